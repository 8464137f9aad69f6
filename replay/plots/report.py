"""`report`: one HTML file that tells a run, without a network: curves, distributions, stragglers, losses."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aggregator import fits, progress_bar
from eventlog import errors, replacing

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
_BEFORE: Final = "before"
QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

_SUMMARY: Final = (
    "run path created steps superseded_steps unbound_windows incomplete_windows metrics records bytes"
)
_ATTEMPTS: Final = "attempt started ended outcome host resume_step owned_from steps superseded_steps"


class _Run(NamedTuple):
    """A run, and what is asked of it more than once."""

    session: Session
    info: dict[str, Any]
    kinds: dict[str, str]  # of the recorded keys
    wanted: Sequence[str] | None

    def recorded(self, kind: str) -> list[str]:
        """Return the recorded keys of a kind, of those that are wanted."""
        keys = [key for key, each in self.kinds.items() if each == kind]
        if self.wanted is None:
            return keys
        # A pattern names metrics, as those of the curves: "k/avg" asks for "k" too.
        names = {key: (key, f"{key}/avg") for key in keys}
        return [k for k in keys if any(fits(name, self.wanted) for name in names[k])]


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
        asked = _Run(session, session.info(), _kinds(session), wanted)
        page = Page(title or f"Run {Path(asked.info['path']).resolve().name}")
        for done, build in enumerate(_SECTIONS, 1):
            section = build(asked)
            if section is not None:
                page.sections.append(section)
            advance(done)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_text(page.html(), "utf-8")
    return path


def _kinds(session: Session) -> dict[str, str]:
    return {row["key"]: row["kind"] for row in session.keys().to_pylist() if row["kind"] != "metric"}


def _summary(run: _Run) -> Section:
    told = run.info
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


def _curves(run: _Run) -> Section:
    table = run.session.metrics(run.wanted)
    names = list(without_counts(dict.fromkeys(table["key"].unique().to_pylist(), 0.0)))
    resumed = [a["owned_from"] for a in run.info["attempts"][1:] if a["owned_from"] is not None]
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


def _distributions(run: _Run) -> Section:
    """Fans from the payload; a run without one says so."""
    shown, says = _first(run.recorded("stat"), "keys")
    if not shown:
        return Section("Distributions", "None: no tensors were recorded.")
    try:
        table = run.session.percentiles(shown, QUANTILES, by=["step"])
    except errors.QueryError as without:
        return Section("Distributions", f"None: {without}")
    found = [charts.fan(key, rows) for key, rows in _by_key(table, shown)]
    what = (
        "How the recorded values of all ranks that count are spread at each step, exactly, from the payload: "
        "the median, and around it the middle half, 10 % to 90 %, and all from the least to the greatest."
    )
    return Section("Distributions", f"{what} {says}", charts=found)


def _timings(run: _Run) -> Section | None:
    """Rank by step: a straggler is a bright row."""
    shown, says = _first(run.recorded("timing"), "timings")
    if not shown:
        return None
    table = run.session.reduce(shown, ["avg"], by=["step", "role", "rank"])
    drawn = [charts.heat(key, rows) for key, rows in _by_key(table, shown)]
    what = (
        "Mean time of each rank at each step, relative to the median of the ranks at that step (the seconds, "
        "where there is one rank): a rank that is slower than the others is a bright row."
    )
    return Section("Timings", f"{what} {says}", charts=drawn, wide=True)


def _evaluations(run: _Run) -> Section | None:
    rows = run.session.sql("select step, key, value from evaluations order by step, key").to_pylist()
    names = without_counts({row["key"]: 0.0 for row in rows})
    tags = _evaluated(run)
    table: dict[tuple[int, bool], dict[str, Any]] = {}
    for row in rows:
        step, key = row["step"], row["key"]
        if key in names:
            before = _untouched(key, tags.get(step, {}))
            shown = f"before (committed with {step})" if before else step
            table.setdefault((step, not before), {"step": shown})[key] = row["value"]
    if not table:
        return None
    what = "By the step whose policy was evaluated; before: the untouched model, before training."
    return Section("Evaluations", what, [table[at] for at in sorted(table)])


def _evaluated(run: _Run) -> dict[int, dict[str, set[Any]]]:
    """Return what the commits' tags say was evaluated: by step and evaluator's name, "before" or updates."""
    found: dict[int, dict[str, set[Any]]] = {}
    query = "select global_step, tags from commits where key is null and tags is not null and not superseded"
    for row in run.session.sql(query).to_pylist():
        for tag, value in json.loads(row["tags"]).items():
            first, *name = tag.split("/")
            if first == "evaluation" and isinstance(value, int | str):
                name = name[:-1] if name[-1:] == [str(value)] else name
                found.setdefault(row["global_step"], {}).setdefault("/".join(name).strip("/"), set()).add(
                    value
                )
    return found


def _untouched(key: str, evaluated: dict[str, set[Any]]) -> bool:
    """Whether a metric is of the evaluation before training: of those of its step, by their names."""
    rest = key.removeprefix("eval-rollout/")
    for name in sorted(evaluated, key=len, reverse=True):
        if not name or rest.startswith(f"{name}/"):
            said, inside = evaluated[name], f"{name}/{_BEFORE}/".lstrip("/")
            return said == {_BEFORE} or (_BEFORE in said and rest.startswith(inside))
    return False


def _losses(run: _Run) -> Section:
    told = run.info
    attempts = [{name: attempt[name] for name in _ATTEMPTS.split()} for attempt in told["attempts"]]
    rows = [{"kind": "attempt", **row} for row in attempts]
    rows += [{"kind": "loss", **loss} for loss in told["losses"]]
    rows += [{"kind": "damage", "outcome": problem} for problem in told["problems"]]
    nothing = "" if told["losses"] or told["problems"] else " Nothing was lost or damaged."
    return Section(
        "Losses and attempts", f"How each attempt ended, and what of the log is missing.{nothing}", rows
    )


_SECTIONS: Final = (_summary, _curves, _distributions, _timings, _evaluations, _losses)


def _first(names: list[str], what: str) -> tuple[list[str], str]:
    """Return as many as a page shows, and what is to be said of the others."""
    left = len(names) - MOST_CHARTS
    return names[:MOST_CHARTS], f"{left} more {what} are not drawn here; choose some." if left > 0 else ""


def _by_key(table: pa.Table, keys: Sequence[str]) -> list[tuple[str, pa.Table]]:
    """Return the rows of each of the keys that has any, in their order."""
    places: dict[str, list[int]] = {key: [] for key in keys}
    for place, key in enumerate(table["key"].to_pylist()):
        if key in places:
            places[key].append(place)
    return [(key, table.take(np.array(those))) for key, those in places.items() if those]
