"""Verified frames of a live or finished run, producer by producer, in order; and what was skipped.

Every pass looks at the directory and the indexes anew, so it sees what has been sealed since the last one.
At most one segment is open a pass, and one frame, or some megabytes of small ones, in memory.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .absence import judge, judge_gone
from .blocks import Sort, pieces
from .claims import judge_claims
from .entries import record_of
from .files import is_there
from .gaps import missing
from .life import is_dead, is_over
from .rundir import Problem, Producer, RunDir, SegmentFile
from .schema import ENTRY_SIZE, IndexRecord, RecordType, Stream
from .sealed import SILENT_SECONDS, SealedSegment
from .seen import Seen
from .segment import Pruned, loss_of, told_by
from .shortfall import shortfall
from .state import SessionState
from .windows import Completeness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa
    from numpy.typing import NDArray

    from .entries import Entries
    from .windows import WindowSet

    Frame = tuple[Producer, IndexRecord, pa.RecordBatch]
    Wanted = Callable[[str, IndexRecord], bool]
    WantedOf = Callable[[str, NDArray[Any]], NDArray[np.bool_]]

_UNLISTED: Final = 64


class Place(NamedTuple):
    """A segment, whether it is its stream's newest, and whether the one before it is missing."""

    file: SegmentFile
    newest: bool
    after_gap: bool


class Block(NamedTuple):
    """Frames of one producer that lie together, their rows joined in their order."""

    producer: Producer
    entries: NDArray[Any]  # what the index says of each, with the fields of an IndexRecord
    batch: pa.RecordBatch  # texts as codes


class RunReader:
    """Reads one run directory. Damage never raises: it is skipped, and listed in `problems`."""

    def __init__(self, path: str | Path) -> None:
        """Open a run; NotARunError when there is none, FormatVersionError when it is too new."""
        self.run = RunDir.open(path)
        self._producers: dict[str, Producer] = {}
        self._dead: dict[str, bool] = {}  # sessions without an end mark whose life was asked for in this pass
        self._seen = Seen()

    @property
    def problems(self) -> list[Problem]:
        """What could not be read so far; what was only late is taken back by the pass that reads it."""
        return self.run.problems

    def producers(self) -> list[Producer]:
        """Return every recording process, by role, rank and start."""
        return [self.producer(files) for files in by_session(self.run.segments())]

    def records(self) -> Iterator[Frame]:
        """Yield every good frame of the records, of incomplete windows too: `sessions` tells which."""
        return self._frames(Stream.RECORDS)

    def commits(self, wanted: Wanted | None = None) -> Iterator[Frame]:
        """Yield the good frames of the commits; `wanted` as for the payload."""
        return self._frames(Stream.COMMITS, wanted)

    def payload(self, wanted: Wanted | None = None) -> Iterator[Frame]:
        """Yield the good frames of the payload; `wanted(session, record)` is asked before a frame is read."""
        return self._frames(Stream.PAYLOAD, wanted)

    def blocks(
        self,
        stream: Stream,
        columns: Sequence[str] | None = None,
        wanted: WantedOf | None = None,
    ) -> Iterator[Block]:
        """Yield the good frames of a stream joined to blocks of some megabytes: the way to read many.

        All columns or some of them, in the schema's order. `wanted(session, entries)` is asked before frames
        are read, of many at once, and answers for each.
        """
        return (block for _, block in self.sorts(stream, [(columns, wanted)]))

    def sorts(
        self, stream: Stream, sorts: Sequence[tuple[Sequence[str] | None, WantedOf | None]]
    ) -> Iterator[tuple[int, Block]]:
        """Yield the same of several sorts of frames, each with the number of its sort, in one pass.

        A sort is (columns, wanted); no frame may be of two.
        """
        named = [(None if columns is None else tuple(columns), wanted) for columns, wanted in sorts]
        every = any(columns is None for columns, _ in named)
        read = None if every else tuple(dict.fromkeys(name for columns, _ in named for name in columns or ()))
        for producer, segment, left in self._opened(stream, read):
            own = [Sort(names, wanted and partial(wanted, producer.session)) for names, wanted in named]
            for piece in pieces(segment, own, left):
                keep = stream is not Stream.PAYLOAD
                self._seen.note(segment.data_path, piece.slots, piece.good, keep=keep)
                if len(piece.entries):
                    yield piece.sort, Block(producer, piece.entries, piece.batch)

    def leave_out(self, frames: Mapping[Path, WindowSet]) -> None:
        """Do not read some frames: the caller has their rows from elsewhere, and they count as good.

        By stream (`SegmentFile.data`), their places in its index. Replaces what was left out before.
        """
        self._seen.left = frames

    def sessions(self) -> list[SessionState]:
        """Return the state of every process; frames of records and commits not read before are read."""
        self._dead.clear()
        found = [self._state(files) for files in by_session(self.run.segments())]
        self.run.judge_empty(SILENT_SECONDS)
        judge_claims(self.run, (state.producer.session for state in found))
        return found

    # Segments

    def producer(self, files: Sequence[SegmentFile]) -> Producer:
        """Who wrote a session's files: as their schema messages say, else as far as their names do."""
        first = files[0]
        known = self._producers.get(first.session)
        for file in files if known is None else ():
            with self.opened(file, newest=file is files[-1]) as segment:
                if known := segment.producer:
                    self._producers[first.session] = known
                    break
        return known or Producer(
            self.run.said_id, first.session, first.role, first.rank, "", 0, "", 0, first.started_us
        )

    def opened(
        self, file: SegmentFile, *, newest: bool, columns: tuple[str, ...] | None = None
    ) -> SealedSegment:
        """Open a segment; what is wrong with it becomes a problem of this reader."""
        return SealedSegment(
            file,
            self.run.found,
            newest=newest,
            dead=lambda: self._is_dead(file),
            owns=self.run.owns,
            columns=columns,
        )

    def places(self, files: Iterable[SegmentFile]) -> Iterator[Place]:
        """Walk the segments of one stream of a session; missing ones are a problem."""
        files = list(files)
        expected = 0
        for file in files:
            # A listing may miss what is just created: few, and the last ones.
            for number in range(max(expected, file.number - _UNLISTED), file.number):
                between = replace(file, number=number)
                if is_there(between.index) or is_there(between.data):
                    yield Place(between, newest=False, after_gap=self._missing(file, expected, number))
                    expected = number + 1
            yield Place(file, file is files[-1], self._missing(file, expected, file.number))
            expected = file.number + 1

    def _missing(self, file: SegmentFile, start: int, stop: int) -> bool:
        """Whether there are segments of a stream from `start` up to `stop` that are not there: a problem."""
        if start >= stop:
            return False
        first, last = replace(file, number=start), replace(file, number=stop - 1)
        rest = "" if start == stop - 1 else f", as are those after it up to {last.data.name}"
        self.run.found.add(Problem(first.data, f"is missing{rest}"))
        return True

    def pruned(self, file: SegmentFile) -> set[int]:
        """Return the numbers of the payload segments that a process removed to keep a budget, or compaction.

        Its segments are listed anew: what is gone was noted before, if need be in a segment that came since.
        """
        pruned: set[int] = set()
        if file.stream is not Stream.PAYLOAD:
            return pruned
        files = self.run.segments_of(file.role, file.rank, Stream.PAYLOAD, file.session)
        for one in files:
            with self.opened(one, newest=one is files[-1]) as segment:
                records = (record for _, record in segment.entries() if record)
                pruned |= {record.last_id for record in records if record.type == RecordType.PRUNE}
        moved = self.run.moved() if files else frozenset[str]()
        return pruned | {one.number for one in files if one.data.name in moved}

    def _opened(
        self, stream: Stream, columns: tuple[str, ...] | None = None
    ) -> Iterator[tuple[Producer, SealedSegment, Sequence[tuple[int, int]]]]:
        """Yield the segments of a stream, producer by producer, each with what of it is left out."""
        self._dead.clear()
        for files in by_session(self.run.segments(stream)):
            producer = self.producer(files)
            gone: set[int] = set()
            for place in self.places(files):
                with self.opened(place.file, newest=place.newest, columns=columns) as segment:
                    if not segment.has_data:
                        gone = gone if place.file.number in gone else self.pruned(place.file)
                        if place.file.number in gone:
                            continue
                    yield producer, segment, self._seen.ranges_left(segment.data_path)

    def _frames(self, stream: Stream, wanted: Wanted | None = None) -> Iterator[Frame]:
        for producer, segment, left in self._opened(stream):
            asked = None if wanted is None else partial(wanted, producer.session)
            begin = left[0][1] if left and left[0][0] <= 1 else 0  # place 0 is the schema's
            for entry in chain.from_iterable(segment.sealed(begin, asked)):
                if entry.read and not (left and self._seen.is_left(segment.data_path, entry.slot)):
                    self.remember(segment, entry.slot, good=entry.batch is not None)
                    if entry.record and entry.batch:
                        yield producer, entry.record, entry.batch

    def remember(self, segment: SealedSegment, slot: int, *, good: bool) -> None:
        """Note that a frame was read, so that `sessions` need not read it again."""
        keep = segment.file.stream is not Stream.PAYLOAD
        self._seen.note(segment.data_path, np.array([slot]), np.array([good]), keep=keep)

    def _is_dead(self, file: SegmentFile) -> bool:
        if file.session not in self._dead:
            self._dead[file.session] = is_dead(self.run, file)
        return self._dead[file.session]

    # States

    def _state(self, files: list[SegmentFile]) -> SessionState:
        state = SessionState(self.producer(files))
        streams = {stream: list(some) for stream, some in groupby(files, lambda file: file.stream)}
        records = self._account(streams.get(Stream.RECORDS, []), state)
        state.complete, state.incomplete = records.complete, records.incomplete
        state.payload = self._account(streams.get(Stream.PAYLOAD, []), state).complete
        own = streams.get(Stream.COMMITS, [])
        commits = self._account(own, state)
        judge(self.run, files, state)
        noted = [loss.window for loss in state.losses if loss.stream is Stream.COMMITS]
        state.losses += missing(commits, noted, self._walked(own), lambda: self._is_dead(own[-1]))
        late = state.complete.without(state.payload)
        if late and state.policy not in ("", "off") and is_over(self.run, files[0]):
            walk = partial(self.walk, files[0])
            state.losses += shortfall(late, walk, ended=state.ended)
        return state

    def _account(self, files: list[SegmentFile], state: SessionState) -> Completeness:
        windows = Completeness()
        gone: list[SegmentFile] = []
        ended = False
        for place in self.places(files):
            stream = place.file.stream
            with self.opened(place.file, newest=place.newest) as segment:
                if place.after_gap or segment.header is None:
                    windows.gap()
                if not segment.slots:
                    self._judge_nothing(segment, place, state, after=ended)
                frames = False
                for run in segment.runs():
                    if segment.ended and not run.good.any():
                        break  # foreign bytes: behind the end nothing can be missing
                    self._count_all(segment, run, state, windows)
                    frames |= bool(run.frames.any())
                if not segment.has_data and (frames or segment.slots):
                    gone.append(place.file)
                state.bytes[stream] += segment.bytes
                state.unsealed[stream] += segment.unsealed
                state.heartbeat_us = max(state.heartbeat_us, segment.seen_us)
                ended = segment.ended
                if ended and place.newest:
                    state.closed.add(stream)
                    state.counted |= set[Stream]() if windows.gapped else {stream}
                if stream is Stream.RECORDS:
                    state.ended = ended
                    state.policy = segment.policy or state.policy
        judge_gone(self.run, gone, state, self.pruned)
        return windows

    def _judge_nothing(
        self, segment: SealedSegment, place: Place, state: SessionState, *, after: bool
    ) -> None:
        """A segment without its schema is one just begun, or the last one of a killed process, or damage.

        Not the last one when the segment before was ended `after` it was begun, or the process spoke of it.
        """
        first = place.file.number < state.told.segments(place.file.stream)
        told = segment.header is None and segment.bytes >= ENTRY_SIZE
        if not told and (not place.newest or ((first or after) and self._is_dead(place.file))):
            reason = "seals nothing: its process wrote no more, or it is gone"
            self.run.found.add(Problem(segment.index_path, reason, offset=0))

    def _walked(self, files: Iterable[SegmentFile]) -> Iterator[SealedSegment]:
        for place in self.places(files):
            with self.opened(place.file, newest=place.newest) as segment:
                yield segment

    def walk(self, file: SegmentFile | Producer, stream: Stream) -> Iterator[SealedSegment]:
        """Open the segments of a stream of a session, as they are listed now."""
        return self._walked(self.run.segments_of(file.role, file.rank, stream, file.session))

    def _count_all(
        self, segment: SealedSegment, run: Entries, state: SessionState, windows: Completeness
    ) -> None:
        """Count index records: one by one, unless they tell of nothing but good frames and signs of life."""
        frames, types = run.table[run.frames], run.table["type"]
        signs = run.table[np.isin(types, (RecordType.HEARTBEAT, RecordType.END))]
        unread = segment.file.stream is Stream.PAYLOAD  # it is not read for this
        good = (
            segment.has_data
            and not segment.holes
            and self._seen.all_right(segment.data_path, run, unread=unread)
        )
        if good and len(frames) + len(signs) == len(types) and run.good.all() and windows.frames(frames):
            if len(signs) and segment.file.stream is Stream.RECORDS:
                state.told = told_by(record_of(signs[-1].item()))
            return
        for slot, record in run.records():
            if slot in segment.holes:
                windows.gap()
            self._count(segment, slot, record, state, windows)

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
            state.losses.append(loss_of(segment.file.stream, record))
        elif record.type == RecordType.PRUNE:
            state.pruned.add(record.last_id)
            windows_of = record.window, record.first_id
            state.prunes.append(Pruned(record.last_id, windows_of, record.rows, record.length))
        elif record.type in (RecordType.HEARTBEAT, RecordType.END) and segment.file.stream is Stream.RECORDS:
            state.told = told_by(record)

    def _is_good(self, segment: SealedSegment, slot: int, record: IndexRecord) -> bool:
        """Whether the bytes of a frame are right. Those of payload are not read for it."""
        if self._seen.is_left(segment.data_path, slot):
            return True
        unread = not self._seen.is_read(segment.data_path, slot)
        if segment.file.stream is Stream.RECORDS and unread:
            self.remember(segment, slot, good=segment.batch(slot, record) is not None)
        elif segment.file.stream is Stream.COMMITS and unread and segment.has_data:
            self.remember(segment, slot, good=segment.frame(slot, record) is not None)
        return segment.has_data and not self._seen.is_bad(segment.data_path, slot)


def by_session(files: Iterable[SegmentFile]) -> Iterator[list[SegmentFile]]:
    """Group segments, sorted as `RunDir.segments` has them, by the process that wrote them."""
    for _, some in groupby(files, lambda file: file.order[:4]):
        yield list(some)
