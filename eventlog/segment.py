"""A segment being written: an Arrow stream, and the index whose records seal its frames."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from . import extent
from .clock import now_us
from .files import is_gone, sync_folder
from .machine import here
from .parts import size
from .rundir import Producer, SegmentFile
from .schema import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
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
    packed,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from .parts import Part

_FORMAT: Final = f"{FORMAT_MAJOR}.{FORMAT_MINOR}"
FINGERPRINTS: Final = {stream: fingerprint(schema) for stream, schema in SCHEMAS.items()}
# A frame is checksummed and written in pieces that the processor's cache still holds the second time. After
# every write a thread that computes in Python may keep the interpreter for 5 ms: then they are larger.
_PIECE: Final = 256 << 10
_LARGE_PIECE: Final = 2 << 20
_HELD_UP: Final = 1e-3  # seconds for a piece that show it
_sync = getattr(os, "fdatasync", os.fsync)


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows that did not reach the disk."""

    stream: Stream
    cause: LossCause | int  # an int: a cause of a newer minor version
    window: int = NO_WINDOW
    rows: int = 0
    bytes: int = 0
    detail: str = ""  # known only in the process that lost them; what is known of what is MISSING
    step: int | None = None  # where it was known; else the window's commit says it

    @property
    def unbound(self) -> bool:
        """Whether its step is the one that a commit says of its window."""
        return self.step is None and self.window >= 0 and self.stream is not Stream.COMMITS

    def as_row(self, producer: Producer) -> dict[str, Any]:
        """Return it in words and numbers, with whose it is."""
        return {
            "role": producer.role,
            "rank": producer.rank,
            "session": producer.session,
            "stream": self.stream.name.lower(),
            "cause": getattr(self.cause, "name", str(self.cause)).lower(),
            "window": None if self.window < 0 else self.window,
            "step": self.step,
            "rows": self.rows,
            "bytes": self.bytes,
            "detail": self.detail or None,
        }

    def plus(self, other: Loss) -> Loss:
        """Return the two together, where they have stream, cause and window in common."""
        return replace(
            self,
            rows=self.rows + other.rows,
            bytes=self.bytes + other.bytes,
            detail=self.detail or other.detail,
            step=other.step if self.step is None else self.step,
        )


class Told(NamedTuple):
    """What a process says of itself with its signs of life."""

    waited_us: int = 0  # how long its callers waited
    not_durable: int = 0  # commits that were not on disk when they returned
    payload: int = 0  # segments of payload it has begun, and of commits …
    commits: int = -1  # … -1: it does not say

    def segments(self, stream: Stream) -> int:
        """Return how many segments of a stream there are at least."""
        return {Stream.RECORDS: 1, Stream.PAYLOAD: self.payload, Stream.COMMITS: self.commits}[stream]


NOTHING_TOLD: Final = Told()


class Pruned(NamedTuple):
    """A segment whose stream was removed to keep a budget."""

    number: int
    windows: tuple[int, int]  # the first and the last one with frames in it
    rows: int
    bytes: int


class FrameInfo(NamedTuple):
    """What the index says of a frame besides its place and checksum."""

    window: int = NO_WINDOW
    frame: int = 0  # within the window
    last: bool = False  # of the window
    first_id: int = 0
    last_id: int = -1
    rows: int = 0


def to_metadata(producer: Producer, stream: Stream, attempt: int | None, policy: str = "") -> dict[str, str]:
    """Return what the schema message of a segment says about its writer; `policy` is that of the payload."""
    said = {f.name: str(getattr(producer, f.name)) for f in fields(Producer)}
    known = "" if attempt is None else str(attempt)
    about = {"attempt": known, "stream": stream.name.lower(), "format": _FORMAT}
    return {**said, **about, "payload": policy, "machine": here()}


def from_metadata(schema: pa.Schema) -> Producer | None:
    """Return who wrote a segment, by its schema message; None when that does not say."""
    try:
        said = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        run, session, role, world, host = (said[n] for n in ("run", "session", "role", "world", "host"))
        rank, world_size, pid, start = (int(said[n]) for n in ("rank", "world_size", "pid", "started_us"))
    except (KeyError, ValueError):
        return None
    return Producer(run, session, role, rank, world, world_size, host, pid, start)


def said_in(written: pa.Schema | None, name: str) -> str:
    """Return what the schema message of a segment says under a name; "" when it does not."""
    metadata = {} if written is None else written.metadata or {}
    return metadata.get(name.encode(), b"").decode(errors="replace")


def _write_all(fd: int, data: Part) -> None:
    done = os.write(fd, data)
    if done == len(data):
        return
    view = memoryview(data)
    while done < len(view):
        if not (wrote := os.write(fd, view[done:])):
            raise OSError(errno.EIO, "nothing was written")
        done += wrote


def _write_checked(fd: int, parts: list[Part], place: int) -> int:
    """Write a frame at a place of a file; return its checksum."""
    if len(parts) == 1 and len(parts[0]) <= _PIECE:
        _write_all(fd, parts[0])
        return crc32c(parts[0])
    crc, most = 0, _PIECE
    for part in parts:
        done, end = 0, len(part)
        while done < end:
            # Pieces end where pages do: the kernel fills one once.
            stop = end if end - done <= most else done + most - (place + done) % most
            piece = part if stop - done == end else part[done:stop]
            crc = crc32c(piece, crc=crc)
            began = time.monotonic()
            _write_all(fd, piece)
            if time.monotonic() - began > _HELD_UP:
                most = _LARGE_PIECE
            done = stop
        place += end
    return crc


class SegmentWriter:
    """The only writer of the two files of a segment.

    After an OSError other than NoRoomError nothing but `leave` may be called.
    """

    def __init__(
        self, file: SegmentFile, producer: Producer, attempt: int | None = None, policy: str = ""
    ) -> None:
        """Create both files: the index first, so that a stream without one is damage."""
        self.file = file
        self.size = 0  # of the stream
        self.frames = 0  # sealed, the schema not counted
        self.unsynced = 0  # bytes
        self.rows = 0
        self.windows = NO_WINDOW, NO_WINDOW  # the first and last one with frames here
        self.said: list[Loss] = []  # losses noted before the first frame: they go with the files in `leave`
        self.stays = False  # whether the files hold what stands nowhere else: a frame, or what was pruned
        self._named = False  # whether the files' names are on the disk
        self._room = extent.Room() if file.stream is Stream.PAYLOAD else None
        self._uid = os.urandom(16)
        self._salt = crc32c(self._uid)
        self._created: list[tuple[Path, int]] = []  # and which file it is
        self._descriptors: list[int] = []
        header = IndexHeader(
            file.stream, file.number & 0xFFFF, self._uid, FINGERPRINTS[file.stream], now_us()
        )
        schema = SCHEMAS[file.stream].with_metadata(to_metadata(producer, file.stream, attempt, policy))
        file.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._index = self._create(file.index)
            _write_all(self._index, header.pack())
            self._data = self._create(file.data)
            self._seal([schema.serialize()], FrameInfo())
        except BaseException:
            self.leave()
            raise

    def _create(self, path: Path) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._descriptors.append(fd)
        self._created.append((path, os.fstat(fd).st_ino))
        return fd

    def append(self, parts: list[Part], said: FrameInfo) -> None:
        """Write a frame and seal it; NoRoomError for values that do not fit: then all is as before."""
        take = self._room.take if self._room and said.rows else extent.take
        take(self._data, self.size, size(parts))
        self._seal(parts, said)
        self.frames += 1
        self.rows += said.rows
        if said.window >= 0:
            self.windows = said.window if self.windows[0] < 0 else self.windows[0], said.window
        self.said.clear()
        self.stays = True

    def _seal(self, parts: list[Part], said: FrameInfo) -> None:
        length = size(parts)
        crc = _write_checked(self._data, parts, self.size)
        flags = LAST_OF_WINDOW if said.last else 0
        place = said.frame, said.window, said.first_id, said.last_id, self.size, length, said.rows, crc
        _write_all(self._index, packed(self._salt, RecordType.FRAME, flags, 0, *place))
        self.size += length
        self.unsynced += length

    def heartbeat(self, queued_bytes: int, told: Told) -> None:
        """Note that the process is alive."""
        self._note(_sign(RecordType.HEARTBEAT, told, queued_bytes >> 10))

    def lost(self, loss: Loss) -> None:
        """Note a loss."""
        cause, rows = int(loss.cause), min(loss.rows, 0xFFFFFFFF)
        steps = (0, -1) if loss.step is None else (loss.step, loss.step)
        window = NO_WINDOW if loss.cause is LossCause.REFUSED else loss.window  # which is whole without it
        self._note(IndexRecord(RecordType.LOSS, window, 0, cause, 0, *steps, length=loss.bytes, rows=rows))
        if not self.frames:
            self.said.append(loss)

    def pruned(self, gone: Pruned) -> None:
        """Note that a segment of this stream is removed: before it is."""
        first, last = gone.windows
        self._note(
            IndexRecord(
                RecordType.PRUNE,
                first,
                first_id=last,
                last_id=gone.number,
                length=gone.bytes,
                rows=min(gone.rows, 0xFFFFFFFF),
            )
        )
        self.stays = True

    def _note(self, record: IndexRecord) -> None:
        _write_all(self._index, record.pack(self._uid))

    def sync(self) -> None:
        """Bring the frames, then what seals them, to the disk, and the files' names with the first call."""
        _sync(self._data)
        _sync(self._index)
        self.unsynced = 0
        if not self._named:
            sync_folder(self.file.folder)
            self._named = True

    def is_gone(self) -> bool:
        """Whether somebody removed the files, or moved them elsewhere."""
        named = zip(self._created, self._descriptors, strict=True)
        return any(is_gone(path, inode, fd) for (path, inode), fd in named)

    def finish(self, told: Told | None = None) -> bool:
        """Write the end record, and close as `close` does; whether the disk took the record."""
        taken = False
        with suppress(OSError):
            self._note(_sign(RecordType.END, told or NOTHING_TOLD))
            taken = True
        self.close()
        return taken

    def leave(self) -> None:
        """Close after a failure; files that hold nothing are removed, all others stay as they are."""
        with suppress(OSError):
            self.close()
        if not self.stays:
            for path, _ in reversed(self._created):  # the index last: a stream without one is damage
                with suppress(OSError):
                    path.unlink()

    def forget(self) -> None:
        """In a forked child: close the descriptors, whatever that says."""
        with suppress(OSError):
            self.close()

    def close(self) -> None:
        """Close the descriptors; OSError when the file system says only now what it could not write."""
        failed = None
        while self._descriptors:
            try:
                os.close(self._descriptors.pop())
            except OSError as error:
                failed = error
        if failed:
            raise failed


def _sign(kind: RecordType, told: Told, rows: int = 0) -> IndexRecord:
    """Return a sign of life, with what the process says of itself."""
    said = {"offset": told.waited_us, "length": told.not_durable, "frame": told.payload}
    return IndexRecord(kind, first_id=now_us(), last_id=told.commits, rows=rows, **said)


def told_by(sign: IndexRecord) -> Told:
    """Return what a process says of itself with a sign of life."""
    return Told(sign.offset, sign.length, sign.frame, sign.last_id)


def loss_of(stream: Stream, record: IndexRecord) -> Loss:
    """Return what a process noted as lost."""
    known = record.cause in set(LossCause)
    cause = LossCause(record.cause) if known else record.cause
    step = record.first_id if record.first_id == record.last_id else None
    detail = "recording mistakes: its process warned of the keys" if cause is LossCause.REFUSED else ""
    return Loss(stream, cause, record.window, record.rows, record.length, detail, step)
