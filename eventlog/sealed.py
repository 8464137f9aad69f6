"""A segment being read: what its index seals, and nothing else.

An index record is believed by its own checksum, and Arrow sees a frame only after the frame's was right.
Whatever is wrong becomes a `Problem`; no damage raises. What the writer has not finished is not damage.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from .conformity import conformed, misfit_of
from .entries import Entries, Sealed
from .files import open_file
from .message import Decoder, head, is_whole
from .rundir import Problem, Problems, Producer, SegmentFile
from .schema import (
    ENTRY_SIZE,
    FORMAT_MAJOR,
    SCHEMAS,
    IndexHeader,
    IndexRecord,
    RecordType,
    Stream,
    crc32c,
)
from .segment import FINGERPRINTS, from_metadata, said_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import Self

SILENT_SECONDS: Final = 30.0  # a process that gave no sign of life for so long counts as gone
_INDEX_CHUNK: Final = 1024 * ENTRY_SIZE
_TAIL_HEAD: Final = 1 << 16  # enough of a frame to judge it by
READ_BYTES: Final = 1 << 20  # frames that lie together are read together, up to so much …
_GAP_BYTES: Final = 1 << 16  # … with what is not wanted between them
_SAVED: Final = " (recover may save what they hold)"


@cache
def _decoder(stream: Stream, columns: tuple[str, ...] | None = None) -> Decoder:
    return Decoder(SCHEMAS[stream], columns)


class SealedSegment:
    """One segment as far as it is sealed; a context manager, as it holds two descriptors."""

    def __init__(
        self,
        file: SegmentFile,
        problems: Problems,
        *,
        newest: bool,
        dead: Callable[[], bool] = lambda: False,
        owns: Callable[[str], bool] = lambda run: True,  # noqa: ARG005 - says nothing of any
        columns: tuple[str, ...] | None = None,
    ) -> None:
        """Open it, to read all or some columns; `owns`: whether a run that it says it is of is this one.

        `newest`: its writer may still be at work in it, so an unsealed tail is no damage, unless the process
        is `dead`, which is asked only then.
        """
        self.file = file
        self.data_path, self.index_path = file.data, file.index
        self.header: IndexHeader | None = None  # None: nothing of the segment can be read
        self.producer: Producer | None = None
        self.attempt: int | None = None  # what its writer knew when it began the segment
        self.policy = ""  # of the payload, as its writer said; "": unknown
        self.machine = ""  # where its process ran, see `machine.here`; "": unknown
        self.seen_us = 0  # last sign of life, in what was read of the index
        self.ended = False  # whether the last record read is the end record
        self.unsealed = 0  # bytes of a frame being written, or that was when the process died
        self._problems, self._newest = problems, newest
        self._dead, self._owns, self._columns = dead, owns, columns
        self._last, self._sealed = 0, 0  # place and end of the last frame read of the index
        self.holes: set[int] = set()  # places of frames before which there are bytes that no record seals
        self._decoder: Decoder | None = None
        self.own = False  # whether the columns are those of this version
        self._index = self._open(self.index_path)
        self._data = self._open(self.data_path)
        self._size = _size(self._data)  # before the index is read: what lies behind its frames is one frame
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._index, self._data):
            if fd is not None:
                os.close(fd)
        self._index = self._data = None

    @property
    def slots(self) -> int:
        """How many whole records the index has now, the schema's included."""
        return max(0, _size(self._index) // ENTRY_SIZE - 1)

    @property
    def has_data(self) -> bool:
        """Whether the stream is there; a pruned segment has only its index left."""
        return self._data is not None

    @property
    def bytes(self) -> int:
        """Size of both files."""
        return _size(self._index) + _size(self._data)

    def _open(self, path: Path) -> int | None:
        try:
            return open_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(path, f"cannot be opened: {error.strerror}")
            return None

    def _report(self, path: Path, reason: str, slot: int | None = None, offset: int | None = None) -> None:
        self._problems.add(Problem(path, reason, slot, offset))

    def _read(self, fd: int | None, size: int, offset: int) -> bytes:
        """Read as much of it as is there."""
        if fd is None or (size := min(size, _size(fd) - offset)) <= 0:
            return b""
        try:
            data = os.pread(fd, size, offset)
            while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
                data += more
        except OSError as error:
            path = self.index_path if fd == self._index else self.data_path
            self._report(path, f"cannot be read: {error.strerror}", None, offset)
            return b""
        return data

    # The header and the schema

    def _begin(self) -> None:
        data = self._read(self._index, ENTRY_SIZE, 0)
        header = IndexHeader.unpack(data)
        if header is None:
            self._judge_header(data)
        elif header.major > FORMAT_MAJOR:
            got = f"{header.major}.{header.minor}"
            self._report(self.index_path, f"expected format {FORMAT_MAJOR}.x, got {got} of a newer release")
        elif (header.stream, header.segment) != (self.file.stream, self.file.number & 0xFFFF):
            self._report(self.index_path, f"is of segment {header.segment} of stream {header.stream}")
        else:
            self._accept(header)

    def _judge_header(self, data: bytes) -> None:
        unread = f"{self._size} bytes of frames are not read"
        if self._index is None and self._data is not None:
            self._report(self.index_path, f"is missing: {unread}")
        elif len(data) == ENTRY_SIZE or self._size:
            self._report(self.index_path, f"has no intact header: {unread}")

    def _accept(self, header: IndexHeader) -> None:
        """Decide by which schema frames are parsed: the built-in one, or another minor version's own."""
        if self._data is None:  # it was created since we looked
            self._data = self._open(self.data_path)
        self._problems.clear(self.index_path)
        if self._data is not None:
            self._problems.clear(self.data_path)
        written = self._written_schema(header.segment_uid)
        said = None if written is None else from_metadata(written)
        attempt = said_in(written, "attempt")
        self.attempt = int(attempt) if attempt.isdecimal() and attempt.isascii() else None
        self.policy, self.machine = said_in(written, "payload"), said_in(written, "machine")
        file = self.file
        named = (file.role, file.rank, file.started_us, file.session)
        if said and named != (said.role, said.rank, said.started_us, said.session):
            self._report(self.data_path, f"is of session {said.session} of {said.role}-{said.rank}")
            return
        self.producer = said
        if said and not self._owns(said.run):
            self._report(self.data_path, f"is of another run, {said.run}: not read")
            return
        self.header, self.seen_us = header, header.opened_us
        if header.fingerprint == FINGERPRINTS[file.stream]:
            self._decoder, self.own = _decoder(file.stream, self._columns), True
        elif written is not None:
            self._decoder = self._understood(written)
        elif self.slots:
            self._report(self.data_path, "has other columns than this version, and does not say which")

    def _written_schema(self, uid: bytes) -> pa.Schema | None:
        record = IndexRecord.unpack(self._read(self._index, ENTRY_SIZE, ENTRY_SIZE), uid)
        if record is None or (frame := self.frame(0, record)) is None:
            return None
        try:
            return pa.ipc.read_schema(pa.py_buffer(frame))
        except (pa.ArrowException, OSError) as error:
            self._report(self.data_path, f"has no schema: {error}", 0, 0)
            return None

    def _understood(self, written: pa.Schema) -> Decoder | None:
        if misfit := misfit_of(written, self.file.stream):
            self._report(self.data_path, misfit)
            return None
        return Decoder(written, self._columns)

    # The index

    def entries(self, start: int = 0) -> Iterator[tuple[int, IndexRecord | None]]:
        """Yield the index records behind the schema's, each with its place; None for a damaged one.

        Ends where the writer is now. `start` is the place to begin at.
        """
        for some in self.runs(start):
            yield from some.records()

    def runs(self, start: int = 0) -> Iterator[Entries]:
        """Yield the same by the thousand."""
        if self.header is None:
            return
        late = Entries.of(b"", start, self.header.segment_uid)
        slot, end = start, _size(self._index)  # a writer faster than the reader is not chased
        while chunk := self._read(self._index, min(_INDEX_CHUNK, end - _place(slot)), _place(slot)):
            whole = len(chunk) // ENTRY_SIZE
            found = Entries.of(chunk[: whole * ENTRY_SIZE], slot, self.header.segment_uid)
            found = late.and_then(found.behind(self._sealed))
            known, late = found.cut(0, found.known), found.cut(found.known)
            self._follow(known)
            yield known.cut(int(known.first == 0))  # the schema's
            slot += whole
            if len(chunk) % ENTRY_SIZE:
                break
        yield from self._judge_tail(late, max(0, end - _place(slot)), every=not start)

    def _follow(self, known: Entries) -> None:
        """Take what intact records, and bad ones between them, say of the segment."""
        for slot in (known.first + np.flatnonzero(~known.good)).tolist():
            self._report(self.index_path, "damaged index record", slot, _place(slot))
        if any(self._problems):
            for slot in (known.first + np.flatnonzero(known.good)).tolist():
                self._problems.clear(self.index_path, slot)
        if len(frames := known.table[known.frames]):
            for slot, size in known.holes(self._sealed):
                self.holes.add(slot)
                reason = f"lacks the records of {size} bytes of frames before this one"
                self._report(self.index_path, reason, slot, _place(slot))
            self._last = known.first + int(np.flatnonzero(known.frames)[-1])
            self._sealed = int(frames["offset"][-1] + frames["length"][-1])
        if len(known.good) and known.good[-1]:
            self.ended = bool(known.table["type"][-1] == RecordType.END)
        signs = known.good & np.isin(known.table["type"], (RecordType.HEARTBEAT, RecordType.END))
        self.seen_us = max([self.seen_us, *known.table["first_id"][signs].tolist()])

    def _judge_tail(self, suspects: Entries, torn: int, *, every: bool) -> Iterator[Entries]:
        """What lies behind the last good record is not yet written in a growing segment, damage in others."""
        growing = self._newest and not self.ended
        several = len(suspects.good)
        alive = growing and not ((several or torn) and self._dead())
        not_yet = alive and several == 1 and suspects.zero and not torn  # zeros of a new page
        if several and not not_yet:
            self._follow(suspects)
            yield suspects
        elif torn and not alive:
            reason = f"ends in {torn} bytes of an index record"
            self._report(self.index_path, reason, None, _size(self._index) - torn)
        elif self._sealed:
            self._judge_stream(growing=growing)
        elif every and self._data is not None:
            self._judge_unsealed(growing=growing)

    def _judge_unsealed(self, *, growing: bool) -> None:
        """Where nothing is sealed there is the schema at most: the writer seals it before the first frame."""
        found = head(self._read(self._data, min(self._size, _TAIL_HEAD), 0))
        if self._size > (found.size if found else 8) and not (growing and not self._dead()):
            reason = f"{self._size} bytes that nothing seals are not read{_SAVED}"
            self._report(self.data_path, reason, None, 0)

    def _judge_stream(self, *, growing: bool) -> None:
        """Behind the last sealed frame may be part of one: being written, cut by a crash or a full disk."""
        behind = max(0, self._size - self._sealed)
        begun = self._read(self._data, min(behind, _TAIL_HEAD), self._sealed)
        allowed = self._decoder is not None and self._decoder.may_begin(begun, behind)
        whole = is_whole(begun, behind)
        allowed &= growing or not (self.ended or whole)
        if behind and not (allowed and not (whole and self._dead())):
            reason = f"{behind} bytes behind the last sealed frame are not read{_SAVED if whole else ''}"
            self._report(self.data_path, reason, None, self._sealed)
        elif self.has_data and _size(self._data) < self._sealed and not (growing and not self._dead()):
            self._report(self.data_path, "ends before its last sealed frame does", self._last, self._size)
        else:
            self.unsealed = behind if growing else 0
            self._problems.clear(self.data_path, "tail")

    # Frames

    def frame(self, slot: int, record: IndexRecord) -> bytes | None:
        """Return the bytes of a frame when their checksum is right; None, and a problem, when not."""
        if self._data is None:
            if slot:
                self._report(self.data_path, "is missing, with the frames its index lists")
            return None
        return self._checked(slot, record, self._read(self._data, record.length, record.offset))

    def _checked(self, slot: int, record: IndexRecord, data: bytes) -> bytes | None:
        if len(data) < record.length:
            reason = f"expected a frame of {record.length} bytes, got {len(data)}"
        elif (found := crc32c(data)) != record.crc:
            reason = f"expected checksum {record.crc:#010x}, got {found:#010x}"
        else:
            self._problems.clear(self.data_path, slot)
            return data
        self._report(self.data_path, reason, slot, record.offset)
        return None

    def sealed(
        self, start: int = 0, wanted: Callable[[IndexRecord], bool] | None = None
    ) -> Iterator[list[Sealed]]:
        """Yield `entries` with the rows of all frames, or those that are wanted, as they are read together.

        The columns are those of this version. A damaged frame has no rows, and is a problem.
        """
        held: list[tuple[int, IndexRecord | None]] = []
        taken: list[tuple[int, IndexRecord]] = []  # the frames among them, which lie near each other
        first = end = 0
        for slot, record in self.entries(start):
            if record and record.type == RecordType.FRAME and (wanted is None or wanted(record)):
                stop = record.offset + record.length
                if not 0 <= record.offset - end <= _GAP_BYTES or stop - first > READ_BYTES:
                    yield self._filled(held, taken)
                    held, taken, first = [], [], record.offset
                taken.append((slot, record))
                end = stop
            held.append((slot, record))
        yield self._filled(held, taken)

    def _filled(
        self, held: Sequence[tuple[int, IndexRecord | None]], taken: Sequence[tuple[int, IndexRecord]]
    ) -> list[Sealed]:
        rows = self.rows(taken) if taken else {}
        return [Sealed(slot, record, slot in rows, rows.get(slot)) for slot, record in held]

    def rows(self, taken: Sequence[tuple[int, IndexRecord]]) -> dict[int, pa.RecordBatch | None]:
        """Read frames that lie near each other in one go, by their places; None for a damaged one."""
        rows: dict[int, pa.RecordBatch | None] = dict.fromkeys(slot for slot, _ in taken)
        if self._decoder is None:
            return rows
        first, end = taken[0][1].offset, taken[-1][1].offset + taken[-1][1].length
        data = self._read(self._data, end - first, first) if len(taken) > 1 else b""
        good: list[tuple[int, IndexRecord, bytes]] = []
        for slot, record in taken:
            place = record.offset - first
            if len(data) == end - first:
                frame = self._checked(slot, record, data[place : place + record.length])
            else:
                frame = self.frame(slot, record)
            if frame is not None:
                good.append((slot, record, frame))
        batches = self._decoder.batches([frame for _, _, frame in good])
        for (slot, record, _), batch in zip(good, batches, strict=True):
            rows[slot] = self._judged(slot, record, batch)
        return rows

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Read of the stream as much as is there."""
        return self._read(self._data, size, offset)

    def arrived(self, slots: Iterable[int]) -> None:
        """Take note that frames have the bytes that were written."""
        if any(self._problems):
            for slot in slots:
                self._problems.clear(self.data_path, slot)

    def batch(self, slot: int, record: IndexRecord) -> pa.RecordBatch | None:
        """Return a frame with the columns of this version; None, and a problem, when it is damaged."""
        if self._decoder is None or (frame := self.frame(slot, record)) is None:
            return None
        (found,) = self._decoder.batches([frame])
        return self._judged(slot, record, found)

    def _judged(
        self, slot: int, record: IndexRecord, batch: pa.RecordBatch | ValueError
    ) -> pa.RecordBatch | None:
        if isinstance(batch, ValueError) or batch.num_rows != record.rows:
            other = isinstance(batch, ValueError)
            reason = str(batch) if other else f"expected {record.rows} rows, got {batch.num_rows}"
            self._report(self.data_path, reason, slot, record.offset)
            return None
        return batch if self.own else conformed(batch, self.file.stream, self._columns)


def _size(fd: int | None) -> int:
    try:
        return 0 if fd is None else os.fstat(fd).st_size
    except OSError:  # a network file system that has forgotten the file
        return 0


def _place(slot: int) -> int:
    """Where an index record begins in the index."""
    return (1 + slot) * ENTRY_SIZE
