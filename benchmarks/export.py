"""What a step's metrics cost the training thread: record every key, export once; ours against the naive way.

    python benchmarks/export.py                       # 2 ranks, 100 keys of (8, 64), half of it masked out
    python benchmarks/export.py --ranks 4
    python benchmarks/export.py --keys 1000
    python benchmarks/export.py --keys 30 --shape 64x2048
    python benchmarks/export.py --all                 # the three sizes

Both record and reduce the same tensors in the same processes over gloo, in turns, and must come to the same
numbers; ours writes every selected value to a real run directory meanwhile. `ours` and `rival` are medians
over the rounds of the slowest rank's time in the caller; `ours_drained` goes on until the writer's queues are
empty (that work is off the training thread). One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.queues import SimpleQueue

    import torch

    import eventlog

WARM_UP = 5
DRAIN_SECONDS = 60.0


class Case(NamedTuple):
    """One size of the benchmark."""

    keys: int
    rows: int
    columns: int
    rounds: int


class Times(NamedTuple):
    """What one rank measured: seconds a round, collectives of one export, and what it exported last."""

    ours: list[float]
    drained: list[float]
    rival: list[float]
    collectives: tuple[int, int]
    exports: tuple[dict[str, float], dict[str, float]]


def main() -> None:
    given = arguments()
    sizes = [(100, "8x64"), (1000, "8x64"), (30, "64x2048")] if given.all else [(given.keys, given.shape)]
    for keys, shape in sizes:
        rows, columns = map(int, shape.split("x"))
        case = Case(keys, rows, columns, given.rounds)
        print(json.dumps(report(case, given.ranks, measure(case, given.ranks))), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--shape", default="8x64", help="rows x columns of every tensor")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--all", action="store_true", help="100 and 1000 keys of 8x64, and 30 of 64x2048")
    return parser.parse_args()


def measure(case: Case, ranks: int) -> list[Times]:
    context = multiprocessing.get_context("spawn")
    answers: SimpleQueue[tuple[int, Times]] = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        processes = [
            context.Process(target=work, args=(rank, ranks, case, folder, answers)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        found = dict(answers.get() for _ in processes)
        for process in processes:
            process.join()
    return [found[rank] for rank in range(ranks)]


def report(case: Case, ranks: int, found: list[Times]) -> dict[str, Any]:
    ours, drained, rival = (
        float(np.median(np.max([getattr(times, name) for times in found], axis=0))) * 1e3
        for name in ("ours", "drained", "rival")
    )
    compare(*found[0].exports)
    return {
        "name": f"record and export {case.keys} keys of ({case.rows}, {case.columns}), payload logged",
        "ours": round(ours, 3),
        "rival": round(rival, 3),
        "unit": "ms",
        "ratio": round(rival / ours, 1),
        "ours_drained": round(drained, 3),
        "ratio_drained": round(rival / drained, 1),
        "collectives": {"ours": found[0].collectives[0], "rival": found[0].collectives[1]},
        "sizes": {"ranks": ranks, **case._asdict(), "masked": 0.5},
    }


def compare(ours: dict[str, float], rival: dict[str, float]) -> None:
    """Both must have exported the same; the rival's sums are float32."""
    if ours.keys() != rival.keys() or not np.allclose(
        [ours[name] for name in rival], list(rival.values()), rtol=1e-3, atol=1e-3
    ):
        raise SystemExit("the two trackers do not agree on the numbers: nothing was measured")


# -- on the ranks ----------------------------------------------------------------------------------


def work(rank: int, ranks: int, case: Case, folder: str, answers: SimpleQueue[tuple[int, Times]]) -> None:
    import torch
    import torch.distributed as dist
    from baseline import NaiveTracker

    import eventlog
    from aggregator import collective, stats_tracker

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    log = eventlog.start(Path(folder) / "run", role="benchmark", rank=rank, world_size=ranks)
    naive, group = NaiveTracker(), dist.group.WORLD
    mask, tensors = inputs(rank, case)

    def rival() -> dict[str, float]:
        naive.denominator(n_valid_tokens=mask)
        for key, tensor in tensors.items():
            naive.stat("n_valid_tokens", **{key: tensor})
        return naive.export(group)

    def ours() -> dict[str, float]:
        stats_tracker.denominator(n_valid_tokens=mask)
        for key, tensor in tensors.items():
            stats_tracker.stat("n_valid_tokens", **{key: tensor})
        return stats_tracker.export_all(reduce_group=group)

    times = Times([], [], [], (0, 0), ({}, {}))
    for number in range(WARM_UP + case.rounds):
        before = collective.count(), naive.collectives
        seconds, rivals = timed(rival, dist.barrier)
        own, mine = timed(ours, dist.barrier)
        drained = own + drain(log)
        if number >= WARM_UP:
            times.rival.append(seconds)
            times.ours.append(own)
            times.drained.append(drained)
        issued = collective.count() - before[0], naive.collectives - before[1]
        times = times._replace(collectives=issued, exports=(dict(mine), rivals))
    answers.put((rank, times))
    eventlog.stop()
    dist.destroy_process_group()


def inputs(rank: int, case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    shape = (case.rows, case.columns)
    tensors = {f"ppo_actor/stat_{i}": torch.randn(shape, generator=generator) for i in range(case.keys)}
    return torch.rand(shape, generator=generator) < 0.5, tensors


def timed(
    function: Callable[[], dict[str, float]], barrier: Callable[[], object]
) -> tuple[float, dict[str, float]]:
    barrier()
    began = time.perf_counter()
    found = function()
    return time.perf_counter() - began, found


def drain(log: eventlog.Log) -> float:
    """Wait until the writer's queues are empty; return how long that took."""
    began = time.perf_counter()
    if not log.writer.flush(DRAIN_SECONDS):
        raise SystemExit(f"the writer did not catch up within {DRAIN_SECONDS:g} s")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
