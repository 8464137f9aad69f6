"""Looking after a run's files: checking them, and saving what can be saved of damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import render
from .options import Json, RunDir, example

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eventlog import SalvageReport

__all__ = ["NAME", "app"]

NAME = None  # its commands stand at the top
app = typer.Typer()


@app.command(epilog=example("verify runs/a", "verify runs/a --json"))
def verify(run_dir: RunDir, as_json: Json = False) -> None:
    """Check every byte of a run.

    A line per file: good frames and their rows, damaged ones, what is wrong. A segment is its stream and its
    index. What is being written while it is checked is no damage. The tables are checked, too. A commit whose
    number is missing is lost, with what is known of it, as are values that were in flight when their process
    was killed. Exit code 3 when anything is damaged, missing or was lost, 1 when there is no run to check.
    """
    from aggregator import progress_bar
    from aggregator import verify as run

    with progress_bar("verify") as progress:
        found = run(run_dir, progress=progress)
    files = [
        {
            "file": str(file.path),
            "kind": file.kind,
            "bytes": file.bytes,
            "frames": file.frames,
            "rows": file.rows,
            "bad": file.bad,
            "state": "damaged" if file.problems else "pruned" if file.pruned else "good",
            **({"problems": list(file.problems)} if as_json else {}),
        }
        for file in found.files
    ]
    losses = [loss.as_row(who) for who, loss in found.losses]
    if as_json:
        said = {"path": str(found.path), "clean": found.clean, "files": files, "losses": losses}
        render.document(said, as_json=True)
    else:
        render.document({"files": files, **({"losses": losses} if losses else {})}, as_json=False)
    render.damaged(problem for file in found.files for problem in file.problems)
    if not found.clean:
        _say_lost(losses)
        raise typer.Exit(3)


def _say_lost(losses: Sequence[dict[str, Any]]) -> None:
    if losses:
        noted = [loss for loss in losses if loss["cause"] != "missing"]
        rows = sum(loss["rows"] for loss in noted)
        if noted:
            render.say(f"lost, as the processes noted: {rows} rows in {len(noted)} places")
        for loss in losses:
            if loss["cause"] == "missing":
                step = "" if loss["step"] is None else f" (step {loss['step']})"
                render.say(f"lost: {loss['detail']}{step}, of {loss['role']}-{loss['rank']}")


@app.command(epilog=example("recover runs/a runs/a-recovered", "recover runs/a saved --json"))
def recover(
    run_dir: RunDir,
    into: Annotated[
        Path, typer.Argument(metavar="INTO", help="A new or empty directory.", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Save what can be saved of a damaged run into a new directory.

    The copy reads without a problem; what is gone is noted in it as lost. The run itself is never changed.
    Values that 'compact --drop-sources' left in the tables alone are in the copy's own files again. A line
    per file: frames and rows recovered; of these the frames found without an index, which no checksum vouches
    for; what was discarded. Exit code 3 when anything was.
    """
    from aggregator import progress_bar
    from aggregator import recover as run

    with progress_bar("recover") as progress:
        done = run(run_dir, into, progress=progress)
    files = [_salvaged(file, full=as_json) for file in done.files]
    if as_json:
        said = {"path": str(done.path), "into": str(done.into), "complete": done.complete, "files": files}
        render.document(said, as_json=True)
    else:
        render.document({"files": files}, as_json=False)
    for file in done.files:
        for reason in file.reasons:
            render.say(f"discarded: {reason}: {file.path}")
    if not done.complete:
        raise typer.Exit(3)


def _salvaged(file: SalvageReport, *, full: bool) -> dict[str, Any]:
    return {
        "file": str(file.path),
        "kind": file.kind,
        "frames": file.frames,
        "rows": file.rows,
        "unverified": file.unverified,
        "discarded": file.discarded,
        "discarded_bytes": file.discarded_bytes,
        "unfinished_bytes": file.unfinished_bytes,
        **({"reasons": list(file.reasons)} if full else {}),
    }
