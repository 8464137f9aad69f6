"""Many threads and tasks record while another thread exports: nothing is lost and nothing is mixed."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
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
from eventlog import binding

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
    log = eventlog.start(tmp_path / "run", rank=0, world_size=1)
    trackers = [stats_tracker.get("threads"), stats_tracker.get("tasks")]

    def recording() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda run, tracker: run(tracker), [by_threads, by_tasks], trackers))

    exported_while(recording, stats_tracker.export_all)
    assert log.writer.flush(100)
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


# -- the same names everywhere ---------------------------------------------------------------------


def mask_of(who: int) -> torch.Tensor:
    """Return a mask of one's own shape that selects the last element alone."""
    mask = torch.zeros(who % 5 + 1, dtype=torch.bool)
    mask[-1] = True
    return mask


def values_of(who: int) -> torch.Tensor:
    """Return values of the shape of the mask: who one is where it selects, something wrong elsewhere."""
    return torch.where(mask_of(who), float(who), 1e6)


def alike_by_threads(tracker: DistributedStatsTracker) -> None:
    """Every thread is one of the people, all under the same names."""
    barrier = threading.Barrier(THREADS)

    def work(who: int) -> None:
        barrier.wait()
        for _ in range(CALLS):
            with tracker.scope("s"):
                tracker.denominator(n=mask_of(who))
                time.sleep(0.0001)
                tracker.stat("n", ReduceType.SUM, x=values_of(who))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def alike_by_tasks(tracker: DistributedStatsTracker) -> None:
    """Every task is one of the people, all under the same names, and loses the processor in between."""

    async def work(who: int) -> None:
        chance = random.Random(who)
        for _ in range(CALLS):
            with tracker.scope("s"):
                tracker.denominator(n=mask_of(who))
                await asyncio.sleep(chance.choice((0, 0, 0.001)))
                tracker.stat("n", ReduceType.SUM, x=values_of(who))

    async def everybody() -> None:
        await asyncio.gather(*(work(who) for who in range(TASKS)))

    asyncio.run(everybody())


@pytest.mark.parametrize(("recording", "people"), [(alike_by_threads, THREADS), (alike_by_tasks, TASKS)])
def test_masks_of_the_same_name_are_not_mixed(recording, people):
    """Under one scope and name every stat has the mask of its own thread or task, exports or not."""
    tracker = DistributedStatsTracker()
    found = exported_while(lambda: recording(tracker), tracker.export)
    assert {"s/n": CALLS * people, "s/x": CALLS * sum(range(people))} == found


def test_an_export_by_another_task_takes_no_mask_away(tmp_path):
    """A task's stat after an export of another one is recorded; its mask is counted and logged once."""
    eventlog.start(tmp_path / "run", rank=0, world_size=1)
    tracker = stats_tracker.get()
    exports = []

    async def record() -> None:
        tracker.denominator(n=torch.tensor([True, False, True]))
        await asyncio.sleep(0.01)
        tracker.stat("n", ReduceType.SUM, x=torch.tensor([1.0, 2.0, 3.0]))

    async def main() -> None:
        recording = asyncio.create_task(record())
        await asyncio.sleep(0)
        exports.append(tracker.export(step=0))
        await recording
        exports.append(tracker.export(step=1))

    asyncio.run(main())
    eventlog.stop()
    assert [{"n": 2}, {"x": 4.0}] == exports
    with open_run(tmp_path / "run") as run:
        masks = run.sql("select key from masks").to_pydict()
        values = run.sql('select key, "values" from tensors').to_pydict()
    assert {"key": ["n"]} == masks
    assert (["x"], [[1.0, 3.0]]) == (values["key"], [list(each) for each in values["values"]])


def test_ones_own_export_ends_ones_masks():
    """After its own export a thread or task must register a mask anew, whatever it registered before."""
    tracker = DistributedStatsTracker()
    tracker.denominator(n=torch.ones(2, dtype=torch.bool))
    tracker.export()
    with pytest.raises(ValueError, match="registered denominator, got 'n'; registered now: none"):
        tracker.stat("n", x=torch.ones(2))


def test_a_mask_may_be_registered_elsewhere():
    """Who registered no mask of that name binds to the last one that anybody did."""
    tracker = DistributedStatsTracker()
    with ThreadPoolExecutor(1) as pool:
        for who in (4, 3):
            pool.submit(tracker.denominator, n=mask_of(who)).result()
    tracker.stat("n", ReduceType.SUM, x=values_of(3))
    assert {"n": 2, "x": 3.0} == tracker.export()


def test_a_task_has_the_masks_of_its_creator():
    """A task inherits masks, and those that it registers itself are not its creator's."""
    tracker = DistributedStatsTracker()

    async def child() -> None:
        tracker.stat("n", ReduceType.SUM, x=values_of(2))
        tracker.denominator(n=mask_of(3))
        tracker.stat("n", ReduceType.SUM, x=values_of(3))

    async def main() -> None:
        tracker.denominator(n=mask_of(2))
        await asyncio.create_task(child())
        tracker.stat("n", ReduceType.SUM, x=values_of(2))

    asyncio.run(main())
    assert {"n": 2, "x": 7.0} == tracker.export()


def test_a_refused_mask_is_not_replaced_by_someone_elses(monkeypatch):
    """Where a thread's mask is refused, its stats are too, though another thread has a mask of that name."""
    monkeypatch.setenv("AREAL_METRICS_ON_MISTAKE", "warn")
    tracker = DistributedStatsTracker("refused")
    tracker.denominator(n=torch.ones(2, dtype=torch.bool))
    with pytest.warns(UserWarning, match="expected a bool tensor"):
        tracker.denominator(n=torch.ones(2))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tracker.denominator, n=torch.ones(2, dtype=torch.bool)).result()
    with pytest.warns(UserWarning, match="got 'refused/n'"):
        tracker.stat("n", x=torch.ones(2))
    assert {"refused/n": 4} == tracker.export()


def test_names_made_up_anew_do_not_pile_up(monkeypatch):
    """A thread that never exports keeps a bounded number of masks of exported windows."""
    monkeypatch.setattr(binding, "NAMES_AT_MOST", 8)
    tracker = DistributedStatsTracker()
    with ThreadPoolExecutor(1) as pool:
        for i in range(20):
            pool.submit(tracker.denominator, **{f"n{i}": torch.ones(1, dtype=torch.bool)}).result()
        tracker.export()
        names = pool.submit(binding.names, tracker.recorder).result()
    assert {f"n{i}" for i in range(20)} > names >= {f"n{i}" for i in range(16, 20)}


def test_masks_of_exported_windows_take_little_memory(monkeypatch):
    """A thread that never exports keeps them packed, as far as they fit; what is left still selects."""
    monkeypatch.setattr(binding, "BYTES_AT_MOST", 30_000)
    tracker, mask = DistributedStatsTracker(), torch.zeros(80_000, dtype=torch.bool)
    mask[:30_000] = True
    with ThreadPoolExecutor(1) as pool:
        for i in range(40):
            pool.submit(tracker.denominator, **{f"n{i}": mask}).result()
            tracker.export()
        names = pool.submit(binding.names, tracker.recorder).result()
        pool.submit(tracker.stat, "n39", ReduceType.SUM, x=torch.ones(80_000)).result()
        held = pool.submit(lambda: [m.index for m in binding.current().values()]).result()
    assert {"n39"} < names < {f"n{i}" for i in range(20, 40)}
    assert 1 == sum(index is not None for index in held)
    assert {"x": 30_000.0} == tracker.export()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_masks_of_its_parent():
    """What the parent registered is in the parent's log: the child registers its own."""
    tracker = DistributedStatsTracker()
    tracker.denominator(n=torch.ones(2, dtype=torch.bool))
    if (pid := os.fork()) == 0:
        try:
            tracker.stat("n", x=torch.ones(2))
        except ValueError:
            os._exit(3)
        os._exit(0)
    assert 3 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tracker.stat("n", ReduceType.SUM, x=torch.ones(2))
    assert {"n": 2, "x": 2.0} == tracker.export()
