"""Table in, figure out: pictures of runs, without any global state.

Which picture answers which question: `curves`, is it getting better, and which run is ahead? `heatmap`, which
tasks buy their accuracy with long responses? `radar`, which method is better at what? `report`, what happened
in this run? matplotlib (extra `plots`) draws the first three, plotly (extra `report`) the last.
"""

from __future__ import annotations

from .canvas import PALETTES, save
from .curves import bands, curves, differences, smoothed
from .heatmap import heatmap, results
from .radar import radar, scores
from .report import report

__all__ = [
    "PALETTES",
    "bands",
    "curves",
    "differences",
    "heatmap",
    "radar",
    "report",
    "results",
    "save",
    "scores",
    "smoothed",
]
