"""Which workflow is running, so that rollouts of training and of evaluation are told apart.

Drop-in for AReaL's `areal.infra.workflow_context`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["WorkflowContext", "get", "set", "stat_scope"]


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """What one episode knows of itself."""

    is_eval: bool = False
    task_id: int | str | None = None
    sample_idx: int | None = None  # its place in the group of rollouts of one prompt
    group_size: int = 1
    processor_cache: Any = None  # AReaL's, shared by the group


_TRAINING = WorkflowContext()
_CURRENT: ContextVar[WorkflowContext] = ContextVar("areal_metrics_workflow", default=_TRAINING)


def set(ctx: WorkflowContext) -> None:  # noqa: A001 (AReaL's name)
    """Make `ctx` the context of the running task and of the tasks it starts."""
    _CURRENT.set(ctx)


def get() -> WorkflowContext:
    """Return the running task's context; one for training when none was set."""
    return _CURRENT.get()


def stat_scope() -> str:
    """Return the name of the tracker for this episode: "eval-rollout" in evaluation, else "rollout"."""
    return "eval-rollout" if get().is_eval else "rollout"
