"""Exports of workers without a process group merge to what one worker would have exported."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.merge import Export, merge_worker_stats
from aggregator.naming import Columns, Meta, Names
from eventlog import Kind, ReduceType, Spread, errors, moments

SCALAR = Meta(Kind.SCALAR, ReduceType.SCALAR)
TIMING = Meta(Kind.TIMING, ReduceType.SCALAR)
FAMILY = Meta(Kind.STAT, ReduceType.AVG_MIN_MAX, "mask")
COUNTER = Meta(Kind.COUNTER)


def of(*values):
    return moments.of(np.array(values, np.float64))


def total(*values):
    return moments.of_integers([len(values)], [sum(values)])[0]


def columns(**keys):
    """Make one part of an export: key=(meta, row)."""
    metas, rows = zip(*keys.values(), strict=True)
    return Columns(Names(keys, metas), np.stack(rows))


def export(**keys):
    return Export.of([columns(**keys)])


def plain(**keys):
    return dict(export(**keys))


# -- Export ----------------------------------------------------------------------------------------


def test_an_export_is_a_dict_that_knows_its_kinds():
    """It compares and iterates as the dict AReaL returns, and carries kinds and moments beside it."""
    stats = export(reward=(SCALAR, of(1, 2)), kl=(FAMILY, of(3)))
    assert {"reward": 1.5, "reward__count": 2, "kl/avg": 3.0, "kl/min": 3.0, "kl/max": 3.0} == stats
    assert {"reward": SCALAR, "kl": FAMILY} == stats.kinds
    assert 2 == stats.moments["reward"][moments.COUNT]


@pytest.mark.parametrize(
    "send",
    [lambda e: pickle.loads(pickle.dumps(e)), lambda e: Export.from_json(e.to_json()), Export.copy],
    ids=["pickle", "json", "copy"],
)
def test_an_export_travels(send):
    """Numbers, moments and what was added by hand survive pickle, JSON and a copy, non-finite ones too."""
    stats = export(a=(SCALAR, of(1, math.nan)), b=(FAMILY, of(-math.inf, 2)), n=(COUNTER, total(2**60 + 1)))
    stats["note"] = math.inf
    sent = send(stats)
    assert list(stats) == list(sent)
    np.testing.assert_array_equal(list(stats.values()), list(sent.values()))
    assert stats.kinds == sent.kinds
    assert all((stats.moments[key] == sent.moments[key]).all() for key in stats.kinds)


def test_the_json_is_strict():
    """A reader in another language can parse it: no NaN tokens."""
    text = export(a=(SCALAR, of(math.nan))).to_json()
    assert json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": [["a"]], "numbers": {}}'])
def test_anything_else_is_no_export(text):
    """What is not an export's JSON is refused with what came."""
    with pytest.raises(errors.MergeError, match="expected an export as JSON, got"):
        Export.from_json(text)


def test_update_takes_over_what_another_export_carries():
    """One step's flow: the actor's export, updated with the rollout's, still merges."""
    stats = export(loss=(SCALAR, of(1)))
    stats.update(export(reward=(SCALAR, of(0, 1))))
    both = merge_worker_stats([stats, stats | {}])
    assert {"loss": 1.0, "loss__count": 2, "reward": 0.5, "reward__count": 4} == both


def test_an_export_that_is_updated_for_ever_does_not_grow():
    """It carries what the latest exports of each key came from, and nothing that was replaced."""
    stats = export(once=(SCALAR, of(7)), reward=(SCALAR, of(0)))
    for step in range(50):
        stats.update(export(reward=(SCALAR, of(step, 1))))
        stats |= export(kl=(FAMILY, of(step)))
    assert 3 == len(stats.parts)
    latest = export(once=(SCALAR, of(7)), reward=(SCALAR, of(49, 1)), kl=(FAMILY, of(49)))
    assert latest == stats
    assert json.loads(latest.to_json()) == {
        **json.loads(stats.to_json()),
        "keys": json.loads(latest.to_json())["keys"],
    }
    assert sorted(latest.kinds) == sorted(stats.kinds)


def test_a_number_changed_by_hand_counts_as_it_stands():
    """The moments of a key whose number was overwritten or deleted are not used against the user."""
    stats = export(a=(SCALAR, of(1, 3)), b=(SCALAR, of(5)), c=(SCALAR, of(7)))
    stats["a"] = 10.0
    del stats["b"], stats["b__count"]
    assert {"c": SCALAR} == stats.kinds
    assert {"a": 10.0, "a__count": 2, "c": 7.0, "c__count": 1} == merge_worker_stats([stats])


def test_timings_of_two_trackers_are_pooled_and_other_names_clash():
    """A timing of two trackers combines by count; a scalar both recorded is reported (report s7)."""
    one = columns(t=(TIMING, of(1)), x=(SCALAR, of(1)))
    two = columns(t=(TIMING, of(2, 3)), x=(SCALAR, of(9)))
    stats = Export.of([one, two])
    assert {"t": 2.0, "t__count": 3, "x": 9.0, "x__count": 1} == stats
    assert ("x", "x__count") == stats.clashes


def test_absent_keys_do_not_clash():
    """A key that one part names but nobody recorded there is no clash."""
    (nothing,) = moments.empty(1)
    stats = Export.of([columns(x=(SCALAR, of(1))), columns(x=(SCALAR, nothing))])
    assert ({"x": 1.0, "x__count": 1}, ()) == (stats, stats.clashes)


# -- merging exports -------------------------------------------------------------------------------


def test_scalars_weigh_by_their_count():
    """Seven rewards of one worker weigh more than one of another: never a mean of means (report c2)."""
    merged = merge_worker_stats([export(r=(SCALAR, of(*[1.0] * 7))), export(r=(SCALAR, of(0)))])
    assert {"r": 0.875, "r__count": 8} == merged


def test_families_have_the_true_extremes():
    """Minima 1 and -3, maxima 5 and 9 give -3 and 9, not their means (report c18)."""
    merged = merge_worker_stats([export(k=(FAMILY, of(1, 5))), export(k=(FAMILY, of(-3, 9, 6)))])
    assert {"k/avg": 3.6, "k/min": -3.0, "k/max": 9.0} == merged


def test_counters_and_denominators_add_exactly():
    """Sums of integers stay integers beyond float64 (report c11)."""
    mask = Meta(Kind.DENOMINATOR, ReduceType.SUM)
    parts = [export(n=(mask, total(2**53)), c=(COUNTER, total(1))), export(n=(mask, total(1)))]
    assert {"n": 2**53 + 1, "c": 1} == merge_worker_stats(parts)


def test_workers_may_hold_any_subset():
    """A key of one worker keeps its value; workers without it add nothing (report c22)."""
    merged = merge_worker_stats([export(math=(SCALAR, of(1))), export(code=(SCALAR, of(0, 0))), Export()])
    assert {"math": 1.0, "math__count": 1, "code": 0.0, "code__count": 2} == merged


def test_spread_is_kept_across_workers():
    """Copies count once and must be equal, shares add up (report c4)."""
    lr, share = SCALAR._replace(spread=Spread.REPLICATED), SCALAR._replace(spread=Spread.SHARES)
    parts = [export(lr=(lr, of(0.1)), s=(share, of(0.25))), export(lr=(lr, of(0.1)), s=(share, of(0.75)))]
    assert {"lr": 0.1, "lr__count": 1, "s": 1.0, "s__count": 1} == merge_worker_stats(parts)
    with pytest.raises(errors.MergeError, match=r"same on all workers \(replicated\), got different 'lr'"):
        merge_worker_stats([export(lr=(lr, of(0.1))), export(lr=(lr, of(0.2)))])


def test_workers_that_disagree_on_a_key_are_refused():
    """A scalar of one worker and a family of another cannot be one number (report c14)."""
    with pytest.raises(
        errors.MergeError, match="key 'x': expected the same on all workers, got scalar but stat"
    ):
        merge_worker_stats([export(x=(SCALAR, of(1))), export(x=(FAMILY, of(1)))])


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=5), min_size=1, max_size=5))
def test_merging_is_exporting_everything_at_once(parts):
    """However the values were split among workers, the merged export is that of all of them together."""
    merged = merge_worker_stats([export(k=(FAMILY, of(*part)), s=(SCALAR, of(*part))) for part in parts])
    values = [value for part in parts for value in part]
    whole = export(k=(FAMILY, of(*values)), s=(SCALAR, of(*values)))
    assert list(whole) == list(merged)
    np.testing.assert_allclose(list(whole.values()), list(merged.values()), rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=4), min_size=3, max_size=3))
def test_merging_can_be_done_in_stages(parts):
    """A controller of controllers gets what one controller of all workers gets."""
    one, two, three = (export(k=(FAMILY, of(*part))) for part in parts)
    at_once = merge_worker_stats([one, two, three])
    staged = merge_worker_stats([merge_worker_stats([one, two]), three])
    assert list(at_once) == list(staged)
    np.testing.assert_allclose(list(at_once.values()), list(staged.values()), rtol=1e-9, atol=1e-9)


# -- merging plain dicts ---------------------------------------------------------------------------


def test_plain_scalars_merge_by_count():
    """AReaL's dicts merge as far as they say how many values there were."""
    merged = merge_worker_stats([{"r": 1.0, "r__count": 3}, {"r": 0.0, "r__count": 1}])
    assert {"r": 0.75, "r__count": 4} == merged


def test_plain_families_merge_by_their_count():
    """With `base__count` beside it a family has its weighted mean and true extremes."""
    one = {"k/avg": 2.0, "k/min": 1.0, "k/max": 3.0, "k__count": 2}
    two = {"k/avg": 5.0, "k/min": 5.0, "k/max": 5.0, "k__count": 1}
    assert {"k/avg": 3.0, "k/min": 1.0, "k/max": 5.0, "k__count": 3} == merge_worker_stats([one, two])


@pytest.mark.parametrize("stats", [{"x": 1.0}, {"x/avg": 1.0, "x/min": 0.0, "x/max": 2.0}])
def test_a_mean_without_a_count_is_refused(stats):
    """It is named, never dropped in silence and never averaged by guess."""
    with pytest.raises(errors.MergeError, match="expected a count beside every mean, got none for 'x"):
        merge_worker_stats([stats, {"y": 2.0, "y__count": 1}])


def test_the_refusal_names_every_key():
    """All keys without a count stand in one message."""
    with pytest.raises(errors.MergeError, match="'a', 'b', 'c'"):
        merge_worker_stats([{"b": 1.0, "a": 2.0}, {"c": 3.0}])


def test_sum_keys_add():
    """Sums in plain dicts are named by the caller; integers stay exact, floats make the sum a float."""
    stats = [{"tokens": 2**60, "cost": 0.5}, {"tokens": 1, "cost": 1}]
    merged = merge_worker_stats(stats, sum_keys=["tokens", "cost", "absent"])
    assert {"tokens": 2**60 + 1, "cost": 1.5} == merged
    assert isinstance(merged["tokens"], int)


def test_sum_keys_do_not_turn_an_exported_mean_into_a_sum():
    """An export says that a key is a mean; naming it a sum is a contradiction, and refused."""
    with pytest.raises(errors.MergeError, match="expected sums in sum_keys, got 'r'"):
        merge_worker_stats([export(r=(SCALAR, of(1)))], sum_keys=["r"])


def test_counts_without_a_mean_add():
    """A count whose mean was absent is a sum by itself."""
    assert {"r__count": 5} == merge_worker_stats([{"r__count": 2}, {"r__count": 3}])


@pytest.mark.parametrize("count", [1.5, -1, math.nan, math.inf])
def test_a_count_is_a_whole_number(count):
    """An averaged or broken count would weigh wrongly."""
    with pytest.raises(errors.MergeError, match=r"key 'r': expected a count \(a whole number\)"):
        merge_worker_stats([{"r": 1.0, "r__count": count}])


def test_a_mean_of_nothing_is_absent():
    """AReaL exports a scalar nobody recorded as 0.0 with count 0; it weighs nothing (report s3)."""
    assert {"r": 2.0, "r__count": 1} == merge_worker_stats(
        [{"r": 0.0, "r__count": 0}, {"r": 2.0, "r__count": 1}]
    )


def test_non_finite_numbers_of_plain_dicts_stay():
    """A NaN or infinite mean is not averaged away."""
    stats = [{"a": math.nan, "a__count": 1, "b": math.inf, "b__count": 2}, {"a": 1.0, "a__count": 9}]
    merged = merge_worker_stats(stats)
    assert math.isnan(merged["a"])
    assert (10, math.inf, 2) == (merged["a__count"], merged["b"], merged["b__count"])


def test_plain_dicts_and_exports_mix():
    """A worker that sent a plain dict still counts, and the export knows what the key is."""
    merged = merge_worker_stats([{"t": 4.0, "t__count": 1}, export(t=(TIMING, of(1, 1)))])
    assert {"t": 2.0, "t__count": 3} == merged
    assert {"t": TIMING} == merged.kinds


def test_a_family_of_nothing_has_no_extremes():
    """What a plain dict says of the extremes of no values is not among those of values."""
    nothing = {"k/avg": 0.0, "k/min": -99.0, "k/max": 99.0, "k__count": 0}
    merged = merge_worker_stats([nothing, {"k/avg": 5.0, "k/min": 4.0, "k/max": 9.0, "k__count": 2}])
    assert {"k/avg": 5.0, "k/min": 4.0, "k/max": 9.0, "k__count": 2} == merged
    assert {"k__count": 0} == merge_worker_stats([nothing, nothing])


@pytest.mark.parametrize("stats", [{"k/avg": 5.0, "k/min": 4.0, "k__count": 2}, {"k": 1.0, "k__count": 2}])
def test_what_does_not_mix_is_refused_with_what_to_do(stats):
    """A plain dict beside an export that has more to say of the key: all are to send exports."""
    with pytest.raises(errors.MergeError, match=r"'k.*\(.*merge the exports themselves, of all"):
        merge_worker_stats([stats, export(k=(FAMILY, of(1, 2)))])


def test_numpy_has_no_say_in_a_merge():
    """What overflows follows IEEE, whatever numpy is told to do of it: a warning is an error here."""
    workers = [{"r": 1e308, "r__count": 20}, {"r": 5e-324, "r__count": 3}]
    for setting in ("warn", "raise"):
        with np.errstate(all=setting):
            assert {"r": math.inf, "r__count": 23} == merge_worker_stats(workers)


def test_nothing_merges_to_nothing():
    """No workers, or workers without numbers, give an empty export."""
    assert {} == merge_worker_stats([]) == merge_worker_stats([{}, Export()])


NO_NUMBERS = [None, "x", "3", [1.0], {}, 1j]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("stats", [{"r": 0, "r__count": 3}, {"r": 1.0, "r__count": 0}, {"r": 0}])
def test_what_is_no_number_is_refused(stats, value):
    """A value or count of a worker that is no number is named, not an error of Python's."""
    stats = {
        key: value if number == 0 and isinstance(number, int) else number for key, number in stats.items()
    }
    with pytest.raises(errors.MergeError, match=r"expected a number for 'r(__count)?', got"):
        merge_worker_stats([stats])
    export_of = export(r=(SCALAR, of(1)))
    export_of["r"] = value
    with pytest.raises(errors.MergeError, match="expected a number for 'r', got"):
        merge_worker_stats([export_of])


@pytest.mark.parametrize(
    "exports", [{"r": 1.0, "r__count": 3}, None, [None], [{"a__count": 1}, 3], "text", [{1: 2}]]
)
def test_what_is_no_list_of_dicts_is_refused(exports):
    """One dict instead of a list, or something else in the list, is said."""
    with pytest.raises(errors.MergeError, match=r"expected (a list of exports \(dicts\)|keys \(str\)), got"):
        merge_worker_stats(exports)
    with pytest.raises(errors.MergeError, match="expected sum_keys as a list of keys, got 'loss'"):
        merge_worker_stats([], sum_keys="loss")


def test_numbers_of_arrays_are_numbers():
    """Integers of numpy stay exact, one-element tensors are what they hold."""
    stats = {"n": np.int64(2**60 + 1), "r": torch.tensor(1.5), "r__count": np.int64(2), "low": -(2**63)}
    merged = merge_worker_stats([stats], sum_keys=["n", "low"])
    assert {"n": 2**60 + 1, "r": 1.5, "r__count": 2, "low": -(2**63)} == merged
    assert {int} == {type(merged[key]) for key in ("n", "r__count", "low")}


def test_counters_merge_exactly_to_the_edge_of_int64():
    """What int64 just holds comes out as it is (report c11)."""
    merged = merge_worker_stats([export(n=(COUNTER, total(2**63 - 2))), export(n=(COUNTER, total(1)))])
    assert (2**63 - 1, int) == (merged["n"], type(merged["n"]))


@pytest.mark.parametrize("count", [2**62, 2**63, 2**64, 10**400])
def test_counts_beyond_int64_are_refused(count):
    """Means are not divided by a count that wrapped around; the key is named."""
    with pytest.raises(errors.MergeError, match="'r"):
        merge_worker_stats([{"r": 1.0, "r__count": count}, {"r": 1.0, "r__count": count}])


def test_counters_beyond_int64_are_refused():
    """What two workers together cannot hold is no float all of a sudden; the key is named."""
    with pytest.raises(errors.MergeError, match="expected counts and sums that fit int64, got more for 'n'"):
        merge_worker_stats([export(n=(COUNTER, total(2**62))), export(n=(COUNTER, total(2**62)))])


@pytest.mark.parametrize("first", [True, False])
def test_a_scalar_without_values_is_its_count(first):
    """A plain export has no mean of nothing: a worker without samples adds none, in a merge of merges too."""
    nothing, some = dict(merge_worker_stats([{"r": 0.0, "r__count": 0}])), {"r": 3.0, "r__count": 3}
    assert {"r__count": 0} == nothing == merge_worker_stats([nothing, nothing])
    assert {"r": 3.0, "r__count": 3} == merge_worker_stats([nothing, some] if first else [some, nothing])
    assert {"r": 3.0, "r__count": 3} == merge_worker_stats([nothing, merge_worker_stats([some])])


def of_json(*rest, key="a", count=2):
    """Return the JSON of an export of one scalar, but for the last word of its moments."""
    row = [key, "scalar", "scalar", None, "shards", 1, count, 0, 0, 0, 0, 0, 0, *rest]
    return json.dumps({"keys": [row], "numbers": {}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "expected an export as JSON, got"),
        (of_json(10**20), "of key 'a': "),
        (of_json(None), "of key 'a': expected integers"),
        (of_json(0.5), "of key 'a': expected integers"),
        (of_json(), "of key 'a': expected 9 words"),
        (of_json(0, key=5), "of key 5: expected keys"),
        (
            of_json(0, count=-2),
            "of key 'a': .*0 or more",
        ),
        (of_json(0, [0.5], [-5], [3]), "of key 'a': .*below 0"),
        (of_json(0, [0.5], [9999], [3]), "of key 'a': "),
        (of_json(0, [7], [5], [3]), "of key 'a': .*from 0 to 1"),
        ('{"keys": [], "numbers": {"a": null}}', "no number of key 'a': None"),
        ('{"keys": [], "numbers": {"a": "1.5"}}', "no number of key 'a': '1.5'"),
        ('{"keys": [], "numbers": {"a": []}}', "no number of key 'a'"),
        (None, "expected an export as JSON, got None"),
    ],
)
def test_a_broken_export_is_refused_by_its_key(text, message):
    """Words beyond int64, no numbers, negative counts, buckets that are none: each is said of its key."""
    with pytest.raises(errors.MergeError, match=message):
        Export.from_json(text)
