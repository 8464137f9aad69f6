"""`verify` and `recover`."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eventlog.schema import ENTRY_SIZE
from tests.cli.conftest import Ask
from tests.storage import flip, only

COMMAND = [sys.executable, "-c", "from cli.app import main; main()"]
RECORDS = "actor-0/*.records.0000.arrows"


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    """Return a run that may be damaged."""
    return Path(shutil.copytree(root / "sub" / "b", tmp_path / "run"))


def damage(run: Path) -> Path:
    """Turn a bit of a frame over, and return its file."""
    data = only(run, RECORDS)
    flip(data, data.stat().st_size // 2)
    return data


def test_verify_of_a_whole_run(ask: Ask, run: Path) -> None:
    """A line per file, none of them damaged, and exit code 0."""
    answer = ask("verify", run, "--json")
    assert (0, "", True, []) == (answer.code, answer.err, answer.json["clean"], answer.json["losses"])
    files = answer.json["files"]
    assert {str(file.relative_to(run)) for file in run.rglob("*") if file.suffix in (".json", ".arrows")} == {
        file["file"] for file in files
    }
    assert {"good"} == {file["state"] for file in files}
    lines = ask("verify", run).out.splitlines()
    assert ["files", "file"] == [line.split()[0] for line in lines[:2]]
    assert len(files) + 2 == len(lines)


def test_verify_of_a_damaged_run(ask: Ask, run: Path) -> None:
    """Damage is told with its file, frame and offset; the exit code is 3 (report g1)."""
    data = damage(run)
    answer = ask("verify", run, "--json")
    assert (3, False) == (answer.code, answer.json["clean"])
    (file,) = [file for file in answer.json["files"] if file["state"] == "damaged"]
    assert (str(data.relative_to(run)), 1) == (file["file"], file["bad"])
    assert file["problems"][0].startswith("expected checksum 0x")
    assert f"damaged: {file['problems'][0]}\n" == answer.err


def test_verify_of_no_run(ask: Ask, tmp_path: Path) -> None:
    """What is no run fails, in one line."""
    answer = ask("verify", tmp_path)
    assert (1, "", 1) == (answer.code, answer.out, answer.err.count("\n"))


def test_recover_saves_the_rest(ask: Ask, run: Path, tmp_path: Path) -> None:
    """The copy lacks the damaged frame, says so, and is read without a problem (report g2)."""
    data = damage(run)
    answer = ask("recover", run, tmp_path / "saved", "--json")
    assert (3, False) == (answer.code, answer.json["complete"])
    (file,) = [file for file in answer.json["files"] if file["discarded"]]
    assert (str(data.relative_to(run)), 1, 0) == (file["file"], file["discarded"], file["unverified"])
    assert f"discarded: {file['reasons'][0]}: {file['file']}\n" == answer.err
    told = ask("info", tmp_path / "saved", "--json").json
    assert ([], ["damaged"]) == (told["problems"], [loss["cause"] for loss in told["losses"]])


def test_recover_of_a_whole_run(ask: Ask, run: Path, tmp_path: Path) -> None:
    """Nothing is discarded, the exit code is 0, and the copy gives the same metrics."""
    answer = ask("recover", run, tmp_path / "saved")
    assert (0, "") == (answer.code, answer.err)
    assert ask("metrics", run, "--json").out == ask("metrics", tmp_path / "saved", "--json").out


def test_recover_overwrites_nothing(ask: Ask, run: Path) -> None:
    """A directory with files in it is refused in one line."""
    answer = ask("recover", run, run.parent)
    expected = f"areal-metrics: expected a new or an empty directory, got one in use: {run.parent}\n"
    assert (1, "", expected) == (answer.code, answer.out, answer.err)


def test_long_work_shows_a_bar_on_a_terminal(run: Path) -> None:
    """When stderr is a terminal a bar shows how far the work is; stdout holds nothing but the data."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [*COMMAND, "verify", str(run)], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as child:
        os.close(theirs)
        shown = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        out = child.stdout.read() if child.stdout else b""
    os.close(ours)
    assert (0, b"files\n") == (child.returncode, out[:6])
    assert b"verify" in shown
    assert b"100%" in shown


def test_a_commit_that_is_missing(ask: Ask, run: Path) -> None:
    """Both `verify` and `info` name it, with the attempt and the steps around it, and exit with 3."""
    index = only(run / "commits" / "actor-1", "*.idx")
    content = index.read_bytes()
    index.write_bytes(content[: 5 * ENTRY_SIZE] + content[6 * ENTRY_SIZE :])
    found = ask("verify", run)
    assert 3 == found.code
    hole, lost = found.err.splitlines()
    assert hole.startswith("damaged: lacks the records of ")
    assert "lost: commit 3 of attempt 0, after step 2 and before step 4, of actor-1" == lost
    for answer in (ask("verify", run, "--json"), ask("info", run, "--json")):
        (loss,) = answer.json["losses"]
        assert (3, "missing", "commits", 3, None) == (
            answer.code,
            loss["cause"],
            loss["stream"],
            loss["window"],
            loss["step"],
        )
        assert "commit 3 of attempt 0, after step 2 and before step 4" == loss["detail"]


def test_verify_and_recover_know_the_tables(ask: Ask, run: Path, tmp_path: Path) -> None:
    """Values that lie in tables alone are in the copy's own files again; a damaged table is told."""
    assert 0 == ask("compact", run, "--drop-sources").code
    assert 0 == ask("verify", run).code
    before = ask("percentiles", run, "ppo_actor/loss", "--json").json
    assert 0 == ask("recover", run, tmp_path / "saved").code
    assert not (tmp_path / "saved" / "tables").exists()
    assert before == ask("percentiles", tmp_path / "saved", "ppo_actor/loss", "--json").json
    flip(only(run, "*.payload.parquet"), 50)
    answer = ask("verify", run)
    assert (3, True) == (answer.code, "is not used: expected checksum" in answer.err)
    assert 3 == ask("recover", run, tmp_path / "again").code
