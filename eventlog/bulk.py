"""Many frames as one batch: column by column, not frame by frame.

Arrow takes 40 µs for a batch of 33 columns, and joining such batches as long again, however few their rows
are; a run has one a window and process. But frames of one writer look alike: their heads are the same, byte
by byte, but for the numbers in them. So those numbers are read as one array, the buffers of a column are cut
out of all frames and put behind each other, and where they are compressed the blocks of all of them make one
LZ4 frame (LZ4 Frame Format 1.6: blocks may be of any length), which is decompressed in one call. Texts and
lists get offsets of their own. Neighbouring columns that say the same in all frames, byte by byte, are read
of one and repeated: keys, kinds and trackers of one training step are mostly those of the next.

Only frames whose checksum was right come here, as to Arrow. What does not look like those of our writer is
left to Arrow, which knows all of its format.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from .alike import Run, Shape, Unlike, extent
from .message import head

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .alike import Said

    Ints = NDArray[np.int64]

_FEW: Final = 8  # frames that Arrow has read as fast one by one
_MOST_SHAPES: Final = 8  # of frames that lie together


class _Alike(NamedTuple):
    """Frames that may be of one shape: their numbers, and what their heads are if they are."""

    frames: NDArray[np.intp]
    shape: Shape
    heads: Ints

    def between(self, first: int, stop: int) -> Ints:
        """Return the heads of frames [first, stop), all of which are among them."""
        place = int(np.searchsorted(self.frames, first))
        return self.heads[place : place + stop - first]


class _Column(NamedTuple):
    """A column that is asked for: its place in the schema, and where in a message its parts are."""

    place: int
    kind: pa.DataType
    nodes: slice
    buffers: slice


class _Repeated(NamedTuple):
    """Columns of one frame, and of frames that all say the same."""

    said: Said
    frames: int
    one: list[pa.Array]
    all: list[pa.Array]


class Joiner:
    """Turns frames of one schema into batches of all or some of its columns, many at a time.

    Texts are dictionaries, as `coded` makes them.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str] | None = None) -> None:
        self._columns: list[_Column] = []
        fields: list[pa.Field] = []
        node = buffer = 0
        begins: list[tuple[int, int]] = []
        for place, field in enumerate(schema):
            begins.append((node, buffer))
            more = extent(field.type)
            nodes, buffers = slice(node, node := node + more[0]), slice(buffer, buffer := buffer + more[1])
            if columns is None or field.name in columns:
                self._columns.append(_Column(place, field.type, nodes, buffers))
                fields.append(field)
        self._layout = node, buffer
        self._begins = np.array(begins, np.intp).T  # of every column: its first node and buffer
        self.schema = pa.schema([field.with_type(coded(field.type)) for field in fields])
        self._shapes: list[Shape] = []
        # By its first place, what some columns said before: all frames of all processes may say the same.
        self._known: dict[int, _Repeated] = {}

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
                run = Run(data, words, starts[first:stop], those.shape, those.between(first, stop))
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
                shape = Shape.of(frame, found) if found is not None and known else None
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

    def _joined(self, run: Run, rows: Ints) -> pa.RecordBatch | None:
        try:
            run.check(rows, [column.nodes.start for column in self._columns])
            arrays = [
                array
                for columns in self._together(run)
                for array in self._repeated(run, columns) or self._apart(run, columns)
            ]
        except (Unlike, pa.ArrowException, OSError):
            return None
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _together(self, run: Run) -> Iterator[list[_Column]]:
        """Yield neighbours that seem to say the same in all frames together, every other column alone."""
        steady = run.steady(*self._begins)
        held: list[_Column] = []
        for column in self._columns:
            seems = steady[column.place] and run.said_at_both_ends(column.buffers)
            if held and (not seems or held[-1].buffers.stop != column.buffers.start):
                yield held
                held = []
            if seems:
                held.append(column)
            else:
                yield [column]
        if held:
            yield held

    def _repeated(self, run: Run, columns: list[_Column]) -> list[pa.Array] | None:
        """Return neighbouring columns, read once, if they are the same in all frames."""
        first, last = columns[0], columns[-1]
        nodes = slice(first.nodes.start, last.nodes.stop)
        buffers = slice(first.buffers.start, last.buffers.stop)
        if (said := run.said(nodes, buffers)) is None:
            return None
        known = self._known.get(first.place)
        if known is None or known.said != said:
            frame = run.first()
            one = [_encoded(frame.column(*column[1:])) for column in columns]
            known = _Repeated(said, 1, one, one)
        if known.frames < len(run):
            every = [pa.concat_arrays([array] * len(run)) for array in known.one]
            known = known._replace(frames=len(run), all=every)
        self._known[first.place] = known
        return [array[: len(run) * len(one)] for one, array in zip(known.one, known.all, strict=True)]

    def _apart(self, run: Run, columns: list[_Column]) -> list[pa.Array]:
        """Return columns, each by itself."""
        if len(columns) == 1:
            return [_encoded(run.column(*columns[0][1:]))]
        return [array for one in columns for array in self._repeated(run, [one]) or self._apart(run, [one])]


def _encoded(column: pa.Array) -> pa.Array:
    return column.dictionary_encode() if pa.types.is_large_string(column.type) else column


def coded(kind: pa.DataType) -> pa.DataType:
    """Return the type that a column has in a joined batch: texts are codes of the distinct ones."""
    return pa.dictionary(pa.int32(), kind) if pa.types.is_large_string(kind) else kind
