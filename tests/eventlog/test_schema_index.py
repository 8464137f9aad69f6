"""The index's 64 bytes, and the columns as they are frozen."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlog.schema import (
    COMMITS,
    ENTRY_SIZE,
    PAYLOAD,
    RECORDS,
    SCHEMAS,
    IndexHeader,
    IndexRecord,
    RecordType,
    crc32c,
    fingerprint,
)

UID = bytes(range(16))
INT64 = st.integers(-(2**63), 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
RECORDS_OF_ANY_KIND = st.builds(
    IndexRecord,
    type=st.integers(0, 255),
    window=INT64,
    flags=st.integers(0, 255),
    cause=st.integers(0, 2**16 - 1),
    frame=U32,
    first_id=INT64,
    last_id=INT64,
    offset=U64,
    length=U64,
    rows=U32,
    crc=U32,
)
HEADER = IndexHeader(2, 7, UID, fingerprint(PAYLOAD), 1_795_961_760_416_779)


@settings(deadline=None)
@given(RECORDS_OF_ANY_KIND)
def test_a_record_is_64_bytes_and_comes_back(record):
    """Every index record is 64 bytes and reads back as it was."""
    data = record.pack(UID)
    assert len(data) == ENTRY_SIZE
    assert IndexRecord.unpack(data, UID) == record


def test_a_header_is_64_bytes_and_comes_back():
    """The header is 64 bytes and reads back as it was."""
    assert len(HEADER.pack()) == ENTRY_SIZE
    assert IndexHeader.unpack(HEADER.pack()) == HEADER


def test_no_flipped_bit_passes():
    """A flip of any single bit of a header or a record is noticed (report g1)."""
    record = IndexRecord(RecordType.FRAME, 5, 1, 0, 2, 100, 131, 4096, 777, 32, 0xDEADBEEF).pack(UID)
    for bit in range(ENTRY_SIZE * 8):
        for data, unpack in (
            (record, lambda data: IndexRecord.unpack(data, UID)),
            (HEADER.pack(), IndexHeader.unpack),
        ):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            assert unpack(bytes(damaged)) is None


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    """Whatever the bytes, unpacking returns; random ones are no header and no record."""
    assert IndexHeader.unpack(data) is None
    assert IndexRecord.unpack(data, UID) is None


def test_zeros_are_no_record():
    """A zero-filled place is no record, whatever the segment."""
    assert IndexRecord.unpack(bytes(ENTRY_SIZE), bytes(16)) is None


def test_a_record_of_another_segment_is_refused():
    """A record copied from another segment fails its checksum, which is salted with the segment's uid."""
    data = IndexRecord(RecordType.FRAME, rows=3).pack(UID)
    assert IndexRecord.unpack(data, bytes(16)) is None


def test_the_checksum_is_castagnoli_over_all_parts():
    """CRC32C of "123456789" is 0xe3069283, in one piece or in parts."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"1234", pa.py_buffer(b"56789")) == 0xE3069283


def test_fingerprints_name_columns_and_types():
    """Another name, type or order is another fingerprint; metadata is none of it."""
    prints = {fingerprint(schema) for schema in SCHEMAS.values()}
    assert len(prints) == 3
    assert fingerprint(RECORDS.with_metadata({"session": "x"})) == fingerprint(RECORDS)
    changed = RECORDS.set(5, RECORDS.field(5).with_type(pa.int32()))
    assert fingerprint(changed) != fingerprint(RECORDS)


def test_format_1_is_frozen():
    """The columns of format 1.0 are these; a change needs a new minor version."""
    assert {
        "records": "aad7457b",
        "payload": "7f2f1187",
        "commits": "c6cfa59f",
    } == {stream.name.lower(): fingerprint(schema).hex()[:8] for stream, schema in SCHEMAS.items()}


def _types(field: pa.Field) -> list[pa.DataType]:
    children = [field.type.field(i) for i in range(field.type.num_fields)]
    return [field.type, *(kind for child in children for kind in _types(child))]


@pytest.mark.parametrize("schema", [RECORDS, PAYLOAD, COMMITS], ids=["records", "payload", "commits"])
def test_lists_and_texts_have_64_bit_offsets(schema):
    """No column can overflow 32-bit offsets, is dictionary-encoded or holds half floats (report g8)."""
    kinds = {kind for field in schema for kind in _types(field)}
    narrow = (
        pa.types.is_list,
        pa.types.is_string,
        pa.types.is_binary,
        pa.types.is_dictionary,
        pa.types.is_float16,
    )
    assert [] == [kind for kind in kinds for is_narrow in narrow if is_narrow(kind)]
