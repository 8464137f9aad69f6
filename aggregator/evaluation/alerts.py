"""Alerts: rules on the metrics of a run, while it trains and afterwards.

    monitor = Monitor(callback=lambda alert: logger.alert(alert.title, alert.text, alert.level))
    monitor.check(global_step, stats)            # before the step's commit, which then records them
    logger.commit(epoch, step, global_step, stats)

A rule looks at the newest row and at the rows before it, and is pure. An alert is raised when its condition
begins to hold, and again only after it did not, restarts of the run or not. `alerts_of` does the same to a
recorded run.
"""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import eventlog
from eventlog import as_metric, errors

from ..progress import progress_bar
from . import history
from .failure import text_of
from .rules import Alert, Past, Row, Rule, default_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pyarrow as pa

__all__ = ["Monitor", "alerts_of", "scan"]

TAG: Final = "alert/"  # a commit's tags of this name are alerts
_ROWS_AT_A_TIME: Final = 100  # that progress is told of

_log = logging.getLogger("areal_metrics.evaluation")

# -- live ------------------------------------------------------------------------------------------


class Monitor:
    """Checks every step's metrics against rules; what it finds goes to the log and to a callback.

    The process that commits has one. `callback` is called with each new alert; what it raises is passed on.
    Where a log is started, the first check looks back in it: a resumed run knows how its metrics were, and
    is not told again of what lasts. Numbers of each rank are not in it: they begin anew.
    """

    def __init__(
        self, rules: Iterable[Rule] | None = None, *, callback: Callable[[Alert], None] | None = None
    ) -> None:
        self.rules = _checked(default_rules() if rules is None else rules)
        if inspect.iscoroutinefunction(callback):
            raise errors.ConfigError(f"expected a plain function as callback, got an async one: {callback!r}")
        self.alerts: list[Alert] = []
        self._callback = callback
        self._past = Past()
        self._looked_back = False
        self._holding: set[tuple[str, str, int | None]] = set()

    def check(
        self, step: int, metrics: Mapping[str, float], ranks: Mapping[int, Mapping[str, float]] | None = None
    ) -> list[Alert]:
        """Return what is new at a step; the process's next commit records it.

        `ranks` are numbers of each rank, such as its timings, by global rank: see `metrics_of_ranks`.
        """
        row, log = Row(step, _numbers(metrics), _by_key(ranks or {})), eventlog.current()
        if log is not None and not self._looked_back:
            self._looked_back = True
            self._look_back(log, step)
        found = self.judge(row)
        if log is not None and found:
            # all of them first: the callback may raise
            log.note({f"{TAG}{each.rule}/{each.key}/{each.step}": asdict(each) for each in found})
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

    def _look_back(self, log: eventlog.Log, step: int) -> None:
        """Judge what the run committed before a step, for nobody to hear."""
        told = [*self.alerts]
        try:
            for row in history.recall(log, step, self._past):
                self.judge(row)
        except Exception as error:  # noqa: BLE001 - the step is checked all the same
            _log.warning("the log's past metrics cannot be read (%s): %s", text_of(error), log.run.path)
        self.alerts = told


def _checked(rules: Iterable[Rule]) -> list[Rule]:
    """Return rules as a list; a ConfigError for what is none."""
    if hasattr(rules, "check"):
        raise errors.ConfigError(f"expected rules as a list, got one rule: {rules!r:.80}")
    listed = list(rules)
    for rule in listed:
        if isinstance(rule, type) or not callable(getattr(rule, "check", None)):
            raise errors.ConfigError(f"expected rules, such as NotFinite(), got {rule!r:.80}")
    return listed


def _identity(alert: Alert) -> tuple[str, str, int | None]:
    return alert.rule, alert.key, alert.rank


def _speaks(row: Row, identity: tuple[str, str, int | None]) -> bool:
    _, key, _ = identity
    return key in row.metrics or key in row.ranks


def _by_key(ranks: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for rank, metrics in ranks.items():
        for key, value in _numbers(metrics).items():
            found.setdefault(key, {})[rank] = value
    return found


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats; a RecordingError for what is no number."""
    return {key: float(as_metric(value, key)) for key, value in metrics.items()}


def _from_json(plain: Any) -> Alert | None:
    """Read an alert's tag; None for anything else: a tag of that name may be somebody else's."""
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


def alerts_of(
    session: Session, rules: Iterable[Rule] | None = None, *, progress: bool = False
) -> list[Alert]:
    """Return the alerts of one recorded run, by step: what it noted itself, and what the rules find in it.

    Timings are looked at rank by rank, as every rank recorded them. `progress` shows how far it is, on a
    terminal.
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
    rows = _recorded(session)
    with progress_bar("alerts", len(rows), shown=progress) as advance:
        found = scan(_told(rows, advance), rules)
    found = [each for each in found if (_identity(each), each.step) not in known]
    alerts = [*found, *(alert for _, alert in noted)]
    return sorted(alerts, key=lambda alert: (alert.step, alert.rule, alert.key, alert.rank or 0))


def _told(rows: list[Row], advance: Callable[..., object]) -> Iterable[Row]:
    """Yield the rows, and tell how many are done."""
    for i, row in enumerate(rows):
        if i % _ROWS_AT_A_TIME == 0:
            advance(i)
        yield row
    advance(len(rows))


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
