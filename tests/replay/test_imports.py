"""What other trackers kept becomes a run: every point, of several files, as far as they are whole."""

from __future__ import annotations

import math
import signal
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import eventlog
from aggregator import open_run
from eventlog.errors import ConfigError, NotARunError, RunDirectoryError
from replay import MemoryBackend, import_history, open_backend, play
from replay.backends.framing import WANDB, RecordWriter
from replay.backends.tensorboard_file import framed, proto
from tests.replay.backend_contract import rows, tell
from tests.replay.committed import build
from tests.replay.readers import wandb_files, wandb_rows

ROOT = Path(__file__).parents[2]


def points(run: Path, attempts: Any = "latest") -> list[tuple[int, str, float, float]]:
    """Return (step, key, value, time) of all that a run's metrics hold."""
    with open_run(run, attempts=attempts) as session:
        table = session.metrics()
    found = table.select(["step", "key", "value", "time"]).to_pylist()
    return [(row["step"], row["key"], row["value"], row["time"].timestamp()) for row in found]


def events(path: Path, told: list[tuple[int, float, dict[str, float]]], *, start: int | None = None) -> Path:
    """Write an event file as TensorBoard's own writers do: one event a value."""
    pb, summary = proto("event"), proto("summary").Summary
    records = [pb.Event(wall_time=0.0, file_version="brain.Event:2")]
    if start is not None:
        log = pb.SessionLog(status=pb.SessionLog.SessionStatus.START)
        records.append(pb.Event(wall_time=1.0, step=start, session_log=log))
    for step, time, values in told:
        for tag, value in values.items():
            one = summary(value=[summary.Value(tag=tag, simple_value=value)])
            records.append(pb.Event(wall_time=time, step=step, summary=one))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(framed(record.SerializeToString()) for record in records))
    return path


def test_several_files_interleaved_and_torn(tmp_path: Path) -> None:
    """Two files whose tags interleave, the last record cut: all whole events, grouped by step (report f5)."""
    events(tmp_path / "tb" / "events.out.tfevents.1.a", [(s, 10.0 + s, {"loss": s / 2}) for s in (3, 1, 2)])
    second = events(
        tmp_path / "tb" / "events.out.tfevents.2.b", [(s, 20.0 + s, {"acc": s / 4}) for s in (1, 2, 3)]
    )
    second.write_bytes(second.read_bytes()[:-5])
    imported = import_history(tmp_path / "tb", tmp_path / "run")
    assert (1, 3, 5, 0, False) == (
        imported.attempts,
        imported.steps,
        imported.points,
        imported.refused,
        imported.complete,
    )
    (problem,) = imported.problems
    assert "ends within a record at byte" in problem
    assert problem.endswith(str(second))
    assert [(1, "acc", 0.25), (1, "loss", 0.5), (2, "acc", 0.5), (2, "loss", 1.0), (3, "loss", 1.5)] == [
        point[:3] for point in points(tmp_path / "run")
    ]
    memory = MemoryBackend()
    play(tmp_path / "run", [memory])
    assert [(1, {"loss": 0.5, "acc": 0.25}), (2, {"loss": 1.0, "acc": 0.5}), (3, {"loss": 1.5})] == [
        (step, metrics) for step, metrics, _ in memory.rows
    ]
    assert [11.0, 12.0, 13.0] == [time for _, _, time in memory.rows]


@pytest.mark.long
def test_every_point_of_a_long_curve(tmp_path: Path) -> None:
    """Twenty-five thousand points of one tag are as many rows: nothing is sampled (report f4)."""
    events(tmp_path / "events.out.tfevents.1", [(step, 1.0 + step, {"loss": 1.0}) for step in range(25_000)])
    assert 25_000 == import_history(tmp_path, tmp_path / "run").points
    assert list(range(25_000)) == [step for step, *_ in points(tmp_path / "run")]


def test_a_session_start_is_a_new_attempt(tmp_path: Path) -> None:
    """Steps done again after a session start supersede the old ones, which stay (reports a1, a6)."""
    events(tmp_path / "tb" / "events.out.tfevents.1", [(s, float(s), {"v": float(s)}) for s in range(16)])
    again = [(s, 100.0 + s, {"v": -float(s)}) for s in range(10, 14)]
    events(tmp_path / "tb" / "events.out.tfevents.2", again, start=10)
    assert 2 == import_history(tmp_path / "tb", tmp_path / "run").attempts
    expected = [(s, float(s)) for s in range(10)] + [(s, -float(s)) for s in range(10, 14)]
    assert expected == [(step, value) for step, _, value, _ in points(tmp_path / "run")]
    with open_run(tmp_path / "run", attempts="all") as session:
        assert 20 == session.metrics().num_rows


def test_points_that_repeat_are_all_kept(tmp_path: Path) -> None:
    """A tag twice at a step, without a session start, is two rows; told is the later one."""
    told = [(5, 10.0, {"v": 1.0}), (5, 11.0, {"w": 7.0}), (5, 12.0, {"v": 2.0})]
    imported = import_history(events(tmp_path / "a.tfevents", told), tmp_path / "run")
    assert (1, 3) == (imported.steps, imported.points)
    expected = [(5, "v", 1.0, 10.0), (5, "v", 2.0, 12.0), (5, "w", 7.0, 10.0)]
    assert expected == sorted(points(tmp_path / "run", "all"))
    memory = MemoryBackend()
    (report,) = play(tmp_path / "run", [memory])
    assert [(5, {"v": 2.0, "w": 7.0}, 10.0)] == memory.rows
    assert 1 == report.folded


def test_what_is_no_number_or_no_step_is_counted(tmp_path: Path) -> None:
    """Texts and histograms are left out by name, negative steps refused; scalar tensors are numbers."""
    pb, summary, tensor = proto("event"), proto("summary").Summary, proto("tensor").TensorProto
    path = events(tmp_path / "a.tfevents", [(0, 1.0, {"v": math.inf}), (-1, 2.0, {"v": 1.0})])
    values = [
        summary.Value(tag="tensor", tensor=tensor(dtype="DT_DOUBLE", double_val=[0.1])),
        summary.Value(tag="text", tensor=tensor(dtype="DT_STRING", string_val=[b"words"])),
        summary.Value(tag="hist", histo=proto("summary").HistogramProto(min=1.0, max=2.0)),
    ]
    with path.open("ab") as file:
        file.write(framed(pb.Event(step=4, wall_time=3.0, summary=summary(value=values)).SerializeToString()))
    imported = import_history(path, tmp_path / "run")
    assert ({"hist": 1, "text": 1}, 1, False) == (imported.left_out, imported.refused, imported.complete)
    assert [(0, "v", math.inf), (4, "tensor", 0.1)] == [p[:3] for p in points(tmp_path / "run")]


@pytest.mark.parametrize(
    "odd",
    [
        {"dtype": "DT_INVALID"},
        {"dtype": "DT_DOUBLE"},
        {"dtype": "DT_DOUBLE", "double_val": [1.0, 2.0]},
        {"dtype": "DT_COMPLEX128", "dcomplex_val": [1.0, 2.0]},
    ],
    ids=["of no type", "empty", "two", "complex"],
)
def test_a_tensor_that_is_no_number_is_left_out(tmp_path: Path, odd: dict[str, object]) -> None:
    """A scalar's shape may hold what no number is: it is named, and all else comes."""
    pb, summary, tensor = proto("event"), proto("summary").Summary, proto("tensor").TensorProto
    path = events(tmp_path / "a.tfevents", [(0, 1.0, {"v": 2.0})])
    value = summary.Value(tag="odd", tensor=tensor(**odd))
    with path.open("ab") as file:
        event = pb.Event(step=1, wall_time=3.0, summary=summary(value=[value]))
        file.write(framed(event.SerializeToString()))
    imported = import_history(path, tmp_path / "run")
    assert ({"odd": 1}, 0) == (imported.left_out, imported.refused)
    assert [(0, "v", 2.0)] == [p[:3] for p in points(tmp_path / "run")]


def test_a_damaged_event_costs_only_itself(tmp_path: Path) -> None:
    """A flipped byte within one event leaves the others; one in a length ends the file, and both are said."""
    path = events(tmp_path / "a.tfevents", [(s, 1.0, {"v": float(s)}) for s in range(4)])
    whole = bytearray(path.read_bytes())
    starts, at = [], 0
    while at < len(whole):
        starts.append(at)
        at += 16 + struct.unpack("<Q", whole[at : at + 8])[0]
    whole[starts[2] + 14] ^= 1  # within step 1
    whole[starts[4]] ^= 1  # the length of step 3
    path.write_bytes(whole)
    imported = import_history(path, tmp_path / "run")
    assert [0, 2] == [step for step, *_ in points(tmp_path / "run")]
    assert ["a wrong checksum at byte", "a wrong checksum of a length"] == [
        problem.split(f" {starts[2]}:")[0].split(" at byte " + str(starts[4]))[0]
        for problem in imported.problems
    ]


def test_our_own_files_come_back(tmp_path: Path) -> None:
    """A run told to TensorBoard and imported again has the same steps, names and times, values as float32."""
    run = build(tmp_path / "run", (range(12), lambda step: {"a/b": step / 4, "n": float(step)}))
    play(run, [open_backend("tensorboard", path=tmp_path / "tb")])
    imported = import_history(tmp_path / "tb", tmp_path / "again")
    assert (12, 24, True) == (imported.steps, imported.points, imported.complete)
    assert points(run) == points(tmp_path / "again")


def test_an_offline_wandb_run_comes_back(tmp_path: Path) -> None:
    """Steps, values, times, config and names: what wandb kept offline can be told elsewhere (report f5)."""
    run = build(tmp_path / "run", (range(12), lambda step: {"a/b": step / 7, "nan": math.nan}))
    play(run, [open_backend("wandb", mode="offline", path=tmp_path / "wb")])
    (file,) = wandb_files(tmp_path / "wb")
    for source in (file, file.parent, tmp_path / "wb"):
        imported = import_history(source, tmp_path / f"again-{source.name}")
        assert (12, 24, {}, True) == (imported.steps, imported.points, imported.left_out, imported.complete)
    got = points(tmp_path / "again-wb")
    assert [p[:2] + p[3:] for p in points(run)] == [p[:2] + p[3:] for p in got]
    assert [step / 7 for step in range(12)] == [value for _, key, value, _ in got if key == "a/b"]
    play(tmp_path / "again-wb", [open_backend("wandb", mode="offline", path=tmp_path / "third")])
    (third,) = wandb_files(tmp_path / "third")
    assert file.parent.name == third.parent.name  # project, id and start are those of the first
    assert str(wandb_rows(tmp_path / "wb")) == str(wandb_rows(tmp_path / "third"))


def test_a_resumed_offline_wandb_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Offline its rows count from 0 again; they stand behind the first ones, as `wandb sync` has them."""
    code = """
import sys, wandb
for life in range(2):
    with wandb.init(project="p", id="one", dir=sys.argv[1], mode="offline", resume="allow") as run:
        for i in range(3):
            run.log({"loss": 10.0 * life + i})
    wandb.teardown()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, timeout=100)
    imported = import_history(tmp_path / "wandb", tmp_path / "run")
    assert (2, 6, True) == (imported.attempts, imported.steps, imported.complete)
    found = [(step, value) for step, key, value, _ in points(tmp_path / "run") if key == "loss"]
    assert list(enumerate([0.0, 1.0, 2.0, 10.0, 11.0, 12.0])) == found


@pytest.mark.parametrize("time", [-5.0, math.nan, math.inf, 1.7e12, 1e300])
def test_a_time_that_is_none_is_told(tmp_path: Path, time: float) -> None:
    """Its row has the time of the one before; the run that is made is whole."""
    events(tmp_path / "tb" / "events.out.tfevents.1", [(0, 10.0, {"a": 0.0}), (1, time, {"a": 1.0})])
    imported = import_history(tmp_path / "tb", tmp_path / "run")
    assert [
        f"expected Unix seconds as the time of step 1, got {time:g}: they have the time of the row before"
    ] == list(imported.problems)
    assert [(0, "a", 0.0, 10.0), (1, "a", 1.0, 10.0)] == points(tmp_path / "run")
    assert eventlog.verify(tmp_path / "run").clean


def test_lifetimes_of_a_wandb_run_are_attempts(tmp_path: Path) -> None:
    """Two lifetimes, written by the SDK itself, are two attempts: the later one counts (report a1)."""
    for steps in (range(6), range(4, 9)):
        backend = open_backend("wandb", mode="offline", path=tmp_path / f"live-{steps.start}")
        tell(backend, tmp_path, rows(steps, **{"from": steps.start}))
    whole = tmp_path / "wandb"
    whole.mkdir()
    for number, file in enumerate(wandb_files(tmp_path)):
        file.parent.rename(whole / f"offline-run-2026010{number + 1}_000000-exp_trial_train")
    assert 2 == import_history(whole, tmp_path / "run").attempts
    assert [(s, 0) for s in range(4)] + [(s, 4) for s in range(4, 9)] == [
        (step, value) for step, key, value, _ in points(tmp_path / "run") if key == "from"
    ]


def test_a_torn_wandb_file_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """Rows up to the tear are there, and the tear is said (report f5)."""
    run = build(tmp_path / "run", (range(40), lambda step: {"v": float(step)}))
    play(run, [open_backend("wandb", mode="offline", path=tmp_path / "wb")])
    (file,) = wandb_files(tmp_path / "wb")
    file.write_bytes(file.read_bytes()[:-900])
    imported = import_history(file, tmp_path / "again")
    assert 0 < imported.steps < 40
    assert list(range(imported.steps)) == [step for step, *_ in points(tmp_path / "again")]
    assert imported.problems[0].startswith("ends within a record at byte")


def refuse(source: Path, run: Path, kind: str | None = None) -> Any:
    return import_history(source, run, kind=kind)


def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    """Nothing there, several runs, an unknown tracker, a directory in use: refused, nothing is written."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotARunError, match=r"expected event files or a wandb run, got neither: .*empty"):
        refuse(tmp_path / "empty", tmp_path / "run")
    events(tmp_path / "logs" / "train" / "a.tfevents", [(0, 1.0, {"v": 1.0})])
    with pytest.raises(NotARunError, match=r"got neither; its runs lie in .*logs/train: .*logs"):
        refuse(tmp_path / "logs", tmp_path / "run")
    with pytest.raises(ConfigError, match="expected a history of tensorboard or wandb, got 'mlflow'"):
        refuse(tmp_path / "logs", tmp_path / "run", kind="mlflow")
    with pytest.raises(NotARunError, match="expected a history with numbers, got nothing"):
        refuse(events(tmp_path / "b.tfevents", []), tmp_path / "run")
    for name in ("a", "b"):
        built = build(tmp_path / name, (range(2), lambda step: {"v": float(step)}))
        play(built, [open_backend("wandb", mode="offline", path=tmp_path / "wb" / name, id=name)])
    both = tmp_path / "both"
    both.mkdir()
    for file in wandb_files(tmp_path / "wb"):
        file.parent.rename(both / file.parent.name)
    with pytest.raises(NotARunError, match="expected the files of one wandb run, got a, b"):
        refuse(both, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunDirectoryError, match="expected a new directory for the run, got one in use"):
        refuse(tmp_path / "logs" / "train", tmp_path / "both")


KILLED = """
import os, signal, sys
from pathlib import Path
from eventlog import Log
from replay import import_history
commit = Log.commit
def die(self, epoch, epoch_step, step, *rest, **more):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(self, epoch, epoch_step, step, *rest, **more)
Log.commit = die
import_history(Path(sys.argv[1]) / "a.tfevents", Path(sys.argv[1]) / "run")
"""


def test_a_killed_import_leaves_no_half_run(tmp_path: Path) -> None:
    """The run appears when it is complete; after a kill the next import begins anew and tidies up."""
    events(tmp_path / "a.tfevents", [(s, 1.0 + s, {"v": float(s)}) for s in range(9)])
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False)
    assert -signal.SIGKILL == killed.returncode
    assert not (tmp_path / "run").exists()
    assert 9 == import_history(tmp_path / "a.tfevents", tmp_path / "run").points
    assert {"a.tfevents", "run"} == {entry.name for entry in tmp_path.iterdir()}


def test_names_that_differ_by_slashes_stay_apart(tmp_path: Path) -> None:
    """Slashes around a tag are a part of it: no two keys become one."""
    told = {"loss": 1.0, "/loss": 2.0, "a/": 3.0, "a": 4.0}
    events(tmp_path / "tb" / "a.tfevents", [(step, 1.0, told) for step in range(3)])
    imported = import_history(tmp_path / "tb", tmp_path / "run")
    assert (12, 0) == (imported.points, imported.refused)
    expected = {(step, *item) for step in range(3) for item in told.items()}
    assert expected == {(step, key, value) for step, key, value, _ in points(tmp_path / "run")}


def test_names_spelled_out_for_wandb_are_read_back(tmp_path: Path) -> None:
    """What replay had to call otherwise in wandb has its own name again."""
    told = {"_step": 1.0, "a.b": 2.0, "x~y": 3.0, "/loss": 4.0, "loss": 5.0}
    run = build(tmp_path / "run", (range(2), lambda _: told))
    play(run, [open_backend("wandb", mode="offline", path=tmp_path / "wb")])
    imported = import_history(tmp_path / "wb", tmp_path / "again")
    assert (10, True) == (imported.points, imported.complete)
    assert points(run) == points(tmp_path / "again")


def test_what_wandb_keeps_about_media_is_no_metric(tmp_path: Path) -> None:
    """An image's or a table's sizes are not numbers of the run: the media are left out, by their names."""
    pb = import_module("wandb.proto.wandb_internal_pb2")
    path = tmp_path / "offline-run-1" / "run-a.wandb"
    path.parent.mkdir()
    row = {
        ("img", "_type"): '"image-file"', ("img", "height"): "8", ("img", "size"): "90",
        ("deep", "tab", "_type"): '"table-file"', ("deep", "tab", "nrows"): "2",
        ("deep", "n"): "1", ("loss",): "0.5", ("hist",): '{"_type": "histogram", "bins": [], "values": []}',
    }  # fmt: skip
    with path.open("xb") as stream:
        file = RecordWriter(stream, WANDB)
        file.put(pb.Record(run=pb.RunRecord(run_id="a")).SerializeToString())
        for step in range(2):
            history = pb.HistoryRecord(step=pb.HistoryStep(num=step))
            for nested, value in row.items():
                history.item.add(nested_key=nested, value_json=value)
            file.put(pb.Record(history=history).SerializeToString())
    imported = import_history(path, tmp_path / "run")
    assert ({"img": 2, "deep.tab": 2, "hist": 2}, 4) == (imported.left_out, imported.points)
    assert {"deep.n", "loss"} == {key for _, key, _, _ in points(tmp_path / "run")}


def test_runs_within_a_directory_are_named(tmp_path: Path) -> None:
    """Sub-directories with event files, as `add_scalars` makes them, are not read, and that is said."""
    events(tmp_path / "tb" / "a.tfevents", [(0, 1.0, {"loss": 1.0})])
    events(tmp_path / "tb" / "both_left" / "a.tfevents", [(0, 1.0, {"both": 1.0})])
    imported = import_history(tmp_path / "tb", tmp_path / "run")
    assert ((str(tmp_path / "tb" / "both_left"),), 1, False) == (
        imported.elsewhere,
        imported.points,
        imported.complete,
    )


def test_an_import_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """Where nothing can be imported, no half of a run stays."""
    events(tmp_path / "tb" / "a.tfevents", [(-1, 1.0, {"loss": 1.0})])
    with pytest.raises(NotARunError, match="expected a history with numbers, got nothing"):
        import_history(tmp_path / "tb", tmp_path / "runs" / "run")
    assert [] == list((tmp_path / "runs").glob("*")) + list((tmp_path / "runs").glob(".*"))
