"""Frames of one shape: where in their bytes the parts of each column are, and those of all put together."""

from __future__ import annotations

import struct
from copy import copy
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from numpy.typing import NDArray

    from .message import Head

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]
    Places = NDArray[np.intp]

_LZ4: Final = bytes.fromhex("04224d18604082")  # of a frame of independent blocks of at most 64 kB
_LZ4_WORD: Final = int.from_bytes(_LZ4, "little")
_LZ4_BITS: Final = (1 << 8 * len(_LZ4)) - 1
_BEFORE: Final = 8 + len(_LZ4)  # the size of the buffer, and the head of its LZ4 frame
_END: Final = bytes(4)
_STORED: Final = 1 << 31  # marks a block that is not compressed
_number = count()


class Unlike(Exception):  # noqa: N818 - no error: another way is taken
    """Frames that are not as our writer makes them."""


class Shape(NamedTuple):
    """What the heads of frames have in common, and where in them, in words of 8 bytes, the numbers stand."""

    words: Ints
    fixed: Ints  # the bits that are common
    body: int
    rows: int
    nodes: slice
    buffers: slice
    compressed: bool

    @classmethod
    def of(cls, frame: bytes, found: Head) -> Self | None:
        """Return the shape of a frame by its head; None when it is laid out as no writer of ours does."""
        body, rows = found.numbers
        size = 8 + struct.unpack_from("<i", frame, 4)[0]
        vectors = [(at + 4, 2 * n) for at, n in zip(found.vectors, found.layout, strict=True)]
        if not body or not rows or any(at % 8 for at in (body, rows, size, *(at for at, _ in vectors))):
            return None
        fixed = np.full(size // 8, -1, np.int64)
        nodes, buffers = (slice(at // 8, at // 8 + n) for at, n in vectors)
        for numbers in (body // 8, rows // 8, nodes, buffers):
            fixed[numbers] = 0
        words = np.frombuffer(frame, np.int64, size // 8)
        return cls(words, fixed, body // 8, rows // 8, nodes, buffers, found.compressed)

    def heads(self, words: Ints, starts: Ints) -> Ints:
        """Return the heads of frames as rows; whatever is there where the bytes end."""
        places = starts[:, np.newaxis] // 8 + np.arange(len(self.words))
        return words.take(places, mode="clip")

    def fits(self, heads: Ints, sizes: Ints, rows: Ints) -> Bools:
        """Return which frames are of this shape, and of the sizes and rows that they should have."""
        same = ~((heads ^ self.words) & self.fixed).any(axis=1)
        return same & (heads[:, self.body] == sizes - 8 * len(self.words)) & (heads[:, self.rows] == rows)


def extent(kind: pa.DataType) -> tuple[int, int]:
    """Return how many nodes and buffers a column has in a message."""
    if pa.types.is_large_list(kind):
        nodes, buffers = extent(kind.value_type)
        return 1 + nodes, 2 + buffers
    return 1, 3 if _is_text(kind) else 2


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)


class Said(NamedTuple):
    """The bytes of neighbouring columns of a frame, and what its head says of them."""

    data: bytes
    numbers: bytes


class Run:
    """Frames of one shape, and what their heads say: a row a node or buffer, a column a frame."""

    def __init__(self, data: bytes, words: Ints, starts: Ints, shape: Shape, heads: Ints) -> None:
        self._data = data
        self._words = words
        self._compressed = shape.compressed
        nodes, buffers = heads[:, shape.nodes].T.copy(), heads[:, shape.buffers].T.copy()
        self._lengths, self._nulls = nodes[0::2], nodes[1::2]
        self._offsets_in_body, self._body = buffers[0::2], heads[:, shape.body]
        self._sizes = buffers[1::2]  # compressed or not
        self._begins = starts + 8 * len(shape.words) + buffers[0::2]

    def check(self, rows: Ints, columns: Sequence[int]) -> None:
        """Raise Unlike where what a head says cannot be: numbers of rows (those of `columns`), places."""
        offsets = self._offsets_in_body
        if (
            (self._lengths[columns] != rows).any()
            or min(self._lengths.min(), self._nulls.min(), offsets.min(), self._sizes.min()) < 0
            or (self._nulls > self._lengths).any()
            or (offsets + self._sizes > self._body).any()
            or (offsets % 8).any()
        ):
            raise Unlike

    def __len__(self) -> int:
        return self._begins.shape[1]

    def first(self) -> Run:
        """Return the first frame alone."""
        run = copy(self)
        for name in ("_lengths", "_nulls", "_begins", "_sizes"):
            setattr(run, name, getattr(self, name)[:, :1])
        return run

    # What all frames say

    def steady(self, nodes: Places, buffers: Places) -> Bools:
        """Return of which columns all heads say the same; those begin at `nodes` and `buffers`."""
        first = self._begins[buffers].repeat(np.diff(buffers, append=len(self._begins)), axis=0)
        same = [
            np.logical_and.reduceat((numbers == numbers[:, :1]).all(axis=1), begins)
            for numbers, begins in (
                (self._lengths, nodes),
                (self._nulls, nodes),
                (self._sizes, buffers),
                (self._begins - first, buffers),
            )
        ]
        return np.logical_and.reduce(same)

    def said_at_both_ends(self, buffers: slice) -> bool:
        """Whether a column of which all heads say the same has the same bytes in the first and last frame."""
        begins = self._begins[buffers]
        begin, end = int(begins[0, 0]), int((begins[:, 0] + self._sizes[buffers, 0]).max())
        other = int(begins[0, -1])
        return self._data[begin:end] == self._data[other : other + end - begin]

    def said(self, nodes: slice, buffers: slice) -> Said | None:
        """Return what neighbouring columns say, if it is the same in all frames, byte by byte."""
        begins, sizes = self._begins[buffers], self._sizes[buffers]
        within = begins - begins[0]
        numbers = np.concatenate([self._lengths[nodes], self._nulls[nodes], within, sizes])
        if (numbers != numbers[:, :1]).any() or (within < 0).any():
            return None
        size = (within[:, 0] + sizes[:, 0]).max()
        parts = _cut(self._data, begins[0], np.full(len(self), size))
        return Said(parts[0], numbers[:, 0].tobytes()) if parts.count(parts[0]) == len(parts) else None

    # Columns

    def column(self, kind: pa.DataType, nodes: slice, buffers: slice) -> pa.Array:
        """Return one column of all frames; Unlike when its parts do not fit together."""
        node, buffer = nodes.start, buffers.start
        lengths, nulls = self._lengths[node], self._nulls[node]
        total, none = int(lengths.sum()), int(nulls.sum())
        if none == total:
            return pa.nulls(total, kind)
        first = self._validity(buffer, lengths, nulls) if none else None
        if pa.types.is_boolean(kind):
            bits = pa.py_buffer(np.packbits(self._bits(buffer + 1, lengths), bitorder="little"))
            return pa.Array.from_buffers(kind, total, [first, bits], none)
        if pa.types.is_large_list(kind):
            offsets, ends = self._offsets(buffer + 1, lengths)
            if (ends != self._lengths[node + 1]).any():
                raise Unlike
            items = self.column(kind.value_type, slice(node + 1, nodes.stop), slice(buffer + 2, buffers.stop))
            return pa.Array.from_buffers(kind, total, [first, offsets], none, children=[items])
        if _is_text(kind):
            offsets, ends = self._offsets(buffer + 1, lengths)
            return pa.Array.from_buffers(kind, total, [first, offsets, self._bytes(buffer + 2, ends)], none)
        data = self._bytes(buffer + 1, lengths * (kind.bit_width // 8))
        return pa.Array.from_buffers(kind, total, [first, data], none)

    def _unwrapped(self, buffer: int) -> tuple[Ints, Ints, Ints]:
        """Return where each frame's block of a compressed buffer is, its size, and that of what is in it.

        Unlike, unless it is alone in its LZ4 frame.
        """
        at, wrapped = self._begins[buffer], self._sizes[buffer]
        full = wrapped > 0
        told, start, rest = (self._words.take(at // 8 + i, mode="clip") for i in range(3))
        blocks = (start >> 56 & 0xFF) | (rest & 0xFFFFFF) << 8  # four bytes, behind those of the LZ4 head
        known = (start & _LZ4_BITS) == _LZ4_WORD
        known &= (blocks & ~_STORED) == wrapped - _BEFORE - 8
        if (full & ~known).any():
            raise Unlike
        sizes = np.where(full, told, 0)
        return at + _BEFORE, np.where(full, wrapped - _BEFORE - 4, 0), sizes

    def _bytes(self, buffer: int, wanted: Ints) -> pa.Buffer:
        """Return so many first bytes of each frame's buffer, one behind the other."""
        data = self._data
        if not self._compressed:
            if (self._sizes[buffer] < wanted).any():
                raise Unlike
            return pa.py_buffer(b"".join(_cut(data, self._begins[buffer], wanted)))
        starts, blocks, sizes = self._unwrapped(buffer)
        if (sizes < wanted).any():
            raise Unlike
        total = int(sizes.sum())
        # Arrow does not say how much it has decompressed: what was told is there if what was put behind is.
        last = struct.pack("<IQ", _STORED | 8, next(_number))
        found = pa.decompress(
            b"".join([_LZ4, *_cut(data, starts, blocks), last, _END]), total + 8, codec="lz4"
        )
        if found[total:].to_pybytes() != last[4:]:
            raise Unlike
        if (sizes == wanted).all():
            return found[:total]
        return pa.py_buffer(b"".join(_cut(found.to_pybytes(), np.cumsum(sizes) - sizes, wanted)))

    def _offsets(self, buffer: int, lengths: Ints) -> tuple[pa.Buffer, Ints]:
        """Return the joined offsets of texts or lists, and where each frame's items end."""
        sizes = np.where(lengths > 0, lengths + 1, 0)
        found = np.frombuffer(self._bytes(buffer, 8 * sizes), np.int64)
        stops = np.cumsum(sizes)
        within = np.ones(len(found), np.bool_)
        within[(stops - sizes)[sizes > 0]] = False
        steps = np.diff(found, prepend=0)[within]
        if (steps < 0).any() or found[~within].any():
            raise Unlike
        offsets = np.zeros(len(steps) + 1, np.int64)
        np.cumsum(steps, out=offsets[1:])
        return pa.py_buffer(offsets), np.where(sizes > 0, found[stops - 1], 0)

    def _bits(self, buffer: int, lengths: Ints) -> NDArray[np.uint8]:
        """Return the bits of all frames, one a byte."""
        sizes = (lengths + 7) // 8
        bits = np.unpackbits(np.frombuffer(self._bytes(buffer, sizes), np.uint8), bitorder="little")
        before = 8 * (np.cumsum(sizes) - sizes) - (np.cumsum(lengths) - lengths)
        return bits[np.arange(lengths.sum()) + np.repeat(before, lengths)]

    def _validity(self, buffer: int, lengths: Ints, nulls: Ints) -> pa.Buffer:
        """Return which values are not null; a frame without nulls need not say so."""
        valid = np.ones(lengths.sum(), np.uint8)
        some = nulls > 0
        valid[np.repeat(some, lengths)] = self._bits(buffer, np.where(some, lengths, 0))
        return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _cut(data: bytes, starts: Ints, sizes: Ints) -> list[bytes]:
    stops = (starts + sizes).tolist()
    return [data[start:stop] for start, stop in zip(starts.tolist(), stops, strict=True)]
