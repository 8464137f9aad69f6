"""Telling a recorded run: each target exactly what it lacks, in the order of the steps."""

from __future__ import annotations

import logging
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import eventlog
from aggregator import open_run, stats_tracker
from eventlog import RunDir
from eventlog.errors import (
    BackendError,
    BackendGoneError,
    ConfigError,
    ManifestError,
    NotARunError,
    QueryError,
    RunDirectoryError,
    StepError,
)
from replay import Capabilities, MemoryBackend, Order, follow, open_backend, play
from tests.replay.backend_contract import snapshot
from tests.replay.committed import build, logger
from tests.replay.readers import (
    Rows,
    tensorboard_rows,
    tensorboard_texts,
    wandb_files,
    wandb_rows,
)
from tests.runs import EPOCH, RunBuilder

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]


def value(step: int) -> dict[str, float]:
    return {"v": float(step)}


def later(step: int) -> dict[str, float]:
    return {"v": 100.0 + step}


def crashed(path: Path) -> Path:
    """Build the run of report a1: attempt 0 writes v = step for 0..15, attempt 1 100 + step for 10..20."""
    return build(path, (range(16), value), (range(10, 21), later))


CRASHED = [(step, {"v": float(step if step < 10 else 100 + step)}) for step in range(21)]


def logged(run: Path) -> Rows:
    """Return what the log's metrics say, one row per step, with their times."""
    rows: dict[int, tuple[dict[str, float], float]] = {}
    with open_run(run) as session:
        for row in session.metrics().to_pylist():
            rows.setdefault(row["step"], ({}, row["time"].timestamp()))[0][row["key"]] = row["value"]
    return [(step, *rows[step]) for step in sorted(rows)]


class Lasting(MemoryBackend):
    """A target that outlives the process: the same rows whoever opens it."""

    def __init__(
        self,
        rows: Rows,
        *,
        reads_back: bool = True,
        order: Order = Order.STRICT,
        target: str = "t",
        limit: int | None = None,
    ) -> None:
        super().__init__(strict=order is Order.STRICT, limit=limit)
        self.capabilities = Capabilities(order=order, reads_back=reads_back)
        self.target = target
        self.rows = rows
        self.calls = 0

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self.calls += 1
        super().log(step, metrics, time)

    def last_step(self) -> int | None:
        return super().last_step() if self.capabilities.reads_back else None


def test_a_crashed_and_resumed_run_is_one_line(tmp_path: Path) -> None:
    """21 rows, 10..20 the later attempt's, the six taken back are counted (reports a1, a4)."""
    run = crashed(tmp_path / "run")
    mine = MemoryBackend(strict=True)
    backends = [mine, open_backend("tensorboard"), open_backend("wandb", mode="offline")]
    for report in play(run, backends):
        assert (21, 0, 6, 0, 0) == (
            report.sent,
            report.skipped,
            report.superseded,
            report.refused,
            report.withheld,
        )
        assert report.complete
    expected = logged(run)
    assert CRASHED == [(step, row) for step, row, _ in expected]
    assert expected == mine.rows == tensorboard_rows(run / "tensorboard") == wandb_rows(run / "wandb")
    assert [EPOCH / 1e6 + 10.0 * n for n in (1, 2, 3)] == [time for _, _, time in expected[:3]]


def test_replaying_again_sends_nothing(tmp_path: Path) -> None:
    """A second replay makes no call and touches nothing, in the run neither (report b3)."""
    run = crashed(tmp_path / "run")
    mine = MemoryBackend(strict=True)
    play(run, [mine, open_backend("tensorboard"), open_backend("wandb", mode="offline")])
    before = snapshot(run)
    reports = play(run, [mine, open_backend("tensorboard"), open_backend("wandb", mode="offline")])
    assert [(0, 21)] * 3 == [(report.sent, report.skipped) for report in reports]
    assert before == snapshot(run)
    assert 21 == len(mine.rows)


def test_a_run_that_has_lost_its_manifest_is_not_told_twice(tmp_path: Path) -> None:
    """Without run.json a run is known by its segments: what targets hold is its own, nothing is sent."""
    run = crashed(tmp_path / "run")
    play(run, [open_backend("tensorboard"), open_backend("wandb", mode="offline")])
    (run / "run.json").unlink()
    reports = play(run, [open_backend("tensorboard"), open_backend("wandb", mode="offline")])
    assert [(0, 21)] * 2 == [(report.sent, report.skipped) for report in reports]
    assert {1} == {report.damaged for report in reports}


def test_only_the_tail_is_told(tmp_path: Path) -> None:
    """100 steps to a recording target; again: no call; 20 more: 20 calls (report b3)."""
    build(tmp_path / "a", (range(100), value))
    build(tmp_path / "b", (range(120), value))
    rows: Rows = []
    for run, calls in (("a", 100), ("a", 0), ("b", 20)):
        target = Lasting(rows)
        (report,) = play(tmp_path / run, [target], cursors=tmp_path / "cursors")
        assert (calls, calls) == (target.calls, report.sent)
    assert [(step, value(step)) for step in range(120)] == [(step, row) for step, row, _ in rows]


def test_a_far_too_high_step_loses_nothing(tmp_path: Path) -> None:
    """Steps 0, 1, 2, 1 000 000, 3, 4: a target told live lacks two, a fresh one has six (report a2)."""
    live = MemoryBackend(strict=True)
    with logger(tmp_path, run=tmp_path / "run", backends=[live]) as log:
        for step in (0, 1, 2, 1_000_000, 3, 4):
            log.commit(0, 0, step, {"v": step})
    fresh = MemoryBackend(strict=True)
    (report,) = play(tmp_path / "run", [fresh])
    assert [0, 1, 2, 3, 4, 1_000_000] == [step for step, _, _ in fresh.rows]
    assert (6, True) == (report.sent, report.complete)
    (report,) = play(tmp_path / "run", [live])
    assert (0, 4, 2, False) == (report.sent, report.skipped, report.withheld, report.complete)
    (report,) = play(tmp_path / "run", [live], new_run=True)
    assert (6, 0, True) == (report.sent, report.withheld, report.complete)
    assert fresh.rows == live.rows


def test_several_commits_of_a_step_are_one_call(tmp_path: Path) -> None:
    """A step's commits, also a late one, become one row with the time of the first (report a9)."""
    with RunBuilder(tmp_path / "run") as run:
        leader = run.producer(attempt=0)
        run.attempt(0, leader=leader)
        for time, (step, data) in enumerate(
            [(0, {"a": 1.0}), (0, {"b": 2.0}), (1, {"a": 3.0}), (0, {"eval": 4.0})]
        ):
            leader.commit(step, data, time=time, leader=True)
    mine = MemoryBackend(strict=True)
    (report,) = play(tmp_path / "run", [mine])
    start = EPOCH / 1e6
    assert [(0, {"a": 1.0, "b": 2.0, "eval": 4.0}, start), (1, {"a": 3.0}, start + 2)] == mine.rows
    assert 2 == report.sent


def test_what_comes_too_late_for_a_target_is_counted(tmp_path: Path) -> None:
    """Steps told before that a later attempt repeats are withheld from an append-only target (report a5)."""
    run = build(tmp_path / "a", (range(31), value))
    rows: Rows = []
    play(run, [Lasting(rows)], cursors=tmp_path / "cursors")
    resumed = build(tmp_path / "b", (range(31), value), (range(11, 36), later))
    (report,) = play(resumed, [Lasting(rows)], cursors=tmp_path / "cursors")
    assert (5, 11, 20, 20, False) == (
        report.sent,
        report.skipped,
        report.superseded,
        report.withheld,
        report.complete,
    )
    assert list(range(36)) == [step for step, _, _ in rows]
    (report,) = play(resumed, [Lasting(rows)], cursors=tmp_path / "cursors")
    assert (0, 20, "11-30", "11-30") == (
        report.sent,
        report.withheld,
        report.withheld_steps,
        report.superseded_steps,
    )
    (report,) = play(resumed, [Lasting([], target="other")], cursors=tmp_path / "cursors")
    assert (36, 0, True) == (report.sent, report.withheld, report.complete)


def test_two_targets_get_each_what_they_lack(tmp_path: Path) -> None:
    """Two targets of one backend at different steps are told different things in one replay."""
    run = build(tmp_path / "run", (range(10), value))
    behind, level = Lasting([], target="behind"), Lasting([], target="level")
    play(run, [behind], until=4)
    play(run, [level])
    reports = play(run, [behind, level])
    assert [(5, 5), (0, 10)] == [(report.sent, report.skipped) for report in reports]
    assert behind.rows == level.rows
    files = [open_backend("tensorboard", path=tmp_path / name) for name in ("behind", "level")]
    play(run, files[:1], until=4)
    play(run, files[1:])
    reports = play(run, files)
    assert [(5, 5), (0, 10)] == [(report.sent, report.skipped) for report in reports]
    assert tensorboard_rows(tmp_path / "behind") == tensorboard_rows(tmp_path / "level") == level.rows


def test_the_target_knows_better_than_the_cursor(tmp_path: Path) -> None:
    """A cursor is a hint: an emptied target is told all, one that holds more is told less."""
    run = build(tmp_path / "run", (range(10), value))
    rows: Rows = []
    play(run, [Lasting(rows)])
    rows.clear()
    assert 10 == play(run, [Lasting(rows)])[0].sent
    shutil.rmtree(run / "cursors")
    (report,) = play(run, [Lasting(rows)])
    assert (0, 10) == (report.sent, report.skipped)


@pytest.mark.parametrize("tell", [play, follow])
def test_a_step_that_was_told_when_the_kill_came_is_no_late_one(tmp_path: Path, tell: Any) -> None:
    """Told, but not acknowledged: the target has the step, and nothing is withheld, now or later (b5)."""

    class Killed(Lasting):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            super().log(step, metrics, time)
            if step == 4:
                raise KeyboardInterrupt

    run = build(tmp_path / "run", (range(6), value))
    RunDir.open(run).end_attempt(0, "finished")
    rows: Rows = []
    with pytest.raises(KeyboardInterrupt):
        play(run, [Killed(rows)])
    for until, sent, skipped in ((4, 0, 5), (None, 1, 5), (None, 0, 6)):
        (report,) = tell(run, [Lasting(rows)], until=until)
        assert (sent, skipped, 0) == (report.sent, report.skipped, report.withheld)
    assert list(range(6)) == [step for step, _, _ in rows]


def test_a_target_that_cannot_say_what_it_holds_is_never_told_twice(tmp_path: Path) -> None:
    """Where the target cannot answer the cursor decides, and a damaged cursor stops the replay."""
    run = build(tmp_path / "run", (range(10), value))
    rows: Rows = []
    assert 10 == play(run, [Lasting(rows, reads_back=False)])[0].sent
    assert 0 == play(run, [Lasting(rows, reads_back=False)])[0].sent
    assert 10 == len(rows)
    (file,) = (run / "cursors").iterdir()
    file.write_text("{")
    with pytest.raises(ManifestError, match=f"{file.name}$"):
        play(run, [Lasting(rows, reads_back=False)])


@pytest.mark.parametrize("name", ["memory", "tensorboard"])
def test_a_cursor_that_cannot_be_written_is_said(tmp_path: Path, name: str) -> None:
    """An unwritable cursor ends the replay with an error; elsewhere it can be kept (report b5)."""
    run = build(tmp_path / "run", (range(3), value))
    (run / "cursors").write_text("in the way")
    rows: Rows = []
    target = Lasting(rows) if name == "memory" else open_backend(name, path=tmp_path / "tb")
    with pytest.raises(RunDirectoryError, match=r"expected to write the cursor of .*cursors"):
        play(run, [target])
    assert [] == rows  # found before anything was told
    play(run, [target], cursors=tmp_path / "elsewhere")
    assert 1 == len(list((tmp_path / "elsewhere").iterdir()))


def test_a_part_of_a_run_can_be_told(tmp_path: Path) -> None:
    """Steps by since and until, both included, keys by globs; an unknown key is an error."""
    run = build(tmp_path / "run", (range(10), lambda step: {"a/x": step, "a/y": step, "b": step}))
    mine = MemoryBackend()
    play(run, [mine], since=3, until=5, keys=["a/*"])
    assert [(step, {"a/x": step, "a/y": step}) for step in (3, 4, 5)] == [
        (step, row) for step, row, _ in mine.rows
    ]
    with pytest.raises(QueryError, match="nothing/like"):
        play(run, [MemoryBackend()], keys=["nothing/like"])


def test_superseded_steps_can_be_told_on_request(tmp_path: Path) -> None:
    """attempts="all" also tells what no later attempt replaced, once a step."""
    run = build(tmp_path / "run", (range(16), value), (range(10, 13), later))
    mine = MemoryBackend(strict=True)
    (report,) = play(run, [mine], attempts="all")
    expected = {step: float(100 + step if 10 <= step < 13 else step) for step in range(16)}
    assert expected == {step: row["v"] for step, row, _ in mine.rows}
    assert (16, 6) == (report.sent, report.superseded)


def test_what_the_log_says_can_be_told_instead(tmp_path: Path) -> None:
    """source="recomputed" tells the numbers reduced anew from the records."""
    with RunBuilder(tmp_path / "run") as run:
        leader = run.producer(attempt=0)
        run.attempt(0, leader=leader)
        for step in range(3):
            leader.tracker().scalar({"reward": 1.0})
            leader.tracker().scalar({"reward": 2.0})
            run.export(leader, time=step)
            leader.commit(step, {"reward": 99.0}, time=step, leader=True)
    mine = MemoryBackend()
    play(tmp_path / "run", [mine], source="recomputed")
    assert [{"reward": 1.5}] * 3 == [row for _, row, _ in mine.rows]


def test_what_cannot_be_recomputed_is_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics that were only committed are not told, and that is said; a target may hold them."""
    with RunBuilder(tmp_path / "run") as run:
        leader = run.producer(attempt=0)
        run.attempt(0, leader=leader)
        for step in range(3):
            leader.tracker().scalar({"reward": 1.0})
            leader.commit(step, run.export(leader, time=step), time=step, leader=True)
        leader.commit(3, {"score": 2.0}, time=3, leader=True)
    mine = MemoryBackend()
    (report,) = play(tmp_path / "run", [mine], source="recomputed")
    assert (1, False, 3) == (report.partial, report.complete, report.sent)
    assert (
        "the log cannot say 1 metrics that were committed, they are not told: score (steps 3)" in caplog.text
    )
    (report,) = play(tmp_path / "run", [mine], source="recomputed", keys="reward")
    assert (0, True) == (report.partial, report.complete)
    place = tmp_path / "tb"
    play(tmp_path / "run", [open_backend("tensorboard", path=place)])
    (report,) = play(tmp_path / "run", [open_backend("tensorboard", path=place)], source="recomputed")
    assert (0, "") == (report.kept, report.kept_steps)


def test_what_lacks_a_rank_is_counted_as_partial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers of a part of the ranks are told, counted and named; statistics too."""
    with RunBuilder(tmp_path / "run") as run:
        leader = run.producer("actor", 0, world="w", world_size=2, attempt=0)
        run.attempt(0, leader=leader)
        for step in range(2):
            leader.tracker().scalar({"reward": 1.0})
            leader.drain(time=step)
            leader.note_export(f"g:{step}", members=(0, 1), time=step)
            leader.commit(step, {"reward": 2.0}, time=step, leader=True)
    mine = MemoryBackend()
    (report,) = play(tmp_path / "run", [mine], source="recomputed")
    assert ([{"reward": 1.0}] * 2, 2, False) == (
        [row for _, row, _ in mine.rows],
        report.partial,
        report.complete,
    )
    assert "lacks records of 2 metrics, they are told of what is left: reward (steps 0-1)" in caplog.text
    assert "actor-1 took part in exports of steps 0-1" in report.problems[0]
    (report,) = play(tmp_path / "run", [MemoryBackend()])
    assert 0 == report.partial
    (report,) = play(tmp_path / "run", [MemoryBackend()], stats=["p50", "histogram"])
    assert 4 == report.partial


def test_commits_that_are_lost_are_counted(tmp_path: Path) -> None:
    """What they held is not told; what a later attempt tells again is not lost."""
    with RunBuilder(tmp_path / "run") as run:
        for attempt, steps in enumerate([(0, 3, 4, 7), (4, 5)]):
            start = 100 * attempt
            leader = run.producer("actor", attempt=attempt, started=start)
            run.attempt(
                attempt, leader=leader, started=start, resume_step=4 if attempt else None, outcome="finished"
            )
            for step in steps:
                leader.commits = step if attempt == 0 else leader.commits
                leader.commit(step, {"x": 1.0}, time=start + step, leader=True)
    told = ("actor-0: commits 1 to 2 of attempt 0, after step 0 and before step 3",)
    (report,) = play(tmp_path / "run", [MemoryBackend()])
    assert (2, told, False) == (report.lost, report.losses, report.complete)


def test_values_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    """NaN and infinities go from the log to the target as they are (report e1)."""
    odd = {"inf": math.inf, "ninf": -math.inf, "nan": math.nan, "d": 1.0}
    run = build(tmp_path / "run", (range(1), lambda _: odd))
    mine = MemoryBackend()
    play(run, [mine])
    ((_, row, _),) = mine.rows
    assert odd | {"nan": 0} == row | {"nan": 0}
    assert math.isnan(row["nan"])


def test_large_integers_stay_exact(tmp_path: Path) -> None:
    """A count beyond 2**53 is told as the integer it is, a step beyond 2**31 too (report a8)."""
    with logger(tmp_path, run=tmp_path / "run") as log:
        log.commit(0, 0, 2**31 + 5, {"tokens": 2**53 + 1})
    mine = MemoryBackend()
    play(tmp_path / "run", [mine, open_backend("wandb", mode="offline")])
    assert [(2**31 + 5, {"tokens": 2**53 + 1})] == [(step, row) for step, row, _ in mine.rows]
    assert mine.rows == wandb_rows(tmp_path / "run" / "wandb")


def test_a_dry_run_touches_nothing(tmp_path: Path) -> None:
    """A dry run counts what would be sent, opens no target and writes nothing."""
    run = crashed(tmp_path / "run")
    mine = MemoryBackend()
    before = snapshot(tmp_path)
    reports = play(
        run, [mine, open_backend("tensorboard"), open_backend("wandb", mode="offline")], dry_run=True
    )
    assert [(21, 6, True)] * 3 == [(report.sent, report.superseded, report.dry_run) for report in reports]
    assert None is mine.run
    assert before == snapshot(tmp_path)
    play(run, [mine])
    (report,) = play(run, [mine], dry_run=True)
    assert (0, 21) == (report.sent, report.skipped)


def test_one_backend_that_fails_does_not_keep_the_others_from_it(tmp_path: Path, caplog) -> None:
    """Every target is told; then the first error is raised, the next ones noted (report b4)."""
    run = build(tmp_path / "run", (range(5), value))

    class Failing(MemoryBackend):
        error: Exception = ConnectionError("no route")

        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            if step == 2:
                raise self.error
            super().log(step, metrics, time)

    failing, gone, fine = Failing(), Failing(), MemoryBackend()
    gone.error = BackendGoneError("run deleted")
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(BackendError, match="failed at step 2, got ConnectionError") as info,
    ):
        play(run, [failing, gone, fine])
    assert ["run deleted"] == info.value.__notes__
    assert "memory: run deleted" in caplog.text
    assert [2, 2, 5] == [len(backend.rows) for backend in (failing, gone, fine)]
    assert all(backend.closed for backend in (failing, gone, fine))
    failing.error = gone.error = None  # pyright: ignore[reportAttributeAccessIssue]


class Foreign(MemoryBackend):
    """An adapter that raises errors of its own at a chosen call, or gives a wrong answer."""

    name = "foreign"

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__()
        self.call, self.error = call, error

    def _at(self, call: str) -> None:
        if call == self.call:
            raise self.error

    def open(self, run: Any) -> None:
        self._at("open")
        super().open(run)

    def last_step(self) -> Any:
        self._at("last_step")
        return "7" if self.call == "answer" else super().last_step()

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._at("log")
        super().log(step, metrics, time)

    def close(self) -> None:
        self._at("close")
        super().close()


@pytest.mark.parametrize("tell", [play, follow])
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("open", RuntimeError("mine")),
        ("last_step", OSError("mine")),
        ("close", RuntimeError("mine")),
        ("log", SystemExit("mine")),
        ("answer", TypeError()),
    ],
)
def test_whatever_an_adapter_raises_the_others_are_told(
    tmp_path: Path, tell: Any, call: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that are not the distribution's become it, say whose they are, and stop no other backend."""
    monkeypatch.setattr("replay.recipient.PAUSES", (0.0, 0.0))
    run = build(tmp_path / "run", (range(5), value))
    fine, last = MemoryBackend(), MemoryBackend()
    more: dict[str, Any] = {"give_up": 0.1, "wait": 0.0, "poll": 0.05} if tell is follow else {}
    failed: list[Any] = []
    reports = tell(run, [Foreign(call, error), fine, last], failed=failed, **more)
    assert [5, 5] == [report.sent for report in reports]
    assert [5, 5] == [len(fine.rows), len(last.rows)]
    (said,) = failed
    assert isinstance(said, BackendError)
    assert "foreign" in str(said)
    with pytest.raises(BackendError, match="got '7'" if call == "answer" else "mine"):
        tell(run, [Foreign(call, error), MemoryBackend()], **more)


def test_the_trackers_own_counts_are_hidden_under_new_names_too(tmp_path: Path) -> None:
    """A rule that takes a name apart does not let `k__count` out."""
    run = build(
        tmp_path / "run", (range(2), lambda _: {"ppo/lr": 1.0, "ppo/lr__count": 3.0, "n__count": 2.0})
    )
    mine = MemoryBackend()
    play(run, [mine], rename=[(r"^(\w*)/(.*)$", r"\2/\1")])
    assert [{"lr/ppo": 1.0, "n__count": 2.0}] * 2 == [row for _, row, _ in mine.rows]


def test_a_call_that_fails_once_is_made_again(tmp_path: Path) -> None:
    """A passing failure loses nothing."""
    run = build(tmp_path / "run", (range(5), value))

    class Shaky(MemoryBackend):
        calls = 0

        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            self.calls += 1
            if self.calls % 3 == 2:
                raise TimeoutError("no answer")
            super().log(step, metrics, time)

    mine = Shaky()
    assert 5 == play(run, [mine])[0].sent
    assert list(range(5)) == [step for step, _, _ in mine.rows]


def test_a_call_that_got_through_though_it_raised_is_not_repeated(tmp_path: Path) -> None:
    """Where the target can say what it holds, it is asked before a second try."""
    run = build(tmp_path / "run", (range(5), value))

    class Late(MemoryBackend):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            super().log(step, metrics, time)
            if step == 2:
                raise TimeoutError("no answer")

    mine = Late(strict=True)
    (report,) = play(run, [mine])
    assert (5, 0, True) == (report.sent, report.refused, report.complete)
    assert list(range(5)) == [step for step, _, _ in mine.rows]


def test_ones_own_object_is_a_backend(tmp_path: Path) -> None:
    """Four methods are enough, without a name, a target or capabilities."""
    run = build(tmp_path / "run", (range(3), value))

    class Bare:
        def __init__(self) -> None:
            self.said: list[Any] = []

        def open(self, run: Any) -> None:
            self.said.append(("open", run.experiment, run.trial))

        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            self.said.append((step, dict(metrics)))
            assert time > 0

        def last_step(self) -> int | None:
            return max((entry[0] for entry in self.said if entry[0] not in ("open", "close")), default=None)

        def close(self) -> None:
            self.said.append(("close",))

    mine = Bare()
    (report,) = play(run, [mine])  # pyright: ignore[reportArgumentType]
    assert [("open", "exp", "t0"), *[(step, value(step)) for step in range(3)], ("close",)] == mine.said
    assert ("bare", 3) == (report.backend, report.sent)
    (report,) = play(run, [mine])  # pyright: ignore[reportArgumentType]
    assert (0, 3) == (report.sent, report.skipped)


def test_trackers_are_told_what_ran(tmp_path: Path) -> None:
    """Config and version of the run go along; names come from its config, without one from its path."""
    run = build(tmp_path / "group" / "run7", (range(1), value))
    play(run, [open_backend("tensorboard"), open_backend("wandb", mode="offline")])
    assert '"lr": 0.5' in tensorboard_texts(run / "tensorboard")["config/text_summary"]
    assert "run-exp_t0_train.wandb" == wandb_files(run / "wandb")[0].name
    shutil.rmtree(run / "attempts")
    mine = MemoryBackend()
    play(run, [mine])
    assert mine.run is not None
    assert ("group", "run7", None) == (mine.run.experiment, mine.run.trial, mine.run.attempt)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"attempts": "newest"}, QueryError, "expected attempts latest or all, got 'newest'"),
        ({"source": "raw"}, QueryError, "got 'raw'"),
        ({"since": -1}, StepError, "got -1"),
        ({"until": 2.5}, StepError, "got 2.5"),
    ],
)
def test_wrong_questions_are_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    """What cannot be asked is said, before anything is told."""
    run = build(tmp_path / "run", (range(1), value))
    mine = MemoryBackend()
    with pytest.raises(error, match=said):
        play(run, [mine], **options)
    assert None is mine.run


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    """A directory without a run is an error with its path last."""
    with pytest.raises(NotARunError, match=f"{tmp_path.name}$"):
        play(tmp_path, [MemoryBackend()])


def test_an_archive_that_cannot_be_written_can_be_told(tmp_path: Path) -> None:
    """With cursors and targets elsewhere nothing is written into the run."""
    run = crashed(tmp_path / "run")
    before = snapshot(run)
    backends = [
        open_backend("tensorboard", path=tmp_path / "tb"),
        open_backend("wandb", mode="offline", path=tmp_path / "wandb"),
        Lasting([]),
    ]
    play(run, backends, cursors=tmp_path / "cursors")
    assert before == snapshot(run)
    assert logged(run) == tensorboard_rows(tmp_path / "tb") == wandb_rows(tmp_path / "wandb")


KILLED = """
import os, signal, sys
from pathlib import Path
from replay import open_backend, play
from replay import player
run, name = Path(sys.argv[1]), sys.argv[2]
last_pass = {"tensorboard": 0, "wandb": 1}[name]  # wandb's rows are read once before they are written
noted = player._Told._noted
def cut(self, rows):
    for row in noted(self, rows):
        if self.passes == last_pass and row.step == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        yield row
    self.passes += 1
player._Told.passes = 0
player._Told._noted = cut
from replay.backends import tensorboard
tensorboard.STEPS_PER_SEGMENT = 4
options = {"mode": "offline"} if name == "wandb" else {}
play(run, [open_backend(name, **options)])
"""


@pytest.mark.parametrize(("name", "read"), [("tensorboard", tensorboard_rows), ("wandb", wandb_rows)])
def test_a_killed_replay_made_again_ends_as_if_made_once(
    tmp_path: Path, name: str, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL half-way, then again: the target says what the log says; a third time nothing is sent."""
    monkeypatch.setattr("replay.backends.tensorboard.STEPS_PER_SEGMENT", 4)
    run = crashed(tmp_path / "run")
    command = [sys.executable, "-c", KILLED, str(run), name]
    killed = subprocess.run(command, cwd=ROOT, check=False)
    assert -signal.SIGKILL == killed.returncode
    options = {"mode": "offline"} if name == "wandb" else {}
    play(run, [open_backend(name, **options)])
    assert logged(run) == read(run / name)
    before = snapshot(run)
    assert 0 == play(run, [open_backend(name, **options)])[0].sent
    assert before == snapshot(run)


def test_a_config_that_names_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """An option that does not exist is refused before a run is opened."""
    with pytest.raises(ConfigError, match=r"expected options of memory among strict, .*got path"):
        play(tmp_path, [open_backend("memory", path="x")])


def test_values_that_a_later_one_replaces_are_counted(tmp_path: Path) -> None:
    """Of a key's values in one commit or one step the last is told, the others are counted."""
    with logger(tmp_path, run=tmp_path / "run") as log:
        log.commit(0, 0, 0, [{"loss": 1.0, "a": 1.0}, {"loss": 2.0}])
        log.commit(0, 0, 1, {"loss": 3.0})
        log.commit(0, 0, 1, {"loss": 4.0, "b": 1.0})
    mine = MemoryBackend()
    (report,) = play(tmp_path / "run", [mine])
    assert [(0, {"loss": 2.0, "a": 1.0}), (1, {"loss": 4.0, "b": 1.0})] == [
        (s, row) for s, row, _ in mine.rows
    ]
    assert (2, 2, True) == (report.sent, report.folded, report.complete)
    (report,) = play(crashed(tmp_path / "crashed"), [MemoryBackend()])
    assert 0 == report.folded


def test_damage_is_in_the_reports(tmp_path: Path) -> None:
    """A log with a file that cannot be read is told, and no report of it is complete."""
    run = build(tmp_path / "run", (range(3), value))
    (run / "attempts" / "0000.json").write_text("{")
    reports = play(run, [MemoryBackend(), MemoryBackend()])
    assert [(3, 1, False)] * 2 == [(report.sent, report.damaged, report.complete) for report in reports]
    assert "0000.json" in reports[0].problems[0]


def test_what_is_no_backend_is_refused(tmp_path: Path) -> None:
    """A name instead of a backend is refused with what was expected and where."""
    run = build(tmp_path / "run", (range(1), value))
    for wrong, message in (
        (["tensorboard"], r"got 'tensorboard': backends\[0\]"),
        ("memory", "as a list, got 'memory'"),
        (iter([MemoryBackend()]), "as a list, got <list_iterator"),
    ):
        with pytest.raises(ConfigError, match=message):
            play(run, wrong)  # pyright: ignore[reportArgumentType]


def test_keys_left_out_before_are_withheld_not_skipped(tmp_path: Path) -> None:
    """After a replay of some keys the others are too late for an append-only target: that is counted."""
    run = build(tmp_path / "run", (range(5), lambda step: {"v": step, "b": -step}))
    mine = MemoryBackend(strict=True)
    assert [5] == [report.sent for report in play(run, [mine], keys="v")]
    (report,) = play(run, [mine])
    assert (0, 0, 5, False) == (report.sent, report.skipped, report.withheld, report.complete)
    (report,) = play(run, [mine], keys="v")
    assert (0, 5) == (report.sent, report.skipped)


@pytest.mark.parametrize("rules", [{"^imagenet/": "eval/imagenet/"}, [("^imagenet/", "eval/imagenet/")]])
def test_metrics_can_get_other_names_on_their_way(tmp_path: Path, rules: Any) -> None:
    """A rule adds a prefix, for every target; the log keeps its names (report f6)."""
    run = build(tmp_path / "run", (range(2), lambda step: {"imagenet/top1": step, "loss": -step}))
    mine = MemoryBackend()
    play(run, [mine, open_backend("tensorboard")], rename=rules)
    assert [{"eval/imagenet/top1": step, "loss": -step} for step in range(2)] == [r for _, r, _ in mine.rows]
    assert mine.rows == tensorboard_rows(run / "tensorboard")


@pytest.mark.parametrize(
    ("rules", "error", "said"),
    [
        ({"[ab]": "c"}, QueryError, "expected a name of its own for every metric, got 'c' for 'a' and 'b'"),
        ({"^a$": "b"}, QueryError, "got 'b' for 'a' and 'b'"),
        ({"^a$": ""}, QueryError, "expected a name for every metric, got none for 'a'"),
        ({"(": "b"}, ConfigError, r"expected rules as pairs of a regular expression .*got \('\('"),
        ({"a": r"\2"}, ConfigError, "invalid group reference"),
        (["ab", 3], ConfigError, "got 3"),
    ],
)
def test_rules_that_lose_a_name_are_refused(
    tmp_path: Path, rules: Any, error: type[Exception], said: str
) -> None:
    """Two metrics under one name, no name, no rule: an error before anything is told (report f6)."""
    run = build(tmp_path / "run", (range(1), lambda _: {"a": 1.0, "b": 2.0}))
    mine = MemoryBackend()
    with pytest.raises(error, match=said):
        play(run, [mine], rename=rules)
    assert None is mine.run


def test_refused_steps_are_named(tmp_path: Path) -> None:
    """One row above the target's limit is left out and named, all others arrive (report b13)."""
    large = {f"k{i}": 1.0 for i in range(100_000)}
    run = build(tmp_path / "run", (range(10), lambda step: large if step == 5 else value(step)))
    mine = MemoryBackend(limit=1_000_000)
    (report,) = play(run, [mine])
    assert (9, 1, "5", False) == (report.sent, report.refused, report.refused_steps, report.complete)
    assert [step for step in range(10) if step != 5] == [step for step, _, _ in mine.rows]


@pytest.mark.parametrize("live", [True, False])
def test_what_was_refused_stays_refused(tmp_path: Path, *, live: bool) -> None:
    """To a later replay a refused step is neither skipped nor late; the newest is tried again (b13)."""
    large = {f"k{i}": 1.0 for i in range(100)}
    rows: Rows = []
    target = Lasting(rows, limit=1000)
    with logger(tmp_path, run=tmp_path / "run", backends=[target] if live else []) as log:
        for step in range(6):
            log.commit(0, step, step, large if step in (2, 5) else value(step))
    if live:
        assert (4, 2, "2, 5") == (
            log.status()[0].sent,
            log.status()[0].withheld,
            log.status()[0].withheld_steps,
        )
    for sent in (0 if live else 4, 0):
        (report,) = play(tmp_path / "run", [Lasting(rows, limit=1000)])
        assert (sent, 4 - sent, 2, "2, 5", 0) == (
            report.sent,
            report.skipped,
            report.refused,
            report.refused_steps,
            report.withheld,
        )
    (report,) = play(tmp_path / "run", [Lasting(rows)])  # now it takes more
    assert (1, 4, "2", False) == (report.sent, report.skipped, report.refused_steps, report.complete)
    (report,) = play(tmp_path / "run", [Lasting(rows)])
    assert (0, 5, "2") == (report.sent, report.skipped, report.refused_steps)


def test_what_was_never_committed_is_counted_once_the_run_has_ended(tmp_path: Path) -> None:
    """A run that goes on may still commit what it recorded; one that ended without lacks all of it."""
    eventlog.start(tmp_path / "run", role="actor", rank=0, world_size=1)
    stats_tracker.scalar(x=1.0)
    stats_tracker.export_all()
    for lost in (0, 1):
        (report,) = play(tmp_path / "run", [MemoryBackend()])
        assert (0, lost, not lost) == (report.sent, report.uncommitted, report.complete)
        eventlog.stop()
