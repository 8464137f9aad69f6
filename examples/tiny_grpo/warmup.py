"""The supervised warm-up: GRPO learns from differences between answers, so some must be right at first."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from task import RETRY, Problem, encode
from trajectory import Trajectory, padded

if TYPE_CHECKING:
    from config import Config
    from policy import Policy


def warm_up(policy: Policy, problems: list[Problem], config: Config) -> None:
    """Imitate a teacher who can add but is careless: what is left for GRPO to teach is care."""
    rng = random.Random(f"{config.seed}/{dist.get_rank()}")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.warmup_lr)
    for _ in range(config.warmup_steps):
        chosen = rng.choices(problems, k=config.warmup_batch)
        batch = [demonstration(problem, rng, config) for problem in chosen]
        logp, _ = policy.score(padded([episode.tokens for episode in batch]))
        written = padded([episode.written for episode in batch])
        optimizer.zero_grad()
        (-logp[written].mean()).backward()
        policy.average_gradients()
        optimizer.step()


def demonstration(problem: Problem, rng: random.Random, config: Config) -> Trajectory:
    """Return an episode of the teacher's: slips are followed by another try."""
    right = problem.a + problem.b
    episode = Trajectory()
    episode.read(encode(problem.prompt))
    for turn in range(config.max_turns):
        if turn:
            episode.read([RETRY])
        said = abs(right + rng.choice((-9, -1, 1, 9))) if rng.random() < config.slips else right
        for token in encode(f"{said}."):
            episode.write(token, logp=0.0)
        if said == right:
            break
    return episode
