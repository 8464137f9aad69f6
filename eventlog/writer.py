"""Appends frames on a background thread. Training never waits long and never sees an I/O error.

Records and commits go first, payload follows. What cannot be queued or written in time is counted, listed,
and noted on the disk as soon as that takes anything.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

from .backlog import Backlog, Job
from .errors import LogError, RunDirectoryError
from .message import serialize
from .schema import NO_WINDOW, SCHEMAS, LossCause, Stream
from .segment import FrameInfo, Loss, SegmentWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .rundir import Producer, RunDir

HEARTBEAT_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 0.1


class Writer:
    """The one writer of a producer's segments.

    `put` hands over, `wait` says when it is written, `losses` what never will be, `close` drains.
    A started writer raises nothing because of I/O.
    """

    def __init__(
        self,
        run: RunDir,
        producer: Producer,
        *,
        attempt: int | None = None,
        fsync: Literal["periodic", "commit"] | bool = False,
        segment_bytes: int = 256 << 20,
        records_queue_bytes: int = 64 << 20,
        payload_queue_bytes: int = 512 << 20,
        block_seconds: float = 5.0,
    ) -> None:
        """Create the producer's records segment; RunDirectoryError when that cannot be.

        `fsync`: "periodic" every few seconds, "commit" (or True) before a commit's ticket is done.
        """
        if fsync not in (False, True, "periodic", "commit"):
            raise LogError(f"expected fsync of False, 'periodic' or 'commit', got {fsync!r}")
        self.attempt = attempt  # written into the segments opened from now on
        self.records_lost = 0  # how often something of records or commits was lost
        self._run = run
        self._producer = producer
        self._fsync = "commit" if fsync is True else fsync
        self._segment_bytes = segment_bytes
        self._block_seconds = block_seconds
        self._changed = threading.Condition(threading.RLock())  # a signal handler may come in at any place
        self._urgent = Backlog(records_queue_bytes)
        self._payload = Backlog(payload_queue_bytes)
        self._tickets = 0
        self._lost: dict[tuple[Stream, int, int], Loss] = {}
        self._unsaid: dict[tuple[Stream, int, int], Loss] = {}
        self._closing = self._finished = self._abandoned = self._timed_out = False
        # The thread's own:
        self._segments: dict[Stream, SegmentWriter] = {}
        self._numbers = dict.fromkeys(Stream, 0)
        self._next_frame: dict[tuple[Stream, int], int] = {}
        self._next_beat = time.monotonic() + HEARTBEAT_SECONDS
        self._say_at = 0.0
        try:
            self._segment(Stream.RECORDS)
        except OSError as error:
            folder = run.producer_dir(Stream.RECORDS, producer.role, producer.rank)
            raise RunDirectoryError(f"expected to write a segment, got {error.strerror}: {folder}") from error
        self._thread = threading.Thread(target=self._work, name="eventlog-writer", daemon=True)
        self._thread.start()

    # The caller's side

    def put(
        self,
        stream: Stream,
        encode: Callable[[], Iterable[pa.RecordBatch]],
        *,
        window: int = NO_WINDOW,
        first_id: int = 0,
        last_id: int = -1,
        nbytes: int,
        last: bool = True,
        linger: bool = False,
    ) -> int:
        """Hand over batches of a stream, encoded later on the writer's thread; return the ticket.

        The last batch completes the window, unless `last` is false: then more of it follows. Waits at most
        `block_seconds` while `nbytes` do not fit into the queue, then counts a loss. `linger` does not
        wake the thread: it comes with the next put, when it is waited for, or within IDLE_SECONDS.
        """
        queue = self._payload if stream is Stream.PAYLOAD else self._urgent
        with self._changed:
            fits = self._wait_for_room(queue, nbytes)
            self._tickets += 1
            job = Job(self._tickets, stream, encode, window, first_id, last_id, nbytes, last)
            if self._closing:
                self._lose_job(job, LossCause.CLOSE_TIMED_OUT, "came after the log was closed")
            elif not fits:
                self._lose_job(job, LossCause.QUEUE_FULL)
            else:
                queue.append(job)
                if not linger:
                    self._changed.notify_all()
            return job.ticket

    def _wait_for_room(self, queue: Backlog, nbytes: int) -> bool:
        if queue.fits(nbytes) or queue.stalled:
            return queue.fits(nbytes)
        self._changed.notify_all()
        fits = self._changed.wait_for(lambda: queue.fits(nbytes) or self._closing, self._block_seconds)
        queue.stalled = not fits
        return fits

    def wait(self, ticket: int, timeout: float) -> bool:
        """Whether, within `timeout` seconds, all records and commits up to the ticket are written or lost.

        They are on the file when `records_lost` has not grown since before they were put.
        """

        def done() -> bool:
            oldest = self._urgent.oldest()
            return oldest is None or oldest > ticket

        with self._changed:
            if not done():
                self._changed.notify_all()
            return not self._abandoned and self._changed.wait_for(done, timeout)

    def flush(self, timeout: float) -> bool:
        """Whether, within `timeout` seconds, everything put so far is written or lost, payload included."""

        def done() -> bool:
            return self._urgent.oldest() is None and self._payload.oldest() is None

        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(done, timeout)

    def losses(self) -> list[Loss]:
        """Return what was lost so far, one entry a stream, cause and window."""
        with self._changed:
            return list(self._lost.values())

    def close(self, timeout: float = 10.0) -> bool:
        """Write everything and end the segments; False when `timeout` seconds were not enough.

        Then what is still queued is lost. Closing again changes nothing.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._finished, timeout):
                self._give_up()
            return not self._timed_out

    def _give_up(self) -> None:
        self._timed_out = True
        for queue in (self._urgent, self._payload):
            if queue.current:  # may still arrive: nothing is said on the disk
                self._count(self._lost, queue.current.loss(LossCause.CLOSE_TIMED_OUT, "was being written"))
            while queue.jobs:
                job = queue.jobs.popleft()
                queue.bytes -= job.nbytes
                self._lose_job(job, LossCause.CLOSE_TIMED_OUT)
        self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child: forget the queue and the files, which are the parent's. It takes no lock."""
        self._changed = threading.Condition(threading.RLock())
        self._closing = self._finished = self._abandoned = True
        self._urgent, self._payload = Backlog(0), Backlog(0)
        self._lost, self._unsaid = {}, {}
        for segment in self._segments.values():
            with suppress(OSError):
                segment.close()
        self._segments = {}

    def _lose_job(self, job: Job, cause: LossCause, detail: str = "") -> None:
        self._advance(job.stream, job.window)
        self._lose(job.loss(cause, detail))

    def _lose(self, loss: Loss) -> None:
        with self._changed:
            self.records_lost += loss.stream is not Stream.PAYLOAD
            self._count(self._lost, loss)
            self._count(self._unsaid, loss)

    @staticmethod
    def _count(losses: dict[tuple[Stream, int, int], Loss], loss: Loss) -> None:
        key = (loss.stream, loss.cause, loss.window)
        losses[key] = losses[key].plus(loss) if key in losses else loss

    # The thread's side

    def _work(self) -> None:
        while True:
            with self._changed:
                queue = self._next()
                if queue is None and self._closing:
                    break
            if queue and (job := queue.current):
                self._write(job)
                with self._changed:
                    queue.done(job)
                    self._changed.notify_all()
                del job  # what it holds is needed no more
            self._tend()
        self._finish()

    def _next(self) -> Backlog | None:
        """Take a job and return its queue, if need be after waiting a while for one."""
        if not (self._urgent.jobs or self._payload.jobs or self._closing):
            self._changed.wait(IDLE_SECONDS)
        return next((queue for queue in (self._urgent, self._payload) if queue.take()), None)

    def _write(self, job: Job) -> None:
        try:
            held = None
            for batch in job.encode():
                if held is not None and not self._append(job, held, final=False):
                    return
                held = batch
            if held is None and job.window >= 0:  # nothing was recorded: the window is complete all the same
                held = pa.RecordBatch.from_pylist([], schema=SCHEMAS[job.stream])
            if held is not None:
                self._append(job, held, final=True)
            if job.stream is Stream.COMMITS and self._fsync == "commit":
                self._sync(Stream.RECORDS, Stream.COMMITS)
        except Exception as error:  # noqa: BLE001 - `encode` is not ours, and the thread must live on
            self._lose_job(job, LossCause.ENCODE_FAILED, f"{type(error).__name__}: {error}")

    def _append(self, job: Job, batch: pa.RecordBatch, *, final: bool) -> bool:
        """Write one frame, after a failure once more into a new segment; else the rest of the job is lost."""
        data = serialize(batch, job.stream)
        first_id, last_id = job.ids_of(batch, whole=final and not job.bytes_written)
        said = FrameInfo(
            job.window,
            self._next_frame.get((job.stream, job.window), 0),
            final and job.last and job.window >= 0,
            first_id,
            last_id,
            batch.num_rows,
        )
        for again in (True, False):
            try:
                self._segment(job.stream, data.size).append(data, said)
                break
            except OSError as error:
                self._leave(job.stream)
                if not again:
                    self._lose_job(job, LossCause.WRITE_FAILED, str(error))
                    return False
        job.rows_written += batch.num_rows
        job.bytes_written += data.size
        self._advance(job.stream, job.window, last=said.last)
        return True

    def _advance(self, stream: Stream, window: int, *, last: bool = False) -> None:
        """Count a frame of a window, or the place of a lost one: a gap that its last frame cannot hide."""
        with self._changed:
            if last:
                self._next_frame.pop((stream, window), None)
            elif window >= 0:
                self._next_frame[stream, window] = self._next_frame.get((stream, window), 0) + 1

    def _segment(self, stream: Stream, size: int = 0) -> SegmentWriter:
        """Return the segment that `size` more bytes go into."""
        segment = self._segments.get(stream)
        if segment is None:
            return self._open(stream)
        if not size or not segment.frames or segment.size + size <= self._segment_bytes:
            return segment
        try:
            fresh = self._open(stream)
        except OSError:
            return segment  # too long is better than lost
        self._end(segment)  # only now: a newest segment with an end record means that the process ended
        return fresh

    def _open(self, stream: Stream) -> SegmentWriter:
        file = self._run.segment(stream, self._producer, self._numbers[stream])
        self._numbers[stream] += 1
        try:
            self._segments[stream] = SegmentWriter(file, self._producer, self.attempt)
        except FileExistsError:  # `leave` could not remove it: the next try takes the next number
            raise
        except OSError:
            self._numbers[stream] -= 1
            raise
        return self._segments[stream]

    def _leave(self, stream: Stream) -> None:
        """Leave a segment as it is after a failure; one without frames is removed, its number used again."""
        if segment := self._segments.pop(stream, None):
            segment.leave()
            if not segment.frames:
                self._numbers[stream] -= 1
                with self._changed:
                    for loss in segment.said:
                        self._count(self._unsaid, loss)

    def _end(self, segment: SegmentWriter) -> None:
        try:
            if self._fsync:
                segment.sync()
            segment.finish()
        except OSError as error:
            self._lose_segment(segment, error)

    def _sync(self, *streams: Stream) -> None:
        for segment in [self._segments[stream] for stream in streams if stream in self._segments]:
            try:
                if segment.unsynced:
                    segment.sync()
            except OSError as error:  # the system may have dropped what it could not write
                self._leave(segment.file.stream)
                self._lose_segment(segment, error)

    def _lose_segment(self, segment: SegmentWriter, error: OSError) -> None:
        cause, stream = LossCause.PREVIOUS_SEGMENT, segment.file.stream
        self._lose(Loss(stream, cause, bytes=segment.unsynced, detail=f"{error}: {segment.file.data}"))

    def _tend(self) -> None:
        """Note losses, and every few seconds a heartbeat."""
        now = time.monotonic()
        if self._unsaid and now >= self._say_at:
            self._say_losses()
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            try:
                self._segment(Stream.RECORDS).heartbeat(self._urgent.bytes + self._payload.bytes)
            except OSError:
                self._leave(Stream.RECORDS)
            if self._fsync:
                self._sync(*Stream)

    def _say_losses(self) -> None:
        while self._unsaid:
            with self._changed:
                key, loss = next(iter(self._unsaid.items()))
                del self._unsaid[key]
            try:
                self._segment(loss.stream).lost(loss)
            except OSError:
                self._leave(loss.stream)
                with self._changed:
                    self._count(self._unsaid, loss)
                self._say_at = time.monotonic() + HEARTBEAT_SECONDS
                return

    def _finish(self) -> None:
        self._say_losses()
        for stream in (Stream.PAYLOAD, Stream.COMMITS, Stream.RECORDS):  # its end is the session's
            if segment := self._segments.pop(stream, None):
                self._end(segment)
        with self._changed:
            self._finished = True
            self._changed.notify_all()
