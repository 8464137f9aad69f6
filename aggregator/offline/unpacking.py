"""Functions that SQL calls, a vector of rows at a time and only where a query names what they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


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


def _unpacked(masks: pa.ChunkedArray, elements: pa.ChunkedArray) -> list[NDArray[np.bool_] | None]:
    return [
        None
        if mask is None
        else np.unpackbits(np.frombuffer(mask, np.uint8), count=n, bitorder="little").astype(np.bool_)
        for mask, n in zip(masks.to_pylist(), elements.to_pylist(), strict=True)
    ]


def _lists(
    rows: Sequence[NDArray[np.float64] | NDArray[np.bool_] | None],
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
