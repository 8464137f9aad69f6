"""The evaluator in a run: what it calls, what the log remembers over restarts, what ranks decide together."""

import asyncio
import json
import logging
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest

import eventlog
from aggregator import collective, open_run, stats_tracker
from aggregator.evaluation import (
    Evaluator,
    EvaluatorConfig,
    compute_aggregated_metrics,
    evaluate_distributed,
    log_evaluation_results,
)
from eventlog import RunDir, RunReader, errors
from tests.gloo import Ranks

SPEC = SimpleNamespace(total_train_epochs=10, steps_per_epoch=1000, total_train_steps=10_000)


class Life:
    """One attempt of a run: steps that evaluate and commit as AReaL's loop does, until it dies."""

    def __init__(self, path, state=None, *, spec=SPEC, **config):
        eventlog.start(path, role="trainer")
        eventlog.current().claim_attempt()
        self.spec = spec
        self.evaluated = []
        self.evaluator = Evaluator(EvaluatorConfig(**config), spec)
        if state is not None:
            self.evaluator.load_state_dict(json.loads(json.dumps(state)))

    def before(self, **kwargs):
        return self.evaluator.before_train(lambda: self._evaluate("before"), **kwargs)

    def check(self, step):
        epoch, within = divmod(step, self.spec.steps_per_epoch)
        return self.evaluator.evaluate(lambda: self._evaluate(step + 1), epoch, within, step)

    def commit(self, step):
        epoch, within = divmod(step, self.spec.steps_per_epoch)
        eventlog.current().commit(epoch, within, step, [{"loss": 1.0}])

    def steps(self, *steps):
        for step in steps:
            self.check(step)
            self.commit(step)
        return self

    def _evaluate(self, label):
        self.evaluated.append(label)
        return label

    def die(self):
        """End as a killed process does: what was not committed is nowhere."""
        state = self.evaluator.state_dict()
        eventlog.stop()
        return state


def commit_tags(path):
    """Return (global step, tags) of every commit that has tags."""
    rows = [batch.slice(0, 1).to_pylist()[0] for _, _, batch in RunReader(path).commits()]
    return [(row["global_step"], json.loads(row["tags"])) for row in rows if row["tags"]]


# -- calling ---------------------------------------------------------------------------------------


def test_returns_what_the_evaluation_returned():
    """A due check returns the function's result, another one None, and the state is plain JSON."""
    evaluator = Evaluator(EvaluatorConfig(freq_steps=2), SPEC)
    results = [evaluator.evaluate(lambda: {"accuracy": 0.5}, 0, step, step) for step in range(4)]
    assert [None, {"accuracy": 0.5}, None, {"accuracy": 0.5}] == results
    state = evaluator.state_dict()
    assert state == json.loads(json.dumps(state))


@pytest.mark.parametrize(
    "config",
    [
        {"freq_steps": 3},
        SimpleNamespace(freq_steps=3),
        EvaluatorConfig(experiment_name="e", trial_name="t", fileroot="/somewhere", freq_steps=3),
    ],
    ids=["mapping", "object", "AReaL's fields"],
)
def test_takes_any_configuration_with_the_names(config):
    """A mapping, an object with some of the names, AReaL's own fields: all are configurations."""
    evaluator = Evaluator(config, SPEC)
    assert [3, 6] == [s + 1 for s in range(7) if evaluator.evaluate(lambda: True, 0, s, s)]


def test_before_train_measures_the_untouched_model():
    """Before training, then at each epoch's end: the first one shifts none of the others (report h2)."""
    spec = SimpleNamespace(steps_per_epoch=2)
    evaluator = Evaluator(EvaluatorConfig(freq_epochs=1, eval_before_train=True), spec)
    evaluated = []
    assert "model" == evaluator.before_train(lambda: evaluated.append("before") or "model")
    for step in range(6):
        evaluator.evaluate(lambda step=step: evaluated.append(step + 1), step // 2, step % 2, step)
    assert ["before", 2, 4, 6] == evaluated


def test_before_train_does_nothing_unless_configured():
    """Without `eval_before_train` (or a start epoch of 0) nothing is measured before training."""
    assert None is Evaluator(EvaluatorConfig(freq_steps=1), SPEC).before_train(lambda: 1)
    assert 1 == Evaluator(EvaluatorConfig(freq_epochs=1, start_epoch=0), SPEC).before_train(lambda: 1)


def test_areals_loop_has_its_first_check_go_off():
    """A loop that never calls `before_train` evaluates at its first check instead, once, as in AReaL."""
    config = EvaluatorConfig(freq_steps=4, eval_before_train=True)
    evaluator = Evaluator(config, SPEC)
    evaluated = [s + 1 for s in range(9) if evaluator.evaluate(lambda: True, 0, s, s)]
    assert [1, 4, 8] == evaluated
    resumed = Evaluator(config, SPEC)
    resumed.load_state_dict(evaluator.state_dict())
    assert [12] == [s + 1 for s in range(9, 13) if resumed.evaluate(lambda: True, 0, s, s)]


def test_missing_evaluation_is_skipped_and_said_once(caplog):
    """Without anything to evaluate with, training goes on; one line says so, and nothing is caught up on."""
    evaluator = Evaluator(EvaluatorConfig(freq_steps=1, eval_before_train=True), SPEC)
    with caplog.at_level(logging.INFO):
        assert None is evaluator.before_train(None)
        assert [None, None] == [evaluator.evaluate(None, 0, step, step) for step in range(2)]
    assert 1 == len(caplog.records)
    assert "evaluation is skipped" in caplog.text
    assert 1 == evaluator.evaluate(lambda: 1, 0, 2, 2)


def test_a_failed_evaluation_is_due_again_at_the_next_check():
    """An evaluation that raises does so to the caller, and is made up for: nothing after it moves."""
    evaluator = Evaluator(EvaluatorConfig(freq_steps=2), SPEC)

    def fail():
        raise OSError("no dataset")

    evaluator.evaluate(fail, 0, 0, 0)
    for step in (1, 2):
        with pytest.raises(OSError, match="no dataset"):
            evaluator.evaluate(fail, 0, step, step)
    assert [4, 6] == [step + 1 for step in range(3, 7) if evaluator.evaluate(lambda: True, 0, step, step)]


def test_a_failed_first_evaluation_is_made_up_for_at_the_first_check():
    """Where measuring the untouched model failed and training goes on, the first check stands in for it."""
    evaluator = Evaluator(EvaluatorConfig(freq_steps=4, eval_before_train=True), SPEC)
    with pytest.raises(ZeroDivisionError):
        evaluator.before_train(lambda: 1 // 0)
    assert [1, 4] == [step + 1 for step in range(5) if evaluator.evaluate(lambda: True, 0, step, step)]


def test_may_be_subclassed():
    """A subclass can decide for itself, through the control that AReaL's evaluator has, too."""

    class Twice(Evaluator):
        def evaluate(self, evaluate_fn, epoch, step, global_step):  # noqa: ARG002
            if not self.freq_ctl.check(epochs=int(step == self.ft_spec.steps_per_epoch - 1), steps=1):
                return None
            return evaluate_fn(), evaluate_fn()

    evaluator = Twice(EvaluatorConfig(freq_steps=2), SPEC)
    assert [None, (7, 7), None] == [evaluator.evaluate(lambda: 7, 0, step, step) for step in range(3)]


def test_an_async_evaluation_is_refused():
    """Of a coroutine nothing has run: it is an error, and still due at the next check."""

    async def evaluate():
        return {"accuracy": 1.0}

    evaluator = Evaluator(EvaluatorConfig(freq_steps=1), SPEC)
    with pytest.raises(errors.EvaluationError, match="got the coroutine of an async function, which nobody"):
        evaluator.evaluate(evaluate, 0, 0, 0)
    assert None is evaluator.state_dict()["evaluated"]
    assert {"accuracy": 1.0} == evaluator.evaluate(lambda: asyncio.run(evaluate()), 0, 1, 1)


# -- what the log remembers ------------------------------------------------------------------------


def test_commits_are_tagged_with_what_was_measured(tmp_path):
    """The commit after an evaluation says how many updates the measured model had, or "before"."""
    life = Life(tmp_path, freq_steps=2, eval_before_train=True)
    life.before()
    life.steps(0, 1, 2).die()
    assert [(0, {"evaluation/before": "before"}), (1, {"evaluation/2": 2})] == commit_tags(tmp_path)


def test_resume_does_not_repeat_a_committed_evaluation(tmp_path):
    """A checkpoint taken just before the evaluation of its step does not bring it about again (report h3)."""
    life = Life(tmp_path, freq_steps=10)
    life.steps(*range(19))
    checkpoint = life.evaluator.state_dict()  # AReaL saves it before the step's evaluation and commit
    life.steps(19, 20, 21).die()
    resumed = Life(tmp_path, checkpoint, freq_steps=10)
    resumed.steps(*range(20, 31))
    assert [30] == resumed.evaluated


def test_resume_makes_up_for_a_torn_evaluation(tmp_path):
    """Evaluated but not committed when the process died: it is done again before training (report h3)."""
    life = Life(tmp_path, freq_steps=10)
    life.steps(*range(19))
    life.check(19)
    assert [10, 20] == life.evaluated
    resumed = Life(tmp_path, life.die(), freq_steps=10)
    resumed.before()
    resumed.steps(*range(20, 31))
    assert ["before", 30] == resumed.evaluated
    assert (20, {"evaluation/20": 20, "evaluation/resumed": 20}) in commit_tags(tmp_path)


def test_resume_makes_up_at_the_first_check_in_areals_loop(tmp_path):
    """Where nobody calls `before_train`, the lost evaluation is made at the first check, once."""
    life = Life(tmp_path, freq_steps=10)
    life.steps(*range(19))
    life.check(19)
    resumed = Life(tmp_path, life.die(), freq_steps=10)
    resumed.steps(*range(20, 31))
    assert [21, 30] == resumed.evaluated


def test_resume_runs_each_evaluation_that_is_missing(tmp_path):
    """Of two evaluations due at the crash the incomplete one is run, then 40 and 42 (report h4)."""
    eventlog.start(tmp_path, role="trainer")
    eventlog.current().claim_attempt()
    frequencies = {"math": 5, "code": 7}

    def evaluators():
        return {n: Evaluator(EvaluatorConfig(freq_steps=f), SPEC, name=n) for n, f in frequencies.items()}

    first = evaluators()
    for step in range(34):
        for evaluator in first.values():
            evaluator.evaluate(lambda: True, 0, step, step)
        eventlog.current().commit(0, step, step, [{}])
    states = {name: evaluator.state_dict() for name, evaluator in first.items()}
    assert first["math"].evaluate(lambda: True, 0, 34, 34)
    eventlog.current().commit(0, 34, 34, [{"math": 1.0}])
    assert first["code"].evaluate(lambda: True, 0, 34, 34)
    eventlog.stop()  # before the commit of the second one

    eventlog.start(tmp_path, role="trainer")
    eventlog.current().claim_attempt()
    second, evaluated = evaluators(), []
    for name, evaluator in second.items():
        evaluator.load_state_dict(states[name])
        evaluator.before_train(lambda name=name: evaluated.append((name, 35)), global_step=34)
    for step in range(35, 42):
        for name, evaluator in second.items():
            evaluator.evaluate(lambda label=(name, step + 1): evaluated.append(label), 0, step, step)
        eventlog.current().commit(0, step, step, [{}])
    assert [("code", 35), ("math", 40), ("code", 42)] == evaluated


def standing_tags(path):
    """Return (global step, tag) of every evaluation whose commit no later attempt has superseded."""
    query = "select global_step, tags from commits where key = 'loss' and not superseded and tags is not null"
    with open_run(path) as run:
        rows = [(row["global_step"], json.loads(row["tags"])) for row in run.sql(query).to_pylist()]
    found = [
        (step, value) for step, tags in rows for key, value in tags.items() if not key.endswith("resumed")
    ]
    return sorted(found, key=str)


@pytest.mark.parametrize("resumed_at", [0, 2], ids=["starting over", "resuming"])
def test_before_has_one_row_in_three_attempts(tmp_path, resumed_at):
    """Whether they resume or start over: one commit that stands holds the untouched model (report h7)."""
    config = {"freq_steps": 10, "eval_before_train": True}
    first = Life(tmp_path, **config)
    first.before()
    state, lives = first.steps(0, 1).die(), [first]
    for _ in range(2):
        lives.append(Life(tmp_path, state if resumed_at else None, **config))
        lives[-1].before()
        with pytest.warns(UserWarning, match="begins at step 0") if not resumed_at else nullcontext():
            lives[-1].steps(*range(resumed_at, resumed_at + 3))
        eventlog.stop()
    again = [] if resumed_at else ["before"]
    assert [["before"], again, again] == [life.evaluated for life in lives]
    assert [(0, "before")] == standing_tags(tmp_path)


def test_before_is_remembered_where_the_attempt_says_that_it_resumes(tmp_path):
    """Without a state, `global_step` or the attempt's `resume_step` tell that it is no new beginning."""
    first = Life(tmp_path, eval_before_train=True)
    first.before()
    first.steps(0, 1).die()
    second = Life(tmp_path, eval_before_train=True)
    second.before(global_step=1)
    second.die()
    third = Life(tmp_path, eval_before_train=True)
    eventlog.stop()
    eventlog.start(tmp_path, role="trainer", resume_step=2)
    eventlog.current().claim_attempt()
    third.before()
    assert [[], []] == [second.evaluated, third.evaluated]


def test_before_is_done_again_by_a_state_of_the_untouched_model(tmp_path):
    """A checkpoint of before the first update says that it was done; its commit is made anew all the same."""
    config = {"freq_steps": 10, "eval_before_train": True}
    first = Life(tmp_path, **config)
    first.before()
    state = first.evaluator.state_dict()
    first.steps(0, 1).die()
    second = Life(tmp_path, state, **config)
    second.before()
    with pytest.warns(UserWarning, match="begins at step 0"):
        second.steps(0, 1).die()
    assert ["before"] == second.evaluated
    assert [(0, "before")] == standing_tags(tmp_path)


def test_before_is_done_again_if_it_was_not_committed(tmp_path):
    """A run that died before its first commit has not measured the untouched model yet."""
    first = Life(tmp_path, eval_before_train=True)
    first.before()
    first.die()
    second = Life(tmp_path, eval_before_train=True)
    second.before()
    assert ["before"] == second.evaluated


def test_resume_without_saved_state_asks_the_log(tmp_path):
    """A training that saves no evaluator state still repeats and skips nothing."""
    Life(tmp_path, freq_steps=10, eval_before_train=True).steps(*range(25)).die()
    resumed = Life(tmp_path, freq_steps=10, eval_before_train=True)
    resumed.steps(*range(22, 31))
    assert [30] == resumed.evaluated


def test_resume_remembers_epochs(tmp_path):
    """An epoch that was evaluated and committed at its end is not evaluated again."""
    spec = SimpleNamespace(steps_per_epoch=4)
    life = Life(tmp_path, spec=spec, freq_epochs=1)
    life.steps(*range(7))
    checkpoint = life.evaluator.state_dict()
    life.steps(7, 8).die()
    resumed = Life(tmp_path, checkpoint, spec=spec, freq_epochs=1)
    resumed.steps(*range(8, 12))
    assert [12] == resumed.evaluated


def test_superseded_evaluations_do_not_count(tmp_path):
    """What an attempt measured after steps that the next one redid is due again."""
    Life(tmp_path, freq_steps=10).steps(*range(25)).die()
    second = Life(tmp_path, freq_steps=10)
    second.steps(*range(12, 19))
    checkpoint = second.evaluator.state_dict()
    second.check(19)
    second.die()
    third = Life(tmp_path, checkpoint, freq_steps=10)
    third.before(global_step=19)
    assert ["before"] == third.evaluated


def test_what_was_made_up_for_and_superseded_is_made_up_for_again(tmp_path):
    """It lies in the commit of the step after the checkpoint, which each attempt makes anew (report h3)."""
    life = Life(tmp_path, freq_steps=10)
    life.steps(*range(19))
    life.check(19)
    state = life.die()  # saved before the commit, which is lost
    lives = []
    for _ in range(2):
        lives.append(Life(tmp_path, state, freq_steps=10))
        lives[-1].before()
        lives[-1].steps(20, 21, 22).die()
    assert [["before"], ["before"]] == [each.evaluated for each in lives]
    assert [(20, 20), (9, 10)] == standing_tags(tmp_path)


@pytest.mark.parametrize("step", [58, 59, 62])
@pytest.mark.parametrize("early", [False, True], ids=["at the first check", "before training"])
def test_a_state_newer_than_the_step_skips_nothing(step, early):
    """A run that goes back further than its saved state evaluates from there on as before (report h3)."""
    spec = SimpleNamespace(steps_per_epoch=20)
    for config in ({"freq_steps": 20}, {"freq_epochs": 1}):
        evaluator = Evaluator(EvaluatorConfig(**config), spec)
        for each in range(100):
            evaluator.evaluate(lambda: True, *divmod(each, 20), each)
        resumed = Evaluator(EvaluatorConfig(**config), spec)
        resumed.load_state_dict(evaluator.state_dict())
        if early:
            assert None is resumed.before_train(lambda: True, global_step=step - 1)
        evaluated = [
            each + 1 for each in range(step, 100) if resumed.evaluate(lambda: True, *divmod(each, 20), each)
        ]
        assert [due for due in (60, 80, 100) if due > step] == evaluated


def test_a_log_that_does_not_know_the_past_is_not_believed(tmp_path):
    """A resumed run that begins a new log trusts its saved state: nothing counts as lost."""
    evaluator = Evaluator(EvaluatorConfig(freq_steps=10), SPEC)
    for step in range(20):
        evaluator.evaluate(lambda: True, 0, step, step)
    resumed = Life(tmp_path, evaluator.state_dict(), freq_steps=10)
    resumed.before()
    resumed.steps(*range(20, 30))
    assert [30] == resumed.evaluated


def test_an_evaluator_beside_the_committing_process_trusts_its_state(tmp_path):
    """Where another process commits the steps, the evaluator's tags are nowhere, and that is no loss."""
    life = Life(tmp_path, freq_steps=10)
    for step in range(20):
        life.commit(step)
    elsewhere = Evaluator(EvaluatorConfig(freq_steps=10), SPEC)
    for step in range(20):
        elsewhere.evaluate(lambda: True, 0, step, step)
    life.die()
    resumed = Life(tmp_path, elsewhere.state_dict(), freq_steps=10)
    resumed.steps(*range(20, 25))
    assert [] == resumed.evaluated


def test_before_and_a_first_evaluation_in_one_commit_stay_apart(tmp_path):
    """Each of the evaluations of one commit has its own tag, its own names, and is done once (report h7)."""
    skill = [0.0]

    def evaluate(life, label):
        life.evaluated.append(label)
        results = evaluate_distributed(lambda _: {"accuracy": skill[0]}, [{"id": "a"}, {"id": "b"}])
        log_evaluation_results(compute_aggregated_metrics(results))

    lives = []
    for first in (0, 2, 4):
        life = Life(tmp_path, freq_steps=1, eval_before_train=True)
        life.evaluator.before_train(lambda life=life: evaluate(life, "before"), global_step=first - 1)
        for step in (first, first + 1):
            skill[0] = step + 1.0
            life.evaluator.evaluate(lambda life=life, step=step: evaluate(life, step + 1), 0, step, step)
            eventlog.current().commit(0, step, step, [stats_tracker.export_all()])
        life.die()
        lives.append(life)
    assert [["before", 1, 2], [3, 4], [5, 6]] == [life.evaluated for life in lives]
    assert (0, {"evaluation/1": 1, "evaluation/before": "before"}) == commit_tags(tmp_path)[0]
    with open_run(tmp_path) as run:
        found = {row["key"]: row["value"] for row in run.metrics(until=0).to_pylist()}
        assert (0.0, 2.0) == (found["eval-rollout/before/accuracy"], found["eval-rollout/before/n_samples"])
        assert (1.0, 2.0) == (found["eval-rollout/accuracy"], found["eval-rollout/n_samples"])


def test_evaluators_with_names_keep_their_results_apart(tmp_path):
    """Two evaluators that are due at the same step record under their names, unpooled (report h4)."""
    eventlog.start(tmp_path, role="trainer")
    sizes = {"math": 2, "code": 3}

    def evaluate(name):
        samples = [{"id": i} for i in range(sizes[name])]
        log_evaluation_results(compute_aggregated_metrics(evaluate_distributed(lambda _: 1.0, samples)))

    for name in sizes:
        Evaluator(EvaluatorConfig(freq_steps=1), SPEC, name=name).evaluate(
            lambda n=name: evaluate(n), 0, 0, 0
        )
    stats = stats_tracker.export_all()
    assert (2.0, 3.0) == (stats["eval-rollout/math/n_samples"], stats["eval-rollout/code/n_samples"])
    assert (2, 3) == (stats["eval-rollout/math/score__count"], stats["eval-rollout/code/score__count"])


def test_a_failed_evaluation_is_made_up_for_after_a_restart(tmp_path):
    """The state says that it is still due: the resumed run makes it before training goes on (report h4)."""
    life = Life(tmp_path, freq_steps=10)
    life.steps(*range(9))
    with pytest.raises(ZeroDivisionError):
        life.evaluator.evaluate(lambda: 1 // 0, 0, 9, 9)
    life.commit(9)
    resumed = Life(tmp_path, life.die(), freq_steps=10)
    resumed.before(global_step=9)
    resumed.steps(*range(10, 21))
    assert ["before", 20] == resumed.evaluated


def test_a_late_evaluation_leaves_the_past_as_it_is(tmp_path):
    """An addition below the resume point supersedes nothing: nothing complete is repeated (report h3)."""
    life = Life(tmp_path, freq_steps=10)
    life.steps(*range(19))
    life.check(19)
    state = life.evaluator.state_dict()
    life.commit(19)
    life.steps(20, 21).die()
    second = Life(tmp_path, state, freq_steps=10)
    second.before(global_step=19)
    stats_tracker.get("eval-rollout").scalar(late=1.0)
    eventlog.current().commit(0, 14, 14, [stats_tracker.export_all(step=14)])
    second.steps(20, 21).die()
    third = Life(tmp_path, state, freq_steps=10)
    third.before(global_step=19)
    assert [[], []] == [second.evaluated, third.evaluated]


def test_logs_of_before_and_strangers_tags_are_read(tmp_path):
    """The one tag that commits had is understood; what somebody else said under it is passed over."""
    log = eventlog.start(tmp_path, role="trainer")
    log.claim_attempt()
    for step, said in ((9, 10), (10, "gsm8k"), (11, None), (12, True)):
        log.note({"evaluation": said})
        log.commit(0, step, step)
    eventlog.stop()
    resumed = Life(tmp_path, freq_steps=10, eval_before_train=True)
    resumed.steps(*range(13, 21))
    assert [20] == resumed.evaluated


def test_reserved_tags_are_refused(tmp_path):
    """A user's tag under a name that evaluators or monitors use is refused where it is given."""
    log = eventlog.start(tmp_path, role="trainer")
    for name in ("evaluation", "evaluation/5", "alert/mine"):
        with pytest.raises(eventlog.errors.RecordingError, match=f"expected no tags under .*, got '{name}'"):
            log.tag({"mine": 1, name: "gsm8k"})
        with pytest.raises(eventlog.errors.RecordingError, match=f"got '{name}'"):
            log.commit(0, 0, 0, tags={name: "gsm8k"})
    log.tag({"evaluations": 3})
    log.commit(0, 0, 0)
    eventlog.stop()
    assert [(0, {"evaluations": 3})] == commit_tags(tmp_path)


# -- ranks -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as world:
        yield world


class SkewedClock:
    """A rank's clock: seven seconds off per rank, and it runs a little differently."""

    def __init__(self, rank):
        self.now, self.pace = 7.0 * rank, 1.0 + 0.05 * rank

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds * self.pace


def decide_by_seconds(rank, checks):
    """Return at which checks this rank evaluated, and how many collectives it took."""
    clock, count = SkewedClock(rank), collective.count()
    evaluator = Evaluator(EvaluatorConfig(freq_secs=10), SPEC, clock=clock)
    evaluated = []
    for step in range(checks):
        clock.pass_(1.0 + step % 3)
        evaluator.evaluate(lambda step=step: (clock.pass_(4.0), evaluated.append(step)), 0, step, step)
    return evaluated, collective.count() - count


def listen(rank, who, checks):
    """Return at which checks this rank evaluated, where only some have anything to evaluate with."""
    clock = SkewedClock(rank)
    evaluator = Evaluator(EvaluatorConfig(freq_secs=10), SPEC, clock=clock)
    evaluated = []
    for step in range(checks):
        clock.pass_(3.0)
        evaluate = (lambda step=step: evaluated.append(step)) if rank in who else None
        evaluator.evaluate(evaluate, 0, step, step)
    return evaluated, evaluator.state_dict()["evaluated"]


@pytest.mark.parametrize("who", [[0], [1]])
def test_the_seconds_begin_again_on_all_ranks_when_one_evaluates(ranks, who):
    """A rank without anything to evaluate with, the deciding one too, counts from the others' evaluation."""
    assert [([3, 7, 11] if rank in who else [], 12) for rank in range(2)] == ranks.run(listen, who, 12)


def test_skewed_clocks_take_identical_decisions(ranks):
    """Two ranks, clocks seven seconds apart: the same 100 decisions, one collective each (report h9).

    Each evaluation takes one more, for the ranks to hear how it went.
    """
    (first, collectives), (second, _) = ranks.run(decide_by_seconds, 100)
    assert first == second
    assert 100 + len(first) == collectives
    gaps = [sum(1.0 + step % 3 for step in range(a + 1, b + 1)) for a, b in pairwise(first)]
    assert all(10 <= gap < 13 for gap in gaps)


def decide_by_steps(_, checks):
    count = collective.count()
    evaluator = Evaluator(EvaluatorConfig(freq_steps=3, freq_epochs=1), SPEC)
    evaluated = [step for step in range(checks) if evaluator.evaluate(lambda: True, 0, step, step)]
    return evaluated, collective.count() - count


def test_steps_and_epochs_are_decided_without_a_collective(ranks):
    """Without seconds every rank decides alike by itself; only how an evaluation went is told."""
    assert [([2, 5, 8], 3)] * 2 == ranks.run(decide_by_steps, 10)


def resume_alone(rank, path, states):
    """Resume on ranks of which only the first has a log."""
    if rank == 0:
        eventlog.start(path, role="trainer", rank=0, world_size=1)
        eventlog.current().claim_attempt()
    evaluator = Evaluator(EvaluatorConfig(freq_steps=10), SPEC)
    evaluator.load_state_dict(states[rank])
    evaluated = ["before"] if evaluator.before_train(lambda: True) else []
    evaluated += [step + 1 for step in range(20, 31) if evaluator.evaluate(lambda: True, 0, step, step)]
    eventlog.stop()
    return evaluated


def test_rank_0_remembers_for_all(ranks, tmp_path):
    """What only rank 0's log can tell is decided for all ranks, whatever their own states say."""
    life = Life(tmp_path, freq_steps=10)
    life.steps(*range(19))
    life.check(19)
    state = life.die()
    other = {**state, "updates": 19, "evaluated": None}
    assert [["before", 30]] * 2 == ranks.run(resume_alone, tmp_path, [state, other])


def test_evaluation_metrics_and_tag_reach_the_same_commit(tmp_path):
    """An evaluation that records into its tracker ends up in the commit that its tag names."""
    life = Life(tmp_path, freq_steps=2)
    evaluation = stats_tracker.get("eval-rollout")
    for step in range(3):
        life.evaluator.evaluate(lambda: evaluation.scalar(reward=0.5), 0, step, step)
        eventlog.current().commit(0, step, step, [stats_tracker.export_all()])
    life.die()
    rows = [row for _, _, batch in RunReader(tmp_path).commits() for row in batch.to_pylist()]
    rewards = [(row["global_step"], row["tags"]) for row in rows if row["key"] == "eval-rollout/reward"]
    assert [(1, '{"evaluation/2": 2}')] == rewards
    assert [0] == [attempt.number for attempt in RunDir.open(tmp_path).attempts()]


def fail_alone(rank):
    """Return what each rank did where the evaluation of step 2 fails on rank 1, and rank 1 has a gap."""
    evaluator = Evaluator(EvaluatorConfig(freq_steps=2), SPEC)
    found = []
    for step in range(6):

        def evaluate(step=step):
            if (rank, step) == (1, 1):
                raise OSError("no disk")
            return step + 1

        try:
            found.append(evaluator.evaluate(None if (rank, step) == (1, 5) else evaluate, 0, step, step))
        except (OSError, eventlog.errors.PeerError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_an_evaluation_that_failed_on_one_rank_failed_on_all(ranks):
    """All evaluate again together; a rank without a function keeps nobody waiting (report h9)."""
    told = "PeerError: expected no failure in the evaluation, got rank 1: OSError: no disk"
    first, second = ranks.run(fail_alone)
    assert [None, told, 3, 4, None, 6] == first
    assert [None, "OSError: no disk", 3, 4, None, None] == second
