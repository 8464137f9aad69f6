"""The committing end of a run: log first, then everybody else."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import eventlog
from aggregator import open_run
from aggregator.evaluation import Evaluator, EvaluatorConfig
from eventlog.errors import (
    BackendMissingError,
    ConfigError,
    LogError,
    RecordingError,
    RecordingTypeError,
    RewindError,
    RunDirectoryError,
    StepError,
)
from replay import (
    MemoryBackend,
    StatsLogger,
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
    play,
)
from replay.config import log_root
from tests.replay.committed import SPEC, logger
from tests.replay.readers import (
    tensorboard_rows,
    tensorboard_texts,
    wandb_files,
    wandb_history,
    wandb_rows,
)
from tests.replay.servers import Trouble
from tests.replay.targets import PATIENCE, STAND_INS, Target
from tests.replay.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]


def run_of(path: Path, trial: str = "t0") -> Path:
    """Return where the log of a trial lies."""
    return log_root(StatsLoggerConfig("exp", trial, str(path)))


def metrics(run: Path, **options: Any) -> list[tuple[int, str, float]]:
    """Return (step, key, value) as the log has them."""
    with open_run(run, **options) as session:
        rows = session.metrics().to_pylist()
    return [
        (row["step"], row["key"], row["value"] if row["value_int"] is None else row["value_int"])
        for row in rows
    ]


def attempts(run: Path) -> list[Any]:
    return eventlog.RunDir.open(run).attempts()


def test_a_commit_is_in_the_log_and_at_every_backend(tmp_path: Path) -> None:
    """The log, TensorBoard, offline wandb and one's own object say the same, from step 0 (report s11)."""
    mine = MemoryBackend()
    parts = {"tensorboard": TensorBoardConfig(str(tmp_path / "tb")), "wandb": WandBConfig(mode="offline")}
    with logger(tmp_path, backends=[mine], **parts) as log:
        assert log.leader
        for step in range(3):
            assert True is log.commit(0, step, step, {"loss": {"total": step / 2}, "n": step})
    expected = [(step, {"loss/total": step / 2, "n": step}) for step in range(3)]
    run = run_of(tmp_path)
    assert [(s, k, v) for s, row in expected for k, v in row.items()] == metrics(run)
    told = mine.rows, tensorboard_rows(tmp_path / "tb"), wandb_rows(run / "live")
    for rows in told:
        assert expected == [(step, row) for step, row, _ in rows]
    with open_run(run) as session:
        times = [time.timestamp() for time in session.metrics(["n"])["time"].to_pylist()]
    for rows in told:
        assert times == pytest.approx([time for _, _, time in rows], abs=0.1)


def test_what_a_commit_says_on_the_console(tmp_path: Path, capsys, caplog) -> None:
    """Counted from one, then the table without the tracker's counts; in logging where that is set up."""
    with logger(tmp_path) as log:
        log.commit(0, 4, 14, {"[a]": 1.0, "[a]__count": 3, "b__count": 2})
        said = capsys.readouterr().out
        assert "Epoch 1/2 Step 5/10 Train step 15/20 done\n" in said
        assert "│ [a] │ 1.0000e+00 │ b__count │ 2 │" in said
        assert "[a]__count" not in said
        with caplog.at_level(logging.INFO):
            log.commit(1, 0, 15, [{"x": 1.0}, {"y": 2.0}])
    assert "" == capsys.readouterr().out
    assert "Epoch 2/2 Step 1/10 Train step 16/20 done" in caplog.text
    assert caplog.text.index("Stats (1/2)") < caplog.text.index("│ x │") < caplog.text.index("Stats (2/2)")


def test_the_trainings_length_may_be_a_mapping(tmp_path: Path, capsys) -> None:
    """A dict says how long the training is, as a config may be one."""
    with StatsLogger(StatsLoggerConfig("exp", "t0", str(tmp_path)), vars(SPEC)) as log:
        log.commit(0, 4, 14, {"a": 1.0})
    assert "Epoch 1/2 Step 5/10 Train step 15/20 done\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "step", [3.0, np.int64(3), np.float32(3), torch.tensor(3), torch.tensor([3], dtype=torch.int32)]
)
def test_steps_of_every_kind_are_taken(tmp_path: Path, step: Any) -> None:
    """Integral floats, numpy integers and tensors with one element are steps (reports a8, e12)."""
    with logger(tmp_path) as log:
        log.commit(0, 0, step, {"a": 1.0})
    assert [(3, "a", 1.0)] == metrics(run_of(tmp_path))


def test_steps_beyond_32_bits_survive(tmp_path: Path) -> None:
    """2**31 + 5 goes through the log and a backend unchanged (report a8)."""
    mine = MemoryBackend(strict=True)
    with logger(tmp_path, backends=[mine]) as log:
        log.commit(0, 0, 2**31 + 5, {"a": 1.0})
    assert [(2**31 + 5, "a", 1.0)] == metrics(run_of(tmp_path))
    assert 2**31 + 5 == mine.rows[0][0]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            np.int32(-1627389952),
            "expected a step of 0 or more, got -1627389952; .*32-bit counter that wrapped",
        ),
        (3.5, "expected an integral step, got 3.5; .*as a metric of their own"),
        ("3", "expected a step"),
        (2**63, "fits int64"),
    ],
)
def test_what_is_no_step_is_refused_and_nothing_is_committed(tmp_path: Path, step: Any, said: str) -> None:
    """A wrapped counter, a fraction, a text: an error, and no trace in the log (reports a8, e12)."""
    with logger(tmp_path) as log:
        with pytest.raises(StepError, match=said):
            log.commit(0, 0, step, {"a": 1.0})
        log.commit(0, 0, 1, {"a": 2.0})
    assert [(1, "a", 2.0)] == metrics(run_of(tmp_path))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"a/b": 1, "a": {"b": 2}}, RecordingError),
        ({"a": "x"}, RecordingTypeError),
        ([{"a": 1.0}, {"b": None}], TypeError),
    ],
)
def test_refused_data_commits_nothing(tmp_path: Path, data: Any, error: type[Exception]) -> None:
    """Data that cannot be committed raises before anything of it is written (report e8)."""
    mine = MemoryBackend()
    with logger(tmp_path, backends=[mine]) as log:
        with pytest.raises(error):
            log.commit(0, 0, 0, data)
        log.commit(0, 0, 0, {"fine": 1.0})
    assert [(0, "fine", 1.0)] == metrics(run_of(tmp_path))
    assert [{"fine": 1.0}] == [row for _, row, _ in mine.rows]


def test_a_list_is_one_step(tmp_path: Path) -> None:
    """A list of dicts is one step with sub-indexes in the log and one row at a backend (report s8)."""
    mine = MemoryBackend()
    with logger(tmp_path, backends=[mine]) as log:
        log.commit(0, 0, 5, [{"a": 1.0, "b": 1.0}, {"a": 2.0}])
        log.commit(0, 1, 6, {"a": 3.0})
    with open_run(run_of(tmp_path)) as session:
        rows = session.metrics(["a"]).to_pylist()
    assert [(5, 0, 1.0), (5, 1, 2.0), (6, 0, 3.0)] == [
        (row["step"], row["sub_index"], row["value"]) for row in rows
    ]
    assert [(5, {"a": 2.0, "b": 1.0}), (6, {"a": 3.0})] == [(step, row) for step, row, _ in mine.rows]


def test_counts_are_in_the_log_but_not_at_backends(tmp_path: Path) -> None:
    """The tracker's own counts stay in the log; backends see a user's own count only (report s9)."""
    mine = MemoryBackend()
    with logger(tmp_path, backends=[mine]) as log:
        log.commit(0, 0, 0, {"reward": 1.0, "reward__count": 4, "tokens__count": 9})
    assert ["reward", "reward__count", "tokens__count"] == [key for _, key, _ in metrics(run_of(tmp_path))]
    assert [{"reward": 1.0, "tokens__count": 9}] == [row for _, row, _ in mine.rows]


def test_what_a_strict_backend_would_refuse_is_counted(tmp_path: Path, caplog) -> None:
    """Steps 0, 1, 2, 1 000 000, 3, 4: the log has six, a strict backend four, said once (report a2)."""
    mine = MemoryBackend(strict=True)
    with logger(tmp_path, backends=[mine]) as log:
        for step in (0, 1, 2, 1_000_000, 3, 4):
            log.commit(0, 0, step, {"v": step})
    (status,) = log.status()
    assert (4, 2) == (status.sent, status.withheld)
    assert [0, 1, 2, 3, 4, 1_000_000] == [step for step, _, _ in metrics(run_of(tmp_path))]
    assert 1 == caplog.text.count("step 3 comes too late or again")


def test_several_commits_of_a_step_are_one_call(tmp_path: Path) -> None:
    """commit(0, a), commit(0, b), commit(1, a): the backend sees exactly two calls (report a9)."""
    mine = MemoryBackend(strict=True)
    with logger(tmp_path, backends=[mine]) as log:
        for step, data in ((0, {"a": 1}), (0, {"b": 2}), (1, {"a": 3})):
            log.commit(0, 0, step, data)
    assert [(0, {"a": 1, "b": 2}), (1, {"a": 3})] == [(step, row) for step, row, _ in mine.rows]


def test_a_rewind_can_be_an_error(tmp_path: Path) -> None:
    """commit(4), commit(3) with on_rewind error raises at the call; the log has both (report a3)."""
    with logger(tmp_path, backends=[MemoryBackend(strict=True)], on_rewind="error") as log:
        log.commit(0, 4, 4, {"v": 4})
        with pytest.raises(
            RewindError, match="expected a step that memory can still take, got 3; the log has it"
        ):
            log.commit(0, 3, 3, {"v": 3})
    assert [3, 4] == [step for step, _, _ in metrics(run_of(tmp_path))]


def test_tensorboard_is_written_anew_where_it_was(tmp_path: Path) -> None:
    """on_rewind rewrite: a late row has everything told again, from a session start on (report a3)."""
    place = tmp_path / "tb"
    parts = {"tensorboard": TensorBoardConfig(str(place)), "on_rewind": "rewrite"}
    with logger(tmp_path, **parts) as log:
        for step in range(6):
            log.commit(0, step, step, {"v": float(step)})
        log.commit(0, 3, 3, {"late": 1.0})
        log.commit(0, 6, 6, {"v": 6.0})
    (status,) = log.status()
    assert (0, 0, None) == (status.withheld, status.dropped, status.error)
    expected = [(s, {"v": float(s)} | ({"late": 1.0} if s == 3 else {})) for s in range(7)]
    assert expected == [(step, row) for step, row, _ in tensorboard_rows(place)]


def test_a_directory_that_was_begun_anew_is_gone_on_with(tmp_path: Path) -> None:
    """on_rewind new_run: late steps, and what a resumed process commits, are in the second (a5, a16)."""
    parts = {"tensorboard": TensorBoardConfig(str(tmp_path / "tb")), "on_rewind": "new_run"}
    for steps in ((0, 3, 1, 2), (4, 5)):
        with logger(tmp_path, **parts) as log:
            for step in steps:
                log.commit(0, step, step, {"v": float(step)})
        assert (0, None) == (log.status()[0].withheld, log.status()[0].error)
    told = [[step for step, _, _ in tensorboard_rows(tmp_path / name)] for name in ("tb", "tb-2")]
    assert [[0, 3], [1, 2, 4, 5]] == told


def test_offline_files_are_written_anew_beside(tmp_path: Path) -> None:
    """on_rewind rewrite, new_run: a wandb run of its own, with everything or from the late step on (a3)."""
    for policy, steps in (("rewrite", [0, 1, 2, 3, 4]), ("new_run", [1, 2, 4])):
        parts = {"wandb": WandBConfig(mode="offline"), "on_rewind": policy}
        with logger(tmp_path, trial=policy, **parts) as log:
            for step in (0, 3, 1, 2, 4):
                log.commit(0, step, step, {"v": float(step)})
        (status,) = log.status()
        assert (0, None) == (status.dropped, status.error)
        runs = wandb_files(run_of(tmp_path, policy) / "live")
        assert 2 == len({file.name for file in runs})  # each is a run of its own when it is uploaded
        told = [[row["_step"] for row in wandb_history(file)] for file in runs]
        assert sorted([[0, 3], steps]) == sorted(told)


def test_a_backend_that_hangs_when_closed_is_left_behind(tmp_path: Path, caplog) -> None:
    """close(timeout) returns, says so, and has told the others (report b15)."""
    leave = threading.Event()

    class Hanging(MemoryBackend):
        def close(self) -> None:
            leave.wait()

    fine = MemoryBackend()
    log = logger(tmp_path, backends=[Hanging(), fine])
    log.commit(0, 0, 0, {"v": 1.0})
    log.close(timeout=0.5)
    assert "memory: did not finish in time" in caplog.text
    until(lambda: fine.closed)
    assert 1 == len(fine.rows)
    assert "finished" == attempts(run_of(tmp_path))[0].outcome
    leave.set()


def test_evaluations_that_come_late_keep_their_own_step(tmp_path: Path) -> None:
    """Reports of older policies arrive out of order: each at the step it measured (report a17)."""
    mine, strict = MemoryBackend(), MemoryBackend(strict=True)
    with logger(tmp_path, backends=[mine, strict]) as log:
        for step in range(31):
            log.commit(0, step, step, {"loss": 1.0})
        for step in (20, 10):
            log.commit(0, step, step, {"eval/reward": float(step)})
    found = {(step, key): value for step, key, value in metrics(run_of(tmp_path))}
    assert (20.0, 10.0) == (found[20, "eval/reward"], found[10, "eval/reward"])
    late = [(20, {"eval/reward": 20.0}), (10, {"eval/reward": 10.0})]
    assert late == [(step, row) for step, row, _ in mine.rows if "loss" not in row]
    assert ["", "10, 20"] == [status.withheld_steps for status in log.status()]


def test_a_step_on_another_scale_is_withheld_and_named(tmp_path: Path, caplog) -> None:
    """Training counts over ranks, evaluation per rank: what falls behind is said, the log has it (a12)."""
    strict = MemoryBackend(strict=True)
    with logger(tmp_path, backends=[strict]) as log:
        log.commit(0, 0, 4000, {"loss": 1.0})
        log.commit(0, 0, 1000, {"eval": 1.0})
    assert "step 1000 comes too late or again" in caplog.text
    assert "1000" == log.status()[0].withheld_steps
    assert [1000, 4000] == [step for step, _, _ in metrics(run_of(tmp_path))]


@pytest.mark.parametrize("restored", [True, False])
def test_a_resumed_run_evaluates_by_the_same_rule(tmp_path: Path, restored: bool) -> None:
    """Stopped at 79 and resumed: every tenth step is evaluated and committed, none shifts (report a18)."""
    mine, spec = MemoryBackend(strict=True), SimpleNamespace(**vars(SPEC) | {"steps_per_epoch": 1000})
    state: dict[str, Any] = {}
    for steps in (range(80), range(80, 120)):
        with logger(tmp_path, backends=[mine]) as log:
            evaluator = Evaluator(EvaluatorConfig(freq_steps=10), spec)
            if state:
                log.load_state_dict(state["logger"])
            if state and restored:
                evaluator.load_state_dict(state["evaluator"])
            evaluator.before_train(lambda: pytest.fail("evaluated once more"), global_step=steps[0] - 1)
            for step in steps:
                found = evaluator.evaluate(lambda step=step: {"accuracy": float(step)}, 0, step, step)
                log.commit(0, step, step, {"loss": 1.0} | (found or {}))
            state = {"logger": log.state_dict(), "evaluator": evaluator.state_dict()}
    expected = {step: float(step) for step in range(9, 120, 10)}
    assert expected == {step: row["accuracy"] for step, row, _ in mine.rows if "accuracy" in row}
    with open_run(run_of(tmp_path)) as run:
        rows = run.metrics(["accuracy"]).to_pylist()
    assert expected == {row["step"]: row["value"] for row in rows}


def test_a_failing_backend_never_reaches_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that raises from its third call on: ten commits succeed and are logged (report b9)."""
    monkeypatch.setattr("replay.delivery.PAUSES", (0.0, 0.0))

    class Failing(MemoryBackend):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            if step >= 2:
                raise ConnectionError("no route")
            super().log(step, metrics, time)

    failing, fine = Failing(), MemoryBackend()
    with logger(tmp_path, backends=[failing, fine]) as log:
        for step in range(10):
            assert log.commit(0, step, step, {"v": step})
    assert 10 == len(metrics(run_of(tmp_path))) == len(fine.rows)
    status = log.status()[0]
    assert (2, 8, True, "ConnectionError: no route") == (
        status.sent,
        status.dropped,
        status.off,
        status.error,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "trouble", [{"status": 500}, {"seconds": 30.0, "status": 503}], ids=["fails", "hangs"]
)
@pytest.mark.parametrize("target", STAND_INS, indirect=True)
def test_a_service_in_trouble_never_reaches_the_training(
    tmp_path: Path, target: Target, trouble: dict[str, Any]
) -> None:
    """Uploads fail or hang for long: every commit is durable and soon over, a later replay fills in (b9)."""
    assert target.server is not None
    took: list[float] = []
    with logger(tmp_path, run=tmp_path / "run", backends=[target.make(timeout=PATIENCE)]) as log:
        target.server.trouble.append(Trouble(STAND_INS[target.name], **trouble))
        for step in range(50):
            began = time.perf_counter()
            assert log.commit(0, step, step, {"v": float(step)})
            took.append(time.perf_counter() - began)
    median, longest = 1e3 * np.median(took), 1e3 * max(took)
    print(f"{target.name}: the median commit took {median:.2f} ms, the longest {longest:.2f} ms")
    assert max(took) < 10.0  # a fraction of the hang, be the machine as busy as it may
    (status,) = log.status()
    assert "BackendError: expected" in str(status.error)
    target.server.trouble.clear()
    (report,) = play(tmp_path / "run", [target.make()])
    assert (50, True) == (report.sent + report.skipped, report.complete)
    assert [(step, {"v": float(step)}) for step in range(50)] == [row[:2] for row in target.rows()]


def test_a_crashed_and_resumed_run(tmp_path: Path) -> None:
    """Steps 0..15, a crash, 10..20 from a checkpoint at 9: 21 steps, 10..15 the later's (report a1)."""
    tb = {"tensorboard": TensorBoardConfig(str(tmp_path / "tb"))}
    saved: list[dict[str, int]] = []

    def train() -> None:
        with logger(tmp_path, **tb) as log:
            for step in range(16):
                log.commit(0, step, step, {"v": step})
                saved.append(log.state_dict())
            raise ZeroDivisionError("the cluster")

    with pytest.raises(ZeroDivisionError):
        train()
    with logger(tmp_path, **tb) as log:
        log.load_state_dict(saved[9])
        for step in range(10, 21):
            log.commit(0, step, step, {"v": 100 + step})
    run = run_of(tmp_path)
    found = {step: value for step, _, value in metrics(run)}
    assert list(range(21)) == sorted(found)
    assert (9, 110, 115, 120) == (found[9], found[10], found[15], found[20])
    assert 27 == len(metrics(run, attempts="all"))
    first, second = attempts(run)
    assert "exception: ZeroDivisionError: the cluster" == first.outcome
    assert "finished" == second.outcome
    live = tensorboard_rows(tmp_path / "tb")
    assert [(step, {"v": float(value)}) for step, value in sorted(found.items())] == [
        (s, row) for s, row, _ in live
    ]


def test_state_is_the_last_committed_step(tmp_path: Path) -> None:
    """`state_dict` holds last_commit_step, -1 at first; a late commit of an old step does not lower it."""
    with logger(tmp_path) as log:
        assert {"last_commit_step": -1} == log.state_dict()
        log.load_state_dict({"last_commit_step": -1})
        log.commit(0, 0, 7, {"a": 1.0})
        log.commit(0, 0, 2, {"late": 1.0})
        assert {"last_commit_step": 7} == log.state_dict()


def test_the_restored_step_is_in_every_commit_that_follows(tmp_path: Path) -> None:
    """What the logger was restored with is written down with its commits: it bounds what the attempt owns."""
    with logger(tmp_path) as log:
        log.load_state_dict({"last_commit_step": 41})
        log.commit(0, 0, 43, {"a": 1.0})
    commits = [b for _, _, b in eventlog.RunReader(run_of(tmp_path)).commits()]
    assert [41, 41] == [value for batch in commits for value in batch["restored_step"].to_pylist()]


def test_the_attempt_says_what_ran_without_secrets(tmp_path: Path) -> None:
    """The experiment's config, redacted, and the code's version are in the attempt and at the backends."""
    wandb = WandBConfig(mode="offline", wandb_api_key="0123456789")
    own = StatsLoggerConfig(
        "exp", "t0", str(tmp_path), wandb=wandb, tensorboard=TensorBoardConfig(str(tmp_path / "tb"))
    )
    experiment = SimpleNamespace(stats_logger=own, actor={"lr": 0.5, "hf_token": "hf_secret"})
    mine = MemoryBackend()
    with StatsLogger(experiment, SPEC, backends=[mine]) as log:
        log.commit(0, 0, 0, {"a": 1.0})
    (attempt,) = attempts(run_of(tmp_path))
    assert {"lr": 0.5, "hf_token": "<redacted>"} == attempt.config["actor"]
    assert "<redacted>" == attempt.config["stats_logger"]["wandb"]["wandb_api_key"]
    assert {"commit_id", "branch", "is_dirty", "version"} == set(attempt.version_info)
    assert mine.run is not None
    assert (attempt.config, attempt.version_info, "exp", "t0", 0) == (
        mine.run.config,
        mine.run.version_info,
        mine.run.experiment,
        mine.run.trial,
        mine.run.attempt,
    )
    everything = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"hf_secret" not in everything
    assert b"0123456789" not in everything
    assert "redacted" in tensorboard_texts(tmp_path / "tb")["config/text_summary"]


def test_the_started_log_is_used(tmp_path: Path) -> None:
    """A log that was started before is the logger's; closing the logger does not stop it."""
    started = eventlog.start(tmp_path / "mine")
    with logger(tmp_path / "elsewhere") as log:
        log.commit(0, 0, 0, {"a": 1.0})
    assert started is eventlog.current()
    assert [(0, "a", 1.0)] == metrics(tmp_path / "mine")
    assert not (tmp_path / "elsewhere").exists()
    assert ["finished"] == [attempt.outcome for attempt in attempts(tmp_path / "mine")]


def test_a_log_started_here_is_stopped_here(tmp_path: Path) -> None:
    """Without a started log the logger starts one under the log root, and ends it; closing twice is fine."""
    log = logger(tmp_path)
    assert run_of(tmp_path) == eventlog.current().run.path  # pyright: ignore[reportOptionalMemberAccess]
    log.close()
    log.close()
    assert None is eventlog.current()
    with pytest.raises(LogError, match="expected an open logger, got a commit of step 3 after close"):
        log.commit(0, 0, 3, {"a": 1.0})


def test_the_log_root_can_be_asked_for(tmp_path: Path) -> None:
    """AReaL's trainers ask the class for the path and write there themselves."""
    assert str(run_of(tmp_path)) == StatsLogger.get_log_path(StatsLoggerConfig("exp", "t0", str(tmp_path)))
    assert run_of(tmp_path).is_dir()


def test_a_log_root_with_other_peoples_files_is_joined(tmp_path: Path) -> None:
    """AReaL's launcher has written into the log root before: that is no reason not to log."""
    run_of(tmp_path).mkdir(parents=True)
    (run_of(tmp_path) / "trainer.log").write_text("hello\n")
    with logger(tmp_path) as log:
        log.commit(0, 0, 0, {"a": 1.0})
    assert [(0, "a", 1.0)] == metrics(run_of(tmp_path))


def test_a_second_trial_needs_a_run_of_its_own(tmp_path: Path) -> None:
    """A logger for another trial in one process is an error unless it is told its run."""
    with logger(tmp_path) as first:
        with pytest.raises(LogError, match=r"expected trial exp/t0, .*got exp/other: pass run="):
            logger(tmp_path, trial="other")
        with logger(tmp_path, trial="other", run=tmp_path / "second") as second:
            first.commit(0, 0, 0, {"a": 1.0})
            second.commit(0, 0, 0, {"b": 2.0})
        first.commit(0, 1, 1, {"a": 3.0})
    assert [(0, "a", 1.0), (1, "a", 3.0)] == metrics(run_of(tmp_path))
    assert [(0, "b", 2.0)] == metrics(tmp_path / "second")
    with logger(tmp_path, trial="other") as third:
        third.commit(0, 0, 0, {"c": 1.0})
    assert [(0, "c", 1.0)] == metrics(run_of(tmp_path, "other"))


def test_a_configured_backend_that_cannot_work_is_loud_and_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was configured must work: an error at once, before the log is touched (report s12)."""
    with monkeypatch.context() as lacking:
        lacking.setattr("replay.backends.base.find_spec", lambda _: None)
        with pytest.raises(BackendMissingError, match="expected the package swanlab"):
            logger(tmp_path, swanlab=SwanlabConfig(mode="local"))
    with pytest.raises(ConfigError, match=r"expected trackio\.space_id or"):
        logger(tmp_path, trackio=TrackioConfig(mode="online"))
    assert [] == list(tmp_path.iterdir())
    assert None is eventlog.current()


def test_a_second_logger_that_fails_leaves_the_firsts_attempt_alone(tmp_path: Path) -> None:
    """The attempt belongs to the logger that claimed it: it ends when that one does, as that one does."""

    class Broken(MemoryBackend):
        def open(self, run: object) -> None:  # noqa: ARG002
            raise PermissionError("no key")

    fine = MemoryBackend()
    with logger(tmp_path) as first:
        with pytest.raises(PermissionError, match="no key"):
            logger(tmp_path, backends=[fine, Broken()])
        assert fine.closed
        assert first.commit(0, 0, 0, {"v": 1.0})
    assert ["finished"] == [a.outcome for a in attempts(run_of(tmp_path))]


def test_a_backend_that_does_not_open_ends_the_attempt(tmp_path: Path) -> None:
    """When opening fails the error reaches the caller, the others are closed and the attempt says why."""

    class Broken(MemoryBackend):
        def open(self, run: object) -> None:  # noqa: ARG002
            raise PermissionError("no key")

    fine = MemoryBackend()
    with pytest.raises(PermissionError, match="no key"):
        logger(tmp_path, backends=[fine, Broken()])
    assert fine.closed
    assert ["exception: PermissionError: no key"] == [a.outcome for a in attempts(run_of(tmp_path))]
    assert None is eventlog.current()


def test_an_older_leader_stops_sending_and_goes_on_logging(tmp_path: Path, caplog) -> None:
    """A newer claim of the run exists: from then on only the log hears of it, said once (split brain)."""
    mine = MemoryBackend()
    with logger(tmp_path, backends=[mine]) as log:
        log.commit(0, 0, 0, {"a": 0})
        log.commit(0, 1, 1, {"a": 1})
        eventlog.RunDir.open(run_of(tmp_path)).claim_attempt({"session": "f" * 32})
        log.commit(0, 2, 2, {"a": 2})
        log.commit(0, 3, 3, {"a": 3})
    assert {step for step, _, _ in mine.rows} <= {0, 1}
    assert 2 == log.status()[0].withheld
    assert 1 == caplog.text.count("a newer attempt of the run exists, nothing is sent from step 2 on")
    assert {0, 1, 2, 3} == {step for step, _, _ in metrics(run_of(tmp_path), attempts="all")}


OTHER_RANK = """
import sys
from tests.replay.committed import logger
from pathlib import Path
from replay import MemoryBackend
mine = MemoryBackend()
with logger(Path(sys.argv[1]), backends=[mine]) as log:
    assert not log.leader
    log.commit(0, 0, 0, {"a": 1.0, "not": "looked at"})
    assert log.status() == []
assert mine.run is None
"""


def test_other_ranks_note_their_commits_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes its own commit row, claims no attempt, talks to no backend and prints nothing."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OTHER_RANK, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
    run = run_of(tmp_path)
    (batch,) = [batch for _, _, batch in eventlog.RunReader(run).commits()]
    assert [(0, None, False)] == [
        (row["global_step"], row["key"], row["leader"]) for row in batch.to_pylist()
    ]
    assert [] == attempts(run)


FORGOTTEN = """
import sys
from pathlib import Path
from replay import TensorBoardConfig
from tests.replay.committed import logger
log = logger(Path(sys.argv[1]), tensorboard=TensorBoardConfig(sys.argv[1] + "/tb"))
log.commit(0, 0, 0, {"a": 1.0})
log.commit(0, 1, 1, {"a": 2.0})
"""


def test_a_logger_that_was_never_closed_still_tells(tmp_path: Path) -> None:
    """A script that ends without closing loses no step, at the backends neither."""
    subprocess.run([sys.executable, "-W", "error", "-c", FORGOTTEN, str(tmp_path)], cwd=ROOT, check=True)
    assert [(0, {"a": 1.0}), (1, {"a": 2.0})] == [
        (step, row) for step, row, _ in tensorboard_rows(tmp_path / "tb")
    ]
    assert ["finished"] == [attempt.outcome for attempt in attempts(run_of(tmp_path))]


@pytest.mark.parametrize(
    "state", [{}, None, *({"last_commit_step": step} for step in ("x", 2.5, -7, None, True))]
)
def test_a_state_that_is_none_is_refused(tmp_path: Path, state: Any) -> None:
    """What `state_dict` cannot have returned is refused in one form, and nothing is taken over."""
    with logger(tmp_path) as log:
        with pytest.raises(StepError, match=r'expected \{"last_commit_step": int ≥ -1\}, got '):
            log.load_state_dict(state)
        assert {"last_commit_step": -1} == log.state_dict()


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_a_fileroot_that_is_no_directory_is_said(tmp_path: Path, below: str) -> None:
    """Where no directory can be made, both ways to the log root say so, the path last."""
    (tmp_path / "file").touch()
    with pytest.raises(
        RunDirectoryError, match=f"expected stats_logger[.]fileroot where .*, got .*: {tmp_path}"
    ):
        logger(tmp_path / below)
    with pytest.raises(RunDirectoryError, match=r"expected stats_logger[.]fileroot where"):
        StatsLogger.get_log_path(StatsLoggerConfig("e", "t", str(tmp_path / below)))


def test_what_is_handed_in_is_checked(tmp_path: Path) -> None:
    """A name instead of a backend, or something else than a training's length, is refused before any log."""
    config = StatsLoggerConfig("e", "t", str(tmp_path / "root"))
    with pytest.raises(ConfigError, match=r"got 'tensorboard': backends\[0\]"):
        StatsLogger(config, backends=["tensorboard"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"expected ft_spec .*got \{.* without total_train_epochs, "):
        StatsLogger(config, {"steps_per_epoch": 1})
    with pytest.raises(ConfigError, match=r"expected ft_spec with total_train_epochs, .*, got 'abc' without"):
        StatsLogger(config, "abc")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "root").exists()
