"""SIGKILL of a rank at a random moment: what was committed is read back with its values."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eventlog import RunReader

SCRIPT = Path(__file__).with_name("recording_rank.py")
ROOT = Path(__file__).parents[2]
KEY = "ppo_actor/advantages"

_spec = importlib.util.spec_from_file_location("recording_rank", SCRIPT)
recording_rank = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(recording_rank)


def start_rank(folder: Path, rank: int) -> subprocess.Popen:
    with (folder / f"said-{rank}").open("w") as said:
        return subprocess.Popen(
            [sys.executable, SCRIPT, folder / "run", folder / "store", str(rank)],
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )


def acknowledged(folder: Path, rank: int) -> set[int]:
    """Return the steps whose commit returned; a line cut short by the kill is none."""
    lines = (folder / f"said-{rank}").read_text().split("\n")[:-1]
    return {int(line) for line in lines if line.isdigit()}


def record_until_killed(folder: Path, rng: random.Random) -> None:
    """Let two ranks record and SIGKILL one of them at a random moment; the other one goes after it."""
    ranks = [start_rank(folder, rank) for rank in range(recording_rank.RANKS)]
    try:
        while len(acknowledged(folder, 0)) < 3:
            assert all(process.poll() is None for process in ranks), (folder / "said-0").read_text()
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 1))
        rng.choice(ranks).kill()
        time.sleep(rng.uniform(0, 0.01))
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def rows_of(frames: Iterator[tuple], rank: int) -> list[dict]:
    return [row for producer, _, batch in frames if producer.rank == rank for row in batch.to_pylist()]


def committed_windows(reader: RunReader, rank: int) -> dict[int, range]:
    """Return the windows of each step that the rank committed."""
    rows = [row for row in rows_of(reader.commits(), rank) if row["key"] is None]
    return {row["global_step"]: range(row["window_first"], row["window_last"] + 1) for row in rows}


def recorded(reader: RunReader, rank: int) -> dict[int, dict]:
    """Return the rank's one record of KEY in each window."""
    return {row["window"]: row for row in rows_of(reader.records(), rank) if row["key"] == KEY}


def payload(reader: RunReader, rank: int) -> dict[int, np.ndarray]:
    """Return the values of each record."""
    rows = [row for row in rows_of(reader.payload(), rank) if row["values32"] is not None]
    return {row["record_id"]: np.array(row["values32"], np.float32) for row in rows}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_what_was_committed_survives_a_sigkill_of_any_rank_at_any_moment(tmp_path, seed):
    """Every committed window is read with its values; the leader misses none, the other at most one."""
    record_until_killed(tmp_path, random.Random(seed))
    reader = RunReader(tmp_path / "run")
    leader = committed_windows(reader, 0)
    steps = range(len(leader))
    assert list(steps) == list(leader)
    for rank in range(recording_rank.RANKS):
        windows, records, values = (read(reader, rank) for read in (committed_windows, recorded, payload))
        [state] = [state for state in reader.sessions() if state.producer.rank == rank]
        assert acknowledged(tmp_path, rank) <= windows.keys()
        assert all([step] == list(windows[step]) for step in windows)  # one export a step
        assert set(steps if rank == 0 else steps[:-1]) | windows.keys() <= set(state.complete)
        for step in state.complete:
            check(records[step], expected := selected(rank, step))
            if step in state.payload:
                assert np.array_equal(expected, values[records[step]["record_id"]])
    assert [] == reader.problems


def selected(rank: int, step: int) -> np.ndarray:
    values, mask = recording_rank.values_of(rank, step)
    return values[mask]


def check(record: dict, expected: np.ndarray) -> None:
    """Compare the moments of a record with the values that were recorded."""
    exact = {"count": expected.size, "nan": 0, "min": expected.min(), "max": expected.max()}
    assert exact == {name: record[name] for name in exact}
    assert expected.sum(dtype=np.float64) == pytest.approx(record["sum"], rel=1e-12, abs=1e-9)
