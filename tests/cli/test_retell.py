"""`replay`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import eventlog
import replay
from aggregator import stats_tracker
from eventlog import write_json
from eventlog.errors import RewindError
from replay import MemoryBackend
from tests.cli.conftest import STEPS, Ask, write_run
from tests.replay.readers import tensorboard_scalars
from tests.replay.servers import SwanlabServer, Trouble, WandbServer
from tests.storage import flip


def test_tells_two_trackers_once(ask: Ask, root: Path, tmp_path: Path) -> None:
    """Both targets get every step; told again, nothing is sent."""
    words = [
        "replay", root / "a", "--to", "tensorboard", "-o", f"tensorboard.path={tmp_path / 'tb'}",
        "--to", "wandb", "-o", "wandb.mode=offline", "-o", f"wandb.path={tmp_path / 'wb'}",
        "--cursors", tmp_path / "cursors", "--json",
    ]  # fmt: skip
    for sent, skipped in ((STEPS, 0), (0, STEPS)):
        answer = ask(*words)
        assert 0 == answer.code, answer.err
        assert [("tensorboard", sent, skipped, 2), ("wandb", sent, skipped, 2)] == [
            (row["backend"], row["sent"], row["skipped"], row["superseded"]) for row in answer.json
        ]
    assert list((tmp_path / "tb").glob("events.out.tfevents.*"))
    assert list((tmp_path / "wb").rglob("*.wandb"))


def test_bounds_and_keys(ask: Ask, root: Path, tmp_path: Path) -> None:
    """Only the steps and keys asked for are told."""
    answer = ask(
        "replay", root / "a", "--to", "tensorboard", "-o", f"tensorboard.path={tmp_path}",
        "--since", 2, "--until", 6, "--keys", "ppo_*", "--json",
        "--cursors", tmp_path / "cursors",
    )  # fmt: skip
    assert [5] == [row["sent"] for row in answer.json]


def test_dry_run_writes_nothing(ask: Ask, root: Path, tmp_path: Path) -> None:
    """--dry-run counts what would be told and leaves no file behind."""
    target = tmp_path / "tb"
    answer = ask("replay", root / "a", "--to", "tensorboard", "-o", f"tensorboard.path={target}", "--dry-run")
    assert 0 == answer.code
    assert "tensorboard" in answer.out
    assert not target.exists()
    assert not (root / "a" / "cursors").exists()


class Refusing(MemoryBackend):
    """A target that takes no step before the third."""

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        if step < 3:
            raise RewindError(f"expected a step of 3 or more, got {step}")
        super().log(step, metrics, time)


def test_refused_steps_exit_3(ask: Ask, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a target would not take is counted, told on stderr, and makes the exit code 3."""
    monkeypatch.setattr(replay, "open_backend", lambda _: Refusing(), raising=False)
    answer = ask("replay", root / "sub" / "b", "--to", "tensorboard", "--json")
    assert (3, [(STEPS - 3, 3)]) == (answer.code, [(row["sent"], row["refused"]) for row in answer.json])
    assert "some steps were refused: these targets will never take them" in answer.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "expected --to BACKEND or -c FILE, got neither"),
        (
            ["--to", "nope"],
            2,
            "expected --to swanlab, tensorboard, trackio, wandb, got 'nope'",
        ),
        (["--to", "swanlab", "-o", "swanlab.mode=x"], 2, "expected a swanlab mode of cloud, online, local"),
        (["--to", "wandb", "-o", "path=x"], 2, "expected -o BACKEND.OPTION=VALUE, got 'path=x'"),
        (["--to", "wandb", "-o", "wandb.path"], 2, "expected -o BACKEND.OPTION=VALUE, got 'wandb.path'"),
        (["--to", "wandb", "-o", "tensorboard.path=x"], 2, "expected -o of a backend named by --to"),
        (
            ["--to", "tensorboard", "-o", "tensorboard.nope=x"],
            2,
            "expected options of tensorboard among path",
        ),
        (["--to", "tensorboard", "--since", "1.5"], 2, "Invalid value for '--since'"),
        (["--to", "tensorboard", "--since", "-1"], 2, "Invalid value for '--since'"),
        (["--to", "tensorboard", "--since", "5", "--until", "1"], 2, "expected --since at or below --until"),
        (["--to", "memory"], 2, "expected --to swanlab, tensorboard, trackio, wandb, got 'memory'"),
        (["--to", "wandb", "-o", "wandb.timeout=abc"], 2, "expected wandb.timeout to be a number, got 'abc'"),
        (["--to", "wandb", "-o", "wandb.mode=foo"], 2, "expected a wandb mode of online, offline, disabled"),
        (["--to", "tensorboard", "--stat", "foo"], 2, "got 'foo'"),
        (["--to", "tensorboard", "--stat", "p101"], 2, "expected percentiles from 0 to 1"),
        (["--to", "tensorboard", "--rename", "^x(=y"], 2, "got ('^x(', 'y'): missing )"),
        (
            ["--to", "tensorboard", "-o", "tensorboard.path="],
            2,
            "expected tensorboard.path to be a path, got ''",
        ),
        (
            ["--to", "tensorboard", "--to", "tensorboard:x"],
            2,
            "expected different targets, got tensorboard and tensorboard:x with the same options",
        ),
        (["-c", "x", "-o", "wandb.mode=offline"], 2, "is changed by -o stats_logger.wandb.mode=offline"),
        (["-c", "x", "-o", "stats_logger.wandb.mode"], 2, "expected -o stats_logger.…=VALUE, got"),
        (["-c", "x"], 2, "expected a YAML file with the key stats_logger"),
    ],
)
def test_bad_orders_are_refused(ask: Ask, root: Path, words: list[str], code: int, message: str) -> None:
    """What cannot be meant is refused before anything is written, with exit code 2."""
    answer = ask("replay", root / "a", *words)
    assert (code, "") == (answer.code, answer.out)
    assert message in answer.err
    assert not (root / "a" / "tensorboard").exists()


@pytest.mark.parametrize("backend", ["swanlab", "tensorboard", "trackio", "wandb"])
def test_help_lists_what_each_backend_takes(ask: Ask, backend: str) -> None:
    """--help names every option of every backend, as the error of a wrong one does; asking loads no SDK."""
    before = set(sys.modules)
    told = " ".join(ask("replay", "--help").out.split("Options of the backends")[1].split())
    names = list(replay.backend_options(backend))
    assert {"path"} <= set(names)
    assert f"{backend} {', '.join(names)}" in told
    assert {"wandb", "swanlab", "trackio", "tensorboard", "torch"}.isdisjoint(set(sys.modules) - before)
    answer = ask("replay", "nowhere", "--to", backend, "-o", f"{backend}.nosuch=1")
    assert (2, True) == (answer.code, f"among {', '.join(names)}, got nosuch" in answer.err)


def test_options_may_be_lists_and_booleans() -> None:
    """An option given twice is a list, a value may hold an equals sign; what it is the backend decides."""
    from cli.retell import _options

    assert {"wandb": {"tags": ["a", "b"], "notes": "x=y", "strict": "true"}, "tensorboard": {}} == _options(
        ["wandb", "tensorboard"],
        ["wandb.tags=a", "wandb.tags=b", "wandb.notes=x=y", "wandb.strict=true"],
    )


@pytest.mark.long
def test_services_are_online_by_default(
    ask: Ask, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--to wandb and --to swanlab tell their servers, --to trackio its local file; again, nothing is sent."""
    monkeypatch.chdir(tmp_path)
    with WandbServer() as wandb, SwanlabServer() as swanlab:
        for name, value in {
            "WANDB_BASE_URL": wandb.url, "WANDB_API_KEY": "x" * 40, "WANDB_ERROR_REPORTING": "false",
            "SWANLAB_API_HOST": swanlab.url, "SWANLAB_API_KEY": "key",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        words = [
            "replay", root / "a", "--to", "wandb", "--to", "swanlab", "--to", "trackio",
            "-o", f"trackio.path={tmp_path / 'trackio'}", "-o", f"wandb.path={tmp_path / 'wb'}",
            "--cursors", tmp_path / "cursors", "--json",
        ]  # fmt: skip
        for sent, skipped in ((STEPS, 0), (0, STEPS)):
            answer = ask(*words)
            assert 0 == answer.code, answer.err
            assert [(sent, skipped)] * 3 == [(row["sent"], row["skipped"]) for row in answer.json]
        (history,) = (run.history for run in wandb.runs.values())
        assert STEPS == len(history)
        assert 1 == len(swanlab.experiments)


@pytest.mark.parametrize("damage", ["segment", "attempt", "manifest"])
def test_damage_is_told_as_by_metrics(ask: Ask, tmp_path: Path, damage: str) -> None:
    """A log with damage is told as far as it goes; the damage is on stderr and makes the exit code 3."""
    run = write_run(tmp_path / "run", [range(3)], gain=1.0)
    if damage == "segment":
        segment = next((run / "commits" / "actor-0").glob("*.arrows"))
        flip(segment, segment.stat().st_size - 20)
    else:
        (run / ("attempts/0000.json" if damage == "attempt" else "run.json")).write_text("{")
    read = ask("metrics", run)
    told = ask("replay", run, "--to", "tensorboard", "--json")
    assert (3, 3) == (read.code, told.code)
    assert (read.err, 1) == (told.err, told.json[0]["damaged"])
    assert read.err.startswith("damaged: ")


def test_a_new_run_on_tensorboard_is_another_directory(ask: Ask, root: Path, tmp_path: Path) -> None:
    """--new-run tells everything to a new directory beside the old one, and names it."""
    words = ("replay", root / "a", "--to", "tensorboard", "-o", f"tensorboard.path={tmp_path / 'tb'}",
             "--cursors", tmp_path / "cursors", "--json")  # fmt: skip
    for folder in ("tb", "tb-2", "tb-3"):
        (row,) = ask(*words, *(["--new-run"] if folder != "tb" else [])).json
        assert (str(tmp_path / folder), STEPS, 0) == (row["target"], row["sent"], row["skipped"])
        assert list((tmp_path / folder).glob("events.out.tfevents.*"))


def test_several_runs_are_told(ask: Ask, root: Path, tmp_path: Path) -> None:
    """Each run goes to a directory of its own in the path that was given; one that fails stops none (b4)."""
    words = ["--to", "tensorboard", "-o", f"tensorboard.path={tmp_path / 'tb'}", "--json", "--keys", "lr"]
    words += ["--cursors", str(tmp_path / "cursors")]
    (tmp_path / "none").mkdir()
    answer = ask("replay", root / "a", tmp_path / "none", root / "sub" / "b", *words)
    assert 1 == answer.code
    assert "areal-metrics: none: " in answer.err
    assert [("a", STEPS), ("b", STEPS)] == [(row["run"], row["sent"]) for row in answer.json]
    assert {"a", "b"} == {path.name for path in (tmp_path / "tb").iterdir()}


def test_several_targets_of_one_backend(ask: Ask, root: Path, tmp_path: Path) -> None:
    """Named targets have options of their own, and each gets exactly what it lacks."""
    behind = ["--to", "tensorboard:one", "-o", f"tensorboard:one.path={tmp_path / 'one'}"]
    level = ["--to", "tensorboard:two", "-o", f"tensorboard:two.path={tmp_path / 'two'}"]
    more = ["--cursors", tmp_path / "cursors", "--json"]
    ask("replay", root / "a", *behind, "--until", 3, *more)
    answer = ask("replay", root / "a", *behind, *level, *more)
    assert [(str(tmp_path / "one"), STEPS - 4, 4), (str(tmp_path / "two"), STEPS, 0)] == [
        (row["target"], row["sent"], row["skipped"]) for row in answer.json
    ]
    answer = ask("replay", root / "a", *behind, "-o", "tensorboard.path=x")
    assert (2, True) == (answer.code, "expected -o of a backend named by --to" in answer.err)


def test_names_can_be_changed_and_statistics_added(ask: Ask, root: Path, tmp_path: Path) -> None:
    """--rename and --stat reach the target; what it cannot show is said and exits 3 (report f6)."""
    place = tmp_path / "tb"
    words = ["replay", root / "a", "--to", "tensorboard", "-o", f"tensorboard.path={place}"]
    words += ["--cursors", tmp_path / "cursors", "--keys", "ppo_actor/*", "--rename", "^ppo_actor/=actor/"]
    answer = ask(*words, "--stat", "max", "--stat", "histogram")
    assert 0 == answer.code, answer.err
    assert "superseded: steps 4-5" in answer.err
    assert {"actor/loss", "actor/loss/max"} == set(tensorboard_scalars(place))
    swanlab = ["--to", "swanlab", "-o", "swanlab.mode=offline", "-o", f"swanlab.path={tmp_path / 'swanlab'}"]
    answer = ask("replay", root / "a", *swanlab, "--cursors", tmp_path / "c", "--stat", "histogram", "--json")
    assert (3, 2 * STEPS) == (answer.code, answer.json[0]["untold"])
    assert "histograms cannot be told to swanlab" in answer.err
    answer = ask(*words, "--rename", "loss")
    assert (2, True) == (answer.code, "expected --rename PATTERN=NAME, got 'loss'" in answer.err)


def test_a_finished_run_can_be_followed(ask: Ask, root: Path, tmp_path: Path) -> None:
    """--follow ends when there is nothing to wait for; what it cannot do is refused."""
    words = [
        "replay",
        root / "a",
        "--follow",
        "--to",
        "tensorboard",
        "-o",
        f"tensorboard.path={tmp_path / 'tb'}",
    ]
    answer = ask(*words, "--cursors", tmp_path / "cursors", "--json", "--wait", 0)
    assert (0, STEPS, "4-5") == (
        answer.code,
        answer.json[0]["sent"],
        answer.json[0]["superseded_steps"],
    ), answer.err
    assert "Ctrl-C ends it" in answer.err
    for more, message in (
        (["--attempts", "all"], "expected --follow without --attempts, --source and --dry-run"),
        (["--dry-run"], "expected --follow without --attempts, --source and --dry-run"),
        ([root / "sub" / "b"], "expected one run with --follow, got 2"),
    ):
        answer = ask(*words, *more)
        assert (2, True) == (answer.code, message in answer.err), answer.err


def test_statistics_can_be_followed(ask: Ask, root: Path, tmp_path: Path) -> None:
    """--follow with --stat tells each step with the statistics of its values."""
    place = tmp_path / "tb"
    answer = ask(
        "replay", root / "a", "--follow", "--wait", 0, "--keys", "ppo_actor/*", "--stat", "max", "--json",
        "--to", "tensorboard", "-o", f"tensorboard.path={place}", "--cursors", tmp_path / "cursors",
    )  # fmt: skip
    assert (0, STEPS, 0) == (answer.code, answer.json[0]["sent"], answer.json[0]["partial"]), answer.err
    assert {"ppo_actor/loss", "ppo_actor/loss/max"} == set(tensorboard_scalars(place))


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--follow", "--wait", "0"]])
@pytest.mark.parametrize("deleted", [True, False])
def test_a_service_that_does_not_take_a_run_exits_1(
    ask: Ask,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: list[object],
    *,
    deleted: bool,
) -> None:
    """Whether the run is gone or the server is down: exit code 1, in time, and the other target is told."""
    with SwanlabServer() as server:
        server.trouble.append(Trouble("/house/metrics", 404 if deleted else 500))
        monkeypatch.setenv("SWANLAB_API_HOST", server.url)
        monkeypatch.setenv("SWANLAB_API_KEY", "key")
        answer = ask(
            "replay", root / "a", *more, "--to", "swanlab", "-o", "swanlab.timeout=2", "--to", "tensorboard",
            "-o", f"tensorboard.path={tmp_path / 'tb'}", "--cursors", tmp_path / "cursors",
        )  # fmt: skip
    assert 1 == answer.code
    assert "expected swanlab to" in answer.err
    assert STEPS == len(tensorboard_scalars(tmp_path / "tb")["lr"])


def test_a_config_says_who_is_told(ask: Ask, root: Path, tmp_path: Path) -> None:
    """-c tells the backends that the file switches on; -o stats_logger.… changes the file's settings."""
    config = tmp_path / "stats_logger.yaml"
    config.write_text(
        "stats_logger:\n  experiment_name: exp\n  trial_name: t\n  fileroot: /nowhere\n"
        f"  tensorboard:\n    path: {tmp_path / 'tb'}\n  swanlab:\n    mode: offline\n"
        f"    logdir: {tmp_path / 'swanlab'}\n"
    )
    words = ["replay", root / "a", "-c", config, "--cursors", tmp_path / "cursors", "--json"]
    answer = ask(*words, "-o", "stats_logger.swanlab.mode=disabled")
    assert [("tensorboard", STEPS)] == [(row["backend"], row["sent"]) for row in answer.json]
    answer = ask(*words)
    assert [("swanlab", STEPS, 0), ("tensorboard", 0, STEPS)] == [
        (row["backend"], row["sent"], row["skipped"]) for row in answer.json
    ]
    answer = ask(*words, "-o", "stats_logger.swanlab.nope=1")
    assert (2, True) == (answer.code, "expected stats_logger.swanlab with" in answer.err)
    off = ["-o", "stats_logger.swanlab.mode=disabled", "-o", "stats_logger.tensorboard.path=null"]
    answer = ask(*words, *off)
    assert (2, True) == (answer.code, "switches a backend on, got none" in answer.err)
    answer = ask("replay", root / "a", "--to", "tensorboard", "-o", "stats_logger.wandb.mode=offline")
    assert (2, True) == (answer.code, "expected -c FILE for -o stats_logger.wandb.mode" in answer.err)


def test_a_target_that_fails_hides_no_other(ask: Ask, root: Path, tmp_path: Path) -> None:
    """Of a config's targets, of which some are another writer's, the rest is told, and in the summary."""
    config = tmp_path / "stats_logger.yaml"
    config.write_text(
        "stats_logger:\n  experiment_name: exp\n  trial_name: t\n  fileroot: /nowhere\n"
        f"  tensorboard:\n    path: {tmp_path / 'tb'}\n  swanlab:\n    mode: offline\n"
        f"    logdir: {tmp_path / 'swanlab'}\n"
    )
    runs = [root / "a", root / "sub" / "b"]
    words = ["-c", config, "--cursors", tmp_path / "cursors", "--json"]
    answer = ask("replay", *runs, *words)
    assert 0 == answer.code, answer.err
    assert {"a", "b"} == {path.name for path in (tmp_path / "tb").iterdir()}
    for taken in ((tmp_path / "tb" / "a"), (tmp_path / "swanlab" / "b")):
        marker = taken / "areal-metrics.json"
        marker.unlink()
        write_json(marker, {"run": "another", "writer": "live"})
    answer = ask("replay", *runs, *words)
    assert 1 == answer.code
    assert [("a", "swanlab", STEPS), ("b", "tensorboard", STEPS)] == [
        (row["run"], row["backend"], row["skipped"]) for row in answer.json
    ]
    assert 2 == answer.err.count("got one of run another; give it another path")
    assert "areal-metrics: a: expected a directory of run" in answer.err
    answer = ask("replay", root / "a", *words, "-o", f"stats_logger.tensorboard.path={tmp_path / 'tb' / 'a'}")
    assert (1, ["swanlab"]) == (answer.code, [row["backend"] for row in answer.json])


def test_a_word_for_no_switches_nothing_on(ask: Ask, root: Path, tmp_path: Path) -> None:
    """`tensorboard.double=no` writes float32, as without the option."""
    words = ["replay", root / "a", "--to", "tensorboard", "--cursors", tmp_path / "cursors"]
    for folder, more in (("plain", []), ("no", ["-o", "tensorboard.double=no"])):
        assert 0 == ask(*words, "-o", f"tensorboard.path={tmp_path / folder}", *more).code
    (plain, no) = (sorted((tmp_path / folder).glob("*tfevents*")) for folder in ("plain", "no"))
    assert [file.read_bytes() for file in plain] == [file.read_bytes() for file in no]


def test_what_there_is_nothing_of_has_no_column(ask: Ask, root: Path, tmp_path: Path) -> None:
    """The table for people has the counts that are not zero; for programs all of them."""
    words = ["replay", root / "a", "--to", "tensorboard", "-o", f"tensorboard.path={tmp_path / 'tb'}"]
    words += ["--cursors", tmp_path / "cursors"]
    answer = ask(*words)
    assert ["backend", "target", "sent", "skipped", "superseded"] == answer.out.splitlines()[0].split()
    assert {"withheld", "folded", "damaged", "kept", "dry_run"} < set(ask(*words, "--json").json[0])


def test_what_the_log_lost_is_said(ask: Ask, tmp_path: Path) -> None:
    """A step that a target has and the log lost stays there, is named, and makes the exit code 3."""
    run = write_run(tmp_path / "run", [range(3)], gain=1.0)
    words = ["replay", run, "--to", "tensorboard", "--json"]
    assert 0 == ask(*words).code
    segment = next((run / "commits" / "actor-0").glob("*.arrows"))
    flip(segment, segment.stat().st_size - 20)
    answer = ask(*words)
    assert (3, 1, "2") == (answer.code, answer.json[0]["kept"], answer.json[0]["kept_steps"])
    assert "tensorboard: kept: steps 2" in answer.err
    assert "some steps lie at a target and not in the log" in answer.err
    assert [0, 1, 2] == [step for step, _, _ in tensorboard_scalars(run / "tensorboard")["lr"]]


@pytest.mark.parametrize("more", [(), ("--follow",)])
def test_a_run_that_committed_nothing_says_so(ask: Ask, tmp_path: Path, more: tuple[str, ...]) -> None:
    """Steps were recorded and exported, no logger committed them: nothing is told, and that is said."""
    eventlog.start(tmp_path / "run", role="actor", rank=0, world_size=1)
    for step in range(3):
        eventlog.set_step(step)
        stats_tracker.scalar(x=step)
        stats_tracker.export_all()
    eventlog.stop()
    answer = ask("replay", tmp_path / "run", "--to", "trackio", "-o", f"trackio.path={tmp_path}", *more)
    assert 3 == answer.code
    assert "nothing to tell: 3 windows were recorded and no metric was committed; --source rec" in answer.err
    words = ["--to", "trackio", "-o", f"trackio.path={tmp_path}", "--source", "recomputed", "--json"]
    answer = ask("replay", tmp_path / "run", *words)
    assert (0, "") == (answer.code, answer.err)
    assert [(3, 0)] == [(row["sent"], row["uncommitted"]) for row in answer.json]


def test_an_empty_choice_says_so(ask: Ask, root: Path, tmp_path: Path) -> None:
    """Where a run's steps are others there is nothing to tell, which is no loss."""
    words = ["--to", "trackio", "-o", f"trackio.path={tmp_path}", "--since", 1000]
    answer = ask("replay", root / "a", *words)
    assert (0, 1) == (answer.code, answer.err.count("\n"))
    assert "nothing to tell: no metric of what is selected was committed" in answer.err
