"""What a target is believed to hold of which no cursor is found: what it must have been told, in any case."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from eventlog import errors

from .turn import commits_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_log = logging.getLogger("areal_metrics.replay")


class Box(NamedTuple):
    """Commits of an attempt that follow one another: steps and times (Unix), both from first to last."""

    attempt: int
    first: int
    last: int
    begin: float
    end: float


def believed(run_dir: Path, last: int, backend: str, target: str) -> list[Box]:
    """Return what a target that ends on a step holds for certain, as far as the log can tell; say so.

    Those are steps with a single commit, which is of the earliest attempt and came in its turn. Of others
    nobody knows which commit is there. A log that cannot be read tells of none.
    """
    _log.warning(
        "%s: no cursor was found (its folder can be given as cursors, or with --cursors): of the steps up to "
        "%d those count as told that were committed once, by the first attempt, the others as withheld: %s",
        backend,
        last,
        target,
    )
    try:
        commits = _commits(run_dir, last)
    except errors.ArealMetricsError as error:
        _log.warning("%s: what was committed cannot be read: %s", backend, error)
        return []
    return list(_boxes(commits))


def _commits(run_dir: Path, last: int) -> list[tuple[int, int, float]]:
    """Return step, attempt and time of all commits up to a step, ascending."""
    from aggregator import open_run

    with open_run(run_dir, attempts="all") as session:
        found = session.metrics(until=last).group_by(["step", "attempt", "time"]).aggregate([])
    return sorted((step, attempt, time / 1e6) for step, attempt, time in commits_of(found))


def _boxes(commits: list[tuple[int, int, float]]) -> Iterator[Box]:
    often = Counter(step for step, _, _ in commits)
    earliest = min((attempt for _, attempt, _ in commits), default=-1)
    in_turn: list[bool] = []
    behind = float("inf")  # when the first commit of a later step came
    for _, _, time in reversed(commits):
        in_turn.append(time <= behind)
        behind = min(behind, time)
    box: Box | None = None
    for (step, attempt, time), turn in zip(commits, reversed(in_turn), strict=True):
        if often[step] == 1 and attempt == earliest and turn:
            box = Box(attempt, step, step, time, time) if box is None else box._replace(last=step, end=time)
        elif box is not None:
            yield box
            box = None
    if box is not None:
        yield box
