"""Clocks that stand before 1970 or after 9999: a run goes on, and is read, whatever they say."""

import subprocess
import sys

import pytest

import eventlog
from aggregator import open_run
from eventlog.clock import LATEST_US, now_us

YEAR = 365 * 86400 * 10**9
RECORDING = """
import sys, time
real, jump = time.time_ns, [0]
time.time_ns = lambda: real() + jump[0]
time.time = lambda: time.time_ns() / 1e9
import eventlog
import tests.patience

jump[0] = int(sys.argv[2])
log = eventlog.start(sys.argv[1])
log.claim_attempt()
recorder = eventlog.Recorder()
for step in range(4):
    if step == 2:
        jump[0] = int(sys.argv[3])
    recorder.scalar({"x": float(step)})
    log.write(eventlog.drain([recorder]).frame)
    assert log.commit(0, step, step, [{"x": float(step)}])
eventlog.stop()
"""


@pytest.mark.parametrize(
    ("begun", "later"),
    [(0, 0), (-100 * YEAR, -100 * YEAR), (-100 * YEAR, 0), (0, -100 * YEAR), (0, 9000 * YEAR)],
    ids=["right", "before 1970", "set right", "set back", "after 9999"],
)
def test_whatever_a_clock_says_a_run_is_whole(tmp_path, begun, later):
    """A run of a clock that stands before 1970, or after 9999, is written, read and followed."""
    code = [sys.executable, "-W", "error", "-c", RECORDING]
    subprocess.run([*code, tmp_path, str(begun), str(later)], check=True, timeout=60)
    assert eventlog.verify(tmp_path).clean
    with open_run(tmp_path) as run:
        assert [0.0, 1.0, 2.0, 3.0] == run.metrics(["x"])["value"].to_pylist()
        told = [run.sql(f"select time from {view}") for view in ("records", "commits")]
        assert all(1970 <= row["time"].year <= 9999 for view in told for row in view.to_pylist())
        assert [] == run.info()["problems"]
    assert [0, 1, 2, 3] == [told.step for told in eventlog.follow(tmp_path, timeout=5, poll=0.02)]


@pytest.mark.parametrize(("said", "told"), [(-5_000, 0), (7_000, 7), ((LATEST_US + 9) * 1000, LATEST_US)])
def test_what_no_date_can_say_is_the_nearest_that_can(monkeypatch, said, told):
    """Times are microseconds since 1970, up to the end of the year 9999."""
    monkeypatch.setattr("time.time_ns", lambda: said)
    assert told == now_us()
