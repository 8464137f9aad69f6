"""Evaluation: the right moment, the same on all ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .evaluator import EpochStepTimeFreqCtl, Evaluator, EvaluatorConfig
    from .schedule import Position, Progress, Schedule

__all__ = ["EpochStepTimeFreqCtl", "Evaluator", "EvaluatorConfig", "Position", "Progress", "Schedule"]

_HOMES = {
    "EpochStepTimeFreqCtl": "evaluator",
    "Evaluator": "evaluator",
    "EvaluatorConfig": "evaluator",
    "Position": "schedule",
    "Progress": "schedule",
    "Schedule": "schedule",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
