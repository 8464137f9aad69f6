"""Which samples are evaluated: all, a seeded part, or new ones; and the hard ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import eventlog
from aggregator import open_run, stats_tracker
from aggregator.evaluation import (
    compute_aggregated_metrics,
    evaluate_distributed,
    mined,
    perturbed,
    select,
    typos,
)
from aggregator.evaluation.results import SampleResult
from eventlog import errors

SAMPLES = [{"id": f"q{i}", "prompt": f"what is {i} and one", "n": i} for i in range(95)]


def ids(samples):
    return [sample["id"] for sample in samples]


def test_a_sampled_evaluation_takes_ten_percent_by_the_seed():
    """The same seed is the same tenth, in the samples' order, whatever that is; another one another."""
    chosen = ids(select(SAMPLES, "sampled", seed=1))
    assert 10 == len(chosen)
    assert chosen == ids(select(SAMPLES, "sampled", seed=1))
    shuffled = random.Random(0).sample(SAMPLES, len(SAMPLES))
    assert set(chosen) == set(ids(select(shuffled, "sampled", seed=1)))
    assert set(chosen) != set(ids(select(SAMPLES, "sampled", seed=2)))
    assert 1 == len(select(SAMPLES[:1], "sampled"))


@given(st.integers(1, 200), st.floats(0.01, 1.0))
def test_a_tenth_is_drawn_evenly(n, fraction):
    """Every fraction gives as many as it says, none of them twice."""
    chosen = ids(select(({"id": i} for i in range(n)), "sampled", fraction=fraction))
    assert len(set(chosen)) == len(chosen)
    assert -1e-9 < len(chosen) - fraction * n < 1 + 1e-9


def test_a_fraction_is_what_is_written():
    """0.07 of 100 are 7, though 0.07 * 100 is a little more than 7; of mined ones too (report a1)."""
    samples = [{"id": i} for i in range(100)]
    assert 7 == len(select(samples, "sampled", fraction=0.07))
    assert 7 == len(mined([SampleResult(str(i), {"a": 0.0}) for i in range(100)], samples, "a", share=0.07))


def test_full_and_incremental():
    """Full takes each id once, incremental what was never evaluated."""
    assert ids(SAMPLES) == ids(select([*SAMPLES, SAMPLES[3]]))
    seen = {f"q{i}" for i in range(90)}
    assert [f"q{i}" for i in range(90, 95)] == ids(select(SAMPLES, "incremental", seen=seen))
    numbered = [{"id": i} for i in range(10)]
    assert [8, 9] == ids(select(numbered, "incremental", seen={sample["id"] for sample in numbered[:8]}))
    assert [8, 9] == ids(select(numbered, "incremental", seen=torch.arange(8)))


def test_what_is_no_mode_or_fraction_is_refused():
    """The message names what there is."""
    with pytest.raises(
        errors.EvaluationError, match=r"expected a mode \(full, sampled, incremental\), got 'some'"
    ):
        select(SAMPLES, "some")
    with pytest.raises(errors.EvaluationError, match="expected a fraction above 0 and at most 1, got 0"):
        select(SAMPLES, "sampled", fraction=0)


# -- ids -------------------------------------------------------------------------------------------


@dataclass
class Item:
    uid: int
    prompt: str
    tags: dict = field(default_factory=dict)


def test_ids_and_tags_are_found_where_the_caller_says():
    """An item, an attribute, or a function; an integer is a text; tags must be a mapping that JSON takes."""
    found = evaluate_distributed(lambda _: 1.0, [Item(7, "x", {"kind": "a"})], sample_id="uid", record=False)
    assert [("7", {"kind": "a"})] == [(each.id, each.tags) for each in found]
    by_function = {"sample_id": lambda s: f"{s['n']}/{s['id']}", "tags": lambda s: {"odd": s["n"] % 2 == 1}}
    found = evaluate_distributed(lambda _: 1.0, SAMPLES[1:2], record=False, **by_function)
    assert [("1/q1", {"odd": True})] == [(each.id, each.tags) for each in found]
    for bad in ("text", {"x": object()}):
        with pytest.raises(errors.EvaluationError, match="expected tags by name, as JSON takes them"):
            evaluate_distributed(lambda _: 1.0, [{"id": 1, "tags": bad}])


@pytest.mark.parametrize("bad", [None, "", 1.5, True, ["q"]])
def test_what_is_no_id_is_refused(bad):
    """An id is a text or an integer: nothing else stands for a sample (report h15)."""
    with pytest.raises(errors.EvaluationError, match=r"expected an id \(a text or an integer\) by 'id'"):
        evaluate_distributed(lambda _: 1.0, [{"id": bad}])


@pytest.mark.parametrize(
    "given_id", [np.int64(7), np.uint8(7), np.array(7), torch.tensor(7), torch.tensor(7, dtype=torch.int32)]
)
def test_integers_of_numpy_and_torch_are_ids(given_id):
    """They are the integer they hold, as text."""
    found = evaluate_distributed(lambda _: 1.0, [{"id": given_id}], record=False)
    assert ["7"] == [each.id for each in found]


@pytest.mark.parametrize(
    "bad", [np.bool_(True), torch.tensor(True), torch.tensor([7]), torch.tensor(7.0), np.array([7])]
)
def test_what_is_no_single_integer_is_no_id(bad):
    """Truth values, fractions and lists of one are refused as before."""
    with pytest.raises(errors.EvaluationError, match="expected an id"):
        evaluate_distributed(lambda _: 1.0, [{"id": bad}])


def test_an_integer_and_its_text_are_not_two_ids():
    """1 and "1" would be one id: they are refused, as samples and as rows."""
    both = [{"id": 1, "right": 1.0}, {"id": "1", "right": 0.0}]
    text = "expected ids that differ as texts, got the integer 1 and the text '1'"
    for call in (
        lambda: evaluate_distributed(lambda _: 1.0, both),
        lambda: compute_aggregated_metrics(both),
        lambda: select(both),
    ):
        with pytest.raises(errors.EvaluationError, match=text):
            call()


# -- hard examples ---------------------------------------------------------------------------------


def test_perturbed_samples_have_ids_and_tags_of_their_own():
    """Copies are told apart by ids that name their origin, and are the same whenever they are made."""
    made = perturbed(SAMPLES[:2], typos("prompt", rate=0.5), name="typos", copies=2)
    assert ["q0~typos", "q0~typos~1", "q1~typos", "q1~typos~1"] == ids(made)
    assert {"perturbation": "typos"} == made[0]["tags"]
    assert (
        made == perturbed(SAMPLES[:2][::-1], typos("prompt", rate=0.5), name="typos", copies=2)[2:] + made[2:]
    )
    assert sorted(SAMPLES[0]["prompt"]) == sorted(made[0]["prompt"])
    assert 3 == len({SAMPLES[0]["prompt"], made[0]["prompt"], made[1]["prompt"]})


def test_any_generator_may_make_hard_examples():
    """It may return a whole sample, or only what differs; dataclasses stay what they are."""
    whole = perturbed(
        [Item(1, "a", {"kind": "x"})], lambda s, _: Item(0, s.prompt * 3), name="long", sample_id="uid"
    )
    assert [Item("1~long", "aaa", {"kind": "x", "perturbation": "long"})] == whole
    part = perturbed([Item(1, "a")], lambda *_: {"prompt": "b"}, name="other", sample_id="uid")
    assert "b" == part[0].prompt
    with pytest.raises(
        errors.EvaluationError, match="expected a sample as a mapping or a dataclass, got str"
    ):
        perturbed([Item(1, "a")], lambda *_: "b", name="other", sample_id="uid")


def test_perturbations_are_slices_of_the_result():
    """By the tag one sees how far each lowers the score."""
    samples = [*SAMPLES[:10], *perturbed(SAMPLES[:10], lambda *_: {"n": -1}, name="broken")]
    results = evaluate_distributed(lambda s: {"right": s["n"] >= 0}, samples, record=False)
    metrics = compute_aggregated_metrics(results, by=["perturbation"])
    assert (0.5, 0.0, 10) == tuple(
        metrics[k] for k in ("right", "perturbation/broken/right", "perturbation/broken/n_samples")
    )


def test_perturbed_samples_are_recorded_together(tmp_path):
    """However many there are they are one record a metric, not one a sample (report v1)."""
    eventlog.start(tmp_path / "run")
    evaluate_distributed(lambda _: 1.0, perturbed(SAMPLES, typos("prompt"), name="typos"))
    eventlog.current().commit(0, 0, 0, [stats_tracker.export_all()])
    eventlog.stop()
    with open_run(tmp_path / "run") as run:
        records = run.sql("select count(*) as n from records where key = 'eval-rollout/score'").to_pylist()
        samples = run.sql("select count(*) as n from samples where tags like '%typos%'").to_pylist()
    assert [{"n": 1}] == records
    assert [{"n": len(SAMPLES)}] == samples


def test_the_hardest_samples_are_mined():
    """The share with the lowest value, NaN first, ties by id; the highest where more is worse."""
    values = {"q0": 0.5, "q1": 0.1, "q2": float("nan"), "q3": 0.1, "q4": 0.9}
    results = [SampleResult(each, {"accuracy": value}) for each, value in values.items()]
    results.append(SampleResult("q5", {"other": 0.0}))
    assert ["q1", "q2"] == ids(mined(results, SAMPLES, "accuracy", share=0.4))
    assert ["q2", "q4"] == ids(mined(results, SAMPLES, "accuracy", share=0.4, highest=True))
    with pytest.raises(errors.EvaluationError, match="expected a share above 0 and at most 1, got 2"):
        mined(results, SAMPLES, "accuracy", share=2)
    with pytest.raises(
        errors.EvaluationError, match="expected the metric 'acuracy' among the results, got 'acc"
    ):
        mined(results, SAMPLES, "acuracy")
    assert [] == mined([], SAMPLES, "accuracy")
