"""Tags of commits, masks and samples: what JSON holds, read when given."""

import enum
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import eventlog
from aggregator import open_run, stats_tracker
from eventlog import errors, plain_tags

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


class Kind(enum.StrEnum):
    TEXT = "text"


@given(st.dictionaries(st.text(), JSON))
def test_what_json_holds_stays_as_it_is(tags):
    """Texts, numbers, lists and mappings are what json makes of them, as a copy."""
    assert json.loads(json.dumps(tags)) == plain_tags(tags)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array(7), 7),
        (np.str_("a"), "a"),
        (torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        (torch.tensor([4]), 4),
        (torch.tensor(0.25, requires_grad=True), 0.25),
        (Kind.TEXT, "text"),
        (math.nan, "nan"),
        (torch.tensor(-math.inf), "-inf"),
        ((1, {np.int64(2): [np.float64(0.5)]}), [1, {"2": [0.5]}]),
    ],
    ids=repr,
)
def test_numbers_of_numpy_and_torch_are_numbers(value, plain):
    """One number is that number, with its kind; what is not finite, for which JSON has none, a text."""
    found = plain_tags({"x": value})["x"]
    assert (plain, type(plain)) == (found, type(found))


class Unreadable:
    def __repr__(self):
        raise OSError("gone")


def ring():
    """Return a mapping that holds itself."""
    found = {}
    found["again"] = found
    return found


@pytest.mark.parametrize(
    "value",
    [
        {1},
        b"x",
        object(),
        Unreadable(),
        1j,
        torch.ones(2),
        np.ones(2),
        torch.empty((), device="meta"),
        np.ma.masked,
        np.datetime64("2020-01-01"),
        10**5000,
        {(1, 2): 3},
        "a lone surrogate \udc80",  # as in undecodable file names; DuckDB reads no JSON with one
        {"\ud800": 1},
        ring(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_hold_is_refused_at_the_call(tmp_path, value):
    """A RecordingError where it is given, and nothing is lost: the step's commit is whole without it."""
    log = eventlog.start(tmp_path, role="actor")
    log.claim_attempt()
    log.tag({"kept": 1})
    for refusing in (
        lambda: log.tag({"x": value}),
        lambda: log.note({"x": value}),
        lambda: log.commit(0, 0, 0, [{"loss": 1.0}], tags={"x": value}),
        lambda: stats_tracker.denominator(n=torch.ones(2, dtype=torch.bool), tags={"x": value}),
        lambda: stats_tracker.get().recorder.samples("acc", {"s1": 1.0}, tags={"x": value}),
    ):
        with pytest.raises(errors.RecordingError, match="expected tags that JSON can hold, got"):
            refusing()
    assert log.commit(0, 0, 0, [{"loss": 1.0}])
    eventlog.stop()
    with open_run(tmp_path) as run:
        rows = run.sql("select key, tags from commits order by key nulls first").to_pylist()
    assert [(None, {"kept": 1}), ("loss", {"kept": 1})] == [
        (row["key"], json.loads(row["tags"])) for row in rows
    ]


def test_tags_of_numpy_and_torch_are_committed(tmp_path):
    """A commit and a batch whose tags are such numbers are on disk, and can be asked for by them."""
    log = eventlog.start(tmp_path, role="actor")
    log.claim_attempt()
    about = {"length": np.int64(8), "scale": torch.tensor(0.5)}
    stats_tracker.denominator(n=torch.ones(2, dtype=torch.bool), tags=about)
    log.tag({"schedule": np.float32(0.5)})
    assert log.commit(0, 0, 0, [stats_tracker.export_all(step=0)], tags={"lr_index": np.int64(3)})
    eventlog.stop()
    with open_run(tmp_path) as run:
        committed = run.sql("select distinct tags->>'schedule' s, tags->>'lr_index' i from commits")
        masks = run.sql("select tags from records where tags is not null")["tags"].to_pylist()
    assert [{"s": "0.5", "i": "3"}] == committed.to_pylist()
    assert [{"length": 8, "scale": 0.5}] == [json.loads(each) for each in masks]


KEY = f"sk-ant-{'A' * 30}"


def test_tags_are_written_without_secrets(tmp_path):
    """Of a commit, a mask and a sample: what a config would not keep is in no file, what is harmless is."""
    log = eventlog.start(tmp_path, role="actor")
    log.claim_attempt()
    stats_tracker.denominator(
        n=torch.ones(2, dtype=torch.bool), tags={"api_key": "hunter2-a", "task": "math"}
    )
    about = {"url": "https://me:hunter2-b@host/x", "task": "code"}
    stats_tracker.get().recorder.samples("x", {"s1": 1.0}, tags=about)
    log.tag({"password": "hunter2-c", "note": f"with {KEY}", "next_token": "kept"})
    assert log.commit(0, 0, 0, [stats_tracker.export_all(step=0)], tags={"a": [{"hf_token": "hunter2-d"}]})
    eventlog.stop()
    with open_run(tmp_path) as run:
        committed = run.sql("select distinct tags from commits")["tags"].to_pylist()
        recorded = run.sql("select distinct tags from records where tags is not null")["tags"].to_pylist()
    gone = "<redacted>"
    said = {"password": gone, "note": f"with {gone}", "next_token": "kept", "a": [{"hf_token": gone}]}
    assert [said] == list(map(json.loads, committed))
    about = [{"api_key": gone, "task": "math"}, {"url": f"https://{gone}@host/x", "task": "code"}]
    assert about == sorted(map(json.loads, recorded), key=lambda tags: tags["task"], reverse=True)
    content = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert (0, 0) == (content.count(b"hunter2"), content.count(KEY.encode()))
