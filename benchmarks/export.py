"""What a step's metrics cost the training thread: record every key, export once; ours against the naive way.

    python benchmarks/export.py                       # 2 ranks, 100 keys of (8, 64), half of it masked out
    python benchmarks/export.py --ranks 4
    python benchmarks/export.py --keys 1000
    python benchmarks/export.py --keys 30 --shape 64x2048
    python benchmarks/export.py --all                 # these, the memory of a window, and the collectives

Both record and reduce the same tensors in the same processes over gloo, in turns, and must come to the same
numbers; ours writes every selected value to a real run directory meanwhile. `ours` and `rival` are medians
over the rounds of the time in the caller, from when the last rank began until the last one was done;
`ours_drained` goes on until the writer's queues are empty (that work is off the training thread). A barrier
lets ranks go one after the other, on two cores over a millisecond apart, and what a rank waits for one that
has not begun is no tracker's work; `with_skew` are the same with it: the longest time of any rank. One JSON
object a line.

The memory is the growth of the resident set at its highest, from before the first call of a process's first
window until its export is over and, for ours, on the disk; one fresh process a rank and tracker.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from baseline import NaiveTracker

WARM_UP = 5
DRAIN_SECONDS = 60.0
GROUP_SECONDS = 120.0


class Case(NamedTuple):
    """One size of the benchmark."""

    keys: int
    rows: int
    columns: int
    rounds: int


class Times(NamedTuple):
    """What one rank measured: when each round began and ended, and what it exported last.

    Seconds of the clock that all processes of the machine share. `collectives` are those of one export.
    """

    ours: list[tuple[float, float]]
    drained: list[tuple[float, float]]
    rival: list[tuple[float, float]]
    collectives: tuple[int, int]
    exports: tuple[dict[str, float], dict[str, float]]


def main() -> None:
    given = arguments()
    sizes = [(given.ranks, given.keys, given.shape)]
    if given.all:
        sizes = [(2, 100, "8x64"), (2, 1000, "8x64"), (2, 30, "64x2048"), (4, 100, "8x64")]
    for ranks, keys, shape in sizes:
        rows, columns = map(int, shape.split("x"))
        case = Case(keys, rows, columns, given.rounds)
        show(report(case, ranks, on_ranks(ranks, work, case)))
    if given.all:
        show(report_memory(Case(30, 64, 2048, 1)))
        show(report_collectives((10, 1000, 40_000)))


def show(measured: dict[str, Any]) -> None:
    print(json.dumps(measured), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--shape", default="8x64", help="rows x columns of every tensor")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--all", action="store_true", help="every size, memory and collectives")
    return parser.parse_args()


def on_ranks(ranks: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    """Return what the function returns on each rank of a new group, in processes of their own."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="export-") as folder,
        ProcessPoolExecutor(ranks, mp_context=spawn) as pool,
    ):
        started = [pool.submit(in_group, rank, ranks, folder, function, given) for rank in range(ranks)]
        return [each.result() for each in started]


def report(case: Case, ranks: int, found: list[Times]) -> dict[str, Any]:
    ours, drained, rival = (
        [getattr(times, name) for times in found] for name in ("ours", "drained", "rival")
    )
    compare(*found[0].exports)
    took = {"ours": lasted(ours), "rival": lasted(rival)}
    longest = {"ours": longest_of(ours), "rival": longest_of(rival)}
    return {
        "name": f"record and export {case.keys} keys of ({case.rows}, {case.columns}), payload logged",
        **compared(took),
        "unit": "ms",
        "ours_drained": round(lasted(drained), 3),
        "ratio_drained": round(took["rival"] / lasted(drained), 1),
        "with_skew": compared(longest),
        "collectives": {"ours": found[0].collectives[0], "rival": found[0].collectives[1]},
        "sizes": {"ranks": ranks, **case._asdict(), "masked": 0.5},
    }


def lasted(times: list[list[tuple[float, float]]]) -> float:
    """Return the median over the rounds of the ms from the last rank's beginning to the last one's end."""
    begun, ended = np.max(times, axis=0).T
    return float(np.median(ended - begun)) * 1e3


def longest_of(times: list[list[tuple[float, float]]]) -> float:
    """Return the median over the rounds of the ms of the rank that took longest."""
    return float(np.median(np.max(np.diff(times, axis=-1), axis=0))) * 1e3


def compared(took: dict[str, float]) -> dict[str, float]:
    return {
        **{name: round(ms, 3) for name, ms in took.items()},
        "ratio": round(took["rival"] / took["ours"], 1),
    }


def report_memory(case: Case) -> dict[str, Any]:
    """Return by how much one window made the processes grow; see the module."""
    grown = {name: max(on_ranks(2, grow, case, name)) / 2**20 for name in ("ours", "rival")}
    return {
        "name": f"peak memory of a window of {case.keys} keys of ({case.rows}, {case.columns})",
        **{name: round(size, 1) for name, size in grown.items()},
        "unit": "MiB",
        "ratio": round(grown["rival"] / grown["ours"], 2),
        "sizes": {"ranks": 2, **case._asdict(), "masked": 0.5},
    }


def report_collectives(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return the collectives of a steady export by its number of keys: 1, or 2 where it is above 4 MiB."""
    return {
        "name": "collectives of a steady export over one group",
        "ours": {str(keys): max(on_ranks(2, count, Case(keys, 1, 2, 3))) for keys in sizes},
        "unit": "collectives",
        "sizes": {"ranks": 2, "keys": sizes},
    }


def compare(ours: dict[str, float], rival: dict[str, float]) -> None:
    """Both must have exported the same; the rival's sums are float32."""
    if ours.keys() != rival.keys() or not np.allclose(
        [ours[name] for name in rival], list(rival.values()), rtol=1e-3, atol=1e-3
    ):
        raise SystemExit("the two trackers do not agree on the numbers: nothing was measured")


# -- on the ranks ----------------------------------------------------------------------------------


def in_group(rank: int, ranks: int, folder: str, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    import eventlog

    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=patience)
    eventlog.start(Path(folder) / "run", role="benchmark", rank=rank, world_size=ranks)
    try:
        return function(rank, *given)
    finally:
        eventlog.stop()
        dist.destroy_process_group()


def work(rank: int, case: Case) -> Times:
    """Record and export with both, in turns."""
    import torch.distributed as dist

    from aggregator import collective

    ours, rival, naive = trackers(rank, case)
    times = Times([], [], [], (0, 0), ({}, {}))
    for number in range(WARM_UP + case.rounds):
        before = collective.count(), naive.collectives
        theirs, rivals = timed(rival, dist.barrier)
        own, mine = timed(ours, dist.barrier)
        drain()
        if number >= WARM_UP:
            times.rival.append(theirs)
            times.ours.append(own)
            times.drained.append((own[0], time.perf_counter()))
        issued = collective.count() - before[0], naive.collectives - before[1]
        times = times._replace(collectives=issued, exports=(dict(mine), rivals))
    return times


def grow(rank: int, case: Case, name: str) -> int:
    """Return the bytes by which the process grows at most in its first window (Linux says it)."""
    for function in trackers(rank, Case(1, 1, 8, 1))[:2]:  # whatever is loaded at first use
        function()
    ours, rival, _ = trackers(rank, case)
    Path("/proc/self/clear_refs").write_text("5")  # the highest is now what it is
    before = highest()
    if name == "ours":
        ours()
        drain()
    else:
        rival()
    return highest() - before


def highest() -> int:
    """Return the highest resident set so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("expected VmHWM in /proc/self/status")


def count(rank: int, case: Case) -> int:
    """Return the collectives of the last of some exports."""
    from aggregator import collective

    ours, *_ = trackers(rank, case)
    before = 0
    for _ in range(case.rounds):
        before = collective.count()
        ours()
    return collective.count() - before


def trackers(
    rank: int, case: Case
) -> tuple[Callable[[], dict[str, float]], Callable[[], dict[str, float]], NaiveTracker]:
    """Return what records and exports the same with ours and with the rival, and the rival."""
    import torch.distributed as dist
    from baseline import NaiveTracker

    from aggregator import stats_tracker

    naive, group = NaiveTracker(), dist.group.WORLD
    assert group is not None
    mask, tensors = inputs(rank, case)

    def ours() -> dict[str, float]:
        stats_tracker.denominator(n_valid_tokens=mask)
        for key, tensor in tensors.items():
            stats_tracker.stat("n_valid_tokens", **{key: tensor})  # pyright: ignore[reportArgumentType]
        return stats_tracker.export_all(reduce_group=group)

    def rival() -> dict[str, float]:
        naive.denominator(n_valid_tokens=mask)
        for key, tensor in tensors.items():
            naive.stat("n_valid_tokens", **{key: tensor})
        return naive.export(group)

    return ours, rival, naive


def inputs(rank: int, case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    shape = (case.rows, case.columns)
    tensors = {f"ppo_actor/stat_{i}": torch.randn(shape, generator=generator) for i in range(case.keys)}
    return torch.rand(shape, generator=generator) < 0.5, tensors


def timed(
    function: Callable[[], dict[str, float]], barrier: Callable[[], object]
) -> tuple[tuple[float, float], dict[str, float]]:
    barrier()
    began = time.perf_counter()
    found = function()
    return (began, time.perf_counter()), found


def drain() -> None:
    """Wait until the writer's queues are empty."""
    import eventlog

    log = eventlog.current()
    if log is None or not log.writer.flush(DRAIN_SECONDS):
        raise SystemExit(f"the writer did not catch up within {DRAIN_SECONDS:g} s")


if __name__ == "__main__":
    main()
