"""Which ranks count: the sets of windows that may stand behind a committed value. Pure.

Per step the candidates are each group export, the committing process's own exports without a group, and the
union of what producers of other worlds exported without a group. They are never added up: tensor-parallel
copies count once. Which of them speaks for a key is decided where the numbers are (`recompute`).
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from .timeline import Binding, Export, Timeline, WindowKey

GROUP: Final = "group"
OWN: Final = "own"
WORKERS: Final = "workers"

Pattern = tuple[str | None, str | None]  # tracker and key that alone are meant; None: all
ALL: Final[Pattern] = (None, None)


class Member(NamedTuple):
    """A session as far as candidates are concerned."""

    session: str
    rank: int
    world: str


class Part(NamedTuple):
    """What an export covers of one window."""

    session: str
    window: int
    only: Pattern = ALL
    gone: tuple[Pattern, ...] = ()  # exported with reset before: no longer covered


class Candidate(NamedTuple):
    """Windows whose records, merged in the order of `parts`, may be a committed value of a step."""

    source: str  # GROUP, OWN or WORKERS
    attempt: int
    step: int
    time: int  # of its (last) export, UTC µs
    parts: tuple[Part, ...]
    export_id: str | None = None  # None: the union of several
    members: tuple[int, ...] | None = None
    leader: bool = False  # the committing process took part
    second: bool = False  # the call's second group: only keys with a group of their own travel over it
    incomplete: bool = False  # a member or a window of it is missing or damaged


def candidates(
    exports: Sequence[Export],
    timeline: Timeline,
    members: Sequence[Member],
    leaders: Mapping[int, Collection[str]],
    incomplete: Collection[WindowKey] = frozenset(),
) -> list[Candidate]:
    """Return the candidates of every bound step.

    `exports` in order per session; `members` in (role, rank) order; `leaders`: attempt → committing sessions;
    `incomplete`: windows of which records are missing.
    """
    covered = _coverage(exports)
    calls = [_Call(e, timeline.windows[e.session, e.window], parts, second) for e, parts, second in covered]
    made = [*_groups(calls, members, leaders), *_ungrouped(calls, members, leaders)]
    return [c._replace(incomplete=True) if _damaged(c, incomplete) else c for c in made]


class _Call(NamedTuple):
    export: Export
    binding: Binding
    parts: tuple[Part, ...]
    second: bool


def _damaged(candidate: Candidate, incomplete: Collection[WindowKey]) -> bool:
    return any((part.session, part.window) in incomplete for part in candidate.parts)


# -- what an export covers -----------------------------------------------------------------------------


def _coverage(exports: Iterable[Export]) -> list[tuple[Export, tuple[Part, ...], bool]]:
    """Return (export, what it covers, whether it is its call's second group)."""
    sessions: dict[str, dict[int, list[Export]]] = {}
    for export in exports:
        sessions.setdefault(export.session, {}).setdefault(export.window, []).append(export)
    found: list[tuple[Export, tuple[Part, ...], bool]] = []
    for session, calls in sessions.items():
        alive: dict[int, tuple[Pattern, ...]] = {}  # window → what was taken from it
        for window in sorted(calls):
            alive[window] = ()
            first = calls[window][0]
            parts = _parts(session, first, window, alive)
            found += [(e, parts, i > 0) for i, e in enumerate(calls[window])]
            if first.reset:
                _take(alive, parts)
    return found


def _parts(
    session: str, call: Export, window: int, alive: dict[int, tuple[Pattern, ...]]
) -> tuple[Part, ...]:
    first = window if call.first is None else call.first
    only = (call.tracker, call.key)
    if first == window:
        return (Part(session, window, only, alive[window]),)
    covered = list(takewhile(lambda w: w >= first, reversed(alive)))
    return tuple(Part(session, w, only, alive[w]) for w in reversed(covered))


def _take(alive: dict[int, tuple[Pattern, ...]], parts: Iterable[Part]) -> None:
    for part in parts:
        if part.only == ALL:
            del alive[part.window]
        else:
            alive[part.window] = (*part.gone, part.only)


# -- candidates ----------------------------------------------------------------------------------------


def _groups(
    calls: Iterable[_Call], members: Sequence[Member], leaders: Mapping[int, Collection[str]]
) -> Iterable[Candidate]:
    rank = {member.session: member.rank for member in members}
    by_id: dict[str, list[_Call]] = {}
    for call in calls:
        if call.export.members is not None:
            by_id.setdefault(call.export.export_id, []).append(call)
    for export_id, those in by_id.items():
        if not any(call.export.ok for call in those):
            continue
        # A rank that failed later, in its second group, took part in the first all the same.
        group = those[0].export.members or ()
        place = {member: i for i, member in enumerate(group)}
        those.sort(key=lambda call: place.get(rank[call.export.session], len(place)))
        said = _spokesman(those, leaders)
        attempt, step = said.binding.attempt, said.binding.step
        if step is not None:
            yield _candidate(GROUP, attempt, step, those, leaders, export_id, len(group))


def _spokesman(calls: Sequence[_Call], leaders: Mapping[int, Collection[str]]) -> _Call:
    """Return whose binding speaks for a group export: the leader's, else the first rank's that has a step."""
    for call in calls:
        if call.export.session in leaders.get(call.binding.attempt, ()):
            return call
    return next((call for call in calls if call.binding.step is not None), calls[0])


def _ungrouped(
    calls: Iterable[_Call], members: Sequence[Member], leaders: Mapping[int, Collection[str]]
) -> Iterable[Candidate]:
    place = {member.session: i for i, member in enumerate(members)}
    world = {member.session: member.world for member in members}
    leading = {attempt: {world[s] for s in those if s in world} for attempt, those in leaders.items()}
    own: dict[tuple[int, int], list[_Call]] = {}
    workers: dict[tuple[int, int], list[_Call]] = {}
    for call in calls:
        attempt, step, session = call.binding.attempt, call.binding.step, call.export.session
        if call.export.members is not None or step is None or not call.export.ok:
            continue
        if session in leaders.get(attempt, ()):
            own.setdefault((attempt, step), []).append(call)
        elif world[session] not in leading.get(attempt, ()):
            workers.setdefault((attempt, step), []).append(call)
    for (attempt, step), those in own.items():
        for call in those:
            yield _candidate(OWN, attempt, step, [call], leaders, call.export.export_id)
        if len(those) > 1:
            yield _candidate(OWN, attempt, step, those, leaders)
    for (attempt, step), those in workers.items():
        those.sort(key=lambda call: place[call.export.session])
        yield _candidate(WORKERS, attempt, step, those, leaders)


def _candidate(
    source: str,
    attempt: int,
    step: int,
    calls: Sequence[_Call],
    leaders: Mapping[int, Collection[str]],
    export_id: str | None = None,
    expected: int = 0,
) -> Candidate:
    sessions = {call.export.session for call in calls}
    return Candidate(
        source=source,
        attempt=attempt,
        step=step,
        time=max(call.export.time for call in calls),
        parts=_distinct(calls),
        export_id=export_id,
        members=calls[0].export.members,
        leader=any(session in leaders.get(attempt, ()) for session in sessions),
        second=all(call.second for call in calls),
        incomplete=len(sessions) < expected,
    )


def _distinct(calls: Iterable[_Call]) -> tuple[Part, ...]:
    """Return the parts of calls in order; a window that several of them cover alike counts once."""
    return tuple(dict.fromkeys(part for call in calls for part in call.parts))
