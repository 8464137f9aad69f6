"""The log of real ranks, with the real tracker, against what their exports returned."""

from __future__ import annotations

from pathlib import Path

import pytest

from aggregator import open_run
from tests import gloo


def train(rank: int, path: str) -> list[dict[str, float]]:
    """Record, export in many ways and commit, three steps; return what was committed at each."""
    import torch
    import torch.distributed as dist

    import eventlog
    from aggregator import stats_tracker

    world = dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # every rank makes every group
    own = pairs[rank // 2]
    log = eventlog.start(path, role="actor")
    if rank == 0:
        log.claim_attempt()
    dist.barrier()
    generator = torch.Generator().manual_seed(rank)
    made = []
    for step in range(3):
        for _ in range(2):
            n = 2 + rank
            mask = torch.rand(n, 5, generator=generator) < 0.5
            with stats_tracker.scope("ppo_actor"):
                stats_tracker.denominator(n_valid_tokens=mask, n_seqs=torch.ones(n, dtype=torch.bool))
                values = torch.randn(n, 5, generator=generator) * 1e3
                stats_tracker.stat(advantages=values, denominator="n_valid_tokens")
                stats_tracker.stat(reward=values[:, 0].double(), denominator="n_seqs")
                total = values.bfloat16()
                stats_tracker.stat("n_valid_tokens", stats_tracker.ReduceType.SUM, total=total)
        stats_tracker.scalar(lr=0.1 / (step + 1))
        stats_tracker.scalar(only_here=rank) if rank == 3 else None
        stats_tracker.scalar(reduce_group=own, pair=float(rank))
        stats_tracker.counter(tokens=10**15 + rank)
        with stats_tracker.record_timing("train_step"):
            pass
        stats_tracker.get("rollout").scalar(reward=float(rank + step))
        # A single key first, a peek without reset, then everything.
        stats = stats_tracker.export("lr", reduce_group=world)
        stats_tracker.get("rollout").export(reduce_group=world, reset=False)
        stats.update(stats_tracker.export_all(reduce_group=world, key_sync_group=world))
        log.commit(0, step, step, [dict(stats)] if rank == 0 else ())
        made.append(dict(stats))
    eventlog.stop()
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the run of four ranks, and what rank 0 committed at each step."""
    path = tmp_path_factory.mktemp("live") / "run"
    return path, gloo.run(train, str(path), ranks=4)[0]


def test_every_live_number_comes_out_of_the_log(trained: tuple[Path, list[dict[str, float]]]) -> None:
    """For every step and key the recomputed number equals the live one, to the bit, and is marked so."""
    path, made = trained
    with open_run(path) as session:
        for step, live in enumerate(made):
            rows = session.metrics(source="recomputed", since=step, until=step).to_pylist()
            found = {
                row["key"]: repr(row["value_int"] if row["value_int"] is not None else row["value"])
                for row in rows
            }
            assert {key: repr(value) for key, value in live.items()} == found
            assert {(False, False)} == {(row["differs"], row["incomplete"]) for row in rows}


def test_every_rank_s_windows_are_bound(trained: tuple[Path, list[dict[str, float]]]) -> None:
    """All ranks committed: nothing is unbound, and everything is of attempt 0."""
    path, _ = trained
    with open_run(path) as session:
        bound = session.sql("select distinct bound_by, attempt from windows where records > 0").to_pylist()
        assert [{"bound_by": "commit", "attempt": 0}] == bound
        info = session.info()
        assert (0, 0, []) == (info["unbound_windows"], info["incomplete_windows"], info["problems"])
        assert [(rank, 4) for rank in range(4)] == [(p["rank"], p["world_size"]) for p in info["producers"]]
        (attempt,) = info["attempts"]
        assert ("actor", 0, 3, 3) == tuple(attempt[name] for name in ("role", "rank", "commits", "steps"))


def record_halved(rank: int, path: str) -> None:
    """Record and export with the other rank, two steps; only rank 0 has a log."""
    import torch
    import torch.distributed as dist

    import eventlog
    from aggregator import stats_tracker

    log = eventlog.start(path, role="actor") if rank == 0 else None
    if log:
        log.claim_attempt()
    for step in range(2):
        stats_tracker.denominator(m=torch.ones(4, dtype=torch.bool))
        stats_tracker.stat(denominator="m", x=torch.arange(4.0) + 100 * rank + step)
        stats = stats_tracker.export_all(reduce_group=dist.group.WORLD)
        if log:
            log.commit(0, step, step, [stats])
    eventlog.stop()


@pytest.mark.long
def test_a_rank_without_a_log_is_missed(tmp_path: Path) -> None:
    """What it recorded is in the committed numbers alone; the rest says what it lacks."""
    gloo.run(record_halved, str(tmp_path / "run"), ranks=2)
    with open_run(tmp_path / "run") as session:
        assert [51.5, 52.5] == session.metrics("x/avg")["value"].to_pylist()
        assert [(1.5, 4, None), (2.5, 4, None)] == [
            (r["p50"], r["count"], r["missing"]) for r in session.percentiles("x", 0.5).to_pylist()
        ]
        (problem,) = session.problems
    assert problem.startswith(
        "actor-1 took part in exports of steps 0-1 and left nothing of them in the log: "
    )
