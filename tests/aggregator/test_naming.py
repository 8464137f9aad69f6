"""What a key is decides what its numbers are called, and which of them there are."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.naming import Meta, Names, names
from eventlog import Kind, ReduceType, Spread, moments

VALUES = st.lists(
    st.floats(width=32) | st.just(math.nan) | st.just(math.inf) | st.just(-math.inf), max_size=6
)
SIMPLE = [ReduceType.AVG, ReduceType.SUM, ReduceType.MIN, ReduceType.MAX]


def of(*values):
    return moments.of(np.array(values, np.float64))


@pytest.mark.parametrize(
    ("reduce_type", "expected"),
    [
        (ReduceType.AVG_MIN_MAX, {"k/avg": 2.0, "k/min": 1.0, "k/max": 3.0}),
        (ReduceType.AVG, {"k": 2.0}),
        (ReduceType.SUM, {"k": 6.0}),
        (ReduceType.MIN, {"k": 1.0}),
        (ReduceType.MAX, {"k": 3.0}),
    ],
)
def test_a_stat_exports_what_its_reduce_type_says(reduce_type, expected):
    """AVG_MIN_MAX exports three numbers, every other type one under the key itself."""
    assert expected == names("k", Kind.STAT, reduce_type, of(1, 2, 3))


@pytest.mark.parametrize("kind", [Kind.SCALAR, Kind.TIMING])
def test_a_scalar_exports_its_mean_and_count(kind):
    """Scalars and timings export their mean, and as `k__count` how many there were."""
    found = names("k", kind, ReduceType.SCALAR, of(1, 4))
    assert {"k": 2.5, "k__count": 2} == found
    assert isinstance(found["k__count"], int)


@pytest.mark.parametrize("kind", [Kind.COUNTER, Kind.DENOMINATOR])
def test_a_counter_exports_an_exact_integer(kind):
    """Counters and denominators are exact beyond what float64 holds (report c11)."""
    (row,) = moments.of_integers([3], [2**53 + 1])
    found = names("k", kind, None, row)
    assert {"k": 2**53 + 1} == found
    assert isinstance(found["k"], int)


def test_what_was_not_recorded_is_absent():
    """A key nobody recorded exports nothing."""
    (row,) = moments.empty(1)
    assert {} == names("k", Kind.STAT, ReduceType.SUM, row) == names("k", Kind.COUNTER, None, row)


def test_means_and_extremes_of_nothing_are_absent_but_a_sum_is_zero():
    """With no selected value a mean or extreme is absent, a recorded sum or denominator is 0 (report c20)."""
    metas = [Meta(Kind.STAT, reduce_type) for reduce_type in (ReduceType.AVG_MIN_MAX, *SIMPLE)]
    keys = ["all", *(reduce_type.value for reduce_type in SIMPLE)]
    assert {"sum": 0.0} == Names(keys, metas).of(np.tile(of(), (5, 1)))
    (mask,) = moments.of_integers([0], [0])
    assert {"k": 0} == names("k", Kind.DENOMINATOR, ReduceType.SUM, mask)


def test_shares_of_one_number_have_no_extremes():
    """No rank saw the whole number, so only what can be known of it is exported (report c4)."""
    found = names("k", Kind.STAT, ReduceType.AVG_MIN_MAX, of(0.25), Spread.SHARES)
    assert {"k/avg": 0.25} == found


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*ReduceType]), VALUES, st.booleans()), max_size=8))
def test_many_keys_export_what_each_exports_alone(entries):
    """Naming a table of keys equals naming its rows one by one, in order, absent ones left out."""
    keys = [f"k{i}" for i in range(len(entries))]
    metas = [Meta(Kind.SCALAR if t is ReduceType.SCALAR else Kind.STAT, t) for t, _, _ in entries]
    rows = moments.empty(len(entries))
    for i, (_, values, recorded) in enumerate(entries):
        if recorded:
            rows[i] = of(*values)
    expected: dict[str, float] = {}
    for key, meta, row in zip(keys, metas, rows, strict=True):
        expected |= names(key, meta.kind, meta.reduce_type, row)
    found = Names(keys, metas).of(rows)
    assert list(expected) == list(found)
    np.testing.assert_array_equal(list(expected.values()), list(found.values()))


def test_a_meta_reads_like_a_sentence():
    """Error messages name what a key is in words."""
    meta = Meta(Kind.STAT, ReduceType.AVG_MIN_MAX, "n_tokens", Spread.REPLICATED)
    assert "stat avg_min_max over 'n_tokens', replicated" == str(meta)
    assert "counter" == str(Meta(Kind.COUNTER))


def test_names_that_two_keys_share_are_noticed():
    """`x` as a family and `x/avg` as a scalar would write one name."""
    metas = [Meta(Kind.STAT, ReduceType.AVG_MIN_MAX), Meta(Kind.SCALAR, ReduceType.SCALAR)]
    assert Names(["x", "x/avg"], metas).ambiguous
    assert not Names(["x", "x/y"], metas).ambiguous
