"""Whose word on a key is told while a run is written: the leader's, and what it does not say the others'."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from eventlog import RunDir

from .succession import attempt_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from eventlog import Followed

    from .steps import Row

_LEADER: Final = -1  # stands before every rank

Place = tuple[int, int]  # an attempt and a step


class Precedence:
    """Lets commits of other processes through once the leader has committed their step, or a later one.

    Then they are told without the keys that the leader said of it. Where nobody leads, rank 0 does.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir
        self._claimed: set[int] = set()
        self._newest: dict[int, int] = {}  # per attempt the highest step that its leader committed
        self._said: dict[Place, dict[int, frozenset[str]]] = {}  # the keys that were told, by rank
        self._alike: dict[frozenset[str], frozenset[str]] = {}  # most commits have the same keys
        self._waiting: list[tuple[int, Row]] = []  # with the rank of the process

    def take(self, told: Followed, rows: Iterable[Row]) -> list[Row]:
        """Take what a commit holds; return it when it is the leader's, else it waits."""
        rows = list(rows)
        attempt = told.commit["attempt"][0].as_py() or 0
        if told.commit["leader"][0].as_py():
            self._claimed.add(attempt)
        elif told.producer.rank or attempt in self._claimed or self._is_claimed(attempt):
            self._waiting += [(told.producer.rank, row) for row in rows]
            return []
        self._newest[attempt] = max(told.step, self._newest.get(attempt, told.step))
        for row in rows:
            self._note(row, _LEADER)
        return rows

    def released(self, *, ending: bool = False) -> list[Row]:
        """Return what need not wait any more; when `ending`, all."""
        waiting, self._waiting = sorted(self._waiting, key=lambda item: item[0]), []
        told: list[Row] = []
        for rank, row in waiting:
            if ending or self._is_due(row):
                told += self._rest(rank, row)
            else:
                self._waiting.append((rank, row))
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

    def _rest(self, rank: int, row: Row) -> list[Row]:
        """Return what a commit says of its step that the leader and lower ranks do not."""
        said = self._said.get((attempt_of(row), row.step), {})
        before = frozenset[str]().union(*(keys for other, keys in said.items() if other < rank))
        metrics = {key: value for key, value in row.metrics.items() if key not in before}
        self._note(row, rank)
        return [replace(row, metrics=metrics)] if metrics else []

    def _note(self, row: Row, rank: int) -> None:
        said = self._said.setdefault((attempt_of(row), row.step), {})
        keys = said.get(rank, frozenset()).union(row.metrics)
        said[rank] = self._alike.setdefault(keys, keys)
