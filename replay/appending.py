"""Telling an append-only target what lies above the step it holds, and counting what it can take no more."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from eventlog import errors, ranges

from .account import Report
from .acknowledged import PLAIN
from .backends.base import capabilities_of, name_of, target_of, tell_surely, with_lineage
from .cursor import known_as
from .standing import is_anothers, standing, store_for
from .steps import Gate, Order

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .acknowledged import Telling
    from .backends.base import Backend, RunInfo
    from .cursor import Cursor
    from .steps import Row
    from .story import Counts

PAUSES: Final = (0.0, 1.0)  # seconds before the second try and the third


class Commits(Protocol):
    """What is told: a story, or what stands for one."""

    counts: Counts

    def commits(self) -> Iterator[Row]:
        """Yield one row per commit."""
        ...

    def taken_back(self) -> Iterator[Row]:
        """Yield what is not told any more, and nothing replaces."""
        ...


def left_behind(story: Commits, cursor: Cursor) -> set[int]:
    """Return the steps of which a target that takes nothing back still shows what was taken back since."""
    return {row.step for row in story.taken_back() if cursor.holds(row)} - cursor.refused


class Appending:
    """Tells one append-only target what lies above the step it holds."""

    def __init__(
        self, backend: Backend, run: RunInfo, cursors: Path, *, dry_run: bool, telling: Telling = PLAIN
    ) -> None:
        self._backend = backend
        self._run = with_lineage(run, backend, cursors, keeps=not dry_run)
        self._cursors = cursors
        self._dry_run = dry_run
        self._telling = telling
        self._sent = self._untold = 0
        self._unsaved = False
        self._refused: set[int] = set()
        self._skipped: set[int] = set()
        self._withheld: set[int] = set()

    def tell(self, story: Commits) -> Report:
        """Tell it what it lacks; BackendError for a failure that stays, after bounded retries."""
        if not self._dry_run:
            self._backend.open(self._run)
        try:
            if is_anothers(self._backend, self._run):
                raise errors.ConfigError(
                    f"expected a run of {name_of(self._backend)} that nothing but this run was told (with a "
                    f"name or id of its own, or as a new run), got another's: {target_of(self._backend)}"
                )
            self._can = capabilities_of(self._backend)
            self._store = store_for(self._backend, self._cursors, beside=self._run.path / "cursors")
            self._cursor, last = self._begin()
            self._refused_before = frozenset(self._cursor.refused)
            gate = Gate(self._can.order, last_step=last, wait=math.inf)
            for commit in story.commits():
                held = last is not None and commit.step <= last
                if self._is_barred(commit) or (held and not self._is_lacking(commit)):
                    self._pass_over(commit)
                else:
                    self._deliver(gate.put(commit))
            self._deliver(gate.close())
            self._withheld |= left_behind(story, self._cursor)
        finally:
            if not self._dry_run:
                self._backend.close()
        if self._unsaved:
            self._store.save(self._cursor)
        return self._report(story)

    def _begin(self) -> tuple[Cursor, int | None]:
        """Return the cursor and the highest step the target holds; a dry run believes the cursor."""
        if not self._dry_run or self._run.fresh:
            return standing(self._backend, self._store, self._run, telling=self._telling)
        called: Any = getattr(
            self._backend, "called", None
        )  # a service, which is not asked, has no target yet
        found = called and known_as(self._cursors, name_of(self._backend), called(self._run))
        cursor = (found or self._store.load(required=not self._can.reads_back)).copy()
        cursor.told.begin(self._telling)
        last = cursor.last_step
        cursor.settle(-1 if last is None else last, completes=False, says=False)
        return cursor, last

    def _is_lacking(self, commit: Row) -> bool:
        """Whether a target that takes steps in any order lacks a commit below its last step."""
        if self._can.order is not Order.ANY or commit.step in self._refused_before:
            return False
        return not self._cursor.knows(self._shown(commit))

    def _is_barred(self, commit: Row) -> bool:
        """Whether a commit may be there, by a kill, and is not told again: unless that does no harm."""
        return self._cursor.bars(self._shown(commit), completes=self._can.completes)

    def _pass_over(self, commit: Row) -> None:
        if commit.step in self._refused_before:
            self._refused.add(commit.step)
        elif self._cursor.passes(self._shown(commit)):
            self._skipped.add(commit.step)
        else:
            self._cursor.told.miss(commit)
            self._withheld.add(commit.step)

    def _shown(self, commit: Row) -> Row:
        """Return what the target can show of a commit."""
        return commit if self._can.histograms or not commit.histograms else replace(commit, histograms={})

    def _deliver(self, rows: list[Row]) -> None:
        for row in rows:
            if not self._can.histograms:
                self._untold += len(row.histograms)
            if self._dry_run:
                self._sent += 1
                continue
            below = self._cursor.tries(row)
            self._cursor.run_id = getattr(self._backend, "run_id", None)
            self._store.save(self._cursor)
            try:
                told = self._call(row)
            except errors.BackendError:
                self._cursor.fail(row, reads_back=self._can.reads_back)
                self._store.save(self._cursor)
                raise
            if told:
                self._sent += 1
                self._cursor.took(row)
            else:
                self._refused.add(row.step)
                self._cursor.refuse(row)
            self._unsaved = True  # until the next row, but where the target's last step does not tell
            if below or not self._can.reads_back:
                self._store.save(self._cursor)

    def _call(self, row: Row) -> bool:
        """Tell one row, with bounded retries; False when the target will never take it."""
        try:
            tell_surely(self._backend, row, PAUSES, pause=time.sleep)
        except errors.RefusedError:
            return False
        except errors.BackendGoneError:
            raise
        except Exception as error:
            name, target = name_of(self._backend), target_of(self._backend)
            raise errors.BackendError(f"{name} failed at step {row.step}, got {error!r}: {target}") from error
        return True

    def _report(self, story: Commits) -> Report:
        return Report(
            name_of(self._backend),
            target_of(self._backend),
            sent=self._sent,
            skipped=len(self._skipped - self._withheld - self._refused),
            superseded=story.counts.superseded,
            refused=len(self._refused),
            withheld=len(self._withheld),
            renamed=len(getattr(self._backend, "renamed", ())),
            folded=story.counts.folded,
            untold=self._untold,
            superseded_steps=story.counts.superseded_steps,
            refused_steps=ranges(self._refused),
            withheld_steps=ranges(self._withheld),
            dry_run=self._dry_run,
        )
