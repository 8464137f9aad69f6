"""The evaluation example: it runs, and its run says what the example says it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aggregator import open_run
from aggregator.evaluation import alerts_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/evaluation"


def ran(script: str, *arguments: str) -> str:
    """Run a script of the example as a user does; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / script), *arguments],
        capture_output=True, text=True, check=False, env=environment, timeout=100,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_training_evaluates_every_sample_once_and_tells_of_trouble(tmp_path):
    """Four evaluations and one before training, 150 samples each, whatever the number of ranks."""
    values = {}
    for ranks in (1, 2):
        ran("train.py", "--out", str(tmp_path / str(ranks)), "--ranks", str(ranks))
        with open_run(tmp_path / str(ranks)) as run:
            rows = run.sql(
                "select step, sample_id, value from samples where key = 'eval-rollout/accuracy' order by all"
            )
            values[ranks] = rows.to_pylist()
            steps = run.sql(
                "select step, value from evaluations where key = 'eval-rollout/n_samples' order by step"
            )
            tags = run.sql("select tags from commits where tags like '%before%' and key is null").to_pylist()
            recomputed = run.metrics("eval-rollout/*", source="recomputed").to_pylist()
            told = [(alert.rule, alert.step) for alert in alerts_of(run)]
        assert [(step, 150) for step in (0, 9, 19, 29, 39)] == [
            tuple(row.values()) for row in steps.to_pylist()
        ]
        assert ranks == len(tags)
        assert not any(row["differs"] or row["incomplete"] for row in recomputed)
        assert ("exploding_gradient", 30) in told
    assert values[1] == values[2]
    assert 5 * 150 == len(values[1])


@pytest.mark.long
def test_the_pieces_come_to_what_they_say():
    """Every piece of the example works by itself."""
    told = ran("pieces.py")
    for line in (
        "full 120, sampled 12, incremental 20",
        "100 results; batches of 8 fit",
        "reordered: False",
        "refresh: drift of prompt/length",
        "0 samples changed",
    ):
        assert line in told


def test_the_table_names_what_there_is():
    """Every name in the example's README is one that can be imported, in a file that uses it."""
    import aggregator.evaluation as offered

    rows = [
        line.split("|")
        for line in (EXAMPLE / "README.md").read_text("utf-8").splitlines()
        if line.startswith("| ")
    ]
    for _, _, used, shown, _ in rows[1:]:
        text = "".join(
            (EXAMPLE / name).read_text("utf-8") for name in shown.strip().replace("`", "").split(", ")
        )
        for name in used.replace("`", "").split(","):
            if name.strip().isidentifier():
                assert name.strip() in offered.__all__
                assert name.strip() in text or name.strip() == "AdaptiveEvaluator"
