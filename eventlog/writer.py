"""Appends frames on a background thread. Training never waits long and never sees an I/O error.

Records and commits go first, payload follows. What cannot be queued or written in time is counted, listed,
and noted on the disk as soon as that takes anything.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa

from . import parts, priority
from .backlog import Job
from .budget import Budget
from .errors import LogError, RunDirectoryError
from .extent import NoRoomError
from .losses import Losses
from .notes import Notes
from .queues import Queues
from .schema import NO_WINDOW, SCHEMAS, LossCause, Stream
from .segment import FrameInfo, Told
from .segments import Segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .backlog import Backlog
    from .message import Message
    from .rundir import Producer, RunDir
    from .segment import Loss, Pruned, SegmentWriter

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
        payload_budget: int | None = None,
        policy: str = "",
    ) -> None:
        """Create the producer's records segment; RunDirectoryError when that cannot be.

        `fsync`: "periodic" every few seconds, "commit" (or True) before a commit's ticket is done.
        `payload_budget`: bytes of payload to keep, the oldest segments go; `policy` is told to readers.
        """
        if fsync not in (False, True, "periodic", "commit"):
            raise LogError(f"expected fsync of False, 'periodic' or 'commit', got {fsync!r}")
        self.not_durable = 0  # commits, as the log counts them
        self.news: list[str] = []  # for the user, each thing once
        self.look: Callable[[], None] = lambda: None  # called by the thread with each sign of life
        self._run = run
        self._producer = producer
        self._fsync = "commit" if fsync is True else fsync
        self._block_seconds = block_seconds
        self._queues = Queues(records_queue_bytes, payload_queue_bytes)
        self._changed = self._queues.changed
        self._tickets = 0
        self._lost = Losses()
        self._budget = Budget(payload_budget)
        self._closing = self._finished = self._abandoned = self._timed_out = False
        # The thread's own:
        self._segments = Segments(
            run,
            producer,
            self._budget,
            segment_bytes=segment_bytes,
            fsync=bool(fsync),
            attempt=attempt,
            policy=policy,
            lose=self._lose,
            owe=self._owe,
        )
        self._next_frame: dict[tuple[Stream, int], int] = {}
        self._next_beat = time.monotonic() + HEARTBEAT_SECONDS
        folder = run.producer_dir(Stream.RECORDS, producer.role, producer.rank)
        self._notes = Notes(self._segments, folder, self._lost, self._changed)
        try:
            self._segments.of(Stream.RECORDS)
        except OSError as error:
            raise RunDirectoryError(f"expected to write a segment, got {error.strerror}: {folder}") from error
        self._thread = threading.Thread(target=self._work, name="eventlog-writer", daemon=True)
        self._thread.start()

    # The caller's side

    def put(
        self,
        stream: Stream,
        encode: Callable[[], Iterable[pa.RecordBatch | Message]],
        *,
        window: int = NO_WINDOW,
        first_id: int = 0,
        last_id: int = -1,
        nbytes: int,
        last: bool = True,
        linger: bool = False,
        step: int | None = None,
        about: int = NO_WINDOW,
    ) -> int:
        """Hand over batches of a stream, encoded later on the writer's thread; return the ticket.

        The last batch completes the window, unless `last` is false: then more of it follows. Waits at most
        `block_seconds` while `nbytes` do not fit into the queue, then counts a loss. `linger` does not
        wake the thread: it comes with the next put, when it is waited for, or within IDLE_SECONDS. `step` is
        what a loss will be listed under, as is the window, or, of what is of none, the one it is `about`.
        """
        own = threading.current_thread() is self._thread  # it alone makes room
        with self._changed:
            queue = self._queues.of(stream)
            fits = self._queues.room(queue, nbytes, 0 if own else self._block_seconds, lambda: self._closing)
            self._tickets += 1
            job = Job(self._tickets, stream, encode, window, first_id, last_id, nbytes, last, step, about)
            if self._closing:
                self._lose_job(job, LossCause.CLOSE_TIMED_OUT, "came after the log was closed")
            elif not fits:
                self._lose_job(job, LossCause.QUEUE_FULL)
            else:
                queue.append(job)
                if not linger:
                    self._changed.notify_all()
            return job.ticket

    def takes(self, nbytes: int) -> bool:
        """Whether so many bytes of any stream fit into its queue now."""
        return self._queues.takes(nbytes)

    def wait(self, ticket: int, timeout: float) -> bool:
        """Whether, within `timeout` seconds, all records and commits up to the ticket are written or lost.

        They are on the file when `records_lost` has not grown since before they were put.
        """
        with self._changed:
            return not self._abandoned and self._queues.written(ticket, timeout)

    def flush(self, timeout: float) -> bool:
        """Whether, within `timeout` seconds, everything put so far is written or lost, payload included."""
        with self._changed:
            return self._queues.empty(timeout)

    def bind(self, first: int, last: int, step: int) -> None:
        """Say which step the windows `first` to `last` are: what is lost of them is listed under it."""
        with self._changed:
            self._queues.bind(first, last, step)
            self._lost.bind(first, last, step)

    @property
    def waited(self) -> float:
        """Seconds that callers waited, for room or for what they had put."""
        return self._queues.waited

    @property
    def progress(self) -> int:
        """How much of what was put is written or lost: frames and jobs."""
        return self._queues.progress

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._closing

    @property
    def attempt(self) -> int | None:
        """The attempt that the segments begun from now on are of."""
        return self._segments.attempt

    @attempt.setter
    def attempt(self, number: int) -> None:
        self._segments.attempt = number

    @property
    def records_lost(self) -> int:
        """How often something of records or commits was lost."""
        return self._lost.of_records

    def lose(self, loss: Loss) -> None:
        """Count a loss of what was never put."""
        self._lose(loss)

    def losses(self) -> list[Loss]:
        """Return what was lost so far, one entry a stream, cause and window."""
        with self._changed:
            return list(self._lost)

    def unsaid(self) -> list[Loss]:
        """Return what of it is not noted on the disk."""
        with self._changed:
            return self._lost.unsaid()

    def pruned(self) -> list[Pruned]:
        """Return the payload segments that were removed to keep the budget."""
        return list(self._budget.pruned)

    def close(self, timeout: float = 10.0) -> bool:
        """Write everything and end the segments; False when `timeout` seconds were not enough.

        Then what is still queued is lost. Closing again changes nothing.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if not self._changed.until(lambda: self._finished, timeout):
                self._give_up()
            return not self._timed_out

    def _give_up(self) -> None:
        self._timed_out = True
        for queue in self._queues:
            if queue.current:  # may still arrive: nothing is said on the disk
                loss = queue.current.loss(LossCause.CLOSE_TIMED_OUT, "was being written")
                self._lost.count(loss, owed=False)
            for job in queue.emptied():
                self._lose_job(job, LossCause.CLOSE_TIMED_OUT)
        self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child: forget the queue and the files, which are the parent's. It takes no lock."""
        self._queues = Queues(0, 0)
        self._changed = self._queues.changed
        self._closing = self._finished = self._abandoned = True
        self._lost = Losses()
        self._notes.forget()
        self._segments.forget()

    def _lose_job(self, job: Job, cause: LossCause, detail: str = "") -> None:
        self._advance(job.stream, job.window)
        self._lose(job.loss(cause, detail))

    def _lose(self, loss: Loss) -> None:
        with self._changed:
            first = self._lost.count(loss)
        moved = self._segments.moved and loss.cause is LossCause.PREVIOUS_SEGMENT  # told by itself
        if first and loss.stream is Stream.PAYLOAD and not moved:  # a commit tells of records
            cause = LossCause(loss.cause).name.replace("_", " ").lower()
            self.news.append(
                f"values were lost ({cause}), records stay; later ones are counted: {self._run.path}"
            )

    def _owe(self, losses: Iterable[Loss]) -> None:
        with self._changed:
            for loss in losses:
                self._lost.owe(loss)

    # The thread's side

    def _work(self) -> None:
        priority.step_back()
        self._notes.begin()
        while True:
            with self._changed:
                queue = self._queues.next(0 if self._closing else IDLE_SECONDS)
                if queue is None and self._closing:
                    break
            if queue and queue.current:
                self._do(queue, queue.current)
            self._tend()
        self._finish()

    def _do(self, queue: Backlog, job: Job) -> None:
        self._write(job)
        if self._lost.owed:  # before the caller goes on
            self._tend()
        with self._changed:
            self._queues.done(queue, job)

    def _go_between(self) -> None:
        """Between two frames of payload: what is urgent does not wait for a whole window, nor do others."""
        while job := self._queues.take_urgent():
            self._do(self._queues.urgent, job)
        self._tend()

    def _write(self, job: Job) -> None:
        if job.stream is Stream.COMMITS:  # what it says is written must be there
            self._miss(Stream.RECORDS, Stream.COMMITS)
        try:
            held = None
            for batch in job.encode():
                if held is not None and not self._append(job, held, final=False):
                    return
                held = batch
            if held is None and job.window >= 0:  # nothing was recorded: the window is complete all the same
                schema = SCHEMAS[job.stream]
                held = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)
            if held is not None:
                self._append(job, held, final=True)
            if job.stream is Stream.COMMITS and self._fsync == "commit":
                self._segments.sync(Stream.RECORDS, Stream.COMMITS)
        except Exception as error:  # noqa: BLE001 - `encode` is not ours, and the thread must live on
            self._lose_job(job, LossCause.ENCODE_FAILED, f"{type(error).__name__}: {error}")

    def _append(self, job: Job, batch: pa.RecordBatch | Message, *, final: bool) -> bool:
        """Write one frame, after a failure once more into a new segment; else the rest of the job is lost."""
        frame = parts.of(batch, job.stream)
        size = parts.size(frame)
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
                self._notes.keep_out(size)
                segment = self._segments.of(job.stream, size, self._told())
                if job.stream is Stream.PAYLOAD and not self._make_room(segment, size):
                    self._lose_job(job, LossCause.BUDGET, "older payload could not be removed")
                    return False
                segment.append(frame, said)
                break
            except NoRoomError as error:  # before a byte was written: the segment goes on
                self._lose_job(job, LossCause.WRITE_FAILED, str(error))
                return False
            except OSError as error:
                self._segments.leave(job.stream)
                if not again:
                    self._notes.failed(error)
                    self._lose_job(job, LossCause.WRITE_FAILED, str(error))
                    return False
        job.rows_written += batch.num_rows
        job.bytes_written += size
        with self._changed:
            self._advance(job.stream, job.window, last=said.last)
            self._queues.moved(self._queues.of(job.stream))
        if self._lost.owed:  # the disk takes something: nobody knows for how long
            self._notes.write()
        if job.stream is Stream.PAYLOAD and not final:
            self._go_between()
        return True

    def _advance(self, stream: Stream, window: int, *, last: bool = False) -> None:
        """Count a frame of a window, or the place of a lost one: a gap that its last frame cannot hide."""
        with self._changed:
            if last:
                self._next_frame.pop((stream, window), None)
            elif window >= 0:
                self._next_frame[stream, window] = self._next_frame.get((stream, window), 0) + 1

    def _make_room(self, segment: SegmentWriter, size: int) -> bool:
        """Whether a frame of payload keeps the budget, if need be without the oldest segments."""
        fits = self._budget.make_room(segment, size, sync=bool(self._fsync))
        if said := self._budget.news(segment.size + size):
            self.news.append(f"{said}: {self._run.path}")
        return fits

    def _tend(self) -> None:
        """Note every few seconds a heartbeat, and losses."""
        now = time.monotonic()
        if beats := now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            self._notes.begin()
            self.look()
            self._miss(*Stream)
            try:
                queued = sum(each.bytes for each in self._queues)
                self._segments.of(Stream.RECORDS).heartbeat(queued, self._told())
            except OSError:
                self._segments.leave(Stream.RECORDS)
            if self._fsync:
                self._segments.sync(*Stream)
        if self._lost.owed:
            self._notes.write(every=beats)

    def _miss(self, *streams: Stream) -> None:
        if said := self._segments.miss(*streams):
            self.news.append(f"{said}: {self._run.path}")

    def _told(self) -> Told:
        begun = (self._segments.begun(stream) for stream in (Stream.PAYLOAD, Stream.COMMITS))
        return Told(int(self.waited * 1e6), self.not_durable, *begun)

    def _finish(self) -> None:
        self._notes.finish()
        self._segments.finish(self._told())
        with self._changed:
            self._finished = True
            self._changed.notify_all()
