"""Bringing in what other trackers kept."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from . import render
from .options import Json, example

__all__ = ["NAME", "app"]

NAME = None  # its command stands at the top
app = typer.Typer()


class Kind(Enum):
    """Trackers whose files can be read."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


@app.command(
    name="import",
    epilog=example("import logs/tb runs/old", "import wandb/offline-run-20260101_000000-abc runs/b --json"),
)
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A directory of event files, or of a wandb run; or one file.",
            show_default=False,
        ),
    ],
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The new run's directory.", show_default=False)
    ],
    kind: Annotated[
        Kind | None, typer.Option("--from", help="Whose files; seen from them if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a run of what TensorBoard or wandb kept.

    Every point of every file; what a resumed run did again becomes an attempt of its own. The run can then be
    asked, plotted and replayed like any other. Exit code 3 when the files are damaged or hold points that no
    run can have, or when directories within SOURCE hold event files of their own, which are not read; texts
    and media are left out, and named.
    """
    from replay import import_history

    imported = import_history(source, run_dir, kind=None if kind is None else kind.value, progress=True)
    about = dataclasses.asdict(imported)
    if not as_json:  # keys are shown as they are, which headings are not
        about["left_out"] = [{"key": key, "values": count} for key, count in imported.left_out.items()]
    render.document(about, as_json=as_json)
    render.damaged(imported.problems, listing=None)
    if imported.left_out:
        render.say(f"left out, being no numbers: {', '.join(imported.left_out)}")
    if imported.elsewhere:
        render.say(f"not read, being runs of their own: {', '.join(imported.elsewhere)}")
    if not imported.complete:
        raise typer.Exit(3)
