"""One data-parallel rank of GRPO: reference log-probabilities, advantages, the clipped update, and their metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from aggregator import stats_tracker

if TYPE_CHECKING:
    from config import Config
    from policy import Policy
    from trajectory import Batch


@dataclass(frozen=True, slots=True)
class Advantages:
    """What the update learns from, (sequence, position) each."""

    kl_rewards: Tensor
    final_reward: Tensor
    advantages: Tensor


class Actor:
    """Trains `policy`; `reference` stays what the warm-up made of it."""

    def __init__(self, config: Config, policy: Policy, reference: Policy) -> None:
        self.config, self.policy, self.reference = config, policy, reference
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=0.0)

    @torch.no_grad()
    def ref_logp(self, batch: Batch) -> Tensor:
        return self.reference.score(batch.tokens)[0]

    def compute_advantages(self, batch: Batch, ref_logp: Tensor) -> Tensor:
        kl_rewards = -self.config.kl_ctl * (batch.logp - ref_logp) * batch.loss_mask
        ...

    def ppo_update(self, batch: Batch, advantages: Tensor) -> None:
        for part in torch.randperm(len(batch.reward)).chunk(self.config.minibatches):
            self._train_batch(batch[part], advantages[part])
