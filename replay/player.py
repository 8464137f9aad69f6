"""`play`: tells trackers a recorded run, each exactly what it lacks, in the order of the steps."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from eventlog import RunDir, as_step, errors

from .account import Report
from .appending import Appending
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
from .renaming import Renaming
from .statistics import compute
from .steps import newest
from .story import Story

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .backends.base import Backend
    from .renaming import Rules
    from .steps import Row

    Source = Literal["committed", "recomputed"]

_log = logging.getLogger("areal_metrics.replay")


def play(
    run_dir: str | os.PathLike[str],
    backends: Sequence[Backend],
    *,
    since: int | None = None,
    until: int | None = None,
    keys: Iterable[str] | None = None,
    attempts: Literal["latest", "all"] = "latest",
    source: Source = "committed",
    stats: Iterable[str] = (),
    rename: Rules = (),
    cursors: str | os.PathLike[str] | None = None,
    new_run: bool = False,
    dry_run: bool = False,
    progress: bool = False,
) -> list[Report]:
    """Tell the backends what a run committed; playing again tells each only what it lacks.

    `since` and `until` bound the steps (both included), `keys` may be globs. `attempts="all"` also tells
    superseded steps where no later attempt has them; `source="recomputed"` tells what the log says instead of
    what was committed. `stats` adds statistics of the recorded values of every selected key, under
    `KEY/STATISTIC`: those of `Session.reduce` (p99, std …), and "histogram" for targets that show them.
    `rename` maps names by regular expressions. `cursors` is the folder that remembers what targets took,
    RUN/cursors by default. `new_run` begins anew on every target; `dry_run` only counts; `progress` shows a
    bar on a terminal.

    A target is told each key once a step: of the rows of one commit, and of several commits of a step, the
    last value; the log keeps the others, and the reports count them (`folded`). Damage in the log does not
    stop the replay: it is in every report's `problems`.

    Every backend is told, whatever befalls another; then the first error is raised, with the others noted.
    """
    selection = select(since, until, keys)
    if attempts not in ("latest", "all"):
        raise errors.QueryError(f"expected attempts latest or all, got {attempts!r}")
    path, names = Path(run_dir), Renaming(rename)
    check_backends(backends)
    table, damage = _metrics(path, selection, source)
    found = RunDir.open(path)
    histograms, partial = None, 0
    if stats := [stats] if isinstance(stats, str) else list(stats):
        extra = compute(path, table, stats, selection, attempts)
        table = pa.concat_tables([table.select(extra.rows.column_names), extra.rows])
        partial = extra.partial
        histograms = {of: {names.to(n): h for n, h in some.items()} for of, some in extra.histograms.items()}
    story = Story(names.table(table), superseded=attempts == "all", histograms=histograms)
    run = run_info(found, fresh=new_run)
    folder = path / "cursors" if cursors is None else Path(cursors)
    reports = tell_all(story, backends, run, selection, folder, dry_run=dry_run, progress=progress)
    problems = tuple(dict.fromkeys([*damage, *map(str, found.problems)]))
    return [replace(report, problems=problems, partial=partial) for report in reports]


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


def story_of(run_dir: Path) -> Story:
    """Return what a run has committed by now."""
    return Story(_metrics(run_dir, Selection(), "committed")[0])


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
        return table.filter(table["value"].is_valid()), session.problems  # null: the log cannot say it


def select(since: int | None, until: int | None, keys: Iterable[str] | None) -> Selection:
    """Return what is selected; StepError for what is no step."""
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
    return Appending(backend, run, cursors, dry_run=dry_run).tell(story)


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
        untold=0 if capabilities_of(backend).histograms else story.histograms,
        superseded_steps=story.counts.superseded_steps,
        dry_run=dry_run,
    )


# -- the story on its way out, counted for the progress bar and the cursor ---------------------------


class _Told:
    """A story that notes how far it was read."""

    def __init__(self, story: Story, advance: Callable[[int], None]) -> None:
        self.counts = story.counts
        self.last_step: int | None = None
        self.told: dict[int, float] = {}
        self.histograms = 0
        self._story = story
        self._advance = advance

    def commits(self) -> Iterator[Row]:
        yield from self._noted(self._story.commits())

    def __iter__(self) -> Iterator[Row]:
        yield from self._noted(self._story)

    def _noted(self, rows: Iterable[Row]) -> Iterator[Row]:
        steps, self.last_step, self.histograms = 0, None, 0
        for row in rows:
            yield row
            self.histograms += len(row.histograms)
            steps += row.step != self.last_step
            self.last_step = row.step
            self.told = newest(self.told, row.commits)
            self._advance(steps)
