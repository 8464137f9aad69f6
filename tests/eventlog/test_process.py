"""The life of a process: however it ends, what was recorded is written, and the attempt says how it ended."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import aggregator
import eventlog
from eventlog import RunDir, RunReader, moments
from eventlog.errors import LogError
from eventlog.writer import Writer
from tests.storage import producer

PRELUDE = """
import atexit, multiprocessing, os, signal, sys, threading, time
import eventlog
import tests.patience
from eventlog import Recorder, drain

def record(value):
    recorder = Recorder()
    recorder.scalar({"x": value})
    eventlog.current().write(drain([recorder]).frame)

def main():
    eventlog.start(sys.argv[1]).claim_attempt()
    record(1)
"""


def run(tmp_path, code, *, env=None):
    """Run a program that has begun to record; return its exit code."""
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "run")],
        timeout=60,
        check=False,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), **(env or {})},
    )
    return done.returncode


def outcomes(tmp_path):
    """Return how the attempts of the run ended."""
    return [attempt.outcome for attempt in RunDir.open(tmp_path / "run").attempts()]


def values(tmp_path):
    """Return what was recorded, in order of size."""
    reader = RunReader(tmp_path / "run")
    found = sorted(row["sum"] for *_, batch in reader.records() for row in batch.to_pylist())
    assert [] == reader.problems
    return found


@pytest.mark.parametrize(
    ("ending", "code", "outcome"),
    [
        ("main()", 0, "finished"),
        ("main(); sys.exit()", 0, "finished"),
        ("main(); sys.exit(0)", 0, "finished"),
        ("main(); sys.exit(2)", 2, "exception: SystemExit: 2"),
        ("main(); sys.exit('no data')", 1, "exception: SystemExit: no data"),
        ("main(); raise KeyError('boom')", 1, "exception: KeyError: 'boom'"),
        ("main(); raise KeyboardInterrupt", -signal.SIGINT, "exception: KeyboardInterrupt: "),
        ("main(); threading.Thread(target=sys.exit, args=(3,)).start()", 0, "finished"),
        ("main()\ntry:\n  sys.exit(3)\nexcept SystemExit: record(2)", 0, "finished"),
        ("main(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM, "signal: SIGTERM"),
        ("main(); exit(4)", 4, "exception: SystemExit: 4"),
        ("main(); quit()", 0, "finished"),
        ("main()\ntry:\n  sys.exit(3)\nexcept SystemExit: pass", 0, "finished"),
        ("main()\ntry:\n  exit(3)\nexcept SystemExit: pass", 0, "finished"),
        ("main()\ntry:\n  sys.exit(3)\nfinally: pass", 3, "exception: SystemExit: 3"),
        (
            "main()\ntry:\n  sys.exit(3)\nexcept SystemExit as e: kept = e; raise",
            3,
            "exception: SystemExit: 3",
        ),
        ("main()\ntry:\n  sys.exit(3)\nexcept SystemExit: sys.exit(5)", 5, "exception: SystemExit: 5"),
        ("main()\ntry:\n  sys.exit(3)\nexcept SystemExit: sys.exit(0)", 0, "finished"),
        ("main(); raise SystemExit(3)", 3, "finished"),  # nothing tells
        ("main(); threading.Thread(target=lambda: time.sleep(0.3) or record(2)).start()", 0, "finished"),
        ("main(); eventlog.current().commit(0, 0, 0); os._exit(5)", 5, None),
        ("main(); eventlog.current().commit(0, 0, 0); os.abort()", -signal.SIGABRT, None),
    ],
)
def test_every_ending_is_told_apart_and_loses_nothing(tmp_path, ending, code, outcome):
    """Exit codes, exceptions, signals and threads: all that was recorded is read (reports b11, b16)."""
    assert code == run(tmp_path, ending)
    expected = [1.0, 2.0] if "record(2)" in ending else [1.0]
    assert ([outcome], expected) == (outcomes(tmp_path), values(tmp_path))


CHILDREN = """
def child(ending):
    main()
    if ending == "raise":
        raise KeyError("boom")
    if ending == "exit":
        sys.exit(3)
    if ending == "stop":
        eventlog.stop()

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    for ending in ("return", "raise", "exit", "stop"):
        process = context.Process(target=child, args=(ending,))
        process.start()
        process.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing_drain_and_tell_how_they_ended(tmp_path, method):
    """They run no exit handlers; nothing is lost, and each says how it ended (reports b11, b16)."""
    assert 0 == run(tmp_path, CHILDREN.format(method=method))
    expected = ["finished", "exception: KeyError: 'boom'", "exception: SystemExit: 3", "finished"]
    assert (expected, [1.0] * 4) == (outcomes(tmp_path), values(tmp_path))


LEFT = """
import numpy
main()
eventlog.current().commit(0, 0, 0)
recorder = Recorder()
recorder.denominator({"m": numpy.array([True, False])})
recorder.stat("m", {"y": numpy.array([numpy.nan, 1.0])})
recorder.scalar({"z": 1e30})
"""


@pytest.mark.parametrize(
    "ending",
    ["", "sys.exit(2)", "raise KeyError('boom')", "eventlog.stop()", "os.kill(os.getpid(), signal.SIGTERM)"],
)
def test_what_no_export_took_is_written_at_the_end(tmp_path, ending):
    """It is readable, values and all, in a window that is incomplete, and counts in no metric."""
    run(tmp_path, LEFT + ending)
    with aggregator.open_run(tmp_path / "run", attempts="all") as opened:
        rows = opened.sql("select key, count, nan, complete from records order by all").to_pylist()
        values = opened.sql("select record_id from payload").num_rows
        info = opened.info()
    expected = [("m", 1, 0, False), ("x", 1, 0, True), ("y", 1, 1, False), ("z", 1, 0, False)]
    assert expected == [tuple(row.values()) for row in rows]
    assert (1, []) == (info["incomplete_windows"], info["problems"])
    assert 4 == values


def test_the_end_does_not_wait_long_for_an_export(tmp_path):
    """A tracker that another thread is exporting is left out, and what the others hold is written."""
    code = """
    main()
    busy, left, taken = Recorder("busy"), Recorder(), threading.Event()
    busy.scalar({"y": 2})
    left.scalar({"z": 3})

    def export():
        with busy.lock:
            taken.set()
            time.sleep(1000)

    threading.Thread(target=export, daemon=True).start()
    taken.wait()
    """
    assert 0 == run(tmp_path, code)
    assert [1.0, 3.0] == values(tmp_path)


def test_what_the_end_writes_is_still_there_to_be_exported(tmp_path):
    """An export after the log was stopped, or into the next one, has the same numbers, and all of them."""
    recorder = eventlog.Recorder()
    found = []
    for name in ("first", "second"):
        log = eventlog.start(tmp_path / name)
        recorder.scalar({"x": 1})
        if name == "second":
            found.append(drained := eventlog.drain([recorder]))
            log.write(drained.frame)
        eventlog.stop()
        found.append(eventlog.drain([recorder], reset=False))
    assert [[1], [2], []] == [drained.rows[:, moments.COUNT].tolist() for drained in found]
    counts = [
        [n for *_, batch in RunReader(tmp_path / name).records() for n in batch["count"].to_pylist()]
        for name in ("first", "second")
    ]
    assert [[1], [2]] == counts


ENDED = """
def child():
    record(2)
    kept.append(Recorder())
    kept[0].scalar({{"x": 3}})
    eventlog.current().commit(0, 0, 0)
    queue.put(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    time.sleep(60)

if __name__ == "__main__":
    kept, context = [], multiprocessing.get_context({method!r})
    main()
    queue = context.SimpleQueue()
    process = context.Process(target=child)
    process.start()
    as_it_was = queue.get()
    process.terminate()
    process.join()
    sys.exit(0 if (as_it_was, process.exitcode) == (True, -signal.SIGTERM) else 1)
"""


def test_a_child_of_multiprocessing_ends_by_sigterm_at_once(tmp_path):
    """A handler in Python may never run there, so there is none; what was exported and committed is there."""
    assert 0 == run(tmp_path, ENDED.format(method="fork"))
    assert [1.0, 2.0] == values(tmp_path)


def test_a_pool_of_workers_loses_nothing(tmp_path):
    """Workers of a pool that is closed record into sessions of their own and drain at their end."""
    code = """
    if __name__ == "__main__":
        eventlog.start(sys.argv[1])
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(record, range(2, 12))
            pool.close()
            pool.join()
        record(1)
    """
    assert 0 == run(tmp_path, code)
    assert [float(n) for n in range(1, 12)] == values(tmp_path)


def test_a_fork_while_the_writer_works_harms_neither(tmp_path):
    """Children forked at any moment of a busy log record and end; the parent's rows are there once."""
    code = """
    main()
    for i in range(2, 42):
        record(i)
        if i % 4 == 0:
            if (pid := os.fork()) == 0:
                record(1000 + i)
                eventlog.stop()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
    """
    assert 0 == run(tmp_path, code)
    expected = [*range(1, 42), *range(1004, 1044, 4)]
    assert expected == values(tmp_path)
    assert ["finished"] == outcomes(tmp_path)


def test_a_child_that_records_nothing_leaves_nothing(tmp_path):
    """A forked child that never records begins no session, whatever it ends by."""
    code = """
    main()
    if os.fork() == 0:
        sys.exit(3)
    os.wait()
    """
    assert 0 == run(tmp_path, code)
    assert (["finished"], [1.0], 1) == (
        outcomes(tmp_path), values(tmp_path), len(RunReader(tmp_path / "run").producers())
    )  # fmt: skip


def test_files_are_made_with_the_umask_of_the_user(tmp_path):
    """Every file and folder of a run has the rights that the user's umask leaves."""
    code = """
    os.umask(0o027)
    main()
    eventlog.current().commit(0, 0, 0)
    """
    assert 0 == run(tmp_path, code)
    rights = {(path.is_dir(), path.stat().st_mode & 0o777) for path in (tmp_path / "run").rglob("*")}
    assert {(True, 0o750), (False, 0o640)} == rights


def test_secrets_are_not_written(tmp_path):
    """A config handed to the log itself is redacted before it lies in a file."""
    code = """
    log = eventlog.start(sys.argv[1])
    log.claim_attempt(
        config={"lr": 1e-5, "wandb": {"api_key": "hunter2hunter2"}, "cmd": ["--hf-token", "hunter2hunter2"]},
        version_info={"remote": "https://me:hunter2hunter2@example.org/x.git"},
    )
    """
    assert 0 == run(tmp_path, code)
    assert not [p for p in (tmp_path / "run").rglob("*.*") if b"hunter2" in p.read_bytes()]
    (attempt,) = RunDir.open(tmp_path / "run").attempts()
    assert (1e-5, "<redacted>") == (attempt.config["lr"], attempt.config["wandb"]["api_key"])


@pytest.mark.parametrize("name", ["../up", "a/b", "/etc", "..", ".", "", "a\0b", "x" * 200, "-x", "a..b"])
def test_names_that_would_leave_the_root_are_refused(tmp_path, name):
    """A role is part of a folder's name: what would not be one is refused, and nothing is made outside."""
    with pytest.raises(LogError, match="expected a role of letters, digits"):
        eventlog.start(tmp_path / "run", name)
    opened = RunDir.create(tmp_path / "run")
    for nobody in (producer(opened, role=name), producer(opened, rank=-1), producer(opened, rank=10**9)):
        with pytest.raises(LogError, match=r"expected a r(ole|ank) of"):
            Writer(opened, nobody)
    assert ["run", "run/run.json"] == sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
