"""`make demo`: a training is killed and goes on; then its log answers what no tracker could, and is retold to two.

What is printed is computed from the run, and checked: the exit code is 1 when a fact does not hold. All results stay
in ./demo/.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launch import Training, last_step

from aggregator import open_run

if TYPE_CHECKING:
    from aggregator import Session

OUT = Path("demo")
RUN = OUT / "run"
STEPS, SAVE_EVERY = 100, 20
KILL_AFTER = 50  # between the checkpoints after step 39 and step 59
RESUMED = 40
REWARD = "rollout/reward"

P99 = """
select step, count(*) as tokens, quantile_cont(abs(value), 0.99) as p99
from (select step, unnest(values) as value from tensors where key = 'ppo_actor/advantages')
where step % 10 = 9 group by step order by step
"""
SLOWER_RANK = """
select rank, 1000 * avg(value) as ms, 1000 * max(value) as worst_ms, arg_max(step, value) as worst_step
from scalars where role = 'actor' and key = 'timeperf/ref_logp' group by rank order by ms desc
"""
CORRECT_ONLY = """
select step, count(*) as sequences, count(*) filter (correct) as correct, avg(reward) filter (correct) as their_reward
from (
    select t.step, unnest(t.values) as reward, unnest(m.mask) as correct
    from tensors t join masks m using (session, "window")
    where t.key = 'ppo_actor/task_reward' and m.key = 'ppo_actor/correct_n_seqs'
)
where step % 10 = 9 group by step order by step
"""


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    lost = train_and_kill()
    resume()
    ask()
    retell()
    with open_run(RUN) as run:
        check(run, lost)
    say(f"done in {time.monotonic() - began:.0f} s; everything is in {OUT}/")


def train_and_kill() -> int:
    """Kill the first attempt between two checkpoints; return how many committed steps the kill undoes."""
    say(f"a training of {STEPS} steps on two ranks, a checkpoint every {SAVE_EVERY}: {OUT}/attempt-0.log")
    with flagged_training(0) as training:
        training.wait_for_step(KILL_AFTER)
        training.kill()
    last = last_step(RUN)
    say(f"SIGKILL to all ranks and workers after step {last}; the last checkpoint was after step {RESUMED - 1}")
    return last - RESUMED + 1


def resume() -> None:
    say(f"the same command again: on from step {RESUMED}: {OUT}/attempt-1.log")
    with flagged_training(1) as training:
        training.finish()


def flagged_training(attempt: int) -> Training:
    flags = (f"--steps={STEPS}", f"--save-every={SAVE_EVERY}")
    return Training(OUT, OUT / f"attempt-{attempt}.log", *flags)


def ask() -> None:
    say("the flight recorder: who recorded, which attempts, what was superseded")
    cli("info", RUN)
    say("each step once, the attempt that counts")
    cli("metrics", RUN, REWARD, "eval-rollout/reward", "--since=38", "--until=41")
    say("p99 of |advantage| by step: over every token of both ranks")
    cli("sql", RUN, P99, "--attempts=latest")
    say("which rank is slower at what both do alone")
    cli("sql", RUN, SLOWER_RANK, "--attempts=latest")
    say("the mean reward of only the correct answers' sequences: second tries are worth half")
    cli("sql", RUN, CORRECT_ONLY, "--attempts=latest")


def retell() -> None:
    say("told again to two trackers, none of which ran during the training")
    cli("replay", RUN, "--to=tensorboard", "--to=wandb", "-o", f"tensorboard.path={OUT}/tensorboard", "-o", "wandb.mode=offline", "-o", f"wandb.path={OUT}/wandb")
    say("the reward curve")
    cli("plot", "curves", RUN, REWARD, "eval-rollout/reward", "-o", OUT / "reward.png")


def check(run: Session, lost: int) -> None: ...
