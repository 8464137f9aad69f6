"""Pictures of runs, written to a PNG or SVG file."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import render
from .options import Attempts, Json, Keys, More, RunDir, Since, Until, check_bounds, check_output, example
from .query import opened

if TYPE_CHECKING:
    import pyarrow as pa

    from aggregator import Session

__all__ = ["NAME", "app"]

NAME = "plot"
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def plot() -> None:
    """Draw runs (extra: plots)."""


Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="The .png or .svg to write.", show_default=False),
]
Palette = Annotated[str, typer.Option(help="Colours: okabe-ito (colour-blind safe) or grey.")]
Title = Annotated[str | None, typer.Option(help="A title above the picture.", show_default=False)]


class Band(Enum):
    """What a line is the mean of, within a band from the least to the greatest."""

    RANKS = "ranks"
    RUNS = "runs"


@app.command(
    epilog=example(
        "plot curves runs/a rollout/reward -o reward.png",
        "plot curves runs/a 'ppo_actor/*/avg' --with runs/b --smooth 0.9 --compare -o curves.svg",
        "plot curves runs/a timeperf/train_step --band ranks -o ranks.png",
    )
)
def curves(
    run_dir: RunDir,
    patterns: Keys = None,
    more: More = None,
    output: Output = None,
    smooth: Annotated[
        float | None,
        typer.Option(
            metavar="WEIGHT",
            help="Add a moving average with this weight of the past, between 0 and 1.",
            show_default=False,
        ),
    ] = None,
    band: Annotated[
        Band | None,
        typer.Option(
            help="Draw the mean of all ranks (of recorded keys), or of all runs (seeds), in a band."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Read out how far each run is from the first, on average.")
    ] = False,
    since: Since = None,
    until: Until = None,
    palette: Palette = "okabe-ito",
    title: Title = None,
    as_json: Json = False,
) -> None:
    """Draw keys over the steps.

    One panel a key, one line a run; --json prints what is drawn, with --compare the differences.
    """
    _check_output(output, as_json=as_json)
    check_bounds(since, until)
    from replay import plots

    with opened(run_dir, more, Attempts.LATEST) as session:
        if band is Band.RANKS:
            table = _by_rank(session, patterns, since, until)
        else:
            table = session.metrics(patterns or None, since=since, until=until)
        if band is Band.RUNS and "run" in table.column_names:
            table = table.rename_columns({"run": "member"})
        names = ("run", "member", "step", "key", "value")
        table = table.select([name for name in names if name in table.column_names])
        if output is not None:
            figure = plots.curves(table, smooth=smooth, compare=compare, palette=palette, title=title)
            render.say(f"wrote {plots.save(figure, output)}")
        if as_json:
            drawn = plots.bands(table) if "member" in table.column_names else table
            if compare:
                drawn = plots.differences(drawn)
            elif smooth is not None:
                drawn = plots.smoothed(drawn, smooth)
            render.rows(drawn, as_json=True)


@app.command(
    epilog=example(
        "plot heatmap runs/a --accuracy 'eval-rollout/*/accuracy' --length 'eval-rollout/*/length' -o h.png"
    )
)
def heatmap(
    run_dir: RunDir,
    accuracy: Annotated[str, typer.Option(metavar="KEY", help="Accuracies; * stands for the task.")],
    length: Annotated[str, typer.Option(metavar="KEY", help="Response lengths; * stands for the task.")],
    more: More = None,
    output: Output = None,
    since: Since = None,
    until: Until = None,
    title: Title = None,
    as_json: Json = False,
) -> None:
    """Draw where tasks lie in accuracy and response length.

    One panel a run; each cell counts steps of tasks, the ideal corner is marked; --json prints what is drawn.
    """
    _check_output(output, as_json=as_json)
    check_bounds(since, until)
    from replay import plots

    with opened(run_dir, more, Attempts.LATEST) as session:
        table = plots.results(session.metrics(since=since, until=until), accuracy, length)
        if output is not None:
            render.say(f"wrote {plots.save(plots.heatmap(table, title=title), output)}")
        if as_json:
            render.rows(table, as_json=True)


@app.command(epilog=example("plot radar runs/grpo rollout/reward --with runs/ppo -o radar.png"))
def radar(
    run_dir: RunDir,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The reward.", show_default=False)],
    more: More = None,
    output: Output = None,
    palette: Palette = "okabe-ito",
    title: Title = None,
    as_json: Json = False,
) -> None:
    """Draw runs over reward, efficiency and stability.

    The picture says what these are and which way is better; --json prints the numbers.
    """
    _check_output(output, as_json=as_json)
    import pyarrow as pa

    from replay import plots

    with opened(run_dir, more, Attempts.LATEST) as session:
        table = session.metrics(key)
        if "run" not in table.column_names:
            table = table.append_column("run", pa.array([run_dir.name] * table.num_rows, pa.string()))
        found = plots.scores(table)
        if output is not None:
            render.say(f"wrote {plots.save(plots.radar(found, palette=palette, title=title), output)}")
        if as_json:
            render.rows(found, as_json=True)


def _check_output(output: Path | None, *, as_json: bool) -> None:
    """Refuse an order that nothing would come of, before any work is done."""
    if output is None and not as_json:
        raise typer.BadParameter("expected --output FILE, --json, or both")
    if output is not None:
        check_output(output)


def _by_rank(session: Session, patterns: list[str] | None, since: int | None, until: int | None) -> pa.Table:
    """Return the mean of each recorded key on each rank: (run?, member, step, key, value)."""
    import pyarrow as pa

    by = ["step", "role", "rank"]
    table = session.reduce(patterns or ["*"], ["avg"], by, since=since, until=until)
    who = zip(table["role"].to_pylist(), table["rank"].to_pylist(), strict=True)
    member = pa.array([f"{role} {rank}" for role, rank in who], pa.string())
    return table.append_column("member", member).rename_columns({"avg": "value"})
