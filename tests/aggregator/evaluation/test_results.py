"""How results get into the tracker: each number once, one evaluation of a key an export, names of use."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch

import eventlog
from aggregator import open_run, stats_tracker, workflow_context
from aggregator.evaluation import (
    SampleResult,
    compute_aggregated_metrics,
    evaluate_distributed,
    log_evaluation_results,
)
from eventlog import errors

SAMPLES = [{"id": i} for i in range(4)]


def recording(sample):
    """Record and return a reward, as AReaL's workflows do, and record how many turns it took."""
    tracker = stats_tracker.get(workflow_context.stat_scope())
    tracker.scalar(reward=float(sample["id"]), turns=2.0)
    return {"reward": float(sample["id"])}


async def recording_async(sample):
    """Do the same as a coroutine."""
    return recording(sample)


@pytest.mark.parametrize("workflow", [recording, recording_async])
def test_a_workflow_may_record_what_it_returns(workflow):
    """The reward that a workflow records itself and returns is one number a sample, not two (report h12)."""
    stats_tracker.get("eval-rollout").scalar(reward=1.0)  # another episode's, earlier: it counts
    metrics = compute_aggregated_metrics(evaluate_distributed(workflow, SAMPLES))
    log_evaluation_results(metrics)
    stats = stats_tracker.export_all()
    assert (7.0 / 5, 5) == (stats["eval-rollout/reward"], stats["eval-rollout/reward__count"])
    assert (2.0, 4) == (stats["eval-rollout/turns"], stats["eval-rollout/turns__count"])
    assert {"reward": 1.5, "n_samples": 4} == metrics


def test_what_a_workflow_recorded_alone_stands():
    """Without `record` the workflow's own numbers stand; the rest of the metrics is added."""
    metrics = compute_aggregated_metrics(evaluate_distributed(recording, SAMPLES, record=False))
    log_evaluation_results(metrics)
    stats = stats_tracker.export_all()
    assert (1.5, 4, 4.0) == tuple(
        stats[f"eval-rollout/{name}"] for name in ("reward", "reward__count", "n_samples")
    )


def test_a_second_evaluation_under_the_same_names_is_refused():
    """Two evaluations are never averaged into one number: the second one says what to do (report h12)."""
    evaluate_distributed(lambda _: 0.0, SAMPLES)
    with pytest.raises(errors.RecordingError, match=r"one evaluation of 'eval-rollout/score' .*scope"):
        evaluate_distributed(lambda _: 1.0, SAMPLES)
    log_evaluation_results({"bleu": 1.0})
    with pytest.raises(
        errors.RecordingError, match=r"one evaluation of 'eval-rollout/bleu' until its export"
    ):
        log_evaluation_results({"bleu": 2.0})
    with stats_tracker.get("eval-rollout").scope("second"):
        evaluate_distributed(lambda _: 1.0, SAMPLES)
        log_evaluation_results({"bleu": 2.0})
    stats = stats_tracker.export_all()
    assert (0.0, 1.0) == (stats["eval-rollout/score"], stats["eval-rollout/second/score"])
    assert (1.0, 2.0) == (stats["eval-rollout/bleu"], stats["eval-rollout/second/bleu"])


def test_where_mistakes_are_forgiven_the_first_evaluation_stands(monkeypatch):
    """A second one is warned of and lost, key by key, and training goes on."""
    monkeypatch.setenv("AREAL_METRICS_ON_MISTAKE", "warn")
    evaluate_distributed(lambda _: {"first": 0.0}, SAMPLES)
    with pytest.warns(UserWarning, match="expected one evaluation of 'eval-rollout/first'"):
        results = evaluate_distributed(lambda _: {"first": 1.0, "fresh": 1.0}, SAMPLES)
    assert [1.0] * 4 == [each.values["first"] for each in results]
    stats = stats_tracker.export_all()
    assert (0.0, 1.0) == (stats["eval-rollout/first"], stats["eval-rollout/fresh"])


def test_each_export_makes_room_for_the_next_evaluation():
    """The same evaluation after every export is what there is the tracker for."""
    for value in (0.0, 1.0):
        log_evaluation_results(
            compute_aggregated_metrics(evaluate_distributed(lambda _, v=value: v, SAMPLES))
        )
        assert value == stats_tracker.export_all()["eval-rollout/score"]


@pytest.mark.parametrize("name", [1, "", "n_samples", "/n_samples/", None, "\udce9"])
def test_names_that_cannot_be_told_apart_or_written_are_refused(name):
    """A value's name is a text, and not that of the count of samples, which it would replace."""
    with pytest.raises(errors.EvaluationError, match="expected names of values as texts, other than"):
        evaluate_distributed(lambda _: {"right": 1.0, name: 0.5}, SAMPLES)
    with pytest.raises(errors.EvaluationError, match="expected names of values as texts, other than"):
        compute_aggregated_metrics([{"id": 0, name: 0.5}])


def test_texts_of_any_class_become_plain():
    """What is told to other ranks and written needs nobody's classes."""

    class Text(str):
        __slots__ = ()

        def __str__(self):
            return "something else"

    samples = [{"id": Text("a"), "tags": {Text("kind"): Text("x")}}]
    (result,) = evaluate_distributed(
        lambda _: {Text("answer"): Text("b"), "n": np.float32(0.5)}, samples, record=False
    )
    kinds = (
        result.id,
        *result.texts,
        *result.texts.values(),
        *result.tags,
        *result.tags.values(),
    )
    assert ("a", "answer", "b", "kind", "x") == kinds
    assert {str} == {type(each) for each in kinds}
    assert float is type(result.values["n"])


def test_a_cancelled_coroutine_says_why():
    """The reason of a cancellation that nobody asked for is in the error, with the sample."""

    async def cancelled(sample):
        await asyncio.sleep(0)
        if sample["id"] == 2:
            raise asyncio.CancelledError("server closed")
        return 1.0

    with pytest.raises(errors.EvaluationError, match="expected a result, got cancelled: server closed") as it:
        evaluate_distributed(cancelled, SAMPLES, record=False)
    assert ["while evaluating sample '2'"] == it.value.__notes__


def test_a_value_named_like_a_slice_is_refused():
    """None of the two is lost without a word; a tag that is asked for twice is one."""
    results = [SampleResult(str(i), {"acc": 1.0, "m/a/acc": 0.5}, tags={"m": "a"}) for i in range(3)]
    with pytest.raises(
        errors.EvaluationError, match="values and of slices that differ, got 'm/a/acc' as both"
    ):
        compute_aggregated_metrics(results, by="m")
    plain = [SampleResult("x", {"acc": 1.0}, tags={"m": "a"})]
    assert compute_aggregated_metrics(plain, by="m") == compute_aggregated_metrics(plain, by=["m", "m"])


def test_tags_may_be_numbers_of_numpy_and_torch(tmp_path):
    """A slice is named by the number, and the log holds it as one."""
    eventlog.start(tmp_path, role="actor")
    samples = [{"id": i, "tags": {"level": torch.tensor(i % 2), "size": np.int64(3)}} for i in range(4)]
    results = evaluate_distributed(lambda sample: float(sample["id"]), samples)
    metrics = compute_aggregated_metrics(results, by=["level", "size"])
    assert [1.0, 2.0, 1.5] == [metrics[f"{each}/score"] for each in ("level/0", "level/1", "size/3")]
    bare = [SampleResult("x", {"acc": 1.0}, tags={"level": torch.tensor(1)})]
    assert 1.0 == compute_aggregated_metrics(bare, by="level")["level/1/acc"]
    stats_tracker.export_all()
    eventlog.stop()
    with open_run(tmp_path) as run:
        tags = run.sql("select distinct tags from samples")["tags"].to_pylist()
    assert [{"level": 0, "size": 3}, {"level": 1, "size": 3}] == sorted(map(json.loads, tags), key=str)


@pytest.mark.parametrize(
    "value", [10**400, b"1.5", 1j, torch.ones(2)], ids=lambda value: type(value).__name__
)
def test_results_that_are_no_number_are_refused(value):
    """Whatever it is, it is named with its sample."""
    with pytest.raises(
        errors.EvaluationError, match="expected a number or a text for 'score' of sample '1', got"
    ):
        evaluate_distributed(lambda _: value, [{"id": 1}], record=False)


def test_a_coroutine_from_a_plain_function_is_refused():
    """A lambda around an async function has run nothing of it."""

    async def score(_):
        return 1.0

    with pytest.raises(errors.EvaluationError, match="got the coroutine of an async function"):
        evaluate_distributed(lambda sample: score([sample]), SAMPLES, record=False)
