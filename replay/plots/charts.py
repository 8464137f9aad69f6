"""Charts of the one-page report: tables in, plotly figures out, as plain data that goes into the page.

Names are data, never markup: plotly reads a few HTML tags in texts, so every text is escaped.
"""

from __future__ import annotations

import html
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .canvas import PALETTES, lone

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    Chart = dict[str, Any]

__all__ = ["HEAT", "curve", "fan", "heat", "text"]

PALETTE: Final = "okabe-ito"
HEAT: Final = "cividis"  # even in lightness, made for colour-blind eyes (Nuñez, Anderton and Renslow 2018)
_COLOURS: Final = PALETTES[PALETTE]
_TITLE: Final = 44  # characters of a key on a line
_LINE: Final = 19  # pixels of one
_HALF: Final = 0.5
_INK: Final = "#222222"
_GRID: Final = "#DDDDDD"
_AXIS: Final = {"gridcolor": _GRID, "zeroline": False, "linecolor": _GRID, "automargin": True}


def text(name: str) -> str:
    """Return a name as plotly shows it letter by letter."""
    return html.escape(name, quote=False)


def curve(key: str, table: pa.Table, resumed: Iterable[int] = ()) -> Chart:
    """Draw (run?, step, value) rows of one key, a line a run; steps where an attempt resumed are marked."""
    runs = table["run"].to_pylist() if "run" in table.column_names else [""] * table.num_rows
    steps, values = table["step"].to_numpy(), table["value"].to_numpy(zero_copy_only=False)
    traces: list[Chart] = []
    for number, run in enumerate(dict.fromkeys(runs)):
        mine = np.array([each == run for each in runs])
        traces.append(
            _line(steps[mine], values[mine], _COLOURS[number % len(_COLOURS)], name=text(run) or "value")
        )
    odd = sum(value is None for trace in traces for value in trace["y"])
    label = f"step ({odd} not finite: not drawn)" if odd else "step"
    return _figure(key, traces, label, shapes=[_mark(step) for step in resumed], legend=len(traces) > 1)


def fan(key: str, table: pa.Table) -> Chart:
    """Draw how a key's values are spread at each step, as `Session.percentiles` returns it.

    Its quantiles `p…`, the least first, are symmetric around the median, which is one of them: bands between
    the outer ones, a line for the median.
    """
    steps = table["step"].to_numpy()
    names = [name for name in table.column_names if name.startswith("p")]
    columns = [table[name].to_numpy(zero_copy_only=False) for name in names]
    half = len(names) // 2
    traces: list[Chart] = []
    for i in range(half):
        low, high = columns[i], columns[-1 - i]
        label = f"{names[i]} to {names[-1 - i]}"
        hidden = {"mode": "lines", "line": {"width": 0}, "legendgroup": label}
        traces += [
            {**_xy(steps, low), **hidden, "showlegend": False, "hoverinfo": "skip"},
            {**_xy(steps, high), **hidden, "name": label, "fill": "tonexty",
             "fillcolor": f"rgba(0,114,178,{0.15 + 0.2 * i / max(1, half - 1):.2f})"},
        ]  # fmt: skip
    traces.append(_line(steps, columns[half], _COLOURS[0], name="median"))
    return _figure(key, traces, "step")


def heat(key: str, table: pa.Table) -> Chart:
    """Draw the mean seconds of a key (column `avg`) for each (role, rank) and step.

    Of several ranks the colour is the time relative to the median of the ranks at that step, so that one slow
    step does not hide a rank that is always slow; what is beyond half and twice of it is drawn as that.
    """
    rows = {each: i for i, each in enumerate(_by_rank(table))}
    steps = {step: i for i, step in enumerate(_spaced(sorted(set(table["step"].to_pylist()))))}
    seconds = np.full((len(rows), len(steps)), np.nan)
    for role, rank, step, value in _columns(table, "role", "rank", "step", "avg"):
        seconds[rows[f"{role} {rank}"], steps[step]] = math.nan if value is None else value
    trace = {
        "type": "heatmap", "x": list(steps), "y": [text(row) for row in rows], "colorscale": HEAT.title(),
        "customdata": seconds.tolist(),
        "hovertemplate": "%{y}, step %{x}: %{customdata:.4g} s<extra></extra>",
    }  # fmt: skip
    if len(rows) > 1:
        known = ~np.isnan(seconds).all(axis=0)
        relative = np.full_like(seconds, np.nan)
        relative[:, known] = seconds[:, known] / np.nanmedian(seconds[:, known], axis=0)
        trace |= {"z": relative.tolist(), "zmin": _HALF, "zmax": 1 / _HALF, "colorbar": _bar("x median")}
    else:
        trace |= {"z": seconds.tolist(), "colorbar": _bar("seconds")}
    chart = _figure(key, [trace], "step")
    chart["layout"]["height"] = 124 + chart["layout"]["margin"]["t"] + 22 * len(rows)
    chart["layout"]["margin"]["r"] = 110
    chart["layout"]["yaxis"] = {**_AXIS, "type": "category", "autorange": "reversed", "showgrid": False}
    return chart


def _spaced(steps: list[int]) -> list[int]:
    """Return steps with empty ones in their gaps: else the cells beside a gap would be drawn across it."""
    usual = min((after - step for step, after in pairwise(steps)), default=1)
    found = set(steps)
    for step, after in pairwise(steps):
        if after - step > usual:
            found |= {step + usual, after - usual}
    return sorted(found)


def _bar(what: str) -> Chart:
    return {"title": {"text": what, "side": "right"}, "thickness": 12}


def _by_rank(table: pa.Table) -> list[str]:
    return [f"{role} {rank}" for role, rank in sorted(set(_columns(table, "role", "rank")))]


def _columns(table: pa.Table, *columns: str) -> list[tuple[Any, ...]]:
    return list(zip(*(table[column].to_pylist() for column in columns), strict=True))


def _xy(steps: Any, values: Any) -> Chart:
    return {"type": "scatter", "x": steps.tolist(), "y": [_finite(value) for value in values.tolist()]}


def _line(steps: Any, values: Any, colour: str, **more: Any) -> Chart:
    drawn: Chart = {**_xy(steps, values), "mode": "lines", "line": {"color": colour, "width": 1.6}, **more}
    if (alone := lone(values.astype(float))).any():
        drawn |= {"mode": "lines+markers", "marker": {"size": np.where(alone, 5, 0).tolist()}}
    return drawn


def _finite(value: float | None) -> float | None:
    """Return None, which breaks a line, for what has no place on an axis."""
    return value if value is not None and math.isfinite(value) else None


def _mark(step: int) -> Chart:
    return {
        "type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper",
        "line": {"color": "#888888", "width": 1, "dash": "dot"},
    }  # fmt: skip


def _figure(key: str, traces: list[Chart], xlabel: str, *, legend: bool = False, **layout: Any) -> Chart:
    lines = [text(key[at : at + _TITLE]) for at in range(0, len(key), _TITLE)]
    top = 20 + _LINE * len(lines)
    title = {"text": "<br>".join(lines), "x": 0, "xref": "paper", "y": 1, "yanchor": "top", "pad": {"t": 10}}
    return {
        "data": traces,
        "layout": {
            "title": {**title, "yref": "container", "font": {"size": 14}},
            "font": {"color": _INK, "size": 12},
            "margin": {"l": 56, "r": 36, "t": top, "b": 40},
            "height": 244 + top,
            "modebar": {"orientation": "v"},  # beside the chart, not across its title
            "plot_bgcolor": "white",
            "paper_bgcolor": "white",
            "colorway": list(_COLOURS),
            "showlegend": legend,
            "legend": {"orientation": "h", "y": -0.25},
            "xaxis": {**_AXIS, "title": {"text": xlabel, "standoff": 6}},
            "yaxis": dict(_AXIS),
            **layout,
        },
    }
