"""Frames, export rows and commits as record batches of the format's schemas; runs on the writer's thread."""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from . import moments
from .frame import Frame, MaskPiece, MatrixPiece, Piece, SeriesPiece
from .schema import COMMITS, PAYLOAD, RECORDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from .frame import Spec

# pyarrow loads these on first use, which is on the writer's thread: a fork in that moment would leave the
# child with half a module. So they are loaded here.
for _late in ("numpy.ma", "pyarrow.compute"):
    importlib.import_module(_late)

FRAME_BYTES = 64 << 20  # frames stay below this, so that nothing needs a whole window in memory
_JOINED_BYTES = 256 << 10  # matrices below this are joined into one frame; larger ones are written uncopied
_WORDS = {
    "present": moments.PRESENT,
    "count": moments.COUNT,
    "nan": moments.NAN,
    "pos_inf": moments.POS_INF,
    "neg_inf": moments.NEG_INF,
    "int_sum": moments.INT_SUM,
    "sum": moments.SUM,
    "min": moments.MIN,
    "max": moments.MAX,
}


def _batch(schema: pa.Schema, n: int, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """Build a batch; columns that are not given are null."""
    arrays = [columns[field.name] if field.name in columns else pa.nulls(n, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(
        [a if isinstance(a, pa.Array) else pa.array(a, f.type) for a, f in zip(arrays, schema, strict=True)],
        schema=schema,
    )


class Texts:
    """The text columns of frames; a layout seen before (the steady state) costs nothing."""

    def __init__(self, capacity: int = 8) -> None:
        self._seen: OrderedDict[tuple[Spec, ...], dict[str, pa.Array]] = OrderedDict()
        self._capacity = capacity

    def of(self, specs: Sequence[Spec]) -> dict[str, pa.Array]:
        """Return the columns that follow from the specs alone."""
        layout = tuple(specs)
        found = self._seen.get(layout)
        if found is None:
            found = self._seen[layout] = _texts(layout)
            if len(self._seen) > self._capacity:
                self._seen.popitem(last=False)
        return found


def _texts(specs: Sequence[Spec]) -> dict[str, pa.Array]:
    text = pa.large_string()
    return {
        "tracker": pa.array([s.tracker for s in specs], text),
        "key": pa.array([s.key for s in specs], text),
        "kind": pa.array([s.kind.value for s in specs], text),
        "reduce_type": pa.array([s.reduce_type and s.reduce_type.value for s in specs], text),
        "spread": pa.array([s.spread.value for s in specs], text),
        "denominator": pa.array([s.denominator for s in specs], text),
        "group": pa.array([s.label for s in specs], text),
    }


def records(frame: Frame, texts: Texts) -> pa.RecordBatch:
    """Return the records of a drained window."""
    n = len(frame)
    rows, floats = frame.moments, moments.floats(frame.moments)
    words = {
        name: pa.array(np.ascontiguousarray((floats if word >= moments.SUM else rows)[:, word]))
        for name, word in _WORDS.items()
    }
    denominators = np.array(frame.denominator_ids, np.int64)
    return _batch(
        RECORDS,
        n,
        {
            "record_id": np.arange(frame.first_id, frame.first_id + n),
            "time": pa.array(np.array(frame.calls.times, np.int64)).cast(RECORDS.field("time").type),
            "window": np.full(n, frame.window, np.int64),
            "step": frame.calls.steps,
            "attempt": [frame.attempt] * n,
            "denominator_id": pa.array(denominators, mask=denominators < 0),
            "shape": frame.shapes,
            "dtype": frame.calls.dtypes,
            **texts.of(frame.calls.specs),
            **words,
        },
    )


def payload(frame: Frame) -> Iterator[pa.RecordBatch]:
    """Yield the payload of a drained window in frames of at most about FRAME_BYTES."""
    small: list[Piece] = []
    size = 0
    for piece in frame.pieces:
        if isinstance(piece, MatrixPiece) and piece.matrix.nbytes > _JOINED_BYTES:
            yield from _matrix(piece)
            continue
        small.append(piece)
        size += piece.nbytes + 1
        if size > FRAME_BYTES:
            yield _joined(small)
            small, size = [], 0
    if small:
        yield _joined(small)


def _values_column(dtype: np.dtype[Any]) -> str:
    return "values64" if dtype == np.float64 else "values32"


def _matrix(piece: MatrixPiece) -> Iterator[pa.RecordBatch]:
    """Yield a large matrix in chunks of rows, uncopied; rows larger than a frame in parts."""
    width = piece.matrix.shape[1]
    per_frame = max(1, FRAME_BYTES // piece.matrix.itemsize)
    rows = max(1, per_frame // width)
    for top in range(0, len(piece.matrix), rows):
        chunk, ids = piece.matrix[top : top + rows], piece.ids[top : top + rows]
        for left in range(0, width, per_frame):
            part = chunk[:, left : left + per_frame]
            n, last = len(part), left + part.shape[1] == width
            offsets = np.arange(n + 1, dtype=np.int64) * part.shape[1]
            values = pa.LargeListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(part).reshape(-1)))
            columns = {
                "record_id": ids,
                "element": np.full(n, left, np.int64),
                "last": np.full(n, last),
                _values_column(part.dtype): values,
            }
            yield _batch(PAYLOAD, n, columns)


def _joined(pieces: Sequence[Piece]) -> pa.RecordBatch:
    """Return many small pieces as one batch."""
    columns = _Columns()
    for piece in pieces:
        if isinstance(piece, MaskPiece):
            columns.mask(piece)
        elif isinstance(piece, MatrixPiece):
            columns.matrix(piece)
        else:
            columns.series(piece)
    return columns.batch()


class _Columns:
    """Payload columns under construction; list columns as runs of (rows, items per row, items)."""

    def __init__(self) -> None:
        self.ids: list[NDArray[np.int64]] = []
        self.rows = 0
        self.lists: dict[str, list[tuple[int, int, int, NDArray[Any]]]] = {
            name: [] for name in ("values32", "values64", "times", "selected")
        }
        self.masks: dict[int, bytes] = {}

    def _add(self, ids: NDArray[np.int64]) -> int:
        first, self.rows = self.rows, self.rows + len(ids)
        self.ids.append(ids)
        return first

    def mask(self, piece: MaskPiece) -> None:
        row = self._add(np.array([piece.record_id]))
        self.masks[row] = piece.packed.tobytes()
        if len(piece.shape) > 1:  # the mask of one dimension says by itself what is selected per entry
            count = int(np.prod(piece.shape, dtype=np.int64))
            bits = np.unpackbits(piece.packed, count=count, bitorder="little").reshape(piece.shape[0], -1)
            selected = bits.sum(axis=1, dtype=np.int64)
            self.lists["selected"].append((row, 1, len(selected), selected))

    def matrix(self, piece: MatrixPiece) -> None:
        n, width = piece.matrix.shape
        row = self._add(piece.ids)
        self.lists[_values_column(piece.matrix.dtype)].append((row, n, width, piece.matrix.reshape(-1)))

    def series(self, piece: SeriesPiece) -> None:
        row, n = self._add(np.array([piece.record_id])), len(piece.values)
        self.lists["values64"].append((row, 1, n, np.array(piece.values, np.float64)))
        self.lists["times"].append((row, 1, n, np.array(piece.times, np.int64)))

    def batch(self) -> pa.RecordBatch:
        masks = [self.masks.get(row) for row in range(self.rows)] if self.masks else None
        columns: dict[str, Any] = {
            "record_id": np.concatenate(self.ids),
            "element": np.zeros(self.rows, np.int64),
            "last": np.ones(self.rows, np.bool_),
            **{name: self._list(name, runs) for name, runs in self.lists.items() if runs},
        }
        if masks is not None:
            columns["mask"] = pa.array(masks, pa.large_binary())
        return _batch(PAYLOAD, self.rows, columns)

    def _list(self, name: str, runs: list[tuple[int, int, int, NDArray[Any]]]) -> pa.Array:
        lengths = np.zeros(self.rows, np.int64)
        missing = np.ones(self.rows, np.bool_)
        for row, n, width, _ in runs:
            lengths[row : row + n] = width
            missing[row : row + n] = False
        offsets = np.zeros(self.rows + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        items = np.concatenate([items for *_, items in runs])
        kind = PAYLOAD.field(name).type
        return pa.LargeListArray.from_arrays(
            pa.array(offsets), pa.array(items, kind.value_type), type=kind, mask=pa.array(missing)
        )


@dataclass(frozen=True, slots=True)
class ExportRow:
    """What one export covered and how it ended."""

    record_id: int
    time: int
    window: int
    step: int | None
    attempt: int | None
    export_id: str
    members: tuple[int, ...] | None
    window_first: int
    window_last: int
    reset: bool
    outcome: str
    tracker: str | None = None
    key: str | None = None


def export(row: ExportRow) -> pa.RecordBatch:
    """Return an export row as a record of kind "export"."""
    names = [name for name in ExportRow.__dataclass_fields__ if name != "time"]
    columns = {name: [getattr(row, name)] for name in names}
    time = pa.array([row.time], RECORDS.field("time").type)
    return _batch(RECORDS, 1, {**columns, "time": time, "kind": ["export"]})


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit: the steps and windows it binds, and on the leader its metrics, a dict per sub-index."""

    number: int
    time: int
    attempt: int | None
    leader: bool
    restored_step: int | None
    epoch: int
    epoch_step: int
    global_step: int
    window_first: int | None
    window_last: int | None
    metrics: tuple[dict[str, float], ...] = ()
    tags: dict[str, Any] | None = None


def commit(made: Commit) -> pa.RecordBatch:
    """Return a commit: one row without a key, then one per sub-index and key."""
    entries: list[tuple[int, str | None, float | None]] = [(0, None, None)]
    entries += [(i, key, value) for i, part in enumerate(made.metrics) for key, value in part.items()]
    n = len(entries)
    shared = ("attempt", "leader", "restored_step", "epoch", "epoch_step", "global_step")
    shared += ("window_first", "window_last")
    columns: dict[str, Any] = {name: [getattr(made, name)] * n for name in shared}
    tags = json.dumps(made.tags, sort_keys=True) if made.tags else None
    columns |= {
        "commit": np.full(n, made.number, np.int64),
        "time": pa.array(np.full(n, made.time, np.int64)).cast(COMMITS.field("time").type),
        "sub_index": [i for i, _, _ in entries],
        "key": [key for _, key, _ in entries],
        "value": [None if value is None else float(value) for *_, value in entries],
        "value_int": [value if isinstance(value, int) else None for *_, value in entries],
        "tags": [tags] * n,
    }
    return _batch(COMMITS, n, columns)
