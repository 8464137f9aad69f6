"""Many threads and tasks record while another thread exports: nothing is lost and nothing is mixed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import eventlog
from aggregator import open_run, stats_tracker
from aggregator.stats_tracker import DistributedStatsTracker, ReduceType

THREADS = 8
TASKS = 200
CALLS = 30

Numbers = dict[str, float]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Begin and end without a log and with empty trackers."""
    stats_tracker.export_all()
    yield
    eventlog.stop()
    stats_tracker.export_all()


def record(tracker: DistributedStatsTracker, who: int, call: int) -> None:
    """Record under a scope of one's own: everything that is counted is known from `who` and `call`."""
    with tracker.scope(f"who{who}"):
        tracker.scalar(value=float(who))
        tracker.counter(calls=1, weight=call)
        tracker.denominator(n=torch.tensor([True] * (call + 1) + [False]))
        tracker.stat("n", ReduceType.SUM, x=torch.full((call + 2,), float(who)))


def expected(people: range) -> Numbers:
    """What everybody's calls add up to."""
    tokens = CALLS * (CALLS + 1) // 2
    return {
        f"who{who}/{key}": number
        for who in people
        for key, number in {
            "value": CALLS * who, "value__count": CALLS, "calls": CALLS,
            "weight": tokens - CALLS, "n": tokens, "x": tokens * who,
        }.items()
    }  # fmt: skip


def exported_while(recording: Callable[[], Any], export: Callable[[], Numbers]) -> Numbers:
    """Export again and again while `recording` goes on, and once after it; add up what came."""
    total: Counter[str] = Counter()
    done = threading.Event()

    def add() -> None:
        numbers = export()
        for key, number in numbers.items():
            count = f"{key}__count"
            total[key] += number * numbers[count] if count in numbers else number

    def keep_exporting() -> None:
        while not done.wait(0.001):
            add()

    with ThreadPoolExecutor(1) as pool:
        exporting = pool.submit(keep_exporting)
        try:
            recording()
        finally:
            done.set()
        exporting.result()
    add()
    return {key: round(number, 6) for key, number in total.items()}


def by_threads(tracker: DistributedStatsTracker) -> None:
    """Every thread is one of the people."""
    barrier = threading.Barrier(THREADS)

    def work(who: int) -> None:
        barrier.wait()
        for call in range(CALLS):
            record(tracker, who, call)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def by_tasks(tracker: DistributedStatsTracker) -> None:
    """Every task is one of the people, and loses the processor between its calls, inside of scopes."""

    async def work(who: int) -> None:
        chance = random.Random(who)
        with tracker.scope("outer"), tracker.disable_scope():
            for call in range(CALLS):
                await asyncio.sleep(chance.choice((0, 0, 0.001)))
                record(tracker, who, call)

    async def everybody() -> None:
        await asyncio.gather(*(work(who) for who in range(TASKS)))

    asyncio.run(everybody())


@pytest.mark.parametrize(("recording", "people"), [(by_threads, THREADS), (by_tasks, TASKS)])
def test_nothing_is_lost_or_mixed(recording, people):
    """8 threads, or 200 tasks, record under scopes while another thread exports (report s6)."""
    tracker = DistributedStatsTracker()
    found = exported_while(lambda: recording(tracker), tracker.export)
    assert expected(range(people)) == found


def test_the_log_has_every_value_once(tmp_path):
    """Recorded by threads and tasks at once into a log, every value is there once, under its own key."""
    eventlog.start(tmp_path / "run", rank=0, world_size=1)
    trackers = [stats_tracker.get("threads"), stats_tracker.get("tasks")]

    def recording() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda run, tracker: run(tracker), [by_threads, by_tasks], trackers))

    exported_while(recording, stats_tracker.export_all)
    eventlog.stop()
    with open_run(tmp_path / "run") as run:
        values = run.sql("select key, \"values\" from tensors where key like '%/x' order by key").to_pydict()
        scalars = run.sql("select key, value from scalars where key like '%/value'").to_pydict()
    pooled: Counter[tuple[str, float]] = Counter()
    for key, numbers in zip(values["key"], values["values"], strict=True):
        who = float(key.split("/")[1].removeprefix("who"))
        assert np.array_equal(np.full(len(numbers), who), numbers)
        pooled[key, who] += len(numbers)
    tokens = CALLS * (CALLS + 1) // 2
    who = [("threads", w) for w in range(THREADS)] + [("tasks", w) for w in range(TASKS)]
    assert {(f"{group}/who{w}/x", float(w)): tokens for group, w in who} == pooled
    assert {(f"{group}/who{w}/value", float(w)): CALLS for group, w in who} == Counter(
        zip(scalars["key"], scalars["value"], strict=True)
    )
