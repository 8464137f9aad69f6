"""Sets of numbers as runs, and which windows of a stream are complete by its index records in their order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np

from .schema import LAST_OF_WINDOW

if TYPE_CHECKING:
    from .schema import IndexRecord


class WindowSet(AbstractSet[int]):
    """A set of numbers, of windows or places, as runs: a hundred thousand in a row cost what one costs."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for number in sorted(numbers):
            self.add(number)

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.runs():
            yield from range(start, stop)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs())

    def __repr__(self) -> str:
        return f"WindowSet({', '.join(f'{start}..{stop - 1}' for start, stop in self.runs())})"

    def runs(self) -> list[tuple[int, int]]:
        """Return the runs in order, each as (first, last + 1)."""
        return list(zip(self._starts, self._stops, strict=True))

    def add(self, number: int) -> None:
        """Add a window, fastest behind all others."""
        self.update(number, number + 1)

    def update(self, start: int, stop: int) -> None:
        """Add the windows `start` to `stop - 1`."""
        if start >= stop:
            return
        low = bisect_right(self._stops, start - 1)  # the first run that touches or lies behind
        high = bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]

    def discard(self, number: int) -> None:
        """Take a window out, if it is in."""
        at = bisect_right(self._starts, number) - 1
        if at < 0 or number >= self._stops[at]:
            return
        start, stop = self._starts.pop(at), self._stops.pop(at)
        self.update(start, number)
        self.update(number + 1, stop)

    def without(self, other: WindowSet) -> WindowSet:
        """Return those that another set has not."""
        left = WindowSet()
        for start, stop in self.runs():
            for first, behind in other.runs()[bisect_right(other._stops, start) :]:
                if first >= stop:
                    break
                left.update(start, first)
                start = behind  # noqa: PLW2901 - what is left of the run
            left.update(start, stop)
        return left

    def copy(self) -> WindowSet:
        """Return another set of the same windows."""
        other = WindowSet()
        other._starts, other._stops = self._starts.copy(), self._stops.copy()
        return other


def ranges(numbers: Iterable[int], *, most: int | None = None) -> str:
    """Return a set of numbers in words: "12-15, 20"; of more than `most` runs only the first, and a "…"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    return ", ".join(said if len(said) == len(runs) else [*said, "…"])


class Completeness:
    """Which windows are whole: frames 0, 1, 2 … all there and good, the last one flagged, nothing lost.

    Where something unknown is missing, every window number that does not turn up again counts as incomplete.
    """

    def __init__(self) -> None:
        self.complete = WindowSet()
        self._broken = WindowSet()
        self._open: dict[int, int] = {}  # window: number of its next frame
        self._newest = -1
        self._gap = False

    @property
    def newest(self) -> int:
        """The greatest number a frame was of; -1 before the first."""
        return self._newest

    @property
    def begun(self) -> int | None:
        """The newest window while its last frame is still to come and nothing of it is missing."""
        return self._newest if self._newest in self._open else None

    @property
    def gapped(self) -> bool:
        """Whether something unknown is missing behind the newest."""
        return self._gap

    @property
    def incomplete(self) -> WindowSet:
        """The windows seen or inferred that are not complete, as far as the index was read."""
        windows = self._broken.copy()
        for window in self._open:
            windows.add(window)
        return windows

    def frame(self, record: IndexRecord, *, good: bool) -> None:
        """Take the next frame; `good`: its bytes are what was written."""
        window = record.window
        if window < 0:
            return
        if self._gap and window > self._newest:
            self._broken.update(self._newest + 1, window)
            self._gap = False
        self._newest = max(self._newest, window)
        if not good or record.frame != self._open.get(window, 0) or window in self._broken:
            self._break(window)
        elif record.last_of_window:
            self._open.pop(window, None)
            self.complete.add(window)
        else:
            self._open[window] = record.frame + 1

    def frames(self, table: Any) -> bool:
        """Take good frames of which each is a window; whether they are such, else nothing is taken.

        `table` has a field for each of an IndexRecord's.
        """
        table = table[table["window"] >= 0]
        windows = table["window"]
        if self._gap or self._open or self._broken or table["frame"].any():
            return False
        if not (table["flags"] & LAST_OF_WINDOW).all() or (np.diff(windows, prepend=self._newest) <= 0).any():
            return False
        for some in np.split(windows, np.flatnonzero(np.diff(windows) > 1) + 1) if len(windows) else ():
            self.complete.update(int(some[0]), int(some[-1]) + 1)
            self._newest = int(some[-1])
        return True

    def lost(self, window: int) -> None:
        """Take the note that something of a window was lost."""
        if window >= 0:
            self._break(window)

    def gap(self) -> None:
        """Say that here something is missing, of which nothing is known."""
        self._gap = True

    def _break(self, window: int) -> None:
        self._open.pop(window, None)
        self.complete.discard(window)
        self._broken.add(window)
