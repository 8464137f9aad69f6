"""Everything a session answers of a run, so that two ways to read it can be compared to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aggregator import open_run
from eventlog import errors

if TYPE_CHECKING:
    from pathlib import Path

QUESTIONS = {
    "metrics": lambda s: s.metrics(),
    "wide": lambda s: s.metrics(wide=True),
    "recomputed": lambda s: s.metrics(source="recomputed"),
    "keys": lambda s: s.keys(),
    "moments": lambda s: s.reduce("*", ["avg", "sum", "count", "nonfinite"], by=["step", "rank"]),
    "spread": lambda s: s.reduce("x", ["std", "var", "min", "max", "median"], by=[]),
    "where": lambda s: s.reduce("x", ["avg", "p90"], where="y > 0"),
    "sequences": lambda s: s.reduce("x", ["avg", "max"], by="sequence"),
    "percentiles": lambda s: s.percentiles("*", [0, 0.25, 0.99], by=["step"]),
    "histogram": lambda s: s.histogram("x", 7, by=["attempt"]),
    "log": lambda s: s.histogram(["x", "lr"], "log"),
    "correlation": lambda s: s.correlation("x", "y", by=["rank"]),
    "percentile": lambda s: s.sql("from percentile('x', 0.5)"),
}


def answers(path: Path, **options: Any) -> dict[str, Any]:
    """Return every view and one answer of every kind; of a refused question what it was refused with."""
    found: dict[str, Any] = {}
    with open_run(path, **options) as session:
        for view in session.schema()["view"].unique().to_pylist():
            if "(" not in view:
                found[f"view {view}"] = _told(session.sql, f"select * from {view}")
        for name, ask in QUESTIONS.items():
            found[name] = _told(ask, session)
        said = session.info()
        found["info"] = {name: said[name] for name in said if name not in ("path", "label", "bytes")}
        found["info"]["producers"] = [
            {name: value for name, value in row.items() if not name.endswith("_bytes")}
            for row in found["info"]["producers"]
        ]
        found["problems"] = session.problems
    if "view producers" in found:
        found["view producers"] = [
            {name: value for name, value in row.items() if not name.endswith("_bytes")}
            for row in found["view producers"]
        ]
    return found


def _told(ask: Any, what: Any) -> Any:
    """Return an answer as plain values, floats spelled out so that NaN equals NaN and -0.0 is not 0.0."""
    try:
        rows = ask(what).to_pylist()
    except errors.QueryError as error:
        return str(error)
    return [{name: _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.hex() if isinstance(value, float) else value
