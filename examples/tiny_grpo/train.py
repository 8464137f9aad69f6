"""GRPO on two data-parallel ranks.

    torchrun --standalone --nproc-per-node 2 examples/tiny_grpo/train.py --out demo/seed-1 --seed 1

Started again with the same --out it goes on from the last checkpoint, where steps are left.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import checkpoint
import torch
import torch.distributed as dist
from actor import Actor
from config import Config
from rollout import RolloutController
from task import Dataset
from trajectory import Batch
from warmup import warm_up

import eventlog
from aggregator import stats_tracker
from aggregator.evaluation import Evaluator, EvaluatorConfig
from replay import StatsLogger

if TYPE_CHECKING:
    from trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class FinetuneSpec:
    """How long the training is, as `StatsLogger` wants to know it."""

    total_train_epochs: int
    steps_per_epoch: int
    total_train_steps: int

    @classmethod
    def of(cls, config: Config, dataset: Dataset) -> FinetuneSpec:
        epochs = math.ceil(config.steps / dataset.steps_per_epoch)
        return cls(epochs, dataset.steps_per_epoch, config.steps)


class Trainer:
    """One rank's part in every step. `controller`, on rank 0 only, drives the rollout workers."""

    def __init__(
        self, config: Config, dataset: Dataset, logger: StatsLogger, controller: RolloutController | None
    ) -> None:
        self.config, self.dataset, self.logger, self.controller = config, dataset, logger, controller
        self.actor = Actor(config)
        schedule = EvaluatorConfig(freq_steps=config.eval_every)
        self.evaluator = Evaluator(schedule, FinetuneSpec.of(config, dataset))

    def train(self) -> None:
        for global_step in range(self.start(), self.config.steps):
            epoch, epoch_step = divmod(global_step, self.dataset.steps_per_epoch)
            stats = self.step(epoch, epoch_step, global_step)
            self.logger.commit(epoch, epoch_step, global_step, stats)

    def start(self) -> int:
        """Restore the last checkpoint, or warm up; return the first step to take."""
        first = 0
        if self.config.checkpoint.exists():
            first = checkpoint.load(self.config.checkpoint, self.actor, self.logger)
        else:
            warm_up(self.actor.policy, self.dataset.training, self.config)
            self.actor.reference.load_state_dict(self.actor.policy.state_dict())
        self.update_weights()
        return first

    def step(self, epoch: int, epoch_step: int, global_step: int) -> dict[str, float]:
        """Take one step; return its metrics: reduced over the ranks, on rank 0 also those of the workers."""
        with stats_tracker.record_timing("rollout"):
            batch = self.rollout(global_step)
        with stats_tracker.record_timing("ref_logp"):
            ref_logp = self.actor.ref_logp(batch)
        with stats_tracker.record_timing("compute_advantage"):
            advantages = self.actor.compute_advantages(batch, ref_logp)
        with stats_tracker.record_timing("train_step"):
            self.actor.ppo_update(batch, advantages)
        with stats_tracker.record_timing("update_weights"):
            self.update_weights()
        if (global_step + 1) % self.config.save_every == 0:
            with stats_tracker.record_timing("save"):
                self.save(global_step)
        self.evaluator.evaluate(lambda: self.evaluate(global_step), epoch, epoch_step, global_step)
        stats = self.actor.export_stats()
        if self.controller:
            stats.update(self.controller.export_stats())  # rollout/…, after an evaluation also eval-rollout/…
        return stats

    def rollout(self, global_step: int) -> Batch:
        """Deal the workers' episodes out to the ranks, one worker's share to each."""
        shares = None
        if self.controller:
            shares = self.controller.rollout(self.dataset.batch(global_step), global_step)
        share: list[list[Trajectory]] = [[]]
        dist.scatter_object_list(share, shares)
        return Batch.of(share[0])

    def update_weights(self) -> None:
        if self.controller:
            self.controller.update_weights(self.actor.weights())
        dist.barrier()

    def save(self, global_step: int) -> None:
        if dist.get_rank() == 0:
            checkpoint.save(self.config.checkpoint, self.actor, self.logger, global_step)
        dist.barrier()

    def evaluate(self, global_step: int) -> None:
        with stats_tracker.record_timing("eval"):
            if self.controller:
                self.controller.evaluate(self.dataset.evaluation, global_step)
            dist.barrier()


def main() -> None:
    config = Config.from_flags()
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    dist.init_process_group("gloo")
    if checkpoint.next_step(config.checkpoint) < config.steps:
        train(config)
    elif dist.get_rank() == 0:
        print(f"nothing left to do: all {config.steps} steps were taken; give another --out, or more --steps")
    dist.destroy_process_group()


def train(config: Config) -> None:
    eventlog.start(config.run_dir, role="actor")
    dataset = Dataset(config.largest, config.held_out, config.prompts, config.seed)
    leads, workers = dist.get_rank() == 0, dist.get_world_size()
    with (
        StatsLogger(config, FinetuneSpec.of(config, dataset)) as logger,
        RolloutController(config, workers) if leads else nullcontext() as controller,
    ):
        Trainer(config, dataset, logger, controller).train()
    eventlog.stop()


if __name__ == "__main__":
    main()
