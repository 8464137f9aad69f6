"""Finding runs, and what is to be known about one."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import pulse, render
from .options import Json, RunDir, example

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from aggregator import Session
    from eventlog import RunReader

__all__ = ["NAME", "app"]

NAME = None  # its commands stand at the top
app = typer.Typer()

_COLUMNS: Final = {
    "attempts": "attempt started ended outcome resume_step owned_from steps superseded_steps",
    "producers": "role rank host pid state last_seen windows incomplete_windows lost_rows payload_bytes",
}


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

    from eventlog import ArealMetricsError, RunReader, shown

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
            broken = {"path": shown(path), "state": "damaged"}
            found.append(pa.RecordBatch.from_pylist([broken], schema))
    render.rows(pa.Table.from_batches(found, schema), as_json=as_json)
    if not found:
        render.say(f"no run at or below {root}")


def _run_directories(root: Path) -> Iterator[Path]:
    """Yield run directories in the order of their names; nothing is looked for inside a run."""
    for folder, inner, files in os.walk(root, onerror=_left_out):
        inner.sort()
        if "run.json" in files or {"events", "commits"} <= set(inner):
            inner.clear()
            yield Path(folder)


def _left_out(error: OSError) -> None:
    render.say(f"left out: {error.strerror}: {error.filename}")


def _summary(path: Path, reader: RunReader) -> dict[str, Any]:
    from eventlog import shown

    attempts = reader.run.attempts()
    steps: set[int | None] = set()
    times: set[int] = set()
    for _, _, batch in reader.commits():
        steps.update(batch.column("global_step").to_pylist())
        times.update(time for time in batch.column("time").cast("int64").to_pylist() if time is not None)
    whole = None not in steps  # a commit without a step is one that no writer of ours has made
    committed = {step for step in steps if step is not None}
    sessions = reader.sessions()
    seen = max((session.heartbeat_us for session in sessions), default=0)
    progress = max([session.producer.started_us for session in sessions] + list(times), default=0)
    patience, now = pulse.stuck_after(times), time.time()
    state = pulse.together(
        pulse.state(
            ended=session.ended,
            seen_us=session.heartbeat_us,
            progress_us=progress,
            patience=patience,
            now=now,
        )
        for session in sessions
    )
    return {
        "path": shown(path),
        "id": reader.run.id,
        "attempts": len(attempts),
        "steps": len(committed),
        "last_step": max(committed, default=None),
        "last": seen or None,
        "state": ((attempts[-1].outcome if attempts else None) or state) if whole else "damaged",
    }


@app.command(epilog=example("info runs/a", "info runs/a --alerts --json"))
def info(
    run_dir: RunDir,
    with_alerts: Annotated[
        bool, typer.Option("--alerts", help="Also what it alerted to, and what the rules find in it now.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe a run.

    Attempts and how each ended, superseded steps, recording processes, sizes, and what was lost, pruned,
    damaged or is incomplete.

    A run is running when something was exported or committed lately; stuck when its processes give signs of
    life, but nothing was for ten times the usual time between commits (2 minutes at least; 30 minutes before
    there are two commits); dead when there was no sign of life for 30 seconds and no word of how it ended:
    then the end of its attempt is unknown.
    """
    from aggregator import open_run

    with open_run(run_dir, attempts="all") as session:
        described = _with_states(session.info(), session)
        if with_alerts:
            from aggregator.evaluation import alerts_of

            described["alerts"] = [asdict(alert) for alert in alerts_of(session, progress=True)]
    render.document(described if as_json else _brief(described), as_json=as_json)
    if described["problems"] or described["losses"]:
        raise typer.Exit(3)


def _with_states(described: dict[str, Any], session: Session) -> dict[str, Any]:
    """Add to a description whether the run and its processes live."""
    commits, times = _times(session, "commits"), _times(session, "windows")
    patience = pulse.stuck_after([time for some in commits.values() for time in some])
    now = time.time()

    def state_of(row: dict[str, Any]) -> str:
        done = commits.get(row["session"], []) + times.get(row["session"], [])
        return pulse.state(
            ended=row["ended"],
            seen_us=_us(row["last_seen"]),
            progress_us=max([_us(row["started"]), *done]),
            patience=patience,
            now=now,
        )

    producers = [{**row, "state": state_of(row)} for row in described["producers"]]
    state = pulse.together(row["state"] for row in producers)
    attempts = described["attempts"]
    if attempts and attempts[-1]["outcome"] is None:
        attempts[-1]["outcome"] = "unknown" if state in ("dead", "ended", "") else state
    outcome = attempts[-1]["outcome"] if attempts else None
    seen = max((row["last_seen"] for row in producers if row["last_seen"]), default=None)
    told = {"state": state if outcome in (None, "unknown", state) else outcome, "last_seen": seen}
    head = {name: described[name] for name in ("run", "path", "label", "created", "format")}
    return {**head, **told, **described, "producers": producers, "stuck_after": patience}


def _times(session: Session, view: str) -> dict[str, list[int]]:
    """Return by session the times of its commits, or of its windows' newest records."""
    rows = session.sql(f"select distinct session, epoch_us(time) as us from {view} where time is not null")  # noqa: S608
    found: dict[str, list[int]] = {}
    for row in rows.to_pylist():
        found.setdefault(row["session"], []).append(row["us"])
    return found


def _us(moment: datetime | None) -> int:
    return 0 if moment is None else round(moment.timestamp() * 1e6)


def _brief(described: dict[str, Any]) -> dict[str, Any]:
    """Return what a person reads first: the tables' main columns, which fit on a line."""
    tables = {
        name: [{column: row[column] for column in columns.split()} for row in described[name]]
        for name, columns in _COLUMNS.items()
    }
    return {**described, **tables}
