"""What recording adds to a training step: everything recorded against nothing, in turns in one process.

    python benchmarks/overhead.py                     # 2 ranks over gloo, a step of 200 ms or more
    python benchmarks/overhead.py --sequences 8 --length 32 --width 64 --rounds 3

The step is that of examples/tiny_grpo without its rollouts: the reference's log-probabilities, advantages,
one optimizer step per minibatch, gradients averaged over the ranks. Recorded, all values of 9 batch
statistics, 6 of every update, scalars and timings go to a real run directory, all keys are exported over the
ranks and the step is committed; not recorded, not even what is recorded is computed. `ours` and `rival` are
medians of the slowest rank's time in the caller, `percent` is the median of what ours is more than the rival
next to it; `_drained` goes on until the writer's queues are empty, so that its thread never works beside the
rival. `percent_cpu` compares the processor time of all threads, drained: it depends little on what else the
machine does. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

ROOT: Final = Path(__file__).resolve().parents[1]
# The example's modules, and not this folder's, which hides the package `replay`.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT / "benchmarks"]
sys.path += [str(ROOT / "examples" / "tiny_grpo")]

WARM_UP: Final = 3
DRAIN_SECONDS: Final = 60.0


class Case(NamedTuple):
    """One size of the benchmark: `sequences` of `length` a rank, half of each written by the policy."""

    sequences: int
    length: int
    width: int
    layers: int
    minibatches: int
    rounds: int


class Times(NamedTuple):
    """What one rank measured: seconds a round, and what a step recorded."""

    ours: list[float]
    drained: list[float]
    rival: list[float]
    cpu: list[float]
    rival_cpu: list[float]
    values: int
    keys: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = Case(sequences=32, length=128, width=128, layers=4, minibatches=4, rounds=30)
    parser.add_argument("--ranks", type=int, default=2)
    for name, value in usual._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args())
    ranks, case = given.pop("ranks"), Case(**given)
    print(json.dumps(report(case, ranks, measure(case, ranks))), flush=True)


def measure(case: Case, ranks: int) -> list[Times]:
    context = multiprocessing.get_context("spawn")
    answers: SimpleQueue[tuple[int, Times]] = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
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
    seconds = {
        name: np.max([getattr(times, name) for times in found], axis=0)
        for name in ("ours", "drained", "rival", "cpu", "rival_cpu")
    }
    ours, drained, rival = (float(np.median(seconds[name])) * 1e3 for name in ("ours", "drained", "rival"))

    def percent(one: str, other: str) -> float:
        return round(100 * float(np.median(seconds[one] - seconds[other]) / np.median(seconds[other])), 2)

    return {
        "name": "a training step with everything recorded against nothing",
        "ours": round(ours, 2),
        "rival": round(rival, 2),
        "unit": "ms",
        "ratio": round(rival / ours, 4),
        "percent": percent("ours", "rival"),
        "ours_drained": round(drained, 2),
        "percent_drained": percent("drained", "rival"),
        "percent_cpu": percent("cpu", "rival_cpu"),
        "sizes": {"ranks": ranks, **case._asdict(), "values": found[0].values, "keys": found[0].keys},
    }


# -- on the ranks ----------------------------------------------------------------------------------


def work(rank: int, ranks: int, case: Case, folder: str, answers: SimpleQueue[tuple[int, Times]]) -> None:
    import torch
    import torch.distributed as dist

    import eventlog

    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights and permutations on all ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    log = eventlog.start(Path(folder) / "run", role="actor", rank=rank, world_size=ranks)
    log.claim_attempt()
    actor, batch = subject(rank, case)
    times = Times([], [], [], [], [], 0, 0)
    for number in range(WARM_UP + case.rounds):
        for recording in (True, False) if number % 2 else (False, True):  # neither is always first
            dist.barrier()
            began, processor = time.perf_counter(), time.process_time()
            stats = step(actor, batch, log, number, recording=recording)
            seconds = time.perf_counter() - began
            drained, processor = seconds + drain(log), time.process_time() - processor
            if number < WARM_UP:
                continue
            (times.ours if recording else times.rival).append(seconds)
            (times.cpu if recording else times.rival_cpu).append(processor)
            if recording:
                times.drained.append(drained)
                times = times._replace(values=selected(stats), keys=len(stats))
    answers.put((rank, times))
    eventlog.stop()
    dist.destroy_process_group()


def subject(rank: int, case: Case) -> tuple[Any, Any]:
    """Return the example's actor, enlarged, which can be told not to record; and a batch."""
    import torch
    from actor import Actor
    from config import Config
    from task import VOCABULARY
    from trajectory import Batch, Trajectory

    class Subject(Actor):
        recording = True

        def _record_batch(self, *what: Any) -> None:
            if self.recording:
                super()._record_batch(*what)

        def _record_update(self, *what: Any) -> None:
            if self.recording:
                super()._record_update(*what)

    generator = torch.Generator().manual_seed(1 + rank)
    episodes: list[Trajectory] = []
    for number in range(case.sequences):
        episode = Trajectory(reward=float(number % 3 == 0))
        tokens = torch.randint(3, len(VOCABULARY), (case.length,), generator=generator).tolist()
        episode.read(tokens[: case.length // 2])
        for token in tokens[case.length // 2 :]:
            episode.write(token, -2.5)
        episodes.append(episode)
    sizes = {"context": case.length, "width": case.width, "layers": case.layers}
    return Subject(Config(minibatches=case.minibatches, **sizes)), Batch.of(episodes)


def step(actor: Any, batch: Any, log: Any, number: int, *, recording: bool) -> dict[str, float]:
    from aggregator import stats_tracker

    actor.recording = recording
    timing = stats_tracker.record_timing if recording else nullcontext
    with timing("ref_logp"):
        ref_logp = actor.ref_logp(batch)
    with timing("compute_advantage"):
        advantages = actor.compute_advantages(batch, ref_logp)
    with timing("train_step"):
        actor.ppo_update(batch, advantages)
    if not recording:
        return {}
    stats = actor.export_stats()
    log.commit(0, number, number, [stats])
    return stats


def selected(stats: Any) -> int:
    """Return how many values of all ranks were behind an export."""
    from eventlog import Kind, moments

    rows = stats.moments
    return sum(int(rows[key][moments.COUNT]) for key, meta in stats.kinds.items() if meta.kind is Kind.STAT)


def drain(log: Any) -> float:
    """Wait until the writer's queues are empty; return how long that took."""
    began = time.perf_counter()
    if not log.writer.flush(DRAIN_SECONDS):
        raise SystemExit(f"the writer did not catch up within {DRAIN_SECONDS:g} s")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
