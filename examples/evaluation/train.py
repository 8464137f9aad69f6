"""A training that evaluates: when, with what, over all ranks, and what is made of it.

python examples/evaluation/train.py --out demo-evaluation --ranks 2
areal-metrics compare-evals demo-evaluation --step 19 --step 39
areal-metrics info demo-evaluation --alerts
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sums import Policy, Sample, dataset

import eventlog
from aggregator import stats_tracker
from aggregator.evaluation import (
    Evaluator,
    EvaluatorConfig,
    Monitor,
    avg_at_k,
    bleu,
    broadcast_tensor_container,
    compute_aggregated_metrics,
    evaluate_distributed,
    log_evaluation_results,
    maj_at_k,
    metrics_of_ranks,
    number_of,
    pass_at_k,
    perturbed,
    policy_entropy,
    typos,
    validate_distributed_results,
)
from replay import StatsLogger, StatsLoggerConfig

STEPS, ATTEMPTS = 40, 4


@dataclass(frozen=True, slots=True)
class FinetuneSpec:
    """How long the training is."""

    total_train_epochs: int = 1
    steps_per_epoch: int = STEPS
    total_train_steps: int = STEPS


class Evaluation:
    """What is evaluated: the held-out sums, and the same with typos."""

    def __init__(self, policy: Policy, samples: list[Sample]) -> None:
        self.policy = policy
        self.samples = [*samples, *perturbed(samples[::4], typos("prompt", rate=0.3), name="typos")]

    def __call__(self) -> dict[str, float]:
        """Evaluate on all ranks; every rank returns the same metrics, and the next export has them."""
        results = evaluate_distributed(self.score, self.samples, concurrency=8, expected=len(self.samples))
        metrics = compute_aggregated_metrics(results, by=("digits", "perturbation"))
        wanted = {sample["id"]: f"the sum is {sample['answer']}" for sample in self.samples}
        metrics["bleu"] = bleu(
            [each.texts["first"] for each in results], [wanted[each.id] for each in results]
        )
        validate_distributed_results(metrics_of_ranks(metrics), tolerance=0)
        log_evaluation_results(metrics)
        return metrics

    async def score(self, sample: Sample) -> dict[str, Any]:
        """Return numbers and texts of one sample; None is absent, so pass@8 of four attempts would be."""
        rng = random.Random(number_of(0, sample["id"]))
        answers = await self.policy.answers(sample, ATTEMPTS, rng)
        right = [answer == sample["answer"] for answer in answers]
        return {
            "accuracy": avg_at_k(right),
            "pass@2": pass_at_k(len(right), sum(right), 2),
            "maj@4": maj_at_k(answers, sample["answer"], ATTEMPTS),
            "first": f"the sum is {answers[0]}",
        }


def train(rank: int, ranks: int, out: str, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    eventlog.start(out, role="actor")
    spec, policy = FinetuneSpec(), Policy()
    config = StatsLoggerConfig(experiment_name="evaluation", trial_name="sums", fileroot=out)
    # rank 0 read the data; the others get it from it, tensors and all
    batch = {"samples": dataset(120), "weights": torch.ones(3)} if rank == 0 else None
    evaluation = Evaluation(policy, broadcast_tensor_container(batch)["samples"])
    with StatsLogger(config, spec) as logger:
        evaluator = Evaluator(EvaluatorConfig(freq_steps=10, eval_before_train=True), spec)
        monitor = Monitor(
            callback=lambda alert: logger.alert(alert.title, alert.text, alert.level, alert.step)
        )
        evaluator.before_train(evaluation)
        for step in range(STEPS):
            update(policy, step)
            evaluator.evaluate(evaluation, 0, step, step)
            stats = stats_tracker.export_all(reduce_group=dist.group.WORLD, step=step)
            if rank == 0:
                monitor.check(step, stats)
            logger.commit(0, step, step, stats)
    eventlog.stop()
    dist.destroy_process_group()


def update(policy: Policy, step: int) -> None:
    """Train, and record what a training records; step 30 has a gradient that explodes."""
    policy.learn()
    stats_tracker.get("rollout").scalar(reward=policy.skill)
    logits = torch.tensor([[4.0 * policy.skill, 0.0, 0.0]])
    with stats_tracker.scope("ppo_actor"):
        stats_tracker.scalar(entropy=policy_entropy(logits), grad_norm=50.0 if step == 30 else 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo-evaluation"))
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        mp.spawn(train, (options.ranks, str(options.out), store), nprocs=options.ranks)


if __name__ == "__main__":
    main()
