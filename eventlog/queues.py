"""The two queues of a writer: records and commits, which go first, and payload; and who waits for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .backlog import Backlog, Change
from .schema import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .backlog import Job


class Queues:
    """What is to be written, and how much of it moved. `changed` is held around every call."""

    def __init__(self, urgent_bytes: int, payload_bytes: int) -> None:
        """Bound the bytes that wait of either kind."""
        self.changed = Change()
        self.urgent, self.payload = Backlog(urgent_bytes), Backlog(payload_bytes)
        self.waited = 0.0  # seconds that callers waited, for room or for what they put
        self.progress = 0  # how much of what was put is written or lost, frame by frame

    def __iter__(self) -> Iterator[Backlog]:
        return iter((self.urgent, self.payload))

    def of(self, stream: Stream) -> Backlog:
        """Return the queue of a stream."""
        return self.payload if stream is Stream.PAYLOAD else self.urgent

    def takes(self, nbytes: int) -> bool:
        """Whether so many bytes of any stream fit now."""
        return self.urgent.fits(nbytes) and self.payload.fits(nbytes)

    def room(self, queue: Backlog, nbytes: int, seconds: float, over: Callable[[], bool]) -> bool:
        """Whether so many bytes fit into a queue within a time, or it is `over`.

        Where the last one that waited did so in vain, and nothing moved since, nobody waits.
        """
        if queue.fits(nbytes) or queue.stalled or not seconds:
            return queue.fits(nbytes)
        self.changed.notify_all()
        fits = self._wait(lambda: queue.fits(nbytes) or over(), seconds)
        queue.stalled = not fits
        return fits

    def written(self, ticket: int, seconds: float) -> bool:
        """Whether, within a time, all records and commits up to a ticket are written or lost."""

        def done() -> bool:
            oldest = self.urgent.oldest()
            return oldest is None or oldest > ticket

        if done():
            return True
        self.changed.notify_all()
        return self._wait(done, seconds)

    def empty(self, seconds: float) -> bool:
        """Whether, within a time, everything is written or lost."""
        self.changed.notify_all()
        return self.changed.until(lambda: all(queue.oldest() is None for queue in self), seconds)

    def _wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        began = time.monotonic()
        held = self.changed.until(holds, seconds)
        self.waited += time.monotonic() - began
        return held

    def bind(self, first: int, last: int, step: int) -> None:
        """Say which step the windows `first` to `last` are, where no step was known."""
        for queue in self:
            queue.bind(first, last, step)

    # The writer's thread

    def next(self, idle: float) -> Backlog | None:
        """Take a job and return its queue, if need be after waiting a while for one."""
        if idle and not (self.urgent.jobs or self.payload.jobs):
            self.changed.wait(idle)
        return next((queue for queue in self if queue.take()), None)

    def take_urgent(self) -> Job | None:
        """Take a job of records or commits, if one waits."""
        with self.changed:
            return self.urgent.take()

    def moved(self, queue: Backlog) -> None:
        """Note that a frame was written, or lost: what is slow is not stuck."""
        queue.stalled = False
        self.progress += 1

    def done(self, queue: Backlog, job: Job) -> None:
        """Forget the current job of a queue, and tell who waited for it."""
        queue.done(job)
        self.moved(queue)
        self.changed.tell()
