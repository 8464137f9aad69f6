"""Several runs as one new run directory: their steps moved, their attempts one after the other.

Every segment is written anew beside its index, frame by frame: what its index says of windows, losses and
signs of life stays as it is, and so does damage, which the new run tells as the old one did. Only steps and
attempt numbers change. A later run's attempts supersede an earlier one's from where they begin, as after a
restart.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from eventlog import Problem, RunDir, appearing, compressed_frame, errors, fixed, is_whole, open_file, schema

from . import tables
from .history import load
from .losses import lost
from .placing import window_code

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import IO

    from eventlog import SegmentFile

    from .history import History

_LAST: Final = (1 << 63) - 1
_STEPS: Final = {
    schema.Stream.RECORDS: ("step",),
    schema.Stream.COMMITS: ("global_step", "restored_step"),
    schema.Stream.PAYLOAD: (),
}


class Merged(NamedTuple):
    """What became of a run: its attempts' numbers now, how far its steps moved; what is damaged or lost."""

    path: str
    attempts: dict[int, int]
    offset: int
    problems: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()


def merge_runs(
    out: str | os.PathLike[str], *paths: str | os.PathLike[str], offsets: Sequence[int] = ()
) -> list[Merged]:
    """Write several runs as one new run; the inputs are only read.

    `offsets`: what to add to the steps of each run, or of each but the first. What trackers acknowledged is
    not taken over: the new run is a run of its own. NotARunError, FormatVersionError;
    RunDirectoryError where there is something at `out`, UnansweredError for runs that share a process.
    """
    target, sources = fixed(out), [Path(path) for path in paths]
    if len(sources) < 2:
        raise errors.QueryError(f"expected two runs or more, got {len(sources)}")
    moved = _checked(offsets, len(sources))
    try:
        with appearing(target) as unfinished:
            return _merged(unfinished, sources, moved)
    except OSError as error:
        raise errors.RunDirectoryError(
            f"expected to write the merged run, got {error.strerror or error}: {target}"
        ) from error


def _merged(target: Path, sources: Sequence[Path], moved: Sequence[int]) -> list[Merged]:
    histories = [load(path, str(path)) for path in sources]
    if bare := [history.reading for history in histories if history.reading.reader.run.moved()]:
        raise errors.UnansweredError(
            "expected runs with their payload streams, got one whose values are in tables alone: "
            f"{bare[0].label}"
        )
    _check_apart(histories)
    for history, offset in zip(histories, moved, strict=True):
        _check_steps(history, offset)
    return _written(RunDir.create(target), histories, moved)


def _checked(offsets: Any, n: int) -> list[int]:
    """Return an offset for each of n runs; QueryError for what says none."""
    listed = list(offsets) if isinstance(offsets, list | tuple) else None
    if listed is None or not all(map(is_whole, listed)):
        raise errors.QueryError(f"expected a list of offsets in steps, got {offsets!r}")
    given = [int(one) for one in listed]
    moved = [0, *given] if len(given) == n - 1 else given or [0] * n
    if len(moved) != n:
        raise errors.QueryError(f"expected an offset for each of {n} runs, got {len(listed)}")
    return moved


def _check_steps(history: History, offset: int) -> None:
    """Refuse to move steps to where there are none."""
    said = [history.commits.table["global_step"], history.records.table["step"]]
    known = [column.drop_null().to_numpy() for column in said]
    steps = np.concatenate(
        [*known, [s for s in history.timeline.owned_from.values() if s is not None]]
    ).astype(np.int64)
    if not len(steps) or not offset:
        return
    first, last = int(steps.min()), int(steps.max())
    if not 0 <= first + offset <= last + offset <= _LAST:
        raise errors.QueryError(
            f"expected an offset that leaves steps {first} to {last} at 0 or above, got {offset}: "
            f"{history.reading.label}"
        )


def _check_apart(histories: Sequence[History]) -> None:
    seen: dict[str, str] = {}
    for history in histories:
        for producer in history.reading.producers:
            if producer.session in seen:
                raise errors.UnansweredError(
                    f"expected runs of different processes, got {producer.role}-{producer.rank} "
                    f"({producer.session}) in two of them: {seen[producer.session]}, {history.reading.label}"
                )
            seen[producer.session] = history.reading.label


def _written(run: RunDir, histories: Sequence[History], offsets: Sequence[int]) -> list[Merged]:
    made: list[Merged] = []
    taken = 0
    for history, offset in zip(histories, offsets, strict=True):
        own = sorted({*history.timeline.owned_from, *(claim.number for claim in history.reading.attempts)})
        attempts = {number: taken + i for i, number in enumerate(own)}
        taken += len(own)
        _claim(run, history, attempts, offset)
        copy = _Copy(run, history, attempts, offset)
        owns = history.reading.reader.run.owns
        foreign = {who.session for who in history.reading.producers if not owns(who.run)}
        for file in history.reading.reader.run.segments():
            producer = copy.producers.get(file.session)
            if producer is not None and file.session not in foreign:
                copy.segment(file, run.segment(file.stream, producer, file.number))
        told = tuple(map(str, tables.problems(history))), tuple(lost(history))
        made.append(Merged(history.reading.label, attempts, offset, *told))
    return made


def _claim(run: RunDir, history: History, attempts: Mapping[int, int], offset: int) -> None:
    """Claim the attempts, saying outright from which step each owns the run."""
    claims = {claim.number: claim for claim in history.reading.attempts}
    for old, new in attempts.items():
        claim = claims.get(old)
        first = history.timeline.owned_from.get(old)
        info: dict[str, Any] = {"session": min(history.leaders.get(old, ()), default=""), "config": {}}
        if claim is not None:
            info = {name: value for name, value in asdict(claim).items() if name != "number"}
        run.claim_attempt({**info, "resume_step": None if first is None else first + offset}, new)


class _Copy:
    """Writes the segments of one run anew."""

    def __init__(self, run: RunDir, history: History, attempts: Mapping[int, int], offset: int) -> None:
        self.producers = {p.session: replace(p, run=run.id) for p in history.reading.producers}
        self.tell = history.reading.reader.run.found.add
        self._attempts = attempts
        self._offset = offset
        self._sid = {producer.session: sid for sid, producer in enumerate(history.reading.producers)}
        windows = zip(history.windows.windows.tolist(), history.windows.attempts.tolist(), strict=True)
        self._of_window: dict[int, int] = dict(windows)
        rows = zip(history.commits.sids.tolist(), history.commits.table["commit"].to_pylist(), strict=True)
        self._of_commit = dict(zip(rows, history.commits.attempts.tolist(), strict=True))

    def segment(self, source: SegmentFile, target: SegmentFile) -> None:
        """Copy one segment record by record; of frames that no index vouches for nobody knows the steps."""
        with self._opened(source.index) as file:
            index = file.read() if file else b""
        target.folder.mkdir(parents=True, exist_ok=True)
        header = schema.IndexHeader.unpack(index[: schema.ENTRY_SIZE])
        with self._opened(source.data) as old:
            if header is not None and old is not None:
                self._moved(source, target, index, header.segment_uid, old)
            else:
                target.index.write_bytes(index or bytes(schema.ENTRY_SIZE))  # damage, as it is

    def _moved(
        self, source: SegmentFile, target: SegmentFile, index: bytes, uid: bytes, old: IO[bytes]
    ) -> None:
        with target.data.open("xb") as new, target.index.open("xb") as entries:
            entries.write(index[: schema.ENTRY_SIZE])
            frames = _Frames(self, source, old, new)
            for slot, start in enumerate(range(schema.ENTRY_SIZE, len(index), schema.ENTRY_SIZE)):
                entry = index[start : start + schema.ENTRY_SIZE]
                record = schema.IndexRecord.unpack(entry, uid)
                if record is not None and record.type == schema.RecordType.FRAME:
                    entry = frames.moved(slot, record).pack(uid)
                entries.write(entry)

    def _opened(self, path: Path) -> AbstractContextManager[IO[bytes] | None]:
        """Open a file of the run; what cannot be opened is a problem of it."""
        try:
            return os.fdopen(open_file(path), "rb")
        except FileNotFoundError:
            return nullcontext()
        except OSError as error:
            self.tell(Problem(path, f"cannot be opened: {error.strerror}"))
            return nullcontext()

    def said(self, metadata: dict[bytes, bytes], session: str) -> dict[bytes, bytes]:
        """Return what a segment's schema message says, for the new run."""
        known = metadata.get(b"attempt", b"")
        number = self._attempts.get(int(known)) if known.isdigit() else None
        new = b"" if number is None else str(number).encode()
        return {**metadata, b"run": self.producers[session].run.encode(), b"attempt": new}

    def rows(self, batch: pa.RecordBatch, stream: schema.Stream, session: str) -> pa.RecordBatch:
        """Return rows with their steps and attempts moved."""
        sid = self._sid[session]
        if stream is schema.Stream.COMMITS:
            old = [self._of_commit.get((sid, commit)) for commit in batch["commit"].to_pylist()]
        else:
            windows = batch["window"].to_pylist()
            old = [self._of_window.get(window_code(sid, w)) if w is not None else None for w in windows]
        columns = {"attempt": pa.array([None if o is None else self._attempts[o] for o in old], pa.int64())}
        for name in _STEPS[stream]:
            steps = batch[name]
            there = steps.is_valid().to_numpy(zero_copy_only=False)
            values = np.where(there, steps.fill_null(0).to_numpy() + self._offset, 0)
            columns[name] = pa.array(values, mask=~there)
        for name, column in columns.items():
            place = batch.schema.get_field_index(name)
            batch = batch.set_column(place, batch.schema.field(place), column)
        return batch


class _Frames:
    """Writes the frames of one segment anew, one after the other."""

    def __init__(self, copy: _Copy, source: SegmentFile, old: IO[bytes], new: IO[bytes]) -> None:
        self._copy = copy
        self._source = source
        self._old, self._new = old, new
        self._schema = schema.SCHEMAS[source.stream]
        self._first = True

    def moved(self, slot: int, record: schema.IndexRecord) -> schema.IndexRecord:
        """Write a frame; return its index record. What is damaged stays so, byte by byte."""
        self._old.seek(record.offset)
        data = self._old.read(record.length)
        offset = self._new.tell()
        first, self._first = self._first, False
        if len(data) != record.length or schema.crc32c(data) != record.crc:
            self._copy.tell(Problem(self._source.data, "damaged frame", slot, record.offset))
            self._new.write(data.ljust(record.length, b"\0"))
            return replace(record, offset=offset)
        if first:  # the schema message
            found = pa.ipc.read_schema(pa.py_buffer(data))
            self._schema = found.remove_metadata()
            said = self._copy.said(found.metadata or {}, self._source.session)
            data = found.with_metadata(said).serialize().to_pybytes()
        elif self._source.stream is not schema.Stream.PAYLOAD:
            batch = pa.ipc.read_record_batch(pa.py_buffer(data), self._schema)
            rows = self._copy.rows(batch, self._source.stream, self._source.session)
            data = compressed_frame(rows).to_pybytes()
        self._new.write(data)
        return replace(record, offset=offset, length=len(data), crc=schema.crc32c(data))
