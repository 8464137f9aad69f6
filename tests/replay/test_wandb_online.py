"""Weights & Biases online, told to a stand-in for its server: what is sent, how often, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from eventlog.errors import BackendError, BackendGoneError, ConfigError, RefusedError
from replay import MemoryBackend, check_apart, open_backend, play
from replay.backends.wandb_names import named_as, names
from replay.steps import Row
from tests.replay.backend_contract import BackendContract, rows, run_info
from tests.replay.committed import build, logger
from tests.replay.readers import OWN, Rows
from tests.replay.servers import Trouble, WandbRun, WandbServer
from tests.replay.targets import PATIENCE

ROOT = Path(__file__).parents[2]
KEY = "x" * 40


@pytest.fixture(scope="module")
def kept() -> Iterator[WandbServer]:
    """One server for all tests of the file."""
    with WandbServer() as server:
        yield server


@pytest.fixture
def server(kept: WandbServer) -> Iterator[WandbServer]:
    """The server, as empty as at first."""
    kept.runs.clear()
    kept.requests.clear()
    kept.trouble.clear()
    kept.deleted.clear()
    yield kept
    kept.trouble.clear()


def online(server: WandbServer, path: Path, **options: Any) -> Any:
    """Return the backend for a run that is called after its directory."""
    given = {"id": path.name, "path": path / "w", "api_key": KEY, "base_url": server.url, "timeout": 20.0}
    return open_backend("wandb", **{"mode": "online"} | given | options)


def tell(backend: Any, path: Path, told: list[Row], **info: Any) -> None:
    """Open, tell what lies above the last step, close."""
    backend.open(run_info(path, **info))
    last = backend.last_step()
    for row in told:
        if last is None or row.step > last:
            backend.log(row.step, row.metrics, row.time)
    backend.close()


@pytest.mark.long
class TestWandbOnline(BackendContract):
    """The public contract, told to the server."""

    @pytest.fixture(autouse=True)
    def _server(self, server: WandbServer) -> None:
        self.server = server

    def make(self, path: Path) -> Any:
        return online(self.server, path)

    def read(self, path: Path) -> Rows:
        return self.server.rows(path.name)

    def renamed(self, name: str) -> str:
        return names().to(name)


@pytest.mark.parametrize("failing", [0, pytest.param(2, marks=pytest.mark.long)])
def test_each_step_is_sent_once_whatever_happened(server: WandbServer, tmp_path: Path, failing: int) -> None:
    """Uploads that fail, a run that went on: every row is there once, at its step (reports a4, b3)."""
    server.trouble.append(Trouble("file_stream", 500, times=failing))
    tell(online(server, tmp_path), tmp_path, rows(range(10)))
    tell(online(server, tmp_path), tmp_path, rows(range(15)))
    assert [(row.step, row.metrics, row.time) for row in rows(range(15))] == server.rows(tmp_path.name)
    assert 0 == server.runs[tmp_path.name].exit_code
    assert "wandb-events.jsonl" not in server.runs[tmp_path.name].files  # of this machine (report f9)


def test_the_run_is_named_and_described(server: WandbServer, tmp_path: Path) -> None:
    """Project, name, group, tags and the config with the code's version reach the server."""
    backend = online(server, tmp_path, id=None, tags=["a", "b"], entity="team", id_suffix="unique")
    tell(backend, tmp_path, rows(range(1)))
    (name,) = server.runs
    assert f"exp_trial_{run_info(tmp_path).id[:8]}" == name
    about = server.runs[name].about
    assert ("exp", "trial", "exp_trial", ["a", "b"], "team") == (
        about["project"],
        about["displayName"],
        about["groupName"],
        about["tags"],
        about["entity"],
    )
    assert '"layers":2' in (server.runs[name].config or "").replace(" ", "")


@pytest.mark.long
def test_an_archive_that_cannot_be_written_can_be_told(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without RUN/live wandb's own files lie in a passing place, of which nothing stays (report b13)."""
    run = build(tmp_path / "run", (range(5), lambda step: {"v": float(step)}))
    (run / "live").write_text("a file, as good as a read-only directory")
    with TemporaryDirectory() as own:  # others make such places, too
        monkeypatch.setattr("tempfile.tempdir", own)
        options = {"mode": "online", "id": "ro", "api_key": KEY, "base_url": server.url, "timeout": 60.0}
        (report,) = play(run, [open_backend("wandb", **options)], cursors=tmp_path / "cursors")
        assert 5 == report.sent == len(server.rows("ro"))
        assert [] == list(Path(own).glob("areal-metrics-*"))


def test_a_suffix_tells_directories_apart(tmp_path: Path) -> None:
    """The same names keep AReaL's id in any directory; `unique` is the directory's own (report a16)."""
    about = {
        (suffix, uid): named_as(run_info(tmp_path, id=uid * 32), {"id_suffix": suffix}, 0.0)["id"]
        for suffix in ("train", "unique")
        for uid in "ab"
    }
    assert about["train", "a"] == about["train", "b"] == "exp_trial_train"
    assert ("exp_trial_aaaaaaaa", "exp_trial_bbbbbbbb") == (about["unique", "a"], about["unique", "b"])


@pytest.mark.parametrize(
    ("trouble", "deleted", "kind"),
    [
        (Trouble("file_stream", 500), False, BackendError),
        (Trouble("file_stream", seconds=30), False, BackendError),
        (Trouble("file_stream", 404), True, BackendGoneError),
        (Trouble("graphql", 500), False, BackendError),
        (Trouble("graphql", 404), False, BackendGoneError),
        (Trouble("graphql", seconds=30), False, BackendError),
    ],
    ids=["upload fails", "upload hangs", "run deleted", "opening fails", "opening refused", "opening hangs"],
)
@pytest.mark.long
def test_trouble_is_bounded_and_said(
    server: WandbServer, tmp_path: Path, trouble: Trouble, deleted: bool, kind: type[Exception]
) -> None:
    """What stays (deleted, refused) is told from what passes; all within the limit (report b4)."""
    backend = online(server, tmp_path, timeout=PATIENCE)
    if trouble.where == "graphql":
        server.trouble.append(trouble)
        with pytest.raises(kind, match="expected wandb to take the run, got") as caught:
            backend.open(run_info(tmp_path))
    else:
        backend.open(run_info(tmp_path))
        server.trouble.append(trouble)
        backend.log(0, {"a": 1.0}, 1000.0)
        if deleted:
            server.delete(tmp_path.name)
        with pytest.raises(kind, match="expected") as caught:
            backend.close()
    assert kind is caught.type
    backend.close()


@pytest.mark.long
def test_rows_that_were_swallowed_are_noticed(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that wandb gives up without a word is an error at closing: what arrived is read back (a4)."""
    monkeypatch.setattr("replay.backends.wandb._READ_BACK_SECONDS", 3.0)
    backend = online(server, tmp_path)
    backend.open(run_info(tmp_path))
    server.trouble.append(Trouble("file_stream", 404))
    backend.log(7, {"a": 1.0}, 1000.0)
    with pytest.raises(BackendError, match="expected step 7 to have arrived, got less"):
        backend.close()


def test_a_row_too_large_is_refused_alone(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten rows, one above the limit: nine arrive, one is refused and counted (report b13)."""
    monkeypatch.setattr("replay.backends.wandb_file.LARGEST_ROW", 10_000)
    run = build(
        tmp_path / "run",
        (range(10), lambda step: {f"k{i}": 1.0 for i in range(1000 if step == 5 else 2)}),
    )
    (report,) = play(run, [online(server, tmp_path)])
    assert (9, 1, False) == (report.sent, report.refused, report.complete)
    assert [step for step in range(10) if step != 5] == [step for step, _, _ in server.rows(tmp_path.name)]
    (report,) = play(run, [online(server, tmp_path)])
    assert (0, 9, "5") == (report.sent, report.skipped, report.refused_steps)
    for sent in (9, 0):
        offline = open_backend("wandb", mode="offline", path=tmp_path / "off")
        (report,) = play(run, [offline], cursors=tmp_path / "cursors")
        assert (sent, 9 - sent, 1, "5") == (
            report.sent,
            report.skipped,
            report.refused,
            report.refused_steps,
        )


def test_several_runs_one_of_them_gone(server: WandbServer, tmp_path: Path) -> None:
    """A target that is gone ends its own replay, loudly; the others are told all the same (report b4)."""
    run = build(tmp_path / "run", (range(5), lambda step: {"v": float(step)}))
    server.trouble.append(Trouble("RunResumeStatus", 404))
    memory = MemoryBackend()
    with pytest.raises(BackendGoneError, match="expected wandb to take the run"):
        play(run, [online(server, tmp_path), memory])
    assert [0, 1, 2, 3, 4] == [step for step, _, _ in memory.rows]


@pytest.mark.long
def test_a_deleted_run_can_be_told_to_a_new_one(server: WandbServer, tmp_path: Path) -> None:
    """Its id can never be used again: that is said; --new-run tells all, and is gone on with (report b4)."""
    run = build(tmp_path / "run", (range(5), lambda step: {"v": float(step)}))
    play(run, [online(server, tmp_path)])
    server.delete(tmp_path.name)
    said = "^expected the run to be there, got one that was deleted: replay --new-run tells it anew: "
    with pytest.raises(BackendGoneError, match=said):
        play(run, [online(server, tmp_path, timeout=PATIENCE)])
    for new, sent in ((True, 5), (False, 0)):
        (report,) = play(run, [online(server, tmp_path)], new_run=new)
        assert (sent, 5 - sent, True) == (report.sent, report.skipped, report.complete)
    ((name, told),) = server.runs.items()
    assert (True, 5) == (name.startswith(f"{tmp_path.name}-"), len(told.history))


def test_in_shared_mode_the_true_step_is_a_metric(server: WandbServer, tmp_path: Path) -> None:
    """Shared rows get numbers of wandb's own: `global_step` is the axis, and no metric's name (report a9)."""
    backend = online(server, tmp_path, mode="shared")
    backend.open(run_info(tmp_path))
    assert None is backend.last_step()
    backend.log(5, {"a": 1.0, "global_step": 2.0}, 1000.0)
    backend.log(9, {"a": 3.0}, 1010.0)
    backend.close()
    got = [{k: v for k, v in row.items() if k not in OWN} for row in server.runs[tmp_path.name].history]
    assert [{"a": 1.0, "~global_step": 2.0, "global_step": 5}, {"a": 3.0, "global_step": 9}] == got
    assert [1000.0, 1010.0] == [row["_timestamp"] for row in server.runs[tmp_path.name].history]


def test_a_run_that_appears_without_history_begins_at_zero(server: WandbServer, tmp_path: Path) -> None:
    """A run that exists and holds nothing is told from the first step."""
    server.runs[tmp_path.name] = WandbRun()
    tell(online(server, tmp_path), tmp_path, rows(range(3)))
    assert [0, 1, 2] == [step for step, _, _ in server.rows(tmp_path.name)]


def test_a_key_is_needed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key the error comes before any file or process of wandb's."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    backend = open_backend("wandb", mode="online", base_url="http://127.0.0.1:9", path=tmp_path / "w")
    with pytest.raises(ConfigError, match="expected WANDB_API_KEY"):
        backend.open(run_info(tmp_path))
    assert not (tmp_path / "w").exists()


def test_a_row_that_is_refused_names_its_size(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal says limit and size, and the backend goes on."""
    monkeypatch.setattr("replay.backends.wandb_file.LARGEST_ROW", 100)
    backend = online(server, tmp_path)
    backend.open(run_info(tmp_path))
    with pytest.raises(RefusedError, match="expected a row of at most 100 bytes, got 3"):
        backend.log(0, {f"key{i}": 1.0 for i in range(25)}, 0.0)
    backend.log(1, {"a": 1.0}, 0.0)
    backend.close()
    assert [1] == [step for step, _, _ in server.rows(tmp_path.name)]


def test_two_runs_of_one_name_are_kept_apart(tmp_path: Path, server: WandbServer) -> None:
    """Of one command: an error before anything is told; one after another: the first has it, and is named."""
    runs = {name: build(tmp_path / name, (range(4), lambda step: {"v": float(step)})) for name in "ab"}

    def opened(**given: Any) -> Any:
        options = {"mode": "online", "base_url": server.url, "api_key": KEY, "path": tmp_path / "w"}
        return open_backend("wandb", **options, **given)

    with pytest.raises(ConfigError, match=r"got a and b for one: http.*/exp/exp_t0_train"):
        check_apart({name: (run, [opened()]) for name, run in runs.items()})
    check_apart({name: (run, [opened(id_suffix="unique")]) for name, run in runs.items()})
    assert not server.runs
    play(runs["a"], [opened()])
    for _ in range(2):
        with pytest.raises(ConfigError, match="nothing but this run was told"):
            play(runs["b"], [opened()])
    (report,) = play(runs["a"], [opened()])
    assert (0, 4) == (report.sent, report.skipped)
    with logger(tmp_path, run=tmp_path / "c", backends=[opened()]) as log:  # which it does not hold up
        for step in (3, 4):
            log.commit(0, step, step, {"v": 1.0})
    assert (1, "3") == (log.status()[0].sent, log.status()[0].withheld_steps)
    assert [0, 1, 2, 3, 4] == [step for step, _, _ in server.rows("exp_t0_train")]
