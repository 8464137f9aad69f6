"""The policy: a small causal transformer over characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from task import VOCABULARY
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

if TYPE_CHECKING:
    from config import Config


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    """Token ids (batch, length), padded on the right → logits (batch, length, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        vocabulary, width = len(VOCABULARY), config.width
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(config.context, width)
        self.blocks = nn.Sequential(*(Block(width, config.heads) for _ in range(config.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))

    def score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's log-probability and the entropy it was drawn with, both (batch, length).

        Nothing predicts the first token: its column is zero.
        """
        logp = functional.log_softmax(self(tokens)[:, :-1], dim=-1)
        chosen = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return functional.pad(chosen, (1, 0)), functional.pad(entropy, (1, 0))

    def average_gradients(self) -> None:
        """Replace the gradients by their mean over all ranks, in one collective."""
        parameters = list(self.parameters())
        mean = parameters_to_vector([parameter.grad for parameter in parameters])
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        for parameter, gradient in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter)
