"""What is particular to Trackio: its files, read by its own reader, and its server, run for real."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from eventlog.errors import BackendError, BackendGoneError, ConfigError
from replay import open_backend, play
from replay.backends import trackio
from replay.backends.base import Rewriter, Selection
from replay.backends.trackio_run import names
from replay.backends.trackio_server import WALL_TIME
from replay.steps import Histogram, Row
from tests.replay.backend_contract import BackendContract, rows, run_info, tell
from tests.replay.committed import build
from tests.replay.readers import Rows, trackio_rows
from tests.replay.targets import trackio_server

ROOT = Path(__file__).parents[2]


def live(path: Path, told: list[Row], *, close: bool = True, **info: Any) -> None:
    """Tell rows live, in one lifetime."""
    tell(open_backend("trackio", path=path / "trackio"), path, told, close=close, **info)


def replayed(path: Path, told: list[Row], **info: Any) -> tuple[int, int]:
    """Rewrite the run; return (sent, skipped)."""
    backend = open_backend("trackio", path=path / "trackio")
    assert isinstance(backend, Rewriter)
    written = backend.rewrite(run_info(path, **info), told, Selection())
    return written.sent, written.skipped


def held(path: Path, run: str | None = None) -> Rows:
    return trackio_rows(path / "trackio" / "exp.db", run)


def as_told(told: list[Row]) -> Rows:
    return [(row.step, dict(row.metrics), row.time) for row in told]


def test_the_last_attempt_wins(tmp_path: Path) -> None:
    """Told to 15, resumed at 10 and told to 30: one straight line, the newer kept (reports a1, a4)."""
    live(tmp_path, rows(range(16)))
    live(tmp_path, rows(range(10, 31), again=1.0), attempt=1)
    assert as_told(rows(range(10)) + rows(range(10, 31), again=1.0)) == held(tmp_path)


def test_a_late_evaluation_keeps_what_was_there(tmp_path: Path) -> None:
    """Rows of old steps are taken at their own step, beside what it holds, in any order (report a17)."""
    evaluations = [Row(20, {"eval": 2.0}, 1400.0), Row(10, {"eval": 1.0}, 1410.0)]
    live(tmp_path, rows(range(31)) + evaluations)
    steps = {step: metrics for step, metrics, _ in held(tmp_path) if "eval" not in metrics}
    assert {row.step: row.metrics for row in rows(range(31))} == steps
    assert [(10, 1.0), (20, 2.0)] == [(s, m["eval"]) for s, m, _ in held(tmp_path) if "eval" in m]


def test_a_key_told_again_at_a_step_is_replaced_alone(tmp_path: Path) -> None:
    """Of two values for a key and a step the later stays; the other keys of the row are not touched."""
    live(tmp_path, [Row(5, {"a": 1.0, "b": 2.0}, 1000.0), Row(5, {"a": 3.0}, 1001.0)])
    assert [(5, {"b": 2.0}, 1000.0), (5, {"a": 3.0}, 1001.0)] == held(tmp_path)


def test_replay_and_live_logging_share_a_run(tmp_path: Path) -> None:
    """What was told live is not sent again; what it lacks is added, what it has too much goes (report b9)."""
    live(tmp_path, rows(range(16)))
    assert (5, 15) == replayed(tmp_path, rows(range(15)) + rows(range(15, 20), again=1.0))
    assert as_told(rows(range(15)) + rows(range(15, 20), again=1.0)) == held(tmp_path)
    live(tmp_path, rows(range(20, 22)), attempt=1)
    assert (0, 22) == replayed(
        tmp_path, [*rows(range(15)), *rows(range(15, 20), again=1.0), *rows(range(20, 22))]
    )


def test_trackio_itself_reads_it(tmp_path: Path) -> None:
    """Its own reader finds the run, its config with the group, the values and the times (report f9)."""
    told = [Row(3, {"step": 1.0, "__x": 2.0, "loss": float("nan")}, 1_700_000_000.25)]
    live(tmp_path, told)
    code = (
        "import json, trackio; from trackio.sqlite_storage import SQLiteStorage as s; "
        "print(json.dumps([s.get_runs('exp'), s.get_logs('exp', 'trial'), s.get_run_config('exp', 'trial')]))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, env=environment
    )
    runs, logs, config = json.loads(done.stdout.splitlines()[-1])
    assert ["trial"] == runs
    assert [3] == [log["step"] for log in logs]
    assert {"~step": 1.0, "~__x": 2.0}.items() <= logs[0].items()
    assert "2023-11-14T22:13:20.250000+00:00" == logs[0]["timestamp"]
    assert ("exp_trial", 0.5, "abc") == (config["_Group"], config["lr"], config["version_info"]["commit_id"])


ODD: dict[str, float] = {
    "z": 1.0,
    "a": 2**62 + 1,
    "nan": float("nan"),
    "up": float("inf"),
    "down": float("-inf"),
    "tiny": 5e-324,
    "large": 1e16,
    "timestamp": -0.0,
}


def as_kept(path: Path) -> list[tuple[Any, ...]]:
    """Return what the file holds, to the byte."""
    columns = "timestamp, run_id, run_name, step, typeof(metrics), metrics, log_id, space_id"
    with closing(sqlite3.connect(path / "trackio" / "exp.db")) as database:
        found = database.execute(f"SELECT {columns} FROM metrics ORDER BY step").fetchall()
        return [*found, *database.execute("SELECT run_id, run_name, config FROM configs").fetchall()]


@pytest.mark.parametrize("trouble", ["no such column", "passed over"])
def test_replay_keeps_rows_as_trackios_own_storage_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Put beside it or by it, as where the table is another than we know, the file holds the same bytes."""
    histogram = {"h": Histogram((0.0, 0.5, 1.0), (3, 4))}
    told = [
        Row(step, ODD | {"b": step / 3}, 1e9 + step / 7, {}, histogram if step else {}) for step in range(9)
    ]
    assert (9, 0) == replayed(tmp_path / "ours", told)
    other = {
        "no such column": trackio._INSERT.replace("log_id", "row_id"),
        "passed over": trackio._INSERT.replace("VALUES (?", "VALUES (NULL * ?"),
    }
    monkeypatch.setattr(trackio, "_INSERT", other[trouble])
    assert (9, 0) == replayed(tmp_path / "theirs", told)
    assert as_kept(tmp_path / "theirs") == as_kept(tmp_path / "ours")
    assert 10 == len(as_kept(tmp_path / "ours"))


def test_the_order_of_keys_makes_no_other_row(tmp_path: Path) -> None:
    """Told live as it came and replayed as it is sorted, a row is the same row (report b9)."""
    live(tmp_path, [Row(3, {"b": 1.0, "a": float("nan")}, 1000.0)])
    assert (0, 1) == replayed(tmp_path, [Row(3, {"a": float("nan"), "b": 1.0}, 1000.0)])


def test_the_same_names_in_another_directory_are_another_run(tmp_path: Path) -> None:
    """Two directories of one experiment and trial keep ids of their own, always the same (report a16)."""
    for uid, steps in (("a" * 32, range(3)), ("b" * 32, range(5)), ("a" * 32, range(3, 4))):
        live(tmp_path, rows(steps), id=uid)
    with closing(sqlite3.connect(tmp_path / "trackio" / "exp.db")) as database:
        found = database.execute("SELECT run_id, count(*) FROM metrics GROUP BY run_id ORDER BY run_id")
        assert [("a" * 32, 4), ("b" * 32, 5)] == found.fetchall()


def test_a_new_run_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Asked for a new run, live or in replay, it gets the next number, and the old one stays."""
    replayed(tmp_path, rows(range(3)))
    assert (2, 0) == replayed(tmp_path, rows(range(2)), fresh=True)
    live(tmp_path, rows(range(4)), fresh=True)
    assert [3, 2, 4] == [len(held(tmp_path, name)) for name in ("trial", "trial-2", "trial-3")]


def test_trackios_own_directory_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of ours moves nothing of what the process tells Trackio itself; without one its own is used."""
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "own")
    live(tmp_path, rows(range(2)))
    assert tmp_path / "own" == sqlite_storage.TRACKIO_DIR
    assert not (tmp_path / "own").exists()
    backend = open_backend("trackio")
    backend.open(run_info(tmp_path))
    backend.log(0, {"a": 1.0}, 1000.0)
    backend.close()
    assert [(0, {"a": 1.0}, 1000.0)] == trackio_rows(tmp_path / "own" / "exp.db")
    assert f"{tmp_path}/own/exp#{run_info(tmp_path).id}" == backend.target


def test_names_that_trackio_keeps_for_itself_are_refused_as_projects(tmp_path: Path) -> None:
    """A project whose file would be another's is refused before anything is written."""
    with pytest.raises(ConfigError, match=r"expected another trackio\.project, got .*reserved suffix"):
        live(tmp_path, rows(range(1)), experiment="model_traces")
    assert not (tmp_path / "trackio").exists()


def test_its_reserved_keys_are_mapped_and_come_back() -> None:
    """`step` and the like would be taken for Trackio's own columns (reports e6, e7)."""
    told = ["step", "time", "run", "~step", "__x", "~", "a.b", "metrics/x"]
    there = [names().to(name) for name in told]
    assert ["~step", "~time", "~run", "~~step", "~__x", "~~", "a.b", "metrics/x"] == there
    assert told == [names().back(name) for name in there]
    assert WALL_TIME not in map(names().to, ["wall_time", "~wall_time", WALL_TIME])


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    """A directory that cannot be used is an error of ours."""
    (tmp_path / "trackio").write_text("in the way")
    with pytest.raises(BackendError, match="expected to reach trackio, got"):
        live(tmp_path, rows(range(1)))


def test_a_file_that_is_no_database_is_said(tmp_path: Path) -> None:
    """What lies there under the project's name and is something else is an error of ours."""
    (tmp_path / "trackio").mkdir()
    (tmp_path / "trackio" / "exp.db").write_bytes(b"no database at all" * 100)
    for told in (live, replayed):
        with pytest.raises(BackendError, match="expected to reach trackio, got file is not a database"):
            told(tmp_path, rows(range(1)))


LIVE = """
import os, signal, sys
from pathlib import Path
from tests.replay.test_trackio import live
from tests.replay.backend_contract import rows
live(Path(sys.argv[1]), rows(range(20)), close=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_live_rows_survive_a_kill_and_nothing_is_printed(tmp_path: Path) -> None:
    """Every row is in the file when the call returns; Trackio's own would lose half a second."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIVE, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert (-signal.SIGKILL, "", "") == (done.returncode, done.stdout, done.stderr)
    assert as_told(rows(range(20))) == held(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from replay.backends import trackio
from tests.replay.test_trackio import replayed
from tests.replay.backend_contract import rows
trackio._BATCH = 10
path, fatal = Path(sys.argv[1]), sys.argv[2]
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if fatal.isdigit():
    def told():
        for row in rows(range(40), again=1.0):
            if row.step == int(fatal):
                die()
            yield row
else:
    setattr(trackio.TrackioBackend, fatal, die)
    def told():
        yield from rows(range(40), again=1.0)
replayed(path, told())
"""


HALF = """
CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL,
    run_name TEXT NOT NULL, step INTEGER NOT NULL, metrics TEXT NOT NULL)
"""


@pytest.mark.parametrize("made", ["PRAGMA user_version = 0", HALF])
def test_a_file_that_is_half_made_is_finished(tmp_path: Path, made: str) -> None:
    """Who made the file was killed over it: replay and live logging go on as with a new one (report b5)."""
    for name in ("replayed", "live"):
        file = tmp_path / name / "trackio" / "exp.db"
        file.parent.mkdir(parents=True)
        file.touch()
        with closing(sqlite3.connect(file)) as database:
            database.execute(made)
    assert (3, 0) == replayed(tmp_path / "replayed", rows(range(3)))
    live(tmp_path / "live", rows(range(3)))
    assert as_told(rows(range(3))) == held(tmp_path / "replayed") == held(tmp_path / "live")


@pytest.mark.parametrize(
    "fatal",
    ["25", "_tidy", *(pytest.param(moment, marks=pytest.mark.long) for moment in ("5", "39", "_mark"))],
)
def test_a_killed_replay_made_again_ends_as_if_made_once(tmp_path: Path, fatal: str) -> None:
    """Killed while writing, tidying up or recording success, and run again: as if once (report b5)."""
    replayed(tmp_path, rows(range(30)))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), fatal], cwd=ROOT, check=False)
    assert -signal.SIGKILL == killed.returncode
    told = rows(range(40), again=1.0)
    replayed(tmp_path, told)
    assert as_told(told) == held(tmp_path)
    assert (0, 40) == replayed(tmp_path, told)


# -- the server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server of Trackio's own, and the directory it writes to."""
    folder = tmp_path_factory.mktemp("server")
    with trackio_server(folder) as url:
        yield url, folder


@pytest.mark.long
class TestTrackioServer(BackendContract):
    """The public contract, told to the server; its own times are those of receipt."""

    times = False

    @pytest.fixture(autouse=True)
    def _server(self, address: tuple[str, Path]) -> None:
        self.url, self.folder = address

    def make(self, path: Path) -> Any:
        return open_backend("trackio", server_url=f"{self.url}/?write_token=token", project=path.name)

    def read(self, path: Path) -> Rows:
        found = trackio_rows(self.folder / f"{path.name}.db")
        self.wall_times = [metrics.pop(WALL_TIME) for _, metrics, _ in found]
        return found

    def renamed(self, name: str) -> str:
        return names().to(name)

    def test_the_true_time_goes_along(self, tmp_path: Path) -> None:
        """The server stamps rows itself, so the original time is a metric beside the others (report f9)."""
        told = rows(range(3))
        self.tell(tmp_path, told)
        self.read(tmp_path)
        assert [row.time for row in told] == self.wall_times

    def test_replay_sends_each_step_once(self, tmp_path: Path) -> None:
        """A run of 250 steps goes in batches; again, nothing goes; a new run has another name (report b3)."""
        run = build(tmp_path / "run", (range(250), lambda step: {"v": step / 7}))
        for sent in (250, 0):
            (report,) = play(run, [self.make(tmp_path)], cursors=tmp_path / "cursors")
            assert sent == report.sent
        play(run, [self.make(tmp_path)], cursors=tmp_path / "cursors", new_run=True, until=9)
        assert list(range(250)) == [
            step for step, _, _ in trackio_rows(self.folder / f"{tmp_path.name}.db", "t0")
        ]
        assert 10 == len(trackio_rows(self.folder / f"{tmp_path.name}.db", "t0-2"))

    def test_a_wrong_token_is_no_passing_error(self, tmp_path: Path) -> None:
        """A server that refuses is told from one that is down, and no token is shown (report b4)."""
        backend = open_backend("trackio", server_url=f"{self.url}/?write_token=sesame", project=tmp_path.name)
        backend.open(run_info(tmp_path))
        with pytest.raises(BackendGoneError, match="write_token is required") as caught:
            backend.log(0, {"a": 1.0}, 1000.0)
        assert "sesame" not in str(caught.value)
        with pytest.raises(BackendError, match=r"expected trackio to take rows, got .*Connection refused"):
            open_backend("trackio", server_url="http://127.0.0.1:9").open(run_info(tmp_path))
