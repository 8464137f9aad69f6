"""The task: add two numbers, written out character by character, and verified exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = " .?+=0123456789"
PAD, EOS, RETRY = range(3)  # filling · the end of an answer · the environment's "no, once more"


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum. The policy sees `prompt` and should write `answer`, the end mark included."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return f"{self.a + self.b}."

    def solved_by(self, text: str) -> bool:
        return text == self.answer


class Dataset:
    """All sums of two numbers up to `largest`: most to train on, some held out for evaluation.

    `batch(step)` follows from the seed and the step alone: a resumed run sees what an unbroken one would.
    """

    def __init__(self, largest: int, held_out: int, batch_size: int, seed: int) -> None:
        problems = [Problem(a, b) for a in range(largest + 1) for b in range(largest + 1)]
        random.Random(seed).shuffle(problems)
        self.evaluation, self.training = problems[:held_out], problems[held_out:]
        self.batch_size, self.seed = batch_size, seed

    @property
    def steps_per_epoch(self) -> int:
        return len(self.training) // self.batch_size

    def batch(self, global_step: int) -> list[Problem]:
        epoch, step = divmod(global_step, self.steps_per_epoch)
        order = random.Random(f"{self.seed}/{epoch}").sample(self.training, len(self.training))
        return order[step * self.batch_size :][: self.batch_size]
