"""Evaluation: the right moment, the same on all ranks, each sample once. Names load when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..broadcast import broadcast_tensor_container
    from .alerts import Monitor, alerts_of, scan
    from .batching import BatchSize, adaptive_batch_evaluation
    from .comparison import Change, changed_samples
    from .consistency import metrics_of_ranks, validate_distributed_results
    from .distributed import evaluate_distributed
    from .drift import (
        Drift,
        ValidationSet,
        kolmogorov_smirnov,
        measure_drift,
        population_stability_index,
        update_validation_set,
    )
    from .evaluator import EpochStepTimeFreqCtl, Evaluator, EvaluatorConfig
    from .hard import mined, perturbed, typos
    from .metrics import (
        accuracy,
        avg_at_k,
        discounted_reward,
        explained_variance,
        maj_at_k,
        mean_of_stds,
        metrics_for,
        pass_at_k,
        policy_entropy,
        sequence_consistency_score,
        std_of_means,
        step_validity,
        token_entropies,
        value_variance,
    )
    from .pace import AdaptiveEvaluator, Pace, advise_schedule
    from .results import SampleResult, compute_aggregated_metrics, log_evaluation_results
    from .rules import (
        Alert,
        EntropyCollapse,
        GradientNorm,
        NotFinite,
        Overfitting,
        Past,
        Row,
        Rule,
        Straggler,
        default_rules,
    )
    from .sampling import number_of, seeded, select
    from .schedule import Position, Progress, Schedule
    from .texts import bleu, rouge

__all__ = [
    "AdaptiveEvaluator",
    "Alert",
    "BatchSize",
    "Change",
    "Drift",
    "EntropyCollapse",
    "EpochStepTimeFreqCtl",
    "Evaluator",
    "EvaluatorConfig",
    "GradientNorm",
    "Monitor",
    "NotFinite",
    "Overfitting",
    "Pace",
    "Past",
    "Position",
    "Progress",
    "Row",
    "Rule",
    "SampleResult",
    "Schedule",
    "Straggler",
    "ValidationSet",
    "accuracy",
    "adaptive_batch_evaluation",
    "advise_schedule",
    "alerts_of",
    "avg_at_k",
    "bleu",
    "broadcast_tensor_container",
    "changed_samples",
    "compute_aggregated_metrics",
    "default_rules",
    "discounted_reward",
    "evaluate_distributed",
    "explained_variance",
    "kolmogorov_smirnov",
    "log_evaluation_results",
    "maj_at_k",
    "mean_of_stds",
    "measure_drift",
    "metrics_for",
    "metrics_of_ranks",
    "mined",
    "number_of",
    "pass_at_k",
    "perturbed",
    "policy_entropy",
    "population_stability_index",
    "rouge",
    "scan",
    "seeded",
    "select",
    "sequence_consistency_score",
    "std_of_means",
    "step_validity",
    "token_entropies",
    "typos",
    "update_validation_set",
    "validate_distributed_results",
    "value_variance",
]

_HOMES = {
    "AdaptiveEvaluator": ".pace",
    "Alert": ".rules",
    "BatchSize": ".batching",
    "Change": ".comparison",
    "Drift": ".drift",
    "EntropyCollapse": ".rules",
    "EpochStepTimeFreqCtl": ".evaluator",
    "Evaluator": ".evaluator",
    "EvaluatorConfig": ".evaluator",
    "GradientNorm": ".rules",
    "Monitor": ".alerts",
    "NotFinite": ".rules",
    "Overfitting": ".rules",
    "Pace": ".pace",
    "Past": ".rules",
    "Position": ".schedule",
    "Progress": ".schedule",
    "Row": ".rules",
    "Rule": ".rules",
    "SampleResult": ".results",
    "Schedule": ".schedule",
    "Straggler": ".rules",
    "ValidationSet": ".drift",
    "accuracy": ".metrics",
    "adaptive_batch_evaluation": ".batching",
    "advise_schedule": ".pace",
    "alerts_of": ".alerts",
    "avg_at_k": ".metrics",
    "bleu": ".texts",
    "broadcast_tensor_container": "..broadcast",
    "changed_samples": ".comparison",
    "compute_aggregated_metrics": ".results",
    "default_rules": ".rules",
    "discounted_reward": ".metrics",
    "evaluate_distributed": ".distributed",
    "explained_variance": ".metrics",
    "kolmogorov_smirnov": ".drift",
    "log_evaluation_results": ".results",
    "maj_at_k": ".metrics",
    "mean_of_stds": ".metrics",
    "measure_drift": ".drift",
    "metrics_for": ".metrics",
    "metrics_of_ranks": ".consistency",
    "mined": ".hard",
    "number_of": ".sampling",
    "pass_at_k": ".metrics",
    "perturbed": ".hard",
    "policy_entropy": ".metrics",
    "population_stability_index": ".drift",
    "rouge": ".texts",
    "scan": ".alerts",
    "seeded": ".sampling",
    "select": ".sampling",
    "sequence_consistency_score": ".metrics",
    "std_of_means": ".metrics",
    "step_validity": ".metrics",
    "token_entropies": ".metrics",
    "typos": ".hard",
    "update_validation_set": ".drift",
    "validate_distributed_results": ".consistency",
    "value_variance": ".metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
