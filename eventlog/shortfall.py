"""Values that did not follow their records: those that were in flight when their process was killed.

A window goes to the payload as it goes to the records, even where nothing of it is left to be written there
(all but policy "off"). So of a process that is gone one whose last frame no index of its payload lists never
arrived, whatever became of the frames since: pruned, damaged, moved to tables.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .entries import Entries, good_frames
from .schema import LAST_OF_WINDOW, LossCause, RecordType, Stream
from .segment import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from .sealed import SealedSegment
    from .windows import WindowSet

    Walk = Callable[[Stream], Iterable[SealedSegment]]


def shortfall(late: WindowSet, walk: Walk, *, ended: bool) -> list[Loss]:
    """Return a loss for each of the windows of a process that is gone whose values never came.

    `late` are those with all records and not all of the payload; `walk` opens the segments of a stream, one
    by one; `ended`: the process closed its log in order.
    """
    sealed = _payload(walk(Stream.PAYLOAD))
    flagged = (sealed["type"] == RecordType.FRAME) & (sealed["flags"] & LAST_OF_WINDOW > 0)
    noted = sealed["type"] == RecordType.LOSS
    wanted = set(late) - set(sealed["window"][flagged | noted].tolist())
    if not wanted:
        return []
    arrived = sealed[sealed["type"] == RecordType.FRAME]
    found: list[Loss] = []
    for window, (rows, last, step) in sorted(_records(wanted, walk(Stream.RECORDS)).items()):
        there = int(arrived["rows"][arrived["window"] == window].sum())
        if rows and (last or there < rows):  # else its end, which is empty, is all that is missing
            found.append(_loss(window, max(0, rows - there), step, ended=ended))
    return found


def bound(losses: Iterable[Loss], commits: Iterable[SealedSegment]) -> list[Loss]:
    """Return the losses of a process with the steps that its own commits say."""
    given = list(losses)
    windows = sorted({loss.window for loss in given if loss.unbound})
    if not windows:
        return given
    steps: dict[int, int] = {}
    for segment in commits:
        for _, batch in good_frames(segment.sealed()):
            names = ("window_first", "window_last", "global_step")
            first, last, step = (batch[name][0].as_py() if batch.num_rows else None for name in names)
            if first is not None and last is not None and step is not None:
                for window in windows[bisect_left(windows, first) : bisect_right(windows, last)]:
                    steps.setdefault(window, step)
    return [
        replace(loss, step=steps[loss.window]) if loss.unbound and loss.window in steps else loss
        for loss in given
    ]


def _payload(segments: Iterable[SealedSegment]) -> NDArray[Any]:
    """Return what the indexes say of windows."""
    tables = [run.table[run.good & (run.table["window"] >= 0)] for s in segments for run in s.runs()]
    return np.concatenate(tables) if tables else Entries.of(b"", 0, b"").table


def _records(wanted: set[int], segments: Iterable[SealedSegment]) -> dict[int, tuple[int, int, int | None]]:
    """Return of windows how many records they have, how many of them in the last frame, and the step."""
    found: dict[int, tuple[int, int, int | None]] = {}
    for segment in segments:
        for record, batch in good_frames(segment.sealed(0, lambda record: record.window in wanted)):
            before, _, step = found.get(record.window, (0, 0, None))
            if step is None and batch.num_rows:
                step = batch["step"][0].as_py()
            found[record.window] = before + batch.num_rows, batch.num_rows, step
    return found


def _loss(window: int, rows: int, step: int | None, *, ended: bool) -> Loss:
    how = "of which nothing is left" if ended else "in flight when the process ended"
    detail = f"the values of window {window}, {how}"
    return Loss(Stream.PAYLOAD, LossCause.MISSING, window, rows, detail=detail, step=step)
