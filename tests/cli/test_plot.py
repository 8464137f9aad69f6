"""`plot curves`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import STEPS, Ask


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
        ([], 2, "expected --output FILE, --json, or both"),
        (["-o", "x.gif"], 1, "expected a file name ending in .png or .svg, got x.gif"),
        (["-o", "x.png", "--smooth", "2"], 1, "expected a smoothing weight between 0 and 1, got 2.0"),
        (["-o", "x.png", "--palette", "jet"], 1, "expected a palette out of okabe-ito, grey, got 'jet'"),
        (["nothing/*", "-o", "x.png"], 1, "'nothing/*'"),
    ],
)
def test_bad_orders_are_refused(ask: Ask, root: Path, words: list[str], code: int, message: str) -> None:
    """What cannot be drawn is refused in one line, and no file is written."""
    answer = ask("plot", "curves", root / "a", *words)
    assert (code, "") == (answer.code, answer.out)
    assert message in answer.err
    assert not Path("x.png").exists()
