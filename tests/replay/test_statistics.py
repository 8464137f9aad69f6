"""Statistics and histograms of recorded values, told beside what was committed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eventlog.errors import QueryError
from replay import MemoryBackend, open_backend, play
from replay.backends.base import tell
from replay.statistics import MOST_BINS, joined
from replay.steps import Histogram, Row
from tests.replay.backend_contract import run_info
from tests.replay.readers import OWN, tensorboard_scalars, wandb_files, wandb_history
from tests.runs import RunBuilder

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 500


def drawn(step: int, attempt: int) -> np.ndarray:
    """Return the values of a step in an attempt."""
    return np.random.default_rng([step, attempt]).normal(step, 1 + attempt, COUNT).astype(np.float32)


def recorded(path: Path, *, payload: bool = True) -> Path:
    """Build a run of two attempts, the second from step 2 on, with a stat and a scalar."""
    with RunBuilder(path) as run:
        for attempt, steps in enumerate((range(4), range(2, 5))):
            leader = run.producer(attempt=attempt, started=100 * attempt, payload=payload)
            resumed = 2 if attempt else None
            run.attempt(attempt, leader=leader, started=100 * attempt, resume_step=resumed)
            for step in steps:
                tracker = leader.tracker()
                tracker.denominator({"n": torch.ones(COUNT, dtype=torch.bool)})
                tracker.stat("n", {"a/v": torch.from_numpy(drawn(step, attempt))})
                for reward in (step, step + 1.0):
                    tracker.scalar({"reward": reward})
                stats = run.export(leader, time=100 * attempt + step)
                leader.commit(step, stats, time=100 * attempt + step, leader=True)
    return path


def owner(step: int) -> int:
    return 0 if step < 2 else 1


def test_percentiles_and_deviations_are_told_beside_what_was_committed(tmp_path: Path) -> None:
    """At every step the numbers of the values that count: of the attempt that owns it, as numpy says."""
    run = recorded(tmp_path / "run")
    plain, mine = MemoryBackend(strict=True), MemoryBackend(strict=True)
    play(run, [plain])
    (report,) = play(run, [mine], stats=["p50", "p99", "std", "avg"])
    assert (5, 2, 0, True) == (report.sent, report.superseded, report.partial, report.complete)
    for (step, row, time), (plain_step, committed, plain_time) in zip(mine.rows, plain.rows, strict=True):
        assert (plain_step, plain_time) == (step, time)
        assert committed == {key: row[key] for key in committed}  # a/v/avg stays as it was committed
        values = drawn(step, owner(step)).astype(np.float64)
        extra = {key: row[key] for key in row.keys() - committed.keys()}
        assert {
            "a/v/p50": pytest.approx(np.quantile(values, 0.5)),
            "a/v/p99": pytest.approx(np.quantile(values, 0.99)),
            "a/v/std": pytest.approx(values.std(ddof=1)),
            "reward/avg": step + 0.5,
            "reward/p50": step + 0.5,
            "reward/p99": pytest.approx(step + 0.99),
            "reward/std": pytest.approx(0.5**0.5),
        } == extra


def test_superseded_steps_have_their_own_statistics(tmp_path: Path) -> None:
    """With all attempts told, each step has those of the newest attempt that made it."""
    with RunBuilder(tmp_path / "run") as run:
        for attempt, steps in enumerate((range(3), range(1, 2))):
            leader = run.producer(attempt=attempt, started=10 * attempt)
            run.attempt(attempt, leader=leader, started=10 * attempt, resume_step=1 if attempt else None)
            for step in steps:
                for value in (step, step + 2.0 + attempt):
                    leader.tracker().scalar({"v": value})
                run.export(leader, time=10 * attempt + step)
                leader.commit(step, {"v": 0.0}, time=10 * attempt + step, leader=True)
    mine = MemoryBackend()
    play(tmp_path / "run", [mine], stats="max", attempts="all")
    assert [2.0, 4.0, 4.0] == [row["v/max"] for _, row, _ in mine.rows]


def test_what_is_selected_decides_of_what_there_are_statistics(tmp_path: Path) -> None:
    """Keys mean recorded keys by their own name or by that of a metric; rules rename the statistics too."""
    run = recorded(tmp_path / "run")
    for keys, names in (
        ("a/*", {"a/v/avg", "a/v/min", "a/v/max", "a/v/p99"}),
        ("a/v/avg", {"a/v/avg", "a/v/p99"}),
        ("reward", {"reward", "reward/p99"}),
    ):
        mine = MemoryBackend()
        play(run, [mine], keys=keys, stats=["p99"])
        assert [names] * 5 == [set(row) for _, row, _ in mine.rows]
    mine = MemoryBackend()
    play(run, [mine], keys="a/*", stats=["p99"], rename={"^a/": "b/"})
    assert {"b/v/avg", "b/v/min", "b/v/max", "b/v/p99"} == set(mine.rows[0][1])
    with pytest.raises(QueryError, match=r"expected statistics of .*got 'mode'"):
        play(run, [mine], stats=["mode"])
    with pytest.raises(QueryError, match="expected recorded values for the statistics, got none"):
        play(run, [mine], keys="n", stats=["p99"])


def test_without_a_payload_there_are_no_percentiles(tmp_path: Path) -> None:
    """Nothing is told before that is said."""
    run = recorded(tmp_path / "run", payload=False)
    mine = MemoryBackend()
    with pytest.raises(QueryError, match="the payload was off or pruned"):
        play(run, [mine], stats=["p99"])
    assert None is mine.run


def check(histogram: Any, step: int) -> None:
    """Compare a histogram (edges, counts) with the values."""
    edges, counts = np.array(histogram[0]), list(histogram[1])
    values = drawn(step, owner(step)).astype(np.float64)
    assert COUNT == sum(counts)
    assert len(edges) == len(counts) + 1 <= MOST_BINS + 1
    assert edges[0] <= values.min() < values.max() <= edges[-1]
    # A value on an edge may be counted on either side.
    assert np.abs(np.histogram(values, edges)[0] - counts).sum() <= 2


def test_histograms_reach_those_who_show_them(tmp_path: Path) -> None:
    """TensorBoard, wandb and Trackio hold each step's histogram; again, nothing is sent."""
    run = recorded(tmp_path / "run")
    for sent in (5, 0):
        backends = [
            open_backend("tensorboard"),
            open_backend("wandb", mode="offline"),
            open_backend("trackio", path=tmp_path / "trackio"),
        ]
        for report in play(run, backends, stats=["histogram"], keys="a/*"):
            assert (sent, 0, True) == (report.sent, report.untold, report.complete)
    for row in wandb_history(wandb_files(run / "wandb")[0]):
        told = row["a/v/histogram"]
        assert "histogram" == told["_type"]
        check((told["bins"], told["values"]), row["_step"])
    for step, row in trackio_metrics(tmp_path / "trackio"):
        told = row["a/v/histogram"]
        assert "trackio.histogram" == told["_type"]
        check((told["bins"], told["values"]), step)
    for step, (edges, counts) in tensorboard_histograms(run / "tensorboard")["a/v/histogram"]:
        check((edges, counts), step)
    assert 5 == len(tensorboard_scalars(run / "tensorboard")["a/v/avg"])


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
@pytest.mark.parametrize("then", ["next", "again", "reopened"])
def test_the_histograms_of_a_row_that_failed_go_with_no_other(tmp_path: Path, name: str, then: str) -> None:
    """They are given up with their row: the next step has none of them; the same told again has its own."""
    offline: dict[str, Any] = {"mode": "offline"} if name == "wandb" else {}
    backend = open_backend(name, path=tmp_path / "told", **offline)
    drawn = {"v/histogram": Histogram((0.0, 1.0, 2.0), (3, 4))}
    nameless: Any = {7: 1.0}
    about = run_info(tmp_path, started=1000.0)
    backend.open(about)
    with pytest.raises(TypeError):
        tell(backend, Row(0, nameless, 1000.0, histograms=drawn))
    if then == "reopened":
        drawing: Any = backend
        drawing.histogram(0, "v/histogram", drawn["v/histogram"], 1000.0)
        backend.close()
        backend.open(about)
    tell(backend, Row(1, {"a": 1.0}, 1010.0, histograms=drawn if then == "again" else {}))
    backend.close()
    expected = {1: {"a", "v/histogram"} if then == "again" else {"a"}}
    assert expected == shown(name, tmp_path / "told")


def shown(name: str, folder: Path) -> dict[int, set[str]]:
    """Return what a tracker's files have of each step."""
    if name == "trackio":
        return {step: set(row) for step, row in trackio_metrics(folder)}
    if name == "wandb":
        rows = [row for file in wandb_files(folder) for row in wandb_history(file)]
        return {row["_step"]: {key.partition(".")[0] for key in row} - OWN for row in rows}
    told = [(step, tag) for tag, points in tensorboard_histograms(folder).items() for step, _ in points]
    told += [(step, tag) for tag, points in tensorboard_scalars(folder).items() for step, _, _ in points]
    return {step: {tag for at, tag in told if at == step} for step, _ in told}


def trackio_metrics(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the steps of the only project in a folder, each with what it holds."""
    (database,) = folder.glob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics")
        return [(step, json.loads(metrics)) for step, metrics in rows]


def tensorboard_histograms(folder: Path) -> dict[str, list[tuple[int, Histogram]]]:
    """Return tag → [(step, histogram)] as TensorBoard's own reader has them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    reader.Reload()
    found: dict[str, list[tuple[int, Histogram]]] = {}
    for tag in reader.Tags()["histograms"]:
        for event in reader.Histograms(tag):
            value = event.histogram_value
            assert 0 == value.bucket[0]
            made = Histogram(tuple(value.bucket_limit), tuple(int(n) for n in value.bucket[1:]))
            found.setdefault(tag, []).append((event.step, made))
    return found


class Drawing(MemoryBackend):
    """Keeps the histograms it is told before each row."""

    def __init__(self) -> None:
        from replay import Capabilities

        super().__init__()
        self.capabilities = Capabilities(lasts=False, histograms=True)
        self.histograms: list[tuple[int, str, Histogram, float]] = []

    def histogram(self, step: int, name: str, histogram: Histogram, time: float) -> None:
        assert step not in {step for step, _, _ in self.rows}
        self.histograms.append((step, name, histogram, time))


def test_ones_own_backend_may_show_histograms(tmp_path: Path) -> None:
    """They come before the row of their step; a backend without them is counted, the scalars are told."""
    run = recorded(tmp_path / "run")
    mine, plain = Drawing(), MemoryBackend()
    drawing, counting = play(run, [mine, plain], stats=["histogram"], keys="a/*")
    assert list(range(5)) == [step for step, _, _, _ in mine.histograms]
    assert [time for _, _, time in mine.rows] == [time for _, _, _, time in mine.histograms]
    for step, name, histogram, _ in mine.histograms:
        assert "a/v/histogram" == name
        check(histogram, step)
    assert (0, True) == (drawing.untold, drawing.complete)
    assert (5, 5, False) == (counting.sent, counting.untold, counting.complete)
    assert mine.rows == plain.rows


def test_a_live_tensorboard_shows_histograms(tmp_path: Path) -> None:
    """Told row by row, a histogram is in the event of its step."""
    from replay.backends.base import tell
    from replay.steps import Row
    from tests.replay.backend_contract import run_info

    backend = open_backend("tensorboard", path=tmp_path / "tb")
    backend.open(run_info(tmp_path))
    tell(backend, Row(3, {"v": 1.0}, 1000.0, {}, {"h": Histogram((0.0, 1.0, 3.0), (2, 5))}))
    tell(backend, Row(4, {"v": 1.0}, 1000.0))
    backend.close()
    assert {"h": [(3, Histogram((0.0, 1.0, 3.0), (2, 5)))]} == tensorboard_histograms(tmp_path / "tb")


def test_a_histogram_of_huge_numbers_is_told(tmp_path: Path) -> None:
    """Bins whose squares are beyond float64 are sent as all others are."""
    huge = Histogram((-1e200, 0.0, 1e200), (2, 5))
    backend = open_backend("tensorboard", path=tmp_path / "tb")
    backend.open(run_info(tmp_path))
    tell(backend, Row(3, {"v": 1.0}, 1000.0, {}, {"h": huge}))
    backend.close()
    assert {"h": [(3, huge)]} == tensorboard_histograms(tmp_path / "tb")


BINS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, unique_by=lambda b: b[0])


@given(BINS)
def test_joining_bins_keeps_every_count(bins: list[tuple[int, int]]) -> None:
    """Bins without gaps, at most so many, whose edges are edges of the given ones, and nothing is lost."""
    given = [(float(at), at + 1.0, count) for at, count in sorted(bins)]
    edges, counts = joined(given)
    assert len(edges) == len(counts) + 1 <= MOST_BINS + 1
    assert sorted(set(edges)) == list(edges)
    assert sum(count for _, _, count in given) == sum(counts)
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        assert count == sum(some for at, _, some in given if left <= at < right)
