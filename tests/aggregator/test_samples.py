"""Samples and sequences are what counts, not how they were packed, split or repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import eventlog
from aggregator import evaluation, open_run, stats_tracker
from aggregator.stats_tracker import DistributedStatsTracker
from eventlog.errors import QueryError, UnansweredError
from tests.gloo import Ranks

LENGTHS = [3, 1, 4, 1, 5, 2]
VALUES = [torch.linspace(-1, 1 + i, length) for i, length in enumerate(LENGTHS)]
GROUPS = {}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as world:
        yield world


def group(size: int) -> Any:
    """Return the group of the first so many ranks, made by all of them."""
    if size not in GROUPS:
        GROUPS[size] = dist.new_group(list(range(size)))
    return GROUPS[size]


def packed(rank: int, folder: str, size: int) -> dict[str, float] | None:
    """Record six sequences, packed into one row on each of `size` ranks."""
    members = group(size)
    if rank >= size:
        return None
    mine = range(rank * len(LENGTHS) // size, (rank + 1) * len(LENGTHS) // size)
    log = eventlog.start(folder, role="actor", rank=rank, world_size=size)
    try:
        tracker = DistributedStatsTracker()
        tracker.denominator(
            n_seqs=torch.ones(len(mine), dtype=torch.bool),
            n_tokens=torch.ones(sum(LENGTHS[i] for i in mine), dtype=torch.bool),
            cu_seqlens=torch.tensor([0, *np.cumsum([LENGTHS[i] for i in mine])]),
            sample_ids=[f"s{i}" for i in mine],
        )
        tracker.stat("n_tokens", x=torch.cat([VALUES[i] for i in mine]))
        tracker.stat("n_seqs", mean=torch.stack([VALUES[i].double().mean() for i in mine]))
        exported = tracker.export(reduce_group=members, step=0)
        log.commit(0, 0, 0, [dict(exported)] if rank == 0 else [])
        return dict(exported)
    finally:
        eventlog.stop()


def test_packing_does_not_matter(ranks: Ranks, tmp_path: Path) -> None:
    """Six sequences packed 1 by 6, 2 by 3 or 3 by 2 have the same numbers, live and offline (report c19)."""
    live, by_sequence = [], []
    for size in (1, 2, 3):
        folder = tmp_path / str(size)
        live.append(ranks.run(packed, str(folder), size)[0])
        with open_run(folder) as run:
            rows = run.reduce("x", ["avg", "min", "max", "std_pop"], by=["step", "sequence"]).to_pylist()
        by_sequence.append({row["sample_id"]: row for row in rows})
    means = [float(each.double().mean()) for each in VALUES]
    wanted = {"mean/avg": np.mean(means), "mean/min": min(means), "mean/max": max(means), "n_seqs": 6}
    for found, rows in zip(live, by_sequence, strict=True):
        assert wanted == pytest.approx({key: found[key] for key in wanted}, rel=1e-12)
        for i, values in enumerate(VALUES):
            row, exact = rows[f"s{i}"], values.double().numpy()
            numbers = (exact.mean(), exact.min(), exact.max(), exact.std())
            assert numbers == pytest.approx(
                tuple(row[name] for name in ("avg", "min", "max", "std_pop")), rel=1e-12, abs=1e-12
            )


def repeated(rank: int, folder: str) -> float:
    """Evaluate five samples on each of two ranks, of which they share one; a sample's value is its id."""
    members = group(2)
    if rank >= 2:
        return 4.0
    eventlog.start(folder, role="actor", rank=rank, world_size=2)
    try:
        samples = [{"id": i} for i in ([0, 1, 2, 3, 4] if rank == 0 else [5, 6, 7, 8, 0])]
        found = evaluation.evaluate_distributed(lambda sample: float(sample["id"]), samples, group=members)
        stats_tracker.export_all(reduce_group=members, step=0)
        return evaluation.compute_aggregated_metrics(found)["score"]
    finally:
        eventlog.stop()


def test_a_repeated_sample_is_evaluated_once(ranks: Ranks, tmp_path: Path) -> None:
    """Ids 0 to 8 on two ranks, id 0 on both: the mean is 4.0, not 3.6, on every rank (report c5)."""
    assert [4.0] * 3 == ranks.run(repeated, str(tmp_path / "run"))


def doubled(rank: int, folder: str) -> list[float]:
    """Record five samples of two tokens on each of two ranks at two steps, one on both; return live means."""
    members = group(2)
    if rank >= 2:
        return []
    eventlog.start(folder, role="actor", rank=rank, world_size=2)
    means: list[float] = []
    try:
        ids = [0, 1, 2, 3, 4] if rank == 0 else [5, 6, 7, 8, 0]
        for step in range(2):
            tracker = DistributedStatsTracker()
            tracker.denominator(n_tokens=torch.ones(5, 2, dtype=torch.bool), sample_ids=ids)
            values = torch.tensor(ids, dtype=torch.float32)[:, None].expand(5, 2)
            tracker.stat("n_tokens", x=values, of=torch.full((5, 2), float(rank)))
            tracker.scalar(s=1.0)
            tracker.denominator(n_seqs=torch.ones(5, dtype=torch.bool))
            tracker.stat("n_seqs", nameless=torch.ones(5))
            means.append(tracker.export(reduce_group=members, step=step)["x/avg"])
        return means
    finally:
        eventlog.stop()


def test_a_repeated_sample_counts_once_where_that_is_asked(ranks: Ranks, tmp_path: Path) -> None:
    """Recorded ids 0 to 8 on two ranks, id 0 on both: 3.6 of all, 4.0 of distinct samples (report c5)."""
    folder = tmp_path / "run"
    assert [[3.6, 3.6]] * 2 == [pytest.approx(live) for live in ranks.run(doubled, str(folder))[:2]]
    with open_run(folder) as run:
        asked = ["avg", "count", "median", "std_pop"]
        exact = np.repeat(np.arange(9.0), 2)
        assert [3.6, 3.6] == pytest.approx(run.reduce("x")["avg"].to_pylist())
        for row in run.reduce("x", asked, distinct=True).to_pylist():
            assert (4.0, 18, 4.0, exact.std()) == pytest.approx(tuple(row[name] for name in asked))
            assert 0 == row["missing"]
        assert [36] == run.reduce("x", "count", by=[], distinct=True)["count"].to_pylist()
        assert [8.0, 8.0] == run.reduce("of", "sum", distinct=True)["sum"].to_pylist()  # rank 1 told 5 to 8
        alone = run.reduce("of", "count", by=["rank"], distinct=True)["count"].to_pylist()
        assert [20, 20] == alone  # each rank stands for itself
        some = run.reduce("x", "count", where="x < 1", distinct=True)
        assert ([2, 2], [0, 0]) == (some["count"].to_pylist(), some["unmatched"].to_pylist())
        with pytest.raises(UnansweredError, match="expected the sample ids of 'nameless', got none: give"):
            run.reduce("nameless", distinct=True)
        with pytest.raises(UnansweredError, match="got 's', which is a scalar"):
            run.reduce("s", distinct=True)
        with pytest.raises(QueryError, match="expected distinct with groups of sequences"):
            run.reduce("x", by="sequence", distinct=True)


def many(rank: int) -> dict[str, float]:
    """Count more true elements than float32 can count."""
    tracker = DistributedStatsTracker()
    mask = torch.ones(2**24 + 1, dtype=torch.bool) if rank == 0 else torch.ones(1, dtype=torch.bool)
    tracker.denominator(n_tokens=mask)
    return dict(tracker.export(reduce_group=dist.group.WORLD))


def test_tokens_are_counted_beyond_float32(ranks: Ranks) -> None:
    """2**24 + 1 tokens on one rank and one on two others are 2**24 + 3, an int (report s4)."""
    for found in ranks.run(many):
        assert {"n_tokens": 2**24 + 3} == found
        assert isinstance(found["n_tokens"], int)
