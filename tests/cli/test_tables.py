"""The command `compact`, and questions that other processes read the values for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import RunBuilder
from tests.storage import flip

ROOT = Path(__file__).parents[2]


def areal_metrics(*arguments):
    code = "from cli.app import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def record(path):
    with RunBuilder(path) as run:
        leader = run.producer()
        for step in range(3):
            leader.tracker().scalar({"loss": float(step)})
            leader.tracker().scalar({"loss": step + 0.5})
            leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
    return path


@pytest.mark.long
def test_compacting_a_run(tmp_path):
    """It says what it wrote; done again it has nothing to do; what was damaged it writes anew."""
    path = record(tmp_path / "run")
    done = areal_metrics("compact", path, "--workers", 1, "--json")
    assert (0, "") == (done.returncode, done.stderr)
    told = json.loads(done.stdout)
    assert (1, 1, 0, []) == (told["parts"], told["written"], told["dropped"], told["problems"])
    assert told["bytes"] == sum(file.stat().st_size for file in path.glob("tables/*.parquet"))
    assert 0 == json.loads(areal_metrics("compact", path, "--json").stdout)["written"]
    (part,) = path.glob("tables/*.json")
    flip(part, 20)
    asked = areal_metrics("keys", path)
    assert (3, True) == (asked.returncode, "is not used" in asked.stderr)
    assert 0 == areal_metrics("compact", path).returncode
    assert 0 == areal_metrics("keys", path).returncode


@pytest.mark.long
def test_dropping_sources(tmp_path):
    """The payload streams go, the answers stay, and nothing counts as damaged."""
    path = record(tmp_path / "run")
    question = ("reduce", path, "loss", "--stat", "std", "--json")
    before = areal_metrics(*question)
    told = json.loads(areal_metrics("compact", path, "--drop-sources", "--json").stdout)
    assert told["dropped"] > 0
    assert [] == list(path.glob("events/*/*.payload.*.arrows"))
    assert before.stdout == areal_metrics(*question).stdout
    assert 0 == areal_metrics("verify", path).returncode


@pytest.mark.long
def test_engines(tmp_path):
    """Statistics, percentiles and histograms are the same from an engine; a wrong one is called wrongly."""
    path = record(tmp_path / "run")
    for question in (
        ["reduce", path, "loss", "--stat", "std"],
        ["percentiles", path, "loss"],
        ["histogram", path, "loss", "--bins", 4],
    ):
        one = areal_metrics(*question, "--json")
        other = areal_metrics(*question, "--json", "--engine", "local", "--workers", 1)
        assert (0, one.stdout) == (other.returncode, other.stdout)
    assert 2 == areal_metrics("reduce", path, "loss", "--engine", "dask").returncode
