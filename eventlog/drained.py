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
from .collection import collect, histograms, unlog, unlogged
from .frame import UNCOUNTED, UNLOGGED, Frame, Spec
from .overflow import window
from .settlement import settle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .frame import Masked
    from .moments import Rows
    from .recorder import Recorder

_ids_lock = threading.RLock()  # a signal handler may come in at any place
_next_id = 0


@dataclass(slots=True)
class Drained:
    """What an export covers: `frame` is new to the log, `specs` and `rows` are everything to be reduced.

    `failed`: what went wrong half-way. Then the frame holds what was collected until then, `lost` says how
    many records were dropped without it, and there is nothing to be reduced.
    """

    frame: Frame
    specs: list[Spec]
    rows: Rows
    first_window: int  # before the frame's own when it covers what earlier exports left
    step: int | None = None
    histograms: dict[Spec, Rows] = field(default_factory=dict[Spec, "Rows"])  # where quantiles are asked
    failed: BaseException | None = None
    lost: int = 0

    def counts(self, specs: Iterable[Spec]) -> Rows | None:
        """Return the histograms of the specs with quantiles, in their order, shape (n, BUCKETS)."""
        if not self.histograms:
            return None
        return np.stack([self.histograms[spec] for spec in specs if spec.quantiles])


def drain(
    recorders: Iterable[Recorder],
    *,
    key: str | None = None,
    reset: bool = True,
    step: int | None = None,
    anyhow: bool = False,
) -> Drained:
    """Take what the recorders hold (all of it, or one full key) as the next window of this process.

    Where what lies on devices cannot be settled that is raised, and nothing is taken; or, `anyhow`, it is
    lost. Once records are in the frame nothing is raised, not even an interrupt: see `Drained.failed`.
    """
    with ExitStack() as held:
        chosen = list(recorders)
        for recorder in chosen:
            held.enter_context(recorder.lock)
        unsettled = _settle(chosen, anyhow=anyhow)
        first = ids_for((m for r in chosen for m in r.masks), sum(len(r.series) for r in chosen))
        frame = Frame(window.close(), first)
        since = [frame.window, *(r.kept_since for r in chosen if r.kept_since is not None)]
        found = Drained(frame, [], moments.empty(0), min(since), step)
        try:
            _collect(chosen, key, found, unsettled)
            for recorder in chosen:
                _release(recorder, key, reset, frame.window)
        except BaseException as error:  # noqa: BLE001 - what was collected is marked as logged: it must be
            _break_off(chosen, key, found, error, reset=reset)
    return found


def _settle(chosen: list[Recorder], *, anyhow: bool) -> Exception | None:
    try:
        settle((m for r in chosen for m in r.masks), (s for r in chosen for s in r.series.values()))
    except Exception as error:
        if not anyhow:
            raise
        return error
    return None


def _collect(chosen: list[Recorder], key: str | None, found: Drained, unsettled: Exception | None) -> None:
    """Fill the frame and what is to be reduced; what could not be settled is left out, and raised."""
    rows: list[Rows] = []
    for recorder in chosen:
        masks, series = recorder.masks, list(recorder.series.values())
        if unsettled is not None:
            masks = [masked for masked in masks if masked.selected != UNCOUNTED]
            series = [each for each in series if not each.late]
        recorder.spilled.give(key, found.specs, rows)
        collect(masks, series, found.frame, key, found.specs, rows)
        own = recorder.own_steps.items()
        found.frame.own_steps |= {each: step for each, step in own if key in (None, each)}
    if unsettled is not None:
        raise unsettled
    found.histograms = _histograms(chosen, found.frame, key)
    found.frame.seal(found.step)
    found.rows = np.concatenate(rows) if rows else found.rows


def _break_off(
    chosen: list[Recorder], key: str | None, found: Drained, error: BaseException, *, reset: bool
) -> None:
    """Keep of the window what was collected as a whole; the rest is lost where it would be reset."""
    frame = found.frame
    frame.seal(found.step)
    for recorder in chosen:
        unlog(recorder.masks, frame.first_id + len(frame))
        if reset:
            found.lost += unlogged(recorder.masks, recorder.series.values(), key)
        _release(recorder, key, reset, frame.window)
    found.failed, found.specs, found.rows, found.histograms = error, [], moments.empty(0), {}


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
    _ids_lock = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew_in_child)
