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
from collections.abc import Iterable, Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from eventlog import Kind, ReduceType, Spread, errors, histogram, moments

from .naming import Columns, Meta, Names, suffixes
from .plain import Key, read_plain, without_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["Export", "merge_worker_stats"]

_NOT_FINITE: Final = ("nan", "inf", "-inf")
_MIXED: Final = "where some workers sent exports and others plain dicts, merge the exports themselves, of all"
_COUNTED: Final = (Kind.SCALAR, Kind.TIMING)  # with `k__count` beside `k`


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
        taken = [part for other in args if isinstance(other, Export) for part in other.parts]
        if taken:
            self.parts = _needed((*self.parts, *taken))

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
            plain = {name: _number_from_json(name, value) for name, value in data["numbers"].items()}
            return _restored(keys, plain)
        except errors.MergeError:
            raise
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
            raise errors.MergeError(f"expected an export as JSON, got {text!r:.80}") from exc

    def split(self) -> tuple[list[Key], dict[str, float]]:
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
    found = [Key(*key) for key in keys]
    export = Export.of([_columns(found)])
    dict.update(export, plain)
    return export


def _same(one: float, other: float | None) -> bool:
    return other is not None and (one == other or (one != one and other != other))  # noqa: PLR0124 - NaN


def _meta_to_json(meta: Meta) -> list[str | None]:
    reduce_type = None if meta.reduce_type is None else meta.reduce_type.value
    return [meta.kind.value, reduce_type, meta.denominator, meta.spread.value]


def _asked(found: Key) -> list[list[Any]]:
    """Return, where quantiles are asked: which, the buckets that are not empty, and what is in them."""
    if found.counts is None:
        return []
    return [list(found.meta.quantiles), *histogram.sparse(found.counts)]


def _key_from_json(parts: Sequence[Any]) -> Key:
    key, *what = parts
    try:
        return _read_key(key, *what)
    except (LookupError, OverflowError, TypeError, ValueError) as exc:
        raise errors.MergeError(f"expected an export as JSON, got of key {key!r:.80}: {exc}") from exc


def _read_key(key: Any, kind: str, reduce_type: Any, denominator: Any, spread: str, *rest: Any) -> Key:
    words, asked = rest[: moments.WORDS], rest[moments.WORDS :]
    row = _integers(words)
    if not isinstance(key, str) or not isinstance(denominator, str | None):
        raise TypeError("expected keys (str)")
    if len(row) != moments.WORDS or (row[moments.PRESENT : moments.INT_SUM] < 0).any():
        raise ValueError(f"expected {moments.WORDS} words of moments, counts of 0 or more, got {words}")
    reduction = None if reduce_type is None else ReduceType(reduce_type)
    meta = Meta(Kind(kind), reduction, denominator, Spread(spread))
    if not asked:
        return Key(key, meta, row)
    quantiles, buckets, contents = asked[0], *map(_integers, asked[1:])
    if (buckets < 0).any() or (contents < 0).any():
        raise ValueError("expected a histogram without anything below 0")
    meta = meta._replace(quantiles=histogram.as_quantiles(quantiles))
    return Key(key, meta, row, counts=histogram.dense(buckets, contents))


def _integers(values: Sequence[Any]) -> Ints:
    if not all(type(value) is int for value in values):
        raise TypeError(f"expected integers, got {values!r:.80}")
    return np.array(values, np.int64)


def _number_from_json(name: str, value: Any) -> float:
    if isinstance(value, int | float):
        return value
    if value in _NOT_FINITE:
        return float(value)
    raise errors.MergeError(f"expected an export as JSON, got no number of key {name!r}: {value!r:.80}")


# -- keys of several parts -------------------------------------------------------------------------


def _names(keys: Iterable[Key]) -> Names:
    found = tuple(keys)
    return Names((key.key for key in found), (key.meta for key in found))


def _rows(keys: Iterable[Key]) -> Ints:
    rows = [key.row for key in keys]
    return np.stack(rows) if rows else moments.empty(0)


def _counts(keys: Iterable[Key]) -> Ints | None:
    counts = [key.counts for key in keys if key.counts is not None]
    return np.stack(counts) if counts else None


def _columns(keys: Iterable[Key]) -> Columns:
    found = tuple(keys)
    return Columns(_names(found), _rows(found), _counts(found))


def _present(columns: Columns) -> list[Key]:
    there = np.flatnonzero(columns.rows[:, moments.PRESENT]).tolist()
    names, counts = columns.names, {}
    if columns.counts is not None:
        counts = dict(zip(names.asked.tolist(), columns.counts, strict=True))
    return [Key(names.keys[i], names.metas[i], columns.rows[i], counts=counts.get(i)) for i in there]


def _needed(parts: tuple[Columns, ...]) -> tuple[Columns, ...]:
    """Return the parts that say something of which no later one says anything."""
    said: set[str] = set()
    kept: list[Columns] = []
    for columns in reversed(parts):
        keys = set(compress(columns.names.keys, columns.rows[:, moments.PRESENT].tolist()))
        if not keys <= said:
            kept.append(columns)
            said |= keys
    return tuple(reversed(kept))


def _overlap(parts: tuple[Columns, ...]) -> bool:
    seen: frozenset[str] = frozenset()
    for columns in parts:
        if columns.names.ambiguous or not seen.isdisjoint(columns.names.distinct):
            return True
        seen = seen | columns.names.distinct if seen else columns.names.distinct
    return False


def _settled(parts: Iterable[Columns]) -> tuple[Columns, tuple[str, ...]]:
    """Return one part without any key twice, and the names that several keys or trackers produced."""
    settled: dict[str, Key] = {}
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
    with np.errstate(all="ignore"):
        return _merged(_as_exports(exports), _as_keys(sum_keys))


def _merged(exports: list[Mapping[str, float]], sums: frozenset[str]) -> Export:
    workers: list[list[Key]] = []
    uncounted: set[str] = set()
    for export in exports:
        keys, plain = export.split() if isinstance(export, Export) else ([], dict(export))
        _refuse_means(keys, sums)
        read, bare = read_plain(plain, sums)
        uncounted |= bare
        workers.append([*keys, *read])
    if uncounted:
        raise errors.MergeError(
            f"expected a count beside every mean, got none for {_listed(uncounted)} (merge the exports "
            "themselves, or name in sum_keys what is a sum)"
        )
    scalars = {key.key: key.meta for keys in workers for key in keys if key.meta.kind in _COUNTED}
    workers = [[without_values(key, scalars) for key in keys] for keys in workers]
    metas: dict[str, Key] = {}
    for key in (key for keys in workers for key in keys):
        metas[key.key] = _agreed(metas.get(key.key), key)
    return _pooled(workers, _names(metas.values()))


def _as_keys(sum_keys: Any) -> frozenset[str]:
    if isinstance(sum_keys, str) or not isinstance(sum_keys, Iterable):
        raise errors.MergeError(f"expected sum_keys as a list of keys, got {sum_keys!r:.80}")
    return frozenset(sum_keys)


def _as_exports(exports: Any) -> list[Mapping[str, float]]:
    if isinstance(exports, Mapping | str | bytes) or not isinstance(exports, Iterable):
        raise errors.MergeError(f"expected a list of exports (dicts), got {type(exports).__name__}")
    found: list[Any] = list(exports)
    for worker, export in enumerate(found):
        if not isinstance(export, Mapping):
            kind = type(export).__name__
            raise errors.MergeError(f"expected a list of exports (dicts), got {kind} for worker {worker}")
    return found


def _pooled(workers: list[list[Key]], names: Names) -> Export:
    if names.ambiguous:
        twice = [name for name, times in Counter(names.names).items() if times > 1]
        raise errors.MergeError(
            f"expected every name from one key, got {_listed(twice)} from two ({_MIXED}; else rename a key)"
        )
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
    wrapped = {*_wrapped(stack, rows, of_spread[Spread.SHARDS]).tolist(), *names.too_large(rows)}
    if wrapped:
        keys = _listed(names.keys[i] for i in wrapped)
        raise errors.MergeError(f"expected counts and sums that fit int64, got more for {keys}")
    different = {names.keys[i] for i in unequal} | _unlike(workers)
    if different:
        raise errors.MergeError(
            f"expected the same on all workers (replicated), got different {_listed(different)}"
        )
    return Export.of([Columns(names, rows, _pooled_counts(workers, names, stack))])


def _unlike(workers: list[list[Key]]) -> set[str]:
    """Return the replicated keys whose histograms are not equal."""
    first: dict[str, Ints] = {}
    copies = [key for keys in workers for key in keys if key.meta.spread is Spread.REPLICATED]
    asked = [(key.key, key.counts) for key in copies if key.counts is not None]
    return {key for key, counts in asked if not np.array_equal(first.setdefault(key, counts), counts)}


def _wrapped(stack: Ints, rows: Ints, pooled: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the pooled positions whose count int64 could not hold."""
    near = stack[:, pooled, moments.COUNT].sum(axis=0, dtype=np.float64)
    return pooled[np.abs(near - rows[pooled, moments.COUNT]) >= 2.0**63]


def _pooled_counts(workers: list[list[Key]], names: Names, stack: Ints) -> Ints | None:
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


def _agreed(one: Key | None, other: Key) -> Key:
    """Return what a key is, when two workers say it; what an export says counts more than a guess."""
    if one is None or one.meta == other.meta:
        return other if one is None or one.plain else one
    if not (one.plain or other.plain) or suffixes(one.meta) != suffixes(other.meta):
        hint = f" ({_MIXED})" if one.plain or other.plain else ""
        raise errors.MergeError(
            f"key {other.key!r}: expected the same on all workers, got {one.meta} but {other.meta}{hint}"
        )
    for key in (one, other):
        if key.meta.reduce_type is ReduceType.SUM and key.meta.kind is Kind.STAT:
            return key  # integers among floats add as floats
    return other if one.plain else one


def _refuse_means(keys: Iterable[Key], sums: frozenset[str]) -> None:
    means = [key.key for key in keys if key.key in sums and suffixes(key.meta) != ("",)]
    if means:
        raise errors.MergeError(f"expected sums in sum_keys, got {_listed(means)}, which the exports average")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
