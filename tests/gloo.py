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
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import tests.patience  # noqa: F401 - on the ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

START_SECONDS = 100.0  # importing torch on a busy machine
COLLECTIVE_SECONDS = 60.0  # how long gloo waits for a peer


class RankError(RuntimeError):
    """A rank died, hung, or answered with what the test's process cannot read."""


class Answer(NamedTuple):
    """What a call on a rank came to: (returned, raised), pickled, and the traceback as text."""

    pickled: bytes
    text: str

    @classmethod
    def of(cls, came_to: tuple[Any, BaseException | None], text: str = "") -> Answer:
        """Pack it; what does not pickle is told in the text."""
        try:
            return cls(pickle.dumps(came_to), text)
        except Exception as exc:  # noqa: BLE001 - the test's process says so
            return cls(b"", f"{came_to!r}: {exc!r}\n{text}")

    def check(self) -> None:
        """Raise what was raised."""
        try:
            _, raised = pickle.loads(self.pickled)
        except Exception as exc:
            raise RankError(f"expected an answer that pickles, got {exc!r}\n{self.text}") from exc
        if raised is not None:
            raised.add_note(self.text)
            raise raised

    def returned(self) -> Any:
        """Return what was returned."""
        return pickle.loads(self.pickled)[0]


class Ranks:
    """Processes with ranks 0 … n-1 of one gloo world."""

    def __init__(
        self, ranks: int, *, timeout: float = 100.0, collective_seconds: float = COLLECTIVE_SECONDS
    ) -> None:
        self.timeout = timeout
        self._loaded: set[str] = set()
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
        path = function.__code__.co_filename
        if path not in self._loaded:  # on all of them, before one waits for another in a collective
            self._loaded.add(path)
            self._send(path, "", ())
            self._answers(f"the import of {path}", START_SECONDS)
        self._send(path, function.__qualname__, args)

    def _send(self, *job: Any) -> None:
        for pipe in self._pipes:
            pipe.send(job)

    def result(self, rank: int, timeout: float | None = None) -> Any:
        """Return what one rank returned for the call that was started."""
        return self._answers("the call", timeout or self.timeout, [rank])[0]

    def _answers(self, what: str, timeout: float, ranks: Sequence[int] | None = None) -> list[Any]:
        """Wait for the ranks; raise the error that came first: the others often follow from it."""
        deadline = time.monotonic() + timeout
        waiting = {self._pipes[rank]: rank for rank in ranks or range(len(self._pipes))}
        answers: dict[int, Answer] = {}
        while waiting:
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            for pipe in ready or list(waiting):
                rank = waiting.pop(pipe)  # pyright: ignore[reportArgumentType]
                answers[rank] = self._answer(rank, what, late=not ready)
        for answer in answers.values():
            answer.check()
        return [answers[rank].returned() for rank in sorted(answers)]

    def _answer(self, rank: int, what: str, *, late: bool) -> Answer:
        if not late:
            with contextlib.suppress(EOFError, OSError):
                return self._pipes[rank].recv()
        self.kill()
        how = "in time, got none" if late else "got the end of the process"
        return Answer.of((None, RankError(f"rank {rank}: expected an answer to {what}, {how}")))

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


def run(function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 100.0) -> list[Any]:
    """Call `function(rank, *args)` in new processes of one world; return the results in rank order."""
    with Ranks(ranks, timeout=timeout) as world:
        return world.run(function, *args)


def _serve(rank: int, ranks: int, store: str, pipe: connection.Connection, collective_seconds: float) -> None:
    """Be one rank: join the world, then run what comes through the pipe until it says None."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = timedelta(seconds=collective_seconds)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=wait)
    pipe.send(Answer.of((None, None)))
    while (job := pipe.recv()) is not None:
        pipe.send(_attempt(rank, *job))
    if dist.is_initialized():
        dist.destroy_process_group()


def _attempt(rank: int, path: str, name: str, args: tuple[Any, ...]) -> Answer:
    try:
        module = _module(path)
        return Answer.of((getattr(module, name)(rank, *args) if name else None, None))
    except BaseException as exc:  # noqa: BLE001 - the test's process raises it
        return Answer.of((None, exc), f"on rank {rank}:\n{traceback.format_exc()}")


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
