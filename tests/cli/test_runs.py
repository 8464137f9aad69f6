"""`ls` and `info`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import eventlog
from cli import pulse
from eventlog.rundir import RunDir
from eventlog.schema import COMMITS, RECORDS, Stream
from eventlog.writer import Writer
from tests.cli.conftest import STEPS, Ask, write_run
from tests.eventlog.test_reader import write_other
from tests.runs import RunBuilder
from tests.storage import flip, producer, put_window, records, settle


def test_ls_finds_runs_at_any_depth(ask: Ask, root: Path) -> None:
    """Every run below the root is listed once, with its attempts, committed steps and how it ended."""
    answer = ask("ls", root, "--json")
    shown = [
        (Path(row["path"]), row["attempts"], row["steps"], row["last_step"], row["state"])
        for row in answer.json
    ]
    assert [(root / "a", 2, 10, 9, "finished"), (root / "sub" / "b", 1, 10, 9, "finished")] == shown
    assert (0, "") == (answer.code, answer.err)


def test_ls_prints_a_table(ask: Ask, root: Path) -> None:
    """Without --json the same is a table whose lines are whole, however long the paths."""
    lines = ask("ls", root).out.splitlines()
    assert ["path", "id", "attempts", "steps", "last_step", "last", "state"] == lines[0].split()
    assert [str(root / "a"), str(root / "sub" / "b")] == [line.split()[0] for line in lines[1:]]


def test_ls_of_a_run_lists_that_run(ask: Ask, root: Path) -> None:
    """The root may itself be a run."""
    assert [str(root / "a")] == [row["path"] for row in ask("ls", root / "a", "--json").json]


def test_a_name_that_is_no_utf8_hides_neither_its_run_nor_the_others(
    ask: Ask, root: Path, tmp_path: Path
) -> None:
    """A run's folder may have any name: it is listed and answers, with a backslash for each odd byte."""
    root = shutil.copytree(root, tmp_path / "runs")
    odd = root / os.fsdecode(b"bad\xff")
    try:
        shutil.copytree(root / "a", odd)
    except OSError:
        pytest.skip("the file system takes only UTF-8")
    listed = [row["path"] for row in ask("ls", root, "--json").json]
    assert [str(root / "a"), f"{root}/bad\\xff", str(root / "sub" / "b")] == listed
    assert ["a", "bad\\xff", "b"] == [
        line.split()[0].split("/")[-1] for line in ask("ls", root).out.splitlines()[1:]
    ]
    for command in ("info", "verify", "metrics"):
        answer, plain = ask(command, odd, "--json"), ask(command, root / "a", "--json")
        assert (0, "") == (answer.code, answer.err)
        assert len(plain.json) == len(answer.json)


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Path]:
    """Return a directory with a running, a stuck, a dead, an ended and a finished run."""
    log = eventlog.start(tmp_path / "running", rank=0, world_size=1)
    log.claim_attempt()
    stuck = RunBuilder(tmp_path / "stuck")  # its process lives, and last committed in January
    actor = stuck.producer("actor")
    stuck.attempt(leader=actor)
    for step in range(3):
        actor.commit(step, {"loss": 1.0}, time=10 * step, leader=True)
    settle(actor.writer)
    write_other(tmp_path / "dead", RECORDS, records(0))  # written in 1970, and never ended
    RunDir.open(tmp_path / "dead").claim_attempt({})
    eventlog_run = RunDir.create(tmp_path / "ended")
    Writer(eventlog_run, producer(eventlog_run)).close()
    write_run(tmp_path / "finished", [range(3)], gain=1.0)
    yield tmp_path
    stuck.close()
    eventlog.stop()


STATES = {"dead": "dead", "ended": "ended", "finished": "finished", "running": "running", "stuck": "stuck"}


def test_ls_tells_living_runs_from_others(ask: Ask, lives: Path) -> None:
    """A running, a stuck and a dead run look different, and those that ended say how (report b16)."""
    rows = ask("ls", lives, "--json").json
    assert STATES == {Path(row["path"]).name: row["state"] for row in rows}


def test_info_tells_living_runs_from_others(ask: Ask, lives: Path) -> None:
    """The run's state, its processes', and how its newest attempt goes or ended (report b16)."""
    told = {name: ask("info", lives / name, "--json").json for name in STATES}
    assert STATES == {name: run["state"] for name, run in told.items()}
    expected = {"running": "running", "stuck": "stuck", "dead": "unknown", "finished": "finished"}
    assert expected == {name: told[name]["attempts"][-1]["outcome"] for name in expected}
    for name in ("running", "stuck", "dead", "ended"):
        assert [name] == [row["state"] for row in told[name]["producers"]]
    assert {"ended"} == {row["state"] for row in told["finished"]["producers"]}
    assert 120 == told["stuck"]["stuck_after"]  # ten seconds a step, ten times; two minutes at least
    assert "1970-01-01T00:00:00.000001+00:00" == told["dead"]["last_seen"]


def test_how_long_is_too_long() -> None:
    """Ten usual steps without progress, two minutes at least; half an hour before there are two commits."""
    seconds = [
        pulse.stuck_after(times) for times in ([], [5], [0, 1_000_000], [n * 60_000_000 for n in range(9)])
    ]
    assert [1800, 1800, 120, 600] == seconds


ENDINGS = """
import os, signal, sys, eventlog
log = eventlog.start(sys.argv[1], rank=0, world_size=1)
log.claim_attempt()
log.commit(0, 0, 0, [{"loss": 1.0}])
if sys.argv[2] == "exception":
    raise ValueError("no")
if sys.argv[2] != "finished":
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
eventlog.stop()
"""


def test_info_says_how_each_attempt_ended(ask: Ask, tmp_path: Path) -> None:
    """Attempts that were terminated, killed, and that finished are told apart (report b16)."""
    endings = ("SIGTERM", "SIGKILL", "finished")
    for ending in endings:
        command = [sys.executable, "-W", "ignore", "-c", ENDINGS, str(tmp_path / "run"), ending]
        subprocess.run(command, check=False, capture_output=True)
    outcomes = [a["outcome"] for a in ask("info", tmp_path / "run", "--json").json["attempts"]]
    assert ["signal", "unknown", "finished"] == [outcome.partition(":")[0] for outcome in outcomes]


def test_info_names_the_steps_of_losses(ask: Ask, tmp_path: Path) -> None:
    """A loss whose window a commit binds is told with its step, and the run's sizes are there."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    for window in range(3):
        put_window(writer, window)
    writer.put(Stream.PAYLOAD, lambda: 1 / 0, window=2, first_id=250, last_id=259, nbytes=10)
    writer.close()
    answer = ask("info", tmp_path / "run", "--json")
    assert 3 == answer.code
    ((window, step, rows),) = [(loss["window"], loss["step"], loss["rows"]) for loss in answer.json["losses"]]
    assert (2, 2, 10) == (window, step, rows)
    files = [file for file in (tmp_path / "run").rglob("*-*.*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) == sum(answer.json["bytes"].values())


def test_ls_leaves_out_what_it_cannot_read(ask: Ask, root: Path, tmp_path: Path) -> None:
    """A run of a newer format is named on stderr and hides no other run."""
    shutil.copytree(root / "sub" / "b", tmp_path / "good")
    shutil.copytree(root / "sub" / "b", tmp_path / "newer")
    newer = {"id": "x", "format": [99, 0], "created_us": 0}
    from eventlog.manifest import write_json

    write_json(tmp_path / "newer" / "run.json", newer)
    answer = ask("ls", tmp_path, "--json")
    assert [str(tmp_path / "good")] == [row["path"] for row in answer.json]
    assert f"{tmp_path / 'newer'}" in answer.err
    assert "99" in answer.err


def test_ls_says_when_there_is_nothing(ask: Ask, tmp_path: Path) -> None:
    """An empty place is an empty list, said on stderr, and no failure; a place that is none fails."""
    answer = ask("ls", tmp_path, "--json")
    assert (0, [], f"no run at or below {tmp_path}\n") == (answer.code, answer.json, answer.err)
    answer = ask("ls", tmp_path / "missing")
    assert (1, f"areal-metrics: expected a directory, got {tmp_path / 'missing'}\n") == (
        answer.code,
        answer.err,
    )


def test_info_counts_what_a_restart_replaced(ask: Ask, root: Path) -> None:
    """Two attempts, and the steps that the later one did again, are counted (report a1)."""
    answer = ask("info", root / "a", "--json")
    told = answer.json
    assert 0 == answer.code
    assert [0, 1] == [attempt["attempt"] for attempt in told["attempts"]]
    assert 2 == told["superseded_steps"]
    assert {"first": 0, "last": 9, "count": 10} == told["steps"]
    assert [] == told["losses"] + told["problems"]


def test_info_reads_well(ask: Ask, root: Path) -> None:
    """The text has the run, its steps, a line an attempt and a line a process."""
    lines = [line.split() for line in ask("info", root / "a").out.splitlines()]
    assert ["superseded", "steps", "2"] in lines
    attempts, producers, steps = (lines.index([heading]) for heading in ("attempts", "producers", "steps"))
    assert ["0", "1"] == [line[0] for line in lines[attempts + 2 : producers]]
    assert ["actor"] * 4 == [line[0] for line in lines[producers + 2 : steps]]


def test_info_of_a_damaged_run_exits_3(ask: Ask, tmp_path: Path) -> None:
    """Damage is listed with its place, the rest is shown, and the exit code says that something is lost."""
    run = write_run(tmp_path / "run", [range(3)], gain=1.0)
    segment = next((run / "events" / "actor-1").glob("*.records.0000.arrows"))
    flip(segment, segment.stat().st_size // 2)
    answer = ask("info", run, "--json")
    assert 3 == answer.code
    assert [segment.name] == [Path(problem.split()[-1]).name for problem in answer.json["problems"]]


def test_info_of_no_run_fails_in_one_line(ask: Ask, tmp_path: Path) -> None:
    """What is no run is refused with what was expected and the path last."""
    for place in (tmp_path, tmp_path / "missing"):
        answer = ask("info", place)
        assert (1, "") == (answer.code, answer.out)
        assert answer.err.startswith("areal-metrics: expected a run directory, got ")
        assert answer.err.endswith(f": {place}\n")
        assert 1 == answer.err.count("\n")


def test_info_lists_payload_that_is_gone(ask: Ask, tmp_path: Path) -> None:
    """A deleted payload stream whose index is still there is a problem, and the exit code is 3."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    put_window(writer, 0)
    settle(writer)
    writer.close()
    (data,) = (tmp_path / "run").rglob("*.payload.0000.arrows")
    data.unlink()
    answer = ask("info", tmp_path / "run", "--json")
    assert (3, [f"is missing, with the frames its index lists: {data}"]) == (
        answer.code,
        answer.json["problems"],
    )


def test_ls_shows_a_broken_run_beside_the_others(ask: Ask, root: Path, tmp_path: Path) -> None:
    """A commit without a step makes its run damaged, and hides neither its other steps nor other runs."""
    shutil.copytree(root / "sub" / "b", tmp_path / "good")
    run = RunDir.create(tmp_path / "odd")
    writer = Writer(run, producer(run))
    said = [
        {"commit": n, "global_step": step, "window_first": n, "window_last": n}
        for n, step in enumerate((4, None))
    ]
    writer.put(
        Stream.COMMITS, lambda: [pa.RecordBatch.from_pylist(said, schema=COMMITS)], window=0, nbytes=100
    )
    writer.close()
    answer = ask("ls", tmp_path, "--json")
    assert [("good", STEPS, "finished"), ("odd", 1, "damaged")] == [
        (Path(row["path"]).name, row["steps"], row["state"]) for row in answer.json
    ]
    assert 0 == answer.code


def test_ls_survives_what_nobody_thought_of(
    ask: Ask, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose summary fails in any other way is listed as damaged, and said on stderr."""
    for name in ("bad", "good"):
        shutil.copytree(root / "sub" / "b", tmp_path / name)
    from cli import runs

    summary = runs._summary
    monkeypatch.setattr(runs, "_summary", lambda path, reader: summary(path, path.stem != "bad" and reader))
    answer = ask("ls", tmp_path, "--json")
    assert [("bad", "damaged"), ("good", "finished")] == [
        (Path(row["path"]).name, row["state"]) for row in answer.json
    ]
    assert "damaged: " in answer.err
