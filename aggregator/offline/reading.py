"""What the verified reader yields of one run, gathered into one table per kind of row."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eventlog import RunReader, schema, shown

from .compacted import COMMITS, EXPORTS, RECORDS, Compacted

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from eventlog import Attempt, Block, Producer, SessionState

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_OF_EXPORTS: Final = ("export_id", "members", "window_first", "window_last", "reset", "outcome")
EXPORT_COLUMNS: Final = (
    "record_id", "time", "window", "step", "attempt", "tracker", "key", "kind", *_OF_EXPORTS,
)  # fmt: skip
RECORD_COLUMNS: Final = tuple(name for name in schema.RECORDS.names if name not in _OF_EXPORTS)
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
    compacted: Compacted


def read(path: str | Path, label: str) -> Reading:
    """Read all but the payload; NotARunError, FormatVersionError. Damage is listed in `reader.problems`."""
    reader = RunReader(path)
    compacted = Compacted(reader.run)
    kept = {**compacted.tables(schema.Stream.RECORDS), **compacted.tables(schema.Stream.COMMITS)}
    reader.leave_out(compacted.covered())
    # A live run grows while it is read: a commit is written after its exports, and they after the records.
    committed = list(reader.blocks(schema.Stream.COMMITS))
    exports: list[Block] = []
    records: list[Block] = []
    sorts = (EXPORT_COLUMNS, _of_no_window), (RECORD_COLUMNS, _of_a_window)
    for sort, block in reader.sorts(schema.Stream.RECORDS, sorts):
        (exports, records)[sort].append(block)
    states = sorted(reader.sessions(), key=lambda state: order(state.producer))
    producers = [state.producer for state in states]
    place = {producer.session: sid for sid, producer in enumerate(producers)}
    return Reading(
        label=shown(label),
        reader=reader,
        attempts=reader.run.attempts(),
        states=states,
        producers=producers,
        records=_gather(records, place, RECORD_COLUMNS, kept[RECORDS]),
        exports=_gather(exports, place, EXPORT_COLUMNS, kept[EXPORTS]),
        commits=_gather(committed, place, schema.COMMITS.names, kept[COMMITS]),
        damaged=_damaged(states, records),
        compacted=compacted,
    )


@contextmanager
def without_collections() -> Generator[None]:
    """Hold back the collector of cycles: of many thousand objects that stay none is in one."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def shifted(reading: Reading, offset: int) -> Reading:
    """Return what was read with `offset` added to every step."""
    if not offset:
        return reading
    return replace(
        reading,
        records=_shifted(reading.records, offset, "step"),
        exports=_shifted(reading.exports, offset, "step"),
        commits=_shifted(reading.commits, offset, "global_step", "restored_step"),
        attempts=[
            claim if claim.resume_step is None else replace(claim, resume_step=claim.resume_step + offset)
            for claim in reading.attempts
        ],
    )


def _shifted(rows: Rows, offset: int, *names: str) -> Rows:
    table = rows.table
    for name in names:
        steps = rows.ints(name)
        moved = nullable(np.where(steps == NONE, NONE, steps + offset))
        table = table.set_column(table.column_names.index(name), name, moved)
    return Rows(table, rows.sids)


def _of_a_window(_: str, entries: NDArray[Any]) -> Bools:
    return entries["window"] >= 0


def _of_no_window(_: str, entries: NDArray[Any]) -> Bools:
    return entries["window"] < 0


def _damaged(states: Sequence[SessionState], records: Iterable[Block]) -> frozenset[tuple[str, int]]:
    """Return the windows of which records are missing: by the reader's account, or read only in part."""
    damaged = {(state.producer.session, window) for state in states for window in state.incomplete}
    parts: dict[tuple[str, int], list[tuple[int, bool]]] = {}
    for block in records:
        last = (block.entries["flags"] & schema.LAST_OF_WINDOW) > 0
        some = np.flatnonzero((block.entries["frame"] > 0) | ~last)
        columns = block.entries["window"][some], block.entries["frame"][some], last[some]
        for window, number, whole in zip(*(column.tolist() for column in columns), strict=True):
            parts.setdefault((block.producer.session, window), []).append((number, whole))
    for window, those in parts.items():
        numbers = [number for number, _ in those]
        if not those[-1][1] or numbers != list(range(len(numbers))):
            damaged.add(window)
    return frozenset(damaged)


def order(producer: Producer) -> tuple[str, int, int, str]:
    """Return the sorting key of producers."""
    return (producer.role, producer.rank, producer.started_us, producer.session)


def ints(column: pa.ChunkedArray, null: int = NONE) -> Ints:
    """Return an integer or timestamp column as an array, nulls as `null`."""
    plain = column.cast(pa.int64())
    return (pc.fill_null(plain, null) if plain.null_count else plain).to_numpy()


def codes(column: pa.ChunkedArray) -> Ints:
    """Return a text column (encoded, as `read` leaves them) as numbers, one per distinct text; null is -1."""
    encoded = column.combine_chunks()
    return pc.fill_null(encoded.indices, -1).to_numpy().astype(np.int64)


def plain(column: pa.ChunkedArray) -> list[Any]:
    """Return a column as Python's own values: many times as fast as Arrow does."""
    if pa.types.is_dictionary(column.type):
        words = np.array([*column.combine_chunks().dictionary.to_pylist(), None], np.object_)
        return words[codes(column)].tolist()
    if not pa.types.is_integer(column.type):
        return column.to_pylist()
    if not column.null_count:
        return ints(column).tolist()
    return [None if value == NONE else value for value in ints(column).tolist()]


def nullable(values: Ints, kind: pa.DataType | None = None) -> pa.Array:
    """Return an array as a column, NONE as null."""
    column = pa.array(values, mask=values == NONE)
    return column if kind is None else column.cast(kind)


def _gather(
    blocks: Iterable[Block], place: Mapping[str, int], columns: Sequence[str], kept: Sequence[pa.Table]
) -> Rows:
    """Join blocks of some columns, the first of which counts within a session, and compacted tables."""
    known = [block for block in blocks if block.producer.session in place]  # the rest vanished meanwhile
    kind = schema.RECORDS if columns[0] == "record_id" else schema.COMMITS
    fields = encoded(pa.schema([kind.field(name) for name in kind.names if name in columns]).empty_table())
    joined = pa.Table.from_batches([block.batch for block in known], fields.schema)
    table = joined.select(list(columns)).unify_dictionaries().combine_chunks()
    owners = np.array([place[block.producer.session] for block in known], np.int64)
    sids = np.repeat(owners, [block.batch.num_rows for block in known])
    if kept:
        table, sids = _together(table, sids, kept, place)
    rows = Rows(table, sids)
    numbers = rows.ints(columns[0], 0)
    back = (np.diff(sids) < 0) | ((np.diff(sids) == 0) & (np.diff(numbers) < 0))
    # Almost never needed, and copying every column costs more than all the rest.
    return rows.take(np.lexsort((numbers, sids))) if back.any() else rows


def _together(
    table: pa.Table, sids: Ints, kept: Sequence[pa.Table], place: Mapping[str, int]
) -> tuple[pa.Table, Ints]:
    """Put compacted tables before encoded rows; return them with the session of each row."""
    compacted = pa.concat_tables(kept).unify_dictionaries()
    sessions = compacted["session"].combine_chunks()
    number = np.array([place[session] for session in sessions.dictionary.to_pylist()], np.int64)
    owners = number[sessions.indices.to_numpy()]
    joined = pa.concat_tables([compacted.select(table.column_names).cast(table.schema), table])
    return joined.unify_dictionaries().combine_chunks(), np.concatenate([owners, sids])


def encoded(table: pa.Table) -> pa.Table:
    """Return the table with its texts as codes: they are few, and compared by the hundred thousand."""
    columns = {
        name: column.dictionary_encode() if pa.types.is_large_string(column.type) else column
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return pa.table(columns)
