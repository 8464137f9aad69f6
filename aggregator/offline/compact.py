"""Compaction: the rows of finished windows written anew as Parquet, a part for some steps.

The sources stay as they are, unless their payload is to be dropped. A part gets its name, which follows from
the frames it stands for, when all of it is on the disk: a compaction that is cut off, or done twice, changes
no answer, and the next one goes on where it was. A part that is not full is written anew with what came
since.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from eventlog import WindowSet, errors, fixed, read_json, schema, sync_folder, write_json

from . import tables
from .checked import TEMPORARY
from .compacted import FOLDER, FORMAT, Compacted, by_name, name_of, read_part
from .engine import Engine
from .history import load
from .losses import lost
from .parquet import write_part
from .placing import window_code
from .reading import NONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from eventlog import RunReader, SessionState

    from .compacted import Part
    from .engine import Name
    from .history import History
    from .parquet import Frames

PART_BYTES: Final = 256 << 20
_STALE_SECONDS: Final = 3600.0  # after which an unfinished file is nobody's


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction did. Sizes in bytes; `rows` and `bytes` are of the parts it wrote."""

    path: str
    parts: int  # in all, now
    written: int  # of them by this one
    rows: int
    bytes: int
    dropped: int  # of payload streams
    problems: list[str]
    losses: list[str]  # what of the run never reached its log


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame that no part stands for."""

    stream: schema.Stream
    file: str
    after: int  # the place of the frame before it in the file
    place: int
    bytes: int
    step: int


class Task(NamedTuple):
    """A part to be written: which frames it is of; see `compacted.Part`."""

    run_dir: str
    run: str
    steps: tuple[int, int]
    frames: Frames


class _Made(NamedTuple):
    """What came of a task. `name` is the part's, empty when none of its frames is good."""

    name: str
    rows: int
    problems: Sequence[str] = ()


def compact(
    run_dir: str | os.PathLike[str],
    *,
    drop_sources: bool = False,
    engine: Name = "local",
    workers: int | None = None,
    part_bytes: int = PART_BYTES,
    done: Callable[[int, int], object] = lambda _done, _all: None,
) -> Compaction:
    """Write what is finished of a run, live or not, to RUN/tables; sessions then use it by themselves.

    `drop_sources` removes the payload streams of processes that ended, once all their frames are in parts
    that were read back whole: from then on the tables are the only place of those values. Records and commits
    are kept for ever. `engine` and `workers`: see `engine.Engine`; `part_bytes`: about the size of a part.
    What of the run is damaged stays where it is: `Compaction.problems`.
    NotARunError, FormatVersionError; RunDirectoryError when RUN/tables cannot be written; DependencyError
    without Ray.
    """
    path, crew = fixed(run_dir), Engine(engine, workers)
    history = load(path, str(path))
    try:
        return _compacted(path, history, crew, part_bytes, done, drop_sources=drop_sources)
    except OSError as error:
        where = error.filename2 or error.filename or path / FOLDER
        raise errors.RunDirectoryError(
            f"expected to write the tables of the run, got {error.strerror or error}: {where}"
        ) from error


def _compacted(
    path: Path,
    history: History,
    crew: Engine,
    part_bytes: int,
    done: Callable[[int, int], object],
    *,
    drop_sources: bool,
) -> Compaction:
    reader, compacted = history.reading.reader, history.reading.compacted
    folder = path / FOLDER
    folder.mkdir(exist_ok=True)
    _sweep(folder)
    frames, replaced = _left(history), None
    if frames and compacted.parts and compacted.parts[-1].bytes < part_bytes // 2:
        last = compacted.parts[-1]
        if _has_sources(history, last):
            compacted.parts.remove(last)
            reader.leave_out(compacted.covered())
            frames, replaced = _left(history), last
    tasks = [Task(str(path), reader.run.id, *those) for those in _ranges(frames, part_bytes)]
    with crew:
        made = crew.each(_written, tasks, done)
    names = {one.name for one in made}
    if replaced is not None and replaced.path.name not in names:
        _remove([replaced.path, *(file for file, _ in replaced.files.values())])
    now = Compacted(type(reader.run).open(path))
    for part in [part for part in now.left if _has_sources(history, part)]:
        _remove([part.path, *(file for file, _ in part.files.values())])
    dropped = _drop(history, now) if drop_sources else 0
    own = [part for part in now.parts if part.path.name in names]
    sources = [problem for problem in tables.problems(history) if folder not in problem.path.parents]
    found = [str(problem) for problem in [*sources, *now.problems()]]
    found += [problem for one in made for problem in one.problems]
    rows, size = sum(one.rows for one in made), sum(part.bytes for part in own)
    told = list(dict.fromkeys(found)), lost(history)
    return Compaction(str(path), len(now.parts), len(own), rows, size, dropped, *told)


def _has_sources(history: History, part: Part) -> bool:
    """Whether every frame that a part stands for is there and good: else the part is its only place."""
    reader = history.reading.reader
    files = by_name(reader.run)
    for name, cover in part.all():
        if name not in files:
            return False
        with reader.opened(files[name], newest=False) as segment:
            for slot, record in segment.entries(cover.first):
                if slot >= cover.stop:
                    break
                if record is None or record.type != schema.RecordType.FRAME:
                    continue
                if segment.frame(slot, record) is None:
                    return False
    return True


# -- what is left to do ------------------------------------------------------------------------------------


def _left(history: History) -> list[_Frame]:
    """Return the frames of finished windows that no part stands for, each with a step to place it by."""
    reader = history.reading.reader
    covered = history.reading.compacted.covered()
    steps = dict(zip(history.windows.windows.tolist(), history.windows.steps.tolist(), strict=True))
    commits = zip(history.commits.sids.tolist(), history.commits.table["commit"].to_pylist(), strict=True)
    of_commit = dict(zip(commits, history.commits.steps.tolist(), strict=True))
    found: list[_Frame] = []
    for sid, state in enumerate(history.reading.states):
        session = state.producer.session
        files = [file for file in reader.run.segments() if file.session == session]
        for stream in schema.Stream:
            own = [file for file in files if file.stream is stream]
            step_of = (
                partial(lambda sid, window: of_commit.get((sid, window), NONE), sid)
                if stream is schema.Stream.COMMITS
                else partial(lambda sid, window: steps.get(window_code(sid, window), NONE), sid)
            )
            found += _finished(reader, own, covered, _limit(state, stream), step_of)
    return found


def _limit(state: SessionState, stream: schema.Stream) -> int | None:
    """Return the newest window that is finished; None: the process is over, and so is all it wrote."""
    if state.ended or stream is schema.Stream.COMMITS:
        return None
    whole = state.payload if stream is schema.Stream.PAYLOAD else state.complete
    return max((stop - 1 for _, stop in whole.runs()), default=-1)


def _finished(
    reader: RunReader,
    files: Sequence[Any],
    covered: Mapping[Path, WindowSet],
    limit: int | None,
    step_of: Callable[[int], int],
) -> Iterator[_Frame]:
    """Yield the frames of one stream up to the limit, steps never going back, a window never in two steps."""
    open_windows: set[int] = set()
    held: list[_Frame] = []
    step = -1
    for place in reader.places(files):
        path, after = place.file.data, 0
        file = name_of(reader.run, place.file)
        kept = covered.get(path, ())
        with reader.opened(place.file, newest=place.newest) as segment:
            for slot, record in segment.entries() if segment.has_data else ():
                if record is None or record.type != schema.RecordType.FRAME:
                    continue
                if limit is not None and record.window > limit:
                    return
                step = max(step, step_of(record.window)) if record.window >= 0 else step
                if record.window >= 0 and not record.last_of_window:
                    open_windows.add(record.window)
                open_windows -= {record.window} if record.last_of_window else set()
                if slot not in kept:
                    held.append(_Frame(place.file.stream, file, after, slot, record.length, step))
                after = slot
                if not open_windows:
                    yield from (_at(frame, step) for frame in held)
                    held.clear()
    if limit is None:
        yield from (_at(frame, step) for frame in held)


def _at(frame: _Frame, step: int) -> _Frame:
    return frame if frame.step == step else replace(frame, step=step)


def _ranges(frames: Sequence[_Frame], part_bytes: int) -> Iterator[tuple[tuple[int, int], Frames]]:
    """Yield the frames in ranges of steps that hold about as many bytes as a part should, at least a step."""
    if not frames:
        return
    steps = np.array([frame.step for frame in frames], np.int64)
    distinct, of = np.unique(steps, return_inverse=True)
    sizes = np.bincount(of, weights=[frame.bytes for frame in frames])
    range_of = ((np.cumsum(sizes) - sizes) // max(1, part_bytes)).astype(np.int64)
    number = range_of[of]
    for one in np.unique(range_of).tolist():
        own = distinct[range_of == one]
        chosen = [frames[i] for i in np.flatnonzero(number == one).tolist()]
        yield (max(0, int(own[0])), max(0, int(own[-1]))), _as_ranges(chosen)


def _as_ranges(frames: Iterable[_Frame]) -> Frames:
    """Return frames by stream and file as ranges of places, with what is no frame before each of them."""
    found: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for frame in frames:
        ranges = found.setdefault(frame.stream.name.lower(), {}).setdefault(frame.file, [])
        if ranges and ranges[-1][1] == frame.after + 1:
            ranges[-1] = (ranges[-1][0], frame.place + 1)
        else:
            ranges.append((frame.after + 1, frame.place + 1))
    return {stream: {file: tuple(r) for file, r in those.items()} for stream, those in found.items()}


# -- a part ------------------------------------------------------------------------------------------------


def _written(task: Task) -> _Made:
    """Write a part, unless it is there. Pure."""
    folder = Path(task.run_dir) / FOLDER
    told = json.dumps([task.run, task.steps, task.frames], sort_keys=True)
    name = (
        f"{task.steps[0]:08d}-{task.steps[1]:08d}.{hashlib.blake2b(told.encode(), digest_size=8).hexdigest()}"
    )
    path = folder / f"{name}.json"
    try:
        part = read_part(path)
        if all(file.stat().st_size == stamp.size for file, stamp in part.files.values()):
            return _Made(path.name, read_json(path)["rows"])
    except (errors.ManifestError, OSError):
        pass
    covers, files, problems = write_part(Path(task.run_dir), name, task.frames)
    rows = sum(file["rows"] for file in files.values())
    if not covers:
        return _Made("", 0, problems)
    _keep(
        path,
        {
            "format": FORMAT,
            "run": task.run,
            "steps": list(task.steps),
            "rows": rows,
            "covers": {
                stream: {file: [list(asdict(cover).values()) for cover in own] for file, own in those.items()}
                for stream, those in covers.items()
            },
            "files": files,
        },
    )
    return _Made(path.name, rows, problems)


def _keep(path: Path, told: dict[str, Any]) -> None:
    """Write a JSON file, and bring it to the disk."""
    write_json(path, told)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _sweep(folder: Path) -> None:
    """Remove what a compaction that was killed left unfinished, once no other can be at it."""
    for path in folder.rglob(f".*{TEMPORARY}"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
        except OSError:
            continue  # another compaction was quicker


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


# -- dropping sources --------------------------------------------------------------------------------------


def _drop(history: History, compacted: Compacted) -> int:
    """Remove payload streams of which every frame is in a part that can be read; return how many bytes."""
    run, reader = history.reading.reader.run, history.reading.reader
    compacted.check()
    covered = compacted.covered()
    over = {state.producer.session for state in history.reading.states if state.ended}
    dropped = 0
    for file in run.segments(schema.Stream.PAYLOAD):
        if file.session not in over:
            continue
        with reader.opened(file, newest=False) as segment:
            there = segment.has_data
            frames = [i for i, r in segment.entries() if r is None or r.type == schema.RecordType.FRAME]
        if there and frames and covered.get(file.data, WindowSet()) >= set(frames):
            mark = run.moved_mark(file)
            mark.parent.mkdir(exist_ok=True)
            sync_folder(mark.parent.parent)
            _keep(mark, {})  # of its own: another compaction may be at it too
            with suppress(FileNotFoundError):  # the other was quicker
                size = file.data.stat().st_size
                file.data.unlink()
                dropped += size
    return dropped
