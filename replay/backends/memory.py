"""A target in memory, for tests and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventlog import errors

from ..steps import Order
from .base import Capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import RunInfo


class MemoryBackend:
    """Keeps what it is told: `rows` is a list of (step, metrics, time), one entry a call, in order.

    With `strict` it takes only ascending steps, as most trackers do, and raises RewindError otherwise. `run`
    is the RunInfo it was opened with, None before; `closed` says whether it was closed since.
    """

    name = "memory"

    def __init__(self, *, strict: bool = False) -> None:
        self.capabilities = Capabilities(order=Order.STRICT if strict else Order.ANY, lasts=False)
        self.target = f"memory-{id(self):x}"
        self.strict = strict
        self.rows: list[tuple[int, dict[str, float], float]] = []
        self.run: RunInfo | None = None
        self.closed = False

    def open(self, run: RunInfo) -> None:
        """Remember the run; what was told before stays, unless a fresh run is asked for."""
        if run.fresh:
            self.rows = []
        self.run, self.closed = run, False

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Append a row; RewindError when strict and the step is not above the last."""
        if self.run is None or self.closed:
            raise errors.BackendError(
                f"expected an open backend, got a call at step {step} before open or after close"
            )
        last = self.last_step()
        if self.strict and last is not None and step <= last:
            raise errors.RewindError(f"expected a step above {last}, got {step}: {self.target}")
        self.rows.append((step, dict(metrics), time))

    def last_step(self) -> int | None:
        """Return the highest step it was told."""
        return max((step for step, _, _ in self.rows), default=None)

    def close(self) -> None:
        """Take nothing more."""
        self.closed = True
