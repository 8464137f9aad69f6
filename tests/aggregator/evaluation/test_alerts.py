"""Alerts: what each rule sees, when it speaks, and where it is heard."""

from __future__ import annotations

import json
import math

import pytest

import eventlog
from aggregator import open_run, stats_tracker
from aggregator.evaluation import alerts
from aggregator.evaluation.alerts import (
    EntropyCollapse,
    GradientNorm,
    Monitor,
    NotFinite,
    Overfitting,
    Row,
    Straggler,
    alerts_of,
    scan,
)


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
                yield alerts.Alert("too_long", "length", now.step, now.metrics["length"], "grew")

    heard = []
    monitor = Monitor([TooLong()], callback=heard.append)
    assert [[], [], heard] == [monitor.check(i, {"length": value}) for i, value in enumerate((1.0, 2.0, 9.0))]
    assert heard == monitor.alerts


def test_timings_of_ranks_are_given_by_rank():
    """Live, the numbers of each rank are handed over as they were gathered."""
    monitor = Monitor([Straggler(patience=1)])
    ranks = {0: {"timeperf/save": 1.0}, 1: {"timeperf/save": 4.0}}
    assert [1] == [alert.rank for alert in monitor.check(0, {}, ranks)]


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
