"""Which samples an evaluation looks at, and with which random numbers: the same on all ranks, every time.

chosen = select(samples, "sampled", seed=step)        # 10 % of them, at random
chosen = select(samples, "incremental", seen=ids)     # only those that were never evaluated
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eventlog import errors

from .samples import Field, ids_of

if TYPE_CHECKING:
    from collections.abc import Container, Generator, Iterable

    Mode = Literal["full", "sampled", "incremental"]

__all__ = ["number_of", "seeded", "select"]

_SEED_BITS = 63


def select(
    samples: Iterable[Any],
    mode: Mode = "full",
    *,
    fraction: float = 0.1,
    seed: int | str = 0,
    seen: Container[str] = (),
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
        return [sample for each, sample in by_id.items() if each not in seen]
    if mode != "sampled":
        raise errors.EvaluationError(f"expected a mode (full, sampled, incremental), got {mode!r}")
    if not 0 < fraction <= 1:
        raise errors.EvaluationError(f"expected a fraction above 0 and at most 1, got {fraction!r}")
    drawn = sorted(by_id, key=lambda sample: number_of(seed, sample))[: math.ceil(fraction * len(by_id))]
    chosen = set(drawn)
    return [sample for each, sample in by_id.items() if each in chosen]


def number_of(seed: int | str, sample: str) -> int:
    """Return a sample's own seed: random, but always the same for a seed and the sample's id."""
    text = f"{seed}\n{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> (64 - _SEED_BITS)


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed random, numpy and torch (its devices too, where they run) inside the block; restore them after it.

    So an evaluation draws the same numbers every time, and the training draws what it would have drawn
    without.
    """
    torch = sys.modules.get("torch")
    on_devices = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - the one that others use
    tensors = torch.get_rng_state() if torch is not None else None
    devices = torch.cuda.get_rng_state_all() if torch is not None and on_devices else None
    try:
        seed_all(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(tensors)
            if devices is not None:
                torch.cuda.set_rng_state_all(devices)


def seed_all(seed: int) -> None:
    """Seed the generators that everybody shares: random's, numpy's and torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
