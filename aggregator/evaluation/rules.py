"""The rules of alerts: what they look at, and what each of them finds. Pure: nobody is told of anything."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, pairwise
from numbers import Integral, Real
from typing import Any, Final, Literal, Protocol, overload

from eventlog import errors

from ..globs import fits

__all__ = [
    "Alert",
    "EntropyCollapse",
    "GradientNorm",
    "NotFinite",
    "Overfitting",
    "Past",
    "Row",
    "Rule",
    "Straggler",
    "default_rules",
]

KEPT_ROWS: Final = 1000
_COUNT: Final = "__count"


@dataclass(frozen=True, slots=True)
class Row:
    """The metrics of a step; `ranks` are the numbers known of each rank, by key and global rank."""

    step: int
    metrics: Mapping[str, float]
    ranks: Mapping[str, Mapping[int, float]] = field(default_factory=dict[str, "Mapping[int, float]"])

    def matching(self, *patterns: str) -> dict[str, float]:
        """Return the metrics whose names fit one of the globs; counts are none."""
        return {key: value for key, value in self.metrics.items() if _fits(key, patterns)}


@lru_cache(maxsize=1 << 16)  # the same keys come at every step
def _fits(key: str, patterns: tuple[str, ...]) -> bool:
    return not key.endswith(_COUNT) and fits(key, patterns)


class Past(Sequence[Row]):
    """The rows before now, oldest first: the last of them, and the last of each key.

    What is asked of it costs the same however long the run is.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: deque[Row] = deque(maxlen=KEPT_ROWS)
        self._of_key: dict[str, deque[Row]] = {}
        self._of_ranks: dict[str, deque[Row]] = {}
        self._highest: dict[str, float] = {}
        for row in rows:
            self.append(row)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Past:
        """Return rows as a past, which they may be already."""
        return rows if isinstance(rows, cls) else cls(rows)

    def append(self, row: Row) -> None:
        """Add the next row."""
        self._rows.append(row)
        self.saw(row.metrics)
        for seen, keys in ((self._of_key, row.metrics), (self._of_ranks, row.ranks)):
            for key in keys:
                if key not in seen:
                    seen[key] = deque(maxlen=KEPT_ROWS)
                seen[key].append(row)

    def saw(self, metrics: Mapping[str, float]) -> None:
        """Remember how high metrics were, and nothing else of them."""
        highest = self._highest
        for key, value in metrics.items():
            if value > highest.get(key, -math.inf) and value != math.inf:
                highest[key] = value

    def highest(self, key: str) -> float | None:
        """Return the greatest finite number that a metric had in all the run; None without any."""
        return self._highest.get(key)

    def last(self, key: str, n: int) -> list[Row]:
        """Return the last n rows with a metric."""
        return _newest(self._of_key.get(key, ()), n)

    def last_of_ranks(self, key: str, n: int) -> list[Row]:
        """Return the last n rows that know a number of each rank."""
        return _newest(self._of_ranks.get(key, ()), n)

    def finite(self, key: str, n: int) -> list[float]:
        """Return the last n finite numbers of a metric."""
        values = (row.metrics[key] for row in reversed(self._of_key.get(key, ())))
        return list(islice(filter(math.isfinite, values), n))[::-1]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._rows[index] if isinstance(index, int) else list(self._rows)[index]


def _newest(rows: Sequence[Row], n: int) -> list[Row]:
    return list(islice(reversed(rows), n))[::-1]


@dataclass(frozen=True, slots=True)
class Alert:
    """What a rule found: about which key, at which step, on which rank (None: all)."""

    rule: str
    key: str
    step: int
    value: float
    text: str
    level: Literal["warn", "error"] = "warn"
    rank: int | None = None

    @property
    def title(self) -> str:
        """A headline."""
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.rule}: {self.key}{where} at step {self.step}"


class Rule(Protocol):
    """A condition on metrics. `past` are the rows before `now`, oldest first; nothing else is looked at."""

    def check(self, past: Past, now: Row) -> Iterable[Alert]:
        """Return an alert for every key (and rank) for which the condition holds now."""
        ...


# -- the rules -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A metric is NaN or infinite."""

    keys: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        _check(self)

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """See `Rule`."""
        del past
        for key, value in now.matching(*self.keys).items():
            if not math.isfinite(value):
                text = f"{key} is {value} at step {now.step}"
                yield Alert("not_finite", key, now.step, value, text, "error")


@dataclass(frozen=True, slots=True)
class GradientNorm:
    """A gradient norm vanishes (below `least`) or explodes (above `factor` times its median of late)."""

    keys: tuple[str, ...] = ("*grad_norm", "*grad_norm/avg")
    least: float = 1e-6
    factor: float = 10.0
    window: int = 20
    enough: int = 5  # rows before it speaks of an explosion

    def __post_init__(self) -> None:
        _check(self, least=0.0, factor=0.0, window=1, enough=1)

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """See `Rule`."""
        for key, value in now.matching(*self.keys).items():
            if abs(value) < self.least:
                text = f"{key} is {value:.3g}, below {self.least:g}"
                yield Alert("vanishing_gradient", key, now.step, value, text, "error")
            before = Past.of(past).finite(key, self.window)
            usual = statistics.median(before) if len(before) >= self.enough else math.inf
            if math.isfinite(usual) and value > self.factor * usual:
                text = f"{key} is {value:.3g}, more than {self.factor:g} times its median of {usual:.3g}"
                yield Alert("exploding_gradient", key, now.step, value, text, "error")


@dataclass(frozen=True, slots=True)
class EntropyCollapse:
    """The policy's entropy falls below `share` of the highest it had: it no longer explores."""

    keys: tuple[str, ...] = ("*entropy", "*entropy/avg")
    share: float = 0.1

    def __post_init__(self) -> None:
        _check(self, share=0.0)

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """See `Rule`."""
        for key, value in now.matching(*self.keys).items():
            highest = Past.of(past).highest(key) or 0.0
            if highest > 0 and value < self.share * highest:
                text = f"{key} is {value:.3g}, below {self.share:g} of the {highest:.3g} it had"
                yield Alert("entropy_collapse", key, now.step, value, text)


@dataclass(frozen=True, slots=True)
class Overfitting:
    """Over the last `evaluations` the training score rose each time, and the evaluation's fell each time."""

    training: str = "rollout/reward"
    evaluation: str = "eval-rollout/reward"
    evaluations: int = 3

    def __post_init__(self) -> None:
        _check(self, evaluations=1)

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """See `Rule`."""
        if self.evaluation not in now.metrics:
            return
        rows = [*Past.of(past).last(self.evaluation, KEPT_ROWS), now]
        both = [row.metrics for row in rows if self.training in row.metrics]
        last = both[-self.evaluations - 1 :]
        steps = list(pairwise(last))
        if len(steps) < self.evaluations:
            return
        rises = all(late[self.training] > early[self.training] for early, late in steps)
        falls = all(late[self.evaluation] < early[self.evaluation] for early, late in steps)
        if rises and falls:
            text = (
                f"{self.training} rose and {self.evaluation} fell over each of the last {self.evaluations} "
                f"evaluations, to {now.metrics[self.evaluation]:.3g}"
            )
            yield Alert("overfitting", self.evaluation, now.step, now.metrics[self.evaluation], text)


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank needs more than `factor` times the others' median, for `patience` rows in a row."""

    keys: tuple[str, ...] = ("timeperf/*",)
    factor: float = 1.5
    patience: int = 3
    least: float = 0.01  # seconds; below them nobody waits

    def __post_init__(self) -> None:
        _check(self, factor=0.0, patience=1, least=0.0)

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """See `Rule`."""
        for key in now.ranks:
            rank = self._slow(now.ranks[key]) if fits(key, self.keys) else None
            if rank is None:
                continue
            before = Past.of(past).last_of_ranks(key, self.patience - 1)
            if [rank] * (self.patience - 1) != [self._slow(row.ranks[key]) for row in before]:
                continue
            value = now.ranks[key][rank]
            text = (
                f"rank {rank} needed {value:.3g} s for {key}, over {self.factor:g} times the others' median"
            )
            yield Alert("straggler", key, now.step, value, text, rank=rank)

    def _slow(self, seconds: Mapping[int, float]) -> int | None:
        """Return the rank that is slower than the others by the factor."""
        if len(seconds) < 2:
            return None
        rank = max(seconds, key=lambda each: (seconds[each], -each))
        usual = statistics.median(value for each, value in seconds.items() if each != rank)
        return rank if seconds[rank] > max(self.factor * usual, self.least) else None


def _check(rule: Any, **bounds: float) -> None:
    """Raise a ConfigError where keys are no list of globs, or a number is below its bound."""
    keys = getattr(rule, "keys", ())
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise errors.ConfigError(f"expected keys as a list of globs, got {keys!r}: {type(rule).__name__}")
    if keys:
        object.__setattr__(rule, "keys", tuple(keys))
    for name, bound in bounds.items():
        value: Any = getattr(rule, name)
        kind, expected = (Integral, "whole number") if isinstance(bound, int) else (Real, "number")
        if isinstance(value, bool) or not isinstance(value, kind) or not float(value) >= bound:
            raise errors.ConfigError(
                f"expected {name} as a {expected} of {bound} or more, got {value!r}: {type(rule).__name__}"
            )


def default_rules() -> list[Rule]:
    """Return all rules, with their defaults."""
    return [NotFinite(), GradientNorm(), EntropyCollapse(), Overfitting(), Straggler()]
