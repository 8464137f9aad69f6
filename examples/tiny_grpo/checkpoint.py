"""Checkpoints: all that a resumed training needs to go on as if nothing had happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from actor import Actor

    from replay import StatsLogger


def save(path: Path, actor: Actor, logger: StatsLogger, global_step: int) -> None:
    """Write the state after `global_step` to a file that is either the old or the new one, never half of it.

    As in AReaL it is written before the step's commit: the logger's `last_commit_step` is the step before.
    """
    state = {
        "global_step": global_step,
        "policy": actor.policy.state_dict(),
        "reference": actor.reference.state_dict(),
        "optimizer": actor.optimizer.state_dict(),
        "scheduler": actor.scheduler.state_dict(),
        "rng": torch.get_rng_state(),  # the ranks draw the same numbers: one state speaks for all
        "stats_logger": logger.state_dict(),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def next_step(path: Path) -> int:
    """Return the step that a training goes on with; 0 without a checkpoint."""
    return torch.load(path)["global_step"] + 1 if path.exists() else 0


def load(path: Path, actor: Actor, logger: StatsLogger) -> int:
    """Restore everything on this rank; return the step to go on with."""
    state = torch.load(path)
    actor.policy.load_state_dict(state["policy"])
    actor.reference.load_state_dict(state["reference"])
    actor.optimizer.load_state_dict(state["optimizer"])
    actor.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    logger.load_state_dict(state["stats_logger"])
    return state["global_step"] + 1
