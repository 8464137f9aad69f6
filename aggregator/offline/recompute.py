"""The log's own account of a key at a step: its records merged as the export merged them.

A *segment* is one key of one candidate: its records on each rank merged in the order they were made, then the
ranks in the order of the group, so that live and offline agree to the bit where one export made the key.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eventlog import Kind, ReduceType, Spread, histogram, moments

from ..naming import Meta
from .candidates import ALL, Candidate, Member, Part, candidates
from .payload import Payload
from .placing import groups, outdated, replaced, window_code
from .reading import NONE, codes, ints, without_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from .history import History
    from .reading import Bools, Ints

    Places = NDArray[np.intp]

_INTEGER_WORDS: Final = ("present", "count", "nan", "pos_inf", "neg_inf", "int_sum")
_FLOAT_WORDS: Final = ("sum", "min", "max")
_SPREADS: Final = tuple(Spread)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a key is, and over which ranks it is reduced when not over all of the export's."""

    key: str
    meta: Meta
    label: str | None


@dataclass(frozen=True)
class Segments:
    """Keys of candidates: `rows[i]` are the moments of `specs[spec[i]]` in `candidates[candidate[i]]`.

    `records` are the places of the records behind them, and `of_records` the segment each belongs to.
    """

    candidates: Sequence[Candidate]
    specs: Sequence[Spec]
    candidate: Ints
    spec: Ints
    lowest: Ints  # the first producer (its sid) that holds the key
    superseded: Bools
    records: Places
    of_records: Places
    merge: Callable[[], Ints]  # which takes as long as all the rest

    def __len__(self) -> int:
        return len(self.candidate)

    @cached_property
    def rows(self) -> Ints:
        """The moments: merged when they are first looked at."""
        return self.merge()


def segments(history: History, keys: Collection[str] | None = None) -> Segments:
    """Return the segments of every bound step, of all keys or some; those of superseded attempts too."""
    made = candidates_of(history)
    specs, spec_of = history.once(_specs)
    candidate, records = _expand(history, made)
    known = spec_of[records] >= 0
    candidate, records = candidate[known], records[known]
    allowed = _allowed(made, specs, candidate, spec_of[records])
    allowed &= history.records.table["complete"].to_numpy()[records]
    if keys is not None:
        allowed &= np.array([spec.key in keys for spec in specs], np.bool_)[spec_of[records]]
    candidate, records = candidate[allowed], records[allowed]
    made, candidate = _at_own_steps(history, made, candidate, records)
    return _merge(history, made, specs, candidate, spec_of[records], records)


def specs_of(history: History) -> list[Spec]:
    """Return what was recorded, sorted."""
    specs, _ = history.once(_specs)
    return sorted(specs, key=lambda spec: (spec.key, spec.meta.kind.value, str(spec)))


def candidates_of(history: History) -> list[Candidate]:
    """Return the candidates of every bound step, of superseded attempts too."""
    members = [Member(p.session, p.rank, p.world) for p in history.reading.producers]
    with without_collections():
        return candidates(history.made, history.timeline, members, history.leaders, history.reading.damaged)


def _specs(history: History) -> tuple[list[Spec], Ints]:
    """Return the distinct specs, and the number of each record's; -1: of a kind this version knows not."""
    table = history.records.table
    columns = ("key", "kind", "reduce_type", "spread", "group", "tags")
    texts = [table[name].combine_chunks().dictionary.to_pylist() for name in columns]
    numbers = [codes(table[name]) + 1 for name in columns]
    numbers[-1][_others(texts[1], numbers[1])] = 0  # a stat's tags say which quantiles are asked
    number = np.zeros(table.num_rows, np.int64)
    for words, of_words in zip(texts, numbers, strict=True):
        number = number * (len(words) + 1) + of_words
    places, n = groups(number)
    distinct = np.empty(n, np.int64)
    distinct[places] = number
    specs: dict[Spec, int] = {}
    known = np.full(len(distinct), -1)
    for i, value in enumerate(distinct.tolist()):
        said: list[Any] = []
        rest = value
        for words in reversed(texts):
            rest, place = divmod(rest, len(words) + 1)
            said.append(words[place - 1] if place else None)
        with suppress(ValueError):
            known[i] = specs.setdefault(_spec(*reversed(said)), len(specs))
    return list(specs), known[places]


def _others(kinds: Sequence[str], kind: Ints) -> Bools:
    """Whether each record is no stat; `kind` counts from 1."""
    stat = Kind.STAT.value
    return kind != (kinds.index(stat) + 1 if stat in kinds else 0)


def _spec(
    key: str, kind: str, reduce_type: str | None, spread: str | None, label: str | None, tags: str | None
) -> Spec:
    reduction = None if reduce_type is None else ReduceType(reduce_type)
    asked = histogram.asked_in(tags)
    return Spec(key, Meta(Kind(kind), reduction, None, Spread(spread or Spread.SHARDS), asked), label)


def _expand(history: History, made: Sequence[Candidate]) -> tuple[Ints, Places]:
    """Return (candidate, record) for all records that candidates cover, in the order in which they merge."""
    sid = {producer.session: i for i, producer in enumerate(history.reading.producers)}
    parts = [(i, part) for i, candidate in enumerate(made) for part in candidate.parts]
    wanted = np.array([window_code(sid[part.session], part.window) for _, part in parts], np.int64)
    windows = history.records.windows
    # Mostly they are in order: a process numbers its windows and its records as they come.
    order = None if (windows[1:] >= windows[:-1]).all() else np.argsort(windows, kind="stable")
    first = np.searchsorted(windows, wanted, "left", order)
    count = np.searchsorted(windows, wanted, "right", order) - first
    starts = np.cumsum(count) - count
    records = np.arange(count.sum()) + np.repeat(first - starts, count)
    records = records if order is None else order[records]
    kept = np.ones(len(records), np.bool_)
    for (_, part), start, n in zip(parts, starts.tolist(), count.tolist(), strict=True):
        if part.only != ALL or part.gone:
            kept[start : start + n] = _covered(history.records.table, records[start : start + n], part)
    candidate = np.repeat(np.array([i for i, _ in parts], np.int64), count)
    return candidate[kept], records[kept]


def _covered(table: pa.Table, records: Places, part: Part) -> Bools:
    """Whether each record is among what a single-tracker or single-key export covered."""
    rows = table.select(["tracker", "key"]).take(records)
    pairs = list(zip(rows["tracker"].to_pylist(), rows["key"].to_pylist(), strict=True))

    def matches(pattern: tuple[str | None, str | None]) -> Bools:
        tracker, key = pattern
        return np.array([tracker in (None, t) and key in (None, k) for t, k in pairs], np.bool_)

    covered = matches(part.only)
    for pattern in part.gone:
        covered &= ~matches(pattern)
    return covered


def _at_own_steps(
    history: History, made: Sequence[Candidate], candidate: Ints, records: Places
) -> tuple[Sequence[Candidate], Ints]:
    """Give what was measured at a step of its own a candidate of its own: the same export, at that step."""
    table = history.records.table
    kinds = table["kind"].combine_chunks().dictionary.to_pylist()
    own = codes(table["kind"]) == (kinds.index(Kind.SCALAR.value) if Kind.SCALAR.value in kinds else NONE)
    own &= table["tags"].is_valid().to_numpy()
    steps = history.records.steps[records]
    at = np.array([c.step for c in made], np.int64)[candidate]
    elsewhere = np.flatnonzero(own[records] & (steps != NONE) & (steps != at))
    if not len(elsewhere):
        return made, candidate
    numbers, firsts = _numbered(candidate[elsewhere], steps[elsewhere])
    places = elsewhere[firsts]
    pairs = zip(candidate[places].tolist(), steps[places].tolist(), strict=True)
    added = [made[i]._replace(step=step) for i, step in pairs]
    candidate = candidate.copy()
    candidate[elsewhere] = len(made) + numbers
    return [*made, *added], candidate


def _allowed(made: Sequence[Candidate], specs: Sequence[Spec], candidate: Ints, spec: Ints) -> Bools:
    """Whether a candidate takes a spec.

    A key with a group of its own needs an export over all of that group (or is alone in it); the other keys
    never travel over a call's second group.
    """
    labels = sorted({s.label for s in specs if s.label is not None})
    ranks = [frozenset(map(int, label.split(","))) for label in labels]
    takes = [
        [not c.second, *(len(r) == 1 if c.members is None else r <= set(c.members) for r in ranks)]
        for c in made
    ]
    label = np.array([0 if s.label is None else labels.index(s.label) + 1 for s in specs], np.int64)
    return np.array(takes, np.bool_).reshape(len(made), 1 + len(labels))[candidate, label[spec]]


def _merge(
    history: History,
    made: Sequence[Candidate],
    specs: Sequence[Spec],
    candidate: Ints,
    spec: Ints,
    records: Places,
) -> Segments:
    sids = history.records.sids[records]
    # On each rank first, in the order of the records; then over the ranks, in the order of the group.
    of_rank, at = _numbered(candidate, sids, spec)
    of_segment, first = _numbered(candidate[at], spec[at])
    spreads = np.array([_SPREADS.index(s.meta.spread) for s in specs], np.int8)[spec[at]]
    # Copies of one value count once: the first rank's.
    counted = spreads != _SPREADS.index(Spread.REPLICATED)
    counted[first] = True

    def merge() -> Ints:
        by_rank = moments.pool(moments_of(history.records.table, records), of_rank, len(at))
        rows = moments.pool(by_rank[counted], of_segment[counted], len(first))
        _count_shares_once(rows, by_rank, of_segment, spreads == _SPREADS.index(Spread.SHARES))
        return rows

    lowest = np.full(len(first), len(history.reading.producers))
    np.minimum.at(lowest, of_segment, sids[at])
    where = at[first]
    kept = counted[of_rank]
    return Segments(
        candidates=made,
        specs=specs,
        candidate=candidate[where],
        spec=spec[where],
        lowest=lowest,
        superseded=_superseded(history, made, specs, candidate[where], spec[where]),
        records=records[kept],
        of_records=of_segment[of_rank[kept]],
        merge=merge,
    )


def _numbered(*columns: Ints) -> tuple[Places, Places]:
    """Number distinct rows in the order in which they first appear; return (numbers, first places)."""
    numbers, n = groups(*columns)
    if n == len(numbers):
        return np.arange(n), np.arange(n)
    first = np.zeros(n, np.intp)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]  # of equal indices the last assignment stands
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[numbers], first[order]


def moments_of(table: pa.Table, records: Places) -> Ints:
    """Return the moments of some records, shape (len(records), WORDS)."""
    rows = np.empty((moments.WORDS, len(records)), np.int64).T  # what follows works word by word
    for word, name in enumerate(_INTEGER_WORDS):
        rows[:, word] = ints(table[name], 0)[records]
    floats = rows.view(np.float64)
    for word, name in enumerate(_FLOAT_WORDS, moments.SUM):
        floats[:, word] = table[name].to_numpy()[records]
    return rows


def histograms(history: History, found: Segments, segments: Collection[int]) -> dict[int, Ints]:
    """Return the histogram of each of the segments of which all values are in the payload."""
    chosen = np.isin(found.of_records, list(segments))
    records, of = found.records[chosen], found.of_records[chosen]
    order = np.argsort(records, kind="stable")
    records, of = records[order], of[order]
    counts = {segment: histogram.empty(1)[0] for segment in segments}
    for place, values in Payload(history).values(records) if len(records) else ():
        counted = histogram.of(values)
        for segment in of[slice(*np.searchsorted(records, [place, place + 1]))].tolist():
            counts[segment] += counted
    odd = found.rows[:, moments.NAN : moments.INT_SUM].sum(axis=1)
    finite = found.rows[:, moments.COUNT] - odd
    return {segment: those for segment, those in counts.items() if those.sum() == finite[segment]}


def _count_shares_once(rows: Ints, by_rank: Ints, of_segment: Places, shares: Bools) -> None:
    """A number in parts is as many numbers as each rank holds parts, not as there are parts."""
    chosen = of_segment[shares]
    rows[chosen, moments.COUNT] = 0
    np.maximum.at(rows[:, moments.COUNT], chosen, by_rank[shares, moments.COUNT])


def _superseded(
    history: History, made: Sequence[Candidate], specs: Sequence[Spec], candidate: Ints, spec: Ints
) -> Bools:
    attempts = np.array([c.attempt for c in made], np.int64)[candidate]
    steps = np.array([c.step for c in made], np.int64)[candidate]
    keys = {key: i for i, key in enumerate(sorted({s.key for s in specs}))}
    superseded = outdated(history.timeline, attempts, steps)
    key = np.array([keys[s.key] for s in specs], np.int64)[spec]
    return superseded | replaced(attempts, steps, ~superseded, key)
