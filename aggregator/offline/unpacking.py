"""Functions that SQL calls, a vector of rows at a time and only where a query names what they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from eventlog import moments

from . import bins
from .statistics import checked_quantiles, quantiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_SEQUENCE: Final = pa.struct(
    {
        **dict.fromkeys(("sequence", "count"), pa.int64()),
        **dict.fromkeys(("avg", "sum", "min", "max"), pa.float64()),
    }
)


def bits(masks: pa.ChunkedArray, elements: pa.ChunkedArray) -> pa.Array:
    """Unpack masks of so many elements into lists of booleans; null stays null."""
    return _lists(_unpacked(masks, elements), pa.bool_())


def dense(values: pa.ChunkedArray, masks: pa.ChunkedArray, elements: pa.ChunkedArray) -> pa.Array:
    """Put selected values back to where the mask selected them, null elsewhere.

    A row is null where the mask is, or where it does not select as many values as there are.
    """
    held = values.combine_chunks()
    items, lengths = held.flatten().to_numpy(), held.value_lengths().to_pylist()
    rows: list[NDArray[np.float64] | None] = []
    chosen: list[NDArray[np.bool_]] = []
    start = 0
    for mask, length in zip(_unpacked(masks, elements), lengths, strict=True):
        if mask is None or length != np.count_nonzero(mask):
            rows.append(None)
        else:
            row = np.zeros(len(mask))
            row[mask] = items[start : start + length]
            rows.append(row)
            chosen.append(mask)
        start += length or 0
    return _lists(rows, pa.float64(), chosen)


def quantile(values: pa.ChunkedArray, asked: pa.ChunkedArray) -> pa.Array:
    """Return a quantile of each list of values, as `statistics.quantiles` does; null of none."""
    pairs = zip(_rows(values), asked.to_pylist(), strict=True)
    found = [None if row is None else quantiles(row, checked_quantiles(q))[0] for row, q in pairs]
    return pa.array(found, pa.float64())


def counts(
    values: pa.ChunkedArray, low: pa.ChunkedArray, high: pa.ChunkedArray, number: pa.ChunkedArray
) -> pa.Array:
    """Count the finite values of each list in equal bins."""
    rows = ([] if row is None else row for row in _rows(values))
    found = [
        bins.counts(np.asarray(row), *ends) for row, ends in zip(rows, _ends(low, high, number), strict=True)
    ]
    return _lists(found, pa.int64())


def edges(low: pa.ChunkedArray, high: pa.ChunkedArray, number: pa.ChunkedArray) -> pa.Array:
    """Return the edges of those bins, one more than there are bins."""
    return _lists([bins.edges(*ends) for ends in _ends(low, high, number)], pa.float64())


def _ends(
    low: pa.ChunkedArray, high: pa.ChunkedArray, number: pa.ChunkedArray
) -> Iterator[tuple[float, float, int]]:
    """Yield where bins begin and end, and how many they are; ends are null where no value is finite."""
    for first, last, n in zip(low.to_pylist(), high.to_pylist(), number.to_pylist(), strict=True):
        yield *bins.ends(first, last, bins.checked(n)), n


def sequences(
    values: pa.ChunkedArray, parts: pa.ChunkedArray, masks: pa.ChunkedArray, elements: pa.ChunkedArray
) -> pa.Array:
    """Return the statistics of every sequence of each list; null where its mask is not there.

    `parts` are the selected values per sequence; null: as many as there are bits in the mask.
    """
    found: list[list[dict[str, Any]] | None] = []
    for row, given, mask in zip(_rows(values), _rows(parts), _unpacked(masks, elements), strict=True):
        lengths = mask if given is None else given
        if row is None or lengths is None or lengths.sum() != len(row):
            found.append(None)
            continue
        split = np.split(row, np.cumsum(lengths, dtype=np.int64)[:-1])
        found.append([_summary(i, moments.of(part)) for i, part in enumerate(split)])
    return pa.array(found, pa.list_(_SEQUENCE))


def _summary(number: int, row: NDArray[np.int64]) -> dict[str, Any]:
    return {
        "sequence": number,
        "count": int(row[moments.COUNT]),
        "avg": moments.mean(row),
        "sum": moments.total_of(row),
        "min": moments.least(row),
        "max": moments.greatest(row),
    }


def _rows(lists: pa.ChunkedArray) -> Iterator[NDArray[Any] | None]:
    """Yield each list as an array, None for null."""
    held = lists.combine_chunks()
    offsets, items = held.offsets.to_numpy(), held.values.to_numpy(zero_copy_only=False)
    there = held.is_valid().to_numpy(zero_copy_only=False)
    for first, stop, valid in zip(offsets, offsets[1:], there, strict=False):
        yield items[first:stop] if valid else None


def _unpacked(masks: pa.ChunkedArray, elements: pa.ChunkedArray) -> list[NDArray[np.bool_] | None]:
    return [
        None
        if mask is None
        else np.unpackbits(np.frombuffer(mask, np.uint8), count=n, bitorder="little").astype(np.bool_)
        for mask, n in zip(masks.to_pylist(), elements.to_pylist(), strict=True)
    ]


def _lists(
    rows: Sequence[NDArray[Any] | None],
    kind: pa.DataType,
    valid: Sequence[NDArray[np.bool_]] | None = None,
) -> pa.Array:
    """Return arrays as a column of lists; `valid` says which items of those rows are not null."""
    there = [row for row in rows if row is not None]
    items = np.concatenate(there) if there else np.empty(0)
    mask = None if valid is None or not there else ~np.concatenate(valid)
    offsets = np.cumsum([0, *(0 if row is None else len(row) for row in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets),
        pa.array(items, kind, mask=mask),
        mask=pa.array([row is None for row in rows], pa.bool_()),
    )
