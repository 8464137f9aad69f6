"""Rollouts: asyncio episodes in worker processes, and the controller that drives them and merges their metrics."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from typing import TYPE_CHECKING, Any

import torch
from policy import Policy
from task import EOS, RETRY, VOCABULARY, Problem, decode, encode
from torch.nn.utils import vector_to_parameters
from trajectory import Trajectory, padded

import eventlog
from aggregator import merge_worker_stats, stats_tracker, workflow_context

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import numpy as np
    from config import Config


class Sampler:
    """Next tokens for many coroutines at once: all that wait when the event loop comes round share a forward pass."""

    def __init__(self, policy: Policy, seed: str, temperature: float) -> None:
        self.policy, self.temperature = policy, temperature
        self.generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
        self._waiting: list[tuple[list[int], asyncio.Future[tuple[int, float]]]] = []

    async def next_token(self, tokens: list[int]) -> tuple[int, float]:
        """Return a token drawn from the policy and its log-probability; at temperature 0 the likeliest."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._sample)
        future = loop.create_future()
        self._waiting.append((tokens, future))
        return await future

    @torch.inference_mode()
    def _sample(self) -> None:
        waiting, self._waiting = self._waiting, []
        lengths = torch.tensor([len(tokens) for tokens, _ in waiting])
        logits = self.policy(padded([tokens for tokens, _ in waiting]))[torch.arange(len(waiting)), lengths - 1]
        logp = logits.log_softmax(-1)
        if self.temperature:
            chosen = torch.multinomial((logp / self.temperature).softmax(-1), 1, generator=self.generator)
        else:
            chosen = logp.argmax(-1, keepdim=True)
        for (_, future), token, value in zip(waiting, chosen.tolist(), logp.gather(-1, chosen).tolist(), strict=True):
            future.set_result((token[0], value[0]))


class ArithmeticWorkflow:
    """An episode: answer; when wrong, be told so and answer once more, for a smaller reward."""

    def __init__(self, config: Config) -> None:
        self.config = config

    async def run(self, problem: Problem, group: int, sampler: Sampler) -> Trajectory:
        episode = Trajectory(group)
        episode.read(encode(problem.prompt))
        longest = 0
        for turn in range(1, self.config.max_turns + 1):
            answer = await self._answer(episode, sampler)
            longest = max(longest, len(answer))
            if problem.solved_by(decode(answer)):
                episode.reward = self.config.turn_discount ** (turn - 1)
                break
            if turn < self.config.max_turns:
                episode.read([RETRY])
        tracker = stats_tracker.get(workflow_context.stat_scope())
        tracker.scalar(reward=episode.reward, num_turns=turn, max_tokens=longest)
        tracker.counter(episodes=1, solved=int(episode.reward > 0))
        return episode

    async def _answer(self, episode: Trajectory, sampler: Sampler) -> list[int]:
        answer: list[int] = []
        while EOS not in answer and len(answer) < self.config.max_new_tokens:
            token, logp = await sampler.next_token(episode.tokens)
            episode.write(token, logp)
            answer.append(token)
        return answer


class RolloutWorker:
    """The worker's side of the RPC: every public method can be called by the controller."""

    def __init__(self, config: Config, worker: int) -> None:
        self.config, self.worker = config, worker
        self.policy = Policy(len(VOCABULARY), config.context, config.width, config.heads, config.layers)
        self.workflow = ArithmeticWorkflow(config)

    def update_weights(self, weights: np.ndarray) -> None:
        vector_to_parameters(torch.from_numpy(weights), self.policy.parameters())

    def rollout(self, problems: list[Problem], step: int) -> list[Trajectory]:
        sampler = Sampler(self.policy, f"{self.config.seed}/{self.worker}/{step}", self.config.temperature)
        return asyncio.run(self._episodes(problems, self.config.group_size, sampler))

    def evaluate(self, problems: list[Problem]) -> None:
        workflow_context.set(workflow_context.WorkflowContext(is_eval=True))
        asyncio.run(self._episodes(problems, 1, Sampler(self.policy, "", temperature=0.0)))

    def export_stats(self) -> dict[str, float]:
        return stats_tracker.export_all()

    async def _episodes(self, problems: list[Problem], group_size: int, sampler: Sampler) -> list[Trajectory]:
        episodes = [self.workflow.run(p, g, sampler) for g, p in enumerate(problems) for _ in range(group_size)]
        return await asyncio.gather(*episodes)
