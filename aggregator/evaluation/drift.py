"""Drift: whether data, or results, are distributed as they were in a reference window.

Two measures. The population stability index over the reference's deciles (or over categories; a number that
is a tenth of the reference or more, as where there are only a few, is a category), with shares r_i before and
c_i now:

    PSI = Σ (c_i - r_i) · ln(c_i / r_i)          under 0.1 none · 0.1 to 0.25 some · above 0.25 much

(Siddiqi 2006, "Credit Risk Scorecards"; a share of 0 counts as half a sample.) Small windows have a PSI above
0 by chance alone, so it must also exceed what chance reaches once in a hundred times: a permutation test,
the PSI of the same values dealt out anew to two windows of these sizes. And the test of Kolmogorov and
Smirnov for numbers, by scipy: the greatest distance between the two distribution functions, and its p-value,
which is told but decides nothing: with many samples it sees differences that matter to nobody.

Both look at values, not at their order: the same values in another order are no drift.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eventlog import errors

from .. import collective
from .failure import Failure, agreed, ended

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

    Floats = NDArray[np.float64]

__all__ = [
    "Drift",
    "ValidationSet",
    "describe",
    "kolmogorov_smirnov",
    "measure_drift",
    "population_stability_index",
    "update_validation_set",
]

THRESHOLD: Final = 0.1
BINS: Final = 10
_EXACT: Final = 10_000  # pairs up to which the p-value is exact
_DEALS: Final = 999  # permutations; more would move the 99th percentile by less than it means
_MANY, _FEWER = 1000, 199  # bins, and permutations then: sums of so many terms hardly differ
_ROUNDED: Final = 1 + 1e-9  # the order of a sum is no drift
_CHUNK: Final = 1 << 20  # counts at a time
_MOST_NAMED: Final = 5
Window = Sequence[float] | Sequence[str]


@dataclass(frozen=True, slots=True)
class Drift:
    """How far a window is from its reference: `psi`, what chance alone would reach, and KS (numbers only)."""

    psi: float
    by_chance: float
    drifted: bool
    ks: float | None = None
    p_value: float | None = None


def measure_drift(reference: Window, current: Window, threshold: float = THRESHOLD) -> Drift:
    """Return the drift of numbers, or of categories (texts), between two windows.

    `drifted`: the PSI is above `threshold` and above what chance alone reaches. NaN is a category of its own.
    Numbers need the extra `eval` (scipy).
    """
    before, now = _window(reference), _window(current)
    if isinstance(before, np.ndarray) != isinstance(now, np.ndarray):
        raise errors.EvaluationError("expected two windows of numbers or two of texts, got one of each")
    if not len(before) or not len(now):
        raise errors.EvaluationError(f"expected two windows with values, got {len(before)} and {len(now)}")
    psi, by_chance = _index(before, now), _by_chance(_pooled(before, now), len(before))
    ks, p_value = None, None
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        ks, p_value = kolmogorov_smirnov(before, now)
    return Drift(psi, by_chance, bool(psi > threshold and psi > by_chance * _ROUNDED), ks, p_value)


def population_stability_index(reference: Window, current: Window) -> float:
    """Return the PSI between two windows of numbers or of texts; see the module."""
    return _index(_window(reference), _window(current))


def kolmogorov_smirnov(reference: Any, current: Any) -> tuple[float | None, float | None]:
    """Return the two-sample KS statistic and its p-value, by scipy, over what is no NaN; None of nothing."""
    try:
        stats = importlib.import_module("scipy.stats")
    except ImportError as error:
        raise errors.DependencyError(
            "expected the package scipy for drift of numbers, got none; pip install 'areal-metrics[eval]'"
        ) from error
    before, now = (np.asarray(each, np.float64) for each in (reference, current))
    before, now = before[~np.isnan(before)], now[~np.isnan(now)]
    if not len(before) or not len(now):
        return None, None
    found = stats.ks_2samp(before, now, method="exact" if len(before) * len(now) <= _EXACT else "asymp")
    return float(found.statistic), float(found.pvalue)


def _window(values: Any) -> Floats | list[str]:
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if all(isinstance(value, str) for value in listed) and listed:
        return listed
    try:
        return np.array([value.item() if hasattr(value, "item") else value for value in listed], np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise errors.EvaluationError("expected numbers only, or texts only, in a window") from None


def _index(reference: Floats | list[str], current: Floats | list[str]) -> float:
    before, now = _counted(reference, current)
    return float(_psi(before, now, before.sum(), now.sum()))


def _counted(reference: Floats | list[str], current: Floats | list[str]) -> tuple[Floats, Floats]:
    """Return how many values of each window lie in each of their bins."""
    before, now = _binned(reference, current)
    bins = sorted(before.keys() | now.keys())
    return np.array([before.get(each, 0.0) for each in bins]), np.array([now.get(each, 0.0) for each in bins])


def _pooled(reference: Any, current: Any) -> NDArray[np.int64]:
    """Return how many values of both lie in each bin, whole: one on an edge is in the lower one."""
    if not isinstance(reference, np.ndarray):
        return np.array([*Counter([*reference, *current]).values()])
    edges = _edges(np.sort(reference[~np.isnan(reference)]))
    values = np.concatenate([reference, current])
    places = np.where(np.isnan(values), -1, np.searchsorted(edges, values))
    return np.unique(places, return_counts=True)[1]


def _psi(before: NDArray[Any], now: NDArray[Any], n: float, m: float) -> NDArray[np.float64]:
    """Return the PSI of counts, over the last axis, in windows of n and m values."""
    r, c = np.maximum(before, 0.5) / n, np.maximum(now, 0.5) / m
    return ((c - r) * np.log(c / r)).sum(axis=-1)


def _binned(reference: Any, current: Any) -> tuple[Mapping[Any, float], Mapping[Any, float]]:
    if not isinstance(reference, np.ndarray):
        return Counter(reference), Counter(current)
    edges = _edges(np.sort(reference[~np.isnan(reference)]))
    return _counts(reference, edges), _counts(current, edges)


def _edges(ordered: Floats) -> Floats:
    """Return where bins of equal shares meet; each value that is a tenth, or one of few, has a bin to itself.

    Mirrored numbers have mirrored edges, to the last bit.
    """
    values, counts = np.unique(ordered, return_counts=True)
    own = values[(counts > 1) & ((counts * BINS >= len(ordered)) | (len(values) <= BINS))]
    rest = ordered[~np.isin(ordered, own)]
    bins = max(1, round(BINS * len(rest) / max(1, len(ordered))))
    places = np.arange(1, bins) * (len(rest) - 1)
    with np.errstate(invalid="ignore", over="ignore"):  # at the ends of the numbers
        cuts = 0.5 * rest[places // bins] + 0.5 * rest[-(-places // bins)]
        beside = np.concatenate([np.nextafter(own, -np.inf), np.nextafter(own, np.inf)])
    found = np.unique(np.concatenate([cuts, beside]))
    return found[~np.isnan(found)]  # between -inf and inf there is no middle


def _counts(values: Floats, edges: Floats) -> dict[int, float]:
    """Return how many values each bin has, -1 for NaN; one on an edge is half in either bin."""
    known = values[~np.isnan(values)]
    places = np.concatenate([np.searchsorted(edges, known, side) for side in ("left", "right")])
    bins, counts = np.unique(places, return_counts=True)
    found = dict(zip(bins.tolist(), (counts / 2).tolist(), strict=True))
    return found | ({-1: float(len(values) - len(known))} if len(known) < len(values) else {})


def _by_chance(pooled: NDArray[np.int64], n: int) -> float:
    """Return what the PSI of values dealt out anew, n to the first window, stays under 99 times in 100.

    `pooled`: how many of them lie in each bin. Always the same for the same counts, in whatever order.
    """
    pooled, m = np.sort(pooled), int(pooled.sum()) - n
    singles = int((pooled == 1).sum())  # all alike: it matters only how many of them come to the first window
    counts = np.append(pooled[singles:], singles)
    deal = np.random.default_rng(0).multivariate_hypergeometric
    one, other = (float(_psi(np.array([x]), np.array([1 - x]), n, m)) for x in (1, 0))
    found: list[Floats] = []
    left = _DEALS if len(counts) <= _MANY else _FEWER
    while left > 0:
        rows = min(left, max(1, _CHUNK // len(counts)))
        dealt = deal(counts, n, rows, method="marginals")
        first, alone = dealt[:, :-1], dealt[:, -1]
        several = _psi(first, counts[:-1] - first, n, m)
        found.append(several + alone * one + (singles - alone) * other)
        left -= rows
    return float(np.quantile(np.concatenate(found), 0.99))


# -- the validation set ----------------------------------------------------------------------------


def describe(sample: Any) -> dict[str, float | str]:
    """Return what of a sample can drift: a number, the length of a text or list, of a mapping each item's.

    Ids are left out; tags are categories. Objects are mappings of their attributes.
    """
    fields = _fields(sample)
    return _described(sample if fields is None else fields)


def _described(sample: Any) -> dict[str, float | str]:
    shape = getattr(sample, "shape", None) if hasattr(sample, "dtype") else None
    if isinstance(sample, bool | int | float) or shape == ():  # of numpy and torch, too
        return {"value": float(sample)}
    if isinstance(sample, Sequence) or shape is not None:  # token ids, chat messages
        return {"length": float(len(sample))}
    if not isinstance(sample, Mapping):
        return {}
    found: dict[str, float | str] = {}
    for name, value in sample.items():
        if name == "tags" and isinstance(value, Mapping):
            found |= {f"tags/{tag}": str(each) for tag, each in value.items()}
        elif name not in ("id", "sample_id"):
            found |= {f"{name}/{part}": each for part, each in _described(value).items()}
    return found


def _fields(sample: Any) -> dict[str, Any] | None:
    """Return the attributes of a dataclass, a named tuple or another object; None for what is a value."""
    if hasattr(sample, "_asdict"):
        return sample._asdict()
    if isinstance(sample, (Sequence, Mapping)) or hasattr(sample, "dtype"):
        return None
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        return {each.name: getattr(sample, each.name) for each in dataclasses.fields(sample)}
    attributes = getattr(sample, "__dict__", None)
    return None if attributes is None or isinstance(sample, type) else dict(attributes)


@dataclass(slots=True)
class ValidationSet:
    """A validation set with the window it is compared to; `update` returns what to evaluate from now on.

    Attributes: `loader`; `drift`, the last measurement by feature; `stalled`, whether training improved while
    evaluation did not; `reason`, why it was refreshed last; `scores`, those of the last epochs.
    """

    loader: Iterable[Any]
    refresh: Callable[[str], Iterable[Any]]
    drift_threshold: float = THRESHOLD
    every: int = 5
    features: Callable[[Any], Mapping[str, float | str]] = describe
    patience: int = 3
    group: ProcessGroup | None = None
    drift: dict[str, Drift] = field(default_factory=dict[str, Drift])
    stalled: bool = False
    reason: str | None = None
    scores: list[tuple[float, float]] = field(default_factory=list["tuple[float, float]"])

    def __post_init__(self) -> None:
        given: dict[str, Any] = {"every": self.every, "patience": self.patience}
        for name, value in given.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise errors.ConfigError(f"expected {name} as a whole number of 1 or more, got {value!r}")
        self.loader = _rereadable(self.loader)

    def update(
        self,
        current: Iterable[Any],
        epoch: int,
        *,
        training: float | None = None,
        evaluation: float | None = None,
    ) -> Iterable[Any]:
        """Compare the samples that training sees now with the validation set; refresh it where they drifted.

        At epochs that are multiples of `every` only. `training` and `evaluation` are the two scores (higher
        is better) of the epoch, given at every epoch: where the first rose over each of the last `patience`
        epochs and the second over none, the set is refreshed too. All ranks of the group (None: the default
        one) call it together; each may see a part, and any rank's drift is everybody's.
        """
        if training is not None and evaluation is not None:
            self.scores = [*self.scores, (training, evaluation)][-self.patience - 1 :]
        self.stalled = _stalled(self.scores, self.patience)
        acting, members, _ = collective.joined(self.group)
        self.drift, failure = {}, Failure()
        with failure.kept():
            self.drift = self._measured(current) if epoch % self.every == 0 else {}
        names = sorted(name for name, each in self.drift.items() if each.drifted)
        reasons = [f"drift of {', '.join(names)}"] if names else []
        reasons += ["training improves, evaluation stalls"] if self.stalled else []
        told = collective.tell(("; ".join(reasons), failure.text), acting)
        failure.raise_together([text for _, text in told], members)
        if found := [each for each, _ in told if each]:
            self._refresh(found[0])
        return self.loader

    def _refresh(self, reason: str) -> None:
        """Take a new set on all ranks, or on none: what one rank's callback raises is raised on all."""
        acting, members, _ = collective.joined(self.group)
        with agreed(acting, members):
            loader = _rereadable(ended(self.refresh(reason)))
        self.loader, self.reason, self.scores = loader, reason, []

    def _measured(self, current: Iterable[Any]) -> dict[str, Drift]:
        before, now = _columns(self.loader, self.features), _columns(current, self.features)
        if before is None or now is None:  # of no samples there is nothing to tell
            return {}
        if not before.keys() & now.keys():
            raise errors.EvaluationError(
                "expected samples with something to compare, got those of the validation set with "
                f"{_named(before)} and those of the training with {_named(now)}; say what by features="
            )
        return {
            name: measure_drift(before[name], now[name], self.drift_threshold)
            for name in sorted(before.keys() & now.keys())
        }


def _rereadable(samples: Iterable[Any]) -> Iterable[Any]:
    return list(samples) if isinstance(samples, Iterator) else samples


def _columns(
    samples: Iterable[Any], features: Callable[[Any], Mapping[str, float | str]]
) -> dict[str, list[Any]] | None:
    """Return the features of samples by name; None without samples."""
    columns: dict[str, list[Any]] | None = None
    for sample in samples:
        columns = {} if columns is None else columns
        for name, value in features(sample).items():
            columns.setdefault(name, []).append(value)
    return columns


def _named(columns: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(columns)[:_MOST_NAMED])) or "nothing"


def _stalled(scores: Sequence[tuple[float, float]], patience: int) -> bool:
    if len(scores) <= patience:
        return False
    steps = list(pairwise(scores))
    return all(now[0] > before[0] for before, now in steps) and not any(
        now[1] > before[1] for before, now in steps
    )


def update_validation_set(
    loader: Iterable[Any],
    drift_threshold: float = THRESHOLD,
    *,
    reference: Iterable[Any],
    refresh: Callable[[str], Iterable[Any]],
    epoch: int = 0,
    every: int = 5,
    features: Callable[[Any], Mapping[str, float | str]] = describe,
    scores: Sequence[tuple[float, float]] = (),
    patience: int = 3,
    group: ProcessGroup | None = None,
) -> Iterable[Any]:
    """Return the validation set to go on with: `loader`, or where it is out of date `refresh(reason)`.

    `reference` are the samples that training sees now. It is out of date where a feature's distribution
    differs from the reference's (PSI above `drift_threshold` and above chance), looked at every `every`
    epochs, or where over the last `patience` of `scores` (training, evaluation; higher is better) training
    improved each time and evaluation never. All ranks of the group call it together and refresh together.
    `ValidationSet` does the same and remembers the scores.
    """
    held = ValidationSet(loader, refresh, drift_threshold, every, features, patience, group)
    held.scores = list(scores)[-patience - 1 :]
    return held.update(reference, epoch)
