"""What is particular to TensorBoard's event files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlog.errors import BackendError
from replay import open_backend
from replay.backends.base import Rewriter, Selection
from replay.backends.directory import MARKER
from replay.backends.tensorboard_file import proto, step_event
from replay.steps import Row
from tests.replay.backend_contract import rows, run_info, snapshot, tell
from tests.replay.readers import tensorboard_events, tensorboard_rows, tensorboard_scalars, tensorboard_texts

ROOT = Path(__file__).parents[2]


def live(path: Path, told: list[Row], **info: Any) -> None:
    """Tell rows live, in one lifetime."""
    tell(open_backend("tensorboard", path=path / "tb"), path, told, **info)


def replayed(path: Path, told: list[Row], **info: Any) -> None:
    """Rewrite the directory."""
    backend = open_backend("tensorboard", path=path / "tb")
    assert isinstance(backend, Rewriter)
    backend.rewrite(run_info(path, **info), told, Selection())


def event_files(path: Path) -> list[Path]:
    return sorted((path / "tb").glob("*tfevents*"))


def test_a_resumed_file_starts_where_readers_must_forget(tmp_path: Path) -> None:
    """Steps 0..150, resumed at 100: the new file begins with a session start at 100 (report a6)."""
    live(tmp_path, rows(range(151)))
    live(tmp_path, rows(range(100, 161), again=1.0), attempt=1)
    first, second = event_files(tmp_path)
    starts = [
        [event.step for event in tensorboard_events(file) if event.HasField("session_log")]
        for file in (first, second)
    ]
    assert [[], [100]] == starts
    points = tensorboard_scalars(tmp_path / "tb")
    assert list(range(161)) == [step for step, _, _ in points["n"]]
    assert list(range(100, 161)) == [step for step, _, _ in points["again"]]


def test_one_event_a_step(tmp_path: Path) -> None:
    """All series of a step are one event, live and replayed (report d6)."""
    told = [Row(step, {f"k{i}": 1.0 for i in range(50)}, 1000.0) for step in range(3)]
    live(tmp_path / "live", told)
    replayed(tmp_path / "replay", told)
    for path in (tmp_path / "live", tmp_path / "replay"):
        events = [event for file in event_files(path) for event in tensorboard_events(file)]
        sizes = [
            len(event.summary.value)
            for event in events
            if event.summary.value and event.summary.value[0].tag == "k0"
        ]
        assert [50, 50, 50] == sizes


def test_config_and_version_are_shown(tmp_path: Path) -> None:
    """The config and the version of the code are texts, and the config is a set of hyperparameters."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    live(tmp_path / "live", rows(range(1)))
    replayed(tmp_path / "replay", rows(range(1)))
    for path in (tmp_path / "live", tmp_path / "replay"):
        texts = tensorboard_texts(path / "tb")
        assert run_info(path).config == json.loads(texts["config/text_summary"])
        assert run_info(path).version_info == json.loads(texts["version_info/text_summary"])
        values = [
            value for file in event_files(path) for e in tensorboard_events(file) for value in e.summary.value
        ]
        (shown,) = [value for value in values if value.tag == "_hparams_/session_start_info"]
        data = plugin_data_pb2.HParamsPluginData.FromString(shown.metadata.plugin_data.content)
        assert {"lr", "model.layers", "model.names"} == set(data.session_start_info.hparams)


def test_values_are_float32_unless_asked_otherwise(tmp_path: Path) -> None:
    """A float32 is what TensorBoard's scalars are; with `double` all digits are there (report e11)."""
    told = [Row(0, {"large": 16777217.0, "long": 0.1234567890123}, 1000.0)]
    replayed(tmp_path / "float", told)
    ((_, got, _),) = tensorboard_rows(tmp_path / "float" / "tb")
    assert {"large": 16777216.0, "long": pytest.approx(0.1234567890123, rel=1e-7)} == got
    assert 0.1234567890123 != got["long"]
    for name in ("live", "replay"):
        backend: Any = open_backend("tensorboard", path=tmp_path / name, double=True)
        if name == "live":
            backend.open(run_info(tmp_path))
            backend.log(0, told[0].metrics, 1000.0)
            assert 0 == backend.last_step()
            backend.close()
        else:
            backend.rewrite(run_info(tmp_path), told, Selection())
        exact = {
            value.tag: value.tensor.double_val[0]
            for file in (tmp_path / name).glob("*tfevents*")
            for event in tensorboard_events(file)
            for value in event.summary.value
            if value.metadata.plugin_data.plugin_name == "scalars"
        }
        assert told[0].metrics == exact


NUMBERS = st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1))
TAGS = st.one_of(st.text(max_size=9), st.integers(0, 400).map(lambda size: "x" * size))


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(0, 1e10),
    st.lists(st.dictionaries(TAGS, NUMBERS), min_size=1, max_size=3),
)
def test_an_event_is_what_protobuf_would_write(step: int, time: float, told: list[dict[str, float]]) -> None:
    """Numbers put between names that were encoded before make the bytes of the whole message encoded anew."""
    summary = proto("summary").Summary
    for metrics in [*told, *told]:  # the second time from what is known
        values = [summary.Value(tag=tag, simple_value=number) for tag, number in metrics.items()]
        whole = proto("event").Event(step=step, wall_time=time, summary=summary(value=values))
        assert whole.SerializeToString() == step_event(step, time, metrics, double=False)
        exact = proto("event").Event.FromString(step_event(step, time, metrics, double=True))
        assert (step, time) == (exact.step, exact.wall_time)
        shown = [(value.tag, value.tensor.double_val[0]) for value in exact.summary.value]
        assert [(tag, repr(float(number))) for tag, number in metrics.items()] == [
            (tag, repr(number)) for tag, number in shown
        ]


def test_a_live_point_is_in_the_file_at_once(tmp_path: Path) -> None:
    """When the call returns the event can be read, without flushing or closing."""
    backend = open_backend("tensorboard", path=tmp_path / "tb")
    backend.open(run_info(tmp_path))
    backend.log(0, {"a": 1.0}, 1000.0)
    assert [(0, {"a": 1.0}, 1000.0)] == tensorboard_rows(tmp_path / "tb")
    backend.close()


def test_another_runs_points_are_never_hidden(tmp_path: Path) -> None:
    """Where another run or writer has event files, live logging takes a sub-directory (report a7)."""
    live(tmp_path, rows(range(5)))
    live(tmp_path, rows(range(2, 4)), id="f" * 32, trial="other")
    live(tmp_path, rows(range(4, 6)), id="f" * 32, trial="other", attempt=1)
    assert [0, 1, 2, 3, 4] == [step for step, _, _ in tensorboard_rows(tmp_path / "tb")]
    assert [2, 3, 4, 5] == [step for step, _, _ in tensorboard_rows(tmp_path / "tb" / "exp_other_ffffffff")]
    (tmp_path / "b" / "tb").mkdir(parents=True)
    (tmp_path / "b" / "tb" / "events.out.tfevents.1700000000.host").write_bytes(b"")
    live(tmp_path / "b", rows(range(2)))
    assert [0, 1] == [step for step, _, _ in tensorboard_rows(tmp_path / "b" / "tb" / "exp_trial_01234567")]


def test_replay_and_live_logging_need_directories_of_their_own(tmp_path: Path) -> None:
    """Replaying into a live directory, or one with foreign event files, is refused; nothing there changes."""
    live(tmp_path, rows(range(5)))
    before = snapshot(tmp_path)
    with pytest.raises(BackendError, match="expected a directory written by replay, got one written by live"):
        replayed(tmp_path, rows(range(5)))
    assert before == snapshot(tmp_path)
    (tmp_path / "b" / "tb").mkdir(parents=True)
    (tmp_path / "b" / "tb" / "events.out.tfevents.1700000000.host").write_bytes(b"")
    with pytest.raises(BackendError, match="expected a directory without other event files"):
        replayed(tmp_path / "b", rows(range(5)))


def test_only_segments_that_change_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that went on rewrites its last segment and adds new ones; the others are not touched."""
    monkeypatch.setattr("replay.backends.tensorboard.STEPS_PER_SEGMENT", 10)
    replayed(tmp_path, rows(range(25)))
    before = snapshot(tmp_path / "tb")
    replayed(tmp_path, rows(range(42)))
    after = snapshot(tmp_path / "tb")
    changed = {name for name in after if before.get(name) != after[name]}
    segments = {f"events.out.tfevents.{number:010d}.areal" for number in (3, 4, 5)}
    assert {".", *segments} == changed
    assert list(range(42)) == [step for step, _, _ in tensorboard_rows(tmp_path / "tb")]


def test_a_new_run_may_hold_less(tmp_path: Path) -> None:
    """Asked for a new run, a narrower selection lies beside what was there, again and again."""
    replayed(tmp_path, rows(range(25)))
    backend = open_backend("tensorboard", path=tmp_path / "tb")
    assert isinstance(backend, Rewriter)
    for folder in ("tb-2", "tb-3"):
        backend.rewrite(run_info(tmp_path, fresh=True), rows(range(20, 25)), Selection(since=20))
        assert str(tmp_path / folder) == backend.target
        assert list(range(20, 25)) == [step for step, _, _ in tensorboard_rows(tmp_path / folder)]
    assert list(range(25)) == [step for step, _, _ in tensorboard_rows(tmp_path / "tb")]


def test_without_a_path_it_lies_in_the_run(tmp_path: Path) -> None:
    """The default directory is RUN/tensorboard."""
    backend = open_backend("tensorboard")
    assert isinstance(backend, Rewriter)
    backend.rewrite(run_info(tmp_path), rows(range(2)), Selection())
    assert [0, 1] == [step for step, _, _ in tensorboard_rows(tmp_path / "run" / "tensorboard")]
    assert str(tmp_path / "run" / "tensorboard") == backend.target  # pyright: ignore[reportAttributeAccessIssue]


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    """A target that is no directory is an error with its path last."""
    (tmp_path / "tb").write_text("in the way")
    with pytest.raises(BackendError, match=r"expected a directory, got a file: .*tb$"):
        replayed(tmp_path, rows(range(2)))


def test_after_a_failed_write_the_next_try_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a torn record cannot be read, so after a short write a new file begins."""
    backend = open_backend("tensorboard", path=tmp_path / "tb")
    backend.open(run_info(tmp_path))
    backend.log(0, {"a": 1.0}, 1000.0)
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(
            os, "write", lambda descriptor, data: write(descriptor, data[: 9 if b"torn" in data else None])
        )
        with pytest.raises(BackendError, match="wrote 9"):
            backend.log(1, {"torn": 2.0}, 1010.0)
    backend.log(1, {"torn": 2.0}, 1010.0)
    backend.close()
    assert 2 == len(event_files(tmp_path))
    assert [(0, {"a": 1.0}, 1000.0), (1, {"torn": 2.0}, 1010.0)] == tensorboard_rows(tmp_path / "tb")


KILLED = """
import os, signal, sys
from pathlib import Path
from replay import open_backend
from replay.backends import tensorboard
from replay.backends.base import Selection
from tests.replay.backend_contract import rows, run_info
tensorboard.STEPS_PER_SEGMENT = 10
path, fatal = Path(sys.argv[1]), int(sys.argv[2])
def told():
    for row in rows(range(45)):
        if row.step == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        yield row
replace = tensorboard._replace
def torn(path, data, later):
    if fatal == 45:
        path.with_name(".areal-0000000002.tmp").write_bytes(data[:100])
        os.kill(os.getpid(), signal.SIGKILL)
    replace(path, data, later)
tensorboard._replace = torn
open_backend("tensorboard", path=path / "tb").rewrite(run_info(path), told(), Selection())
"""


@pytest.mark.parametrize("fatal", [5, 10, 44, 45])
def test_a_killed_replay_made_again_ends_as_if_made_once(
    tmp_path: Path, fatal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any moment and run again: byte for byte what one replay writes, no leftovers."""
    monkeypatch.setattr("replay.backends.tensorboard.STEPS_PER_SEGMENT", 10)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "a"), str(fatal)], cwd=ROOT, check=False
    )
    assert -signal.SIGKILL == killed.returncode
    replayed(tmp_path / "a", rows(range(45)))
    replayed(tmp_path / "b", rows(range(45)))
    once, again = (
        {name: content for name, (_, content) in snapshot(tmp_path / p / "tb").items()} for p in "ba"
    )
    assert once == again
    assert MARKER in once


SHIFTS = """
import os, signal, sys
from pathlib import Path
from replay.backends import tensorboard
from tests.replay.test_tensorboard import Lacking, shifted
of, name = (Path, "replace") if sys.argv[4] == "placing" else (tensorboard, "_replace")
done, left = getattr(of, name), int(sys.argv[2])
def kill(*given):
    global left
    left -= any(isinstance(path, Path) and path.suffix == ".areal" for path in given)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return done(*given)
setattr(of, name, kill)
shifted(Path(sys.argv[1]), Lacking(eval(sys.argv[3])))
"""


class Lacking(list[Row]):
    """A log that has lost step 10."""

    def __init__(self, steps: list[int]) -> None:
        super().__init__(rows(steps))

    def knows(self, step: int, time: float) -> bool:
        del time
        return step != 10


def shifted(path: Path, told: list[Row]) -> None:
    """Rewrite a directory with ten steps to a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replay.backends.tensorboard.STEPS_PER_SEGMENT", 10)
        replayed(path, told)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("fatal", [1, 2])
@pytest.mark.parametrize("at", ["writing", "placing"])
def test_a_kill_loses_no_kept_step(tmp_path: Path, first: int, fatal: int, at: str) -> None:
    """A step that the log lost goes to another file, whichever way: killed between two files it is there."""
    before, after = list(range(1, 26)), [step for step in range(first, 26) if step != 10]
    shifted(tmp_path, rows(before))
    killed = [sys.executable, "-c", SHIFTS, str(tmp_path), str(fatal), repr(after), at]
    assert -signal.SIGKILL == subprocess.run(killed, cwd=ROOT, check=False).returncode
    shifted(tmp_path, Lacking(after))
    assert list(range(first, 26)) == [step for step, _, _ in tensorboard_rows(tmp_path / "tb")]
    assert not list((tmp_path / "tb").glob(".areal-*"))
