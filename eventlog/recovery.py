"""Checking a run byte by byte, and saving what can be saved of a damaged one. Neither changes it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from .attempt import attempt_of, is_own, number_of
from .claims import claimants, leaders, lost, stand_in, why_lost
from .errors import LogError, ManifestError, RunDirectoryError
from .files import appearing, is_there
from .judge import Judge
from .manifest import read_json, write_json
from .reader import RunReader, SessionState, by_session
from .rescue import Meter, Rescue, SalvageReport, size_of
from .rundir import Problem, Producer
from .schema import FORMAT_MAJOR, FORMAT_MINOR, Stream
from .shortfall import bound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .rescue import Progress
    from .rundir import RunDir, SegmentFile
    from .salvage import Kept
    from .sealed import SealedSegment
    from .segment import Loss

_MANIFEST: Final = "manifest"


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
    meter = Meter(progress, sum(size_of(file.data) + size_of(file.index) for file in segments))
    files: list[FileReport] = []
    for stream, session in _streams(segments):
        pruned = set[int]()
        for place in reader.places(session):
            with reader.opened(place.file, newest=place.newest) as segment:
                if not segment.has_data and place.file.number not in pruned:
                    pruned = reader.pruned(place.file)
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
        found.append(FileReport(path.relative_to(reader.run.path), _MANIFEST, size_of(path)))
    return found


def _with_problems(reader: RunReader, files: Sequence[FileReport]) -> list[FileReport]:
    """Give the problems to the files they are of; a file that has nothing but a problem gets a row, too."""
    root, told = reader.run.path, {file.path: file for file in files}
    for problem in reader.problems:
        path = problem.path.relative_to(root)
        if path not in told and path.with_suffix(".arrows") in told:
            path = path.with_suffix(".arrows")
        kind = _MANIFEST if path.suffix == ".json" else path.parts[0]
        file = told.get(path) or FileReport(path, kind, size_of(problem.path))
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
    is noted in the copy as lost, and its windows as incomplete; in the place of a lost claim stands one
    whose outcome says so. The run itself stays as it is. Cursors and derived tables are left behind.
    `kept(segment, place)` has the rows of frames that cannot be read, as tables hold them
    (`aggregator.recover` gives it): without it payload that compaction left in tables alone is counted as
    discarded.
    `into` appears when it is complete. RunDirectoryError when it is not empty, or cannot be written;
    NotARunError, FormatVersionError.
    """
    reader, target = RunReader(Path(run_dir)), Path(into).absolute()
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(reader.run.path)):
        raise RunDirectoryError(f"expected a directory outside the run to recover into: {into}")
    try:
        with appearing(target) as unfinished:
            files = _recovered(reader, unfinished, kept, progress)
        return Recovery(reader.run.path, Path(into), files)
    except OSError as error:
        got = f"{error.strerror or error}: {error.filename or into}"
        raise RunDirectoryError(f"expected to write a copy of the run, got {got}") from error


def _recovered(
    reader: RunReader, target: Path, kept: Kept | None, progress: Progress | None
) -> list[SalvageReport]:
    producers = reader.producers()
    files = [_save_manifest(reader, target, producers), *_save_attempts(reader, target)]
    states = {state.producer.session: state for state in reader.sessions()}
    segments = reader.run.segments()
    meter = Meter(progress, sum(size_of(file.data) + size_of(file.index) for file in segments))
    with Judge() as judge:
        for session in by_session(segments):
            state = states.get(session[0].session)
            one = Rescue(reader, target, judge, meter, reader.producer(session), kept)
            files += one.save(session, state)
        for who in _claimed(reader.run, states):
            with suppress(LogError):  # a name that no process can have
                files += Rescue(reader, target, judge, meter, who, kept).save([], SessionState(who))
    return [*files, *_left(reader, files)]


def _claimed(run: RunDir, sessions: Iterable[str]) -> Iterator[Producer]:
    """Yield the processes of which nothing but the claim of an attempt is left."""
    for claim in claimants(run, sessions):
        said = (claim.session, claim.role, claim.rank, "", 0, claim.host, claim.pid, claim.started_us)
        yield Producer(run.said_id, *said)


def _left(reader: RunReader, files: Iterable[SalvageReport]) -> Iterator[SalvageReport]:
    """Yield what stays behind that is no file of a segment: folders that cannot be listed, strange names."""
    told = {file.path.with_suffix("") for file in files}
    for problem in reader.problems:
        path = problem.path.relative_to(reader.run.path)
        if (
            is_there(problem.path)
            and path.parts[0] in ("events", "commits", "attempts")
            and path.with_suffix("") not in told
        ):
            told.add(path.with_suffix(""))
            yield SalvageReport(path, path.parts[0], discarded=1, reasons=(str(problem),))


def _save_manifest(reader: RunReader, target: Path, producers: Sequence[Producer]) -> SalvageReport:
    path, manifest = Path("run.json"), reader.run.manifest
    reasons = [problem.reason for problem in reader.problems if problem.path.name == path.name]
    if manifest is None:
        started = min((producer.started_us for producer in producers), default=0)
        manifest = {"format": [FORMAT_MAJOR, FORMAT_MINOR], "created_us": started}
    # What run.json says, unless that is lost, or another run's.
    write_json(target / path, {**manifest, "id": reader.run.said_id})
    return SalvageReport(path, _MANIFEST, discarded=len(reasons), reasons=tuple(reasons))


def _save_attempts(reader: RunReader, target: Path) -> list[SalvageReport]:
    """Save the claims; a lost one gets one in its place, so that its number stays taken."""
    run, led = reader.run, leaders(reader.run)
    (target / "attempts").mkdir()
    found = [_save_claim(reader, path, target, led) for path in run.json_files("attempts")]
    for number in lost(run, led):
        place = _stand_in(reader, number, target, led)
        found.append(SalvageReport(place, _MANIFEST, discarded=1, reasons=(why_lost(led[number]),)))
    return found


def _save_claim(reader: RunReader, path: Path, target: Path, led: Mapping[int, SegmentFile]) -> SalvageReport:
    place, number = path.relative_to(reader.run.path), number_of(path.name)
    try:
        claim = read_json(path)
        attempt_of(path, claim)
    except ManifestError as error:
        reason = str(error).rsplit(": ", 1)[0]
        if number is not None and (number in led or is_own(path)):
            _stand_in(reader, number, target, led)
        return SalvageReport(place, _MANIFEST, discarded=1, discarded_bytes=size_of(path), reasons=(reason,))
    write_json(target / place, claim)
    return SalvageReport(place, _MANIFEST)


def _stand_in(reader: RunReader, number: int, target: Path, led: Mapping[int, SegmentFile]) -> Path:
    """Write a claim in the place of a lost one; return where."""
    path = reader.run.attempt_path(number).relative_to(reader.run.path)
    leader = reader.producer([led[number]]) if number in led else None
    write_json(target / path, stand_in(number, leader))
    return path


def _streams(files: Iterable[SegmentFile]) -> Iterator[tuple[Stream, list[SegmentFile]]]:
    """Group segments by session and stream."""
    for session in by_session(files):
        for stream, some in groupby(session, lambda file: file.stream):
            yield stream, list(some)


def _manifests(run: RunDir) -> list[Path]:
    """Return the JSON files of a run."""
    own = run.path / "run.json"
    return [*([own] if is_there(own) else []), *run.json_files("attempts"), *run.json_files("cursors")]
