"""The task and the policy of the example: sums, and something that learns to add."""

from __future__ import annotations

import asyncio
import random
from typing import Any

Sample = dict[str, Any]


def dataset(n: int, seed: int = 0) -> list[Sample]:
    """Return sums with an id, a prompt, the answer, and a tag by which results are sliced."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(10), rng.randrange(10 if i % 2 else 100)) for i in range(n)]
    return [
        {
            "id": f"sum-{i:03}",
            "prompt": f"add {a} and {b}",
            "answer": str(a + b),
            "tags": {"digits": "two" if b > 9 else "one"},
        }
        for i, (a, b) in enumerate(pairs)
    ]


class Policy:
    """Adds correctly with probability `skill`, which training raises; its entropy falls meanwhile."""

    def __init__(self) -> None:
        self.skill = 0.1

    def learn(self) -> None:
        """Take one step."""
        self.skill += 0.06 * (0.9 - self.skill)

    async def answers(self, sample: Sample, n: int, rng: random.Random) -> list[str]:
        """Return n answers to a prompt, as an inference server would."""
        await asyncio.sleep(0)
        words = sample["prompt"].split()
        known = len(words) == 4 and words[0] == "add" and words[2] == "and"  # typos confuse it
        right = [rng.random() < self.skill * (1.0 if known else 0.3) for _ in range(n)]
        return [sample["answer"] if each else str(rng.randrange(100)) for each in right]
