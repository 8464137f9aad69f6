"""One data-parallel rank of GRPO: advantages, the clipped update, and what is recorded of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from policy import Policy
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim.lr_scheduler import LinearLR

from aggregator import stats_tracker

if TYPE_CHECKING:
    import numpy as np
    from config import Config
    from trajectory import Batch


@dataclass(frozen=True, slots=True)
class Loss:
    """The clipped objective, (sequence, position) each."""

    loss: Tensor
    importance_weight: Tensor
    clipped: Tensor  # bool: the ratio's bound decided
    dual_clipped: Tensor  # bool: c_clip decided


def grpo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, eps_clip: float, c_clip: float) -> Loss:
    """Return PPO's loss per token; `c_clip` bounds what a token with a negative advantage can cost."""
    ratio = (logp - old_logp).exp()
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - eps_clip, 1 + eps_clip)
    single = torch.maximum(plain, bounded)
    ceiling = -advantages * c_clip
    dual = (advantages < 0) & (single > ceiling)
    return Loss(torch.where(dual, ceiling, single), ratio, plain < bounded, dual)


def group_advantages(reward: Tensor, group_size: int) -> Tensor:
    """Return how much better each answer is than the others to its prompt, in standard deviations."""
    groups = reward.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).view(-1)


class Actor:
    """Trains `policy`; `reference` stays what the warm-up made of it. All ranks hold the same weights."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy, self.reference = Policy(config), Policy(config)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=config.lr, weight_decay=0.0)
        self.scheduler = LinearLR(self.optimizer, 1.0, config.final_lr_ratio, total_iters=config.steps)

    def weights(self) -> np.ndarray:
        return parameters_to_vector(self.policy.parameters()).detach().numpy()

    @torch.no_grad()
    def ref_logp(self, batch: Batch) -> Tensor:
        return self.reference.score(batch.tokens)[0]

    @stats_tracker.scope_func_wrapper("ppo_actor")
    def compute_advantages(self, batch: Batch, ref_logp: Tensor) -> Tensor:
        """Return the answer's advantage in its group plus the KL rewards to come, (sequence, position)."""
        kl_rewards = self.config.kl_ctl * (ref_logp - batch.logp) * batch.loss_mask
        score = group_advantages(batch.reward, self.config.group_size)
        advantages = score[:, None] + kl_rewards.flip(1).cumsum(1).flip(1)
        self._record_batch(batch, kl_rewards, advantages)
        return advantages

    @stats_tracker.scope_func_wrapper("ppo_actor")
    def ppo_update(self, batch: Batch, advantages: Tensor) -> None:
        """Take one optimizer step per minibatch. The ranks draw the same permutation."""
        for part in torch.randperm(len(batch.reward)).chunk(self.config.minibatches):
            with stats_tracker.scope("update"):
                self._train_batch(batch[part], advantages[part])
        self.scheduler.step()

    def export_stats(self) -> dict[str, float]:
        """Return what all ranks recorded since the last call, reduced; the same on every rank."""
        return stats_tracker.export_all(reduce_group=dist.group.WORLD)

    def _train_batch(self, batch: Batch, advantages: Tensor) -> None:
        logp, entropy = self.policy.score(batch.tokens)
        objective = grpo_loss(logp, batch.logp, advantages, self.config.eps_clip, self.config.c_clip)
        tokens = batch.loss_mask.sum().float()
        dist.all_reduce(tokens)
        self.optimizer.zero_grad()
        # A mean over the tokens of all ranks: ranks hold unequal numbers of them, and gradients are averaged.
        (objective.loss[batch.loss_mask].sum() * dist.get_world_size() / tokens).backward()
        self.policy.average_gradients()
        grad_norm = clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self._record_update(batch, objective, logp, entropy, grad_norm)

    def _record_batch(self, batch: Batch, kl_rewards: Tensor, advantages: Tensor) -> None:
        correct = batch.reward > 0
        seq_len = batch.attention_mask.sum(1)
        last = torch.arange(batch.tokens.shape[1]) == seq_len[:, None] - 1
        stats_tracker.denominator(
            n_seqs=torch.ones_like(correct),
            n_tokens=batch.attention_mask,
            n_valid_tokens=batch.loss_mask,
            correct_n_seqs=correct,
            incorrect_n_seqs=~correct,
        )
        stats_tracker.stat(
            advantages=advantages,
            kl_rewards=kl_rewards,
            final_reward=kl_rewards + batch.reward[:, None] * last,
            denominator="n_valid_tokens",
        )
        stats_tracker.stat(
            task_reward=batch.reward,
            seq_len=seq_len.float(),
            prompt_len=batch.loss_mask.int().argmax(1).float(),
            no_eos_ratios=(~batch.ended).float(),
            denominator="n_seqs",
        )
        stats_tracker.stat(correct_seq_len=seq_len.float(), denominator="correct_n_seqs")
        stats_tracker.stat(incorrect_seq_len=seq_len.float(), denominator="incorrect_n_seqs")
        stats_tracker.scalar(eps_clip=self.config.eps_clip, c_clip=self.config.c_clip, use_dual_clip=1)

    def _record_update(
        self, batch: Batch, objective: Loss, logp: Tensor, entropy: Tensor, grad_norm: Tensor
    ) -> None:
        stats_tracker.scalar(grad_norm=grad_norm, lr=self.scheduler.get_last_lr()[0])
        stats_tracker.denominator(n_tokens=batch.attention_mask, n_valid_tokens=batch.loss_mask)
        stats_tracker.stat(
            actor_loss=objective.loss,
            importance_weight=objective.importance_weight,
            approx_kl=batch.logp - logp,
            entropy=entropy,
            clip_ratio=objective.clipped.float(),
            dual_clip_ratio=objective.dual_clipped.float(),
            denominator="n_valid_tokens",
        )
