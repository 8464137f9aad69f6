"""Both forms of the wire bring the same numbers, and both notice ranks that are not at the same export."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator import wire
from aggregator.plan import Entry, Layout, Meta, Slot
from eventlog import Kind, Spread, moments

SPREADS = [Spread.SHARDS, Spread.SHARDS, Spread.SHARES, Spread.REPLICATED]
ENTRIES = [Entry(Slot("", f"k{i}"), Meta(Kind.SCALAR, spread=spread)) for i, spread in enumerate(SPREADS)]
LAYOUT = Layout(3, ENTRIES, [found.slot for found in ENTRIES])
FLOATS = st.floats(-1e150, 1e150) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 2.0**53])
ROWS = st.none() | st.lists(FLOATS, max_size=4).map(lambda v: moments.of(np.array(v, np.float64)))
RANKS = st.lists(st.tuples(ROWS, ROWS, ROWS, ROWS), min_size=1, max_size=5)
HEAD = {wire.NUMBER: 7, wire.EPOCH: 3, wire.HASH: -(2**62), wire.OPERATION: 5, wire.RESET: 1}


def vector(rows, **head):
    """Fill one rank's vector; head words by name, the others alike on all ranks."""
    filled = wire.vector(LAYOUT)
    filled[[wire.ATTEMPT, wire.STEP]] = wire.UNSET
    for word, value in HEAD.items():
        filled[word] = value
    for word, value in head.items():
        filled[getattr(wire, word)] = value
    at = [i for i, row in enumerate(rows) if row is not None]
    if at:
        wire.body(filled)[np.array(at)] = np.stack([rows[i] for i in at])
    return filled


def summed(vectors):
    greatest = np.max([wire.maxima(v, LAYOUT) for v in vectors], axis=0)
    with np.errstate(all="ignore"):
        total = np.sum([wire.sums(v) for v in vectors], axis=0)
    return wire.read_summed(greatest, total, LAYOUT)


@settings(deadline=None)
@given(RANKS)
def test_both_forms_bring_the_same_moments(ranks):
    """Counts and extremes equal to the bit, float sums up to rounding; both find unequal copies."""
    vectors = [vector(rows) for rows in ranks]
    rows, unequal = LAYOUT.pool(wire.body(np.stack(vectors)))
    _, found, also_unequal = summed(vectors)
    assert unequal.tolist() == also_unequal.tolist()
    if len(unequal):
        return
    assert (rows[:, moments.INTS] == found[:, moments.INTS]).all()
    np.testing.assert_array_equal(rows.view(float)[:, moments.MIN :], found.view(float)[:, moments.MIN :])
    np.testing.assert_allclose(
        rows.view(float)[:, moments.SUM], found.view(float)[:, moments.SUM], rtol=1e-12, atol=1e136
    )


@settings(deadline=None)
@given(st.lists(st.integers(-(2**61), 2**61), min_size=1, max_size=3))
def test_integers_stay_exact_as_halves(numbers):
    """Sums of int64 beyond float64 come back exactly from the SUM of float64 halves (report c11)."""
    vectors = [vector([moments.of_integers([1], [n])[0], None, None, None]) for n in numbers]
    assert sum(numbers) == summed(vectors)[1][0, moments.INT_SUM]


@pytest.mark.parametrize(
    ("word", "values", "name"),
    [
        ("NUMBER", (7, 8), "export number 7 on rank 0 but export number 8 on rank 1"),
        ("OPERATION", (5, 6), "one call on rank 0 but another on rank 1"),
        ("RESET", (0, 1), "reset 0 on rank 0 but reset 1 on rank 1"),
        ("STEP", (4, 5), "step 4 on rank 0 but step 5 on rank 1"),
        ("HASH", (1, 2**62), "one layout on rank 0 but another on rank 1"),
    ],
)
def test_ranks_at_different_exports_are_noticed(word, values, name):
    """Any head word that must be equal and is not is named; the summed form notices it as well."""
    vectors = [vector([None] * 4, **{word: value}) for value in values]
    assert name == wire.disagreement(np.stack(vectors)[:, : wire.HEAD], ["rank 0", "rank 1"])
    assert wire.disagreement(summed(vectors)[0], ["some ranks", "others"]) is not None


def test_a_step_binds_only_those_who_set_it():
    """A rank that gives no step agrees with any."""
    vectors = [vector([None] * 4, STEP=step) for step in (wire.UNSET, 9, 9)]
    assert wire.disagreement(np.stack(vectors)[:, : wire.HEAD], ["a", "b", "c"]) is None
    heads = summed(vectors)[0]
    assert wire.disagreement(heads, ["most", "least"]) is None
    assert 9 == heads[0, wire.STEP]


def test_flags_and_the_attempt_arrive_as_their_greatest():
    """One rank that misfits or failed, or the one that knows the attempt, is heard by all."""
    vectors = [vector([None] * 4), vector([None] * 4, MISFIT=1, FAILED=1, ATTEMPT=4), vector([None] * 4)]
    heads = summed(vectors)[0]
    assert [1, 1, 4] == heads[:, [wire.MISFIT, wire.FAILED, wire.ATTEMPT]].max(axis=0).tolist()
    assert wire.disagreement(heads, ["most", "least"]) is None


def test_zeros_of_both_signs_are_equal_copies():
    """-0.0 and 0.0 are one value."""
    rows = [moments.of(np.array([zero])) for zero in (0.0, -0.0)]
    vectors = [vector([None, None, None, row]) for row in rows]
    assert [] == LAYOUT.pool(wire.body(np.stack(vectors)))[1].tolist() == summed(vectors)[2].tolist()
