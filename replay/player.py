"""`play`: tells trackers a recorded run, each exactly what it lacks, in the order of the steps."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from eventlog import RunDir, as_step, errors

from .backends.base import (
    Rewriter,
    RunInfo,
    Selection,
    capabilities_of,
    check_backends,
    name_of,
    store_for,
    target_of,
)
from .console import progress_bar
from .cursor import Cursor
from .steps import Gate, newest
from .story import Story

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from .backends.base import Backend
    from .steps import Row

    Source = Literal["committed", "recomputed"]

_log = logging.getLogger("areal_metrics.replay")

TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Report:
    """What replay did for one target. All counts but the last three are of steps.

    sent:     told now (would be, in a dry run)          skipped: the target had them already
    superseded: of older attempts, not told              refused: the target would not take them
    withheld: can no longer be told to an append-only target (late, or of an attempt that came after it was
              told another); a new run can have them     renamed: keys with another name there
    folded:   values that a later commit of the same step, or a later row of the same commit, gives again: of
              these the last is told
    problems: damage found in the log as it was read, which may have cost any of the rest
    """

    backend: str
    target: str
    sent: int = 0
    skipped: int = 0
    superseded: int = 0
    refused: int = 0
    withheld: int = 0
    renamed: int = 0
    folded: int = 0
    problems: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def damaged(self) -> int:
        """How many problems the log has."""
        return len(self.problems)

    @property
    def complete(self) -> bool:
        """Whether the target now holds all that was selected, of a log without damage."""
        return not (self.refused or self.withheld or self.problems)


def play(
    run_dir: str | os.PathLike[str],
    backends: Sequence[Backend],
    *,
    since: int | None = None,
    until: int | None = None,
    keys: Iterable[str] | None = None,
    attempts: Literal["latest", "all"] = "latest",
    source: Source = "committed",
    cursors: str | os.PathLike[str] | None = None,
    new_run: bool = False,
    dry_run: bool = False,
    progress: bool = False,
) -> list[Report]:
    """Tell the backends what a run committed; playing again tells each only what it lacks.

    `since` and `until` bound the steps (both included), `keys` may be globs. `attempts="all"` also tells
    superseded steps where no later attempt has them; `source="recomputed"` tells what the log says instead of
    what was committed. `cursors` is the folder that remembers what targets took, RUN/cursors by default.
    `new_run` begins anew on every target; `dry_run` only counts; `progress` shows a bar on a terminal.

    A target is told each key once a step: of the rows of one commit, and of several commits of a step, the
    last value; the log keeps the others, and the reports count them (`folded`). Damage in the log does not
    stop the replay: it is in every report's `problems`.

    Every backend is told, whatever befalls another; then the first error is raised, with the others noted.
    """
    selection = _selection(since, until, keys)
    if attempts not in ("latest", "all"):
        raise errors.QueryError(f"expected attempts latest or all, got {attempts!r}")
    path = Path(run_dir)
    check_backends(backends)
    table, damage = _metrics(path, selection, source)
    story = Story(table, superseded=attempts == "all")
    found = RunDir.open(path)
    run = run_info(found, fresh=new_run)
    folder = path / "cursors" if cursors is None else Path(cursors)
    reports = tell_all(story, backends, run, selection, folder, dry_run=dry_run, progress=progress)
    problems = tuple(dict.fromkeys([*damage, *map(str, found.problems)]))
    return [replace(report, problems=problems) for report in reports]


def tell_all(
    story: Story,
    backends: Sequence[Backend],
    run: RunInfo,
    selection: Selection,
    cursors: Path,
    *,
    dry_run: bool = False,
    progress: bool = False,
) -> list[Report]:
    """Tell every backend the story; then raise the first error, if there was one."""
    reports: list[Report] = []
    failed: list[errors.ArealMetricsError] = []
    for backend in backends:
        try:
            with progress_bar(name_of(backend), story.counts.steps, shown=progress) as advance:
                told = _Told(story, advance)
                reports.append(_tell(told, backend, run, selection, cursors, dry_run=dry_run))
        except errors.ArealMetricsError as error:
            if failed:  # the first is raised in the end
                _log.error("%s: %s", name_of(backend), error)
            failed.append(error)
    for other in failed[1:]:
        failed[0].add_note(str(other))
    if failed:
        raise failed[0]
    return reports


def run_info(run: RunDir, *, fresh: bool = False) -> RunInfo:
    """Return what a recorded run says about itself; without a config it is named after its directories."""
    attempts = run.attempts()
    config = next((attempt.config for attempt in reversed(attempts) if attempt.config), {})
    own = config.get("stats_logger") or config
    path = run.path.resolve()
    return RunInfo(
        id=run.id,
        experiment=str(own.get("experiment_name") or path.parent.name or "runs"),
        trial=str(own.get("trial_name") or path.name),
        path=run.path,
        config=config,
        version_info=next(
            (attempt.version_info for attempt in reversed(attempts) if attempt.version_info), {}
        ),
        attempt=attempts[-1].number if attempts else None,
        started=attempts[0].started_us / 1e6 if attempts else 0.0,
        fresh=fresh,
    )


def _metrics(path: Path, selection: Selection, source: Source) -> tuple[pa.Table, list[str]]:
    """Return the metrics and what of the log was damaged."""
    from aggregator import open_run

    with open_run(path, attempts="all") as session:
        table = session.metrics(selection.keys, source=source, since=selection.since, until=selection.until)
        return table, session.problems


def _selection(since: int | None, until: int | None, keys: Iterable[str] | None) -> Selection:
    return Selection(
        None if since is None else as_step(since),
        None if until is None else as_step(until),
        None if keys is None else tuple(sorted({keys} if isinstance(keys, str) else set(keys))),
    )


# -- one backend -----------------------------------------------------------------------------------


def _tell(
    story: _Told, backend: Backend, run: RunInfo, selection: Selection, cursors: Path, *, dry_run: bool
) -> Report:
    if isinstance(backend, Rewriter):
        return _rewrite(story, backend, run, selection, cursors, dry_run=dry_run)
    return _Appending(backend, run, cursors, dry_run=dry_run).tell(story)


def _rewrite(
    story: _Told, backend: Any, run: RunInfo, selection: Selection, cursors: Path, *, dry_run: bool
) -> Report:
    """Write a target as a whole; its cursor is for `info`, the target itself is what counts."""
    try:
        written = backend.rewrite(run, story, selection, dry_run=dry_run)
    except OSError as error:
        raise errors.BackendError(
            f"expected to write to {name_of(backend)}, got {error}: {target_of(backend)}"
        ) from error
    cursor = Cursor(name_of(backend), target_of(backend), story.last_step, story.told)
    store = store_for(backend, cursors)
    if not dry_run and story.last_step is not None and store.load() != cursor:
        store.save(cursor)
    return Report(
        name_of(backend),
        target_of(backend),
        sent=written.sent,
        skipped=written.skipped,
        superseded=story.counts.superseded,
        refused=written.refused,
        renamed=written.renamed,
        folded=story.counts.folded,
        dry_run=dry_run,
    )


class _Appending:
    """Tells one append-only target what lies above the step it holds."""

    def __init__(self, backend: Backend, run: RunInfo, cursors: Path, *, dry_run: bool) -> None:
        self._backend = backend
        self._run = run
        self._cursors = cursors
        self._dry_run = dry_run
        self._sent = self._refused = 0
        self._skipped: set[int] = set()
        self._withheld: set[int] = set()

    def tell(self, story: _Told) -> Report:
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
                self._store.save(self._cursor)
            else:
                self._refused += 1

    def _call(self, row: Row) -> bool:
        """Tell one row, with bounded retries; False when the target will never take it."""
        for attempt in range(TRIES):
            try:
                self._backend.log(row.step, row.metrics, row.time)
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
        self._all_withheld = max(len(self._withheld), self._cursor.withheld)
        if self._all_withheld != self._cursor.withheld and not self._dry_run:
            self._cursor.withheld = self._all_withheld
            self._store.save(self._cursor)

    def _report(self, story: _Told) -> Report:
        return Report(
            name_of(self._backend),
            target_of(self._backend),
            sent=self._sent,
            skipped=len(self._skipped),
            superseded=story.counts.superseded,
            refused=self._refused,
            withheld=self._all_withheld,
            renamed=len(getattr(self._backend, "renamed", ())),
            folded=story.counts.folded,
            dry_run=self._dry_run,
        )


# -- the story on its way out, counted for the progress bar and the cursor ---------------------------


class _Told:
    """A story that notes how far it was read."""

    def __init__(self, story: Story, advance: Callable[[int], None]) -> None:
        self.counts = story.counts
        self.last_step: int | None = None
        self.told: dict[int, float] = {}
        self._story = story
        self._advance = advance

    def commits(self) -> Iterator[Row]:
        yield from self._noted(self._story.commits())

    def __iter__(self) -> Iterator[Row]:
        yield from self._noted(self._story)

    def _noted(self, rows: Iterable[Row]) -> Iterator[Row]:
        steps, self.last_step = 0, None
        for row in rows:
            yield row
            steps += row.step != self.last_step
            self.last_step = row.step
            self.told = newest(self.told, row.commits)
            self._advance(steps)
