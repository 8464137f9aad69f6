"""`play`: tells trackers a recorded run, each exactly what it lacks, in the order of the steps."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute

from aggregator import progress_bar
from eventlog import RunDir, as_step, errors, fixed, ranges, schema
from eventlog import losses as lost

from .account import Report
from .acknowledged import PLAIN, Acknowledged, Telling
from .appending import Appending
from .backends.base import (
    Rewriter,
    RunInfo,
    Selection,
    as_ours,
    capabilities_of,
    check_backends,
    name_of,
    target_of,
    with_lineage,
)
from .cursor import Cursor
from .metrics import is_count
from .renaming import Renaming
from .standing import store_for
from .statistics import check_stats, compute
from .story import Story
from .turn import in_turn

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from eventlog import Loss, Producer

    from .backends.base import Backend
    from .renaming import Rules
    from .steps import Row

    Lost = tuple[Producer, Loss]
    Source = Literal["committed", "recomputed"]

pc: Any = pyarrow.compute  # its functions are made at import: no type checker sees them

_log = logging.getLogger("areal_metrics.replay")
_MOST_NAMED: Final = 10


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
    failed: list[errors.ArealMetricsError] | None = None,
) -> list[Report]:
    """Tell the backends what a run committed; playing again tells each only what it lacks.

    `since` and `until` bound the steps (both included), `keys` may be globs. `attempts="all"` also tells
    superseded steps where no later attempt has them; `source="recomputed"` tells what the log says instead of
    what was committed. `stats` adds statistics of the recorded values of every selected key, under
    `KEY/STATISTIC`: those of `Session.reduce` (p99, std …), and "histogram" for targets that show them; a
    name that was committed keeps its value.
    `rename` maps names by regular expressions. `cursors` is the folder that remembers what targets took,
    RUN/cursors by default. `new_run` begins anew on every target; `dry_run` only counts; `progress` shows a
    bar on a terminal.

    A target is told each key once a step: of the rows of one commit, and of several commits of a step, the
    last value; the log keeps the others, and the reports count them (`folded`). Damage in the log does not
    stop the replay: it is in every report's `problems`.

    Every backend is told, whatever befalls another; then the first error is raised, with the others noted.
    With a list as `failed` the errors are put there instead, and the reports of the other backends returned.
    """
    selection = select(since, until, keys)
    if attempts not in ("latest", "all"):
        raise errors.QueryError(f"expected attempts latest or all, got {attempts!r}")
    path, names = fixed(run_dir), Renaming(rename)
    check_backends(backends)
    stats = check_stats(stats)
    table, committed, damage, losses = _metrics(path, selection, source)
    streams = {schema.Stream.COMMITS, *([schema.Stream.RECORDS] if stats or source == "recomputed" else [])}
    losses = lost.concerning(losses, streams, selection.since, selection.until)
    found = RunDir.open(path)
    histograms, partial = None, _unsaid(committed, table, superseded=attempts == "all")
    if stats:
        extra = compute(path, table, stats, selection, attempts)
        table = pa.concat_tables([table.select(extra.rows.column_names), extra.rows])
        partial += extra.partial
        histograms = {of: {names.to(n): h for n, h in some.items()} for of, some in extra.histograms.items()}
    names.check(table["key"].unique().to_pylist())
    story = Story(
        table, superseded=attempts == "all", histograms=histograms, names=names.to, committed=committed
    )
    run = run_info(found, fresh=new_run)
    folder = path / "cursors" if cursors is None else fixed(cursors)
    reports = tell_all(
        story,
        backends,
        run,
        selection,
        folder,
        telling=telling_of(selection, stats, names, source),
        dry_run=dry_run,
        progress=progress,
        failed=failed,
    )
    problems = tuple(dict.fromkeys([*damage, *map(str, found.problems)]))
    about: dict[str, Any] = {
        "problems": problems,
        "partial": partial,
        "lost": lost.number(losses),
        "losses": tuple(lost.lines(losses)),
        "uncommitted": 0 if story.counts.steps else uncommitted(path),
    }
    return [replace(report, **about) for report in reports]


def tell_all(
    story: Story,
    backends: Sequence[Backend],
    run: RunInfo,
    selection: Selection,
    cursors: Path,
    *,
    telling: Telling = PLAIN,
    dry_run: bool = False,
    progress: bool = False,
    failed: list[errors.ArealMetricsError] | None = None,
) -> list[Report]:
    """Tell every backend the story; then raise the first error, or leave all in `failed`."""
    reports: list[Report] = []
    found: list[errors.ArealMetricsError] = []
    for backend in backends:
        try:
            with progress_bar(name_of(backend), story.counts.steps, shown=progress) as advance:
                told = _Told(story, telling, advance)
                reports.append(_tell(told, backend, run, selection, cursors, dry_run=dry_run))
        except (Exception, SystemExit) as error:  # noqa: BLE001  (somebody else's code: whatever it raises)
            if found and failed is None:  # the first is raised in the end
                _log.error("%s: %s", name_of(backend), error)
            found.append(as_ours(error, backend))
    raise_or_leave(found, failed)
    return reports


def raise_or_leave(
    found: Sequence[errors.ArealMetricsError], failed: list[errors.ArealMetricsError] | None
) -> None:
    """Put errors where somebody wants them all, else raise the first, with the others noted."""
    if failed is not None:
        failed += found
    elif found:
        for other in found[1:]:
            found[0].add_note(str(other))
        raise found[0]


def story_of(
    run_dir: Path,
    since: int | None = None,
    selection: Selection | None = None,
    names: Callable[[str], str] = str,
) -> Story:
    """Return what a run has committed by now, from a step on or of a selection."""
    return Story(_metrics(run_dir, selection or Selection(since), "committed")[0], names=names)


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


def _metrics(
    path: Path, selection: Selection, source: Source
) -> tuple[pa.Table, pa.Table, list[str], list[Lost]]:
    """Return the metrics by a source, those that were committed, and what of the log is damaged, and lost."""
    from aggregator import open_run

    keys, since, until = selection.keys, selection.since, selection.until
    with open_run(path, attempts="all") as session:
        table = in_turn(session.metrics(keys, source=source, since=since, until=until), session)
        if source == "committed":
            return table, table, session.problems, session.losses
        try:
            committed = session.metrics(keys, since=since, until=until)
        except errors.UnansweredError:  # they were recorded alone
            committed = session.metrics([])
        said = table.filter(table["value"].is_valid())
        return said, committed, session.problems, session.losses


def _unsaid(committed: pa.Table, table: pa.Table, *, superseded: bool) -> int:
    """Count, and name, what of a step was committed and is not told, or told of a part of the records."""
    if committed is table:
        return 0
    if not superseded:
        committed = committed.filter(pc.invert(committed["superseded"]))
    keys = {*committed["key"].unique().to_pylist(), *table["key"].unique().to_pylist()}
    unsaid = _named(_places(committed) - _places(table), keys)
    if not superseded:
        table = table.filter(pc.invert(table["superseded"]))
    if unsaid[0]:
        _log.warning("the log cannot say %d metrics that were committed, they are not told: %s", *unsaid)
    partly = _named(_places(table.filter(table["incomplete"])), keys)
    if partly[0]:
        _log.warning("the log lacks records of %d metrics, they are told of what is left: %s", *partly)
    return unsaid[0] + partly[0]


def _named(places: set[tuple[str, int]], keys: Collection[str]) -> tuple[int, str]:
    """Return how many metrics of a step there are, without the counts beside means, and name them."""
    some = sorted((key, step) for key, step in places if not is_count(key, keys))
    groups = islice(groupby(some, key=lambda place: place[0]), _MOST_NAMED)
    steps = ((key, ranges((step for _, step in own), most=_MOST_NAMED)) for key, own in groups)
    return len(some), ", ".join(f"{key} (steps {words})" for key, words in steps)


def _places(table: pa.Table) -> set[tuple[str, int]]:
    pairs = table.select(["key", "step"]).group_by(["key", "step"]).aggregate([])
    return set(zip(pairs["key"].to_pylist(), pairs["step"].to_pylist(), strict=True))


def uncommitted(path: Path) -> int:
    """Return how many windows were recorded of a run that ended without a committed metric; else 0.

    What a run that goes on or was killed has not committed is its tail, and no loss.
    """
    from aggregator import open_run

    try:
        with open_run(path, attempts="all") as session:
            about = session.info()
    except errors.NotARunError:  # nothing yet
        return 0
    over = all(process["ended"] for process in about["producers"])
    return sum(process["windows"] for process in about["producers"]) if over and not about["metrics"] else 0


def select(since: int | None, until: int | None, keys: Iterable[str] | None) -> Selection:
    """Return what is selected; StepError for what is no step."""
    return Selection(
        None if since is None else as_step(since),
        None if until is None else as_step(until),
        None if keys is None else tuple(sorted({keys} if isinstance(keys, str) else set(keys))),
    )


def telling_of(
    selection: Selection, stats: Iterable[str], names: Renaming, source: Source = "committed"
) -> Telling:
    """Return in words as what commits are told."""
    named = str(names) if source == "committed" else f"{source} {names}"
    return Telling(", ".join(selection.keys or ()), ", ".join(sorted(set(stats))), named)


def check_apart(
    told: Mapping[str, tuple[Path, Sequence[Backend]]],
    cursors: str | os.PathLike[str] | None = None,
) -> None:
    """ConfigError where several runs, given by name, would be told to one run of a service."""
    seen: dict[str, str] = {}
    for name, (path, backends) in told.items():
        try:
            run = run_info(RunDir.open(path))
        except errors.ArealMetricsError:  # said when it is told
            continue
        folder = path / "cursors" if cursors is None else fixed(cursors)
        for backend in backends:
            destination: Any = getattr(backend, "destination", None)
            if destination is None or isinstance(backend, Rewriter):
                continue
            there = destination(with_lineage(run, backend, folder, keeps=False))
            if (other := seen.setdefault(f"{name_of(backend)} {there}", name)) != name:
                raise errors.ConfigError(
                    f"expected runs that have their own in {name_of(backend)} (id_suffix unique for wandb, "
                    f"or an id for each, keeps them apart), got {other} and {name} for one: {there}"
                )


# -- one backend -----------------------------------------------------------------------------------


def _tell(
    story: _Told, backend: Backend, run: RunInfo, selection: Selection, cursors: Path, *, dry_run: bool
) -> Report:
    if isinstance(backend, Rewriter):
        return _rewrite(story, backend, run, selection, cursors, dry_run=dry_run)
    return Appending(backend, run, cursors, dry_run=dry_run, telling=story.telling).tell(story)


def _rewrite(
    story: _Told, backend: Any, run: RunInfo, selection: Selection, cursors: Path, *, dry_run: bool
) -> Report:
    """Write a target as a whole; its cursor is for `info`, the target itself is what counts."""
    about = with_lineage(run, backend, cursors, keeps=not dry_run)
    try:
        written = backend.rewrite(about, story, selection, dry_run=dry_run)
    except OSError as error:
        raise errors.BackendError(
            f"expected to write to {name_of(backend)} (another place can be given as its path), "
            f"got {error.strerror or error}: {target_of(backend)}"
        ) from error
    cursor = Cursor(name_of(backend), target_of(backend), story.last_step, story.acknowledged)
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
        kept=written.kept,
        renamed=written.renamed,
        folded=story.counts.folded,
        untold=0 if capabilities_of(backend).histograms else story.histograms,
        superseded_steps=story.counts.superseded_steps,
        refused_steps=written.refused_steps,
        kept_steps=written.kept_steps,
        dry_run=dry_run,
    )


# -- the story on its way out, counted for the progress bar and the cursor ---------------------------


class _Told:
    """A story that notes how far it was read."""

    def __init__(self, story: Story, telling: Telling, advance: Callable[[int], object]) -> None:
        self.counts = story.counts
        self.telling = telling
        self.last_step: int | None = None
        self.acknowledged = Acknowledged()
        self.histograms = 0
        self._story = story
        self._advance = advance

    def commits(self) -> Iterator[Row]:
        yield from self._noted(self._story.commits())

    def __iter__(self) -> Iterator[Row]:
        self.acknowledged = Acknowledged()
        self.acknowledged.begin(self.telling)
        for row in self._noted(self._story):
            yield row
            self.acknowledged.take(row)

    def taken_back(self) -> Iterator[Row]:
        return self._story.taken_back()

    def knows(self, step: int, time: float) -> bool:
        """Whether the log has a commit of this step and time."""
        return self._story.knows(step, time)

    def _noted(self, rows: Iterable[Row]) -> Iterator[Row]:
        steps, self.last_step, self.histograms = 0, None, 0
        for row in rows:
            yield row
            self.histograms += len(row.histograms)
            steps += row.step != self.last_step
            self.last_step = row.step
            self._advance(steps)
