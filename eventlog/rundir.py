"""Names inside a run directory; creating, opening and joining one; attempts and who claimed them."""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from .attempt import Attempt, attempt_of, check_number, is_own, number_of
from .clock import now_us
from .errors import LogError, ManifestError, NotARunError, RunDirectoryError
from .files import fixed, is_folder, is_link, is_there, why_no_run
from .manifest import create_json, read_json, write_json
from .origin import manifest, runs_in, settled_manifest
from .redaction import redact_sensitive_config
from .schema import FORMAT_MAJOR, FORMAT_MINOR, Stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

OUTCOMES: Final = ("finished", "exception", "signal")
_MOST_OF_DETAIL: Final = 500
_LONGEST_DETAIL: Final = 10_000  # cut before secrets are looked for: far behind what is shown
_OWN_ENTRIES: Final = {"run.json", "attempts", "events", "commits", "cursors", "tables", "tensorboard"}
_MOVED: Final = "tables/moved"
_ROLE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_SEGMENT_FILE = re.compile(
    r"(\d{8}T\d{6}\.\d{6}Z)-([0-9a-f]{32})\.(?:(records|payload)\.)?([0-9]{4}|[1-9][0-9]{4,8})\.(arrows|idx)"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_START_FORMAT: Final = "%Y%m%dT%H%M%S.%fZ"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something of a run that could not be used; everything else of it can."""

    path: Path
    reason: str
    frame: int | None = None  # its place in the index: record 0 is the schema's
    offset: int | None = None  # in the file, bytes

    def __str__(self) -> str:
        """One line, path last."""
        frame = "" if self.frame is None else f", frame {self.frame}"
        offset = "" if self.offset is None else f", offset {self.offset}"
        return f"{self.reason}{frame}{offset}: {self.path}"


class Problems:
    """The problems found so far, at most one a place: a frame, a file's tail (an offset alone), a file."""

    def __init__(self) -> None:
        self._found: dict[tuple[Path, int | str | None], Problem] = {}

    def add(self, problem: Problem) -> None:
        """Note a problem; the first one of a place stands."""
        place = "tail" if problem.frame is None and problem.offset is not None else problem.frame
        self._found.setdefault((problem.path, place), problem)

    def clear(self, path: Path, place: int | Literal["tail"] | None = None) -> None:
        """Take back what was noted about a place: what was being written then has arrived."""
        if self._found:
            self._found.pop((path, place), None)

    def __iter__(self) -> Iterator[Problem]:
        """In the order in which they were found."""
        return iter(list(self._found.values()))


@dataclass(frozen=True, slots=True)
class Producer:
    """One recording process."""

    run: str
    session: str  # 32 hexadecimal digits, its process lifetime
    role: str
    rank: int
    world: str
    world_size: int
    host: str
    pid: int
    started_us: int


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """The two files of a segment: `data` is the Arrow stream, `index` what seals its frames."""

    folder: Path
    stream: Stream
    role: str
    rank: int
    started_us: int
    session: str
    number: int

    @property
    def stem(self) -> str:
        """The common part of both names."""
        start = (_EPOCH + timedelta(microseconds=self.started_us)).strftime(_START_FORMAT)
        kind = "" if self.stream is Stream.COMMITS else f"{self.stream.name.lower()}."
        return f"{start}-{self.session}.{kind}{self.number:04d}"

    @property
    def data(self) -> Path:
        """The Arrow stream."""
        return self.folder / f"{self.stem}.arrows"

    @property
    def index(self) -> Path:
        """The index."""
        return self.folder / f"{self.stem}.idx"

    @property
    def order(self) -> tuple[str, int, int, str, int, int]:
        """Sorting key: producers in (role, rank, start, session) order, then stream, then number."""
        return (self.role, self.rank, self.started_us, self.session, self.stream, self.number)


def _start_us(text: str) -> int | None:
    with suppress(ValueError):
        start = datetime.strptime(text, _START_FORMAT).replace(tzinfo=UTC)
        return (start - _EPOCH) // timedelta(microseconds=1)
    return None


def check_role(role: str) -> str:
    """Return the role; LogError when it cannot be part of a file name."""
    if not isinstance(role, str) or not _is_role(role):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LogError(
            f"expected a role of letters, digits, '_', '.' or '-' (at most 128, no '..'), got {role!r}"
        )
    return role


def _is_role(name: str) -> bool:
    return _ROLE.fullmatch(name) is not None and ".." not in name


class RunDir:
    """A run directory, where it lay at first. `manifest` is what run.json says, None when that is lost."""

    def __init__(self, path: Path, manifest: dict[str, Any] | None) -> None:
        self.path = path
        self.manifest = manifest
        self.found = Problems()
        self._claimed: set[int] = set()  # attempts whose files were found to be their own

    @classmethod
    def create(cls, path: str | Path) -> RunDir:
        """Create a run, or join the one that is there.

        NotARunError when other things lie there, ManifestError and FormatVersionError as `open`.
        """
        path = fixed(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
            if "run.json" not in names:
                if (foreign := names - _OWN_ENTRIES) and not names & {"events", "commits"}:
                    raise NotARunError(
                        f"expected a run or an empty directory, got {min(foreign)!r} in it: {path}"
                    )
                name = min(runs_in(path), default=uuid.uuid4().hex)  # run.json of a run may be lost
                born = {"id": name, "format": [FORMAT_MAJOR, FORMAT_MINOR], "created_us": now_us()}
                create_json(path / "run.json", born)
        except (FileExistsError, NotADirectoryError) as error:
            raise NotARunError(f"expected a directory, got a file: {path}") from error
        except OSError as error:
            raise RunDirectoryError(
                f"expected a directory to write to, got {error.strerror}: {path}"
            ) from error
        return cls(path, settled_manifest(path / "run.json"))

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Open a run for reading: frames alone are enough, a damaged manifest beside them is a problem.

        NotARunError when nothing of a run is there, FormatVersionError when it is of a newer major version.
        """
        path = fixed(path)
        has_frames = any(is_folder(path / name) for name in _ROOTS)
        why = "is missing: of which run this is the segments alone say"
        try:
            if is_there(path / "run.json"):
                return cls(path, manifest(path / "run.json"))
            if not has_frames:
                raise NotARunError(f"expected a run directory, got {why_no_run(path)}: {path}")
        except ManifestError as error:
            if not has_frames:
                raise
            why = str(error).rsplit(": ", 1)[0]
        run = cls(path, None)
        run.found.add(Problem(path / "run.json", why))
        return run

    @property
    def id(self) -> str:
        """The run's id; without a manifest what the segments say, without them the directory's name."""
        if self.manifest:
            return str(self.manifest["id"])
        return min(self._runs, default=f"unknown-{self.path.resolve().name}")

    @property
    def said_id(self) -> str:
        """The id that its segments say, where that is one."""
        return min(self._runs) if len(self._runs) == 1 else self.id

    @property
    def problems(self) -> list[Problem]:
        """What could not be used of the run, as far as it was looked at."""
        return list(self.found)

    def owns(self, name: str) -> bool:
        """Whether segments that say they are of a run are of this one.

        Where all say another one than run.json it is that file that does not belong here: a problem.
        """
        if self.manifest is None or name == self.id:
            return True
        if alone := self._runs == {name}:
            reason = f"is of run {self.id}, all segments of run {name}"
            self.found.add(Problem(self.path / "run.json", reason))
        return alone

    @cached_property
    def _runs(self) -> set[str]:
        return runs_in(self.path)

    # Attempts

    def attempts(self) -> list[Attempt]:
        """Return every readable attempt in order; the others become problems."""
        found: list[Attempt] = []
        for path in self.json_files("attempts"):
            try:
                found.append(attempt_of(path, read_json(path)))
            except ManifestError as error:
                self.found.add(Problem(path, str(error).rsplit(": ", 1)[0]))
        return sorted(found, key=lambda attempt: attempt.number)

    def newest_attempt(self) -> int | None:
        """Return the highest claimed number; one look at the directory, and one at a new claim."""
        for number in sorted(self._attempt_numbers(), reverse=True):
            if number in self._claimed or is_own(self.attempt_path(number)):
                self._claimed.add(number)
                return number
        return None

    def claim_attempt(
        self, info: dict[str, Any], number: int | None = None, taken: Iterable[int] = ()
    ) -> int:
        """Claim the next number (or the given one) for the caller; no two processes get the same.

        `info` holds fields of `Attempt`; start, host and pid are filled in when they are missing, secrets
        are taken out. `taken`: of which numbers it is known that there was a claim, though it may be gone.
        LogError when the given number is taken, RunDirectoryError when the directory cannot be written.
        """
        own = {"started_us": now_us(), "host": socket.gethostname(), "pid": os.getpid()}
        claim = redact_sensitive_config(own | info)
        least = max([*self._attempt_numbers(), *taken], default=-1) + 1
        free = itertools.count(least) if number is None else {number}.difference(taken)
        check_number(least if number is None else number, "an attempt")
        try:
            (self.path / "attempts").mkdir(exist_ok=True)
            for wanted in free:
                if create_json(self.attempt_path(wanted), {**claim, "number": wanted}):
                    return wanted
        except OSError as error:
            reason = f"expected to claim an attempt, got {error.strerror}: {self.path}"
            raise RunDirectoryError(reason) from error
        raise LogError(
            f"expected attempt {number} to be free, got a claim of it; without attempt= the next number is "
            f"taken: {self.path}"
        )

    def end_attempt(self, number: int, outcome: str, detail: str = "") -> None:
        """Say how one's own attempt ended: "finished", "exception" or "signal". The first ending stands.

        What looks like a secret in the detail is left out.
        ManifestError when the claim has become unreadable, OSError when it cannot be rewritten.
        """
        if outcome not in OUTCOMES:
            raise LogError(f"expected an outcome of {', '.join(OUTCOMES)}, got {outcome!r}")
        data = read_json(self.attempt_path(number))
        if data.get("outcome") is None:
            said = redact_sensitive_config(detail[:_LONGEST_DETAIL])[:_MOST_OF_DETAIL]
            text = f"{outcome}: {said}" if said else outcome
            write_json(self.attempt_path(number), {**data, "outcome": text, "ended_us": now_us()})

    def attempt_path(self, number: int) -> Path:
        """Return the file of an attempt's claim."""
        return self.path / "attempts" / f"{number:04d}.json"

    def _attempt_numbers(self) -> list[int]:
        numbers = (number_of(path.name) for path in self.json_files("attempts"))
        return [number for number in numbers if number is not None]

    # Segments

    def producer_dir(self, stream: Stream, role: str, rank: int) -> Path:
        """Return where the segments of a producer lie; LogError for a role or rank that cannot be a name."""
        root = "commits" if stream is Stream.COMMITS else "events"
        return self.path / root / f"{check_role(role)}-{check_number(rank, 'a rank')}"

    def segment(self, stream: Stream, producer: Producer, number: int) -> SegmentFile:
        """Return the files of a producer's segment; nothing is created."""
        folder = self.producer_dir(stream, producer.role, producer.rank)
        return SegmentFile(
            folder, stream, producer.role, producer.rank, producer.started_us, producer.session, number
        )

    def moved_mark(self, file: SegmentFile) -> Path:
        """Return the file that is there when the rows of a payload segment are in tables alone."""
        return self.path / _MOVED / f"{file.data.name}.json"

    def moved(self) -> frozenset[str]:
        """Return the names of the payload segments whose rows are in tables alone."""
        try:
            listed = read_json(self.path / f"{_MOVED}.json")["streams"]  # where they once had no mark each
        except (ManifestError, KeyError):
            listed = []
        return frozenset([*listed, *(mark.stem for mark in self.json_files(_MOVED))])

    def segments(self, *streams: Stream) -> list[SegmentFile]:
        """Return the segments that are there now, all or those of some streams, producer by producer."""
        roots = [root for root, kinds in _ROOTS.items() if not streams or kinds & set(streams)]
        found = {
            name for root in roots for folder in self._folders(root) for name in self._named(folder, root)
        }
        return sorted((s for s in found if not streams or s.stream in streams), key=lambda s: s.order)

    def segments_of(
        self, role: str, rank: int, stream: Stream | None = None, session: str | None = None
    ) -> list[SegmentFile]:
        """Return the segments of one role and rank: events, or one stream; of every session, or of one."""
        folder = self.producer_dir(stream or Stream.RECORDS, role, rank)
        found = set(self._named(folder, folder.parent.name))
        own = (s for s in found if stream in (None, s.stream) and session in (None, s.session))
        return sorted(own, key=lambda s: s.order)

    def listed(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted; a folder that cannot be listed is a problem, and empty."""
        try:
            return sorted(entry.name for entry in folder.iterdir())
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or is_link(folder):  # to nothing
                self.found.add(Problem(folder, f"cannot be listed: {error.strerror}"))
            return []

    def json_files(self, folder: str) -> list[Path]:
        """Return the JSON files in one of the run's folders, sorted."""
        names = self.listed(self.path / folder)
        return [self.path / folder / name for name in names if name.endswith(".json") and name[0] != "."]

    def judge_empty(self, seconds: float) -> None:
        """Let folders of producers without a segment, but for those made in the last seconds, be problems."""
        for root in _ROOTS:
            for folder in self._folders(root):
                names = self.listed(folder)
                if any(map(_SEGMENT_FILE.fullmatch, names)) or not is_folder(folder):
                    continue
                with suppress(OSError):
                    if abs(time.time() - folder.stat().st_mtime) > seconds:
                        self.found.add(Problem(folder, "holds no segment: what was written there is gone"))

    def _folders(self, root: str) -> list[Path]:
        place = self.path / root
        return [place / name for name in self.listed(place) if not name.startswith(".")]

    def _named(self, folder: Path, root: str) -> Iterator[SegmentFile]:
        role, _, rank = folder.name.rpartition("-")
        own = _is_role(role) and _NUMBER.fullmatch(rank)
        for name in self.listed(folder):
            match = _SEGMENT_FILE.fullmatch(name)
            start = _start_us(match[1]) if match else None
            if not match or start is None or bool(match[3]) is (root == "commits") or not own:
                if name.endswith((".arrows", ".idx")):
                    self.found.add(Problem(folder / name, "is not named like a segment: not read"))
                continue
            stream = Stream[match[3].upper()] if match[3] else Stream.COMMITS
            yield SegmentFile(folder, stream, role, int(rank), start, match[2], int(match[4]))


_ROOTS: Final = {"events": {Stream.RECORDS, Stream.PAYLOAD}, "commits": {Stream.COMMITS}}
