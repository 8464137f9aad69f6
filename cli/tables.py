"""Tables derived from a run: smaller, quicker to ask, and gone without harm."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from . import render
from .options import EngineName, EngineOption, Json, RunDir, Workers, example

__all__ = ["NAME", "app"]

NAME = None  # its commands stand at the top
app = typer.Typer()


@app.command(
    epilog=example(
        "compact runs/a", "compact runs/a --drop-sources", "compact runs/a --engine ray --workers 64"
    )
)
def compact(
    run_dir: RunDir,
    drop_sources: Annotated[
        bool,
        typer.Option(
            "--drop-sources",
            help="Remove payload whose values are in the tables: they are then its only place.",
        ),
    ] = False,
    engine: EngineOption = EngineName.LOCAL,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write what is finished of a run to Parquet.

    Every question uses it by itself and gives the same answer, sooner. A live run may be compacted again and
    again. The tables lie in RUN_DIR/tables and may be deleted, unless the sources were dropped. Exit code 3
    when tables were damaged and had to be left unused, or when something of the run is damaged or lost.
    """
    from aggregator import compact as run
    from aggregator import progress_bar

    with progress_bar("compact") as done:
        made = run(run_dir, drop_sources=drop_sources, engine=engine.value, workers=workers, done=done)
    render.document(asdict(made), as_json=as_json)
    if made.problems or made.losses:
        render.damaged(made.problems, listing="compact --json")
        render.lost(made.losses)
        raise typer.Exit(3)
