"""Curves: how a key moves over the steps, one panel a key, one line a run.

Panels have their own y axis, as keys have their own units; nothing is clipped, rescaled or cut off at a
percentile. Where a value is missing or not finite the line breaks, and the panel says how many there were.
Smoothing is never silent: the values stay visible, and the picture names the weight.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from eventlog import errors

from . import canvas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["curves", "smoothed"]

MOST_PANELS: Final = 24
_NEEDED: Final = ("step", "key", "value")
_FAINT: Final = 0.3


class _Line(NamedTuple):
    run: str | None
    key: str
    rows: NDArray[np.int64]  # where the line's points lie in the table, by step
    steps: NDArray[np.int64]
    values: Floats  # NaN for null


def curves(
    table: pa.Table, *, smooth: float | None = None, palette: str = "okabe-ito", title: str | None = None
) -> Figure:
    """Draw a table of (run?, step, key, value) rows, as `Session.metrics` returns it.

    `smooth` adds an exponential moving average with that weight of the past, 0 < smooth < 1; the values
    themselves are then drawn faintly behind it.

    Raises:
        QueryError: a column is missing, there is no row, more than 24 keys, or `smooth` is out of range.
        BackendMissingError: matplotlib is not installed.
    """
    lines = _lines(table)
    if smooth is not None:
        _check_weight(smooth)
    keys = sorted({line.key for line in lines})
    if not 0 < len(keys) <= MOST_PANELS:
        raise errors.QueryError(f"expected 1 to {MOST_PANELS} keys to draw, got {len(keys)}")
    runs = sorted({line.run or "" for line in lines})
    style = dict(zip(runs, canvas.styles(len(runs), palette), strict=True))
    figure, axes = canvas.panels(len(keys))
    for axis, key in zip(axes, keys, strict=True):
        mine = [line for line in lines if line.key == key]
        for line in mine:
            _draw(axis, line, style[line.run or ""], smooth)
        canvas.title(axis, key)
        axis.set_xlabel("step" + _not_finite(mine), parse_math=False)
    _legend(figure, runs if "run" in table.column_names else [], style, smooth)
    if title is not None:
        figure.suptitle(title, parse_math=False)
    return figure


def smoothed(table: pa.Table, weight: float) -> pa.Table:
    """Return the table with a column `ema`: what `curves` draws for that smoothing, row by row.

    The average is taken over the finite values so far, by step, and corrected for its start (the first value
    is not counted more than its share); it is null where the value is null or not finite.

    Raises:
        QueryError: as `curves`.
    """
    _check_weight(weight)
    out = np.full(table.num_rows, np.nan)
    for line in _lines(table):
        out[line.rows] = _ema(line.values, weight)
    return table.append_column("ema", pa.array(out, pa.float64(), from_pandas=True))


def _check_weight(weight: float) -> None:
    if not 0 < weight < 1:
        raise errors.QueryError(f"expected a smoothing weight between 0 and 1, got {weight}")


def _lines(table: pa.Table) -> list[_Line]:
    if missing := [name for name in _NEEDED if name not in table.column_names]:
        raise errors.QueryError(
            f"expected columns step, key, value to draw, got none named {', '.join(missing)}"
        )
    steps = table["step"].to_numpy()
    values = np.asarray(table["value"].to_numpy(), np.float64)
    runs = table["run"].to_pylist() if "run" in table.column_names else [None] * table.num_rows
    members: dict[tuple[str | None, str], list[int]] = {}
    for i, name in enumerate(zip(runs, table["key"].to_pylist(), strict=True)):
        members.setdefault(name, []).append(i)
    lines: list[_Line] = []
    for (run, key), found in members.items():
        rows = np.asarray(found, np.int64)
        rows = rows[np.argsort(steps[rows], kind="stable")]
        lines.append(_Line(run, key, rows, steps[rows], values[rows]))
    return lines


def _ema(values: Floats, weight: float) -> Floats:
    out = np.full(len(values), np.nan)
    total, mass = 0.0, 0.0
    for i, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total = weight * total + (1 - weight) * value
            mass = weight * mass + (1 - weight)
            out[i] = total / mass
    return out


def _draw(axis: Axes, line: _Line, style: canvas.Style, smooth: float | None) -> None:
    colour, dashes = style
    values = np.where(np.isfinite(line.values), line.values, np.nan)
    faint = 1.0 if smooth is None else _FAINT
    axis.plot(line.steps, values, color=colour, linestyle=dashes, linewidth=1.2, alpha=faint)
    lone = _lone(values)  # a line through a single point is invisible
    axis.plot(line.steps[lone], values[lone], ".", color=colour, markersize=5, alpha=faint)
    if smooth is not None:
        axis.plot(line.steps, _ema(line.values, smooth), color=colour, linestyle=dashes, linewidth=1.8)


def _lone(values: Floats) -> NDArray[np.bool_]:
    there = np.isfinite(values)
    before = np.append(False, there[:-1])
    after = np.append(there[1:], False)
    return there & ~before & ~after


def _not_finite(lines: Sequence[_Line]) -> str:
    count = sum(int(np.count_nonzero(~np.isfinite(line.values))) for line in lines)
    return f" ({count} not finite: not drawn)" if count else ""


def _legend(figure: Figure, runs: list[str], style: dict[str, canvas.Style], smooth: float | None) -> None:
    """One legend for all panels: the runs' names as they are, and what the smoothing is."""
    from matplotlib.lines import Line2D

    entries = [(run, Line2D([], [], color=style[run][0], linestyle=style[run][1])) for run in runs]
    if smooth is not None:
        entries.append(("as logged", Line2D([], [], color="#555555", alpha=_FAINT, linewidth=1.2)))
        entries.append((f"EMA, weight {smooth:g}", Line2D([], [], color="#555555", linewidth=1.8)))
    if not entries:
        return
    handles = [handle for _, handle in entries]
    # A label that begins with "_" would be left out: the texts are set afterwards.
    legend = figure.legend(
        handles, [str(i) for i in range(len(handles))], loc="outside lower center", ncols=3
    )
    legend.get_frame().set_linewidth(0)
    for text, (label, _) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(label)
