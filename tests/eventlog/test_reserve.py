"""A disk that is full to the end: what was lost is noted in space kept back, and told when the log ends."""

import json
import os
import signal
import subprocess
import sys
import warnings

import pytest

import eventlog
from aggregator import open_run
from eventlog.losses import told
from eventlog.reserve import RESERVE_BYTES, Reserve
from eventlog.rundir import RunDir
from eventlog.schema import LossCause as Cause
from eventlog.schema import Stream
from eventlog.segment import Loss
from eventlog.writer import Writer
from tests.disk import FAULTS, Disk, small
from tests.storage import producer, put_window, settle, tell


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of 1 MiB, where one may be mounted."""
    with small(tmp_path / "disk") as path:
        yield path


def fill_up(path):
    """Write until the disk takes nothing more."""
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_a_disk_that_stays_full_still_says_what_was_lost(small_disk):
    """Forty windows find no room and none comes to the end: every loss is noted, with its step."""
    run = RunDir.create(small_disk / "run")
    writer = Writer(run, producer(run))
    put_window(writer, 0, 1000)
    settle(writer)
    fill_up(small_disk / "ballast")
    for window in range(1, 41):
        put_window(writer, window, 1000)
        writer.bind(window, window, 100 + window)
        settle(writer)
    assert writer.close()
    assert [] == writer.unsaid()
    (state,) = tell(run.path).states
    lost = {(loss.stream, loss.window, loss.step) for loss in writer.losses()}
    assert lost == {(loss.stream, loss.window, loss.step) for loss in state.losses}
    for stream in (Stream.RECORDS, Stream.PAYLOAD):
        windows = {window: step for s, window, step in lost if s is stream}
        assert set(range(20, 41)) <= windows.keys() <= set(range(1, 41))  # the first may have found some room
        assert all(step == 100 + window for window, step in windows.items())
    assert (True, True) == (state.ended, 0 in state.complete)


def test_training_that_ends_on_a_full_disk_lists_its_steps(small_disk):
    """The user's log: commits warn that they are not durable, and `info` lists the steps (report d4)."""
    from aggregator import stats_tracker

    log = eventlog.start(small_disk / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(8):
            stats_tracker.scalar(x=step)
            durable = log.commit(0, step, step, [stats_tracker.export_all()])
            assert log.writer.flush(60)
            if step == 2:
                fill_up(small_disk / "ballast")
        assert not durable
        eventlog.stop()
        with open_run(small_disk / "run") as run:
            steps = {row["step"] for row in run.info()["losses"]}
    assert {7} <= steps <= set(range(3, 8))
    assert steps == {loss.step for loss in log.losses()}


RELEASED = """
import json
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import producer, put_window, settle
run = RunDir.create(root + "/run")
writer = Writer(run, producer(run))
for window in range(10):
    fault.set({letter!r} if window >= 3 else "0")
    put_window(writer, window, 1000)
    settle(writer)
    writer.bind(window, window, 100 + window)
print(json.dumps([writer.close(), len(writer.unsaid()), len(writer.losses())]))
"""


def test_the_space_kept_back_is_enough_where_nothing_else_is(tmp_path):
    """A file system that takes nothing until space is given back: the notes of all losses fit into it."""
    disk = Disk(tmp_path)
    closed, unsaid, lost = json.loads(disk.run(RELEASED.format(letter=FAULTS["until freed"])).stdout)
    assert (True, 0, 21) == (closed, unsaid, lost)
    told_ = tell(disk.root / "run")
    (state,) = told_.states
    noted = sorted((loss.stream, loss.window, loss.step) for loss in state.losses if loss.step is not None)
    expected = [(stream, window, 100 + window) for stream in (1, 2) for window in range(3, 10)]
    assert (expected, 21, []) == (noted, len(state.losses), told_.problems)
    assert [] == [path for path in disk.root.rglob("*") if "reserve" in path.name]


STOPPED = """
import warnings
import eventlog
log = eventlog.start(root + "/run")
recorder = eventlog.Recorder()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for step in range(6):
        fault.set("E" if step in (2, 3, 5) else "0")
        recorder.scalar({"x": step})
        log.write(eventlog.drain([recorder]).frame)
        log.commit(0, step, 10 + step)
        assert log.writer.flush(60)
    fault.set("E")
warnings.simplefilter("always")
"""


@pytest.mark.parametrize("end", ["eventlog.stop()", ""])
def test_what_could_be_noted_nowhere_is_told_at_the_end(tmp_path, end):
    """A disk that takes nothing at all: `stop`, or the exit, says on stderr which steps were lost."""
    done = Disk(tmp_path).run(STOPPED + end)
    (line,) = [line for line in done.stderr.splitlines() if "lost, and noted nowhere else" in line]
    assert "records of steps 15; values of steps 15; commits of steps 15: " in line
    assert line.endswith(str(tmp_path / "disk" / "run"))


def test_space_is_kept_in_a_file_without_a_name(tmp_path):
    """It takes its blocks at once, leaves no name, and goes with its descriptor."""
    reserve = Reserve(tmp_path / ".reserve")
    reserve.take()
    assert [] == list(tmp_path.iterdir())
    assert os.fstat(reserve._fd).st_blocks * 512 >= RESERVE_BYTES
    descriptor = reserve._fd
    reserve.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    nowhere = Reserve(tmp_path / "missing" / ".reserve")
    nowhere.take()
    assert not nowhere.give()
    nowhere.release()


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ([], ""),
        ([(1, 5, 5)], "records of steps 5"),
        ([(1, w, 10 + w) for w in (0, 1, 2, 5)], "records of steps 10-12, 15"),
        ([(1, 0, 1), (3, 0, 1), (3, 1, 2), (2, 0, None)],
         "records of steps 1; values of 1 window without a step; commits of steps 1-2"),
        ([(2, 0, 4), (2, 1, None), (2, 2, None)], "values of steps 4 and 2 windows without a step"),
    ],
)  # fmt: skip
def test_losses_are_told_by_step(lost, expected):
    """Steps that follow each other are a range; what no step is known of is counted in windows."""
    losses = [Loss(Stream(stream), Cause.WRITE_FAILED, window, step=step) for stream, window, step in lost]
    assert expected == told(losses)


KILLED = """
import os, signal, sys, warnings
import numpy as np
import eventlog
from aggregator import stats_tracker
from tests.eventlog.test_reserve import fill_up
from pathlib import Path
warnings.simplefilter("ignore")
root = Path(sys.argv[1])
log = eventlog.start(root / "run")
log.claim_attempt()
for step in range(40):
    if step == 3:
        fill_up(root / "ballast")
    for i in range(4):
        stats_tracker.denominator(m=np.ones(100, bool))
        stats_tracker.stat("m", x=np.random.default_rng(i).random(100, np.float32))
    log.commit(0, step, 100 + step, [stats_tracker.export_all()])
    assert log.writer.flush(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_on_a_full_disk_has_said_what_it_lost(small_disk):
    """While the process goes on its losses are noted in some of the space, by step, not only at its end."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, small_disk], check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = eventlog.verify(small_disk / "run")
    for stream in Stream:
        steps = {loss.step for _, loss in found.losses if loss.stream is stream}
        assert set(range(110, 140)) <= steps <= set(range(103, 140))
    with open_run(small_disk / "run") as run:
        assert {100, 101, 102} <= set(run.metrics()["step"].to_pylist())


def test_space_is_given_up_in_slices_and_taken_again(tmp_path):
    """Half of it stays for the end; what was given up is taken again."""
    reserve = Reserve(tmp_path / ".reserve")
    reserve.take()
    given = 0
    while reserve.give():
        given += 1
    kept = os.fstat(reserve._fd).st_blocks * 512
    assert (True, RESERVE_BYTES // 2) == (given > 1, kept)
    reserve.take()
    assert os.fstat(reserve._fd).st_blocks * 512 >= RESERVE_BYTES
    reserve.release()
    reserve.take()
    assert not reserve.give()
