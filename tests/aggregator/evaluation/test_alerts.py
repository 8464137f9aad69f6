"""Alerts: what each rule sees, when it speaks, and where it is heard."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import pytest
import torch

import eventlog
from aggregator import open_run, stats_tracker
from aggregator.evaluation import (
    Alert,
    EntropyCollapse,
    GradientNorm,
    Monitor,
    NotFinite,
    Overfitting,
    Past,
    Row,
    Straggler,
    alerts_of,
    scan,
)
from eventlog import errors


def series(key, *values):
    """Return a row per value, from step 0 on; None leaves the key out."""
    return [Row(step, {} if value is None else {key: value}) for step, value in enumerate(values)]


def found(rule, rows):
    """Return (step, rule) of what one rule finds."""
    return [(alert.step, alert.rule) for alert in scan(rows, [rule])]


# -- the rules -------------------------------------------------------------------------------------


def test_nan_and_infinities_are_seen_under_any_name():
    """Every metric is looked at; counts are not, which cannot be NaN."""
    rows = [Row(3, {"loss": math.nan, "a/b/max": math.inf, "fine": 1.0, "loss__count": math.nan})]
    told = scan(rows, [NotFinite()])
    assert [("loss", "error"), ("a/b/max", "error")] == [(alert.key, alert.level) for alert in told]
    assert ("not_finite: loss at step 3", "loss is nan at step 3") == (told[0].title, told[0].text)


def test_gradient_norms_vanish_or_explode():
    """Below the least, or above ten times the usual; a few rows are not yet usual, NaN is not looked at."""
    key = "ppo_actor/update/grad_norm"
    assert [(2, "vanishing_gradient")] == found(GradientNorm(), series(key, 1.0, 0.5, 1e-7))
    assert [(6, "exploding_gradient")] == found(GradientNorm(), series(key, *[1.0] * 6, 10.5))
    assert [] == found(GradientNorm(), series(key, *[1.0] * 4, 10.5))
    assert [] == found(GradientNorm(), series(key, *[1.0, math.nan] * 6, 9.9))
    assert [] == found(GradientNorm(), series("reward", *[1.0] * 6, 0.0))


def test_entropy_collapses():
    """A tenth of the highest it had is a collapse, a slow start is none."""
    key = "ppo_actor/entropy/avg"
    assert [(3, "entropy_collapse")] == found(EntropyCollapse(), series(key, 0.5, 2.0, 0.3, 0.19))
    assert [] == found(EntropyCollapse(), series(key, 0.01, 0.5, 1.0, 0.9))


def test_overfitting_is_training_up_and_evaluation_down():
    """Three evaluations in a row that fell while training rose; steps without evaluation do not count."""

    def rows(*pairs):
        return [
            Row(step, {"rollout/reward": up} | ({} if down is None else {"eval-rollout/reward": down}))
            for step, (up, down) in enumerate(pairs)
        ]

    falls = [(0.1, 0.9), (0.9, None), (0.2, 0.8), (0.3, 0.7), (0.1, None), (0.4, 0.6)]
    assert [(5, "overfitting")] == found(Overfitting(), rows(*falls))
    assert [] == found(Overfitting(), rows(*falls[:-1]))
    assert [] == found(Overfitting(), rows(*falls[:-1], (0.4, 0.75)))


def test_a_straggler_is_one_rank_for_several_steps():
    """The same rank, three rows in a row, against the median of the others; turns are no straggler."""

    def rows(*slow):
        return [
            Row(step, {}, {"timeperf/train_step": {rank: 2.0 if rank == each else 1.0 for rank in range(4)}})
            for step, each in enumerate(slow)
        ]

    told = scan(rows(2, 2, 2, 2), [Straggler()])
    assert [(2, 2)] == [(alert.step, alert.rank) for alert in told]
    assert "straggler: timeperf/train_step on rank 2 at step 2" == told[0].title
    assert [] == scan(rows(0, 1, 2, 3, 0, 0, None, 0, 0), [Straggler()])
    alone = [Row(step, {}, {"timeperf/x": {0: 1.0}}) for step in range(5)]
    assert [] == scan(alone, [Straggler()])


# -- when it speaks --------------------------------------------------------------------------------


def test_an_alert_is_raised_when_its_condition_begins():
    """Once while it holds, again after it did not; rows without the key change nothing."""
    rows = series("loss", 1.0, math.nan, math.nan, None, math.nan, 1.0, math.nan)
    assert [(1, "not_finite"), (6, "not_finite")] == found(NotFinite(), rows)


def test_the_callback_hears_what_is_new():
    """`check` returns and tells each alert once, rules of one's own included."""

    class TooLong:
        def check(self, past, now):
            if now.metrics["length"] > 2 * past[-1].metrics["length"] if past else False:
                yield Alert("too_long", "length", now.step, now.metrics["length"], "grew")

    heard = []
    monitor = Monitor([TooLong()], callback=heard.append)
    assert [[], [], heard] == [monitor.check(i, {"length": value}) for i, value in enumerate((1.0, 2.0, 9.0))]
    assert heard == monitor.alerts


def test_timings_of_ranks_are_given_by_rank():
    """Live, the numbers of each rank are handed over as they were gathered."""
    monitor = Monitor([Straggler(patience=1)])
    ranks = {0: {"timeperf/save": 1.0}, 1: {"timeperf/save": 4.0}}
    assert [1] == [alert.rank for alert in monitor.check(0, {}, ranks)]


def test_a_rule_looks_back_over_a_long_run():
    """The highest entropy, and evaluations, count however many rows ago they were."""
    falling = series("entropy", *(5.0 * 10 ** (-step / 1500) for step in range(3000)))
    assert [(1501, "entropy_collapse")] == found(EntropyCollapse(), falling)
    rows = [
        Row(step, {"rollout/reward": float(step)} | ({} if step % 600 else {"eval-rollout/reward": -step}))
        for step in range(2000)
    ]
    assert [(1800, "overfitting")] == found(Overfitting(), rows)
    slow = [Row(step, {}, {} if step % 600 else {"timeperf/save": {0: 1.0, 1: 3.0}}) for step in range(1300)]
    assert [(1200, "straggler")] == found(Straggler(), slow)


def test_rules_take_plain_rows():
    """A rule asked by itself takes the rows before as a list."""
    rows = series("grad_norm", *[1.0] * 6, 10.5)
    assert ["exploding_gradient"] == [alert.rule for alert in GradientNorm().check(rows[:-1], rows[-1])]
    rows = series("entropy", 1.0, 0.01)
    assert ["entropy_collapse"] == [alert.rule for alert in EntropyCollapse().check(rows[:-1], rows[-1])]


def test_a_past_is_a_sequence_of_rows():
    """Rules of one's own may index it, cut it and go through it, and ask it for what a metric was."""
    rows = [*series("x", 1.0, None, math.nan, 3.0, math.inf), Row(5, {"y": -1.0}, {"y": {0: 1.0}})]
    past = Past(rows)
    assert (6, rows, rows[-1], rows[:2]) == (len(past), [*past], past[-1], past[:2])
    assert (3.0, -1.0, None) == (past.highest("x"), past.highest("y"), past.highest("z"))
    assert ([3.0], [1.0, 3.0], []) == (past.finite("x", 1), past.finite("x", 9), past.finite("z", 9))
    assert ([rows[3], rows[4]], [], [rows[5]]) == (
        past.last("x", 2),
        past.last_of_ranks("x", 2),
        past.last_of_ranks("y", 2),
    )


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda: NotFinite(keys="loss"), "expected keys as a list of globs, got 'loss': NotFinite"),
        (lambda: Straggler(keys=(1,)), r"expected keys as a list of globs, got \(1,\): Straggler"),
        (lambda: Overfitting(evaluations=0), "expected evaluations as a whole number of 1 or more, got 0"),
        (lambda: Straggler(patience=0), "expected patience as a whole number of 1 or more, got 0: Straggler"),
        (lambda: GradientNorm(window=1.5), "expected window as a whole number of 1 or more, got 1.5"),
        (lambda: GradientNorm(factor=math.nan), "expected factor as a number of 0.0 or more, got nan"),
        (lambda: Monitor(NotFinite()), "expected rules as a list, got one rule: NotFinite"),
        (lambda: Monitor([NotFinite]), "expected rules, such as NotFinite.., got <class"),
        (lambda: Monitor(["loss"]), "expected rules, such as NotFinite.., got 'loss'"),
        (lambda: Monitor(callback=asyncio.sleep), "expected a plain function as callback, got an async one"),
    ],
)
def test_what_is_no_rule_is_refused(wrong, expected):
    """Keys as one text, numbers that mean nothing, a rule's class, an async callback: said at once."""
    with pytest.raises(errors.ConfigError, match=expected):
        wrong()


def test_metrics_of_torch_and_numpy_are_numbers():
    """A tensor that is NaN is seen and told as a float; what is no number is refused."""
    told = Monitor([NotFinite()]).check(3, {"loss": torch.tensor(math.nan), "n": np.int64(1)})
    assert [("loss", float)] == [(alert.key, type(alert.value)) for alert in told]
    slow = Monitor([Straggler(patience=1)]).check(
        0, {}, {0: {"timeperf/x": np.float32(1)}, 1: {"timeperf/x": 4}}
    )
    assert [1] == [alert.rank for alert in slow]
    with pytest.raises(errors.RecordingError, match="expected a number for 'loss', got str 'x'"):
        Monitor().check(0, {"loss": "x"})


# -- in a run --------------------------------------------------------------------------------------


def train(path, *, monitor):
    """Record a short run whose loss becomes NaN and whose rank 1 is slow."""
    for rank in (1, 0):
        eventlog.start(path, role="actor", rank=rank, world_size=2)
        if rank == 0:
            eventlog.current().claim_attempt()
        for step in range(4):
            tracker = stats_tracker.DEFAULT_TRACKER
            tracker.recorder.timing("train_step", 3.0 if rank else 1.0)
            tracker.scalar(loss=math.nan if step == 2 and rank == 0 else 1.0)
            stats = stats_tracker.export_all(step=step)
            if rank == 0 and monitor is not None:
                monitor.check(step, stats)
            eventlog.current().commit(0, step, step, [dict(stats)] if rank == 0 else ())
        eventlog.stop()


def test_alerts_are_in_the_log(tmp_path):
    """What a monitor found is in the step's commit, and is told with what only the record shows."""
    train(tmp_path / "run", monitor=Monitor([NotFinite()]))
    with open_run(tmp_path / "run") as run:
        told = alerts_of(run)
        noted = run.sql(
            "select global_step from commits where tags like '%alert/not_finite/loss/2%' and key is null"
        )
    assert [2] == noted["global_step"].to_pylist()
    assert [("loss", 2, None), ("timeperf/train_step (actor)", 2, 1)] == [
        (a.key, a.step, a.rank) for a in told
    ]
    assert math.isnan(told[0].value)


def test_alerts_of_tensors_are_committed(tmp_path):
    """Whatever kind of number a metric is, its alert is on disk, and with it the step that it is of."""
    log = eventlog.start(tmp_path / "run", role="actor")
    log.claim_attempt()
    monitor = Monitor()
    for step in range(8):
        norm = torch.tensor(1.0) if step < 7 else np.float32(500.0)
        monitor.check(step, {"grad_norm": norm, "loss": torch.tensor(math.nan if step == 6 else 1.0)})
        assert log.commit(0, step, step, [{"grad_norm": norm}])
    eventlog.stop()
    with open_run(tmp_path / "run") as run:
        told = [(alert.rule, alert.step, alert.value) for alert in alerts_of(run)]
        steps = run.sql("select global_step from commits where key is null order by 1")["global_step"]
    assert (list(range(8)), 500.0) == (steps.to_pylist(), told[1][2])
    assert [("not_finite", 6), ("exploding_gradient", 7)] == [each[:2] for each in told]


def attempt(path, steps, metrics, **resumed):
    """Check and commit some steps, as one attempt of a run; return (step, rule) of what its monitor says."""
    log = eventlog.start(path, role="actor", **resumed)
    log.claim_attempt()
    monitor, told = Monitor([NotFinite(), EntropyCollapse(), GradientNorm()]), []
    for step in steps:
        found = monitor.check(step, metrics(step))
        told += [(alert.step, alert.rule) for alert in found]
        log.commit(0, step, step, [metrics(step)])
    assert told == [(alert.step, alert.rule) for alert in monitor.alerts]
    log.end("signal")
    eventlog.stop()
    return told


@pytest.mark.parametrize("resumed", [False, True], ids=["as its steps say", "as the attempt says"])
def test_a_restarted_run_goes_on_where_it_was(tmp_path, resumed):
    """What lasts is not told again, and what the metrics were before the restart counts."""

    def metrics(step):
        bad = {"loss": math.nan if step >= 5 else 1.0, "grad_norm": 20.0 if step == 10 else 1.0}
        return {"entropy": 5.0 * 10 ** (-step / 20), **bad}

    told = [
        attempt(tmp_path, range(begin, begin + 10), metrics, **({"resume_step": begin} if resumed else {}))
        for begin in (0, 10, 20)
    ]
    expected = [[(5, "not_finite")], [(10, "exploding_gradient")], [(21, "entropy_collapse")]]
    assert expected == told
    with open_run(tmp_path) as run:
        rules = [NotFinite(), EntropyCollapse(), GradientNorm()]
        assert [each for part in expected for each in part] == [
            (a.step, a.rule) for a in alerts_of(run, rules)
        ]


def test_what_is_done_again_is_not_looked_back_at(tmp_path):
    """A run that goes back forgets what it had come to after that: it is told when it comes to it again."""
    path = tmp_path / "run"
    assert [(6, "not_finite")] == attempt(
        path, range(8), lambda step: {"loss": math.nan if step > 5 else 1.0}
    )
    assert [(5, "not_finite")] == attempt(
        path, range(4, 6), lambda step: {"loss": math.nan if step > 4 else 1.0}
    )
    assert [] == attempt(path, range(6, 8), lambda _: {"loss": math.nan}, resume_step=6)


def test_a_long_past_is_looked_back_at_in_part(tmp_path):
    """Of more than a thousand rows the last are judged again; of those before them the highest counts."""

    def metrics(step):
        return {"entropy": 9.0 if step == 3 else 1.0, "loss": math.nan if step == 8 else 1.0}

    assert [(8, "not_finite")] == attempt(tmp_path, range(1200), metrics)
    assert [(1200, "entropy_collapse")] == attempt(tmp_path, [1200], lambda _: {"entropy": 0.8})


def test_a_callback_that_fails_loses_no_alert(tmp_path):
    """Its error is passed on, and all alerts of the step are in the commit all the same."""
    eventlog.start(tmp_path / "run")

    def fail(_):
        raise ArithmeticError("no network")

    with pytest.raises(ArithmeticError, match="no network"):
        Monitor([NotFinite()], callback=fail).check(0, {"a": math.nan, "b": math.nan})
    eventlog.current().commit(0, 0, 0, [{"a": math.nan, "b": math.nan}])
    eventlog.stop()
    with open_run(tmp_path / "run") as run:
        tags = run.sql("select tags from commits where key is null")["tags"].to_pylist()
    assert {"alert/not_finite/a/0", "alert/not_finite/b/0"} == set(json.loads(tags[0]))


def test_a_straggler_that_was_noted_is_not_found_again(tmp_path):
    """Live it has the timing's key, in the record the role is added: one rank's trouble is listed once."""
    path, monitor = tmp_path / "run", Monitor([Straggler()])
    for rank in (1, 0):
        eventlog.start(path, role="actor", rank=rank, world_size=2)
        if rank == 0:
            eventlog.current().claim_attempt()
        for step in range(4):
            stats_tracker.DEFAULT_TRACKER.recorder.timing("train_step", 3.0 if rank else 1.0)
            stats = stats_tracker.export_all(step=step)
            if rank == 0:
                monitor.check(step, {}, {0: {"timeperf/train_step": 1.0}, 1: {"timeperf/train_step": 3.0}})
            eventlog.current().commit(0, step, step, [dict(stats)] if rank == 0 else ())
        eventlog.stop()
    with open_run(path) as run:
        assert [("timeperf/train_step", 2, 1)] == [(a.key, a.step, a.rank) for a in alerts_of(run)]


def test_a_run_without_a_monitor_is_looked_at_afterwards(tmp_path):
    """The rules find in the record what they would have found live; other rules find what they say."""
    train(tmp_path / "run", monitor=None)
    with open_run(tmp_path / "run") as run:
        assert ["not_finite", "straggler"] == [alert.rule for alert in alerts_of(run)]
        assert [] == alerts_of(run, [GradientNorm()])


def test_strangers_tags_are_no_alerts(tmp_path):
    """What somebody else wrote under an alert's name is passed over; the alerts that there are stay."""
    log = eventlog.start(tmp_path, role="actor")
    log.claim_attempt()
    Monitor([NotFinite()]).check(0, {"loss": math.nan})
    strange = [
        "look here",
        None,
        3,
        {},
        {"value": 1.0},
        {"rule": 1, "key": "k", "step": 0, "value": 1, "text": ""},
    ]
    log.note({f"alert/mine/{i}": each for i, each in enumerate(strange)})
    log.commit(0, 0, 0, [{"loss": 1.0}])
    eventlog.stop()
    with open_run(tmp_path) as run:
        assert ["loss"] == [alert.key for alert in alerts_of(run)]


def test_a_run_without_trouble_has_no_alerts():
    """A session of quiet metrics gives none."""
    assert [] == scan([Row(i, {"loss": 1.0, "grad_norm": 1.0, "entropy": 2.0}) for i in range(50)])
