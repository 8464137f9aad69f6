"""The pictures: what is drawn is what the table holds, nothing is hidden, nothing global is touched."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eventlog.errors import BackendMissingError, QueryError
from replay.plots import PALETTES, bands, curves, differences, heatmap, radar, results, save, scores, smoothed
from replay.plots.canvas import MOST_ENTRIES
from replay.plots.lettering import fitted, packed, width
from replay.plots.radar import DEFINITIONS

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def metrics(rows: list[tuple[int, str, float | None]], runs: list[str] | None = None) -> pa.Table:
    """Return rows of (step, key, value) as a table, with a run column when runs are given."""
    columns = {} if runs is None else {"run": runs}
    steps, keys, values = zip(*rows, strict=True)
    return pa.table({**columns, "step": steps, "key": keys, "value": pa.array(values, pa.float64())})


REWARD = metrics([(2, "reward", 3.0), (0, "reward", 1.0), (1, "reward", 2.0)])


def drawn(axis: object) -> list[list[tuple[float, float]]]:
    """Return the points of every line of an axes that has any."""
    lines = [line.get_xydata().tolist() for line in axis.get_lines()]
    return [[(x, y) for x, y in line] for line in lines if line]


def test_draws_every_value_at_its_step() -> None:
    """A key's values are drawn at their steps, in the order of the steps, whatever the order of the rows."""
    (axis,) = curves(REWARD).axes
    assert [[(0, 1.0), (1, 2.0), (2, 3.0)]] == drawn(axis)
    assert "reward" == axis.get_title(loc="left")
    assert "step" == axis.get_xlabel()


def test_one_panel_a_key_one_line_a_run() -> None:
    """Keys have panels of their own, and a run has the same colour in each of them."""
    rows = [(0, "a", 1.0), (1, "a", 2.0), (0, "b", 5.0), (1, "b", 6.0)]
    figure = curves(metrics([*rows, *rows], ["x"] * 4 + ["y"] * 4))
    assert ["a", "b"] == [axis.get_title(loc="left") for axis in figure.axes]
    colours = [
        [line.get_color() for line in axis.get_lines() if len(line.get_xdata())] for axis in figure.axes
    ]
    assert [list(PALETTES["okabe-ito"][:2])] * 2 == colours
    assert ["x", "y"] == [text.get_text() for text in figure.legends[0].get_texts()]


def test_nine_runs_still_differ() -> None:
    """More runs than colours differ by their dashes."""
    table = metrics(
        [(s, "k", 1.0) for _ in range(9) for s in (0, 1)], [str(i) for i in range(9) for _ in "ab"]
    )
    lines = [line for line in curves(table).axes[0].get_lines() if len(line.get_xdata())]
    assert 9 == len({(line.get_color(), line.get_linestyle()) for line in lines})


def test_breaks_where_a_value_is_not_finite_and_says_so() -> None:
    """NaN, infinities and nulls break the line and are counted on the axis; none is drawn as a number."""
    values = [1.0, math.nan, 2.0, math.inf, None, 3.0, 4.0]
    (axis,) = curves(metrics([(i, "loss", value) for i, value in enumerate(values)])).axes
    line, lone = axis.get_lines()
    np.testing.assert_array_equal([1, math.nan, 2, math.nan, math.nan, 3, 4], line.get_ydata())
    assert [(0.0, 1.0), (2.0, 2.0)] == [tuple(point) for point in lone.get_xydata()]
    assert "step (3 not finite: not drawn)" == axis.get_xlabel()


def test_a_single_step_is_visible() -> None:
    """A run of one step is drawn as a point, not as an invisible line."""
    (axis,) = curves(metrics([(7, "k", 1.5)])).axes
    assert [(7.0, 1.5)] == [tuple(point) for point in axis.get_lines()[1].get_xydata()]


def test_smoothing_is_stated_and_keeps_the_values() -> None:
    """The smoothed line is drawn over the values, and the legend names its weight."""
    figure = curves(REWARD, smooth=0.5)
    raw, average = drawn(figure.axes[0])
    assert [(0, 1.0), (1, 2.0), (2, 3.0)] == raw
    assert [(0, 1.0), (1, pytest.approx(5 / 3)), (2, pytest.approx(17 / 7))] == average
    assert ["as logged", "EMA, weight 0.5"] == [text.get_text() for text in figure.legends[0].get_texts()]


def test_smoothed_column_keeps_the_order_of_the_rows() -> None:
    """`smoothed` adds what the picture shows to each row, and leaves gaps null."""
    table = smoothed(metrics([(1, "k", math.nan), (2, "k", 3.0), (0, "k", 1.0), (0, "other", 9.0)]), 0.5)
    assert [None, pytest.approx(7 / 3), 1.0, 9.0] == table["ema"].to_pylist()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0.01, 0.99), st.floats(-1e3, 1e3))
def test_smoothing_stays_within_the_values_and_moves_with_them(
    values: list[float], weight: float, shift: float
) -> None:
    """An average lies within what was seen so far, and shifting the values shifts it as much."""
    ema = smoothed(metrics([(i, "k", v) for i, v in enumerate(values)]), weight)["ema"].to_pylist()
    moved = smoothed(metrics([(i, "k", v + shift) for i, v in enumerate(values)]), weight)["ema"].to_pylist()
    for i, (value, other) in enumerate(zip(ema, moved, strict=True)):
        assert min(values[: i + 1]) - 1e-6 <= value <= max(values[: i + 1]) + 1e-6
        assert value + shift == pytest.approx(other, abs=1e-6)


def test_names_are_shown_as_they_are() -> None:
    """A `$`, an underscore in front, or mathtext in a key or run is text."""
    figure = curves(metrics([(0, "a$x_1$b$", 1.0), (1, "a$x_1$b$", 2.0)], ["_run$\\bad$"] * 2), title="$\\no")
    assert "a$x_1$b$" == figure.axes[0].get_title(loc="left")
    assert ["_run$\\bad$"] == [text.get_text() for text in figure.legends[0].get_texts()]
    figure.canvas.draw()  # mathtext would raise here


@pytest.mark.parametrize(("name", "head"), [("a.png", PNG), ("b/c.svg", b"<?xml"), ("d.PNG", PNG)])
def test_saves_by_ending_and_the_same_bytes_each_time(tmp_path: Path, name: str, head: bytes) -> None:
    """PNG and SVG are written by the path's ending, folders made, and the same picture is the same file."""
    first = save(curves(REWARD, smooth=0.9), tmp_path / name).read_bytes()
    again = save(curves(REWARD, smooth=0.9), tmp_path / "again" / name).read_bytes()
    assert head == first[: len(head)]
    assert first == again


def test_refuses_other_endings(tmp_path: Path) -> None:
    """Another ending is refused naming the two, and nothing is written."""
    with pytest.raises(QueryError, match=r"expected a file name ending in \.png or \.svg, got .*plot\.gif"):
        save(curves(REWARD), tmp_path / "plot.gif")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: curves(REWARD.slice(0, 0)), "expected 1 to 24 keys to draw, got 0"),
        (
            lambda: curves(metrics([(0, str(i), 1.0) for i in range(25)])),
            "expected 1 to 24 keys to draw, got 25",
        ),
        (
            lambda: curves(REWARD.drop_columns(["value"])),
            "expected columns step, key, value to draw, got none",
        ),
        (lambda: curves(REWARD, smooth=1.0), r"expected a smoothing weight between 0 and 1, got 1\.0"),
        (lambda: smoothed(REWARD, math.nan), "expected a smoothing weight between 0 and 1, got nan"),
        (lambda: curves(REWARD, palette="jet"), "expected a palette out of okabe-ito, grey, got 'jet'"),
    ],
)
def test_refuses_what_cannot_be_drawn(call: object, message: str) -> None:
    """What cannot be drawn is refused with what was expected and what came."""
    with pytest.raises(QueryError, match=message):
        call()


def test_leaves_no_global_state(tmp_path: Path) -> None:
    """Drawing loads no pyplot, leaves the settings as they are, and importing the module no matplotlib."""
    code = """
import json, sys
import pyarrow as pa
from replay.plots import curves, save
early = "matplotlib" in sys.modules
import matplotlib
before = matplotlib.rcParams.copy()
save(curves(pa.table({"step": [0, 1], "key": ["k", "k"], "value": [1.0, 2.0]})), sys.argv[1])
print(json.dumps([early, "matplotlib.pyplot" in sys.modules, dict.__eq__(matplotlib.rcParams, before)]))
"""
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "plot.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert [False, False, True] == json.loads(done.stdout), done.stderr


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib a plot fails naming the extra that brings it."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendMissingError, match=r"pip install 'areal-metrics\[plots\]'"):
        curves(REWARD)


def test_names_that_the_font_lacks_are_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A Chinese key is kept as the title; that the font has no glyphs for it is not said."""
    figure = curves(metrics([(0, "奖励", 1.0), (1, "奖励", 2.0)]))
    save(figure, tmp_path / "plot.png")
    assert "奖励" == figure.axes[0].get_title(loc="left")
    assert [] == recwarn.list


# -- several runs, members, and how far apart ----------------------------------------------------------


def members(rows: list[tuple[str, int, float]]) -> pa.Table:
    """Return rows of (member, step, value) of one key."""
    names, steps, values = zip(*rows, strict=True)
    return pa.table({"member": names, "step": steps, "key": ["k"] * len(rows), "value": values})


def test_members_are_a_mean_within_a_band() -> None:
    """Ranks or seeds are drawn as their mean, in a band from the least to the greatest, and it says so."""
    figure = curves(members([("0", 0, 1.0), ("1", 0, 3.0), ("0", 1, 5.0), ("1", 1, math.nan), ("1", 2, 4.0)]))
    (axis,) = figure.axes
    assert [[(0, 2.0), (1, 5.0), (2, 4.0)]] == drawn(axis)
    (band,) = axis.collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
    assert {(0.0, 1.0), (0.0, 3.0), (1.0, 5.0), (2.0, 4.0)} == corners
    assert ["mean of 2; band: least to greatest"] == [
        text.get_text() for text in figure.legends[0].get_texts()
    ]


def test_reads_out_how_far_runs_are_apart() -> None:
    """How far a run is from the first is said of the steps both have a finite value of, as sums."""
    first = [(0, "k", 2.0), (1, "k", 0.0), (2, "k", math.nan), (3, "k", -4.0)]
    other = [(0, "k", 3.0), (1, "k", 9.0), (2, "k", 9.0), (3, "k", -3.0), (4, "k", 1.0)]
    table = metrics([*first, *other, (9, "k", 1.0)], ["a"] * 4 + ["b"] * 5 + ["c"])
    assert [
        {"key": "k", "run": "b", "relative_to": "a", "difference": (1 + 9 + 1) / (2 + 0 + 4), "steps": 3},
        {"key": "k", "run": "c", "relative_to": "a", "difference": None, "steps": 0},
    ] == differences(table).to_pylist()
    (axis,) = curves(table, compare=True).axes
    assert (
        "step (1 not finite: not drawn)\nrelative to a:\nb: +183.3%\nc: no common steps" == axis.get_xlabel()
    )


def test_a_step_at_which_the_first_run_is_next_to_nothing_does_not_outweigh_the_others() -> None:
    """A run that is 40 % below at all steps but the first, where both are small, is read out as below."""
    first, other = [0.001] + [0.5] * 19, [0.1] + [0.3] * 19
    rows = [(step, "reward", value) for values in (first, other) for step, value in enumerate(values)]
    (row,) = differences(metrics(rows, ["a"] * 20 + ["b"] * 20)).to_pylist()
    assert (sum(other) - sum(first)) / sum(first) == pytest.approx(row["difference"])
    assert -0.4 < row["difference"] < -0.35


def test_only_so_many_differences_are_read_out() -> None:
    """Of many runs the first are read out and the rest is counted; the panel keeps its height."""
    runs = [f"run {i:02}" for i in range(12)]
    table = metrics(
        [(step, "k", 1.0) for _ in runs for step in (0, 1)], [run for run in runs for _ in (0, 1)]
    )
    figure = curves(table, compare=True)
    told = figure.axes[0].get_xlabel().splitlines()
    assert ["relative to run 00:", "run 01: +0.0%"] == told[1:3]
    assert ["run 08: +0.0%", "and 3 more"] == told[-2:]
    assert figure.get_figheight() > curves(table).get_figheight() + 1


def test_a_difference_says_to_which_run_it_is() -> None:
    """A key that the first run lacks is relative to the first that has it; what overflows is left out."""
    table = metrics([(0, "x", 1.0), (0, "k", 2.0), (0, "k", 3.0), (1, "x", 1.0)], ["a", "b", "c", "b"])
    said = {
        row["key"]: (row["relative_to"], row["run"], row["steps"]) for row in differences(table).to_pylist()
    }
    assert {"k": ("b", "c", 1), "x": ("a", "b", 0)} == said
    huge = metrics([(0, "k", 1e-300), (0, "k", 1e300), (1, "k", 1.7e308), (1, "k", -1.7e308)], ["a", "b"] * 2)
    assert [(None, 2)] == [(row["difference"], row["steps"]) for row in differences(huge).to_pylist()]
    assert "b: no number" == curves(huge, compare=True).axes[0].get_xlabel().splitlines()[-1]


def test_bands_are_what_is_drawn_of_members() -> None:
    """A row a step: the mean, the least and the greatest; null where no member has a number."""
    table = members([("0", 0, 1.0), ("1", 0, 3.0), ("0", 1, math.nan), ("1", 2, 4.0)])
    assert [
        {"step": 0, "key": "k", "value": 2.0, "least": 1.0, "greatest": 3.0},
        {"step": 1, "key": "k", "value": None, "least": None, "greatest": None},
        {"step": 2, "key": "k", "value": 4.0, "least": 4.0, "greatest": 4.0},
    ] == bands(table).to_pylist()
    named = table.append_column("run", pa.array(["a", "a", "b", "b"]))
    assert [("a", 0), ("b", 1), ("b", 2)] == [(row["run"], row["step"]) for row in bands(named).to_pylist()]


@pytest.mark.parametrize("value", [1e308, -1.7e308])
def test_what_is_beyond_the_axes_is_left_out_and_said(tmp_path: Path, value: float) -> None:
    """Matplotlib cannot draw so large numbers: curves, bands, smoothing and heat maps go without them."""
    rows = [("0", 0, value), ("1", 0, -value), ("0", 1, 1.0), ("1", 1, value), ("0", 2, math.inf)]
    alone = members(rows).drop_columns("member").slice(2)
    for drawn_from, options in ((members(rows), {}), (alone, {}), (alone, {"smooth": 0.5})):
        save(curves(drawn_from, **options), tmp_path / "x.svg")
    (axis,) = curves(alone).axes
    assert "step (1 not finite, 1 beyond 1e300: not drawn)" == axis.get_xlabel()
    heat = outcomes([("a", "t", 0.5, 10.0), ("a", "t", 0.5, value)])
    assert "response length (1 beyond 1e300: not drawn)" == heatmap(heat).axes[0].get_xlabel()
    save(heatmap(heat), tmp_path / "x.svg")


def test_control_characters_are_spelled_out_in_an_svg(tmp_path: Path) -> None:
    """Whatever a key, a run or a title is named, the file is XML."""
    odd = "a\x00b\x1b[1m\x0c\ufffe\x9f--"
    table = metrics([(0, odd, 1.0), (0, odd, 2.0)], [odd, "b"])
    svg = save(curves(table, compare=True, title=odd), tmp_path / "x.svg")
    assert ET.fromstring(svg.read_text("utf-8")) is not None
    assert "a\\x00b\\x1b[1m" in svg.read_text("utf-8")
    assert save(curves(table), tmp_path / "x.png").stat().st_size > 1000


# -- heat map ------------------------------------------------------------------------------------------


def outcomes(rows: list[tuple[str, str, float, float]]) -> pa.Table:
    """Return rows of (run, task, accuracy, length)."""
    return pa.Table.from_pylist(
        [dict(zip(("run", "task", "accuracy", "length"), row, strict=True)) for row in rows]
    )


def test_heat_map_counts_every_result() -> None:
    """A panel a run on common axes; the cells count all finite results, the others are said, not drawn."""
    rows = [("a", "t", 0.5, 10.0), ("a", "t", 0.5, 10.0), ("a", "u_$x$", 1.0, 90.0)]
    rows += [("b", "t", math.nan, 5.0), ("b", "t", 0.2, 50.0)]
    figure = heatmap(outcomes(rows))
    one, two, bar = figure.axes
    assert ["a", "b"] == [axis.get_title(loc="left") for axis in (one, two)]
    counts = [axis.collections[0].get_array() for axis in (one, two)]
    assert [3.0, 1.0] == [count.sum() for count in counts]
    assert ["response length", "response length (1 not finite: not drawn)"] == [
        axis.get_xlabel() for axis in (one, two)
    ]
    assert one.get_xlim() == two.get_xlim()
    assert "cividis" == one.collections[0].get_cmap().name
    assert "results" == bar.get_ylabel()
    assert {"★ ideal", "1", "2"} == {text.get_text() for text in one.texts}
    assert "means: 1 t · 2 u_$x$" == figure.get_supxlabel()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pa.table({"task": ["t"], "accuracy": [1.0]}), "got none named length"),
        (outcomes([("a", "t", math.nan, 1.0)]), "expected finite accuracies and lengths, got none in 1 rows"),
    ],
)
def test_heat_map_refuses_what_it_cannot_draw(table: pa.Table, said: str) -> None:
    """A missing column, or nothing that is finite, is refused."""
    with pytest.raises(QueryError, match=said):
        heatmap(table)


def test_results_pair_accuracy_and_length_by_task_and_step() -> None:
    """The star of both keys is the task; a row for every step at which a task has both."""
    rows = [(0, "eval/a/acc", 0.5), (0, "eval/a/len", 9.0), (1, "eval/a/acc", 0.7), (0, "eval/b.c/acc", 0.1),
            (0, "eval/b.c/len", 3.0), (0, "other", 1.0)]  # fmt: skip
    found = results(metrics(rows), "eval/*/acc", "eval/*/len")
    assert [
        {"task": "a", "accuracy": 0.5, "length": 9.0},
        {"task": "b.c", "accuracy": 0.1, "length": 3.0},
    ] == found.to_pylist()
    assert [{"task": "all", "accuracy": 0.5, "length": 9.0}] == results(
        metrics(rows), "eval/a/acc", "eval/a/len"
    ).to_pylist()


@pytest.mark.parametrize(
    ("key", "said"), [("eval/*/*", "expected a key with one \\*"), ("nowhere", "expected steps that have")]
)
def test_results_need_a_pair(key: str, said: str) -> None:
    """Two stars, or keys that never meet, are refused."""
    with pytest.raises(QueryError, match=said):
        results(REWARD, "reward", key)


# -- radar ---------------------------------------------------------------------------------------------


def test_scores_are_what_they_are_defined_to_be() -> None:
    """Reward, efficiency and stability follow their definitions; values that are not finite are left out."""
    values = [0.0, 4.0, math.nan, 2.0, 4.0, 8.0]
    found = scores(metrics([(i, "r", v) for i, v in enumerate(values)], ["a"] * 6)).to_pylist()
    numbers = {row["dimension"]: row["value"] for row in found}
    assert {"reward": 8.0, "efficiency": 18 / 5, "stability": 1.0} == numbers


def test_several_keys_have_no_scores() -> None:
    """Curves of two keys are not one curve."""
    with pytest.raises(QueryError, match="expected the curves of one key, got 'a', 'b'"):
        scores(metrics([(0, "a", 1.0), (1, "b", 2.0)], ["x"] * 2))


def test_radar_states_directions_and_numbers() -> None:
    """The best of each dimension is on the rim and the worst on the inner ring, whichever way is better."""
    names = ["reward", "efficiency", "stability"]
    table = pa.Table.from_pylist([
        {"run": run, "dimension": name, "value": value}
        for run, row in {"a": (1.0, 2.0, 0.5), "b": (3.0, 2.0, 0.1)}.items()
        for name, value in zip(names, row, strict=True)
    ])  # fmt: skip
    figure = radar(table)
    (axis,) = figure.axes
    radii = [line.get_ydata()[:3].tolist() for line in axis.get_lines()]
    assert [[0.25, 1.0, 0.25], [1.0, 1.0, 1.0]] == radii
    labels = [text.get_text().splitlines() for text in axis.get_xticklabels()]
    assert [
        ("reward (higher is better)", "1 … 3"),
        ("efficiency (higher is better)", "2 … 2"),
        ("stability (lower is better)", "0.5 … 0.1"),
    ] == [(label[0], label[-1]) for label in labels]
    assert [DEFINITIONS[name] for name in names] == [" ".join(label[1:-1]) for label in labels]
    assert ["a", "b"] == [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("a", n, 1.0) for n in ("x", "y", "z")], "expected 2 or more runs to compare, got 1"),
        ([(r, n, 1.0) for r in "ab" for n in "xy"], "expected 3 or more dimensions for a radar, got 2"),
        ([(r, n, 1.0) for r in "ab" for n in ("reward", "stability", "z")], "got none for \\['z'\\]"),
        (
            [("a", n, 1.0) for n in ("reward", "stability", "efficiency")] + [("b", "reward", 1.0)],
            "got none of 'b' in 'stability'",
        ),
    ],
)
def test_radar_refuses_what_cannot_be_compared(rows: list[tuple[str, str, float]], said: str) -> None:
    """Too few dimensions, one without a direction, or a run without a value are refused."""
    table = pa.Table.from_pylist([dict(zip(("run", "dimension", "value"), row, strict=True)) for row in rows])
    with pytest.raises(QueryError, match=said):
        radar(table)


def test_what_rounding_leaves_is_no_difference() -> None:
    """Two runs that rise by the same amount each step are equally stable, whatever their last bits say."""
    rows = [(step, "r", 0.1 * step + more) for more in (0.0, 1.0) for step in range(20)]
    table = scores(metrics(rows, ["a"] * 20 + ["b"] * 20))
    assert [0.0, 0.0] == [row["value"] for row in table.to_pylist() if row["dimension"] == "stability"]
    names = ["reward", "efficiency", "stability"]
    nearly = [(run, name, value) for run, value in (("a", 1.0), ("b", 1.0 + 4e-16)) for name in names]
    table = pa.table(dict(zip(("run", "dimension", "value"), zip(*nearly, strict=True), strict=True)))
    assert [[1.0] * 3] * 2 == [line.get_ydata()[:3].tolist() for line in radar(table).axes[0].get_lines()]


def test_an_infinite_score_is_the_best_or_the_worst() -> None:
    """A spread that overflowed is the worst of its spoke, and the others keep their corners."""
    rows = [("a", "reward", 1.0), ("a", "efficiency", 1.0), ("a", "stability", math.inf)]
    rows += [("b", "reward", 2.0), ("b", "efficiency", 3.0), ("b", "stability", 1.0)]
    table = pa.table(dict(zip(("run", "dimension", "value"), zip(*rows, strict=True), strict=True)))
    (axis,) = radar(table).axes
    radii = [line.get_ydata()[:3].tolist() for line in axis.get_lines()]
    assert [[0.25, 0.25, 0.25], [1.0, 1.0, 1.0]] == radii


def inside(figure: Figure) -> bool:
    """Whether everything that is drawn lies on the sheet."""
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        canvas.draw()
        box = figure.get_tightbbox(canvas.get_renderer())
    wide, high = figure.get_size_inches()
    return min(box.x0, box.y0) > -0.02 and box.x1 < wide + 0.02 and box.y1 < high + 0.02


@pytest.mark.parametrize(
    "names",
    [[f"run number {i:02}" for i in range(60)], ["W" * 300, "b"], ["名" * 145, "b", "c"]],
    ids=["sixty", "long", "wide"],
)
def test_a_legend_of_any_size_leaves_the_panel_its_height(names: list[str]) -> None:
    """However many and long the names are: the panel is as high as for one, and nothing is cut off."""
    rows = [(step, "k", 1.0 * step) for _ in names for step in (0, 1)]
    figure = curves(metrics(rows, [name for name in names for _ in (0, 1)]), compare=True)
    assert inside(figure)
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(told) == min(len(names), MOST_ENTRIES + 1)
    assert (len(names) > MOST_ENTRIES) == (told[-1] == f"and {len(names) - MOST_ENTRIES} more")
    height = figure.axes[0].get_window_extent().height
    assert height > 0.9 * 120 * 2.4  # dots


def test_the_names_of_many_tasks_break_between_tasks() -> None:
    """The list of a heat map's tasks stands below the panel, no name is torn from its number."""
    names = [f"task_number_{i:02}_with_a_long_name" for i in range(40)]
    rows = [{"task": name, "accuracy": 0.1 * i, "length": 1.0 * i} for i, name in enumerate(names)]
    figure = heatmap(pa.Table.from_pylist(rows))
    assert inside(figure)
    lines = figure.get_supxlabel().splitlines()
    assert ("and 10 more without a mark", 15) == (lines[-1], len(lines) - 1)
    assert all(line.removeprefix("means: ")[0].isdecimal() for line in lines[:-1])


@given(st.lists(st.text("abcW_ 名", min_size=1, max_size=60), min_size=1, max_size=8))
def test_packed_lines_hold_every_text_in_order(texts: list[str]) -> None:
    """Lines are as wide as is allowed, and together say all texts that fit."""
    lines = packed(texts, 3.0, 9)
    assert " · ".join(fitted(text, 3.0, 9) for text in texts) == " · ".join(lines)
    assert all(width(line, 9) <= 3.0 for line in lines)


def test_long_names_are_cut_in_the_middle() -> None:
    """Titles and legends of any length fit; the ends of a name, which tell names apart, stay."""
    name = "a" * 100 + "/" + "b" * 100
    figure = curves(metrics([(0, name, 1.0), (1, name, 2.0)] * 2, [name + "1"] * 2 + [name + "2"] * 2))
    (title,) = [axis.get_title(loc="left") for axis in figure.axes]
    assert (True, "a", "b", 1) == (len(title) < 60, title[0], title[-1], title.count("…"))
    assert ["1", "2"] == [text.get_text()[-1] for text in figure.legends[0].get_texts()]
