"""Finding runs, and what is to be known about one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import render
from .options import Json, RunDir, example

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eventlog import RunReader

__all__ = ["NAME", "app"]

NAME = None  # its commands stand at the top
app = typer.Typer()

_COLUMNS: Final = {
    "attempts": "attempt started ended outcome resume_step owned_from steps superseded_steps",
    "producers": "role rank host pid last_seen ended windows incomplete_windows lost_rows payload_bytes",
}
ALIVE_SECONDS: Final = 60  # a recording process gives a sign of life every few seconds


@app.command(epilog=example("ls runs", "ls runs --json"))
def ls(
    root: Annotated[
        Path, typer.Argument(metavar="ROOT", help="Where to look; the current directory by default.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """List the runs below a directory.

    Attempts, committed steps, the last sign of life, and whether the run is alive or how it ended.
    """
    import pyarrow as pa

    from eventlog import ArealMetricsError, RunReader

    if not root.is_dir():
        raise NotADirectoryError(f"expected a directory, got {root}")
    columns = [("path", pa.string()), ("id", pa.string()), ("attempts", pa.int64()), ("steps", pa.int64())]
    columns += [("last_step", pa.int64()), ("last", pa.timestamp("us", "UTC")), ("state", pa.string())]
    schema = pa.schema(columns)
    found: list[pa.RecordBatch] = []
    for path in _run_directories(root):
        try:
            found.append(pa.RecordBatch.from_pylist([_summary(path, RunReader(path))], schema))
        except ArealMetricsError as exc:
            render.say(f"left out: {exc}")
        except Exception as exc:  # noqa: BLE001 - one broken run must not hide the others
            render.say(f"damaged: {type(exc).__name__}: {exc}: {path}")
            broken = {"path": str(path), "state": "damaged"}
            found.append(pa.RecordBatch.from_pylist([broken], schema))
    render.rows(pa.Table.from_batches(found, schema), as_json=as_json)
    if not found:
        render.say(f"no run at or below {root}")


def _run_directories(root: Path) -> Iterator[Path]:
    """Yield run directories in the order of their names; nothing is looked for inside a run."""
    for folder, inner, files in os.walk(root):
        inner.sort()
        if "run.json" in files or {"events", "commits"} <= set(inner):
            inner.clear()
            yield Path(folder)


def _summary(path: Path, reader: RunReader) -> dict[str, Any]:
    attempts = reader.run.attempts()
    steps: set[int | None] = set()
    for _, _, batch in reader.commits():
        steps.update(batch.column("global_step").to_pylist())
    whole = None not in steps  # a commit without a step is one that no writer of ours has made
    committed = {step for step in steps if step is not None}
    seen = max((state.heartbeat_us for state in reader.sessions()), default=0)
    return {
        "path": str(path),
        "id": reader.run.id,
        "attempts": len(attempts),
        "steps": len(committed),
        "last_step": max(committed, default=None),
        "last": seen or None,
        "state": _state(attempts[-1].outcome if attempts else None, seen) if whole else "damaged",
    }


def _state(outcome: str | None, seen_us: int) -> str:
    """Say how the newest attempt ended, or whether it lives: a killed process cannot say so itself."""
    if outcome is not None:
        return outcome
    return "running" if time.time() - seen_us / 1e6 < ALIVE_SECONDS else "silent"


@app.command(epilog=example("info runs/a", "info runs/a --json"))
def info(run_dir: RunDir, as_json: Json = False) -> None:
    """Describe a run.

    Attempts, superseded steps, recording processes, and what was lost, damaged or is incomplete.
    """
    from aggregator import open_run

    with open_run(run_dir) as session:
        described = session.info()
    render.document(described if as_json else _brief(described), as_json=as_json)
    if described["problems"] or described["losses"]:
        raise typer.Exit(3)


def _brief(described: dict[str, Any]) -> dict[str, Any]:
    """Return what a person reads first: the tables' main columns, which fit on a line."""
    tables = {
        name: [{column: row[column] for column in columns.split()} for row in described[name]]
        for name, columns in _COLUMNS.items()
    }
    return {**described, **tables}
