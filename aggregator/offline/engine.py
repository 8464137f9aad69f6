"""Runs pure functions over many tasks: in this process, in a pool of processes, or on a Ray cluster.

A task may run more than once and anywhere the run directory is: what it writes it writes whole, under a name
that follows from what is asked. Results come in the order of the tasks, whatever ran when.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from eventlog import errors, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self


class _Worker(SpawnProcess):
    """A process that does not run the caller's script, which may stand without a `__main__` guard."""

    def start(self) -> None:
        """Start it as if the script had no file: what it works on is all ours, and found by import."""
        main = sys.modules["__main__"]
        with _STARTING:
            known = {name: getattr(main, name, None) for name in ("__file__", "__spec__")}
            hidden = {name: value for name, value in known.items() if value is not None}
            try:
                for name in hidden:
                    setattr(main, name, None)
                super().start()
            finally:
                for name, value in hidden.items():
                    setattr(main, name, value)


class _Spawning(SpawnContext):
    """Starts workers anew, not by a fork: it copies what threads of Arrow and DuckDB were holding."""

    Process = _Worker


_STARTING: Final = Lock()
Name = Literal["local", "ray"]
Task = TypeVar("Task")
Result = TypeVar("Result")
ENGINES: Final = ("local", "ray")
_TRIES: Final = 3  # after the first: a worker or its node may die
_AHEAD: Final = 4  # tasks that wait on a cluster for each processor


def _nothing(_done: int, _all: int) -> None:
    pass


class Engine:
    """Where tasks run: a context manager that starts with the first of them and keeps its workers.

    "local": `workers` processes (as many as there are processors), one means this process. "ray": the cluster
    of RAY_ADDRESS, the one that runs here, or one of this machine alone; `workers`: how many tasks at a time.
    """

    def __init__(self, name: Name = "local", workers: int | None = None) -> None:
        """QueryError for an engine that there is not; DependencyError where Ray is not installed."""
        if name not in ENGINES:
            raise errors.QueryError(f"expected engine to be local or ray, got {name!r}")
        _check(workers)
        self._workers = None if workers is None else int(workers)
        self._pool: ProcessPoolExecutor | None = None
        self._ray: Any = _ray() if name == "ray" else None
        self._ours = False  # whether Ray was started here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        if self._ours:
            self._ray.shutdown()
            self._ours = False

    def each(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        done: Callable[[int, int], object] = _nothing,
    ) -> list[Result]:
        """Return the function of every task, in the order of the tasks; raises what a task raises.

        What a worker that died was at is done again. `done` is told how many of how many are done.
        """
        results: dict[int, Result] = {}
        workers = min(self._workers or os.cpu_count() or 1, len(tasks))
        if self._ray is not None:
            self._on_ray(function, tasks, results, done)
        elif workers > 1 or (tasks and self._pool is not None):
            self._in_processes(function, tasks, results, done)
        else:
            for i, task in enumerate(tasks):
                results[i] = function(task)
                done(len(results), len(tasks))
        return [results[i] for i in range(len(tasks))]

    def _in_processes(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        results: dict[int, Result],
        done: Callable[[int, int], object],
    ) -> None:
        for left in range(_TRIES, -1, -1):
            if self._pool is None:
                self._pool = ProcessPoolExecutor(self._workers or os.cpu_count(), _Spawning())
            try:
                rest = [i for i in range(len(tasks)) if i not in results]
                waiting = {self._pool.submit(function, tasks[i]): i for i in rest}
                for future in as_completed(waiting):
                    results[waiting[future]] = future.result()
                    done(len(results), len(tasks))
            except BrokenProcessPool:
                self.close()
                if not left:
                    raise
            else:
                return

    def _on_ray(
        self,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
        results: dict[int, Result],
        done: Callable[[int, int], object],
    ) -> None:
        ray = self._ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False)
            self._ours = True
        # A worker or node that dies is Ray's to replace; an OSError is a file system away for a moment.
        remote = ray.remote(function).options(
            num_cpus=1, max_retries=_TRIES, retry_exceptions=[OSError], scheduling_strategy="SPREAD"
        )
        most = self._workers or _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting: dict[Any, int] = {}
        rest = iter(enumerate(tasks))
        while len(results) < len(tasks):
            while len(waiting) < most and (following := next(rest, None)):
                waiting[remote.remote(following[1])] = following[0]
            (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
            results[waiting.pop(ready)] = ray.get(ready)
            done(len(results), len(tasks))


def _check(workers: Any) -> None:
    if workers is None:
        return
    if not is_whole(workers) or workers < 1:
        raise errors.QueryError(f"expected at least one worker, got {workers!r}")


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise errors.DependencyError(
            "expected Ray for the engine ray, got no package of that name; install areal-metrics[ray]"
        ) from error
    return ray
