"""The values of a pool as they are drawn, and an account of what of them was not there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from eventlog import errors, schema

from .distinct import firsts
from .drawing import draw
from .reading import ints
from .statistics import SUMMARIES
from .tags import sampled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .drawing import Drawn, Wanted
    from .grouping import Asked, Pool
    from .history import History
    from .reading import Ints

    Places = NDArray[np.intp]


class Tally:
    """Draws the values of a pool, and counts what of them is there."""

    def __init__(self, histories: Sequence[History], made: Pool, asked: Asked, wanted: Wanted) -> None:
        self.histories = histories
        self.made = made
        self.asked = asked
        self.wanted = wanted
        self._keys = ", ".join(map(repr, asked.keys))
        self._read = False
        self._firsts = firsts(histories, made, asked, wanted.most) if wanted.distinct else None
        self.begin()

    def counts(self, i: int) -> Ints:
        """Return how many values each record of the i-th history had."""
        return ints(self.histories[i].records.table["count"], 0)[self.made.records[i]]

    def begin(self) -> None:
        """Count anew, before a pass over the values."""
        self.count, self._missing, self._unmatched = (np.zeros(len(self.made), np.int64) for _ in range(3))

    def draw(self) -> Iterator[tuple[int, Drawn]]:
        """Yield (group, what is drawn of a record) in order, in one whole pass."""
        self.begin()
        for i, records in enumerate(self.made.records):
            for _, group, drawn in self.draw_of(i, np.arange(len(records))):
                yield group, drawn
        self.check()

    def draw_of(self, i: int, which: Places) -> Iterator[tuple[int, int, Drawn]]:
        """Yield (place among the records, group, what is drawn) of some records of the i-th history."""
        self._read = True
        for drawn in self.again(i, which):
            at = int(which[drawn.at])
            group = int(self.made.of[i][at])
            self.count[group] += len(drawn.values)
            self._missing[group] += drawn.missing
            self._unmatched[group] += drawn.unmatched
            yield at, group, drawn

    def note(self, i: int, which: Places, count: Ints, missing: Ints, unmatched: Ints) -> None:
        """Count what was drawn elsewhere of some records of the i-th history."""
        self._read = True
        for total, own in ((self.count, count), (self._missing, missing), (self._unmatched, unmatched)):
            np.add.at(total, self.made.of[i][which], own)

    def again(self, i: int, which: Places) -> Iterator[Drawn]:
        """Yield what is drawn of some records without counting it."""
        records, steps = self.made.records[i][which], self.made.steps[i][which]
        for drawn in draw(self.histories[i], records, steps, self.wanted):
            if self._firsts is None or drawn.parts is None:
                yield drawn
            else:
                first = self._firsts[i][int(which[drawn.at])][drawn.parts]
                yield replace(drawn, values=drawn.values[first], parts=drawn.parts[first])

    def columns(self) -> dict[str, pa.Array]:
        """Return what was not there, where values were read, and what no condition could judge.

        How much is missing is not known (null) where a rank's part of an export is.
        """
        if not self._read:
            return {}
        columns = {"missing": pa.array(self._missing, mask=~self.made.whole)}
        return {**columns, "unmatched": pa.array(self._unmatched)} if self.wanted.keys() else columns

    def check(self) -> None:
        """Raise UnansweredError when nothing at all was there."""
        if self.count.any():
            return
        if self._missing.any():
            raise errors.UnansweredError(
                f"expected the values of {self._keys}, got none: {why_missing(self.histories)}; "
                f"{', '.join(SUMMARIES)} can still be asked, without a condition"
            )
        if self._unmatched.any():
            others = ", ".join(map(repr, sorted(self.wanted.keys())))
            raise errors.UnansweredError(
                f"expected values of {others} beside those of {self._keys}, got none: "
                "no process recorded both in one batch"
            )


def why_missing(histories: Sequence[History]) -> str:
    """Say why values are not in the payload."""
    states = [state for history in histories for state in history.reading.states]
    if any(sampled(history).any() for history in histories):
        return "the payload was sampled (the samples are in the views tensors and scalars)"
    if any(state.pruned for state in states):
        return "the payload was pruned to keep its budget"
    lost = [
        (state, loss) for state in states for loss in state.losses if loss.stream is schema.Stream.PAYLOAD
    ]
    if any(loss.cause is schema.LossCause.MISSING and not state.ended for state, loss in lost):
        return "they were lost when the process ended"
    if lost:
        return "they are lost"
    if any(state.bytes[schema.Stream.PAYLOAD] for state in states):
        return "they are damaged, or not written yet"
    if all(state.policy in ("", "off") for state in states):
        return "the payload was off or pruned"
    return "they are not written yet"
