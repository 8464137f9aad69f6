"""Commits that are known to be lost, and which of the others may be of a step that one of them was of.

A lost commit has no step. It lies between two that are left of its process: so do, of another process, the
commits of the same steps, and those made while it stood there (a late evaluation is of a step long past).
"""

from __future__ import annotations

from itertools import accumulate, groupby
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .reading import Bools, Reading
    from .timeline import Commit, Timeline

    Lost = Mapping[str, Sequence[range]]  # by session, as eventlog.lost_commits has them

LEADER = 0  # stands before every rank


class Lapse(NamedTuple):
    """One or more commits of a process that are lost, and where it stood before and behind them."""

    attempt: int
    standing: int
    low: float
    high: float


class _Place(NamedTuple):
    """A commit that is left."""

    number: int
    attempt: int
    step: int
    pace: int  # the highest step that its process had committed in the attempt by then


def standing(rank: int, *, leads: bool) -> int:
    """Return what decides whose word on a key stands: the leader's, then the lowest rank's."""
    return LEADER if leads else -1 - rank


def torn(lost: Lost, commits: Iterable[Commit]) -> frozenset[str]:
    """Return the sessions of which commits behind the newest one left are lost."""
    newest: dict[str, int] = {}
    for commit in commits:
        newest[commit.session] = max(commit.number, newest.get(commit.session, -1))
    return frozenset(
        session
        for session, ranges in lost.items()
        if any(numbers.stop - 1 > newest.get(session, -1) for numbers in ranges)
    )


def silenced(
    reading: Reading,
    lost: Lost,
    commits: Sequence[Commit],
    found: Timeline,
    leaders: Mapping[int, set[str]],
) -> Bools:
    """Whether each commit may be of a step that a process whose word stands before its own has lost."""
    out = np.zeros(len(commits), np.bool_)
    lapses = [*_of_the_vanished(reading)]
    if not lapses and not any(lost.values()) and _are_all(commits):
        return out
    own = _places(commits, found)
    lapses += _of_sessions(reading, lost, own, found, leaders)
    if not (lapses and commits):
        return out
    ranks = {producer.session: producer.rank for producer in reading.producers}
    place = {(session, place.number): place for session, places in own.items() for place in places}
    of = [place[commit.session, commit.number] for commit in commits]
    attempts, steps, paces = (np.array(column) for column in list(zip(*of, strict=True))[1:])
    stands = np.array([standing(ranks[commit.session], leads=commit.leader) for commit in commits])
    for lapse in lapses:
        at_steps = (lapse.low <= steps) & (steps <= lapse.high)
        meanwhile = (lapse.low <= paces) & (paces <= lapse.high)
        out |= (attempts == lapse.attempt) & (stands < lapse.standing) & (at_steps | meanwhile)
    return out


def _are_all(commits: Iterable[Commit]) -> bool:
    """Whether no number below the newest of each session is missing."""
    numbers: dict[str, set[int]] = {}
    for commit in commits:
        numbers.setdefault(commit.session, set()).add(commit.number)
    return all(max(those) == len(those) - 1 for those in numbers.values())


def _places(commits: Sequence[Commit], found: Timeline) -> dict[str, list[_Place]]:
    """Return the commits of each session, in their order."""
    those = sorted(zip(commits, found.commit_attempts, strict=True), key=lambda those: those[0][:2])
    places: dict[str, list[_Place]] = {}
    for (session, attempt), some in groupby(those, lambda those: (those[0].session, those[1])):
        made = [commit for commit, _ in some]
        for commit, pace in zip(made, accumulate((commit.step for commit in made), max), strict=True):
            places.setdefault(session, []).append(_Place(commit.number, attempt, commit.step, pace))
    return places


def _of_sessions(
    reading: Reading,
    lost: Lost,
    own: Mapping[str, Sequence[_Place]],
    found: Timeline,
    leaders: Mapping[int, set[str]],
) -> Iterator[Lapse]:
    known: dict[str, set[int]] = {}
    for (session, _), binding in found.windows.items():
        known.setdefault(session, set()).add(binding.attempt)
    for attempt, those in leaders.items():
        for session in those:
            known.setdefault(session, set()).add(attempt)
    every = set(found.owned_from) | set(leaders)
    for producer in reading.producers:
        session = producer.session
        places = own.get(session, [])
        attempts = known.get(session, set()) | {place.attempt for place in places}
        for before, behind in _gaps(places, lost[session]):
            for attempt in attempts or every:
                if (before and before.attempt > attempt) or (behind and behind.attempt < attempt):
                    continue
                low = before.pace if before and before.attempt == attempt else -inf
                high = behind.pace if behind and behind.attempt == attempt else inf
                leads = session in leaders.get(attempt, ())
                yield Lapse(attempt, standing(producer.rank, leads=leads), low, high)


def _gaps(places: Sequence[_Place], lost: Sequence[range]) -> Iterator[tuple[_Place | None, _Place | None]]:
    """Yield between which commits some are lost; of one that is left in part others are lost as well."""
    whole = [place for place in places if not any(place.number in numbers for numbers in lost)]
    before: _Place | None = None
    for place in whole:
        if place.number > (before.number + 1 if before else 0):
            yield before, place
        before = place
    if any(numbers.stop - 1 > (before.number if before else -1) for numbers in lost):
        yield before, None


def _of_the_vanished(reading: Reading) -> Iterator[Lapse]:
    """Yield the attempts of whose leader nothing at all is left."""
    sessions = {producer.session for producer in reading.producers}
    run = reading.reader.run
    damaged = {problem.path for problem in run.found}
    for claim in reading.attempts:
        if claim.session not in sessions and run.attempt_path(claim.number) in damaged:
            yield Lapse(claim.number, LEADER, -inf, inf)
