r"""The format of a run directory on one page: every column, every index field, the version.

A *segment* is an Arrow IPC stream (schema message, then one message per frame) beside an *index*: a 64-byte
header and one 64-byte record per frame, both little-endian. A frame is written first, its index record
after it: that seals the frame. Arrow has no checksum, so a reader checks the frame's CRC32C before Arrow
sees a byte of it, and parses it with the schema below, never with the one in the file.

Index header (64 bytes)                       Index record (64 bytes)
    0  8s   magic  b"ARMIDX\r\n"                 0  u8   type: 1 frame 2 loss 3 prune 4 heartbeat 5 end
    8  u16  format major                         1  u8   flags: bit 0 last frame of its window
   10  u16  format minor                         2  u16  cause (loss: why; else 0)
   12  u8   stream: 1 records 2 payload          4  u32  number of the frame within its window
            3 commits                            8  i64  window (-1: belongs to none)
   13  u8   checksum: 1 = CRC32C                16  i64  first record id       | heartbeat, end: time, UTC µs
   14  u16  segment number                      24  i64  last record id (incl.)| prune: number of the segment
   16  16s  segment uid                         32  u64  offset of the frame in the segment
   32  16s  schema fingerprint                  40  u64  length in bytes (loss: bytes lost)
   48  i64  opened, UTC µs                      48  u32  rows (loss: rows lost; heartbeat: queued KiB)
   56  4x   zero                                52  u32  CRC32C of the frame's bytes
   60  u32  CRC32C of bytes 0..59               56  4x   zero
                                                60  u32  CRC32C of segment uid + bytes 0..59

Record 0 of an index covers the schema message (type frame, window -1, no rows). Compatibility: a reader takes
every minor version of its major; it fills columns the file lacks with null and ignores those it does not
know. Columns are only ever added at the end.

What else a record says: a heartbeat and the end have, as offset, the µs that callers waited for room so far
and, as length, the commits that were not durable; as number of the frame the segments of payload that the
process has begun, and as last record id those of commits (-1: not said, and the other means nothing). Where
the records' last end says so, all streams were ended. A loss has its step twice, as first and last record id,
where it was known (else 0, -1). A prune has the first window of the removed segment as its window, the last
one as its first record id, and the rows and bytes that went.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import google_crc32c
import pyarrow as pa

FORMAT_MAJOR: Final = 1
FORMAT_MINOR: Final = 0

_TIME = pa.timestamp("us", "UTC")
_TEXT = pa.large_string()
_INTS = pa.large_list(pa.int64())


def _schema(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in columns])


RECORDS: Final = _schema(
    ("record_id", pa.int64()),  # never reset in a session; (session, record_id) is the identity
    ("time", _TIME),  # stat, denominator: of the call; scalar, timing, counter: of the last call
    ("window", pa.int64()),
    ("step", pa.int64()),  # only if the caller gave it
    ("attempt", pa.int64()),  # what the producer knew when it drained the window
    ("tracker", _TEXT),
    ("key", _TEXT),  # in full, tracker and scope included
    ("kind", _TEXT),  # reduction.Kind
    ("reduce_type", _TEXT),  # reduction.ReduceType; null for counters and exports
    ("spread", _TEXT),  # reduction.Spread; null means shards
    ("denominator", _TEXT),  # key of the mask
    ("denominator_id", pa.int64()),  # its record id
    ("group", _TEXT),  # per-key reduce group: "0,1,5", its global ranks
    ("shape", _INTS),
    ("dtype", _TEXT),  # as recorded: "float32", "bfloat16", …
    ("present", pa.int64()),  # the moments: see moments.py
    ("count", pa.int64()),
    ("nan", pa.int64()),
    ("pos_inf", pa.int64()),
    ("neg_inf", pa.int64()),
    ("int_sum", pa.int64()),
    ("sum", pa.float64()),
    ("min", pa.float64()),  # of the finite values; +inf when there is none
    ("max", pa.float64()),  # of the finite values; -inf when there is none
    ("tags", _TEXT),  # a JSON object; of stats: {"quantiles": [0.5, 0.99]} where they were asked
    # the rest: only in rows of kind "export"; there, tracker and key say what alone was exported (null: all)
    ("export_id", _TEXT),
    ("members", _INTS),  # global ranks of the group; null: exported without a group
    ("window_first", pa.int64()),
    ("window_last", pa.int64()),
    ("reset", pa.bool_()),  # false: a later export covers the same records again
    ("outcome", _TEXT),  # "ok", else the class of the error
)

PAYLOAD: Final = _schema(
    ("record_id", pa.int64()),
    ("element", pa.int64()),  # index of the part's first entry within the record
    ("last", pa.bool_()),  # false: the record goes on in a later row
    ("values32", pa.large_list(pa.float32())),  # the selected values in order, one of the two columns
    ("values64", pa.large_list(pa.float64())),  # scalars, timings, counters: every call's value
    ("times", _INTS),  # scalars, timings, counters: every call's time, UTC µs
    ("mask", pa.large_binary()),  # denominators: the mask, bit-packed, little-endian bit order
    ("selected", _INTS),  # denominators: selected values per sequence
    ("sample_ids", pa.large_list(pa.large_string())),
)

COMMITS: Final = _schema(
    ("commit", pa.int64()),  # 0, 1, 2 … within the session
    ("time", _TIME),
    ("attempt", pa.int64()),
    ("leader", pa.bool_()),
    ("restored_step", pa.int64()),  # the last_commit_step the logger was restored with
    ("epoch", pa.int64()),
    ("epoch_step", pa.int64()),
    ("global_step", pa.int64()),
    ("sub_index", pa.int64()),  # position in the list, for a list commit
    ("window_first", pa.int64()),  # windows drained since this process's last commit; null: none
    ("window_last", pa.int64()),
    ("key", _TEXT),  # null in the one row every commit begins with; then the leader's metrics
    ("value", pa.float64()),
    ("value_int", pa.int64()),  # set when the value was an integer: exact beyond 2**53
    ("tags", _TEXT),
)


class Stream(IntEnum):
    """Which of a producer's streams a segment belongs to."""

    RECORDS = 1
    PAYLOAD = 2
    COMMITS = 3


SCHEMAS: Final = {Stream.RECORDS: RECORDS, Stream.PAYLOAD: PAYLOAD, Stream.COMMITS: COMMITS}


def fingerprint(schema: pa.Schema) -> bytes:
    """Return 16 bytes that name the columns and types of a schema, metadata aside."""
    text = "\n".join(f"{field.name}:{field.type}" for field in schema)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def crc32c(*parts: bytes | pa.Buffer, crc: int = 0) -> int:
    """Return the CRC32C (Castagnoli) of the parts, one after the other; `crc` is that of what came before."""
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return crc


MAGIC: Final = b"ARMIDX\r\n"
ENTRY_SIZE: Final = 64
NO_WINDOW: Final = -1
LAST_OF_WINDOW: Final = 1
_HEADER = struct.Struct("<8sHHBBH16s16sq4x")
_RECORD = struct.Struct("<BBHIqqqQQII4x")
_CRC = struct.Struct("<I")


class RecordType(IntEnum):
    """What an index record says."""

    FRAME = 1
    LOSS = 2
    PRUNE = 3
    HEARTBEAT = 4
    END = 5


class LossCause(IntEnum):
    """Why rows did not reach the disk."""

    QUEUE_FULL = 1
    WRITE_FAILED = 2
    ENCODE_FAILED = 3
    CLOSE_TIMED_OUT = 4
    BUDGET = 5
    PREVIOUS_SEGMENT = 6
    DAMAGED = 7  # found when the run was recovered
    REFUSED = 8  # a recording mistake, where those do not raise (`mistakes`); the window is whole without it
    MISSING = 9  # concluded by readers, never on the disk: a commit before later ones, a dead process' values


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The first 64 bytes of an index."""

    stream: int
    segment: int
    segment_uid: bytes
    fingerprint: bytes
    opened_us: int
    major: int = FORMAT_MAJOR
    minor: int = FORMAT_MINOR
    checksum: int = 1

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        body = _HEADER.pack(
            MAGIC,
            self.major,
            self.minor,
            self.stream,
            self.checksum,
            self.segment,
            self.segment_uid,
            self.fingerprint,
            self.opened_us,
        )
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def unpack(cls, data: bytes) -> IndexHeader | None:
        """Read 64 bytes; None when they are no intact header."""
        if len(data) != ENTRY_SIZE or data[60:] != _CRC.pack(crc32c(data[:60])):
            return None
        magic, major, minor, stream, checksum, segment, uid, schema, opened = _HEADER.unpack(data[:60])
        if magic != MAGIC:
            return None
        return cls(stream, segment, uid, schema, opened, major, minor, checksum)


def packed(salt: int, *fields: int) -> bytes:
    """Return the 64 bytes of an index record: its fields in the table's order; `salt`: the uid's CRC32C."""
    body = _RECORD.pack(*fields)
    return body + _CRC.pack(google_crc32c.extend(salt, body))


@dataclass(frozen=True, slots=True)
class IndexRecord:
    """One 64-byte index record; the meaning of the fields by type stands in the module's table."""

    type: int
    window: int = NO_WINDOW
    flags: int = 0
    cause: int = 0
    frame: int = 0
    first_id: int = 0
    last_id: int = -1
    offset: int = 0
    length: int = 0
    rows: int = 0
    crc: int = 0

    @property
    def last_of_window(self) -> bool:
        """Whether the frame completes its window."""
        return bool(self.flags & LAST_OF_WINDOW)

    def pack(self, segment_uid: bytes) -> bytes:
        """Return the 64 bytes, their checksum salted with the segment's uid."""
        numbers = self.frame, self.window, self.first_id, self.last_id
        place = self.offset, self.length, self.rows, self.crc
        return packed(crc32c(segment_uid), self.type, self.flags, self.cause, *numbers, *place)

    @classmethod
    def unpack(cls, data: bytes, segment_uid: bytes) -> IndexRecord | None:
        """Read 64 bytes; None when they are no intact record of this segment."""
        if len(data) != ENTRY_SIZE or data[60:] != _CRC.pack(crc32c(segment_uid, data[:60])):
            return None
        kind, flags, cause, frame, window, first, last, offset, length, rows, crc = _RECORD.unpack(data[:60])
        return cls(kind, window, flags, cause, frame, first, last, offset, length, rows, crc)
