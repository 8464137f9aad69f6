"""Which ranks count, by layout: in every one the committed numbers are what the log recomputes.

The ranks are real processes that use the library as a training does: record, export over the layout's
groups, commit on every rank. Expected numbers are worked out by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eventlog
from aggregator import Export, merge_worker_stats, open_run, stats_tracker
from replay import StatsLogger, StatsLoggerConfig
from tests import players
from tests.gloo import Ranks
from tests.players import group_of
from tests.reference import differences

WORLD = 4
STEPS = 2
EVERYONE = ((0, 1, 2, 3),)
DP_OF_TP = ((0, 2), (1, 3))  # two data-parallel shards of two tensor- or context-parallel ranks each
DP_OF_PP = ((0, 1), (2, 3))  # two pipeline stages of two data-parallel ranks each

Numbers = dict[str, float]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as world:
        world.run(meet)
        yield world


# -- what runs on the ranks ----------------------------------------------------------------------------


def meet(rank: int) -> None:
    players.meet(rank)


def config(run: str) -> StatsLoggerConfig:
    return StatsLoggerConfig(experiment_name="layouts", trial_name="trial", fileroot=run)


@contextmanager
def logged(rank: int, run: str, world_size: int = WORLD) -> Iterator[StatsLogger]:
    """Log this rank, with the logger through which it commits."""
    eventlog.start(run, role="actor", rank=rank, world_size=world_size)
    try:
        with StatsLogger(config(run)) as logger:
            yield logger
    finally:
        eventlog.stop()


def record(n: str, tokens: int, loss: float, **group: Any) -> None:
    """Record a loss of so many tokens."""
    stats_tracker.denominator(**{n: torch.ones(tokens, dtype=torch.bool)}, **group)
    stats_tracker.stat(n, loss=torch.full((tokens,), loss), **group)


def data_parallel(rank: int, run: str) -> list[Numbers]:
    """Every rank holds a shard: all are pooled."""
    told = []
    with logged(rank, run) as logger:
        for step in range(STEPS):
            with stats_tracker.scope("ppo_actor"):
                record("n_tokens", 1 + rank, float(rank + step))
            told.append(stats_tracker.export_all(reduce_group=group_of(rank, EVERYONE)))
            logger.commit(0, step, step, told[-1])
    return told


def tensor_parallel(rank: int, run: str) -> list[Numbers]:
    """Ranks 0 and 1 hold the same shard, and so do 2 and 3: each is pooled with its like of the other."""
    told = []
    with logged(rank, run) as logger:
        for step in range(STEPS):
            record("n_tokens", 1 + rank // 2, float(rank // 2 + step))
            stats_tracker.counter(episodes=5)
            told.append(stats_tracker.export_all(reduce_group=group_of(rank, DP_OF_TP)))
            logger.commit(0, step, step, told[-1])
    return told


def replicated_on_all(rank: int, run: str) -> list[Numbers]:
    """Copies may also be declared: then they count once wherever they are reduced."""
    stats_tracker.declare("lr", spread="replicated")
    with logged(rank, run) as logger:
        stats_tracker.scalar(lr=0.125)
        told = stats_tracker.export_all(reduce_group=group_of(rank, EVERYONE))
        logger.commit(0, 0, 0, told)
    stats_tracker.declare("lr", spread="shards")
    return [told]


def pipeline_parallel(rank: int, run: str, groups: tuple[tuple[int, ...], ...]) -> list[Numbers]:
    """Ranks 0 and 1 are the first stage; only the last one, of ranks 2 and 3, knows the loss."""
    told = []
    with logged(rank, run) as logger:
        for step in range(STEPS):
            stats_tracker.scalar(**{f"stage{rank // 2}/grad_norm": rank + 1.0})
            if rank >= 2:
                record("n_tokens", rank, float(rank + step))
            told.append(stats_tracker.export_all(reduce_group=group_of(rank, groups)))
            logger.commit(0, step, step, told[-1])
    return told


def context_parallel(rank: int, run: str, dp: int, cp: int) -> list[Numbers]:
    """Of 8 sequences of 4 tokens, every rank holds the part 1/cp of the tokens of 8/dp sequences."""
    if rank >= dp * cp:
        return []
    dp_group = tuple(tuple(range(first, dp * cp, cp)) for first in range(cp))
    dp_cp_group = group_of(rank, (tuple(range(dp * cp)),))
    with logged(rank, run, dp * cp) as logger:
        sequences, tokens = 8 // dp, 4 // cp
        loss = torch.arange(tokens, dtype=torch.float32).expand(sequences, tokens) + tokens * (rank % cp)
        stats_tracker.denominator(n_seqs=torch.ones(sequences, dtype=torch.bool))
        stats_tracker.denominator(n_tokens=torch.ones_like(loss, dtype=torch.bool), reduce_group=dp_cp_group)
        stats_tracker.stat("n_tokens", loss=loss, reduce_group=dp_cp_group)
        stats_tracker.stat("n_seqs", prompt_len=torch.full((sequences,), 3.0))
        told = stats_tracker.export_all(reduce_group=group_of(rank, dp_group), key_sync_group=dp_cp_group)
        logger.commit(0, 0, 0, told)
    return [told]


def each_alone(rank: int, run: str) -> list[Numbers]:
    """Every rank runs rollouts of its own, which it exports without a group, beside the training."""
    with logged(rank, run) as logger:
        stats_tracker.get("rollout").scalar(reward=float(rank))
        stats_tracker.scalar(loss=float(rank))
        told = stats_tracker.export(reduce_group=group_of(rank, EVERYONE))
        told.update(stats_tracker.get("rollout").export())
        logger.commit(0, 0, 0, told)
    return [told]


def slow_rank(rank: int, run: str) -> list[Numbers]:
    """One rank takes nine times as long as the others."""
    clock = iter([0.0, 9.0 if rank == 3 else 1.0])
    real, stats_tracker.time = stats_tracker.time, SimpleNamespace(perf_counter=lambda: next(clock))
    try:
        with logged(rank, run) as logger:
            with stats_tracker.record_timing("train_step"):
                pass
            told = stats_tracker.export_all(reduce_group=group_of(rank, EVERYONE))
            logger.commit(0, 0, 0, told)
    finally:
        stats_tracker.time = real
    return [told]


def start_worker(rank: int, run: str, trainers: int) -> None:
    """Be a trainer of a world, or a rollout worker of none; both log and neither commits."""
    if rank < trainers:
        eventlog.start(run, role="actor", rank=rank, world_size=trainers)
    else:
        eventlog.start(run, role="rollout", rank=rank - trainers, world_size=1)


def stop_worker(rank: int) -> None:
    assert rank >= 0
    eventlog.stop()


def work(rank: int, step: int, trainers: int) -> str:
    """Train, or run rollouts; return what was exported as an RPC would carry it."""
    if rank < trainers:
        record("n_tokens", 1 + rank, float(rank + step))
        return stats_tracker.export_all(reduce_group=group_of(rank, (tuple(range(trainers)),))).to_json()
    rollout = stats_tracker.get("rollout")
    for reward in range(rank):
        rollout.scalar(reward=float(reward + step))
    rollout.counter(accepted=rank)
    if rank == WORLD - 1:  # the last one alone sees a task of another kind
        rollout.scalar(math=1.0)
    return stats_tracker.export_all().to_json()


# -- what is shown -------------------------------------------------------------------------------------


def numbers(run: Path, source: str) -> list[Numbers]:
    """Return what a run's log says, step by step; nothing of it differs from what was committed."""
    steps: dict[int, Numbers] = {}
    with open_run(run) as opened:
        assert opened.problems == []
        for row in opened.metrics(source=source).to_pylist():
            assert not row.get("differs"), row
            assert not row.get("incomplete"), row
            number = row["value"] if row["value_int"] is None else row["value_int"]
            steps.setdefault(row["step"], {})[row["key"]] = number
    assert list(range(len(steps))) == sorted(steps)
    return [steps[step] for step in sorted(steps)]


def differing(wanted: list[Numbers], got: list[Numbers]) -> list[Any]:
    """Return the names that differ, as (wanted, got), of the steps where some do."""
    return [found for pair in zip(wanted, got, strict=True) if (found := differences(*pair))]


def stat(key: str, average: float, least: float, greatest: float) -> Numbers:
    return {f"{key}/avg": average, f"{key}/min": least, f"{key}/max": greatest}


def test_data_parallel(ranks: Ranks, tmp_path: Path) -> None:
    """One sum over one count of all ranks, the same on each, committed and recomputed."""
    wanted = [
        {"ppo_actor/n_tokens": 10, **stat("ppo_actor/loss", 2.0 + step, 0.0 + step, 3.0 + step)}
        for step in range(STEPS)
    ]
    for told in ranks.run(data_parallel, str(tmp_path)):
        assert [] == differing(wanted, told)
    assert [] == differing(wanted, numbers(tmp_path, "committed"))
    assert [] == differing(wanted, numbers(tmp_path, "recomputed"))


def test_tensor_parallel_copies_count_once(ranks: Ranks, tmp_path: Path) -> None:
    """Two groups export the same numbers; neither live nor in the log are they added up."""
    wanted = [
        {"n_tokens": 3, "episodes": 10, **stat("loss", 2 / 3 + step, 0.0 + step, 1.0 + step)}
        for step in range(STEPS)
    ]
    for told in ranks.run(tensor_parallel, str(tmp_path)):
        assert [] == differing(wanted, told)
    assert [] == differing(wanted, numbers(tmp_path, "committed"))
    assert [] == differing(wanted, numbers(tmp_path, "recomputed"))


def test_replicated_values_count_once_in_any_group(ranks: Ranks, tmp_path: Path) -> None:
    """What is declared to be the same on all ranks is one value, however many are reduced (report c4)."""
    wanted = [{"lr": 0.125, "lr__count": 1}]
    for told in ranks.run(replicated_on_all, str(tmp_path)):
        assert [] == differing(wanted, told)
    assert [] == differing(wanted, numbers(tmp_path, "recomputed"))


FIRST_STAGE = {"stage0/grad_norm": 1.5, "stage0/grad_norm__count": 2}
LAST_STAGE = [
    {"stage1/grad_norm": 3.5, "stage1/grad_norm__count": 2, "n_tokens": 5}
    | stat("loss", (2 * (2 + step) + 3 * (3 + step)) / 5, 2.0 + step, 3.0 + step)
    for step in range(STEPS)
]
BOTH_STAGES = [FIRST_STAGE | of_step for of_step in LAST_STAGE]


def test_pipeline_stages_keys_are_found_where_they_live(ranks: Ranks, tmp_path: Path) -> None:
    """The leader's stage commits what it knows; the log has the last stage's too, as that one read it."""
    told = ranks.run(pipeline_parallel, str(tmp_path), DP_OF_PP)
    assert [] == differing([FIRST_STAGE] * STEPS, told[0])
    assert [] == differing(LAST_STAGE, told[3])
    assert [] == differing([FIRST_STAGE] * STEPS, numbers(tmp_path, "committed"))
    assert [] == differing(BOTH_STAGES, numbers(tmp_path, "recomputed"))


def test_pipeline_stages_reduced_together(ranks: Ranks, tmp_path: Path) -> None:
    """Over a group of all stages the leader reads, and commits, keys it never held (report c14)."""
    for told in ranks.run(pipeline_parallel, str(tmp_path), EVERYONE):
        assert [] == differing(BOTH_STAGES, told)
    assert [] == differing(BOTH_STAGES, numbers(tmp_path, "committed"))
    assert [] == differing(BOTH_STAGES, numbers(tmp_path, "recomputed"))


@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2), (2, 2), (1, 1), (1, 4)])
def test_context_parallel(ranks: Ranks, tmp_path: Path, dp: int, cp: int) -> None:
    """Tokens count over all ranks, sequences over the data-parallel ones, in any layout (report c12)."""
    wanted = [
        {"n_seqs": 8, "n_tokens": 32, **stat("loss", 1.5, 0.0, 3.0), **stat("prompt_len", 3.0, 3.0, 3.0)}
    ]
    for told in ranks.run(context_parallel, str(tmp_path), dp, cp)[: dp * cp]:
        assert [] == differing(wanted, told)
    assert [] == differing(wanted, numbers(tmp_path, "committed"))
    assert [] == differing(wanted, numbers(tmp_path, "recomputed"))


def test_what_ranks_export_alone_is_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """Of exports without a group within a world, the committing process's counts, and no other."""
    wanted = [{"loss": 1.5, "loss__count": 4, "rollout/reward": 0.0, "rollout/reward__count": 1}]
    told = ranks.run(each_alone, str(tmp_path))
    assert [] == differing(wanted, told[0])
    assert {"loss": 1.5, "rollout/reward": 3.0}.items() <= told[3][0].items()
    assert [] == differing(wanted, numbers(tmp_path, "committed"))
    assert [] == differing(wanted, numbers(tmp_path, "recomputed"))


def test_the_slow_rank_is_found(ranks: Ranks, tmp_path: Path) -> None:
    """The mean of a timing hides the slow rank; the log names it (report c30)."""
    wanted = [{"timeperf/train_step": 3.0, "timeperf/train_step__count": 4}]
    for told in ranks.run(slow_rank, str(tmp_path)):
        assert [] == differing(wanted, told)
    assert [] == differing(wanted, numbers(tmp_path, "recomputed"))
    with open_run(tmp_path) as run:
        by_rank = run.reduce("timeperf/train_step", ["max"], by=["rank"]).to_pylist()
        assert {0: 1.0, 1: 1.0, 2: 1.0, 3: 9.0} == {row["rank"]: row["max"] for row in by_rank}
        slowest = "select rank, max from records where key = 'timeperf/train_step' order by max desc limit 1"
        assert [{"rank": 3, "max": 9.0}] == run.sql(slowest).to_pylist()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[StatsLogger]:
    """A process of its own, without a world: it only collects and commits."""
    eventlog.start(tmp_path, role="controller", rank=0, world_size=1)
    with StatsLogger(config(str(tmp_path))) as logger:
        yield logger
    eventlog.stop()


def collect(ranks: Ranks, controller: StatsLogger, run: Path, trainers: int) -> list[Numbers]:
    """Let trainers and workers work, step by step; commit what the controller makes of their answers."""
    committed = []
    ranks.run(start_worker, str(run), trainers)
    for step in range(STEPS):
        answers = [Export.from_json(text) for text in ranks.run(work, step, trainers)]
        stats = answers[0].copy() if trainers else Export()  # every trainer has the same numbers
        stats.update(merge_worker_stats(answers[trainers:]))
        controller.commit(0, step, step, stats)
        committed.append(dict(stats))
    ranks.run(stop_worker)
    return committed


def test_a_controller_that_is_no_training_rank(ranks: Ranks, tmp_path: Path, controller: StatsLogger) -> None:
    """The trainers' group speaks for the step that the controller commits."""
    wanted = [{"n_tokens": 10, **stat("loss", 2.0 + step, 0.0 + step, 3.0 + step)} for step in range(STEPS)]
    assert [] == differing(wanted, collect(ranks, controller, tmp_path, trainers=4))
    assert [] == differing(wanted, numbers(tmp_path, "committed"))
    assert [] == differing(wanted, numbers(tmp_path, "recomputed"))


def test_ungrouped_workers(ranks: Ranks, tmp_path: Path, controller: StatsLogger) -> None:
    """Workers share no group: the controller merges their exports, the log their records, to the same."""
    wanted = [
        {
            "rollout/reward": (1 * 0 + 2 * 0.5 + 3 * 1.0) / 6 + step, "rollout/reward__count": 6,
            "rollout/accepted": 6, "rollout/math": 1.0, "rollout/math__count": 1,
        }
        for step in range(STEPS)
    ]  # fmt: skip
    assert [] == differing(wanted, collect(ranks, controller, tmp_path, trainers=0))
    assert [] == differing(wanted, numbers(tmp_path, "committed"))
    assert [] == differing(wanted, numbers(tmp_path, "recomputed"))


def test_trainers_and_workers_in_one_step(ranks: Ranks, tmp_path: Path, controller: StatsLogger) -> None:
    """A step of AReaL's flow: the actors' numbers and the merged rollouts', committed as one."""
    wanted = [
        {
            "n_tokens": 3, **stat("loss", (0 * 1 + 1 * 2) / 3 + step, 0.0 + step, 1.0 + step),
            "rollout/reward": (2 * 0.5 + 3 * 1.0) / 5 + step, "rollout/reward__count": 5,
            "rollout/accepted": 5, "rollout/math": 1.0, "rollout/math__count": 1,
        }
        for step in range(STEPS)
    ]  # fmt: skip
    assert [] == differing(wanted, collect(ranks, controller, tmp_path, trainers=2))
    assert [] == differing(wanted, numbers(tmp_path, "committed"))
    assert [] == differing(wanted, numbers(tmp_path, "recomputed"))
