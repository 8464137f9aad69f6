"""Spilling: what is complete so far of an open window goes to the log; its moments stay for the export.

A recorder is spilled by the call that fills its room, or, when what it holds has grown old, by the writer's
clock: what was recorded before a process hangs reaches the disk. Neither waits for a device: what lies on one
stays until it is exported, as do values declared to be replicated: their copies on other ranks might be added
in another order, and no longer be equal to the bit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from . import moments
from .collection import collect, histograms
from .drained import ids_for, reserve_ids
from .frame import UNLOGGED, Frame, Masked
from .overflow import ENDLESS, ROOM, Spilled, valve, window
from .recorder import recorders
from .reduction import Spread
from .settlement import DeviceBlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from .frame import Series, Spec
    from .moments import Rows
    from .recorder import Recorder


class Spill:
    """Spills the recorders of this process into one log.

    `write` takes a part of the open window; `fits` says whether the log takes so many bytes at once.
    """

    def __init__(
        self, write: Callable[[Frame], None], fits: Callable[[int], bool], nbytes: int, seconds: float
    ) -> None:
        self._write = write
        self._fits = fits
        self._room = nbytes or ENDLESS
        self._microseconds = round(seconds * 1e6) or ENDLESS

    def open(self) -> dict[str, int]:
        """From now on what is too much goes here; return how many values of which keys went elsewhere.

        What is held in memory is new to this log. What was spilled into another one, and not exported before
        that was stopped, stays there: an export counts what its own log holds.
        """
        valve.spill, valve.room = self.take, self._room
        elsewhere: dict[str, int] = {}
        for recorder in recorders():
            elsewhere |= begin_log(recorder)
            recorder.room = self._room
        return elsewhere

    def close(self) -> None:
        """From now on everything stays in memory, if it went here."""
        if valve.spill == self.take:
            valve.spill, valve.room = None, ROOM

    def take(self, recorder: Recorder) -> None:
        """Spill what can be of a recorder."""
        with recorder.lock, window.lock:
            self._take(recorder)

    def look(self) -> None:
        """Spill what has grown old. Called by the writer, which all wait for: so it waits for nobody."""
        if valve.spill != self.take:
            return
        before = time.time_ns() // 1000 - self._microseconds
        for recorder in recorders():
            if not recorder.lock.acquire(blocking=False):
                continue
            try:
                if _since(recorder) < before and self._fits(self._room - recorder.room):
                    self._try(recorder)
            finally:
                recorder.lock.release()

    def _try(self, recorder: Recorder) -> None:
        if window.lock.acquire(blocking=False):
            try:
                self._take(recorder)
                recorder.room = self._room
            finally:
                window.lock.release()

    def _take(self, recorder: Recorder) -> None:
        masks = [masked for masked in recorder.masks if _is_ready(masked)]
        series = {name: each for name, each in recorder.series.items() if _is_complete(each)}
        if not masks and not series:
            return
        frame = Frame(window.open, ids_for(masks, len(series)))
        specs: list[Spec] = []
        rows: list[Rows] = []
        collect(masks, series.values(), frame, None, specs, rows)
        counts: dict[Spec, Rows] = {}
        if recorder.specs.asks:
            histograms(masks, frame, None, counts)
        frame.seal(None)
        recorder.spilled.add(specs, np.concatenate([moments.empty(0), *rows]), counts)
        recorder.let_go(masks, series)
        if len(frame):
            recorder.kept_since = frame.window if recorder.kept_since is None else recorder.kept_since
            self._write(frame)


def begin_log(recorder: Recorder) -> dict[str, int]:
    """Let all that a recorder holds be new to the log that starts; what an earlier one holds is forgotten.

    Returns how many values of which keys that was: they were spilled, and never exported.
    """
    with recorder.lock:
        gone = {spec.key: int(row[moments.COUNT]) for spec, row in recorder.spilled.rows.items()}
        recorder.spilled, recorder.kept_since, recorder.since_id = Spilled(), None, reserve_ids(0)
        for masked in recorder.masks:
            masked.record_id = UNLOGGED
            for block in masked.blocks.values():
                block.ids = [UNLOGGED] * len(block.ids)
        for series in recorder.series.values():
            series.logged = 0
    return gone


def _is_ready(masked: Masked) -> bool:
    """Whether all under a mask lies on the host, and the order in which it is added does not matter."""
    return (
        masked.mask is None
        and not masked.pending
        and not any(isinstance(block, DeviceBlock) for block in masked.blocks.values())
        and not any(map(_is_copy, dict.fromkeys(s for b in masked.blocks.values() for s in b.calls.specs)))
    )


def _is_complete(series: Series) -> bool:
    return not series.late and not _is_copy(series.spec)


def _is_copy(spec: Spec) -> bool:
    return spec.spread is Spread.REPLICATED


def _since(recorder: Recorder) -> int:
    """Return when the oldest record that can be spilled was made, UTC µs."""
    times = [each.times[0] for each in recorder.series.values() if each.times and _is_complete(each)]
    if masked := next(filter(_is_ready, recorder.masks), None):
        times += [block.calls.times[0] for block in masked.blocks.values() if len(block.calls)]
        times += [] if masked.counted else [masked.time]
    return min(times, default=ENDLESS)
