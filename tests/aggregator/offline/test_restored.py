"""Recovery and verification of a run whose values lie in tables."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pytest
import torch

import eventlog
from aggregator import compact, open_run, recover, verify
from eventlog import read_json, write_json
from eventlog.schema import PAYLOAD, Stream
from eventlog.writer import Writer
from tests.runs import RunBuilder
from tests.storage import IDS_A_WINDOW, flip, only, payload, producer, put_records

STEPS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run of two ranks, with values; tests work on copies of it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    with RunBuilder(path) as run:
        ranks = [run.producer("actor", rank, world="w", world_size=2, attempt=0) for rank in range(2)]
        run.attempt(leader=ranks[0])
        for step in range(STEPS):
            for rank in ranks:
                tracker = rank.tracker()
                tracker.scalar({"loss": step + rank.rank})
                tracker.denominator({"mask": torch.tensor([True, False, True, True])})
                tracker.stat("mask", {"adv": torch.arange(4.0) + 10 * step + rank.rank})
                tracker.stat("mask", {"kl": torch.arange(4.0).double() / (1 + step)})
            stats = run.export(ranks, time=10 * step)
            ranks[0].commit(step, stats, time=10 * step + 5, leader=True)
            ranks[1].commit(step, time=10 * step + 5)
    return path


@pytest.fixture
def run(whole, tmp_path):
    """Return a run that may be damaged."""
    return shutil.copytree(whole, tmp_path / "run")


def values(path):
    """Return every recorded value with whose it is."""
    with open_run(path) as session:
        assert [] == session.problems
        rows = session.sql("select role, rank, step, key, values from payload order by all").to_pylist()
        return rows, session.percentiles("*", [0.1, 0.5], by=["step", "rank"]).to_pylist()


def payload_of(done):
    """Return what a recovery says of the payload."""
    return [file for file in done.files if file.kind == "payload"]


def test_payload_in_tables_alone_comes_back_as_streams(run, whole, tmp_path):
    """After `compact(drop_sources=True)` the copy has every value, in streams, and nothing is discarded."""
    compact(run, drop_sources=True, workers=1)
    assert [] == list(run.glob("events/*/*.payload.*.arrows"))
    done = recover(run, tmp_path / "saved")
    assert done.complete
    assert [STEPS, STEPS] == [file.frames for file in payload_of(done)]
    assert 2 == len(list(done.into.glob("events/*/*.payload.*.arrows")))
    assert not (done.into / "tables").exists()
    assert values(whole) == values(done.into)
    assert verify(done.into).clean
    before, after = (eventlog.RunReader(path).sessions() for path in (whole, done.into))
    assert [state.payload for state in before] == [state.payload for state in after]


def test_a_damaged_frame_that_a_table_has_comes_back(run, whole, tmp_path):
    """What of a stream is damaged is taken from the table that holds it."""
    compact(run, workers=1)
    for data in run.glob("events/*/*.payload.*.arrows"):
        flip(data, data.stat().st_size // 2)
    done = recover(run, tmp_path / "saved")
    assert done.complete
    assert values(whole) == values(done.into)


def test_tables_without_a_note_of_it_are_used_too(run, whole, tmp_path):
    """Where the marks of what was moved are lost, the tables still hold the values."""
    compact(run, drop_sources=True, workers=1)
    shutil.rmtree(run / "tables" / "moved")
    done = recover(run, tmp_path / "saved")
    assert done.complete
    assert values(whole) == values(done.into)


def test_a_damaged_table_costs_its_rows_and_is_counted(run, tmp_path):
    """Frames that no table can give any more are discarded one by one, with their windows noted as lost."""
    compact(run, drop_sources=True, workers=1)
    flip(only(run, "*.payload.parquet"), 300)
    done = recover(run, tmp_path / "saved")
    assert not done.complete
    assert [STEPS, STEPS] == [file.discarded for file in payload_of(done)]
    assert all(file.discarded_bytes for file in payload_of(done))
    with open_run(done.into) as session:
        assert [] == session.problems
        losses = [row for row in session.info()["losses"] if row["stream"] == "payload"]
        assert sorted([*range(STEPS), *range(STEPS)]) == sorted(row["step"] for row in losses)


def test_without_tables_what_is_not_copied_is_counted(run, tmp_path):
    """`eventlog.recover` knows no tables: it counts the frames that stay behind, and notes their windows."""
    compact(run, drop_sources=True, workers=1)
    done = eventlog.recover(run, tmp_path / "saved")
    assert not done.complete
    reason = f"{STEPS} frames: their rows are in tables alone, which are not copied"
    assert [(STEPS, (reason,))] * 2 == [(file.discarded, file.reasons) for file in payload_of(done)]


def test_a_long_record_is_put_together_in_order(tmp_path):
    """Rows of one record in several frames go back to the frames they came from."""
    run = eventlog.RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    for window in range(2):
        put_records(writer, window)
        (row,) = payload(window, 3).to_pylist()
        parts = [
            pa.RecordBatch.from_pylist([{**row, "element": at, "last": at == 6}], schema=PAYLOAD)
            for at in (0, 3, 6)
        ]
        ids = {"first_id": window * IDS_A_WINDOW, "last_id": window * IDS_A_WINDOW}
        writer.put(Stream.PAYLOAD, lambda parts=parts: parts, window=window, nbytes=100, **ids)
    writer.close()
    before = [(r.window, r.frame, b.to_pylist()) for _, r, b in eventlog.RunReader(run.path).payload()]
    assert 6 == len(before)
    compact(run.path, drop_sources=True, workers=1)
    recover(run.path, tmp_path / "saved")
    copy = eventlog.RunReader(tmp_path / "saved")
    assert before == [(r.window, r.frame, b.to_pylist()) for _, r, b in copy.payload()]


def test_verify_reads_the_tables(run):
    """Every file of the tables has a line; a flipped bit in one, and a part that is none, are told."""
    compact(run, workers=1)
    found = verify(run)
    assert found.clean
    tables = [file for file in found.files if file.kind == "tables"]
    assert {file.path for file in tables} == {
        path.relative_to(run) for path in (run / "tables").glob("*.parquet")
    }
    assert all(file.bytes for file in tables)
    flip(only(run, "*.records.parquet"), 99)
    (run / "tables" / "00000009-00000009.0123456789abcdef.json").write_text("{}")
    found = verify(run)
    assert not found.clean
    assert [".json", ".parquet"] == sorted(file.path.suffix for file in found.files if file.problems)


def test_verify_tells_of_a_part_of_other_frames(run):
    """A part whose frames are not what it was made of is not used, and told."""
    compact(run, workers=1)
    part = only(run / "tables", "0*.json")
    told = read_json(part)
    name = min(told["covers"]["commits"])
    told["covers"]["commits"][name][0][2] ^= 1
    write_json(part, told)
    found = verify(run)
    (problem,) = [problem for file in found.files for problem in file.problems]
    assert f"is not used: {name} is not what it was made of" in problem
