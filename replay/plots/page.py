"""The page of a report: sections of text, tables and charts, one HTML file that needs no network."""

from __future__ import annotations

import html
import json
import math
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from typing import TYPE_CHECKING, Any

from eventlog import errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Page", "Section"]


@dataclass(slots=True)
class Section:
    """A part of the page: what it says, its table, its charts; `wide` gives each chart a line of its own."""

    name: str
    says: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    charts: Sequence[dict[str, Any]] = ()
    wide: bool = False


@dataclass(slots=True)
class Page:
    """Sections under a title."""

    title: str
    sections: list[Section] = field(default_factory=list[Section])

    def html(self) -> str:
        """Return the page, plotly's script included (about 5 MB).

        Raises:
            BackendMissingError: plotly is not installed.
        """
        charts: dict[str, Any] = {}
        parts = [_section(section, charts) for section in self.sections]
        links = " ".join(
            f'<a href="#{_anchor(section.name)}">{html.escape(section.name)}</a>' for section in self.sections
        )
        filled = {
            "title": html.escape(self.title),
            "links": links,
            "sections": "\n".join(parts),
            "plotly": _plotly(),
            "charts": _embedded(charts),
        }
        text = resources.files("replay.plots").joinpath("report.html").read_text("utf-8")
        head, *rest = text.split("@")
        # Every other piece is the name of a hole: what goes in is never searched for holes again.
        return head + "".join(filled[piece] if i % 2 == 0 else piece for i, piece in enumerate(rest))


def _section(section: Section, charts: dict[str, Any]) -> str:
    parts = [f'<h2 id="{_anchor(section.name)}">{html.escape(section.name)}</h2>']
    if section.says:
        parts.append(f"<p>{html.escape(section.says)}</p>")
    if section.rows:
        parts.append(_table(section.rows))
    if section.charts:
        divs: list[str] = []
        for chart in section.charts:
            charts[f"chart-{len(charts)}"] = chart
            divs.append(f'<div class="chart" id="chart-{len(charts) - 1}"></div>')
        parts.append(f'<div class="charts{" wide" if section.wide else ""}">{"".join(divs)}</div>')
    return "\n".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in names)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    match value:
        case None:
            return "<td></td>"
        case bool():
            return f"<td>{'yes' if value else 'no'}</td>"
        case int():
            return f'<td class="number">{value:,}</td>'
        case float():
            return f'<td class="number">{value:.6g}</td>'
        case datetime():
            return f"<td>{value:%Y-%m-%d %H:%M:%S} UTC</td>"
        case _:
            return f"<td>{html.escape(str(value))}</td>"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _plotly() -> str:
    """Return plotly's script, which holds no end of a script element of its own."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as exc:
        raise errors.BackendMissingError(
            "expected plotly for a report, got none: pip install 'areal-metrics[report]'"
        ) from exc
    return get_plotlyjs().replace("</script", "<\\/script")


def _embedded(data: Any) -> str:
    """Return JSON that may stand inside of a script element: nothing in it ends or opens an element."""
    text = json.dumps(_strict(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _strict(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _strict(item) for key, item in value.items()}
        case list() | tuple():
            return [_strict(item) for item in value]
        case _:
            return value
