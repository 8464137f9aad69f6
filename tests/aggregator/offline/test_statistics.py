"""Statistics of values that come in pieces, against numpy on all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.offline.statistics import Deviations, checked_stats, quantiles, quantiles_of_stream
from eventlog import errors, histogram

numbers = st.floats(allow_nan=False, width=32) | st.sampled_from([0.0, -0.0, 1.5, 1.5])
pieces = st.lists(st.lists(numbers, max_size=12), min_size=1, max_size=5)


@given(pieces, st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(1, 20))
def test_quantiles_of_a_stream_are_those_of_its_values(parts, asked, most):
    """Found in passes that keep at most some values, to the bit; infinities included (report g10)."""
    arrays = [np.array(part, np.float32) for part in parts]
    everything = np.concatenate(arrays)
    if len(everything):
        found = quantiles_of_stream(lambda: arrays, len(everything), asked, most)
        assert list(map(repr, quantiles(everything + np.float32(0), asked))) == list(map(repr, found))


def test_quantiles_of_values_far_apart():
    """Between the least and the greatest numbers lies what lies between, not infinity."""
    far = np.array([-1.7e308, 1.7e308])
    assert [-1.7e308, 0.0, 0.85e308, 1.7e308] == pytest.approx(quantiles(far, [0, 0.5, 0.75, 1]))
    assert [-math.inf, math.inf] == quantiles(np.array([-math.inf, 1.7e308, math.inf]), [0.25, 0.75])


def test_a_stream_of_one_value_is_never_held():
    """Of a value that repeats no more than it is known: nothing is collected."""
    held = []
    part = np.full(1000, -5.4)

    def stream():
        held.append(1)
        return [part] * 3

    assert [-5.4, -5.4] == quantiles_of_stream(stream, 3000, [0.1, 1], 10)
    assert 4 == len(held)


finite = st.lists(st.floats(-1e6, 1e6), max_size=8)


@given(st.lists(finite, max_size=6))
def test_deviations_are_numpy_s(parts):
    """However the values are cut into pieces, to 1e-9 of their size."""
    spread = Deviations(1)
    for part in parts:
        spread.add(0, np.array(part))
    everything = np.concatenate([np.array(part, np.float64) for part in parts] or [np.empty(0)])
    for ddof in (0, 1):
        found = spread.variance(0, ddof)
        if len(everything) <= ddof:
            assert found is None
        else:
            scale = max(1.0, float(np.abs(everything).max())) ** 2
            assert found == pytest.approx(everything.var(ddof=ddof), abs=1e-12 * scale, rel=1e-9)


@given(st.floats(-1e300, 1e300), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_constants_deviate_by_exactly_nothing(value, sizes):
    """In however many pieces they come (report g14)."""
    spread = Deviations(1)
    for size in sizes:
        spread.add(0, np.full(size, value))
    assert 0.0 == spread.variance(0, 0)
    assert spread.variance(0, 1) == (None if sum(sizes) == 1 else 0.0)


@pytest.mark.parametrize("values", [[1.0, 2.0, 1e300], [-1e308, 1e308], [1e200, 1e200, -1e200, 0.0]])
@pytest.mark.parametrize("pieces", [1, 2])
def test_squares_beyond_float64_are_infinite(values, pieces):
    """A deviation that float64 cannot say is inf as numpy's is, never 0, and there is no correlation."""
    made = Deviations(1)
    for piece in np.array_split(np.array(values), pieces):
        made.add(0, piece, piece[::-1])
    with np.errstate(all="ignore"):
        assert [float(np.var(values))] == made.all("var_pop")
    assert math.isinf(made.all("std")[0])
    assert math.isnan(made.correlation(0))


def test_statistics_have_names():
    """Quantiles may be named as numbers or as percentiles; the column is named alike."""
    assert {"avg": None, "p99.9": 0.999, "p50": 0.5, "median": 0.5} == checked_stats(
        ["avg", 0.999, "p50", "median"]
    )
    asked = [0.0, 0.125, 0.9999, 1.0, 0.999999999, 0.1 + 0.2]
    assert ["p0", "p12.5", "p99.99", "p100", "p99.9999999", "p30.000000000000004"] == [*checked_stats(asked)]
    assert {"p0": 0.0} == checked_stats([-0.0])
    for wrong in ("p", "pp", "p-1", "p101", 1.5, math.nan, "AVG", True):
        with pytest.raises(errors.QueryError, match="expected"):
            checked_stats([wrong])
    with pytest.raises(errors.QueryError, match="expected at least one statistic, got none"):
        checked_stats([])


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.floats(0, 1))
def test_between_two_values_is_where_numpy_says(one, other, part):
    """To the bit, for live quantiles and for those of the values: one function says it (a law)."""
    below, above = sorted((one, other))
    assert np.quantile([below, above], part) == histogram.between(below, above, part)
