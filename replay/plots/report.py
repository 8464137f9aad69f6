"""`report`: one HTML file that tells a run, without a network: curves, distributions, stragglers, losses."""

from __future__ import annotations

import os
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eventlog import errors

from ..console import progress_bar
from ..metrics import without_counts
from . import charts
from .page import Page, Section

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    Session = Any  # of `aggregator`, which is imported when a report is made

__all__ = ["report"]

MOST_CHARTS: Final = 120
"""Charts of one kind in a page; what is left out is said there."""
QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

_SUMMARY: Final = (
    "run path created steps superseded_steps unbound_windows incomplete_windows metrics records bytes"
)
_ATTEMPTS: Final = "attempt started ended outcome host resume_step owned_from steps superseded_steps"
_PRODUCERS: Final = (
    "role rank host pid started last_seen ended windows incomplete_windows lost_rows payload_bytes"
)


def report(
    run: str | os.PathLike[str] | Session,
    path: str | os.PathLike[str],
    *,
    keys: Iterable[str] | None = None,
    title: str | None = None,
    progress: bool = False,
) -> Path:
    """Write the report of a run, a directory or a session over one, to `path`, whole or not at all.

    `keys` (globs) choose what is drawn, `progress` shows a bar on a terminal. Raises BackendMissingError
    without plotly, NotARunError, and QueryError for keys that are not there.
    """
    from aggregator import open_run

    path, wanted = Path(path), None if keys is None else [*([keys] if isinstance(keys, str) else keys)]
    opened = open_run(run) if isinstance(run, str | os.PathLike) else nullcontext(run)
    with opened as session, progress_bar("report", len(_SECTIONS), shown=progress) as advance:
        page = Page(title or f"Run {Path(session.info()['path']).resolve().name}")
        for done, build in enumerate(_SECTIONS, 1):
            section = build(session, wanted)
            if section is not None:
                page.sections.append(section)
            advance(done)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(page.html(), "utf-8")
    return temporary.replace(path)


def _summary(run: Session, _wanted: Sequence[str] | None) -> Section:
    told = run.info()
    steps, sizes = told["steps"], told["bytes"]
    flat = {name: told[name] for name in _SUMMARY.split()} | {
        "steps": f"{steps['count']:,} ({steps['first']} to {steps['last']})" if steps["count"] else "none",
        "bytes": ", ".join(f"{name} {size:,}" for name, size in sizes.items()),
    }
    return Section(
        "Summary", rows=[{"": name.replace("_", " "), " ": _text(value)} for name, value in flat.items()]
    )


def _text(value: Any) -> Any:
    return f"{value:,}" if isinstance(value, int) else value


def _curves(run: Session, wanted: Sequence[str] | None) -> Section:
    table = run.metrics(wanted)
    names = list(without_counts(dict.fromkeys(table["key"].unique().to_pylist(), 0.0)))
    resumed = [a["owned_from"] for a in run.info()["attempts"][1:] if a["owned_from"] is not None]
    series = _by_key(table, names)
    still = {key: rows["value"][0].as_py() for key, rows in series if len(rows["value"].unique()) == 1}
    shown, says = _first([key for key in names if key not in still], "metrics")
    return Section(
        "Curves",
        "What was committed, by step; the table lists what was the same at all of its steps. "
        f"Dotted lines: where the run was resumed. {says}",
        rows=[{"metric": key, "value": value} for key, value in still.items()],
        charts=[charts.curve(key, rows, resumed) for key, rows in series if key in shown],
    )


def _distributions(run: Session, wanted: Sequence[str] | None) -> Section:
    """Fans from the payload; a run without one says so."""
    keys = _recorded(run, ("stat",), wanted)
    shown, says = _first(keys, "keys")
    found: list[dict[str, Any]] = []
    for key in shown:
        try:
            found.append(charts.fan(key, run.percentiles(key, QUANTILES, by=["step"]), QUANTILES))
        except errors.QueryError as without:
            return Section("Distributions", f"None: {without}")
    if not found:
        return Section("Distributions", "None: no tensors were recorded.")
    what = (
        "How the recorded values of all ranks that count are spread at each step, exactly, from the payload: "
        "the median, and around it the middle half, 10 % to 90 %, and all from the least to the greatest."
    )
    return Section("Distributions", f"{what} {says}", charts=found)


def _timings(run: Session, wanted: Sequence[str] | None) -> Section | None:
    """Rank by step: a straggler is a bright row."""
    keys = _recorded(run, ("timing",), wanted)
    shown, says = _first(keys, "timings")
    drawn = [charts.heat(key, run.reduce(key, ["avg"], by=["step", "role", "rank"])) for key in shown]
    what = (
        "Mean time of each rank at each step, relative to the median of the ranks at that step (the seconds, "
        "where there is one rank): a rank that is slower than the others is a bright row."
    )
    return Section("Timings", f"{what} {says}", charts=drawn, wide=True) if drawn else None


def _evaluations(run: Session, _wanted: Sequence[str] | None) -> Section | None:
    rows = run.sql("select step, key, value from evaluations order by step, key").to_pylist()
    names = without_counts({row["key"]: 0.0 for row in rows})
    table: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["key"] in names:
            table.setdefault(row["step"], {"step": row["step"]})[row["key"]] = row["value"]
    return (
        Section("Evaluations", "By the step whose policy was evaluated.", list(table.values()))
        if table
        else None
    )


def _losses(run: Session, _wanted: Sequence[str] | None) -> Section:
    told = run.info()
    attempts = [{name: attempt[name] for name in _ATTEMPTS.split()} for attempt in told["attempts"]]
    rows = [{"kind": "attempt", **row} for row in attempts]
    rows += [{"kind": "loss", **loss} for loss in told["losses"]]
    rows += [{"kind": "damage", "outcome": problem} for problem in told["problems"]]
    nothing = "" if told["losses"] or told["problems"] else " Nothing was lost or damaged."
    return Section(
        "Losses and attempts", f"How each attempt ended, and what of the log is missing.{nothing}", rows
    )


_SECTIONS: Final = (_summary, _curves, _distributions, _timings, _evaluations, _losses)


def _recorded(run: Session, kinds: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    rows = run.keys().to_pylist()
    keys = [row["key"] for row in rows if row["kind"] in kinds]
    if wanted is None:
        return keys
    # A pattern names metrics, as those of the curves: "k/avg" asks for "k" too.
    return [key for key in keys if any(fnmatchcase(key, w) or fnmatchcase(f"{key}/avg", w) for w in wanted)]


def _first(names: list[str], what: str) -> tuple[list[str], str]:
    """Return as many as a page shows, and what is to be said of the others."""
    left = len(names) - MOST_CHARTS
    return names[:MOST_CHARTS], f"{left} more {what} are not drawn here; choose some." if left > 0 else ""


def _by_key(table: pa.Table, keys: Sequence[str]) -> list[tuple[str, pa.Table]]:
    rows = np.asarray(table["key"].to_pylist(), object)
    return [(key, table.take(np.flatnonzero(rows == key))) for key in keys]
