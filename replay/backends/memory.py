"""A target in memory, for tests and notebooks; its switches make it behave as badly as real ones do."""

from __future__ import annotations

import json
import re
import time as clock
from typing import TYPE_CHECKING

from eventlog import errors

from ..steps import Order
from .base import Capabilities, not_open

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .base import RunInfo


class MemoryBackend:
    """Keeps what it is told: `rows` is a list of (step, metrics, time), one entry a call, in order.

    `run` is the RunInfo it was opened with, None before; `closed` says whether it was closed since; `asked`
    counts the calls of `log`, the failed ones too; `alerts` are (title, text, level, step). What goes wrong
    is chosen by switches:

    strict:  only ascending steps, as most trackers: RewindError otherwise
    drops:   a step that is not above the last vanishes without a word, as on some servers
    fails:   calls (counted from 1) that raise BackendError, as a server that is down for a moment
    dies:    from this call on every call raises BackendGoneError, as a run that was deleted
    seconds: how long each call takes
    limit:   the most bytes a row may have as JSON: RefusedError otherwise
    refuses: names that match this pattern: RefusedError
    """

    name = "memory"

    def __init__(
        self,
        *,
        strict: bool = False,
        drops: bool = False,
        fails: Collection[int] = (),
        dies: int | None = None,
        seconds: float = 0.0,
        limit: int | None = None,
        refuses: str | None = None,
    ) -> None:
        self.capabilities = Capabilities(order=Order.STRICT if strict else Order.ANY, lasts=False)
        self.target = f"memory-{id(self):x}"
        self.strict = strict
        self.rows: list[tuple[int, dict[str, float], float]] = []
        self.run: RunInfo | None = None
        self.closed = False
        self.asked = 0
        self.alerts: list[tuple[str, str, str, int | None]] = []
        self._drops = drops
        self._fails = fails
        self._dies = dies
        self._seconds = seconds
        self._limit = limit
        self._refuses = None if refuses is None else re.compile(refuses)

    def open(self, run: RunInfo) -> None:
        """Remember the run; what was told before stays, unless a fresh run is asked for."""
        if run.fresh:
            self.rows = []
        self.run, self.closed = run, False

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Append a row, if nothing is switched on that comes between."""
        if self.run is None or self.closed:
            raise not_open(step)
        self.asked += 1
        clock.sleep(self._seconds)
        self._misbehave(step, metrics)
        last = self.last_step()
        if last is None or step > last or not (self.strict or self._drops):
            self.rows.append((step, dict(metrics), time))
        elif self.strict:
            raise errors.RewindError(f"expected a step above {last}, got {step}: {self.target}")

    def alert(self, title: str, text: str, level: str, step: int | None) -> None:
        """Append an alert."""
        self.alerts.append((title, text, level, step))

    def last_step(self) -> int | None:
        """Return the highest step it was told."""
        return max((step for step, _, _ in self.rows), default=None)

    def close(self) -> None:
        """Take nothing more."""
        self.closed = True

    def _misbehave(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._dies is not None and self.asked >= self._dies:
            raise errors.BackendGoneError(f"expected a run, got none any more: {self.target}")
        if self.asked in self._fails:
            raise errors.BackendError(f"expected an answer, got none at call {self.asked}: {self.target}")
        if self._limit is not None and (size := len(json.dumps(dict(metrics)))) > self._limit:
            raise errors.RefusedError(
                f"expected a row of at most {self._limit} bytes, got {size} at step {step}: {self.target}"
            )
        refused = [key for key in metrics if self._refuses is not None and self._refuses.search(key)]
        if refused:
            raise errors.RefusedError(
                f"expected names without {self._refuses}, got {refused[0]!r} at step {step}: {self.target}"
            )
