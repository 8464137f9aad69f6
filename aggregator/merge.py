"""Exports that can be merged: for workers that share no process group, which is a rollout controller's case.

    stats = tracker.export().to_json()                       # on each worker, sent by any RPC
    merged = merge_worker_stats(map(Export.from_json, answers))

An export remembers the moments its numbers came from, so merging is pooling: one sum over one count, true
extremes. From plain dicts the same is read as far as it goes: a mean needs its `__count`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from eventlog import Kind, ReduceType, Spread, errors, moments

from .naming import Columns, Meta, Names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["Export", "merge_worker_stats"]

_COUNT = "__count"


class Export(dict[str, float]):
    """The numbers of an export by name; a dict that also carries where they came from.

    `update` with another export takes its moments over too. A number that is changed, added or deleted by hand
    counts as it stands in the dict from then on. `clashes` are names that two trackers produced: the later one
    won, except for timings, which were pooled.
    """

    clashes: tuple[str, ...] = ()
    _parts: tuple[Columns, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Columns]) -> Self:
        """Make the export of reduced moments."""
        made = cls()
        found = tuple(parts)
        seen: set[str] = set()
        for columns in found:
            if not seen.isdisjoint(columns.names.distinct) or columns.names.ambiguous:
                settled, made.clashes = _settle(found)
                found = (settled,)
                break
            seen |= columns.names.distinct
        for columns in found:
            dict.update(made, columns.names.of(columns.rows))
        made._parts = found
        return made

    @property
    def kinds(self) -> dict[str, Meta]:
        """What each key is, by key (not by name): `ppo_actor/kl`, where the names are `ppo_actor/kl/avg`, …."""
        return {key: meta for key, meta, _ in self._keys()}

    @property
    def moments(self) -> dict[str, Ints]:
        """The moments of each key, shape (WORDS,)."""
        return {key: row for key, _, row in self._keys()}

    def update(self, *args: Any, **kwargs: float) -> None:
        """Update as a dict does; from an export its moments too."""
        dict.update(self, *args, **kwargs)
        self._parts += tuple(part for other in args if isinstance(other, Export) for part in other._parts)

    def __or__(self, other: Any) -> Export:
        made = type(self)()
        made.update(self)
        made.update(other)
        return made

    def __ior__(self, other: Any) -> Self:
        self.update(other)
        return self

    def copy(self) -> Export:
        """Return another export of the same."""
        return self | {}

    def __reduce__(self) -> tuple[Any, ...]:
        keys, plain = self._split()
        return _restore, (tuple(k[:2] for k in keys), np.array([k.row for k in keys]), plain)

    def to_json(self) -> str:
        """Return strict JSON; non-finite numbers and all integers come back exactly."""
        keys, plain = self._split()
        numbers = {name: value if math.isfinite(value) else repr(value) for name, value in plain.items()}
        rows = [[key, *_as_list(meta), *row.tolist()] for key, meta, row in keys]
        return json.dumps({"keys": rows, "numbers": numbers}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Export:
        """Read what `to_json` wrote; a MergeError for anything else."""
        try:
            data = json.loads(text)
            plain = {name: float(v) if isinstance(v, str) else v for name, v in data["numbers"].items()}
            keys = [(row[0], _from_list(row[1:5])) for row in data["keys"]]
            rows = np.array([row[5:] for row in data["keys"]], np.int64)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as exc:
            raise errors.MergeError(f"expected an export as JSON, got {text[:80]!r}") from exc
        return _restore(keys, rows, plain)

    def _keys(self) -> list[_Key]:
        return self._split()[0]

    def _split(self) -> tuple[list[_Key], dict[str, float]]:
        """Return the keys whose numbers all stand as their moments say, and every other number."""
        latest: dict[str, _Key] = {}
        for columns in self._parts:
            latest.update((found.key, found) for found in _present(columns))
        names, rows = _joined(latest.values())
        said = names.of(rows)
        changed = {
            int(i)
            for i, name in zip(names.row_of, names.names, strict=True)
            if name in said and not _same(said[name], self.get(name))
        }
        keys = [found for i, found in enumerate(latest.values()) if i not in changed]
        kept = frozenset(_joined(keys)[0].names)
        return keys, {name: value for name, value in self.items() if name not in kept}


class _Key(NamedTuple):
    """A key, what it is, and its moments."""

    key: str
    meta: Meta
    row: Ints


def merge_worker_stats(
    exports: Iterable[Mapping[str, float]], sum_keys: Iterable[str] = ()
) -> Export:
    """Merge the exports of workers that hold different data: one sum over one count, the true extremes.

    Scalars weigh by their count; counts, sums and counters add. Workers may hold any subset of keys. Plain
    dicts are taken too: a mean needs its `__count` beside it (`base__count` for `base/avg`, `base/min` and
    `base/max`), and what is to be added up without one is named in `sum_keys`. Raises a MergeError naming the
    keys for a mean without a count, and for workers that disagree on what a key is.
    """
    sums = frozenset(sum_keys)
    merged: dict[str, Meta] = {}
    found: list[tuple[int, _Key]] = []
    plain_keys: list[_Key] = []
    uncounted: dict[str, int] = {}
    workers = -1
    for workers, export in enumerate(exports):
        known, plain = export._split() if isinstance(export, Export) else ([], dict(export))
        read, bare = _read_plain(plain, sums)
        uncounted |= dict.fromkeys(bare, workers)
        for key in known:
            _check_known(key, merged, sums)
        found += [(workers, key) for key in (*known, *read)]
        plain_keys += read
    if uncounted:
        raise errors.MergeError(
            f"expected a count beside every mean, got none for {', '.join(map(repr, sorted(uncounted)))} "
            "(merge the Exports themselves, or name sums in sum_keys)"
        )
    for key in plain_keys:
        _check_plain(key, merged)
    return _merged(found, merged, workers + 1)


def _merged(found: list[tuple[int, _Key]], metas: dict[str, Meta], workers: int) -> Export:
    index = {key: i for i, key in enumerate(metas)}
    names = Names(metas.keys(), metas.values())
    if names.ambiguous:
        twice = [name for name, n in Counter(names.names).items() if n > 1]
        raise errors.MergeError(f"expected each name from one key, got {', '.join(map(repr, twice))} from two")
    stack = np.tile(moments.empty(len(metas)), (workers, 1, 1))
    for worker, key in found:
        stack[worker, index[key.key]] = key.row
    spreads = [meta.spread for meta in metas.values()]
    shares, replicated = (
        np.array([i for i, spread in enumerate(spreads) if spread is wanted], np.intp)
        for wanted in (Spread.SHARES, Spread.REPLICATED)
    )
    rows, unequal = moments.across(stack, shares, replicated)
    if len(unequal):
        keys = ", ".join(repr(names.keys[i]) for i in unequal)
        raise errors.MergeError(f"expected the same on all workers (replicated), got different values of {keys}")
    return Export.of([Columns(names, rows)])
