"""Questions about values of which the payload keeps none, or only some."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import eventlog
from aggregator import open_run, stats_tracker
from eventlog import errors


def train(path, steps=3, **options):
    """Record 100 values and their squares at every step, and commit."""
    log = eventlog.start(path, role="actor", rank=0, world_size=1, **options)
    tracker = stats_tracker.DistributedStatsTracker()
    try:
        log.claim_attempt()
        for step in range(steps):
            x = torch.arange(100, dtype=torch.float64) + step
            tracker.denominator(m=torch.ones(100, dtype=torch.bool))
            tracker.stat(x=x, square=x * x, denominator="m")
            tracker.scalar(lr=0.1)
            log.commit(0, step, step, [dict(tracker.export())])
    finally:
        eventlog.stop()
    return path


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.percentiles("x", 0.5),
        lambda s: s.reduce("x", "std"),
        lambda s: s.reduce("x", "avg", where="square > 4"),
        lambda s: s.histogram("x"),
        lambda s: s.correlation("x", "square"),
        lambda s: s.reduce("x", "avg", by="sequence"),
    ],
)
@pytest.mark.parametrize(
    ("payload", "why"), [("off", "the payload was off or pruned"), ("sample:8", "the payload was sampled")]
)
def test_questions_about_values_that_are_not_kept(tmp_path, ask, payload, why):
    """They are refused, saying why, and what can still be asked; that is answered exactly."""
    with open_run(train(tmp_path / "run", payload=payload)) as session:
        with pytest.raises(
            errors.QueryError, match=rf"expected the values of 'x', got none: {why}.*; avg, sum, min"
        ):
            ask(session)
        assert [49.5, 50.5, 51.5] == session.reduce("x", ["avg", "count"])["avg"].to_pylist()
        assert [300] == session.reduce("x", "count", by=[])["count"].to_pylist()


def test_samples_are_marked_and_belong_together(tmp_path):
    """SQL shows them, says that they are samples, and pairs those of one mask; macros refuse them."""
    with open_run(train(tmp_path / "run", payload="sample:8")) as session:
        rows = session.sql("select key, sampled, len(values) as n, dense from tensors").to_pylist()
        assert {("x", 8, 8, None), ("square", 8, 8, None)} == {tuple(row.values()) for row in rows}
        pairs = session.sql("""
            select unnest(a.values) as x, unnest(b.values) as y
            from tensors a join tensors b using (session, denominator_id)
            where a.key = 'x' and b.key = 'square'
        """).to_pylist()
        assert 24 == len(pairs)
        assert all(pair["x"] ** 2 == pair["y"] for pair in pairs)
        assert [None] == session.sql("select distinct sampled from scalars")["sampled"].to_pylist()
        for call in ("percentile('x', 0.5)", "histogram('x')", "by_sequence('x')"):
            with pytest.raises(
                errors.QueryError, match="expected all values of the key, got samples of them"
            ):
                session.sql(f"from {call}")
        assert [0.1] * 3 == session.percentiles("lr", 0.5)["p50"].to_pylist()


def test_what_is_missing_is_counted(run):
    """Of two ranks one kept no values: the other's are answered, and the rest is told."""
    ranks = [run.producer("actor", rank, world="w", world_size=2, payload=not rank) for rank in range(2)]
    for producer in ranks:
        producer.tracker().denominator({"m": np.ones(4, bool)})
        producer.tracker().stat("m", {"x": np.arange(4.0) + 4 * producer.rank})
    ranks[0].commit(0, run.export(ranks, time=1), time=2, leader=True)
    session = run.open()
    row = session.reduce("x", ["median", "std", "count", "avg"]).to_pylist()[0]
    assert (1.5, 8, 3.5, 4) == (row["median"], row["count"], row["avg"], row["missing"])
    assert row["std"] == pytest.approx(np.arange(4).std(ddof=1), rel=1e-12)
    assert 4 == session.histogram("x", 2)["missing"][0].as_py()
    (row,) = session.reduce("x", ["count", "avg"], where="m").to_pylist()
    assert {"step": 0, "count": 4, "avg": 1.5, "missing": 4, "unmatched": 0} == row


@pytest.mark.filterwarnings("ignore:.*payload budget")
def test_a_pruned_payload_is_told(tmp_path):
    """What a budget removed is missing, what is left is answered; with nothing left the error says why."""
    path = train(tmp_path / "run", steps=60, payload_budget="16kB")
    with open_run(path) as session:
        rows = session.percentiles("x", 0.5).to_pylist()
        assert (0, None, 100) == tuple(rows[0][name] for name in ("count", "p50", "missing"))
        assert (100, 108.5, 0) == tuple(rows[-1][name] for name in ("count", "p50", "missing"))
        assert 60 == session.reduce("x", "avg").num_rows
        with pytest.raises(
            errors.QueryError, match=r"got none: the payload was pruned to keep its budget; avg, sum"
        ):
            session.percentiles("x", 0.5, until=10)
