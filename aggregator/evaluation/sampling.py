"""Which samples an evaluation looks at, and with which random numbers: the same on all ranks, every time.

    chosen = select(samples, "sampled", seed=step)        # 10 % of them, at random
    chosen = select(samples, "incremental", seen=ids)     # only those that were never evaluated

Random numbers follow from a seed and the sample's id, not from its place or rank. The generators that
everybody shares are seeded on the main thread only: beside a training they are the training's.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import operator
import random
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.random import MT19937, BitGenerator, mtrand

from eventlog import errors

from .samples import Field, id_of, ids_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    Mode = Literal["full", "sampled", "incremental"]

__all__ = ["number_of", "seed_here", "seed_tasks", "seeded", "seeded_steps", "select", "share_of"]

_SEED_BITS = 63
_log = logging.getLogger("areal_metrics.evaluation")


def select(
    samples: Iterable[Any],
    mode: Mode = "full",
    *,
    fraction: float = 0.1,
    seed: int | str = 0,
    seen: Iterable[str | int] = (),
    sample_id: Field = "id",
) -> list[Any]:
    """Return the samples to evaluate, each id once, in their order.

    full         all of them
    sampled      ceil(fraction · n) of them at random; the same seed is the same choice, in whatever order the
                 samples come: a sample is chosen by its id
    incremental  those whose id is not in `seen`
    """
    by_id = ids_of(samples, sample_id)
    if mode == "full":
        return list(by_id.values())
    if mode == "incremental":
        before = {id_of(each, lambda given: given) for each in seen}
        return [sample for each, sample in by_id.items() if each not in before]
    if mode != "sampled":
        raise errors.EvaluationError(f"expected a mode (full, sampled, incremental), got {mode!r}")
    if not 0 < fraction <= 1:
        raise errors.EvaluationError(f"expected a fraction above 0 and at most 1, got {fraction!r}")
    drawn = sorted(by_id, key=lambda sample: number_of(seed, sample))[: share_of(fraction, len(by_id))]
    chosen = set(drawn)
    return [sample for each, sample in by_id.items() if each in chosen]


def share_of(fraction: float, n: int) -> int:
    """Return ceil(fraction · n) for the fraction as it is written: 7 of 100 for 0.07, not 8."""
    return math.ceil(Fraction(repr(float(fraction))) * n)


def number_of(seed: int | str, sample: str) -> int:
    """Return a sample's own seed: random, but always the same for a seed and the sample's id."""
    text = f"{seed}\n{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> (64 - _SEED_BITS)


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed random, numpy and torch (its devices too, where they run) inside the block; restore them after it.

    So an evaluation draws the same numbers every time, and the training draws what it would have drawn
    without. On any thread but the main one nothing is seeded: it says so once. An EvaluationError for a seed
    that is no integer.
    """
    if seed_here(seed) is None:
        yield
        return
    before, arrays = _States.now(), np.random.get_state()  # noqa: NPY002 - the one that others use
    try:
        seed_all(seed)
        yield
    finally:
        before.restore()
        np.random.set_state(arrays)  # noqa: NPY002


def seed_here(seed: int | None) -> int | None:
    """Return the seed, as an integer; None on any thread but the main one, where nothing is seeded."""
    if seed is None:
        return None
    try:
        number = operator.index(seed)
    except TypeError:
        raise errors.EvaluationError(f"expected a seed as an integer, or None, got {seed!r:.80}") from None
    if threading.current_thread() is threading.main_thread():
        return number
    _say_shared()
    return None


@cache  # once
def _say_shared() -> None:
    _log.warning(
        "random numbers are not seeded: expected the main thread, got another one, where the training may be "
        "drawing from the same generators; say seed=None, and draw from generators of your own: "
        "random.Random(number_of(seed, id))"
    )


class _States(NamedTuple):
    """Where the shared generators but numpy's stand; None for what is not loaded or does not run."""

    python: Any
    tensors: Any
    devices: Any

    @classmethod
    def now(cls) -> _States:
        torch = sys.modules.get("torch")
        on_devices = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            random.getstate(),
            torch.get_rng_state() if torch is not None else None,
            torch.cuda.get_rng_state_all() if torch is not None and on_devices else None,
        )

    def restore(self) -> None:
        random.setstate(self.python)
        torch = sys.modules.get("torch")
        if torch is not None and self.tensors is not None:
            torch.set_rng_state(self.tensors)
            if self.devices is not None:
                torch.cuda.set_rng_state_all(self.devices)


def seed_all(seed: int) -> None:
    """Seed the generators that everybody shares: random's, numpy's and torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


# -- coroutines ------------------------------------------------------------------------------------


class _Numbers:
    """The random numbers of a coroutine: where its generators stand while others run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._tasks = 0
        self._states: _States | None = None
        self._arrays: BitGenerator = MT19937(0)  # changed for the shared one: its state is slow to copy
        self._shared: BitGenerator = self._arrays

    def resume(self) -> None:
        """Go on with these numbers."""
        self._shared = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._arrays)
        if self._states is None:
            seed_all(self.seed)
        else:
            self._states.restore()

    def suspend(self) -> None:
        """Remember how far they were drawn; what random and torch are left with is nobody's."""
        self._states = _States.now()
        mtrand.set_bit_generator(self._shared)

    def of_task(self) -> _Numbers:
        """Return the numbers of the next task that is started: its own, whenever it runs."""
        self._tasks += 1
        return _Numbers(number_of(self.seed, f"task {self._tasks}"))


_running: Final[ContextVar[_Numbers | None]] = ContextVar("areal_metrics_random_numbers", default=None)


class _Seeded(Coroutine[Any, Any, Any]):
    """A coroutine whose every step finds its own numbers in place."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], numbers: _Numbers) -> None:
        self._coroutine, self._numbers = coroutine, numbers

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._step(self._coroutine.close)

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        before = _running.set(self._numbers)
        self._numbers.resume()
        try:
            return step(*args)
        finally:
            self._numbers.suspend()
            _running.reset(before)

    def __await__(self) -> _Seeded:
        return self

    def __iter__(self) -> _Seeded:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:  # what shows or inspects tasks looks at the coroutine itself
        return getattr(self._coroutine, name)


def seeded_steps(coroutine: Coroutine[Any, Any, Any], seed: int) -> Coroutine[Any, Any, Any]:
    """Return a coroutine that draws the same numbers for a seed, whichever others run in between.

    Tasks that it starts have numbers of their own, by the order in which they are started, where the loop is
    one of `seed_tasks`. Threads do not: what they draw is anybody's.
    """
    return _Seeded(coroutine, _Numbers(seed))


def seed_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Give every task that a coroutine of `seeded_steps` starts in this loop random numbers of its own."""

    def task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        if (parent := _running.get()) is not None:
            coroutine = _Seeded(coroutine, parent.of_task())
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(task)
