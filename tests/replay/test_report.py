"""The one-page report: everything in one file, names harmless, every chart drawn by a real browser."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

import eventlog
from aggregator import stats_tracker
from aggregator.evaluation import Evaluator, EvaluatorConfig, log_evaluation_results
from eventlog.errors import NotARunError, QueryError
from replay import StatsLogger, StatsLoggerConfig
from replay.plots import report
from replay.plots.charts import curve, heat
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


def test_charts_show_what_is_there_and_nothing_else() -> None:
    """A point between two gaps is a marker; a cell of a heat map is no wider than its step."""
    (line,) = curve("x", pa.table({"step": [0, 1, 2, 3], "value": [1.0, math.nan, 2.0, 3.0]}))["data"]
    assert ("lines+markers", [5, 0, 0, 0]) == (line["mode"], line["marker"]["size"])
    table = pa.table({"role": ["a"] * 4, "rank": [0] * 4, "step": [0, 1, 2, 11], "avg": [1.0] * 4})
    (cells,) = heat("timeperf/save", table)["data"]
    assert [0, 1, 2, 3, 10, 11] == cells["x"]
    assert [False, False, False, True, True, False] == [math.isnan(z) for z in cells["z"][0]]


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


def test_a_page_that_cannot_take_its_place_leaves_nothing(run: Path, tmp_path: Path) -> None:
    """Where something else has the name the error is raised, and no half page stays beside it."""
    (tmp_path / "taken.html").mkdir()
    with pytest.raises(IsADirectoryError):
        report(run, tmp_path / "taken.html", keys=["actor/kl/*"])
    assert ["taken.html"] == [path.name for path in tmp_path.iterdir()]


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


def test_the_untouched_model_is_no_step(tmp_path: Path) -> None:
    """What was evaluated before training says so, whoever evaluated it (report u1)."""
    eventlog.start(tmp_path / "run", rank=0, world_size=1).claim_attempt()
    spec = SimpleNamespace(steps_per_epoch=100)
    often = Evaluator(EvaluatorConfig(freq_steps=1, eval_before_train=True), spec, name="often")
    rare = Evaluator(EvaluatorConfig(freq_steps=2, eval_before_train=True), spec)

    def measure(value: float) -> None:
        log_evaluation_results({"right": value})

    often.before_train(lambda: measure(0.1))
    rare.before_train(lambda: measure(0.2))
    for step in range(2):
        often.evaluate(lambda: measure(0.3), 0, step, step)
        rare.evaluate(lambda: measure(0.4), 0, step, step)
        eventlog.current().commit(0, step, step, [stats_tracker.export_all()])
    eventlog.stop()
    page = report(tmp_path / "run", tmp_path / "run.html").read_text("utf-8")
    section = page.split("Evaluations</h2>")[1].split("</table>")[0]
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", section)]
    assert [
        ["step", "eval-rollout/often/before/right", "eval-rollout/right", "eval-rollout/often/right"],
        ["before (committed with 0)", "0.1", "0.2", ""],
        ["0", "", "", "0.3"],
        ["1", "", "0.4", "0.3"],
    ] == rows


def test_a_long_name_has_room_above_its_chart() -> None:
    """However many lines a title has, the axes begin below it, and the chart stays as high."""
    table = pa.table({"step": [0], "value": [1.0]})
    short, long = (curve("n" * length, table)["layout"] for length in (3, 300))
    lines = long["title"]["text"].count("<br>") + 1
    assert 7 == lines
    assert long["margin"]["t"] >= long["title"]["pad"]["t"] + 1.3 * long["title"]["font"]["size"] * lines
    assert long["height"] - long["margin"]["t"] == short["height"] - short["margin"]["t"]
    ranks = pa.table({"role": ["a"] * 2, "rank": [0, 1], "step": [0, 0], "avg": [1.0, 2.0]})
    short, long = (heat("n" * length, ranks)["layout"] for length in (3, 300))
    assert long["height"] - long["margin"]["t"] == short["height"] - short["margin"]["t"]


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
