"""Evaluations that report late: what they measured stands at their step, what else is exported at its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import eventlog
from aggregator import open_run, stats_tracker
from aggregator.evaluation import (
    compute_aggregated_metrics,
    evaluate_distributed,
    log_evaluation_results,
)
from replay import MemoryBackend, StatsLogger, StatsLoggerConfig, play
from tests.gloo import Ranks

SAMPLES = [{"id": f"q{i}", "tags": {"kind": "text"}} for i in range(4)]
SPEC = SimpleNamespace(total_train_epochs=1, steps_per_epoch=4, total_train_steps=8)


def train(step):
    """Record a tensor and a scalar of a step, as a training does."""
    stats_tracker.denominator(n=torch.ones(2, dtype=torch.bool))
    stats_tracker.stat("n", adv=torch.full((2,), float(step)))
    stats_tracker.scalar(lr=0.1 * step)


def measure(value, step, **options):
    """Evaluate a model as of a step, and log what was aggregated."""
    results = evaluate_distributed(lambda _: {"acc": value}, SAMPLES, step=step)
    log_evaluation_results(compute_aggregated_metrics(results, by=["kind"]), **options)


def late_run(rank, path, sizes=None):
    """Train 8 steps, on the way with a late evaluation of step 1 and one of a step that is still to come."""
    group = torch.distributed.group.WORLD if sizes else None
    log = eventlog.start(path, role="actor")
    if rank == 0:
        log.claim_attempt()
    for step in range(8):
        train(step)
        if step in (3, 5):
            measure(step / 4, {3: 1, 5: 7}[step])
        stats = stats_tracker.export_all(reduce_group=group)
        log.commit(step // 4, step % 4, step, [stats] if rank == 0 else ())
    eventlog.stop()


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as world:
        yield world


def steps_of(table):
    """Return key → the steps that have it."""
    found = {}
    for row in table.to_pylist():
        if row["value"] is not None:
            found.setdefault(row["key"], []).append(row["step"])
    return {key: sorted(steps) for key, steps in found.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_a_late_evaluation_moves_nothing_but_itself(ranks, tmp_path, size):
    """Its metrics, samples, slices and counts are of the step it measured; the training's stay at theirs."""
    path = tmp_path / "run"
    if size == 1:
        late_run(0, path)
    else:
        ranks.run(late_run, path, size)
    with open_run(path) as run:
        committed, recomputed = (
            steps_of(run.metrics(source=source)) for source in ("committed", "recomputed")
        )
        assert committed == recomputed
        late = {key for key in committed if key.startswith("eval-rollout/")}
        assert {"acc", "acc__count", "n_samples", "kind/text/acc"} <= {
            key.removeprefix("eval-rollout/") for key in late
        }
        assert [[1, 7]] * len(late) == [committed[key] for key in late]
        assert list(range(8)) == committed["adv/avg"] == committed["lr"] == committed["n"]
        rows = run.metrics(source="recomputed").to_pylist()
        assert not any(row["differs"] or row["incomplete"] for row in rows)
        assert [float(step) for step in range(8)] == [
            row["avg"] for row in run.reduce("adv", "avg").to_pylist()
        ]
        means = run.reduce("eval-rollout/acc", ["avg", "count"]).to_pylist()
        assert [(1, 0.75, 4), (7, 1.25, 4)] == [tuple(row.values()) for row in means]
        samples = run.sql("select distinct step from samples order by step")["step"].to_pylist()
        evaluations = run.sql("select distinct step from evaluations order by step")["step"].to_pylist()
        assert [1, 7] == samples == evaluations
        epochs = run.sql("select distinct step, epoch from records where key = 'adv' order by step")
        assert [step // 4 for step in range(8)] == epochs["epoch"].to_pylist()


def test_backends_are_told_late_and_early_evaluations_at_their_steps(tmp_path):
    """Live and replayed a target comes to hold the same; a step that is to come waits for its training."""
    live, strict, replayed = MemoryBackend(), MemoryBackend(strict=True), MemoryBackend()
    config = StatsLoggerConfig("e", "t", str(tmp_path), on_rewind="error")
    eventlog.start(tmp_path / "run", role="actor")
    with StatsLogger(config, SPEC, backends=[live, strict]) as logger:
        for step in range(8):
            train(step)
            if step in (3, 5):
                measure(step / 4, {3: 1, 5: 9}[step])
            logger.commit(0, step, step, stats_tracker.export_all())
        told = {status.target: status.withheld for status in logger.status()}
    eventlog.stop()
    play(tmp_path / "run", [replayed])

    def held(backend):
        found = {}
        for step, metrics, _ in backend.rows:
            found.setdefault(step, {}).update(metrics)
        return found

    assert held(live) == held(replayed)
    assert [0.75, 1.25] == [held(live)[step]["eval-rollout/acc"] for step in (1, 9)]
    assert [0, 1] == sorted(told.values())
    late = {key for key in held(live)[1] if key.startswith("eval-rollout/")}
    expected = {
        step: {k: v for k, v in row.items() if step != 1 or k not in late} for step, row in held(live).items()
    }
    assert expected == held(strict)


def test_a_step_may_be_given_for_the_metrics_alone(tmp_path):
    """`log_evaluation_results(step=…)` says when where nothing was recorded by sample; the rest stays."""
    log = eventlog.start(tmp_path, role="actor")
    log.claim_attempt()
    train(6)
    log_evaluation_results({"bleu": 12.5}, step=2)
    log.commit(0, 6, 6, [stats_tracker.export_all()])
    eventlog.stop()
    with open_run(tmp_path) as run:
        for source in ("committed", "recomputed"):
            found = steps_of(run.metrics(source=source))
            assert [2] == found["eval-rollout/bleu"] == found["eval-rollout/bleu__count"]
            assert [6] == found["adv/avg"] == found["lr"]


def test_a_step_of_the_export_or_of_all_binds_the_window_still(tmp_path):
    """`export(step=)` and `set_step` say it for what has no step of its own, beside a late evaluation too."""
    log = eventlog.start(tmp_path, role="actor")
    log.claim_attempt()
    for step, given in ((4, None), (5, 5)):
        try:
            if given is None:
                stats_tracker.set_step(step)
            train(step)
            measure(0.5, step - 3)
            stats_tracker.export_all(step=given)
        finally:
            stats_tracker.set_step(None)
    eventlog.stop()
    with open_run(tmp_path) as run:
        rows = run.sql(
            "select distinct step, key from records where key in ('lr', 'eval-rollout/acc') order by all"
        )
        assert [(1, "eval-rollout/acc"), (2, "eval-rollout/acc"), (4, "lr"), (5, "lr")] == [
            tuple(row.values()) for row in rows.to_pylist()
        ]
        windows = run.sql(
            'select step, bound_by from windows where records > 0 order by "window"'
        ).to_pylist()
        assert [(4, "given"), (5, "given")] == [tuple(row.values()) for row in windows]
