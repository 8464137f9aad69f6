"""Numbers measured on samples: recorded by id, written with ids and tags, exported as scalars are."""

from __future__ import annotations

import json

import pytest

import eventlog
from aggregator import stats_tracker
from eventlog import Recorder, RunReader, errors


@pytest.fixture(autouse=True)
def nothing_left():
    """Every test ends with an empty tracker, and without a log."""
    yield
    stats_tracker.export_all()
    eventlog.stop()


def written(path):
    """Return (key, tags, step) of each record and the (ids, values) of its payload."""
    reader = RunReader(path)
    rows = {
        row["record_id"]: (row["key"], row["tags"] and json.loads(row["tags"]), row["step"])
        for _, _, batch in reader.records()
        for row in batch.to_pylist()
        if row["kind"] != "export"
    }
    return [
        (rows[row["record_id"]], row["sample_ids"], row["values64"])
        for _, _, batch in reader.payload()
        for row in batch.to_pylist()
    ]


def test_samples_are_written_with_ids_and_tags(tmp_path):
    """A record per key, step and tags; ids are kept as they are; what is of no sample stays apart."""
    eventlog.start(tmp_path / "run")
    tracker = stats_tracker.get("eval-rollout")
    with tracker.scope("aime"):
        tracker.recorder.samples("right", {"/a/1": 1, "a/2": 0}, tags={"kind": "text"})
        tracker.recorder.samples("right", {"ü": 1}, tags={"kind": "image"}, step=7)
        tracker.recorder.samples("right", {"a/3": 0}, tags={"kind": "text"})
        tracker.scalar(right=0.5)
    exported = stats_tracker.export_all()
    eventlog.stop()
    key = "eval-rollout/aime/right"
    assert {key: 0.5, f"{key}__count": 5} == exported
    assert [
        ((key, {"kind": "text"}, None), ["/a/1", "a/2", "a/3"], [1.0, 0.0, 0.0]),
        ((key, {"kind": "image"}, 7), ["ü"], [1.0]),
        ((key, None, None), None, [0.5]),
    ] == written(tmp_path / "run")


def test_what_an_export_leaves_is_logged_once(tmp_path):
    """Without reset the samples are exported again, and written only once."""
    eventlog.start(tmp_path / "run")
    recorder = stats_tracker.get("eval-rollout").recorder
    recorder.samples("right", {"a": 1})
    first = stats_tracker.export_all(reset=False)
    recorder.samples("right", {"b": 0})
    assert (1.0, 0.5) == (first["eval-rollout/right"], stats_tracker.export_all()["eval-rollout/right"])
    eventlog.stop()
    assert [["a"], ["b"]] == [ids for _, ids, _ in written(tmp_path / "run")]


def test_a_key_without_samples_is_known():
    """A rank that has none holds the key all the same: no mean, and nothing that counts."""
    recorder = Recorder("eval-rollout")
    assert not recorder.sampled("right")
    recorder.samples("right", {})
    assert recorder.sampled("right")
    drained = eventlog.drain([recorder])
    assert ["eval-rollout/right"] == [spec.key for spec in drained.specs]
    assert 0 == len(drained.frame)
    assert not recorder.sampled("right")


def test_what_is_no_id_is_refused_as_a_whole():
    """A bad id or value records nothing of the call."""
    recorder = Recorder()
    for values in ({"a": 1, "": 2}, {"a": 1, "\ud800": 2}, {"a": 1, "b": "x"}):
        with pytest.raises(errors.RecordingError, match="expected a"):
            recorder.samples("right", values)
    assert not recorder.sampled("right")
