"""`compare-evals`, and the alerts of `info`."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import eventlog
from aggregator import stats_tracker
from aggregator.evaluation import Evaluator, EvaluatorConfig, Monitor, evaluate_distributed
from tests.cli.conftest import Ask
from tests.terminal import on_terminal

KEY_TO_CHANGE = ("key", "sample_id", "change")


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


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two evaluators on schedules of their own: of one a sample changes, of the other none."""
    stats_tracker.export_all()
    path = tmp_path_factory.mktemp("named") / "run"
    eventlog.start(path, role="actor", rank=0, world_size=1)
    eventlog.current().claim_attempt()
    spec = SimpleNamespace(steps_per_epoch=1000)
    frequencies = {"math": 2, "code": 3}
    evaluators = {n: Evaluator(EvaluatorConfig(freq_steps=f), spec, name=n) for n, f in frequencies.items()}
    for step in range(6):
        for name, evaluator in evaluators.items():
            scores = {0: 1.0, 1: float(step == 5 and name == "math")}
            samples = [{"id": each, "score": score} for each, score in scores.items()]
            evaluator.evaluate(
                lambda held=samples: evaluate_distributed(lambda sample: sample["score"], held), 0, step, step
            )
        eventlog.current().commit(0, step, step, [stats_tracker.export_all(step=step)])
    eventlog.stop()
    return path


def test_the_last_evaluations_are_those_of_each_key(ask: Ask, named: Path) -> None:
    """Evaluators that are due at different steps are compared each with its own last one (report h19)."""
    answer = ask("compare-evals", named, "--json")
    assert [("eval-rollout/math/score", "1", 1.0)] == [
        tuple(map(row.get, KEY_TO_CHANGE)) for row in answer.json
    ]
    assert f"1 of 4 results differ: {named} at steps 2, 3 and {named} at step 5\n" == answer.err
    code = ask("compare-evals", named, "--key", "*/code/*")
    assert f"0 of 2 results differ: {named} at step 2 and {named} at step 5\n" == code.err


def test_what_only_one_side_was_evaluated_under_has_not_changed(
    ask: Ask, named: Path, runs: tuple[Path, Path]
) -> None:
    """Such keys are named, and not listed sample by sample; without a common key there is no answer."""
    answer = ask("compare-evals", named, "--step", 1, "--step", 5, "--json")
    assert ["eval-rollout/math/score"] == [row["key"] for row in answer.json]
    told = "not compared, evaluated on one side only: eval-rollout/code/score"
    assert told == answer.err.splitlines()[-1]
    nothing = ask("compare-evals", named, runs[0])
    assert (1, True) == (nothing.code, "expected evaluations under the same keys, got" in nothing.err)


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


def test_looking_for_alerts_shows_a_bar_on_a_terminal(runs: tuple[Path, Path]) -> None:
    """When stderr is a terminal a bar shows how far the rules are; stdout holds nothing but the data."""
    command = [
        sys.executable,
        "-c",
        "from cli.app import main; main()",
        "info",
        str(runs[0]),
        "--alerts",
        "--json",
    ]
    out, shown = on_terminal(command, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"})
    assert "not_finite" == json.loads(out)["alerts"][0]["rule"]
    assert b"alerts" in shown
    assert b"100%" in shown
