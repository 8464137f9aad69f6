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
    RunDir,
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

__all__ = ["NAME", "app"]

NAME = None  # its command stands at the top
app = typer.Typer()

_WORDS = {"true": True, "false": False}


@app.command(
    epilog=example(
        "replay runs/a --to tensorboard -o tensorboard.path=tb",
        "replay runs/a --to wandb -o wandb.mode=offline --since 100 --keys 'ppo_actor/*'",
    )
)
def replay(
    run_dir: RunDir,
    to: Annotated[
        list[str],
        typer.Option("--to", metavar="BACKEND", help="tensorboard or wandb; repeatable.", show_default=False),
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
    """Tell a run to trackers.

    Each is told what it lacks of what was committed; doing it again tells nothing twice.

    The counts are of steps, that of folded of values: where a commit or a step gives a key several values,
    the last is told. Exit code 3 when the log is damaged, or when a target refused steps or can no longer
    take them (withheld).
    """
    check_bounds(since, until)
    if "memory" in to:
        raise typer.BadParameter(
            "expected --to tensorboard or wandb, got memory, which ends with the command"
        )
    given = _options(to, options or [])
    from replay import open_backend, play

    reports = play(
        run_dir,
        [open_backend(name, **given[name]) for name in given],
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
    render.rows(_table(reports), as_json=as_json)
    if reports:
        render.damaged(reports[0].problems)
    if any(report.refused or report.withheld for report in reports):
        render.say("some steps were refused or withheld; --new-run tells everything to a new run")
    if not all(report.complete for report in reports):
        raise typer.Exit(3)


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


def _table(reports: Sequence[Any]) -> pa.Table:
    import pyarrow as pa

    from replay import Report

    counts = [field.name for field in dataclasses.fields(Report)]
    counts[counts.index("problems")] = "damaged"
    return pa.Table.from_pylist([{name: getattr(report, name) for name in counts} for report in reports])
