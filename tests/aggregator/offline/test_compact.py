"""Compaction: Parquet that changes no answer, whatever happens to it, and is used by itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator import compact, merge_runs, open_run
from eventlog import RunReader, encode, errors, read_json, schema, verify, write_json
from tests.answers import answers
from tests.runs import RunBuilder
from tests.storage import flip, settle

ROOT = Path(__file__).parents[3]
SMALL = 4096  # bytes of a part: several parts of a small run


def window(producer, step):
    """Record all kinds of things, with NaN, Inf, empty selections and sequences."""
    random = np.random.default_rng([step, producer.rank])
    mask = random.random((4, 6)) < (0.0 if step == 2 else 0.7)
    x = random.normal(size=(4, 6)).astype(np.float32)
    if step == 3:
        x[0, 0], x[1, 1] = np.nan, -np.inf
    tracker = producer.tracker()
    tracker.denominator({"m": mask}, about={"sample_ids": [f"s{step}-{i}" for i in range(4)]})
    tracker.stat("m", {"x": x, "y": x.astype(np.float64) / 3})
    tracker.scalar({"lr": step / 7})
    tracker.scalar({"lr": -0.0})
    tracker.counter({"hits": 2**60 + step})
    producer.tracker("rollout").scalar({"reward": float(step)})


def group(run, attempt, begin, end, *, started=0):
    """Record steps on two ranks, and commit them."""
    ranks = [
        run.producer("actor", r, world=f"w{attempt}", world_size=2, attempt=attempt, started=started)
        for r in range(2)
    ]
    run.attempt(attempt, leader=ranks[0], started=started, resume_step=begin or None, outcome="finished")
    more(run, ranks, begin, end, started=started)
    return ranks


def more(run, ranks, begin, end, *, started=0):
    for step in range(begin, end):
        for producer in ranks:
            window(producer, step)
        at = started + 10 * step
        stats = run.export(ranks, time=at)
        ranks[0].commit(step, stats, time=at + 5, epoch=step // 2, leader=True)
        ranks[1].commit(step, time=at + 5)


def record(path):
    """Record a run that was restarted, beside a worker without a world; its last window is unbound."""
    with RunBuilder(path) as run:
        ranks = group(run, 0, 0, 6)
        group(run, 1, 4, 9, started=1000)
        worker = run.producer("rollout", 0, started=3)
        for step in range(4):
            worker.tracker("rollout").scalar({"reward": step / 3})
            run.export(worker, time=10 * step + 2)
        window(ranks[0], 50)
        run.export(ranks[0], time=5000)
    return path


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return a recorded run, and what it answers."""
    path = record(tmp_path_factory.mktemp("recorded") / "run")
    return path, answers(path)


@pytest.fixture
def before(told):
    """Return what the run answered before it was compacted."""
    return dict(told[1])


@pytest.fixture
def path(told, tmp_path):
    """Return a copy of a recorded run."""
    return Path(shutil.copytree(told[0], tmp_path / "run"))


def same_but_for_notes(before, after):
    """Whether two accounts agree but for what they say could not be used."""
    notes = ("problems", "info")
    assert {k: v for k, v in before.items() if k not in notes} == {
        k: v for k, v in after.items() if k not in notes
    }


def settled(account):
    """Return what a live run answers, but when its processes were last seen."""
    for row in [*account["info"]["producers"], *account["view producers"]]:
        row.pop("last_seen")
    return account


def parts(path):
    return sorted((path / "tables").glob("[0-9]*.json"))


@pytest.mark.parametrize(
    ("part_bytes", "attempts"), [(1, "latest"), (SMALL, "all"), (1 << 30, "latest"), (1 << 30, "all")]
)
def test_no_answer_changes(path, part_bytes, attempts):
    """Every view, table and statistic is the same to the bit, and no source is touched."""
    before = answers(path, attempts=attempts)
    files = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    made = compact(path, part_bytes=part_bytes, workers=1)
    assert before == answers(path, attempts=attempts)
    assert files == {p: p.read_bytes() for p in files}
    assert (made.written, made.problems) == (len(parts(path)), [])
    assert (len(parts(path)) == 1) == (part_bytes == 1 << 30)
    assert 0 == compact(path, part_bytes=part_bytes, workers=1).rows


def test_the_tables_are_what_is_read(path, before):
    """A session reads no frame that a part stands for: frames that are damaged later change nothing."""
    compact(path, workers=1)
    for data in path.glob("*/*/*.arrows"):
        data.write_bytes(data.read_bytes()[:2000] + bytes(len(data.read_bytes()) - 2000))
    after = answers(path)
    same_but_for_notes(before, after)


def test_values_lie_by_key(path):
    """The payload of one key lies together: few bytes answer a question about it."""
    compact(path, workers=1)
    (payload,) = (path / "tables").glob("*.payload.parquet")
    (records,) = (path / "tables").glob("00000000-*.records.parquet")
    key_of = {(row["session"], row["record_id"]): row["key"] for row in pq.read_table(records).to_pylist()}
    rows = pq.read_table(payload, columns=["session", "record_id"]).to_pylist()
    keys = [key_of[row["session"], row["record_id"]] for row in rows]
    changes = sum(one != other for one, other in pairwise(keys))
    assert len(set(keys)) - 1 == changes


def test_a_live_run_is_compacted_again_and_again(tmp_path):
    """What is finished goes into parts, what came since is read from the frames; small parts are joined."""
    path = tmp_path / "run"
    with RunBuilder(path) as run:
        ranks = group(run, 0, 0, 2)
        for end in range(3, 6):
            window(ranks[0], 99)  # a window that nobody has drained yet is nobody's business
            for producer in ranks:
                assert producer.writer.flush(100)
            before = settled(answers(path))
            made = compact(path, part_bytes=40_000, workers=1)
            assert before == settled(answers(path))
            assert made.written >= 1
            more(run, ranks, end - 1, end)
            for producer in ranks:
                assert producer.writer.flush(100)
            with open_run(path) as session:
                assert list(range(end)) == session.metrics("hits")["step"].to_pylist()
    before = answers(path)
    made = compact(path, part_bytes=40_000, workers=1)
    assert before == answers(path)
    assert made.parts == len(parts(path)) < 4


def test_large_records_stay_whole(tmp_path, monkeypatch):
    """A record that was split over frames is one again, whatever part its frames are in."""
    monkeypatch.setattr(encode, "FRAME_BYTES", 64)
    path = record(tmp_path / "run")
    before = answers(path)
    compact(path, part_bytes=1, workers=1)
    assert before == answers(path)


KILLED = """
import sys
from pathlib import Path
from aggregator import compact
from aggregator.offline import checked

plain, left = checked.NewFile.finish, int(sys.argv[2])

def finish(self):
    global left
    left -= 1
    if left < 0:
        print("at it", flush=True)
        import time
        time.sleep(60)
    return plain(self)

checked.NewFile.finish = finish
compact(sys.argv[1], part_bytes=int(sys.argv[3]), workers=1)
"""


@pytest.mark.parametrize("files", [0, 3, 6])
def test_killed_half_way(path, before, files):
    """Frames and old Parquet still give the full table, unfinished files are nobody's (report g3)."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), str(files), str(SMALL)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert child.stdout
    assert b"at it\n" == child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    unfinished = list((path / "tables").glob(".*.tmp"))
    assert 1 == len(unfinished)
    assert before == answers(path)
    made = compact(path, part_bytes=SMALL, workers=1)
    assert before == answers(path)
    assert made.parts == len(parts(path))
    os.utime(unfinished[0], (time.time() - 7200,) * 2)
    compact(path, part_bytes=SMALL, workers=1)
    assert [] == list((path / "tables").glob(".*.tmp"))


def test_a_compaction_goes_on_where_it_was(path):
    """Parts that are there are not written again: the files are the ones the killed compaction left."""
    compact(path, part_bytes=SMALL, workers=1)
    kept = {p: p.stat().st_mtime_ns for p in (path / "tables").iterdir()}
    gone = parts(path)[1]
    gone.unlink()
    before = answers(path)
    compact(path, part_bytes=SMALL, workers=1)
    assert before == answers(path)
    assert {p: t for p, t in kept.items() if not p.name.startswith(gone.stem)} == {
        p: p.stat().st_mtime_ns for p in kept if not p.name.startswith(gone.stem)
    }


@pytest.mark.parametrize(
    ("table", "damage"),
    [(table, "flip") for table in ("records", "exports", "commits", "payload", "json")]
    + [(table, damage) for table in ("commits", "payload") for damage in ("cut", "gone")]
    + [("json", "gone")],
)
def test_damaged_tables_are_not_used(path, before, table, damage):
    """One flipped bit, a cut, a missing file: the frames answer, and the session says why (report g3)."""
    compact(path, part_bytes=SMALL, workers=1)
    victim = sorted((path / "tables").glob("*.json" if table == "json" else f"*.{table}.parquet"))[1]
    if damage == "flip":
        flip(victim, victim.stat().st_size // 2)
    elif damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-100])
    else:
        victim.unlink()
    after = answers(path)
    same_but_for_notes(before, after)
    if (table, damage) != ("json", "gone"):
        assert [True] == ["is not used" in note and victim.name in note for note in after["problems"]]


def test_a_part_that_is_replaced_meanwhile_is_no_problem(path):
    """A session that finds tables gone, and with them what names them, reads the frames and says nothing."""
    with open_run(path) as session:
        before = session.percentiles("x", 0.5).to_pydict(), session.problems
    compact(path, workers=1)
    with open_run(path) as session:
        for part in (path / "tables").iterdir():
            part.unlink()
        assert str(before) == str((session.percentiles("x", 0.5).to_pydict(), session.problems))


def test_every_flipped_byte_of_a_table_is_found(path):
    """Heads, footers, values: whatever byte is wrong, the frames answer."""
    compact(path, workers=1)
    (victim,) = (path / "tables").glob("*.exports.parquet")
    whole = victim.read_bytes()
    with open_run(path) as session:
        before = session.sql("select * from exports").to_pydict()
    for place in range(0, len(whole), max(1, len(whole) // 24)):
        victim.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with open_run(path) as session:
            assert before == session.sql("select * from exports").to_pydict()
            assert [True] == ["expected checksum" in note for note in session.problems]


def test_stale_tables_are_not_used(path, tmp_path):
    """Tables beside other frames than theirs are ignored with a note; so are those of a newer format."""
    other = tmp_path / "other"
    with RunBuilder(other) as run:
        group(run, 0, 0, 2)
    compact(path, workers=1)
    before = answers(other)
    shutil.copytree(path / "tables", other / "tables")
    after = answers(other)
    same_but_for_notes(before, after)
    assert [True] == ["is not what it was made of" in note for note in after["problems"]]
    (part,) = parts(other)
    part.write_text(json.dumps({"format": 2, "crc32c": schema.crc32c(b'{"format":2}')}))
    assert [True] == ["expected tables of format 1, got 2" in note for note in answers(other)["problems"]]


def test_damage_of_the_sources_stays_told(path):
    """Frames that were damaged before are in no part: the run says the same of them as before."""
    for folder, stream in (("events", "records"), ("events", "payload"), ("commits", "0000")):
        data = min((path / folder).glob(f"actor-0/*{stream}*.arrows"))
        flip(data, data.stat().st_size * 2 // 3)
    before = answers(path)
    assert before["problems"]
    compact(path, part_bytes=SMALL, workers=1)
    after = answers(path)
    assert sorted(before.pop("problems")) == sorted(after.pop("problems"))
    before["info"].pop("problems"), after["info"].pop("problems")
    assert before == after


def test_dropping_sources(path, before):
    """The values are then in the tables alone: smaller, the same answers, nothing that counts as damage."""
    payload = list(path.glob("events/*/*.payload.*.arrows"))
    size = sum(p.stat().st_size for p in payload)
    made = compact(path, drop_sources=True, part_bytes=SMALL, workers=1)
    assert size == made.dropped
    assert [] == [p for p in payload if p.exists()]
    assert before == answers(path)
    assert verify(path).clean
    reader = RunReader(path)
    assert [] == list(reader.payload())
    reader.sessions()
    assert [] == reader.problems
    with pytest.raises(errors.QueryError, match="got one whose values are in tables alone"):
        merge_runs(path.with_name("merged"), path, path)
    again = compact(path, drop_sources=True, part_bytes=SMALL, workers=1)
    assert (0, made.parts) == (again.written, again.parts)
    assert before == answers(path)
    victim = min((path / "tables").glob("*.payload.parquet"))
    flip(victim, 100)
    assert [True] == ["is not used" in note for note in answers(path)["problems"]]


def test_each_dropped_source_has_a_mark_of_its_own(path, before):
    """Dropped streams are no damage whoever drops others at the same time; one lost mark costs one stream."""
    payload = {p.name for p in path.glob("events/*/*.payload.*.arrows")}
    compact(path, part_bytes=SMALL, workers=1)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: compact(path, drop_sources=True, workers=1), range(3)))
    assert [[]] * 3 == [one.problems for one in made]
    marks = list((path / "tables" / "moved").iterdir())
    assert payload == {mark.stem for mark in marks}
    assert before == answers(path)
    assert verify(path).clean
    marks[0].unlink()
    problems = [problem for file in verify(path).files for problem in file.problems]
    assert [True] == [marks[0].stem in problem for problem in problems]


def test_what_older_compactions_noted_is_known(path, before):
    """The list of dropped streams that was kept in one file is still read."""
    compact(path, drop_sources=True, workers=1)
    marks = path / "tables" / "moved"
    write_json(path / "tables" / "moved.json", {"streams": [mark.stem for mark in marks.iterdir()]})
    shutil.rmtree(marks)
    assert before == answers(path)
    assert verify(path).clean


def test_sources_that_no_table_holds_stay(path, before):
    """What is dropped was read back first: a table that does not hold its values costs no source."""
    compact(path, part_bytes=SMALL, workers=1)
    damaged = min((path / "tables").glob("*.payload.parquet"))
    flip(damaged, 100)
    sources = read_json(damaged.with_name(damaged.name.replace(".payload.parquet", ".json")))["covers"]
    made = compact(path, drop_sources=True, part_bytes=SMALL, workers=1)
    (problem,) = made.problems
    assert "is not used: expected checksum" in problem
    assert sources["payload"]
    assert [] == [name for name in sources["payload"] if not (path / name).exists()]
    assert before["percentiles"] == answers(path)["percentiles"]


def test_a_table_with_the_only_good_rows_is_not_replaced(tmp_path):
    """A part is written anew with what came since only as long as its sources are good."""
    with RunBuilder(tmp_path / "run") as run:
        ranks = group(run, 0, 0, 3)
        for rank in ranks:
            settle(rank.writer)
        compact(run.path, workers=1)
        before = answers(run.path)["percentiles"]
        data = min(run.path.glob("events/actor-0/*.payload.*.arrows"))
        flip(data, data.stat().st_size // 2)
        more(run, ranks, 3, 5)
    made = compact(run.path, workers=1)
    assert 2 == made.parts
    after = answers(run.path)["percentiles"]
    assert before == [row for row in after if row["step"] < 3]


def test_damage_in_the_sources_is_told(path):
    """A frame that cannot be read is in no table, and compaction says so."""
    data = min(path.glob("events/actor-0/*.payload.*.arrows"))
    flip(data, data.stat().st_size // 2)
    made = compact(path, workers=1)
    assert [data.name] == [Path(problem).name for problem in made.problems]


def test_a_stream_that_changed_costs_only_its_own_tables(path):
    """Where the index of one stream is not what a part was made of, its other streams are still used."""
    compact(path, drop_sources=True, workers=1)
    index = min(path.glob("commits/actor-0/*.idx"))
    flip(index, 200)
    with open_run(path) as session:
        assert any("is not what it was made of" in problem for problem in session.problems)
        assert 0 == sum(session.percentiles("x", [0.5])["missing"].to_pylist())


def test_of_two_compactions_at_once_each_row_counts_once(path, before):
    """Parts that stand for the same frames: the fuller one is read, the other removed in time."""
    compact(path, part_bytes=SMALL, workers=1)
    small = {p.name: p.read_bytes() for p in (path / "tables").iterdir()}
    shutil.rmtree(path / "tables")
    compact(path, workers=1)
    for name, data in small.items():
        (path / "tables" / name).write_bytes(data)
    assert before == answers(path)
    made = compact(path, workers=1)
    assert (1, 1) == (made.parts, len(parts(path)))
    assert before == answers(path)


def test_a_part_that_others_stand_in_for_stays_while_its_sources_are_damaged(path):
    """What two compactions at once left is removed only where every frame of it is there and good."""
    compact(path, part_bytes=SMALL, workers=1)
    small = {p: p.read_bytes() for p in (path / "tables").iterdir()}
    shutil.rmtree(path / "tables")
    compact(path, workers=1)
    for name, data in small.items():
        name.write_bytes(data)
    victim = min(path.glob("commits/actor-0/*.arrows"))
    intact = victim.read_bytes()
    flip(victim, len(intact) // 2)
    compact(path, workers=1)
    assert 1 < len(parts(path)) < 1 + len([p for p in small if p.suffix == ".json"])
    victim.write_bytes(intact)
    compact(path, workers=1)
    assert 1 == len(parts(path))


def test_two_processes_write_what_one_writes(path):
    """Parts are the same to the byte, whoever writes them."""
    compact(path, part_bytes=SMALL, workers=1)
    one = {p.name: p.read_bytes() for p in (path / "tables").iterdir()}
    shutil.rmtree(path / "tables")
    compact(path, part_bytes=SMALL, workers=2)
    assert one == {p.name: p.read_bytes() for p in (path / "tables").iterdir()}


def test_nothing_to_compact(tmp_path):
    """No run is an error that says so; an empty run has no parts."""
    with pytest.raises(errors.NotARunError, match="expected a run directory, got nothing"):
        compact(tmp_path / "none")
    with RunBuilder(tmp_path / "run"):
        pass
    assert 0 == compact(tmp_path / "run", workers=1).parts


@given(
    st.lists(
        st.one_of(st.none(), st.lists(st.floats(width=32, allow_nan=False), max_size=5)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 3),
)
def test_lists_are_stored_as_their_bytes(lists, skipped):
    """Lists of numbers come back as they were, null and empty ones too, whole or a slice (a law)."""
    import pyarrow as pa

    from aggregator.offline import compacted

    rows = [
        {
            "record_id": i,
            "element": 0,
            "last": True,
            "values32": values,
            "times": values and [i] * len(values),
        }
        for i, values in enumerate(lists)
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=schema.PAYLOAD)[skipped:]
    stored = pa.table(compacted.as_stored(batch))
    assert batch.to_pylist() == compacted._as_recorded(stored).to_pylist()
