"""Resuming: where one rank alone can read the old log, all ranks export alike and know the same attempt."""

import torch
import torch.distributed as dist

import eventlog
from aggregator import collective, open_run, stats_tracker
from replay import StatsLogger, StatsLoggerConfig
from tests import gloo


def _train(rank, root, resume):
    """Train four steps; rank 1's files lie on a disk of its own, where nothing of the old run is."""
    log = eventlog.start(f"{root}/{'shared' if rank == 0 else 'local'}", role="actor", resume_step=resume)
    config = StatsLoggerConfig(experiment_name="e", trial_name="t", fileroot=root)
    exported = []
    with StatsLogger(config, run=log) as logger:
        if resume is not None and rank == 0:  # it alone has the old state
            logger.load_state_dict({"last_commit_step": resume - 1})
        for step in range(resume or 0, (resume or 0) + 4):
            stats_tracker.denominator(m=torch.ones(2 + rank, 3, dtype=torch.bool))
            stats_tracker.stat("m", x=torch.full((2 + rank, 3), float(step)))
            stats = stats_tracker.export_all(reduce_group=dist.group.WORLD)
            exported.append(dict(stats))
            assert logger.commit(0, step, step, stats)
    attempt = log.attempt
    eventlog.stop()
    return exported, attempt, collective.count()


def test_ranks_that_cannot_read_the_old_log_resume_alike(tmp_path):
    """Exports, attempt and collectives are the same on all ranks of a resumed run (report a15)."""
    with gloo.Ranks(2) as ranks:
        for attempt, resume in enumerate((None, 2)):
            (first, one, calls), (second, other, others_calls) = ranks.run(_train, str(tmp_path), resume)
            assert first == second
            assert (attempt, attempt, calls) == (one, other, others_calls)
    assert [None, 2] == [a.resume_step for a in eventlog.RunDir.open(tmp_path / "shared").attempts()]
    with open_run(tmp_path / "shared") as run:
        table = run.metrics(["x/avg"]).to_pydict()
    assert ([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 1, 1]) == (table["step"], table["attempt"])
    (producer,) = eventlog.RunReader(tmp_path / "local").producers()[1:]
    rows = [r for *_, b in eventlog.RunReader(tmp_path / "local").records() for r in b.to_pylist()]
    assert 1 in {row["attempt"] for row in rows if row["kind"] != "export"}
    assert 1 == producer.rank
