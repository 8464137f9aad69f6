"""`report`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Ask, write_run


def test_a_damaged_run_is_told_in_a_page(ask: Ask, tmp_path: Path) -> None:
    """The page is written, beside the run by default; the damage is told and makes the exit code 3."""
    run = write_run(tmp_path / "run-0.5", [range(3)], gain=1.0)
    assert (0, "", f"wrote {run}.html\n") == ask("report", run)
    assert "Run run-0.5" in Path(f"{run}.html").read_text("utf-8")
    with (run / "run.json").open("a") as file:
        file.write("x")
    answer = ask("report", run, "-o", tmp_path / "damaged.html")
    assert 3 == answer.code
    assert ["wrote", "damaged:"] == [line.split()[0] for line in answer.err.splitlines()]
    assert "expected" in (tmp_path / "damaged.html").read_text("utf-8")


def test_a_page_needs_a_directory(ask: Ask, root: Path, tmp_path: Path) -> None:
    """No directory is made for it, as for any other file."""
    path = tmp_path / "none" / "page.html"
    told = f"areal-metrics: expected a file in a directory that exists, got {path}\n"
    assert (2, "", told) == ask("report", root / "a", "-o", path)
    assert not path.parent.exists()
