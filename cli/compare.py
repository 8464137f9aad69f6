"""Comparing evaluations: which samples came out differently, in two runs or at two steps of one."""

from __future__ import annotations

from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import render
from .options import Attempts, Json, RunDir, example
from .query import opened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aggregator import Session

__all__ = ["NAME", "app"]

NAME = None  # its command stands at the top
app = typer.Typer()

_EVALUATION = "eval-rollout/*"
_AT = "from samples where step = {} order by key, sample_id, role, rank"


@app.command(
    "compare-evals",
    epilog=example(
        "compare-evals runs/a runs/b",
        "compare-evals runs/a --step 100 --step 200 --key '*/accuracy' --json",
    ),
)
def compare_evals(
    run_dir: RunDir,
    other: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER", help="Another run; without it two steps of one.", show_default=False),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            "--step",
            metavar="STEP",
            help="Step of the evaluation, for both runs or, given twice, for each; the last by default.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--key", metavar="KEY", help=f"Results to compare, globs too; {_EVALUATION} by default."
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Differences up to this are none.")] = 0.0,
    as_json: Json = False,
) -> None:
    """List the samples whose evaluation changed.

    Of two runs, or of two steps of one: by default the last evaluations. A row per sample and result.
    """
    if len(steps or ()) > 2:
        raise typer.BadParameter(f"expected --step at most twice, got {len(steps or ())}")
    if other is None and len(steps or ()) == 1:
        raise typer.BadParameter("expected two steps of one run, got one: --step")
    import pyarrow as pa

    from aggregator.evaluation import changed_samples

    with ExitStack() as runs:
        sides = _sides(runs, run_dir, other, steps or [], keys or [_EVALUATION])
        (where, before), (there, after) = sides
        changes = changed_samples(before, after, tolerance)
        columns = ("key", "sample_id", "before", "after", "change")
        types = (pa.string(), pa.string(), pa.float64(), pa.float64(), pa.float64())
        table = {
            name: pa.array([getattr(change, name) for change in changes], kind)
            for name, kind in zip(columns, types, strict=True)
        }
        render.rows(pa.table(table), as_json=as_json)
        differ = f"{len(changes)} of {len(before.keys() | after.keys())} results differ"
        render.say(f"{differ}: {where} and {there}")


Values = dict[tuple[str, str], float]


def _sides(
    runs: ExitStack, run_dir: Path, other: Path | None, steps: Sequence[int], keys: Sequence[str]
) -> list[tuple[str, Values]]:
    """Return (what it is, its values) of the two evaluations; the runs stay open."""
    if other is None:
        session = runs.enter_context(opened(run_dir, None, Attempts.LATEST))
        chosen = steps or _evaluated(session, run_dir, 2)
        return [_side(session, run_dir, step, keys) for step in chosen]
    sides: list[tuple[str, Values]] = []
    for i, path in enumerate((run_dir, other)):
        session = runs.enter_context(opened(path, None, Attempts.LATEST))
        step = steps[min(i, len(steps) - 1)] if steps else _evaluated(session, path, 1)[0]
        sides.append(_side(session, path, step, keys))
    return sides


def _evaluated(session: Session, path: Path, wanted: int) -> list[int]:
    """Return the last steps with an evaluation."""
    from eventlog import errors

    rows = session.sql(
        "select distinct step from samples "
        "where step is not null and starts_with(key, 'eval-rollout/') order by step"
    )
    steps = rows["step"].to_pylist()
    if len(steps) < wanted:
        raise errors.UnansweredError(
            f"expected {wanted} steps with evaluated samples, got {len(steps)}: {path}"
        )
    return steps[-wanted:]


def _side(session: Session, path: Path, step: int, keys: Sequence[str]) -> tuple[str, Values]:
    from eventlog import errors

    # of ranks that evaluated the same sample, as tensor-parallel copies do, the first speaks
    rows = session.sql(f"select key, sample_id, value {_AT.format(int(step))}")
    values: Values = {}
    for key, sample, value in zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True):
        if any(fnmatchcase(key, pattern) for pattern in keys):
            values.setdefault((key, sample), value)
    if not values:
        raise errors.UnansweredError(
            f"expected results of samples at step {step}, got none for {', '.join(keys)}: {path}"
        )
    return f"{path} at step {step}", values
