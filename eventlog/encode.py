"""Frames, export rows and commits as record batches of the format's schemas; runs on the writer's thread."""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import moments
from .columns import Table
from .pieces import MaskPiece, MatrixPiece, SeriesPiece
from .schema import COMMITS, PAYLOAD, RECORDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from .frame import Frame, Spec
    from .pieces import Piece

# pyarrow loads these on first use, which is on the writer's thread: a fork in that moment would leave the
# child with half a module. So they are loaded here.
for _late in ("numpy.ma", "pyarrow.compute"):
    importlib.import_module(_late)

FRAME_BYTES = 64 << 20  # frames stay below this, so that nothing needs a whole window in memory
FRAME_ROWS = 1 << 17  # of records and commits
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


_RECORDS, _PAYLOAD, _COMMITS = Table(RECORDS), Table(PAYLOAD), Table(COMMITS)


def in_frames(batch: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Return a batch of records or commits in parts of at most FRAME_ROWS."""
    return [batch.slice(at, FRAME_ROWS) for at in range(0, max(1, batch.num_rows), FRAME_ROWS)]


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
    texts = {
        "tracker": [s.tracker for s in specs],
        "key": [s.key for s in specs],
        "kind": [s.kind.value for s in specs],
        "reduce_type": [s.reduce_type and s.reduce_type.value for s in specs],
        "spread": [s.spread.value for s in specs],
        "denominator": [s.denominator for s in specs],
        "group": [s.label for s in specs],
    }
    return {name: _RECORDS[name].of(values) for name, values in texts.items()}


def records(frame: Frame, texts: Texts) -> pa.RecordBatch:
    """Return the records of a drained window."""
    n = len(frame)
    rows = np.ascontiguousarray(frame.moments.T)
    floats = rows.view(np.float64)
    words = {name: (floats if word >= moments.SUM else rows)[word] for name, word in _WORDS.items()}
    denominators = np.array(frame.denominator_ids, np.int64)
    return _RECORDS.batch(
        n,
        {
            "record_id": np.arange(frame.first_id, frame.first_id + n),
            "time": np.array(frame.calls.times, np.int64),
            "window": np.full(n, frame.window, np.int64),
            "step": _RECORDS["step"].again(frame.calls.steps),
            "attempt": _RECORDS["attempt"].again([frame.attempt] * n),
            "denominator_id": _RECORDS["denominator_id"].of(denominators, denominators >= 0),
            "shape": _RECORDS["shape"].again(frame.shapes),
            "dtype": _RECORDS["dtype"].again(frame.calls.dtypes),
            **_tags(frame),
            **texts.of(frame.calls.specs),
            **words,
        },
    )


def _tags(frame: Frame) -> dict[str, list[str | None]]:
    """Return the column of tags, where there are any."""
    ids = range(frame.first_id, frame.first_id + len(frame))
    return {"tags": [frame.tags.get(record) for record in ids]} if frame.tags else {}


def payload(frame: Frame) -> Iterator[pa.RecordBatch]:
    """Yield the payload of a drained window in frames of at most about FRAME_BYTES."""
    small: list[Piece] = []
    size = 0
    for piece in frame.pieces:
        if isinstance(piece, MatrixPiece) and piece.nbytes > _JOINED_BYTES:
            yield from _matrix(piece)
            continue
        if isinstance(piece, SeriesPiece) and piece.nbytes > FRAME_BYTES:
            yield from _series(piece)
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
    matrix = piece.values()
    width = matrix.shape[1]
    per_frame = max(1, FRAME_BYTES // matrix.itemsize)
    rows = max(1, per_frame // width)
    for top in range(0, len(matrix), rows):
        chunk, ids = matrix[top : top + rows], piece.ids[top : top + rows]
        for left in range(0, width, per_frame):
            part = chunk[:, left : left + per_frame]
            n, last = len(part), left + part.shape[1] == width
            name, widths = _values_column(part.dtype), np.full(n, part.shape[1], np.int64)
            columns = {
                "record_id": ids,
                "element": np.full(n, left, np.int64),
                "last": np.full(n, last),
                name: _PAYLOAD[name].lists(widths, np.ascontiguousarray(part).reshape(-1)),
            }
            yield _PAYLOAD.batch(n, columns)


def _series(piece: SeriesPiece) -> Iterator[pa.RecordBatch]:
    """Yield a series larger than a frame in parts."""
    n, step = len(piece.values), max(1, FRAME_BYTES // (piece.nbytes // len(piece.values)))
    for at in range(0, n, step):
        values, times = (numbers[at : at + step] for numbers in (piece.values, piece.times))
        columns: dict[str, Any] = {"record_id": [piece.record_id], "element": [at], "last": [at + step >= n]}
        columns |= {"values64": [values], "times": [times]}
        if piece.samples:
            columns["sample_ids"] = [piece.samples[at : at + step]]
        yield _PAYLOAD.batch(1, columns)


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
        self.samples: dict[int, list[str]] = {}

    def _add(self, ids: NDArray[np.int64]) -> int:
        first, self.rows = self.rows, self.rows + len(ids)
        self.ids.append(ids)
        return first

    def mask(self, piece: MaskPiece) -> None:
        row, bits = self._add(np.array([piece.record_id])), piece.bits()
        self.masks[row] = bits.tobytes()
        selected = piece.batch.selected(bits, piece.shape)
        if selected is not None:  # else the mask says by itself what each sequence selects
            self.lists["selected"].append((row, 1, len(selected), selected))
        if piece.batch.sample_ids is not None:
            self.samples[row] = list(piece.batch.sample_ids)

    def matrix(self, piece: MatrixPiece) -> None:
        matrix = piece.values()
        n, width = matrix.shape
        row = self._add(piece.ids)
        self.lists[_values_column(matrix.dtype)].append((row, n, width, matrix.reshape(-1)))

    def series(self, piece: SeriesPiece) -> None:
        row, n = self._add(np.array([piece.record_id])), len(piece.values)
        self.lists["values64"].append((row, 1, n, np.array(piece.values, np.float64)))
        self.lists["times"].append((row, 1, n, np.array(piece.times, np.int64)))
        if piece.samples:
            self.samples[row] = piece.samples

    def batch(self) -> pa.RecordBatch:
        masks = [self.masks.get(row) for row in range(self.rows)] if self.masks else None
        columns: dict[str, Any] = {
            "record_id": np.concatenate(self.ids),
            "element": np.zeros(self.rows, np.int64),
            "last": np.ones(self.rows, np.bool_),
            **{name: self._list(name, runs) for name, runs in self.lists.items() if runs},
        }
        if masks is not None:
            columns["mask"] = masks
        if self.samples:
            columns["sample_ids"] = [self.samples.get(row) for row in range(self.rows)]
        return _PAYLOAD.batch(self.rows, columns)

    def _list(self, name: str, runs: list[tuple[int, int, int, NDArray[Any]]]) -> pa.Array:
        lengths = np.zeros(self.rows, np.int64)
        there = np.zeros(self.rows, np.bool_)
        for row, n, width, _ in runs:
            lengths[row : row + n] = width
            there[row : row + n] = True
        items = np.concatenate([items for *_, items in runs])
        return _PAYLOAD[name].lists(lengths, items, there)


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
    return _RECORDS.batch(1, {**columns, "time": [row.time], "kind": ["export"]})


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
        "time": np.full(n, made.time, np.int64),
        "sub_index": [i for i, _, _ in entries],
        "key": [key for _, key, _ in entries],
        "value": [None if value is None else float(value) for *_, value in entries],
        "value_int": [value if isinstance(value, int) else None for *_, value in entries],
        "tags": [tags] * n,
    }
    return _COMMITS.batch(n, columns)
