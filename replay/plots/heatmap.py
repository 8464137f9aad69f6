"""Heat map: where results lie in the plane of accuracy and response length, and how near the ideal corner.

Each cell counts results (say, of one task at one step). A task or run that is both right and brief lies in
the upper left corner, which is marked; each task's mean is marked by its number. It answers: which tasks buy
their accuracy with long responses?
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from eventlog import errors

from . import canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["heatmap", "results"]

COLOURS: Final = "cividis"  # even in lightness, made for colour-blind eyes (Nuñez, Anderton and Renslow 2018)
BINS: Final = (24, 20)
MOST_MARKS: Final = 30
_NEEDED: Final = ("task", "accuracy", "length")


def heatmap(table: pa.Table, *, title: str | None = None) -> Figure:
    """Draw (run?, task, accuracy, length) rows: a panel per run, all with the same axes and colours.

    Rows with a value that is null or not finite are not drawn; the panel says how many there were.

    Raises:
        QueryError: a column is missing, or nothing can be drawn.
        BackendMissingError: matplotlib is not installed.
    """
    if missing := [name for name in _NEEDED if name not in table.column_names]:
        raise errors.QueryError(
            f"expected columns task, accuracy, length, got none named {', '.join(missing)}"
        )
    runs = np.array(table["run"].to_pylist() if "run" in table.column_names else [""] * table.num_rows)
    tasks = np.array(table["task"].to_pylist())
    points = np.array([table[name].to_numpy(zero_copy_only=False) for name in ("length", "accuracy")], float)
    drawn = np.isfinite(canvas.placed(points)).all(axis=0)
    if not drawn.any():
        raise errors.UnansweredError(
            f"expected finite accuracies and lengths, got none in {table.num_rows} rows"
        )
    edges = [_edges(row[drawn], bins) for row, bins in zip(points, BINS, strict=True)]
    names = sorted(set(tasks.tolist()))
    shown = list(dict.fromkeys(runs.tolist()))
    counts = {r: np.histogram2d(*points[:, drawn & (runs == r)], bins=edges)[0] for r in shown}
    most = max(float(count.max()) for count in counts.values())
    figure, axes = canvas.panels(len(shown))
    image: Any = None
    for axis, run in zip(axes, shown, strict=True):
        grid = np.ma.masked_equal(counts[run].T, 0)  # nothing there is white, not dark
        image = axis.pcolormesh(*edges, grid, cmap=COLOURS, vmin=1, vmax=max(most, 2))
        here = runs == run
        _marks(axis, points[:, here & drawn], tasks[here & drawn], names)
        canvas.title(axis, run or "accuracy by response length")
        axis.set_xlabel("response length" + canvas.left_out(np.abs(points[:, here]).max(axis=0)))
        axis.set_ylabel("accuracy")
    figure.colorbar(image, ax=axes, label="results", ticks=canvas.whole())
    _key(figure, names, title)
    return figure


def results(table: pa.Table, accuracy: str, length: str) -> pa.Table:
    """Return (run?, task, accuracy, length) rows for (run?, step, key, value) rows, one a task and step.

    `accuracy` and `length` are keys with one `*` that stands for the task ("eval/*/accuracy"), or without one
    for a single task. A task has a row where it has both at one step.

    Raises:
        QueryError: a key with more than one `*`, or no step of any task that has both.
    """
    found: list[dict[Any, float]] = [{}, {}]
    rows = table.to_pylist()
    for values, pattern in zip(found, (accuracy, length), strict=True):
        fits = _pattern(pattern)
        for row in rows:
            if match := fits.fullmatch(row["key"]):
                values[row.get("run"), match["task"] or "all", row["step"]] = row["value"]
    both = [place for place in found[0] if place in found[1]]
    if not both:
        raise errors.UnansweredError(f"expected steps that have {accuracy!r} and {length!r}, got none")
    columns = {"run": [run for run, _, _ in both]} if "run" in table.column_names else {}
    columns |= {"task": [task for _, task, _ in both]}
    columns |= {
        name: [values[place] for place in both] for name, values in zip(_NEEDED[1:], found, strict=True)
    }
    return pa.table(columns)


def _pattern(key: str) -> re.Pattern[str]:
    before, *after = key.split("*")
    if len(after) > 1:
        raise errors.QueryError(f"expected a key with one * for the task, got {key!r}")
    if not after:
        return re.compile(f"{re.escape(before)}(?P<task>)")
    return re.compile(f"{re.escape(before)}(?P<task>.+){re.escape(after[0])}")


def _edges(values: Any, bins: int) -> Any:
    low, high = float(values.min()), float(values.max())
    pad = (high - low) * 0.05 or max(abs(low) * 0.05, 0.5)
    return np.linspace(low - pad, high + pad, bins + 1)


def _marks(axis: Any, points: Any, tasks: Any, names: list[str]) -> None:
    """Mark the ideal corner, and the mean of each task by its number."""
    axis.annotate(
        "★ ideal", (0, 1), xycoords="axes fraction", xytext=(4, -4), textcoords="offset points",
        va="top", fontsize=11, color="#D55E00", zorder=7,
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )  # fmt: skip
    for number, name in enumerate(names[:MOST_MARKS], 1):
        if (mine := tasks == name).any():
            mean = points[:, mine].mean(axis=1)
            box = {"boxstyle": "circle,pad=0.2", "facecolor": "white", "edgecolor": "#D55E00"}
            axis.text(*mean, str(number), fontsize=8, ha="center", va="center", bbox=box, zorder=6)


def _key(figure: Figure, names: list[str], title: str | None) -> None:
    left = len(names) - MOST_MARKS
    listed = [
        f"{'means: ' if number == 1 else ''}{number} {name}"
        for number, name in enumerate(names[:MOST_MARKS], 1)
    ]
    listed += [f"and {left} more without a mark"] if left > 0 else []
    canvas.listed(figure, listed)
    if title is not None:
        figure.suptitle(title, parse_math=False)
