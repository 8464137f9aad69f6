"""Runs pure functions over many tasks: in this process, in a pool of processes, or on a Ray cluster.

A task may run more than once and anywhere the run directory is: what it writes it writes whole, under a name
that follows from what is asked. Results come in the order of the tasks, whatever ran when.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from eventlog import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Engine = Literal["local", "ray"]

Task = TypeVar("Task")
Result = TypeVar("Result")
ENGINES: Final = ("local", "ray")
_TRIES: Final = 3  # after the first: a worker or its node may die
_AHEAD: Final = 4  # tasks that wait on a cluster for each that runs


def each(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    engine: Engine = "local",
    workers: int | None = None,
    done: Callable[[int, int], object] = lambda _done, _all: None,
) -> list[Result]:
    """Return the function of every task, in the order of the tasks; raises what a task raises.

    `local`: `workers` processes (as many as there are processors), one means this process. `ray`: as many
    tasks at a time as the cluster has processors, or `workers`; DependencyError without Ray. What a worker
    that died was at is done again. `done` is told how many of how many are done.
    """
    if engine not in ENGINES:
        raise errors.QueryError(f"expected engine to be local or ray, got {engine!r}")
    if workers is not None and workers < 1:
        raise errors.QueryError(f"expected at least one worker, got {workers}")
    if engine == "ray":
        return _on_ray(function, tasks, workers, done)
    workers = min(workers or os.cpu_count() or 1, len(tasks))
    if workers > 1:
        return _in_processes(function, tasks, workers, done)
    results: list[Result] = []
    for task in tasks:
        results.append(function(task))
        done(len(results), len(tasks))
    return results


def _in_processes(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    workers: int,
    done: Callable[[int, int], object],
) -> list[Result]:
    results: dict[int, Result] = {}
    for left in range(_TRIES, -1, -1):
        try:
            # Spawned, not forked: a fork copies what threads of Arrow and DuckDB were holding.
            with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
                waiting = {pool.submit(function, task): i for i, task in enumerate(tasks) if i not in results}
                for future in as_completed(waiting):
                    results[waiting[future]] = future.result()
                    done(len(results), len(tasks))
            break
        except BrokenProcessPool:
            if not left:
                raise
    return [results[i] for i in range(len(tasks))]


def _on_ray(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    workers: int | None,
    done: Callable[[int, int], object],
) -> list[Result]:
    try:
        import ray
    except ImportError as error:
        raise errors.DependencyError(
            "expected Ray for the engine ray, got no package of that name; install areal-metrics[ray]"
        ) from error
    ours = not ray.is_initialized()
    if ours:
        ray.init(log_to_driver=False, **({} if os.environ.get("RAY_ADDRESS") else _ALONE))
    try:
        return _gathered(ray, function, tasks, workers, done)
    finally:
        if ours:
            ray.shutdown()


_ALONE: Final[dict[str, Any]] = {"include_dashboard": False}  # a cluster of this machine, for this question


def _gathered(
    ray: Any,
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    workers: int | None,
    done: Callable[[int, int], object],
) -> list[Result]:
    # A worker or node that dies is Ray's to replace; an OSError is a file system that was away for a moment.
    remote = ray.remote(function).options(num_cpus=1, max_retries=_TRIES, retry_exceptions=[OSError])
    most = workers or _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
    results: dict[int, Result] = {}
    waiting: dict[Any, int] = {}
    rest = iter(enumerate(tasks))
    while len(results) < len(tasks):
        while len(waiting) < most and (following := next(rest, None)):
            waiting[remote.remote(following[1])] = following[0]
        (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
        results[waiting.pop(ready)] = ray.get(ready)
        done(len(results), len(tasks))
    return [results[i] for i in range(len(tasks))]
