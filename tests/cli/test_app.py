"""The command as a process: exit codes, streams, and what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from tests.cli.conftest import Ask

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from cli.app import main; main()"]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command as a shell would."""
    command = [*COMMAND, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["metrics", "--help"], 0),
        ([], 2),
        (["no-such-command"], 2),
        (["metrics"], 2),
        (["metrics", "runs", "--no-such-option"], 2),
        (["metrics", "/nonexistent"], 1),
    ],
)
def test_exit_codes(words: list[str], code: int) -> None:
    """0 done, 1 failed, 2 called wrongly; a failure says so on stderr and leaves stdout empty."""
    done = run(*words)
    assert code == done.returncode
    assert "Traceback" not in done.stderr
    assert bool(code) != bool(done.stdout)
    assert bool(code) == bool(done.stderr)


def test_data_on_stdout_talk_on_stderr(root: Path, tmp_path: Path) -> None:
    """A process prints data alone on stdout, and exits with 0."""
    done = run("sql", root / "a", "select 1 as one", "--json")
    assert (0, '[{"one": 1}]\n', "") == (done.returncode, done.stdout, done.stderr)
    done = run("plot", "curves", root / "a", "lr", "-o", tmp_path / "x.svg")
    assert (0, "", f"wrote {tmp_path / 'x.svg'}\n") == (done.returncode, done.stdout, done.stderr)


def test_a_reader_that_has_seen_enough_is_no_failure(root: Path) -> None:
    """`areal-metrics … | head -1` ends quietly, with exit code 0."""
    query = "select range as n from range(500000)"
    with subprocess.Popen(
        [*COMMAND, "sql", str(root / "a"), query, "--json"], cwd=ROOT, stdout=-1, stderr=-1
    ) as process:
        assert b'[{"n": 0},\n' == process.stdout.readline()
        process.stdout.close()
        assert b"" == process.stderr.read()
    assert 0 == process.returncode


@pytest.mark.parametrize("words", [("sql", "select range as n from range(500000)"), ("metrics",), ("ls",)])
def test_a_table_cut_short_is_no_failure(root: Path, words: tuple[str, ...]) -> None:
    """A closed pipe ends a table, too, with exit code 0 and without a word."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, words[0], str(root / "a"), *words[1:]]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (0, b"") == (done.returncode, done.stderr)


def test_an_interrupt_ends_without_a_traceback(root: Path) -> None:
    """Ctrl-C exits with 130 and says nothing."""
    code = (
        "import os, signal, sys, time; from cli import app, query;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a shell's background job ignores it
        "query.opened = lambda *_, **__: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60));"
        "app.main()"
    )
    command = [sys.executable, "-c", code, "metrics", str(root / "a")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (130, "", "") == (done.returncode, done.stdout, done.stderr)


def test_unwritable_output_fails_in_one_line(ask: Ask, root: Path) -> None:
    """An error of the file system is one line, too."""
    answer = ask("plot", "curves", root / "a", "lr", "-o", "/dev/null/x.png")
    assert (1, "", 1) == (answer.code, answer.out, answer.err.count("\n"))
    assert "/dev/null" in answer.err


def test_version(ask: Ask) -> None:
    """--version prints the name and the version of the distribution."""
    answer = ask("--version")
    assert (0, "areal-metrics 0.1.0\n") == (answer.code, answer.out)


def test_the_app_can_be_embedded(root: Path) -> None:
    """The typer app runs under typer's own runner."""
    result = CliRunner().invoke(app, ["ls", str(root), "--json"])
    assert 0 == result.exit_code
    assert '"state": "finished"' in result.stdout


@pytest.mark.parametrize("module", ["cli", "cli.app"])
def test_the_modules_are_the_command(module: str) -> None:
    """`python -m cli` does what the console script does."""
    done = subprocess.run(
        [sys.executable, "-m", module, "replay", "nowhere"], capture_output=True, text=True, check=False
    )
    assert (2, True) == (done.returncode, "expected --to BACKEND or -c FILE" in done.stderr)
