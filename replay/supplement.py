"""Statistics of a run that is followed: a step waits until it has closed, and is told with them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eventlog import errors

from .backends.base import Selection
from .statistics import Recorded, nothing_recorded, recorded
from .steps import Row, newest
from .succession import attempt_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from .statistics import Place
    from .succession import Succession


@dataclass(slots=True)
class _Open:
    """A step of an attempt that may still get commits, or whose values are still on their way to the disk."""

    row: Row
    touched: float
    tried: bool = False


class Supplement:
    """Holds the commits of a step until it has closed; then adds statistics of what was recorded.

    A step closes `wait` seconds after its last commit: by then its values are on the disk, too, which are
    written behind it. Where some are not, it waits once more, and is then told with what there is. What comes
    to a step that was told already (an evaluation that is late) is passed on as it is. Without `stats`
    everything is.
    """

    def __init__(
        self, run_dir: Path, stats: Sequence[str], selection: Selection, succession: Succession, wait: float
    ) -> None:
        self.partial = 0
        """Statistics of values that are not all kept; a step of which none are counts as one."""
        self._path = run_dir
        self._stats = stats
        self._selection = selection
        self._succession = succession
        self._wait = wait
        self._open: dict[Place, _Open] = {}
        self._told: dict[int, int] = {}  # per attempt the highest step
        self._committed: set[str] = set()
        self._why: errors.ArealMetricsError | None = nothing_recorded() if stats else None

    def take(self, rows: list[Row], *, ending: bool = False) -> list[Row]:
        """Take commits; return those of the steps that have closed, one row each; when `ending`, all."""
        if not self._stats:
            return rows
        now = time.monotonic()
        late = [row for row in rows if not self._hold(row, now)]
        closed = self._closed(now, ending=ending)
        return late + (self._supplemented(closed, now, ending=ending) if closed else [])

    def check(self) -> None:
        """Raise why there was nothing at all to make statistics of, if so."""
        if self._why is not None:
            raise self._why

    def _hold(self, row: Row, now: float) -> bool:
        """Keep a commit with those of its step; False when that was told."""
        place = row.step, attempt_of(row)
        if row.step <= self._told.get(place[1], -1):
            return False
        self._committed |= row.metrics.keys()
        before = self._open.get(place)
        if before is not None:
            commits = newest(before.row.commits, row.commits)
            row = Row(row.step, {**before.row.metrics, **row.metrics}, before.row.time, commits)
        self._open[place] = _Open(row, now)
        return True

    def _closed(self, now: float, *, ending: bool) -> list[Place]:
        """Return what can be told, attempt by attempt: none behind a step that is still open."""
        closed: list[Place] = []
        waits = False
        for step, attempt in sorted(self._open, key=lambda place: (place[1], place[0])):
            if self._succession.superseded(attempt, step):
                del self._open[step, attempt]
                continue
            waits = waits or not (ending or now - self._open[step, attempt].touched >= self._wait)
            if not waits:
                closed.append((step, attempt))
        return closed

    def _supplemented(self, closed: list[Place], now: float, *, ending: bool) -> list[Row]:
        found = self._recorded(step for step, _ in closed)
        told: list[Row] = []
        waits = False
        for place in closed:
            step, attempt = place
            held, lacking = self._open[place], 1 if found is None else found.partial[place]
            if lacking and not ending and not held.tried:
                held.tried, held.touched, waits = True, now, True
            if waits:  # what is behind it is told after it
                continue
            row = self._open.pop(place).row
            self._told[attempt] = step
            self.partial += lacking
            if found is not None:
                numbers, drawn = found.numbers.get(place, {}), found.histograms.get(place, {})
                row = replace(row, metrics={**row.metrics, **numbers}, histograms=drawn)
            told.append(row)
        return told

    def _recorded(self, steps: Iterable[int]) -> Recorded | None:
        """Return the statistics of steps; None where they cannot be had, or not yet."""
        every = set(steps)
        part = Selection(min(every), max(every), self._selection.keys)
        try:
            found = recorded(self._path, self._stats, part, self._committed, "all")
        except errors.ArealMetricsError as error:  # of these values none is there, or a file is in the making
            if self._why is not None:
                self._why = error
            return None
        if found.keys:
            self._why = None
        return found
