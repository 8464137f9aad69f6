"""Commits of which nothing is left: a process numbers them 0, 1, 2 …, so that a missing one shows.

Nothing else need tell of it: a frame that was cut out leaves no trace, and what was lost on a full disk is
noted only by a process that lived to do so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from .entries import good_frames
from .schema import LossCause, Stream
from .segment import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .sealed import SealedSegment
    from .windows import Completeness

_MOST_ROWS: Final = 0xFFFFFFFF  # as an index record holds them


class Neighbour(NamedTuple):
    """What the commit before or behind a gap says."""

    step: int | None
    attempt: int | None


def gaps(commits: Completeness, noted: Iterable[int]) -> list[range]:
    """Return the numbers that are missing below the newest one, whose loss the process has not noted."""
    known = commits.complete.copy()
    for number in noted:
        known.add(number)
    if commits.begun is not None:  # and still being written, or cut off by the end of its process
        known.add(commits.begun)
    stop, found = 0, list[range]()
    for first, behind in [*known.runs(), (commits.newest + 1, 0)]:
        if first > stop:
            found.append(range(stop, first))
        stop = behind
    return found


def missing(
    commits: Completeness, noted: Iterable[int], segments: Iterable[SealedSegment], dead: Callable[[], bool]
) -> list[Loss]:
    """Return the commits of a process that nobody has noted as lost, with what is known of them.

    `segments` are those of its commits, walked once if need be; `dead`: whether nothing more will come.
    """
    found = gaps(commits, noted)
    if found and found[-1].stop == commits.newest:  # one of another thread may have overtaken it
        unseen = found[-1].stop - 1 not in commits.incomplete
        if unseen and not dead():
            found.pop()
    beside = _beside(found, segments) if found else {}
    return [_loss(gap, beside) for gap in found]


def _beside(found: Iterable[range], segments: Iterable[SealedSegment]) -> dict[int, Neighbour]:
    """Read the commits next to gaps."""
    wanted = {number for gap in found for number in (gap.start - 1, gap.stop)}
    beside: dict[int, Neighbour] = {}
    for segment in segments:
        for record, batch in good_frames(segment.sealed(0, lambda record: record.window in wanted)):
            if batch.num_rows:
                step, attempt = (batch[name][0].as_py() for name in ("global_step", "attempt"))
                beside.setdefault(record.window, Neighbour(step, attempt))
    return beside


def _loss(gap: range, beside: Mapping[int, Neighbour]) -> Loss:
    """Return a gap as a loss, with what is known of it: every commit is of one row at least."""
    before, behind = beside.get(gap.start - 1), beside.get(gap.stop)
    named = f"commit {gap.start}" if len(gap) == 1 else f"commits {gap.start} to {gap.stop - 1}"
    sides = [side for side in (before, behind) if side is not None]
    attempts = sorted({side.attempt for side in sides if side.attempt is not None})
    of = f" of attempt {' or '.join(map(str, attempts))}" if attempts else ""
    places = [
        f"{word} step {side.step}"
        for word, side in (("after", before), ("before", behind))
        if side is not None and side.step is not None
    ]
    where = f", {' and '.join(places)}" if places else ""
    rows = min(len(gap), _MOST_ROWS)
    return Loss(Stream.COMMITS, LossCause.MISSING, gap.start, rows, detail=f"{named}{of}{where}")
