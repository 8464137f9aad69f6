"""Curves: how a key moves over the steps, one panel a key, one line a run.

Panels have their own y axis, as keys have their own units; nothing is clipped, rescaled or cut off at a
percentile. Where a value is missing, not finite or beyond 1e300 the line breaks, and the panel says how many
there were.
Smoothing is never silent: the values stay visible, and the picture names the weight. Several *members* of a
line (ranks, seeds) are drawn as their mean within a band from the least to the greatest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from eventlog import errors

from . import canvas, lettering

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["bands", "curves", "differences", "smoothed"]

MOST_PANELS: Final = 24
MOST_TOLD: Final = 8  # runs whose difference is read out
_NEEDED: Final = ("step", "key", "value")
_FAINT: Final = 0.3
_BAND: Final = 0.2


class _Line(NamedTuple):
    run: str | None
    key: str
    rows: NDArray[np.int64]  # where the line's points lie in the table, by step
    steps: NDArray[np.int64]
    values: Floats  # NaN for null; the mean of the members
    band: tuple[Floats, Floats] | None = None  # the least and the greatest of the members
    members: int = 0  # how many; 0: it has none


def curves(
    table: pa.Table,
    *,
    smooth: float | None = None,
    compare: bool = False,
    palette: str = "okabe-ito",
    title: str | None = None,
) -> Figure:
    """Draw a table of (run?, member?, step, key, value) rows, as `Session.metrics` returns it.

    `smooth` adds an exponential moving average with that weight of the past, 0 < smooth < 1; the values
    themselves are then drawn faintly behind it. `compare` reads out how far each run is from the first one,
    see `differences`.

    Raises:
        QueryError: a column is missing, there is no row, more than 24 keys, or `smooth` is out of range.
        BackendMissingError: matplotlib is not installed.
    """
    lines = _members_joined(_lines(table)) if "member" in table.column_names else _lines(table)
    if smooth is not None:
        _check_weight(smooth)
    keys = sorted({line.key for line in lines})
    if not 0 < len(keys) <= MOST_PANELS:
        raise errors.UnansweredError(f"expected 1 to {MOST_PANELS} keys to draw, got {len(keys)}")
    runs = list(dict.fromkeys(line.run or "" for line in lines))
    style = dict(zip(runs, canvas.styles(len(runs), palette), strict=True))
    figure, axes = canvas.panels(len(keys))
    for axis, key in zip(axes, keys, strict=True):
        mine = [line for line in lines if line.key == key]
        for line in mine:
            _draw(axis, line, style[line.run or ""], smooth)
        canvas.title(axis, key)
        values = np.concatenate([line.values for line in mine])
        told = ["step" + canvas.left_out(values), *(_read_out(mine) if compare else [])]
        axis.set_xlabel("\n".join(told), parse_math=False)
        if len(steps := np.unique(np.concatenate([line.steps for line in mine]))) == 1:
            axis.set_xticks(steps)
    if compare:
        canvas.grow(figure, min(len(runs), MOST_TOLD + 2) * canvas.rows_of(len(keys)))
    named = runs if "run" in table.column_names else []
    canvas.legend(figure, _entries(named, style, smooth, band=max(line.members for line in lines)))
    if title is not None:
        figure.suptitle(title, parse_math=False)
    return figure


def bands(table: pa.Table) -> pa.Table:
    """Return what `curves` draws of members: (run?, step, key, value, least, greatest), by key and step.

    `value` is the mean of the members' finite values at the step; null where there is none.

    Raises:
        QueryError: as `curves`.
    """
    lines = _members_joined(_lines(table))
    columns: dict[str, Any] = {name: [] for name in ("run", "step", "key")}
    numbers: list[tuple[Floats, ...]] = []
    for line in lines:
        columns["run"] += [line.run] * len(line.steps)
        columns["step"] += line.steps.tolist()
        columns["key"] += [line.key] * len(line.steps)
        numbers.append((line.values, *(line.band or ())))
    if "run" not in table.column_names:
        del columns["run"]
    for name, parts in zip(("value", "least", "greatest"), zip(*numbers, strict=True), strict=True):
        columns[name] = pa.array(np.concatenate(parts), pa.float64(), from_pandas=True)
    return pa.table(columns)


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


def differences(table: pa.Table) -> pa.Table:
    """Return how far each run is from the first that has the key: (key, run, relative_to, difference, steps).

    `relative_to` names that run, `difference` is the sum of (value - first) over the sum of |first|, over the
    `steps` of which both have a finite value: the mean relative difference, each step weighted by |first|, so
    that a step where the first is next to 0 does not outweigh all others. Null where it cannot be said.

    Raises:
        QueryError: as `curves`.
    """
    lines = _lines(table)
    rows: list[dict[str, Any]] = []
    for key in dict.fromkeys(line.key for line in lines):
        mine = [line for line in lines if line.key == key]
        rows += [
            {"key": key, "run": run, "relative_to": mine[0].run, "difference": difference, "steps": steps}
            for run, difference, steps in _differences(mine)
        ]
    texts = [(name, pa.string()) for name in ("key", "run", "relative_to")]
    return pa.Table.from_pylist(
        rows, pa.schema([*texts, ("difference", pa.float64()), ("steps", pa.int64())])
    )


def _differences(lines: Sequence[_Line]) -> list[tuple[str | None, float | None, int]]:
    first, *others = lines
    found: list[tuple[str | None, float | None, int]] = []
    for line in others:
        _, one, other = np.intersect1d(first.steps, line.steps, return_indices=True)
        base, value = first.values[one], line.values[other]
        both = np.isfinite(base) & np.isfinite(value)
        with np.errstate(all="ignore"):  # what cannot be said is no number
            apart = (value[both] - base[both]).sum() / np.abs(base[both]).sum()
        found.append((line.run, float(apart) if np.isfinite(apart) else None, int(both.sum())))
    return found


def _read_out(lines: Sequence[_Line]) -> list[str]:
    """Return lines of text: to which run the others are compared, and how far apart they are."""
    found = _differences(lines)
    told = [
        f"{lettering.fitted(run or '', 3.0, 10)}: {_said(apart, steps)}"
        for run, apart, steps in found[:MOST_TOLD]
    ]
    if len(found) > MOST_TOLD:
        told.append(f"and {len(found) - MOST_TOLD} more")
    return [f"relative to {lettering.fitted(lines[0].run or '', 3.0, 10)}:", *told] if told else []


def _said(apart: float | None, steps: int) -> str:
    if apart is None:
        return "no number" if steps else "no common steps"
    return f"{apart:+.1%}"


def _members_joined(lines: Sequence[_Line]) -> list[_Line]:
    """Return a line per run and key: the mean of its members at each step, and how far they spread."""
    joined: list[_Line] = []
    for run, key in dict.fromkeys((line.run, line.key) for line in lines):
        mine = [line for line in lines if (line.run, line.key) == (run, key)]
        rows = np.concatenate([line.rows for line in mine])
        values = np.concatenate([line.values for line in mine])
        steps, at = np.unique(np.concatenate([line.steps for line in mine]), return_inverse=True)
        finite = np.isfinite(values)
        count, total = (
            np.bincount(at[finite], minlength=len(steps)),
            np.bincount(at[finite], values[finite], len(steps)),
        )
        low, high = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
        np.minimum.at(low, at[finite], values[finite])
        np.maximum.at(high, at[finite], values[finite])
        there = count > 0
        mean = np.divide(total, count, out=np.full(len(steps), np.nan), where=there)
        joined.append(
            _Line(
                run,
                key,
                rows,
                steps,
                mean,
                (np.where(there, low, np.nan), np.where(there, high, np.nan)),
                len(mine),
            )
        )
    return joined


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
    of = table["member"].to_pylist() if "member" in table.column_names else [None] * table.num_rows
    places: dict[tuple[str | None, str, Any], list[int]] = {}
    for i, name in enumerate(zip(runs, table["key"].to_pylist(), of, strict=True)):
        places.setdefault(name, []).append(i)
    lines: list[_Line] = []
    for (run, key, _), found in places.items():
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
    if line.band is not None:
        low, high = map(canvas.placed, line.band)
        axis.fill_between(line.steps, low, high, color=colour, alpha=_BAND, linewidth=0)
    values = canvas.placed(line.values)
    faint = 1.0 if smooth is None else _FAINT
    axis.plot(line.steps, values, color=colour, linestyle=dashes, linewidth=1.2, alpha=faint)
    lone = canvas.lone(values)
    axis.plot(line.steps[lone], values[lone], ".", color=colour, markersize=5, alpha=faint)
    if smooth is not None:
        axis.plot(
            line.steps,
            canvas.placed(_ema(line.values, smooth)),
            color=colour,
            linestyle=dashes,
            linewidth=1.8,
        )


def _entries(
    runs: list[str], style: dict[str, canvas.Style], smooth: float | None, *, band: int
) -> list[tuple[str, Artist]]:
    """Say what the lines are: the runs' names, what the smoothing is, and what the bands are."""
    entries = [(run, canvas.stroke(style[run])) for run in runs]
    if smooth is not None:
        entries.append(("as logged", canvas.stroke("#555555", alpha=_FAINT, linewidth=1.2)))
        entries.append((f"EMA, weight {smooth:g}", canvas.stroke("#555555", linewidth=1.8)))
    if band:
        entries.append(
            (f"mean of {band}; band: least to greatest", canvas.stroke("#555555", alpha=_BAND, linewidth=8))
        )
    return entries
