"""Values that were in flight when their process was killed are listed, and nothing else is."""

import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eventlog
from aggregator import compact, merge_runs, open_run, recover, verify
from eventlog.errors import QueryError
from eventlog.reader import RunReader
from eventlog.rundir import RunDir
from eventlog.schema import LossCause, Stream
from eventlog.windows import WindowSet
from eventlog.writer import Writer
from tests.storage import producer, put_payload, put_records

RECORDING = """
import os, signal, sys
import numpy as np
import eventlog
import tests.patience
from aggregator import stats_tracker as tracker

log = eventlog.start(sys.argv[1], **{options!r})
log.claim_attempt()
for step in range({steps}):
    if step == {stuck}:
        log.writer._queues.payload.take = lambda: None
    for i in range(12):
        tracker.denominator(m=np.arange(50) < {selected})
        tracker.stat("m", x=np.full(50, float(step), np.float32))
    tracker.counter(n=1)
    log.commit(0, step, 10 + step, [tracker.export_all()])
    if step < {stuck}:
        assert log.writer.flush(60)
{end}
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
WAIT = "print('ready', flush=True); sys.stdin.read()"


def code(*, stuck, end=KILL, steps=6, selected=20, **options):
    """Return a program that commits steps 10, 11 …, of which the values stay in flight from one on."""
    return RECORDING.format(stuck=stuck, end=end, steps=steps, selected=selected, options=options)


def killed(path, **how):
    """Run such a program; it is killed at its end."""
    done = subprocess.run(
        [sys.executable, "-c", code(**how), path], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return path


def lost(path):
    """Return (window, step, rows) of the losses of a run, all of them values that went missing."""
    found = [loss for _, loss in eventlog.verify(path).losses]
    assert all((loss.stream, loss.cause) == (Stream.PAYLOAD, LossCause.MISSING) for loss in found)
    return [(loss.window, loss.step, loss.rows) for loss in found]


@pytest.mark.parametrize("payload", ["full", "sample:5"])
def test_values_in_flight_at_a_kill_are_listed_by_window_and_step(tmp_path, payload):
    """Verify and info name windows and steps, verify is not clean, and the records stay."""
    run = killed(tmp_path / "run", stuck=4, payload=payload)
    records = 12 * 2 + 1
    assert [(4, 14, records), (5, 15, records)] == lost(run)
    assert not verify(run).clean
    with open_run(run) as session:
        named = [(row["window"], row["step"], row["stream"]) for row in session.info()["losses"]]
        assert [(4, 14, "payload"), (5, 15, "payload")] == named
        assert 6 == len(session.metrics(["x/avg"], source="recomputed"))


def test_all_that_never_came_is_listed_and_the_reason_is_true(tmp_path):
    """A process killed before its first value was written kept nothing, and not because it was told so."""
    run = killed(tmp_path / "run", stuck=0)
    assert [10, 11, 12, 13, 14, 15] == [step for _, step, _ in lost(run)]
    with open_run(run) as session, pytest.raises(QueryError, match="lost when the process ended"):
        session.percentiles("x", [0.5])


@pytest.mark.parametrize(
    "how",
    [
        {"stuck": 6, "payload": "full"},
        {"stuck": 6, "payload": "sample:5"},
        {"stuck": 6, "payload": "off"},
        {"stuck": 6, "payload": "full", "selected": 0},
        {"stuck": 6, "payload": "full", "payload_budget": 6000},
        {"stuck": 6, "payload": "full", "spill_bytes": 300},
        {"stuck": 6, "payload": "sample:5", "spill_bytes": 300},
        {"stuck": 6, "payload": "off", "spill_bytes": 300},
    ],
)
def test_a_process_that_wrote_everything_lost_nothing(tmp_path, how):
    """Whatever is kept, pruned, spilled or never selected: a killed process of which all arrived is clean."""
    run = killed(tmp_path / "run", **how)
    assert ([], True) == (lost(run), verify(run).clean)


def test_a_window_that_was_spilled_is_lost_in_part(tmp_path):
    """Of a window of which parts arrived the rest is listed."""
    run = killed(tmp_path / "run", stuck=3, steps=4, spill_bytes=2000)
    ((window, step, rows),) = lost(run)
    assert (3, 13) == (window, step)
    assert 0 < rows <= 25


def test_what_a_live_process_has_not_written_is_not_lost(tmp_path):
    """Not yet is not lost while the process lives, and is as soon as it is gone."""
    run = tmp_path / "run"
    program = code(stuck=4, end=WAIT)
    with subprocess.Popen(
        [sys.executable, "-c", program, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert b"ready\n" == process.stdout.readline()
        assert ([], True) == (lost(run), verify(run).clean)
        process.kill()
    assert [14, 15] == [step for _, step, _ in lost(run)]


def test_a_process_elsewhere_is_given_time(tmp_path, monkeypatch):
    """Of a process of another machine nothing is concluded until it has been silent for long."""
    run = killed(tmp_path / "run", stuck=4)
    monkeypatch.setattr("eventlog.machine.here", lambda: "another")
    assert ([], True) == (lost(run), verify(run).clean)
    monkeypatch.setattr("eventlog.life.SILENT_SECONDS", -1.0)
    assert [14, 15] == [step for _, step, _ in lost(run)]


def test_copies_say_the_same(tmp_path):
    """Recovery, merging and compaction that drops the payload neither hide a loss nor invent one."""
    run, whole = killed(tmp_path / "run", stuck=4), killed(tmp_path / "whole", stuck=6)
    recover(run, tmp_path / "copy")
    merge_runs(tmp_path / "both", run, whole)
    for path in (run, tmp_path / "copy", tmp_path / "both"):
        assert [14, 15] == [step for _, step, _ in lost(path)]
    for path in (run, whole):
        _make_old(path)
        compact(path, drop_sources=True)
    assert [14, 15] == [step for _, step, _ in lost(run)]
    assert [] == lost(whole)
    assert verify(whole).clean


def _make_old(path):
    """Let the processes of a run be gone for good, which a restart shows."""
    eventlog.start(path, attempt=None).claim_attempt()
    eventlog.stop()


def test_a_run_that_does_not_say_its_policy_is_not_judged(tmp_path):
    """Of a log that does not tell whether it kept values none is called lost."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    put_records(writer, 0)
    put_payload(writer, 1)
    put_records(writer, 1)
    writer.close()
    (state,) = RunReader(run.path).sessions()
    assert ("", [], {0, 1}) == (state.policy, state.losses, state.complete)


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_windows_without_others(some, others):
    """A set without another is what sets say it is."""
    assert some - others == set(WindowSet(some).without(WindowSet(others)))
