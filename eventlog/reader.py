"""Verified frames of a live or finished run, producer by producer, in order; and what was skipped.

Every pass looks at the directory and the indexes anew, so it sees what has been sealed since the last one.
At most one segment is open a pass, and one frame in memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from .rundir import Problem, Producer, RunDir, SegmentFile
from .schema import IndexRecord, LossCause, RecordType, Stream
from .sealed import SealedSegment
from .segment import Loss
from .windows import Completeness, WindowSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa

    Frame = tuple[Producer, IndexRecord, pa.RecordBatch]


@dataclass(slots=True)
class SessionState:
    """How far one process got. Its records decide which windows count; payload is told apart."""

    producer: Producer
    complete: WindowSet = field(default_factory=WindowSet)  # windows with all their records
    incomplete: WindowSet = field(default_factory=WindowSet)  # with some missing, damaged or still to come
    payload: WindowSet = field(default_factory=WindowSet)  # with all their payload, as its index says
    heartbeat_us: int = 0  # last sign of life, UTC
    ended: bool = False  # closed in order
    losses: list[Loss] = field(default_factory=list[Loss])  # as the process noted them
    pruned: set[int] = field(default_factory=set[int])  # payload segments removed to keep a budget
    bytes: Counter[Stream] = field(default_factory=Counter[Stream])  # on the disk, indexes included
    unsealed: Counter[Stream] = field(default_factory=Counter[Stream])  # of a frame begun and not finished


class _Place(NamedTuple):
    """A segment, whether it is its stream's newest, and whether the one before it is missing."""

    file: SegmentFile
    newest: bool
    after_gap: bool


class RunReader:
    """Reads one run directory. Damage never raises: it is skipped, and listed in `problems`."""

    def __init__(self, path: str | Path) -> None:
        """Open a run; NotARunError when there is none, FormatVersionError when it is too new."""
        self.run = RunDir.open(path)
        self._producers: dict[str, Producer] = {}
        self._checked: dict[Path, int] = {}  # per stream of records: frames before this place were read
        self._bad: set[tuple[Path, int]] = set()  # frames found damaged

    @property
    def problems(self) -> list[Problem]:
        """What could not be read so far; what was only late is taken back by the pass that reads it."""
        return self.run.problems

    def producers(self) -> list[Producer]:
        """Return every recording process, by role, rank and start."""
        return [self._producer(files) for files in _by_session(self.run.segments())]

    def records(self) -> Iterator[Frame]:
        """Yield every good frame of the records, of incomplete windows too: `sessions` tells which."""
        return self._frames(Stream.RECORDS)

    def commits(self, wanted: Callable[[str, IndexRecord], bool] | None = None) -> Iterator[Frame]:
        """Yield the good frames of the commits; `wanted` as for the payload."""
        return self._frames(Stream.COMMITS, wanted)

    def payload(self, wanted: Callable[[str, IndexRecord], bool] | None = None) -> Iterator[Frame]:
        """Yield the good frames of the payload; `wanted(session, record)` is asked before a frame is read."""
        return self._frames(Stream.PAYLOAD, wanted)

    def sessions(self) -> list[SessionState]:
        """Return the state of every process; frames of records not read before are read to be sure."""
        return [self._state(files) for files in _by_session(self.run.segments())]

    # Segments

    def _producer(self, files: list[SegmentFile]) -> Producer:
        """Who wrote them: as their schema messages say, else as far as their names do."""
        first = files[0]
        known = self._producers.get(first.session)
        for file in files if known is None else ():
            with SealedSegment(file, self.run.found, newest=file is files[-1]) as segment:
                if known := segment.producer:
                    self._producers[first.session] = known
                    break
        return known or Producer(
            self.run.id, first.session, first.role, first.rank, "", 0, "", 0, first.started_us
        )

    def _places(self, files: list[SegmentFile]) -> Iterator[_Place]:
        """Walk the segments of one stream of a session; a missing one is a problem."""
        expected, gap = 0, False
        for file in files:
            for number in range(expected, file.number):
                between = _numbered(file, number)
                if between.index.exists() or between.data.exists():  # a listing may miss what is just created
                    yield _Place(between, newest=False, after_gap=gap)
                    gap = False
                else:
                    self.run.found.add(Problem(between.data, "is missing"))
                    gap = True
            yield _Place(file, file is files[-1], gap)
            expected, gap = file.number + 1, False

    def _frames(
        self, stream: Stream, wanted: Callable[[str, IndexRecord], bool] | None = None
    ) -> Iterator[Frame]:
        for files in _by_session(self.run.segments(stream)):
            producer = self._producer(files)
            for place in self._places(files):
                with SealedSegment(place.file, self.run.found, newest=place.newest) as segment:
                    if not segment.has_data and place.file.number in self._pruned(files):
                        continue
                    for slot, record in segment.entries():
                        if record is None or record.type != RecordType.FRAME:
                            continue
                        if wanted is None or wanted(producer.session, record):
                            batch = segment.batch(slot, record)
                            self._remember(segment, slot, good=batch is not None)
                            if batch is not None:
                                yield producer, record, batch

    def _pruned(self, files: list[SegmentFile]) -> set[int]:
        pruned: set[int] = set()
        for file in files if files[0].stream is Stream.PAYLOAD else ():
            with SealedSegment(file, self.run.found, newest=file is files[-1]) as segment:
                records = (record for _, record in segment.entries() if record)
                pruned |= {record.last_id for record in records if record.type == RecordType.PRUNE}
        return pruned

    def _remember(self, segment: SealedSegment, slot: int, *, good: bool) -> None:
        path = segment.data_path
        if segment.file.stream is Stream.RECORDS:
            self._checked[path] = max(slot + 1, self._checked.get(path, 0))
        if good:
            self._bad.discard((path, slot))
        else:
            self._bad.add((path, slot))

    # States

    def _state(self, files: list[SegmentFile]) -> SessionState:
        state = SessionState(self._producer(files))
        streams = {stream: list(some) for stream, some in groupby(files, lambda file: file.stream)}
        records = self._account(streams.get(Stream.RECORDS, []), state)
        state.complete, state.incomplete = records.complete, records.incomplete
        state.payload = self._account(streams.get(Stream.PAYLOAD, []), state).complete
        self._account(streams.get(Stream.COMMITS, []), state)
        return state

    def _account(self, files: list[SegmentFile], state: SessionState) -> Completeness:
        windows = Completeness()
        gone: list[SegmentFile] = []
        for place in self._places(files):
            stream = place.file.stream
            with SealedSegment(place.file, self.run.found, newest=place.newest) as segment:
                if place.after_gap or segment.header is None:
                    windows.gap()
                frames = False
                for slot, record in segment.entries():
                    self._count(segment, slot, record, state, windows)
                    frames |= record is not None and record.type == RecordType.FRAME
                if frames and not segment.has_data:
                    gone.append(place.file)
                state.bytes[stream] += segment.bytes
                state.unsealed[stream] += segment.unsealed
                state.heartbeat_us = max(state.heartbeat_us, segment.seen_us)
                if stream is Stream.RECORDS:
                    state.ended = segment.ended
        self._judge_gone(gone, state)
        return windows

    def _judge_gone(self, files: list[SegmentFile], state: SessionState) -> None:
        """A stream that is gone is damage, but for payload whose removal the process has noted."""
        for file in files:
            if file.stream is Stream.PAYLOAD and file.number in state.pruned:
                self.run.found.clear(file.data)
            else:
                self.run.found.add(Problem(file.data, "is missing, with the frames its index lists"))

    def _count(
        self,
        segment: SealedSegment,
        slot: int,
        record: IndexRecord | None,
        state: SessionState,
        windows: Completeness,
    ) -> None:
        if record is None:
            windows.gap()
        elif record.type == RecordType.FRAME:
            windows.frame(record, good=self._is_good(segment, slot, record))
        elif record.type == RecordType.LOSS:
            windows.lost(record.window)
            state.losses.append(_loss(segment.file.stream, record))
        elif record.type == RecordType.PRUNE:
            state.pruned.add(record.last_id)

    def _is_good(self, segment: SealedSegment, slot: int, record: IndexRecord) -> bool:
        """Whether the bytes of a frame are right. Those of payload and commits are not read for it."""
        unread = slot >= self._checked.get(segment.data_path, 0)
        if segment.file.stream is Stream.RECORDS and unread:
            self._remember(segment, slot, good=segment.batch(slot, record) is not None)
        return segment.has_data and (segment.data_path, slot) not in self._bad


def _by_session(files: list[SegmentFile]) -> Iterator[list[SegmentFile]]:
    for _, some in groupby(files, lambda file: file.order[:4]):
        yield list(some)


def _numbered(file: SegmentFile, number: int) -> SegmentFile:
    return SegmentFile(file.folder, file.stream, file.role, file.rank, file.started_us, file.session, number)


def _loss(stream: Stream, record: IndexRecord) -> Loss:
    known = record.cause in set(LossCause)
    cause = LossCause(record.cause) if known else record.cause
    return Loss(stream, cause, record.window, record.rows, record.length)
