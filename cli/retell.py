"""Telling a run again, to any tracker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from . import render
from .options import (
    Attempts,
    AttemptsOption,
    Json,
    KeysOption,
    Since,
    Source,
    SourceOption,
    Until,
    asked_wrongly,
    check_bounds,
    example,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from replay import Backend, Report

__all__ = ["NAME", "app"]

NAME = None  # its command stands at the top
app = typer.Typer()

OWN = "stats_logger."  # how what changes a config begins
_ALWAYS = ("backend", "target", "sent", "skipped")
_TOLD = ("sent", "skipped", "superseded", "refused", "withheld", "kept")  # each says that there is something
_TRACKERS = ("swanlab", "tensorboard", "trackio", "wandb")


class _Replay(typer.core.TyperCommand):
    """The command, whose help says what each backend takes."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from replay import backend_options

        super().format_options(ctx, formatter)
        with formatter.section("Options of the backends (-o BACKEND.OPTION=VALUE)"):
            formatter.write_dl([(name, ", ".join(backend_options(name))) for name in _TRACKERS])


@app.command(
    cls=_Replay,
    epilog=example(
        "replay runs/a --to tensorboard -o tensorboard.path=tb",
        "replay runs/a --to wandb --to swanlab --since 100 --keys 'ppo_actor/*'",
        "replay runs/a --to wandb -o wandb.mode=offline --to trackio -o trackio.project=grpo",
        "replay runs/* --to trackio",
        "replay runs/a --to tensorboard --to trackio --follow",
        "replay runs/a --to wandb --stat p99 --stat histogram --rename '^ppo_actor/=actor/'",
        "replay runs/a --to tensorboard:mine -o tensorboard:mine.path=tb --to tensorboard",
        "replay runs/a -c stats_logger.yaml -o stats_logger.wandb.mode=offline",
    ),
)
def replay(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of the runs.", show_default=False)
    ],
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="BACKEND[:NAME]",
            help="swanlab, tensorboard, trackio or wandb; repeatable, with names for several of one kind.",
            show_default=False,
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="BACKEND.OPTION=VALUE",
            help="An option of a backend, named as in --to; repeatable, also for lists.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="A YAML file with stats_logger: tell all backends that it switches on, too. "
            "-o stats_logger.… changes it.",
            show_default=False,
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    keys: KeysOption = None,
    source: SourceOption = Source.COMMITTED,
    attempts: AttemptsOption = Attempts.LATEST,
    stat: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATISTIC",
            help="Tell this of every recorded key, from the payload: p99, std, … or histogram; repeatable.",
            show_default=False,
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=NAME",
            help="Rename what matches a regular expression; repeatable, in order.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Tell a run while it is written, until it has finished; Ctrl-C ends it, too."
        ),
    ] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="With --follow: how long a step stays open.")
    ] = 2.0,
    give_up: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, help="With --follow: end after so long without a sign of life."
        ),
    ] = 600.0,
    cursors: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where it is kept what targets have taken; RUN_DIR/cursors by default.",
            show_default=False,
        ),
    ] = None,
    new_run: Annotated[
        bool, typer.Option("--new-run", help="Tell all to a new run on every target.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be told.")] = False,
    as_json: Json = False,
) -> None:
    """Tell runs to trackers.

    Each tracker is told what it lacks of what was committed; doing it again tells nothing twice.

    The counts are of steps; that of folded of values: where a commit or a step gives a key several
    values, the last is told; that of untold of histograms a target cannot show; that of partial of
    statistics whose values are not all kept, and of metrics that cannot be recomputed, or not of all
    ranks; that of lost of commits (and recorded windows) that never reached the log; that of uncommitted
    of recorded windows, where a run committed nothing at all.

    Of several runs each is told, whatever befalls another; a path given for a target gets a directory for
    each of them, and the exit code is 1 when one failed. Exit code 3 when the log is damaged, when a target
    refused steps, can no longer take them (withheld) or holds some that the log does not have (kept: they
    stay), or when something is untold, partial, lost or uncommitted.

    With --follow a run need not have begun yet; offline files of wandb and swanlab are written at the end,
    and TensorBoard's lie in RUN_DIR/live/tensorboard. With --stat, too, a step is told --wait seconds after
    its last commit, when its values are there.
    """
    from aggregator import labels
    from replay import check_apart, check_stats

    check_bounds(since, until)
    overrides = [each.removeprefix(OWN) for each in options or () if each.startswith(OWN)]
    given = _options(to or [], [each for each in options or () if not each.startswith(OWN)])
    _check(
        given, run_dirs, config, overrides,
        follow=follow, dry_run=dry_run, attempts=attempts, source=source,
    )  # fmt: skip
    asked: dict[str, Any] = {
        "since": since,
        "until": until,
        "keys": keys or None,
        "stats": stat or [],
        "rename": list(map(_rule, rename or ())),
        "cursors": cursors,
        "new_run": new_run,
    }
    if follow:
        asked |= {"wait": wait, "give_up": give_up}
    else:
        asked |= {"attempts": attempts.value, "source": source.value, "dry_run": dry_run, "progress": True}
    runs = dict(zip(labels(run_dirs), run_dirs, strict=True))
    told = {name: _backends(given, config, overrides, name if len(runs) > 1 else "") for name in runs}
    check_stats(asked["stats"])
    if not new_run:  # each has a name of its own
        check_apart({name: (runs[name], backends) for name, backends in told.items()}, cursors)
    found, failed = _play_all(runs, told, follow=follow, **asked)
    if any(found.values()):
        _tell(found, as_json=as_json)
    for error in failed:
        render.complain(error)
    if failed:
        raise typer.Exit(1)
    if not all(report.complete for reports in found.values() for report in reports):
        raise typer.Exit(3)


def _check(
    given: dict[str, dict[str, Any]],
    run_dirs: Sequence[Path],
    config: Path | None,
    overrides: Sequence[str],
    *,
    follow: bool,
    dry_run: bool,
    attempts: Attempts,
    source: Source,
) -> None:
    """Refuse what does not go together."""
    if not given and config is None:
        raise typer.BadParameter("expected --to BACKEND or -c FILE, got neither")
    if overrides and config is None:
        raise typer.BadParameter(f"expected -c FILE for -o {OWN}{overrides[0]}, got none")
    if wrong := [each for each in overrides if "=" not in each]:
        raise typer.BadParameter(f"expected -o {OWN}…=VALUE, got {OWN + wrong[0]!r}")
    if strange := [name for name in given if name.partition(":")[0] not in _TRACKERS]:
        raise typer.BadParameter(f"expected --to {', '.join(_TRACKERS)}, got {strange[0]!r}")
    _check_different(given)
    if follow and len(run_dirs) > 1:
        raise typer.BadParameter(f"expected one run with --follow, got {len(run_dirs)}")
    if follow and (dry_run or attempts is not Attempts.LATEST or source is not Source.COMMITTED):
        raise typer.BadParameter(
            "expected --follow without --attempts, --source and --dry-run, "
            "which need the whole run: replay it once it has finished"
        )


def _check_different(given: dict[str, dict[str, Any]]) -> None:
    """Refuse two targets that cannot but be the same."""
    seen: dict[str, str] = {}
    for name, chosen in given.items():
        path = chosen.get("path")
        place = chosen | ({"path": Path(path).resolve()} if isinstance(path, str) else {})
        other = seen.setdefault(f"{name.partition(':')[0]} {sorted(place.items())}", name)
        if other != name:
            raise typer.BadParameter(
                f"expected different targets, got {other} and {name} with the same options"
            )


def _play_all(
    runs: dict[str, Path], told: dict[str, list[Backend]], *, follow: bool, **asked: Any
) -> tuple[dict[str, list[Report]], list[str]]:
    """Tell every run, whatever befalls another; return the reports, and what failed."""
    from eventlog import ArealMetricsError

    found: dict[str, list[Report]] = {}
    failed: list[str] = []
    for name, run_dir in runs.items():
        own: list[ArealMetricsError] = []
        before = f"{name}: " if len(runs) > 1 else ""
        try:
            found[name] = _play(run_dir, told[name], follow=follow, failed=own, **asked)
        except (ArealMetricsError, OSError) as exc:
            if len(runs) == 1 or asked_wrongly(exc):
                raise
            failed.append(f"{before}{exc}")
        failed += [f"{before}{error}" for error in own]
    return found, failed


def _play(run_dir: Path, backends: Sequence[Backend], *, follow: bool, **asked: Any) -> list[Report]:
    import replay

    if not follow:
        return replay.play(run_dir, backends, **asked)
    render.say(f"following {run_dir}; Ctrl-C ends it")
    return replay.follow(run_dir, backends, **asked)


def _backends(
    given: dict[str, dict[str, Any]], config: Path | None, overrides: Sequence[str], run: str
) -> list[Backend]:
    """Return who is told of a run; one among several gets a directory of its own in each path."""
    from replay import configured, load_config, open_backend

    backends: list[Backend] = []
    for name, chosen in given.items():
        path = chosen.get("path")
        own = {"path": str(Path(path, run))} if path and isinstance(path, str) else {}
        backends.append(open_backend(name.partition(":")[0], **chosen | own))
    if config is not None:
        loaded = load_config(config, [f"{OWN}{each}" for each in overrides])
        if loaded.tensorboard.path is not None:
            loaded.tensorboard.path = str(Path(loaded.tensorboard.path, run))
        if loaded.swanlab.logdir is not None:
            loaded.swanlab.logdir = str(Path(loaded.swanlab.logdir, run))
        backends += configured(loaded)
    if not backends:
        raise typer.BadParameter(f"expected a file that switches a backend on, got none: {config}")
    return backends


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, new = text.rpartition("=")
    if not equals:
        raise typer.BadParameter(f"expected --rename PATTERN=NAME, got {text!r}")
    return pattern, new


def _tell(found: dict[str, list[Report]], *, as_json: bool) -> None:
    render.rows(_table(found, as_json=as_json), as_json=as_json)
    for name, reports in found.items():
        if reports:
            render.damaged(reports[0].problems)
            render.lost(reports[0].losses)
        if reports and not any(getattr(report, what) for report in reports for what in _TOLD):
            _say_nothing(f"{name}: " if len(found) > 1 else "", reports[0].uncommitted)
    every = [report for reports in found.values() for report in reports]
    for report in every:
        for what in ("superseded", "refused", "withheld", "kept"):
            if steps := getattr(report, f"{what}_steps"):
                render.say(f"{report.backend}: {what}: steps {steps}")
    if any(report.withheld for report in every):
        render.say("some steps were withheld; --new-run tells everything to a new run")
    if any(report.refused for report in every):
        render.say("some steps were refused: these targets will never take them, the log has them")
    if any(report.kept for report in every):
        render.say("some steps lie at a target and not in the log, which has lost them: there they stay")
    if untold := sorted({report.backend for report in every if report.untold}):
        render.say(f"histograms cannot be told to {', '.join(untold)}")
    if any(report.partial for report in every):
        render.say("the log does not hold all values: some numbers are of those that are left, or absent")


def _say_nothing(before: str, windows: int) -> None:
    """Say why a run had nothing to tell."""
    why = "no metric of what is selected was committed"
    if windows:
        why = (
            f"{windows} windows were recorded and no metric was committed; "
            "--source recomputed tells windows that were recorded with a step (set_step)"
        )
    render.say(f"{before}nothing to tell: {why}")


def _options(names: Sequence[str], settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each backend, as text; one that is given several times is a list."""
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for setting in settings:
        path, equals, text = setting.partition("=")
        name, dot, option = path.partition(".")
        if not (equals and dot and option):
            raise typer.BadParameter(f"expected -o BACKEND.OPTION=VALUE, got {setting!r}")
        if name not in given:
            hint = f"; what -c FILE says is changed by -o {OWN}{setting}" if name in _TRACKERS else ""
            raise typer.BadParameter(f"expected -o of a backend named by --to, got {setting!r}{hint}")
        value: Any = text
        if option in given[name]:
            before = given[name][option]
            value = [*(before if isinstance(before, list) else [before]), value]
        given[name][option] = value
    return given


def _table(found: dict[str, list[Report]], *, as_json: bool) -> pa.Table:
    import pyarrow as pa

    from replay import Report

    counts = [field.name for field in dataclasses.fields(Report) if field.name != "losses"]
    counts[counts.index("problems")] = "damaged"
    every = [report for reports in found.values() for report in reports]
    if not as_json:  # steps are said on stderr, a line each; of the rest only what there is
        counts = [
            name
            for name in counts
            if name in _ALWAYS or (not name.endswith("_steps") and any(getattr(each, name) for each in every))
        ]
    rows = [
        ({} if len(found) == 1 else {"run": run}) | {name: getattr(report, name) for name in counts}
        for run, reports in found.items()
        for report in reports
    ]
    return pa.Table.from_pylist(rows)
