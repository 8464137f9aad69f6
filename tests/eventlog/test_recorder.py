"""The verbs and the drain: what a window holds, to what it is bound, what a refused call leaves."""

import asyncio
import gc
import mmap
import threading
import weakref

import numpy as np
import pytest
import torch

from eventlog import Recorder, drain, moments, set_step
from eventlog.errors import RecordingError, RecordingTypeError
from eventlog.frame import MaskPiece, MatrixPiece, SeriesPiece
from eventlog.reduction import ReduceType, Spread


@pytest.fixture
def recorder():
    return Recorder()


def mask(*bits):
    return torch.tensor(bits, dtype=torch.bool)


def rows(drained):
    """Every drained row by key, in order."""
    found = {}
    for spec, row in zip(drained.specs, drained.rows, strict=True):
        found.setdefault(spec.key, []).append(row)
    return found


def test_only_selected_values_are_looked_at(recorder):
    """Masked-out NaN and Inf never reach the moments (report c21)."""
    recorder.denominator({"m": mask(1, 0, 1, 0)})
    recorder.stat("m", {"x": torch.tensor([1.0, float("nan"), 3.0, float("inf")])})
    (row,) = rows(drain([recorder]))["x"]
    assert (2.0, 1.0, 3.0) == (moments.mean(row), moments.least(row), moments.greatest(row))
    assert row[moments.COUNT] == 2
    assert row[moments.NAN] == row[moments.POS_INF] == 0


def test_a_stat_binds_to_the_mask_current_at_its_call(recorder):
    """A denominator registered twice pairs each stat with the mask of its own moment (report s1)."""
    x = torch.tensor([1.0, 5.0])
    recorder.denominator({"m": mask(1, 0)})
    recorder.denominator({"m": mask(0, 1)})
    recorder.stat("m", {"x": x})
    recorder.denominator({"m": mask(1, 0)})
    recorder.stat("m", {"x": x})
    assert [5.0, 1.0] == [moments.mean(row) for row in rows(drain([recorder]))["x"]]


def zeros(n, dtype):
    """Return n zeros that take no memory but where they are written to, nor is any set aside for them."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    size = n * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), dtype)


def test_a_mask_selects_beyond_what_32_bits_count(recorder):
    """A value at a place of 2**31 or more is the one that is selected there."""
    elements, selected = 2**31 + 20_000, 10_000
    m, x = zeros(elements, np.bool_), zeros(elements, np.float32)
    m[-selected:], x[0], x[-selected:] = True, -7.0, np.arange(1, selected + 1)
    recorder.denominator({"m": m})
    recorder.stat("m", {"x": x})
    (row,) = rows(drain([recorder]))["x"]
    assert (5000.5, 1.0, 10_000.0) == (moments.mean(row), moments.least(row), moments.greatest(row))


def test_masks_and_values_are_captured_when_recorded(recorder):
    """Changing mask or tensor in place afterwards changes nothing (report c27)."""
    m, x = mask(1, 1, 0), torch.tensor([1.0, 2.0, 3.0])
    recorder.denominator({"m": m})
    recorder.stat("m", {"x": x})
    m.fill_(True)
    x.fill_(9.0)
    found = rows(drain([recorder]))
    assert moments.mean(found["x"][0]) == 1.5
    assert moments.exact(found["m"][0]) == 2


def test_several_named_masks_per_batch(recorder):
    """The same values under two masks give two means (report c27)."""
    x = torch.tensor([1.0, 1.0, 0.0, 0.0])
    recorder.denominator({"all": mask(1, 1, 1, 1), "kept": mask(1, 1, 0, 0)})
    recorder.stat("all", {"r_all": x})
    recorder.stat("kept", {"r_kept": x})
    found = rows(drain([recorder]))
    assert (0.5, 1.0) == (moments.mean(found["r_all"][0]), moments.mean(found["r_kept"][0]))


def test_keys_carry_tracker_and_scope():
    """Keys are tracker, then scopes, then key; a denominator's name resolves under the same scope."""
    recorder = Recorder("rollout")
    with recorder.scope("/a/"), recorder.scope("b"):
        recorder.denominator({"m": mask(1)})
        recorder.stat("m", {"x": torch.ones(1)})
        with recorder.no_scope():
            recorder.scalar({"s": 1})
    drained = drain([recorder])
    assert [spec.key for spec in drained.specs] == ["rollout/a/b/m", "rollout/a/b/x", "rollout/s"]
    assert drained.specs[1].denominator == "rollout/a/b/m"


def test_disable_scope_restores_on_exceptions(recorder):
    """The scope is back after an exception inside disable_scope (report s6)."""
    with recorder.scope("a"):
        with pytest.raises(KeyError), recorder.no_scope():
            raise KeyError
        assert recorder.full_key("x") == "a/x"


def test_scopes_belong_to_their_task_and_thread(recorder):
    """Tasks and threads that interleave under scopes never see each other's (report s6)."""

    async def task(name):
        with recorder.scope(name):
            await asyncio.sleep(0)
            recorder.scalar({"v": 1})
            await asyncio.sleep(0)
            recorder.scalar({"v": 1})

    async def main():
        await asyncio.gather(*(task(f"t{i}") for i in range(50)))

    thread = threading.Thread(target=lambda: recorder.scalar({"v": 1}))
    with recorder.scope("main"):
        thread.start()
        thread.join()
        asyncio.run(main())
    found = rows(drain([recorder]))
    assert {"v": 1, **{f"main/t{i}/v": 2 for i in range(50)}} == {
        key: int(found[key][0][moments.COUNT]) for key in found
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda r: r.stat("nope", {"x": torch.ones(2)}),
            "registered denominator, got 'nope'; registered now: 'm'",
        ),
        (
            lambda r: r.stat("m", {"ok": torch.ones(2), "x": torch.ones(3)}),
            r"shape \(2,\) .* for 'x', got \(3,\)",
        ),
        (
            lambda r: r.stat("m", {"ok": torch.ones(2), "x": torch.ones(2).int()}),
            "floating tensor for 'x', got int32",
        ),
        (lambda r: r.stat("m", {"x": torch.ones(0)}), "non-empty tensor for 'x'"),
        (lambda r: r.stat("m", {"x": torch.ones(2)}, ReduceType.SCALAR), "got SCALAR; use scalar"),
        (lambda r: r.denominator({"ok": mask(1), "x": torch.ones(2)}), "bool tensor for denominator 'x'"),
        (lambda r: r.scalar({"ok": 1, "bad": "nan"}), "number for 'bad', got str"),
        (lambda r: r.counter({"ok": 1, "bad": 1.5}), "integer for counter 'bad', got 1.5"),
        (lambda r: r.scalar({"": 1}), "non-empty key, got ''"),
        (lambda r: r.scalar({"ok": 1, "\ud800": 1}), "key that is valid Unicode"),
        (lambda r: r.scope("\udc80").__enter__(), "scope name that is valid Unicode"),
    ],
)
def test_a_refused_call_records_nothing(recorder, call, message):
    """A refused call says expected, got and key, records nothing, and loses nothing recorded before."""
    recorder.denominator({"m": mask(1, 0)})
    recorder.stat("m", {"before": torch.ones(2)})
    with pytest.raises(ValueError, match=message):
        call(recorder)
    assert ["m", "before"] == [spec.key for spec in drain([recorder]).specs]


def test_refused_types_are_type_errors(recorder):
    """A value of a wrong type is a TypeError too (report e2)."""
    with pytest.raises(TypeError, match="bad"):
        recorder.scalar({"bad": "nan"})
    with pytest.raises(RecordingTypeError, match="expected a scope name"):
        recorder.scope(3).__enter__()


def test_shares_of_a_number_have_no_extremes(recorder):
    """MIN and MAX of what is declared as shares of one number are refused: no rank sees the whole."""
    recorder.declare(["part"], Spread.SHARES)
    recorder.denominator({"m": mask(1)})
    with pytest.raises(RecordingError, match=r"expected AVG or SUM for 'part'.*, got MAX"):
        recorder.stat("m", {"ok": torch.ones(1), "part": torch.ones(1)}, ReduceType.MAX)
    assert ["m"] == [spec.key for spec in drain([recorder]).specs]


def test_a_declaration_may_be_repeated(recorder):
    """Declared before every recording, as micro-batches do, a key stays one key (report c4)."""
    for _ in range(2):
        recorder.declare(["lr"], Spread.REPLICATED)
        recorder.scalar({"lr": 0.5})
        recorder.declare(["x"], Spread.SHARES)
        recorder.denominator({"m": mask(1)})
        recorder.stat("m", {"x": torch.ones(1)}, ReduceType.SUM)
    specs = drain([recorder]).specs
    assert 1 == len({spec for spec in specs if spec.key == "lr"}) == len({s for s in specs if s.key == "x"})


def test_a_declaration_comes_before_the_recording(recorder):
    """What the window holds already is not made something else; after the export it may be (report c4)."""
    recorder.scalar({"lr": 0.5, "other": 1.0})
    with pytest.raises(RecordingError, match="expected 'lr' to be declared before it is recorded, or after"):
        recorder.declare(["fresh", "lr"], Spread.REPLICATED)
    recorder.scalar({"lr": 0.5, "fresh": 1.0})
    assert {Spread.SHARDS} == {spec.spread for spec in drain([recorder]).specs}
    recorder.declare(["lr"], Spread.REPLICATED)
    recorder.scalar({"lr": 0.5})
    assert [Spread.REPLICATED] == [spec.spread for spec in drain([recorder]).specs]


def test_counters_are_exact_and_bounded(recorder):
    """Counters add exactly and refuse to leave int64 (report c11)."""
    recorder.counter({"n": 2**62})
    with pytest.raises(RecordingError, match="sum that fits int64 for counter 'n'"):
        recorder.counter({"other": 1, "n": 2**62})
    recorder.counter({"n": 3})
    found = rows(drain([recorder]))
    assert (["n"], 2**62 + 3) == (list(found), moments.exact(found["n"][0]))


def test_drain_resets_and_unknown_denominators_raise_afterwards(recorder):
    """After a drain nothing is left, and masks must be registered anew."""
    recorder.denominator({"m": mask(1)})
    drain([recorder])
    assert len(drain([recorder]).frame) == 0
    with pytest.raises(RecordingError, match="registered now: none"):
        recorder.stat("m", {"x": torch.ones(1)})


def test_without_reset_each_record_is_logged_once(recorder):
    """reset=False reduces everything again but logs only what is new, and names the windows it covers."""
    recorder.denominator({"m": mask(1, 1)})
    recorder.stat("m", {"x": torch.tensor([1.0, 2.0])})
    recorder.scalar({"s": 1})
    first = drain([recorder], reset=False)
    recorder.stat("m", {"y": torch.tensor([3.0, 4.0])})
    recorder.scalar({"s": 3})
    second = drain([recorder])
    assert ["m", "x", "s"] == [spec.key for spec in first.frame.calls.specs]
    assert ["y", "s"] == [spec.key for spec in second.frame.calls.specs]
    assert second.frame.denominator_ids[0] == first.frame.first_id
    assert (first.frame.window, first.frame.window) == (first.first_window, second.first_window)
    assert ["m", "x", "y", "s"] == [spec.key for spec in second.specs]
    assert moments.mean(rows(second)["s"][0]) == 2.0


def test_a_single_key_is_drained_alone(recorder):
    """Draining one key leaves the others and their denominators usable (report s2)."""
    recorder.denominator({"m": mask(1, 1)})
    for key, value in (("x", 1.0), ("y", 2.0), ("x", 3.0)):
        recorder.stat("m", {key: torch.full((2,), value)})
    assert ["x", "x"] == [spec.key for spec in drain([recorder], key="x").specs]
    recorder.stat("m", {"z": torch.ones(2)})
    assert ["m"] == [spec.key for spec in drain([recorder], key="m").specs]
    recorder.stat("m", {"w": torch.ones(2)})
    rest = drain([recorder])
    assert ["y", "z", "w"] == [spec.key for spec in rest.specs]


def test_payload_pieces_hold_exactly_the_selected_values(recorder):
    """The payload keeps the mask, the selected values in order, and every scalar with its time."""
    recorder.denominator({"m": mask(1, 0, 1)})
    recorder.stat("m", {"x": torch.tensor([1.0, 2.0, 3.0])})
    recorder.scalar({"s": 4})
    recorder.scalar({"s": 5})
    pieces = drain([recorder]).frame.pieces
    assert [MaskPiece, MatrixPiece, SeriesPiece] == [type(piece) for piece in pieces]
    assert [0b101] == pieces[0].packed.tolist()
    assert [[1.0, 3.0]] == pieces[1].matrix.tolist()
    assert [4.0, 5.0] == pieces[2].values
    assert pieces[2].times == sorted(pieces[2].times)


def test_steps_given_are_kept_per_record(recorder):
    """set_step applies from its call on; the tracker's own step goes before that of the process."""
    try:
        recorder.scalar({"s": 1})
        set_step(3)
        recorder.scalar({"s": 1})
        recorder.set_step(4)
        recorder.scalar({"s": 1})
    finally:
        set_step(None)
    frame = drain([recorder], step=9).frame
    assert [9, 3, 4] == frame.calls.steps


def test_autograd_graphs_are_released_at_record(recorder):
    """Recording keeps no reference to the graph of a tensor (report d5)."""

    class Token:
        pass

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, token):
            ctx.token = token
            return x * 2

        @staticmethod
        def backward(_, gradient):
            return gradient, None

    token = Token()
    graph = weakref.ref(token)
    x = Double.apply(torch.ones(3, requires_grad=True), token)
    recorder.denominator({"m": mask(1, 1, 1)})
    recorder.stat("m", {"x": x})
    del x, token
    gc.collect()
    assert graph() is None


def test_made_up_keys_do_not_pile_up(monkeypatch):
    """A key that is new in every window leaves nothing behind but a bounded table of names."""
    monkeypatch.setattr("eventlog.specs.INTERNED_AT_MOST", 500)
    recorder = Recorder()
    for i in range(2000):
        recorder.scalar({f"k{i}": 1})
        if i % 100 == 99:
            drain([recorder])
    assert len(recorder.specs) <= 600


def test_a_producer_tensor_on_another_dtype_shares_a_mask(recorder):
    """float32, float64 and bfloat16 under one mask are all kept, float64 exactly."""
    recorder.denominator({"m": mask(1, 1)})
    recorder.stat("m", {"a": torch.tensor([0.1, 0.2], dtype=torch.float64)})
    recorder.stat("m", {"b": torch.ones(2, dtype=torch.bfloat16)})
    drained = drain([recorder])
    assert [np.float64, np.float32] == [p.matrix.dtype for p in drained.frame.pieces[1:]]
    assert ["bool", "float64", "bfloat16"] == drained.frame.calls.dtypes


CLASHES = {
    "scalar, counter": (
        lambda r: r.scalar({"k": 1}),
        lambda r: r.counter({"ok": 1, "k": 1}),
        "scalar and counter",
    ),
    "mask, scalar": (
        lambda r: r.denominator({"k": mask(1)}),
        lambda r: r.scalar({"k": 1}),
        "denominator and scalar",
    ),
    "counter, mask": (
        lambda r: r.counter({"k": 1}),
        lambda r: r.denominator({"k": mask(1)}),
        "counter and denomi",
    ),
    "counter, samples": (
        lambda r: r.counter({"k": 1}),
        lambda r: r.samples("k", {"a": 1}),
        "counter and scalar",
    ),
    "two masks": (
        lambda r: r.stat("m", {"k": torch.ones(1)}),
        lambda r: r.stat("n", {"ok": torch.ones(1), "k": torch.ones(1)}),
        "avg_min_max under 'm' and stat avg_min_max under 'n'",
    ),
    "reductions": (
        lambda r: r.stat("m", {"k": torch.ones(1)}, ReduceType.SUM),
        lambda r: r.stat("m", {"k": torch.ones(1)}, ReduceType.AVG),
        "stat sum under 'm' and stat avg under 'm'",
    ),
}


@pytest.mark.parametrize("clash", CLASHES)
def test_a_key_is_one_thing_until_its_export(recorder, clash):
    """A key that is recorded as something else is refused at the call; after its export it may be that."""
    first, second, message = CLASHES[clash]
    recorder.denominator({"m": mask(1), "n": mask(1)})
    first(recorder)
    with pytest.raises(RecordingError, match=f"expected one kind of 'k' until its export, got .*{message}"):
        second(recorder)
    assert [["m", "n", "k"]] == [
        sorted({spec.key for spec in drain([recorder], reset=False).specs}, key="mnk".find)
    ]
    drain([recorder], key="k")
    second(recorder)
    first_again = {spec.key for spec in drain([recorder]).specs}
    assert "k" in first_again


def test_a_refused_call_says_nothing_of_its_keys(recorder):
    """What a key would have been in a call that was refused does not matter to the next one."""
    recorder.counter({"n": 2**62})
    with pytest.raises(RecordingError, match="fits int64"):
        recorder.counter({"k": 1, "n": 2**62})
    recorder.scalar({"k": 1})
    assert {"n", "k"} == {spec.key for spec in drain([recorder]).specs}


def test_one_key_for_two_groups_is_two(recorder):
    """The group a key is reduced over is a part of its name: within each it is one thing."""
    recorder.scalar({"k": 1}, label="0,1")
    recorder.counter({"k": 1}, label="0,2")
    with pytest.raises(RecordingError, match="got scalar and counter"):
        recorder.counter({"k": 1}, label="0,1")


def test_a_key_may_change_with_every_window(recorder):
    """What a key was in windows before neither refuses it nor lets it be two things in this one."""
    verbs = [lambda: recorder.scalar({"k": 1}), lambda: recorder.counter({"k": 1})]
    for window in range(4):
        first, second = verbs[window % 2], verbs[1 - window % 2]
        first()
        with pytest.raises(RecordingError, match="expected one kind of 'k' until its export"):
            second()
        assert ["k"] == [spec.key for spec in drain([recorder]).specs]


def test_a_stat_said_again_binds_anew_where_scope_or_mask_changed(recorder):
    """The same name in another scope, and after another registration, means another mask."""
    name = "n"
    recorder.denominator({name: mask(1, 1)})
    with recorder.scope("inner"):
        recorder.denominator({name: mask(1, 0)})
    for _ in range(2):
        recorder.stat(name, {"k": torch.ones(2)})
        with recorder.scope("inner"):
            recorder.stat(name, {"k": torch.ones(2)})
            recorder.stat(name, {"k": torch.ones(2)})
        recorder.denominator({name: mask(0, 0)})
    found = rows(drain([recorder]))
    assert [0, 2] == sorted(int(row[moments.COUNT]) for row in found["k"])
    assert [1] * 4 == [int(row[moments.COUNT]) for row in found["inner/k"]]
