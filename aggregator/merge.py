"""Exports that can be merged: for workers that share no process group, a rollout controller's case.

    answer = tracker.export().to_json()                      # on each worker; any RPC may carry it
    stats = merge_worker_stats(map(Export.from_json, answers))

An export remembers the moments its numbers came from, so merging is pooling: one sum over one count, the true
extremes. Plain dicts are read as far as they go: a mean needs its `__count`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from eventlog import Kind, ReduceType, Spread, errors, histogram, moments

from .naming import Columns, Meta, Names, suffixes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["Export", "merge_worker_stats"]

_COUNT = "__count"
_AVG, _MIN, _MAX = "/avg", "/min", "/max"


class _Key(NamedTuple):
    """A key, what it is, and its moments; `plain` when they were read from bare numbers.

    `counts` is its histogram, where quantiles are asked of it.
    """

    key: str
    meta: Meta
    row: Ints
    plain: bool = False
    counts: Ints | None = None


class Export(dict[str, float]):
    """The numbers of an export by name; a dict that also carries what they are and came from.

    `update` with another export takes that over too. A number that is changed, added or deleted by hand
    counts as it stands in the dict. `clashes` are the names that two trackers or keys produced: the later one
    won (timings of one key are no clash, they are pooled). `parts` are the moments as they came.
    """

    clashes: tuple[str, ...] = ()
    parts: tuple[Columns, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Columns]) -> Self:
        """Return the export of reduced moments."""
        made = cls()
        made.parts = tuple(parts)
        if _overlap(made.parts):
            settled, made.clashes = _settled(made.parts)
            made.parts = (settled,)
        for columns in made.parts:
            dict.update(made, columns.names.of(columns.rows, columns.counts))
        return made

    @property
    def kinds(self) -> dict[str, Meta]:
        """What each key is: by key (`ppo_actor/kl`), not by name (`ppo_actor/kl/avg`)."""
        return {found.key: found.meta for found in self.split()[0]}

    @property
    def moments(self) -> dict[str, Ints]:
        """The moments of each key, shape (WORDS,)."""
        return {found.key: found.row for found in self.split()[0]}

    def update(self, *args: Any, **kwargs: float) -> None:
        """Update as a dict does, and take over what other exports carry."""
        dict.update(self, *args, **kwargs)
        self.parts += tuple(part for other in args if isinstance(other, Export) for part in other.parts)

    def __or__(self, other: Any) -> Export:
        made = Export()
        made.update(self)
        made.update(other)
        return made

    def __ior__(self, other: Any) -> Self:
        self.update(other)
        return self

    def copy(self) -> Export:
        """Return another export with the same numbers."""
        return self | {}

    def __reduce__(self) -> tuple[Any, ...]:
        keys, plain = self.split()
        return _restored, ([tuple(found) for found in keys], plain)

    def to_json(self) -> str:
        """Return strict JSON from which everything comes back exactly, NaN and infinities too."""
        keys, plain = self.split()
        rows = [
            [found.key, *_meta_to_json(found.meta), *found.row.tolist(), *_asked(found)] for found in keys
        ]
        numbers = {name: value if math.isfinite(value) else repr(value) for name, value in plain.items()}
        return json.dumps({"keys": rows, "numbers": numbers}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Export:
        """Read what `to_json` wrote; a MergeError for anything else."""
        try:
            data = json.loads(text)
            keys = [_key_from_json(row) for row in data["keys"]]
            plain = {name: float(v) if isinstance(v, str) else v for name, v in data["numbers"].items()}
            return _restored(keys, plain)
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            raise errors.MergeError(f"expected an export as JSON, got {text[:80]!r}") from exc

    def split(self) -> tuple[list[_Key], dict[str, float]]:
        """Return the keys whose numbers all stand as their moments say, and every other number by name."""
        latest = {found.key: found for columns in self.parts for found in _present(columns)}
        names = _names(latest.values())
        said = names.of(_rows(latest.values()), _counts(latest.values()))
        changed = {
            int(i)
            for i, name in zip(names.row_of, names.names, strict=True)
            if name in said and not _same(said[name], self.get(name))
        }
        keys = [found for i, found in enumerate(latest.values()) if i not in changed]
        carried = _names(keys).distinct
        return keys, {name: value for name, value in self.items() if name not in carried}


def _restored(keys: Iterable[tuple[Any, ...]], plain: dict[str, float]) -> Export:
    found = [_Key(*key) for key in keys]
    export = Export.of([_columns(found)])
    dict.update(export, plain)
    return export


def _same(one: float, other: float | None) -> bool:
    return other is not None and (one == other or (one != one and other != other))  # noqa: PLR0124 - NaN


def _meta_to_json(meta: Meta) -> list[str | None]:
    reduce_type = None if meta.reduce_type is None else meta.reduce_type.value
    return [meta.kind.value, reduce_type, meta.denominator, meta.spread.value]


def _asked(found: _Key) -> list[list[Any]]:
    """Return, where quantiles are asked: which, the buckets that are not empty, and what is in them."""
    if found.counts is None:
        return []
    return [list(found.meta.quantiles), *histogram.sparse(found.counts)]


def _key_from_json(parts: Sequence[Any]) -> _Key:
    key, kind, reduce_type, denominator, spread, *rest = parts
    row, asked = np.array(rest[: moments.WORDS], np.int64), rest[moments.WORDS :]
    reduction = None if reduce_type is None else ReduceType(reduce_type)
    meta = Meta(Kind(kind), reduction, denominator, Spread(spread))
    if not asked:
        return _Key(key, meta, row)
    quantiles, buckets, contents = asked
    meta = meta._replace(quantiles=histogram.as_quantiles(quantiles))
    return _Key(key, meta, row, counts=histogram.dense(buckets, contents))


# -- keys of several parts -------------------------------------------------------------------------


def _names(keys: Iterable[_Key]) -> Names:
    found = tuple(keys)
    return Names((key.key for key in found), (key.meta for key in found))


def _rows(keys: Iterable[_Key]) -> Ints:
    rows = [key.row for key in keys]
    return np.stack(rows) if rows else moments.empty(0)


def _counts(keys: Iterable[_Key]) -> Ints | None:
    counts = [key.counts for key in keys if key.counts is not None]
    return np.stack(counts) if counts else None


def _columns(keys: Iterable[_Key]) -> Columns:
    found = tuple(keys)
    return Columns(_names(found), _rows(found), _counts(found))


def _present(columns: Columns) -> list[_Key]:
    there = np.flatnonzero(columns.rows[:, moments.PRESENT]).tolist()
    names, counts = columns.names, {}
    if columns.counts is not None:
        counts = dict(zip(names.asked.tolist(), columns.counts, strict=True))
    return [_Key(names.keys[i], names.metas[i], columns.rows[i], counts=counts.get(i)) for i in there]


def _overlap(parts: tuple[Columns, ...]) -> bool:
    seen: frozenset[str] = frozenset()
    for columns in parts:
        if columns.names.ambiguous or not seen.isdisjoint(columns.names.distinct):
            return True
        seen = seen | columns.names.distinct if seen else columns.names.distinct
    return False


def _settled(parts: Iterable[Columns]) -> tuple[Columns, tuple[str, ...]]:
    """Return one part without any key twice, and the names that several keys or trackers produced."""
    settled: dict[str, _Key] = {}
    produced: Counter[str] = Counter()
    for found in (found for columns in parts for found in _present(columns)):
        before = settled.get(found.key)
        if before is not None and before.meta == found.meta and found.meta.kind is Kind.TIMING:
            pooled = moments.merge(np.stack([before.row, found.row])[:, np.newaxis])[0]
            settled[found.key] = found._replace(row=pooled)
            continue
        settled[found.key] = found
        produced.update(found.key + suffix for suffix in suffixes(found.meta))
    clashes = tuple(sorted(name for name, times in produced.items() if times > 1))
    return _columns(settled.values()), clashes


# -- merging ---------------------------------------------------------------------------------------


def merge_worker_stats(exports: Iterable[Mapping[str, float]], sum_keys: Iterable[str] = ()) -> Export:
    """Merge the exports of workers that hold different data: one sum over one count, the true extremes.

    Scalars weigh by their count; counts, sums and counters add. Workers may hold any subset of keys. Plain
    dicts are taken too: a mean needs its `__count` beside it (`base__count` for `base/avg`, `base/min` and
    `base/max`), and what is to be added up without one is named in `sum_keys`. Raises a MergeError naming the
    keys for a mean without a count, and where workers disagree on what a key is.
    """
    sums = frozenset(sum_keys)
    workers: list[list[_Key]] = []
    metas: dict[str, _Key] = {}
    uncounted: set[str] = set()
    for export in exports:
        keys, plain = export.split() if isinstance(export, Export) else ([], dict(export))
        _refuse_means(keys, sums)
        read, bare = _read_plain(plain, sums)
        uncounted |= bare
        workers.append([*keys, *read])
        for key in workers[-1]:
            metas[key.key] = _agreed(metas.get(key.key), key)
    if uncounted:
        raise errors.MergeError(
            f"expected a count beside every mean, got none for {_listed(uncounted)} (merge the exports "
            "themselves, or name in sum_keys what is a sum)"
        )
    return _pooled(workers, _names(metas.values()))


def _pooled(workers: list[list[_Key]], names: Names) -> Export:
    if names.ambiguous:
        twice = [name for name, times in Counter(names.names).items() if times > 1]
        raise errors.MergeError(f"expected every name from one key, got {_listed(twice)} from two")
    if not names.keys:
        return Export()
    index = {key: i for i, key in enumerate(names.keys)}
    stack = np.tile(moments.empty(len(index)), (len(workers), 1, 1))
    for i, keys in enumerate(workers):
        for key in keys:
            stack[i, index[key.key]] = key.row
    of_spread = {
        spread: np.array([i for i, meta in enumerate(names.metas) if meta.spread is spread], np.intp)
        for spread in Spread
    }
    rows, unequal = moments.across(stack, of_spread[Spread.SHARES], of_spread[Spread.REPLICATED])
    if len(unequal):
        keys = _listed(names.keys[i] for i in unequal)
        raise errors.MergeError(f"expected the same on all workers (replicated), got different {keys}")
    return Export.of([Columns(names, rows, _pooled_counts(workers, names, stack))])


def _pooled_counts(workers: list[list[_Key]], names: Names, stack: Ints) -> Ints | None:
    """Add up the histograms; of copies, which are equal here, one is left."""
    if not len(names.asked):
        return None
    place = {names.keys[i]: n for n, i in enumerate(names.asked.tolist())}
    counts = histogram.empty(len(place))
    for key in (key for keys in workers for key in keys if key.counts is not None):
        counts[place[key.key]] += key.counts
    holders = stack[:, names.asked, moments.PRESENT].sum(axis=0)
    copies = [names.metas[i].spread is Spread.REPLICATED for i in names.asked]
    return histogram.once(counts, holders, np.flatnonzero(copies))


def _agreed(one: _Key | None, other: _Key) -> _Key:
    """Return what a key is, when two workers say it; what an export says counts more than a guess."""
    if one is None or one.meta == other.meta:
        return other if one is None or one.plain else one
    if not (one.plain or other.plain) or suffixes(one.meta) != suffixes(other.meta):
        raise errors.MergeError(
            f"key {other.key!r}: expected the same on all workers, got {one.meta} but {other.meta}"
        )
    for key in (one, other):
        if key.meta.reduce_type is ReduceType.SUM and key.meta.kind is Kind.STAT:
            return key  # integers among floats add as floats
    return other if one.plain else one


def _refuse_means(keys: Iterable[_Key], sums: frozenset[str]) -> None:
    means = [key.key for key in keys if key.key in sums and suffixes(key.meta) != ("",)]
    if means:
        raise errors.MergeError(f"expected sums in sum_keys, got {_listed(means)}, which the exports average")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


# -- plain dicts -----------------------------------------------------------------------------------


def _read_plain(plain: Mapping[str, float], sums: frozenset[str]) -> tuple[list[_Key], set[str]]:
    """Read moments out of bare numbers: (keys, names of means that have no count)."""
    left = dict(plain)
    keys = [_sum(name, left.pop(name)) for name in plain if name in sums]
    keys += [
        _mean(name, ReduceType.SCALAR, left.pop(name), _count_of(name, left.pop(name + _COUNT)))
        for name in plain
        if name in left and name + _COUNT in left
    ]
    for base in [name.removesuffix(_AVG) for name in left if name.endswith(_AVG)]:
        if base + _COUNT in left:
            keys += _family(base, left)
    for name in [name for name in left if name.endswith(_COUNT)]:
        keys.append(_sum(name, _count_of(name.removesuffix(_COUNT), left.pop(name))))
    return keys, set(left)


def _family(base: str, left: dict[str, float]) -> list[_Key]:
    """Take `base/avg`, its extremes (AReaL leaves infinite ones out) and its count out of `left`."""
    number = _count_of(base, left.pop(base + _COUNT))
    keys = [_mean(base + _AVG, ReduceType.AVG, left.pop(base + _AVG), number), _sum(base + _COUNT, number)]
    for suffix, reduce_type in ((_MIN, ReduceType.MIN), (_MAX, ReduceType.MAX)):
        if base + suffix in left:
            row = moments.of([float(left.pop(base + suffix))])
            keys.append(_Key(base + suffix, Meta(Kind.STAT, reduce_type), row, plain=True))
    return keys


def _mean(name: str, reduce_type: ReduceType, value: float, number: int) -> _Key:
    row = moments.of([float(value)] if number else [])
    row[[moments.COUNT, moments.NAN, moments.POS_INF, moments.NEG_INF]] *= number
    moments.floats(row)[moments.SUM] *= number
    kind = Kind.SCALAR if reduce_type is ReduceType.SCALAR else Kind.STAT
    return _Key(name, Meta(kind, reduce_type), row, plain=True)


def _sum(name: str, value: float) -> _Key:
    if isinstance(value, int) and abs(value) < 2**63:
        return _Key(name, Meta(Kind.COUNTER), moments.of_integers([1], [value])[0], plain=True)
    return _Key(name, Meta(Kind.STAT, ReduceType.SUM), moments.of([float(value)]), plain=True)


def _count_of(name: str, value: float) -> int:
    if not (value >= 0 and value % 1 == 0):  # also refuses NaN and infinity
        raise errors.MergeError(f"key {name!r}: expected a count (a whole number), got {value!r}")
    return int(value)
