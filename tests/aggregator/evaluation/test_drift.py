"""Drift of data and of results, and whether ranks agree."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.evaluation import (
    ValidationSet,
    changed_samples,
    kolmogorov_smirnov,
    measure_drift,
    metrics_of_ranks,
    population_stability_index,
    update_validation_set,
    validate_distributed_results,
)
from aggregator.evaluation.drift import describe
from aggregator.evaluation.results import SampleResult
from eventlog import errors
from tests.gloo import run


@pytest.fixture
def rng():
    """The same numbers for every test, in whatever order they run."""
    return np.random.default_rng(0)


# -- measures --------------------------------------------------------------------------------------


@settings(deadline=None)  # the first one imports scipy
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.randoms())
def test_mere_reordering_is_no_drift(values, random):
    """The same values in another order have a PSI of 0, and nothing drifted (report h19)."""
    other = random.sample(values, len(values))
    found = measure_drift(values, other)
    assert (0.0, False) == (found.psi, found.drifted)


def test_psi_is_the_sum_over_deciles():
    """Ten equal shares that move to five are what the formula says."""
    reference, current = np.arange(1000.0), np.repeat(np.arange(500.0), 2)
    expected = 5 * (0.2 - 0.1) * math.log(2) + 5 * (0.0005 - 0.1) * math.log(0.0005 / 0.1)
    assert expected == pytest.approx(population_stability_index(reference, current))
    assert measure_drift(reference, current).drifted


@pytest.mark.parametrize("n", [20, 100, 1000])
def test_chance_alone_is_rarely_drift(n, rng):
    """Windows of one distribution, small ones too, are taken for drift about once in a hundred times."""
    drifted = [measure_drift(rng.normal(size=n), rng.normal(size=n)).drifted for _ in range(100)]
    assert 8 > sum(drifted)


@pytest.mark.parametrize(("n", "m"), [(500, 500), (500, 64), (500, 5), (10, 10), (30, 10)])
def test_windows_with_nothing_in_common_have_drifted(n, m, rng):
    """However small: numbers far away, and other categories, if each comes several times."""
    assert measure_drift(rng.normal(size=n), rng.normal(100, size=m)).drifted
    before, now = ([f"{kind}{i % 4}" for i in range(many)] for kind, many in (("a", n), ("b", m)))
    assert measure_drift(before, now).drifted


@pytest.mark.parametrize(("n", "m"), [(5, 500), (500, 5), (100, 100)])
def test_rare_categories_alone_are_rarely_drift(n, m, rng):
    """Of two hundred equal categories a small window has a few, which is chance."""
    names = [f"s{i}" for i in range(200)]
    drifted = [
        measure_drift(list(rng.choice(names, n)), list(rng.choice(names, m))).drifted for _ in range(50)
    ]
    assert 5 > sum(drifted)


def test_texts_of_their_own_are_no_drift_and_need_little_memory():
    """Where every text is another one, chance says it all; ten thousand of them take some megabytes."""
    before, now = ([f"{kind}{i}" for i in range(10_000)] for kind in "ab")
    tracemalloc.start()
    try:
        found = measure_drift(before, now)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not found.drifted
    assert found.psi == pytest.approx(found.by_chance)
    assert 100e6 > peak


def test_many_categories_drift_as_few_do(rng):
    """Of thousands of categories, each several times, others come up now; and the same ones by chance."""
    before = [f"a{i % 4000}" for i in range(12_000)]
    assert measure_drift(before, [f"b{i % 4000}" for i in range(12_000)]).drifted
    one, other = ([f"a{i}" for i in rng.integers(0, 4000, 12_000)] for _ in range(2))
    assert not measure_drift(one, other).drifted


@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_a_shift_is_drift(shift, rng):
    """A standard deviation of shift is seen with a hundred samples, and KS tells the same."""
    reference, current = rng.normal(size=200), rng.normal(shift, size=100)
    found = measure_drift(reference, current)
    assert found.drifted
    assert found.psi > found.by_chance
    assert pytest.approx(0.383, abs=0.15) == found.ks  # 2 Φ(½) - 1, give or take three deviations
    assert 1e-4 > found.p_value


@pytest.mark.parametrize(
    ("reference", "current"),
    [
        ([1] * 98 + [0] * 2, [0] * 60 + [1] * 40),
        ([0] * 98 + [1] * 2, [1] * 60 + [0] * 40),
        ([1] * 50, [0] * 50),
        ([0] * 50, [1] * 50),
        ([0.5] * 500, [0.1] * 500),
        ([1] * 95 + [0.5] * 5, [0] * 100),
        ([1] * 500, np.linspace(0, 1, 500)),
        ([1, 2, 3] * 30, [1.5, 2.5] * 45),
        ([0] * 995 + [1] * 5, [0] * 700 + [1] * 300),
        ([1] * 900 + list(range(2, 102)), [0] * 900 + list(range(2, 102))),
    ],
)
def test_values_that_many_share_drift_like_categories(reference, current):
    """Where most of the reference is one value, or it has few, leaving them is seen, both ways round."""
    found = measure_drift(reference, current)
    mirrored = measure_drift([-value for value in reference], [-value for value in current])
    assert found.drifted
    assert (found.psi, found.by_chance) == (mirrored.psi, mirrored.by_chance)
    assert not measure_drift(reference, reference[::-1]).drifted


NUMBERS = st.lists(st.integers(-4, 4) | st.floats(allow_nan=False), min_size=1, max_size=60)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_mirrored_numbers_drift_as_far(reference, current):
    """The PSI does not depend on which end is up, to the last bit but for the order of the sum."""
    mirrored = population_stability_index([-each for each in reference], [-each for each in current])
    assert population_stability_index(reference, current) == pytest.approx(mirrored, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("kind", ["coin", "rare", "counts", "mostly one"])
def test_chance_alone_is_rarely_drift_of_discrete_values(kind):
    """Two windows of one distribution of few or repeated values are seldom taken for drift."""
    rng = np.random.default_rng(3)
    drawn = {
        "coin": lambda: rng.integers(0, 2, 100),
        "rare": lambda: rng.random(100) < 0.05,
        "counts": lambda: rng.poisson(3, 100),
        "mostly one": lambda: np.where(rng.random(100) < 0.9, 1.0, rng.random(100)),
    }[kind]
    assert 8 > sum(measure_drift(drawn(), drawn()).drifted for _ in range(100))


def test_ks_is_scipys_without_nan(rng):
    """It is what scipy says of the numbers there are; of none it is absent."""
    from scipy.stats import ks_2samp

    a, b = rng.normal(size=50), rng.normal(size=60)
    expected = ks_2samp(a, b, method="exact")
    assert (expected.statistic, expected.pvalue) == kolmogorov_smirnov([*a, math.nan], b)
    assert (None, None) == kolmogorov_smirnov([math.nan], b)


def test_categories_and_nan_drift_too():
    """Texts are compared by their shares; NaN is a bin of its own; windows of two kinds are refused."""
    assert measure_drift(["text"] * 90 + ["image"] * 10, ["text"] * 40 + ["image"] * 60).drifted
    assert not measure_drift(["text", "image"] * 50, ["image", "text"] * 40).drifted
    assert measure_drift([1.0] * 100, [1.0] * 50 + [math.nan] * 50).drifted
    with pytest.raises(errors.EvaluationError, match="expected two windows of numbers or two of texts"):
        measure_drift(["a"], [1.0])
    with pytest.raises(errors.EvaluationError, match="expected two windows with values, got 1 and 0"):
        measure_drift([1.0], [])
    with pytest.raises(errors.EvaluationError, match="expected numbers only, or texts only"):
        measure_drift([1.0, "a"], [1.0])


# -- the validation set ----------------------------------------------------------------------------

LOADER = [{"id": i, "prompt": "x" * (10 + i % 7), "tags": {"kind": "text"}} for i in range(100)]
LONGER = [{**sample, "prompt": sample["prompt"] * 3} for sample in LOADER]


def test_what_is_described():
    """Numbers, lengths of texts, tags as categories; ids and what has no size are left out."""
    assert {"prompt/length": 10.0, "tags/kind": "text"} == describe(LOADER[0])
    assert {"value": 2.0} == describe(2)
    assert {"a/value": 1.0} == describe({"a": 1, "b": None, "sample_id": 3})
    assert {"length": 3.0} == describe([1, 2, 3]) == describe(np.arange(3))
    assert {"a/value": 2.0} == describe({"a": np.float32(2)})
    assert {} == describe(object())


@dataclass
class Item:
    id: str
    prompt: str
    shape: tuple = (3, 4)
    tags: dict = field(default_factory=lambda: {"kind": "text"})


class Named(NamedTuple):
    id: str
    prompt: str


class Plain:
    def __init__(self, prompt):
        self.id, self.prompt = "a", prompt


def test_objects_are_described_by_their_attributes():
    """Dataclasses, named tuples and other objects are mappings; a tensor of one number is a number."""
    assert {"prompt/length": 3.0, "shape/length": 2.0, "tags/kind": "text"} == describe(Item("a", "why"))
    assert {"prompt/length": 3.0} == describe(Named("a", "why")) == describe(Plain("why"))
    assert {"value": 2.0} == describe(torch.tensor(2)) == describe(np.array(2.0))
    assert {"a/value": 2.0, "b/length": 2.0} == describe({"a": torch.tensor(2), "b": torch.ones(2)})


@pytest.mark.parametrize(
    "make", [Item, Named, lambda _, text: Plain(text), lambda _, text: torch.tensor(len(text))]
)
def test_samples_of_every_kind_drift(make):
    """What they are made of makes no difference: longer ones have drifted."""
    short, long = ([make(str(i), text * (1 + i % 5)) for i in range(100)] for text in ("a", "abcdefgh"))
    held = ValidationSet(short, refresh=lambda _: long)
    assert long is held.update(long, 5)


def test_samples_without_anything_in_common_are_an_error():
    """What cannot be measured is said, and never taken for no drift; a rank without samples has none."""
    held = ValidationSet([{"a": 1.0}] * 5, refresh=lambda _: [])
    with pytest.raises(
        errors.EvaluationError, match="got those of the validation set with 'a/value' and those of"
    ):
        held.update([{"b": 1.0}] * 5, 5)
    with pytest.raises(errors.EvaluationError, match="of the training with nothing; say what by features="):
        held.update([object()], 5)
    assert held.loader is held.update([], 5)


def test_a_refresh_that_can_be_read_once_is_kept():
    """A generator is there to be evaluated again and again; an async callback is refused."""
    held = ValidationSet(LOADER, refresh=lambda _: iter(LONGER))
    assert [LONGER] * 3 == [list(held.update(LONGER, epoch)) for epoch in (5, 6, 10)]

    async def refresh(_):
        return LONGER

    with pytest.raises(errors.EvaluationError, match="got the coroutine of an async function"):
        ValidationSet(LOADER, refresh=refresh).update(LONGER, 5)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 2.5}, {"patience": 0}])
def test_a_validation_set_needs_whole_numbers(options):
    """Of epochs, one or more: said when it is made, not at some later epoch."""
    (name, value), *_ = options.items()
    with pytest.raises(
        errors.ConfigError, match=f"expected {name} as a whole number of 1 or more, got {value}"
    ):
        ValidationSet(LOADER, refresh=lambda _: [], **options)


def test_a_loader_that_can_be_read_once_is_kept():
    """A generator as validation set is there to be evaluated after it was measured."""
    held = ValidationSet(iter(LOADER), refresh=lambda _: [])
    assert LOADER == list(held.update(LOADER, 0))


def test_the_validation_set_is_refreshed_when_the_data_drifts():
    """At every fifth epoch, by the callback, with the features that drifted as its reason."""
    reasons = []

    def refresh(reason):
        reasons.append(reason)
        return LONGER

    held = ValidationSet(LOADER, refresh)
    assert LOADER is held.update(LOADER[::-1], 0)
    assert LOADER is held.update(LONGER, 4)
    assert {} == held.drift
    assert LONGER is held.update(LONGER, 5)
    assert ["drift of prompt/length"] == reasons
    assert LONGER is held.update(LONGER, 10)
    assert 1 == len(reasons)


def test_the_validation_set_is_refreshed_on_the_symptom_too():
    """Training that improves three times while evaluation never does is one, a rise of evaluation is none."""
    reasons = []
    stalls = [(0.1, 0.5), (0.2, 0.5), (0.3, 0.4), (0.4, 0.4)]
    options = {"reference": LOADER, "refresh": lambda reason: reasons.append(reason) or LOADER, "epoch": 1}
    update_validation_set(LOADER, **options, scores=stalls[:3])
    update_validation_set(LOADER, **options, scores=[*stalls[:3], (0.4, 0.41)])
    assert [] == reasons
    update_validation_set(LOADER, **options, scores=stalls)
    assert ["training improves, evaluation stalls"] == reasons
    held = ValidationSet(LOADER, options["refresh"])
    for epoch, (training, evaluation) in enumerate(stalls, start=1):
        held.update(LOADER, epoch, training=training, evaluation=evaluation)
    assert 2 == len(reasons)


def refreshed(rank):
    held = ValidationSet(LOADER, lambda reason: [reason])
    return held.update(LONGER if rank == 1 else LOADER, 5)


def test_ranks_refresh_together():
    """What one rank sees in its part is everybody's reason (report h9)."""
    assert [["drift of prompt/length"]] * 2 == run(refreshed)


# -- ranks that agree ------------------------------------------------------------------------------


def test_ranks_within_the_tolerance_agree():
    """Means are returned; exactly the tolerance is within it; NaN and infinities everywhere are agreement."""
    nan, inf = math.nan, math.inf
    found = validate_distributed_results([{"a": 0.55, "n": nan, "i": inf}, {"a": 0.65, "n": nan, "i": inf}])
    assert (pytest.approx(0.6), inf, True) == (found["a"], found["i"], math.isnan(found["n"]))
    assert {"result": 1.0} == validate_distributed_results({3: 1.0, 5: 1.0}, tolerance=0)
    assert {"a": 100.0} == validate_distributed_results([{"a": 96}, {"a": 104}], 0.05, relative=True)


@pytest.mark.parametrize(
    ("results", "options", "got"),
    [
        (
            [{"a": 0.6}, {"a": 0.6}, {"a": 0.9}, {"a": 0.6}],
            {"tolerance": 0.1},
            r"a = 0.9 on rank 2 \(mean 0.675\)$",
        ),
        ({4: {"a": 1.0}, 7: {}}, {}, r"got no a on rank 7"),
        ([1.0, math.nan], {}, r"result = nan on rank 1 \(mean 1\)"),
        ([1.0, math.inf], {}, r"result = inf on rank 1"),
        ([{"a": 96}, {"a": 107}], {"relative": True}, r"within 0.05 times their mean, got a = 96 on rank 0"),
    ],
)
def test_ranks_that_deviate_are_named_with_their_values(results, options, got):
    """The error tells metric, rank, value and mean."""
    with pytest.raises(errors.DistributedEvaluationError, match=got):
        validate_distributed_results(results, **options)


def gathered(rank):
    metrics = metrics_of_ranks({"accuracy": 0.5 + 0.2 * rank})
    try:
        validate_distributed_results(metrics)
    except errors.DistributedEvaluationError as error:
        return str(error)
    return None


def test_all_ranks_raise_alike():
    """Gathered over real ranks, the verdict is the same on all of them."""
    text = (
        "expected metrics of 2 ranks within 0.05 of their mean, got "
        "accuracy = 0.5 on rank 0 (mean 0.6), accuracy = 0.7 on rank 1 (mean 0.6)"
    )
    assert [text] * 2 == run(gathered)


def test_nonsense_is_refused():
    """A negative tolerance and no results at all are mistakes."""
    with pytest.raises(errors.EvaluationError, match="expected a tolerance of 0 or more, got -1"):
        validate_distributed_results([1.0], -1)
    with pytest.raises(errors.EvaluationError, match="expected the results of at least one rank, got none"):
        validate_distributed_results([])


# -- samples that changed --------------------------------------------------------------------------


def test_exactly_the_changed_samples_are_listed():
    """Three changed samples are three, in whatever order the results come (report h19)."""
    before = [SampleResult(f"q{i}", {"right": i % 2, "len": i}) for i in range(50)]
    after = [
        SampleResult(f"q{i}", {"right": i % 2 if i not in (3, 9) else 0, "len": i + (i == 20)})
        for i in range(50)
    ]
    found = changed_samples(before, after[::-1])
    assert [("len", "q20", 1.0), ("right", "q3", -1.0), ("right", "q9", -1.0)] == [
        (each.key, each.sample_id, each.change) for each in found
    ]
    assert [] == changed_samples(before, after, tolerance=1)


def test_missing_and_nan_results_are_changes():
    """A result that one side lacks is listed without a difference; NaN on both sides is none."""
    nan = math.nan
    found = changed_samples(
        {("a", "1"): 1.0, ("a", "2"): nan, ("a", "3"): nan}, {("a", "2"): nan, ("a", "3"): 1.0}
    )
    assert [("1", 1.0, None, None), ("3", 1.0)] == [
        (found[0].sample_id, found[0].before, found[0].after, found[0].change),
        (found[1].sample_id, found[1].after),
    ]
