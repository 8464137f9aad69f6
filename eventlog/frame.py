"""What one producer recorded between two exports: masks, the rows selected under them, and series.

A stat is tied to *its* mask by identity: `Masked` is one registration of a denominator and owns the rows that
were recorded under it. On the host the selection is the copy: rows are selected straight into one matrix per
mask and dtype. On a device clones are kept until the window is drained, see `settlement`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arrays, histogram, moments
from .batch import PLAIN, Batch
from .device import Held, Late, Parcel, landed
from .errors import RecordingError
from .pieces import MaskPiece, MatrixPiece, SeriesPiece
from .reduction import Kind, ReduceType, Spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .histogram import Counts
    from .moments import Rows
    from .pieces import Piece

UNLOGGED = -1
UNCOUNTED = -1  # what a mask on a device selects, before the window is settled
FIRST_ROWS = 4
RECORD_BYTES = 1 << 10  # what a record of tensors weighs besides its values: 65 536 fill what may be held
_SMALL_INDEX = 1 << 13  # numpy makes an intp index of an int32 one at every take: a small one is kept as intp


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """What a key is; interned by its recorder, so that equal means identical."""

    tracker: str
    key: str
    kind: Kind
    reduce_type: ReduceType | None
    denominator: str | None = None
    label: str | None = None
    spread: Spread = Spread.SHARDS
    quantiles: tuple[float, ...] = ()  # that are asked of its values, ascending


@dataclass(slots=True)
class Calls:
    """Who recorded what and when: one entry per record, a column per field (times in UTC µs)."""

    specs: list[Spec] = field(default_factory=list[Spec])
    times: list[int] = field(default_factory=list[int])
    steps: list[int | None] = field(default_factory=list["int | None"])
    dtypes: list[str] = field(default_factory=list[str])

    def __len__(self) -> int:
        return len(self.specs)

    def add(self, spec: Spec, time: int, step: int | None, dtype: str) -> None:
        """Append one entry."""
        self.specs.append(spec)
        self.times.append(time)
        self.steps.append(step)
        self.dtypes.append(dtype)

    def extend(self, other: Calls) -> None:
        """Append the entries of another."""
        self.specs += other.specs
        self.times += other.times
        self.steps += other.steps
        self.dtypes += other.dtypes

    def take(self, chosen: Sequence[int]) -> Calls:
        """Return the chosen entries."""
        return Calls(
            [self.specs[i] for i in chosen],
            [self.times[i] for i in chosen],
            [self.steps[i] for i in chosen],
            [self.dtypes[i] for i in chosen],
        )


@dataclass(slots=True)
class RowBlock:
    """The rows of one dtype recorded under one mask; `matrices` grow by doubling, rows are never moved."""

    width: int
    dtype: np.dtype[Any]
    expected: int = FIRST_ROWS
    calls: Calls = field(default_factory=Calls)
    ids: list[int] = field(default_factory=list[int])  # of the rows logged so far, UNLOGGED for the others
    matrices: list[NDArray[Any]] = field(default_factory=list["NDArray[Any]"])
    _first: int = 0  # row of the newest matrix
    _stop: int = 0  # behind its last one

    def add(
        self, spec: Spec, values: NDArray[Any], index: Any, time: int, step: int | None, dtype: str
    ) -> None:
        """Add a row: the values that the index selects, None: all."""
        calls = self.calls
        place = len(calls.specs)
        if place == self._stop:
            self._grow()
        arrays.select_into(self.matrices[-1][place - self._first], values, index)
        calls.specs.append(spec)
        calls.times.append(time)
        calls.steps.append(step)
        calls.dtypes.append(dtype)
        self.ids.append(UNLOGGED)

    def _grow(self) -> None:
        self._first = len(self.calls)
        size = max(1, self.expected, self._first)
        self._stop = self._first + size
        self.matrices.append(np.empty((size, self.width), self.dtype))

    def parts(self) -> list[NDArray[Any]]:
        """Return the matrices, cut to the rows in use."""
        used = len(self.calls) - self._first
        if not self.matrices or used == len(self.matrices[-1]):
            return self.matrices
        return [*self.matrices[:-1], self.matrices[-1][:used]]

    def taken(self, rows: Sequence[int]) -> Sequence[NDArray[Any] | Parcel]:
        """Return the values of some rows, or of all, in order."""
        return self.parts() if len(rows) == len(self.calls) else [np.concatenate(self.parts())[rows]]

    def of_key(self, key: str | None) -> Sequence[int]:
        """Return the rows of one key, or of all keys."""
        if key is None:
            return range(len(self.calls))
        return [i for i, spec in enumerate(self.calls.specs) if spec.key == key]

    def unlogged(self, key: str | None) -> Sequence[int]:
        """Return those of them that are not in the log yet."""
        rows = self.of_key(key)
        if self.ids.count(UNLOGGED) == len(self.ids):
            return rows
        return [i for i in rows if self.ids[i] == UNLOGGED]

    def moments(self) -> Rows:
        """Return the moments of every row, shape (rows, WORDS)."""
        return np.concatenate([moments.of_matrix(part) for part in self.parts()])

    def asked(self, key: str | None) -> Iterator[tuple[Spec, int, Counts]]:
        """Yield (spec, record id, histogram) of the rows of which quantiles are asked."""
        rows = (row for part in self.parts() for row in part)
        for spec, record, row in zip(self.calls.specs, self.ids, rows, strict=True):
            if spec.quantiles and key in (None, spec.key):
                yield spec, record, histogram.of(row)

    def drop_key(self, key: str) -> None:
        """Forget the rows of one key."""
        chosen = [i for i, spec in enumerate(self.calls.specs) if spec.key != key]
        self.matrices = [np.concatenate(self.parts())[chosen]] if chosen else []
        self._first, self._stop = 0, len(chosen)
        self.calls = self.calls.take(chosen)
        self.ids = [self.ids[i] for i in chosen]


class Masked:
    """One registration of a denominator, and the rows under it; `mask` is None unless on a device."""

    __slots__ = (
        "batch", "block", "blocks", "counted", "drained", "expected", "index", "mask", "own_bytes", "packed",
        "pending", "record_id", "row_bytes", "selected", "shape", "spec", "step", "time",
    )  # fmt: skip

    def __init__(
        self,
        spec: Spec,
        mask: Any,
        time: int,
        step: int | None,
        batch: Batch = PLAIN,
        expected: int = FIRST_ROWS,
    ) -> None:
        self.spec = spec
        self.batch = batch
        self.expected = expected  # rows of a dtype
        self.shape = tuple(mask.shape)
        self.time = time
        self.step = step
        self.record_id = UNLOGGED
        self.counted = False  # its own count was exported and reset; it stays usable by other keys
        self.drained = False  # so was all under it; a stat of who registered it brings it back
        self.blocks: dict[str, RowBlock] = {}
        self.block: RowBlock | None = None  # of them, the one that was added to last
        self.pending: list[tuple[Spec, Any, int, int | None, str]] = []
        self.mask: Held | None = None
        self.selected = UNCOUNTED
        self.row_bytes = self.own_bytes = 0  # of the host's memory, about: of a row, of the mask itself
        self.packed: NDArray[np.uint8] | Parcel
        if isinstance(mask, np.ndarray):
            self.capture(mask)
        else:
            self.mask = Held(mask)

    def capture(self, mask: NDArray[np.bool_]) -> None:
        """Keep a mask that lies on the host."""
        self.mask = None
        flat = mask.reshape(-1)
        index = np.flatnonzero(flat)
        self.selected = len(index)
        if len(index) > _SMALL_INDEX and flat.size <= 1 << 31:  # int32 reaches no further
            index = index.astype(np.int32)
        self.index = None if self.selected == flat.size else index
        self.packed = np.packbits(flat, bitorder="little")
        self.row_bytes = RECORD_BYTES + 4 * self.selected
        self.own_bytes = self.row_bytes + flat.size // 8

    def drain(self) -> None:
        """Forget what was exported: all that is under it, its own count, what can be found again."""
        self.counted, self.drained, self.blocks, self.block, self.index = True, True, {}, None, None

    @property
    def elements(self) -> int:
        """How many elements it and the values under it have."""
        return math.prod(self.shape)

    def bits(self) -> NDArray[np.bool_]:
        """Return the mask, flat; waits where a device still packs it."""
        return np.unpackbits(landed(self.packed), count=self.elements, bitorder="little").view(np.bool_)

    def moments(self) -> Rows:
        """Return the moments of the mask itself, shape (1, WORDS)."""
        return moments.of_integers([self.selected], [self.selected])

    def add(self, spec: Spec, values: Any, time: int, step: int | None, dtype: str) -> None:
        """Select `values` (as `arrays.as_values` returns them) into a row, or keep a clone for the drain."""
        if self.mask is None and isinstance(values, np.ndarray):
            block = self.block
            if block is None or block.dtype is not values.dtype:
                block = self.block = self.block_of(values.dtype)
            block.add(spec, values, self.index, time, step, dtype)
        else:
            held = values.copy() if isinstance(values, np.ndarray) else Held(values)
            self.pending.append((spec, held, time, step, dtype))

    def block_of(self, dtype: np.dtype[Any]) -> RowBlock:
        """Return the rows of a dtype on the host."""
        block = self.blocks.get(dtype.char)
        if block is None:
            block = self.blocks[dtype.char] = RowBlock(self.selected, dtype, self.expected)
        return block


@dataclass(slots=True)
class Series:
    """Every value of one scalar, timing or counter key in a window; the first `logged` are in the log.

    `about`: the tags, as JSON, of the samples whose ids are in `samples`, or of an evaluation; None: neither.
    """

    spec: Spec
    step: int | None
    about: str | None = None
    values: list[Any] = field(default_factory=list[Any])
    times: list[int] = field(default_factory=list[int])
    samples: list[str] = field(default_factory=list[str])
    late: list[int] = field(default_factory=list[int])  # positions of values a device still works on
    total: int = 0
    logged: int = 0

    def check(self, value: float) -> None:
        """Refuse a value with which a counter's sum would leave int64."""
        if self.spec.kind is Kind.COUNTER and not -(2**63) <= self.total + int(value) < 2**63:
            total = self.total + int(value)
            raise RecordingError(f"expected a sum that fits int64 for counter {self.spec.key!r}, got {total}")

    def append(self, value: float | Late, time: int) -> None:
        """Add one value that `check` let pass, or one that is read when the window is drained."""
        if isinstance(value, Late):
            self.late.append(len(self.values))
        elif self.spec.kind is Kind.COUNTER:
            self.total += int(value)
        self.values.append(value)
        self.times.append(time)

    def settle(self) -> None:
        """Put numbers in the place of late ones."""
        for at in self.late:
            self.values[at] = self.values[at].read()
        self.late.clear()

    @property
    def dtype(self) -> str:
        """What its values are."""
        return "int64" if self.spec.kind is Kind.COUNTER else "float64"

    def moments(self, first: int = 0) -> Rows:
        """Return the moments of the values from `first` on, shape (WORDS,)."""
        values = self.values[first:]
        if self.spec.kind is Kind.COUNTER:
            return moments.of_integers([len(values)], [sum(values)])[0]
        return moments.of(np.array(values, np.float64))


@dataclass(slots=True)
class Frame:
    """The records of one drained window, a column per field, and the pieces of its payload.

    `moments` has shape (len(calls), WORDS); record i has the id `first_id + i`.
    """

    window: int
    first_id: int
    calls: Calls = field(default_factory=Calls)
    shapes: list[tuple[int, ...]] = field(default_factory=list["tuple[int, ...]"])
    denominator_ids: list[int] = field(default_factory=list[int])
    moments: Rows = field(default_factory=lambda: moments.empty(0))
    pieces: list[Piece] = field(default_factory=list["Piece"])
    tags: dict[int, str] = field(default_factory=dict[int, str])  # by record id, as JSON
    own_steps: dict[str, int] = field(default_factory=dict[str, int])  # of keys measured at a step, by key
    attempt: int | None = None
    parcels: list[Parcel] = field(default_factory=list[Parcel])  # pieces that lie on devices
    _rows: list[Rows] = field(default_factory=list["Rows"])

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def payload_bytes(self) -> int:
        """Bytes of values and masks waiting to be written."""
        return sum(piece.nbytes for piece in self.pieces)

    def send(self) -> None:
        """Start to copy the payload that lies on devices to the host, without waiting."""
        for parcel in self.parcels:
            parcel.send()

    def _keep(self, piece: MaskPiece | MatrixPiece, held: NDArray[Any] | Parcel) -> None:
        self.pieces.append(piece)
        if isinstance(held, Parcel):
            self.parcels.append(held)

    def add_mask(self, masked: Masked, rows: Rows) -> None:
        """Log a mask of these moments; it gets its record id here."""
        masked.record_id = self._next_id
        if masked.batch.tags is not None:
            self.tags[masked.record_id] = masked.batch.tags
        self.calls.add(masked.spec, masked.time, masked.step, "bool")
        self._place(1, masked.shape, UNLOGGED)
        self._rows.append(rows)
        packed = masked.packed
        self._keep(MaskPiece(masked.record_id, masked.shape, packed, masked.batch), packed)

    def add_rows(self, masked: Masked, block: RowBlock, rows: Rows, key: str | None = None) -> None:
        """Log the rows of a block (or of one of its keys) not logged yet; `rows` are the moments of all."""
        fresh = block.unlogged(key)
        if not fresh:
            return
        first = self._next_id
        whole = len(fresh) == len(block.calls)
        self.calls.extend(block.calls if whole else block.calls.take(fresh))
        self._place(len(fresh), masked.shape, masked.record_id)
        self._rows.append(rows if whole else rows[fresh])
        if whole:
            block.ids = list(range(first, first + len(fresh)))
        for i, row in enumerate(() if whole else fresh):
            block.ids[row] = first + i
        for part in block.taken(fresh):
            self._keep(MatrixPiece(np.arange(first, first + len(part), dtype=np.int64), part), part)
            first += len(part)

    def add_series(self, series: Series, rows: Rows) -> None:
        """Log the values of a series that are not logged yet; `rows` are the moments of all."""
        values, times = series.values[series.logged :], series.times[series.logged :]
        if not values:
            return
        if series.about is not None:
            self.tags[self._next_id] = series.about
        self.calls.add(series.spec, times[-1], series.step, series.dtype)
        self._place(1, (len(values),), UNLOGGED)
        self._rows.append(series.moments(series.logged)[None] if series.logged else rows)
        self.pieces.append(SeriesPiece(self._next_id - 1, values, times, series.samples[series.logged :]))
        series.logged = len(series.values)

    @property
    def _next_id(self) -> int:
        return self.first_id + len(self.calls)

    def _place(self, n: int, shape: tuple[int, ...], denominator_id: int) -> None:
        self.shapes += [shape] * n
        self.denominator_ids += [denominator_id] * n

    def seal(self, step: int | None) -> None:
        """Join the moments, drop what was not added whole; `step` is for records with none of their own."""
        self.moments, self._rows = np.concatenate([self.moments, *self._rows]), []
        n, own = len(self.moments), self.calls
        for column in (own.specs, own.times, own.steps, own.dtypes, self.shapes, self.denominator_ids):
            del column[n:]
        if step is not None:
            self.calls.steps = [step if own is None else own for own in self.calls.steps]
