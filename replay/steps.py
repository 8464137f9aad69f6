"""The step gate: merges rows into one call per step and decides what a target may be told. Pure: no I/O.

A step is *open* while further rows may still be merged into it. It closes at a row of a later step, at
`close()`, or once nothing came for `wait` seconds. A row whose step the target can no longer take is
*withheld*: counted here, kept in the log. Live logging and replay use this same gate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

DEFAULT_WAIT = 2.0
"""Seconds without a further row after which a step closes."""


class Order(Enum):
    """Which steps a target takes after those it already holds."""

    ANY = "any"  # every step at any time, also again
    FORWARD = "forward"  # never a lower step; the newest step may still get new keys
    STRICT = "strict"  # each call needs a higher step than the one before


class Histogram(NamedTuple):
    """How many values lie between neighbouring edges; there is one edge more than counts."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The metrics of one commit or, when it comes out of the gate, of one step.

    `time` (Unix seconds) is that of the step's first commit. `commits` says which commits a target has
    acknowledged once it took the row: per attempt (-1: unknown) the time of the newest. `histograms` are told
    to targets that can show them.
    """

    step: int
    metrics: Mapping[str, float]
    time: float
    commits: Mapping[int, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


class Gate:
    """Rows in, in the order of their commits; closed steps out, in an order the target takes.

    `last_step` is the highest step that the target holds already; `bars` says of a row that it must not be
    told whatever the step. Times given as `now` are seconds of any one clock that does not go back.
    """

    def __init__(
        self,
        order: Order = Order.STRICT,
        *,
        last_step: int | None = None,
        wait: float = DEFAULT_WAIT,
        bars: Callable[[Row], bool] | None = None,
    ) -> None:
        self.order = order
        self._bars = bars
        self.withheld = 0
        """Rows of which at least one value was held back."""
        self.withheld_steps: set[int] = set()
        """Their steps."""
        self.wait = wait
        self._last = last_step
        self._told: Collection[str] | None = (
            None if last_step is not None else ()
        )  # keys of the last step; None: unknown
        self._open: Row | None = None
        self._touched = 0.0

    @property
    def floor(self) -> int | None:
        """The step below which nothing is taken any more; None while everything is."""
        if self.order is Order.ANY:
            return None
        return self._last if self._open is None else self._open.step

    def raise_floor(self, step: int) -> None:
        """Take steps up to `step` as told already, by whoever wrote before."""
        if self.order is not Order.ANY and self._open is None and (self._last is None or step > self._last):
            self._last, self._told = step, None

    def takes(self, row: Row) -> bool:
        """Whether `put` would withhold nothing of a row."""
        return len(self._admit(row)) == len(row.metrics)

    def put(self, row: Row, now: float = 0.0) -> list[Row]:
        """Take one commit's metrics; return the steps that this closes, oldest first."""
        closed = self._close_for(row.step)
        admitted = self._admit(row)
        if len(admitted) < len(row.metrics):
            self.withheld += 1
            self.withheld_steps.add(row.step)
        if admitted:
            self._merge(row, admitted)
            self._touched = now
        return closed

    def due(self) -> float | None:
        """Return when the open step closes if nothing more comes; None when no step is open."""
        return None if self._open is None else self._touched + self.wait

    def tick(self, now: float) -> list[Row]:
        """Return the step whose time has come, if any."""
        due = self.due()
        return self.close() if due is not None and now >= due else []

    def close(self) -> list[Row]:
        """Close the open step and return it, if any."""
        row, self._open = self._open, None
        if row is None:
            return []
        before = self._told if row.step == self._last else None
        self._told = {*before, *row.metrics} if before else row.metrics
        self._last = row.step if self._last is None else max(self._last, row.step)
        return [row]

    def _close_for(self, step: int) -> list[Row]:
        if self._open is None or step == self._open.step:
            return []
        return self.close() if step > self._open.step or self.order is Order.ANY else []

    def _admit(self, row: Row) -> Mapping[str, float]:
        """Return the part of the row's metrics that the target can still take."""
        if self._bars is not None and self._bars(row):
            return {}
        floor = self.floor
        if floor is None or row.step > floor or (self._open is not None and row.step == floor):
            return self._untold(row) if row.step == self._last else row.metrics
        return self._untold(row) if row.step == floor else {}

    def _untold(self, row: Row) -> Mapping[str, float]:
        """Return what may follow at a step that was told before: only new keys, if anything."""
        if self.order is Order.ANY:
            return row.metrics
        if self.order is Order.STRICT or self._told is None:
            return {}
        return {key: value for key, value in row.metrics.items() if key not in self._told}

    def _merge(self, row: Row, admitted: Mapping[str, float]) -> None:
        if self._open is None:
            self._open = Row(row.step, dict(admitted), row.time, row.commits, row.histograms)
            return
        before = self._open
        self._open = Row(
            row.step,
            {**before.metrics, **admitted},
            before.time,
            newest(before.commits, row.commits),
            {**before.histograms, **row.histograms},
        )


def newest(*commits: Mapping[int, float]) -> dict[int, float]:
    """Return the newest commit per attempt."""
    merged: dict[int, float] = {}
    for some in commits:
        for attempt, time in some.items():
            merged[attempt] = max(time, merged.get(attempt, time))
    return merged


def numbered(text: str) -> set[int]:
    """Return the set of steps that `eventlog.ranges` has put into words; ValueError for other words."""
    steps: set[int] = set()
    for run in text.split(", ") if text else ():
        first, _, last = run.partition("-")
        steps.update(range(int(first), int(last or first) + 1))
    return steps
