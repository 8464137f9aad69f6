"""Asking a run: its keys, its metrics, statistics of all that was recorded, and SQL."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import render
from .options import (
    Attempts,
    AttemptsOption,
    EngineName,
    Json,
    Keys,
    MemoryLimit,
    More,
    RunDir,
    Since,
    Source,
    SourceOption,
    Spill,
    Until,
    Workers,
    check_bounds,
    example,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from aggregator import Session

__all__ = ["NAME", "app", "opened"]

NAME = None  # its commands stand at the top
app = typer.Typer()


By = Annotated[
    list[str] | None,
    typer.Option(
        "--by",
        metavar="WHAT",
        help="Group by any of step, epoch, attempt, role, rank, session, tracker, sequence, tags.NAME; "
        "repeatable.",
        show_default=False,
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION",
        help="Only values that meet it: 'ppo_actor/final_reward > 0', 'MASK and not (KEY < 1)'.",
        show_default=False,
    ),
]
Engine = Annotated[
    EngineName | None,
    typer.Option(
        help="Read the values in several processes, or on a Ray cluster; in this process if not given.",
        show_default=False,
    ),
]
Recorded = Annotated[
    list[str],
    typer.Argument(metavar="KEY", help="Recorded keys, globs too ('ppo_actor/*').", show_default=False),
]


@contextmanager
def opened(
    run_dir: Path,
    more: Sequence[Path] | None,
    attempts: Attempts,
    memory_limit: str | None = None,
    spill: Path | None = None,
    engine: EngineName | None = None,
    workers: int | None = None,
    *,
    committed: bool = False,
    since: int | None = None,
    until: int | None = None,
) -> Generator[Session]:
    """Open one or several runs; what of them is damaged, or lost, is told, and makes the exit code 3.

    Lost of the records and commits, or for what is answered from the `committed` alone of these, from step
    `since` to `until`; the answers themselves count the values that are not kept. The end of the block ends
    the command then: all that it does belongs into the block.
    """
    from aggregator import open_run
    from eventlog import losses, schema

    runs = (run_dir, *(more or ()))
    with open_run(
        *runs,
        attempts=attempts.value,
        memory_limit=memory_limit,
        spill=spill,
        engine=engine and engine.value,
        workers=workers,
    ) as session:
        other = None
        try:
            yield session
        except typer.Exit as ended:  # of another run, which is damaged too
            other = ended
        streams = {schema.Stream.COMMITS} | (set() if committed else {schema.Stream.RECORDS})
        lost = losses.lines(losses.concerning(session.losses, streams, since, until))
        problems = session.problems
    render.damaged(problems)
    render.lost(lost)
    if other is not None:
        raise other
    if problems or lost:
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
        render.rows(session.keys(patterns or None), as_json=as_json)


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
    wide: Annotated[
        bool, typer.Option("--wide", help="One row a step, one column a key (a key step: ~step).")
    ] = False,
    source: SourceOption = Source.COMMITTED,
    attempts: AttemptsOption = Attempts.LATEST,
    as_json: Json = False,
) -> None:
    """Print a run's metrics by step.

    Each step once: of a restarted run the attempt that owns the step.
    """
    check_bounds(since, until)
    committed = source is Source.COMMITTED
    with opened(run_dir, more, attempts, committed=committed, since=since, until=until) as session:
        table = session.metrics(patterns or None, wide=wide, source=source.value, since=since, until=until)
        render.rows(table, as_json=as_json)


@app.command(
    epilog=example(
        "percentiles runs/a ppo_actor/advantages -q 0.5 -q 0.99",
        "percentiles runs/a ppo_actor/kl_rewards --where 'ppo_actor/final_reward > 0'",
    )
)
def percentiles(
    run_dir: RunDir,
    patterns: Recorded,
    q: Annotated[
        list[float] | None,
        typer.Option(
            "-q", metavar="Q", help="From 0 to 1; repeatable. 0.5, 0.9 and 0.99 if none.", show_default=False
        ),
    ] = None,
    by: By = None,
    where: Where = None,
    since: Since = None,
    until: Until = None,
    more: More = None,
    attempts: AttemptsOption = Attempts.LATEST,
    memory_limit: MemoryLimit = None,
    engine: Engine = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Print exact percentiles of recorded keys.

    By step, unless --by says otherwise; from the values of all ranks.
    """
    check_bounds(since, until)
    with opened(
        run_dir, more, attempts, memory_limit, None, engine, workers, since=since, until=until
    ) as session:
        asked = q or [0.5, 0.9, 0.99]
        answer = session.percentiles(
            _one(patterns), asked, by or ["step"], where=where, since=since, until=until
        )
        render.rows(answer, as_json=as_json)


@app.command(
    epilog=example(
        "reduce runs/a ppo_actor/advantages --stat avg --stat std --by step --by rank",
        "reduce runs/a ppo_actor/kl_rewards --where 'ppo_actor/final_reward > 0'",
        "reduce runs/a ppo_actor/advantages --stat max --by sequence --since 100 --until 100",
    )
)
def reduce(
    run_dir: RunDir,
    patterns: Recorded,
    stats: Annotated[
        list[str] | None,
        typer.Option(
            "--stat",
            metavar="STAT",
            help="avg, sum, min, max, count, nonfinite, std, var, median, p99 …; repeatable. avg if none.",
            show_default=False,
        ),
    ] = None,
    by: By = None,
    where: Where = None,
    distinct: Annotated[
        bool, typer.Option("--distinct", help="Of each sample id and step the lowest rank's first alone.")
    ] = False,
    since: Since = None,
    until: Until = None,
    more: More = None,
    attempts: AttemptsOption = Attempts.LATEST,
    memory_limit: MemoryLimit = None,
    engine: Engine = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Print statistics of recorded keys.

    By step, unless --by says otherwise; of all that every rank recorded, or of what meets a condition.
    """
    check_bounds(since, until)
    with opened(
        run_dir, more, attempts, memory_limit, None, engine, workers, since=since, until=until
    ) as session:
        asked = stats or ["avg"]
        bounds = {"since": since, "until": until}
        answer = session.reduce(
            _one(patterns), asked, by or ["step"], where=where, distinct=distinct, **bounds
        )
        render.rows(answer, as_json=as_json)


@app.command(epilog=example("histogram runs/a ppo_actor/advantages --bins 20 --since 100"))
def histogram(
    run_dir: RunDir,
    patterns: Recorded,
    bins: Annotated[int, typer.Option(help="How many equal bins.")] = 50,
    by: By = None,
    where: Where = None,
    since: Since = None,
    until: Until = None,
    more: More = None,
    attempts: AttemptsOption = Attempts.LATEST,
    memory_limit: MemoryLimit = None,
    engine: Engine = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Print how many values of recorded keys lie in each of some bins.

    Of the whole run, unless --by says otherwise.
    """
    check_bounds(since, until)
    with opened(
        run_dir, more, attempts, memory_limit, None, engine, workers, since=since, until=until
    ) as session:
        answer = session.histogram(_one(patterns), bins, by or (), where=where, since=since, until=until)
        render.rows(answer, as_json=as_json)


@app.command(epilog=example("correlation runs/a ppo_actor/advantages ppo_actor/kl_rewards --by step"))
def correlation(
    run_dir: RunDir,
    key: Annotated[str, typer.Argument(metavar="KEY", help="A recorded key.", show_default=False)],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Recorded beside it.", show_default=False)],
    by: By = None,
    where: Where = None,
    since: Since = None,
    until: Until = None,
    more: More = None,
    attempts: AttemptsOption = Attempts.LATEST,
    memory_limit: MemoryLimit = None,
    as_json: Json = False,
) -> None:
    """Print the correlation of two keys, value by value.

    Of the whole run, unless --by says otherwise.
    """
    check_bounds(since, until)
    with opened(run_dir, more, attempts, memory_limit, since=since, until=until) as session:
        answer = session.correlation(key, other, by or (), where=where, since=since, until=until)
        render.rows(answer, as_json=as_json)


def _one(patterns: list[str]) -> str | list[str]:
    """Return a single key as itself: its answer needs no column that says which key it is."""
    return patterns[0] if len(patterns) == 1 else patterns


@app.command(
    epilog=example(
        'sql runs/a "select key, count(*) from records group by key"',
        "sql runs/a \"from percentile('ppo_actor/advantages', 0.99)\"",
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
    memory_limit: MemoryLimit = None,
    spill: Spill = None,
    as_json: Json = False,
) -> None:
    """Ask a run in SQL.

    DuckDB's SQL over views of all that every rank recorded: see --schema.
    """
    if schema == (question is not None):
        raise typer.BadParameter("expected a QUERY or --schema")
    with opened(run_dir, more, attempts, memory_limit, spill) as session:
        if question is None:
            answer = session.schema()
        else:
            answer = session.sql(sys.stdin.read() if question == "-" else question)
        render.rows(answer, as_json=as_json)
