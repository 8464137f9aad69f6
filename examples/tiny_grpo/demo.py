"""`make demo`: a training is killed and goes on; then its log answers questions, and is told to two trackers.

Every command is printed before its output; at the end the facts are checked, and the exit code is 1 if one
does not hold. All of it stays in ./demo/.
"""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from launch import Training, last_step

from aggregator import open_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aggregator import Session

OUT = Path("demo")
RUN = OUT / "run"
PICTURE = OUT / "reward.png"
CLI = Path(sys.executable).with_name("areal-metrics")

STEPS, SAVE_EVERY = 100, 20
KILL_AFTER = 50  # the checkpoint before was written at step 39
RESUMED = 40

P99 = """
select step, count(*) as tokens, quantile_cont(abs(value), 0.99) as p99
from (select step, unnest(values) as value from tensors where key = 'ppo_actor/advantages')
where step % 10 = 9 group by step order by step
"""
SLOWER_RANK = """
select rank, 1000 * avg(value) as ms, 1000 * max(value) as longest_ms, arg_max(step, value) as at_step
from scalars where role = 'actor' and key = 'timeperf/ref_logp' group by rank order by ms desc
"""
CORRECT_ONLY = """
select step, avg(reward) as of_all, avg(reward) filter (correct) as of_correct,
    count(*) filter (correct) as correct, count(*) as sequences
from (
    select step, unnest(tensors.values) as reward, unnest(mask) as correct
    from tensors join masks using (step, rank)
    where tensors.key = 'ppo_actor/task_reward' and masks.key = 'ppo_actor/correct_n_seqs'
)
where step % 10 = 9 group by step order by step
"""


def main() -> None:
    """Tell the story; exit with 1 when a fact does not hold."""
    began = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    undone = train_until_killed()
    resume()
    ask()
    retell()
    hold = verify(undone)
    say(f"{time.monotonic() - began:.0f} s; all of it lies in {OUT}/")
    sys.exit(not hold)


# -- the training ----------------------------------------------------------------------------------


def train_until_killed() -> int:
    """Kill the first attempt between two checkpoints; return how many committed steps that undoes."""
    say(f"A training of {STEPS} steps on two ranks, a checkpoint every {SAVE_EVERY} ({OUT}/attempt-0.log)")
    with training(0) as first:
        first.wait_for_step(KILL_AFTER)
        first.kill()
    last = last_step(RUN)
    say(f"SIGKILL to all ranks and workers after step {last}; the last checkpoint is of step {RESUMED - 1}")
    return last + 1 - RESUMED


def resume() -> None:
    """Start the same command again and let it finish."""
    say(f"The same command once more goes on with step {RESUMED} ({OUT}/attempt-1.log)")
    with training(1) as second:
        second.finish()


def training(attempt: int) -> Training:
    """Start the training."""
    return Training(OUT, OUT / f"attempt-{attempt}.log", f"--steps={STEPS}", f"--save-every={SAVE_EVERY}")


# -- what a log is good for ------------------------------------------------------------------------


def ask() -> None:
    """Put the log the questions."""
    say("What is in the log: two attempts, and the steps that the second one did again")
    cli("info", RUN)
    say("Every step once, of the attempt that counts")
    cli("metrics", RUN, "rollout/reward", "eval-rollout/reward", "--since=38", "--until=41")
    say("What the kill undid is still there: the same rewards, at other times")
    cli("metrics", RUN, "rollout/reward", "--since=49", "--until=50", "--attempts=all")
    say("p99 of |advantage|, over every token of both ranks")
    cli("sql", RUN, P99, "--attempts=latest")
    say("The slower rank, at what each does alone")
    cli("sql", RUN, SLOWER_RANK, "--attempts=latest")
    say("The mean reward of the correct answers only: those found at the second try are worth half")
    cli("sql", RUN, CORRECT_ONLY, "--attempts=latest")


def retell() -> None:
    """Tell the run to trackers of which none was there, and draw it."""
    replay = ("replay", RUN, "--to=tensorboard", "--to=wandb", "-o", "wandb.mode=offline")
    say("The same story for two trackers that were not there")
    cli(*replay)
    say("Told once more, nothing is sent twice")
    cli(*replay)
    say("The reward curve")
    cli("plot", "curves", RUN, "rollout/reward", "eval-rollout/reward", "-o", PICTURE)


# -- the facts -------------------------------------------------------------------------------------


def verify(undone: int) -> bool:
    """Print the facts the demo stands for, each with whether it holds; return whether all do."""
    say("The facts")
    with open_run(RUN) as run:
        facts = [
            *facts_of_training(run),
            *facts_of_attempts(run, undone),
            *facts_of_log(run),
            *facts_of_files(),
        ]
    for fact, holds in facts:
        print("  yes " if holds else "  NO  ", fact, flush=True)
    return all(holds for _, holds in facts)


def facts_of_training(run: Session) -> Iterator[tuple[str, bool]]:
    """Yield whether all steps are there, and whether anything was learnt."""
    reward = run.metrics(["rollout/reward"])
    yield f"steps 0 to {STEPS - 1} are there, each once", reward["step"].to_pylist() == list(range(STEPS))
    values, tenth = reward["value"].to_pylist(), STEPS // 10
    first, last = fmean(values[:tenth]), fmean(values[-tenth:])
    yield (
        f"the mean reward rose by 0.2 or more: first tenth {first:.3f}, last {last:.3f}",
        last - first >= 0.2,
    )


def facts_of_attempts(run: Session, undone: int) -> Iterator[tuple[str, bool]]:
    """Yield what the kill did to the steps."""
    counted = run.sql("select steps, superseded_steps as undone from attempts order by attempt").to_pylist()
    expected = [{"steps": RESUMED, "undone": undone}, {"steps": STEPS - RESUMED, "undone": 0}]
    yield (
        f"there are two attempts, and the second one did {undone} steps of the first again",
        counted == expected,
    )
    owners = run.metrics(["rollout/reward"])["attempt"].to_pylist()
    yield "these steps are the second attempt's", owners == [int(step >= RESUMED) for step in range(STEPS)]


def facts_of_log(run: Session) -> Iterator[tuple[str, bool]]:
    """Yield whether the log of all ranks says what the training said."""
    live, log = (
        {(row["step"], row["key"]): row for row in run.metrics(source=source).to_pylist()}
        for source in ("committed", "recomputed")
    )
    same = live.keys() == log.keys() and all(agree(row, log[at]) for at, row in live.items())
    yield f"all {len(live)} committed numbers follow from the raw values of all ranks", same


def agree(live: dict[str, Any], log: dict[str, Any]) -> bool:
    """Whether two metrics are equal: counts and extremes exactly, means up to rounding."""
    if live["value_int"] is not None or live["key"].endswith(("/min", "/max")):
        return (live["value"], live["value_int"]) == (log["value"], log["value_int"])
    return math.isclose(live["value"], log["value"], rel_tol=1e-6)


def facts_of_files() -> Iterator[tuple[str, bool]]:
    """Yield whether what was retold and drawn is there."""
    yield "TensorBoard can show the run", any(RUN.glob("tensorboard/**/*tfevents*"))
    yield "wandb can sync the run", any(RUN.glob("wandb/**/*.wandb"))
    yield f"the reward curve is drawn: {PICTURE}", PICTURE.exists()


# -- the screen ------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a headline."""
    print(f"\n== {text}", flush=True)


def cli(*arguments: str | Path) -> None:
    """Print a command and run it."""
    words = [str(argument) for argument in arguments]
    shown = (f'"{word}"' if "'" in word else shlex.quote(word) for word in words)
    print("\n$ areal-metrics", *shown, flush=True)
    subprocess.run([CLI, *words], check=True)


if __name__ == "__main__":
    main()
