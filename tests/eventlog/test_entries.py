"""Index records as columns: what is believed is what is believed of each alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from eventlog.entries import Entries
from eventlog.schema import ENTRY_SIZE, IndexRecord, RecordType

UID = bytes(range(16))
RECORD = st.builds(
    IndexRecord,
    type=st.sampled_from(RecordType).map(int),
    window=st.integers(-1, 2**40),
    flags=st.integers(0, 1),
    cause=st.integers(0, 9),
    frame=st.integers(0, 2**32 - 1),
    first_id=st.integers(-(2**63), 2**63 - 1),
    last_id=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(0, 200),
    length=st.integers(0, 50),
    rows=st.integers(0, 2**32 - 1),
    crc=st.integers(0, 2**32 - 1),
)
DAMAGE = st.lists(st.tuples(st.integers(0, 20 * ENTRY_SIZE), st.integers(1, 255)), max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(RECORD, max_size=20), DAMAGE, st.integers(0, 5), st.integers(0, 100))
def test_records_are_those_that_are_read_one_by_one(records, damage, first, sealed):
    """Damaged records are None, all others what they were; a frame that was there before is not good."""
    data = bytearray(b"".join(record.pack(UID) for record in records))
    for at, flip in damage:
        if at < len(data):
            data[at] ^= flip
    entries = [bytes(data[at : at + ENTRY_SIZE]) for at in range(0, len(data), ENTRY_SIZE)]
    alone = [IndexRecord.unpack(entry, UID) for entry in entries]
    found = Entries.of(bytes(data), first, UID)
    assert list(enumerate(alone, first)) == list(found.records())
    assert [r is not None and r.type == RecordType.FRAME for r in alone] == found.frames.tolist()
    for place, record in enumerate(alone):
        frame = record is not None and record.type == RecordType.FRAME
        if frame and record.offset < sealed_before(alone[:place], sealed):
            alone[place] = None
    assert list(enumerate(alone, first)) == list(found.behind(sealed_before([], sealed)).records())


def sealed_before(records, sealed):
    """Return where the last frame ends that was believed."""
    for record in records:
        if record is not None and record.type == RecordType.FRAME:
            sealed = record.offset + record.length
    return sealed


@given(st.lists(RECORD, max_size=8), st.lists(RECORD, max_size=8))
def test_parts_are_the_whole(some, others):
    """What is cut and joined again is what it was."""
    data = b"".join(record.pack(UID) for record in [*some, *others])
    whole = Entries.of(data, 3, UID)
    joined = whole.cut(0, len(some)).and_then(whole.cut(len(some)))
    assert list(whole.records()) == list(joined.records())
    assert len(some) + len(others) == whole.known


def test_zeros_are_known():
    """A page of the index that was not written yet holds zeros, which are no records."""
    found = Entries.of(bytes(2 * ENTRY_SIZE), 0, UID)
    assert found.zero
    assert 0 == found.known
    assert not Entries.of(IndexRecord(RecordType.FRAME).pack(UID), 0, UID).zero
