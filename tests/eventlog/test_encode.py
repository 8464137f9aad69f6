"""What a frame becomes on disk: columns of the frozen schema, valid Arrow, bounded frames."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from eventlog import Recorder, drain, encode
from eventlog.pieces import MatrixPiece
from eventlog.schema import COMMITS, PAYLOAD, RECORDS


def window(record, **options):
    recorder = Recorder()
    record(recorder)
    return drain([recorder], **options).frame


def typical(recorder):
    torch.manual_seed(0)
    recorder.denominator({"m": torch.tensor([[True, False], [True, True]])})
    recorder.stat("m", {"x": torch.arange(4.0).reshape(2, 2)})
    recorder.stat("m", {"y": torch.arange(4.0, dtype=torch.float64).reshape(2, 2) / 3})
    recorder.scalar({"s": 0.1})
    recorder.counter({"c": 2**60})
    recorder.timing("t", 0.5)


def batches(frame):
    return [message.batch() for message in encode.payload(frame)]


def rows(batch):
    assert batch.validate(full=True) is None
    return batch.to_pylist()


def test_records_hold_one_row_per_record():
    """Every record has its identity, its key's kind and its moments; steps are null unless given."""
    frame = window(typical)
    batch = encode.records(frame, encode.Texts()).batch()
    assert batch.schema.equals(RECORDS)
    found = {row["key"]: row for row in rows(batch)}
    assert list(range(frame.first_id, frame.first_id + 6)) == batch["record_id"].to_pylist()
    assert {"step": None, "window": frame.window, "kind": "stat", "reduce_type": "avg_min_max"} == {
        name: found["x"][name] for name in ("step", "window", "kind", "reduce_type")
    }
    assert (3, 5.0, 0.0, 3.0) == tuple(found["x"][name] for name in ("count", "sum", "min", "max"))
    assert found["x"]["denominator_id"] == found["m"]["record_id"]
    assert [2, 2] == found["x"]["shape"]
    assert (2**60, None) == (found["c"]["int_sum"], found["c"]["reduce_type"])
    assert found["timeperf/t"]["kind"] == "timing"


def test_payload_round_trips_values_masks_and_times():
    """Selected values in their own width, the packed mask, counts per sequence, and every scalar's time."""
    (batch,) = batches(window(typical))
    assert batch.schema.equals(PAYLOAD)
    mask, x, y, s, c, t = rows(batch)
    assert (b"\x0d", [1, 2]) == (mask["mask"], mask["selected"])
    assert ([0.0, 2.0, 3.0], None) == (x["values32"], x["values64"])
    assert ([0.0, 2 / 3, 1.0], None) == (y["values64"], y["values32"])
    assert ([0.1], [2.0**60], [0.5]) == (s["values64"], c["values64"], t["values64"])
    assert all(len(row["times"]) == 1 for row in (s, c, t))
    assert all(row["last"] and row["element"] == 0 for row in rows(batch))


def test_huge_windows_are_split_into_bounded_frames(monkeypatch):
    """With a frame limit of 4 kB a large record comes in parts that join to the same values (report g8)."""
    monkeypatch.setattr(encode, "FRAME_BYTES", 4096)
    monkeypatch.setattr(encode, "_JOINED_BYTES", 1024)
    values = {f"k{i}": torch.randn(50, 100) for i in range(3)}

    def record(recorder):
        recorder.denominator({"m": torch.ones(50, 100, dtype=torch.bool)})
        recorder.stat("m", values)
        for i in range(2000):
            recorder.scalar({f"s{i}": i})

    found = batches(window(record))
    assert len(found) > 10
    assert max(batch.nbytes for batch in found) < 4 * 4096 + 8192
    joined = {}
    for row in (row for batch in found for row in rows(batch) if row["values32"]):
        part = joined.setdefault(row["record_id"], [])
        assert row["element"] == len(part)
        part += row["values32"]
        assert row["last"] == (len(part) == 5000)
    parts = [np.float32(values) for _, values in sorted(joined.items())]
    np.testing.assert_array_equal([v.numpy().reshape(-1) for v in values.values()], parts)


def test_messages_are_what_arrow_would_write():
    """Records, payload, export rows and commits are byte for byte Arrow's own messages of the same batch."""
    frame = window(typical)
    messages = [encode.records(frame, encode.Texts()), *encode.payload(frame)]
    messages.append(encode.export(encode.ExportRow(7, 1, 3, None, 1, "g", (0, 1), 2, 3, True, "ok")))
    messages.append(encode.commit(encode.Commit(4, 1, 0, True, None, 0, 1, 2, 3, 4, ({"a": 1, "b": 0.5},))))
    for message in messages:
        assert message.batch().serialize().to_pybytes() == b"".join(message.parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_matrices_go_uncopied_from_where_they_lie(dtype):
    """The values of a large window are the recorder's own memory until they are written (report a15)."""

    def record(recorder):
        recorder.denominator({"m": torch.ones(3, 40_000, dtype=torch.bool)})
        recorder.stat("m", {f"k{i}": torch.rand(3, 40_000, dtype=dtype) for i in range(3)})

    frame = window(record)
    (large,) = (piece.matrix for piece in frame.pieces if isinstance(piece, MatrixPiece))
    parts = [part for message in encode.payload(frame) for part in message.parts]
    assert large.ctypes.data in [part.address for part in parts if isinstance(part, pa.Buffer)]


def test_no_half_floats_no_dictionaries_and_wide_offsets():
    """The format has no half types, no dictionaries and 64-bit list offsets only (reports e4, g8)."""
    for schema in (RECORDS, PAYLOAD, COMMITS):
        for field in schema:
            assert not pa.types.is_dictionary(field.type)
            assert not pa.types.is_list(field.type)
            assert not pa.types.is_float16(field.type)


def test_text_columns_are_built_once_per_layout():
    """A layout seen before reuses its columns; another gets its own."""
    texts = encode.Texts(capacity=2)
    recorder = Recorder()
    seen = []
    for _ in range(2):
        typical(recorder)
        seen.append(texts.of(drain([recorder]).frame.calls.specs))
    assert seen[0] is seen[1]
    for i in range(5):
        recorder.scalar({f"z{i}": 1})
        assert [f"z{i}"] == encode.records(drain([recorder]).frame, texts).batch()["key"].to_pylist()
    assert len(texts._seen) == 2


def test_export_rows_say_what_was_covered():
    """An export row carries id, members, windows, outcome and no moments."""
    row = encode.ExportRow(7, 1_000_000, 3, 5, 1, "g:1", (0, 1), 2, 3, reset=False, outcome="ok", key="a")
    (found,) = rows(encode.export(row).batch())
    assert ("export", "g:1", [0, 1], 2, 3, False, "ok", "a") == tuple(
        found[name]
        for name in ("kind", "export_id", "members", "window_first", "window_last", "reset", "outcome", "key")
    )
    assert found["present"] is None


@pytest.mark.parametrize("tags", [None, {"before": True}])
def test_commits_keep_integers_exact_and_nan_apart_from_null(tags):
    """The marker row has no key; integers keep their value beyond 2**53; NaN is NaN (reports c11, e1, f7)."""
    metrics = ({"a": 2**53 + 1, "b": float("nan")}, {"a": 0.5})
    made = encode.Commit(4, 1_000_000, 0, True, None, 0, 1, 2, 3, 4, metrics, tags)
    batch = encode.commit(made).batch()
    assert batch.schema.equals(COMMITS)
    marker, *entries = rows(batch)
    assert (None, None, 0) == (marker["key"], marker["value"], marker["sub_index"])
    assert [(0, "a"), (0, "b"), (1, "a")] == [(row["sub_index"], row["key"]) for row in entries]
    assert (2**53 + 1, None, None) == tuple(row["value_int"] for row in entries)
    assert np.isnan(entries[1]["value"])
    assert tags == (marker["tags"] and json.loads(marker["tags"]))
