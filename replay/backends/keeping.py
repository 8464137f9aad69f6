"""What a rewrite leaves at a target: rows that the log does not have, but once had.

A log that was damaged, or of which a part is not there, is no reason to delete the only copy. A row belongs
to the log when some attempt, be it superseded, made a commit of its step at its time: no clocks are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ..steps import Row

T = TypeVar("T")


def is_unknown(rows: Iterable[Row], step: int, time: float) -> bool:
    """Whether a row that lies at a target is none of the log that `rows` come from; without one, never."""
    knows = getattr(rows, "knows", None)
    return knows is not None and not knows(step, time)


def with_kept(rows: Iterable[Row], kept: Mapping[int, T]) -> Iterator[Row | T]:
    """Yield rows by ascending steps, with what is kept in the place of its step's."""
    left = sorted(kept, reverse=True)
    for row in rows:
        while left and left[-1] < row.step:
            yield kept[left.pop()]
        if left and left[-1] == row.step:
            yield kept[left.pop()]
        else:
            yield row
    while left:
        yield kept[left.pop()]
