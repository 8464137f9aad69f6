"""Quantiles asked of a stat: the same on all ranks in one collective, and the same out of the log."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aggregator
import eventlog
from aggregator import collective, merge_worker_stats, open_run, wire
from aggregator.stats_tracker import DistributedStatsTracker, ReduceType
from eventlog import arrays, errors, histogram
from replay import MemoryBackend, play
from tests import players
from tests.gloo import Ranks
from tests.players import group_of

WORLD = 3
ASKED = (0.5, 0.999)
NAMES = ["x/p50", "x/p99.9"]
ALL = (0, 1, 2)
# Of rank 1 and 2: what is selected has the same count, sum and extremes, and other medians.
UNEQUAL = [[], [0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 0.0, 10.0], [0.0, 1.0, 1.5, 0.0, 3.5, 4.0, 0.0, 10.0]]

Numbers = dict[str, float]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as world:
        world.run(meet)
        yield world


@pytest.fixture
def tracker() -> DistributedStatsTracker:
    return DistributedStatsTracker()


def values_of(rank: int, n: int = 500) -> Any:
    """Return the values that a rank records."""
    return np.random.default_rng(rank).standard_normal(n * (1 + rank)).astype(np.float32) * 10**rank


def record(tracker: Any, values: Any, asked: Any = ASKED, key: str = "x", **options: Any) -> None:
    """Record values of which every third one is masked out."""
    tensor = torch.as_tensor(np.asarray(values))
    tracker.denominator(n=torch.arange(len(tensor)) % 3 > 0)
    tracker.stat("n", quantiles=asked, **{key: tensor}, **options)


def selected(values: Any) -> Any:
    """Return what `record` selects."""
    return np.asarray(values)[np.arange(len(values)) % 3 > 0]


def near(exact: Any, found: float) -> bool:
    """Whether a quantile lies within a percent."""
    return abs(found - exact) <= 0.0101 * abs(exact)


def quantiles_in(numbers: Any) -> list[float]:
    return [numbers[name] for name in NAMES]


def histogram_quantiles(values: Any) -> list[float]:
    """Return what the histogram says of values that are all in one place."""
    return histogram.quantiles(histogram.of(values), eventlog.moments.of(values), ASKED)


# -- what runs on the ranks ------------------------------------------------------------------------


def meet(rank: int) -> None:
    players.meet(rank)


def exports(rank: int, gather_bytes: int, times: int, run: str | None = None) -> tuple[list[Numbers], int]:
    """Record and export over all ranks; return also how many collectives the last export took."""
    usual, wire.GATHER_BYTES = wire.GATHER_BYTES, gather_bytes
    log = None if run is None else eventlog.start(run, role="actor", rank=rank, world_size=WORLD)
    if log is not None and rank == 0:
        log.claim_attempt()
    tracker, told, before = DistributedStatsTracker(), [], 0
    try:
        for step in range(times):
            record(tracker, values_of(rank) + step)
            tracker.scalar(loss=1.0)
            before = collective.count()
            told.append(tracker.export(reduce_group=group_of(rank, (ALL,))))
            if log is not None:
                log.commit(0, step, step, [told[-1]] if rank == 0 else ())
        return told, collective.count() - before
    finally:
        wire.GATHER_BYTES = usual
        eventlog.stop()


def some_ranks(rank: int) -> list[Numbers]:
    """Ranks 1 and 2 hold the key, then only rank 2, then nobody; rank 0 holds another one."""
    tracker, told = DistributedStatsTracker(), []
    for step in range(3):
        if rank > step:
            record(tracker, values_of(rank))
        if rank == 0:
            record(tracker, values_of(9), key="y")
        told.append(tracker.export(reduce_group=group_of(rank, (ALL,))))
    return told


def disagreeing(rank: int) -> list[Numbers | str]:
    """Ranks ask different quantiles; then the same."""
    tracker, told = DistributedStatsTracker(), []
    for asked in ((0.5, 0.9) if rank == 1 else 0.5, 0.5):
        record(tracker, values_of(rank), asked)
        try:
            told.append(tracker.export(reduce_group=group_of(rank, (ALL,))))
        except errors.AgreementError as error:
            told.append(str(error))
    return told


def own_group(rank: int) -> Numbers:
    """The key is reduced over ranks 0 and 1, and over 2 alone; the export over all."""
    tracker = DistributedStatsTracker()
    record(tracker, values_of(rank), reduce_group=group_of(rank, ((0, 1), (2,))))
    record(tracker, values_of(rank), key="y")
    return tracker.export(reduce_group=group_of(rank, (ALL,)))


def copies(rank: int, gather_bytes: int, values: Any = None) -> Numbers:
    """Ranks 1 and 2 hold the same values, which are declared as copies; or those given."""
    usual, wire.GATHER_BYTES = wire.GATHER_BYTES, gather_bytes
    tracker = copy_of(values_of(0) if values is None else values[rank]) if rank else DistributedStatsTracker()
    try:
        return tracker.export(reduce_group=group_of(rank, (ALL,)))
    finally:
        wire.GATHER_BYTES = usual


def copy_of(values: Any) -> DistributedStatsTracker:
    """Return a tracker that holds values declared as copies."""
    tracker = DistributedStatsTracker()
    tracker.declare("x", "n", spread="replicated")
    record(tracker, values)
    return tracker


def unequal_copies(rank: int, gather_bytes: int) -> str:
    try:
        return str(copies(rank, gather_bytes, UNEQUAL))
    except errors.AgreementError as error:
        return str(error)


# -- over ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gathered", "summed"])
def test_all_ranks_read_the_quantiles_of_all_values(ranks: Ranks, form: str) -> None:
    """Within 1 % of numpy's over the selected values of all ranks, in the steady state's collectives."""
    answers = ranks.run(exports, wire.GATHER_BYTES if form == "gathered" else 0, 3)
    for step in range(3):
        pooled = np.concatenate([selected(values_of(rank) + step) for rank in range(WORLD)])
        for told, _ in answers:
            assert answers[0][0][step] == told[step]
            assert ["x/avg", "x/min", "x/max", *NAMES] == [name for name in told[step] if name[0] == "x"]
            assert all(near(np.quantile(pooled, q), told[step][f"x/p{q * 100:g}"]) for q in ASKED)
    assert {1 if form == "gathered" else 2} == {count for _, count in answers}


def test_both_forms_of_the_wire_say_the_same_to_the_bit(ranks: Ranks) -> None:
    """Counts are exact in either."""
    gathered, summed = (ranks.run(exports, size, 1)[0][0][0] for size in (wire.GATHER_BYTES, 0))
    assert quantiles_in(gathered) == quantiles_in(summed)


def test_ranks_may_lack_the_key(ranks: Ranks) -> None:
    """Quantiles are those of the ranks that hold it; where nobody does they are absent (report c22)."""
    told = ranks.run(some_ranks)
    for answers in told:
        for step, holders in enumerate([(1, 2), (2,)]):
            pooled = np.concatenate([selected(values_of(rank)) for rank in holders])
            assert near(np.quantile(pooled, 0.5), answers[step]["x/p50"])
        assert not any(name.startswith("x") for name in answers[2])
        assert all(near(np.quantile(selected(values_of(9)), 0.5), said["y/p50"]) for said in answers)


def test_ranks_that_ask_different_quantiles_all_hear_of_it(ranks: Ranks) -> None:
    """One error that names the key, what was asked and by whom; then all goes on."""
    for error, later in ranks.run(disagreeing):
        assert "key 'x': expected the same on all ranks, got stat avg_min_max over 'n' with p50 on" in error
        assert "with p50 on ranks 0, 2 but stat avg_min_max over 'n' with p50 p90 on rank 1" in error
        assert "x/p50" in later


def test_a_key_with_a_group_of_its_own(ranks: Ranks) -> None:
    """Its quantiles are those of that group, beside others' of all ranks."""
    everyone = np.concatenate([selected(values_of(rank)) for rank in range(WORLD)])
    both = np.concatenate([selected(values_of(rank)) for rank in (0, 1)])
    for told, own in zip(ranks.run(own_group), (both, both, selected(values_of(2))), strict=True):
        assert near(np.quantile(own, 0.5), told["x/p50"])
        assert near(np.quantile(everyone, 0.5), told["y/p50"])


@pytest.mark.parametrize("form", ["gathered", "summed"])
def test_copies_are_counted_once(ranks: Ranks, form: str) -> None:
    """The quantiles of replicated values are those of one copy (report c4)."""
    values = selected(values_of(0))
    for told in ranks.run(copies, wire.GATHER_BYTES if form == "gathered" else 0):
        assert len(values) == told["n"]
        assert histogram_quantiles(values) == quantiles_in(told)


@pytest.mark.parametrize("form", ["gathered", "summed"])
def test_copies_that_differ_in_their_quantiles_alone_are_refused(ranks: Ranks, form: str) -> None:
    """Equal moments do not make values equal: their quantiles would be of no rank."""
    for told in ranks.run(unequal_copies, wire.GATHER_BYTES if form == "gathered" else 0):
        assert "key 'x': expected the same on all ranks (replicated), got other values of the same" in told
        assert "x/avg = 4.0, x/min = 1.0, x/max = 10.0 (export" in told
    with pytest.raises(errors.MergeError, match=r"same on all workers \(replicated\), got different 'x'"):
        merge_worker_stats([copy_of(values).export() for values in UNEQUAL[1:]])


# -- the log ---------------------------------------------------------------------------------------


def test_the_log_says_the_same_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    """Recomputed from the payload of all ranks, quantiles equal the committed ones; replayed, too."""
    (told, _), *_ = ranks.run(exports, wire.GATHER_BYTES, 3, str(tmp_path))
    with open_run(tmp_path) as run:
        rows = run.metrics(NAMES, source="recomputed").to_pylist()
        assert [(s, n, told[s][n]) for s in range(3) for n in NAMES] == [
            (row["step"], row["key"], row["value"]) for row in rows
        ]
        assert not any(row["differs"] or row["incomplete"] for row in rows)
        assert not any(row["differs"] for row in run.metrics(source="recomputed").to_pylist())
        assert run.metrics()["key"].unique().to_pylist() == sorted(told[0])
    mine = [MemoryBackend(), MemoryBackend()]
    for backend, source in zip(mine, ("committed", "recomputed"), strict=True):
        play(tmp_path, [backend], source=source, cursors=tmp_path / source)
    committed, recomputed = ([quantiles_in(metrics) for _, metrics, _ in each.rows] for each in mine)
    assert committed == recomputed == [quantiles_in(told[step]) for step in range(3)]


def test_the_histogram_can_be_asked_of_the_log(ranks: Ranks, tmp_path: Path) -> None:
    """`histogram(bins="log")` are the counts that live quantiles were read from, of any recorded key."""
    ranks.run(exports, wire.GATHER_BYTES, 2, str(tmp_path))
    with open_run(tmp_path) as run:
        rows = run.histogram("x", bins="log", by="step").to_pylist()
    for step in range(2):
        pooled = np.concatenate([selected(values_of(rank) + step) for rank in range(WORLD)])
        counts = histogram.of(pooled)
        left, right = histogram.bounds(np.flatnonzero(counts))
        found = [(row["left"], row["right"], row["count"]) for row in rows if row["step"] == step]
        assert list(zip(left, right, counts[counts > 0], strict=True)) == found
        assert all(np.sum((left <= v) & (v <= right)) == 1 for v in pooled[:20])


@pytest.mark.parametrize("payload", ["off", "sample:16"])
def test_without_all_values_quantiles_are_not_recomputed(
    tracker: DistributedStatsTracker, tmp_path: Path, payload: str
) -> None:
    """What the payload does not hold is not made up: an incomplete row without a value; the commit stands."""
    log = eventlog.start(tmp_path, role="actor", payload=payload)
    log.claim_attempt()
    record(tracker, values_of(0))
    tracker.stat("n", few=torch.ones(500), quantiles=0.5)
    log.commit(0, 0, 0, [stats := tracker.export()])
    eventlog.stop()
    with open_run(tmp_path) as run:
        assert stats == {row["key"]: row["value"] for row in run.metrics().to_pylist()}
        rows = {row["key"]: row for row in run.metrics(source="recomputed").to_pylist()}
    assert stats.keys() == rows.keys()
    for name, row in rows.items():
        assert ("/p" in name) == (row["value"] is None) == row["incomplete"]
        assert not row["differs"]


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduce_type", "names"),
    [
        (ReduceType.AVG_MIN_MAX, ["n", "x/avg", "x/min", "x/max", "x/p50"]),
        *[(kind, ["n", "x", "x/p50"]) for kind in (ReduceType.AVG, ReduceType.SUM, ReduceType.MIN)],
    ],
)
def test_quantiles_stand_beside_what_a_stat_exports(
    tracker: DistributedStatsTracker, reduce_type: ReduceType, names: list[str]
) -> None:
    """Any reduce type can have them."""
    record(tracker, np.ones(4), 0.5, reduce_type=reduce_type)
    assert names == list(tracker.export())


def test_names_tell_quantiles_apart(tracker: DistributedStatsTracker) -> None:
    """Names are percents, exact, as often as they are asked: once."""
    record(tracker, np.ones(4), (0.07, 1, 0.999, 0.5, 0.9999999, 0, 0.5))
    names = ["p0", "p7", "p50", "p99.9", "p99.99999", "p100"]
    assert names == [name.removeprefix("x/") for name in tracker.export() if name.startswith("x/p")]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([9.0, 1.0, np.nan, 9.0], np.nan),
        ([9.0, 1.0, np.inf, 9.0], np.inf),
        ([np.nan, 3.0, 3.0, np.nan], 3.0),
    ],
)
def test_what_is_selected_decides(tracker: DistributedStatsTracker, values: Any, wanted: float) -> None:
    """A selected NaN makes them NaN, infinities count, what is masked out is not looked at (report c20)."""
    record(tracker, values, 0.6)
    np.testing.assert_equal(wanted, tracker.export()["x/p60"])


def test_of_nothing_there_is_no_quantile(tracker: DistributedStatsTracker) -> None:
    """Without a selected value it is absent; a recorded sum is 0 (report c2)."""
    record(tracker, [7.0], reduce_type=ReduceType.SUM)
    assert {"n": 0, "x": 0.0} == tracker.export()


def test_calls_and_dtypes_of_a_window_are_put_together(tracker: DistributedStatsTracker) -> None:
    """Several calls, in half, single and double precision, under several masks, are one distribution."""
    parts = [values_of(0).astype(np.float16), values_of(1), values_of(2).astype(np.float64)]
    for part in parts:
        record(tracker, part)
    pooled = np.concatenate([selected(part).astype(np.float64) for part in parts])
    assert histogram_quantiles(pooled) == quantiles_in(tracker.export())


def test_on_a_device_they_are_counted_there(
    tracker: DistributedStatsTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on a device (here: the CPU taken for one) are counted with their moments, to the same end."""
    monkeypatch.setattr(arrays, "on_host", lambda value: not isinstance(value, torch.Tensor))
    values = values_of(0)
    record(tracker, values)
    tracker.stat("n", plain=torch.ones(500))
    tracker.stat("n", y=torch.from_numpy(-values), quantiles=0.5)
    assert histogram_quantiles(selected(values)) == quantiles_in(tracker.export("x"))
    rest = tracker.export()
    assert [-histogram_quantiles(selected(values))[0]] == [rest["y/p50"]]
    assert not any(name.startswith(("x", "plain/p")) for name in rest)


def test_one_key_alone_and_without_reset(tracker: DistributedStatsTracker) -> None:
    """An export without reset, of one key or of all, says the same of it again; reset takes it."""
    record(tracker, values_of(0))
    tracker.stat("n", y=torch.ones(500), quantiles=ASKED)
    wanted = histogram_quantiles(selected(values_of(0)))
    for export in (
        lambda: tracker.export("x", reset=False),
        lambda: tracker.export(reset=False),
        lambda: tracker.export("x"),
    ):
        assert wanted == quantiles_in(export())
    assert {"y/avg", "y/min", "y/max", "y/p50", "y/p99.9", "n"} == tracker.export().keys()


def test_keys_without_quantiles_have_no_histogram(tracker: DistributedStatsTracker) -> None:
    """Nothing is counted where nothing is asked, and nothing more is sent."""
    tracker.denominator(n=torch.ones(4, dtype=torch.bool))
    tracker.stat("n", x=torch.ones(4))
    assert {} == eventlog.drain([tracker.recorder], reset=False).histograms
    (part,) = tracker.export().parts
    assert part.counts is None
    vector = np.zeros(3, np.int64)
    assert wire.joined(vector, histogram.empty(0)) is vector


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (1.5, "quantiles from 0 to 1, got 1.5"),
        ((0.5, float("nan")), "quantiles from 0 to 1, got nan"),
        ("p50", "quantiles .* got str 'p50'"),
    ],
)
def test_what_is_no_quantile_is_refused(tracker: DistributedStatsTracker, asked: Any, message: str) -> None:
    """A refused call records nothing."""
    tracker.denominator(n=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError if "got str" not in message else TypeError, match=message):
        tracker.stat("n", x=torch.ones(2), quantiles=asked)
    assert {"n": 2} == tracker.export()


def test_shares_have_no_quantiles(tracker: DistributedStatsTracker) -> None:
    """No rank ever saw the number that the shares add up to."""
    tracker.declare("x", spread="shares")
    tracker.denominator(n=torch.ones(2, dtype=torch.bool))
    with pytest.raises(errors.RecordingError, match="no quantiles of 'x', whose values are shares"):
        tracker.stat("n", x=torch.ones(2), quantiles=0.5)


def test_a_stat_may_still_be_called_quantiles(tracker: DistributedStatsTracker) -> None:
    """A tensor under that name is a stat, as with AReaL."""
    tracker.denominator(n=torch.ones(2, dtype=torch.bool))
    tracker.stat("n", quantiles=torch.tensor([1.0, 3.0]), reduce_type=ReduceType.AVG)
    assert {"n": 2, "quantiles": 2.0} == tracker.export()


@pytest.mark.parametrize("asked", [np.array([0.5, 0.9, 0.99]), torch.tensor([0.5, 0.9, 0.99])])
def test_an_array_of_quantiles_is_told_what_to_pass(tracker: DistributedStatsTracker, asked: Any) -> None:
    """It is taken for a stat, and where it cannot be one the error says how quantiles are asked."""
    tracker.denominator(n=torch.ones(2, dtype=torch.bool))
    with pytest.raises(
        errors.RecordingError, match=r"for 'quantiles', got \(3,\); ask for .* as a tuple of f"
    ):
        tracker.stat("n", x=torch.ones(2), quantiles=asked)


def test_one_process_that_asks_differently_is_told(tracker: DistributedStatsTracker) -> None:
    """Within a window a key is one thing."""
    record(tracker, values_of(0), 0.5)
    with pytest.raises(errors.RecordingError, match=r"one kind of 'x' until its export, got .*\(0.5,\) and"):
        record(tracker, values_of(0), 0.9)


# -- workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("send", ["as it is", "json", "pickle"])
def test_exports_of_workers_merge(send: str) -> None:
    """Merging the exports of workers says what one of all would have said, to the bit."""
    sent = []
    for rank in range(WORLD):
        tracker = DistributedStatsTracker()
        record(tracker, values_of(rank))
        export = tracker.export()
        if send == "json":
            export = aggregator.Export.from_json(export.to_json())
        if send == "pickle":
            export = pickle.loads(pickle.dumps(export))
        sent.append(export)
    pooled = np.concatenate([selected(values_of(rank)) for rank in range(WORLD)])
    merged = merge_worker_stats([*sent, {}])
    assert histogram_quantiles(pooled) == quantiles_in(merged)
    assert merged == merge_worker_stats([merged]) == merge_worker_stats(sent[::-1])


def test_workers_that_ask_different_quantiles_are_told() -> None:
    """Nobody gets half of what was asked."""
    sent = []
    for asked in (0.5, (0.5, 0.9)):
        tracker = DistributedStatsTracker()
        record(tracker, values_of(0), asked)
        sent.append(tracker.export())
    with pytest.raises(errors.MergeError, match=r"key 'x': .* with p50 but stat .* with p50 p90"):
        merge_worker_stats(sent)


def test_bare_quantiles_cannot_be_merged(tracker: DistributedStatsTracker) -> None:
    """A plain dict has lost the histogram: its quantiles are refused by name."""
    record(tracker, values_of(0))
    plain = dict(tracker.export())
    with pytest.raises(errors.MergeError, match="'x/p50'"):
        merge_worker_stats([plain])
