"""The example, small: two ranks and their workers train, are killed after a checkpoint, and go on from it."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from aggregator import open_run
from eventlog import RunReader

pytestmark = pytest.mark.timeout(600)  # two trainings, on a busy machine

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY, EVAL_EVERY = 32, 20, 4
KILL_AFTER = 21  # the only checkpoint is of step 19
FLAGS = (
    f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--eval-every={EVAL_EVERY}", "--warmup-steps=4",
    "--prompts=8", "--group-size=4", "--held-out=6", "--width=32", "--layers=1",
)  # fmt: skip

_spec = importlib.util.spec_from_file_location("launch", ROOT / "examples/tiny_grpo/launch.py")
launch = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launch)


@dataclass(frozen=True)
class Story:
    """A run directory, and the last step that was committed before the kill."""

    run: Path
    killed_after: int


# However late it is killed, it does not come to its end: there it waits.
ENDLESS = f"""
import runpy, sys, time
from replay import StatsLogger

commit = StatsLogger.commit

def commit_or_wait(self, epoch, epoch_step, global_step, data):
    if global_step == {STEPS - 1}:
        time.sleep(1000)
    return commit(self, epoch, epoch_step, global_step, data)

StatsLogger.commit = commit_or_wait
train = {str(launch.TRAIN)!r}
sys.path.insert(0, {str(launch.TRAIN.parent)!r})
runpy.run_path(train, run_name="__main__")
"""


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Train, kill all ranks and workers above the checkpoint, and start the same command again."""
    out = tmp_path_factory.mktemp("tiny_grpo")
    (out / "endless.py").write_text(ENDLESS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with patch.context() as first:
            first.setattr(launch, "TRAIN", out / "endless.py")
            training = launch.Training(out, out / "attempt-0.log", *FLAGS)
        with training:
            training.wait_for_step(KILL_AFTER)
            training.kill()
        killed_after = launch.last_step(out / "run")
        with launch.Training(out, out / "attempt-1.log", *FLAGS) as training:
            training.finish()
    return Story(out / "run", killed_after)


def test_a_training_that_is_done_says_so(story):
    """Started once more when every step is in the checkpoint, it trains nothing and records no attempt."""
    out = story.run.parent
    taken = SAVE_EVERY  # what the only checkpoint holds
    flags = [flag for flag in FLAGS if not flag.startswith("--steps=")]
    before = sorted(path for path in story.run.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with launch.Training(out, out / "again.log", *flags, f"--steps={taken}") as training:
            training.finish()
    assert f"nothing left to do: all {taken} steps were taken" in (out / "again.log").read_text()
    assert before == sorted(path for path in story.run.rglob("*"))


def committed(run: Path) -> dict[tuple[int, int, str], float]:
    """Return (attempt, step, key) → value as the leaders' commit files hold them."""
    rows = [row for _, _, batch in RunReader(run).commits() for row in batch.to_pylist() if row["key"]]
    return {(row["attempt"], row["global_step"], row["key"]): row["value"] for row in rows}


def test_live_metrics_equal_what_the_log_recomputes_for_every_step_and_key(story):
    """Means agree to 1e-6, counts and extremes exactly, and no committed key is without its records."""
    with open_run(story.run) as run:
        live, again = (
            {(row["step"], row["key"]): (row["value"], row["value_int"]) for row in table.to_pylist()}
            for table in (run.metrics(), run.metrics(source="recomputed"))
        )
    assert set(live) == set(again)
    for (step, key), (value, exact) in live.items():
        if exact is not None or key.endswith(("/min", "/max")):
            assert (value, exact) == again[step, key], (step, key)
        else:
            assert math.isclose(value, again[step, key][0], rel_tol=1e-6), (step, key)


def test_each_step_is_there_once_and_the_later_attempt_wins(story):
    """The steps redone after the checkpoint have the second attempt's values, the others the first's."""
    kept = committed(story.run)
    with open_run(story.run) as run:
        rows = run.metrics().to_pylist()
    assert 1 == max(Counter((row["step"], row["key"]) for row in rows).values())
    assert list(range(STEPS)) == [row["step"] for row in rows if row["key"] == "rollout/reward"]
    for row in rows:
        assert (row["step"] >= SAVE_EVERY) == row["attempt"]
        assert kept[row["attempt"], row["step"], row["key"]] == row["value"]


def test_superseded_rows_are_kept_and_counted(story):
    """`attempts="all"` shows what the kill undid, and `attempts` says how many steps that was."""
    undone = range(SAVE_EVERY, story.killed_after + 1)
    with open_run(story.run, attempts="all") as run:
        rows = [row for row in run.metrics(["rollout/reward"]).to_pylist() if row["superseded"]]
        attempts = run.sql("select outcome, superseded_steps from attempts order by attempt").to_pylist()
    kept = committed(story.run)
    assert [(0, step, kept[0, step, "rollout/reward"]) for step in undone] == [
        (row["attempt"], row["step"], row["value"]) for row in rows
    ]
    assert [
        {"outcome": "unknown", "superseded_steps": len(undone)},
        {"outcome": "finished", "superseded_steps": 0},
    ] == attempts  # fmt: skip


def test_a_resumed_training_repeats_what_the_kill_undid(story):
    """Weights, optimizer, random numbers and problems come back: redone numbers differ in timings only."""
    kept = committed(story.run)
    undone = [(step, key) for attempt, step, key in kept if attempt == 0 and step >= SAVE_EVERY]
    compared = [(step, key) for step, key in undone if not key.startswith("timeperf/")]
    assert {(step, key): kept[0, step, key] for step, key in compared} == {
        (step, key): kept[1, step, key] for step, key in compared
    }


def test_the_names_of_areal_are_there(story):
    """Streaming, batch, timing and evaluation metrics carry the names that AReaL's users know."""
    with open_run(story.run) as run:
        names = {row["key"] for row in run.metrics().to_pylist()}
        evaluated = run.metrics(["eval-rollout/reward"])["step"].to_pylist()
    stats = ("advantages", "kl_rewards", "final_reward", "task_reward", "seq_len", "no_eos_ratios")
    update = ("importance_weight", "entropy", "clip_ratio")
    counts = ("n_seqs", "n_tokens", "n_valid_tokens", "correct_n_seqs", "incorrect_n_seqs")
    scalars = ("eps_clip", "c_clip", "use_dual_clip", "update/grad_norm", "update/lr")
    timings = ("rollout", "ref_logp", "compute_advantage", "train_step", "update_weights", "save", "eval")
    expected = {f"ppo_actor/{name}" for name in (*counts, *scalars)}
    expected |= {f"ppo_actor/{name}/{part}" for name in stats for part in ("avg", "min", "max")}
    expected |= {f"ppo_actor/update/{name}/avg" for name in update} | {f"timeperf/{name}" for name in timings}
    expected |= {f"rollout/{name}" for name in ("reward", "num_turns", "max_tokens", "reward__count")}
    assert expected - names == set()
    assert list(range(EVAL_EVERY - 1, STEPS, EVAL_EVERY)) == evaluated


def test_workers_rewards_are_the_ranks_rewards(story):
    """The merge of the workers' exports agrees with the reduction over the ranks that trained on them."""
    with open_run(story.run) as run:
        merged, reduced = (
            run.metrics([key])["value"].to_pylist() for key in ("rollout/reward", "ppo_actor/task_reward/avg")
        )
    assert merged == pytest.approx(reduced, rel=1e-6)
