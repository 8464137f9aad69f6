"""The one-page report: everything in one file, names harmless, every chart drawn by a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import eventlog
from aggregator import stats_tracker
from eventlog.errors import NotARunError, QueryError
from replay import StatsLogger, StatsLoggerConfig
from replay.plots import report
from tests.cli.conftest import write_run

EVIL = "<script>alert(1)</script>"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with tensors, timings, evaluations, and a name that wants to be a script."""
    root = tmp_path_factory.mktemp("report")
    config = StatsLoggerConfig(experiment_name="e", trial_name="t", fileroot=str(root))
    eventlog.start(root / "run", rank=0, world_size=1)
    with StatsLogger(config) as logger:
        for step in range(6):
            with stats_tracker.scope("actor"):
                stats_tracker.denominator(n=torch.ones(50, dtype=torch.bool))
                stats_tracker.stat("n", kl=torch.linspace(0, 1 + step, 50), **{EVIL: torch.rand(50)})
            with stats_tracker.record_timing("train"):
                stats_tracker.get("eval-rollout").scalar(reward=0.1 * step)
            logger.commit(0, step, step, stats_tracker.export_all())
    eventlog.stop()
    return root / "run"


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return report(run, run.with_name("report.html")).read_text("utf-8")


def charts(page: str) -> dict[str, dict]:
    """Return the figures that the page holds."""
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_tells_the_run(page: str) -> None:
    """Summary, curves, distributions, timings by rank, evaluations, losses: all there, in this order."""
    headings = re.findall(r"<h2 [^>]*>(.*?)</h2>", page)
    assert [
        "Summary", "Curves", "Distributions", "Timings", "Evaluations", "Losses and attempts"
    ] == headings  # fmt: skip
    titles = [chart["layout"]["title"]["text"] for chart in charts(page).values()]
    assert {"actor/kl/avg", "actor/kl", "timeperf/train", "eval-rollout/reward"} <= set(titles)
    assert "Nothing was lost or damaged." in page


def test_the_charts_hold_the_numbers(page: str) -> None:
    """What is drawn is what was recorded: the curve, the quantiles, the seconds of each rank."""
    by_title: dict[str, dict] = {}
    for chart in charts(page).values():
        by_title.setdefault(chart["layout"]["title"]["text"], chart)
    (curve,) = by_title["actor/kl/avg"]["data"]
    assert pytest.approx([(1 + step) / 2 for step in range(6)]) == curve["y"]
    *_, greatest = [
        t for t in by_title["actor/kl"]["data"] if t["name" if "name" in t else "x"] == "p0 to p100"
    ]
    assert pytest.approx([1 + step for step in range(6)]) == greatest["y"]
    (heat,) = [t for chart in charts(page).values() for t in chart["data"] if t["type"] == "heatmap"]
    assert ["main 0"] == heat["y"]
    assert list(range(6)) == heat["x"]
    assert all(0 < seconds < 10 for seconds in heat["z"][0])
    assert "Cividis" == heat["colorscale"]


def test_names_are_no_markup(page: str) -> None:
    """A metric named like a script is text everywhere: in the page, and in what plotly reads."""
    assert EVIL not in page
    assert html.escape(f"actor/{EVIL}", quote=False) in [
        chart["layout"]["title"]["text"] for chart in charts(page).values()
    ]


def test_the_page_asks_for_nothing(page: str) -> None:
    """Nothing is fetched: no element of the page itself names a source elsewhere."""
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own)


def test_keys_choose_what_is_drawn(run: Path, tmp_path: Path) -> None:
    """Patterns choose metrics and the keys behind them; an unknown one is refused and nothing is written."""
    page = report(run, tmp_path / "kl.html", keys=["actor/kl/*"]).read_text("utf-8")
    titles = [chart["layout"]["title"]["text"] for chart in charts(page).values()]
    assert ["actor/kl", "actor/kl/avg", "actor/kl/max"] == sorted(titles)
    assert '<td>actor/kl/min</td><td class="number">0</td>' in page  # it never changes
    with pytest.raises(QueryError, match="nowhere"):
        report(run, tmp_path / "none.html", keys=["nowhere"])
    with pytest.raises(NotARunError):
        report(tmp_path, tmp_path / "none.html")
    assert ["kl.html"] == [path.name for path in tmp_path.iterdir()]


def test_a_run_without_payload_says_so(tmp_path: Path) -> None:
    """Where values were not kept the distributions are not silently missing; resumed runs are marked."""
    page = report(write_run(tmp_path / "a", [range(3), range(2, 5)], 1.0), tmp_path / "a.html").read_text()
    shapes = [chart["layout"]["shapes"] for chart in charts(page).values() if "shapes" in chart["layout"]]
    assert [2] == [shape["x0"] for shape in shapes[0]]
    log = eventlog.start(tmp_path / "b", rank=0, world_size=1, payload="off")
    log.claim_attempt()
    stats_tracker.denominator(n=torch.ones(5, dtype=torch.bool))
    stats_tracker.stat("n", x=torch.rand(5))
    log.commit(0, 0, 0, [stats_tracker.export_all()])
    eventlog.stop()
    assert "None: expected" in report(tmp_path / "b", tmp_path / "b.html").read_text("utf-8")


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_draws_every_chart(run: Path, page: str, tmp_path: Path) -> None:
    """Headless Chromium draws all charts without a word on its console; no script of a name's runs."""
    done = subprocess.run(
        [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path}", "--virtual-time-budget=15000",
         "--enable-logging=stderr", "--dump-dom", run.with_name("report.html").as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert [] == console
    drawn = re.findall(r'<div class="chart js-plotly-plot" id="(chart-\d+)"', done.stdout)
    assert list(charts(page)) == drawn
    assert len(drawn) == len(re.findall(r'<g class="infolayer">', done.stdout))
    assert EVIL not in re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
