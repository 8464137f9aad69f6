"""What evaluating together saves: few messages, samples shared by ranks, long sequences in pieces.

    python benchmarks/evaluation.py

broadcast     a container of 200 small tensors from rank 0 to rank 1, against one broadcast a tensor, in turns
evaluation    100 samples on 2 ranks against 1, in turns; a sample takes a pause, as for an inference server's
              answer, or arithmetic, which needs two idle cores
consistency   the score of 10 000 tokens of width 4096: peak memory beside the input, against doing it at once

One JSON object a line; times are medians of the slowest rank's, in seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import SimpleQueue

    Times = dict[str, list[list[float]]]

TENSORS, SAMPLES, TOKENS, WIDTH = 200, 100, 10_000, 4096
PAUSE = 0.01  # seconds a sample waits for its answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    found = on_two_ranks(rounds)
    tell("broadcast", *found["broadcast"], "s", tensors=TENSORS)
    for work in ("pause", "arithmetic"):
        tell(f"evaluation, {work}", *found[work], "s", samples=SAMPLES, ranks=2, rival_ranks=1)
    ours, at_once = consistency()
    tell("consistency", ours, at_once, "bytes", tokens=TOKENS, width=WIDTH, input_bytes=4 * TOKENS * WIDTH)


def tell(name: str, ours: float, rival: float, unit: str, **sizes: Any) -> None:
    print(
        json.dumps({"name": name, "ours": ours, "rival": rival, "unit": unit, "ratio": rival / ours, **sizes})
    )


def on_two_ranks(rounds: int) -> dict[str, list[float]]:
    """Return ours and the rival's medians of the slowest rank's times."""
    context = multiprocessing.get_context("spawn")
    answers: SimpleQueue[Times] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        processes = [
            context.Process(target=be_rank, args=(rank, store, rounds, answers)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        times = [answers.get() for _ in processes]
        for process in processes:
            process.join()
    return {
        name: np.median(np.max([own[name] for own in times], axis=0), axis=1).tolist() for name in times[0]
    }


def be_rank(rank: int, store: str, rounds: int, answers: SimpleQueue[Times]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    times = {"broadcast": broadcasts(rank, rounds)}
    matrix = torch.rand(400, 400)
    times["pause"] = evaluations(rank, lambda _: time.sleep(PAUSE) or 1.0)
    times["arithmetic"] = evaluations(rank, lambda _: (matrix @ matrix @ matrix)[0, 0].item())
    answers.put(times)
    dist.destroy_process_group()


def broadcasts(rank: int, rounds: int) -> list[list[float]]:
    import torch
    import torch.distributed as dist

    from aggregator.evaluation import broadcast_tensor_container

    data = {f"t{i}": torch.full((1 + i % 64,), float(i)) for i in range(TENSORS)}

    def ours() -> None:
        got = broadcast_tensor_container(data if rank == 0 else None)
        assert got["t199"][0] == 199.0

    def rival() -> None:
        got = {name: tensor if rank == 0 else torch.empty_like(tensor) for name, tensor in data.items()}
        for tensor in got.values():
            dist.broadcast(tensor, 0)
        assert got["t199"][0] == 199.0

    return in_turns(rounds, ours, rival)


def evaluations(rank: int, work: Callable[[Any], float]) -> list[list[float]]:
    import torch.distributed as dist

    from aggregator.evaluation import evaluate_distributed

    samples = [{"id": i} for i in range(SAMPLES)]
    alone = dist.new_group([0])

    def rival() -> None:
        if rank == 0:
            evaluate_distributed(work, samples, alone, record=False)

    return in_turns(5, lambda: evaluate_distributed(work, samples, record=False), rival)


def in_turns(rounds: int, *functions: Callable[[], Any]) -> list[list[float]]:
    """Time functions in turns, after one round that is not counted, all ranks beginning together."""
    import torch.distributed as dist

    times: list[list[float]] = [[] for _ in functions]
    for number in range(rounds + 1):
        for found, function in zip(times, functions, strict=True):
            dist.barrier()
            began = time.perf_counter()
            function()
            if number:
                found.append(time.perf_counter() - began)
    return times


def consistency() -> tuple[int, int]:
    """Return the peaks of memory beside the input: ours, and of the formula written down."""
    from aggregator.evaluation import sequence_consistency_score

    states = np.random.default_rng(0).normal(size=(TOKENS, WIDTH)).astype(np.float32)

    def at_once() -> float:
        wide = states.astype(np.float64)
        units = wide / np.linalg.norm(wide, axis=1, keepdims=True)
        return float((units[:-1] * units[1:]).sum(axis=1).mean())

    scores, peaks = [], []
    for function in (lambda: sequence_consistency_score(states), at_once):
        tracemalloc.start()
        scores.append(function())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert abs(scores[0] - scores[1]) < 1e-12
    return peaks[0], peaks[1]


if __name__ == "__main__":
    main()
