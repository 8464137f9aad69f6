"""`watch`."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import RESUMED_AT, STEPS, Ask, write_run
from tests.runs import RunBuilder
from tests.storage import flip, only

COMMAND = [sys.executable, "-c", "from cli.app import main; main()"]


def test_a_finished_run_is_told_by_lines(ask: Ask, root: Path) -> None:
    """Where stdout is no terminal every commit is a line, in the order of the attempts, and then it ends."""
    answer = ask("watch", root / "a", "--keys", "ppo_actor/loss", "--every", "0.01")
    steps = [*range(6), *range(RESUMED_AT, STEPS)]
    expected = [f"a step {step}: ppo_actor/loss={step + 0.5:g}" for step in steps]
    assert (0, "", expected) == (answer.code, answer.err, answer.out.splitlines())


def test_several_runs_are_told_as_json(ask: Ask, root: Path) -> None:
    """With --json every commit is an object that names its run; keys may be globs."""
    answer = ask("watch", root / "a", root / "sub" / "b", "--keys", "*/loss", "--json", "--every", "0.01")
    rows = [json.loads(line) for line in answer.out.splitlines()]
    of_b = [row for row in rows if row["run"] == "b"]
    assert [(step, {"ppo_actor/loss": 2.0 * step + 0.5}) for step in range(STEPS)] == [
        (row["step"], row["metrics"]) for row in of_b
    ]
    assert {"a", "b"} == {row["run"] for row in rows}
    assert [0] * STEPS == [row["attempt"] for row in of_b]


def test_what_other_ranks_say_beside_the_leader_is_not_shown(ask: Ask, tmp_path: Path) -> None:
    """Every rank commits a loss: the leader's is told, and of the others what it does not say."""
    with RunBuilder(tmp_path / "run") as run:
        ranks = [run.producer("actor", rank, attempt=0, started=rank) for rank in range(2)]
        run.attempt(0, leader=ranks[0], outcome="finished")
        for rank, producer in enumerate(ranks):
            more = {"own": 5.0} if rank else {}
            producer.commit(0, {"loss": 1.0 + rank} | more, time=rank, leader=not rank)
    answer = ask("watch", tmp_path / "run", "--every", "0.01")
    assert ["run step 0: loss=1", "run step 0: own=5"] == answer.out.splitlines()


def test_once_shows_what_there_is(ask: Ask, root: Path, tmp_path: Path) -> None:
    """With --once the newest values of all runs are one table, also of a run that is not there yet."""
    lines = ask("watch", root / "a", tmp_path / "none", "--once", "--keys", "lr").out.splitlines()
    assert ["a", "none"] == lines[0].split()
    assert ["state", "finished", "not there"] == [
        word.strip() for word in lines[1].split("  ") if word.strip()
    ]
    assert ["step", "9"] == lines[2].split()
    assert ["lr", "0.5"] == lines[4].split()


@pytest.mark.parametrize("more", [[], ["--once"], ["--json"]])
def test_a_file_is_no_run_to_wait_for(ask: Ask, tmp_path: Path, more: list[str]) -> None:
    """Where a file lies no run will come: that is said at once, as verify says it."""
    (tmp_path / "file").write_text("x")
    answer = ask("watch", tmp_path / "file", *more)
    assert (1, "") == (answer.code, answer.out)
    assert f"areal-metrics: expected a run directory, got a file: {tmp_path / 'file'}\n" == answer.err


@pytest.mark.parametrize("more", [["--every", "0.01"], ["--once"], ["--once", "--json"]])
def test_a_key_that_nobody_has_is_a_mistake(ask: Ask, root: Path, more: list[str]) -> None:
    """A key that is none of what runs have committed is refused, as by metrics; what is near is said."""
    answer = ask("watch", root / "a", root / "sub" / "b", "--keys", "ppo_actor/los", "--keys", "lr", *more)
    assert 1 == answer.code
    assert answer.err.startswith("areal-metrics: expected a key, got 'ppo_actor/los'; near: 'ppo_actor/loss'")


def test_keys_of_a_run_that_has_committed_nothing_may_come(ask: Ask, tmp_path: Path) -> None:
    """Of a run that is not there yet every key may come."""
    assert 0 == ask("watch", tmp_path / "none", "--once", "--keys", "lr").code


def test_long_tables_say_what_they_leave_out(ask: Ask, tmp_path: Path) -> None:
    """When no keys are chosen the first ones are shown, and the rest counted."""
    write_run(tmp_path / "run", [range(1)], gain=1.0)
    from cli import watch

    most, watch._MOST_KEYS = watch._MOST_KEYS, 2
    try:
        out = ask("watch", tmp_path / "run", "--once").out
    finally:
        watch._MOST_KEYS = most
    assert "… and 2 more: choose with --keys" in out


def test_one_run_twice_is_refused(ask: Ask, root: Path) -> None:
    """The same directory twice is a mistake."""
    assert 2 == ask("watch", root / "a", root / "a").code


def test_damage_is_told_in_the_end(ask: Ask, tmp_path: Path) -> None:
    """Commits that cannot be read are named on stderr, and the exit code is 3."""
    write_run(tmp_path / "run", [range(3)], gain=1.0)
    data = only(tmp_path / "run", "commits/actor-0/*.arrows")
    flip(data, data.stat().st_size - 100)
    answer = ask("watch", tmp_path / "run", "--every", "0.01")
    assert (3, 2) == (answer.code, len(answer.out.splitlines()))
    assert answer.err.startswith("damaged: expected checksum 0x")


WRITER = """
import sys
from pathlib import Path
from tests.cli.conftest import write_run
write_run(Path(sys.argv[1]), [range(5)], gain=1.0)
"""


def shown_on(terminal: int, until: bytes | None = None) -> bytes:
    """Return what a terminal shows, up to these words or to its end."""
    shown = b""
    while select.select([terminal], [], [], 60)[0] and (until is None or until not in shown):
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
    return shown


def test_a_terminal_shows_a_table_of_a_run_as_it_comes(tmp_path: Path) -> None:
    """On a terminal the table is drawn anew while another process writes the run, until that has finished."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    words = ["watch", str(tmp_path / "run"), "--every", "0.05", "--keys", "lr"]
    with subprocess.Popen(
        [*COMMAND, *words], stdout=theirs, stderr=subprocess.PIPE, env=environment
    ) as child:
        os.close(theirs)
        shown = shown_on(ours, b"not there")
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "run")]) as writer:
            shown += shown_on(ours)
        assert b"" == (child.stderr.read() if child.stderr else b"")
    os.close(ours)
    assert (0, 0) == (writer.returncode, child.returncode)
    assert b"not there" in shown
    last = shown.decode().rpartition("state")[2].split()
    assert last[0] == "finished"
    assert ["step", "4"] == last[1:3]
    assert "lr" in last
