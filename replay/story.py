"""What a run committed, as the rows that targets are told; built from the table of its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute

from .metrics import without_counts
from .steps import Gate, Order, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

pc: Any = pyarrow.compute  # its functions are made at import: no type checker sees them

_ROWS_AT_A_TIME: Final = 262_144
_ORDER: Final = [(name, "ascending") for name in ("step", "attempt", "time", "sub_index", "key")]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many steps a story has, and what is not told.

    superseded: (attempt, step) pairs that later attempts took back
    folded:     values of a key that the same attempt gave again at the same step
    """

    steps: int
    superseded: int
    folded: int


class Story:
    """Metrics of a run in the order of their steps; may be read any number of times.

    `table` has the columns step, key, value, value_int, time, attempt, sub_index and, where it holds rows
    that were taken back, superseded. These are left out unless `superseded` asks for them; then the latest
    attempt's value of a step and key is told.
    """

    def __init__(self, table: pa.Table, *, superseded: bool = False) -> None:
        kept = table if superseded else _surviving(table)
        self._table = kept.sort_by(_ORDER)
        self.counts = Counts(_distinct(kept, "step"), _taken_back(table), _folded(table, kept))

    def commits(self) -> Iterator[Row]:
        """Yield one row per commit: ascending steps, within a step in the order they were made."""
        for _, commits in groupby(self._commits(), key=lambda row: row.step):
            yield from _latest_attempt_wins(list(commits))

    def __iter__(self) -> Iterator[Row]:
        """Yield one row per step, ascending: what a target that holds nothing yet is told."""
        gate = Gate(Order.STRICT)
        for commit in self.commits():
            yield from gate.put(commit)
        yield from gate.close()

    def _commits(self) -> Iterator[Row]:
        rest: pa.Table = self._table
        while rest.num_rows:
            length = _whole_commits(rest)
            yield from _rows(rest.slice(0, length))
            rest = rest.slice(length)


def _surviving(table: pa.Table) -> pa.Table:
    return table.filter(pc.invert(table["superseded"])) if "superseded" in table.column_names else table


def _taken_back(table: pa.Table) -> int:
    """Count the (attempt, step) pairs of which nothing survives."""
    if "superseded" not in table.column_names:
        return 0
    pairs = table.group_by(["attempt", "step"]).aggregate([("superseded", "min")])
    return pc.sum(pairs["superseded_min"]).as_py() or 0


def _folded(table: pa.Table, kept: pa.Table) -> int:
    """Count what an attempt said of a key at a step before what is kept (a later commit supersedes it)."""
    names = ["attempt", "step", "key"]
    given, told = (
        some.filter(pc.invert(pc.ends_with(some["key"], "__count")))  # these no target is told
        .group_by(names)
        .aggregate([([], "count_all")])
        for some in (table, kept)
    )
    if told.num_rows < given.num_rows:  # the rest is of attempts that were taken back
        given = given.join(told.select(names), names, join_type="left semi")
    return (pc.sum(given["count_all"]).as_py() or 0) - told.num_rows


def _distinct(table: pa.Table, name: str) -> int:
    return pc.count_distinct(table[name]).as_py()


def _whole_commits(table: pa.Table) -> int:
    """Return how many rows make up a bounded number of whole steps."""
    if table.num_rows <= _ROWS_AT_A_TIME:
        return table.num_rows
    steps = table["step"].to_numpy()
    last = steps[_ROWS_AT_A_TIME - 1]
    first = int(np.searchsorted(steps, last, "left"))
    return first or int(np.searchsorted(steps, last, "right"))


def _rows(table: pa.Table) -> Iterator[Row]:
    steps, attempts = table["step"].to_pylist(), pc.fill_null(table["attempt"], -1).to_pylist()
    times = table["time"].cast(pa.int64()).to_pylist()
    parts = pc.fill_null(table["sub_index"], 0).to_pylist()
    keys, floats, integers = (table[name].to_pylist() for name in ("key", "value", "value_int"))
    identity = list(zip(steps, attempts, times, parts, strict=True))
    start = 0
    for (step, attempt, time, _), same in groupby(identity):
        end = start + sum(1 for _ in same)
        found = zip(keys[start:end], floats[start:end], integers[start:end], strict=True)
        metrics = {key: value if integer is None else integer for key, value, integer in found}
        seconds = time / 1e6
        yield Row(step, without_counts(metrics), seconds, {attempt: seconds})
        start = end


def _latest_attempt_wins(commits: list[Row]) -> list[Row]:
    """Drop what a later attempt says again; the commits come in the order of their attempts."""
    if len({attempt for row in commits for attempt in row.commits}) < 2:
        return commits
    latest: dict[str, Any] = {key: max(row.commits) for row in commits for key in row.metrics}
    kept = [
        Row(
            row.step,
            {k: v for k, v in row.metrics.items() if latest[k] == max(row.commits)},
            row.time,
            row.commits,
        )
        for row in commits
    ]
    return [row for row in kept if row.metrics]
