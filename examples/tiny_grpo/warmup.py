"""The supervised warm-up: GRPO learns from differences between answers, so some must be right to begin with."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
from task import RETRY, Problem, encode
from trajectory import Trajectory, padded

if TYPE_CHECKING:
    from config import Config
    from policy import Policy


def warm_up(policy: Policy, problems: list[Problem], config: Config) -> None:
    """Train on right answers, half of them after a wrong one, so that the policy knows what a retry looks like."""
    rng = random.Random(config.seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.warmup_lr)
    for _ in range(config.warmup_steps):
        episodes = [demonstration(problem, rng) for problem in rng.choices(problems, k=config.warmup_batch)]
        logp, _ = policy.score(padded([episode.tokens for episode in episodes]))
        loss = -logp[padded([episode.written for episode in episodes])].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def demonstration(problem: Problem, rng: random.Random) -> Trajectory:
    """Return an episode that ends with the right answer; only that answer counts as written by the policy."""
    episode = Trajectory(group=0)
    episode.read(encode(problem.prompt))
    if rng.random() < 0.5:
        wrong = abs(problem.a + problem.b + rng.choice((-9, -1, 1, 9)))
        episode.read([*encode(f"{wrong}."), RETRY])
    for token in encode(problem.answer):
        episode.write(token, 0.0)
    return episode
