"""`plot curves`, `plot heatmap`, `plot radar`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import STEPS, Ask, write_run


def test_writes_a_picture(ask: Ask, root: Path, tmp_path: Path) -> None:
    """Curves of several runs are written to the file, which is named on stderr; stdout stays empty."""
    file = tmp_path / "reward.png"
    answer = ask(
        "plot", "curves", root / "a", "lr", "--with", root / "sub" / "b", "-o", file, "--smooth", 0.5
    )
    assert (0, "", f"wrote {file}\n") == answer
    assert b"\x89PNG" == file.read_bytes()[:4]


def test_json_is_what_is_drawn(ask: Ask, root: Path) -> None:
    """--json prints the points instead, with the moving average when there is one."""
    answer = ask("plot", "curves", root / "a", "ppo_actor/loss", "--json", "--smooth", 0.5)
    assert [(step, step + 0.5) for step in range(STEPS)] == [
        (row["step"], row["value"]) for row in answer.json
    ]
    assert [0.5, pytest.approx(1.5 - 1 / 3)] == [row["ema"] for row in answer.json[:2]]
    assert {"step", "key", "value", "ema"} == set(answer.json[0])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-o", "none/x.png"], 2, "expected a file in a directory that exists, got none/x.png"),
        ([], 2, "expected --output FILE, --json, or both"),
        (["-o", "x.gif"], 2, "expected a file name ending in .png or .svg, got x.gif"),
        (["-o", "x.png", "--smooth", "2"], 2, "expected a smoothing weight between 0 and 1, got 2.0"),
        (["-o", "x.png", "--palette", "jet"], 2, "expected a palette out of okabe-ito, grey, got 'jet'"),
        (["nothing/*", "-o", "x.png"], 1, "'nothing/*'"),
    ],
)
def test_bad_orders_are_refused(ask: Ask, root: Path, words: list[str], code: int, message: str) -> None:
    """What cannot be drawn is refused in one line, and no file is written."""
    answer = ask("plot", "curves", root / "a", *words)
    assert (code, "") == (answer.code, answer.out)
    assert message in answer.err
    assert not Path("x.png").exists()


BAND = ("step", "value", "least", "greatest")


def test_ranks_are_drawn_in_a_band(ask: Ask, root: Path) -> None:
    """--band takes what each rank or run recorded; --json prints the mean and the band that are drawn."""
    answer = ask("plot", "curves", root / "a", "ppo_actor/loss", "--band", "ranks", "--json", "--until", 0)
    assert [(0, 0.5, 0.0, 1.0)] == [tuple(row[name] for name in BAND) for row in answer.json]
    runs = ("--with", root / "sub" / "b", "--band", "runs", "--json", "--until", 1, "--smooth", 0.5)
    answer = ask("plot", "curves", root / "a", "ppo_actor/loss", *runs)
    assert [(0, 0.5, 0.5, 0.5), (1, 2.0, 1.5, 2.5)] == [tuple(row[n] for n in BAND) for row in answer.json]
    assert [0.5, pytest.approx(1.5)] == [row["ema"] for row in answer.json]


def test_runs_are_compared(ask: Ask, root: Path) -> None:
    """--compare reads out how far each run is from the first."""
    words = ("--with", root / "sub" / "b", "--compare", "--json", "--since", 1)
    answer = ask("plot", "curves", root / "a", "ppo_actor/loss", *words)
    expected = sum(range(1, STEPS)) / sum(step + 0.5 for step in range(1, STEPS))
    assert [("b", pytest.approx(expected), STEPS - 1)] == [
        (row["run"], row["difference"], row["steps"]) for row in answer.json
    ]


def test_heat_maps_and_radars_are_written(ask: Ask, root: Path, tmp_path: Path) -> None:
    """The pictures land in their files; --json prints what they show."""
    heat = ("plot", "heatmap", root / "a", "--accuracy", "lr", "--length", "ppo_actor/loss")
    assert 0 == ask(*heat, "-o", tmp_path / "heat.png").code
    assert STEPS == len(ask(*heat, "--json").json)
    radar = ("plot", "radar", root / "a", "ppo_actor/loss", "--with", root / "sub" / "b")
    assert 0 == ask(*radar, "-o", tmp_path / "radar.svg").code
    assert {"reward", "efficiency", "stability"} == {row["dimension"] for row in ask(*radar, "--json").json}
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("heat.png", "radar.svg"))


DRAWN = [
    ("plot", "curves", "{run}", "lr"),
    ("plot", "heatmap", "{run}", "--accuracy", "lr", "--length", "ppo_actor/loss"),
    ("plot", "radar", "{run}", "ppo_actor/loss", "--with", "{other}"),
]


@pytest.mark.parametrize("words", DRAWN)
def test_a_damaged_run_is_drawn_all_the_same(
    ask: Ask, root: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The picture is written and the points are printed; the damage is told and makes the exit code 3."""
    run = write_run(tmp_path / "run", [range(3)], gain=1.0)
    with (run / "run.json").open("a") as file:
        file.write("x")
    those = [word.format(run=run, other=root / "a") for word in words]
    answer = ask(*those, "-o", tmp_path / "x.png", "--json")
    assert 3 == answer.code
    assert answer.json
    assert ["wrote", "damaged:"] == [line.split()[0] for line in answer.err.splitlines()]
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("words", [*DRAWN, ("report", "{run}")])
def test_pictures_are_not_put_into_runs(ask: Ask, root: Path, words: tuple[str, ...]) -> None:
    """A file of a run is never replaced by a picture or a page of it."""
    run = root / "sub" / "b"
    before = (run / "run.json").read_bytes()
    answer = ask(*(word.format(run=run, other=root / "a") for word in words), "-o", run / "run.json")
    assert (2, "", 1) == (answer.code, answer.out, answer.err.count("\n"))
    assert "expected a file outside of runs, got one in the run " in answer.err
    assert before == (run / "run.json").read_bytes()
