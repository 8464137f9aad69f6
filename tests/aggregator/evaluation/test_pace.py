"""How often to evaluate: the advice, and the pace that follows a metric."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aggregator.evaluation import AdaptiveEvaluator, EvaluatorConfig, Pace, advise_schedule
from aggregator.evaluation.schedule import Position, Schedule
from eventlog import errors
from tests.gloo import run

SPEC = SimpleNamespace(total_train_epochs=1, steps_per_epoch=10_000, total_train_steps=10_000)


@pytest.mark.parametrize(
    ("samples", "training", "steps", "epochs"),
    [
        (9_999, {}, 100, None),
        (10_000, {}, 1000, 1),
        (100_000, {}, 1000, 1),
        (100_001, {}, None, 1),
        (500, {"total_steps": 5_001}, 501, None),
        (500, {"total_steps": 500}, 100, None),
        (50_000, {"total_steps": 20_000}, 4000, None),
        (50_000, {"total_steps": 20_000, "steps_per_epoch": 900}, None, 5),
        (50_000, {"total_steps": 3000, "steps_per_epoch": 100}, 1000, None),
        (50_000, {"total_steps": 3000, "steps_per_epoch": 5000}, None, 1),
        (1_000_000, {"total_steps": 1000, "steps_per_epoch": 10}, None, 20),
    ],
)
def test_advice_goes_by_the_number_of_samples(samples, training, steps, epochs):
    """By size as the contract says, and never more often than every tenth or fifth of the training."""
    assert EvaluatorConfig(freq_steps=steps, freq_epochs=epochs) == advise_schedule(samples, **training)


@given(st.integers(1, 200_000), st.integers(1, 5000), st.integers(1, 3000))
def test_a_bounded_training_is_evaluated_as_often_as_advised(samples, total, per_epoch):
    """Whatever falls due in it: ten times at most, from 10 000 samples on five (report a1)."""
    advice = advise_schedule(samples, total_steps=total, steps_per_epoch=per_epoch)
    schedule = Schedule(advice.freq_epochs, advice.freq_steps)
    at = [Position(done // per_epoch, done) for done in range(total + 1)]
    assert sum(itertools.starmap(schedule.due, itertools.pairwise(at))) <= (10 if samples < 10_000 else 5)


def test_epochs_of_unknown_length_are_not_bounded():
    """Where only epochs are left, how many steps they have must be said."""
    with pytest.raises(
        errors.EvaluationError, match="expected steps_per_epoch with total_steps for 500000 samples"
    ):
        advise_schedule(500_000, total_steps=3000)


def test_no_samples_need_no_schedule():
    """There is no advice for nothing."""
    with pytest.raises(errors.EvaluationError, match="expected 1 sample or more, got 0"):
        advise_schedule(0)


def test_the_pace_slows_down_where_nothing_moves_and_speeds_up_where_much_does():
    """Still doubles the interval, moving halves it, within the bounds; between them it stays."""
    pace, intervals = Pace(least=50, most=300), []
    for value in (0.5, 0.5, 0.5, 0.5, 0.51, 0.6, 0.7, 0.9, float("nan")):
        pace = pace.after(value)
        intervals.append(pace.interval)
    assert [50, 100, 200, 300, 300, 150, 75, 50, 50] == intervals


def test_impossible_bounds_are_refused():
    """The least interval lies between 1 and the most."""
    with pytest.raises(
        errors.ConfigError,
        match="expected least and most as whole numbers with 1 <= least <= most, got 5 and 2",
    ):
        Pace(least=5, most=2)


def steps_of(rank, values, state=None, first=0, last=400):
    """Return the steps at which an adaptive evaluator evaluates; ranks see different results."""
    evaluator = AdaptiveEvaluator(EvaluatorConfig(), SPEC, metric="accuracy", pace=Pace(least=10, most=160))
    if state is not None:
        evaluator.load_state_dict(json.loads(json.dumps(state)))
    found, left = [], list(values)

    def evaluate():
        value = left.pop(0) if len(left) > 1 else left[0]
        return {"accuracy": value + 0.1 * rank * len(found)}

    for step in range(first, last):
        found += [step + 1] if evaluator.evaluate(evaluate, 0, step, step) is not None else []
    return found, evaluator.state_dict()


def test_an_adaptive_evaluator_evaluates_on_multiples_of_its_interval():
    """A metric that settles is measured ever more rarely, one that moves as often as at first."""
    assert [10, 20, 40, 80, 160, 320] == steps_of(0, [0.5])[0]
    assert list(range(10, 110, 10)) == steps_of(0, [0.1 * i for i in range(30)], last=100)[0]


def test_a_resumed_evaluator_keeps_its_pace():
    """The interval and the last value are part of the state; a bare evaluator's state is taken too."""
    whole = steps_of(0, [0.5])[0]
    before, state = steps_of(0, [0.5], last=100)
    assert whole == before + steps_of(0, [0.5], state, first=100)[0]
    del state["pace"]
    assert 110 == steps_of(0, [0.5], state, first=100)[0][0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"least": 1.5}, "expected least and most as whole numbers with 1 <= least <= most, got 1.5 and 20"),
        ({"scale": 0}, "expected 0 <= still <= moving, and a scale above 0, got 0.01, 0.05 and 0"),
        (
            {"still": 0.5, "moving": 0.1},
            "expected 0 <= still <= moving, and a scale above 0, got 0.5, 0.1 and",
        ),
        ({"interval": 500}, "expected an interval within least and most, got 500, not within 10 and 20"),
        ({"interval": 5}, "expected an interval within least and most, got 5, not within 10 and 20"),
    ],
)
def test_a_pace_that_means_nothing_is_refused(options, text):
    """Bounds, thresholds and the interval are looked at when it is made."""
    with pytest.raises(errors.ConfigError, match=text):
        Pace(**{"least": 10, "most": 20, **options})


@pytest.mark.parametrize("pace", [None, "x", ["x", 1], [10], [20, "high"], [0.5, None]])
def test_a_state_without_a_pace_in_it_is_refused(pace):
    """What is no pace says so, and the evaluator stays as it was."""
    evaluator = AdaptiveEvaluator(EvaluatorConfig(), SPEC, metric="a", pace=Pace(least=10, most=80))
    before = evaluator.state_dict()
    with pytest.raises(errors.ConfigError, match="expected a pace as its interval and the last number, got"):
        evaluator.load_state_dict({**before, "updates": 7, "pace": pace})
    assert (before["updates"], before["pace"]) == (0, evaluator.state_dict()["pace"])
    assert 0 == evaluator.state_dict()["updates"]


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor, int, lambda v: np.array([v])[0]])
def test_any_number_sets_the_pace(number):
    """Numbers of numpy and torch are numbers: an evaluation that does not move is made ever more rarely."""
    evaluator = AdaptiveEvaluator(EvaluatorConfig(), SPEC, metric="accuracy", pace=Pace(least=1, most=8))
    due = [s + 1 for s in range(9) if evaluator.evaluate(lambda: {"accuracy": number(1)}, 0, s, s)]
    assert ([1, 2, 4, 8], 8) == (due, evaluator.interval)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"acuracy": 1.0}, "expected the metric 'accuracy' among the results, got 'acuracy'"),
        ({}, "expected the metric 'accuracy' among the results, got none"),
        ({"accuracy": "high"}, "expected a number for the metric 'accuracy', got str 'high'"),
        ({"accuracy": torch.zeros(2)}, "expected a number for the metric 'accuracy', got Tensor"),
    ],
)
def test_results_without_the_metric_are_refused(result, text):
    """A pace that cannot adapt says so, instead of never adapting."""
    evaluator = AdaptiveEvaluator(EvaluatorConfig(), SPEC, metric="accuracy", pace=Pace(least=1, most=8))
    with pytest.raises(errors.EvaluationError, match=text):
        evaluator.evaluate(lambda: result, 0, 0, 0)


def test_rank_0_sets_the_pace_for_all():
    """Ranks with results of their own evaluate at the same steps (report h9)."""
    answers = run(steps_of, [0.5])
    assert [[10, 20, 40, 80, 160, 320]] * 2 == [steps for steps, _ in answers]
