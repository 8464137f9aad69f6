"""A log: what one process tells one run: windows, export rows, commits. Nothing of it stops training."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
import time
import uuid
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import encode, recorder
from .arrays import as_int, as_key, as_metric, as_step
from .errors import LogError, RecordingTypeError
from .rivals import rivals
from .rundir import Producer, RunDir
from .schema import Stream
from .writer import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .frame import Frame
    from .writer import Loss

    Fsync = Literal[False, "periodic", "commit"]

COMMIT_SECONDS = 5.0  # how long commit() waits for the disk
EXPORT_SECONDS = 1.0  # how long an export waits for the records of the window before
CLOSE_SECONDS = 10.0
_ROW_BYTES = 300  # what one record weighs in the queue's budget


@dataclass(frozen=True, slots=True)
class Options:
    """How a log was started; see `start`."""

    run_dir: str
    role: str = "main"
    rank: int | None = None
    world_size: int | None = None
    attempt: int | None = None
    resume_step: int | None = None
    resume: str = "allow"
    payload: str = "full"
    payload_budget: int | None = None
    fsync: Fsync = False


class Log:
    """The log of one process's lifetime in one run directory.

    Attributes: `run`, `producer`; `attempt` (None while unknown); `leader` (claimed the attempt);
    `not_durable` (commits that were not on disk within COMMIT_SECONDS, or with losses).
    """

    def __init__(self, options: Options, *, warn_of_rivals: bool = True) -> None:
        self.options = options
        self.run = _open_run(options)
        self.producer = _producer(options, self.run)
        self.leader = False
        self.not_durable = 0
        self.writer = Writer(self.run, self.producer, fsync=options.fsync, attempt=options.attempt)
        # Only now: of two processes that start together at least one sees the other's files.
        if warn_of_rivals and (others := rivals(self.run, self.producer)):
            warnings.warn(
                f"role {options.role!r} rank {self.producer.rank} is recorded by another live process too "
                f"({others[0]}); both are kept, each in files of its own",
                stacklevel=4,
            )
        self._texts = encode.Texts()
        self._attempt = options.attempt
        self._known_attempt = options.attempt is not None
        self._records_ticket = 0
        self._commits = 0
        self._drained: int | None = None
        self._committed = -1
        self._lost = 0
        self._finished_before: list[int] = []  # attempts that had finished when this one was claimed
        self._tags: dict[str, Any] = {}
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
    ) -> int:
        """Make this process the leader of a new attempt of the run (or of the one it was given)."""
        info = {
            "started_us": time.time_ns() // 1000,
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
        self._attempt = self.writer.attempt = self.run.claim_attempt(info, self.options.attempt)
        self._known_attempt = self.leader = True
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

    def end(self, outcome: str, detail: str = "") -> None:
        """Note how the attempt ended ("finished", "exception", "signal"); the first word stays."""
        if self.leader and self._attempt is not None and not self._ended:
            self._ended = True
            self.run.end_attempt(self._attempt, outcome, detail)

    # -- what goes in ------------------------------------------------------------------------------

    def write(self, frame: Frame) -> None:
        """Hand over a drained window: its records, then its payload; waits (bounded) for those before."""
        self.writer.wait(self._records_ticket, EXPORT_SECONDS)
        frame.attempt = self.attempt
        with self._lock:
            self._drained = frame.window
        if not len(frame):
            return
        first, last = frame.first_id, frame.first_id + len(frame) - 1
        self._records_ticket = self.writer.put(
            Stream.RECORDS,
            lambda: [encode.records(frame, self._texts)],
            window=frame.window,
            first_id=first,
            last_id=last,
            nbytes=_ROW_BYTES * len(frame),
            linger=True,  # the export's collective comes now: the core is the training's
        )
        if self.options.payload == "full":
            self.writer.put(
                Stream.PAYLOAD,
                lambda: encode.payload(frame),
                window=frame.window,
                first_id=first,
                last_id=last,
                nbytes=frame.payload_bytes,
                linger=True,
            )

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
        row = encode.ExportRow(
            record_id=recorder.reserve_ids(1),
            time=time.time_ns() // 1000,
            window=window,
            step=step,
            attempt=self.attempt,
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
        )

    def tag(self, tags: Mapping[str, Any]) -> None:
        """Add to the tags of this process's next commit."""
        with self._lock:
            self._tags.update(tags)

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
        `metrics` has one dict per sub-index; `time_us` is when it happened (now, if not given);
        `restored_step` is the last_commit_step the logger was restored with.
        """
        epoch, epoch_step, global_step = as_step(epoch), as_step(epoch_step), as_step(global_step)
        parts = _checked(metrics)
        if self._finished_before and restored_step is None and self.options.resume_step is None:
            self._look_at_beginning(global_step)
        with self._lock:
            first, last = self._committed + 1, self._drained
            if last is None or last < first:
                first = last = None
            else:
                self._committed = last
            number, self._commits = self._commits, self._commits + 1
            tags, self._tags = {**self._tags, **(tags or {})}, {}
        made = encode.Commit(
            number=number,
            time=time.time_ns() // 1000 if time_us is None else time_us,
            attempt=self.attempt,
            leader=self.leader,
            restored_step=restored_step,
            epoch=epoch,
            epoch_step=epoch_step,
            global_step=global_step,
            window_first=first,
            window_last=last,
            metrics=parts,
            tags=tags,
        )
        rows = 1 + sum(map(len, made.metrics))
        ticket = self.writer.put(
            Stream.COMMITS,
            lambda: [encode.commit(made)],
            window=number,
            first_id=number,
            last_id=number,
            nbytes=_ROW_BYTES * rows,
        )
        return self._durable(ticket, global_step)

    def _look_at_beginning(self, step: int) -> None:
        """Warn, at the first commit, of a finished run that is started again from the beginning."""
        finished, self._finished_before = self._finished_before, []
        if step > 1:  # it goes on, where the caller knows
            return
        warnings.warn(
            f"attempt {finished[-1]} of this run had finished; attempt {self._attempt} restored nothing and "
            f"begins at step {step}: what it trains supersedes the steps from there on. Give resume_step= or "
            f"load the logger's state to continue, another directory for a new run: {self.run.path}",
            stacklevel=4,
        )

    def _durable(self, ticket: int, step: int) -> bool:
        written = self.writer.wait(ticket, COMMIT_SECONDS)
        before, self._lost = self._lost, self.writer.records_lost
        if written and self._lost == before:
            return True
        self.not_durable += 1
        got = "a loss" if written else "no answer yet"
        if os.getpid() != self.producer.pid:
            got = "the log of the parent process (a forked child has its own: eventlog.current())"
        warnings.warn(
            f"expected step {step} on disk within {COMMIT_SECONDS:g} s, got {got} "
            f"({self.not_durable} such commits): {self.run.path}",
            stacklevel=4,
        )
        return False

    # -- the end -----------------------------------------------------------------------------------

    def losses(self) -> list[Loss]:
        """Return what did not reach the disk so far."""
        return self.writer.losses()

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Write what is queued; False when that took longer than `timeout` seconds. May be called twice."""
        return self.writer.close(timeout)


def _checked(metrics: Any) -> tuple[dict[str, float], ...]:
    """Return the parts of a commit: names that can be written, numbers as `as_metric` keeps them."""
    expected = "expected metrics as a list of dicts, got"
    if not isinstance(metrics, (list, tuple)):
        raise RecordingTypeError(f"{expected} {type(metrics).__name__}")
    parts: list[dict[str, float]] = []
    for part in metrics:
        if not isinstance(part, dict):
            raise RecordingTypeError(f"{expected} one of {type(part).__name__}")
        for key in part:
            as_key(key, "metric name")
        parts.append({key: as_metric(value, key) for key, value in part.items()})
    return tuple(parts)


def _open_run(options: Options) -> RunDir:
    if options.payload_budget is not None:
        raise LogError(
            f"expected no payload_budget, which this version has not, got {options.payload_budget}"
        )
    if options.resume not in ("allow", "must", "never"):
        raise LogError(f"expected resume to be allow, must or never, got {options.resume!r}")
    if options.payload not in ("full", "off"):
        raise LogError(f"expected payload to be full or off, got {options.payload!r}")
    if options.fsync not in (False, "periodic", "commit"):
        raise LogError(f"expected fsync to be False, 'periodic' or 'commit', got {options.fsync!r}")
    if options.resume == "must":
        return RunDir.open(options.run_dir)
    run = RunDir.create(options.run_dir)
    if options.resume == "never" and run.attempts():
        raise LogError(f"expected no earlier attempt (resume='never'), got {len(run.attempts())}: {run.path}")
    return run


def _producer(options: Options, run: RunDir) -> Producer:
    rank, world_size = place_in_world(options.rank, options.world_size)
    session = uuid.uuid4().hex
    return Producer(
        run=run.id,
        session=session,
        role=options.role,
        rank=rank,
        world=_world(options.role, world_size) if world_size > 1 else session,
        world_size=world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_us=time.time_ns() // 1000,
    )


def place_in_world(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return (rank, world size): given, of torch.distributed, RANK and WORLD_SIZE, else (0, 1)."""
    if rank is not None:
        return as_int(rank, "rank"), 1 if world_size is None else as_int(world_size, "world_size")
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _world(role: str, world_size: int) -> str:
    """Name the world of ranks this process was launched in, alike in all of them."""
    launch = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    if not any(launch):
        launch = [socket.gethostname(), str(os.getppid())]
    text = "\n".join([*launch, role, str(world_size)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
