"""Evaluating together: each sample once, on one rank, and the same results on all of them.

    def score(sample):
        return {"accuracy": answer(sample["prompt"]) == sample["answer"]}

    results = evaluate_distributed(score, samples, group=dp_group)
    log_evaluation_results(compute_aggregated_metrics(results))

Nothing is repeated to make ranks equal: a rank may have any number of samples, none too. Whatever fails on a
rank, or is missing at the end, is an error on all of them: no score is made of half the answers.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from eventlog import as_step, errors, now_us, workflow_context

from .. import collective
from ..progress import progress_bar
from .batching import BatchSize, adaptive_batch_evaluation
from .failure import Failure, agreed, ended, text_of
from .results import SampleResult, as_result, record_samples
from .samples import Field, check_unambiguous, deal, ids_of, is_integer, tags_of
from .sampling import number_of, seed_all, seed_here, seed_tasks, seeded, seeded_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

    Sample = tuple[str, Any]  # with its id

__all__ = ["evaluate_distributed"]

CONCURRENCY: Final = 64
_MOST_NAMED: Final = 5


class _Share(NamedTuple):
    """What this rank evaluates, and the results of all of it."""

    samples: dict[str, Any]
    tags: dict[str, dict[str, Any]]
    rank: int

    def result(self, sample: str, found: Any) -> SampleResult:
        return as_result(found, sample, self.tags[sample], self.rank)


def evaluate_distributed(
    fn: Callable[[Any], Any],
    samples: Iterable[Any],
    group: ProcessGroup | None = None,
    *,
    sample_id: Field = "id",
    tags: Field = "tags",
    expected: int | None = None,
    batch_size: int | BatchSize | None = None,
    max_memory: float = 0.8,
    concurrency: int = CONCURRENCY,
    seed: int | None = 0,
    step: int | None = None,
    record: bool = True,
    cleanup: Callable[[], None] | None = None,
) -> list[SampleResult]:
    """Return the results of all samples, sorted by id, on every rank of the group; all of them must call it.

    `fn(sample)` returns a number, or numbers and texts by name; None among them is absent. It may be a
    coroutine function: then at most `concurrency` of them run at a time on each rank. With `batch_size` it is
    a plain function that takes a list of samples and returns a list, called through
    `adaptive_batch_evaluation`. It runs as an evaluation: `stat_scope()` is "eval-rollout". Without a group
    the default one evaluates, or, without torch.distributed, this process.

    `samples` is what this rank holds: all of them, or its own part. An id that several ranks hold, or that
    one holds twice, is evaluated once. `sample_id` and `tags` say where a sample has them; the integer 1 and
    the text "1" are not told apart, and refused. `expected` is how many different ids there must be on all
    ranks together. All ranks give the same `expected`, `seed`, `step` and `record`, and all batches or none.

    `seed` seeds everybody's generators (random's, numpy's, torch's) before each sample by its id, so that
    results depend neither on the world size nor on the order, and restores them at the end; None leaves them
    alone. Coroutines draw as if each ran alone, and so do the tasks they start; threads they start do not:
    those should make generators of their own, of `number_of(seed, id)`. So should `fn` where this is called
    on another thread than the main one: there nothing is seeded, which is said once. Batches are seeded by
    their first sample: there random numbers depend on the world size.
    `record` writes every result, with id and tags, into the `eval-rollout` tracker on the rank that evaluated
    it, as of `step` where that is given: the means in its next export are then committed there, whatever else
    is exported with them. `cleanup` is called on every rank at the end, come what may.

    Raises EvaluationError for samples without an id, DistributedEvaluationError when ranks give different
    arguments, or when ids or results are missing, naming both numbers; an error of `fn` is raised as it is on
    its rank, elsewhere as a PeerError.
    """
    acting, members, at = collective.joined(group)
    arguments = {
        "expected": expected,
        "batch_size": "a size" if batch_size is not None else None,
        "seed": seed,
        "step": step,
        "record": record,
    }
    began = now_us()
    with _cleaned_up(cleanup, acting, members):
        wrong = _refused(fn, batched=batch_size is not None)
        share = _shared(samples, sample_id, tags, arguments, wrong, acting, members, at)
        seed = seed_here(seed)
        with _evaluating(), ExitStack() as held:
            tell, wrong = _entered(held, seed, len(share.samples), shown=at == 0)
            if batch_size is not None:
                own = _batches(fn, share, batch_size, max_memory, seed, acting, tell, wrong)
            else:
                own = _one_by_one(fn, share, concurrency, seed, tell, wrong)
            results = _gathered(own, share, acting, members)
        if record:
            names = sorted({name for result in results for name in result.values})
            mine = [each for each in results if each.rank == share.rank]
            with agreed(acting, members):
                record_samples(mine, names, step=step, since=began)
    return results


@contextmanager
def _cleaned_up(
    cleanup: Callable[[], None] | None, group: ProcessGroup | None, members: Sequence[int]
) -> Generator[None]:
    """Clean up at the end. An error of the clean-up never hides the evaluation's own: it is its context."""
    try:
        yield
    except BaseException as error:
        if cleanup is not None:
            try:
                ended(cleanup())
            except Exception as second:  # noqa: BLE001 - told with the first
                error.__context__ = second
                error.add_note(f"cleaning up failed, too: {text_of(second)}")
        raise
    with agreed(group, members):
        if cleanup is not None:
            ended(cleanup())


def _entered(
    held: ExitStack, seed: int | None, total: int, *, shown: bool
) -> tuple[Callable[[int], object], BaseException | None]:
    """Seed the generators until the end, and show how far it is; return what to tell, and what went wrong."""
    failure = Failure()
    with failure.kept():
        if seed is not None:
            held.enter_context(seeded(seed))
        bar = held.enter_context(progress_bar("evaluation", total, shown=shown))
        return lambda more: bar(more=more), None
    return str, failure.error


@contextmanager
def _evaluating() -> Generator[None]:
    """Make what is recorded meanwhile part of the evaluation, not of the training's rollouts."""
    before = workflow_context.get()
    workflow_context.set(workflow_context.WorkflowContext(is_eval=True))
    try:
        yield
    finally:
        workflow_context.set(before)


# -- who evaluates what ----------------------------------------------------------------------------


class _Told(NamedTuple):
    """What ranks tell each other before anything is evaluated."""

    ids: list[str]
    integers: list[str]  # those of the ids that are no texts
    arguments: Mapping[str, Any]
    error: str | None


def _refused(fn: Callable[..., Any], *, batched: bool) -> Exception | None:
    """Return what is wrong with a function, to be told to the peers first."""
    if batched and _is_async(fn):
        return errors.EvaluationError(
            f"expected a plain function, which takes a list, with batch_size, "
            f"got a coroutine function: {_name(fn)}"
        )
    return None


def _shared(
    samples: Iterable[Any],
    sample_id: Field,
    tags: Field,
    arguments: Mapping[str, Any],
    error: BaseException | None,
    group: ProcessGroup | None,
    members: Sequence[int],
    at: int,
) -> _Share:
    held: dict[str, Any] = {}
    named: dict[str, dict[str, Any]] = {}
    integers: list[str] = []
    failure = Failure(error)
    with failure.kept():
        held = ids_of(samples, sample_id) if error is None else {}
        named = {each: tags_of(sample, tags) for each, sample in held.items()}
        integers = [each for each, sample in held.items() if is_integer(sample, sample_id)]
        if arguments["step"] is not None:
            as_step(arguments["step"])
    mine = _Told(list(held), integers, arguments, failure.text)
    told: list[_Told] = collective.tell(mine, group)
    failure.raise_together([each.error for each in told], members)
    _check_agreed(told, members)
    dealt = deal([each.ids for each in told])
    count, expected = sum(map(len, dealt)), arguments["expected"]
    if expected is not None and count != expected:
        raise errors.DistributedEvaluationError(
            f"expected {expected} samples with different ids on {len(members)} ranks, got {count}"
        )
    return _Share({each: held[each] for each in dealt[at]}, named, members[at])


def _check_agreed(told: Sequence[_Told], members: Sequence[int]) -> None:
    """Raise, alike on all ranks, where arguments differ, or an id is an integer here and a text there."""
    for name, first in told[0].arguments.items():
        for rank, each in zip(members, told, strict=True):
            if each.arguments[name] != first:
                raise errors.DistributedEvaluationError(
                    f"expected the same {name} on all ranks, got {first!r} on rank {members[0]} and "
                    f"{each.arguments[name]!r} on rank {rank}"
                )
    integers = {each for one in told for each in one.integers}
    check_unambiguous(integers, {each for one in told for each in set(one.ids).difference(one.integers)})


def _gathered(
    own: tuple[list[SampleResult], BaseException | None],
    share: _Share,
    group: ProcessGroup | None,
    members: Sequence[int],
) -> list[SampleResult]:
    """Return the results of all ranks; raise on all of them where one failed or a result is missing."""
    found, failure = own[0], Failure(own[1])
    told = collective.tell((found, list(share.samples), failure.text), group)
    failure.raise_together([text for *_, text in told], members)
    wanted = {each for _, ids, _ in told for each in ids}
    results = {result.id: result for part, *_ in told for result in part}
    if missing := sorted(wanted - set(results)):
        named = ", ".join(map(repr, missing[:_MOST_NAMED]))
        raise errors.DistributedEvaluationError(
            f"expected results of {len(wanted)} samples, got {len(results)}; missing: {named}"
        )
    return [results[each] for each in sorted(results)]


# -- evaluating ------------------------------------------------------------------------------------


def _one_by_one(
    fn: Callable[[Any], Any],
    share: _Share,
    concurrency: int,
    seed: int | None,
    tell: Callable[[int], object],
    wrong: BaseException | None,
) -> tuple[list[SampleResult], BaseException | None]:
    """Evaluate this rank's samples; return what was found, and what stopped it."""
    found: list[SampleResult] = []
    failure = Failure(wrong)
    if wrong is not None:
        return found, wrong
    with failure.kept():
        if _is_async(fn):
            _run(_concurrently(fn, share, concurrency, seed, found, tell))
            return found, None
        for each, sample in share.samples.items():
            if seed is not None:
                seed_all(number_of(seed, each))
            with _about(each):
                found.append(share.result(each, ended(fn(sample))))
            tell(1)
    return found, failure.error


@contextmanager
def _about(sample: str) -> Generator[None]:
    """Say in an error which sample it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while evaluating sample {sample!r}")
        raise


def _is_async(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


def _run(coroutine: Any) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(coroutine)
        return
    coroutine.close()
    raise errors.EvaluationError(
        "expected a thread without a running event loop, got one with: "
        "await asyncio.to_thread(evaluate_distributed, …)"
    )


async def _concurrently(
    fn: Callable[[Any], Any],
    share: _Share,
    concurrency: int,
    seed: int | None,
    found: list[SampleResult],
    tell: Callable[[int], object],
) -> None:
    """Evaluate with at most `concurrency` coroutines at a time; the first error ends the others."""
    if concurrency < 1:
        raise errors.EvaluationError(f"expected a concurrency of 1 or more, got {concurrency}")
    waiting = iter(share.samples.items())
    seed_tasks(asyncio.get_running_loop())

    async def one(sample: Any) -> Any:
        try:
            return await fn(sample)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # by us, for another one failed
            raise errors.EvaluationError(f"expected a result, got cancelled: {error}") from error

    async def work(waiting: Iterator[Sample]) -> None:
        for each, sample in waiting:
            with _about(each):
                own = one(sample) if seed is None else seeded_steps(one(sample), number_of(seed, each))
                found.append(share.result(each, await own))
            tell(1)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(share.samples))):
                tasks.create_task(work(waiting))
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


def _batches(
    fn: Callable[[Any], Any],
    share: _Share,
    batch_size: int | BatchSize,
    max_memory: float,
    seed: int | None,
    group: ProcessGroup | None,
    tell: Callable[[int], object],
    wrong: BaseException | None,
) -> tuple[list[SampleResult], BaseException | None]:
    """Evaluate this rank's samples in batches; errors are agreed on already, and raised."""

    def items() -> Iterator[Sample]:
        if wrong is not None:
            raise wrong
        yield from share.samples.items()

    def evaluate(batch: list[Sample]) -> list[SampleResult]:
        if seed is not None:
            seed_all(number_of(seed, batch[0][0]))
        found: Sequence[Any] | Mapping[str, Any] = fn([sample for _, sample in batch])
        if len(found) != len(batch):
            raise errors.EvaluationError(f"expected {len(batch)} results, one a sample, got {len(found)}")
        return [share.result(each, one) for (each, _), one in zip(batch, found, strict=True)]

    evaluate.__module__, evaluate.__qualname__ = getattr(fn, "__module__", ""), _name(fn)
    done = adaptive_batch_evaluation(
        evaluate,
        items(),
        max_memory,
        batch_size=batch_size,
        group=group,
        on_batch=tell,
    )
    return done, None


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)
