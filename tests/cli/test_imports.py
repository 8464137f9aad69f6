"""`import`."""

from __future__ import annotations

from pathlib import Path

from replay.backends.tensorboard_file import framed, proto
from tests.cli.conftest import STEPS, Ask
from tests.replay.readers import wandb_files
from tests.replay.test_imports import events


def test_a_history_comes_in_and_can_be_asked(ask: Ask, root: Path, tmp_path: Path) -> None:
    """What was told to TensorBoard and wandb comes back as a run whose steps and keys are the same."""
    told = ask(
        "replay", root / "sub" / "b", "--to", "tensorboard", "-o", f"tensorboard.path={tmp_path / 'tb'}",
        "--to", "wandb", "-o", "wandb.mode=offline", "-o", f"wandb.path={tmp_path / 'wb'}",
        "--cursors", tmp_path / "cursors", "--json",
    )  # fmt: skip
    assert 0 == told.code, told.err
    for source, kind in ((tmp_path / "tb", "tensorboard"), (wandb_files(tmp_path / "wb")[0].parent, "wandb")):
        answer = ask("import", source, tmp_path / kind, "--json")
        assert 0 == answer.code, answer.err
        assert (kind, 1, STEPS, []) == tuple(
            answer.json[name] for name in ("source", "attempts", "steps", "problems")
        )
        metrics = ask("metrics", tmp_path / kind, "lr", "--json")
        assert [(step, 1.0) for step in range(STEPS)] == [(row["step"], row["value"]) for row in metrics.json]


def test_damage_is_told(ask: Ask, root: Path, tmp_path: Path) -> None:
    """A torn source comes in as far as it goes; the damage is on stderr and makes the exit code 3."""
    ask("replay", root / "a", "--to", "tensorboard", "-o", f"tensorboard.path={tmp_path / 'tb'}",
        "--cursors", tmp_path / "cursors")  # fmt: skip
    newest = max((tmp_path / "tb").glob("*tfevents*"))
    newest.write_bytes(newest.read_bytes()[:-3])
    answer = ask("import", tmp_path / "tb", tmp_path / "run")
    assert 3 == answer.code
    assert "damaged: ends within a record at byte" in answer.err
    assert f"steps {STEPS - 1}" in " ".join(answer.out.split())


def test_nothing_to_import_is_an_error(ask: Ask, tmp_path: Path) -> None:
    """An empty directory is refused with its path last, an unknown tracker is usage."""
    answer = ask("import", tmp_path, tmp_path / "run")
    assert (1, "") == (answer.code, answer.out)
    assert answer.err.strip().endswith(f"got neither: {tmp_path}")
    assert 2 == ask("import", tmp_path, tmp_path / "run", "--from", "mlflow").code


def test_what_is_left_out_is_called_by_its_name(ask: Ask, tmp_path: Path) -> None:
    """Keys of what is no number are shown as they are, and so are directories that are not read."""
    events(tmp_path / "tb" / "a.tfevents", [(0, 1.0, {"loss": 1.0})])
    events(tmp_path / "tb" / "more" / "a.tfevents", [(0, 1.0, {"loss": 1.0})])
    told = proto("summary").Summary(value=[proto("summary").Summary.Value(tag="a_b", histo={})])
    event = proto("event").Event(wall_time=1.0, step=0, summary=told)
    (tmp_path / "tb" / "b.tfevents").write_bytes(framed(event.SerializeToString()))
    answer = ask("import", tmp_path / "tb", tmp_path / "run")
    assert 3 == answer.code, answer.err
    assert "a_b" in answer.out.split()
    assert "left out, being no numbers: a_b" in answer.err
    assert f"not read, being runs of their own: {tmp_path / 'tb' / 'more'}" in answer.err
