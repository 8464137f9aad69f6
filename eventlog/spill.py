"""Spilling: what is complete so far of an open window goes to the log; its moments stay for the export.

A recorder is spilled by the call that fills its room, or, when what it holds has grown old, by the writer's
clock: what was recorded before a process hangs reaches the disk. Neither waits for a device: what lies on one
stays until it is exported, as do values declared to be replicated: their copies on other ranks might be added
in another order, and no longer be equal to the bit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from . import moments, warning
from .clock import now_us
from .collection import collect, histograms
from .drained import ids_for, reserve_ids
from .frame import UNCOUNTED, UNLOGGED, Frame, Masked
from .overflow import ENDLESS, ROOM, Spilled, valve, window
from .recorder import recorders
from .reduction import Spread
from .settlement import DeviceBlock, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from .frame import Series, Spec
    from .moments import Rows
    from .recorder import Recorder

LEAVE_SECONDS: Final = 1.0  # how long the end waits for trackers that are in use


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

    def leave(self) -> None:
        """Write down what no export took, at the end of the log: in a window that stays incomplete.

        The recorders keep it: what is exported later, without a log or into the next one, is all of it. What
        lies on a device is not waited for (see `leave_late`), and a tracker that is in use not for long.
        """
        if valve.spill != self.take:
            return
        deadline = time.monotonic() + LEAVE_SECONDS
        for recorder in recorders():
            if recorder.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                try:
                    self._leave(recorder)
                except Exception as error:  # noqa: BLE001 - the log has to end
                    what = f"what tracker {recorder.name!r} did not export"
                    warning.warn(f"expected to write down {what}, got {type(error).__name__}: {error}")
                finally:
                    recorder.lock.release()

    def leave_late(self, aside: Callable[[Callable[[], None]], None]) -> None:
        """Write down what lies on devices too; `aside` waits for them, a bounded time."""
        late = [recorder for recorder in recorders() if _is_late(recorder)]
        if valve.spill != self.take or not late:
            return
        failed: list[Exception] = []

        def wait_for_devices() -> None:
            for recorder in late:
                if recorder.lock.acquire(timeout=LEAVE_SECONDS):
                    try:
                        settle(recorder.masks, recorder.series.values())
                    except Exception as error:  # noqa: BLE001 - said below
                        failed.append(error)
                    finally:
                        recorder.lock.release()

        aside(wait_for_devices)
        self.leave()
        if any(map(_is_late, late)):
            got = f"{type(failed[0]).__name__}: {failed[0]}" if failed else "no answer"
            warning.warn(f"expected a device to give what it did not export before the log ends, got {got}")

    def _leave(self, recorder: Recorder) -> None:
        masks = [masked for masked in recorder.masks if masked.selected != UNCOUNTED]
        series = [each for each in recorder.series.values() if not each.late]
        with window.lock:
            frame = _collected(recorder, masks, series)[0]
            if len(frame):
                self._write(frame)

    def look(self) -> None:
        """Spill what has grown old. Called by the writer, which all wait for: so it waits for nobody."""
        if valve.spill != self.take:
            return
        before = now_us() - self._microseconds
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
        frame, specs, rows, counts = _collected(recorder, masks, list(series.values()))
        recorder.spilled.add(specs, rows, counts)
        recorder.let_go(masks, series)
        if len(frame):
            recorder.kept_since = frame.window if recorder.kept_since is None else recorder.kept_since
            self._write(frame)


def _collected(
    recorder: Recorder, masks: list[Masked], series: list[Series]
) -> tuple[Frame, list[Spec], Rows, dict[Spec, Rows]]:
    """Return a part of the open window: its frame, and specs, moments and histograms of all that is in it."""
    frame = Frame(window.open, ids_for(masks, len(series)))
    specs: list[Spec] = []
    rows: list[Rows] = []
    counts: dict[Spec, Rows] = {}
    with np.errstate(all="ignore"):  # as an export: whatever numpy is told to do
        collect(masks, series, frame, None, specs, rows)
        if recorder.specs.asks:
            histograms(masks, frame, None, counts)
    frame.seal(None)
    return frame, specs, np.concatenate([moments.empty(0), *rows]), counts


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


def _is_late(recorder: Recorder) -> bool:
    """Whether something that was recorded still lies on a device."""
    masks, series = list(recorder.masks), list(recorder.series.values())
    return any(m.pending or m.selected == UNCOUNTED for m in masks) or any(each.late for each in series)


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
