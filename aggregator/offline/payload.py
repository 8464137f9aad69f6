"""The values themselves: read where they are asked for, joined with the records they belong to.

Rows of the payload know only their record's id; what the record is stands in `History.records`. A record
whose parts are not all there is left out: half of its values would be an answer to another question.
No more than a bounded part of a run is in memory at a time, unless it is asked for as one table.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from eventlog import schema

from .placing import first_rows, groups, turns
from .reading import codes, ints
from .tags import carried, sampled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .history import History
    from .reading import Bools, Ints

    Places = NDArray[np.intp]

_OF_RECORD: Final = (
    "run", "session", "role", "rank", "world", "record_id", "time", "window", "step", "bound_by", "attempt",
    "epoch", "tracker", "key", "kind", "denominator", "denominator_id", "shape", "superseded", "complete",
)  # fmt: skip
_SQL_BYTES: Final = 8 << 20
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
        **dict.fromkeys(("tracker", "key", "kind", "denominator", "tags"), pa.string()),
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
        "parts": pa.large_list(pa.int64()),
        "whose": pa.large_list(pa.large_string()),
        "counted": pa.bool_(),
        "sampled": pa.int64(),
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
        return self._within(*self._span(session), ids)

    def _within(self, first: int, stop: int, ids: Ints) -> Places:
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

    def masks(self, history: History) -> Places:
        """Return for every record the place of the mask it was recorded under, -1 where there is none."""
        ids = ints(history.records.table["denominator_id"], -1)
        spans = zip(self._bounds, self._bounds[1:], strict=False)
        found = [self._within(first, stop, ids[first:stop]) for first, stop in spans]
        return np.concatenate([*found, np.empty(0, np.int64)]).astype(np.intp)


class Payload:
    """The payload of one run."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._index = Index(history)
        self.masks = self._index.masks(history)  # of every record the place of its mask, -1: it has none

    @cached_property
    def calls(self) -> Ints:
        """Which call of its key in its window each record is, 0 first: calls of one batch share it."""
        records = self._history.records
        return turns(*groups(records.windows, codes(records.table["key"])))[0]

    @cached_property
    def tags(self) -> pa.ChunkedArray:
        """What is known of every record besides: its own tags and those of its mask."""
        return carried(self._history, self.masks)

    def values(self, wanted: Places) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (place, values) of some records, in the order of the files; large ones in parts."""
        for places, rows, batch in self._frames(wanted):
            for name in ("values32", "values64"):
                lists = batch[name]
                there = lists.is_valid().to_numpy(zero_copy_only=False)
                offsets, items = lists.offsets.to_numpy(), lists.values.to_numpy()
                for row in rows[there[rows]].tolist():
                    yield int(places[row]), items[offsets[row] : offsets[row + 1]]

    def rows(self, wanted: Places) -> tuple[pa.Table, Places]:
        """Return the rows of some records, whole, in the order of the records, and their places."""
        found: list[Places] = []
        batches: list[pa.RecordBatch] = []
        for places, chosen, batch in self._frames(wanted):
            whole = len(chosen) == batch.num_rows
            batches.append(batch if whole else batch.take(pa.array(chosen)))
            found.append(places[chosen])
        table = pa.Table.from_batches(batches, schema.PAYLOAD).combine_chunks()
        places = np.concatenate([*found, np.empty(0, np.intp)]).astype(np.intp)
        table, places = _joined(table.drop_columns(["record_id"]), places)
        kept = np.flatnonzero(_whole(self._history, table, places))
        kept = kept[np.argsort(places[kept], kind="stable")]
        if len(kept) < len(places) or (np.diff(kept) < 0).any():  # else all that weighs is copied for nothing
            table, places = table.take(kept), places[kept]
        return table, places

    def _frames(self, wanted: Places) -> Iterator[tuple[Places, Places, pa.RecordBatch]]:
        """Yield the frames that hold wanted records: the place of each row, the wanted rows, the frame."""
        chosen = np.zeros(self._history.records.table.num_rows + 1, np.bool_)
        chosen[wanted] = True
        reading = self._history.reading
        for places, batch in reading.compacted.payload(self._index.places, chosen):
            rows = np.flatnonzero(chosen[places])  # -1 is the last place, which is never chosen
            yield places, rows, batch
            chosen[places[rows]] = False
        reading.reader.leave_out(reading.compacted.covered())  # less than before, where a table was damaged
        before = np.concatenate([[0], np.cumsum(chosen)])

        def holds(session: str, entry: schema.IndexRecord) -> bool:
            first, stop = self._index.span(session, entry.first_id, entry.last_id)
            return bool(before[stop] > before[first])

        for producer, _, batch in reading.reader.payload(holds):
            places = self._index.places(producer.session, ints(batch["record_id"]))
            yield places, np.flatnonzero(chosen[places]), batch

    def tables(self, counted: Bools, most: int) -> Iterator[pa.Table]:
        """Yield a row per record that has its values or mask, with what the record is, as TABLE says.

        In the order of the records, about `most` bytes of values at a time. `counted` says which records
        count in the metric of their key.
        """
        of = sizes(self._history)
        for wanted in np.split(np.arange(len(of)), cuts(of, most)):
            yield self._described(wanted, counted).combine_chunks()

    def _described(self, wanted: Places, counted: Bools) -> pa.Table:
        """Put what the records say beside their values, and the mask they were recorded under."""
        under = self.masks[wanted]
        rows, places = self.rows(np.union1d(wanted, under[under >= 0]).astype(np.intp))
        row_of = np.full(self._history.records.table.num_rows + 1, -1)
        row_of[places] = np.arange(len(places))
        kept = np.flatnonzero(np.isin(places, wanted))
        masked = row_of[self.masks[places[kept]]]
        of_mask = pa.array(masked, mask=masked < 0)
        names = {"under": "mask", "parts": "selected", "whose": "sample_ids"}
        of_masks = {name: rows[of].combine_chunks().take(of_mask) for name, of in names.items()}
        if len(kept) < len(places):
            rows, places = rows.take(kept), places[kept]
        records = self._history.records.table.select(list(_OF_RECORD)).take(places)
        drawn = sampled(self._history)[places]
        columns = {
            **dict(zip(records.column_names, records.columns, strict=True)),
            "tags": self.tags.take(pa.array(places)),
            "call": pa.array(self.calls[places]),
            "values32": rows["values32"],
            "values64": rows["values64"],
            "times": rows["times"].combine_chunks().cast(_TIMES),
            "mask": rows["mask"],
            "selected": rows["selected"],
            "sample_ids": rows["sample_ids"],
            "elements": pa.array(elements(records["shape"])),
            **of_masks,
            "counted": pa.array(counted[places]),
            "sampled": pa.array(drawn, mask=drawn == 0),
        }
        return pa.table(columns)


def with_tags(history: History) -> pa.Table:
    """Return what the records of a run say, with the tags of their masks."""
    table = history.records.table
    return table.set_column(table.column_names.index("tags"), "tags", Payload(history).tags)


class Held:
    """Some rows of the payload, by the place of their record. What is not there is None."""

    def __init__(self, history: History, rows: pa.Table, places: Places) -> None:
        self._row = dict(zip(places.tolist(), range(len(places)), strict=True))
        self._elements = elements(history.records.table["shape"].take(pa.array(places)))
        names = ("values32", "values64", "times", "selected")
        self._lists = {name: rows[name].combine_chunks() for name in names}
        self._offsets = {name: lists.offsets.to_numpy() for name, lists in self._lists.items()}
        self._items = {name: lists.values.to_numpy() for name, lists in self._lists.items()}
        self._valid = {
            name: lists.is_valid().to_numpy(zero_copy_only=False) for name, lists in self._lists.items()
        }
        self._masks = rows["mask"].combine_chunks()
        self._samples = rows["sample_ids"].combine_chunks()
        self._counts = ints(history.records.table["count"], 0)

    def _list(self, place: int, name: str) -> NDArray[Any] | None:
        row = self._row.get(place)
        if row is None or not self._valid[name][row]:
            return None
        offsets = self._offsets[name]
        return self._items[name][offsets[row] : offsets[row + 1]]

    def values(self, place: int) -> NDArray[np.float64] | None:
        """Return the selected values of a record, in order; None of one that was sampled."""
        found = self._list(place, "values32")
        found = self._list(place, "values64") if found is None else found
        return None if found is None or len(found) != self._counts[place] else found.astype(np.float64)

    def times(self, place: int) -> Ints | None:
        """Return when each value of a scalar, timing or counter was recorded, UTC µs."""
        return self._list(place, "times")

    def bits(self, place: int) -> Bools | None:
        """Return a mask, flat."""
        row = self._row.get(place)
        packed = None if row is None else self._masks[row].as_buffer()
        if row is None or packed is None:
            return None
        bits = np.frombuffer(packed, np.uint8)
        return np.unpackbits(bits, count=int(self._elements[row]), bitorder="little").astype(np.bool_)

    def parts(self, place: int) -> Ints | None:
        """Return how many values a mask selects of each sequence (leading dimension, or `cu_seqlens`)."""
        found = self._list(place, "selected")
        if found is None and (bits := self.bits(place)) is not None:
            return bits.astype(np.int64)  # a mask of one dimension: every entry is one
        return found

    def samples(self, place: int) -> list[str] | None:
        """Return the ids of a mask's sequences, if it was given any."""
        row = self._row.get(place)
        return None if row is None else self._samples[row].as_py()


def sizes(history: History) -> Ints:
    """Return about how many bytes the values of each record take in memory."""
    records = history.records.table
    return 64 + 8 * ints(records["count"], 0) + elements(records["shape"]) // 8


def batches(whole: Sequence[tuple[History, Bools]], most: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of several runs, with which of them are counted, a part at a time; see `tables`."""
    for history, counted in whole:
        for table in Payload(history).tables(counted, most):
            yield from sliced(table.select(TABLE.names).cast(TABLE))


def sliced(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield a table in batches that SQL can work on at once: it takes their rows by the thousand."""
    row = max(1, table.nbytes // max(1, table.num_rows))
    yield from table.combine_chunks().to_batches(max_chunksize=max(1, _SQL_BYTES // row))


def cuts(of: Ints, most: int) -> Places:
    """Return where to cut rows of some sizes so that a piece holds about `most`, and at least one row."""
    piece = (np.cumsum(of) - of) // max(1, most)
    return np.flatnonzero(np.diff(piece)) + 1


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
    for name in ("times", "sample_ids"):
        if (lists := parts[name].combine_chunks()).null_count == 0:
            joined = lists.flatten()
            columns[name] = pa.LargeListArray.from_arrays(pa.array([0, len(joined)], pa.int64()), joined)
    begins = np.cumsum(lengths) - lengths
    whole = (ints(parts["element"]) == begins).all() and parts["last"][-1].as_py()
    other = parts.slice(0, 1).drop_columns(["element", "last"])
    for name, column in columns.items():
        other = other.set_column(other.column_names.index(name), name, column)
    return other if whole else other.slice(0, 0)


def _whole(history: History, rows: pa.Table, places: Places) -> Bools:
    """Whether each row belongs to a known record and holds as many values as that has, or was to be left."""
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
    return known & (~lists | (held == counts[places]) | (held == sampled(history)[places]))


def elements(shapes: pa.ChunkedArray) -> Ints:
    """Return the product of each shape."""
    lists = shapes.combine_chunks()
    offsets, items = lists.offsets.to_numpy(), lists.values.to_numpy()
    out = np.ones(len(lists), np.int64)
    lengths = np.diff(offsets)
    for axis in range(int(lengths.max(initial=0))):
        has = lengths > axis
        out[has] *= items[offsets[:-1][has] + axis]
    return out
