"""A value that is given again: the newest stands at every target, however often the run is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aggregator import open_run
from eventlog import RunDir
from replay import Capabilities, MemoryBackend, Order, follow, open_backend, play
from replay.backends.base import RunInfo
from tests.replay.committed import build
from tests.replay.readers import Rows, trackio_rows
from tests.runs import EPOCH, RunBuilder

if TYPE_CHECKING:
    from pathlib import Path

FAST: dict[str, Any] = {"poll": 0.02, "wait": 0.05, "give_up": 60.0}
LATE = {f"loss/{step}": (step, {"loss": float(step)}) for step in range(8)} | {
    f"eval/{number}": (2, {"eval": float(number)}) for number in range(3)
}


class Lasting(MemoryBackend):
    """A target that takes every step and outlives the process: the same rows whoever opens it."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.capabilities = Capabilities()
        self.target, self.rows = "t", rows


def evaluated(path: Path, *attempts: list[str]) -> Path:
    """Build a run of attempts, each a list of what it commits, which resumes at its first loss."""
    clock = 0
    with RunBuilder(path) as run:
        for number, commits in enumerate(attempts):
            leader = run.producer(started=clock, attempt=number)
            resumed = LATE[commits[0]][0] if number else None
            config = {"experiment_name": "exp", "trial_name": "t0"}
            run.attempt(number, leader=leader, started=clock, resume_step=resumed, config=config)
            for name in commits:
                clock += 10
                step, metrics = LATE[name]
                if "loss" in metrics:
                    leader.tracker().scalar({"window": step})
                    run.export(leader, time=clock - 1)
                leader.commit(step, metrics, time=clock, leader=True)
    found = RunDir.open(path)
    found.end_attempt(found.attempts()[-1].number, "finished")
    return path


def losses(first: int, last: int) -> list[str]:
    return [f"loss/{step}" for step in range(first, last + 1)]


def committed(run: Path) -> dict[tuple[int, str], float]:
    """Return what the log says, by step and key."""
    with open_run(run) as session:
        return {(row["step"], row["key"]): row["value"] for row in session.metrics().to_pylist()}


def held(rows: Rows) -> dict[tuple[int, str], float]:
    """Return what a target holds: of what it was told twice the newest."""
    return {(step, key): value for step, row, _ in rows for key, value in row.items()}


EVALUATIONS = {
    "by a later attempt": ([*losses(0, 5), "eval/1"], ["loss/6", "eval/2"]),
    "by two attempts": (losses(0, 5), ["loss/6", "eval/1"], ["loss/7", "eval/2"]),
    "by one attempt": ([*losses(0, 5), "eval/1", "loss/6", "eval/2"],),
}


@pytest.mark.parametrize("attempts", EVALUATIONS.values(), ids=EVALUATIONS)
@pytest.mark.parametrize("first", [follow, play])
def test_a_repeated_evaluation_stands_however_often_the_run_is_followed(
    tmp_path: Path, first: Any, attempts: tuple[list[str], ...]
) -> None:
    """Once all is told nothing is sent, and the value that was replaced does not come back."""
    run = evaluated(tmp_path / "run", *attempts)
    rows: Rows = []
    expected = committed(run)
    assert 2.0 == expected[2, "eval"]
    for number, tell in enumerate((first, follow, follow, play, follow)):
        backends = [open_backend("trackio", path=tmp_path / "trackio"), Lasting(rows)]
        for report in tell(run, backends, **(FAST if tell is follow else {})):
            assert (True, number > 0) == (report.complete, not report.sent), report
        (file,) = (tmp_path / "trackio").glob("*.db")
        for told in (trackio_rows(file), rows):
            assert expected == held(told)


def test_replay_repairs_a_trackio_row_of_which_a_value_was_taken(tmp_path: Path) -> None:
    """What lies there is known by its content: an old value told live once more does not stay."""
    run = evaluated(tmp_path / "run", [*losses(0, 3), "eval/1", "eval/2"])
    backend = open_backend("trackio", path=tmp_path)
    play(run, [backend])
    backend.open(RunInfo(RunDir.open(run).id, "exp", "t0", run))
    backend.log(2, {"eval": 1.0}, (EPOCH + 50_000_000) / 1e6)
    backend.close()
    assert committed(run) != held(trackio_rows(tmp_path / "exp.db"))
    (report,) = play(run, [backend])
    assert report.complete
    assert committed(run) == held(trackio_rows(tmp_path / "exp.db"))


# -- taken back, and replaced by nothing -----------------------------------------------------------


class Told(Lasting):
    """As Lasting, with an order."""

    def __init__(self, rows: Rows, order: Order) -> None:
        super().__init__(rows)
        self.capabilities, self.strict = Capabilities(order=order), order is Order.STRICT


def short(path: Path, first: int) -> Path:
    """Build a run of ten steps that is then resumed at a step and ends behind the next."""
    both = {"loss": 1.0, "once": 1.0}
    run = build(path, (range(10), lambda _: both), (range(first, first + 2), lambda _: {"loss": 2.0}))
    RunDir.open(run).end_attempt(1, "finished")
    return run


@pytest.mark.parametrize("tell", [play, follow])
@pytest.mark.parametrize(("order", "sent"), [(Order.ANY, 2), (Order.STRICT, 0)])
def test_what_was_taken_back_after_it_was_told_is_withheld(
    tmp_path: Path, tell: Any, order: Order, sent: int
) -> None:
    """Nothing replaces steps 7 to 9, nor a key of 5 and 6: the target shows them still, each time."""
    rows: Rows = []
    run = build(tmp_path / "before", (range(10), lambda _: {"loss": 1.0, "once": 1.0}))
    play(run, [Told(rows, order)], cursors=tmp_path / "cursors")
    for number in range(2):
        if not number:
            run = short(tmp_path / "run", 5)
        options = FAST if tell is follow else {}
        (report,) = tell(run, [Told(rows, order)], cursors=tmp_path / "cursors", **options)
        assert ("5-9", False) == (report.withheld_steps, report.complete)
        assert (0 if number else sent) == report.sent
    (report,) = play(run, [Told([], order)], cursors=tmp_path / "others")
    assert (7, "", True) == (report.sent, report.withheld_steps, report.complete)


def test_what_was_taken_back_before_it_was_told_is_no_loss(tmp_path: Path) -> None:
    """A target that was told the run as it stands, or of some keys of it, shows no more."""
    run, rows = short(tmp_path / "run", 5), []
    for options, sent in (({"keys": "loss"}, 7), ({}, 5), ({}, 0)):
        (report,) = play(run, [Told(rows, Order.ANY)], **options)
        assert (sent, True) == (report.sent, report.complete), report


def test_what_an_attempt_left_behind_is_told_where_all_are(tmp_path: Path) -> None:
    """With attempts "all" the steps that nothing replaced are asked for: they are skipped, not withheld."""
    rows: Rows = []
    run = short(tmp_path / "run", 5)
    for sent in (10, 0):
        (report,) = play(run, [Told(rows, Order.ANY)], attempts="all")
        assert (sent, True) == (report.sent, report.complete)
