"""One target of a run that is followed, and what it is to be told."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from eventlog import RunDir, errors, ranges

from .account import Report
from .appending import left_behind
from .backends.base import as_ours, capabilities_of, name_of, target_of
from .delivery import Delivery
from .player import play, run_info, story_of, telling_of
from .renaming import Renaming
from .standing import store_for
from .succession import attempt_of

if TYPE_CHECKING:
    from pathlib import Path

    from .backends.base import Backend, Selection
    from .renaming import Rules
    from .steps import Row
    from .succession import Succession

CLOSE_SECONDS: Final = 120.0
PAUSES: Final = (0.5, 2.0, 10.0, 30.0, 60.0)  # nobody waits: an outage of a minute is no reason to give up


@dataclass(frozen=True)
class Asked:
    """What is to be told, and where it is remembered."""

    path: Path
    selection: Selection
    stats: list[str]
    rename: Rules
    cursors: Path
    new_run: bool

    def play(self, backend: Backend) -> Report:
        """Tell a target the whole run as it is now."""
        return play(
            self.path,
            [backend],
            **asdict(self.selection),
            stats=self.stats,
            rename=self.rename,
            cursors=self.cursors,
            new_run=self.new_run,
        )[0]


class Recipient:
    """One target that is told commit by commit, as live; a new attempt is a lifetime of its own to it."""

    def __init__(self, backend: Backend, asked: Asked, succession: Succession, wait: float) -> None:
        self.backend = backend
        self._asked = asked
        self._succession = succession
        self._wait = wait
        self._sent = self._untold = 0
        self._skipped: set[int] = set()
        self._refused: set[int] = set()
        self._delivery = self._begin(keeps=True, fresh=asked.new_run)
        self._known = self._delivery.known  # attempts that it was told of

    @property
    def failure(self) -> errors.ArealMetricsError | None:
        """Why it is not told any more."""
        failure = self._delivery.failure
        return None if failure is None else as_ours(failure, self.backend)

    def tell(self, row: Row) -> None:
        """Hand over a commit."""
        attempt = attempt_of(row)
        first = self._succession.owned_from(attempt)
        if first is not None and attempt not in self._known and self._must_go_back(first):
            self._go_back(first)
        self._known.add(attempt)
        self._delivery.tell(row)

    def finish(self) -> None:
        """Tell the open step, and close."""
        self._delivery.finish()

    def join(self, seconds: float) -> None:
        """Wait until it is closed."""
        self._delivery.join(seconds)

    def report(self, deadline: float, *, back: bool) -> Report:
        """Return what was done, once it is closed; `back`: the run has taken something back."""
        self._delivery.join(deadline - time.monotonic())
        self._count()
        held = self._delivery.withheld() | (self._left_behind() if back else set())
        return Report(
            name_of(self.backend),
            target_of(self.backend),
            sent=self._sent,
            skipped=len(self._skipped - held - self._refused),
            refused=len(self._refused),
            withheld=len(held),
            renamed=len(getattr(self.backend, "renamed", ())),
            untold=self._untold,
            refused_steps=ranges(self._refused),
            withheld_steps=ranges(held),
        )

    def _begin(self, *, keeps: bool, fresh: bool = False) -> Delivery:
        asked = self._asked
        return Delivery(
            self.backend,
            run_info(RunDir.open(asked.path), fresh=fresh),
            asked.cursors,
            wait=self._wait,
            queue_rows=float("inf"),
            pauses=PAUSES,
            keeps=keeps,
            telling=telling_of(asked.selection, asked.stats, Renaming(asked.rename)),
        )

    def _left_behind(self) -> set[int]:
        """Return the steps of which the target still shows what the run has taken back."""
        if self.failure is not None or capabilities_of(self.backend).rewinds:
            return set()
        asked = self._asked
        story = story_of(asked.path, selection=asked.selection, names=Renaming(asked.rename).to)
        return left_behind(story, store_for(self.backend, asked.cursors).load())

    def _must_go_back(self, first: int) -> bool:
        """Whether the target holds what an attempt takes back, and can be told so by a new lifetime."""
        floor = self._delivery.floor
        return capabilities_of(self.backend).rewinds and floor is not None and first <= floor

    def _go_back(self, first: int) -> None:
        self._delivery.finish()
        if self._delivery.join(CLOSE_SECONDS) and self._delivery.failure is None:
            self._count()
            self._delivery = self._begin(keeps=False)
            self._delivery.restored(first - 1)

    def _count(self) -> None:
        self._sent += self._delivery.status().sent
        self._untold += self._delivery.untold
        self._skipped |= self._delivery.skipped
        self._refused |= self._delivery.refused
