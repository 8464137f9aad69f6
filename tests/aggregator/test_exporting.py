"""An export that fails before its collective fails on all ranks, mixes no steps, loses nothing unsaid."""

import os

import numpy as np
import pytest
import torch

import eventlog
from aggregator import collective, exporting, open_run, stats_tracker, wire
from aggregator.stats_tracker import DistributedStatsTracker
from eventlog import drained
from eventlog.errors import RecordingError, StepError
from eventlog.schema import LossCause
from tests import gloo


@pytest.fixture(scope="module")
def ranks():
    with gloo.Ranks(2) as world:
        yield world


def new_group(gather_bytes=1 << 22):
    """Make a new group, a fresh channel, with one form of the wire."""
    wire.GATHER_BYTES = gather_bytes
    return torch.distributed.new_group([0, 1])


def came_to(call):
    """Return what an export came to: its numbers, or its error as text."""
    try:
        return dict(call())
    except BaseException as error:  # noqa: BLE001 - an interrupt too
        return f"{type(error).__name__}: {error}"


def failing(where, name, error):
    """Let the next call of a function raise, and only that."""
    whole = getattr(where, name)

    def fail(*_args, **_kwargs):
        setattr(where, name, whole)
        raise error

    setattr(where, name, fail)


def record(value):
    """Record a mask, a stat and a scalar."""
    stats_tracker.denominator(m=torch.ones(2, dtype=torch.bool))
    stats_tracker.stat("m", x=torch.full((2,), float(value)))
    stats_tracker.scalar(w=value)


def _without_a_directory(rank, folder, gather_bytes):
    """Export with a log that rank 1 cannot open at first."""
    eventlog.process._environment_read = False
    blocked = folder / f"blocked-{rank}"
    if rank == 1:
        blocked.touch()
    os.environ["AREAL_METRICS_DIR"] = str(blocked / "run" if rank == 1 else folder / "run")
    group, found = new_group(gather_bytes), []
    for step in range(3):
        if rank == 0 or step:
            stats_tracker.scalar(w=step)
        found.append(came_to(lambda: stats_tracker.export_all(reduce_group=group)))
        if step == 0:
            blocked.unlink(missing_ok=True)
    eventlog.stop()
    del os.environ["AREAL_METRICS_DIR"]
    return found


@pytest.mark.parametrize("gather_bytes", [1 << 22, 0])
def test_a_log_that_cannot_be_opened_fails_the_export_on_all_ranks(ranks, tmp_path, gather_bytes):
    """Nobody waits, and the steps after it are not mixed with that one."""
    first, second = ranks.run(_without_a_directory, tmp_path, gather_bytes)
    later = [{"w": 1.0, "w__count": 2}, {"w": 2.0, "w__count": 2}]
    assert (later, later) == (first[1:], second[1:])
    assert "PeerError: expected no failure before the export, got rank 1: NotARunError: expected" in first[0]
    assert second[0].startswith("NotARunError: expected a directory, got a file")


def _with_a_wrong_key(rank, gather_bytes, wrong):
    group, found = new_group(gather_bytes), []
    for step, key in enumerate(("w", wrong if rank == 0 else "w", "w")):
        stats_tracker.scalar(w=rank + 10 * step, v=1)
        found.append(came_to(lambda key=key: stats_tracker.export(key, reduce_group=group)))
    return found, came_to(lambda: stats_tracker.export_all(reduce_group=group))


@pytest.mark.parametrize("gather_bytes", [1 << 22, 0])
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("/", "RecordingError: expected a non-empty key, got '/'"),
        (3, "RecordingTypeError: expected a key (str), got int 3"),
    ],
)
def test_a_key_that_is_none_fails_the_export_on_all_ranks(ranks, gather_bytes, wrong, text):
    """The others hear of it, the channel stays open, and what they exported is in no later number."""
    (first, rest), (second, other) = ranks.run(_with_a_wrong_key, gather_bytes, wrong)
    assert text == first[1]
    assert f"got rank 0: {text}" in second[1]
    assert first[2] == second[2] == {"w": 20.5, "w__count": 2}
    assert rest == other == {"v": 1.0, "v__count": 6}


def _with_a_wrong_group(rank, used, sync):
    """Export three times, the second time over what is no group on rank 1."""
    group, found = new_group(), []
    for step in range(3) if used else range(1, 3):
        record(10**step)
        wrong = "no group" if rank == 1 and step == 1 else group
        groups = {"reduce_group": wrong, "key_sync_group": group if sync else None}
        found.append(came_to(lambda groups=groups: stats_tracker.export_all(**groups)))
    return found[-2:]


@pytest.mark.parametrize("used", [True, False])
def test_a_wrong_group_is_an_error_on_all_ranks(ranks, used):
    """Ranks that wait in the right one get nobody's next step, also where it is the group's first export."""
    first, second = ranks.run(_with_a_wrong_group, used, False)
    refused = "AgreementError: expected a process group that contains this rank, got str 'no group'"
    assert refused == second[0]
    number = 1 + used
    both = f"got export number {number} on rank 0 but export number {number + 1} on rank 1"
    assert both in first[0]
    assert both in second[1]
    assert "no export over this group is possible any more" in first[1]


def test_a_wrong_group_beside_a_right_one_is_heard_of(ranks):
    """The group that is entered tells of it, and is as good as before."""
    first, second = ranks.run(_with_a_wrong_group, True, True)
    assert "got rank 1: AgreementError: expected a process group" in first[0]
    assert "AgreementError: expected a process group" in second[0]
    assert 100.0 == first[1]["w"] == second[1]["w"]


FAULTS = {
    "drain": (drained, "collect", MemoryError("no room")),
    "settle": (drained, "settle", RuntimeError("device-side assert")),
    "pool": (exporting, "_pooled", MemoryError("no room")),
    "log": (eventlog.Log, "_put", OSError("no disk")),
    "groups": (collective, "_route", ValueError("no route")),
}


def _with_a_fault(rank, path, name):
    group, found = new_group(), []
    log = eventlog.start(path, role="actor", rank=rank, world_size=2)
    if rank == 0:
        log.claim_attempt()
    for step in range(3):
        record(4 + step)
        if rank == 1 and step == 0:
            failing(*FAULTS[name])
        found.append(came_to(lambda: stats_tracker.export_all(reduce_group=group)))
        log.commit(0, step, step, [found[-1]] if rank == 0 and step else [])
    eventlog.stop()
    return found


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.filterwarnings("ignore:expected step 0 on disk")
def test_whatever_fails_before_the_collective_fails_on_all_ranks(ranks, tmp_path, name):
    """The window is in nobody's next numbers, which are those of the log."""
    first, second = ranks.run(_with_a_fault, tmp_path / "run", name)
    error = FAULTS[name][2]
    text = f"{type(error).__name__}: {error}"
    assert f"got rank 1: {text} (export 1 of the group of ranks 0, 1)" in first[0]
    assert text == second[0]
    assert first[1:] == second[1:]
    assert [(5.0, 4, 2), (6.0, 4, 2)] == [(found["w"], found["m"], found["w__count"]) for found in first[1:]]
    with open_run(tmp_path / "run") as run:
        told = run.metrics(["w", "m", "x/avg"], source="recomputed").to_pylist()
        kept = run.sql("select count(*) n from records where step = 0 and key = 'w' and rank = 0").to_pylist()
    expected = [(s, key, found[key]) for s, found in enumerate(first[1:], 1) for key in ("m", "w", "x/avg")]
    assert expected == sorted((row["step"], row["key"], row["value"]) for row in told)
    assert [{"n": 1}] == kept


def _with_an_interrupt(rank, name):
    group, found = new_group(), []
    for step in range(3):
        stats_tracker.scalar(w=step)
        if rank == 1 and step == 0:
            failing(*FAULTS[name][:2], KeyboardInterrupt())
            found.append(came_to(lambda: stats_tracker.export_all(reduce_group=group)))
            continue
        found.append(came_to(lambda: stats_tracker.export_all(reduce_group=group)))
    return found


@pytest.mark.parametrize("name", ["drain", "settle", "pool"])
def test_an_interrupted_export_is_seen_by_the_next_one(ranks, name):
    """The peers wait in the step before: they are told instead of being given another step's numbers."""
    first, second = ranks.run(_with_an_interrupt, name)
    assert "KeyboardInterrupt: " == second[0]
    shifted = "DesyncError: expected all ranks at the same export, got export number 1 on rank 0 but export "
    assert first[0].startswith(shifted + "number 2 on rank 1")
    assert first[0].split(" (")[0] == second[1].split(" (")[0]
    assert all("no export over this group is possible any more" in found for found in first + second[1:])


def test_a_drain_that_fails_half_way_hands_over_what_it_has(tmp_path):
    """Its window is incomplete, the loss is counted with its step, and the next window has none of it."""
    log = eventlog.start(tmp_path)
    log.claim_attempt()
    stats_tracker.get("rollout").scalar(r=1)
    record(4)
    whole, calls = drained.collect, []

    def collect(*args):
        calls.append(args)
        if len(calls) == 2:  # the second tracker's
            drained.collect = whole
            raise MemoryError("no room")
        whole(*args)

    drained.collect = collect
    with pytest.raises(MemoryError, match="no room"):
        stats_tracker.export_all()
    with pytest.warns(UserWarning, match="expected step 0 on disk"):
        assert not log.commit(0, 0, 0)
    record(5)
    numbers = stats_tracker.export_all()
    log.commit(0, 1, 1, [numbers])
    assert {"m": 2, "w": 5.0, "w__count": 1, "x/avg": 5.0, "x/min": 5.0, "x/max": 5.0} == numbers
    (loss,) = log.losses()
    assert (LossCause.ENCODE_FAILED, 1, 0) == (loss.cause, loss.rows, loss.step)
    eventlog.stop()
    with open_run(tmp_path) as run:
        rows = run.sql("select step, key, sum, complete from records order by all").to_pylist()
    expected = [(step, key, value, bool(step)) for step, values in enumerate(
        ({"m": 2.0, "w": 4.0, "x": 8.0}, {"m": 2.0, "w": 5.0, "x": 10.0})
    ) for key, value in values.items()]  # fmt: skip
    assert expected == [tuple(row.values()) for row in rows]


@pytest.mark.parametrize("fail_at", range(12))
def test_a_record_is_logged_as_a_whole_or_not_at_all(monkeypatch, fail_at):
    """Wherever memory runs out, each record is in the frame or, with reset=False, left for the next one."""
    tracker = DistributedStatsTracker()
    tracker.denominator(m=torch.ones(2, dtype=torch.bool))
    tracker.stat("m", x=torch.ones(2), y=torch.ones(2, dtype=torch.float64))
    tracker.scalar(w=1)
    tracker.counter(c=1)
    calls = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise MemoryError("no room")
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as broken:
        for name in ("_place", "_keep", "add_series", "seal"):
            broken.setattr(eventlog.frame.Frame, name, counted(getattr(eventlog.frame.Frame, name)))
        first = eventlog.drain([tracker.recorder], reset=False)
    frame = first.frame
    columns = (frame.calls.specs, frame.calls.times, frame.calls.steps, frame.shapes, frame.denominator_ids)
    assert [len(frame)] * 6 == [*map(len, columns), len(frame.moments)]
    rest = eventlog.drain([tracker.recorder])
    assert 0 == first.lost == rest.lost
    assert ["c", "m", "w", "x", "y"] == sorted(
        s.key for each in (first, rest) for s in each.frame.calls.specs
    )
    assert ["c", "m", "w", "x", "y"] == sorted(spec.key for spec in rest.specs)


def test_an_interrupt_leaves_its_window_in_the_log(tmp_path):
    """What was collected until then is there, and in no later numbers."""
    log = eventlog.start(tmp_path)
    record(4)
    failing(drained, "_histograms", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        stats_tracker.export_all()
    assert {} == stats_tracker.export_all()
    log.commit(0, 0, 0)
    eventlog.stop()
    with open_run(tmp_path) as run:
        assert [("m",), ("w",), ("x",)] == [
            tuple(row.values()) for row in run.sql("select key from records order by 1").to_pylist()
        ]


def test_alone_nothing_is_taken_by_an_export_that_cannot_begin():
    """A wrong key or step, without others, leaves the window for the next export."""
    stats_tracker.scalar(w=1)
    with pytest.raises(RecordingError, match="expected a non-empty key"):
        stats_tracker.export("/")
    with pytest.raises(StepError, match="expected a step"):
        stats_tracker.export_all(step=-1)
    assert {"w": 1.0, "w__count": 1} == stats_tracker.export_all()


# A signalling NaN, half of the floats' range, and what is next to zero, in each type.
BITS = {
    np.float16: (np.uint16, 0x7D00),
    np.float32: (np.uint32, 0x7FA00000),
    np.float64: (np.uint64, 0x7FF4 << 48),
}
ODD = {
    "signalling NaN": lambda kind: np.array([BITS[kind][1]] * 2, BITS[kind][0]).view(kind),
    "overflow beside infinity": lambda kind: np.array([np.finfo(kind).max] * 2 + [np.inf], kind),
    "underflow": lambda kind: np.array([np.finfo(kind).smallest_subnormal, 0, 0], kind),
}


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("setting", ["warn", "raise"])
def test_numpy_s_errors_cost_no_window(tmp_path, monkeypatch, kind, name, setting):
    """Whatever numpy is told to do of floating-point errors, an export and a spill go through.

    A warning is an error here.
    """
    values = ODD[name](kind)
    eventlog.start(tmp_path)
    monkeypatch.setattr(eventlog.overflow.valve, "room", 0)  # from the second window on
    with np.errstate(all=setting):
        for spills in (False, True):
            stats_tracker.denominator(m=np.ones(len(values), np.bool_))
            stats_tracker.stat("m", x=values, quantiles=0.5)
            stats_tracker.scalar(w=values[0])
            assert spills is bool(stats_tracker.DEFAULT_TRACKER.recorder.spilled.rows)
            stats = stats_tracker.export_all()
            assert len(values) == stats["m"]
            np.testing.assert_equal(stats["x/max"], float(values.max()))
