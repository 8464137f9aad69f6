"""The sheet a picture is drawn on: figure, panels, colours by name, and the way into a file.

matplotlib is imported when the first figure is made, and only its `Figure`: no pyplot, no current figure, no
back end to choose, so that drawing works in threads, on servers and inside somebody's notebook alike.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from eventlog import errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PALETTES", "Style", "panels", "save", "styles", "title"]

Dashes = Literal["-", "--", "-.", ":"]
Style = tuple[str, Dashes]  # a colour and a line style: more lines than colours still differ

PALETTES: Final[dict[str, tuple[str, ...]]] = {
    # Okabe and Ito (2008): told apart with every common colour blindness. Yellow, faint on white, is last.
    "okabe-ito": (
        "#0072B2",
        "#D55E00",
        "#009E73",
        "#CC79A7",
        "#E69F00",
        "#56B4E9",
        "#000000",
        "#F0E442",
    ),
    "grey": ("#000000", "#555555", "#888888", "#AAAAAA"),
}
FORMATS: Final = (".png", ".svg")
_LINES: Final[tuple[Dashes, ...]] = ("-", "--", "-.", ":")
_COLUMNS: Final = 3
_PANEL: Final = (4.8, 3.0)  # inches


def styles(count: int, palette: str = "okabe-ito") -> list[Style]:
    """Return `count` styles that differ: all colours with a full line first, then dashed, and so on.

    Raises:
        QueryError: the palette is none of `PALETTES`.
    """
    if palette not in PALETTES:
        raise errors.QueryError(f"expected a palette out of {', '.join(PALETTES)}, got {palette!r}")
    colours = PALETTES[palette]
    return [(colours[i % len(colours)], _LINES[i // len(colours) % len(_LINES)]) for i in range(count)]


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a new figure with `count` panels in rows of up to three, their x axes aligned in range.

    Raises:
        BackendMissingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as exc:
        raise errors.BackendMissingError(
            "expected matplotlib for a plot, got none: pip install 'areal-metrics[plots]'"
        ) from exc
    columns = min(count, _COLUMNS)
    rows = math.ceil(count / columns)
    size = (max(6.4, columns * _PANEL[0]), max(4.0, rows * _PANEL[1]))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    for axis in axes[:count]:
        axis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelbottom=True)  # shared axes hide it but in the last row
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 0.5
    return figure, axes[:count]


def title(axes: Any, text: str) -> None:
    """Write a title that is shown as it is: a key's `$` or `_` is no formula."""
    axes.set_title(text, fontsize="medium", loc="left", parse_math=False)


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as PNG or SVG, by the path's ending; the same figure gives the same bytes.

    Raises:
        QueryError: another ending.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise errors.QueryError(f"expected a file name ending in {' or '.join(FORMATS)}, got {path}")
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    # its ids would be random otherwise; a name in a script that the font lacks is drawn as boxes, and kept
    with mpl.rc_context({"svg.hashsalt": "areal-metrics"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        figure.savefig(path, metadata=metadata)
    return path
