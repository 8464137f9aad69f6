"""The segments of one process, saved: every stream into the copy of a run, with what is lost of it noted."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from .absence import absent
from .rundir import Problems
from .salvage import Piece, Planner, write
from .schema import LAST_OF_WINDOW, NO_WINDOW, IndexRecord, RecordType, Stream
from .sealed import SealedSegment
from .source import Source
from .windows import Completeness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .judge import Judge
    from .reader import RunReader, SessionState
    from .rundir import Producer, SegmentFile
    from .salvage import Kept, Plan

    Progress = Callable[[int, int], object]  # called with the bytes done and the bytes there are

_GAP: Final = 4096  # segments missing in a row: the file behind so many was not numbered by its writer
_NO_ID: Final = 1 << 63  # above all record ids


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What came of one file; a segment is its stream and its index together."""

    path: Path  # within the run
    kind: str  # records, payload, commits, manifest
    frames: int = 0  # recovered
    rows: int = 0  # in them
    unverified: int = 0  # of the frames: found without an index, so that no checksum vouches for their values
    discarded: int = 0  # frames, and places where some may have been
    discarded_bytes: int = 0
    unfinished_bytes: int = 0  # of a frame that was being written when the process stopped
    reasons: tuple[str, ...] = ()  # why something was discarded, a line each


class Rescue:
    """Saves the segments of one process."""

    def __init__(
        self,
        reader: RunReader,
        target: Path,
        judge: Judge,
        meter: Meter,
        producer: Producer,
        kept: Kept | None,
    ) -> None:
        self._kept = kept
        self._reader = reader
        self._target = target
        self._judge = judge
        self._meter = meter
        self._producer = producer
        self._ids: list[tuple[int, int, int]] = []  # first and last record id, and their window

    def save(self, files: Sequence[SegmentFile], state: SessionState | None) -> list[SalvageReport]:
        """Save every stream, the records first: by their ids the payload's windows are known."""
        found: list[SalvageReport] = []
        who = self._producer
        if not self._reader.run.owns(who.run):
            return [self._left_out(file, f"is of another run, {who.run}") for file in files]
        if files and (files[0].role, files[0].rank) != (who.role, who.rank):  # they were copied there
            return [
                self._left_out(file, f"is of session {who.session} of {who.role}-{who.rank}")
                for file in files
            ]
        gone = absent(self._reader.run, files, state) if state else []
        files = sorted([*files, *gone], key=lambda file: file.order)
        for stream, some in groupby(files, lambda file: file.stream):
            every: list[SegmentFile] = []
            for file in some:
                if file.number - len(every) > _GAP:
                    found.append(self._left_out(file, f"its number is {file.number}, expected {len(every)}"))
                    continue
                every += [replace(file, number=n) for n in range(len(every), file.number)]
                every.append(file)
            if not every:
                continue
            prunes = state.prunes if state and stream is Stream.PAYLOAD else ()
            pruned = {prune.number for prune in prunes}
            planner = Planner(stream, self._judge, self._window_of, self._target, self._kept)
            plans = [self._plan(planner, file, pruned, state) for file in every]
            if state and state.ended:
                _end(plans[-1], state.heartbeat_us, whole=stream is Stream.PAYLOAD)
            if stream is Stream.RECORDS:
                self._learn(plans, state)
            for file, plan in zip(every, plans, strict=True):
                found.append(self._write(file, plan))
                self._meter.add(size_of(file.data) + size_of(file.index))
        return found

    def _left_out(self, file: SegmentFile, reason: str) -> SalvageReport:
        place, kind = file.data.relative_to(self._reader.run.path), file.stream.name.lower()
        size = size_of(file.data)
        self._meter.add(size + size_of(file.index))
        return SalvageReport(place, kind, discarded=1, discarded_bytes=size, reasons=(f"{reason}: {place}",))

    def _plan(
        self, planner: Planner, file: SegmentFile, pruned: set[int], state: SessionState | None
    ) -> Plan:
        with Source(file) as source:
            if not source.has_data and file.number in pruned:
                return planner.tombstone(source)
            if not source.has_data and not source.index:
                return planner.refuse(source, "is missing")
            spoken = state is not None and file.number < state.told.segments(file.stream)
            if spoken and file.stream is not Stream.RECORDS and not source.size and not any(source.records()):
                return planner.refuse(source, "holds nothing, though its process wrote there")
            if not source.has_data and self._kept is None and file.number in self._reader.pruned(file):
                return planner.forgo(source, "their rows are in tables alone, which are not copied")
            refused = Problems()
            with SealedSegment(file, refused, newest=False) as segment:
                if source.header is not None and segment.header is None:
                    return planner.refuse(source, next(iter(refused)).reason)
            return planner.plan(source)

    def _learn(self, plans: Sequence[Plan], state: SessionState | None) -> None:
        """Remember whose the ids are, and note every window that is not whole any more as lost."""
        windows = Completeness()
        for plan in plans:
            for piece in plan.pieces:
                record = piece.record
                if record.type == RecordType.LOSS:
                    windows.lost(record.window)
                elif piece.at is not None:
                    windows.frame(record, good=True)
                    self._ids.append((record.first_id, record.last_id, record.window))
        self._ids.sort()
        known = windows.complete | windows.incomplete
        for window in state.incomplete if state else ():
            if window not in known:
                plans[-1].lose(window)

    def _window_of(self, number: int) -> int:
        at = bisect_right(self._ids, (number, _NO_ID, NO_WINDOW)) - 1
        if at < 0 or number > self._ids[at][1]:
            return NO_WINDOW
        return self._ids[at][2]

    def _write(self, file: SegmentFile, plan: Plan) -> SalvageReport:
        root = self._reader.run.path
        with Source(file) as source:
            write(
                plan,
                source,
                replace(file, folder=self._target / file.folder.relative_to(root)),
                self._producer,
            )
        return SalvageReport(
            file.data.relative_to(root),
            file.stream.name.lower(),
            len(plan.frames),
            sum(piece.record.rows for piece in plan.frames),
            sum(not piece.sealed for piece in plan.frames),
            plan.discarded,
            plan.discarded_bytes,
            plan.unfinished,
            tuple(plan.reasons),
        )


def _end(plan: Plan, time_us: int, *, whole: bool) -> None:
    """Let the copy say that the process ended in order, and where that is so with a `whole` window."""
    if not plan.pieces or plan.pieces[-1].record.type != RecordType.END:
        plan.pieces.append(Piece(IndexRecord(RecordType.END, first_id=time_us)))
    last = plan.frames[-1] if plan.frames else None
    if whole and last and not last.sealed and last.record.window >= 0 and not plan.discarded:
        last.record = replace(last.record, flags=LAST_OF_WINDOW)


class Meter:
    """Tells how much is done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        """`progress` is called with the bytes done and the bytes there are."""
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, size: int) -> None:
        """Say that so many bytes more are done."""
        self._done += size
        if self._progress:
            self._progress(min(self._done, self._total), self._total)


def size_of(path: Path) -> int:
    """Return the size of a file; 0 where it has none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
