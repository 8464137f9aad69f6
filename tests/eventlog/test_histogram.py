"""The laws of the histogram: it adds up exactly, and its quantiles lie within 1 % of numpy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from eventlog import device, errors, histogram, moments
from eventlog.histogram import BUCKETS, EDGES, ERROR, LEAST, SIDE

COVERED = st.floats(LEAST, 9e8) | st.floats(-9e8, -LEAST) | st.just(0.0)
ODD = st.sampled_from([0.0, -0.0, math.inf, -math.inf, 5e-324, -1e-12, LEAST, 1e9, 1e300, -1e38])
QUANTILES = st.floats(0, 1) | st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0])


def of(values: Any) -> tuple[Any, Any]:
    """Return the histogram and the moments of some values."""
    array = np.asarray(values, np.float64)
    return histogram.of(array), moments.of(array)


def pooled(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Merge the histograms and the moments of several sets of values."""
    counts, rows = zip(*parts, strict=True)
    return histogram.merge(np.stack(counts)), moments.merge(np.stack(rows)[:, None])[0]


def neighbours(values: Any, q: float) -> tuple[float, float, float]:
    """Return the order statistics around a quantile, and how far on the way from one to the other it is."""
    ordered, place = np.sort(values), q * (len(values) - 1)
    low = math.floor(place)
    return ordered[low], ordered[min(low + 1, len(ordered) - 1)], place - low


# -- what it promises ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=400)
@given(st.lists(st.lists(COVERED, max_size=12), min_size=1, max_size=5), QUANTILES)
def test_a_quantile_lies_within_one_percent_of_the_exact_one(parts: list[list[float]], q: float) -> None:
    """Of values split in any way, numpy's quantile is met within 1 % of what it is interpolated from."""
    values = np.array([value for part in parts for value in part])
    (found,) = histogram.quantiles(*pooled([of(part) for part in parts]), [q])
    if not len(values):
        assert math.isnan(found)
        return
    exact = np.quantile(values, q)
    below, above, part = neighbours(values, q)
    assert abs(found - exact) <= (ERROR + 1e-9) * ((1 - part) * abs(below) + part * abs(above))
    if below * above >= 0:
        assert abs(found - exact) <= (ERROR + 1e-9) * abs(exact)


@settings(deadline=None)
@given(st.lists(COVERED | ODD, min_size=1, max_size=20))
def test_the_extremes_are_exact(values: list[float]) -> None:
    """p0 and p100 are the least and greatest value, infinite ones and those beyond the edges included."""
    assert [min(values), max(values)] == histogram.quantiles(*of(values), [0.0, 1.0])


@settings(deadline=None)
@given(
    st.lists(st.lists(COVERED | ODD | st.just(math.nan), max_size=9), min_size=1, max_size=5), st.randoms()
)
def test_counts_add_up_exactly_in_any_order(parts: list[list[float]], random: Any) -> None:
    """The histogram of all is the sum of the parts' in any order, and the quantiles are equal to the bit."""
    whole = of([value for part in parts for value in part])
    shuffled = [of(part) for part in random.sample(parts, len(parts))]
    counts, row = pooled(shuffled)
    assert (whole[0] == counts).all()
    asked = [0.0, 0.25, 0.5, 0.99, 1.0]
    np.testing.assert_array_equal(histogram.quantiles(*whole, asked), histogram.quantiles(counts, row, asked))


@settings(deadline=None)
@given(st.lists(COVERED | ODD | st.just(math.nan), max_size=30))
def test_every_finite_value_is_in_one_bucket(values: list[float]) -> None:
    """NaN and the infinities are in none: the moments count them."""
    counts, row = of(values)
    apart = row[[moments.NAN, moments.POS_INF, moments.NEG_INF]].sum()
    assert len(values) - apart == counts.sum()
    assert (counts >= 0).all()


@settings(deadline=None)
@given(st.lists(COVERED | ODD, max_size=30))
def test_negative_values_are_the_mirror_image(values: list[float]) -> None:
    """-x lies as far below zero as x above it."""
    assert (histogram.of(values)[::-1] == histogram.of([-value for value in values])).all()


def test_every_edge_belongs_to_the_bucket_it_begins() -> None:
    """An edge is in the bucket above it, the number just below it in the one beneath."""
    first = SIDE + 1
    buckets = np.arange(SIDE)
    for values, shift in (
        (EDGES[:-1], 0),
        (np.nextafter(EDGES[:-1], math.inf), 0),
        (np.nextafter(EDGES[:-1], 0), -1),
    ):
        for value, bucket in zip(values, buckets + shift, strict=True):
            assert 1 == histogram.of([value])[first + bucket]


def test_edges_are_a_percent_wide_and_reach_from_1e_9_to_1e9() -> None:
    """The edges grow by (1 + 1 %) / (1 - 1 %), from 1e-9 to beyond 1e9."""
    np.testing.assert_allclose(EDGES[1:] / EDGES[:-1], 1.01 / 0.99, rtol=1e-12)
    assert LEAST == EDGES[0] == 1e-9
    assert EDGES[-2] < 1e9 < EDGES[-1]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_large_arrays_of_any_dtype_are_counted_in_parts(dtype: Any) -> None:
    """An array larger than what is looked at at a time is counted as its values one by one."""
    values = np.random.default_rng(3).standard_normal((3, 70_000)).astype(dtype)
    sizes = np.searchsorted(EDGES, np.abs(values, dtype=np.float64).reshape(-1), side="right")
    signs = np.where(values.reshape(-1) < 0, -1, 1)
    wanted = np.bincount(SIDE + signs * np.minimum(sizes, SIDE), minlength=BUCKETS)
    assert (wanted == histogram.of(values)).all()


@settings(deadline=None)
@given(
    npst.arrays(np.float64, (3, 20), elements=COVERED | ODD | st.just(math.nan)),
    npst.arrays(np.bool_, 20),
    st.sampled_from([np.float32, np.float64]),
)
def test_a_device_counts_as_the_host_does(matrix: Any, mask: Any, dtype: Any) -> None:
    """The arithmetic of devices, done on the CPU, ends in the same counts."""
    with np.errstate(over="ignore"):
        matrix = matrix.astype(dtype)
    found = device.counts_of(torch.from_numpy(matrix), torch.from_numpy(mask)).numpy()
    assert (np.stack([histogram.of(row[mask]) for row in matrix]) == found).all()


# -- what is no ordinary number --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([], [math.nan] * 3),
        ([7.0], [7.0] * 3),
        ([1.0, math.nan, 3.0], [math.nan] * 3),
        ([math.nan, math.inf], [math.nan] * 3),
        ([-math.inf, 1.0, math.inf], [-math.inf, 1.0, math.inf]),
        ([math.inf, math.inf], [math.inf] * 3),
        ([-math.inf, math.inf], [-math.inf, math.nan, math.inf]),
        ([1.0, math.inf], [1.0, math.inf, math.inf]),
        ([0.0, -0.0, 1e-12], [0.0, 0.0, 1e-12]),
        ([1e200] * 5, [1e200] * 3),
    ],
)
def test_what_is_no_ordinary_number_keeps_its_order(values: list[float], wanted: list[float]) -> None:
    """NaN makes a quantile NaN, infinities count in their order (report c20); a constant is exact."""
    np.testing.assert_array_equal(wanted, histogram.quantiles(*of(values), [0.0, 0.5, 1.0]))


def test_what_is_smaller_than_the_least_edge_counts_as_zero() -> None:
    """Of values below 1e-9 it is known that they are, no more."""
    assert [0.0] == histogram.quantiles(*of([-1.0, 1e-10, 2e-10, 1.0]), [0.5])


def test_beyond_the_last_edge_a_quantile_is_between_it_and_the_extreme() -> None:
    """Of values beyond 1e9 no more is known than that they are, and which is the greatest."""
    (found,) = histogram.quantiles(*of([1.0, 1e12, 1e15]), [0.5])
    assert EDGES[-2] <= found <= 1e15


# -- how it is told --------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(COVERED | ODD, max_size=20))
def test_the_sparse_form_says_the_same(values: list[float]) -> None:
    """What `sparse` tells is what `dense` reads."""
    counts = histogram.of(values)
    buckets, contents = histogram.sparse(counts)
    assert len(buckets) <= len(values)
    assert (counts == histogram.dense(buckets, contents)).all()


@given(COVERED | ODD)
def test_a_value_lies_between_the_bounds_of_its_bucket(value: float) -> None:
    """The bounds of a bucket hold what is counted in it; the outermost are open."""
    (bucket,) = np.flatnonzero(histogram.of([value])) if math.isfinite(value) else [BUCKETS - 1]
    left, right = histogram.bounds(np.array([bucket]))
    assert left[0] <= value <= right[0] or value == -math.inf
    outermost = histogram.bounds(np.array([0, BUCKETS - 1]))
    assert [-math.inf, math.inf] == [outermost[0][0], outermost[1][1]]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (0.5, (0.5,)),
        (1, (1.0,)),
        ((0.99, 0.5, 0.99), (0.5, 0.99)),
        ([np.float32(0.25), np.float64(0.5)], (0.25, 0.5)),
        ({-0.0, 1}, (0.0, 1.0)),
        ((), ()),
    ],
)
def test_quantiles_are_taken_in_order_each_once(asked: Any, wanted: tuple[float, ...]) -> None:
    """One number or several, as int, float or numpy's; an empty list asks nothing."""
    assert wanted == histogram.as_quantiles(asked)
    assert wanted == histogram.asked_in(histogram.tags(wanted))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (1.5, r"expected quantiles from 0 to 1, got 1.5"),
        (-0.1, r"expected quantiles from 0 to 1, got -0.1"),
        ((0.5, math.nan), r"expected quantiles from 0 to 1, got nan"),
        ((0.5, math.inf), r"expected quantiles from 0 to 1, got inf"),
        (50, r"expected quantiles from 0 to 1, got 50"),
        ("0.5", r"expected quantiles \(numbers from 0 to 1\), got str '0.5'"),
        (("0.5",), r"expected quantiles \(numbers from 0 to 1\), got str '0.5'"),
        (True, r"expected quantiles \(numbers from 0 to 1\), got bool True"),
        (np.ones(3), r"expected quantiles \(numbers from 0 to 1\), got ndarray array"),
    ],
)
def test_what_is_no_quantile_is_refused(asked: Any, message: str) -> None:
    """Anything but numbers from 0 to 1 is refused; NaN too."""
    with pytest.raises((errors.RecordingError, errors.RecordingTypeError), match=message):
        histogram.as_quantiles(asked)


@pytest.mark.parametrize("tags", [None, "{}", "[]", "no JSON", '{"quantiles": [2]}', '{"quantiles": "p50"}'])
def test_tags_that_say_nothing_of_quantiles_ask_none(tags: str | None) -> None:
    """Tags from elsewhere are no error."""
    assert () == histogram.asked_in(tags)
