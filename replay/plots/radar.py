"""Radar: methods over a few dimensions at once, each scaled to the methods shown, its direction stated.

On every spoke the rim is the best of the methods shown and the inner ring the worst; both are written there
as numbers, so that a large difference in shape can be seen to be a small one in fact. It answers: which
method is better at what?
"""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa

from eventlog import errors

from . import canvas

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

__all__ = ["DEFINITIONS", "DIRECTIONS", "radar", "scores"]

Direction = Literal["higher", "lower"]

DEFINITIONS: Final = {
    "reward": "mean over the last tenth of the steps",
    "efficiency": "mean over all steps: the sooner it rises, the higher",
    "stability": "standard deviation of the changes from step to step in the last half",
}
DIRECTIONS: Final[dict[str, Direction]] = {"reward": "higher", "efficiency": "higher", "stability": "lower"}
_NOISE: Final = 1e-12  # of a value: the rest is rounding
_INNER: Final = 0.25  # where the worst is drawn: at the centre no shape could be seen


def scores(table: pa.Table) -> pa.Table:
    """Return (run, dimension, value) rows for the curves of one key, given (run, step, value) rows.

    The dimensions are those of `DEFINITIONS`; values that are null or not finite are left out. A dimension
    of which there is no value (stability of a single step) has none. QueryError for several keys.
    """
    keys = set(table["key"].to_pylist()) if "key" in table.column_names else set[str]()
    if len(keys) > 1:
        raise errors.QueryError(f"expected the curves of one key, got {', '.join(map(repr, sorted(keys)))}")
    found: list[dict[str, Any]] = []
    runs = np.array(table["run"].to_pylist())
    steps, values = table["step"].to_numpy(), table["value"].to_numpy(zero_copy_only=False).astype(float)
    for run in dict.fromkeys(runs.tolist()):
        mine = (runs == run) & np.isfinite(values)
        curve = values[mine][np.argsort(steps[mine], kind="stable")]
        if not len(curve):
            continue
        changes = np.diff(curve[len(curve) // 2 :])
        made = {
            "reward": float(curve[-max(1, len(curve) // 10) :].mean()),
            "efficiency": float(curve.mean()),
            "stability": _spread(changes, np.abs(curve).max()) if len(changes) else None,
        }
        found += [{"run": run, "dimension": name, "value": value} for name, value in made.items()]
    schema = pa.schema([("run", pa.string()), ("dimension", pa.string()), ("value", pa.float64())])
    return pa.Table.from_pylist(found, schema)


def _spread(changes: Any, size: float) -> float:
    """Return their standard deviation; 0 where it is what rounding leaves of values of that size."""
    with np.errstate(over="ignore"):
        spread = float(changes.std())
    return spread if spread > _NOISE * size else 0.0


def radar(
    table: pa.Table,
    directions: Mapping[str, Direction] | None = None,
    *,
    palette: str = "okabe-ito",
    title: str | None = None,
) -> Figure:
    """Draw (run, dimension, value) rows; `directions` says for each dimension which way is better.

    Raises:
        QueryError: fewer than 2 runs or 3 dimensions, one without a direction or a value of every run.
        BackendMissingError: matplotlib is not installed.
    """
    directions = DIRECTIONS if directions is None else directions
    runs, dimensions, values = _grid(table, directions)
    figure, axis = canvas.polar()
    angles = np.linspace(0, 2 * math.pi, len(dimensions), endpoint=False)
    radii = _scaled(values, [directions[name] for name in dimensions])
    styles = canvas.styles(len(runs), palette)
    for row, (colour, dashes) in zip(radii, styles, strict=True):
        closed = [np.append(angles, angles[0]), np.append(row, row[0])]
        axis.plot(*closed, color=colour, linestyle=dashes, linewidth=1.8)
        axis.fill(*closed, color=colour, alpha=0.08)
    axis.set_ylim(0, 1)
    axis.spines["polar"].set_visible(False)
    axis.set_yticks([_INNER, 1], ["worst", "best"], fontsize=7, color="#555555")
    labels = [_label(n, directions[n], values[:, i]) for i, n in enumerate(dimensions)]
    axis.set_xticks(angles, labels, fontsize=8)
    for text in axis.get_xticklabels():
        text.set_parse_math(False)
    canvas.legend(figure, [(run, canvas.stroke(style)) for run, style in zip(runs, styles, strict=True)])
    if title is not None:
        figure.suptitle(title, parse_math=False)
    return figure


def _label(name: str, direction: str, values: Any) -> str:
    best, worst = (values.max(), values.min()) if direction == "higher" else (values.min(), values.max())
    what = textwrap.wrap(DEFINITIONS.get(name, ""), 30)
    return "\n".join([f"{name} ({direction} is better)", *what, f"{worst:.4g} … {best:.4g}"])


def _scaled(values: Any, directions: list[Direction]) -> Any:
    """Scale each column so that its best is 1 and its worst `_INNER`; where all are equal, all are best."""
    signed = values * np.array([1 if direction == "higher" else -1 for direction in directions])
    signed = np.nan_to_num(signed, nan=-canvas.MOST, posinf=canvas.MOST, neginf=-canvas.MOST)
    low, high = signed.min(axis=0), signed.max(axis=0)
    apart = high - low > _NOISE * np.maximum(np.abs(low), np.abs(high))
    spread = np.where(apart, high - low, 1.0)
    return np.where(apart, _INNER + (1 - _INNER) * (signed - low) / spread, 1.0)


def _grid(table: pa.Table, directions: Mapping[str, str]) -> tuple[list[str], list[str], Any]:
    """Return runs, dimensions, and their values as a matrix."""
    found = {
        (row["run"], row["dimension"]): row["value"] for row in table.to_pylist() if row["value"] is not None
    }
    runs = list(dict.fromkeys(run for run, _ in found))
    dimensions = list(dict.fromkeys(dimension for _, dimension in found))
    if len(runs) < 2:
        raise errors.QueryError(f"expected 2 or more runs to compare, got {len(runs)}")
    if len(dimensions) < 3:
        raise errors.QueryError(f"expected 3 or more dimensions for a radar, got {len(dimensions)}")
    if unknown := [name for name in dimensions if directions.get(name) not in ("higher", "lower")]:
        raise errors.QueryError(
            f"expected a direction, higher or lower, for each dimension, got none for {unknown}"
        )
    missing = [(run, name) for run in runs for name in dimensions if (run, name) not in found]
    if missing:
        run, name = missing[0]
        raise errors.UnansweredError(
            f"expected a value of every run in each dimension, got none of {run!r} in {name!r}"
        )
    return runs, dimensions, np.array([[found[run, name] for name in dimensions] for run in runs], float)
