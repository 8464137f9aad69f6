"""Alerts: rules on the metrics of a run, while it trains and afterwards.

    monitor = Monitor(callback=lambda alert: logger.alert(alert.title, alert.text, alert.level))
    monitor.check(global_step, stats)            # before the step's commit, which then records them
    logger.commit(epoch, step, global_step, stats)

A rule looks at the newest row and at the rows before it, and is pure. An alert is raised when its condition
begins to hold, and again only after it did not. `alerts_of` does the same to a recorded run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import eventlog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pyarrow as pa

__all__ = [
    "Alert",
    "EntropyCollapse",
    "GradientNorm",
    "Monitor",
    "NotFinite",
    "Overfitting",
    "Row",
    "Rule",
    "Straggler",
    "alerts_of",
    "default_rules",
    "scan",
]

TAG: Final = "alert/"  # a commit's tags of this name are alerts
KEPT_ROWS: Final = 1000
_COUNT = "__count"


@dataclass(frozen=True, slots=True)
class Row:
    """The metrics of a step; `ranks` are the numbers known of each rank, by key and global rank."""

    step: int
    metrics: Mapping[str, float]
    ranks: Mapping[str, Mapping[int, float]] = field(default_factory=dict[str, "Mapping[int, float]"])

    def matching(self, *patterns: str) -> dict[str, float]:
        """Return the metrics whose names fit one of the globs; counts are none."""
        return {
            key: value
            for key, value in self.metrics.items()
            if not key.endswith(_COUNT) and any(fnmatchcase(key, pattern) for pattern in patterns)
        }


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

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """Return an alert for every key (and rank) for which the condition holds now."""
        ...


# -- the rules -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A metric is NaN or infinite."""

    keys: tuple[str, ...] = ("*",)

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

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """See `Rule`."""
        for key, value in now.matching(*self.keys).items():
            if abs(value) < self.least:
                text = f"{key} is {value:.3g}, below {self.least:g}"
                yield Alert("vanishing_gradient", key, now.step, value, text, "error")
            before = _finite(past, key)[-self.window :]
            usual = statistics.median(before) if len(before) >= self.enough else math.inf
            if math.isfinite(usual) and value > self.factor * usual:
                text = f"{key} is {value:.3g}, more than {self.factor:g} times its median of {usual:.3g}"
                yield Alert("exploding_gradient", key, now.step, value, text, "error")


@dataclass(frozen=True, slots=True)
class EntropyCollapse:
    """The policy's entropy falls below `share` of the highest it had: it no longer explores."""

    keys: tuple[str, ...] = ("*entropy", "*entropy/avg")
    share: float = 0.1

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """See `Rule`."""
        for key, value in now.matching(*self.keys).items():
            highest = max(_finite(past, key), default=0.0)
            if highest > 0 and value < self.share * highest:
                text = f"{key} is {value:.3g}, below {self.share:g} of the {highest:.3g} it had"
                yield Alert("entropy_collapse", key, now.step, value, text)


@dataclass(frozen=True, slots=True)
class Overfitting:
    """Over the last `evaluations` the training score rose each time, and the evaluation's fell each time."""

    training: str = "rollout/reward"
    evaluation: str = "eval-rollout/reward"
    evaluations: int = 3

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """See `Rule`."""
        if self.evaluation not in now.metrics:
            return
        both = [row.metrics for row in (*past, now) if {self.training, self.evaluation} <= row.metrics.keys()]
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

    def check(self, past: Sequence[Row], now: Row) -> Iterable[Alert]:
        """See `Rule`."""
        for key in now.ranks:
            if not any(fnmatchcase(key, pattern) for pattern in self.keys):
                continue
            known = [row for row in (*past, now) if key in row.ranks][-self.patience :]
            slow = [self._slow(row.ranks[key]) for row in known]
            if len(slow) < self.patience or slow[0] is None or len(set(slow)) > 1:
                continue
            rank, value = slow[0], now.ranks[key][slow[0]]
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


def _finite(rows: Iterable[Row], key: str) -> list[float]:
    return [row.metrics[key] for row in rows if math.isfinite(row.metrics.get(key, math.nan))]


def default_rules() -> list[Rule]:
    """Return all rules, with their defaults."""
    return [NotFinite(), GradientNorm(), EntropyCollapse(), Overfitting(), Straggler()]


# -- live ------------------------------------------------------------------------------------------


class Monitor:
    """Checks every step's metrics against rules; what it finds goes to the log and to a callback.

    The process that commits has one. `callback` is called with each new alert; what it raises is passed on.
    """

    def __init__(
        self, rules: Iterable[Rule] | None = None, *, callback: Callable[[Alert], None] | None = None
    ) -> None:
        self.rules = default_rules() if rules is None else list(rules)
        self.alerts: list[Alert] = []
        self._callback = callback
        self._past: deque[Row] = deque(maxlen=KEPT_ROWS)
        self._holding: set[tuple[str, str, int | None]] = set()

    def check(
        self, step: int, metrics: Mapping[str, float], ranks: Mapping[int, Mapping[str, float]] | None = None
    ) -> list[Alert]:
        """Return what is new at a step; the process's next commit records it.

        `ranks` are numbers of each rank, such as its timings, by global rank: see `metrics_of_ranks`.
        """
        found = self.judge(Row(step, dict(metrics), _by_key(ranks or {})))
        log = eventlog.current() if found else None
        if log is not None:
            for alert in found:  # all of them first: the callback may raise
                log.note({f"{TAG}{alert.rule}/{alert.key}/{alert.step}": _as_json(alert)})
        if self._callback is not None:
            for alert in found:
                self._callback(alert)
        return found

    def judge(self, row: Row) -> list[Alert]:
        """Return what is new in a row, and remember it; tells nobody."""
        holds = [alert for rule in self.rules for alert in rule.check(self._past, row)]
        fresh = [alert for alert in holds if _identity(alert) not in self._holding]
        still = {each for each in self._holding if not _speaks(row, each)}  # rows without the key say nothing
        self._holding = still | {_identity(alert) for alert in holds}
        self._past.append(row)
        self.alerts += fresh
        return fresh


def _identity(alert: Alert) -> tuple[str, str, int | None]:
    return alert.rule, alert.key, alert.rank


def _speaks(row: Row, identity: tuple[str, str, int | None]) -> bool:
    _, key, _ = identity
    return key in row.metrics or key in row.ranks


def _by_key(ranks: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for rank, metrics in ranks.items():
        for key, value in metrics.items():
            found.setdefault(key, {})[rank] = value
    return found


def _as_json(alert: Alert) -> dict[str, Any]:
    plain = asdict(alert)
    return plain if math.isfinite(alert.value) else {**plain, "value": repr(alert.value)}


def _from_json(plain: Any) -> Alert | None:
    """Read what `_as_json` wrote; None for anything else: a tag of that name may be somebody else's."""
    try:
        fields: dict[str, Any] = {**plain, "value": float(plain["value"])}
        texts = all(isinstance(fields[name], str) for name in ("rule", "key", "text"))
        numbers = isinstance(fields["step"], int) and isinstance(fields.get("rank"), int | None)
        return Alert(**fields) if texts and numbers else None
    except (KeyError, TypeError, ValueError):
        return None


# -- recorded --------------------------------------------------------------------------------------


class Session(Protocol):
    """What is needed of a recorded run: `aggregator.open_run` returns one."""

    def sql(self, query: str) -> pa.Table:
        """Answer a query over the views."""
        ...


def scan(rows: Iterable[Row], rules: Iterable[Rule] | None = None) -> list[Alert]:
    """Return the alerts that rows, in order, would have raised."""
    monitor = Monitor(rules)
    for row in rows:
        monitor.judge(row)
    return monitor.alerts


def alerts_of(session: Session, rules: Iterable[Rule] | None = None) -> list[Alert]:
    """Return the alerts of one recorded run, by step: what it noted itself, and what the rules find in it.

    Timings are looked at rank by rank, as every rank recorded them.
    """
    commits = (
        "select role, tags from commits "
        "where key is null and tags is not null and not superseded order by time"
    )
    noted = [
        (role, alert)
        for role, tags in _rows(session, commits)
        for name, found in json.loads(tags).items()
        if name.startswith(TAG) and (alert := _from_json(found)) is not None
    ]
    known = {(_identity(alert), alert.step) for _, alert in noted}
    known |= {
        (_identity(replace(alert, key=_timing(alert.key, role))), alert.step) for role, alert in noted
    }  # live, a process names timings of its own role only
    found = [each for each in scan(_recorded(session), rules) if (_identity(each), each.step) not in known]
    alerts = [*found, *(alert for _, alert in noted)]
    return sorted(alerts, key=lambda alert: (alert.step, alert.rule, alert.key, alert.rank or 0))


def _timing(key: str, role: str) -> str:
    return f"{key} ({role})"


def _recorded(session: Session) -> list[Row]:
    """Return what was committed, and the timings of every rank, as rows."""
    metrics: dict[int, dict[str, float]] = {}
    for step, key, value in _rows(session, "select step, key, value from metrics where not superseded"):
        metrics.setdefault(step, {})[key] = value
    ranks: dict[int, dict[str, dict[int, float]]] = {}
    timings = (
        "select step, key, role, rank, sum(sum) / sum(count) from records "
        "where kind = 'timing' and step is not null and not superseded group by all order by all"
    )
    for step, key, role, rank, seconds in _rows(session, timings):
        ranks.setdefault(step, {}).setdefault(_timing(key, role), {})[rank] = seconds
    steps = sorted(metrics.keys() | ranks.keys())
    return [Row(step, metrics.get(step, {}), ranks.get(step, {})) for step in steps]


def _rows(session: Session, query: str) -> Iterable[tuple[Any, ...]]:
    table = session.sql(query)
    return zip(*(column.to_pylist() for column in table.columns), strict=True)
