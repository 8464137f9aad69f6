"""The command as a process: exit codes, streams, and what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
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


WRONG = [
    ["run", "--role", "../x", "--", "true"],
    ["run"],
    ["ls", "--jsno"],
    ["info"],
    ["keys", "RUN", "--with", "RUN"],
    ["metrics", "RUN", "--source", "nosuch"],
    ["metrics", "RUN", "--since", "3", "--until", "2"],
    ["metrics", "RUN", "--with", "RUN"],
    ["percentiles", "RUN", "lr", "-q", "50"],
    ["percentiles", "RUN", "lr", "--by", "nosuch"],
    ["percentiles", "RUN", "lr", "--workers", "0"],
    ["reduce", "RUN", "lr", "--stat", "nosuch"],
    ["reduce", "RUN", "lr", "--by", "nosuch"],
    ["reduce", "RUN", "lr", "--where", "lr >"],
    ["reduce", "RUN", "lr", "--engine", "nosuch"],
    ["reduce", "RUN", "lr", "--memory-limit", "lots"],
    ["histogram", "RUN", "lr", "--bins", "0"],
    ["histogram", "RUN", "lr", "--by", "sequence"],
    ["correlation", "RUN", "lr", "lr", "--by", "nosuch"],
    ["correlation", "RUN", "lr", "lr", "--where", "("],
    ["sql", "RUN", "selec 1"],
    ["sql", "RUN", "select nosuch from metrics"],
    ["sql", "RUN", "from nosuch"],
    ["sql", "RUN", "from percentile('lr', 5)"],
    ["sql", "RUN", "select 1; select 2"],
    ["sql", "RUN", "create table x (y int)"],
    ["sql", "RUN", "from '/etc/passwd'"],
    ["sql", "RUN", "select 'a'::int"],
    ["sql", "RUN", "from query('from sys' || 'tem.main.query(''select 1'')')"],
    ["sql", "RUN", "from delta_scan('x')"],
    ["sql", "RUN", "select 1", "--spill", "/nonexistent"],
    ["export", "RUN", "OUT.xyz"],
    ["export", "RUN", "OUT.csv", "--format", "nosuch"],
    ["export", "RUN", "OUT.csv", "--view", "nosuch"],
    ["export", "RUN", "OUT.csv", "--view", "records", "--wide"],
    ["export", "RUN", "OUT.csv", "--view", "attempts", "--since", "1"],
    ["export", "RUN", "/nonexistent/out.csv"],
    ["merge", "OUT", "RUN"],
    ["merge", "OUT", "RUN", "OTHER", "--offset", "1", "--offset", "2", "--offset", "3"],
    ["replay", "RUN"],
    ["replay", "RUN", "RUN", "--to", "tensorboard"],
    ["replay", "RUN", "--to", "nosuch"],
    ["replay", "RUN", "--to", "tensorboard", "--stat", "nosuch"],
    ["replay", "RUN", "--to", "tensorboard", "--rename", "("],
    ["replay", "RUN", "--to", "tensorboard", "--rename", "(=x"],
    ["replay", "RUN", "OTHER", "--to", "tensorboard", "--rename", r"x=\9"],
    ["replay", "RUN", "--to", "tensorboard", "-o", "tensorboard.nosuch=1"],
    ["watch", "RUN", "RUN", "--once"],
    ["watch", "RUN", "--every", "0"],
    ["plot", "curves", "RUN"],
    ["plot", "curves", "RUN", "-o", "OUT.pdf"],
    ["plot", "curves", "RUN", "-o", "OUT.png", "--smooth", "2"],
    ["plot", "curves", "RUN", "-o", "OUT.png", "--palette", "nosuch"],
    ["plot", "heatmap", "RUN", "--accuracy", "a/*/b/*", "--length", "b", "--json"],
    ["plot", "radar", "RUN", "lr", "-o", "OUT.png"],
    ["report", "RUN", "-o", "/nonexistent/out.html"],
    ["compare-evals", "RUN", "--step", "1"],
    ["compact", "RUN", "--workers", "0"],
    ["import", "RUN", "OUT", "--from", "nosuch"],
    ["verify", "RUN", "--nosuch"],
    ["recover", "RUN"],
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_what_is_asked_wrongly_exits_2(ask: Ask, root: Path, tmp_path: Path, words: list[str]) -> None:
    """What no run could answer is exit code 2, whichever command is asked; nothing is printed or made."""
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    places = {"RUN": str(root / "a"), "OTHER": str(root / "sub" / "b")}
    answer = ask(*(places.get(word, word.replace("OUT", str(tmp_path / "out"))) for word in words))
    assert (2, "") == (answer.code, answer.out), answer.err
    assert (True, False) == (bool(answer.err), "Traceback" in answer.err)
    assert [] == list(tmp_path.iterdir())
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*")}


def test_every_command_is_asked_wrongly() -> None:
    """No command is left out above."""
    commands = typer.main.get_command(app).commands
    assert set(commands) == {words[0] for words in WRONG}
    assert set(commands["plot"].commands) == {words[1] for words in WRONG if words[0] == "plot"}


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
    """A place where no file can be is one line, too, and a wrong call."""
    answer = ask("plot", "curves", root / "a", "lr", "-o", "/dev/null/x.png")
    assert (2, "", 1) == (answer.code, answer.out, answer.err.count("\n"))
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
