"""What of a run was written anew as Parquet, how far it can be trusted, and its rows.

`RUN/tables` holds *parts*. A part is a JSON file, written last, that names the frames it stands for, and
Parquet files, with checksums, of their rows as they were recorded:

    STEPS.HASH.json     steps, the frames by stream, the files
    STEPS.HASH.records.parquet, ….exports.parquet, ….commits.parquet      by session, in order
    STEPS.HASH.payload.parquet                                             by key, then window

Everything else about a row (its step, whether it counts) is found out when a run is opened, as always. A part
is used for a stream when it is intact, the indexes of the stream's frames are still what they were, and no
other part that is used stands for one of its frames; everything else is read from the frames. Payload tables
hold lists of numbers as their bytes: reading them costs no more than copying them.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eventlog import Problem, WindowSet, errors, is_there, open_file, read_json, schema

from .checked import CheckedFile, Stamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from eventlog import RunDir, SegmentFile

    Bools = NDArray[np.bool_]
    Places = NDArray[np.intp]

FOLDER: Final = "tables"
FORMAT: Final = 1
RECORDS, EXPORTS, COMMITS, PAYLOAD = "records", "exports", "commits", "payload"
# Which tables hold the rows of a stream; rows of one stream are trusted together.
TABLES: Final = {
    schema.Stream.RECORDS: (RECORDS, EXPORTS),
    schema.Stream.COMMITS: (COMMITS,),
    schema.Stream.PAYLOAD: (PAYLOAD,),
}
NUMBERS: Final = ("values32", "values64", "times", "selected")  # held as bytes
_PART: Final = re.compile(r"\d+-\d+\.[0-9a-f]{16}\.json")


@dataclass(frozen=True, slots=True)
class Cover:
    """Frames of one stream's segment: places [first, stop) of its index, whose bytes have a checksum."""

    first: int
    stop: int
    crc: int

    def holds(self, slot: int) -> bool:
        """Whether a place is among them."""
        return self.first <= slot < self.stop


def table_of(stream: schema.Stream, window: int) -> str:
    """Return which table holds the rows of a frame: those of exports belong to no window."""
    return TABLES[stream][stream is schema.Stream.RECORDS and window < 0]


def name_of(run: RunDir, file: SegmentFile) -> str:
    """Return how parts name a segment: its data file, within the run."""
    return file.data.relative_to(run.path).as_posix()


def by_name(run: RunDir, *streams: schema.Stream) -> dict[str, SegmentFile]:
    """Return the segments of a run, of some streams, by how parts name them."""
    return {name_of(run, file): file for file in run.segments(*streams)}


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of some frames, as Parquet. `covers` has them by segment, under its `name_of`."""

    path: Path
    run: str  # id of the run
    first: int  # step
    last: int
    covers: Mapping[schema.Stream, Mapping[str, Sequence[Cover]]]
    files: Mapping[str, tuple[Path, Stamp]]

    @property
    def frames(self) -> int:
        """How many places of indexes it stands for."""
        return sum(cover.stop - cover.first for _, cover in self.all())

    def all(self, *streams: schema.Stream) -> Iterator[tuple[str, Cover]]:
        """Yield every range of frames, or those of some streams, with its segment."""
        for stream in streams or self.covers:
            for file, covers in self.covers.get(stream, {}).items():
                yield from ((file, cover) for cover in covers)

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(stamp.size for _, stamp in self.files.values())


def read_part(path: Path) -> Part:
    """Read what a part says of itself; ManifestError when it is damaged."""
    told = read_json(path)
    if (written := told.get("format")) != FORMAT:
        raise errors.ManifestError(f"expected tables of format {FORMAT}, got {written}: {path}")
    try:
        covers = {
            schema.Stream[stream.upper()]: {
                file: tuple(Cover(*map(int, numbers)) for numbers in ranges) for file, ranges in those.items()
            }
            for stream, those in told["covers"].items()
        }
        files = {name: (path.with_name(file["name"]), Stamp.of(file)) for name, file in told["files"].items()}
        return Part(path, str(told["run"]), int(told["steps"][0]), int(told["steps"][1]), covers, files)
    except (KeyError, TypeError, ValueError) as error:
        raise errors.ManifestError(f"expected a part of compacted tables, got {error!r}: {path}") from error


def index_checksum(data: Path, first: int, stop: int) -> int:
    """Return the CRC32C of places [first, stop) of a segment's index; OSError when they are not there."""
    start, size = (1 + first) * schema.ENTRY_SIZE, (stop - first) * schema.ENTRY_SIZE
    with os.fdopen(open_file(data.with_suffix(".idx")), "rb") as index:
        index.seek(start)
        entries = index.read(size)
    if len(entries) != size:
        raise OSError(f"expected {stop - first} index records, got {len(entries) // schema.ENTRY_SIZE}")
    return schema.crc32c(entries)


class Compacted:
    """The parts of one run that are used. Damage never raises: what is damaged is read from the frames."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._bad: set[tuple[Path, schema.Stream]] = set()
        self.parts: list[Part] = []
        self.left: list[Part] = []  # that others stand in for
        self.unfit: list[Part] = []  # that stand for frames whose index has changed
        taken: dict[str, list[Cover]] = {}
        found = [part for part in map(self._read, self._paths()) if part is not None]
        # Of two compactions at once, or of one cut off while it replaced a part, the fuller part stands.
        for part in sorted(found, key=lambda part: (-part.frames, part.path.name)):
            if any(_meet(cover, other) for file, cover in part.all() for other in taken.get(file, ())):
                self.left.append(part)
                continue
            fitting = [stream for stream in part.covers if self._fits(part, stream)]
            if len(fitting) < len(part.covers):
                self.unfit.append(part)
            if fitting:
                self.parts.append(part)
                self._bad |= {(part.path, stream) for stream in part.covers if stream not in fitting}
                for file, cover in part.all(*fitting):
                    taken.setdefault(file, []).append(cover)
        self.parts.sort(key=lambda part: (part.first, part.last, part.path.name))

    def _paths(self) -> list[Path]:
        folder = self._run.path / FOLDER
        return [folder / name for name in self._run.listed(folder) if _PART.fullmatch(name)]

    def _read(self, path: Path) -> Part | None:
        try:
            return read_part(path)
        except errors.ManifestError as error:
            if not is_there(path):  # a compaction has just replaced it: there are frames
                return None
            self._run.found.add(Problem(path, f"is not used: {str(error).rsplit(': ', 1)[0]}"))
            return None

    def _fits(self, part: Part, stream: schema.Stream) -> bool:
        """Whether the frames of a stream that it stands for are still those that it was made of."""
        for file, cover in part.all(stream):
            try:
                same = index_checksum(self._run.path / file, cover.first, cover.stop) == cover.crc
            except OSError:
                same = False
            if not same:
                self._run.found.add(Problem(part.path, f"is not used: {file} is not what it was made of"))
                return False
        return True

    def trusted(self, stream: schema.Stream) -> list[Part]:
        """Return the parts that are used for a stream and stand for some of it."""
        return [p for p in self.parts if stream in p.covers and (p.path, stream) not in self._bad]

    def told(self, stream: schema.Stream) -> list[Part]:
        """Return the parts of this run that may hold rows of a stream, those that are used first.

        Of the others an index has changed: what the rest of it still says may be asked of them.
        """
        used, run = self.trusted(stream), self._run.id
        return used + [p for p in self.unfit if stream in p.covers and p.run == run and p not in used]

    def check(self) -> None:
        """Read every byte of the parts: what is damaged becomes a problem, and is not used."""
        for part in self.parts:
            for stream, names in TABLES.items():
                for name in [name for name in names if name in part.files]:
                    try:
                        CheckedFile(*part.files[name]).read()
                    except OSError as error:
                        self._give_up(part, stream, name, error)

    def problems(self) -> list[Problem]:
        """Return why parts are not used."""
        return self._run.problems

    def covered(self) -> dict[Path, WindowSet]:
        """Return the frames that need not be read, as `RunReader.leave_out` takes them."""
        found: dict[Path, WindowSet] = {}
        for stream in schema.Stream:
            for part in self.trusted(stream):
                for file, cover in part.all(stream):
                    found.setdefault(self._run.path / file, WindowSet()).update(cover.first, cover.stop)
        return found

    def tables(self, stream: schema.Stream) -> dict[str, list[pa.Table]]:
        """Return the tables of a stream's rows, part by part; a part of which one is damaged gives none."""
        found: dict[str, list[pa.Table]] = {name: [] for name in TABLES[stream]}
        for part in self.trusted(stream):
            own: dict[str, pa.Table] = {}
            for name in found.keys() & part.files.keys():
                try:
                    own[name] = _opened(*part.files[name]).read()
                except (OSError, pa.ArrowException) as error:
                    self._give_up(part, stream, name, error)
                    break
            else:
                for name, table in own.items():
                    found[name].append(table)
        return found

    @cached_property
    def _payload(self) -> list[tuple[Part, PayloadTable]]:
        found: list[tuple[Part, PayloadTable]] = []
        for part in self.parts:
            if PAYLOAD in part.files:
                try:
                    found.append((part, PayloadTable(*part.files[PAYLOAD])))
                except (OSError, pa.ArrowException) as error:
                    self._give_up(part, schema.Stream.PAYLOAD, PAYLOAD, error)
        return found

    def payload(
        self, places: Callable[[str, NDArray[np.int64]], Places], chosen: Bools
    ) -> Iterator[tuple[Places, pa.RecordBatch]]:
        """Yield (the record of each row, rows) of what holds chosen records; `covered` may be less after it.

        `places` says where the records of a session are. All rows of a record come together.
        """
        for part, table in self._payload:
            if (part.path, schema.Stream.PAYLOAD) in self._bad:
                continue
            try:
                yield from table.groups(places, chosen)
            except (OSError, pa.ArrowException) as error:
                self._give_up(part, schema.Stream.PAYLOAD, PAYLOAD, error)

    def _give_up(self, part: Part, stream: schema.Stream, name: str, error: Exception) -> None:
        self._bad.add((part.path, stream))
        if not (is_there(part.path) or self._run.moved()):
            return  # a compaction has replaced it since: there are frames
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        self._run.found.add(Problem(part.files[name][0], f"is not used: {said}"))


class PayloadTable:
    """The payload of a part."""

    def __init__(self, path: Path, stamp: Stamp) -> None:
        """Open it and read whose its rows are; OSError or ArrowException when it is damaged."""
        self._file = _opened(path, stamp)
        whose = self._file.read(["session", "record_id"]).unify_dictionaries()
        sessions = whose["session"].combine_chunks()
        self._sessions = sessions.dictionary.to_pylist()
        self._of = sessions.indices.to_numpy()
        self._ids = whose["record_id"].to_numpy()
        groups = self._file.metadata
        sizes = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
        self._stops = np.cumsum([0, *sizes])
        self._places: Places | None = None

    def of(self, session: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a process, as far as they are intact."""
        if session not in self._sessions:
            return
        number = self._sessions.index(session)
        for i, (start, stop) in enumerate(zip(self._stops[:-1], self._stops[1:], strict=True)):
            own = np.flatnonzero(self._of[start:stop] == number)
            with suppress(OSError, pa.ArrowException):
                if len(own):
                    yield _as_recorded(self._file.read_row_group(i).take(pa.array(own)))

    def groups(
        self, places: Callable[[str, NDArray[np.int64]], Places], chosen: Bools
    ) -> Iterator[tuple[Places, pa.RecordBatch]]:
        """Yield (places, rows) of the row groups that hold chosen records."""
        if self._places is None:  # they are the same each time: there is one run
            self._places = np.full(len(self._ids), -1, np.intp)
            for i, session in enumerate(self._sessions):
                own = np.flatnonzero(self._of == i)
                self._places[own] = places(session, self._ids[own])
        for i, (start, stop) in enumerate(zip(self._stops[:-1], self._stops[1:], strict=True)):
            own = self._places[start:stop]
            if chosen[own].any():
                yield own, _as_recorded(self._file.read_row_group(i))


def recorded(part: Part, name: str, session: str) -> pa.Table:
    """Return the rows of a process in a table of a part as they were recorded, as far as they are intact."""
    kind = schema.COMMITS if name == COMMITS else schema.PAYLOAD if name == PAYLOAD else schema.RECORDS
    found: list[pa.RecordBatch] = []
    with suppress(KeyError, OSError, pa.ArrowException):
        file = part.files[name]
        found.extend(PayloadTable(*file).of(session) if name == PAYLOAD else _texts_of(file, kind, session))
    return pa.Table.from_batches(found, kind)


def _texts_of(file: tuple[Path, Stamp], kind: pa.Schema, session: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a process in a table of texts; what it has no column for was null in such rows."""
    table = _opened(*file)
    for i in range(table.num_row_groups):
        with suppress(OSError, pa.ArrowException):
            rows = table.read_row_group(i)
            sessions = rows["session"].unify_dictionaries().combine_chunks()
            known = sessions.dictionary.to_pylist()
            if session not in known:
                continue
            rows = rows.filter(pa.array(sessions.indices.to_numpy() == known.index(session)))
            names = set(rows.column_names)
            columns = [
                rows[f.name].cast(f.type) if f.name in names else pa.nulls(len(rows), f.type) for f in kind
            ]
            yield from pa.table(columns, schema=kind).combine_chunks().to_batches()


def as_stored(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the columns of payload rows as the tables hold them."""
    names = batch.schema.names
    return {name: _bytes(batch[name]) if name in NUMBERS else batch[name] for name in names}


def _as_recorded(table: pa.Table) -> pa.RecordBatch:
    table = table.combine_chunks()
    columns: list[pa.Array] = []
    for field in schema.PAYLOAD:
        column = table[field.name].combine_chunks()
        columns.append(_numbers(column, field.type) if field.name in NUMBERS else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema.PAYLOAD)


def _bytes(lists: pa.Array) -> pa.Array:
    """Return lists of numbers as the bytes of each."""
    if lists.null_count == len(lists):
        return pa.nulls(len(lists), pa.large_binary())
    lists = pa.concat_arrays([lists])  # without an offset
    width = lists.type.value_type.bit_width // 8
    items = lists.values
    data = items.buffers()[1]
    if data is not None:
        data = data[items.offset * width : (items.offset + len(items)) * width]
    offsets = pa.py_buffer(lists.offsets.to_numpy() * width)
    return pa.Array.from_buffers(pa.large_binary(), len(lists), [_validity(lists), offsets, data])


def _numbers(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return bytes as the lists of numbers they are."""
    if column.null_count == len(column):
        return pa.nulls(len(column), kind)
    width = kind.value_type.bit_width // 8
    column = pa.concat_arrays([column.cast(pa.large_binary())])
    offsets = np.frombuffer(column.buffers()[1], np.int64)[: len(column) + 1] // width
    items = pa.Array.from_buffers(kind.value_type, int(offsets[-1]), [None, column.buffers()[2]])
    buffers = [_validity(column), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(column), buffers, children=[items])


def _validity(column: pa.Array) -> pa.Buffer | None:
    if not column.null_count:
        return None
    return pa.py_buffer(np.packbits(column.is_valid().to_numpy(zero_copy_only=False), bitorder="little"))


def _opened(path: Path, stamp: Stamp) -> pq.ParquetFile:
    return pq.ParquetFile(pa.PythonFile(CheckedFile(path, stamp), "r"))


def _meet(one: Cover, other: Cover) -> bool:
    return one.first < other.stop and other.first < one.stop
