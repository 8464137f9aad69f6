"""Many frames as one batch: the same rows as Arrow reads frame by frame, and nothing guessed."""

import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlog.bulk import Joiner, coded
from eventlog.message import Decoder, serialize
from eventlog.schema import COMMITS, PAYLOAD, RECORDS, SCHEMAS, Stream

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = {
    pa.int64(): INT64,
    pa.float64(): st.floats(width=64),
    pa.float32(): st.floats(width=32),
    pa.bool_(): st.booleans(),
    pa.timestamp("us", "UTC"): st.integers(0, 2**50),
    pa.large_string(): TEXT,
    pa.large_binary(): st.binary(max_size=12),
}


def column(kind, n):
    """Draw a column of n values: without nulls, with some, or of nothing else."""
    listed = pa.types.is_large_list(kind)
    value = st.lists(VALUES[kind.value_type], max_size=4) if listed else VALUES[kind]
    ways = st.lists(value, min_size=n, max_size=n) | st.lists(st.none() | value, min_size=n, max_size=n)
    return (ways | st.just([None] * n)).map(lambda values: pa.array(values, kind))


@st.composite
def runs_of_frames(draw):
    """Draw a stream and batches of it, runs of them alike: repeated as they are, or in their numbers only."""
    stream = draw(st.sampled_from(list(Stream)))
    schema, batches = SCHEMAS[stream], []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(0, 20))
        arrays = [draw(column(field.type, n)) for field in schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        for i in range(draw(st.integers(1, 12))):
            ids = pa.array(np.arange(n) + i)
            batches.append(batch.set_column(0, schema.field(0), ids))
    columns = draw(st.none() | st.lists(st.sampled_from(schema.names), min_size=1, unique=True))
    return stream, batches, columns


def lay(frames):
    """Put frames behind each other; return the bytes, and where and how large each is."""
    sizes = np.array([len(frame) for frame in frames])
    return b"".join(frames), np.cumsum(sizes) - sizes, sizes


def joined(schema, frames, rows, columns=None):
    """Return what a joiner makes of frames."""
    return list(Joiner(schema, columns).runs(*lay(frames), np.array(rows)))


def plain(batch):
    """Return a batch with its texts as texts."""
    table = pa.Table.from_batches([batch])
    fields = [
        field.with_type(pa.large_string()) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields)).combine_chunks()


def wanted(schema, batches, columns=None):
    """Return batches as one table, of some columns."""
    names = [name for name in schema.names if columns is None or name in columns]
    return pa.Table.from_batches(batches).select(names).combine_chunks()


@settings(max_examples=120, deadline=None)
@given(runs_of_frames())
def test_joined_frames_are_what_arrow_reads(made):
    """Whatever columns hold, frames that are joined have the bits that Arrow reads one by one."""
    stream, batches, columns = made
    frames = [serialize(batch, stream).to_pybytes() for batch in batches]
    places = []
    for first, stop, batch in joined(SCHEMAS[stream], frames, [b.num_rows for b in batches], columns):
        places += range(first, stop)
        if batch is not None:
            batch.validate(full=True)
            found = plain(batch)
            assert wanted(SCHEMAS[stream], batches[first:stop], columns).schema.names == found.schema.names
            one_by_one = Decoder(SCHEMAS[stream], columns).batches(frames[first:stop])
            assert_same(pa.Table.from_batches(one_by_one), found)
    assert list(range(len(batches))) == places


def assert_same(expected, found):
    """Equal to the bit: NaN is NaN, and -0.0 not 0.0."""
    for name in expected.column_names:
        one, other = expected[name].combine_chunks(), found[name].combine_chunks()
        assert one.is_valid().equals(other.is_valid())
        if pa.types.is_floating(one.type):
            one, other = (a.drop_null().to_numpy(zero_copy_only=False).tobytes() for a in (one, other))
            assert one == other
        elif pa.types.is_large_list(one.type) and pa.types.is_floating(one.type.value_type):
            assert one.value_lengths().equals(other.value_lengths())
            one, other = (a.flatten().to_numpy(zero_copy_only=False).tobytes() for a in (one, other))
            assert one == other
        else:
            assert one.equals(other)


def batch_of(rows, start=0):
    """Return records of the same keys, numbered from `start`."""
    columns = {
        "record_id": np.arange(start, start + rows),
        "window": np.full(rows, start),
        "key": [f"k{i}" for i in range(rows)],
        "denominator": [None, *(["mask"] * (rows - 1))],
        "sum": np.arange(rows) / 3 + start,
    }
    n = [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(rows, f.type) for f in RECORDS]
    return pa.RecordBatch.from_arrays(n, schema=RECORDS)


@pytest.mark.parametrize("rows", [3, 50])
def test_frames_of_one_writer_are_joined(rows):
    """Frames that differ in their numbers only become one batch, compressed or not, their texts codes."""
    batches = [batch_of(rows, 100 * i) for i in range(20)]
    frames = [serialize(batch, Stream.RECORDS).to_pybytes() for batch in batches]
    ((first, stop, batch),) = joined(RECORDS, frames, [rows] * 20)
    assert (0, 20) == (first, stop)
    assert wanted(RECORDS, batches).equals(plain(batch))
    assert coded(pa.large_string()) == batch.schema.field("key").type
    assert rows == len(batch["key"].dictionary)


@pytest.mark.parametrize("rows", [3, 50])
@pytest.mark.parametrize("other", ["key", "denominator", "window", "sum"])
def test_one_frame_that_says_something_else_is_heard(rows, other):
    """What is the same in all frames but one, in the midst of them, is not taken for the same in all."""
    batches = [batch_of(rows)] * 20
    kind = RECORDS.field(other).type
    said = [None, *(["k1"] * (rows - 1))] if pa.types.is_large_string(kind) else [7] * rows
    if other == "key":
        said[0] = "k0"
    place = RECORDS.get_field_index(other)
    batches[7] = batches[7].set_column(place, RECORDS.field(other), pa.array(said, kind))
    frames = [serialize(batch, Stream.RECORDS).to_pybytes() for batch in batches]
    for columns in (None, [other], ["record_id", other]):
        found = joined(RECORDS, frames, [rows] * 20, columns)
        assert any(batch is not None for *_, batch in found)
        for first, stop, batch in found:
            assert batch is None or wanted(RECORDS, batches[first:stop], columns).equals(plain(batch))


def test_two_kinds_of_frames_are_told_apart():
    """Where frames of another writer begin, another batch does."""
    few, many = ([batch_of(n, 100 * i) for i in range(10)] for n in (2, 60))
    frames = [serialize(batch, Stream.RECORDS).to_pybytes() for batch in [*few, *many, *few]]
    rows = [*[2] * 10, *[60] * 10, *[2] * 10]
    found = joined(RECORDS, frames, rows)
    assert [(0, 10), (10, 20), (20, 30)] == [(first, stop) for first, stop, _ in found]
    expected = [wanted(RECORDS, those) for those in (few, many, few)]
    assert expected == [plain(batch) for *_, batch in found]


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_what_our_writer_does_not_write_is_left_to_arrow(compression):
    """Other codecs, and buffers of more than one block, are not looked into."""
    rows = 50 if compression == "zstd" else 20_000
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, COMMITS, options=options) as stream:
        numbers = pa.array(np.random.default_rng(0).integers(0, 2**60, rows))
        arrays = [numbers, *(pa.nulls(rows, field.type) for field in list(COMMITS)[1:])]
        stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=COMMITS))
    frame = sink.getvalue().to_pybytes()[COMMITS.serialize().size : -8]
    assert rows == Decoder(COMMITS).batch(frame).num_rows
    assert [(0, 10, None)] == joined(COMMITS, [frame] * 10, [rows] * 10)


def test_a_size_that_lies_is_not_believed():
    """Where a buffer says to be larger than it is, Arrow judges: no byte is made up."""
    frames = [serialize(batch_of(50, 100 * i), Stream.RECORDS).to_pybytes() for i in range(10)]
    at = frames[4].index(struct.pack("<q", 400) + b"\x04\x22\x4d\x18")
    frames[4] = frames[4][:at] + struct.pack("<q", 408) + frames[4][at + 8 :]
    assert [(0, 10, None)] == joined(RECORDS, frames, [50] * 10)
    with pytest.raises(ValueError, match="expected an Arrow batch"):
        Decoder(RECORDS).batch(frames[4])


def test_rows_are_those_the_index_tells():
    """A frame that holds other rows than its index record says is not joined."""
    frames = [serialize(batch_of(20, 100 * i), Stream.RECORDS).to_pybytes() for i in range(30)]
    rows = [20] * 30
    rows[12] = 21
    found = joined(RECORDS, frames, rows)
    assert [(0, 12, True), (12, 13, False), (13, 30, True)] == [(a, b, c is not None) for a, b, c in found]


def test_parts_of_a_payload_are_joined():
    """Values, masks and sequences of frames of several sizes come as one column each."""
    batches = []
    for i in range(12):
        columns = {
            "record_id": [i, i + 1],
            "element": [0, 0],
            "last": [True, i % 2 == 0],
            "values32": [list(range(i)), None],
            "mask": [None, bytes(range(i))],
            "selected": [None, [i] * 3],
            "sample_ids": [None, [f"s{i}"] * (i % 3)],
        }
        made = [
            pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(2, f.type) for f in PAYLOAD
        ]
        batches.append(pa.RecordBatch.from_arrays(made, schema=PAYLOAD))
    frames = [serialize(batch, Stream.PAYLOAD).to_pybytes() for batch in batches]
    ((_, _, batch),) = joined(PAYLOAD, frames, [2] * 12)
    assert wanted(PAYLOAD, batches).equals(plain(batch))
