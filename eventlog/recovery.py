"""Checking a run byte by byte, and saving what can be saved of a damaged one. Neither changes it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from .attempt import attempt_of
from .errors import ManifestError, RunDirectoryError
from .files import is_folder, is_there
from .judge import Judge
from .manifest import read_json, write_json
from .reader import RunReader, by_session
from .rundir import Problem, Problems
from .salvage import Planner, Source, write
from .schema import FORMAT_MAJOR, FORMAT_MINOR, NO_WINDOW, RecordType, Stream
from .sealed import SealedSegment
from .shortfall import bound
from .windows import Completeness

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .reader import SessionState
    from .rundir import Producer, RunDir, SegmentFile
    from .salvage import Kept, Plan
    from .segment import Loss

    Progress = Callable[[int, int], object]  # called with the bytes done and the bytes there are

_MANIFEST: Final = "manifest"
_GAP: Final = 4096  # segments missing in a row: the file behind so many was not numbered by its writer
_NO_ID: Final = 1 << 63  # above all record ids


@dataclass(frozen=True, slots=True)
class FileReport:
    """What is right and wrong with one file; a segment is its stream and its index together."""

    path: Path  # within the run
    kind: str  # records, payload, commits, manifest
    bytes: int = 0
    frames: int = 0  # good ones
    rows: int = 0  # in them
    bad: int = 0  # frames, and index records, that are damaged
    pruned: bool = False  # removed by its process, to keep a budget
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found: every file, and what the processes themselves have noted as lost."""

    path: Path
    files: list[FileReport]
    losses: list[tuple[Producer, Loss]]

    @property
    def clean(self) -> bool:
        """Whether nothing is damaged, missing or lost."""
        return not self.losses and not any(file.problems for file in self.files)


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


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `recover` did, file by file."""

    path: Path
    into: Path
    files: list[SalvageReport]

    @property
    def complete(self) -> bool:
        """Whether nothing had to be discarded."""
        return not any(file.discarded for file in self.files)


# Checking


def verify(run_dir: str | os.PathLike[str], *, progress: Progress | None = None) -> Verification:
    """Read every byte of a run and check every checksum; nothing is written.

    A live run is checked as far as it is written. NotARunError, FormatVersionError; damage is reported.
    """
    reader = RunReader(Path(run_dir))
    segments = reader.run.segments()
    meter = _Meter(progress, sum(_size(file.data) + _size(file.index) for file in segments))
    files: list[FileReport] = []
    for stream, session in _streams(segments):
        pruned = reader.pruned(session[0])
        for place in reader.places(session):
            with reader.opened(place.file, newest=place.newest) as segment:
                files.append(_checked(reader, segment, stream, pruned=place.file.number in pruned))
            meter.add(files[-1].bytes)
    losses = [
        (state.producer, loss)
        for state in reader.sessions()
        for loss in bound(state.losses, reader.walk(state.producer, Stream.COMMITS))
    ]
    files = _check_manifests(reader) + files
    return Verification(reader.run.path, _with_problems(reader, files), losses)


def _checked(reader: RunReader, segment: SealedSegment, stream: Stream, *, pruned: bool) -> FileReport:
    path, kind = segment.data_path.relative_to(reader.run.path), stream.name.lower()
    if pruned and not segment.has_data:
        return FileReport(path, kind, segment.bytes, pruned=True)
    frames = rows = bad = 0
    for entry in chain.from_iterable(segment.sealed()):
        wrong = _invalid(entry.batch) if entry.batch else ""
        if wrong:
            reader.run.found.add(Problem(segment.data_path, wrong, entry.slot))
        good = entry.batch is not None and not wrong
        frames, rows = frames + good, rows + (entry.batch.num_rows if entry.batch and good else 0)
        bad += (entry.read and not good) or entry.record is None
        if entry.read:
            reader.remember(segment, entry.slot, good=good)
    return FileReport(path, kind, segment.bytes, frames, rows, bad)


def _invalid(batch: pa.RecordBatch) -> str:
    try:
        batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        return f"holds what Arrow refuses: {error}"
    return ""


def _check_manifests(reader: RunReader) -> list[FileReport]:
    found: list[FileReport] = []
    for path in _manifests(reader.run):
        try:
            said = read_json(path)
            if path.parent.name == "attempts":
                attempt_of(path, said)
        except ManifestError as error:
            reader.run.found.add(Problem(path, str(error).rsplit(": ", 1)[0]))
        found.append(FileReport(path.relative_to(reader.run.path), _MANIFEST, _size(path)))
    return found


def _with_problems(reader: RunReader, files: Sequence[FileReport]) -> list[FileReport]:
    """Give the problems to the files they are of; a file that has nothing but a problem gets a row, too."""
    root, told = reader.run.path, {file.path: file for file in files}
    for problem in reader.problems:
        path = problem.path.relative_to(root)
        if path not in told and path.with_suffix(".arrows") in told:
            path = path.with_suffix(".arrows")
        file = told.get(path) or FileReport(path, path.parts[0], _size(problem.path))
        told[path] = replace(file, problems=(*file.problems, str(problem)))
    return list(told.values())


# Saving


def recover(
    run_dir: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    kept: Kept | None = None,
    progress: Progress | None = None,
) -> Recovery:
    """Save what can be saved of a run into a new directory, which then reads without a problem.

    Sealed frames are copied where their checksum is right. Where an index is lost its stream is walked, and
    what is found there is fully validated in a child process, so that no damage ends this one. What is gone
    is noted in the copy as lost, and its windows as incomplete. The run itself stays as it is. Cursors and
    derived tables are left behind. `kept(segment, place)` has the rows of frames of payload that cannot be
    read, as tables hold them (`aggregator.recover` gives it): without it payload that compaction left in
    tables alone is counted as discarded.
    RunDirectoryError when `into` is not empty, or cannot be written; NotARunError, FormatVersionError.
    """
    reader = RunReader(Path(run_dir))
    try:
        return _recovered(reader, _target(reader.run.path, Path(into)), kept, progress)
    except OSError as error:
        got = f"{error.strerror or error}: {error.filename or into}"
        raise RunDirectoryError(f"expected to write a copy of the run, got {got}") from error


def _recovered(reader: RunReader, target: Path, kept: Kept | None, progress: Progress | None) -> Recovery:
    producers = reader.producers()
    files = [_save_manifest(reader, target, producers), *_save_attempts(reader, target)]
    states = {state.producer.session: state for state in reader.sessions()}
    segments = reader.run.segments()
    meter = _Meter(progress, sum(_size(file.data) + _size(file.index) for file in segments))
    with Judge() as judge:
        for session in by_session(segments):
            state = states.get(session[0].session)
            one = _Session(reader, target, judge, meter, reader.producer(session), kept)
            files += one.save(session, state)
    return Recovery(reader.run.path, target, files)


def _target(run: Path, into: Path) -> Path:
    if is_there(into) and not (is_folder(into) and not any(into.iterdir())):
        raise RunDirectoryError(
            f"expected a new or an empty directory to recover into, got files in it: {into}"
        )
    if into.resolve().is_relative_to(run.resolve()):
        raise RunDirectoryError(f"expected a directory outside the run to recover into: {into}")
    into.mkdir(parents=True, exist_ok=True)
    return into


def _save_manifest(reader: RunReader, target: Path, producers: Sequence[Producer]) -> SalvageReport:
    path, manifest = Path("run.json"), reader.run.manifest
    reasons = [problem.reason for problem in reader.problems if problem.path.name == path.name]
    if manifest is None:
        known = {producer.run for producer in producers}
        started = min((producer.started_us for producer in producers), default=0)
        manifest = {
            "id": min(known, default=reader.run.id),
            "format": [FORMAT_MAJOR, FORMAT_MINOR],
            "created_us": started,
        }
    write_json(target / path, manifest)
    return SalvageReport(path, _MANIFEST, discarded=len(reasons), reasons=tuple(reasons))


def _save_attempts(reader: RunReader, target: Path) -> list[SalvageReport]:
    found: list[SalvageReport] = []
    for path in reader.run.json_files("attempts"):
        place = path.relative_to(reader.run.path)
        try:
            claim = read_json(path)
            attempt_of(path, claim)
        except ManifestError as error:
            reason = str(error).rsplit(": ", 1)[0]
            found.append(
                SalvageReport(place, _MANIFEST, discarded=1, discarded_bytes=_size(path), reasons=(reason,))
            )
            continue
        (target / place).parent.mkdir(exist_ok=True)
        write_json(target / place, claim)
        found.append(SalvageReport(place, _MANIFEST))
    return found


class _Session:
    """Saves the segments of one process."""

    def __init__(
        self,
        reader: RunReader,
        target: Path,
        judge: Judge,
        meter: _Meter,
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
            pruned = {gone.number for gone in state.prunes} if state else set[int]()
            planner = Planner(stream, self._judge, self._window_of, self._target, self._kept)
            plans = [self._plan(planner, file, pruned) for file in every]
            if stream is Stream.RECORDS:
                self._learn(plans, state)
            for file, plan in zip(every, plans, strict=True):
                found.append(self._write(file, plan))
                self._meter.add(_size(file.data) + _size(file.index))
        return found

    def _left_out(self, file: SegmentFile, reason: str) -> SalvageReport:
        place, kind = file.data.relative_to(self._reader.run.path), file.stream.name.lower()
        size = _size(file.data)
        self._meter.add(size + _size(file.index))
        return SalvageReport(place, kind, discarded=1, discarded_bytes=size, reasons=(f"{reason}: {place}",))

    def _plan(self, planner: Planner, file: SegmentFile, pruned: set[int]) -> Plan:
        with Source(file) as source:
            if not source.has_data and file.number in pruned:
                return planner.tombstone(source)
            if not source.has_data and not source.index:
                return planner.refuse(source, "is missing")
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


class _Meter:
    """Tells how much is done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, size: int) -> None:
        self._done += size
        if self._progress:
            self._progress(min(self._done, self._total), self._total)


def _streams(files: Iterable[SegmentFile]) -> Iterator[tuple[Stream, list[SegmentFile]]]:
    """Group segments by session and stream."""
    for session in by_session(files):
        for stream, some in groupby(session, lambda file: file.stream):
            yield stream, list(some)


def _manifests(run: RunDir) -> list[Path]:
    """Return the JSON files of a run."""
    own = run.path / "run.json"
    return [*([own] if is_there(own) else []), *run.json_files("attempts"), *run.json_files("cursors")]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
