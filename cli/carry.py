"""Runs carried elsewhere: tables as files, and several runs as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import render
from .options import (
    Attempts,
    AttemptsOption,
    Json,
    KeysOption,
    MemoryLimit,
    More,
    RunDir,
    Since,
    Source,
    SourceOption,
    Spill,
    Until,
    check_bounds,
    example,
)
from .query import opened

__all__ = ["NAME", "app"]

NAME = None  # its commands stand at the top
app = typer.Typer()


@app.command(
    epilog=example(
        "export runs/a metrics.parquet",
        "export runs/a reward.csv --keys 'rollout/*' --wide",
        "export runs/a advantages.arrow --view tensors --keys ppo_actor/advantages --since 100",
    )
)
def export(
    run_dir: RunDir,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A .parquet, .arrow, .csv or .jsonl file.", show_default=False),
    ],
    patterns: KeysOption = None,
    view: Annotated[str, typer.Option(metavar="VIEW", help="Any view of 'sql --schema'.")] = "metrics",
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="parquet, arrow, csv or jsonl; else OUT says it.",
            show_default=False,
        ),
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="One row a step, one column a key (a key step: ~step).")
    ] = False,
    source: SourceOption = Source.COMMITTED,
    since: Since = None,
    until: Until = None,
    more: More = None,
    attempts: AttemptsOption = Attempts.LATEST,
    memory_limit: MemoryLimit = None,
    spill: Spill = None,
    as_json: Json = False,
) -> None:
    """Write a run's metrics, or any view of it, to a file.

    Null (not logged) and NaN stay apart. A file that is there is replaced when the new one is whole.
    """
    check_bounds(since, until)
    committed = view in ("metrics", "evaluations", "commits") and source is Source.COMMITTED
    with opened(
        run_dir, more, attempts, memory_limit, spill, committed=committed, since=since, until=until
    ) as session:
        rows = session.export(
            out,
            patterns or None,
            view=view,
            format=form,
            wide=wide,
            source=source.value,
            since=since,
            until=until,
        )
        if as_json:
            render.record({"out": str(out), "rows": rows})
        else:
            render.say(f"wrote {rows} rows to {out}")


@app.command(epilog=example("merge runs/whole runs/a runs/b --offset 300", "merge runs/whole runs/a runs/b"))
def merge(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new run's directory.", show_default=False)],
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR", help="Two runs or more, in order.", show_default=False)
    ],
    offsets: Annotated[
        list[int] | None,
        typer.Option(
            "--offset",
            metavar="STEPS",
            help="What to add to the steps of each run, or of each but the first; 0 if none.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Join runs that are one training into a new run.

    Where steps overlap the later run owns them, as after a restart; nothing is lost, and the runs stay as
    they are. What trackers acknowledged is not taken over. Damage stays damage, and what is lost lost, in
    the new run too: exit code 3.
    """
    from aggregator import merge_runs

    made = merge_runs(out, *runs, offsets=offsets or ())
    told = [{"run": one.path, "offset": one.offset, "attempts": list(one.attempts.values())} for one in made]
    render.document({"out": str(out), "runs": told}, as_json=as_json)
    render.damaged(problem for one in made for problem in one.problems)
    render.lost(line for one in made for line in one.losses)
    if any(one.problems or one.losses for one in made):
        raise typer.Exit(3)
