"""Equal bins from the least to the greatest of some values, as numpy's where numpy makes any.

Where numpy refuses, because float64 knows too few numbers between the ends, the ends lie further apart; and
the largest numbers are worked out as their quarters, where sums of them are beyond float64.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eventlog import errors, is_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST: Final = 1_000_000
_LARGEST: Final = sys.float_info.max


def checked(bins: Any) -> int:
    """Return a number of bins; QueryError unless it is from one to MOST."""
    if not is_whole(bins) or bins < 1:
        raise errors.QueryError(f"expected at least one bin, got {bins!r}")
    if bins > MOST:
        raise errors.QueryError(f"expected at most {MOST} bins, got {bins}")
    return int(bins)


def ends(low: float | None, high: float | None, bins: int) -> tuple[float, float]:
    """Return where bins begin and end that hold values from low to high; of no values 0 and 1."""
    if low is None or high is None or not low <= high:
        return (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    # Edges are rounded by up to half a spacing on either side: two apart, they cannot meet.
    short = 2 * bins * math.ulp(max(abs(low), abs(high))) - (high - low)
    if short > 0:
        low, high = low - short / 2, high + short / 2
    return max(low, -_LARGEST), min(high, _LARGEST)


def edges(low: float, high: float, bins: int) -> NDArray[np.float64]:
    """Return the edges of bins between ends, one more than there are bins."""
    scale = _scale(low, high)
    found = np.histogram_bin_edges(np.empty(0), bins, (low * scale, high * scale)) / scale
    found[[0, -1]] = low, high  # the tiniest numbers have no quarters
    return found


def counts(values: NDArray[Any], low: float, high: float, bins: int) -> NDArray[np.int64]:
    """Return how many of the finite values lie in each bin between ends."""
    scale = _scale(low, high)
    finite = values[np.isfinite(values)].astype(np.float64)
    if scale != 1:
        finite *= scale
    return np.histogram(finite, bins, (low * scale, high * scale))[0]


def _scale(low: float, high: float) -> float:
    return 1.0 if max(abs(low), abs(high)) < _LARGEST / 4 else 0.25
