"""Batches that fit: halved together when memory runs out, grown again, never another error in disguise."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from aggregator.evaluation import BatchSize, adaptive_batch_evaluation
from aggregator.evaluation.batching import GROW_AFTER, Memory, is_out_of_memory
from eventlog import errors
from tests.gloo import Ranks


@pytest.fixture(scope="module")
def ranks():
    """Three ranks, for all tests of the module."""
    with Ranks(3) as world:
        yield world


class Function:
    """Doubles numbers; runs out of memory above `limit`; remembers the sizes it was called with."""

    def __init__(self, limit, error=torch.OutOfMemoryError):
        self.limit, self.error, self.sizes = limit, error, []

    def __call__(self, batch):
        self.sizes.append(len(batch))
        if len(batch) > self.limit:
            raise self.error("more than fits")
        return [2 * each for each in batch]


def test_halves_until_it_fits_and_keeps_what_was_finished():
    """16, 8, 4, 2 where more than 3 do not fit; every item is evaluated once, in order (report h16)."""
    fn = Function(3)
    found = adaptive_batch_evaluation(fn, range(9), batch_size=BatchSize(16))
    assert [2 * i for i in range(9)] == found
    assert [9, 4, 2, 2, 2, 2, 1] == fn.sizes


def test_later_batches_may_be_the_ones_that_do_not_fit():
    """What was done before memory ran out is not done again."""
    done = []

    def fn(batch):
        if len(batch) > 2 and 8 in batch:
            raise MemoryError
        done.extend(batch)
        return batch

    assert list(range(12)) == adaptive_batch_evaluation(fn, range(12), batch_size=BatchSize(4))
    assert list(range(12)) == done


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_at_one_the_original_error_is_raised(error):
    """Halving ends at 1, never at 0, with the function's own error (report h16)."""
    fn = Function(0, error)
    with pytest.raises(error, match="more than fits") as caught:
        adaptive_batch_evaluation(fn, range(8), batch_size=BatchSize(8))
    assert [8, 4, 2, 1] == fn.sizes
    assert "__call__" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("CUDA error: an illegal memory access")])
def test_other_errors_pass_through_at_once(error):
    """What is not running out of memory is nobody's reason for smaller batches (report h16)."""
    calls = []

    def fn(batch):
        calls.append(len(batch))
        raise error

    with pytest.raises(type(error), match=str(error)):
        adaptive_batch_evaluation(fn, range(8), batch_size=BatchSize(8))
    assert [8] == calls


def test_the_hosts_allocator_is_understood():
    """Torch's real error for host memory counts, although it has no type of its own."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_nothing_holds_on_to_what_did_not_fit():
    """What the failed call held is free before the next call, error and traceback included."""
    held, alive = [], []

    def fn(batch):
        alive.append([ref() is not None for ref in held])
        big = torch.zeros(len(batch))
        held.append(weakref.ref(big))
        if len(batch) > 1:
            try:
                {}["an inner error, with the same frame"]
            except KeyError as inner:
                raise MemoryError from inner
        return batch

    gc.disable()
    try:
        adaptive_batch_evaluation(fn, range(4), batch_size=BatchSize(4))
    finally:
        gc.enable()
    assert [[], [False], [False, False]] == alive[:3]


def test_a_failing_clean_up_does_not_hide_the_first_error():
    """Memory ran out, and giving it back failed: the first is raised, the second attached (report h20)."""

    class Broken(Memory):
        def release(self):
            raise OSError("device lost")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        adaptive_batch_evaluation(Function(1), range(8), batch_size=BatchSize(8), memory=Broken())
    assert isinstance(caught.value.__context__, OSError)
    assert ["giving memory back failed, too: OSError: device lost"] == caught.value.__notes__


# -- what is remembered ----------------------------------------------------------------------------


def test_the_size_is_remembered_and_grows_again():
    """The next call begins where the last one ended; after batches that went well the size doubles."""
    size, fn = BatchSize(16), Function(5)
    adaptive_batch_evaluation(fn, range(16), batch_size=size)
    assert [16, 8, 4, 4, 4, 4] == fn.sizes
    fn.sizes.clear()
    fn.limit = 100  # there is room again
    adaptive_batch_evaluation(fn, range(4 * GROW_AFTER + 8), batch_size=size)
    assert [*[4] * (GROW_AFTER - 4), 8] == fn.sizes[: GROW_AFTER - 3]
    assert size.size == 8
    adaptive_batch_evaluation(fn, range(16 * 3 * GROW_AFTER), batch_size=size)
    assert size.size == 16 == max(fn.sizes)


@pytest.mark.long
def test_growing_in_vain_becomes_rare():
    """A limit that stays is not run into every few batches: patience doubles each time."""
    size, fn = BatchSize(16), Function(4)
    adaptive_batch_evaluation(fn, range(1000), batch_size=size)
    assert 7 == sum(each > 4 for each in fn.sizes)  # 16 and 8 at first, then after 8, 16, 32, 64, 128 batches
    assert [4, True] == [size.size, size.patience > GROW_AFTER]


def test_a_function_is_known_by_its_name():
    """Given a number, the size is remembered for the function, also when it is defined anew each time."""

    def make(sizes, limit):
        def scores_of_this_test(batch):
            sizes.append(len(batch))
            if len(batch) > limit:
                raise MemoryError
            return batch

        return scores_of_this_test

    first, second, third = [], [], []
    adaptive_batch_evaluation(make(first, 2), range(8), batch_size=8)
    adaptive_batch_evaluation(make(second, 2), range(4), batch_size=8)
    adaptive_batch_evaluation(make(third, 9), range(4), batch_size=1)
    assert [8, 4, 2, 2, 2, 2] == first
    assert [2, 2] == second
    assert [1, 1, 1, 1] == third


@pytest.mark.parametrize("size", [0, -3, 2.5, "8", True, None])
def test_what_is_no_batch_size_is_refused(size):
    """It is a whole number of one or more."""
    with pytest.raises(errors.EvaluationError, match=f"expected a batch size of 1 or more, got {size!r}"):
        adaptive_batch_evaluation(lambda batch: batch, range(8), batch_size=size)


def test_a_remembered_size_must_be_one():
    """A size below 0 would never end; none needs no patience of 0."""
    with pytest.raises(errors.EvaluationError, match=r"expected a size that fits .* of 0 or more, got -5"):
        BatchSize(3, size=-5)
    with pytest.raises(errors.EvaluationError, match="expected a patience of 1 or more, got 0"):
        BatchSize(3, patience=0)
    assert [3, 3, 2] == [BatchSize(3, size).size for size in (0, 5, 2)]


def test_an_async_function_takes_no_batches():
    """Its coroutine is no list of results: that is said, instead of a result that nobody awaited."""

    async def evaluate(batch):
        return batch

    with pytest.raises(errors.EvaluationError, match="got the coroutine of an async function"):
        adaptive_batch_evaluation(evaluate, range(8))


def test_a_size_must_be_one_or_more_and_shares_within_one():
    """Sizes below 1 and impossible shares are refused, as are too few results."""
    with pytest.raises(errors.EvaluationError, match="expected a batch size of 1 or more, got 0"):
        adaptive_batch_evaluation(lambda batch: batch, [1], batch_size=0)
    with pytest.raises(errors.EvaluationError, match=r"expected max_memory above 0 and at most 1, got 1\.5"):
        adaptive_batch_evaluation(lambda batch: batch, [1], 1.5)
    with pytest.raises(errors.EvaluationError, match="expected 2 results, one an item, got 1"):
        adaptive_batch_evaluation(lambda batch: batch[:1], [1, 2])


# -- ceilings --------------------------------------------------------------------------------------


class Shelf(Memory):
    """A memory of which `base` is taken, and `each` by every item of the largest batch since a release."""

    def __init__(self, base, each):
        self.base, self.each, self.most = base, each, 0

    def fn(self, batch):
        self.most = max(self.most, len(batch))
        return batch

    def used(self):
        return self.base + self.each * self.most

    def release(self):
        self.most = 0


@pytest.mark.parametrize(
    ("base", "each", "options", "fits"),
    [
        (0.0, 0.05, {}, 8),  # 16 would be 80 %: the evaluation's own ceiling of 70 %
        (0.5, 0.03, {}, 8),  # 16 would be 98 % in all: max_memory of 80 %
        (0.0, 0.05, {"ceiling": 1.0, "max_memory": 0.5}, 8),
        (0.9, 0.0001, {}, 16),  # the training's: a smaller batch would not help
    ],
)
def test_memory_has_a_ceiling(base, each, options, fits):
    """A batch that takes too much is followed by smaller ones, and none grows into the ceiling again."""
    shelf, size = Shelf(base, each), BatchSize(16)
    adaptive_batch_evaluation(shelf.fn, range(16 * 40), batch_size=size, memory=shelf, **options)
    assert fits == size.size


def test_the_host_says_how_much_it_holds():
    """A process holds some, but not all, of the machine's memory."""
    assert 0.0 < Memory.of_process().used() < 1.0


# -- together --------------------------------------------------------------------------------------


def together(rank, counts, limits):
    """Evaluate different numbers of items, each rank with a limit of its own."""
    fn, size = Function(limits[rank]), BatchSize(16)
    data = range(100 * rank, 100 * rank + counts[rank])
    try:
        found = adaptive_batch_evaluation(fn, data, batch_size=size)
    except Exception as error:  # noqa: BLE001 - its kind is the answer
        return type(error).__name__, str(error)
    return found == [2 * each for each in data], size.size, max(fn.sizes, default=0)


def test_ranks_go_on_with_the_size_that_fits_all(ranks):
    """One rank runs out of memory: all continue with its size; ranks without items take part."""
    assert [(True, 4, 16), (True, 4, 16), (True, 4, 0)] == ranks.run(together, [40, 40, 0], [99, 5, 99])


def test_a_rank_that_cannot_fit_one_item_ends_all(ranks):
    """It raises its own error, the others say which rank it was, and the next call works."""
    text = "expected no failure in the evaluation, got rank 1: OutOfMemoryError: more than fits"
    answers = ranks.run(together, [5, 5, 0], [9, 0, 9])
    assert [("PeerError", text), ("OutOfMemoryError", "more than fits"), ("PeerError", text)] == answers
    assert [(True, 16, 5)] * 3 == ranks.run(together, [5, 5, 5], [9, 9, 9])


def unlike(rank):
    size = BatchSize([16, 8, 32][rank])
    fn = Function(99)
    adaptive_batch_evaluation(fn, range(40), batch_size=size)
    return fn.sizes[0], size.size


def test_ranks_that_ask_for_different_sizes_take_the_least(ranks):
    """They begin, and go on, with the same size."""
    assert [(8, 8)] * 3 == ranks.run(unlike)
