"""Asking a run: its keys, its metrics, and SQL over everything it recorded."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

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
    example,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa

__all__ = ["NAME", "app", "chosen", "opened"]

NAME = None  # its commands stand at the top
app = typer.Typer()


@contextmanager
def opened(run_dir: Path, more: Sequence[Path] | None, attempts: Attempts) -> Iterator[Any]:
    """Open one or several runs; at the end, frames that could not be read make the exit code 3."""
    from aggregator import open_run

    with open_run(run_dir, *(more or ()), attempts=attempts.value) as session:
        yield session
        problems = session.info()["problems"]
    if problems:
        for problem in problems:
            render.say(f"damaged: {problem}")
        raise typer.Exit(3)


def chosen(session: Any, patterns: Sequence[str] | None) -> list[str] | None:
    """Return the keys that match any pattern, in order; None when there is no pattern.

    A pattern that is itself a key stands for that key alone.

    Raises:
        QueryError: a pattern matches no key.
    """
    if not patterns:
        return None
    names: list[str] = session.keys()["key"].unique().to_pylist()
    return _matching(names, patterns)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    from eventlog import errors

    taken: set[str] = set()
    for pattern in patterns:
        found = {pattern} & set(names) or {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            raise errors.QueryError(
                f"expected a key or glob that matches one of {len(names)} keys, got {pattern!r}"
            )
        taken |= found
    return sorted(taken)


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
        if patterns:
            table = _only(table, _matching(table["key"].to_pylist(), patterns))
        render.rows(table, as_json=as_json)


def _only(table: pa.Table, names: list[str]) -> pa.Table:
    import pyarrow as pa

    wanted = set(names)
    return table.filter(pa.array([key in wanted for key in table["key"].to_pylist()], pa.bool_()))


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
    with opened(run_dir, more, attempts) as session:
        names = chosen(session, patterns)
        table = session.metrics(names, wide=wide, source=source.value, since=since, until=until)
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
    attempts: AttemptsOption = Attempts.ALL,
    as_json: Json = False,
) -> None:
    """Ask a run in SQL.

    DuckDB's SQL over views of all that every rank recorded: see --schema.
    """
    if schema == (question is not None):
        raise typer.BadParameter("expected a QUERY or --schema")
    with opened(run_dir, more, attempts) as session:
        if schema:
            render.rows(session.sql(_SCHEMA), as_json=as_json)
        else:
            render.rows(session.sql(sys.stdin.read() if question == "-" else question), as_json=as_json)


_SCHEMA = """
select table_name as view, column_name as "column", data_type as type
from information_schema.columns
order by table_name, ordinal_position
"""
