"""What is particular to Weights & Biases' offline files."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eventlog.errors import BackendError, ConfigError
from replay import open_backend
from replay.backends.base import Rewriter, Selection
from replay.backends.wandb_names import names
from replay.steps import Row
from tests.replay.backend_contract import ODD_NAMES, rows, run_info, snapshot, tell
from tests.replay.readers import Rows, wandb_files, wandb_history, wandb_records, wandb_rows
from tests.replay.waiting import until

ROOT = Path(__file__).parents[2]


def replayed(
    path: Path, told: list[Row], selection: Selection | None = None, *, options: Any = None, **info: Any
) -> int:
    """Rewrite the run; return how many steps were sent."""
    backend = open_backend("wandb", mode="offline", path=path / "wandb", **(options or {}))
    assert isinstance(backend, Rewriter)
    return backend.rewrite(run_info(path, **info), told, selection or Selection()).sent


def run_record(file: Path) -> Any:
    """Return the record that names the run."""
    (record,) = [record.run for record in wandb_records(file) if record.WhichOneof("record_type") == "run"]
    return record


def test_a_replayed_run_is_complete(tmp_path: Path) -> None:
    """Header, run, history, summary and exit are there; relative times are the training's."""
    replayed(tmp_path, rows(range(5)))
    (file,) = wandb_files(tmp_path)
    kinds = [record.WhichOneof("record_type") for record in wandb_records(file)]
    assert ["header", "run", *["history"] * 5, "summary", "exit"] == kinds
    assert [1.0, 11.0, 21.0, 31.0, 41.0] == [row["_runtime"] for row in wandb_history(file)]
    (summary,) = [r.summary for r in wandb_records(file) if r.WhichOneof("record_type") == "summary"]
    last = {item.nested_key[0]: json.loads(item.value_json) for item in summary.update}
    assert (4, 4 / 7) == (last["_step"], last["a/b"])


def test_the_run_is_named_after_the_trial(tmp_path: Path) -> None:
    """Project, name, group and id come from experiment and trial, the config goes along with the version."""
    replayed(tmp_path, rows(range(1)))
    (file,) = wandb_files(tmp_path)
    run = run_record(file)
    assert ("exp", "trial", "exp_trial", "exp_trial_train") == (
        run.project,
        run.display_name,
        run.run_group,
        run.run_id,
    )
    assert 999 == run.start_time.seconds
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {**run_info(tmp_path).config, "version_info": run_info(tmp_path).version_info} == config


def test_names_come_from_options_then_the_runs_config(tmp_path: Path) -> None:
    """What is given wins over what the run was configured with, and that over what is derived."""
    config = {
        "stats_logger": {"wandb": {"project": "configured", "entity": "team", "tags": ["a"], "notes": ""}}
    }
    replayed(
        tmp_path, rows(range(1)), options={"name": "given", "entity": "mine", "tags": "alone"}, config=config
    )
    run = run_record(wandb_files(tmp_path)[0])
    assert ("configured", "mine", "given", ["alone"], "exp_trial_train") == (
        run.project,
        run.entity,
        run.display_name,
        list(run.tags),
        run.run_id,
    )


def test_large_rows_span_the_files_blocks(tmp_path: Path) -> None:
    """Rows larger than a block of the file, and ends of blocks of every size, are read back whole."""
    told = [
        Row(step, {f"key/{'x' * step}/{i}": i / 3 for i in range(900 + step)}, 1000.0) for step in range(9)
    ]
    replayed(tmp_path, told)
    assert [(row.step, row.metrics, row.time) for row in told] == wandb_rows(tmp_path)


def test_names_that_wandb_keeps_for_itself_are_mapped_back() -> None:
    """Names beginning with an underscore, with dots, and "length" get marks that come off (report e7)."""
    told = [*ODD_NAMES, "~", "_", "~~x", "__x", "_timestamp", "~_timestamp"]
    there = [names().to(name) for name in told]
    assert ["~length", "my~2e;loss", "~_step", "~_timestamp"] == [
        names().to(name) for name in ("length", "my.loss", "_step", "_timestamp")
    ]
    assert told == [names().back(name) for name in there]
    assert not any(name.startswith("_") or "." in name or name == "length" for name in there)


def test_a_directory_that_was_synced_is_left_alone(tmp_path: Path) -> None:
    """What was uploaded is not replaced: a run that went on gets another id (report b3)."""
    replayed(tmp_path, rows(range(3)))
    (first,) = wandb_files(tmp_path)
    first.with_name(first.name + ".synced").touch()
    assert 0 == replayed(tmp_path, rows(range(3)))
    before = snapshot(first.parent)
    replayed(tmp_path, rows(range(5)))
    assert before == snapshot(first.parent)
    ids = {run_record(file).run_id: len(wandb_history(file)) for file in wandb_files(tmp_path)}
    assert {"exp_trial_train": 3, "exp_trial_train-2": 5} == ids
    assert 0 == replayed(tmp_path, rows(range(5)))


def test_a_new_run_stands_beside_the_old_one(tmp_path: Path) -> None:
    """Asked for a new run, the old directory stays and the new one has another id."""
    replayed(tmp_path, rows(range(3)))
    assert 3 == replayed(tmp_path, rows(range(3)), fresh=True)
    assert ["exp_trial_train", "exp_trial_train-2"] == [
        run_record(file).run_id for file in wandb_files(tmp_path)
    ]


def test_a_run_that_went_on_has_one_directory(tmp_path: Path) -> None:
    """The old directory goes when the new one is in place."""
    replayed(tmp_path, rows(range(3)))
    replayed(tmp_path, rows(range(5)))
    assert 1 == len(wandb_files(tmp_path))
    assert list(range(5)) == [step for step, _, _ in wandb_rows(tmp_path)]


def test_nothing_to_tell_makes_no_run(tmp_path: Path) -> None:
    """A run without commits leaves no empty directory."""
    assert 0 == replayed(tmp_path, [])
    assert [] == list(tmp_path.iterdir())


LIVE = """
import sys
from pathlib import Path
from eventlog.errors import BackendError, ConfigError
from replay import open_backend
from tests.replay.backend_contract import rows, run_info
path, waits = Path(sys.argv[1]), sys.argv[2] == "kill"
backend = open_backend("wandb", mode="offline", path=path / "wandb")
backend.open(run_info(path))
for row in rows(range(20)):
    backend.log(row.step, row.metrics, row.time)
import wandb
assert wandb.run is None, "a helper's wandb.log must not move our steps (report a9)"
if waits:
    sys.stdin.read()
backend.close()
"""


def so_far(folder: Path) -> Rows:
    """Return what the files below a folder hold, which may be just being made."""
    with suppress(struct.error):
        return wandb_rows(folder)
    return []


@pytest.mark.parametrize("end", ["close", pytest.param("kill", marks=pytest.mark.long)])
def test_live_rows_are_on_disk_soon(tmp_path: Path, end: str) -> None:
    """Live rows are complete after closing; before, too, soon after they were told, and a kill costs none."""
    command = [sys.executable, "-W", "error", "-c", LIVE, str(tmp_path), end]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        if end == "kill":
            until(lambda: len(so_far(tmp_path)) == 20)
            process.kill()
    assert (-signal.SIGKILL if end == "kill" else 0) == process.returncode
    assert list(range(20)) == [step for step, _, _ in wandb_rows(tmp_path)]
    assert [row.time for row in rows(range(20))] == [time for _, _, time in wandb_rows(tmp_path)]


def test_a_second_lifetime_has_a_directory_of_its_own_and_one_replay_joins_them(tmp_path: Path) -> None:
    """Offline, every lifetime is a directory; the log's replay is one continuous run (report b12)."""
    for steps in (range(6), range(4, 9)):
        backend = open_backend("wandb", mode="offline", path=tmp_path / f"live-{steps.start}")
        tell(backend, tmp_path, rows(steps))
    assert 2 == len(wandb_files(tmp_path))
    replayed(tmp_path / "replay", rows(range(9)))
    assert list(range(9)) == [step for step, _, _ in wandb_rows(tmp_path / "replay")]


def test_experiments_whose_names_no_project_can_have(tmp_path: Path) -> None:
    """They get one that is as close as can be, live and replayed, and ids that tell them apart."""
    ids = set()
    for number, experiment in enumerate(("a/b", "a#b", "a-b", "e" * 200)):
        path = tmp_path / str(number)
        backend = open_backend("wandb", mode="offline", path=path / "live")
        tell(backend, path, rows(range(2)), experiment=experiment)
        replayed(path / "replay", rows(range(2)), experiment=experiment)
        for file in wandb_files(path):
            run = run_record(file)
            assert {"a-b", "e" * 128} >= {run.project}
            ids.add((number, run.run_id))
    assert 4 == len(ids)
    with pytest.raises(ConfigError, match=r"expected a wandb project without any of .*got 'a/b'"):
        replayed(tmp_path / "x", rows(range(1)), config={"wandb": {"project": "a/b"}})


def test_what_wandb_refuses_is_an_error_of_ours(tmp_path: Path) -> None:
    """The same run twice in one process: wandb's own error becomes a BackendError that says where."""
    first, second = (open_backend("wandb", mode="offline", path=tmp_path / "w", id="same") for _ in range(2))
    first.open(run_info(tmp_path))
    try:
        with pytest.raises(BackendError, match=r"expected wandb to take the run, got .*same"):
            second.open(run_info(tmp_path))
    finally:
        first.close()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """Offline files need a directory: which, and how another is given."""
    (tmp_path / "w").write_text("in the way")
    with pytest.raises(BackendError, match=r"another can be given as wandb\.path\), got .*: .*/w$"):
        open_backend("wandb", mode="offline", path=tmp_path / "w").open(run_info(tmp_path))
