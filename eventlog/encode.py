"""Frames, export rows and commits as messages of the format's schemas; runs on the writer's thread."""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .columns import Columns, Table, Valid, beside, lists_of, of_words, remembered
from .pieces import MaskPiece, MatrixPiece, SeriesPiece
from .schema import COMMITS, PAYLOAD, RECORDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from .frame import Frame, Spec
    from .message import Message
    from .pieces import Piece

# pyarrow loads these on first use, which is on the writer's thread: a fork in that moment would leave the
# child with half a module. So they are loaded here.
for _late in ("numpy.ma", "pyarrow.compute"):
    importlib.import_module(_late)

# Frames stay below this, so that nothing needs a whole window in memory, and a commit, whose turn is between
# two of them, waits half a second on a disk of 30 MB/s. A record in several of them costs its readers a copy.
FRAME_BYTES = 16 << 20
FRAME_ROWS = 1 << 17  # of records and commits
_JOINED_BYTES = 256 << 10  # matrices below this are joined into one frame; larger ones are written uncopied
_MOMENTS = ("present", "count", "nan", "pos_inf", "neg_inf", "int_sum", "sum", "min", "max")  # as in moments
_IDS = ("record_id", "time", "window")


_TEXTS = ("tracker", "key", "kind", "reduce_type", "spread", "denominator")
_OF_EXPORTS = ("export_id", "members", "window_first", "window_last", "reset", "outcome")

_RECORDS = Table(RECORDS, _IDS, _TEXTS, _MOMENTS, _OF_EXPORTS)
_EXPORTS, _PAYLOAD, _COMMITS = Table(RECORDS, _MOMENTS), Table(PAYLOAD), Table(COMMITS)


def in_frames(message: Message) -> Sequence[Message | pa.RecordBatch]:
    """Return records or commits in parts of at most FRAME_ROWS."""
    if message.num_rows <= FRAME_ROWS:
        return [message]
    batch = message.batch()
    return [batch.slice(at, FRAME_ROWS) for at in range(0, batch.num_rows, FRAME_ROWS)]


class Texts:
    """The text columns of frames; a layout seen before (the steady state) costs nothing."""

    def __init__(self, capacity: int = 8) -> None:
        self._seen: OrderedDict[tuple[Spec, ...], dict[str, Columns]] = OrderedDict()
        self._capacity = capacity

    def of(self, specs: Sequence[Spec]) -> dict[str, Columns]:
        """Return the columns that follow from the specs alone."""
        layout = tuple(specs)
        found = self._seen.get(layout)
        if found is None:
            found = self._seen[layout] = _texts(layout)
            if len(self._seen) > self._capacity:
                self._seen.popitem(last=False)
        return found


def _texts(specs: Sequence[Spec]) -> dict[str, Columns]:
    texts = _EXPORTS.of(
        {
            "tracker": [s.tracker for s in specs],
            "key": [s.key for s in specs],
            "kind": [s.kind.value for s in specs],
            "reduce_type": [s.reduce_type and s.reduce_type.value for s in specs],
            "spread": [s.spread.value for s in specs],
            "denominator": [s.denominator for s in specs],
            "group": [s.label for s in specs],
        }
    )
    return {_TEXTS[0]: beside(texts[name] for name in _TEXTS), "group": texts["group"]}


def records(frame: Frame, texts: Texts) -> Message:
    """Return the records of a drained window."""
    n, first = len(frame), frame.first_id
    ids = np.empty((len(_IDS), n), np.int64)
    ids[0], ids[1], ids[2] = np.arange(first, first + n), frame.calls.times, frame.window
    owners = np.array(frame.denominator_ids, np.int64)
    columns = {
        _IDS[0]: of_words(ids),
        "step": _RECORDS["step"].again(frame.calls.steps),
        "attempt": _RECORDS["attempt"].again([frame.attempt] * n),
        "denominator_id": _RECORDS["denominator_id"].of(owners, owners >= 0),
        "shape": _RECORDS["shape"].again(frame.shapes),
        "dtype": _RECORDS["dtype"].again(frame.calls.dtypes),
        _MOMENTS[0]: of_words(frame.moments.T),
        **texts.of(frame.calls.specs),
    }
    if frame.tags:
        tags = [frame.tags.get(record) for record in range(first, first + n)]
        columns["tags"] = _RECORDS["tags"].of(tags)
    return _RECORDS.message(n, columns)


def payload(frame: Frame) -> Iterator[Message]:
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


def _matrix(piece: MatrixPiece) -> Iterator[Message]:
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
            columns = _PAYLOAD.of({"record_id": ids, "element": np.full(n, left), "last": np.full(n, last)})
            widths, name = np.full(n, part.shape[1]), _values_column(part.dtype)
            columns[name] = _PAYLOAD[name].lists(lists_of(widths), np.ascontiguousarray(part).reshape(-1))
            yield _PAYLOAD.message(n, columns, _span(ids))


def _series(piece: SeriesPiece) -> Iterator[Message]:
    """Yield a series larger than a frame in parts."""
    n, step = len(piece.values), max(1, FRAME_BYTES // (piece.nbytes // len(piece.values)))
    for at in range(0, n, step):
        values, times = (numbers[at : at + step] for numbers in (piece.values, piece.times))
        columns: dict[str, Any] = {"record_id": [piece.record_id], "element": [at], "last": [at + step >= n]}
        columns |= {"values64": [values], "times": [times]}
        if piece.samples:
            columns["sample_ids"] = [piece.samples[at : at + step]]
        yield _PAYLOAD.message(1, _PAYLOAD.of(columns), (piece.record_id, piece.record_id))


def _span(ids: NDArray[np.int64]) -> tuple[int, int]:
    return int(ids[0]), int(ids[-1])


def _joined(pieces: Sequence[Piece]) -> Message:
    """Return many small pieces as one message."""
    columns = _Columns()
    for piece in pieces:
        if isinstance(piece, MaskPiece):
            columns.mask(piece)
        elif isinstance(piece, MatrixPiece):
            columns.matrix(piece)
        else:
            columns.series(piece)
    return columns.message()


class _Columns:
    """Payload columns under construction; list columns as runs of (rows, items per row, items)."""

    def __init__(self) -> None:
        self.ids: list[NDArray[np.int64]] = []
        self.rows = 0
        self.lists: dict[str, list[tuple[int, int, int, NDArray[Any]]]] = {
            name: [] for name in ("values32", "values64", "times", "mask", "selected")
        }
        self.samples: dict[int, list[str]] = {}

    def _add(self, ids: NDArray[np.int64]) -> int:
        first, self.rows = self.rows, self.rows + len(ids)
        self.ids.append(ids)
        return first

    def mask(self, piece: MaskPiece) -> None:
        row, bits = self._add(np.array([piece.record_id])), piece.bits()
        self.lists["mask"].append((row, 1, len(bits), bits))
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

    def message(self) -> Message:
        ids = np.concatenate(self.ids)
        columns = {"record_id": _PAYLOAD["record_id"].of(ids), **_whole(self.rows)}
        columns |= {name: self._list(name, runs) for name, runs in self.lists.items() if runs}
        if self.samples:
            samples = [self.samples.get(row) for row in range(self.rows)]
            columns["sample_ids"] = _PAYLOAD["sample_ids"].of(samples)
        return _PAYLOAD.message(self.rows, columns, _span(ids))

    def _list(self, name: str, runs: list[tuple[int, int, int, NDArray[Any]]]) -> Columns:
        items = runs[0][-1] if len(runs) == 1 else np.concatenate([items for *_, items in runs])
        return _PAYLOAD[name].lists(_rows(self.rows, tuple([run[:3] for run in runs])), items)


@remembered
def _rows(n: int, runs: tuple[tuple[int, int, int], ...]) -> Columns:
    """Return n lists, those in runs of (row, rows, items per row): of a scalar the same in every window."""
    lengths = np.zeros(n, np.int64)
    there = np.zeros(n, np.bool_)
    for row, count, width in runs:
        lengths[row : row + count] = width
        there[row : row + count] = True
    return lists_of(lengths, Valid.of(there))


@remembered
def _whole(n: int) -> dict[str, Columns]:
    """Return the columns of n records that are in one part."""
    return _PAYLOAD.of({"element": np.zeros(n, np.int64), "last": np.ones(n, np.bool_)})


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


def export(row: ExportRow) -> Message:
    """Return an export row as a record of kind "export"."""
    columns = {name: [getattr(row, name)] for name in ExportRow.__dataclass_fields__}
    return _EXPORTS.message(1, _EXPORTS.of({**columns, "kind": ["export"]}))


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit: the steps and windows it binds, and on the leader its metrics, a dict per sub-index."""

    number: int
    time: int
    attempt: int | None
    leader: bool
    restored_step: int | None
    epoch: int | None  # None: of a step that another commit is about, to which this one adds
    epoch_step: int | None
    global_step: int
    window_first: int | None
    window_last: int | None
    metrics: tuple[dict[str, float], ...] = ()
    tags: dict[str, Any] | None = None


def commit(made: Commit) -> Message:
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
    return _COMMITS.message(n, _COMMITS.of(columns))
