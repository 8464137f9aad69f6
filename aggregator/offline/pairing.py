"""Which record of another key belongs to a record, and its values beside those of the record.

Records that one process made in one go carry no common number. What ties them is their mask:

1. Records under one registration of a mask belong together, element by element; so do a mask and what was
   recorded under it.
2. Masks are registered batch by batch. The n-th registration of one mask in a window and the n-th of another
   are of one batch, if both were registered equally often there. Else nobody knows, and the question is
   refused.
3. Scalars belong together call by call: when both were recorded at the same times.

Values of two shapes meet element by element where the shapes are the same. A value per sequence stands for
each element of its sequence (of the leading dimension, or of `cu_seqlens`). Everything else is refused.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np

from eventlog import Kind, errors

from .placing import groups, turns
from .reading import NONE, codes, ints

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from .history import History
    from .payload import Held, Payload
    from .reading import Bools, Ints

    Places = NDArray[np.intp]
    Floats = NDArray[np.float64]
    Beside = tuple[Floats, Bools]

SERIES: Final = (Kind.SCALAR.value, Kind.TIMING.value, Kind.COUNTER.value)


def among(history: History, name: str, texts: Collection[str]) -> Bools:
    """Return which records have one of some texts in a column."""
    column = history.records.table[name]
    words = column.combine_chunks().dictionary.to_pylist()
    return np.isin(codes(column), [i for i, word in enumerate(words) if word in texts])


class Pairing:
    """The records of one run, and what ties them."""

    def __init__(self, history: History, payload: Payload) -> None:
        records = history.records
        self._history = history
        self._records = records
        self._payload = payload
        self.keys = records.table["key"].combine_chunks().dictionary.to_pylist()
        self._key = codes(records.table["key"])
        self.series = among(history, "kind", SERIES)
        self.denominator = among(history, "kind", [Kind.DENOMINATOR.value])
        # The mask of every record: of a mask itself.
        self.mask = np.where(self.denominator, np.arange(len(self._key)), payload.masks)
        self.counts = ints(records.table["count"], 0)

    def of_key(self, key: str) -> Places:
        """Return the places of all records of a key."""
        return np.flatnonzero(among(self._history, "key", [key]))

    @cached_property
    def _batches(self) -> tuple[Ints, Ints]:
        """Return of every record the number of its batch (-1: not known), and how many its window has."""
        records, masks = self._records, np.maximum(self.mask, 0)
        windows, n = groups(records.windows, self._key)
        many = np.bincount(windows, minlength=n)[windows][masks]
        # A window has one record of a scalar for each step, and set of tags, that the caller gave.
        tags = np.where(self.series, codes(records.table["tags"]), -1)
        call = np.where(self.series, records.steps, self._payload.calls[masks])
        window = np.where(self.series, records.windows, records.windows[masks])
        batches, _ = groups(self.series.astype(np.int64), window, call, tags)
        known = self.series | (self.mask >= 0)
        return np.where(known, batches, -1), np.where(self.series, 1, many)

    def partners(self, places: Places, key: str) -> Places:
        """Return the record of another key that belongs to each record; -1 where there is none.

        UnansweredError where more than one might.
        """
        others = self.of_key(key)
        found = np.full(len(places), -1, np.intp)
        if not len(places) or not len(others):
            return found
        if self.series[places[0]] != self.series[others[0]]:
            own, theirs = (
                "call by call, as scalars are" if self.series[those[0]] else "under masks"
                for those in (places, others)
            )
            raise errors.UnansweredError(
                f"expected {key!r} recorded {own}, as {self.name(places[0])!r} was, got it recorded {theirs}"
            )
        own = np.flatnonzero(np.isin(self.mask[places], others) & (self.mask[places] >= 0))
        found[own] = self.mask[places[own]]
        batches, many = self._batches
        for ties in (self.mask, batches):
            left = np.flatnonzero((found < 0) & (ties[places] >= 0))
            found[left] = self._tied(places[left], others, ties, many)
        return found

    def _tied(self, places: Places, others: Places, ties: Ints, many: Ints) -> Places:
        """Return the other record with the same tie: the only one, or the n-th for the n-th."""
        others = others[np.argsort(ties[others], kind="stable")]
        first = np.searchsorted(ties[others], ties[places], "left")
        n = np.searchsorted(ties[others], ties[places], "right") - first
        place, peers = turns(*groups(self._key, ties))
        at = np.where(n == 1, 0, place[places])
        found = np.where(n > 0, others[np.minimum(first + at, len(others) - 1)], -1)
        there = found >= 0
        batches = many[found] != many[places]
        unclear = np.flatnonzero(there & (((n != 1) & (n != peers[places])) | batches))
        if len(unclear):
            i = int(unclear[0])
            own, other = int(places[i]), int(found[i])
            if batches[i]:
                self._refuse(own, other, "batches", int(many[other]), int(many[own]))
            what = "records under one mask" if ties is self.mask else "records in one batch"
            self._refuse(own, other, what, int(n[i]), int(peers[own]))
        return found

    def _refuse(self, place: int, other: int, what: str, theirs: int, own: int) -> NoReturn:
        records = self._records
        row = records.table.select(["role", "rank"]).slice(place, 1).to_pylist()[0]
        step = "none" if records.steps[place] == NONE else records.steps[place]
        raise errors.UnansweredError(
            f"expected as many {what} of {self.name(other)!r} as of {self.name(place)!r}, "
            f"got {theirs} and {own}: which of them belong together is not known; "
            f"step {step}, {row['role']}-{row['rank']}"
        )

    def name(self, place: int) -> str:
        """Return the key of a record."""
        return self.keys[self._key[place]]

    # -- values side by side ---------------------------------------------------------------------------

    def behind(self, places: Places) -> Places:
        """Return the records with all masks that are needed to look at them."""
        known = places[places >= 0]
        masks = self.mask[known]
        return np.union1d(known, masks[masks >= 0]).astype(np.intp)

    def values(self, place: int, held: Held) -> Floats | None:
        """Return the selected values of a record: of a mask, ones; None where they are not kept."""
        return np.ones(self.counts[place]) if self.denominator[place] else held.values(place)

    def beside(self, place: int, other: int, held: Held) -> Beside | None:
        """Return another record's values beside each selected value of a record, and where they are known.

        A mask's values are 0 and 1. None where something that is needed is not kept. QueryError for shapes
        that do not meet.
        """
        if self.series[place]:
            return self._call_by_call(place, other, held)
        mask = self.mask[place]
        if other == mask:
            return np.ones(self.counts[place]), np.ones(self.counts[place], np.bool_)
        if self.mask[other] == mask and not self.denominator[other]:
            found = held.values(other)
            return None if found is None else (found, np.ones(len(found), np.bool_))
        theirs = self._dense(other, held)
        chosen, parts = held.bits(mask), held.parts(mask)
        if theirs is None or chosen is None or parts is None:
            return None
        own, shape = (self._records.table["shape"][at].as_py() for at in (place, other))
        if own == shape:
            return theirs[0][chosen], theirs[1][chosen]
        if len(parts) == shape[0] == len(theirs[0]):
            return np.repeat(theirs[0], parts), np.repeat(theirs[1], parts)
        raise errors.UnansweredError(
            f"expected {self.name(other)!r} in the shape {own} of {self.name(place)!r}, or a value for each "
            f"of its {len(parts)} sequences, got the shape {shape}"
        )

    def _call_by_call(self, place: int, other: int, held: Held) -> Beside | None:
        found = held.values(other)
        own, theirs = held.times(place), held.times(other)
        if found is None or own is None or theirs is None:
            return None
        if not np.array_equal(own, theirs):
            raise errors.UnansweredError(
                f"expected {self.name(other)!r} and {self.name(place)!r} recorded in the same calls, got "
                f"{len(theirs)} and {len(own)} calls in a window, at different times"
            )
        return found, np.ones(len(found), np.bool_)

    def _dense(self, place: int, held: Held) -> Beside | None:
        """Return all elements of a record in order, 0 where its mask did not select, and where it did."""
        known = held.bits(self.mask[place]) if self.mask[place] >= 0 else None
        if known is None:
            return None
        if self.denominator[place]:
            return known.astype(np.float64), np.ones(len(known), np.bool_)
        found = held.values(place)
        if found is None or len(found) != np.count_nonzero(known):
            return None
        values = np.zeros(len(known))
        values[known] = found
        return values, known
