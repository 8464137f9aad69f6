"""Whether a run lives: told from its processes' signs of life, and from when they last got on.

A recording process gives a sign of life every few seconds, from a thread of its own: a training that hangs
still gives it, but neither exports nor commits.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

DEAD_SECONDS: Final = 30  # without a sign of life: six are missing
STUCK_STEPS: Final = 10  # usual times between two commits without anything exported or committed …
LEAST_STUCK_SECONDS: Final = 120  # … but no less than this
BEGIN_STUCK_SECONDS: Final = 1800  # before there are two commits: models load, kernels compile


def stuck_after(commits_us: Iterable[int]) -> float:
    """Return after how many seconds without progress a run counts as stuck, by the times of its commits."""
    gaps = [later - earlier for earlier, later in pairwise(sorted(set(commits_us)))]
    if not gaps:
        return BEGIN_STUCK_SECONDS
    return max(LEAST_STUCK_SECONDS, STUCK_STEPS * median(gaps) / 1e6)


def state(*, ended: bool, seen_us: int, progress_us: int, patience: float, now: float) -> str:
    """Return "ended", "dead", "stuck" or "running".

    `seen_us` is the last sign of life, `progress_us` when it last exported or committed, `now` in seconds.
    How long it got no further is measured by the run's own clock.
    """
    if ended:
        return "ended"
    if now - seen_us / 1e6 > DEAD_SECONDS:
        return "dead"
    return "stuck" if (seen_us - progress_us) / 1e6 > patience else "running"


def together(states: Iterable[str]) -> str:
    """Return the state of a run by those of its processes: as long as one lives it does; "" without any."""
    found = set(states)
    return next((name for name in ("running", "stuck", "dead", "ended") if name in found), "")
