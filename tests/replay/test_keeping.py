"""What a rewrite leaves at a target: steps of which the log has lost its own copy."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from eventlog import RunDir
from eventlog.errors import ArealMetricsError
from replay import follow, open_backend, play
from replay.backends.keeping import with_kept
from replay.steps import Row
from tests.replay.committed import build
from tests.replay.readers import trackio_rows
from tests.replay.targets import FILES, Target
from tests.storage import flip

if TYPE_CHECKING:
    from pathlib import Path


def value(step: int) -> dict[str, float]:
    return {"v": float(step), "a/b": step / 2}


def later(step: int) -> dict[str, float]:
    return {"v": 100.0 + step, "a/b": step / 2}


def commit_files(run: Path) -> list[Path]:
    """Return the files of commits, a lifetime each, the oldest first."""
    return sorted((run / "commits").rglob("*.arrows"))


def files(folder: Path) -> dict[str, bytes]:
    """Return all that lies in a folder; folders are empty files."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize("target", FILES, indirect=True)
def test_a_step_that_the_log_lost_stays(tmp_path: Path, target: Target) -> None:
    """A damaged commit costs no target the step it was told: it is counted, until the log has it again."""
    run = build(tmp_path / "run", (range(10), value))
    play(run, [target.make()])
    whole = target.rows()
    (file,) = commit_files(run)
    intact = file.read_bytes()
    flip(file, len(intact) * 2 // 3)
    for _ in range(2):
        (report,) = play(run, [target.make()])
        assert (0, 9, 1, False) == (report.sent, report.skipped, report.kept, report.complete), report
        assert report.kept_steps.isdigit()
        assert whole == target.rows()
    file.write_bytes(intact)
    (report,) = play(run, [target.make()])
    assert (0, 10, 0, True) == (report.sent, report.skipped, report.kept, report.complete), report
    assert whole == target.rows()


@pytest.mark.parametrize("target", FILES, indirect=True)
def test_a_part_of_the_log_that_is_not_there_takes_nothing_back(tmp_path: Path, target: Target) -> None:
    """Without the newest attempt's commits, which no reader misses, its steps stay as it told them."""
    run = build(tmp_path / "run", (range(8), value), (range(5, 12), later))
    play(run, [target.make()])
    whole = target.rows()
    for file in commit_files(run)[1:]:
        file.unlink()
        file.with_suffix(".idx").unlink(missing_ok=True)
    (report,) = play(run, [target.make()])
    assert (0, 5, 7, "5-11") == (report.sent, report.skipped, report.kept, report.kept_steps), report
    assert whole == target.rows()


@pytest.mark.parametrize("target", FILES, indirect=True)
def test_what_was_superseded_goes(tmp_path: Path, target: Target) -> None:
    """A resumed run's older steps are the log's still, so that its newer ones take their place."""
    run = build(tmp_path / "run", (range(8), value))
    play(run, [target.make()])
    run = build(tmp_path / "again", (range(8), value), (range(5, 7), later))
    (tmp_path / "run" / "run.json").replace(run / "run.json")
    (report,) = play(run, [target.make()])
    assert 0 == report.kept
    assert [0, 1, 2, 3, 4, 5, 6] == [step for step, _, _ in target.rows()]
    assert [105.0, 106.0] == [row["v"] for _, row, _ in target.rows()[5:]]


def test_kept_steps_stand_in_their_places() -> None:
    """They come in the order of the steps, in the place of the log's where it has the step, too."""
    rows = [Row(step, {}, 0.0) for step in (1, 3, 5)]
    kept = {0: "zero", 3: "three", 4: "four", 9: "nine"}
    assert ["zero", rows[0], "three", "four", rows[2], "nine"] == list(with_kept(rows, kept))


@pytest.mark.parametrize("target", ["tensorboard", "wandb", "swanlab"], indirect=True)
def test_a_rewrite_that_fails_leaves_no_half_behind(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk what lies there stays as it is, and nothing of the new lies beside it."""
    run = build(tmp_path / "run", (range(4), value))
    play(run, [target.make()])
    before = files(target.path / "told")
    more = build(tmp_path / "more", (range(6), value))
    (run / "run.json").replace(more / "run.json")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("os.fsync", full)
        with pytest.raises(ArealMetricsError, match="No space left"):
            play(more, [target.make()], cursors=tmp_path / "cursors")
    assert before == files(target.path / "told")
    (report,) = play(more, [target.make()], cursors=tmp_path / "cursors")
    assert 6 == report.sent + report.skipped


def test_following_keeps_what_the_log_lost(tmp_path: Path) -> None:
    """A run that is followed to Trackio is put right at the end, but not by what is damaged in the log."""
    run = build(tmp_path / "run", (range(6), value))
    RunDir.open(run).end_attempt(0, "finished")
    play(run, [open_backend("trackio", path=tmp_path / "t")])
    flip(commit_files(run)[0], commit_files(run)[0].stat().st_size * 2 // 3)
    (report,) = follow(run, [open_backend("trackio", path=tmp_path / "t")], wait=0.0, poll=0.02)
    assert (1, False) == (report.kept, report.complete)
    (database,) = (tmp_path / "t").glob("*.db")
    assert [0, 1, 2, 3, 4, 5] == [step for step, _, _ in trackio_rows(database)]
