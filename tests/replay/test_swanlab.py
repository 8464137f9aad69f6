"""What is particular to SwanLab: its files, and its server as a stand-in."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventlog.errors import BackendError, BackendGoneError, ConfigError, RefusedError
from replay import open_backend, play
from replay.backends.base import Rewriter, Selection
from replay.backends.swanlab import names
from replay.steps import Row
from tests.replay.backend_contract import BackendContract, rows, run_info, tell
from tests.replay.committed import build
from tests.replay.readers import Rows, swanlab_files, swanlab_records, swanlab_rows
from tests.replay.servers import SwanlabServer, Trouble
from tests.replay.targets import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def kept() -> Iterator[SwanlabServer]:
    """One server for all tests of the file."""
    with SwanlabServer() as server:
        yield server


@pytest.fixture
def server(kept: SwanlabServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwanlabServer]:
    """The server, as empty as at first."""
    monkeypatch.setenv("SWANLAB_API_HOST", kept.url)
    monkeypatch.setenv("SWANLAB_API_KEY", "anything")
    kept.experiments.clear()
    kept.requests.clear()
    kept.trouble.clear()
    yield kept
    kept.trouble.clear()


def cloud(path: Path, **options: Any) -> Any:
    """Return the backend for an experiment that is called after its directory."""
    return open_backend("swanlab", **{"mode": "cloud", "id": path.name, "timeout": 20.0} | options)


class TestSwanlabCloud(BackendContract):
    """The public contract, told to the server."""

    largest_step = 2**48

    @pytest.fixture(autouse=True)
    def _server(self, server: SwanlabServer) -> None:
        self.server = server

    def make(self, path: Path) -> Any:
        return cloud(path)

    def read(self, path: Path) -> Rows:
        return self.server.rows(path.name)

    def renamed(self, name: str) -> str:
        return names().to(name)

    def stored(self, value: float) -> float:
        return value if abs(value) < float("inf") else float("nan")  # its client sends "nan" for all three


def test_an_interrupted_step_is_completed(server: SwanlabServer, tmp_path: Path) -> None:
    """Of a step that was cut short the missing keys follow, and nothing is sent twice (reports a5, b5)."""
    run = build(tmp_path / "run", (range(10), lambda step: {"a": step / 7, "b": float(step)}))
    play(run, [cloud(tmp_path)], cursors=tmp_path / "cursors", until=6)
    cut = server.experiments[tmp_path.name].scalars
    assert ("b", 6) == (cut[-1]["key"], cut[-1]["index"])
    del cut[-1]
    (report,) = play(run, [cloud(tmp_path)], cursors=tmp_path / "other machine")
    assert 4 == report.sent
    assert [(s, {"a": s / 7, "b": float(s)}) for s in range(10)] == [
        (step, row) for step, row, _ in server.rows(tmp_path.name)
    ]
    (report,) = play(run, [cloud(tmp_path)], cursors=tmp_path / "other machine")
    assert (0, 10) == (report.sent, report.skipped)


def test_the_experiment_is_named_described_and_ended(server: SwanlabServer, tmp_path: Path) -> None:
    """Names, group, tags, the config with the code's version and the end reach the server (report s11)."""
    backend = cloud(tmp_path, tags="one", id=None)
    backend.open(run_info(tmp_path, experiment="my exp/1"))
    backend.log(0, {"a": 1.0}, 1000.0)
    backend.close()
    (made,) = server.experiments.values()
    assert ("trial_train", "my exp/1_trial", [{"name": "one"}]) == (
        made.about[0]["name"],
        made.about[0]["cluster"],
        made.about[0]["labels"],
    )
    assert ["my-exp-1_trial_train"] == list(server.experiments)
    assert "my-exp-1" in server.projects
    assert "FINISHED" == made.state["state"]
    (profile,) = made.profiles
    assert {"lr": 0.5, "model": run_info(tmp_path).config["model"]}.items() <= {
        key: entry["value"] for key, entry in profile["config"].items()
    }.items()


def test_nothing_of_the_process_is_touched(server: SwanlabServer, tmp_path: Path) -> None:
    """No handler, no hook, not a word on the terminal, nothing of this machine (report f9)."""
    code = f"""
import signal, sys
from pathlib import Path
from replay import open_backend
from tests.replay.backend_contract import rows, run_info
path = Path({str(tmp_path)!r})
hooks = signal.getsignal(signal.SIGINT), sys.excepthook
backend = open_backend("swanlab")
backend.open(run_info(path))
assert hooks == (signal.getsignal(signal.SIGINT), sys.excepthook)
for row in rows(range(3)):
    backend.log(row.step, row.metrics, row.time)
backend.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, check=False, text=True
    )
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
    assert {"a/b", "n"} == {point["key"] for point in server.experiments["exp_trial_train"].scalars}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (Trouble("/login", 401), BackendGoneError),
        pytest.param(Trouble("/login", seconds=30), BackendError, marks=pytest.mark.long),
        (Trouble("/experiment", 403), BackendGoneError),
        pytest.param(Trouble("/experiment", seconds=30), BackendError, marks=pytest.mark.long),
    ],
    ids=["bad key", "silent", "refused", "hangs"],
)
def test_trouble_in_opening_is_bounded_and_said(
    server: SwanlabServer, tmp_path: Path, trouble: Trouble, kind: type[Exception]
) -> None:
    """What stays is told from what passes, within the limit; then another try works (report b4)."""
    server.trouble.append(trouble)
    with pytest.raises(kind, match="expected swanlab to") as caught:
        cloud(tmp_path, timeout=PATIENCE).open(run_info(tmp_path))
    assert kind is caught.type
    server.trouble.clear()
    backend = cloud(tmp_path)
    backend.open(run_info(tmp_path))
    backend.log(0, {"a": 1.0}, 1000.0)
    backend.close()
    assert [(0, {"a": 1.0}, 1000.0)] == server.rows(tmp_path.name)


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (Trouble("/house/metrics", 404), BackendGoneError),
        pytest.param(Trouble("POST /api/house/metrics", 500), BackendError, marks=pytest.mark.long),
        pytest.param(Trouble("POST /api/house/metrics", seconds=30), BackendError, marks=pytest.mark.long),
    ],
    ids=["deleted", "fails", "hangs"],
)
def test_trouble_in_uploading_is_bounded_and_said(
    server: SwanlabServer, tmp_path: Path, trouble: Trouble, kind: type[Exception]
) -> None:
    """Rows that the server refuses are an error, which SwanLab itself would swallow (reports a5, b4)."""
    backend = cloud(tmp_path, timeout=PATIENCE)
    backend.open(run_info(tmp_path))
    server.trouble.append(trouble)
    backend.log(0, {"a": 1.0}, 1000.0)
    with pytest.raises(kind, match="expected swanlab to") as caught:
        backend.close()
    assert kind is caught.type


def test_an_experiment_that_was_told_another_run_is_refused(server: SwanlabServer, tmp_path: Path) -> None:
    """Two run directories of one name are not one experiment: the second says so, before anything is sent."""
    runs = [
        build(tmp_path / place / "train", (range(3), lambda step, more=more: {"v": step + more}))
        for place, more in (("a", 0.0), ("b", 100.0))
    ]
    (report,) = play(runs[0], [cloud(tmp_path)])
    assert (3, True) == (report.sent, report.complete)
    with pytest.raises(ConfigError, match="expected a run of swanlab that nothing but this run was told"):
        play(runs[1], [cloud(tmp_path)])
    assert [(step, {"v": float(step)}) for step in range(3)] == [r[:2] for r in server.rows(tmp_path.name)]
    (report,) = play(runs[0], [cloud(tmp_path)])
    assert (0, 3, True) == (report.sent, report.skipped, report.complete)


@pytest.mark.parametrize("status", [408, 429])
def test_a_server_that_asks_for_patience_gets_the_rows_later(
    server: SwanlabServer, tmp_path: Path, status: int
) -> None:
    """A rate limit is no refusal: what it turned away is sent again, each row once."""
    backend = cloud(tmp_path)
    backend.open(run_info(tmp_path))
    server.trouble.append(Trouble("POST /api/house/metrics", status, times=1))
    for step in range(3):
        backend.log(step, {"a": float(step)}, 1000.0 + step)
    backend.close()
    assert [(step, {"a": float(step)}, 1000.0 + step) for step in range(3)] == server.rows(tmp_path.name)


def test_a_target_that_refuses_is_given_up_while_running(server: SwanlabServer, tmp_path: Path) -> None:
    """Once the server has refused rows, the next call raises: a deleted experiment is noticed (report b4)."""
    backend = cloud(tmp_path)
    backend.open(run_info(tmp_path))
    del server.experiments[tmp_path.name]

    def go_on() -> None:
        for step in range(4000):
            backend.log(step, {"a": 1.0}, 1000.0)
            time.sleep(0.02)

    with pytest.raises(BackendGoneError, match=r"expected swanlab to take rows, got .*404"):
        go_on()
    with pytest.raises(BackendGoneError, match="expected swanlab to take rows"):
        backend.close()


def test_a_step_beyond_its_limit_is_refused_alone(server: SwanlabServer, tmp_path: Path) -> None:
    """SwanLab drops steps above 2**48 without a word; here the row is refused and the rest goes on (b13)."""
    steps = [5, 2**48 + 1, 2**48]
    for backend in (cloud(tmp_path), open_backend("swanlab", mode="local", path=tmp_path / "live")):
        backend.open(run_info(tmp_path))
        backend.log(5, {"a": 1.0}, 1000.0)
        with pytest.raises(RefusedError, match=f"expected a step up to {2**48} for swanlab, got {2**48 + 1}"):
            backend.log(2**48 + 1, {"a": 1.0}, 1010.0)
        backend.log(2**48, {"a": 1.0}, 1020.0)
        backend.close()
    assert [5, 2**48] == [step for step, _, _ in server.rows(tmp_path.name)]
    rewriter: Any = open_backend("swanlab", mode="offline", path=tmp_path / "replayed")
    written = rewriter.rewrite(
        run_info(tmp_path), [Row(step, {"a": 1.0}, 1000.0) for step in steps], Selection()
    )
    assert (2, 1) == (written.sent, written.refused)


# -- files -----------------------------------------------------------------------------------------


def replayed(path: Path, told: list[Row], **info: Any) -> int:
    """Rewrite the run; return how many steps were sent."""
    backend = open_backend("swanlab", mode="offline", path=path / "swanlab")
    assert isinstance(backend, Rewriter)
    return backend.rewrite(run_info(path, **info), told, Selection()).sent


def test_a_file_is_what_swanlab_writes(tmp_path: Path) -> None:
    """Start, config, a column before each key's first scalar, finish: all that `swanlab sync` looks for."""
    replayed(tmp_path, rows(range(2)))
    (file,) = swanlab_files(tmp_path)
    records = list(swanlab_records(file))
    kinds = [record.WhichOneof("record_type") for record in records]
    assert ["start", "save", "column", "scalar", "column", "scalar", "scalar", "scalar", "finish"] == kinds
    start, config = records[0].start, records[1].save
    assert ("exp", "trial_train", "exp_trial", "exp_trial_train", 999) == (
        start.project,
        start.name,
        start.group,
        start.id,
        start.started_at.seconds,
    )
    assert "layers: 2" in Path(config.source_path).read_text()


@pytest.mark.long
def test_a_file_can_be_synced_once(server: SwanlabServer, tmp_path: Path) -> None:
    """SwanLab's own command uploads a replayed directory; under its id again it adds nothing (report b3)."""
    replayed(tmp_path, rows(range(20)))
    (file,) = swanlab_files(tmp_path)
    for _ in range(2):
        command = ["swanlab", "sync", "--id", "rid", "-p", "p", str(file.parent)]
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, check=False, text=True, timeout=100
        )
        assert 0 == done.returncode, done.stdout + done.stderr
        assert [(row.step, row.metrics, row.time) for row in rows(range(20))] == server.rows("rid")


LIVE = """
import os, signal, sys
from pathlib import Path
from replay import open_backend
from tests.replay.backend_contract import rows, run_info
path = Path(sys.argv[1])
backend = open_backend("swanlab", mode="local", path=path / "swanlab")
backend.open(run_info(path))
for row in rows(range(20)):
    backend.log(row.step, row.metrics, row.time)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_live_rows_survive_a_kill(tmp_path: Path) -> None:
    """What was told is in the file at once, where SwanLab's own writer would lose all of it."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", LIVE, str(tmp_path)], cwd=ROOT, check=False)
    assert -signal.SIGKILL == done.returncode
    assert [(row.step, row.metrics, row.time) for row in rows(range(20))] == swanlab_rows(tmp_path)


def test_lifetimes_have_directories_of_their_own(tmp_path: Path) -> None:
    """Two lifetimes within a second are two directories; one replay joins them (report b12)."""
    for steps in (range(6), range(4, 9)):
        tell(open_backend("swanlab", mode="local", path=tmp_path / "live"), tmp_path, rows(steps))
    assert 2 == len(swanlab_files(tmp_path))
    replayed(tmp_path / "b", rows(range(9)))
    assert list(range(9)) == [step for step, _, _ in swanlab_rows(tmp_path / "b")]


def test_keys_that_swanlab_would_merge_stay_apart() -> None:
    """It strips spaces, dots and slashes at the edges: "lead", ".lead" and " lead" would be one (e6, e7)."""
    told = ["lead", ".lead", " lead", "lead.", "lead ", "a\nb", "__swanlab__.x"]
    there = [names().to(name) for name in told]
    assert len(told) == len({name.strip(" \t\n\r./") for name in there})
    assert told == [names().back(name) for name in there]
    assert not any(name.startswith("__swanlab__") or "\n" in name for name in there)


def test_a_directory_in_the_way_is_said(tmp_path: Path) -> None:
    """A target that cannot be written is an error with its path last."""
    (tmp_path / "swanlab").write_text("in the way")
    backend = open_backend("swanlab", mode="local", path=tmp_path / "swanlab")
    with pytest.raises(BackendError, match=r"expected a directory to write to, got .*run-.*exp_trial_train$"):
        backend.open(run_info(tmp_path))


def test_two_servers_in_a_process_are_refused(server: SwanlabServer, tmp_path: Path) -> None:
    """SwanLab's client is one a process: a second server is said, never mixed up; threads do not race."""
    first = cloud(tmp_path)
    first.open(run_info(tmp_path))
    with pytest.raises(BackendError, match="expected one SwanLab server a process, got http"):
        cloud(tmp_path, id="other", host="http://127.0.0.1:9").open(run_info(tmp_path))
    second = cloud(tmp_path, id="second")
    second.open(run_info(tmp_path))
    closing = threading.Thread(target=first.close)
    closing.start()
    second.log(0, {"a": 1.0}, 1000.0)
    second.close()
    closing.join()
    assert [(0, {"a": 1.0}, 1000.0)] == server.rows("second")


def test_a_key_is_needed_for_the_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key the error names the ways to give one, before anything is written."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError, match=r"expected SWANLAB_API_KEY or swanlab\.api_key"):
        open_backend("swanlab", host="http://127.0.0.1:9").open(run_info(tmp_path))
    assert not (tmp_path / "run").exists()
