"""Which samples came out differently: two evaluations compared id by id.

A score that moved says that something changed; this says which samples did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .results import SampleResult

__all__ = ["Change", "changed_samples"]

Values = Mapping[tuple[str, str], float]
"""What was found, by metric and sample id."""


@dataclass(frozen=True, slots=True)
class Change:
    """One sample whose result differs; None where an evaluation has none for it."""

    key: str
    sample_id: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """By how much it changed; None where one of the two is missing."""
        return None if self.before is None or self.after is None else self.after - self.before


def changed_samples(
    before: Values | Iterable[SampleResult], after: Values | Iterable[SampleResult], tolerance: float = 0.0
) -> list[Change]:
    """Return the samples whose result changed by more than `tolerance`, by metric and id.

    Takes the results of `evaluate_distributed`, or values by (metric, sample id). A result that only one of
    the two has is a change; NaN on both sides is none.
    """
    one, other = _values(before), _values(after)
    found = [Change(*each, one.get(each), other.get(each)) for each in sorted(one.keys() | other.keys())]
    return [each for each in found if _differs(each.before, each.after, tolerance)]


def _values(results: Any) -> Values:
    if isinstance(results, Mapping):
        return results
    return {(name, each.id): value for each in results for name, value in each.values.items()}


def _differs(before: float | None, after: float | None, tolerance: float) -> bool:
    if before is None or after is None:
        return True
    if math.isnan(before) or math.isnan(after):
        return math.isnan(before) != math.isnan(after)
    return before != after and not abs(after - before) <= tolerance
