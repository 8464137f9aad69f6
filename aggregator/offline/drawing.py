"""The values of records, in a fixed order and a bounded piece at a time, all or those that meet a condition.

Records come by step, and within one by (session, when recorded), whatever the memory limit is: what is summed
in the order in which it comes is the same to the bit each time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eventlog import Kind, errors

from .condition import Test, Truth, evaluate, tests
from .pairing import Pairing, among
from .payload import Held, Payload, cuts, sizes
from .reading import ints
from .tags import sampled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .condition import Condition
    from .history import History
    from .reading import Bools, Ints

    Places = NDArray[np.intp]

_NARROW: Final = ("float32", "float16", "bfloat16")  # dtypes that the payload holds as float32


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is drawn of each record.

    `where`: only the values that meet it. `other`: also another key's values beside them, only where both
    are there. `parts`: also the sequence of each value. `most`: about how many bytes are in memory at a time.
    `elsewhere`: the engine that reads them (`scaleout.Elsewhere`), if it is not this process. `distinct`: of
    the sequences of one sample only the first.
    """

    where: Condition | None
    other: str | None
    parts: bool
    most: int
    elsewhere: Any
    distinct: bool = False

    def once(self) -> Wanted:
        """Return the same of each sample once, which this process finds out."""
        return replace(self, parts=True, elsewhere=None, distinct=True)

    @property
    def alone(self) -> bool:
        """Whether the values of a record are all that is needed."""
        return self.where is None and self.other is None and not self.parts

    def keys(self) -> set[str]:
        """Return the other keys that are needed."""
        keys = {test.key for test in tests(self.where)} if self.where is not None else set[str]()
        return keys if self.other is None else {*keys, self.other}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The values drawn of one record.

    `at` is its place among the records asked for. `missing` of its values are not kept in the payload,
    `unmatched` cannot be judged: the process recorded nothing of another key beside them.
    """

    at: int
    values: NDArray[Any]
    missing: int = 0
    unmatched: int = 0
    others: NDArray[np.float64] | None = None
    parts: Ints | None = None  # of each value
    sequences: int = 0
    samples: Sequence[str] | None = None  # ids of the sequences


def draw(history: History, records: Places, steps: Ints, wanted: Wanted) -> Iterator[Drawn]:
    """Yield the values of records; those of which nothing is kept come too, without any."""
    if not len(records):
        return
    order = np.lexsort((records, steps))
    payload = Payload(history)
    pieces = np.split(order, cuts(sizes(history)[records[order]], wanted.most))
    if wanted.alone:
        masks = among(history, "kind", [Kind.DENOMINATOR.value])
        plain = _Plain(payload, ints(history.records.table["count"], 0), masks, sampled(history) > 0)
        for piece in pieces:
            yield from plain.drawn(records, piece)
        return
    joined = _Joined(history, payload, records, wanted)
    for piece in pieces:
        yield from joined.drawn(piece)


def gather(history: History, records: Places) -> tuple[NDArray[Any], Ints]:
    """Return all values of some records, none of them twice, joined in their order, and how many of each.

    For who wants nothing else of them: half the time of `draw`.
    """
    table = history.records.table
    masks, counts = (
        among(history, "kind", [Kind.DENOMINATOR.value])[records],
        ints(table["count"], 0)[records],
    )
    kept = ~(masks | (sampled(history)[records] > 0))
    narrow = among(history, "kind", [Kind.STAT.value]) & among(history, "dtype", _NARROW)
    values = np.empty(counts.sum(), np.float32 if narrow[records[~masks]].all() else np.float64)
    starts = np.cumsum(counts) - counts
    for start, count in zip(starts[masks].tolist(), counts[masks].tolist(), strict=True):
        values[start : start + count] = 1.0
    ends = np.zeros(table.num_rows, np.int64)
    ends[records] = starts
    for place, own in Payload(history).values(records[kept]):
        begin = ends[place]
        ends[place] = end = begin + len(own)
        values[begin:end] = own
    found = np.where(masks, counts, ends[records] - starts)
    if (found < counts).any():
        there = np.ones(len(values), np.bool_)
        for start, count, own in zip(starts.tolist(), counts.tolist(), found.tolist(), strict=True):
            there[start + own : start + count] = False
        values = values[there]
    return values, found


class _Plain:
    """Draws the values of records as they lie in the payload."""

    def __init__(self, payload: Payload, counts: Ints, masks: Bools, sampled: Bools) -> None:
        self._payload = payload
        self._kept = ~(masks | sampled)  # whose values can be read
        self._counts = counts
        self._masks = masks

    def drawn(self, records: Places, piece: Places) -> Iterator[Drawn]:
        places = records[piece]
        found: dict[int, list[NDArray[Any]]] = {}
        for place, values in self._payload.values(np.unique(places[self._kept[places]])):
            found.setdefault(place, []).append(values.copy())  # else the whole frame stays in memory
        for at, place in zip(piece.tolist(), places.tolist(), strict=True):
            count = int(self._counts[place])
            if self._masks[place]:
                yield Drawn(at, np.ones(count))
                continue
            parts = found.get(place, [])
            values = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0)])
            yield Drawn(at, values, missing=count - len(values))


class _Joined:
    """Draws values beside those of other keys, or of their sequences."""

    def __init__(self, history: History, payload: Payload, records: Places, wanted: Wanted) -> None:
        self._history = history
        self._payload = payload
        self._records = records
        self._wanted = wanted
        self._pairing = pairing = Pairing(history, payload)
        self._partners = {key: pairing.partners(records, key) for key in sorted(wanted.keys())}
        for test in tests(wanted.where) if wanted.where is not None else ():
            mask = pairing.of_key(test.key)
            if test.compare is None and len(mask) and not pairing.denominator[mask[0]]:
                raise errors.UnansweredError(
                    f'expected a comparison with {test.key!r}, as in "{test.key} > 0", got it alone: '
                    "only a mask is true by itself"
                )
        if wanted.parts and pairing.series[records].any():
            raise errors.UnansweredError(
                f"expected a key recorded under a mask, which has sequences, got "
                f"{pairing.name(records[0])!r}, which is a scalar"
            )

    def drawn(self, piece: Places) -> Iterator[Drawn]:
        own = [self._records[piece], *(partners[piece] for partners in self._partners.values())]
        places = self._pairing.behind(np.concatenate(own))
        held = Held(self._history, *self._payload.rows(places))
        for at in piece.tolist():
            yield self._one(at, held)

    def _one(self, at: int, held: Held) -> Drawn:
        place = int(self._records[at])
        count = int(self._pairing.counts[place])
        lost = Drawn(at, np.empty(0), missing=count)
        values = self._pairing.values(place, held)
        if values is None:
            return lost
        chosen = np.ones(count, np.bool_)
        unmatched, others = 0, None
        if self._wanted.where is not None:
            judged = self._judge(at, place, held)
            if judged is None:
                return lost
            chosen = judged.true
            alone = any(self._partners[test.key][at] < 0 for test in tests(self._wanted.where))
            unmatched = int(np.count_nonzero(~judged.true & ~judged.false)) if alone else 0
        if self._wanted.other is not None:
            if (partner := int(self._partners[self._wanted.other][at])) < 0:
                return Drawn(at, np.empty(0), unmatched=count)
            beside = self._pairing.beside(place, partner, held)
            if beside is None:
                return lost
            chosen = chosen & beside[1]
            others = beside[0][chosen]
        if not self._wanted.parts:
            return Drawn(at, values[chosen], unmatched=unmatched, others=others)
        mask = int(self._pairing.mask[place])
        parts = held.parts(mask) if mask >= 0 else None
        if parts is None:
            return lost
        of = np.repeat(np.arange(len(parts)), parts)[chosen]
        return Drawn(at, values[chosen], 0, unmatched, others, of, len(parts), held.samples(mask))

    def _judge(self, at: int, place: int, held: Held) -> Truth | None:
        """Return where the condition is true of the selected values; None: something is not kept."""
        found: dict[Test, Truth] = {}
        nowhere = np.zeros(self._pairing.counts[place], np.bool_)
        for test in tests(self._wanted.where) if self._wanted.where is not None else ():
            partner = int(self._partners[test.key][at])
            if partner < 0:
                found[test] = Truth(nowhere, nowhere)
            elif (beside := self._pairing.beside(place, partner, held)) is None:
                return None
            else:
                found[test] = test.of(*beside)
        return None if self._wanted.where is None else evaluate(self._wanted.where, found.__getitem__)
