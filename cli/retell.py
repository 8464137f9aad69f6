"""Telling a run again, to any tracker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import render
from .options import (
    Attempts,
    AttemptsOption,
    Json,
    Since,
    Source,
    SourceOption,
    Until,
    check_bounds,
    example,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from replay import Report

__all__ = ["NAME", "app"]

NAME = None  # its command stands at the top
app = typer.Typer()

_WORDS = {"true": True, "false": False}


@app.command(
    epilog=example(
        "replay runs/a --to tensorboard -o tensorboard.path=tb",
        "replay runs/a --to wandb --to swanlab --since 100 --keys 'ppo_actor/*'",
        "replay runs/a --to wandb -o wandb.mode=offline --to trackio -o trackio.project=grpo",
        "replay runs/* --to trackio",
    )
)
def replay(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of the runs.", show_default=False)
    ],
    to: Annotated[
        list[str],
        typer.Option(
            "--to",
            metavar="BACKEND",
            help="swanlab, tensorboard, trackio or wandb; repeatable.",
            show_default=False,
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="BACKEND.NAME=VALUE",
            help="An option of a backend; repeatable, also for lists.",
            show_default=False,
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Keys to tell, globs too; repeatable.", show_default=False),
    ] = None,
    source: SourceOption = Source.COMMITTED,
    attempts: AttemptsOption = Attempts.LATEST,
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

    The counts are of steps, that of folded of values: where a commit or a step gives a key several values,
    the last is told. Of several runs each is told, whatever befalls another; a path given for a target gets
    a directory for each of them, and the exit code is 1 when one failed. Exit code 3 when the log is damaged,
    or when a target refused steps or can no longer take them (withheld).
    """
    check_bounds(since, until)
    if "memory" in to:
        raise typer.BadParameter(
            "expected --to swanlab, tensorboard, trackio or wandb, got memory, which ends with the command"
        )
    given = _options(to, options or [])
    found: dict[str, list[Report]] = {}
    failed = 0
    for name, run_dir in _named(run_dirs).items():
        try:
            found[name] = _play(
                run_dir,
                given if len(run_dirs) == 1 else _own(given, name),
                since=since,
                until=until,
                keys=keys or None,
                attempts=attempts.value,
                source=source.value,
                cursors=cursors,
                new_run=new_run,
                dry_run=dry_run,
                progress=True,
            )
        except Exception as exc:
            from eventlog import ArealMetricsError

            if len(run_dirs) == 1 or not isinstance(exc, ArealMetricsError | OSError):
                raise
            failed += 1
            render.complain(f"{exc}; the other runs are told")
    _tell(found, as_json=as_json)
    if failed:
        raise typer.Exit(1)
    if not all(report.complete for reports in found.values() for report in reports):
        raise typer.Exit(3)


def _play(run_dir: Path, backends: dict[str, dict[str, Any]], **options: Any) -> list[Report]:
    from replay import open_backend, play

    return play(run_dir, [open_backend(name, **chosen) for name, chosen in backends.items()], **options)


def _named(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """Name runs by as many last parts of their paths as tell them apart."""
    from aggregator import labels

    return dict(zip(labels(run_dirs), run_dirs, strict=True))


def _own(given: dict[str, dict[str, Any]], run: str) -> dict[str, dict[str, Any]]:
    """Give a run a directory of its own in each path that targets were given."""
    return {
        name: {
            option: str(Path(value, run)) if option == "path" else value for option, value in chosen.items()
        }
        for name, chosen in given.items()
    }


def _tell(found: dict[str, list[Report]], *, as_json: bool) -> None:
    render.rows(_table(found), as_json=as_json)
    for reports in found.values():
        if reports:
            render.damaged(reports[0].problems)
    if any(report.refused or report.withheld for reports in found.values() for report in reports):
        render.say("some steps were refused or withheld; --new-run tells everything to a new run")


def _options(names: Sequence[str], settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each backend; an option given several times is a list."""
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for setting in settings:
        path, equals, text = setting.partition("=")
        name, dot, option = path.partition(".")
        if not (equals and dot and option):
            raise typer.BadParameter(f"expected -o BACKEND.NAME=VALUE, got {setting!r}")
        if name not in given:
            raise typer.BadParameter(f"expected -o of a backend named by --to, got {setting!r}")
        value: Any = _WORDS.get(text, text)
        if option in given[name]:
            before = given[name][option]
            value = [*(before if isinstance(before, list) else [before]), value]
        given[name][option] = value
    return given


def _table(found: dict[str, list[Report]]) -> pa.Table:
    import pyarrow as pa

    from replay import Report

    counts = [field.name for field in dataclasses.fields(Report)]
    counts[counts.index("problems")] = "damaged"
    rows = [
        ({} if len(found) == 1 else {"run": run}) | {name: getattr(report, name) for name in counts}
        for run, reports in found.items()
        for report in reports
    ]
    return pa.Table.from_pylist(rows)
