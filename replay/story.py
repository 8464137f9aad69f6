"""What a run committed, as the rows that targets are told; built from the table of its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute

from .metrics import without_counts
from .steps import Gate, Histogram, Order, Row, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pc: Any = pyarrow.compute  # its functions are made at import: no type checker sees them

Identity = tuple[int, int, int, int]  # a commit's step, attempt, time (µs) and sub-index

_ROWS_AT_A_TIME: Final = 262_144
_ORDER: Final = [(name, "ascending") for name in ("step", "attempt", "time", "sub_index", "key")]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many steps a story has, and what is not told.

    superseded: (attempt, step) pairs that later attempts took back
    folded:     values of a key that the same attempt gave again at the same step
    superseded_steps: the steps of those pairs, in words
    """

    steps: int
    superseded: int
    folded: int
    superseded_steps: str = ""


class Story:
    """Metrics of a run in the order of their steps; may be read any number of times.

    `table` has the columns step, key, value, value_int, time, attempt, sub_index and, where it holds rows
    that were taken back, superseded. These are left out unless `superseded` asks for them; then the latest
    attempt's value of a step and key is told. `histograms` go with the commit they belong to: its step,
    attempt, time in µs and sub-index.
    """

    def __init__(
        self,
        table: pa.Table,
        *,
        superseded: bool = False,
        histograms: Mapping[Identity, Mapping[str, Histogram]] | None = None,
    ) -> None:
        kept = table if superseded else _surviving(table)
        self._table = kept.sort_by(_ORDER)
        self._histograms = histograms or {}
        back = _taken_back(table)
        self.counts = Counts(_distinct(kept, "step"), len(back), _folded(table, kept), named(back))

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
            yield from _rows(rest.slice(0, length), self._histograms)
            rest = rest.slice(length)


def _surviving(table: pa.Table) -> pa.Table:
    return table.filter(pc.invert(table["superseded"])) if "superseded" in table.column_names else table


def _taken_back(table: pa.Table) -> list[int]:
    """Return the step of every (attempt, step) pair of which nothing survives."""
    if "superseded" not in table.column_names:
        return []
    pairs = table.group_by(["attempt", "step"]).aggregate([("superseded", "min")])
    return pairs.filter(pairs["superseded_min"])["step"].to_pylist()


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


def _rows(table: pa.Table, histograms: Mapping[Identity, Mapping[str, Histogram]]) -> Iterator[Row]:
    steps, attempts = table["step"].to_pylist(), pc.fill_null(table["attempt"], -1).to_pylist()
    times = table["time"].cast(pa.int64()).to_pylist()
    parts = pc.fill_null(table["sub_index"], 0).to_pylist()
    keys, floats, integers = (table[name].to_pylist() for name in ("key", "value", "value_int"))
    identity = list(zip(steps, attempts, times, parts, strict=True))
    start = 0
    for (step, attempt, time, part), same in groupby(identity):
        end = start + sum(1 for _ in same)
        found = zip(keys[start:end], floats[start:end], integers[start:end], strict=True)
        metrics = {key: value if integer is None else integer for key, value, integer in found}
        seconds = time / 1e6
        drawn = histograms.get((step, attempt, time, part), {})
        yield Row(step, without_counts(metrics), seconds, {attempt: seconds}, drawn)
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
            row.histograms,
        )
        for row in commits
    ]
    return [row for row in kept if row.metrics]
