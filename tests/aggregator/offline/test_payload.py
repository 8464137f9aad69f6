"""The values behind the records: joined, unpacked, split, missing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator import open_run
from aggregator.offline import unpacking
from eventlog import encode, errors, schema


def rows(session, sql):
    return session.sql(sql).to_pylist()


def test_dense_puts_values_back_where_they_were(run):
    """`values` are what was selected, `dense` the whole tensor with nulls where the mask is false."""
    leader = run.producer()
    mask = np.array([[True, False, True], [False, False, True]])
    leader.tracker().denominator({"n": mask})
    leader.tracker().stat("n", {"x": np.arange(6, dtype=np.float32).reshape(2, 3)})
    run.export(leader, time=1)
    session = run.open()
    assert [{"values": [0, 2, 5], "dense": [0, None, 2, None, None, 5], "shape": [2, 3]}] == rows(
        session, "select values, dense, shape from tensors"
    )
    assert [{"mask": mask.reshape(-1).tolist(), "selected": [2, 1]}] == rows(
        session, "select mask, selected from masks"
    )


def test_a_mask_of_one_dimension_selects_per_entry(run):
    """`selected` of a sequence-level mask is one or nothing per sequence."""
    leader = run.producer()
    leader.tracker().denominator({"n": np.array([True, False, True])})
    run.export(leader, time=1)
    assert [{"selected": [1, 0, 1]}] == rows(run.open(), "select selected from masks")


def test_calls_number_the_batches_of_a_window(run):
    """The n-th call of a mask and the n-th call of a stat belong to one batch, whatever lies between."""
    leader = run.producer()
    for n in range(3):
        leader.tracker().denominator({"n": np.ones(n + 1, bool), "other": np.arange(n + 1) == 0})
        leader.tracker().stat("n", {"x": np.full(n + 1, n, np.float32)})
    run.export(leader, time=1)
    found = rows(
        run.open(),
        'select t.call, t.values, m.mask from tensors t join masks m using (session, "window", call) '
        "where m.key = 'other' order by call",
    )
    assert [(n, [n] * (n + 1), [True] + [False] * n) for n in range(3)] == [
        tuple(row.values()) for row in found
    ]


def test_every_value_of_a_scalar_has_its_time(run):
    """Scalars come one row per call, with the time of the call."""
    leader = run.producer()
    for value in (1.5, 2.5):
        leader.tracker().scalar({"s": value})
    leader.tracker().counter({"c": 3})
    leader.tracker().timing("t", 0.5)
    run.export(leader, time=1)
    session = run.open()
    found = session.sql("select key, kind, value, time from scalars order by key, time")
    assert [
        ("c", "counter", 3),
        ("s", "scalar", 1.5),
        ("s", "scalar", 2.5),
        ("timeperf/t", "timing", 0.5),
    ] == list(zip(*(found[name].to_pylist() for name in ("key", "kind", "value")), strict=True))
    assert 0 == found["time"].null_count


def test_a_mask_of_an_earlier_window_is_found(run):
    """A stat exported without reset keeps the mask that was logged before it."""
    leader = run.producer()
    tracker = leader.tracker()
    tracker.denominator({"n": np.array([True, False])})
    tracker.stat("n", {"x": np.array([1.0, 2.0])})
    run.export(leader, time=1, reset=False)
    tracker.stat("n", {"y": np.array([3.0, 4.0])})
    run.export(leader, time=2)
    found = rows(run.open(), "select key, dense from tensors order by key")
    assert [{"key": "x", "dense": [1, None]}, {"key": "y", "dense": [3, None]}] == found


def test_double_precision_is_kept(run):
    """float64 tensors come back to the last bit."""
    leader = run.producer()
    leader.tracker().denominator({"n": np.ones(2, bool)})
    values = np.array([0.1234567890123456, 1e-300])
    leader.tracker().stat("n", {"x": values})
    run.export(leader, time=1)
    assert [{"values": values.tolist()}] == rows(run.open(), "select values from tensors")


@pytest.mark.parametrize("frame_bytes", [8, 64, 1 << 20])
def test_split_records_come_back_whole(run, monkeypatch, frame_bytes):
    """A record larger than a frame lies in parts: the answer is the same as from one piece (report g8)."""
    monkeypatch.setattr(encode, "FRAME_BYTES", frame_bytes)
    monkeypatch.setattr(encode, "_JOINED_BYTES", 0)
    leader = run.producer()
    leader.tracker().denominator({"n": np.ones((2, 7), bool)})
    values = {key: np.arange(14, dtype=np.float32).reshape(2, 7) + 100 * i for i, key in enumerate("ab")}
    leader.tracker().stat("n", values)
    run.export(leader, time=1)
    session = run.open()
    found = rows(session, "select key, values from tensors order by key")
    assert [{"key": key, "values": v.reshape(-1).tolist()} for key, v in values.items()] == found


def test_a_record_with_a_missing_part_is_left_out(run):
    """Half of a record's values would answer another question."""
    leader = run.producer()
    leader.tracker().denominator({"n": np.ones(4, bool)})
    leader.tracker().stat("n", {"x": np.arange(4, dtype=np.float32)})
    leader.payload = False
    drained, window, _ = leader.drain()
    leader.note_export()
    leader.commit(0, time=2, leader=True)
    (record,) = [i for i, spec in enumerate(drained.specs) if spec.key == "x"]
    part = pa.record_batch(
        {
            **{field.name: pa.nulls(1, field.type) for field in schema.PAYLOAD},
            "record_id": pa.array([drained.frame.first_id + record]),
            "element": pa.array([2]),
            "last": pa.array([True]),
            "values32": pa.array([[2.0, 3.0]], schema.PAYLOAD.field("values32").type),
        },
        schema=schema.PAYLOAD,
    )
    leader._put(schema.Stream.PAYLOAD, [part], window)
    session = run.open()
    with pytest.raises(errors.QueryError, match="expected the values that were recorded, got none"):
        session.sql("select * from tensors")
    row = session.percentiles("x", 0.5).to_pylist()
    assert [{"step": 0, "p50": 2.5, "count": 2, "missing": 2}] == row


def test_without_a_payload_the_views_say_so(run):
    """A run recorded with the payload off says what can be asked instead; its moments answer."""
    leader = run.producer(payload=False)
    leader.tracker().denominator({"n": np.ones(4, bool)})
    leader.tracker().stat("n", {"x": np.arange(4.0)})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    session = run.open()
    for view in ("payload", "tensors", "masks", "scalars", "samples"):
        with pytest.raises(
            errors.QueryError, match="payload was off or pruned; records and metrics can still be asked"
        ):
            session.sql(f"select * from {view}")
    with pytest.raises(
        errors.QueryError, match=r"expected the values of 'x', got none: .* avg, sum, min, max, count"
    ):
        session.percentiles("x", 0.5)
    assert [{"step": 0, "avg": 1.5, "count": 4}] == session.reduce("x", ["avg", "count"]).to_pylist()


def test_a_lost_payload_file_costs_only_itself(run):
    """Of two ranks' values one file is gone: the other rank's are there, metrics are untouched."""
    ranks = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
    for producer in ranks:
        producer.tracker().scalar({"x": float(producer.rank)})
    ranks[0].commit(0, run.export(ranks, time=1), time=2, leader=True)
    run.close()
    (file,) = (run.path / "events" / "actor-0").glob("*.payload.*.arrows")
    file.unlink()
    session = open_run(run.path)
    assert [{"rank": 1, "value": 1.0}] == rows(session, "select rank, value from scalars")
    assert [0.5] == session.metrics(["x"], source="recomputed")["value"].to_pylist()
    assert [{"step": 0, "p50": 1.0, "count": 1, "missing": 1}] == session.percentiles("x", 0.5).to_pylist()


def test_values_may_be_asked_while_the_run_goes_on(run):
    """A session shows the run as it was opened, also when values and processes came since."""
    leader = run.producer()
    leader.tracker().scalar({"x": 1.0})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    assert leader.writer.close(100)
    with open_run(run.path) as session:
        late = run.producer("late")
        late.tracker().scalar({"x": 2.0})
        run.export(late, time=3)
        assert late.writer.close(100)
        assert [{"value": 1.0}] == rows(session, "select value from scalars")
        assert [1.0] == session.percentiles("x", 0.5)["p50"].to_pylist()


masks = st.lists(st.none() | st.lists(st.booleans(), max_size=20), max_size=6)


@given(masks)
def test_bits_unpack_what_was_packed(found):
    """Masks of any length come back, null stays null."""
    packed = [
        None if m is None else np.packbits(np.array(m, bool), bitorder="little").tobytes() for m in found
    ]
    lengths = pa.chunked_array([pa.array([0 if m is None else len(m) for m in found], pa.int64())])
    made = unpacking.bits(pa.chunked_array([pa.array(packed, pa.binary())]), lengths)
    assert found == made.to_pylist()


@given(masks)
def test_dense_is_the_inverse_of_selection(found):
    """Selecting from the dense list gives the values back; a mask that does not fit gives null."""
    values = [None if m is None else [float(i) for i, chosen in enumerate(m) if chosen] for m in found]
    packed = [
        None if m is None else np.packbits(np.array(m, bool), bitorder="little").tobytes() for m in found
    ]
    lengths = pa.chunked_array([pa.array([0 if m is None else len(m) for m in found], pa.int64())])
    lists = pa.chunked_array([pa.array(values, pa.list_(pa.float64()))])
    made = unpacking.dense(lists, pa.chunked_array([pa.array(packed, pa.binary())]), lengths).to_pylist()
    for mask, row in zip(found, made, strict=True):
        assert row == (
            None if mask is None else [float(i) if chosen else None for i, chosen in enumerate(mask)]
        )
    wrong = pa.chunked_array([pa.array([[*(v or []), 1.0] for v in values], pa.list_(pa.float64()))])
    assert [None] * len(found) == unpacking.dense(
        wrong, pa.chunked_array([pa.array(packed, pa.binary())]), lengths
    ).to_pylist()
