"""A log: what one process tells one run: windows, export rows, commits. Nothing of it stops training."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from . import claims, drained, encode, ending, losses, warning
from .arrays import as_step
from .clock import now_us
from .errors import ArealMetricsError
from .options import Options, open_run, this_process
from .patience import Patience
from .placement import Placement, as_tags, checked
from .rivals import rivals
from .sampling import Sample
from .schema import Stream
from .spill import Spill
from .tags import plain_tags
from .writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa

    from .frame import Frame
    from .message import Message
    from .segment import Loss, Pruned

COMMIT_SECONDS = 5.0  # how long commit() waits for the disk
EXPORT_SECONDS = 1.0  # how long an export waits for the records of the window before
END_SECONDS = 3.0  # how long the end of an attempt waits for the disk
CLOSE_SECONDS = 10.0
_ROW_BYTES = 300  # what one record weighs in the queue's budget


class Log:
    """The log of one process's lifetime in one run directory.

    Attributes: `run`, `producer`; `attempt` (None while unknown); `leader` (claimed the attempt).
    """

    def __init__(self, options: Options, *, warn_of_rivals: bool = True) -> None:
        self.run = open_run(options)
        self.options = replace(options, run_dir=str(self.run.path))  # a forked child may be elsewhere
        self.producer = this_process(options, self.run)
        self.leader = False
        self.writer = Writer(
            self.run,
            self.producer,
            fsync=options.fsync,
            attempt=options.attempt,
            payload_budget=options.budget,
            policy=options.payload,
        )
        size = options.sample_size
        self._sample = Sample(size, self.producer) if size else None
        seconds = options.spill_seconds
        self.overflow = Spill(self._write_part, self.writer.takes, options.spill_size, seconds)
        self.writer.look = self._look
        self._begun: set[int] = set()  # windows that parts were written of
        self._patience = Patience(self.writer)
        # Only now: of two processes that start together at least one sees the other's files.
        if warn_of_rivals and (others := rivals(self.run, self.producer)):
            warning.warn(
                f"role {options.role!r} rank {self.producer.rank} is recorded by another live process too "
                f"({others[0]}); both are kept, each in files of its own"
            )
        self._texts = encode.Texts()
        self._attempt = options.attempt
        self._known_attempt = options.attempt is not None
        self._records_ticket = 0
        self._commits = 0
        self._drained: int | None = None
        self._found: dict[int, int | None] = {}  # the attempt of the window drained last: looked up once
        self._committed = -1
        self._finished_before: list[int] = []  # attempts that had finished when this one was claimed
        self._tags: dict[str, Any] = {}
        self.placement = Placement()
        self._ended = False
        self._lock = threading.Lock()

    # -- attempts ----------------------------------------------------------------------------------

    @property
    def attempt(self) -> int | None:
        """The attempt of what is drained now: given, claimed, learnt, else the highest claim there is."""
        return self._attempt if self._known_attempt else self.run.newest_attempt()

    @property
    def own_attempt(self) -> int | None:
        """The attempt this process knows of by itself (given or claimed): what an export tells the others."""
        return self._attempt if self.leader or self.options.attempt is not None else None

    def claim_attempt(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        version_info: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        started_us: int | None = None,
    ) -> int:
        """Make this process the leader of a new attempt of the run (or of the one it was given).

        One process of all calls it, rank 0 of its world: every claim is an attempt of its own. `started_us`
        is when it began (now, if not given): a history that is imported began long ago.
        """
        info = {
            "started_us": now_us() if started_us is None else started_us,
            "host": self.producer.host,
            "pid": self.producer.pid,
            "role": self.producer.role,
            "rank": self.producer.rank,
            "session": self.producer.session,
            "resume_step": self.options.resume_step if resume_step is None else as_step(resume_step),
            "config": dict(config or {}),
            "version_info": dict(version_info or {}),
        }
        self._finished_before = [a.number for a in self.run.attempts() if a.outcome == "finished"]
        given = self.options.attempt
        taken = claims.taken(self.run, self.producer, given=given is not None)
        self._attempt = self.writer.attempt = self.run.claim_attempt(info, given, taken)
        self._known_attempt, self.leader, self._ended = True, True, False
        return self._attempt

    def learn_attempt(self, number: int) -> None:
        """Take over the attempt of the leader an export was shared with; a given attempt stays."""
        if self.options.attempt is None and not self.leader:
            self._attempt = self.writer.attempt = number
            self._known_attempt = True

    def superseded(self) -> bool:
        """Whether a newer attempt was claimed: a leader then goes on logging but talks to no backend."""
        newest = self.run.newest_attempt()
        return newest is not None and self._attempt is not None and newest > self._attempt

    def end(self, outcome: str, detail: str = "", timeout: float = END_SECONDS) -> None:
        """Note how the attempt ended ("finished", "exception", "signal"); the first word stays.

        It is the writer's thread that does, so that a file system that hangs costs `timeout` seconds.
        """
        number = self._attempt
        if not self.leader or number is None or self._ended:
            return
        self._ended = True

        def note() -> list[pa.RecordBatch]:
            try:
                self.run.end_attempt(number, outcome, detail)
            except (OSError, ArealMetricsError) as error:
                self.writer.news.append(f"expected to note how attempt {number} ended, got: {error}")
            return []

        if self.writer.closed:
            note()
        else:
            self.writer.wait(self.writer.put(Stream.RECORDS, note, nbytes=0), timeout)

    # -- what goes in ------------------------------------------------------------------------------

    def write(self, frame: Frame) -> None:
        """Hand over a drained window: its records, then its payload; waits (bounded) for those before."""
        ending.forget_exit()
        try:
            self._patience.wait(self._records_ticket, EXPORT_SECONDS)
        finally:  # an interrupt there does not lose it
            self._write_last(frame)

    def _write_last(self, frame: Frame) -> None:
        frame.attempt = self.attempt
        with self._lock:
            self._drained, self._found = frame.window, {frame.window: frame.attempt}
            self.placement.add(frame.own_steps)
        if len(frame) or frame.window in self._begun:
            self._begun.discard(frame.window)
            self._records_ticket = self._put(frame, last=True)

    def _write_part(self, frame: Frame) -> None:
        """Hand over a part of the window that is open: it is complete with what `write` brings of it."""
        frame.attempt = self.attempt
        self._begun.add(frame.window)
        self._put(frame, last=False)

    def _look(self) -> None:
        try:
            self.overflow.look()
        except Exception as error:  # noqa: BLE001 - the writer's thread must live on
            self.overflow.close()
            self.writer.news.append(f"expected to spill what is old, got {type(error).__name__}: {error}")

    def _put(self, frame: Frame, *, last: bool) -> int:
        sample = self._sample

        def records() -> Iterable[pa.RecordBatch | Message]:
            marked = sample.marked(frame) if sample else frame
            return encode.in_frames(encode.records(marked, self._texts)) if len(frame) else ()

        def payload() -> Iterable[pa.RecordBatch | Message]:
            return encode.payload(sample.drawn(frame) if sample else frame)

        put = partial(
            self.writer.put,
            window=frame.window,
            first_id=frame.first_id,
            last_id=frame.first_id + len(frame) - 1,
            last=last,
            linger=last,  # the export's collective comes now: the core is the training's
            step=frame.calls.steps[0] if len(frame) else None,
        )
        ticket = put(Stream.RECORDS, records, nbytes=_ROW_BYTES * len(frame))
        if self.options.payload != "off":
            frame.send()
            put(Stream.PAYLOAD, payload, nbytes=frame.payload_bytes)
        return ticket

    def write_export(
        self,
        *,
        export_id: str,
        members: tuple[int, ...] | None,
        window: int,
        window_first: int,
        step: int | None,
        reset: bool,
        outcome: str,
        tracker: str | None = None,
        key: str | None = None,
    ) -> None:
        """Note what an export covered and how it ended; called right after its collective."""
        known = self._known_attempt or window not in self._found
        row = encode.ExportRow(
            record_id=drained.reserve_ids(1),
            time=now_us(),
            window=window,
            step=step,
            attempt=self.attempt if known else self._found[window],
            export_id=export_id,
            members=members,
            window_first=window_first,
            window_last=window,
            reset=reset,
            outcome=outcome,
            tracker=tracker,
            key=key,
        )
        self._records_ticket = self.writer.put(
            Stream.RECORDS,
            lambda: [encode.export(row)],
            first_id=row.record_id,
            last_id=row.record_id,
            nbytes=_ROW_BYTES,
            step=step,
            about=window,  # without this row nobody knows what the window came to
        )

    def tag(self, tags: Mapping[str, Any]) -> None:
        """Add to the tags of this process's next commit; a RecordingError for names that `note` is for."""
        self.note(as_tags(tags))

    def note(self, tags: Mapping[str, Any]) -> None:
        """Add to those tags what an evaluator or a monitor has to say; a RecordingError for no JSON."""
        plain = plain_tags(tags)
        with self._lock:
            self._tags.update(plain)

    def commit(
        self,
        epoch: int,
        epoch_step: int,
        global_step: int,
        metrics: Sequence[dict[str, float]] = (),
        *,
        time_us: int | None = None,
        restored_step: int | None = None,
        tags: dict[str, Any] | None = None,
    ) -> bool:
        """Bind what was drained since this process's last commit to a step; the leader adds its metrics.

        Returns whether the commit and everything since the last one is written (a SIGKILL cannot take it
        back); after a loss, and past COMMIT_SECONDS, it warns, counts `not_durable` and returns False.
        `metrics` has one dict per sub-index (another process's are kept, and stand for what the leader does
        not say of the step); `time_us` is when it happened (now, if not given); `restored_step` is the
        last_commit_step the logger was restored with. What was measured at a step of its own is committed
        there, see `placement`.
        """
        epoch, epoch_step, global_step = as_step(epoch), as_step(epoch_step), as_step(global_step)
        parts, own = checked(metrics), as_tags(tags)
        ending.forget_exit()
        if self._finished_before and restored_step is None and self.options.resume_step is None:
            self._look_at_beginning(global_step)
        with self._lock:
            first, last = self._committed + 1, self._drained
            if last is None or last < first:
                first = last = None
            else:
                self._committed = last
            placed = self.placement.of(global_step, parts)
            self.placement.clear()
            number, self._commits = self._commits, self._commits + len(placed)
            tags, self._tags = self._tags | own, {}
        made = encode.Commit(
            number=number,
            time=now_us() if time_us is None else time_us,
            attempt=self.attempt,
            leader=self.leader,
            restored_step=restored_step,
            epoch=epoch,
            epoch_step=epoch_step,
            global_step=global_step,
            window_first=first,
            window_last=last,
            metrics=tuple(placed.pop(global_step)),
            tags=tags,
        )
        if first is not None and last is not None:
            self.writer.bind(first, last, global_step)
        ticket = self._put_commit(made)
        bare = replace(made, epoch=None, epoch_step=None, window_first=None, window_last=None, tags=None)
        for i, (step, found) in enumerate(sorted(placed.items()), 1):
            late = replace(bare, number=number + i, global_step=step, metrics=tuple(found))
            ticket = self._put_commit(late)
        durable = self._durable(ticket, global_step)
        self._tell_news()
        return durable

    def _put_commit(self, made: encode.Commit) -> int:
        return self.writer.put(
            Stream.COMMITS,
            lambda: encode.in_frames(encode.commit(made)),
            window=made.number,
            first_id=made.number,
            last_id=made.number,
            nbytes=_ROW_BYTES * (1 + sum(map(len, made.metrics))),
            step=made.global_step,
        )

    def _look_at_beginning(self, step: int) -> None:
        """Warn, at the first commit, of a finished run that is started again from the beginning."""
        finished, self._finished_before = self._finished_before, []
        if step > 1:  # it goes on, where the caller knows
            return
        warning.warn(
            f"attempt {finished[-1]} of this run had finished; attempt {self._attempt} restored nothing and "
            f"begins at step {step}: what it trains supersedes the steps from there on. Give resume_step= or "
            f"load the logger's state to continue, another directory for a new run: {self.run.path}"
        )

    def _tell_news(self) -> None:
        while self.writer.news:
            warning.warn(self.writer.news.pop(0))

    def _durable(self, ticket: int, step: int) -> bool:
        got = self._patience.why_not(ticket, COMMIT_SECONDS)
        if got is None:
            return True
        self.writer.not_durable += 1
        within = f" within {COMMIT_SECONDS:g} s"
        if os.getpid() != self.producer.pid:
            got = "the log of the parent process (a forked child has its own: eventlog.current())"
        elif self.writer.closed:
            within, got = "", "a log that is closed"
        warning.warn(
            f"expected step {step} on disk{within}, got {got} ({self.not_durable} such commits): "
            f"{self.run.path}"
        )
        return False

    # -- the end -----------------------------------------------------------------------------------

    @property
    def not_durable(self) -> int:
        """Commits that were not on disk within COMMIT_SECONDS, or with losses."""
        return self.writer.not_durable

    @property
    def waited(self) -> float:
        """Seconds that recording waited for the disk, in all: for room in the queues, and in commits."""
        return self.writer.waited

    def losses(self) -> list[Loss]:
        """Return what did not reach the disk so far, with its step where that is known."""
        return self.writer.losses()

    def pruned(self) -> list[Pruned]:
        """Return the payload that was removed to keep its budget."""
        return self.writer.pruned()

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Write what is queued; False when that took longer than `timeout` seconds. May be called twice."""
        self.overflow.close()
        again = self.writer.closed
        closed = self.writer.close(timeout)
        if not again and (unsaid := losses.told(self.writer.unsaid())):
            self.writer.news.append(f"lost, and noted nowhere else: {unsaid}: {self.run.path}")
        self._tell_news()
        return closed
