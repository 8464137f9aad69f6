"""Real ranks over gloo come to the same numbers, or to the same error, and never wait for ever."""

import gc
import math
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist

from aggregator import collective, wire
from aggregator.merge import Export
from aggregator.stats_tracker import DistributedStatsTracker, ReduceType
from eventlog import Kind, Spread, errors, moments
from tests.gloo import Ranks
from tests.runs import Spec

WORLD = 3
FORMS = [wire.GATHER_BYTES, 0]
FORM_NAMES = ["gathered", "summed"]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(WORLD) as world:
        yield world


# What runs on the ranks: functions of the rank, found by name in this file.


@contextmanager
def form(gather_bytes):
    """Use one form of the wire: gathered up to so many bytes, else summed."""
    usual, wire.GATHER_BYTES = wire.GATHER_BYTES, gather_bytes
    try:
        yield
    finally:
        wire.GATHER_BYTES = usual


def group_of(*ranks):
    """Make a new group, a fresh channel; all ranks call it, non-members get None."""
    group = dist.new_group(list(ranks or range(dist.get_world_size())))
    return group if dist.get_rank() in (ranks or range(dist.get_world_size())) else None


def reduce(values, group, sync=None, **options):
    """Reduce {spec or key: values} and return the outcome."""
    specs = [spec if isinstance(spec, Spec) else Spec(spec) for spec in values]
    rows = [moments.of(np.array(v, np.float64)) for v in values.values()]
    table = np.stack(rows) if rows else moments.empty(0)
    given = {"operation": "export", "session": f"session{dist.get_rank()}", **options}
    return collective.reduce(specs, table, group, sync, **given)


def numbers(values, group, sync=None, **options):
    """Reduce and return the export as a dict, or the error as text."""
    reduced = reduce(values, group, sync, **options)
    if reduced.error is not None:
        assert reduced.parts == ()
        return f"{reduced.outcome}: {reduced.error}"
    return dict(Export.of(reduced.parts))


def export_of(record, group):
    """Let `record` fill a fresh tracker and export it over the group."""
    tracker = DistributedStatsTracker()
    record(tracker)
    return dict(tracker.export(reduce_group=group))


def alike(results):
    """Return what all ranks returned, which must be the same."""
    for result in results[1:]:
        assert repr(results[0]) == repr(result)
    return results[0]


# -- the numbers -----------------------------------------------------------------------------------


def few_against_many(rank, group_ranks=(0, 1)):
    if (group := group_of(*group_ranks)) is None:
        return None
    mask = torch.arange(99) < (1, 99)[rank]

    def record(tracker):
        tracker.denominator(n=mask)
        tracker.stat("n", x=torch.full((99,), 1.0 - rank))

    return export_of(record, group)


def test_one_global_sum_over_one_global_count(ranks):
    """One token of 1.0 against 99 of 0.0 is 0.01 on all ranks, not a mean of means (report c2)."""
    found = alike(ranks.run(few_against_many)[:2])
    assert {"n": 100, "x/avg": pytest.approx(0.01), "x/min": 0.0, "x/max": 1.0} == found


def micro_batches(rank):
    group = group_of()

    def record(tracker):
        sizes = ([(10.0, 5)], [(6.0, 1)], [])[rank]
        for total, n in sizes:
            tracker.denominator(n_tokens=torch.ones(n, dtype=torch.bool))
            tracker.stat("n_tokens", ReduceType.AVG, loss=torch.full((n,), total / n))

    return export_of(record, group)


def test_accumulation_over_ranks_and_micro_batches(ranks):
    """Loss sums 10 over 5 tokens and 6 over 1 token are 16/6, not 4 (report c7)."""
    assert {"n_tokens": 6, "loss": pytest.approx(16 / 6)} == alike(ranks.run(micro_batches))


def missing_keys(rank):
    group = group_of()

    def record(tracker):
        if rank == 0:
            tracker.denominator(mask=torch.tensor([True, False]))
            tracker.stat("mask", a=torch.tensor([3.0, 9.0]))
        if rank < 2:
            tracker.scalar(b=float(rank))

    return export_of(record, group)


def test_ranks_may_lack_keys(ranks):
    """A key only one rank has, and a rank that has none: all get the same dict (report c14)."""
    expected = {"a/avg": 3.0, "a/min": 3.0, "a/max": 3.0, "mask": 1, "b": 0.5, "b__count": 2}
    assert expected == alike(ranks.run(missing_keys))


def orders(rank):
    keys = "abc" if rank == 0 else "cba"
    group = group_of()
    return [hash("a"), export_of(lambda t: [t.scalar(**{k: float(ord(k))}) for k in keys], group)]


def test_the_order_of_recording_and_the_hash_seed_do_not_matter(ranks):
    """Ranks that record in another order, in processes of other hash seeds, swap no values (report c17)."""
    results = ranks.run(orders)
    assert WORLD == len({seed for seed, _ in results})
    found = alike([stats for _, stats in results])
    assert {"a": 97.0, "b": 98.0, "c": 99.0} == {k: v for k, v in found.items() if len(k) == 1}


def extremes(rank):
    group = group_of()

    def record(tracker):
        tracker.denominator(n=torch.tensor([True, True]))
        tracker.stat("n", x=torch.tensor([[5.0, 9.0], [-3.0, 1.0], [0.0, 0.0]][rank]))

    return export_of(record, group)


def test_extremes_of_extremes(ranks):
    """Rank minima 5 and -3, maxima 9 and 1 give -3 and 9 (report c18)."""
    found = alike(ranks.run(extremes))
    assert (-3.0, 9.0) == (found["x/min"], found["x/max"])


def masked_out(rank):
    group = group_of()

    def record(tracker):
        tracker.denominator(some=torch.tensor([rank == 1, False]), none=torch.tensor([False, False]))
        tracker.stat("some", x=torch.tensor([2.0, math.nan]))
        tracker.stat("none", y=torch.tensor([math.nan, math.inf]))

    return export_of(record, group)


def test_a_rank_without_valid_tokens_adds_nothing(ranks):
    """Masked-out NaNs never count; a key nobody selected is absent, its denominator 0 (reports c20, c21)."""
    expected = {"none": 0, "some": 1, "x/avg": 2.0, "x/min": 2.0, "x/max": 2.0}
    assert expected == alike(ranks.run(masked_out))


def non_finite(rank):
    return numbers({"x": [[1.0], [math.nan], []][rank], "y": [[math.inf], [2.0], [2.0]][rank]}, group_of())


def test_real_nans_and_infinities_reach_every_rank(ranks):
    """One NaN among the selected makes the mean NaN wherever it sat; infinity stays infinite."""
    found = alike(ranks.run(non_finite))
    assert math.isnan(found["x"])
    assert (2, math.inf, 3) == (found["x__count"], found["y"], found["y__count"])


def big_counts(rank, gather_bytes):
    counts = moments.of_integers([1], [(16777217, 1, 2**53)[rank]])
    spec = Spec("n", Kind.DENOMINATOR, ReduceType.SUM)
    with form(gather_bytes):
        reduced = collective.reduce([spec], counts, group_of(), operation="export", session="s")
    return dict(Export.of(reduced.parts))


@pytest.mark.parametrize("gather_bytes", FORMS, ids=FORM_NAMES)
def test_counts_are_exact_on_the_wire(ranks, gather_bytes):
    """Token counts beyond float32 and float64 add exactly, in both forms of the wire (report c11)."""
    assert {"n": 2**53 + 16777218} == alike(ranks.run(big_counts, gather_bytes))


def beyond_int64(rank, gather_bytes):
    spec, found = Spec("n", Kind.COUNTER), []
    group = group_of()
    with form(gather_bytes):
        for number in (2**62, 2**61):
            counts = moments.of_integers([1], [number])
            reduced = collective.reduce([spec], counts, group, operation="export", session=f"s{rank}")
            found.append(dict(Export.of(reduced.parts)) or f"{reduced.outcome}: {reduced.error}")
    return found


@pytest.mark.parametrize("gather_bytes", FORMS, ids=FORM_NAMES)
def test_a_sum_that_int64_cannot_hold_is_an_error_on_every_rank(ranks, gather_bytes):
    """Exact sums are exact or nothing; the key is named, and the next export works."""
    error, later = alike(ranks.run(beyond_int64, gather_bytes))
    text = "ReductionError: expected exact sums over all ranks that fit int64, got more for 'n' (export 1"
    assert error.startswith(text)
    assert {"n": 3 * 2**61} == later


def spreads(rank, rate, gather_bytes):
    group = group_of()
    lr = Spec("lr", spread=Spread.REPLICATED)
    held = {lr: [rate if rank == 1 else 0.1]} if rank else {}
    with form(gather_bytes):
        found = numbers(held | {Spec("share", spread=Spread.SHARES): [(0.25, 0.5, 0.25)[rank]]}, group)
        return found, numbers({"next": [1.0]}, group)


@pytest.mark.parametrize("gather_bytes", FORMS, ids=FORM_NAMES)
def test_copies_are_checked_and_shares_summed(ranks, gather_bytes):
    """A learning rate on two ranks counts once, three shares make one number (report c4)."""
    found, _ = alike(ranks.run(spreads, 0.1, gather_bytes))
    assert {"lr": 0.1, "lr__count": 1, "share": 1.0, "share__count": 1} == found


@pytest.mark.parametrize("gather_bytes", FORMS, ids=FORM_NAMES)
def test_unequal_copies_are_an_error_on_every_rank(ranks, gather_bytes):
    """It names key, ranks and values, to ranks without the key too; the next export works (report c4)."""
    error, after = alike(ranks.run(spreads, 0.2, gather_bytes))
    assert error.startswith(
        "AgreementError: key 'lr': expected the same on all ranks (replicated), got "
        "lr = 0.2, lr__count = 1 on rank 1 but lr = 0.1, lr__count = 1 on rank 2"
    )
    assert {"next": 1.0, "next__count": 3} == after


# -- groups ----------------------------------------------------------------------------------------


def layouts(rank, data_parallel):
    """Count the tokens of 8 sequences of 4, split over sequences or (context parallel) along them."""
    everyone = group_of(0, 1)
    singles = [dist.new_group([r]) for r in range(WORLD)]
    if everyone is None:
        return None
    shape = (4, 4) if data_parallel else (8, 2)
    tracker = DistributedStatsTracker()
    tracker.denominator(n_tokens=torch.ones(shape, dtype=torch.bool), reduce_group=everyone)
    tracker.denominator(n_seqs=torch.ones(shape[0], dtype=torch.bool))
    group = everyone if data_parallel else singles[rank]
    return dict(tracker.export(reduce_group=group, key_sync_group=everyone))


@pytest.mark.parametrize("data_parallel", [True, False])
def test_counts_do_not_depend_on_the_parallel_layout(ranks, data_parallel):
    """Two data-parallel or two context-parallel ranks count the same tokens and sequences (report c12)."""
    assert {"n_tokens": 32, "n_seqs": 8} == alike(ranks.run(layouts, data_parallel)[:2])


def two_groups(rank):
    """Reduce over (0, 1) or (2,), synchronise over all; one key lives in each, one is labelled."""
    pair, single, everyone = dist.new_group([0, 1]), dist.new_group([2]), group_of()
    own = pair if rank < 2 else single
    tensor = Spec("tensor", label="0,1" if rank < 2 else "2")
    values = {"own": [float(rank)], tensor: [float(rank)], Spec("all", label="0,1,2"): [float(rank)]}
    before = collective.count()
    found = [numbers(values, own, everyone) for _ in range(3)]
    return found[0], found == [found[0]] * 3, collective.count() - before


def test_a_key_is_reduced_over_its_own_group(ranks):
    """Keys without a group follow reduce_group, labelled ones the group they name."""
    results = ranks.run(two_groups)
    pair = {"own": 0.5, "own__count": 2, "tensor": 0.5, "tensor__count": 2, "all": 1.0, "all__count": 3}
    single = {"own": 2.0, "own__count": 1, "tensor": 2.0, "tensor__count": 1, "all": 1.0, "all__count": 3}
    assert [pair, pair, single] == [found for found, _, _ in results]
    assert all(steady for _, steady, _ in results)
    assert [5 + 5, 5 + 5, 5] == [issued for _, _, issued in results]  # a group of one needs no wire


def same_group_twice(_):
    group = group_of()
    numbers({"x": [1.0]}, group, group)
    before = collective.count()
    return numbers({"x": [1.0]}, group, group), collective.count() - before


def test_one_group_in_both_roles_is_entered_once(ranks):
    """reduce_group and key_sync_group may be the same."""
    assert ({"x": 1.0, "x__count": 3}, 1) == alike(ranks.run(same_group_twice))


def stranger(_):
    group = dist.new_group([0, 1])
    everyone = group_of()
    try:
        named = collective.label(group)
    except errors.RecordingError as exc:
        named = str(exc)[:60]
    return named, numbers({"x": [1.0]}, group, everyone)


def test_a_group_without_this_rank_is_an_error_everywhere(ranks):
    """The other group is entered all the same, so that its ranks hear of it."""
    results = ranks.run(stranger)
    assert ["0,1", "0,1"] == [named for named, _ in results[:2]]
    assert results[2][0].startswith("expected a process group that contains this rank")
    assert all("expected a process group that contains this rank" in found for _, found in results)


def no_home(rank):
    group = group_of()
    values = {Spec("x", label="0,7"): [1.0]} if rank == 1 else {"y": [1.0]}
    return numbers(values, group), numbers({"y": [1.0]}, group)


def test_a_label_no_group_contains_is_an_error_on_every_rank(ranks):
    """The message of the rank that knows reaches the others; the next export works."""
    results = ranks.run(no_home)
    assert all(
        "AgreementError: " in found and "key 'x': expected this rank (1)" in found for found, _ in results
    )
    assert {"y": 1.0, "y__count": 3} == alike([after for _, after in results])


# -- cost ------------------------------------------------------------------------------------------


def steady(rank, gather_bytes):
    """Export 1000 keys five times, then with a new key on one rank; return collectives and names told."""
    group = group_of()
    keys = {f"k{i}": [1.0] for i in range(1000)}
    counts = []
    for i in range(7):
        before = collective.count()
        values = keys | ({"new": [2.0]} if rank == 1 and i >= 5 else {})
        with form(gather_bytes):
            assert len(numbers(values, group)) == 2 * (1000 + (i >= 5))
        counts.append(collective.count() - before)
    return counts


@pytest.mark.parametrize(("gather_bytes", "each"), [(FORMS[0], 1), (FORMS[1], 2)], ids=FORM_NAMES)
def test_names_travel_only_when_the_layout_changes(ranks, gather_bytes, each):
    """One collective per steady export (two when summed); a new key costs one exchange (reports d3, c14)."""
    misfit = 2 * each + 1
    assert [misfit, each, each, each, each, misfit, each] == alike(ranks.run(steady, gather_bytes))


def recording(rank):
    group, before = group_of(), collective.count()
    tracker = DistributedStatsTracker()
    for i in range(20):
        tracker.denominator(m=torch.ones(4, dtype=torch.bool))
        tracker.stat("m", x=torch.ones(4))
        if rank == i % WORLD:
            tracker.scalar(**{f"only{i}": 1.0})
    silent = collective.count() - before
    tracker.export(reduce_group=group)
    return silent, collective.count() - before


def test_recording_never_communicates(ranks):
    """Only export does, the same number of times on all ranks, whatever each recorded (report c15)."""
    assert (0, 3) == alike(ranks.run(recording))


def alone(rank):
    groups = [dist.new_group([r]) for r in range(WORLD)]
    before = collective.count()
    reduced = [reduce({"x": [float(rank)]}, groups[rank]) for _ in range(2)]
    ids = [export_id for one in reduced for export_id, _ in one.exports]
    return dict(Export.of(reduced[1].parts)), ids, collective.count() - before


def test_a_group_of_one_skips_the_wire(ranks):
    """It still has export ids, which no other group shares."""
    results = ranks.run(alone)
    assert [{"x": float(rank), "x__count": 1} for rank in range(WORLD)] == [found for found, _, _ in results]
    assert 2 * WORLD == len({export_id for _, ids, _ in results for export_id in ids})
    assert [0] * WORLD == [issued for _, _, issued in results]


# -- identities ------------------------------------------------------------------------------------


def ids(_):
    groups = [group_of(), group_of()]
    reduced = [reduce({"x": [1.0]}, group) for group in (groups[0], groups[0], groups[1])]
    reduced.append(reduce({"x": [1.0]}, *groups))
    return [one.exports for one in reduced]


def test_export_ids_are_shared_by_the_ranks_and_by_nothing_else(ranks):
    """All members get the same id and members; exports and groups of the same ranks have different ones."""
    found = alike(ranks.run(ids))
    assert [1, 1, 1, 2] == list(map(len, found))
    flat = [export_id for exports in found for export_id, _ in exports]
    assert 5 == len(set(flat))
    assert {(0, 1, 2)} == {members for exports in found for _, members in exports}
    assert [":1", ":2", ":1", ":3", ":2"] == [export_id[-2:] for export_id in flat]


def attempts(rank):
    pair, everyone = dist.new_group([0, 1]), group_of()
    single = dist.new_group([2])
    first = reduce({}, everyone, attempt=4 if rank == 1 else None).attempt
    second = reduce({}, everyone).attempt
    through = reduce({}, pair if rank < 2 else single, everyone, attempt=5 if rank == 0 else None).attempt
    return first, second, through


def test_the_attempt_is_learnt_from_whoever_knows_it(ranks):
    """Only the leader knows it; every rank of an export with it does afterwards (report a15)."""
    assert (4, None, 5) == alike(ranks.run(attempts))


# -- what goes wrong -------------------------------------------------------------------------------


def one_fails(rank, first):
    """Fail on ranks 1 and 2 in one export, with good ones around it."""
    group = group_of()
    before = numbers({"x": [1.0]}, group) if not first else None
    error = errors.RecordingError(f"broken {rank}") if rank else None
    return before, numbers({} if rank else {"x": [1.0]}, group, error=error), numbers({"x": [1.0]}, group)


@pytest.mark.parametrize("first", [True, False])
def test_a_failure_on_one_rank_is_told_to_all(ranks, first):
    """The ranks that failed raise their own error, the others hear of it; the next export works."""
    results = ranks.run(one_fails, first)
    assert ["RecordingError: broken 1", "RecordingError: broken 2"] == [found for _, found, _ in results[1:]]
    assert results[0][1].startswith(
        "PeerError: expected no failure before the export, got "
        "rank 1: RecordingError: broken 1; rank 2: RecordingError: broken 2"
    )
    assert {"x": 1.0, "x__count": 3} == alike([after for _, _, after in results])


def failure_crosses_groups(rank):
    """Let unequal copies in the reduce group of ranks 0 and 1 be heard by rank 2 in the wider group."""
    pair, single, everyone = dist.new_group([0, 1]), dist.new_group([2]), group_of()
    own = pair if rank < 2 else single
    found = numbers({Spec("lr", spread=Spread.REPLICATED): [0.1 * (1 + rank)]}, own, everyone)
    return found, numbers({"x": [1.0]}, own, everyone)


def test_a_failure_in_one_group_is_told_to_the_next(ranks):
    """Nobody goes on with half an export: what failed in reduce_group fails in key_sync_group."""
    results = ranks.run(failure_crosses_groups)
    assert all(found.startswith("AgreementError: ") for found, _ in results)
    assert all("key 'lr': expected the same on all ranks (replicated)" in found for found, _ in results)
    assert [2, 2, 1] == [after["x__count"] for _, after in results]


def disagreeing(rank):
    group = group_of()
    kinds = {Spec("x", Kind.STAT, ReduceType.AVG, "m" if rank else "n"): [1.0], "y": [1.0]}
    first = numbers(kinds, group)
    return first, numbers({"x": [1.0]}, group), numbers({Spec("x", Kind.STAT, ReduceType.AVG): [1.0]}, group)


def test_disagreement_is_one_error_on_every_rank(ranks):
    """Key, ranks and views are named everywhere; ranks that agree again, on anything, go on (report c14)."""
    error, after, changed = alike(ranks.run(disagreeing))
    assert error.startswith(
        "AgreementError: key 'x': expected the same on all ranks, got "
        "stat avg over 'm' on ranks 1, 2 but stat avg over 'n' on rank 0"
    )
    assert {"x": 1.0, "x__count": 3} == after
    assert {"x": 1.0} == changed


def out_of_step(rank, word):
    """Give one export word differently on rank 1, then try again."""
    group = group_of()
    numbers({"x": [1.0]}, group)
    options = {
        "operation": {"operation": "export_all" if rank == 1 else "export"},
        "reset": {"reset": rank != 1},
        "step": {"step": 5 + (rank == 1)},
        "full": {"full": rank != 1},
    }[word]
    wrong = numbers({"x": [1.0]}, group, **options)
    before = collective.count()
    return wrong, numbers({"x": [1.0]}, group), collective.count() - before


@pytest.mark.parametrize("word", ["operation", "reset", "step", "full"])
def test_ranks_at_different_exports_close_the_channel(ranks, word):
    """All ranks notice at once, and every later export over the group raises without a collective."""
    for wrong, after, issued in ranks.run(out_of_step, word):
        assert wrong.startswith("DesyncError: expected all ranks at the same export, got ")
        assert "rank 0, rank 2" in wrong
        assert "(this rank: export" in wrong
        assert "no export over this group is possible any more" in after
        assert 0 == issued


def closed_in_one_group(rank):
    """Close the channel of ranks 0 and 1, then export over both groups."""
    pair, single, everyone = dist.new_group([0, 1]), dist.new_group([2]), group_of()
    own = pair if rank < 2 else single
    if rank < 2:
        numbers({}, pair, operation=f"export{rank}")
    return numbers({"x": [1.0]}, own, everyone), numbers({"x": [1.0]}, everyone)


def test_a_closed_channel_still_enters_the_other_group(ranks):
    """Ranks outside the broken group hear of it instead of waiting; the wider group stays usable."""
    results = ranks.run(closed_in_one_group)
    assert ["DesyncError", "DesyncError", "PeerError"] == [found.split(":")[0] for found, _ in results]
    assert {"x": 1.0, "x__count": 3} == alike([after for _, after in results])


def steps(rank):
    group = group_of()
    return numbers({"x": [1.0]}, group, step=None if rank == 0 else 7)


def test_a_step_may_be_known_to_some_ranks_only(ranks):
    """Ranks that give no step agree with any."""
    assert {"x": 1.0, "x__count": 3} == alike(ranks.run(steps))


def bad_rows(rank):
    rows = np.zeros((2, 3), np.int64) if rank == 2 else moments.empty(1)
    reduced = collective.reduce([Spec("x")], rows, group_of(), operation="export", session="s")
    return reduced.outcome


def test_rows_of_the_wrong_shape_are_refused_on_every_rank(ranks):
    """A caller's mistake is an error like any other."""
    assert ["PeerError", "PeerError", "ReductionError"] == ranks.run(bad_rows)


def survive(_, gather_bytes):
    """Export until a peer is gone; return the error, and what the next export does."""
    found = {}
    with form(gather_bytes):
        while isinstance(found, dict):
            found = numbers({"x": [1.0]}, dist.group.WORLD)
        before = collective.count()
        return found, numbers({"x": [1.0]}, dist.group.WORLD), collective.count() - before


@pytest.mark.parametrize("gather_bytes", FORMS, ids=FORM_NAMES)
def test_a_dead_peer_is_an_error_and_the_end_of_the_channel(gather_bytes):
    """What died inside a collective is the cause; every later export raises at once."""
    with Ranks(2) as world:
        world.start(survive, gather_bytes)
        time.sleep(0.5)
        world.kill(1)
        found, after, issued = world.result(0)
    assert found.startswith("DesyncError: an export ended inside a collective: ")
    assert (found, 0) == (after, issued)


# -- lifetimes -------------------------------------------------------------------------------------


def forgotten(_):
    before = len(collective._registry)
    group = group_of()
    numbers({"x": [1.0]}, group)
    during = len(collective._registry)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return during - before, len(collective._registry) - before


def test_a_destroyed_group_takes_its_channel_with_it(ranks):
    """Channels are tied to group objects and keep none alive."""
    assert (1, 0) == alike(ranks.run(forgotten))


def threads(_):
    """Let four threads export over one group at the same time."""
    group, failures, totals = group_of(), [], []

    def work():
        for _ in range(10):
            found = numbers({"x": [1.0]}, group)
            (totals if isinstance(found, dict) else failures).append(found)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return failures, totals == [{"x": 1.0, "x__count": 3}] * 40


def test_threads_take_turns(ranks):
    """Exports of several threads over one group never mix."""
    assert ([], True) == alike(ranks.run(threads))


def flags(rank):
    group = group_of()
    return [collective.agree(flag, group) for flag in (rank == 2, False)] + [collective.agree(True, None)]


def test_a_flag_is_agreed_when_any_rank_has_it(ranks):
    """One rank's yes is everybody's; without a group it is one's own."""
    assert [True, False, True] == alike(ranks.run(flags))
