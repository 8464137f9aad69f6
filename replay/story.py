"""What a run committed, as the rows that targets are told; built from the table of its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress, groupby, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from eventlog import ranges

from .metrics import is_count
from .steps import Gate, Histogram, Order, Row
from .turn import strays_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from .turn import Commit

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
    attempt, time in µs and sub-index. `names` says what the metrics are called when they are told.
    `committed` has what the log knows besides, where the table holds something else.
    """

    def __init__(
        self,
        table: pa.Table,
        *,
        superseded: bool = False,
        histograms: Mapping[Identity, Mapping[str, Histogram]] | None = None,
        names: Callable[[str], str] = str,
        committed: pa.Table | None = None,
    ) -> None:
        if "superseded" in table.column_names and not pc.any(table["superseded"]).as_py():
            table = table.drop_columns(["superseded"])  # nothing was: what follows costs half
        kept = table if superseded else _surviving(table)
        self._table = kept.sort_by(_ORDER)
        self._histograms = histograms or {}
        self._names = names
        self._whole = table
        self._committed = table if committed is None else committed
        self._strays = strays_of(table) or strays_of(self._committed)
        self._tells_all = superseded or kept is table
        self._known: frozenset[tuple[int, int]] | None = None
        back = _taken_back(table)
        folded = _folded(table, superseded=superseded)
        self.counts = Counts(_distinct(kept, "step"), len(back), folded, ranges(back))

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

    def taken_back(self) -> Iterator[Row]:
        """Yield per commit the values that are not told, and that no other commit of their step replaces."""
        if self._tells_all:
            return
        steps = self._whole.filter(self._whole["superseded"])["step"].unique()
        table = self._whole.filter(pc.is_in(self._whole["step"], steps))
        places = _encoded(table["key"])[1]
        places = places + _encoded(table["step"])[1] * (places.max(initial=0) + 1)
        back = table["superseded"].to_numpy()
        left = table.filter(pa.array(back & ~np.isin(places, places[~back]))).sort_by(_ORDER)
        yield from _rows(left, {}, self._names, self._strays) if left.num_rows else ()

    def knows(self, step: int, time: float) -> bool:
        """Whether some attempt, be it superseded, made a commit of this step at this time (Unix seconds)."""
        if self._known is None:
            tables = {id(table): table for table in (self._whole, self._committed)}.values()
            pairs = pa.concat_tables([table.select(["step", "time"]) for table in tables])
            pairs = pairs.group_by(["step", "time"]).aggregate([])
            times = pairs["time"].cast(pa.int64()).to_pylist()
            self._known = frozenset(zip(pairs["step"].to_pylist(), times, strict=True))
        return (step, round(time * 1e6)) in self._known

    def _commits(self) -> Iterator[Row]:
        rest: pa.Table = self._table
        while rest.num_rows:
            length = _whole_commits(rest)
            yield from _rows(rest.slice(0, length), self._histograms, self._names, self._strays)
            rest = rest.slice(length)


def _surviving(table: pa.Table) -> pa.Table:
    return table.filter(pc.invert(table["superseded"])) if "superseded" in table.column_names else table


def _taken_back(table: pa.Table) -> list[int]:
    """Return the step of every (attempt, step) pair of which nothing survives."""
    if "superseded" not in table.column_names:
        return []
    pairs = table.group_by(["attempt", "step"]).aggregate([("superseded", "min")])
    return pairs.filter(pairs["superseded_min"])["step"].to_pylist()


def _folded(table: pa.Table, *, superseded: bool) -> int:
    """Count what an attempt said of a key at a step before what is told (a later commit supersedes it)."""
    words, keys = _encoded(table["key"])
    shown = np.array([not word.endswith("__count") for word in words], np.bool_)[keys]
    places = keys  # one number per key, step and attempt
    for name in ("step", "attempt"):
        places = places + (_encoded(table[name])[1] + 1) * (places.max(initial=0) + 1)
    told = shown
    if not superseded and "superseded" in table.column_names:
        told = shown & ~table["superseded"].to_numpy()
    different = np.sort(places[told])  # np.unique hashes them, at many times the cost
    different = different[np.diff(different, prepend=-1) > 0]
    if told is not shown:  # the rest is of attempts that were taken back
        shown = shown & np.isin(places, different)
    return int(np.count_nonzero(shown)) - len(different)


def _encoded(column: pa.ChunkedArray) -> tuple[list[Any], NDArray[np.int64]]:
    """Return the distinct values of a column, and where each of its values is among them; null is -1."""
    encoded = column.combine_chunks().dictionary_encode()
    numbers = pc.fill_null(encoded.indices, -1).to_numpy()
    return encoded.dictionary.to_pylist(), numbers.astype(np.int64)


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


class _Layout(NamedTuple):
    """The keys of commits that name the same: those that are told, and which of all they are."""

    told: tuple[str, ...]
    which: list[bool] | None  # None: every one


def _rows(
    table: pa.Table,
    histograms: Mapping[Identity, Mapping[str, Histogram]],
    to: Callable[[str], str],
    strays: Mapping[Commit, int],
) -> Iterator[Row]:
    words, keys = _encoded(table["key"])
    values, layouts = _numbers(table), dict[bytes, _Layout]()
    identity = [
        table["step"].to_numpy(),
        pc.fill_null(table["attempt"], -1).to_numpy(),
        table["time"].cast(pa.int64()).to_numpy(),
        pc.fill_null(table["sub_index"], 0).to_numpy(),
    ]
    starts = _starts(identity)
    commits = zip(*(column[starts].tolist() for column in identity), strict=True)
    bounds = pairwise([*starts.tolist(), len(keys)])
    for (start, end), (step, attempt, time, part) in zip(bounds, commits, strict=True):
        named = keys[start:end].tobytes()
        layout = layouts.get(named)
        if layout is None:
            layout = layouts[named] = _layout([words[key] for key in keys[start:end]], to)
        told, which = layout
        numbers = values[start:end]
        metrics = dict(zip(told, numbers if which is None else compress(numbers, which), strict=True))
        seconds = time / 1e6
        drawn = histograms.get((step, attempt, time, part), {}) if histograms else {}
        turn = strays[step, attempt, time] / 1e6 if strays and (step, attempt, time) in strays else seconds
        yield Row(step, metrics, seconds, {attempt: turn}, drawn)


def _starts(columns: Sequence[NDArray[np.int64]]) -> NDArray[np.intp]:
    """Return the places at which any of the columns changes, the first included."""
    changes = np.ones(len(columns[0]), np.bool_)
    changes[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(changes)


def _layout(names: Sequence[str], to: Callable[[str], str]) -> _Layout:
    given = set(names)
    which = [not is_count(name, given) for name in names]
    return _Layout(tuple(map(to, compress(names, which))), None if all(which) else which)


def _numbers(table: pa.Table) -> list[float]:
    """Return the values, those that are integers as such: exact beyond 2**53."""
    values: list[float] = table["value"].to_numpy().tolist()
    integers = table["value_int"]
    if integers.null_count < len(values):
        places = np.flatnonzero(integers.is_valid().to_numpy())
        for place, integer in zip(places.tolist(), integers.drop_null().to_pylist(), strict=True):
            values[place] = integer
    return values


def _latest_attempt_wins(commits: list[Row]) -> list[Row]:
    """Drop what a later attempt says again; the commits come in the order of their attempts."""
    if len(commits) < 2 or len({attempt for row in commits for attempt in row.commits}) < 2:
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
