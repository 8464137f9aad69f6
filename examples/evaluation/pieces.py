"""The pieces one by one, in one process: each prints what it came to.

python examples/evaluation/pieces.py
"""

from __future__ import annotations

import random

import numpy as np
from sums import dataset

from aggregator.evaluation import (
    BatchSize,
    Pace,
    ValidationSet,
    adaptive_batch_evaluation,
    advise_schedule,
    changed_samples,
    discounted_reward,
    evaluate_distributed,
    explained_variance,
    measure_drift,
    metrics_for,
    mined,
    rouge,
    seeded,
    select,
    sequence_consistency_score,
    step_validity,
    value_variance,
)


def schedules() -> None:
    for samples in (5_000, 50_000, 500_000):
        advice = advise_schedule(samples, total_steps=20_000, steps_per_epoch=2_000)
        print(f"{samples} samples: every {advice.freq_steps} steps, every {advice.freq_epochs} epochs")
    pace = Pace(least=50, most=800)
    for accuracy in (0.30, 0.45, 0.451, 0.452):
        pace = pace.after(accuracy)
        print(f"accuracy {accuracy}: evaluate every {pace.interval} steps")


def modes() -> None:
    samples = dataset(120)
    sampled = select(samples, "sampled", seed=1)
    new = select(samples, "incremental", seen={sample["id"] for sample in samples[:100]})
    print(f"full {len(select(samples))}, sampled {len(sampled)}, incremental {len(new)}")


def batches() -> None:
    size = BatchSize(32)

    def score(batch: list[int]) -> list[int]:
        if len(batch) > 10:
            raise MemoryError
        return [2 * each for each in batch]

    found = adaptive_batch_evaluation(score, range(100), batch_size=size)
    print(f"{len(found)} results; batches of {size.size} fit")


def numbers() -> None:
    rng = np.random.default_rng(0)
    values, returns = rng.normal(size=100), rng.normal(size=100)
    print("reward", discounted_reward([0, 0, 1], gamma=0.9), "variance", round(value_variance(values), 3))
    print("explained variance", round(explained_variance(values, returns), 3))
    print("consistency", round(sequence_consistency_score(rng.normal(size=(1000, 8)) + 1), 3))
    print("steps valid", step_validity([1, 3, 2, 4], lambda step, before: not before or step > before[-1]))
    print("rouge", rouge(["the sum is 12"], ["the sum is 13"]))
    print("for reasoning:", ", ".join(metrics_for("reasoning")))


def drift() -> None:
    samples = dataset(200)
    longer = [{**sample, "prompt": sample["prompt"] * 2} for sample in samples]
    print("reordered:", measure_drift([1.0, 2.0, 3.0], [3.0, 1.0, 2.0]).drifted)
    held = ValidationSet(samples, refresh=lambda reason: print("refresh:", reason) or longer)
    held.update(longer, epoch=5)


def changes() -> None:
    samples = dataset(50)

    def score(sample: dict) -> dict:  # everybody's generators are seeded by the sample's id
        return {"right": random.random() < 0.5 + 0.01 * len(sample["prompt"])}

    before = evaluate_distributed(score, samples, record=False)
    again = evaluate_distributed(score, samples[::-1], record=False)
    hardest = mined(before, samples, "right")[0]["id"]
    print(f"{len(changed_samples(before, again))} samples changed; hardest: {hardest}")
    with seeded(7):
        print(f"seeded: {random.random():.3f}")


if __name__ == "__main__":
    for piece in (schedules, modes, batches, numbers, drift, changes):
        print(f"\n# {piece.__name__}")
        piece()
