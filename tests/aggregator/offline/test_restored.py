"""Recovery and verification of a run whose rows lie in tables."""

from __future__ import annotations

import shutil
from contextlib import closing

import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eventlog
from aggregator import compact, open_run, recover, verify
from eventlog import read_json, write_json
from eventlog.schema import ENTRY_SIZE, PAYLOAD, RECORDS, Stream
from eventlog.writer import Writer
from tests.answers import answers
from tests.eventlog.test_reader import write_other
from tests.runs import RunBuilder
from tests.storage import IDS_A_WINDOW, flip, only, payload, producer, put_records, records

STEPS = 4
LONG = [pytest.mark.long, pytest.mark.timeout(900)]


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


@pytest.fixture(scope="module")
def told(whole):
    """Return what the run answers, and every row of its frames."""
    return answers(whole), rows_of(whole)


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


def rows_of(path):
    """Return every frame: whose it is, what its index record says of it but where it lies, its rows."""
    reader = eventlog.RunReader(path)
    frames = [*reader.records(), *reader.payload(), *reader.commits()]
    assert [] == reader.problems
    return [
        (who.session, r.window, r.frame, r.flags, r.first_id, r.last_id, str(batch.to_pylist()))
        for who, r, batch in frames
    ]


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


@pytest.mark.parametrize("pattern", ["*.records.*.arrows", "commits/*/*.arrows"])
def test_damaged_records_and_commits_come_back(run, told, tmp_path, pattern):
    """What the run itself serves from its tables is in the copy: steps, metrics, records, to the bit."""
    compact(run, workers=1)
    for data in run.rglob(pattern):
        flip(data, data.stat().st_size * 3 // 4)
    assert not verify(run).clean
    assert told[0] == answers(run)
    done = recover(run, tmp_path / "saved")
    assert done.complete
    assert [0] * len(done.files) == [file.discarded + file.unverified for file in done.files]
    assert told == (answers(done.into), rows_of(done.into))
    assert verify(done.into).clean


@pytest.mark.parametrize("examples", [4, pytest.param(100, marks=LONG)])
def test_one_bit_of_every_stream_costs_nothing(whole, told, tmp_path_factory, examples):
    """Wherever streams or indexes of a compacted run are damaged, the copy answers as the run did (a law)."""
    compacted = tmp_path_factory.mktemp("compacted") / "run"
    shutil.copytree(whole, compacted)
    compact(compacted, workers=1)

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.floats(0, 1), st.integers(0, 7), st.sampled_from(["arrows", "idx"]))
    def law(place, bit, suffix):
        root = tmp_path_factory.mktemp("damaged")
        run = shutil.copytree(compacted, root / "run")
        for file in sorted(run.glob(f"*/actor-0/*.{suffix}")):
            flip(file, int(place * (file.stat().st_size - 1)), bit)
            place = (
                place + 1 / 3
            ) % 1  # not all schema messages at once, which alone say whose files they are
        done = recover(run, root / "saved")
        assert done.complete
        assert told == (answers(done.into), rows_of(done.into))
        shutil.rmtree(root)

    law()


@pytest.mark.parametrize("kind", ["payload", "records", "commits"])
@pytest.mark.parametrize("left", [0, 1000])
def test_a_stream_that_is_gone_or_cut_comes_back(run, told, tmp_path, kind, left):
    """Whole streams are put together from the tables, and a session tells that they are not whole."""
    compact(run, workers=1)
    data = min(file for file in run.glob("*/*/*.arrows") if kind in str(file.relative_to(run)))
    data.write_bytes(data.read_bytes()[:-left]) if left else data.unlink()
    with open_run(run) as session:
        assert [data.name] == [problem.rsplit("/", 1)[-1] for problem in session.problems]
    done = recover(run, tmp_path / "saved")
    assert done.complete
    assert told == (answers(done.into), rows_of(done.into))


@pytest.mark.parametrize("place", [11, 20, 2 * ENTRY_SIZE + 8])
def test_one_bit_of_the_index_of_values_in_tables_costs_nothing(run, told, tmp_path, place):
    """The values are in tables alone, and which of them a frame had stands in its index alone."""
    compact(run, drop_sources=True, workers=1)
    flip(min(run.glob("events/*/*.payload.*.idx")), place)
    done = recover(run, tmp_path / "saved")
    assert done.complete
    assert told == (answers(done.into), rows_of(done.into))


def test_a_lost_index_record_of_values_in_tables_costs_its_frame(run, told, tmp_path):
    """A part of which an index changed is not used by a session; what the other records name is saved."""
    compact(run, drop_sources=True, workers=1)
    index = min(run.glob("events/*/*.payload.*.idx"))
    content = bytearray(index.read_bytes())
    content[3 * ENTRY_SIZE : 4 * ENTRY_SIZE] = bytes(ENTRY_SIZE)
    index.write_bytes(content)
    done = recover(run, tmp_path / "saved")
    assert [(STEPS - 1, 1), (STEPS, 0)] == sorted((file.frames, file.discarded) for file in payload_of(done))
    rows = rows_of(done.into)
    assert 1 == len(set(told[1]) - set(rows))
    assert set(rows) < set(told[1])


def test_tables_of_another_run_are_not_asked(run, told, tmp_path):
    """What lies in a table beside other frames than its own is never taken for theirs."""
    compact(run, workers=1)
    part = only(run / "tables", "0*.json")
    data = min(run.glob("events/*/*.records.*.arrows"))
    told = read_json(part)
    told["covers"]["records"][data.relative_to(run).as_posix()][0][2] ^= 1
    write_json(part, {**told, "run": "another"})
    flip(data, data.stat().st_size * 3 // 4)
    done = recover(run, tmp_path / "saved")
    assert 1 == sum(file.discarded for file in done.files)


def test_of_two_tables_of_a_stream_the_whole_one_is_used(run, told, tmp_path):
    """Records and exports lie in tables of their own: damage in the one costs no row of the other."""
    compact(run, workers=1)
    flip(only(run, "*.records.parquet"), 300)
    for data in run.glob("events/*/*.records.*.arrows"):
        data.unlink()
    done = recover(run, tmp_path / "saved")
    kept = [file for file in done.files if file.kind == "records"]
    assert [(STEPS, STEPS)] * 2 == [(file.frames, file.discarded) for file in kept]
    with open_run(done.into) as session:
        ids = session.sql("select export_id from exports")["export_id"].to_pylist()
        assert [row["export_id"] for row in told[0]["view exports"]] == ids


def test_columns_that_no_table_has_are_told(tmp_path):
    """Of a frame of a newer version what this one knows comes back, and the report names what does not."""
    newer = RECORDS.append(pa.field("mood", pa.large_string()))
    rows = [{"record_id": i, "window": 0, "key": f"k{i}", "mood": "good", "sum": 1.5} for i in range(3)]
    file = write_other(tmp_path / "run", newer, pa.RecordBatch.from_pylist(rows, schema=newer), minor=3)
    compact(tmp_path / "run", workers=1)
    flip(file.data, file.data.stat().st_size - 100)
    done = recover(tmp_path / "run", tmp_path / "saved")
    (report,) = [one for one in done.files if one.kind == "records"]
    assert (1, 3, 1) == (report.frames, report.rows, report.discarded)
    assert "no table has its columns mood" in report.reasons[0]
    ((_, _, batch),) = eventlog.RunReader(tmp_path / "saved").records()
    assert [("k0", 1.5), ("k1", 1.5), ("k2", 1.5)] == [(r["key"], r["sum"]) for r in batch.to_pylist()]


def test_a_frame_that_says_more_than_a_table_keeps_stays_a_frame(tmp_path):
    """A record with the columns of an export is in no table: nothing of it could be told from there."""
    run = eventlog.RunDir.create(tmp_path / "run")
    with closing(Writer(run, producer(run))) as writer:
        for window in range(2):
            rows = [{**row, "outcome": "ok" if window else None} for row in records(window).to_pylist()]
            batch = pa.RecordBatch.from_pylist(rows, schema=RECORDS)
            ids = {"first_id": rows[0]["record_id"], "last_id": rows[-1]["record_id"]}
            writer.put(Stream.RECORDS, lambda batch=batch: [batch], window=window, nbytes=900, **ids)
    before = answers(run.path)
    assert 3 == compact(run.path, workers=1).rows
    assert before == answers(run.path)


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
