"""One HTML page that tells a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import render
from .options import Attempts, Keys, RunDir, check_output, example
from .query import opened

__all__ = ["NAME", "app"]

NAME = None  # its command stands at the top
app = typer.Typer()


@app.command(epilog=example("report runs/a", "report runs/a 'ppo_actor/*' 'timeperf/*' -o actor.html"))
def report(
    run_dir: RunDir,
    patterns: Keys = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The .html to write; RUN_DIR.html by default.",
            show_default=False,
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's title.", show_default=False)] = None,
) -> None:
    """Write a run as one HTML page (extra: report).

    Summary, curves, distributions over the steps, timings by rank, evaluations, losses and attempts. The page
    is interactive and needs no network.
    """
    path = output or run_dir.resolve().with_name(f"{run_dir.resolve().name}.html")
    check_output(path)
    from replay import plots

    with opened(run_dir, None, Attempts.LATEST) as session:
        plots.report(session, path, keys=patterns or None, title=title, progress=True)
        render.say(f"wrote {path}")
