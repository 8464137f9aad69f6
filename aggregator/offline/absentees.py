"""Ranks that took part in the export of a group and left nothing of it in the log: what it merged lacks them.

An export row names the ranks of its group. Of a rank whose process lives it may only be late; else it will
not come any more: the rank had no log, or its files are gone, or it was killed before it wrote. What is
damaged, or noted as lost, is told as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute

from eventlog import Problem, is_over, now_us, ranges, schema

from .candidates import GROUP
from .losses import losses
from .placing import outdated
from .reading import codes, ints
from .recompute import candidates_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .history import History

_LATE_US: Final = 30_000_000  # what is so old is listed, and more than clocks of one cluster differ
_MOST_RUNS: Final = 8  # of steps, or of ranks, that are named


def absentees(history: History) -> list[Problem]:
    """Return a problem for all ranks of a role that left nothing of the same exports.

    Exports of steps that a later attempt took back are left out.
    """
    together: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for role, ranks, step in _lacking(history):
        together.setdefault((role, ranks), set()).add(step)
    steps: dict[tuple[str, int], set[int]] = {}
    for (role, ranks), those in together.items():
        for rank in ranks:
            steps.setdefault((role, rank), set()).update(those)
    alike: dict[tuple[str, frozenset[int]], list[int]] = {}
    for (role, rank), those in sorted(steps.items()):
        alike.setdefault((role, frozenset(those)), []).append(rank)
    run = history.reading.reader.run
    return [
        Problem(run.producer_dir(schema.Stream.RECORDS, role, ranks[0]), _said(role, ranks, sorted(those)))
        for (role, those), ranks in alike.items()
    ]


def _said(role: str, ranks: Sequence[int], steps: Sequence[int]) -> str:
    one = len(steps) == 1
    who = f"{role}-{ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks, most=_MOST_RUNS)} of {role}"
    where = f"the export of step {steps[0]}" if one else f"exports of steps {ranges(steps, most=_MOST_RUNS)}"
    return f"{who} took part in {where} and left nothing of {'it' if one else 'them'} in the log"


def _lacking(history: History) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield (role, ranks, step) where ranks of a group left nothing of its export, and will not."""
    if _are_all(history):
        return
    groups = [made for made in candidates_of(history) if made.source == GROUP]
    attempts, steps = (np.array([getattr(c, n) for c in groups], np.int64) for n in ("attempt", "step"))
    counts = ~outdated(history.timeline, attempts, steps)
    lives, told, people = _Lives(history), _Told(history), _People(history)
    for made in (made for made, counted in zip(groups, counts.tolist(), strict=True) if counted):
        there = tuple(dict.fromkeys(part.session for part in made.parts))
        if len(there) >= len(made.members or ()):
            continue
        role, strangers, known = people.absent(made.members or (), there)
        if strangers and not lives.is_late((), made.time, there):
            yield role, strangers, made.step
        for rank, own in known:
            if not told.of(own, made.step) and not lives.is_late(own, made.time, there):
                yield role, (rank,), made.step


def _are_all(history: History) -> bool:
    """Whether every group export has a row of each of its ranks: mostly so, and quickly seen."""
    rows = history.exports.table
    ids = codes(rows["export_id"]) + 1
    sizes = ints(pyarrow.compute.list_value_length(rows["members"]).cast(pa.int64()), 0)  # pyright: ignore[reportAttributeAccessIssue]
    return bool((sizes <= np.bincount(ids, minlength=1)[ids]).all())


class _People:
    """Who took part in exports, and is there."""

    def __init__(self, history: History) -> None:
        self._who = {producer.session: producer for producer in history.reading.producers}
        self._own: dict[tuple[str, int], list[str]] = {}
        for session, who in self._who.items():
            self._own.setdefault((who.role, who.rank), []).append(session)
        self._known: dict[Any, tuple[str, tuple[int, ...], list[tuple[int, list[str]]]]] = {}

    def absent(
        self, members: tuple[int, ...], there: tuple[str, ...]
    ) -> tuple[str, tuple[int, ...], list[tuple[int, list[str]]]]:
        """Return the role of a group, its ranks without a process, and the others with their processes.

        Without those of which one is `there`: the processes that left something of the export.
        """
        if (members, there) not in self._known:
            role = self._who[there[0]].role
            ranks = sorted(set(members) - {self._who[session].rank for session in there})
            own = [(rank, self._own.get((role, rank), [])) for rank in ranks]
            strangers = tuple(rank for rank, sessions in own if not sessions)
            self._known[members, there] = role, strangers, [those for those in own if those[1]]
        return self._known[members, there]


class _Told:
    """What is said of processes already: damage in their files, and losses of their records."""

    def __init__(self, history: History) -> None:
        self._damaged = [problem.path.name for problem in history.reading.reader.problems]
        self._lost = {
            (who.session, loss.step) for who, loss in losses(history) if loss.stream is schema.Stream.RECORDS
        }

    def of(self, own: Iterable[str], step: int) -> bool:
        """Whether it may be why some processes left nothing of an export of a step."""
        return any(
            (session, step) in self._lost
            or (session, None) in self._lost
            or any(session in name for name in self._damaged)
            for session in own
        )


class _Lives:
    """Whether more may come of processes; each is asked about once."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._now = now_us()
        self._over: dict[str, bool] = {}
        self._started = {who.session: who.started_us for who in history.reading.producers}
        self._newest: dict[str, int] = {}  # the time of each process's last export
        for export in history.made:
            self._newest[export.session] = max(export.time, self._newest.get(export.session, 0))

    def is_late(self, own: Iterable[str], time: int, there: Iterable[str]) -> bool:
        """Whether more of an export may come of a rank's `own` processes; `there` have left something."""
        own = [session for session in own if self._started[session] < time + _LATE_US]
        if own:
            waited = [session for session in own if self._newest.get(session, 0) < time + _LATE_US]
            return not all(map(self._is_over, waited))
        return self._now < time + _LATE_US and not all(map(self._is_over, there))

    def _is_over(self, session: str) -> bool:
        if session not in self._over:
            run = self._history.reading.reader.run
            who = next(one for one in self._history.reading.producers if one.session == session)
            files = run.segments_of(who.role, who.rank, schema.Stream.RECORDS, session)
            self._over[session] = not files or is_over(run, files[0])
        return self._over[session]
