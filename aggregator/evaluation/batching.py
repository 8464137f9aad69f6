"""Evaluating in batches that fit: halved when memory runs out, by all ranks alike, and grown again.

A rank that runs out of memory tells the others at the end of the batch; all go on with the same, smaller
size. What was finished is kept. Only running out of memory is treated so (torch.OutOfMemoryError,
MemoryError, and torch's allocator on the CPU); any other error passes through at once, on all ranks. The
training's own batch size is nobody's business here.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from eventlog import errors

from .. import collective
from .failure import Failure, ended, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed import ProcessGroup

    T = TypeVar("T")
    R = TypeVar("R")

__all__ = ["CEILING", "BatchSize", "Memory", "adaptive_batch_evaluation", "is_out_of_memory"]

CEILING: Final = 0.7  # share of the memory that an evaluation takes at most, by default
DEFAULT_SIZE: Final = 32
GROW_AFTER: Final = 8  # batches that went well before a size that was reduced is doubled again
_MATTERS: Final = 0.01  # an evaluation that takes less of the memory frees none by smaller batches


@dataclass(slots=True)
class BatchSize:
    """A batch size that remembers: `most` is what was asked for, `size` what fits, as far as is known."""

    most: int
    size: int = 0
    patience: int = GROW_AFTER  # doubles whenever growing was a mistake
    well: int = 0  # batches that went well at this size
    grown: bool = False  # this size was reached by growing

    def __post_init__(self) -> None:
        self.most = _whole("a batch size", self.most, 1)
        self.size = min(_whole("a size that fits (0: not known)", self.size, 0) or self.most, self.most)
        self.patience = _whole("a patience", self.patience, 1)

    def agree(self, group: ProcessGroup | None) -> None:
        """Take over the most cautious state of the group's ranks: from now on all of them move alike."""
        mine = (-self.most, -self.size, self.patience, -self.well, self.grown)
        most, size, self.patience, well, grown = collective.greatest(mine, group)
        self.most, self.size, self.well, self.grown = -most, -size, -well, bool(grown)

    def shrink(self, size: int) -> None:
        """Go on with less."""
        if self.grown:
            self.patience *= 2
        self.size, self.well, self.grown = max(1, size), 0, False

    def went_well(self, *, room: bool) -> None:
        """Count a batch; after enough of them, and where there is room, double the size."""
        self.well += 1
        if self.well >= self.patience and room and self.size < self.most:
            self.size, self.well, self.grown = min(self.most, 2 * self.size), 0, True


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise errors.EvaluationError(f"expected {name} of {least} or more, got {value!r}")
    return number


_remembered: dict[str, BatchSize] = {}


def adaptive_batch_evaluation(
    fn: Callable[[list[T]], Sequence[R]],
    data: Iterable[T],
    max_memory: float = 0.8,
    *,
    batch_size: int | BatchSize = DEFAULT_SIZE,
    ceiling: float = CEILING,
    group: ProcessGroup | None = None,
    memory: Memory | None = None,
    on_batch: Callable[[int], object] | None = None,
) -> list[R]:
    """Return what `fn` returns for the items of `data`, in their order; `fn` takes a list and returns one.

    Out of memory, the batch is halved, down to 1; then the original error is raised (there, and a PeerError
    on the other ranks). It is halved too when more than `max_memory` of the memory is in use in all, or the
    evaluation itself takes more than `ceiling` of it; after some batches that went well it grows again, up to
    `batch_size`. The size is remembered for the next call with the same function, or in a BatchSize.
    `on_batch` is told how many items more are done.

    All ranks of `group` (None: the default group, where torch.distributed runs) call it together, with any
    number of items each, none too; one tiny collective a batch. A `fn` that communicates itself may leave its
    peers waiting when it runs out of memory: that cannot be had.
    """
    acting, members, _ = collective.joined(group)
    try:
        limits = _Limits(max_memory, ceiling, memory or Memory.of_process())
        sizes, work = _sizes(fn, batch_size), _Work(fn, list(data), limits, on_batch)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        collective.agree(True, acting)
        collective.tell(text_of(error), acting)
        raise
    if collective.agree(False, acting):
        Failure().raise_together(collective.tell(None, acting), members)
    sizes.agree(acting)
    while True:
        mine = work.step(sizes.size)
        failed, fits, left, over, cramped = collective.greatest(mine, acting)
        if failed:
            failure = Failure(work.error)
            failure.raise_together(collective.tell(failure.text, acting), members)
        if -fits < sizes.size:
            sizes.shrink(-fits)
        elif over and sizes.size > 1:
            sizes.shrink(sizes.size // 2)
        else:
            sizes.went_well(room=not cramped)
        if not left:
            return work.done


def _sizes(fn: Callable[..., Any], batch_size: int | BatchSize) -> BatchSize:
    if isinstance(batch_size, BatchSize):
        return batch_size
    name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
    known = _remembered.get(name)
    reduced = known is not None and known.size < known.most
    _remembered[name] = replace(known, most=batch_size) if known and reduced else BatchSize(batch_size)
    return _remembered[name]


class _Work:
    """One rank's items: those that are done, those still to be done, and what went wrong."""

    def __init__(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        items: list[Any],
        limits: _Limits,
        on_batch: Callable[[int], object] | None,
    ) -> None:
        self.done: list[Any] = []
        self.error: BaseException | None = None
        self._out_of_memory: Exception | None = None
        self._fn, self._items, self._limits, self._on_batch = fn, items, limits, on_batch

    def step(self, size: int) -> tuple[int, int, int, int, int]:
        """Do a batch; return what all ranks are told: failed, -size that fits, left, over, near a limit."""
        chunk = self._items[len(self.done) : len(self.done) + size]
        fits, over, cramped = size, False, False
        if chunk and not self._fitted(chunk):
            fits = max(1, len(chunk) // 2)
            self._clean_up()
        elif chunk and self.error is None:
            over, cramped = self._read_limits()
            if over:
                self._clean_up()
        left = len(self._items) - len(self.done)
        return self.error is not None, -fits, left, over, cramped

    def _fitted(self, chunk: list[Any]) -> bool:
        """Do a batch; False when it did not fit and a smaller one may: then nothing holds on to it."""
        try:
            found = list(ended(self._fn(chunk)))
            _check_length(found, chunk)
            self._say(len(found))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, the peers must hear of it
            if len(chunk) > 1 and isinstance(error, Exception) and is_out_of_memory(error):
                self._out_of_memory = _without_references(error)
                return False
            self.error = error
            return True
        self.done += found
        return True

    def _say(self, done: int) -> None:
        if self._on_batch is not None:
            self._on_batch(done)

    def _read_limits(self) -> tuple[bool, bool]:
        failure = Failure()
        with failure.kept():
            return self._limits.read()
        self.error = failure.error
        return False, False

    def _clean_up(self) -> None:
        """Give memory back; if even that fails, what came first is what is raised."""
        try:
            self._limits.memory.release()
        except Exception as error:  # noqa: BLE001 - as above
            self.error = self._out_of_memory or error
            if self.error is not error:
                self.error.__context__ = error
                self.error.add_note(f"giving memory back failed, too: {text_of(error)}")
        self._out_of_memory = None


def _check_length(found: list[Any], chunk: list[Any]) -> None:
    if len(found) != len(chunk):
        raise errors.EvaluationError(f"expected {len(chunk)} results, one an item, got {len(found)}")


def _without_references(error: Exception) -> Exception:
    """Return the error without the frames, and what they hold, of the call that raised it."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


# -- memory ----------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the host."""
    torch = sys.modules.get("torch")
    kinds: tuple[type[BaseException], ...] = (MemoryError,)
    if torch is not None:
        kinds += (getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError),)
    if isinstance(error, kinds):
        return True
    # torch has no type of its own for the host's allocator
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


class Memory:
    """How much memory is in use, and giving back what is not needed; of a device, or of this process."""

    @staticmethod
    def of_process() -> Memory:
        """Return the memory an evaluation takes here: the current device's where torch has one in use."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            return _DeviceMemory(torch)
        return Memory()

    def used(self) -> float:
        """Return the share in use; of the host what this process holds, 0 where that cannot be read."""
        try:
            resident = int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
        except (OSError, ValueError):
            return 0.0
        return resident / _host_bytes()

    def release(self) -> None:
        """Let go of what nobody refers to."""
        gc.collect()


class _DeviceMemory(Memory):
    """The current CUDA device, other processes on it included; torch keeps what a batch took at most."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda

    def used(self) -> float:
        free, total = self._cuda.mem_get_info()
        return 1 - free / total

    def release(self) -> None:
        gc.collect()
        self._cuda.empty_cache()


def _host_bytes() -> int:
    """Return the memory this process may use: the machine's, or less where its control group says so."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    except (OSError, ValueError):  # no such group, or "max"
        return total


class _Limits:
    """What an evaluation may use, told against what was in use when it began."""

    def __init__(self, most: float, ceiling: float, memory: Memory) -> None:
        for name, share in (("max_memory", most), ("ceiling", ceiling)):
            if not isinstance(share, Real) or not 0 < share <= 1:
                raise errors.EvaluationError(f"expected {name} above 0 and at most 1, got {share!r}")
        self.memory, self._most, self._ceiling = memory, most, ceiling
        self._before = memory.used()

    def read(self) -> tuple[bool, bool]:
        """Return whether a limit is exceeded, and whether a batch of twice the size might exceed one."""
        used = self.memory.used()
        own = max(0.0, used - self._before)
        over = own > self._ceiling or (used > self._most and own > _MATTERS)
        return over, over or used + own > self._most or 2 * own > self._ceiling
