"""Reading a run into columns: bindings in the views, damage, live runs, what `info` tells."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import eventlog
from aggregator import open_run, stats_tracker
from eventlog import RunDir, RunReader, errors, schema
from tests.runs import RunBuilder, at


def bound(session, where="true"):
    sql = f'select role, rank, step, bound_by from windows where {where} order by role, rank, "window"'
    return [tuple(row.values()) for row in session.sql(sql).to_pylist()]


def actors(run, n=2, **options):
    return [run.producer("actor", rank, world="w", world_size=n, **options) for rank in range(n)]


def test_all_five_bindings_are_told(run):
    """Windows, and the records in them, carry their step and the reason for it."""
    leader, other = actors(run)
    worker = run.producer("worker")
    given = run.producer("given")
    for producer in (leader, other, worker, given):
        producer.tracker().scalar({"x": 1.0})
    run.export(given, time=1, step=7)
    run.export(worker, time=1)
    run.export([leader, other], time=2)
    leader.commit(3, {}, time=5, leader=True)
    worker.tracker().scalar({"x": 2.0})
    run.export(worker, time=9)
    session = run.open()
    expected = [
        ("actor", 0, 3, "commit"),
        ("actor", 1, 3, "export"),
        ("given", 0, 7, "given"),
        ("worker", 0, 3, "time"),
        ("worker", 0, None, None),
    ]
    assert expected == bound(session)
    records = session.sql(
        'select role, rank, step, bound_by from records order by role, rank, "window"'
    ).to_pylist()
    assert expected == [tuple(row.values()) for row in records]
    assert 1 == session.info()["unbound_windows"]


def test_a_record_s_own_step_stands_within_its_window(run):
    """`set_step` between two calls gives two records of one window different steps."""
    leader = run.producer()
    for step in (4, 5):
        leader.tracker().set_step(step)
        leader.tracker().scalar({"x": float(step)})
    run.export(leader, time=1)
    session = run.open()
    rows = session.sql("select step, bound_by, sum from records order by step").to_pylist()
    assert [(4, "given", 4.0), (5, "given", 5.0)] == [tuple(row.values()) for row in rows]
    assert [("main", 0, 5, "given")] == bound(session)


def test_a_step_of_one_tracker_moves_no_other_record(run):
    """What carries a step is at that one, a rollout at its policy's; the training beside it is committed."""
    leader = run.producer()
    for step in range(4):
        rollout = leader.tracker("rollout")
        rollout.set_step(step // 2)
        rollout.scalar({"reward": float(step)})
        leader.tracker().scalar({"loss": float(step)})
        leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
    session = run.open()
    assert [("main", 0, step, "commit") for step in range(4)] == bound(session)
    committed, recomputed = (
        session.metrics(["loss", "rollout/reward"], source=source) for source in ("committed", "recomputed")
    )
    assert committed["step"].to_pylist() == recomputed["step"].to_pylist()
    assert committed["value"].to_pylist() == recomputed["value"].to_pylist()
    assert {False} == {row[name] for row in recomputed.to_pylist() for name in ("differs", "incomplete")}
    losses = session.percentiles("loss", [0.5], by=["step"]).to_pylist()
    assert [(step, float(step), 1) for step in range(4)] == [
        (r["step"], r["p50"], r["count"]) for r in losses
    ]
    rewards = session.reduce("rollout/reward", ["avg", "count"], by=["step"]).to_pylist()
    assert [(0, 0.5, 2), (1, 2.5, 2)] == [tuple(row.values()) for row in rewards]


def test_steps_within_a_window_are_told_apart_where_nothing_commits(run):
    """Statistics by step are those of the steps that were set, not of the latest one alone."""
    leader = run.producer()
    for step in (3, 5, 4):
        leader.tracker().set_step(step)
        leader.tracker().scalar({"x": float(step)})
    run.export(leader, time=1)
    session = run.open()
    assert [(3, 3.0), (4, 4.0), (5, 5.0)] == [
        tuple(row.values()) for row in session.reduce("x", ["avg"], by=["step"]).to_pylist()
    ]
    (whole,) = session.metrics(["x"], source="recomputed").to_pylist()
    assert (5, 4.0) == (whole["step"], whole["value"])


def test_epochs_come_from_the_commits(run):
    """Records carry the epoch of their step."""
    leader = run.producer()
    for step in range(4):
        leader.tracker().scalar({"x": 1.0})
        run.export(leader, time=step)
        leader.commit(step, {}, time=step + 0.5, epoch=step // 2, leader=True)
    rows = (
        run.open().sql("select epoch, count(*) as n from records group by epoch order by epoch").to_pylist()
    )
    assert [{"epoch": 0, "n": 2}, {"epoch": 1, "n": 2}] == rows


def recorded(run, steps=3):
    """Two ranks and a worker, three steps; returns the producers."""
    producers = [*actors(run, attempt=0), run.producer("worker")]
    for step in range(steps):
        for producer in producers:
            producer.tracker().scalar({f"{producer.producer.role}/x": float(step)})
        stats = run.export(producers[:2], time=10 * step) | run.export(producers[2], time=10 * step + 1)
        producers[0].commit(step, stats, time=10 * step + 5, leader=True)
        producers[1].commit(step, time=10 * step + 5)
    return producers


def test_without_a_manifest_the_frames_alone_are_enough(run):
    """With everything but the frame files gone, keys and steps are still there (report b6)."""
    run.attempt(0)
    recorded(run)
    run.close()
    known = RunDir.open(run.path).id
    for entry in run.path.iterdir():
        if entry.name not in ("events", "commits"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    session = open_run(run.path)
    assert [0, 1, 2] == session.metrics(["actor/x"])["step"].to_pylist()
    assert {"actor/x", "worker/x"} <= set(session.keys()["key"].to_pylist())
    assert [("worker", 0, step, "time") for step in range(3)] == bound(session, "role = 'worker'")
    assert known == session.info()["run"]
    assert None is session.info()["created"]


def test_attempts_are_known_without_their_files(run):
    """Rows carry their attempt: losing the attempts directory does not mix two lives of a run (report b6)."""
    for attempt, steps in enumerate([range(4), range(2, 5)]):
        leader = run.producer("actor", 0, attempt=attempt, started=100 * attempt)
        for step in steps:
            leader.tracker().scalar({"x": attempt * 100.0 + step})
            stats = run.export(leader, time=100 * attempt + step)
            restored = 1 if attempt else None
            leader.commit(step, stats, time=100 * attempt + step + 0.5, leader=True, restored=restored)
    assert [0, 1, 102, 103, 104] == run.open().metrics(["x"])["value"].to_pylist()


@pytest.mark.parametrize("damage", ["random", "empty", "gone"])
def test_a_damaged_file_costs_only_its_own_rows(run, damage):
    """Of four ranks one file is destroyed: three answer, and the bad one is named (reports b10, g4)."""
    ranks = actors(run, 4)
    for step in range(3):
        for producer in ranks:
            producer.tracker().scalar({"x": float(step + producer.rank)})
        stats = run.export(ranks, time=step)
        ranks[0].commit(step, stats, time=step + 0.5, leader=True)
    run.close()
    (bad,) = (run.path / "events" / "actor-2").glob("*.records.*.arrows")
    if damage == "random":
        bad.write_bytes(np.random.default_rng(1).bytes(bad.stat().st_size))
    elif damage == "empty":
        bad.write_bytes(b"")
    else:
        bad.unlink()
    session = open_run(run.path)
    rows = session.sql("select rank, step, sum from records order by rank, step").to_pylist()
    assert [(rank, step, float(step + rank)) for rank in (0, 1, 3) for step in range(3)] == [
        tuple(row.values()) for row in rows
    ]
    assert any(bad.name.split(".")[0] in problem for problem in session.problems)
    assert session.problems == session.info()["problems"]
    assert [1.5, 2.5, 3.5] == session.metrics(["x"])["value"].to_pylist()
    recomputed = session.metrics(["x"], source="recomputed").to_pylist()
    assert [(True, True)] * 3 == [(row["incomplete"], row["differs"]) for row in recomputed]


@pytest.mark.parametrize("damage", ["frames", "files"])
def test_damage_does_not_cost_an_attempt_its_steps(run, damage):
    """A restarted leader whose records are destroyed still owns what it committed (report b10)."""
    for attempt, steps in enumerate([range(6), range(3, 5)]):
        leader = run.producer("actor", attempt, attempt=attempt, started=100 * attempt)
        for step in steps:
            leader.tracker().scalar({"x": 100.0 * attempt + step, f"only{attempt}": 1.0})
            stats = run.export(leader, time=100 * attempt + step)
            restored = 2 if attempt else None
            leader.commit(step, stats, time=100 * attempt + step + 0.5, leader=True, restored=restored)
    run.close()
    for file in (run.path / "events" / "actor-1").glob("*.records.*"):
        if damage == "files":
            file.unlink()
        elif file.suffix == ".arrows":
            file.write_bytes(bytes(file.stat().st_size))
    session = open_run(run.path)
    assert [0, 1, 2, 103, 104] == session.metrics(["x"])["value"].to_pylist()
    assert [0, 1, 2] == session.metrics(["only0"])["step"].to_pylist()
    assert 3 == session.info()["superseded_steps"]


def test_a_run_without_any_readable_frame_still_opens(run):
    """Every file destroyed: no rows, no exception, a problem for each."""
    recorded(run)
    run.close()
    for file in run.path.rglob("*.arrows"):
        file.write_bytes(b"\0" * 100)
    session = open_run(run.path)
    assert 0 == session.metrics().num_rows
    assert session.problems


def test_two_processes_of_one_rank_are_both_read(run):
    """Both say rank 0 and commit other keys: both keys are complete (report b7)."""
    for n, key in enumerate("ab"):
        leader = run.producer("actor", 0, attempt=0, started=n)
        for step in range(10):
            leader.tracker().scalar({f"rec/{key}": 1.0})
            run.export(leader, time=100 * n + step)
            leader.commit(step, {key: float(step)}, time=100 * n + step + 0.5, leader=True)
    session = run.open()
    for key in "ab":
        assert list(range(10)) == session.metrics([key])["value"].to_pylist()
    assert 2 == session.sql("select count(*) as n from producers where rank = 0")["n"][0].as_py()
    assert 20 == session.sql("select count(*) as n from records")["n"][0].as_py()


def test_a_live_run_is_read_as_far_as_it_is_sealed(run):
    """Readers need no lock: while the writer goes on, each new session sees more (reports b2, g11)."""
    leader = run.producer()
    seen = []
    for step in range(6):
        leader.tracker().scalar({"x": float(step)})
        leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
        if step % 2:
            assert leader.writer.flush(100)
            with open_run(run.path) as one, open_run(run.path) as other:
                assert one.metrics().equals(other.metrics())
                seen.append(one.metrics(["x"]).num_rows)
                assert not one.info()["producers"][0]["ended"]
    assert [2, 4, 6] == seen


def test_a_window_whose_records_were_lost_is_incomplete_and_counts_nowhere(run):
    """A frame damaged on one rank: its window is told, flagged, and in no recomputed number."""
    producers = recorded(run)
    run.close()
    (file,) = (run.path / "events" / "actor-1").glob("*.records.*.arrows")
    batch_two = bytearray(file.read_bytes())
    entries = [
        e for p, e, _ in RunReader(run.path).records() if p.session == producers[1].session and e.window == 1
    ]
    batch_two[entries[0].offset + entries[0].length - 20] ^= 0xFF
    file.write_bytes(batch_two)
    session = open_run(run.path)
    sql = (
        "select \"window\", step, complete, records from windows where role = 'actor' and rank = 1 order by 1"
    )
    assert [(0, 0, True, 1), (1, 1, False, 0), (2, 2, True, 1)] == [
        tuple(row.values()) for row in session.sql(sql).to_pylist()
    ]
    assert 1 == session.info()["incomplete_windows"]
    rows = session.metrics(["actor/x"], source="recomputed").to_pylist()
    assert [False, True, False] == [row["incomplete"] for row in rows]


def test_records_of_an_unknown_kind_are_kept_and_not_reduced(run):
    """What a newer minor version records shows in the views, and stays out of the numbers."""
    leader = run.producer()
    leader.tracker().scalar({"x": 1.0})
    _, window, _ = leader.drain(time=1)
    leader.note_export(time=1)
    batch = pa.RecordBatch.from_pylist(
        [{"record_id": 10**9, "window": 77, "kind": "sketch", "key": "y", "tracker": ""}], schema.RECORDS
    )
    leader._put(schema.Stream.RECORDS, [batch], 77)
    leader.commit(0, {"x": 1.0}, time=2, leader=True, windows=(window, 77))
    session = run.open()
    assert [("x", 0), ("y", 0)] == [
        tuple(row.values()) for row in session.sql("select key, step from records order by key").to_pylist()
    ]
    assert ["x", "x__count"] == session.metrics(source="recomputed")["key"].to_pylist()
    assert ["x"] == [row["key"] for row in session.keys().to_pylist() if row["kind"] == "scalar"]


def test_not_a_run_is_an_error(tmp_path):
    """A directory that is none, and a path that is not there, are refused with the path last."""
    with pytest.raises(errors.NotARunError, match=f"expected a run directory, .*{tmp_path}$"):
        open_run(tmp_path)
    with pytest.raises(errors.NotARunError, match="expected a run directory, got nothing"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(errors.QueryError, match="expected at least one run directory, got none"):
        open_run()


def test_info_tells_who_led_and_who_recorded(run):
    """Attempts, producers, sizes and counts, as plain values."""
    leader, other = actors(run, attempt=0)
    run.attempt(0, leader=leader, started=3, resume_step=0, outcome="finished")
    leader.tracker().scalar({"x": 1.0})
    other.tracker().scalar({"x": 3.0})
    leader.commit(0, run.export([leader, other], time=4), time=5, leader=True)
    info = run.open().info()
    (attempt,) = info["attempts"]
    assert ("actor", 0, leader.session, "finished", 0, 0, 1, 1) == tuple(
        attempt[name]
        for name in ("role", "rank", "session", "outcome", "resume_step", "owned_from", "commits", "steps")
    )
    assert at(3) == round(attempt["started"].timestamp() * 1e6)
    assert [("actor", 0, 2, 1, 0), ("actor", 1, 2, 1, 0)] == [
        (p["role"], p["rank"], p["world_size"], p["windows"], p["incomplete_windows"])
        for p in info["producers"]
    ]
    assert all(p["ended"] for p in info["producers"])
    assert (run.run.id, str(run.path), [1, 0], 1, 2) == tuple(
        info[name] for name in ("run", "path", "format", "keys", "records")
    )
    assert min(info["bytes"].values()) > 0
    assert ([], []) == (info["losses"], info["problems"])


def test_nothing_is_written_into_the_run(run):
    """Asking leaves every file as it was, and adds none."""
    recorded(run)
    run.close()
    before = {path: path.stat().st_mtime_ns for path in Path(run.path).rglob("*")}
    with open_run(run.path) as session:
        session.metrics(source="recomputed")
        session.sql("select count(*) from tensors, scalars")
    assert before == {path: path.stat().st_mtime_ns for path in Path(run.path).rglob("*")}


def test_the_builder_joins_an_existing_run(run):
    """A second process writes into the same directory."""
    recorded(run)
    with RunBuilder(run.path) as again:
        again.producer("late").commit(9, {"late": 1.0}, time=999, leader=True)
    assert {9} == set(run.open().metrics(["late"])["step"].to_pylist())


def test_a_damaged_export_row_makes_its_window_incomplete(tmp_path):
    """Without its export row nobody knows what a window was exported as: it is told, not passed over."""
    log = eventlog.start(tmp_path / "run")
    log.claim_attempt()
    for step in range(3):
        stats_tracker.scalar(v=step)
        log.commit(0, step, step, [stats_tracker.export_all()])
    eventlog.stop()
    (index,) = (tmp_path / "run" / "events" / "main-0").glob("*.records.0000.idx")
    data = index.read_bytes()
    uid = schema.IndexHeader.unpack(data[:64]).segment_uid
    entries = [schema.IndexRecord.unpack(data[at : at + 64], uid) for at in range(64, len(data), 64)]
    export = [entry for entry in entries if entry.rows == 1 and entry.window < 0][1]
    segment = index.with_suffix(".arrows")
    flipped = bytearray(segment.read_bytes())
    flipped[export.offset + export.length // 2] ^= 1
    segment.write_bytes(flipped)
    with open_run(tmp_path / "run") as run:
        windows = run.sql("select step, complete from windows order by step").to_pylist()
        assert [(0, True), (1, False), (2, True)] == [(row["step"], row["complete"]) for row in windows]
        assert (1, 1) == (run.info()["incomplete_windows"], len(run.info()["problems"]))
        assert [0, 1, 2] == run.metrics(["v"])["step"].to_pylist()
