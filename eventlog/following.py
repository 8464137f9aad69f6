"""Following a run while it is written, from any process: every committed window once, in order.

What is told comes process by process in the order of its commits, and a commit with the windows it binds:
their records are on the disk before it is. Indexes are read as far as they have grown; a frame is read once,
when its commit is told.
"""

from __future__ import annotations

import stat
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from .errors import NotARunError
from .files import fixed, is_file
from .gaps import missing
from .life import is_dead, read_end
from .reader import RunReader, by_session
from .schema import ENTRY_SIZE, IndexRecord, RecordType, Stream
from .sealed import READ_BYTES
from .segment import loss_of
from .shortfall import bound
from .windows import Completeness, WindowSet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from os import PathLike

    import pyarrow as pa

    from .losses import Lost
    from .rundir import Problem, Producer, SegmentFile
    from .segment import Loss

PATIENCE_SECONDS: Final = 5.0  # a damaged frame of a live process may only be late, on a network file system
_AT_ONCE: Final = 64  # commits


class Sign(NamedTuple):
    """The last sign of life of a process."""

    started_us: int
    seen_us: int
    ended: bool  # closed in order


@dataclass(frozen=True, slots=True)
class Followed:
    """One commit of one process, and what it binds to its step."""

    producer: Producer
    number: int  # of the commit: 0, 1, 2 … within the process's lifetime
    commit: pa.RecordBatch  # its rows, with the columns of schema.COMMITS; a leader's hold the metrics
    windows: range
    records: list[pa.RecordBatch]  # theirs, and their export rows, in the order in which they were written
    incomplete: tuple[int, ...]  # the windows with records that are damaged or lost

    @property
    def step(self) -> int:
        """The commit's global step."""
        return int(self.commit["global_step"][0].as_py())


class Follower:
    """Follows one run directory, which need not exist yet. For one thread at a time.

    Without `records` only the commits are read: `Followed.records` and `incomplete` stay empty.
    """

    def __init__(self, run_dir: str | PathLike[str], *, records: bool = True) -> None:
        self.reader: RunReader | None = None  # once there is a run
        self._path = fixed(run_dir)
        self._with_records = records
        self._sessions: dict[str, _Session] = {}

    @property
    def problems(self) -> list[Problem]:
        """What could not be read of what was told so far."""
        return self.reader.problems if self.reader else []

    @property
    def losses(self) -> list[Lost]:
        """What is lost of the commits so far, and of the records of those that were told, and of whom.

        As the processes noted it, and as numbers that are missing show; with its step where that is known.
        Without steps that a later process of the same role and rank committed.
        """
        return [lost for session in self._sessions.values() for lost in self._left(session)]

    def _left(self, session: _Session) -> Iterator[Lost]:
        for who, loss in session.losses():
            kin = (other for other in self._sessions.values() if other.follows(who))
            if loss.step is None or not any(loss.step in other.steps for other in kin):
                yield who, loss

    def poll(self) -> Iterator[Followed]:
        """Yield what has been committed since the last poll.

        NotARunError for a file, which is never a run; FormatVersionError for a run that is too new.
        """
        if self.reader is None:
            try:
                self.reader = RunReader(self._path)
            except NotARunError:
                if is_file(self._path):
                    raise
                return
        for files in by_session(self.reader.run.segments(Stream.RECORDS, Stream.COMMITS)):
            name = files[0].session
            if name not in self._sessions:
                self._sessions[name] = _Session(self.reader, with_records=self._with_records)
            yield from self._sessions[name].poll(files)

    def signs(self) -> list[Sign]:
        """Return the last sign of life of every process found so far."""
        return [session.sign() for session in self._sessions.values()]

    def finished(self) -> bool:
        """Whether nothing more will come: the newest attempt has finished, and every process has ended.

        Where no attempt was claimed the processes alone decide. One that was killed counts as ended when
        there is no sign of life of it any more.
        """
        if self.reader is None or not self._sessions:
            return False
        attempts = self.reader.run.attempts()
        if attempts and not (attempts[-1].outcome or "").startswith("finished"):
            return False
        return all(session.ended() for session in self._sessions.values())


def follow(
    run_dir: str | PathLike[str],
    *,
    records: bool = True,
    poll: float = 0.5,
    timeout: float | None = None,
    stop: threading.Event | None = None,
) -> Iterator[Followed]:
    """Yield every commit of a run, past and coming, each once, as soon as it is on the disk.

    `run_dir` need not exist yet; processes, attempts and segments that come later are followed, too. Ends
    when the run has finished and everything is told, after `timeout` seconds in which nothing came, or at
    `stop`. Looks every `poll` seconds. Without `records` only the commits are read. Windows that no commit of
    their own process binds are not told: ask `RunReader` for them. NotARunError for a file,
    FormatVersionError for a run of a newer major version.
    """
    follower, stop = Follower(run_dir, records=records), stop or threading.Event()
    last = time.monotonic()
    while not stop.is_set():
        finished = follower.finished()  # asked before the last look, and after it
        for told in follower.poll():
            yield told
            last = time.monotonic()
            finished = False
            if stop.is_set():
                return
        if finished and follower.finished():
            return
        if timeout is not None and time.monotonic() - last > timeout:
            return
        stop.wait(poll)


@dataclass(slots=True, eq=False)
class _Entry:
    """A frame that is sealed and not told yet."""

    file: SegmentFile
    slot: int
    record: IndexRecord
    batch: pa.RecordBatch | None = None  # once it is read, and good


@dataclass(slots=True)
class _Tail:
    """How far the indexes of one stream of one process were read."""

    number: int = 0  # of the segment
    slot: int = 1  # behind the last good record in it

    def grow(
        self, reader: RunReader, files: Sequence[SegmentFile]
    ) -> Iterator[tuple[SegmentFile, int, IndexRecord | None]]:
        """Yield what the indexes have got since; of a segment that others follow nothing more will come."""
        for file in files:
            if file.number > self.number:
                self.number, self.slot = file.number, 1
            if file.number == self.number and _size(file) > (1 + self.slot) * ENTRY_SIZE:
                with reader.opened(file, newest=file is files[-1]) as segment:
                    for slot, record in segment.entries(self.slot):
                        if record is not None:  # a bad one at the end may only be late, and is not passed
                            self.slot = slot + 1
                        yield file, slot, record


class _Session:
    """One process: the commits it has written, and its windows that no commit told so far binds."""

    def __init__(self, reader: RunReader, *, with_records: bool) -> None:
        self._reader = reader
        self._with_records = with_records
        self._tails = {Stream.RECORDS: _Tail(), Stream.COMMITS: _Tail()}
        self._commits: list[_Entry] = []
        self._numbers = Completeness()  # of the commits that were seen
        self._losses: list[Loss] = []  # as the process noted them
        self.steps = WindowSet()  # of the commits that were told
        self._records: dict[int, list[_Entry]] = {}  # by window; export rows with the window before them
        self._window = -1  # the last one seen
        self._told = -1  # the windows up to it were told, or no commit binds them
        self._state = Completeness()
        self._hole = False  # whether the newest index record is damaged, or still on its way
        self._waiting_since: float | None = None  # a damaged frame may still arrive
        self._newest: SegmentFile | None = None

    def ended(self) -> bool:
        """Whether the process has ended, and every commit of it was told."""
        return not self._commits and (self._newest is None or is_dead(self._reader.run, self._newest))

    def sign(self) -> Sign:
        """Return its last sign of life, which stands in the newest of its segments of records."""
        own = self._segments()
        if not own:
            return Sign(0, 0, ended=False)
        end = read_end(own[-1])
        return Sign(own[-1].started_us, end.seen_us, end.ended)

    def follows(self, other: Producer) -> bool:
        """Whether the process came after another of its role and rank."""
        own = self._newest
        if own is None or (own.role, own.rank) != (other.role, other.rank):
            return False
        return own.started_us > other.started_us

    def losses(self) -> list[Lost]:
        """Return what of it is lost, by its own word and by the numbers of its commits."""
        if self._newest is None:
            return []
        newest, reader = self._newest, self._reader
        who = reader.producer([newest])
        noted = [loss.window for loss in self._losses if loss.stream is Stream.COMMITS]
        commits = partial(reader.walk, who, Stream.COMMITS)
        found = missing(self._numbers, noted, commits(), lambda: is_dead(reader.run, newest))
        return [(who, loss) for loss in [*bound(self._losses, commits()), *found]]

    def _segments(self) -> list[SegmentFile]:
        """List its segments of records anew."""
        if self._newest is None:
            return []
        newest = self._newest
        return self._reader.run.segments_of(newest.role, newest.rank, Stream.RECORDS, newest.session)

    def poll(self, files: Sequence[SegmentFile]) -> Iterator[Followed]:
        """Yield what is committed since."""
        self._newest = files[-1]
        commits = [file for file in files if file.stream is Stream.COMMITS]
        for file, slot, record in self._tails[Stream.COMMITS].grow(self._reader, commits):
            if record is not None and record.type == RecordType.FRAME:
                self._commits.append(_Entry(file, slot, record))
                self._numbers.frame(record, good=True)  # a damaged one is a problem, and no loss
            elif record is not None and record.type == RecordType.LOSS:
                self._losses.append(loss_of(Stream.COMMITS, record))
        if self._commits and self._with_records:  # what no commit binds yet need not be kept in mind
            self._look_at_records(self._segments())  # some may have come since the commits were listed
        while self._commits:
            some = self._commits[:_AT_ONCE]
            self._read(some)
            stop = max(_windows(commit).stop for commit in some)
            covered = _within(self._records, self._told, stop)
            self._read([entry for window in covered for entry in self._records[window]])
            for commit in some:
                told = self._tell(commit)
                if told is None and self._may_wait():
                    return
                told = told or self._tell(commit, anyway=True)
                self._waiting_since = None
                self._commits.remove(commit)
                if told is not None:
                    self.steps.add(told.step)
                    yield told

    def _look_at_records(self, files: Sequence[SegmentFile]) -> None:
        for file, slot, record in self._tails[Stream.RECORDS].grow(self._reader, files):
            self._hole = record is None
            if record is None:
                self._state.gap()
            elif record.type == RecordType.LOSS:
                self._state.lost(record.window)
                self._losses.append(loss_of(Stream.RECORDS, record))
            elif record.type == RecordType.FRAME:
                self._state.frame(record, good=True)  # until it is read
                self._window = max(self._window, record.window)
                window = self._window if record.window < 0 else record.window
                self._records.setdefault(window, []).append(_Entry(file, slot, record))

    def _bound(self, commit: _Entry) -> list[_Entry]:
        """Return the frames that a commit binds, and export rows that came since the last one."""
        windows = _windows(commit)
        if not windows:
            return []
        return [
            entry
            for window in _within(self._records, self._told, windows.stop)
            for entry in self._records[window]
            if entry.record.window < 0 or entry.record.window >= windows.start
        ]

    def _tell(self, commit: _Entry, *, anyway: bool = False) -> Followed | None:
        """Return a commit with what it binds; None while something of it cannot be read, or `anyway`."""
        if commit.batch is None:
            return None
        windows, bound = _windows(commit), self._bound(commit)
        lacking = {entry.record.window for entry in bound if entry.batch is None}
        if self._hole:
            lacking |= {window for window in windows if window not in self._records}
        if lacking and not anyway:
            return None
        for window in lacking:
            self._state.lost(window)
        if windows:
            for window in _within(self._records, self._told, windows.stop):
                del self._records[window]
            self._told = max(self._told, windows.stop - 1)
        return Followed(
            self._reader.producer([commit.file]),
            commit.batch["commit"][0].as_py(),
            commit.batch,
            windows,
            [entry.batch for entry in bound if entry.batch is not None],
            tuple(window for window in self._state.incomplete if window in windows),
        )

    def _may_wait(self) -> bool:
        """Whether what is damaged may only be late."""
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        late = now - self._waiting_since < PATIENCE_SECONDS
        return late and self._newest is not None and not is_dead(self._reader.run, self._newest)

    def _read(self, entries: Sequence[_Entry]) -> None:
        """Read the frames that were not read before, or were damaged."""
        unread = sorted((e for e in entries if e.batch is None), key=lambda e: (e.file.number, e.slot))
        for file, some in groupby(unread, lambda entry: entry.file):
            with self._reader.opened(file, newest=True) as segment:
                for near in _near(list(some)):
                    rows = segment.rows([(entry.slot, entry.record) for entry in near])
                    for entry in near:
                        entry.batch = rows[entry.slot]


def _near(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Part the frames of a file so that what is read at once stays small."""
    near: list[_Entry] = []
    for entry in entries:
        if near and entry.record.offset + entry.record.length - near[0].record.offset > READ_BYTES:
            yield near
            near = []
        near.append(entry)
    yield near


def _windows(commit: _Entry) -> range:
    """Return the windows that a commit binds."""
    if commit.batch is None:
        return range(0)
    first, last = (commit.batch[name][0].as_py() for name in ("window_first", "window_last"))
    return range(0) if first is None or last is None else range(first, last + 1)


def _within(windows: Collection[int], start: int, stop: int) -> list[int]:
    """Return the windows from `start` up to before `stop`, in order."""
    if stop - start < len(windows):
        return [window for window in range(start, stop) if window in windows]
    return sorted(window for window in windows if start <= window < stop)


def _size(file: SegmentFile) -> int:
    """Return the size of an index; of what is none it is large: opening it says what it is."""
    try:
        found = file.index.stat()
    except OSError:
        return sys.maxsize
    return found.st_size if stat.S_ISREG(found.st_mode) else sys.maxsize
