"""Comparing evaluations: which samples came out differently, in two runs or at two steps of one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

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
_STEPS = "select distinct key, step from samples where step is not null order by key, step"
_MOST_NAMED = 5


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
            help="Step of the evaluation, for both runs or, given twice, for each; the last of each key by "
            "default.",
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

    Of two runs, or of two steps of one: by default the last evaluations of each key. A row per sample and
    result. Keys that only one of the two was evaluated under are named, and not compared.
    """
    if len(steps or ()) > 2:
        raise typer.BadParameter(f"expected --step at most twice, got {len(steps or ())}")
    if other is None and len(steps or ()) == 1:
        raise typer.BadParameter("expected two steps of one run, got one: --step")
    import pyarrow as pa

    from aggregator.evaluation import changed_samples

    with ExitStack() as runs:
        sides = _sides(runs, run_dir, other, steps or [], keys or [_EVALUATION])
        (where, before), (there, after) = map(_read, sides)
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
        if alone := sorted({key for side in sides for key in side.alone}):
            more = f" and {len(alone) - _MOST_NAMED} more" if len(alone) > _MOST_NAMED else ""
            render.say(f"not compared, evaluated on one side only: {', '.join(alone[:_MOST_NAMED])}{more}")


Values = dict[tuple[str, str], float]


class _Side(NamedTuple):
    """What is compared of a run: the step of each key; `alone` are those that the other side has not."""

    session: Session
    path: Path
    steps: dict[str, int]
    alone: frozenset[str] = frozenset()


def _sides(
    runs: ExitStack, run_dir: Path, other: Path | None, steps: Sequence[int], keys: Sequence[str]
) -> list[_Side]:
    """Return the two evaluations, under the keys that both have; the runs stay open."""
    from eventlog import errors

    found: list[_Side] = []
    session = runs.enter_context(opened(run_dir, None, Attempts.LATEST))
    for i, path in enumerate((run_dir, other or run_dir)):
        if i and other is not None:
            session = runs.enter_context(opened(other, None, Attempts.LATEST))
        step = steps[min(i, len(steps) - 1)] if steps else None
        found.append(_side(session, path, keys, step, back=2 - i if other is None else 1))
    both = found[0].steps.keys() & found[1].steps.keys()
    if not both:
        names = " and ".join(", ".join(sorted(side.steps)[:_MOST_NAMED]) for side in found)
        raise errors.UnansweredError(
            f"expected evaluations under the same keys, got {names}: {found[1].path}"
        )
    return [
        side._replace(
            steps={key: step for key, step in side.steps.items() if key in both},
            alone=frozenset(side.steps.keys() - both),
        )
        for side in found
    ]


def _side(session: Session, path: Path, keys: Sequence[str], step: int | None, *, back: int) -> _Side:
    """Return what a run has under some keys at a step, or, of each key, at the last (2: the one before)."""
    from aggregator import fits
    from eventlog import errors

    evaluated: dict[str, list[int]] = {}
    rows = session.sql(_STEPS)
    for key, at in zip(rows["key"].to_pylist(), rows["step"].to_pylist(), strict=True):
        if fits(key, keys):
            evaluated.setdefault(key, []).append(at)
    if step is not None:
        chosen = {key: step for key, known in evaluated.items() if step in known}
        wanted = f"results of samples at step {step}, got none for {', '.join(keys)}"
    else:
        chosen = {key: known[-back] for key, known in evaluated.items() if len(known) >= back}
        most = max(map(len, evaluated.values()), default=0)
        wanted = f"{back} steps with evaluated samples, got {most}"
    if not chosen:
        raise errors.UnansweredError(f"expected {wanted}: {path}")
    return _Side(session, path, chosen)


def _read(side: _Side) -> tuple[str, Values]:
    """Return what a side is, and its values."""
    steps = sorted(set(side.steps.values()))
    values: Values = {}
    for step in steps:
        # of ranks that evaluated the same sample, as tensor-parallel copies do, the first speaks
        rows = side.session.sql(f"select key, sample_id, value {_AT.format(int(step))}")
        for key, sample, value in zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True):
            if side.steps.get(key) == step:
                values.setdefault((key, sample), value)
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))}"
    return f"{side.path} at {at}", values
