"""The example of an adapter of one's own passes the public contract, live and in replay."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

from replay import BackendContract, play
from tests.replay.committed import build, logger

HERE = Path(__file__).parents[2] / "examples" / "adapter"
JsonLines: Any = runpy.run_path(str(HERE / "jsonl.py"))["JsonLines"]


def read(path: Path) -> list[tuple[int, dict[str, float], float]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["step"], line["metrics"], line["time"]) for line in lines]


class TestJsonLines(BackendContract):
    """The public contract, as the page shows it."""

    def make(self, path: Path) -> Any:
        return JsonLines(path / "metrics.jsonl")

    def read(self, path: Path) -> list[tuple[int, dict[str, float], float]]:
        return read(path / "metrics.jsonl")


def test_it_is_told_live_and_afterwards(tmp_path: Path) -> None:
    """Live it has every commit; replay sends what it lacks, and nothing twice."""
    with logger(tmp_path, backends=[JsonLines(tmp_path / "live.jsonl")]) as live:
        for step in range(3):
            live.commit(0, step, step, {"v": step / 7})
    assert [(s, {"v": s / 7}) for s in range(3)] == [row[:2] for row in read(tmp_path / "live.jsonl")]
    for steps, sent in ((5, 5), (5, 0), (8, 3)):
        run = build(tmp_path / f"run-{steps}-{sent}", (range(steps), lambda step: {"v": step / 7}))
        (report,) = play(run, [JsonLines(tmp_path / "told.jsonl")], cursors=tmp_path / "cursors")
        assert sent == report.sent
    assert list(range(8)) == [step for step, _, _ in read(tmp_path / "told.jsonl")]


def test_the_page_tells_the_truth() -> None:
    """The page names what there is, and how long the example is."""
    page = (HERE / "README.md").read_text()
    code = (HERE / "jsonl.py").read_text().partition("class JsonLines")[2]
    assert f"in {len(code.splitlines())} lines" in page
    import eventlog.errors
    import replay

    for name in re.findall(r"`(\w+Error)`", page):
        assert hasattr(eventlog.errors, name), name
    for name in ("Capabilities", "Order", "BackendContract", "RewriterContract", "StatsLogger", "play"):
        assert name in page
        assert hasattr(replay, name)
