"""The tracker with tensors on a GPU: what waits for it, and that the numbers are those of the host.

Record calls run under `torch.cuda.set_sync_debug_mode("error")`, in which what waits for the device raises.
So does the export of a window that lies on the device: its one wait is for an event, behind one small copy.
What the CPU can show of it is in tests/eventlog/test_device.py.
"""

import contextlib
import math

import pytest
import torch

import eventlog
from aggregator import collective, open_run, stats_tracker
from aggregator.stats_tracker import DistributedStatsTracker, ReduceType
from eventlog import drain
from tests import gloo

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def clean():
    """Every test begins and ends without a log and with empty trackers."""
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()
    eventlog.stop()


@contextlib.contextmanager
def no_waiting():
    """Raise where a call waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batches(place, n=3):
    """Return batches of (mask, values, number, bounds) on a device."""
    found = []
    for seed in range(n):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(400, generator=generator) < 0.5
        # integers over 64: their sums are exact, so that the order of adding does not matter
        x = torch.randint(-1000, 1000, (400,), generator=generator).float() / 64
        x[~mask] = math.nan
        bounds = torch.tensor([0, 100, 100, 400], dtype=torch.int32)
        found.append([tensor.to(place) for tensor in (mask, x, x[mask].sum(), bounds)])
    return found


def record(tracker, batch):
    mask, x, number, bounds = batch
    tracker.denominator(m=mask, cu_seqlens=bounds)
    tracker.stat("m", f=x, d=x.double(), h=x.bfloat16(), strided=torch.stack([x, x], 1)[:, 0])
    tracker.stat("m", ReduceType.SUM, s=x, graph=x.clone().requires_grad_())
    tracker.scalar(number=number, one=1.0)


def expected(n=3):
    """Return what the host makes of the same batches."""
    tracker = DistributedStatsTracker()
    for batch in batches("cpu", n):
        record(tracker, batch)
    return dict(tracker.export())


@needs_gpu
def test_recording_waits_for_nothing_and_an_export_for_one_event():
    """Neither verbs nor drain synchronise; the numbers are exactly those of the host."""
    tracker, prepared = DistributedStatsTracker(), batches("cuda")
    torch.cuda.synchronize()
    with no_waiting():
        for batch in prepared:
            with tracker.record_timing("t", device="cuda"):
                record(tracker, batch)
        found = dict(tracker.export())
    timings = [found.pop(f"timeperf/{key}") for key in ("t", "t/cuda")]
    assert (3, 3) == (found.pop("timeperf/t__count"), found.pop("timeperf/t/cuda__count"))
    assert min(timings) > 0
    assert expected() == found


@needs_gpu
def test_values_reach_the_log_while_the_device_goes_on(tmp_path):
    """Payload copied beside the training is what was recorded, whatever its memory is used for next."""
    eventlog.start(tmp_path)
    for batch in batches("cuda"):
        record(stats_tracker, batch)
    stats_tracker.export_all(step=0)
    for _ in range(50):  # whoever frees too early gets these numbers
        torch.full((400 * 4,), -7.0, device="cuda")
    eventlog.stop()
    with open_run(tmp_path) as run:
        found = run.sql("select key, values from tensors order by key, call").to_pylist()
        selected = run.sql("select selected from masks order by call")["selected"].to_pylist()
    values = [x[mask] for mask, x, *_ in batches("cpu")]
    wanted = [(key, each) for key in ("d", "f", "graph", "h", "s", "strided") for each in values]
    assert [(key, (each.bfloat16().float() if key == "h" else each).tolist()) for key, each in wanted] == [
        (row["key"], row["values"]) for row in found
    ]
    masks = [mask for mask, *_ in batches("cpu")]
    assert [[int(m[:100].sum()), 0, int(m[100:].sum())] for m in masks] == selected


@needs_gpu
def test_host_and_device_meet_under_one_mask():
    """Masks on one side and values on the other make the same numbers (report c28)."""
    (mask, x, *_), *_ = batches("cpu")
    tracker = DistributedStatsTracker()
    tracker.denominator(host=mask, device=mask.cuda())
    tracker.stat("host", a=x, b=x.cuda())
    tracker.stat("device", c=x, d=x.cuda())
    found = tracker.export()
    averages = {found[f"{key}/avg"] for key in "abcd"}
    assert {x[mask].double().mean().item()} == averages


@needs_gpu
def test_what_another_stream_recorded_is_waited_for():
    """An export on one stream reads what was recorded on another only when that is there."""
    tracker, side = DistributedStatsTracker(), torch.cuda.Stream()
    (mask, x, *_), *_ = batches("cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        tracker.denominator(m=mask)
        tracker.stat("m", x=x * 2)
    found = tracker.export()
    assert found["x/avg"] == x[mask].double().mean().item() * 2


@needs_gpu
def test_payload_lies_in_pinned_memory():
    """The buffers that the writer waits for are pinned, so that the copy does not hold up the device."""
    tracker = DistributedStatsTracker()
    record(tracker, batches("cuda")[0])
    frame = drain([tracker.recorder]).frame
    frame.send()
    assert frame.parcels
    assert all(parcel._host.is_pinned() and parcel._arrived is not None for parcel in frame.parcels)


def _reduced(rank):
    """Record half of the batches on the GPU, and reduce over the world."""
    import torch.distributed as dist

    for batch in batches("cuda", 4)[rank::2]:
        record(stats_tracker, batch)
    return dict(stats_tracker.export_all(reduce_group=dist.group.WORLD))


@needs_gpu
def test_gloo_reduces_what_lies_on_the_device():
    """Only moments travel: a gloo group reduces values on a GPU as those of the host."""
    assert [expected(4)] * 2 == gloo.run(_reduced, ranks=2)


def _nccl(_rank):
    """Gather over an NCCL group of this process alone."""
    import numpy as np
    import torch.distributed as dist

    group = dist.new_group([0], backend="nccl")
    link = collective._GroupLink(group)
    vector = np.arange(5)
    return link.device, link.gather(vector).tolist(), link.total(vector * 0.5).tolist()


@needs_gpu
def test_nccl_takes_host_numbers_on_its_device():
    """Numbers of the host move to the device of an NCCL group for the reduction only (report c28)."""
    assert [("cuda", [[0, 1, 2, 3, 4]], [0.0, 0.5, 1.0, 1.5, 2.0])] == gloo.run(_nccl, ranks=1)


@pytest.mark.parametrize(
    ("backends", "bound", "expected"),
    [
        ("cpu:gloo,cuda:nccl", torch.device("cuda", 1), "cpu"),
        ("cuda:gloo,cpu:gloo", None, "cpu"),
        ("cuda:nccl", torch.device("cuda", 1), "cuda:1"),
        ("cuda:nccl", None, "cuda"),
    ],
)
def test_a_group_reduces_on_the_host_where_it_can(monkeypatch, backends, bound, expected):
    """Groups that take CPU tensors get them; others get tensors on the device they are bound to."""

    class Group:  # a real NCCL group needs a GPU
        bound_device_id = bound

    monkeypatch.setattr("torch.distributed.get_backend_config", lambda _: backends)
    assert expected == collective._device(Group())
