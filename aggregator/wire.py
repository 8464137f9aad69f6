"""What travels in a collective: a head that must agree, then the moments of the layout's slots.

    vector = int64[HEAD + slots * moments.WORDS]        floats as their bits

and after it, where quantiles are asked, the histograms of those slots, BUCKETS words each.

*Gathered* (small worlds): every rank receives every rank's vector and reduces on its own, in rank order.
Counts are exact, a NaN cannot vanish, and the device needs no float64.

*Summed* (large worlds): two all-reduces, MAX over int64 and SUM over float64. MAX carries the head as x and
~x (the greatest and the least: unequal means disagreement), extremes as integers of the same order, and what
is no sum (a share's count, a replicated row and a number that stands for its histogram). SUM carries float
sums as they are, and every int64 as two halves of 32 bits, integers that float64 adds exactly for up to 2**21
ranks: so counts stay exact, and each all-reduce is one vector of one type, which every backend can reduce. A
bucket of a histogram is one float64, exact for up to 2**53 values.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np

from eventlog import histogram, moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .plan import Layout

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = [
    "GATHER_BYTES",
    "HEAD",
    "body",
    "disagreement",
    "joined",
    "maxima",
    "read_counts",
    "read_summed",
    "sums",
    "vector",
]

GATHER_BYTES = 4 << 20  # what a rank may receive before the summed form is the cheaper one

# The head. MISFIT, FAILED and ATTEMPT count as their maximum, STEP and OPERATION must be equal among those
# who set them, and what follows among all.
MISFIT, FAILED, ATTEMPT, STEP, OPERATION, NUMBER, EPOCH, HASH, RESET = range(9)
HEAD: Final = 9
UNSET: Final = -1
_MUST_EQUAL: Final = {
    NUMBER: "export number",
    OPERATION: "call",
    RESET: "reset",
    STEP: "step",
    EPOCH: "layout epoch",
    HASH: "layout",
}
_MAY_BE_UNSET: Final = (STEP, OPERATION)
_OPAQUE: Final = (OPERATION, HASH)
_NONE: Final = np.iinfo(np.int64).min  # loses to everything in a maximum
_HALF: Final = 0xFFFFFFFF
_MAGNITUDE: Final = np.iinfo(np.int64).max
_INTEGERS: Final = moments.INTS.stop - moments.INTS.start  # words of a slot that add as int64


def vector(layout: Layout) -> Ints:
    """Return a vector nobody has filled: an empty head, and the identity in every slot."""
    return np.concatenate([np.zeros(HEAD, np.int64), moments.empty(len(layout.wire)).ravel()])


def body(filled: Ints) -> Ints:
    """View the moments in a vector, or in many along the first axes: shape (…, slots, WORDS)."""
    return filled[..., HEAD:].reshape(*filled.shape[:-1], -1, moments.WORDS)


def joined(filled: Ints, counts: Ints) -> Ints:
    """Return the vector with the histograms, shape (n, BUCKETS), behind it."""
    return np.concatenate([filled, counts.ravel()]) if len(counts) else filled


def disagreement(heads: Ints, who: Sequence[str]) -> str | None:
    """Say which word of the heads, shape (n, HEAD), should be equal and is not; None when all agree."""
    said = heads[:, STEP:].tolist()
    if all(words == said[0] for words in said):
        return None
    for word, name in _MUST_EQUAL.items():
        views: dict[int, list[str]] = {}
        for value, rank in zip(heads[:, word].tolist(), who, strict=True):
            if word not in _MAY_BE_UNSET or value != UNSET:
                views.setdefault(value, []).append(rank)
        if len(views) > 1:
            ranks = [(value, ", ".join(found)) for value, found in views.items()]
            if word in _OPAQUE:
                return f"one {name} on " + " but another on ".join(found for _, found in ranks)
            return " but ".join(f"{name} {value} on {found}" for value, found in ranks)
    return None


# -- the summed form -------------------------------------------------------------------------------


def maxima(filled: Ints, layout: Layout, counts: Ints | None = None) -> Ints:
    """Return the vector for the MAX all-reduce; `counts` are the histograms."""
    head = np.stack([filled[:HEAD], ~filled[:HEAD]])
    for word in _MAY_BE_UNSET:
        if filled[word] == UNSET:
            head[:, word] = _NONE
    rows = body(filled)
    f = rows.view(np.float64)
    copies = rows[layout.replicated]
    moments.floats(copies)[:, moments.SUM :] += 0.0  # as `moments.across`: -0.0 has the bits of 0.0
    copies = np.stack([copies, ~copies])
    copies[:, rows[layout.replicated, moments.PRESENT] == 0] = _NONE
    return np.concatenate(
        [
            head.ravel(),
            _ordered(f[:, moments.MAX]),
            ~_ordered(f[:, moments.MIN]),
            rows[layout.shares, moments.COUNT],
            copies.ravel(),
            _contents(rows, layout, counts).ravel(),
        ]
    )


def _contents(rows: Ints, layout: Layout, counts: Ints | None) -> Ints:
    """Return numbers x and ~x that stand for the histograms of copies, shape (2, copies with one)."""
    if counts is None or not len(layout.asked_copies):
        return np.empty((2, 0), np.int64)
    digests = [hashlib.blake2b(counts[i].tobytes(), digest_size=7).digest() for i in layout.asked_copies]
    numbers = np.array([int.from_bytes(digest, "little") for digest in digests], np.int64)
    contents = np.stack([numbers, ~numbers])
    contents[:, rows[layout.asked[layout.asked_copies], moments.PRESENT] == 0] = _NONE
    return contents


def sums(filled: Ints, counts: Ints | None = None) -> Floats:
    """Return the vector for the SUM all-reduce: high halves, low halves, float sums, histograms."""
    rows = body(filled)
    ints = rows[:, moments.INTS]
    floats = rows.view(np.float64)[:, moments.SUM]
    parts = [(ints >> 32).ravel(), (ints & _HALF).ravel(), floats]
    return np.concatenate(parts if counts is None else [*parts, counts.ravel()], dtype=np.float64)


def read_summed(greatest: Ints, summed: Floats, layout: Layout) -> tuple[Ints, Ints, Ints]:
    """Read both results: (heads: greatest and least, reduced rows, positions of unequal replicated keys)."""
    n, shares = len(layout.wire), len(layout.shares)
    cuts = np.cumsum([2 * HEAD, n, n, shares, 2 * len(layout.replicated) * moments.WORDS])
    head, top, bottom, counts, copies, contents = np.split(greatest, cuts)
    rows = moments.empty(n)
    high, low, floats, _ = np.split(summed, _cuts(n))
    exact = (high.astype(np.int64) << 32) + low.astype(np.int64)
    rows[:, moments.INTS] = exact.reshape(n, _INTEGERS)
    rows[:, moments.PRESENT] = rows[:, moments.PRESENT] > 0
    f = rows.view(np.float64)
    f[:, moments.SUM] = floats
    f[:, moments.MAX] = _from_ordered(top)
    f[:, moments.MIN] = _from_ordered(~bottom)
    rows[layout.shares, moments.COUNT] = counts
    unequal = _copy_replicated(copies, rows, layout)
    if len(contents):
        number, negated = contents.reshape(2, -1)
        differ = (number != _NONE) & (number != ~negated)
        unequal = np.union1d(unequal, layout.asked[layout.asked_copies[differ]])
    return _heads(head), rows, unequal


def read_counts(summed: Floats, layout: Layout) -> Ints:
    """Read the histograms out of the SUM all-reduce's result, shape (n, BUCKETS)."""
    n = len(layout.wire)
    _, low, _, counts = np.split(summed, _cuts(n))
    holders = low.astype(np.int64).reshape(n, _INTEGERS)[:, moments.PRESENT]
    return layout.count_once(counts.astype(np.int64).reshape(-1, histogram.BUCKETS), holders)


def _cuts(n: int) -> list[int]:
    """Return where the parts of the SUM all-reduce's vector begin, but the first."""
    return [n * _INTEGERS, 2 * n * _INTEGERS, n * (2 * _INTEGERS + 1)]


def _heads(head: Ints) -> Ints:
    greatest, negated = head.reshape(2, HEAD)
    heads = np.stack([greatest, ~negated])
    for word in _MAY_BE_UNSET:
        if greatest[word] == _NONE:
            heads[:, word] = UNSET
    return heads


def _copy_replicated(copies: Ints, rows: Ints, layout: Layout) -> Ints:
    """Write replicated rows, which came as greatest and least; return the positions where those differ."""
    at = layout.replicated
    greatest, negated = copies.reshape(2, len(at), moments.WORDS)
    held = greatest[:, moments.PRESENT] == 1
    rows[at[held]] = greatest[held]
    rows[at[~held]] = moments.empty(1)
    return at[held & (greatest != ~negated).any(axis=1)]


def _ordered(floats: Floats) -> Ints:
    """Map floats (no NaN) to integers of the same order, -0.0 just below 0.0."""
    bits = np.ascontiguousarray(floats).view(np.int64)
    return bits ^ ((bits >> 63) & _MAGNITUDE)


def _from_ordered(integers: Ints) -> Floats:
    return (integers ^ ((integers >> 63) & _MAGNITUDE)).view(np.float64)
