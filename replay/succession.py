"""Which attempt of a run owns which steps, while it is still written: the log itself is asked if need be."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from eventlog import ArealMetricsError, RunDir

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from eventlog import Loss, Producer

    from .steps import Row

HOLD_SECONDS: Final = 2.0
"""How long a commit waits for the records that say whether its attempt begins anew there."""


class Succession:
    """Lets commits through once it is known what their attempt owns, and knows what was taken back.

    The earliest attempt needs no question. Of another the log is asked when it commits, until it owns
    something: where it resumed by its claim, or by the first step it trained.
    """

    def __init__(self, run_dir: Path, *, hold: float = HOLD_SECONDS) -> None:
        self.problems: dict[str, None] = {}
        self.losses: list[tuple[Producer, Loss]] = []
        self._path = run_dir
        self._hold = hold
        self._owned: dict[int, int] = {}
        self._earliest: int | None = None
        self._seen: dict[int, set[int]] = {}
        self._waiting: list[tuple[float, Row]] = []

    def owned_from(self, attempt: int) -> int | None:
        """Return the first step an attempt owns; None where it owns nothing, or is the first."""
        return self._owned.get(attempt)

    def take(self, rows: Iterable[Row]) -> list[Row]:
        """Take commits; return those that can be told now, attempt by attempt, in their order.

        Without what came again since: a target that was told it keeps what replaced it.
        """
        now = time.monotonic()
        ready = self._waiting + [(now, row) for row in rows]
        if not ready:
            return []
        self._waiting = []
        ready.sort(key=lambda item: next(iter(item[1].commits.items())))
        self._ask({attempt_of(row) for _, row in ready})
        for _, row in ready:
            self._seen.setdefault(attempt_of(row), set()).add(row.step)
        told: list[Row] = []
        for since, row in _unrepeated(ready):
            attempt = attempt_of(row)
            if self._decided(attempt) or now - since >= self._hold:
                told.append(row)
            else:
                self._waiting.append((since, row))
        return [row for row in told if not self.superseded(attempt_of(row), row.step)]

    @property
    def waiting(self) -> bool:
        """Whether commits wait for what their attempt owns."""
        return bool(self._waiting)

    def superseded(self, attempt: int, step: int) -> bool:
        """Whether a later attempt owns the step."""
        return any(later > attempt and first <= step for later, first in self._owned.items())

    def taken_back(self) -> list[int]:
        """Return the step of every (attempt, step) that was committed and belongs to a later attempt."""
        pairs = ((attempt, step) for attempt, steps in self._seen.items() for step in steps)
        return [step for attempt, step in pairs if self.superseded(attempt, step)]

    def _decided(self, attempt: int) -> bool:
        return attempt in self._owned or attempt == self._earliest

    def _ask(self, attempts: set[int]) -> None:
        """Find what attempts own that is not known yet."""
        earliest = min(attempts)
        if self._earliest is None or earliest < self._earliest:
            self._earliest = earliest
        if all(map(self._decided, attempts)):
            return
        claims = {claim.number: claim.resume_step for claim in RunDir.open(self._path).attempts()}
        self._owned |= {a: step for a in attempts if (step := claims.get(a)) is not None}
        if not all(map(self._decided, attempts)):
            self._owned |= self._by_records()

    def _by_records(self) -> dict[int, int]:
        from aggregator import open_run

        try:
            with open_run(self._path, attempts="all") as session:
                found = session.sql("select attempt, owned_from from attempts where owned_from is not null")
        except ArealMetricsError as error:  # a directory in the making: asked again
            self.problems[str(error)] = None
            return {}
        pairs = zip(found["attempt"].to_pylist(), found["owned_from"].to_pylist(), strict=True)
        return {attempt: step for attempt, step in pairs if attempt != self._earliest}


def _unrepeated(rows: list[tuple[float, Row]]) -> list[tuple[float, Row]]:
    """Return rows without the values that a later row of their step gives again, and without empty ones."""
    often = {step for step, count in Counter(row.step for _, row in rows).items() if count > 1}
    said: dict[int, set[str]] = {}
    left: list[tuple[float, Row]] = []
    for since, row in reversed(rows):
        if row.step in often:
            later = said.setdefault(row.step, set())
            metrics = {key: value for key, value in row.metrics.items() if key not in later}
            later.update(row.metrics)
            if not metrics:
                continue
            row = row if len(metrics) == len(row.metrics) else replace(row, metrics=metrics)  # noqa: PLW2901
        left.append((since, row))
    return left[::-1]


def attempt_of(row: Row) -> int:
    """Return the attempt of a commit."""
    return next(iter(row.commits))
