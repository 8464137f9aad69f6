"""Following a run while it is written: every committed window once, in order."""

import itertools
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

import eventlog.following
from eventlog import losses
from eventlog.errors import FormatVersionError, NotARunError
from eventlog.following import Follower, follow
from eventlog.manifest import write_json
from eventlog.message import head
from eventlog.rundir import RunDir
from eventlog.schema import ENTRY_SIZE, Stream
from eventlog.writer import Writer
from tests.eventlog.test_reader import entry
from tests.runs import RunBuilder
from tests.storage import (
    commits,
    flip,
    only,
    producer,
    put_records,
    put_window,
    records,
    settle,
    write_run,
)

RECORDS_DATA = "*.records.0000.arrows"


@pytest.fixture
def writer(tmp_path):
    """Return a writer of a run at tmp_path / "run", which is closed in the end."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run), segment_bytes=6000)
    yield writer
    writer.close()


def put(writer, *windows):
    """Write and commit windows, and wait for them."""
    for window in windows:
        put_window(writer, window)
    settle(writer)


def windows(told):
    """Return the windows of what was told, after looking at the rows."""
    told = list(told)
    for item in told:
        assert [records(w).to_pylist() for w in item.windows] == [b.to_pylist() for b in item.records]
        assert [commits(item.number).to_pylist()] == [item.commit.to_pylist()]
    return [window for item in told for window in item.windows]


def test_a_finished_run_is_told_and_ends(tmp_path):
    """Every committed window comes once, in order, through all segments, and then it is over."""
    run = write_run(tmp_path, 20, segment_bytes=6000)
    assert len(run.segments(Stream.RECORDS)) > 3
    assert list(range(20)) == windows(follow(tmp_path))


def test_each_poll_tells_what_is_new(tmp_path, writer):
    """What was told does not come again; what is written later does, in the next segments too."""
    follower = Follower(tmp_path / "run")
    assert [] == windows(follower.poll())
    start = 0
    for more in (1, 0, 5, 9, 2):
        put(writer, *range(start, start + more))
        assert list(range(start, start + more)) == windows(follower.poll())
        start += more
    assert [] == follower.problems
    assert not follower.finished()
    writer.close()
    assert [] == windows(follower.poll())
    assert follower.finished()


def test_no_frame_is_read_twice(tmp_path, writer):
    """What was told may be damaged, or gone: nobody looks at it again."""
    follower = Follower(tmp_path / "run")
    put(writer, *range(10))
    assert list(range(10)) == windows(follower.poll())
    for data in (tmp_path / "run").rglob("*.arrows"):
        content = data.read_bytes()
        begin = head(content).size  # behind the schema message
        data.write_bytes(content[:begin] + bytes(len(content) - begin))
    put(writer, 10, 11)
    assert [10, 11] == windows(follower.poll())
    assert [] == follower.problems


def test_a_run_is_followed_from_its_beginning(tmp_path):
    """A directory that does not exist yet is waited for, and followed from another process until the end."""
    script = """
import sys, time
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import producer, put_window
time.sleep(0.5)
run = RunDir.create(sys.argv[1])
run.claim_attempt({})
writers = [Writer(run, producer(run, rank=rank), segment_bytes=8000) for rank in (0, 1)]
for window in range(50):
    for writer in writers:
        put_window(writer, window)
    time.sleep(0.005)
for writer in writers:
    writer.close()
run.end_attempt(0, "finished")
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")]) as child:
        told = list(follow(tmp_path / "run", poll=0.02, timeout=60))
    assert 0 == child.returncode
    for rank in (0, 1):
        assert list(range(50)) == windows(item for item in told if item.producer.rank == rank)


def test_a_restarted_run_is_followed(tmp_path):
    """A run that ended by an exception goes on: processes of the next attempt are followed, too."""
    run = RunDir.create(tmp_path)
    run.claim_attempt({})
    write_run(tmp_path, 3)
    run.end_attempt(0, "exception", "ValueError")
    told = follow(tmp_path, poll=0.01, timeout=60)
    assert [0, 1, 2] == windows(itertools.islice(told, 3))
    run.claim_attempt({})
    write_run(tmp_path, 2)
    run.end_attempt(1, "finished")
    assert [0, 1] == windows(told)


def test_it_ends_when_nothing_comes(tmp_path, writer):
    """After `timeout` seconds without news, or when it is told to stop, it ends."""
    put(writer, 0)
    assert [0] == windows(follow(tmp_path / "run", poll=0.01, timeout=0.05))
    stop = threading.Event()
    told = follow(tmp_path / "run", poll=30, stop=stop)
    assert [0] == windows(itertools.islice(told, 1))
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    assert [] == list(told)
    timer.join()
    assert [] == list(follow(tmp_path / "none", poll=0.01, timeout=0.05))


def test_a_killed_process_has_ended(tmp_path, monkeypatch):
    """Of a process without an end mark it is waited for signs of life; then the run is over."""
    run = RunDir.create(tmp_path / "run")
    started = 1_767_225_600_000_000
    old = Writer(run, producer(run, started_us=started))
    put(old, 0)
    follower = Follower(tmp_path / "run")
    assert [0] == windows(follower.poll())
    assert not follower.finished()
    monkeypatch.setattr("eventlog.life.SILENT_SECONDS", -1.0)
    assert follower.finished()
    old.close()


def test_only_what_is_committed_is_told(tmp_path, writer):
    """Records wait for their commit; a process that commits nothing is passed over."""
    follower = Follower(tmp_path / "run")
    put_records(writer, 0)
    put_records(writer, 1)
    settle(writer)
    assert [] == list(follower.poll())
    said = {"commit": 0, "global_step": 7, "window_first": 0, "window_last": 1}
    batch = commits(0).from_pylist([said], schema=commits(0).schema)
    writer.put(Stream.COMMITS, lambda: [batch], window=0, nbytes=100)
    settle(writer)
    (told,) = follower.poll()
    assert (7, range(2), [records(0), records(1)], ()) == (
        told.step,
        told.windows,
        told.records,
        told.incomplete,
    )


def test_commits_without_windows_and_export_rows_are_told(tmp_path):
    """A commit that binds nothing is told all the same; export rows come with the windows they belong to."""
    with RunBuilder(tmp_path) as run:
        actor = run.producer("actor")
        actor.commit(0, {"a": 1.0}, leader=True)
        actor.tracker().scalar({"loss": 1.0})
        stats = run.export(actor)
        actor.commit(1, stats, leader=True)
    first, second = follow(tmp_path)
    assert (0, range(0), [], 0) == (first.number, first.windows, first.records, first.step)
    assert [["scalar"], ["export"]] == [batch["kind"].to_pylist() for batch in second.records]
    assert [None, "loss", "loss__count"] == second.commit["key"].to_pylist()


def test_the_commits_alone_can_be_followed(tmp_path):
    """Without records no record is read: damage among them is not even seen."""
    write_run(tmp_path, 4)
    flip(only(tmp_path, RECORDS_DATA), entry(tmp_path, 2).offset + 100)
    follower = Follower(tmp_path, records=False)
    told = list(follower.poll())
    assert [(n, range(n, n + 1), [], ()) for n in range(4)] == [
        (item.step, item.windows, item.records, item.incomplete) for item in told
    ]
    assert [] == follower.problems


def test_a_damaged_frame_makes_its_window_incomplete(tmp_path):
    """A commit is told even when records of its windows are damaged, and says of which."""
    write_run(tmp_path, 4)
    flip(only(tmp_path, RECORDS_DATA), entry(tmp_path, 2).offset + 100)
    told = list(follow(tmp_path))
    assert [(), (1,), (), ()] == [item.incomplete for item in told]
    assert [1, 0, 1, 1] == [len(item.records) for item in told]


def test_a_lost_index_record_makes_its_window_incomplete(tmp_path):
    """Where an index record is damaged its window is named by the commit that binds it."""
    write_run(tmp_path, 4)
    flip(only(tmp_path, "*.records.0000.idx"), 3 * ENTRY_SIZE + 8)
    assert [(), (1,), (), ()] == [item.incomplete for item in follow(tmp_path)]


def test_a_damaged_commit_is_passed_over(tmp_path):
    """The windows of a commit that is lost are bound by none, and the others are told."""
    write_run(tmp_path, 4)
    data = only(tmp_path / "commits", "*.arrows")
    flip(data, data.stat().st_size - 100)
    follower = Follower(tmp_path)
    assert [0, 1, 2] == windows(follower.poll())
    assert [data] == [problem.path for problem in follower.problems]
    assert follower.finished()


@pytest.mark.parametrize("late", ["records", "commits"])
def test_what_is_late_is_waited_for(tmp_path, writer, monkeypatch, late):
    """While a process lives, bytes that came after their index record are not given up (a network disk)."""
    put(writer, 0, 1)
    root = tmp_path / "run" / ("events" if late == "records" else "commits")
    data = max(root.rglob("*.arrows" if late == "commits" else "*.records.*.arrows"))
    monkeypatch.setattr(eventlog.following, "PATIENCE_SECONDS", 60.0)
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    follower = Follower(tmp_path / "run")
    assert [0] == windows(follower.poll())
    assert [] == windows(follower.poll())
    data.write_bytes(whole)
    assert [1] == windows(follower.poll())
    assert [] == follower.problems

    data.write_bytes(whole[:-100])
    monkeypatch.setattr(eventlog.following, "PATIENCE_SECONDS", 0.0)
    told = list(Follower(tmp_path / "run").poll())
    expected = [(0, ()), (1, (1,))] if late == "records" else [(0, ())]
    assert expected == [(item.number, item.incomplete) for item in told]


def test_a_newer_run_is_refused(tmp_path):
    """A run of a newer major version is not followed."""
    write_json(tmp_path / "run.json", {"id": "x", "format": [2, 0], "created_us": 1})
    with pytest.raises(FormatVersionError, match=r"expected format 1\.x, got 2\.0"):
        list(follow(tmp_path))


def test_a_file_is_refused(tmp_path):
    """A file never becomes a run: it is not waited for, as a directory, or a link to nothing, is."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nothing")
    for path in (tmp_path / "folder", tmp_path / "none", tmp_path / "link"):
        assert [] == list(Follower(path).poll())
    with pytest.raises(NotARunError, match=f"expected a run directory, got a file: {tmp_path / 'file'}$"):
        list(follow(tmp_path / "file"))


def test_what_is_written_between_two_looks_is_not_missed(tmp_path, writer):
    """However writing and polling fall together, nothing is missed and nothing comes twice."""
    follower, seen = Follower(tmp_path / "run"), []
    thread = threading.Thread(target=lambda: [put_window(writer, n) or time.sleep(0.001) for n in range(200)])
    thread.start()
    while thread.is_alive():
        seen += windows(follower.poll())
    settle(writer)
    seen += windows(follower.poll())
    assert list(range(200)) == seen


def test_commits_that_left_no_trace_are_losses(tmp_path):
    """The numbers that are missing say so, between which steps."""
    with RunBuilder(tmp_path / "run") as run:
        first = run.producer("actor", attempt=0)
        for step in (0, 1, 4):
            first.commits = step  # of those between nothing is left
            first.commit(step, time=step, leader=True)
        follower = Follower(run.path)
        run.close()
        assert [0, 1, 4] == [told.step for told in follower.poll()]
        assert (["actor-0: commits 2 to 3 of attempt 0, after step 1 and before step 4"], []) == (
            losses.lines(follower.losses),
            follower.problems,
        )
        assert 2 == losses.number(follower.losses)


def test_losses_that_processes_noted_are_told_with_their_steps(tmp_path):
    """Of the commits, and of the records where they are followed."""
    run = RunDir.create(tmp_path / "run")
    with closing(Writer(run, producer(run))) as writer:
        for window in range(3):
            put_window(writer, window)
        settle(writer)
        for stream in (Stream.RECORDS, Stream.COMMITS):
            writer.put(stream, lambda: 1 / 0, window=3, nbytes=1, step=3)
        put_window(writer, 4)
        settle(writer)
    follower = Follower(run.path)
    assert [0, 1, 2, 4] == [told.number for told in follower.poll()]
    assert ["actor-0: records of steps 3; commits of steps 3"] == losses.lines(follower.losses)
    metrics = Follower(run.path, records=False)
    list(metrics.poll())
    assert ["actor-0: commits of steps 3"] == losses.lines(metrics.losses)
    with closing(Writer(run, producer(run))) as again:  # the rank goes back, and commits the step after all
        put(again, *range(4))
    for one in (follower, metrics):
        list(one.poll())
        assert [] == one.losses
