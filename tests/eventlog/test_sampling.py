"""payload="sample": the same number of values of every larger record, in order, and said so."""

import json
import subprocess
import sys
import textwrap
from collections import Counter

import numpy as np
import pytest

import eventlog
from eventlog import encode
from eventlog.options import Options, open_run, this_process
from eventlog.sampling import USUAL_SIZE, Sample, size_of
from tests.storage import producer

ROWS, COLUMNS = 30, 100


@pytest.fixture
def sample(tmp_path):
    """Return what draws 50 values for rank 0."""
    return Sample(50, producer(eventlog.RunDir.create(tmp_path / "run")))


def drained(record):
    """Return the window of what `record` records."""
    recorder = eventlog.Recorder()
    record(recorder)
    return eventlog.drain([recorder]).frame


def typical(recorder):
    """Record a mask, two stats of 3000 values that say their position, a small one and scalars."""
    recorder.denominator({"m": np.ones((ROWS, COLUMNS), bool), "few": np.ones((4, 5), bool)})
    position = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    recorder.stat("m", {"x": position.astype(np.float32)})
    recorder.stat("m", {"y": 2.0 * position})
    recorder.stat("few", {"z": np.arange(20, dtype=np.float32).reshape(4, 5)})
    for i in range(200):
        recorder.scalar({"s": i})
    recorder.scalar({"t": 7})


def payload_of(sample, frame):
    """Return the payload's rows by key."""
    rows = [row for message in encode.payload(sample.drawn(frame)) for row in message.batch().to_pylist()]
    return {frame.calls.specs[row["record_id"] - frame.first_id].key: row for row in rows}


def test_large_records_keep_as_many_values_in_their_order(sample):
    """Of larger records 50 values are kept, in order, with their times; small ones and masks are whole."""
    found = payload_of(sample, drained(typical))
    for key, name in (("x", "values32"), ("y", "values64"), ("s", "values64")):
        values = found[key][name]
        assert (50, sorted(set(values))) == (len(values), values)
        assert (0, True) == (found[key]["element"], found[key]["last"])
    assert 50 == len(found["s"]["times"])
    assert list(range(20)) == found["z"]["values32"]
    assert [7.0] == found["t"]["values64"]
    assert b"\xff" * (ROWS * COLUMNS // 8) == found["m"]["mask"]
    assert [COLUMNS] * ROWS == found["m"]["selected"]


def test_values_under_one_mask_still_belong_together(sample):
    """Stats of one mask keep the same elements, whatever their types are."""
    found = payload_of(sample, drained(typical))
    assert [2.0 * x for x in found["x"]["values32"]] == found["y"]["values64"]


def test_moments_are_of_all_values_and_sampled_records_say_so(sample):
    """A sampled record's moments are exact, and its tags say how many values are kept; others say nothing."""
    frame = drained(typical)
    rows = encode.records(sample.marked(frame), encode.Texts()).batch().to_pylist()
    tags = {row["key"]: row["tags"] and json.loads(row["tags"]) for row in rows}
    assert {"sampled": 50} == tags["x"] == tags["y"] == tags["s"]
    assert [None] * 4 == [tags[key] for key in ("m", "few", "z", "t")]
    (x,) = [row for row in rows if row["key"] == "x"]
    n = ROWS * COLUMNS
    assert (n, n * (n - 1) / 2, 0.0, n - 1) == tuple(x[name] for name in ("count", "sum", "min", "max"))
    assert {} == frame.tags


def test_values_of_samples_are_whole(sample):
    """Values that carry the ids of evaluation samples are never sampled."""
    frame = drained(lambda recorder: recorder.samples("accuracy", {f"q{i}": i % 2 for i in range(200)}))
    (row,) = payload_of(sample, frame).values()
    assert (200, [f"q{i}" for i in range(200)]) == (len(row["values64"]), row["sample_ids"])


def test_every_value_has_the_same_chance(sample):
    """Over many records each element is kept about equally often: chi-square within six deviations."""
    counts, rounds, n = Counter(), 2000, 200
    for record in range(rounds):
        counts.update(sample._draw(record, n).tolist())
    expected = rounds * sample.size / n
    statistic = sum((counts[i] - expected) ** 2 / expected for i in range(n)) / (1 - sample.size / n)
    assert abs(statistic - (n - 1)) < 6 * (2 * (n - 1)) ** 0.5


def test_the_same_program_keeps_the_same_values(tmp_path):
    """A rerun draws the same sample, in another session and directory; another rank draws another one."""
    code = """
    import sys, eventlog
    log = eventlog.start(sys.argv[1], rank=int(sys.argv[2]), payload="sample:20")
    recorder = eventlog.Recorder()
    for i in range(500):
        recorder.scalar({"s": i})
    log.write(eventlog.drain([recorder]).frame)
    eventlog.stop()
    ((_, _, batch),) = eventlog.RunReader(sys.argv[1]).payload()
    print(batch["values64"][0].as_py())
    """

    def kept(path, rank):
        command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / path), str(rank)]
        return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

    first = kept("a", 0)
    assert 20 == len(first)
    assert first == kept("b", 0)
    assert first != kept("c", 1)


@pytest.mark.parametrize(
    ("policy", "size"), [("full", None), ("off", 0), ("sample", USUAL_SIZE), ("sample:7", 7)]
)
def test_a_policy_names_a_size(policy, size):
    """How many values are kept follows from the policy's name."""
    assert size == size_of(policy)


def test_nothing_is_kept_of_a_payload_that_is_off(tmp_path):
    """payload="off" writes records alone."""
    log = eventlog.start(tmp_path, payload="off")
    log.write(drained(typical))
    eventlog.stop()
    reader = eventlog.RunReader(tmp_path)
    assert ([7], []) == ([b.num_rows for *_, b in reader.records()], list(reader.payload()))


def test_the_environment_gives_policy_and_budget(tmp_path, monkeypatch):
    """AREAL_METRICS_PAYLOAD and AREAL_METRICS_PAYLOAD_BUDGET stand for the arguments, units included."""
    monkeypatch.setattr("eventlog.process._environment_read", False)
    for name, value in (("DIR", str(tmp_path)), ("PAYLOAD", "sample:5"), ("PAYLOAD_BUDGET", "1.5MB")):
        monkeypatch.setenv(f"AREAL_METRICS_{name}", value)
    log = eventlog.current()
    assert (5, 1_500_000) == (log.options.sample_size, log.options.budget)
    eventlog.stop()


def test_ranks_draw_differently_by_role_and_rank(tmp_path):
    """The seed is the producer's role and rank, nothing of the session."""
    drawn = []
    for role, rank in (("actor", 0), ("actor", 0), ("actor", 1), ("rollout", 0)):
        options = Options(str(tmp_path), role, rank)
        drawn.append(tuple(Sample(5, this_process(options, open_run(options)))._draw(3, 1000)))
    assert drawn[0] == drawn[1]
    assert 3 == len(set(drawn))
