"""What goes wrong on one rank is an error on all of them, wherever it happens: nobody is left waiting."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest

from aggregator import stats_tracker
from aggregator.evaluation import (
    AdaptiveEvaluator,
    Evaluator,
    EvaluatorConfig,
    Pace,
    ValidationSet,
    evaluate_distributed,
)
from tests.gloo import Ranks

SAMPLES = [{"id": i, "n": i} for i in range(30)]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as world:
        yield world


class SpeechlessError(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no words")


class Odd(BaseException):
    """Neither an Exception nor a wish to leave."""


KINDS = {"speechless": SpeechlessError(), "odd": Odd()}


def raised(function):
    """Return what a call raised as text."""
    try:
        function()
    except SpeechlessError:
        return "SpeechlessError: (no text: RuntimeError)"
    except BaseException as error:  # noqa: BLE001 - its kind is the answer
        return f"{type(error).__name__}: {error}"
    finally:
        stats_tracker.export_all()
    return None


def fail_one_by_one(rank, error):
    def fail(_):
        if rank == 1:
            raise KINDS[error]
        return 1.0

    return raised(lambda: evaluate_distributed(fail, SAMPLES))


def fail_in_coroutines(rank, error):
    async def fail(_):
        await asyncio.sleep(0)
        if rank == 1:
            raise KINDS[error]
        return 1.0

    return raised(lambda: evaluate_distributed(fail, SAMPLES))


def fail_in_batches(rank, error):
    def fail(batch):
        if rank == 1:
            raise KINDS[error]
        return [1.0] * len(batch)

    return raised(lambda: evaluate_distributed(fail, SAMPLES, batch_size=4))


def fail_in_the_evaluator(rank, error):
    def fail():
        if rank == 1:
            raise KINDS[error]

    evaluator = Evaluator(EvaluatorConfig(freq_steps=1), SimpleNamespace(steps_per_epoch=10))
    return raised(lambda: evaluator.evaluate(fail, 0, 0, 0))


def fail_to_adapt(rank, error):
    """Return results of which one rank's cannot be read."""

    class Unreadable(dict):
        def __getitem__(self, _):
            raise KINDS[error]

    spec = SimpleNamespace(steps_per_epoch=10)
    evaluator = AdaptiveEvaluator(EvaluatorConfig(), spec, metric="a", pace=Pace(least=1, most=8))
    return raised(lambda: evaluator.evaluate(lambda: (Unreadable if rank else dict)(a=1.0), 0, 0, 0))


def fail_to_describe(rank, error):
    def describe(sample):
        if rank == 1:
            raise KINDS[error]
        return {"n": sample["n"]}

    held = ValidationSet(SAMPLES, refresh=lambda _: [], features=describe)
    return raised(lambda: held.update(SAMPLES, 5))


@pytest.mark.parametrize(
    ("error", "text"), [("speechless", "SpeechlessError: (no text: RuntimeError)"), ("odd", "Odd: ")]
)
@pytest.mark.parametrize(
    "case",
    [
        fail_one_by_one,
        fail_in_coroutines,
        fail_in_batches,
        fail_in_the_evaluator,
        fail_to_adapt,
        fail_to_describe,
    ],
)
def test_whatever_is_raised_is_told(ranks, case, error, text):
    """An error without a text and one of an unheard-of kind keep no peer waiting either (report h9)."""
    own, other = text, f"PeerError: expected no failure in the evaluation, got rank 1: {text}"
    assert [other, own] == ranks.run(case, error)


def clean_up(rank):
    def fail():
        if rank == 1:
            raise OSError("cannot remove")

    return raised(lambda: evaluate_distributed(lambda _: 1.0, SAMPLES, cleanup=fail))


def leave(rank):
    def fail(_):
        if rank == 1:
            sys.exit("bad config")
        return 1.0

    return raised(lambda: evaluate_distributed(fail, SAMPLES))


def leave_in_batches(rank):
    def fail(batch):
        if rank == 1:
            raise asyncio.CancelledError("server closed")
        return [1.0] * len(batch)

    return raised(lambda: evaluate_distributed(fail, SAMPLES, batch_size=4))


def record_otherwise(rank):
    """Evaluate what one rank's tracker holds as a counter."""
    if rank == 1:
        stats_tracker.get("eval-rollout").counter(score=1)
    return raised(lambda: evaluate_distributed(lambda _: 1.0, SAMPLES))


def bad_id(rank):
    return raised(lambda: evaluate_distributed(lambda _: 1.0, [{"id": "b\udce9" if rank == 1 else "a"}]))


def features(rank):
    def describe(sample):
        return {"n": float("x" if rank == 1 and sample["id"] == 7 else sample["n"])}

    held = ValidationSet(SAMPLES, refresh=lambda _: [], features=describe)
    return raised(lambda: held.update(SAMPLES, 5))


def refresh(rank):
    """Refresh a drifted set by a callback that fails on one rank: it stays on both."""

    def fail(reason):
        if rank == 1:
            raise OSError("no source")
        return [reason]

    held = ValidationSet(SAMPLES, refresh=fail, features=lambda sample: {"n": float(sample["n"])})
    told = raised(lambda: held.update([{"id": i, "n": i + 100} for i in range(300)], 5))
    assert held.loader is SAMPLES
    return told


@pytest.mark.parametrize(
    ("case", "error"),
    [
        (clean_up, "OSError: cannot remove"),
        (leave, "SystemExit: bad config"),
        (leave_in_batches, "CancelledError: server closed"),
        (record_otherwise, "RecordingError: expected"),
        (bad_id, "RecordingError: expected a sample id that is valid Unicode"),
        (features, "ValueError: could not convert string to float: 'x'"),
        (refresh, "OSError: no source"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_both(ranks, case, error):
    """The rank itself raises its own error, the other one learns of it (reports h9, h20)."""
    other, own = ranks.run(case)
    assert own.startswith(error)
    assert other.startswith(f"PeerError: expected no failure in the evaluation, got rank 1: {error}")


def adapt(rank, who, metric):
    """Return what an adaptive evaluator did whose function returns results on some ranks only."""
    spec = SimpleNamespace(steps_per_epoch=1000)
    evaluator = AdaptiveEvaluator(EvaluatorConfig(), spec, metric=metric, pace=Pace(least=1, most=8))
    steps = []

    def evaluate(step):
        steps.append(step + 1)
        return {"accuracy": 0.5} if rank in who else None

    told = raised(lambda: [evaluator.evaluate(lambda s=s: evaluate(s), 0, s, s) for s in range(16)])
    return steps, evaluator.interval, told


@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_the_first_rank_with_a_result_sets_the_pace(ranks, who):
    """Metrics on some ranks only, as where one gathers them, keep nobody waiting (report h9)."""
    assert [([1, 2, 4, 8, 16], 8, None)] * 2 == ranks.run(adapt, who, "accuracy")


def test_a_misspelt_metric_is_an_error_on_both(ranks):
    """A pace that could never adapt says so at the first evaluation, on every rank."""
    told = "EvaluationError: expected the metric 'acuracy' among the results, got 'accuracy'"
    assert [([1], 1, told)] * 2 == ranks.run(adapt, [1], "acuracy")
