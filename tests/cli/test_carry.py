"""`export` and `merge`."""

from __future__ import annotations

from pathlib import Path

from aggregator import open_run
from tests.cli.conftest import Ask
from tests.runs import RunBuilder


def test_export_writes_a_file(ask: Ask, root: Path, tmp_path: Path) -> None:
    """The file's ending is its format; how much was written is said on stderr."""
    out = tmp_path / "loss.csv"
    answer = ask("export", root / "a", out, "--keys", "*/loss", "--wide", "--since", 8)
    assert (0, "", f"wrote 2 rows to {out}\n") == (answer.code, answer.out, answer.err)
    assert '"step","sub_index","time","ppo_actor/loss"' == out.read_text().splitlines()[0]
    where = tmp_path / "records"
    told = ask("export", root / "a", where, "--view", "records", "--format", "jsonl", "--json").json
    assert {"out": str(where), "rows": len(where.read_text().splitlines())} == told
    with open_run(root / "a") as session:
        assert session.sql("from records").num_rows == len((tmp_path / "records").read_text().splitlines())


def test_wrong_exports_are_one_line(ask: Ask, root: Path, tmp_path: Path) -> None:
    """An unknown view or key says what there is; nothing is written."""
    for words, code, message in (
        (["--view", "metric"], 2, "expected a view, got 'metric'; near: 'metrics'"),
        (["--keys", "los"], 1, "expected a committed metric, got 'los'; near: "),
    ):
        answer = ask("export", root / "a", tmp_path / "out.csv", *words)
        assert (code, "", 1) == (answer.code, answer.out, answer.err.count("\n"))
        assert message in answer.err
    assert [] == list(tmp_path.iterdir())


def test_merge_joins_runs(ask: Ask, tmp_path: Path) -> None:
    """Two runs with an offset are one, with each step once (report f8)."""
    for name, steps in (("a", 6), ("b", 4)):
        with RunBuilder(tmp_path / name) as run:
            leader = run.producer("actor", attempt=0, session=name * 32)
            run.attempt(0, leader=leader, outcome="finished")
            for step in range(steps):
                leader.tracker().scalar({"loss": float(step)})
                leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
    out = tmp_path / "whole"
    answer = ask("merge", out, tmp_path / "a", tmp_path / "b", "--offset", 6, "--json")
    assert (0, "") == (answer.code, answer.err)
    assert [([0], 0), ([1], 6)] == [(run["attempts"], run["offset"]) for run in answer.json["runs"]]
    rows = ask("metrics", out, "loss", "--json").json
    assert [(step, float(step % 6)) for step in range(10)] == [(row["step"], row["value"]) for row in rows]
    again = ask("merge", out, tmp_path / "a", tmp_path / "b")
    assert (1, True) == (again.code, "expected a new or an empty directory, got one in use" in again.err)


def test_one_run_is_not_merged_with_itself(ask: Ask, root: Path, tmp_path: Path) -> None:
    """Runs that share a process are refused: its values would count twice."""
    answer = ask("merge", tmp_path / "whole", root / "a", root / "a")
    assert (1, "", 1) == (answer.code, answer.out, answer.err.count("\n"))
    assert "expected runs of different processes, got actor-0" in answer.err
