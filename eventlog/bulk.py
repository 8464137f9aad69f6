"""Many frames as one batch: column by column, not frame by frame.

Arrow takes 40 µs for a batch of 33 columns, and joining such batches as long again, however few their rows
are; a run has one a window and process. But frames of one writer look alike: their heads are the same, byte
by byte, but for the numbers in them. So those numbers are read as one array, the buffers of a column are cut
out of all frames and put behind each other, and where they are compressed the blocks of all of them make one
LZ4 frame (LZ4 Frame Format 1.6: blocks may be of any length), which is decompressed in one call. Texts and
lists get offsets of their own.

Only frames whose checksum was right come here, as to Arrow. What does not look like those of our writer is
left to Arrow, which knows all of its format.
"""

from __future__ import annotations

import struct
from copy import copy
from itertools import count, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .message import head

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from .message import Head

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_FEW: Final = 8  # frames that Arrow has read as fast one by one
_MOST_SHAPES: Final = 8  # of frames that lie together
_LZ4: Final = bytes.fromhex("04224d18604082")  # of a frame of independent blocks of at most 64 kB
_LZ4_WORD: Final = int.from_bytes(_LZ4, "little")
_LZ4_BITS: Final = (1 << 8 * len(_LZ4)) - 1
_BEFORE: Final = 8 + len(_LZ4)  # the size of the buffer, and the head of its LZ4 frame
_END: Final = bytes(4)
_STORED: Final = 1 << 31  # marks a block that is not compressed
_number = count()


class Unlike(Exception):  # noqa: N818 - no error: another way is taken
    """Frames that are not as our writer makes them."""


class _Shape(NamedTuple):
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


class _Alike(NamedTuple):
    """Frames that may be of one shape: their numbers, and what their heads are if they are."""

    frames: NDArray[np.intp]
    shape: _Shape
    heads: Ints

    def between(self, first: int, stop: int) -> Ints:
        """Return the heads of frames [first, stop), all of which are among them."""
        place = int(np.searchsorted(self.frames, first))
        return self.heads[place : place + stop - first]


class Joiner:
    """Turns frames of one schema into batches of all or some of its columns, many at a time.

    Texts are dictionaries, as `coded` makes them.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str] | None = None) -> None:
        self._columns: list[tuple[pa.DataType, int, int]] = []
        fields: list[pa.Field] = []
        node = buffer = 0
        for field in schema:
            if columns is None or field.name in columns:
                self._columns.append((field.type, node, buffer))
                fields.append(field)
            more = _extent(field.type)
            node, buffer = node + more[0], buffer + more[1]
        self._layout = node, buffer
        self.schema = pa.schema([field.with_type(coded(field.type)) for field in fields])
        self._shapes: list[_Shape] = []
        # Of each column of texts those of the frames before: all frames of all processes may have the same.
        self._known: dict[int, tuple[tuple[bytes, int, int], pa.DictionaryArray]] = {}

    def runs(
        self, data: bytes, starts: Ints, sizes: Ints, rows: Ints
    ) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
        """Yield (first, stop, their rows) of frames that were joined, in order; None: they are left to Arrow.

        `data` holds the frames, at `starts`, each of so many bytes and rows.
        """
        if (starts % 8).any():
            yield 0, len(starts), None
            return
        words = np.frombuffer(data, np.int64, len(data) // 8)
        alike, of = self._sorted(data, words, starts, sizes, rows)
        cuts = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), len(of)]
        for first, stop in pairwise(cuts):
            batch = None
            if of[first] >= 0 and stop - first >= _FEW:
                those = alike[of[first]]
                run = _Run(data, words, starts[first:stop], those.shape, those.between(first, stop))
                batch = self._joined(run, rows[first:stop])
            yield first, stop, batch

    def _sorted(
        self, data: bytes, words: Ints, starts: Ints, sizes: Ints, rows: Ints
    ) -> tuple[list[_Alike], Ints]:
        """Sort frames by their shapes; return with each which of those it has, -1 for none."""
        shapes, alike = list(self._shapes), list[_Alike]()
        of = np.full(len(starts), -1)
        left = np.arange(len(starts))
        while len(left) and len(alike) < _MOST_SHAPES:
            if len(alike) == len(shapes):
                frame = data[starts[left[0]] : starts[left[0]] + sizes[left[0]]]
                found = head(frame)
                known = found is not None and found.layout == self._layout
                shape = _Shape.of(frame, found) if found is not None and known else None
                if shape is None:
                    break
                shapes.append(shape)
                self._shapes = [shape, *self._shapes[:3]]
            shape = shapes[len(alike)]
            heads = shape.heads(words, starts[left])
            alike.append(_Alike(left, shape, heads))
            same = shape.fits(heads, sizes[left], rows[left])
            of[left[same]] = len(alike) - 1
            left = left[~same]
        return alike, of

    def _joined(self, run: _Run, rows: Ints) -> pa.RecordBatch | None:
        try:
            run.check(rows, [node for _, node, _ in self._columns])
            arrays = [
                self._texts(run, node, buffer)
                if pa.types.is_large_string(kind)
                else run.column(kind, node, buffer)
                for kind, node, buffer in self._columns
            ]
        except (Unlike, pa.ArrowException, OSError):
            return None
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _texts(self, run: _Run, node: int, buffer: int) -> pa.DictionaryArray:
        if (same := run.same(node, buffer)) is None:
            return run.column(pa.large_string(), node, buffer).dictionary_encode()
        if node not in self._known or self._known[node][0] != same:
            self._known[node] = same, run.first().column(pa.large_string(), node, buffer).dictionary_encode()
        one = self._known[node][1]
        codes = np.tile(pc.fill_null(one.indices, -1).to_numpy(), len(run))
        first = pa.py_buffer(np.packbits(codes >= 0, bitorder="little")) if one.null_count else None
        indices = pa.Array.from_buffers(pa.int32(), len(codes), [first, pa.py_buffer(codes)])
        return pa.DictionaryArray.from_arrays(indices, one.dictionary)


def coded(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column has in a joined batch: texts are codes of the distinct ones."""
    return pa.dictionary(pa.int32(), kind) if pa.types.is_large_string(kind) else kind


def _extent(kind: pa.DataType) -> tuple[int, int]:
    """Return how many nodes and buffers a column has in a message."""
    if pa.types.is_large_list(kind):
        nodes, buffers = _extent(kind.value_type)
        return 1 + nodes, 2 + buffers
    return 1, 3 if _is_text(kind) else 2


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)


class _Run:
    """Frames of one shape, and what their heads say: a row a node or buffer, a column a frame."""

    def __init__(self, data: bytes, words: Ints, starts: Ints, shape: _Shape, heads: Ints) -> None:
        self._data = data
        self._words = words
        self._compressed = shape.compressed
        nodes, buffers = heads[:, shape.nodes].T, heads[:, shape.buffers].T
        self._lengths, self._nulls = nodes[0::2], nodes[1::2]
        self._offsets_in_body, self._body = buffers[0::2], heads[:, shape.body]
        self._sizes = buffers[1::2]  # decompressed
        self._begins = self._starts = starts + 8 * len(shape.words) + buffers[0::2]
        self._ends = self._stops = self._begins + self._sizes

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
        if self._compressed:
            self._unwrap()

    def _unwrap(self) -> None:
        """Look through the LZ4 frames to their blocks; only such of one block each are known here."""
        at, wrapped, full = self._begins, self._sizes, self._sizes > 0
        places = at // 8
        known = (self._words.take(places + 1, mode="clip") & _LZ4_BITS) == _LZ4_WORD
        data = self._data
        blocks = np.ndarray(len(data) - 3, "<u4", data, strides=(1,)).take(at + _BEFORE, mode="clip")
        known &= (blocks & ~np.uint32(_STORED)) == wrapped - _BEFORE - 8
        if (full & ~known).any():
            raise Unlike
        self._starts = at + np.where(full, _BEFORE, 0)
        self._stops = self._ends - np.where(full, 4, 0)
        self._sizes = np.where(full, self._words.take(places, mode="clip"), 0)

    def __len__(self) -> int:
        return self._starts.shape[1]

    def first(self) -> _Run:
        """Return the first frame alone."""
        run = copy(self)
        for name in ("_lengths", "_nulls", "_starts", "_stops", "_sizes"):
            setattr(run, name, getattr(self, name)[:, :1])
        return run

    def same(self, node: int, buffer: int) -> tuple[bytes, int, int] | None:
        """Return the bytes of a column of texts, its values and nulls, if they are the same in all frames."""
        lengths, nulls, starts = self._lengths[node], self._nulls[node], self._begins[buffer]
        parts = _cut(self._data, starts, self._ends[buffer + 2] - starts)
        if parts.count(parts[0]) < len(parts) or (lengths != lengths[0]).any() or (nulls != nulls[0]).any():
            return None
        return parts[0], int(lengths[0]), int(nulls[0])

    def column(self, kind: pa.DataType, node: int, buffer: int) -> pa.Array:
        """Return one column of all frames; Unlike when its parts do not fit together."""
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
            items = self.column(kind.value_type, node + 1, buffer + 2)
            return pa.Array.from_buffers(kind, total, [first, offsets], none, children=[items])
        if _is_text(kind):
            offsets, ends = self._offsets(buffer + 1, lengths)
            return pa.Array.from_buffers(kind, total, [first, offsets, self._bytes(buffer + 2, ends)], none)
        data = self._bytes(buffer + 1, lengths * (kind.bit_width // 8))
        return pa.Array.from_buffers(kind, total, [first, data], none)

    def _bytes(self, buffer: int, wanted: Ints) -> pa.Buffer:
        """Return so many first bytes of each frame's buffer, one behind the other."""
        sizes, starts, data = self._sizes[buffer], self._starts[buffer], self._data
        if (sizes < wanted).any():
            raise Unlike
        if not self._compressed:
            return pa.py_buffer(b"".join(_cut(data, starts, wanted)))
        total = int(sizes.sum())
        # Arrow does not say how much it has decompressed: what was told is there if what was put behind is.
        last = struct.pack("<IQ", _STORED | 8, next(_number))
        blocks = _cut(data, starts, self._stops[buffer] - starts)
        found = pa.decompress(b"".join([_LZ4, *blocks, last, _END]), total + 8, codec="lz4")
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
