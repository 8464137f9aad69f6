"""How often to evaluate: the advice, and the pace that follows a metric."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from aggregator.evaluation import AdaptiveEvaluator, EvaluatorConfig, Pace, advise_schedule
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
        (50_000, {"total_steps": 20_000}, 4000, 1),
        (50_000, {"total_steps": 20_000, "steps_per_epoch": 900}, 4000, 5),
        (1_000_000, {"total_steps": 1000, "steps_per_epoch": 10}, None, 20),
    ],
)
def test_advice_goes_by_the_number_of_samples(samples, training, steps, epochs):
    """By size as the contract says, and never more often than every tenth or fifth of the training."""
    assert EvaluatorConfig(freq_steps=steps, freq_epochs=epochs) == advise_schedule(samples, **training)


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
        errors.ConfigError, match="expected least and most with 1 <= least <= most, got 5 and 2"
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


def test_rank_0_sets_the_pace_for_all():
    """Ranks with results of their own evaluate at the same steps (report h9)."""
    answers = run(steps_of, [0.5])
    assert [[10, 20, 40, 80, 160, 320]] * 2 == [steps for steps, _ in answers]
