"""Evaluating over real ranks: each sample once, the same results everywhere, no rank left waiting."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from numpy.random import mtrand

import eventlog
from aggregator import open_run, stats_tracker, workflow_context
from aggregator.evaluation import (
    compute_aggregated_metrics,
    evaluate_distributed,
    log_evaluation_results,
    number_of,
    seeded,
)
from aggregator.evaluation.samples import deal
from aggregator.evaluation.sampling import _say_shared, seed_all
from eventlog import errors
from tests.gloo import Ranks
from tests.terminal import on_terminal

SAMPLES = [{"id": f"q{i:02d}", "x": i, "tags": {"kind": "text" if i % 3 else "image"}} for i in range(74)]


@pytest.fixture(scope="module")
def worlds():
    """Groups of 1, 2, 3 and 4 ranks, the first ones of one world."""
    with Ranks(4) as world:

        class Some:
            def __init__(self, size):
                self.size = size

            def run(self, function, *args):
                return world.run(among, self.size, function.__name__, *args)[: self.size]

        yield Some


_groups = {}


def among(rank, size, name, *args):
    """Call a function of this module on the first `size` ranks, in a group of theirs."""
    if size not in _groups:
        _groups[size] = torch.distributed.new_group(list(range(size)))
    return globals()[name](rank, _groups[size], *args) if rank < size else None


def score(sample):
    """Return what depends on the sample and on its own random numbers alone."""
    return {"right": sample["x"] % 4 == 0, "noise": random.random() / 3, "answer": f"<{sample['x']}>"}


def summary(results):
    """Return what must be the same on all ranks and in all worlds."""
    return [(each.id, dict(each.values), dict(each.texts), dict(each.tags)) for each in results]


# -- the same, whatever the world ------------------------------------------------------------------


def evaluate_all(_rank, group, samples, options):
    return summary(evaluate_distributed(score, samples, group, record=False, **options))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_do_not_depend_on_the_world_size(worlds, size):
    """74 samples give the same results, random ones too, on 1 to 4 ranks; each id once (report h12)."""
    alone = summary(evaluate_distributed(score, SAMPLES, record=False))
    assert [sample["id"] for sample in SAMPLES] == [each for each, *_ in alone]
    assert [alone] * size == worlds(size).run(evaluate_all, SAMPLES, {"expected": 74})


def in_batches(rank, group, size, out_of_memory, limit):
    """Evaluate all samples in batches; on one rank, batches above `limit` run out of memory."""

    def scores(batch):
        if rank == out_of_memory and len(batch) > limit:
            raise torch.OutOfMemoryError("injected")
        return [{"right": sample["x"] % 4 == 0, "thirds": sample["x"] / 3} for sample in batch]

    scores.__qualname__ = f"scores-{size}-{out_of_memory}"  # a function of its own: nothing is remembered
    results = evaluate_distributed(scores, SAMPLES, group, batch_size=size, expected=74, record=False)
    return [each.id for each in results], compute_aggregated_metrics(results)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("out_of_memory", [False, True])
def test_batches_and_running_out_of_memory_change_nothing(worlds, ranks, out_of_memory):
    """The same 74 ids and the same means to the last bit, for batches of 1 to 64, with and without an OOM."""
    expected = (
        [sample["id"] for sample in SAMPLES],
        compute_aggregated_metrics(
            {"id": s["id"], "right": s["x"] % 4 == 0, "thirds": s["x"] / 3} for s in SAMPLES
        ),
    )
    where = ranks - 1 if out_of_memory else None
    for size in (1, 5, 16, 64):
        assert [expected] * ranks == worlds(ranks).run(in_batches, size, where, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_repeats_that_pad_ranks_count_once(size):
    """21 samples, padded so that all ranks have as many, are 21 samples for any world size (report h12)."""
    ids = [f"s{i}" for i in range(21)]
    padded = ids + ids[: -len(ids) % size]
    dealt = deal([padded[rank::size] for rank in range(size)])
    assert sorted(ids) == sorted(each for own in dealt for each in own)
    held_by_all = deal([padded] * size)
    assert sorted(ids) == sorted(each for own in held_by_all for each in own)
    assert 1 >= max(map(len, held_by_all)) - min(map(len, held_by_all))


def part_of(rank, group, ranks):
    """Evaluate where each rank holds a part that overlaps with its neighbour's."""
    mine = [sample for i, sample in enumerate(SAMPLES) if i % ranks in (rank, (rank + 1) % ranks)]
    results = evaluate_distributed(score, mine, group, record=False, expected=74)
    return summary(results), sorted({each.rank for each in results})


def test_ranks_may_hold_parts_that_overlap(worlds):
    """What several ranks hold is evaluated by one of them."""
    alone = summary(evaluate_distributed(score, SAMPLES, record=False))
    assert [(alone, [0, 1, 2])] * 3 == worlds(3).run(part_of, 3)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_ranks_may_have_nothing_to_do(worlds, batch_size):
    """3 samples on 4 ranks are 3 results, and none are none (report h13)."""
    options = {"batch_size": batch_size}
    three = worlds(4).run(count_only, SAMPLES[:3], options)
    assert [["q00", "q01", "q02"]] * 4 == three
    assert [[]] * 4 == worlds(4).run(count_only, [], options)


def count_only(_rank, group, samples, options):
    fn = (lambda batch: [1.0 for _ in batch]) if options["batch_size"] else (lambda _: 1.0)
    return [each.id for each in evaluate_distributed(fn, samples, group, record=False, **options)]


# -- errors on all ranks ---------------------------------------------------------------------------


def outcome(rank, group, how, options=None):
    """Evaluate so that rank 1 fails in some way; return the error of every rank."""

    def broken(sample):
        if rank == 1 and sample["x"] == 5:
            raise ArithmeticError("five is broken")
        return None if how == "nothing" else 1.0

    async def broken_async(sample):
        await asyncio.sleep(0)
        return broken(sample)

    samples, fn = SAMPLES, broken_async if how == "async" else broken
    if how == "no id" and rank == 1:
        samples = [{"text": "same"}] * 2
    if how == "few":
        samples = SAMPLES[:63]
    try:
        evaluate_distributed(fn, samples, group, record=False, **(options or {}))
    except Exception as error:  # noqa: BLE001 - its kind is the answer
        return type(error).__name__, str(error), getattr(error, "__notes__", [])
    return None


@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_error_of_one_rank_is_raised_on_all(worlds, how):
    """Its rank raises it as it is, with the sample's id; the others a PeerError that names both."""
    other, own = worlds(2).run(outcome, how)
    assert ("ArithmeticError", "five is broken", ["while evaluating sample 'q05'"]) == own
    assert (
        "PeerError",
        "expected no failure in the evaluation, got rank 1: ArithmeticError: five is broken",
    ) == other[:2]


def test_samples_without_ids_are_refused_on_all_ranks(worlds):
    """No id is an error, not a guess from the text, and no rank hangs (report h15)."""
    other, own = worlds(2).run(outcome, "no id")
    assert "EvaluationError" == own[0]
    assert (
        "expected an id (a text or an integer) by 'id' for every sample, got none for {'text': 'same'}"
        == own[1]
    )
    assert "PeerError" == other[0]


def test_too_few_samples_are_no_score(worlds):
    """63 of 500 expected samples are an error with both numbers, on all ranks (report h18)."""
    text = "expected 500 samples with different ids on 2 ranks, got 63"
    answers = worlds(2).run(outcome, "few", {"expected": 500})
    assert [("DistributedEvaluationError", text, [])] * 2 == answers


def test_a_sample_without_a_result_is_an_error():
    """None for a sample is no result; what else is neither number nor text is refused by name."""
    for found, got in (
        (None, "got None"),
        ("text", "got 'text'"),
        ({"a": [1]}, r"for 'a' of sample 'q00', got list \[1\]"),
    ):
        with pytest.raises(errors.EvaluationError, match=got):
            evaluate_distributed(lambda _, found=found: found, SAMPLES[:1])


def test_batches_must_have_a_result_for_each_sample():
    """A batch function that returns fewer results than it got samples is refused."""
    with pytest.raises(errors.EvaluationError, match="expected 4 results, one a sample, got 3"):
        evaluate_distributed(lambda batch: [1.0] * (len(batch) - 1), SAMPLES, batch_size=4)


def test_the_first_error_is_the_one_that_is_raised():
    """An error of the clean-up does not hide the evaluation's own; alone it is raised (report h20)."""

    def clean_up():
        raise OSError("clean-up")

    with pytest.raises(ZeroDivisionError) as caught:
        evaluate_distributed(lambda _: 1 / 0, SAMPLES, cleanup=clean_up)
    assert isinstance(caught.value.__context__, OSError)
    assert "cleaning up failed, too: OSError: clean-up" in caught.value.__notes__
    with pytest.raises(OSError, match="clean-up"):
        evaluate_distributed(lambda _: 1.0, SAMPLES, cleanup=clean_up)


def disagree(rank, group, what):
    """Evaluate with arguments that only rank 1 gives so; return the error of every rank."""
    samples = [{"id": i} for i in range(6)]
    if what == "ids" and rank == 1:
        samples = [{"id": str(i)} for i in range(6)]
    given = {
        "expected": {"expected": 6 + rank},
        "batch_size": {"batch_size": 2} if rank == 1 else {},
        "bad batch_size": {"batch_size": 2 - 2 * rank},
        "bad max_memory": {"batch_size": 2, "max_memory": 1 + rank},
        "seed": {"seed": rank},
        "step": {"step": rank},
        "record": {"record": bool(rank)},
        "ids": {},
    }[what]
    batched = "batch_size" in given
    try:
        evaluate_distributed(lambda each: [1.0] * len(each) if batched else 1.0, samples, group, **given)
    except Exception as error:  # noqa: BLE001 - its kind is the answer
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("expected", "expected the same expected on all ranks, got 6 on rank 0 and 7 on rank 1"),
        (
            "batch_size",
            "expected the same batch_size on all ranks, got None on rank 0 and 'a size' on rank 1",
        ),
        ("seed", "expected the same seed on all ranks, got 0 on rank 0 and 1 on rank 1"),
        ("step", "expected the same step on all ranks, got 0 on rank 0 and 1 on rank 1"),
        ("record", "expected the same record on all ranks, got False on rank 0 and True on rank 1"),
    ],
)
def test_ranks_that_are_told_different_things_all_learn_so(worlds, what, text):
    """Arguments that must be alike are compared before anything is evaluated: one error on every rank."""
    assert [("DistributedEvaluationError", text)] * 2 == worlds(2).run(disagree, what)


def test_an_id_that_is_a_text_elsewhere_is_refused_on_all_ranks(worlds):
    """The integer 0 of one rank and the text "0" of another are as ambiguous as in one list."""
    text = "expected ids that differ as texts, got the integer 0 and the text '0'"
    assert [("EvaluationError", text)] * 2 == worlds(2).run(disagree, "ids")


@pytest.mark.parametrize("what", ["bad batch_size", "bad max_memory"])
def test_an_argument_that_one_rank_refuses_is_an_error_on_all(worlds, what):
    """A size of 0, or a share above 1, on one rank leaves no other waiting for its batch."""
    other, own = worlds(2).run(disagree, what)
    assert ("PeerError", "EvaluationError") == (other[0], own[0])


def test_coroutine_functions_take_no_batches():
    """It is said, not found out by what a coroutine has no length."""

    async def scores(batch):
        return [1.0] * len(batch)

    with pytest.raises(errors.EvaluationError, match=r"with batch_size, got a coroutine function: .*scores"):
        evaluate_distributed(scores, SAMPLES, batch_size=4)


# -- coroutines ------------------------------------------------------------------------------------


def test_coroutines_run_side_by_side_up_to_a_limit():
    """Never more than `concurrency` at a time, and as many as that; the results are the same."""
    running, most = 0, 0

    async def slowly(sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(sample["x"] % 5):
            await asyncio.sleep(0)
        running -= 1
        return {"x": sample["x"]}

    results = evaluate_distributed(slowly, SAMPLES, concurrency=8, record=False)
    assert (8, [float(i) for i in range(74)]) == (most, [each.values["x"] for each in results])
    most = 0
    evaluate_distributed(slowly, SAMPLES, concurrency=1, record=False)
    assert most == 1


async def drawing(sample):
    """Draw between waits of all lengths, and in tasks of one's own."""

    def draw():
        return random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002

    async def attempt(i):
        drawn = [draw()]
        await asyncio.sleep(0.001 * ((sample["x"] + i) % 3))
        return sum(drawn, draw())

    drawn = [draw()]
    for _ in range(sample["x"] % 4):
        await asyncio.sleep(0)
        drawn.append(draw())
    attempts = await asyncio.gather(*(attempt(i) for i in range(3)))
    return {"own": sum(drawn), **{f"attempt {i}": value for i, value in enumerate(attempts)}}


def evaluate_drawing(_rank, group, options):
    return summary(evaluate_distributed(drawing, SAMPLES, group, record=False, **options))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_coroutines_draw_the_same_numbers_on_any_number_of_ranks(worlds, size):
    """Whichever others run in between, and however many, a sample's numbers and its tasks' are its own."""
    alone = summary(evaluate_distributed(drawing, SAMPLES, concurrency=1, record=False))
    drawn = {value for _, values, *_ in alone for value in values.values()}
    assert 4 * len(SAMPLES) == len(drawn)
    assert [alone] * size == worlds(size).run(evaluate_drawing, {"concurrency": 16})


def test_seeded_coroutines_are_cancelled_and_fail_as_others():
    """Time-outs reach the sample, errors their place, and what never ran is closed without a warning."""
    told = []

    async def stuck():
        try:
            await asyncio.sleep(60)
        finally:
            told.append("cleaned up")

    async def one(sample):
        task = asyncio.create_task(stuck())
        assert "stuck" in repr(task)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stuck()
        if sample["x"] == 2:
            raise ArithmeticError("two")
        return 1.0

    with pytest.raises(ArithmeticError, match="two"):
        evaluate_distributed(one, SAMPLES[:5], concurrency=1, record=False)
    assert ["cleaned up"] * 3 == told


def test_without_a_seed_coroutines_draw_from_what_there_is():
    """None leaves the generators alone: they go on, and are not put back."""

    async def draw(_):
        return random.random()

    random.seed(5)
    found = [
        each.values["score"] for each in evaluate_distributed(draw, SAMPLES[:3], record=False, seed=None)
    ]
    after = random.random()
    random.seed(5)
    assert [*found, after] == [random.random() for _ in range(4)]


def test_an_event_loop_in_the_way_is_named():
    """Within a running loop it says how to call it instead, and that works."""

    async def one(_):
        return 1.0

    async def within():
        with pytest.raises(errors.EvaluationError, match=r"await asyncio\.to_thread"):
            evaluate_distributed(one, SAMPLES)
        return await asyncio.to_thread(evaluate_distributed, one, SAMPLES, record=False)

    assert 74 == len(asyncio.run(within()))


# -- what it leaves --------------------------------------------------------------------------------


def test_training_draws_what_it_would_have_drawn():
    """The generators are as they were, and every evaluation draws the same numbers."""

    def draw(_=None):
        return {"a": random.random(), "b": float(np.random.rand()), "c": torch.rand(1).item()}  # noqa: NPY002

    seed_all(1)
    undisturbed = [draw() for _ in range(2)]
    seed_all(1)
    first = [draw()]
    evaluations = [summary(evaluate_distributed(draw, SAMPLES[:3], record=False)) for _ in range(2)]
    assert evaluations[0] == evaluations[1]
    assert evaluations[0][0][1] != evaluations[0][1][1]
    assert undisturbed == [*first, draw()]
    assert number_of(0, "q00") != number_of(1, "q00")


@pytest.mark.parametrize("batch_size", [None, 2])
def test_beside_a_training_nothing_is_seeded(caplog, batch_size):
    """On another thread the generators stay the training's, and what to do is said once (report i1)."""
    _say_shared.cache_clear()
    drawn = []

    async def asynchronous(_):
        drawn.append(random.random())
        return number_of(0, "x") % 2

    def plain(found):
        drawn.append(random.random())
        return 1.0 if batch_size is None else [1.0 for _ in found]

    def evaluate():
        for fn in (plain, asynchronous) if batch_size is None else (plain,):
            evaluate_distributed(fn, SAMPLES[:4], record=False, batch_size=batch_size)
        with seeded(3):
            drawn.append(random.random())

    seed_all(1)
    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    after = [random.random(), float(np.random.rand()), torch.rand(()).item()]  # noqa: NPY002
    seed_all(1)
    assert drawn == [random.random() for _ in drawn]
    assert after == [random.random(), float(np.random.rand()), torch.rand(()).item()]  # noqa: NPY002
    (said,) = [record.message for record in caplog.records]
    assert "random.Random(number_of(seed, id))" in said


def test_numpy_s_generator_is_the_one_it_was():
    """Coroutines draw from numpy generators of their own; the shared one is in its place again."""
    seed_all(1)
    shared, undisturbed = mtrand.get_bit_generator(), float(np.random.rand())  # noqa: NPY002
    seed_all(1)
    evaluate_distributed(drawing, SAMPLES[:3], record=False)
    assert shared is mtrand.get_bit_generator()
    assert undisturbed == np.random.rand()  # noqa: NPY002


@pytest.mark.parametrize("seed", ["x", 1.5])
def test_a_seed_is_an_integer(seed):
    """Anything else is refused as what it is; numpy's integers are integers."""
    with pytest.raises(errors.EvaluationError, match="expected a seed as an integer, or None, got "):
        evaluate_distributed(lambda _: 1.0, SAMPLES[:1], seed=seed, record=False)
    found = [
        evaluate_distributed(lambda _: random.random(), SAMPLES[:2], seed=each, record=False)
        for each in (3, np.int64(3))
    ]
    assert summary(found[0]) == summary(found[1])


def test_what_it_records_is_an_evaluations():
    """Within it the stat scope is eval-rollout, for coroutines too, and afterwards what it was."""
    scopes = []

    async def one(_):
        scopes.append(workflow_context.stat_scope())
        return 1.0

    evaluate_distributed(
        lambda _: scopes.append(workflow_context.stat_scope()) or 1.0, SAMPLES[:1], record=False
    )
    evaluate_distributed(one, SAMPLES[:1], record=False)
    assert ["eval-rollout"] * 2 == scopes
    assert "rollout" == workflow_context.stat_scope()


def record(rank, group, path):
    """Evaluate, log what was aggregated, export and commit, as a training does."""
    eventlog.start(path, role="actor")
    if rank == 0:
        eventlog.current().claim_attempt()

    def right(sample):
        return {"right": sample["x"] % 4 == 0, **({"odd": sample["x"]} if sample["x"] % 2 else {})}

    results = evaluate_distributed(right, SAMPLES[:7], group, step=3)
    metrics = compute_aggregated_metrics(results, by=["kind"])
    log_evaluation_results({**metrics, "bleu": 12.5})
    exported = stats_tracker.export_all(reduce_group=group, step=3)
    eventlog.current().commit(0, 3, 3, [dict(exported)] if rank == 0 else ())
    eventlog.stop()
    return metrics, dict(exported)


def test_every_result_is_in_the_log_with_its_id_tags_and_value(worlds, tmp_path):
    """Samples, their means, slices and derived metrics are exported once, logged, and recomputed alike."""
    answers = worlds(4).run(record, str(tmp_path / "run"))
    metrics, exported = answers[0]
    assert [answers[0]] * 4 == answers
    means = {name: value for name, value in exported.items() if not name.endswith("__count")}
    assert {
        f"eval-rollout/{name}": value for name, value in {**metrics, "bleu": 12.5}.items()
    } == pytest.approx(means)
    assert (7, 3, 1) == tuple(exported[f"eval-rollout/{name}__count"] for name in ("right", "odd", "bleu"))
    assert (2 / 7, 3.0, 7, 1 / 3) == tuple(
        metrics[n] for n in ("right", "odd", "n_samples", "kind/image/right")
    )
    with open_run(tmp_path / "run") as run:
        rows = run.sql(
            "select step, sample_id, value, tags->>'kind' as kind from samples "
            "where key = 'eval-rollout/right' order by sample_id"
        ).to_pylist()
        expected = [(3, s["id"], float(s["x"] % 4 == 0), s["tags"]["kind"]) for s in SAMPLES[:7]]
        assert expected == [tuple(row.values()) for row in rows]
        recomputed = run.metrics(source="recomputed").to_pylist()
        assert dict(exported) == {row["key"]: row["value"] for row in recomputed}
        assert not any(row["differs"] or row["incomplete"] for row in recomputed)


def test_aggregation_goes_by_id_and_not_by_order():
    """Rows of one text are told apart by their ids; order and repeats change nothing; no id is an error."""
    rows = [{"id": i, "text": "same", "reward": i / 7} for i in range(26)]
    expected = compute_aggregated_metrics(rows)
    assert 26 == expected["n_samples"]
    assert expected == compute_aggregated_metrics([*rows[::-1], *rows[:5]])
    with pytest.raises(errors.EvaluationError, match="expected an id"):
        compute_aggregated_metrics([{"text": "same", "reward": 1.0}])


def test_a_tag_that_no_sample_has_is_refused():
    """Slices by it would be silently missing; a tag that some samples have gives those a slice."""
    rows = [{"id": 0, "reward": 1.0, "tags": {"modality": "text"}}, {"id": 1, "reward": 0.0}]
    assert 1.0 == compute_aggregated_metrics(rows, by="modality")["modality/text/reward"]
    with pytest.raises(errors.EvaluationError, match="got 'modalty'; there are 'modality': tags are what"):
        compute_aggregated_metrics(rows, by=["modalty"])
    with pytest.raises(errors.EvaluationError, match="got 'modality'; there is none: tags are what a sample"):
        compute_aggregated_metrics([{"id": 0, "modality": 1}], by=["modality"])
    assert {"n_samples": 0} == compute_aggregated_metrics([], by=["modality"])


# -- what one sees ---------------------------------------------------------------------------------

SHOWN = """
import sys
from aggregator.evaluation import evaluate_distributed
evaluate_distributed(lambda sample: 1.0, [{"id": i} for i in range(3)], record=False)
print(sys.stderr.isatty(), "rich" in sys.modules)
"""


def test_progress_is_shown_on_a_terminal_only():
    """Standard error has a bar when it is a terminal, full in the end, and nothing when it is not."""
    command = [sys.executable, "-c", SHOWN]
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("", "False False\n") == (plain.stderr, plain.stdout)
    out, shown = on_terminal(command, env={**os.environ, "TERM": "xterm"})
    assert b"True True\n" == out
    assert b"evaluation" in shown
    assert b"100%" in shown
