"""What is done on devices, done here with tensors on the CPU: the arithmetic and the settling are the same.

Streams, events and pinned memory, which the CPU does not have, are in tests/aggregator/test_device.py.
"""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from eventlog import Recorder, arrays, device, drain, encode, moments, settlement
from eventlog.errors import RecordingError, RecordingTypeError
from eventlog.reduction import ReduceType

# Sums of these are exact in float64 whatever the order, so that rows can be compared bit by bit.
VALUES = st.sampled_from([0.0, -0.0, 1.0, -2.5, 3e4, 2.0**-20, math.nan, math.inf, -math.inf])
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 20))


@st.composite
def matrices(draw, elements=VALUES, dtypes=(np.float32, np.float64)):
    """Return a matrix and a mask over its columns."""
    n, width = draw(SHAPES)
    dtype = draw(st.sampled_from(dtypes))
    values = draw(npst.arrays(dtype, (n, width), elements=elements))
    return values, draw(npst.arrays(np.bool_, width))


def bits(rows):
    """Return moments as they are compared: -0.0 and 0.0 are the same number."""
    rows = rows.copy()
    moments.floats(rows)[:, moments.SUM :] += 0.0
    return rows.tolist()


@given(matrices())
def test_moments_on_a_device_are_those_of_the_host(drawn):
    """Counts, sums, extremes and odd values under a mask are those of the selected values to the bit."""
    values, mask = drawn
    found = device.moments_of(torch.from_numpy(values), torch.from_numpy(mask)).numpy()
    assert bits(moments.of_matrix(values[:, mask])) == bits(found)


@given(matrices(elements=st.floats(-1e3, 1e3, width=32), dtypes=(np.float32,)))
def test_sums_on_a_device_are_float64(drawn):
    """Where float64 rounds, the sums are those of float64 in another order (report c10)."""
    values, mask = drawn
    found = device.moments_of(torch.from_numpy(values), torch.from_numpy(mask)).numpy()
    exact = [math.fsum(row[mask].tolist()) for row in values]
    weight = np.abs(values[:, mask]).sum(axis=1, dtype=np.float64)
    error = np.abs(moments.floats(found)[:, moments.SUM] - exact)
    assert (error <= values.shape[1] * np.finfo(np.float64).eps * weight).all()


@given(matrices())
def test_selection_and_packing_on_a_device_are_numpys(drawn):
    """The selected columns come in order, the mask a bit per element."""
    values, mask = drawn
    tensor = torch.from_numpy(mask)
    chosen = device.selected(torch.from_numpy(values), tensor, int(mask.sum()))
    np.testing.assert_array_equal(values[:, mask], chosen.numpy())
    assert np.packbits(mask, bitorder="little").tolist() == device.packed(tensor).tolist()


@pytest.fixture
def on_device(monkeypatch):
    """Let tensors on the CPU count as tensors on a device."""
    monkeypatch.setattr(arrays, "on_host", lambda value: not isinstance(value, torch.Tensor))


def program(recorder, chunk=None):
    """Record most of what can be recorded of tensors."""
    generator = torch.Generator().manual_seed(chunk or 0)
    for shape in ((3, 5), (7,), ()):
        mask = torch.rand(shape, generator=generator) < 0.6
        x = torch.randn(shape, generator=generator)
        recorder.denominator({"m": mask, "none": torch.zeros_like(mask), "all": torch.ones_like(mask)})
        for name in ("m", "none", "all"):
            recorder.stat(name, {f"{name}/f": x, f"{name}/d": x.double(), f"{name}/h": x.bfloat16()})
            recorder.stat(name, {f"{name}/s": x.half()}, ReduceType.SUM)
            recorder.stat(name, {f"{name}/n": np.full(shape, 0.5, np.float32)})
        recorder.stat("m", {"odd": torch.where(mask, math.nan, x), "graph": x.requires_grad_()})
        recorder.scalar({"s": x.sum(), "t": 1.5})
    recorder.scalar({"s": torch.tensor([2], dtype=torch.int32)})


def kept(drained):
    """Return everything that a window keeps, by key: moments, and payload values, masks and counts."""
    frame = drained.frame
    frame.send()
    found = {}
    for spec, row in zip(frame.calls.specs, frame.moments, strict=True):
        found.setdefault(spec.key, []).append(bits(row[None]))
    keys = dict(zip(range(frame.first_id, frame.first_id + len(frame)), frame.calls.specs, strict=True))
    rows = [row for message in encode.payload(frame) for row in message.batch().to_pylist()]
    for row in sorted(rows, key=lambda row: row["record_id"]):
        columns = [row[name] for name in ("values32", "values64", "mask", "selected")]
        found[keys[row["record_id"]].key].append(repr(columns))
    return found, dict(zip(frame.calls.specs, frame.calls.dtypes, strict=True))


@pytest.mark.parametrize("chunk_bytes", [1, 100, settlement.CHUNK_BYTES])
def test_a_window_from_a_device_is_that_of_the_host(monkeypatch, chunk_bytes):
    """The same program leaves the same moments, dtypes, masks and values, wherever it lies (report c28)."""
    monkeypatch.setattr(settlement, "CHUNK_BYTES", chunk_bytes)
    here, there = Recorder(), Recorder()
    program(here)
    expected, dtypes = kept(drain([here]))
    monkeypatch.setattr(arrays, "on_host", lambda value: not isinstance(value, torch.Tensor))
    program(there)
    found, others = kept(drain([there]))
    assert expected == found
    assert {s.key: d for s, d in dtypes.items()} == {s.key: d for s, d in others.items()}


@pytest.mark.usefixtures("on_device")
def test_tensors_on_a_device_are_captured_when_recorded():
    """Changing mask, values or number in place afterwards changes nothing (report c27)."""
    mask, x, number = torch.tensor([True, True, False]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0)
    recorder = Recorder()
    recorder.denominator({"m": mask})
    recorder.stat("m", {"x": x})
    recorder.scalar({"s": number})
    for tensor in (mask, x, number):
        tensor.fill_(9)
    drained = drain([recorder])
    found = {spec.key: row for spec, row in zip(drained.specs, drained.rows, strict=True)}
    assert (2, 1.5, 4.0) == (
        moments.exact(found["m"]), moments.mean(found["x"]), moments.mean(found["s"])
    )  # fmt: skip


@pytest.mark.usefixtures("on_device")
def test_single_keys_and_kept_windows_from_a_device():
    """export(key) and reset=False work as on the host: each record is logged once, all are reduced again."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor([True, False])})
    for value in (1.0, 2.0, 3.0):
        recorder.stat("m", {"x": torch.full((2,), value), "y": torch.full((2,), -value)})
    first = drain([recorder], key="x")
    assert (["x"] * 3, ["m"] + ["x"] * 3) == tuple(
        [spec.key for spec in specs] for specs in (first.specs, first.frame.calls.specs)
    )
    kept_too = drain([recorder], reset=False)
    assert ["y"] * 3 == [spec.key for spec in kept_too.frame.calls.specs]
    recorder.stat("m", {"z": torch.ones(2)})
    last = drain([recorder])
    assert (["z"], ["m", "y", "y", "y", "z"]) == (
        [spec.key for spec in last.frame.calls.specs], sorted(spec.key for spec in last.specs)
    )  # fmt: skip
    values = [piece.values().tolist() for d in (first, kept_too, last) for piece in d.frame.pieces[-1:]]
    assert [[[1.0], [2.0], [3.0]], [[-1.0], [-2.0], [-3.0]], [[1.0]]] == values


@pytest.mark.usefixtures("on_device")
def test_nothing_of_the_payload_is_made_before_it_is_sent():
    """Without a log the selected values are never copied; a copy that fails is the payload's loss."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor([True, False])})
    recorder.stat("m", {"x": torch.ones(2)})
    frame = drain([recorder]).frame
    assert [None, None] == [parcel._host for parcel in frame.parcels]

    def fail():
        raise MemoryError("no room")

    parcel = device.Parcel(fail, 1, 4)
    parcel.send()
    with pytest.raises(MemoryError, match="no room"):
        parcel.array()


@pytest.mark.usefixtures("on_device")
def test_a_window_that_cannot_be_settled_is_left_as_it_was(monkeypatch):
    """When the device fails in an export, what was recorded is still there for the next one."""
    recorder = Recorder()
    program(recorder)
    with monkeypatch.context() as broken:
        broken.setattr(device, "moments_of", None)
        with pytest.raises(TypeError, match="not callable"):
            drain([recorder])
    expected = Recorder()
    program(expected)
    assert kept(drain([expected]))[0] == kept(drain([recorder]))[0]


@pytest.mark.usefixtures("on_device")
def test_devices_without_float64_give_their_values_to_the_host(monkeypatch):
    """What cannot be reduced where it lies is brought to the host as it is, and is the same."""
    expected, found = Recorder(), Recorder()
    program(expected)
    wanted = kept(drain([expected]))[0]
    monkeypatch.setattr(device, "REDUCING", ())
    program(found)
    assert wanted == kept(drain([found]))[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), r"expected one number for 'k', got float32 of shape \(2,\)"),
        (torch.tensor(1j), "expected one number for 'k', got complex64"),
        (type("DTensor", (), {})(), r"got a DTensor; pass x.to_local\(\)"),
    ],
)
@pytest.mark.usefixtures("on_device")
def test_what_is_no_number_on_a_device_is_refused_at_the_call(monkeypatch, value, message):
    """A scalar on a device is checked at the call, although it is read at export."""
    monkeypatch.setattr(arrays, "on_host", lambda _: False)
    with pytest.raises(RecordingTypeError, match=message):
        Recorder().scalar({"k": value})


def test_a_lap_on_the_cpu_is_host_time():
    """On the CPU the device's clock is the host's."""
    lap = device.Lap(torch.device("cpu"))
    assert ("cpu", "cpu", 0.25) == (lap.name, device.Lap("cpu").name, lap.stop(0.25))


class Clock:
    """Stands for torch.cuda on a machine without a GPU: events on a clock that ticks once per event."""

    ticks = 0
    waits = 0

    class Event:
        """Stands for torch.cuda.Event."""

        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            Clock.ticks += 1
            self.at = Clock.ticks, stream

        def synchronize(self):
            Clock.waits += 1

        def elapsed_time(self, other):
            return 1000.0 * (other.at[0] - self.at[0])

    @staticmethod
    def current_stream(place):
        return f"stream of {place}"

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def device_count():
        return 2


def test_a_device_clock_is_read_at_export(monkeypatch):
    """Laps are two events on the device's own stream; nothing waits before the export (report d7)."""
    monkeypatch.setattr(device, "_streams", lambda _: Clock)
    recorder = Recorder()
    for _ in range(2):
        lap = device.Lap("cuda:1")
        recorder.timing(f"t/{lap.name}", lap.stop(9.0))
    assert ({"stream of cuda:1"}, 0) == ({event.at[1] for event in lap._events}, Clock.waits)
    (row,) = drain([recorder], reset=False).rows
    assert (2, 1.0, 2) == (row[moments.COUNT], moments.mean(row), Clock.waits)
    drain([recorder])
    assert 2 == Clock.waits
    with pytest.raises(RecordingError, match="got 'cuda:2'"):
        device.Lap("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", torch.device("cuda", 1), "mps", "nonsense", 3.5])
def test_a_lap_on_a_device_that_is_not_there_is_refused(name):
    """A clock that this process does not have is refused by name."""
    with pytest.raises(RecordingError, match=r"a clock that this process has \('cuda'.*, got "):
        device.Lap(name)


def test_a_lap_without_torch_is_refused(monkeypatch):
    """Where torch is not loaded there is no device."""
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(RecordingError, match="got 'cuda', and torch is not loaded"):
        device.Lap("cuda")


def test_fetch_keeps_order_and_shape():
    """Tensors of any shape come back flat, in the order they were asked for; of nothing, nothing."""
    parts = [torch.tensor(3), torch.tensor([[1, 2], [4, 5]]), torch.empty(0, dtype=torch.int64)]
    assert [[3], [1, 2, 4, 5], []] == [found.tolist() for found in device.fetch(parts)]
    assert [] == device.fetch([])


@pytest.mark.usefixtures("on_device")
def test_a_window_that_has_to_be_taken_is_taken_without_its_device(monkeypatch):
    """Where others take theirs the host's part is logged, the rest counted as lost, and nothing is left."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor([True, False]), "host": np.array([True, True])})
    recorder.stat("m", {"x": torch.ones(2)})
    recorder.stat("host", {"y": np.ones(2), "z": torch.ones(2)})
    recorder.scalar({"s": 1.5, "late": torch.ones(())})
    with monkeypatch.context() as broken:
        broken.setattr(device, "moments_of", None)
        drained = drain([recorder], anyhow=True)
    assert isinstance(drained.failed, TypeError)
    assert ["host", "y", "s"] == [spec.key for spec in drained.frame.calls.specs]
    assert (4, []) == (drained.lost, drained.specs)  # m, x, z and late
    assert [] == drain([recorder]).specs
