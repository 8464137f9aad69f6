"""Pictures of runs, written to a PNG or SVG file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import render
from .options import Attempts, Json, Keys, More, RunDir, Since, Until, check_bounds, example
from .query import opened

__all__ = ["NAME", "app"]

NAME = "plot"
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def plot() -> None:
    """Draw runs (extra: plots)."""


@app.command(
    epilog=example(
        "plot curves runs/a rollout/reward -o reward.png",
        "plot curves runs/a 'ppo_actor/*/avg' --with runs/b --smooth 0.9 -o curves.svg",
    )
)
def curves(
    run_dir: RunDir,
    patterns: Keys = None,
    more: More = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The .png or .svg to write.", show_default=False),
    ] = None,
    smooth: Annotated[
        float | None,
        typer.Option(
            metavar="WEIGHT",
            help="Add a moving average with this weight of the past, between 0 and 1.",
            show_default=False,
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    palette: Annotated[
        str, typer.Option(help="Colours: okabe-ito (colour-blind safe) or grey.")
    ] = "okabe-ito",
    title: Annotated[str | None, typer.Option(help="A title above the picture.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Draw keys over the steps.

    One panel a key, one line a run; --json prints what is drawn.
    """
    if output is None and not as_json:
        raise typer.BadParameter("expected --output FILE, --json, or both")
    check_bounds(since, until)
    from replay import plots

    with opened(run_dir, more, Attempts.LATEST) as session:
        table = session.metrics(patterns or None, since=since, until=until)
        table = table.select([name for name in ("run", "step", "key", "value") if name in table.column_names])
        if output is not None:
            figure = plots.curves(table, smooth=smooth, palette=palette, title=title)
            render.say(f"wrote {plots.save(figure, output)}")
        if as_json:
            render.rows(table if smooth is None else plots.smoothed(table, smooth), as_json=True)
