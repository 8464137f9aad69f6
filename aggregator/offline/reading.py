"""What the verified reader yields of one run, gathered into one table per kind of row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eventlog import RunReader, schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from eventlog import Attempt, IndexRecord, Producer, SessionState

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]
    _Frame = tuple[Producer, IndexRecord, pa.RecordBatch]

_OF_EXPORTS: Final = ("export_id", "members", "window_first", "window_last", "reset", "outcome")
_EXPORT_COLUMNS: Final = (
    "record_id", "time", "window", "step", "attempt", "tracker", "key", "kind", *_OF_EXPORTS,
)  # fmt: skip
_RECORD_COLUMNS: Final = tuple(name for name in schema.RECORDS.names if name not in _OF_EXPORTS)
NONE: Final = int(np.iinfo(np.int64).min)  # stands for null in arrays


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in the order (session, when recorded); `sids` says whose each is."""

    table: pa.Table
    sids: Ints

    def ints(self, name: str, null: int = NONE) -> Ints:
        """Return an integer or timestamp column as an array, nulls as `null`."""
        return ints(self.table[name], null)

    def codes(self, name: str) -> Ints:
        """Return a text column as numbers, one per distinct text; null is -1."""
        return codes(self.table[name])

    def equals(self, name: str, text: str) -> Bools:
        """Return where a text column says `text`."""
        words = self.table[name].combine_chunks().dictionary.to_pylist()
        return self.codes(name) == (words.index(text) if text in words else len(words))

    def take(self, places: NDArray[np.intp]) -> Rows:
        """Return the rows at the places."""
        return Rows(self.table.take(pa.array(places)), self.sids[places])


@dataclass(frozen=True, slots=True)
class Reading:
    """One run as it was recorded. A session's number, its sid, is its place in `producers`."""

    label: str  # how the run is told from others
    reader: RunReader
    attempts: Sequence[Attempt]
    states: Sequence[SessionState]
    producers: Sequence[Producer]  # by role, rank, start
    records: Rows
    exports: Rows
    commits: Rows
    damaged: frozenset[tuple[str, int]]  # session and window, of which records are missing


def read(path: str | Path, label: str) -> Reading:
    """Read all but the payload; NotARunError, FormatVersionError. Damage is listed in `reader.problems`."""
    reader = RunReader(path)
    # A live run grows while it is read: a commit is written after the records that it binds.
    committed = list(reader.commits())
    found = list(reader.records())
    states = sorted(reader.sessions(), key=lambda state: order(state.producer))
    producers = [state.producer for state in states]
    place = {producer.session: sid for sid, producer in enumerate(producers)}
    found = [frame for frame in found if frame[0].session in place]  # the rest vanished meanwhile
    exports = [frame for frame in found if frame[1].window < 0]
    records = [frame for frame in found if frame[1].window >= 0]
    return Reading(
        label=label,
        reader=reader,
        attempts=reader.run.attempts(),
        states=states,
        producers=producers,
        records=_gather(records, place, _RECORD_COLUMNS),
        exports=_gather(exports, place, _EXPORT_COLUMNS),
        commits=_gather(committed, place, schema.COMMITS.names),
        damaged=_damaged(states, records),
    )


def _damaged(states: Sequence[SessionState], records: Iterable[_Frame]) -> frozenset[tuple[str, int]]:
    """Return the windows of which records are missing: by the reader's account, or read only in part."""
    damaged = {(state.producer.session, window) for state in states for window in state.incomplete}
    parts: dict[tuple[str, int], list[IndexRecord]] = {}
    for producer, entry, _ in records:
        if entry.frame or not entry.last_of_window:
            parts.setdefault((producer.session, entry.window), []).append(entry)
    for window, entries in parts.items():
        last = entries[-1]
        if not last.last_of_window or [entry.frame for entry in entries] != list(range(last.frame + 1)):
            damaged.add(window)
    return frozenset(damaged)


def order(producer: Producer) -> tuple[str, int, int, str]:
    """Return the sorting key of producers."""
    return (producer.role, producer.rank, producer.started_us, producer.session)


def ints(column: pa.ChunkedArray, null: int = NONE) -> Ints:
    """Return an integer or timestamp column as an array, nulls as `null`."""
    return pc.fill_null(column.cast(pa.int64()), null).to_numpy()


def codes(column: pa.ChunkedArray) -> Ints:
    """Return a text column (encoded, as `read` leaves them) as numbers, one per distinct text; null is -1."""
    encoded = column.combine_chunks()
    return pc.fill_null(encoded.indices, -1).to_numpy().astype(np.int64)


def nullable(values: Ints, kind: pa.DataType | None = None) -> pa.Array:
    """Return an array as a column, NONE as null."""
    column = pa.array(values, mask=values == NONE)
    return column if kind is None else column.cast(kind)


def _gather(frames: Sequence[_Frame], place: Mapping[str, int], columns: Sequence[str]) -> Rows:
    """Join some columns of frames, the first of which counts within a session."""
    batches = [batch for _, _, batch in frames]
    kind = schema.RECORDS if columns[0] == "record_id" else schema.COMMITS
    table = _encoded(pa.Table.from_batches(batches, kind).select(list(columns)).combine_chunks())
    owners = np.array([place[producer.session] for producer, _, _ in frames], np.int64)
    sids = np.repeat(owners, [batch.num_rows for batch in batches])
    rows = Rows(table, sids)
    numbers = rows.ints(columns[0], 0)
    back = (np.diff(sids) < 0) | ((np.diff(sids) == 0) & (np.diff(numbers) < 0))
    # Almost never needed, and copying every column costs more than all the rest.
    return rows.take(np.lexsort((numbers, sids))) if back.any() else rows


def _encoded(table: pa.Table) -> pa.Table:
    """Return the table with its texts as codes: they are few, and compared by the hundred thousand."""
    columns = {
        name: column.dictionary_encode() if pa.types.is_large_string(column.type) else column
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return pa.table(columns)
