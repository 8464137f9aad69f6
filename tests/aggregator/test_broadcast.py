"""Containers of tensors over real ranks: everything arrives as it was, in few messages."""

from __future__ import annotations

import warnings
from difflib import Match

import pytest
import torch
import torch.distributed as dist

from aggregator import collective
from aggregator.broadcast import broadcast_tensor_container
from eventlog import errors
from tests.gloo import Ranks

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    """Three ranks, for all tests of the module."""
    with Ranks(3) as world:
        yield world


def container():
    """Return a container with everything in it that was ever found in a batch."""
    torch.manual_seed(0)
    every = {str(dtype): (10 * torch.rand(3, 5)).to(dtype) for dtype in DTYPES}
    wide = torch.rand(6, 8)
    return {
        "every": every,
        "turned": [
            wide.t(),
            wide[::2, 1::3],
            wide.expand(2, 6, 8),
            torch.rand(2, 3).to(torch.complex64).conj(),
        ],
        "empty": (torch.empty(0, 7), torch.empty(0, dtype=torch.int64), []),
        "single": torch.tensor(2.5, dtype=torch.float64),
        "named": Match(torch.arange(3), {"deep": [(torch.ones(1),)]}, 1),
        "plain": {"name": "q1", "n": 3, "none": None, 7: (1.5,)},
        "graph": torch.ones(2, requires_grad=True),
    }


def flat(data):
    """Return what a container holds, tensors as (dtype, shape, values), to be compared."""
    if isinstance(data, torch.Tensor):
        values = data.detach()
        values = values.float() if values.dtype.itemsize == 1 and values.is_floating_point() else values
        return str(data.dtype), tuple(data.shape), values.tolist()
    if isinstance(data, dict):
        return {key: flat(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data).__name__, [flat(value) for value in data]
    return data


def receive(rank, source):
    return flat(broadcast_tensor_container(container() if rank == source else "ignored", source))


@pytest.mark.parametrize("source", [0, 2])
def test_everything_arrives_as_it_was(ranks, source):
    """Nesting, names, dtypes, shapes and values are the source's on every rank, whatever the strides."""
    assert [flat(container())] * 3 == ranks.run(receive, source)


ONE_DIMENSIONAL = {
    "column": lambda: torch.arange(24.0).reshape(6, 4)[:, 1],
    "every other": lambda: torch.arange(10)[::2],
    "expanded": lambda: torch.ones(1).expand(5),
    "imaginary part": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "one element of a column": lambda: torch.arange(24.0).reshape(6, 4)[2:3, 1],
    "one element, turned": lambda: torch.arange(12.0)[::5][1:2].expand(1),
}


def receive_view(rank, name):
    return flat(broadcast_tensor_container(ONE_DIMENSIONAL[name]() if rank == 0 else None))


@pytest.mark.parametrize("name", ONE_DIMENSIONAL)
def test_views_of_one_dimension_arrive_too(ranks, name):
    """A column, a slice with a step, an expanded element: also alone in a message, where nothing packs it."""
    assert [flat(ONE_DIMENSIONAL[name]())] * 3 == ranks.run(receive_view, name)


def messages_for(rank, count):
    before = collective.count()
    data = [torch.full((4,), float(i)) for i in range(count)] if rank == 0 else None
    got = broadcast_tensor_container(data)
    return collective.count() - before, [part[0].item() for part in got]


def test_many_tensors_cost_as_many_messages_as_few(ranks):
    """200 tensors go in the header and one message, as 2 do."""
    assert [(2, [0.0, 1.0])] * 3 == ranks.run(messages_for, 2)
    assert [(2, [float(i) for i in range(200)])] * 3 == ranks.run(messages_for, 200)


def large_and_small(rank):
    big = torch.arange(5 << 20, dtype=torch.float32)  # 20 MiB
    before = collective.count()
    got = broadcast_tensor_container({"big": big, "small": torch.ones(3)} if rank == 1 else None, 1)
    return collective.count() - before, bool(torch.equal(got["big"], big)), got["small"].tolist()


def test_a_large_tensor_goes_in_a_message_of_its_own(ranks):
    """What is large is not packed; what is small beside it is."""
    assert [(3, True, [1.0, 1.0, 1.0])] * 3 == ranks.run(large_and_small)


def shared(rank):
    one = torch.zeros(2)
    got = broadcast_tensor_container([one, one, {"again": one}] if rank == 0 else None)
    got[0][0] = 5.0
    return [part.tolist() for part in (got[0], got[1], got[2]["again"])]


def test_a_tensor_that_occurs_twice_stays_one(ranks):
    """Places that held one tensor hold one tensor on the other ranks too."""
    assert [[[5.0, 0.0]] * 3] * 3 == ranks.run(shared)


def within(rank):
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    got = broadcast_tensor_container({"x": torch.tensor([rank])}, 2, group)
    dist.destroy_process_group(group)
    return got["x"].item()


def test_a_group_is_served_by_one_of_its_ranks(ranks):
    """The source is a global rank; others than the group's do not take part."""
    assert [None, 2, 2] == ranks.run(within)


class NoBytes(torch.Tensor):
    """A tensor of a kind that cannot be looked at as bytes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.view:
            raise RuntimeError("no view of it")
        return super().__torch_function__(func, types, args, kwargs or {})


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates making them
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their interface may change
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


GIVEN = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "unpicklable": lambda: [torch.ones(1), lambda: 0],
    "quantized": quantized,
    "nested": nested,
    "meta": lambda: torch.empty(2, device="meta"),
    "without bytes": lambda: torch.ones(2).as_subclass(NoBytes),
}


def failing(rank, data):
    given = GIVEN[data]()
    try:
        broadcast_tensor_container(given if rank == 0 else None)
    except Exception as error:  # noqa: BLE001 - its kind is the answer
        return type(error).__name__, str(error)
    return None


def test_a_source_that_cannot_send_fails_everywhere(ranks):
    """No rank waits for what will not come: the source raises its own error, the others name it."""
    own, *others = ranks.run(failing, "sparse")
    assert "EvaluationError" == own[0]
    assert "expected dense local tensors" in own[1]
    assert [
        ("PeerError", f"expected a container from rank 0, which failed: EvaluationError: {own[1]}")
    ] * 2 == others
    own, *others = ranks.run(failing, "unpicklable")
    assert own[0] in ("PicklingError", "AttributeError")
    assert ["PeerError"] * 2 == [kind for kind, _ in others]
    assert [(2, [0.0])] * 3 == ranks.run(messages_for, 1)  # the group goes on


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("quantized", r"a quantized one (torch.qint8)"),
        ("nested", "a nested one"),
        ("meta", "a torch.strided one on meta"),
        ("without bytes", "no view of it"),
    ],
)
def test_what_has_no_bytes_to_send_is_refused_before_anything_is_sent(ranks, name, text):
    """The peers hear of it instead of a header, wherever it fails, and the group goes on."""
    own, *others = ranks.run(failing, name)
    assert text in own[1]
    assert ["PeerError"] * 2 == [kind for kind, _ in others]
    assert [(2, [0.0])] * 3 == ranks.run(messages_for, 1)


def test_without_a_group_the_data_is_returned():
    """A process by itself gets its own data back, and learns of a source that is not there."""
    data = {"x": torch.ones(2)}
    assert data is broadcast_tensor_container(data)
    with pytest.raises(errors.AgreementError, match=r"expected a source among ranks \[0\], got 1"):
        broadcast_tensor_container(data, 1)
