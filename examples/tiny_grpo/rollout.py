"""Rollouts: asyncio episodes in worker processes, and the controller that collects what they recorded."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from typing import TYPE_CHECKING, Any, Self

import torch
from policy import Policy
from task import EOS, RETRY, Problem, decode, encode
from torch.nn.utils import vector_to_parameters
from trajectory import Trajectory, padded

import eventlog
from aggregator import merge_worker_stats, stats_tracker, workflow_context

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    import numpy as np
    from config import Config


# -- an episode ------------------------------------------------------------------------------------


class Sampler:
    """Next tokens for many coroutines: all that wait when the event loop comes round share a forward pass."""

    def __init__(self, policy: Policy, temperature: float, seed: str) -> None:
        self.policy, self.temperature = policy, temperature
        self._generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
        self._waiting: list[tuple[list[int], asyncio.Future[tuple[int, float]]]] = []

    async def next_token(self, tokens: list[int]) -> tuple[int, float]:
        """Return the token drawn to follow `tokens`, and its log-probability."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._sample)
        future: asyncio.Future[tuple[int, float]] = loop.create_future()
        self._waiting.append((tokens, future))
        return await future

    @torch.inference_mode()
    def _sample(self) -> None:
        sequences, futures = zip(*self._waiting, strict=True)
        self._waiting = []
        last = torch.tensor([len(tokens) - 1 for tokens in sequences])
        logits = self.policy(padded(sequences))[torch.arange(len(last)), last] / self.temperature
        logp = logits.log_softmax(-1)
        drawn = torch.multinomial(logp.exp(), 1, generator=self._generator)
        answers = zip(drawn.squeeze(1).tolist(), logp.gather(1, drawn).squeeze(1).tolist(), strict=True)
        for future, answer in zip(futures, answers, strict=True):
            future.set_result(answer)


class ArithmeticWorkflow:
    """An episode: answer; when wrong, be told so and answer once more, for a smaller reward."""

    def __init__(self, config: Config) -> None:
        self.config = config

    async def arun_episode(self, sampler: Sampler, problem: Problem) -> Trajectory:
        episode, turn, longest = Trajectory(), 0, 0
        episode.read(encode(problem.prompt))
        while not episode.reward and turn < self.config.max_turns:
            if turn:
                episode.read([RETRY])
            answer = await self._answer(sampler, episode)
            if problem.solved_by(decode(answer)):
                episode.reward = self.config.turn_discount**turn
            turn, longest = turn + 1, max(longest, len(answer))
        tracker = stats_tracker.get(workflow_context.stat_scope())
        tracker.scalar(reward=episode.reward, num_turns=turn, max_tokens=longest)
        tracker.counter(episodes=1, solved=int(episode.reward > 0))
        return episode

    async def _answer(self, sampler: Sampler, episode: Trajectory) -> list[int]:
        answer: list[int] = []
        while EOS not in answer and len(answer) < self.config.max_new_tokens:
            token, logp = await sampler.next_token(episode.tokens)
            episode.write(token, logp)
            answer.append(token)
        return answer


# -- the worker's side -----------------------------------------------------------------------------


class RolloutWorker:
    """Holds a copy of the policy and runs episodes with it; the controller may call any public method."""

    def __init__(self, config: Config, rank: int) -> None:
        self.config, self.rank = config, rank
        self.policy = Policy(config)
        self.workflow = ArithmeticWorkflow(config)

    def update_weights(self, weights: np.ndarray) -> None:
        vector_to_parameters(torch.from_numpy(weights), self.policy.parameters())

    def rollout(self, problems: list[Problem], step: int) -> list[Trajectory]:
        return asyncio.run(self._episodes(problems, self.config.group_size, step, is_eval=False))

    def evaluate(self, problems: list[Problem], step: int) -> None:
        asyncio.run(self._episodes(problems, 1, step, is_eval=True))

    def export_stats(self) -> dict[str, float]:
        return stats_tracker.export_all()

    async def _episodes(
        self, problems: list[Problem], group_size: int, step: int, *, is_eval: bool
    ) -> list[Trajectory]:
        workflow_context.set(workflow_context.WorkflowContext(is_eval=is_eval))  # inherited by every episode
        seed = f"{self.config.seed}/{self.rank}/{step}/{is_eval}"
        sampler = Sampler(self.policy, self.config.temperature, seed)
        answers = [problem for problem in problems for _ in range(group_size)]
        return await asyncio.gather(*(self.workflow.arun_episode(sampler, problem) for problem in answers))


def serve(connection: Connection, config: Config, rank: int) -> None:
    """Answer the controller's calls until it hangs up; the main function of a worker process."""
    torch.set_num_threads(1)
    eventlog.start(config.run_dir, role="rollout", rank=rank, world_size=1)
    worker = RolloutWorker(config, rank)
    try:
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(worker, method)(*arguments))
    except EOFError:
        eventlog.stop()


# -- the controller's side -------------------------------------------------------------------------


class RolloutController:
    """Starts the workers, deals problems out to them and merges what they recorded."""

    def __init__(self, config: Config, workers: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for rank in range(workers):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, config, rank), daemon=True)
            process.start()
            theirs.close()  # so that the worker sees the end of the pipe when this process is gone
            self._connections.append(ours)
            self._processes.append(process)

    def update_weights(self, weights: np.ndarray) -> None:
        self._call("update_weights", [(weights,)] * len(self._connections))

    def rollout(self, problems: list[Problem], step: int) -> list[list[Trajectory]]:
        """Return every worker's episodes; all answers to one problem come from one worker."""
        return self._call("rollout", [(share, step) for share in self._deal(problems)])

    def evaluate(self, problems: list[Problem], step: int) -> None:
        self._call("evaluate", [(share, step) for share in self._deal(problems)])

    def export_stats(self) -> dict[str, float]:
        """Return one dict of all workers' `rollout/` metrics and, after an evaluation, `eval-rollout/`."""
        return merge_worker_stats(self._call("export_stats", [()] * len(self._connections)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up; the workers finish their logs and leave."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()

    def _deal(self, problems: list[Problem]) -> list[list[Problem]]:
        workers = len(self._connections)
        return [problems[worker::workers] for worker in range(workers)]

    def _call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call all workers at once and wait for all of them."""
        for connection, own in zip(self._connections, arguments, strict=True):
            connection.send((method, own))
        return [connection.recv() for connection in self._connections]
