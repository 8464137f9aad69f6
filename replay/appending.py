"""Telling an append-only target what lies above the step it holds, and counting what it can take no more."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

from eventlog import errors

from .account import Report
from .backends.base import capabilities_of, name_of, store_for, target_of, tell
from .cursor import Cursor
from .steps import Gate, named

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .backends.base import Backend, RunInfo
    from .steps import Row
    from .story import Counts

TRIES: Final = 3


class Commits(Protocol):
    """What is told: a story, or what stands for one."""

    counts: Counts

    def commits(self) -> Iterator[Row]:
        """Yield one row per commit."""
        ...


class Appending:
    """Tells one append-only target what lies above the step it holds."""

    def __init__(self, backend: Backend, run: RunInfo, cursors: Path, *, dry_run: bool) -> None:
        self._backend = backend
        self._run = run
        self._cursors = cursors
        self._dry_run = dry_run
        self._sent = self._untold = self._all_withheld = 0
        self._refused: set[int] = set()
        self._skipped: set[int] = set()
        self._withheld: set[int] = set()

    def tell(self, story: Commits) -> Report:
        """Tell it what it lacks; BackendError for a failure that stays, after bounded retries."""
        if not self._dry_run:
            self._backend.open(self._run)
        try:
            self._store = store_for(self._backend, self._cursors)
            self._cursor, last = self._begin()
            gate = Gate(capabilities_of(self._backend).order, last_step=last, wait=math.inf)
            for commit in story.commits():
                if last is not None and commit.step <= last:
                    self._pass_over(commit)
                else:
                    self._deliver(gate.put(commit))
            self._deliver(gate.close())
            self._remember_withheld()
        finally:
            if not self._dry_run:
                self._backend.close()
        return self._report(story)

    def _begin(self) -> tuple[Cursor, int | None]:
        """Return the cursor and the highest step the target holds; its own answer wins over the cursor."""
        new = Cursor(name_of(self._backend), target_of(self._backend))
        if self._run.fresh:
            return new, None
        reads_back = capabilities_of(self._backend).reads_back
        cursor = self._store.load(required=not reads_back)
        if self._dry_run:
            return cursor, cursor.last_step
        last = self._backend.last_step()
        if last is None and not reads_back:
            last = cursor.last_step
        if last is not None and capabilities_of(self._backend).completes and cursor.last_step != last:
            last -= 1  # told without an acknowledgement: what of it is missing is taken now
        return (new if last is None else cursor), last

    def _pass_over(self, commit: Row) -> None:
        known = not self._cursor.acknowledged or self._cursor.knows(commit)
        (self._skipped if known else self._withheld).add(commit.step)

    def _deliver(self, rows: list[Row]) -> None:
        for row in rows:
            if not capabilities_of(self._backend).histograms:
                self._untold += len(row.histograms)
            if self._dry_run:
                self._sent += 1
                continue
            if not self._sent:
                self._store.save(
                    self._cursor
                )  # a cursor that cannot be written is found before anything is told
            if self._call(row):
                self._sent += 1
                self._cursor.took(row)
                self._cursor.run_id = getattr(self._backend, "run_id", None)
                self._store.save(self._cursor)
            else:
                self._refused.add(row.step)

    def _call(self, row: Row) -> bool:
        """Tell one row, with bounded retries; False when the target will never take it."""
        for attempt in range(TRIES):
            try:
                tell(self._backend, row)
            except errors.RefusedError:
                return False
            except errors.BackendGoneError:
                raise
            except Exception as error:
                if attempt + 1 == TRIES:
                    name, target = name_of(self._backend), target_of(self._backend)
                    raise errors.BackendError(
                        f"{name} failed at step {row.step}, got {error!r}: {target}"
                    ) from error
            else:
                return True
        return False

    def _remember_withheld(self) -> None:
        before = self._cursor.withheld
        self._all_withheld = self._cursor.withhold(self._withheld)
        if self._cursor.withheld != before and not self._dry_run:
            self._store.save(self._cursor)

    def _report(self, story: Commits) -> Report:
        return Report(
            name_of(self._backend),
            target_of(self._backend),
            sent=self._sent,
            skipped=len(self._skipped),
            superseded=story.counts.superseded,
            refused=len(self._refused),
            withheld=self._all_withheld,
            renamed=len(getattr(self._backend, "renamed", ())),
            folded=story.counts.folded,
            untold=self._untold,
            superseded_steps=story.counts.superseded_steps,
            refused_steps=named(self._refused),
            withheld_steps=self._cursor.withheld,
            dry_run=self._dry_run,
        )
