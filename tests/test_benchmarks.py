"""The benchmark of questions runs at any size, says what it should, and draws its picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_questions_at_a_tiny_size(tmp_path: Path) -> None:
    """Every case prints its lines; the cost curve is a PNG; the engines agree."""
    picture = tmp_path / "cost.png"
    size = ["--steps", "8", "--ranks", "4", "--keys", "4", "--values", "20", "--plot", str(picture)]
    cases = ["tables", "metrics", "percentiles", "memory", "curve"]
    command = [sys.executable, "benchmarks/query.py", *cases, *size, "--dir", str(tmp_path)]
    lines = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    told = [json.loads(line) for line in lines]
    assert 3 == sum(line["name"].startswith("cost curve") and "slope" in line["name"] for line in told)
    assert 12 == sum(line["name"].startswith("cost curve") for line in told)
    for name in ("compaction", "open: tables", "standard metrics", "p50 and p99", "1920 values under"):
        assert [line for line in told if line["name"].startswith(name)]
    assert b"\x89PNG" == picture.read_bytes()[:4]
    assert [] == list(tmp_path.glob("query-*"))
