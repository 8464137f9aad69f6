"""Equal bins between any two numbers: where they lie, and what is counted in them."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.offline import bins
from eventlog import errors

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.integers(1, 300))
def test_bins_hold_all_values_that_are_finite(values, n):
    """Between any numbers of float64 edges ascend and are finite, and every value lies in one bin."""
    ends = bins.ends(min(values), max(values), n)
    edges = bins.edges(*ends, n)
    assert n + 1 == len(edges)
    assert np.isfinite(edges).all()
    assert (edges[:-1] < edges[1:]).all()
    assert edges[0] <= min(values) <= max(values) <= edges[-1]
    odd = [math.nan, math.inf, -math.inf]
    assert len(values) == bins.counts(np.array([*values, *odd]), *ends, n).sum()


@given(st.lists(st.floats(-1e6, 1e6).map(lambda x: round(x, 3)), min_size=1, max_size=50), st.integers(1, 60))
def test_bins_are_numpy_s(values, n):
    """Where numpy makes bins, these are the same to the bit, and so is what lies in them."""
    counts, edges = np.histogram(values, n)
    ends = bins.ends(min(values), max(values), n)
    assert edges.tolist() == bins.edges(*ends, n).tolist()
    assert counts.tolist() == bins.counts(np.array(values), *ends, n).tolist()


@pytest.mark.parametrize("value", [0.0, 0.3, -1e17, 5e-324, sys.float_info.max, -sys.float_info.max])
def test_a_constant_has_bins_too(value):
    """One number, however large or small, is held by as many bins as there may be."""
    ends = bins.ends(value, value, bins.MOST)
    edges = bins.edges(*ends, bins.MOST)
    assert (edges[:-1] < edges[1:]).all()
    assert 2 == bins.counts(np.array([value, value]), *ends, bins.MOST).sum()


def test_no_values_lie_between_0_and_1():
    """Of nothing, and of what is not known, there are bins all the same."""
    assert (0.0, 1.0) == bins.ends(None, None, 3) == bins.ends(math.inf, -math.inf, 3)


def test_a_number_of_bins_may_be_numpy_s():
    """Any whole number from 1 on is one; others are refused."""
    assert 5 == bins.checked(np.int64(5)) == bins.checked(5)
    for odd in (0, -1, 2.0, True, "many", None):
        with pytest.raises(errors.QueryError, match="expected at least one bin, got "):
            bins.checked(odd)
