"""Real ranks for tests: processes joined in a gloo world, which run functions of the test's module.

    def sums(rank, start):                      # at module level; its first argument is the rank
        ...

    results = run(sums, 10, ranks=2)            # spawn, run once, end
    with Ranks(2) as ranks:                     # the processes stay for several calls
        results = ranks.run(sums, 10)

Results come in rank order and must pickle. An error of a rank is raised here, with its traceback as a note;
a rank that dies or does not answer within `timeout` seconds is a RankError, and the end of all ranks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import ModuleType

START_SECONDS = 60.0  # importing torch on a busy machine
COLLECTIVE_SECONDS = 30.0  # how long gloo waits for a peer


class RankError(RuntimeError):
    """A rank died, hung, or raised what does not pickle."""


class Ranks:
    """Processes with ranks 0 … n-1 of one gloo world."""

    def __init__(
        self, ranks: int, *, timeout: float = 60.0, collective_seconds: float = COLLECTIVE_SECONDS
    ) -> None:
        self.timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-")
        store = f"file://{Path(self._folder.name) / 'store'}"
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(ranks)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, ranks, store, theirs, collective_seconds), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()
        self._answers("the start", START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call `function(rank, *args)` on all ranks at once; return what each returned."""
        self.start(function, *args)
        return self._answers(function.__qualname__, timeout or self.timeout)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin to call `function(rank, *args)` on all ranks; `result` fetches what one returns."""
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__qualname__, args))

    def result(self, rank: int, timeout: float | None = None) -> Any:
        """Return what one rank returned for the call that was started."""
        deadline = time.monotonic() + (timeout or self.timeout)
        return _opened(self._answer(rank, "the call", deadline))

    def _answers(self, what: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        return [_opened(answer) for answer in [self._answer(r, what, deadline) for r in range(len(self._pipes))]]

    def _answer(self, rank: int, what: str, deadline: float) -> tuple[Any, BaseException | None, str]:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pipe.recv()
            text = f"rank {rank}: expected an answer to {what} in time, got none"
        except (EOFError, OSError):
            text = f"rank {rank}: expected an answer to {what}, got its end"
        self.kill()
        raise RankError(text)

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL one rank, or all."""
        for process in self._processes if rank is None else [self._processes[rank]]:
            process.kill()
            process.join()

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._folder.cleanup()


def run(function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 60.0) -> list[Any]:
    """Call `function(rank, *args)` in new processes of one world; return the results in rank order."""
    with Ranks(ranks, timeout=timeout) as world:
        return world.run(function, *args)


def _opened(answer: tuple[Any, BaseException | None, str]) -> Any:
    result, error, text = answer
    if error is not None:
        error.add_note(text)
        raise error
    return result


def _serve(rank: int, ranks: int, store: str, pipe: Connection, collective_seconds: float) -> None:
    """Be one rank: join the world, then run what comes through the pipe until it says None."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = timedelta(seconds=collective_seconds)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=wait)
    pipe.send((None, None, ""))
    while (job := pipe.recv()) is not None:
        pipe.send(_attempt(rank, *job))
    if dist.is_initialized():
        dist.destroy_process_group()


def _attempt(rank: int, path: str, name: str, args: tuple[Any, ...]) -> tuple[Any, BaseException | None, str]:
    try:
        return getattr(_module(path), name)(rank, *args), None, ""
    except BaseException as exc:  # noqa: BLE001 - the parent raises it
        text = f"on rank {rank}:\n{traceback.format_exc()}"
        try:
            pickle.loads(pickle.dumps(exc))
        except Exception:  # noqa: BLE001 - some errors do not pickle
            exc = RankError(f"{type(exc).__name__}: {exc}")
        return None, exc, text


def _module(path: str) -> ModuleType:
    """Load the test module by path: a name is no help under pytest's importlib mode."""
    name = f"gloo_job_{abs(hash(path))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
