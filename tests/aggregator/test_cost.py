"""What recording may not do: communicate, read values on the host, keep graphs, grow."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import eventlog
from aggregator import collective, stats_tracker
from aggregator.stats_tracker import DistributedStatsTracker
from tests import gloo

CYCLES = 1000
WARM_UP = 100
SHAPE = (8, 512)


class Dispatched(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def tracker() -> Iterator[DistributedStatsTracker]:
    yield DistributedStatsTracker()
    eventlog.stop()


def record(tracker: DistributedStatsTracker, keys: int = 5) -> None:
    mask = torch.zeros(SHAPE, dtype=torch.bool)
    mask[:, ::2] = True
    tracker.denominator(n=mask)
    for i in range(keys):
        tracker.stat("n", **{f"x{i}": torch.rand(SHAPE, requires_grad=i == 0)})
    tracker.scalar(lr=0.1)


def test_recording_reads_no_value(tracker):
    """A hundred calls read no number of a tensor on the host, and issue no collective (report d1)."""
    mask, values = torch.ones(SHAPE, dtype=torch.bool), torch.rand(SHAPE, requires_grad=True)
    before = collective.count()
    with Dispatched() as seen:
        tracker.denominator(n=mask)
        for _ in range(100):
            tracker.stat("n", x=values)
    assert {"detach"} >= set(seen.counts)
    assert before == collective.count()
    with Dispatched() as seen:
        tracker.export()
    assert not seen.counts


def collectives(_rank: int, keys: int) -> list[int]:
    """Export three times with so many keys; return the collectives of recording and of each export."""
    tracker = DistributedStatsTracker()
    counts = []
    for _ in range(3):
        before = collective.count()
        record(tracker, keys)
        recorded = collective.count()
        assert before == recorded
        tracker.export(reduce_group=torch.distributed.group.WORLD)
        counts.append(collective.count() - recorded)
    return counts


@pytest.mark.parametrize("keys", [10, 1000])
def test_a_steady_export_is_one_collective(keys):
    """One collective an export once the keys are agreed, however many there are (report d3)."""
    for counts in gloo.run(collectives, keys):
        assert [1, 1] == counts[1:]


def test_the_selection_is_the_copy(tracker):
    """Under a mask a stat allocates its selected elements and little else; the index is made once a mask."""
    mask = torch.zeros(1024, 1024, dtype=torch.bool)
    mask[:128] = True
    values = torch.rand(1024, 1024)
    selected = 4 * 128 * 1024
    for _ in range(2):  # the second window knows how many rows to expect
        tracker.denominator(n=mask)
        tracker.stat("n", a=values)
        tracker.stat("n", b=values)
        tracker.export()
    tracemalloc.start()
    try:
        tracker.denominator(n=mask)
        tracker.stat("n", a=values)
        tracker.stat("n", b=values)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    index = 4 * 128 * 1024
    packed = 1024 * 1024 // 8
    expected = 2 * selected + index + packed
    assert expected <= kept < 1.02 * expected


def test_graphs_are_released_at_once(tracker):
    """When the call returns nothing holds the graph of a recorded tensor (report d5)."""
    weights = torch.rand(SHAPE)
    saved_for_backward = weakref.ref(weights)
    product = torch.rand(SHAPE, requires_grad=True) * weights
    del weights
    tracker.denominator(n=torch.ones(SHAPE, dtype=torch.bool))
    tracker.stat("n", x=product)
    tracker.scalar(loss=product.mean())
    assert saved_for_backward() is not None
    del product
    gc.collect()
    assert saved_for_backward() is None


def settled(process: psutil.Process, log: eventlog.Log | None) -> int:
    """Return the memory that is the process's own when nothing waits to be written or collected."""
    assert log is None or log.writer.flush(100)
    gc.collect()
    held = process.memory_info()
    return held.rss - held.shared  # how much of its libraries lies in memory is the system's business


@pytest.mark.parametrize("logged", [False, True])
def test_memory_stays(tracker, tmp_path, logged):
    """Over 1000 exports, with and without a log, the process grows by less than 2 % (report d5)."""
    log = eventlog.start(tmp_path / "run", rank=0, world_size=1) if logged else None
    process = psutil.Process()
    sizes = []
    for cycle in range(WARM_UP + CYCLES):
        if cycle == WARM_UP:
            sizes.append(settled(process, log))
        record(tracker)
        assert tracker.export()
    sizes.append(settled(process, log))
    assert sizes[1] < sizes[0] * 1.02


def test_a_stat_is_in_no_one_elses_way():
    """What the default tracker holds does not wait in other trackers, nor outlive its export (report c31)."""
    stats_tracker.get("cost").scalar(x=1.0)
    assert {"cost/x": 1.0, "cost/x__count": 1} == stats_tracker.get("cost").export()
    assert {} == stats_tracker.get("cost").export()
