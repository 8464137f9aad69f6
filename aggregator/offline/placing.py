"""Rows with their place on the timeline: whose they are, which step and attempt, whether they still count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from . import timeline
from .lapses import LEADER
from .reading import NONE, nullable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .reading import Bools, Ints, Reading, Rows
    from .timeline import Timeline

    Places = NDArray[np.intp]

_WINDOW_BITS: Final = 40
_DENSE: Final = 8  # numbers that lie in a range of so many times their count are close together
BOUND_BY: Final = (timeline.GIVEN, timeline.COMMIT, timeline.EXPORT, timeline.TIME)


@dataclass(frozen=True, slots=True)
class Placed:
    """Rows on the timeline, as columns of `table` and, what is worked on most, as arrays (null is NONE)."""

    table: pa.Table
    sids: Ints
    windows: Ints  # as `window_code` names them
    attempts: Ints
    steps: Ints
    superseded: Bools


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a run in order, and what is known of each."""

    codes: Ints  # as `window_code` names them
    attempts: Ints
    steps: Ints
    bound_by: NDArray[np.int8]  # place in BOUND_BY; -1: unbound
    complete: Bools


def window_code(sid: Any, number: Any) -> Any:
    """Return the number that names a window of a session; numbers sort as (session, window) does."""
    return (sid << _WINDOW_BITS) | number


def window_parts(codes: Ints) -> tuple[Ints, Ints]:
    """Return (sid, number) of windows named by `window_code`."""
    return codes >> _WINDOW_BITS, codes & ((1 << _WINDOW_BITS) - 1)


def place(
    reading: Reading,
    rows: Rows,
    windows: Windows,
    of: Places,
    found: Timeline,
    epochs: Mapping[tuple[int, int], int],
    *,
    by_key: bool = False,
) -> Placed:
    """Give rows the step and attempt of their windows; `of` is the window of each row.

    A step that a row carries itself stands. `by_key`: a row is superseded also where a later attempt, which
    does not own the step, added the same key to it.
    """
    given = rows.ints("step")
    attempts = windows.attempts[of]
    steps = np.where(given == NONE, windows.steps[of], given)
    reason = np.where(given == NONE, windows.bound_by[of], np.int8(BOUND_BY.index(timeline.GIVEN)))
    superseded = outdated(found, attempts, steps)
    if by_key:
        superseded |= replaced(attempts, steps, ~superseded & (steps != NONE), rows.codes("key"))
    table = rows.table
    for name, column in (
        ("step", nullable(steps)),
        ("attempt", pa.array(attempts)),
        ("bound_by", pa.DictionaryArray.from_arrays(pa.array(reason, mask=reason < 0), list(BOUND_BY))),
        ("epoch", nullable(_epochs(attempts, steps, epochs))),
        ("superseded", pa.array(superseded)),
        ("complete", pa.array(windows.complete[of])),
    ):
        table = _with_column(table, name, column)
    table = identified(reading, table, rows.sids)
    return Placed(table, rows.sids, windows.codes[of], attempts, steps, superseded)


def place_commits(reading: Reading, found: Timeline, firsts: Places, silenced: Bools) -> Placed:
    """Give commit rows their attempt and say which of them a later one replaced.

    Of the rows of one key, step and sub-index the later commit wins; of a key at a step that several
    attempts report, the later attempt, whole. Within an attempt the leader's word on a key and step stands:
    what its other processes say of it is `beside`, which replaces nothing and is not replaced, and so is what
    they say in commits that are `silenced`. `firsts` are the places of each commit's first row.
    """
    rows = reading.commits
    counts = np.diff(np.append(firsts, rows.table.num_rows))
    attempts = np.repeat(np.array(found.commit_attempts, np.int64), counts)
    steps = rows.ints("global_step")
    superseded = outdated(found, attempts, steps)
    named = rows.table["key"].is_valid().to_numpy()
    beside = _beside(reading, rows, attempts, steps, named) | (named & np.repeat(silenced, counts))
    metric = named & ~beside & ~superseded
    superseded |= replaced(attempts, steps, metric, rows.codes("key"))
    started = np.array([producer.started_us for producer in reading.producers], np.int64)
    since = np.lexsort((rows.ints("commit"), rows.sids, started[rows.sids]))
    superseded |= _repeated(rows, steps, metric & ~superseded, since)
    table = rows.table.set_column(rows.table.column_names.index("attempt"), "attempt", pa.array(attempts))
    table = table.append_column("superseded", pa.array(superseded))
    table = table.append_column("beside", pa.array(beside))
    none = np.full(len(steps), NONE)
    return Placed(identified(reading, table, rows.sids), rows.sids, none, attempts, steps, superseded)


def leads(commits: pa.Table) -> Bools:
    """Return which commit rows are of a process that leads its attempt."""
    return commits["leader"].combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)


def metrics_of(commits: Placed) -> Bools:
    """Return which commit rows are the run's metrics: those with a key that are not `beside` the leader's."""
    beside = commits.table["beside"].to_numpy()
    return commits.table["key"].is_valid().to_numpy() & ~beside


def outdated(found: Timeline, attempts: Ints, steps: Ints) -> Bools:
    """Whether a later attempt owns the step of each row: the last one that had begun to own by then."""
    owner = np.full(len(steps), NONE)
    for attempt, first in sorted(found.owned_from.items()):
        if first is not None:
            owner[steps >= first] = attempt
    return attempts < owner


def replaced(attempts: Ints, steps: Ints, among: Bools, keys: Ints) -> Bools:
    """Whether a later attempt holds the same key at the same step, of the rows `among`."""
    behind = np.zeros(len(attempts), np.bool_)
    places = np.flatnonzero(among)
    if not len(places) or attempts[places].min() == attempts[places].max():
        return behind  # one attempt left: nothing to compare, and no look at the keys
    newest = _greatest(attempts[places], steps[places])
    places = places[np.isin(steps[places], steps[places][attempts[places] < newest])]
    newest = _greatest(attempts[places], steps[places], keys[places])
    behind[places] = attempts[places] < newest
    return behind


def _greatest(values: Ints, *columns: Ints) -> Ints:
    """Return for each row the greatest value among the rows with the same columns."""
    numbers, n = groups(*columns)
    greatest = np.full(n, NONE)
    np.maximum.at(greatest, numbers, values)
    return greatest[numbers]


def _beside(reading: Reading, rows: Rows, attempts: Ints, steps: Ints, among: Bools) -> Bools:
    """Whether, of the rows `among`, another process of the attempt speaks for the key at the step.

    That is the leader; where it does not say the key, the process of the lowest rank that does.
    """
    beside = np.zeros(len(steps), np.bool_)
    places = np.flatnonzero(among)
    ranks = np.array([producer.rank for producer in reading.producers], np.int64)[rows.sids[places]]
    standing = np.where(leads(rows.table)[places], LEADER, -1 - ranks)
    if len(places) and standing.min() < standing.max():  # else one process speaks, or all alike
        keys = rows.codes("key")[places]
        beside[places] = standing < _greatest(standing, attempts[places], steps[places], keys)
    return beside


def _repeated(rows: Rows, steps: Ints, among: Bools, since: Places) -> Bools:
    """Whether a later row of the order `since` has the same key, step and sub-index, of the rows `among`."""
    repeated = np.zeros(len(steps), np.bool_)
    places = since[among[since]]
    if len(places):
        numbers, n = groups(steps[places], rows.codes("key")[places], rows.ints("sub_index", 0)[places])
        order = np.arange(len(places))
        last = np.zeros(n, np.int64)
        last[numbers] = order  # of equal indices the last assignment stands
        repeated[places] = last[numbers] != order
    return repeated


def groups(*columns: Ints) -> tuple[Places, int]:
    """Number the distinct rows of some columns in sorted order; return each row's number, and how many."""
    numbers, n = _ranked(columns[0])
    for column in columns[1:]:
        places, m = _ranked(column)
        numbers, n = _ranked(numbers * m + places)
    return numbers, n


def turns(of: Places, n: int) -> tuple[Ints, Ints]:
    """Return which of its group each row is, 0 first, and of how many; `of` says which of n groups."""
    counts = np.bincount(of, minlength=n)
    order = np.argsort(of, kind="stable")
    found = np.empty(len(of), np.int64)
    found[order] = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    return found, counts[of]


def _ranked(values: Ints) -> tuple[Places, int]:
    """Return the place of each value among the distinct ones in sorted order, and how many there are."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, -1)
    if high - low > _DENSE * len(values):
        distinct, places = np.unique(values, return_inverse=True)
        return places, len(distinct)
    there = np.zeros(high - low + 1, np.bool_)  # close together: nothing needs to be sorted
    places = values - low
    there[places] = True
    if there.all():
        return places, len(there)
    return (np.cumsum(there) - 1)[places], int(np.count_nonzero(there))


def _epochs(attempts: Ints, steps: Ints, epochs: Mapping[tuple[int, int], int]) -> Ints:
    """Return the epoch of each row; rows of one step follow each other, so few changes are looked up."""
    firsts = first_rows(attempts, steps)
    places = zip(attempts[firsts].tolist(), steps[firsts].tolist(), strict=True)
    known = np.array([epochs.get(place, NONE) for place in places], np.int64)
    return np.repeat(known, np.diff(np.append(firsts, len(steps))))


def first_rows(*columns: Ints) -> Places:
    """Return where rows begin that differ from the row before in any of the columns."""
    changed = np.ones(len(columns[0]), np.bool_)
    if len(changed):
        changed[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(changed)


def identified(reading: Reading, table: pa.Table, sids: Ints) -> pa.Table:
    """Put the columns before a table that say whose each row is: run, session, role, rank, world."""
    producers = reading.producers
    own = {
        "run": pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(sids), np.int32)), [reading.label]),
        "session": _spread([p.session for p in producers], sids),
        "role": _spread([p.role for p in producers], sids),
        "rank": pa.array(np.array([p.rank for p in producers], np.int64)[sids]),
        "world": _spread([p.world for p in producers], sids),
    }
    return pa.table({**own, **dict(zip(table.column_names, table.columns, strict=True))})


def _spread(names: list[str], sids: Ints) -> pa.DictionaryArray:
    values, codes = np.unique(np.array(names, np.object_), return_inverse=True)
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int32)[sids]), pa.array(values, pa.string())
    )


def _with_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)
