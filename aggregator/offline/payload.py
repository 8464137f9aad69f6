"""The values themselves: read where they are asked for, joined with the records they belong to.

Rows of the payload know only their record's id; what the record is stands in `History.records`. A record
whose parts are not all there is left out: half of its values would be an answer to another question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from eventlog import schema

from .placing import first_rows, groups
from .reading import codes, ints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .history import History
    from .reading import Bools, Ints

    Places = NDArray[np.intp]

_OF_RECORD: Final = (
    "run", "session", "role", "rank", "world", "record_id", "time", "window", "step", "bound_by", "attempt",
    "epoch", "tracker", "key", "kind", "denominator", "denominator_id", "shape", "superseded", "complete",
)  # fmt: skip
_TIMES: Final = pa.large_list(pa.timestamp("us", "UTC"))
TABLE: Final = pa.schema(
    {
        **dict.fromkeys(("run", "session", "role"), pa.string()),
        "rank": pa.int64(),
        "world": pa.string(),
        "record_id": pa.int64(),
        "time": pa.timestamp("us", "UTC"),
        "window": pa.int64(),
        "step": pa.int64(),
        "bound_by": pa.string(),
        "attempt": pa.int64(),
        "epoch": pa.int64(),
        **dict.fromkeys(("tracker", "key", "kind", "denominator"), pa.string()),
        "denominator_id": pa.int64(),
        "shape": pa.large_list(pa.int64()),
        "superseded": pa.bool_(),
        "complete": pa.bool_(),
        "call": pa.int64(),
        "values32": pa.large_list(pa.float32()),
        "values64": pa.large_list(pa.float64()),
        "times": _TIMES,
        "mask": pa.large_binary(),
        "selected": pa.large_list(pa.int64()),
        "sample_ids": pa.large_list(pa.large_string()),
        "elements": pa.int64(),
        "under": pa.large_binary(),
    }
)  # texts are dictionaries in the tables made here: the same to SQL


class Index:
    """Finds records by session and record id."""

    def __init__(self, history: History) -> None:
        self._ids = ints(history.records.table["record_id"])
        sessions = np.arange(len(history.reading.producers) + 1)
        self._bounds = np.searchsorted(history.records.sids, sessions).tolist()
        self._sid = {producer.session: i for i, producer in enumerate(history.reading.producers)}

    def places(self, session: str, ids: Ints) -> Places:
        """Return the place of each record, -1 where it is not there."""
        first, stop = self._span(session)
        own = self._ids[first:stop]
        at = np.minimum(np.searchsorted(own, ids), max(0, len(own) - 1))
        return np.where(own[at] == ids, at + first, -1) if len(own) else np.full(len(ids), -1)

    def _span(self, session: str) -> tuple[int, int]:
        sid = self._sid.get(session)  # a live run may have got a process since its records were read
        return (0, 0) if sid is None else (self._bounds[sid], self._bounds[sid + 1])

    def span(self, session: str, first_id: int, last_id: int) -> tuple[int, int]:
        """Return the places (first, stop) of a range of ids."""
        low, high = self._span(session)
        first, stop = np.searchsorted(self._ids[low:high], [first_id, last_id + 1]).tolist()
        return first + low, stop + low


def values(history: History, wanted: Places) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (place, values) of some records, in the order of the files; large ones in parts."""
    index = Index(history)
    chosen = np.zeros(history.records.table.num_rows + 1, np.bool_)
    chosen[wanted] = True
    before = np.concatenate([[0], np.cumsum(chosen)])

    def holds(session: str, entry: schema.IndexRecord) -> bool:
        first, stop = index.span(session, entry.first_id, entry.last_id)
        return bool(before[stop] > before[first])

    for producer, _, batch in history.reading.reader.payload(holds):
        places = index.places(producer.session, ints(batch["record_id"]))
        rows = np.flatnonzero(chosen[places])  # -1 is the last place, which is never chosen
        for name in ("values32", "values64"):
            lists = batch[name]
            there = lists.is_valid().to_numpy(zero_copy_only=False)
            offsets, items = lists.offsets.to_numpy(), lists.values.to_numpy()
            for row in rows[there[rows]].tolist():
                yield int(places[row]), items[offsets[row] : offsets[row + 1]]


def table(history: History) -> pa.Table:
    """Return one row per record that has its values or mask, with what the record is."""
    index = Index(history)
    batches: list[pa.RecordBatch] = []
    found: list[Places] = []
    for producer, _, batch in history.reading.reader.payload():
        batches.append(batch)
        found.append(index.places(producer.session, ints(batch["record_id"])))
    rows = pa.Table.from_batches(batches, schema.PAYLOAD).combine_chunks()
    places = np.concatenate([*found, np.empty(0, np.intp)]).astype(np.intp)
    rows, places = _joined(rows.drop_columns(["record_id"]), places)
    kept = np.flatnonzero(_whole(history, rows, places))
    kept = kept[np.argsort(places[kept], kind="stable")]
    if len(kept) < len(places) or (np.diff(kept) < 0).any():  # else all that weighs is copied for nothing
        rows, places = rows.take(kept), places[kept]
    return _described(history, index, rows, places)


def _joined(rows: pa.Table, places: Places) -> tuple[pa.Table, Places]:
    """Join the parts of records that were split; drop records of which a part is missing."""
    single = (ints(rows["element"], 0) == 0) & rows["last"].combine_chunks().to_numpy(zero_copy_only=False)
    split = np.flatnonzero(~single & (places >= 0))
    if single.all():
        return rows.drop_columns(["element", "last"]), places
    rest = rows.filter(pa.array(single)).drop_columns(["element", "last"])
    if not len(split):
        return rest, places[single]
    split = split[np.lexsort((ints(rows["element"], 0)[split], places[split]))]
    starts = first_rows(places[split])
    made = [rest, *(_one(rows.take(those)) for those in np.split(split, starts[1:]))]
    joined = pa.concat_tables(made).combine_chunks()
    kept = np.concatenate([np.ones(rest.num_rows, np.bool_), [table.num_rows > 0 for table in made[1:]]])
    return joined, np.concatenate([places[single], places[split[starts]]])[kept]


def _one(parts: pa.Table) -> pa.Table:
    """Return the parts of one record as one row; no row when one of them is missing."""
    lengths = np.zeros(parts.num_rows, np.int64)
    columns: dict[str, pa.Array] = {}
    for name in ("values32", "values64"):
        lists = parts[name].combine_chunks()
        lengths += np.nan_to_num(lists.value_lengths().to_numpy(zero_copy_only=False), nan=0).astype(np.int64)
        columns[name] = pa.nulls(1, lists.type)
        if lists.null_count == 0:
            columns[name] = pa.LargeListArray.from_arrays(
                pa.array([0, lengths.sum()], pa.int64()), lists.flatten()
            )
    begins = np.cumsum(lengths) - lengths
    whole = (ints(parts["element"]) == begins).all() and parts["last"][-1].as_py()
    other = parts.slice(0, 1).drop_columns(["element", "last"])
    for name, column in columns.items():
        other = other.set_column(other.column_names.index(name), name, column)
    return other if whole else other.slice(0, 0)


def _whole(history: History, rows: pa.Table, places: Places) -> Bools:
    """Whether each row belongs to a known record and holds as many values as that has."""
    known = places >= 0
    held = np.zeros(len(places), np.int64)
    lists = np.zeros(len(places), np.bool_)
    for name in ("values32", "values64"):
        lengths = rows[name].combine_chunks().value_lengths()
        lists |= lengths.is_valid().to_numpy(zero_copy_only=False)
        held += lengths.fill_null(0).to_numpy()
    counts = ints(history.records.table["count"])
    if not len(counts):
        return known
    return known & (~lists | (held == counts[places]))


def _described(history: History, index: Index, rows: pa.Table, places: Places) -> pa.Table:
    """Put what the records say beside their values."""
    records = history.records.table.select(list(_OF_RECORD)).take(places)
    masked = _mask_rows(history, index, places)
    times = rows["times"].combine_chunks()
    columns = {
        **dict(zip(records.column_names, records.columns, strict=True)),
        "call": pa.array(_calls(history)[places]),
        "values32": rows["values32"],
        "values64": rows["values64"],
        "times": times.cast(_TIMES),
        "mask": rows["mask"],
        "selected": rows["selected"],
        "sample_ids": rows["sample_ids"],
        "elements": pa.array(_elements(records["shape"])),
        "under": rows["mask"].combine_chunks().take(pa.array(masked, mask=masked < 0)),
    }
    return pa.table(columns)


def _calls(history: History) -> Ints:
    """Return which call of its key in its window each record is, 0 first: calls of one batch share it."""
    numbers, n = groups(history.records.windows, codes(history.records.table["key"]))
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers, minlength=n)
    calls = np.empty(len(numbers), np.int64)
    calls[order] = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    return calls


def _elements(shapes: pa.ChunkedArray) -> Ints:
    """Return the product of each shape."""
    lists = shapes.combine_chunks()
    offsets, items = lists.offsets.to_numpy(), lists.values.to_numpy()
    out = np.ones(len(lists), np.int64)
    lengths = np.diff(offsets)
    for axis in range(int(lengths.max(initial=0))):
        has = lengths > axis
        out[has] *= items[offsets[:-1][has] + axis]
    return out


def _mask_rows(history: History, index: Index, places: Places) -> Places:
    """Return for each row the row of the mask it was recorded under, -1 where that is not there."""
    row_of = np.full(history.records.table.num_rows + 1, -1)
    row_of[places] = np.arange(len(places))
    found = np.full(len(places), -1)
    masks = ints(history.records.table["denominator_id"], -1)
    sids = history.records.sids
    for sid, producer in enumerate(history.reading.producers):
        own = np.flatnonzero(sids[places] == sid)
        found[own] = row_of[index.places(producer.session, masks[places[own]])]
    return found
