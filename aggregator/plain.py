"""Plain dicts of numbers, as AReaL's workers send them: moments are read out of bare numbers.

A mean needs its count beside it: `base__count` for `base`, and for `base/avg`, `base/min` and `base/max`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from eventlog import Kind, ReduceType, as_metric, errors, moments

from .naming import Meta

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = ["Key", "read_plain", "without_values"]

_COUNT = "__count"
_AVG, _MIN, _MAX = "/avg", "/min", "/max"


class Key(NamedTuple):
    """A key, what it is, and its moments; `plain` when they were read from bare numbers.

    `counts` is its histogram, where quantiles are asked of it.
    """

    key: str
    meta: Meta
    row: Ints
    plain: bool = False
    counts: Ints | None = None


def read_plain(plain: Mapping[str, Any], sums: frozenset[str]) -> tuple[list[Key], set[str]]:
    """Read moments out of bare numbers: (keys, names of means that have no count).

    `sums` are the names that need none. Raises a MergeError naming the key for what is no number or no count.
    """
    left = {name: _number(name, value) for name, value in plain.items()}
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


def without_values(key: Key, scalars: Mapping[str, Meta]) -> Key:
    """Return the scalar, one of those that others have, of which a key is the count of 0; else the key.

    An export has no mean of nothing: of such a scalar it has the count alone.
    """
    name = key.key.removesuffix(_COUNT)
    if not key.plain or name == key.key or name not in scalars or key.row[moments.INT_SUM]:
        return key
    return Key(name, scalars[name], moments.of([]), plain=True)


def _family(base: str, left: dict[str, float]) -> list[Key]:
    """Take `base/avg`, its extremes (AReaL leaves infinite ones out) and its count out of `left`."""
    number = _count_of(base, left.pop(base + _COUNT))
    keys = [_mean(base + _AVG, ReduceType.AVG, left.pop(base + _AVG), number), _sum(base + _COUNT, number)]
    for suffix, reduce_type in ((_MIN, ReduceType.MIN), (_MAX, ReduceType.MAX)):
        if base + suffix in left:
            value = left.pop(base + suffix)  # whatever it says of nothing
            row = moments.of([value] if number else [])
            keys.append(Key(base + suffix, Meta(Kind.STAT, reduce_type), row, plain=True))
    return keys


def _mean(name: str, reduce_type: ReduceType, value: float, number: int) -> Key:
    row = moments.of([value] if number else [])
    row[[moments.COUNT, moments.NAN, moments.POS_INF, moments.NEG_INF]] *= number
    moments.floats(row)[moments.SUM] *= number
    kind = Kind.SCALAR if reduce_type is ReduceType.SCALAR else Kind.STAT
    return Key(name, Meta(kind, reduce_type), row, plain=True)


def _sum(name: str, value: float) -> Key:
    if isinstance(value, int):  # which fits int64
        return Key(name, Meta(Kind.COUNTER), moments.of_integers([1], [value])[0], plain=True)
    return Key(name, Meta(Kind.STAT, ReduceType.SUM), moments.of([value]), plain=True)


def _count_of(name: str, value: float) -> int:
    if not (0 <= value < 2**63 and value % 1 == 0):  # also refuses NaN and infinity
        raise errors.MergeError(f"key {name!r}: expected a count (a whole number), got {value!r}")
    return int(value)


def _number(name: Any, value: Any) -> float:
    """Return a number as it is, an integer that int64 cannot hold as float64."""
    if not isinstance(name, str):
        raise errors.MergeError(f"expected keys (str), got {type(name).__name__} {name!r:.80}")
    try:
        return as_metric(value, name)
    except errors.RecordingError as refused:
        raise errors.MergeError(str(refused)) from None
