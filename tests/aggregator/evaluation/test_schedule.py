"""The schedule against an oracle that counts update by update, and what a saved state keeps of it."""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.evaluation import (
    EpochStepTimeFreqCtl,
    Evaluator,
    EvaluatorConfig,
    Position,
    Progress,
    Schedule,
)
from eventlog import errors


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


# -- the oracle ------------------------------------------------------------------------------------


@dataclass
class Check:
    """A call of `evaluate`: what happened since the one before, and how long an evaluation takes here."""

    updates: int = 1
    seconds: int = 1
    evaluation_seconds: int = 0
    downtime: int | None = None  # the process was restarted before the check, after so many seconds


@dataclass
class Training:
    """A configuration, and the checks of a run."""

    config: EvaluatorConfig
    steps_per_epoch: int
    checks: list[Check] = field(default_factory=list)


def is_due(config, steps_per_epoch, update):
    """Say, for one single update, whether an evaluation belongs right after it."""
    if config.freq_steps and update % config.freq_steps == 0:
        return True
    epoch, rest = divmod(update, steps_per_epoch)
    if not config.freq_epochs or rest:
        return False
    if config.start_epoch > 1:
        return epoch >= config.start_epoch and (epoch - config.start_epoch) % config.freq_epochs == 0
    return epoch % config.freq_epochs == 0


def expected(training):
    """Return the numbers of finished updates after which a run evaluates."""
    config, evaluated, finished, waited = training.config, [], 0, 0
    first = config.eval_before_train or config.start_epoch == 0
    for check in training.checks:
        passed = range(finished + 1, finished + check.updates + 1)
        finished += check.updates
        waited += check.seconds
        late = config.freq_secs is not None and waited >= config.freq_secs
        if first or late or any(is_due(config, training.steps_per_epoch, update) for update in passed):
            evaluated.append(finished)
            waited = 0
        first = False
    return evaluated


def observed(training):
    """Return the same of the real evaluator, restarted from its saved state where the run was."""
    clock, spec = Clock(), SimpleNamespace(steps_per_epoch=training.steps_per_epoch)
    evaluator = Evaluator(training.config, spec, clock=clock)
    evaluated, finished = [], 0
    for check in training.checks:
        if check.downtime is not None:
            state = json.loads(json.dumps(evaluator.state_dict()))
            clock.now += check.downtime
            evaluator = Evaluator(training.config, spec, clock=clock)
            evaluator.load_state_dict(state)
        clock.now += check.seconds
        finished += check.updates

        def evaluate(check=check):
            clock.now += check.evaluation_seconds
            return True

        epoch, step = divmod(finished - 1, training.steps_per_epoch)
        if evaluator.evaluate(evaluate, epoch, step, finished - 1):
            evaluated.append(finished)
    return evaluated


def often(most):
    return st.none() | st.integers(1, most)


configs = st.builds(
    EvaluatorConfig,
    freq_epochs=often(4),
    freq_steps=often(12),
    freq_secs=often(20),
    eval_before_train=st.booleans(),
    start_epoch=st.integers(0, 4),
)
checks = st.builds(
    Check,
    updates=st.integers(1, 4),
    seconds=st.integers(0, 10),
    evaluation_seconds=st.integers(0, 30),
    downtime=st.none() | st.none() | st.none() | st.integers(0, 1000),
)
trainings = st.builds(
    Training, configs, steps_per_epoch=st.integers(1, 7), checks=st.lists(checks, min_size=1, max_size=40)
)


@given(trainings)
@settings(max_examples=300, deadline=None)
def test_evaluates_when_the_oracle_says(training):
    """Whatever the triggers, strides and restarts, evaluations come where counting by hand puts them."""
    assert expected(training) == observed(training)


@pytest.mark.long
@pytest.mark.timeout(600)
@given(trainings)
@settings(max_examples=10_000, deadline=None)
def test_evaluates_when_the_oracle_says_ten_thousand_times(training):
    """The same for ten thousand schedules."""
    assert expected(training) == observed(training)


# -- single rules ----------------------------------------------------------------------------------


def evaluations(config, steps, *, steps_per_epoch=1000, seconds=1.0, evaluation_seconds=0.0):
    checks = [Check(1, seconds, evaluation_seconds) for _ in range(steps)]
    return observed(Training(config, steps_per_epoch, checks))


def test_steps_count_finished_updates():
    """Every ten steps means after 10, 20 and 30 updates, as checkpoints are counted (report h6)."""
    assert [10, 20, 30] == evaluations(EvaluatorConfig(freq_steps=10), 35)


def test_epochs_trigger_at_their_ends_only():
    """Every epoch of 100 steps means after 100 and 200 updates, and not at the first steps (report h8)."""
    assert [100, 200] == evaluations(EvaluatorConfig(freq_epochs=1), 250, steps_per_epoch=100)


def test_start_epoch_moves_the_epochs():
    """Every second epoch from the second on is 2, 4, 6; from the third on 3, 5, 7 (report h2)."""
    assert [2, 4, 6] == evaluations(EvaluatorConfig(freq_epochs=2, start_epoch=2), 7, steps_per_epoch=1)
    assert [3, 5, 7] == evaluations(EvaluatorConfig(freq_epochs=2, start_epoch=3), 7, steps_per_epoch=1)


def test_seconds_begin_when_the_evaluation_has_ended():
    """Ten seconds, steps of one, evaluations of fifteen: ten steps lie between two of them (report h10)."""
    config = EvaluatorConfig(freq_secs=10)
    assert [10, 20, 30] == evaluations(config, 35, evaluation_seconds=15)


def test_an_interval_shorter_than_a_step_evaluates_once_per_check():
    """One second with steps of five evaluates at every step, once (report h11)."""
    assert [1, 2, 3, 4] == evaluations(EvaluatorConfig(freq_secs=1), 4, seconds=5)


def test_any_evaluation_begins_the_seconds_anew():
    """Seconds count since the last evaluation, whatever triggered it."""
    assert [6, 12, 18] == evaluations(EvaluatorConfig(freq_secs=8, freq_steps=6), 20)


def test_downtime_does_not_count():
    """A run that was down for an hour does not evaluate for that reason when it comes back (report s10)."""
    checks = [Check(seconds=3), Check(seconds=3), Check(seconds=3, downtime=3600), Check(seconds=3)]
    assert [4] == observed(Training(EvaluatorConfig(freq_secs=12), 100, checks))


def test_nothing_configured_means_never():
    """Without a frequency nothing is ever due."""
    assert [] == evaluations(EvaluatorConfig(), 50, steps_per_epoch=5)


def test_due_changes_nothing():
    """A schedule is a value, and asking a progress does not move it."""
    schedule = Schedule(steps=2)
    assert schedule.due(Position(0, 1), Position(0, 2))
    assert not schedule.due(Position(0, 2), Position(0, 3))
    progress = Progress(schedule)
    assert [True, True] == [progress.due(Position(0, 2)) for _ in range(2)]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"epochs": 0}, "expected freq_epochs to be a whole number of 1 or more or None, got 0"),
        ({"steps": -1}, "expected freq_steps to be a whole number of 1 or more or None, got -1"),
        ({"steps": 2.5}, "expected freq_steps .* got 2.5"),
        ({"steps": True}, "expected freq_steps .* got True"),
        ({"seconds": 0}, "expected freq_secs to be above 0 or None, got 0"),
        ({"seconds": float("nan")}, "expected freq_secs to be above 0 or None, got nan"),
        ({"start_epoch": -1}, "expected start_epoch to be a whole number of 0 or more or None, got -1"),
    ],
)
def test_refuses_what_is_no_frequency(given_, message):
    """A frequency that would mean every check or none is refused where it is configured."""
    with pytest.raises(errors.ConfigError, match=message):
        Schedule(**given_)


# -- AReaL's control and its states ----------------------------------------------------------------


def test_seconds_work_without_process_group():
    """A control by seconds in one process waits, goes off, and waits again (report h1)."""
    clock = Clock()
    control = EpochStepTimeFreqCtl(freq_epoch=None, freq_step=None, freq_sec=1, clock=clock)
    assert not control.check(epochs=0, steps=1)
    clock.now += 1
    assert control.check(epochs=0, steps=1)
    assert not control.check(epochs=0, steps=1)


def test_control_counts_what_it_is_told():
    """The control by AReaL's name counts epochs and steps from check to check, and combines with or."""
    control = EpochStepTimeFreqCtl(freq_epoch=1, freq_step=3, freq_sec=None)
    checked = [control.check(epochs=int(step % 4 == 3), steps=1) for step in range(8)]
    assert [False, False, True, True, False, True, False, True] == checked


def test_control_goes_off_at_the_first_check_if_asked():
    """With AReaL's initial value the first check goes off, once, also over a restart."""
    control = EpochStepTimeFreqCtl(1, None, None, initial_epoch_value=True)
    assert [True, False] == [control.check(epochs=0, steps=1) for _ in range(2)]
    resumed = EpochStepTimeFreqCtl(1, None, None, initial_epoch_value=True)
    resumed.load_state_dict(control.state_dict())
    assert not resumed.check(epochs=0, steps=1)


def areal_state(*, steps, epochs=0, seconds_since=None, fired=False, initial=False):
    """Return what AReaL's three controls save; it spells the frequency of seconds wrong."""
    shared = {"frequence_seconds": None, "frequency_steps": None, "start_time": 1.7e9, "last_time": 1.7e9}
    rest = {"interval_steps": 1, "interval_seconds": seconds_since, "initial_value": False}
    last = steps if fired else 0
    return {
        "epoch": {
            **shared,
            **rest,
            "frequency_steps": 1,
            "steps": epochs,
            "last_steps": 0,
            "initial_value": initial,
        },
        "step": {**shared, **rest, "frequency_steps": 50, "steps": steps, "last_steps": 0},
        "time": {**shared, **rest, "frequence_seconds": 600, "steps": steps, "last_steps": last},
    }


def test_takes_areals_state():
    """AReaL's saved state tells how far the run is; nothing before is due again (report s10)."""
    progress = Progress(Schedule(epochs=1, steps=10, seconds=30), clock := Clock())
    progress.load_state_dict(areal_state(steps=25, epochs=2, seconds_since=20.0))
    assert Position(2, 25) == progress.position
    assert 20 == progress.waited
    assert not progress.due(Position(2, 26))
    assert progress.due(Position(2, 30))
    clock.now += 10
    assert progress.due(Position(2, 26))


def test_takes_areals_state_of_an_initial_check():
    """What AReaL's state says of the initial evaluation and of a timer that has just fired holds."""
    progress = Progress(Schedule(), Clock())
    progress.load_state_dict(areal_state(steps=7, seconds_since=900.0, fired=True))
    assert 0 == progress.waited
    assert progress.before_done
    progress.load_state_dict(areal_state(steps=0, initial=True))
    assert not progress.before_done
    progress.load_state_dict({**areal_state(steps=9), "start_epoch": 3, "epoch_count": 4})
    assert Position(4, 9) == progress.position


def test_new_configuration_wins_over_saved_state():
    """A resumed run follows the frequencies of today's configuration, ours and AReaL's (report s10)."""
    state = Evaluator(EvaluatorConfig(freq_steps=50), SimpleNamespace(steps_per_epoch=1000)).state_dict()
    for saved in ({**state, "updates": 25}, areal_state(steps=25)):
        evaluator = Evaluator(EvaluatorConfig(freq_steps=7), SimpleNamespace(steps_per_epoch=1000))
        evaluator.load_state_dict(saved)
        due = [step + 1 for step in range(25, 45) if evaluator.evaluate(lambda: True, 0, step, step)]
        assert [28, 35, 42] == due


@pytest.mark.parametrize("state", [{}, {"step": {}}, {"updates": -1, "epochs": 0}, {"updates": "x"}])
def test_refuses_a_state_that_is_none(state):
    """A state that is neither ours nor AReaL's is refused, and the progress stays as it was."""
    progress = Progress(Schedule())
    progress.advance(Position(1, 5))
    with pytest.raises(errors.ConfigError, match="expected the state of an evaluator with epochs, updates"):
        progress.load_state_dict(state)
    assert Position(1, 5) == progress.position
