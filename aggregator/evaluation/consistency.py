"""Whether ranks that measured the same thing found the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from eventlog import errors

from .. import collective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    Metrics = Mapping[str, float]

__all__ = ["metrics_of_ranks", "validate_distributed_results"]

_MOST_NAMED: Final = 10


def metrics_of_ranks(
    metrics: Mapping[str, float], group: ProcessGroup | None = None
) -> dict[int, dict[str, float]]:
    """Return the metrics of all ranks by global rank; all of them must call it."""
    acting, members, _ = collective.joined(group)
    return dict(zip(members, collective.tell(dict(metrics), acting), strict=True))


def validate_distributed_results(
    results: Mapping[int, Metrics | float] | Sequence[Metrics | float],
    tolerance: float = 0.05,
    relative: bool = False,
) -> dict[str, float]:
    """Return the mean over the ranks of every metric, if no rank deviates from it by more than `tolerance`.

    `results` are the metrics (or one number) of each rank: by rank, or in rank order. `relative` takes the
    tolerance as a share of the mean. A metric that a rank lacks, and NaN on some ranks only, are deviations;
    NaN on all of them is agreement. For ranks that evaluated the same: parts of a data set differ by nature.

        validate_distributed_results(metrics_of_ranks(metrics, group))

    Raises a DistributedEvaluationError naming the metrics, the ranks that deviate, and their values.
    """
    if tolerance < 0:
        raise errors.EvaluationError(f"expected a tolerance of 0 or more, got {tolerance!r}")
    by_rank = dict(results if isinstance(results, Mapping) else enumerate(results))
    named = {rank: dict(_metrics(found)) for rank, found in by_rank.items()}
    if not named:
        raise errors.EvaluationError("expected the results of at least one rank, got none")
    means: dict[str, float] = {}
    found: list[str] = []
    for name in sorted({name for metrics in named.values() for name in metrics}):
        values = {rank: metrics.get(name) for rank, metrics in sorted(named.items())}
        there = {rank: value for rank, value in values.items() if value is not None}
        means[name], deviating = _judge(there, tolerance, relative=relative)
        lacking = [rank for rank, value in values.items() if value is None]
        found += [f"{name} = {there[rank]!r} on rank {rank} (mean {means[name]:.6g})" for rank in deviating]
        found += [f"no {name} on rank {rank}" for rank in lacking]
    if found:
        more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        bound = f"{tolerance:g} of their mean" if not relative else f"{tolerance:g} times their mean"
        raise errors.DistributedEvaluationError(
            f"expected metrics of {len(named)} ranks within {bound}, "
            f"got {', '.join(found[:_MOST_NAMED])}{more}"
        )
    return means


def _metrics(found: Metrics | float) -> Metrics:
    return found if isinstance(found, Mapping) else {"result": float(found)}


def _judge(values: Mapping[int, float], tolerance: float, *, relative: bool) -> tuple[float, list[int]]:
    """Return the mean of what are numbers, and the ranks that are too far from it."""
    numbers = [value for value in values.values() if not math.isnan(value)]
    if not numbers:
        return math.nan, []
    if any(map(math.isinf, numbers)):
        mean = max(set(numbers), key=numbers.count)  # ranks agree only where all hold the same
    else:
        mean = math.fsum(numbers) / len(numbers)
    allowed = tolerance * abs(mean) if relative else tolerance
    return mean, [
        rank
        for rank, value in values.items()
        if math.isnan(value) or (value != mean and not abs(value - mean) <= allowed * (1 + 1e-12))
    ]
