"""Every hyperparameter of the training, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Config:
    """Defaults learn sums of two numbers up to 49 in a hundred steps on two CPU cores."""

    out: Path = Path("demo")
    seed: int = 0
    steps: int = 100
    # task: about 2400 sums to train on
    largest: int = 49
    held_out: int = 100
    # policy: about 100 000 parameters
    width: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 16
    # supervised warm-up: enough to be right now and then, as reinforcement needs
    warmup_steps: int = 150
    warmup_batch: int = 128
    warmup_lr: float = 3e-3
    # rollout
    workers: int = 2
    prompts: int = 16  # a step, all ranks together
    group_size: int = 8  # answers to each prompt
    max_turns: int = 2
    max_new_tokens: int = 4  # a turn
    turn_discount: float = 0.5
    temperature: float = 1.0
    # GRPO
    lr: float = 1e-3
    minibatches: int = 2
    eps_clip: float = 0.2
    c_clip: float = 3.0
    kl_ctl: float = 0.01
    max_grad_norm: float = 1.0
    # how often, in steps
    eval_every: int = 20
    save_every: int = 20
