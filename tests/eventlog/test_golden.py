"""Runs of format v1 as an earlier version wrote them, one per feature, read to the same tables for ever."""

import json
from pathlib import Path

import pytest

from tests.golden.make import FEATURES, GOLDEN, told

RUNS = sorted(path.parent for path in GOLDEN.glob("*/expected.json"))


def test_every_feature_has_its_golden_run():
    """No feature's run is missing, and none is without a name."""
    assert {feature.__name__ for feature in FEATURES} == {path.name for path in RUNS}


@pytest.mark.parametrize("golden", RUNS, ids=lambda path: path.name)
def test_a_golden_run_reads_to_the_same_tables(golden: Path):
    """Records, payload, commits, sessions, metrics and bindings are what they were when it was written."""
    expected = json.loads((golden / "expected.json").read_text())
    found = told(golden / "run")
    assert sorted(expected) == sorted(found)
    for name, value in expected.items():  # as text: NaN is NaN
        assert json.dumps(value, sort_keys=True) == json.dumps(found[name], sort_keys=True), name


def test_golden_runs_stay_small():
    """They are in every checkout: together less than a megabyte."""
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 1 << 20
