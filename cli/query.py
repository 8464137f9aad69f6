"""Asking a run: its keys, its metrics, and SQL over everything it recorded."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from . import render
from .options import (
    Attempts,
    AttemptsOption,
    Json,
    Keys,
    More,
    RunDir,
    Since,
    Source,
    SourceOption,
    Until,
    check_bounds,
    example,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    import pyarrow as pa

    from aggregator import Session

__all__ = ["NAME", "app", "opened"]

NAME = None  # its commands stand at the top
app = typer.Typer()


@contextmanager
def opened(run_dir: Path, more: Sequence[Path] | None, attempts: Attempts) -> Generator[Session]:
    """Open one or several runs; whatever of them turned out damaged is told, and makes the exit code 3."""
    from aggregator import open_run

    with open_run(run_dir, *(more or ()), attempts=attempts.value) as session:
        yield session
        problems = session.problems
    if problems:
        render.damaged(problems)
        raise typer.Exit(3)


@app.command(epilog=example("keys runs/a", "keys runs/a 'ppo_actor/*' --json"))
def keys(
    run_dir: RunDir,
    patterns: Keys = None,
    more: More = None,
    attempts: AttemptsOption = Attempts.LATEST,
    as_json: Json = False,
) -> None:
    """List a run's keys.

    What was recorded under which name, and how it is reduced.
    """
    with opened(run_dir, more, attempts) as session:
        table = session.keys()
        render.rows(_matching(table, patterns) if patterns else table, as_json=as_json)


def _matching(table: pa.Table, patterns: Sequence[str]) -> pa.Table:
    import pyarrow as pa

    from eventlog import errors

    names = table["key"].to_pylist()
    taken: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not found:
            raise errors.QueryError(
                f"expected a key or glob that matches one of {len(names)}, got {pattern!r}"
            )
        taken |= found
    return table.filter(pa.array([name in taken for name in names], pa.bool_()))


@app.command(
    epilog=example(
        "metrics runs/a 'ppo_actor/*/avg' --since 100", "metrics runs/a rollout/reward --with runs/b --wide"
    )
)
def metrics(
    run_dir: RunDir,
    patterns: Keys = None,
    more: More = None,
    since: Since = None,
    until: Until = None,
    wide: Annotated[bool, typer.Option("--wide", help="One row a step, one column a key.")] = False,
    source: SourceOption = Source.COMMITTED,
    attempts: AttemptsOption = Attempts.LATEST,
    as_json: Json = False,
) -> None:
    """Print a run's metrics by step.

    Each step once: of a restarted run the attempt that owns the step.
    """
    check_bounds(since, until)
    with opened(run_dir, more, attempts) as session:
        table = session.metrics(patterns or None, wide=wide, source=source.value, since=since, until=until)
        render.rows(table, as_json=as_json)


@app.command(
    epilog=example(
        'sql runs/a "select key, count(*) from records group by key"',
        "sql runs/a --schema",
        "sql runs/a - < question.sql",
    )
)
def sql(
    run_dir: RunDir,
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUERY", help="A query; '-' reads it from stdin.", show_default=False),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the views and their columns.")] = False,
    more: More = None,
    attempts: AttemptsOption = Attempts.LATEST,
    as_json: Json = False,
) -> None:
    """Ask a run in SQL.

    DuckDB's SQL over views of all that every rank recorded: see --schema.
    """
    if schema == (question is not None):
        raise typer.BadParameter("expected a QUERY or --schema")
    with opened(run_dir, more, attempts) as session:
        if question is None:
            answer = session.schema()
        else:
            answer = session.sql(sys.stdin.read() if question == "-" else question)
        render.rows(answer, as_json=as_json)
