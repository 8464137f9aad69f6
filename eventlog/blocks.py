"""Frames of a segment that lie together, joined: read in one go, checked one by one, decoded as one."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

from .bulk import Joiner, coded
from .entries import record_of
from .schema import SCHEMAS, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from .sealed import SealedSegment

    Bools = NDArray[np.bool_]
    Places = NDArray[np.intp]

_READ_BYTES: Final = 4 << 20  # what is read together: of hundreds of small frames most of the cost is shared
_GAP_BYTES: Final = 1 << 16  # what is not wanted may lie between frames that are read together, up to so much


class Sort(NamedTuple):
    """Frames that are wanted, and which of their columns; None: all.

    `wanted` says of a table of index records which frames are.
    """

    columns: tuple[str, ...] | None = None
    wanted: Callable[[Any], Bools] | None = None


class Piece(NamedTuple):
    """Frames of one sort: their places in the index, which were good; of those the entries and rows."""

    sort: int
    slots: Places
    good: Bools
    entries: Any  # rows of `Entries.table`
    batch: pa.RecordBatch


@cache
def _joiner(stream: Stream, columns: tuple[str, ...] | None) -> Joiner:
    return Joiner(SCHEMAS[stream], columns)


def pieces(
    segment: SealedSegment, sorts: Sequence[Sort], left: Sequence[tuple[int, int]] = ()
) -> Iterator[Piece]:
    """Yield the frames of a segment, sort by sort and in their order, some megabytes at a time.

    No frame is of two sorts. `left` are ranges of places that are not read. Texts are codes. A damaged frame
    is a problem of the segment's.
    """
    begin = left[0][1] if left and left[0][0] <= 1 else 0  # place 0 is the schema's
    for run in segment.runs(begin):
        of = np.full(len(run.good), -1)
        for i, sort in enumerate(sorts):
            of[run.frames if sort.wanted is None else run.frames & sort.wanted(run.table)] = i
        for first, stop in left:
            of[max(0, first - run.first) : max(0, stop - run.first)] = -1
        places = np.flatnonzero(of >= 0)
        for first, stop in _together(run.table[places]):
            those = places[first:stop]
            yield from _read(segment, sorts, of[those], run.first + those, run.table[those])


def _together(entries: Any) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of frames to be read together."""
    starts, stops = entries["offset"], entries["offset"] + entries["length"]
    apart = np.append(np.flatnonzero(starts[1:] - stops[:-1] > _GAP_BYTES) + 1, len(entries)).tolist()
    first = 0
    for end in apart:
        while first < end:
            many = int(np.searchsorted(stops[first:end], starts[first] + _READ_BYTES, "right"))
            yield first, first + max(1, many)
            first += max(1, many)


def _read(
    segment: SealedSegment, sorts: Sequence[Sort], of: Places, slots: Places, entries: Any
) -> Iterator[Piece]:
    begin = int(entries["offset"][0])
    starts, sizes = entries["offset"] - begin, entries["length"]
    data = segment.bytes_at(begin, int(starts[-1] + sizes[-1])) if segment.own else b""
    right = _are_right(data, starts.tolist(), sizes.tolist(), entries["crc"].tolist())
    if right:
        segment.arrived(slots.tolist())
    for i, sort in enumerate(sorts):
        if len(own := np.flatnonzero(of == i)):
            joiner = _joiner(segment.file.stream, sort.columns)
            parts: list[tuple[int, int, pa.RecordBatch | None]] = [(0, len(own), None)]
            if right:
                parts = list(
                    joiner.runs(data, starts[own], sizes[own], entries["rows"][own].astype(np.int64))
                )
            yield _piece(segment, joiner, i, slots[own], entries[own], parts)


def _piece(
    segment: SealedSegment,
    joiner: Joiner,
    sort: int,
    slots: Places,
    entries: Any,
    parts: Sequence[tuple[int, int, pa.RecordBatch | None]],
) -> Piece:
    """Put frames together, those that could not be joined read one by one."""
    good = np.ones(len(slots), np.bool_)
    found: list[pa.RecordBatch] = []
    for first, stop, batch in parts:
        if batch is not None:
            found.append(batch)
            continue
        records = map(record_of, entries[first:stop].tolist())
        rows = segment.rows(list(zip(slots[first:stop].tolist(), records, strict=True)))
        for place, one in enumerate(rows.values(), first):
            good[place] = one is not None
            found += [] if one is None else [one.select(joiner.schema.names)]
    return Piece(sort, slots, good, entries[good], _joined(found, joiner.schema))


def _are_right(data: bytes, starts: list[int], sizes: list[int], checksums: list[int]) -> bool:
    """Whether all frames are there, each with its checksum."""
    if len(data) != starts[-1] + sizes[-1]:
        return False
    crc = google_crc32c.value
    return checksums == [crc(data[at : at + size]) for at, size in zip(starts, sizes, strict=True)]


def _joined(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return batches as one, their texts as codes."""
    if len(batches) == 1 and batches[0].schema.equals(schema):
        return batches[0]
    columns = {
        field.name: pa.chunked_array([_coded(batch[field.name]) for batch in batches], field.type)
        for field in schema
    }
    table = pa.table(columns, schema=schema).unify_dictionaries().combine_chunks()
    empty = [pa.nulls(0, field.type) for field in schema]
    return table.to_batches()[0] if table.num_rows else pa.RecordBatch.from_arrays(empty, schema=schema)


def _coded(column: pa.Array) -> pa.Array:
    return column if column.type.equals(coded(column.type)) else column.dictionary_encode()
