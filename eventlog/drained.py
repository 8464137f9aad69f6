"""What an export takes: everything that trackers recorded since the last one, as the next window.

The records that are new go to the log; what is reduced may reach further back, where an export before this
one did not reset its tracker.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from . import moments
from .collection import collect, histograms
from .frame import UNLOGGED, Frame, Spec
from .overflow import window
from .settlement import settle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .frame import Masked
    from .moments import Rows
    from .recorder import Recorder

_ids_lock = threading.Lock()
_next_id = 0


@dataclass(slots=True)
class Drained:
    """What an export covers: `frame` is new to the log, `specs` and `rows` are everything to be reduced."""

    frame: Frame
    specs: list[Spec]
    rows: Rows
    first_window: int  # before the frame's own when it covers what earlier exports left
    step: int | None = None
    histograms: dict[Spec, Rows] = field(default_factory=dict[Spec, "Rows"])  # where quantiles are asked

    def counts(self, specs: Iterable[Spec]) -> Rows | None:
        """Return the histograms of the specs with quantiles, in their order, shape (n, BUCKETS)."""
        if not self.histograms:
            return None
        return np.stack([self.histograms[spec] for spec in specs if spec.quantiles])


def drain(
    recorders: Iterable[Recorder], *, key: str | None = None, reset: bool = True, step: int | None = None
) -> Drained:
    """Take what the recorders hold (all of it, or one full key) as the next window of this process."""
    with ExitStack() as held:
        chosen = list(recorders)
        for recorder in chosen:
            held.enter_context(recorder.lock)
        settle((m for r in chosen for m in r.masks), (s for r in chosen for s in r.series.values()))
        first = ids_for((m for r in chosen for m in r.masks), sum(len(r.series) for r in chosen))
        frame = Frame(window.close(), first)
        specs: list[Spec] = []
        rows: list[Rows] = []
        for recorder in chosen:
            recorder.spilled.give(key, specs, rows)
            collect(recorder.masks, recorder.series.values(), frame, key, specs, rows)
        counts = _histograms(chosen, frame, key)
        frame.seal(step)
        since = [frame.window, *(r.kept_since for r in chosen if r.kept_since is not None)]
        for recorder in chosen:
            _release(recorder, key, reset, frame.window)
    found = np.concatenate(rows) if rows else moments.empty(0)
    return Drained(frame, specs, found, min(since), step, counts)


def _release(recorder: Recorder, key: str | None, reset: bool, window: int) -> None:
    if reset and key is not None:
        recorder.forget_key(key)
    elif reset:
        recorder.forget()
    # A mask is logged with the first stat under it, which may be exported before the mask itself is.
    owed = any(masked.record_id != UNLOGGED and not masked.counted for masked in recorder.masks)
    if recorder.kept_since is None and (owed or not reset):
        recorder.kept_since = window


def ids_for(masks: Iterable[Masked], series: int) -> int:
    """Take record ids for masks, what is under them, and so many series; gaps are allowed."""
    return reserve_ids(
        series + sum(1 + len(m.pending) + sum(len(b.calls) for b in m.blocks.values()) for m in masks)
    )


def reserve_ids(n: int) -> int:
    """Take n record ids of this process; returns the first."""
    global _next_id
    with _ids_lock:
        first, _next_id = _next_id, _next_id + n
    return first


def _histograms(chosen: list[Recorder], frame: Frame, key: str | None) -> dict[Spec, Rows]:
    """Return the histograms of the keys of which quantiles are asked."""
    found: dict[Spec, Rows] = {}
    for recorder in chosen:
        if recorder.specs.asks:
            found.update(recorder.spilled.counts_of(key))
            histograms(recorder.masks, frame, key, found)
    return found


def _begin_anew_in_child() -> None:
    global _ids_lock
    _ids_lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew_in_child)
