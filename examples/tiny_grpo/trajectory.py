"""What an episode leaves behind, and a batch of them as tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from task import EOS
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(slots=True)
class Trajectory:
    """All turns of one episode in a row; what the environment wrote has `written` False and `logp` 0."""

    tokens: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    reward: float = 0.0

    def read(self, tokens: list[int]) -> None:
        """Append what the environment wrote."""
        self.tokens += tokens
        self.written += [False] * len(tokens)
        self.logp += [0.0] * len(tokens)

    def write(self, token: int, logp: float) -> None:
        """Append what the policy wrote."""
        self.tokens.append(token)
        self.written.append(True)
        self.logp.append(logp)


@dataclass(frozen=True, slots=True)
class Batch:
    """Episodes side by side, padded on the right; answers to one prompt are adjacent."""

    tokens: Tensor  # int64 (sequence, position)
    attention_mask: Tensor  # bool (sequence, position): no padding
    loss_mask: Tensor  # bool (sequence, position): written by the policy
    logp: Tensor  # (sequence, position): when it was written
    reward: Tensor  # (sequence,)
    ended: Tensor  # bool (sequence,): the last token is the end mark

    @classmethod
    def of(cls, trajectories: list[Trajectory]) -> Batch:
        tokens = padded([t.tokens for t in trajectories])
        return cls(
            tokens=tokens,
            attention_mask=padded([[True] * len(t.tokens) for t in trajectories]),
            loss_mask=padded([t.written for t in trajectories]),
            logp=padded([t.logp for t in trajectories]),
            reward=torch.tensor([t.reward for t in trajectories]),
            ended=torch.tensor([t.tokens[-1] == EOS for t in trajectories]),
        )

    def __getitem__(self, sequences: Tensor) -> Batch:
        return Batch(*(getattr(self, name)[sequences] for name in self.__slots__))


def padded(rows: list[list[int]] | list[list[bool]] | list[list[float]]) -> Tensor:
    """Return the rows as one tensor, shorter ones filled up with zeros."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
