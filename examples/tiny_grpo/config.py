"""Every hyperparameter of the training, each a flag of `train.py`."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass, fields
from pathlib import Path

from replay import StatsLoggerConfig


@dataclass(frozen=True, slots=True)
class Config:
    """The defaults learn to add two numbers up to 49, in half a minute on two CPU cores."""

    out: str = "demo"
    seed: int = 0
    steps: int = 100
    eval_every: int = 10
    save_every: int = 20
    # the task: 2400 sums to train on
    largest: int = 49
    held_out: int = 100
    # the policy: 100 000 parameters
    width: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 16
    # the warm-up: imitating a teacher that slips this often
    slips: float = 0.7
    warmup_steps: int = 300
    warmup_batch: int = 64  # per rank
    warmup_lr: float = 3e-3
    # rollouts
    prompts: int = 64  # per step, all ranks together
    group_size: int = 8  # answers to each prompt
    max_turns: int = 2
    max_new_tokens: int = 4  # per turn
    turn_discount: float = 0.5
    temperature: float = 1.0
    # GRPO
    lr: float = 7e-4
    final_lr_ratio: float = 0.5
    minibatches: int = 4
    eps_clip: float = 0.2
    c_clip: float = 3.0
    kl_ctl: float = 0.01
    max_grad_norm: float = 1.0

    @classmethod
    def from_flags(cls) -> Config:
        """Read `--steps 50 --warmup-lr 1e-3 …` from the command line."""
        parser = ArgumentParser(description=cls.__doc__)
        for field in fields(cls):
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=type(field.default), default=field.default)
        return cls(**vars(parser.parse_args()))

    @property
    def stats_logger(self) -> StatsLoggerConfig:
        return StatsLoggerConfig(
            experiment_name="tiny-grpo", trial_name=f"seed-{self.seed}", fileroot=self.out
        )

    @property
    def run_dir(self) -> Path:
        return Path(self.out, "run")

    @property
    def checkpoint(self) -> Path:
        return Path(self.out, "checkpoint.pt")
