"""Whose word on a key is told while a run is written: the leader's, and what it does not say the others'."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from eventlog import RunDir, RunReader, WindowSet, lost_commits
from eventlog.schema import Stream

from .succession import attempt_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from eventlog import Followed, SessionState

    from .steps import Row

_LEADER: Final = -1  # stands before every rank
_EVERY: Final = 1 << 32  # places of an index

Place = tuple[int, int]  # an attempt and a step


class _Waiting(NamedTuple):
    """What another process says of a step."""

    rank: int
    pace: int  # the highest step that its process had committed in the attempt by then
    row: Row


class _Stand(NamedTuple):
    """How far a process has got."""

    number: int  # of its newest commit
    attempt: int
    pace: int


class _Lapse(NamedTuple):
    """Commits of a process that are lost, and where it stood before and behind them."""

    attempt: int
    rank: int
    low: float
    high: float

    def may_be(self, attempt: int, waiting: _Waiting) -> bool:
        """Whether one of them may be of the step of another process, whose word stands behind."""
        steps = waiting.row.step, waiting.pace
        before = attempt == self.attempt and self.rank < waiting.rank
        return before and any(self.low <= step <= self.high for step in steps)


class Precedence:
    """Lets commits of other processes through once the leader has committed their step, or a later one.

    Then they are told without the keys that the leader said of it; where its commit of the step is known to
    be lost they are not told. Where nobody leads, rank 0 does.
    """

    def __init__(self, run_dir: Path) -> None:
        self.problems: dict[str, None] = {}  # found where it was asked what is lost
        self._path = run_dir
        self._claimed: set[int] = set()
        self._newest: dict[int, int] = {}  # per attempt the highest step that its leader committed
        self._said: dict[Place, dict[int, frozenset[str]]] = {}  # the keys that were told, by rank
        self._alike: dict[frozenset[str], frozenset[str]] = {}  # most commits have the same keys
        self._waiting: list[_Waiting] = []
        self._stands: dict[str, _Stand] = {}  # by session
        self._lapses: dict[tuple[str, int, int], _Lapse] = {}  # by session, first lost commit and attempt
        self._asked: set[tuple[int, bool]] = set()  # attempts, and whether that was in the end

    def take(self, told: Followed, rows: Iterable[Row]) -> list[Row]:
        """Take what a commit holds; return it when it is the leader's, else it waits."""
        rows = list(rows)
        attempt = told.commit["attempt"][0].as_py() or 0
        leads = bool(told.commit["leader"][0].as_py())
        others = not leads and (told.producer.rank or attempt in self._claimed or self._is_claimed(attempt))
        stand = self._walk(told, attempt, told.producer.rank if others else _LEADER)
        if leads:
            self._claimed.add(attempt)
        elif others:
            self._waiting += [_Waiting(told.producer.rank, stand.pace, row) for row in rows]
            return []
        self._newest[attempt] = max(told.step, self._newest.get(attempt, told.step))
        for row in rows:
            self._note(row, _LEADER)
        return rows

    def released(self, *, ending: bool = False) -> list[Row]:
        """Return what need not wait any more; when `ending`, all."""
        waiting, self._waiting = sorted(self._waiting, key=lambda item: item.rank), []
        told: list[Row] = []
        for item in waiting:
            if ending or self._is_due(item.row):
                told += self._rest(item, ending=ending)
            else:
                self._waiting.append(item)
        return told

    def _is_claimed(self, attempt: int) -> bool:
        self._claimed |= {claim.number for claim in RunDir.open(self._path).attempts()}
        return attempt in self._claimed

    def _is_due(self, row: Row) -> bool:
        """Whether the leader will say no more of the step, or there is none."""
        attempt = attempt_of(row)
        if attempt not in self._newest and not self._is_claimed(attempt):
            return True
        return self._newest.get(attempt, -1) >= row.step or max(self._newest, default=-1) > attempt

    def _rest(self, waiting: _Waiting, *, ending: bool) -> list[Row]:
        """Return what a commit says of its step that the leader and lower ranks do not."""
        rank, _, row = waiting
        attempt = attempt_of(row)
        if row.step > self._newest.get(attempt, -1):
            self._ask(attempt, ending=ending)
        if any(lapse.may_be(attempt, waiting) for lapse in self._lapses.values()):
            return []
        said = self._said.get((attempt, row.step), {})
        before = frozenset[str]().union(*(keys for other, keys in said.items() if other < rank))
        metrics = {key: value for key, value in row.metrics.items() if key not in before}
        self._note(row, rank)
        return [replace(row, metrics=metrics)] if metrics else []

    def _note(self, row: Row, rank: int) -> None:
        said = self._said.setdefault((attempt_of(row), row.step), {})
        keys = said.get(rank, frozenset()).union(row.metrics)
        said[rank] = self._alike.setdefault(keys, keys)

    def _walk(self, told: Followed, attempt: int, rank: int) -> _Stand:
        """Take note of how far a process has got, and of the commits between that are lost."""
        session = told.producer.session
        before = self._stands.get(session, _Stand(-1, attempt, -1))
        here = before.attempt == attempt
        pace = max(told.step, before.pace) if here else told.step
        if told.number > before.number + 1:
            first = before.number + 1
            self._lapses[session, first, attempt] = _Lapse(attempt, rank, before.pace if here else -inf, pace)
            if not here:
                self._lapses[session, first, before.attempt] = _Lapse(before.attempt, rank, before.pace, inf)
        for of in (attempt, before.attempt):  # another thread may have overtaken it
            self._lapses.pop((session, told.number, of), None)
        self._stands[session] = stand = _Stand(max(told.number, before.number), attempt, pace)
        return stand

    def _ask(self, attempt: int, *, ending: bool) -> None:
        """Ask the run, once, which processes of an attempt have lost commits behind those that were told."""
        if (attempt, ending) in self._asked:
            return
        self._asked.add((attempt, ending))
        reader = RunReader(self._path)
        everything = WindowSet()
        everything.update(0, _EVERY)
        reader.leave_out({file.data: everything for file in reader.run.segments(Stream.RECORDS)})
        lapses = dict(self._behind(attempt, reader, reader.sessions()))
        if lapses:
            self._lapses |= lapses
            self.problems |= {str(problem): None for problem in reader.problems}

    def _behind(
        self, attempt: int, reader: RunReader, states: Sequence[SessionState]
    ) -> Iterator[tuple[tuple[str, int, int], _Lapse]]:
        leaders = {claim.session for claim in reader.run.attempts() if claim.number == attempt}
        vanished = leaders - {state.producer.session for state in states}
        if vanished and reader.run.attempt_path(attempt) in {problem.path for problem in reader.problems}:
            yield ("", 0, attempt), _Lapse(attempt, _LEADER, -inf, inf)
        found = lost_commits(reader.run, states)
        for state in states:
            session = state.producer.session
            stand = self._stands.get(session, _Stand(-1, attempt, -1))
            here, leads = stand.attempt == attempt, session in leaders
            lost = any(numbers.stop - 1 > stand.number for numbers in found[session])
            if lost and (here or leads):
                low = stand.pace if here else -inf
                rank = _LEADER if leads else state.producer.rank
                yield (session, stand.number + 1, attempt), _Lapse(attempt, rank, low, inf)
