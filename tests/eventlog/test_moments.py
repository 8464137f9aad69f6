"""The laws of moments: merging parts is the same as looking at everything at once."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlog import moments

NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.just(-0.0)
LISTS = st.lists(NUMBERS, max_size=12)


def of(values):
    return moments.of(np.array(values, np.float64))


def pooled(rows):
    return moments.merge(np.stack(rows)[:, None])[0]


def same(a, b, rel=1e-9):
    assert a[moments.INTS].tolist() == b[moments.INTS].tolist()
    f, g = a.view(np.float64), b.view(np.float64)
    assert f[moments.MIN] == g[moments.MIN]
    assert f[moments.MAX] == g[moments.MAX]
    assert math.isclose(f[moments.SUM], g[moments.SUM], rel_tol=rel, abs_tol=1e25)


@given(st.lists(LISTS, min_size=1, max_size=5))
def test_split_invariance(parts):
    """Moments of the whole equal the merged moments of any split of it."""
    same(of([v for part in parts for v in part]), pooled([of(part) for part in parts]))


@given(LISTS, LISTS)
def test_merge_commutes_and_has_an_identity(a, b):
    """Merging commutes, and the moments of nothing change nothing."""
    same(pooled([of(a), of(b)]), pooled([of(b), of(a)]))
    same(of(a), pooled([moments.empty(1)[0], of(a), moments.empty(1)[0]]), rel=0)


@given(LISTS)
def test_finalized_values_equal_numpy(values):
    """Mean, least and greatest equal numpy on the same values, NaN and infinities included."""
    row, array = of(values), np.array(values, np.float64)
    if not values:
        assert (moments.mean(row), moments.least(row), moments.greatest(row)) == (None, None, None)
        assert moments.total_of(row) == 0.0
        return
    with np.errstate(all="ignore"):
        expected = (array.mean(), array.min(), array.max())
    found = (moments.mean(row), moments.least(row), moments.greatest(row))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e25)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.nan], (math.nan, math.nan, math.nan)),
        ([1.0, math.inf], (math.inf, 1.0, math.inf)),
        ([math.inf, -math.inf], (math.nan, -math.inf, math.inf)),
        ([math.inf, math.inf], (math.inf, math.inf, math.inf)),
        ([-math.inf, 2.0], (-math.inf, -math.inf, 2.0)),
    ],
)
def test_non_finite_values_follow_ieee(values, expected):
    """A NaN anywhere makes mean, least and greatest NaN; infinities behave as in IEEE (report c21, D3)."""
    row = of(values)
    found = (moments.mean(row), moments.least(row), moments.greatest(row))
    np.testing.assert_array_equal(found, expected)


@given(st.lists(st.tuples(st.integers(0, 3), LISTS), max_size=8))
def test_pool_is_merge_by_group(entries):
    """Pooling rows by group equals merging each group on its own."""
    rows = np.stack([moments.empty(1)[0], *(of(values) for _, values in entries)])
    groups = np.array([0, *(group for group, _ in entries)])
    found = moments.pool(rows, groups, 4)
    for group in range(4):
        chosen = rows[groups == group]
        same(pooled(list(chosen)) if len(chosen) else moments.empty(1)[0], found[group], rel=0)
    order = np.argsort(groups, kind="stable")  # groups that lie together are pooled another way
    assert found.tobytes() == moments.pool(rows[order], groups[order], 4).tobytes()


def test_sums_are_kept_in_float64():
    """A thousand float32 ones after 2**24 still count: sums are float64 (report c10)."""
    values = np.ones(1001, np.float32)
    values[0] = 2**24
    assert moments.total_of(moments.of(values)) == 2**24 + 1000


def test_integer_sums_are_exact_beyond_float64():
    """Counts add as int64: 2**53 and two ones are 2**53 + 2 (report c11)."""
    rows = moments.of_integers([1, 1, 1], [2**53, 1, 1])
    assert moments.exact(moments.merge(rows[:, None])[0]) == 2**53 + 2


def test_overflowing_sum_is_infinite_not_nan():
    """Finite values whose sum leaves float64 give the infinite sum IEEE gives."""
    assert moments.total_of(of([1.7e308, 1.7e308])) == math.inf


def test_a_sum_beyond_int64_is_the_nearest_float_not_another_number():
    """Counters of many ranks whose sum int64 cannot hold do not wrap around (report c11)."""
    merged = moments.merge(moments.of_integers([1, 1], [2**62, 2**62])[:, None])[0]
    assert moments.exact(merged) == 2.0**63
    assert moments.exact(moments.of_integers([1], [2**63 - 1025])[0]) == 2**63 - 1025


@pytest.mark.parametrize(
    "parts", [[2**63 - 1], [2**62, 2**62 - 1], [-(2**63)], [2**63 - 1, 2**63 - 1, -(2**63)]]
)
def test_sums_are_exact_to_the_edges_of_int64(parts):
    """What int64 just holds is exact, though its float rounds to what it does not hold (report c11)."""
    merged = moments.merge(moments.of_integers([1] * len(parts), parts)[:, None])[0]
    found = moments.exact(merged)
    assert (sum(parts), int) == (found, type(found))


@pytest.mark.parametrize("parts", [[2**63 - 1, 1], [-(2**63), -1], [2**62] * 9])
def test_sums_just_beyond_int64_are_floats(parts):
    """One more than int64 holds, or a whole turn of it, is the nearest float."""
    merged = moments.merge(moments.of_integers([1] * len(parts), parts)[:, None])[0]
    assert (float(sum(parts)), float) == (moments.exact(merged), type(moments.exact(merged)))
