"""One of two ranks that record, export and commit until they are killed; run by test_sigkill.py.

    recording_rank.py RUN_DIR STORE RANK

Prints a line with the step whenever a commit has returned.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

RANKS = 2


def values_of(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what a rank records in a step, float32 (2 + rank, 257), and its mask."""
    rng = np.random.default_rng([rank, step])
    values = rng.standard_normal((2 + rank, 257), dtype=np.float32)
    return values, rng.random(values.shape) < 0.5


def main(run_dir: str, store: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    import eventlog
    import tests.patience  # noqa: F401
    from aggregator import stats_tracker
    from replay import StatsLogger, StatsLoggerConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    eventlog.start(run_dir, role="actor")
    logger = StatsLogger(StatsLoggerConfig("sigkill", "trial", run_dir), _endless())
    for step in itertools.count():
        values, mask = map(torch.from_numpy, values_of(rank, step))
        with stats_tracker.scope("ppo_actor"):
            stats_tracker.denominator(n_valid_tokens=mask)
            stats_tracker.stat(advantages=values, denominator="n_valid_tokens")
            stats_tracker.scalar(step=step)
        logger.commit(0, step, step, stats_tracker.export_all(reduce_group=dist.group.WORLD))
        sys.stderr.write(f"{step}\n")
        sys.stderr.flush()


def _endless() -> Any:
    return SimpleNamespace(total_train_epochs=1, steps_per_epoch=1, total_train_steps=1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
