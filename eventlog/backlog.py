"""What waits to be written: jobs of one priority, bounded in bytes; and who waits for it."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .message import Message
from .schema import NO_WINDOW, Stream
from .segment import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    from .schema import LossCause


@dataclass(slots=True)
class Job:
    """Batches of one stream to be encoded and written, and how much of them is."""

    ticket: int
    stream: Stream
    encode: Callable[[], Iterable[pa.RecordBatch | Message]]
    window: int
    first_id: int
    last_id: int
    nbytes: int
    last: bool
    step: int | None = None  # where it is known
    about: int = NO_WINDOW  # of what is no part of a window: the one that is not whole without it
    rows_written: int = 0
    bytes_written: int = 0

    def ids_of(self, batch: pa.RecordBatch | Message, *, whole: bool) -> tuple[int, int]:
        """Return the first and last record id of a batch, which is all of the job's or a part."""
        if whole or not batch.num_rows:
            return self.first_id, self.last_id
        if isinstance(batch, Message):
            return batch.ids or (self.first_id, self.last_id)
        ids = batch.column(0)
        return ids[0].as_py(), ids[-1].as_py()

    def loss(self, cause: LossCause, detail: str = "") -> Loss:
        """Return what is lost when nothing more of the job is written."""
        rows = max(0, self.last_id - self.first_id + 1 - self.rows_written)
        size = max(0, self.nbytes - self.bytes_written)
        return Loss(self.stream, cause, self.place, rows, size, detail, self.step)

    @property
    def place(self) -> int:
        """The window that a loss is of."""
        return self.about if self.window < 0 else self.window


class Change(threading.Condition):
    """What callers wait for; `tell` wakes them only when something that one of them waits for has come.

    To be woken in vain takes the interpreter from the thread that writes.
    """

    def __init__(self) -> None:
        super().__init__(threading.RLock())  # a signal handler may come in at any place
        self._awaited: list[Callable[[], bool]] = []

    def until(self, holds: Callable[[], bool], timeout: float) -> bool:
        """Wait until something holds; return whether it does within `timeout` seconds."""
        self._awaited.append(holds)
        try:
            return self.wait_for(holds, timeout)
        finally:
            self._awaited.remove(holds)

    def tell(self) -> None:
        """Say that something moved."""
        if any(holds() for holds in self._awaited):
            self.notify_all()


class Backlog:
    """Jobs of one priority and the bytes they hold, the one being written included."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.jobs: deque[Job] = deque()
        self.current: Job | None = None
        self.bytes = 0
        self.stalled = False  # a put waited its full time: the next ones do not, until something moves

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes more may wait; a job of any size may wait alone."""
        return self.bytes == 0 or self.bytes + nbytes <= self.limit

    def append(self, job: Job) -> None:
        """Add a job behind the others."""
        self.jobs.append(job)
        self.bytes += job.nbytes

    def take(self) -> Job | None:
        """Make the first job the current one."""
        self.current = self.jobs.popleft() if self.jobs else None
        return self.current

    def done(self, job: Job) -> None:
        """Forget the current job."""
        self.current = None
        self.bytes -= job.nbytes

    def emptied(self) -> Iterator[Job]:
        """Yield the jobs that wait; they do no more."""
        while self.jobs:
            job = self.jobs.popleft()
            self.bytes -= job.nbytes
            yield job

    def bind(self, first: int, last: int, step: int) -> None:
        """Say which step the windows `first` to `last` are, where no step was known."""
        for job in [self.current, *self.jobs] if self.current else self.jobs:
            if job.stream is not Stream.COMMITS and job.step is None and first <= job.place <= last:
                job.step = step

    def oldest(self) -> int | None:
        """Return the ticket of the oldest job that is not done."""
        job = self.current or (self.jobs[0] if self.jobs else None)
        return job.ticket if job else None
