"""`compare-evals`, and the alerts of `info`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

import eventlog
from aggregator import stats_tracker
from aggregator.evaluation import Monitor, evaluate_distributed
from tests.cli.conftest import Ask


def record(path: Path, evaluations: dict[int, dict[str, float]]) -> Path:
    """Record a run that evaluates at some steps: step → sample → whether it was right."""
    eventlog.start(path, role="actor", rank=0, world_size=1)
    eventlog.current().claim_attempt()
    for step, right in evaluations.items():
        samples = [{"id": each, "right": value} for each, value in right.items()]
        evaluate_distributed(lambda sample: {"right": sample["right"], "size": 2}, samples)
        stats = stats_tracker.export_all(step=step)
        stats["grad_norm"] = math.nan if step == 20 else 1.0
        Monitor().check(step, stats)
        eventlog.current().commit(0, step, step, [dict(stats)])
    eventlog.stop()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of fifty samples: the first evaluates twice, three change; in the second one more is new."""
    stats_tracker.export_all()
    folder = tmp_path_factory.mktemp("evaluations")
    first = {f"q{i:02}": float(i % 2) for i in range(50)}
    second = {**first, "q03": 0.0, "q04": 1.0, "q31": 0.0}
    third = {**first, "new": 1.0}
    return record(folder / "a", {10: first, 20: second}), record(folder / "b", {30: third})


def test_two_steps_of_a_run_differ_in_three_samples(ask: Ask, runs: tuple[Path, Path]) -> None:
    """Exactly the samples whose result changed are listed, by default between the last two (report h19)."""
    answer = ask("compare-evals", runs[0], "--json")
    rows = [(row["key"], row["sample_id"], row["change"]) for row in answer.json]
    assert [
        ("eval-rollout/right", each, by) for each, by in (("q03", -1.0), ("q04", 1.0), ("q31", -1.0))
    ] == rows
    assert f"3 of 100 results differ: {runs[0]} at step 10 and {runs[0]} at step 20\n" == answer.err
    assert answer.json == ask("compare-evals", runs[0], "--step", 10, "--step", 20, "--json").json
    assert 0 == answer.code


def test_two_runs_differ_in_what_one_lacks_too(ask: Ask, runs: tuple[Path, Path]) -> None:
    """Runs are compared at their last evaluations, or at steps of each; a missing result is null."""
    answer = ask("compare-evals", *runs, "--step", 10, "--step", 30, "--json")
    new = {"sample_id": "new", "before": None, "change": None}
    assert [
        {"key": "eval-rollout/right", "after": 1.0, **new},
        {"key": "eval-rollout/size", "after": 2.0, **new},
    ] == answer.json
    last = ask("compare-evals", *runs, "--key", "*/right", "--json").json
    assert ["new", "q03", "q04", "q31"] == [row["sample_id"] for row in last]
    assert [] == ask("compare-evals", *runs, "--step", 10, "--step", 30, "--key", "*/size", "--json").json[1:]


def test_damaged_runs_are_compared_all_the_same(ask: Ask, runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The differences are printed first; the damage of either run is told and makes the exit code 3."""
    copies = [tmp_path / run.name for run in runs]
    for run, copy in zip(runs, copies, strict=True):
        shutil.copytree(run, copy)
        with (copy / "run.json").open("a") as file:
            file.write("x")
    answer = ask("compare-evals", *copies, "--json")
    assert (3, ask("compare-evals", *runs, "--json").json) == (answer.code, answer.json)
    last, *damage = answer.err.splitlines()
    assert " results differ: " in last
    assert [str(copy / "run.json") for copy in copies] == sorted(line.split(": ")[-1] for line in damage)


def test_small_differences_may_be_none(ask: Ask, runs: tuple[Path, Path]) -> None:
    """Within the tolerance nothing is listed, and the table has its head all the same."""
    answer = ask("compare-evals", runs[0], "--tolerance", 1)
    assert ["key", "sample_id", "before", "after", "change"] == answer.out.split()
    assert answer.err.startswith("0 of 100 results differ")


def test_wrong_questions_get_right_errors(ask: Ask, runs: tuple[Path, Path], root: Path) -> None:
    """One step, three steps, a step without an evaluation, a run without samples: each is said."""
    assert "expected two steps of one run, got one" in ask("compare-evals", runs[0], "--step", 10).err
    three = ask("compare-evals", runs[0], *["--step", 10] * 3)
    assert (2, True) == (three.code, "expected --step at most twice, got 3" in three.err)
    missing = ask("compare-evals", *runs, "--step", 11)
    assert (1, True) == (missing.code, "expected results of samples at step 11, got none" in missing.err)
    few = ask("compare-evals", runs[1])
    assert (1, True) == (few.code, "expected 2 steps with evaluated samples, got 1" in few.err)
    assert 1 == ask("compare-evals", root / "a").code


def test_info_shows_alerts_when_asked(ask: Ask, runs: tuple[Path, Path]) -> None:
    """`info --alerts` lists what the run noted, and what the rules find; without it there is no such part."""
    told = ask("info", runs[0], "--alerts", "--json").json["alerts"]
    assert [("not_finite", "grad_norm", 20, "NaN")] == [
        (each["rule"], each["key"], each["step"], each["value"]) for each in told
    ]
    assert "grad_norm is nan at step 20" in ask("info", runs[0], "--alerts").out
    assert "alerts" not in ask("info", runs[0], "--json").json
