"""What can be saved of a segment, decided without trusting a byte that no checksum vouches for.

Frames that the index seals are taken when they are good. Where the index is damaged or lost the stream is
walked by the heads of its messages, which is safe with any bytes; a `Judge` finds out what those hold.
"""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from .conformity import as_written, misfit_of
from .message import Decoder, compressed_frame, serialize
from .schema import (
    LAST_OF_WINDOW,
    NO_WINDOW,
    SCHEMAS,
    IndexHeader,
    IndexRecord,
    LossCause,
    RecordType,
    Stream,
    crc32c,
    fingerprint,
)
from .segment import FINGERPRINTS, from_metadata, to_metadata
from .source import HEAD_BYTES
from .windows import WindowSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

    from .judge import Judge
    from .rundir import Producer, SegmentFile
    from .source import Source

    # All rows of a frame by its segment and its place in the index; None where nobody has them.
    Kept = Callable[[SegmentFile, int], pa.RecordBatch | None]

# The plan


@dataclass(slots=True)
class Piece:
    """An index record of the copy, and for a frame where its bytes lie."""

    record: IndexRecord
    at: int | None = None  # None: no frame
    sealed: bool = True  # whether a checksum vouches for it
    kept: bool = False  # whether its bytes lie in the plan's `spool`, not in the stream


@dataclass(slots=True)
class Plan:
    """What is taken of a segment, in order, and what is not."""

    schema: bytes | None = None  # as it was written; None: the copy gets that of this version
    pieces: list[Piece] = field(default_factory=list[Piece])
    discarded: int = 0  # frames, and places where some may have been
    discarded_bytes: int = 0
    unfinished: int = 0  # bytes of a frame that was being written when the process stopped
    tombstone: bool = False  # the index alone is kept
    reasons: list[str] = field(default_factory=list[str])
    spool: BinaryIO | None = None  # frames made anew of rows that were kept elsewhere

    @property
    def frames(self) -> list[Piece]:
        """The frames that are taken."""
        return [piece for piece in self.pieces if piece.at is not None]

    def leave(self, reason: str, size: int) -> None:
        """Note what is not taken, though the process has lost nothing by it."""
        self.reasons.append(reason)
        self.discarded += 1
        self.discarded_bytes += size

    def discard(self, reason: str, size: int, window: int = NO_WINDOW, rows: int = 0) -> None:
        """Note a loss, in the copy too."""
        self.leave(reason, size)
        self.lose(window, size, rows)

    def take(self, record: IndexRecord, frame: pa.Buffer, folder: Path) -> None:
        """Take a frame made anew of rows kept elsewhere; until it is written it lies in the folder."""
        self.spool = self.spool or tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it goes with the plan
        at = self.spool.seek(0, os.SEEK_END)
        self.spool.write(frame)
        self.pieces.append(Piece(replace(record, length=frame.size, crc=crc32c(frame)), at, kept=True))

    def lose(self, window: int, size: int = 0, rows: int = 0) -> None:
        """Let the copy say that something of a window is lost, before it says that the process ended."""
        ended = bool(self.pieces) and self.pieces[-1].record.type == RecordType.END
        self.pieces.insert(len(self.pieces) - ended, Piece(_lost(window, size, rows)))


class Planner:
    """Plans the copies of one session's segments of one stream, in their order."""

    def __init__(
        self, stream: Stream, judge: Judge, window_of: Callable[[int], int], folder: Path, kept: Kept | None
    ) -> None:
        """`window_of` a record id is asked for payload; `folder` keeps what `kept` has till it is written."""
        self._folder = folder
        self._kept = kept
        self._stream = stream
        self._judge = judge
        self._window_of = window_of
        self._own = Decoder(SCHEMAS[stream])
        self._next: dict[int, int] = {}  # window: number of its next frame
        self._ids = WindowSet()  # of the records or commits in the frames taken …
        self._frames: set[tuple[int, int]] = set()  # … and their lengths and checksums

    def refuse(self, source: Source, reason: str) -> Plan:
        """Take nothing of a segment."""
        plan = Plan()
        plan.discard(reason, source.size)
        return plan

    def forgo(self, source: Source, reason: str) -> Plan:
        """Take nothing of a segment whose index is whole: what there was in it is counted, and noted."""
        plan = Plan()
        for _, record in source.records():
            if record.type == RecordType.FRAME:
                plan.discarded += 1
                plan.discarded_bytes += record.length
                plan.lose(record.window, record.length, record.rows)
            else:
                plan.pieces.append(Piece(record))
        plan.reasons.append(f"{plan.discarded} frames: {reason}")
        return plan

    def tombstone(self, source: Source) -> Plan:
        """Keep the index of a segment whose stream its process removed."""
        return Plan(pieces=[Piece(record) for _, record in source.records()], tombstone=True)

    def plan(self, source: Source) -> Plan:
        """Decide what is taken of a segment."""
        plan = Plan(source.schema())
        written = None if plan.schema is None else pa.ipc.read_schema(pa.py_buffer(plan.schema))
        if reason := self._foreign(source, written):
            return self.refuse(source, reason)
        own = source.header is None or source.header.fingerprint == FINGERPRINTS[self._stream]
        decoder = self._own if own or written is None else Decoder(written)
        place, told = source.begin, 0
        for slot, record in source.records():
            lacking, told = slot - told - 1, slot
            if record.type == RecordType.END:
                if lacking:
                    self._fill(plan, source, place, source.size, decoder, tail=True)
                elif behind := source.size - place:
                    plan.leave(f"{behind} bytes at {place} lie behind the end of the stream", behind)
                place = source.size
            if record.type != RecordType.FRAME:
                plan.pieces.append(Piece(record))
                continue
            if record.offset < place:
                continue  # the same frame a second time
            self._fill(plan, source, place, min(record.offset, source.size), decoder)
            self._take(plan, source, slot, record, decoder)
            place = max(place, min(source.size, record.offset + record.length))
        self._fill(plan, source, place, source.size, decoder, tail=True)
        if not source.has_data and (torn := source.torn):
            plan.discard(f"{torn} index records: damaged, and the stream that they tell of is missing", 0)
        self._take_once(plan)
        self._number(plan)
        return plan

    def _foreign(self, source: Source, written: pa.Schema | None) -> str:
        """Say why a segment is none of this stream and session, or cannot be understood; "" when it is."""
        if written is None:
            other = source.header is not None and source.header.fingerprint != FINGERPRINTS[self._stream]
            return "has other columns than this version, and does not say which" if other else ""
        said, file = from_metadata(written), source.file
        named = (file.role, file.rank, file.started_us, file.session)
        if said and named != (said.role, said.rank, said.started_us, said.session):
            return f"is of session {said.session} of {said.role}-{said.rank}"
        return misfit_of(written, self._stream)

    def _take(self, plan: Plan, source: Source, slot: int, record: IndexRecord, decoder: Decoder) -> None:
        reason = "damaged" if source.has_data else "missing"
        if (frame := source.frame(record)) is not None:
            try:
                rows = decoder.batch(frame).num_rows
                reason = "" if rows == record.rows else f"expected {record.rows} rows, got {rows}"
            except ValueError as error:
                reason = str(error)
        where = f"frame {slot} at {record.offset}, window {record.window}"
        if not reason:
            plan.pieces.append(Piece(record, record.offset))
        elif (kept := self._kept(source.file, slot) if self._kept else None) is None:
            plan.discard(f"{where}: {reason}", record.length, record.window, record.rows)
        else:
            rows, lacking = as_written(kept, decoder.schema)
            own = decoder is self._own
            frame = serialize(rows, self._stream) if own else compressed_frame(rows)
            plan.take(record, frame, self._folder)
            if lacking:
                plan.leave(f"{where}: {reason}, and no table has its columns {', '.join(lacking)}", 0)

    def _fill(
        self, plan: Plan, source: Source, start: int, stop: int, decoder: Decoder, *, tail: bool = False
    ) -> None:
        """Look for frames where the index says nothing, up to where another stream begins."""
        place = start
        for at, size in source.walk(start, stop, self._own) if decoder is self._own else ():
            self._skip(plan, source, place, at)
            if not size:
                plan.leave(f"{stop - at} bytes at {at} are a second stream", stop - at)
                return
            place = at + size
            seen = self._judge.look(source.file.data, at, size, self._stream)
            if isinstance(seen, str):
                plan.discard(f"frame at {at}: {seen}", size)
                continue
            window = self._window_of(seen.first_id) if self._stream is Stream.PAYLOAD else seen.window
            ids, crc = (seen.first_id, seen.last_id), crc32c(source.read(at, size))
            record = IndexRecord(RecordType.FRAME, window, 0, 0, 0, *ids, at, size, seen.rows, crc)
            plan.pieces.append(Piece(record, at, sealed=False))
        self._skip(plan, source, place, stop, tail=tail)

    def _skip(self, plan: Plan, source: Source, start: int, stop: int, *, tail: bool = False) -> None:
        if start >= stop:
            return
        size = stop - start
        if tail and self._own.may_begin(source.read(start, min(HEAD_BYTES, size)), size):
            plan.unfinished = size
        else:
            plan.discard(f"{size} bytes at {start} hold no frame", size)

    def _take_once(self, plan: Plan) -> None:
        """Let go of found frames whose rows were taken before: of a stream that was appended to itself.

        Several frames may hold parts of a record's payload, and of a large commit: these lie in a row.
        """
        for piece in plan.frames:
            if piece.sealed:
                self._remember(piece.record)
        again, before = set[int](), IndexRecord(RecordType.FRAME)
        for piece in plan.frames:
            record, (first, last) = piece.record, self._ids_of(piece.record)
            goes_on = before.window == record.window and before.offset + before.length == record.offset
            before = record
            if piece.sealed:
                continue
            shared = self._stream is Stream.PAYLOAD or (self._stream is Stream.COMMITS and goes_on)
            known = not shared and (first in self._ids or last in self._ids)
            if known or (record.length, record.crc) in self._frames:
                again.add(id(piece))
                plan.leave(f"frame at {record.offset}: its rows are there already", record.length)
            else:
                self._remember(record)
        plan.pieces = [piece for piece in plan.pieces if id(piece) not in again]

    def _remember(self, record: IndexRecord) -> None:
        first, last = self._ids_of(record)
        self._frames.add((record.length, record.crc))
        self._ids.update(first, last + 1)

    def _ids_of(self, record: IndexRecord) -> tuple[int, int]:
        commits = self._stream is Stream.COMMITS
        return (record.window, record.window) if commits else (record.first_id, record.last_id)

    def _number(self, plan: Plan) -> None:
        """Give frames that no index speaks for their place in their window.

        Such a frame ends its window when the next one, right behind it, is of another: at the end of a
        stream, and before a hole, nobody knows. Most commits are one frame: the last one found ends it.
        """
        frames = plan.frames
        for piece, behind in zip(frames, [*frames[1:], None], strict=False):
            record = piece.record
            number = record.frame if piece.sealed else self._next.get(record.window, 0)
            self._next[record.window] = number + 1
            if piece.sealed:
                continue
            goes_on = behind is not None and behind.record.window == record.window
            touches = behind is not None and behind.at == record.offset + record.length
            last = record.window >= 0 and not goes_on and (touches or self._stream is Stream.COMMITS)
            piece.record = replace(record, frame=number, flags=LAST_OF_WINDOW if last else 0)


def write(plan: Plan, source: Source, copy: SegmentFile, producer: Producer) -> None:
    """Write a segment as planned, and let go of the plan; FileExistsError when it is there already.

    A frame that cannot be read any more, because the run lives and prunes, becomes a loss.
    """
    with plan.spool or nullcontext():
        _write(plan, source, copy, producer)


def _write(plan: Plan, source: Source, copy: SegmentFile, producer: Producer) -> None:
    uid, place = os.urandom(16), 0
    schema = plan.schema or _schema(copy.stream, producer)
    columns = fingerprint(pa.ipc.read_schema(pa.py_buffer(schema)))
    opened = source.header.opened_us if source.header else copy.started_us
    header = IndexHeader(copy.stream, copy.number & 0xFFFF, uid, columns, opened)
    copy.folder.mkdir(parents=True, exist_ok=True)
    with copy.index.open("xb") as index, _stream(copy, plan) as data:
        index.write(header.pack())
        first = IndexRecord(RecordType.FRAME, length=len(schema), crc=crc32c(schema))
        index.write(first.pack(uid))
        place += data.write(schema)
        for piece in plan.pieces:
            record = piece.record
            if plan.tombstone and record.type == RecordType.FRAME:  # behind the schema of this copy
                record = replace(record, offset=place)
                place += record.length
            elif piece.at is not None:
                frame = _bytes_at(plan, piece, source)
                crc = crc32c(frame)
                if len(frame) < record.length or (piece.sealed and crc != record.crc):
                    record = _lost(record.window, record.length, record.rows)
                else:
                    record = replace(record, offset=place, crc=crc)
                    place += data.write(frame)
            index.write(record.pack(uid))


def _bytes_at(plan: Plan, piece: Piece, source: Source) -> bytes:
    if not piece.kept or plan.spool is None:
        return source.read(piece.at or 0, piece.record.length)
    plan.spool.seek(piece.at or 0)
    return plan.spool.read(piece.record.length)


def _stream(copy: SegmentFile, plan: Plan) -> BinaryIO:
    return io.BytesIO() if plan.tombstone else copy.data.open("xb")


def _schema(stream: Stream, producer: Producer) -> bytes:
    said = to_metadata(producer, stream, None)
    return SCHEMAS[stream].with_metadata(said).serialize().to_pybytes()


def _lost(window: int, size: int, rows: int) -> IndexRecord:
    return IndexRecord(RecordType.LOSS, window, cause=LossCause.DAMAGED, length=size, rows=rows)
