"""The layout is a pure function of what ranks say: the same on all of them, whatever they hold."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.plan import IDLE_EXPORTS, Entry, Layout, Load, Meta, Slot, agree, propose, route
from eventlog import Kind, ReduceType, Spread, errors, moments
from tests.runs import Spec

FAMILY = Meta(Kind.STAT, ReduceType.AVG_MIN_MAX, "mask")
SCALAR = Meta(Kind.SCALAR, ReduceType.SCALAR)
NOBODY = np.zeros(0, np.int64)
ROOT = Path(__file__).parents[2]


def entry(key, meta=SCALAR, label=None, tracker=""):
    return Entry(Slot(tracker, key, label), meta)


def load(*entries, carried=None):
    return Load(entries, tuple(range(len(entries))) if carried is None else carried)


def met(*loads, layout=None, idle=NOBODY, full=True):
    proposals = [(rank, propose(given_load)) for rank, given_load in enumerate(loads)]
    return agree(layout or Layout(), idle, proposals, full=full)


# -- routes ----------------------------------------------------------------------------------------


def test_keys_go_to_the_reduce_group_and_labelled_ones_where_they_fit():
    """A key without a label follows reduce_group; a label goes to the first group that contains its ranks."""
    specs = (Spec("a"), Spec("b", label="0,1"), Spec("c", label="0,1,2"), Spec("d", label="0"))
    found = route(specs, ((0, 1), (0, 1, 2, 3)), 0, reduced=True)
    assert ((0, 1, 3), (2,)) == tuple(one.chosen for one in found.loads)
    assert () == found.local.chosen


def test_without_a_reduce_group_keys_stay_local():
    """With a key_sync_group alone only labelled keys are reduced; the group still checks the others."""
    found = route((Spec("a"), Spec("b", label="1,2")), ((0, 1, 2),), 1, reduced=False)
    assert ((0,), (1,)) == (found.local.chosen, found.loads[0].chosen)
    assert 2 == len(found.loads[0].entries)


def test_a_key_of_this_rank_alone_needs_no_group():
    """A label that names nobody else is local where no group is given."""
    assert (0,) == route((Spec("a", label="3"),), (), 3, reduced=False).local.chosen


@pytest.mark.parametrize(("label", "rank"), [("0,7", 0), ("1,2", 0), ("0,1", 0)])
def test_a_key_no_group_can_take_is_refused(label, rank):
    """Its ranks must contain this one and lie within one of the two groups."""
    groups = () if label == "0,1" else ((0, 1), (0, 1, 2))
    with pytest.raises(errors.AgreementError, match=r"key 'x': expected this rank \(0\) in its reduce_group"):
        route((Spec("x", label=label),), groups, rank, reduced=bool(groups))


def test_a_key_given_twice_is_refused():
    """A key that is two things in one export has no number; the message names both."""
    with pytest.raises(
        errors.AgreementError, match="'x': expected one kind in an export, got scalar and stat"
    ):
        route((Spec("x"), Spec("x", Kind.STAT, ReduceType.AVG)), (), 0, reduced=False)


# -- agreement -------------------------------------------------------------------------------------


def test_ranks_may_hold_different_keys():
    """The layout is the union, sorted by name; each rank's load fits it (report c14)."""
    mine, theirs = load(entry("b"), entry("a", FAMILY)), load(entry("c"), entry("b"))
    layout, _, conflicts = met(mine, theirs, load())
    assert [] == conflicts
    assert ["a", "b", "c"] == [found.slot.key for found in layout.wire]
    assert [1, 0] == layout.place(mine).tolist()
    assert [2, 1] == layout.place(theirs).tolist()


def test_a_layout_is_named_alike_in_every_process():
    """The hash does not depend on the process's hash seed or on the order of recording (report c17)."""
    code = (
        "from aggregator.plan import *; from eventlog import Kind\n"
        "known = {Entry(Slot('', k), Meta(Kind.SCALAR)) for k in 'abcdef'}\n"
        "print(Layout(1, known, {e.slot for e in known}).hash)"
    )
    command = [sys.executable, "-c", code]
    hashes = {
        subprocess.run(
            command, cwd=ROOT, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert 1 == len(hashes)


def test_the_hash_tells_layouts_apart():
    """Another key, kind, label or set of carried slots is another layout."""
    known = [entry("a"), entry("b")]
    layouts = [
        Layout(1, known, [known[0].slot]),
        Layout(1, known, [known[1].slot]),
        Layout(1, known[:1], [known[0].slot]),
        Layout(1, [entry("a", FAMILY), known[1]], [known[0].slot]),
        Layout(1, [entry("a", label="0,1"), known[1]], [Slot("", "a", "0,1")]),
    ]
    assert len(layouts) == len({layout.hash for layout in layouts})


def test_disagreement_names_key_and_ranks():
    """Ranks that differ on a key are named, with what they say; the layout stays (report c14)."""
    before, idle, _ = met(load(entry("x")), load())
    layout, _, conflicts = met(
        load(entry("x")), load(entry("x", FAMILY)), load(entry("x"), entry("y")), layout=before, idle=idle
    )
    assert layout is before
    expected = (
        "key 'x': expected the same on all ranks, got scalar on ranks 0, 2 but "
        "stat avg_min_max over 'mask' on rank 1"
    )
    assert [expected] == conflicts


def test_ranks_that_differ_only_in_the_denominator_disagree():
    """The same key under another mask is another number."""
    (conflict,) = met(load(entry("x", FAMILY)), load(entry("x", FAMILY._replace(denominator="other"))))[2]
    assert "over 'mask' on rank 0 but stat avg_min_max over 'other' on rank 1" in conflict


@pytest.mark.parametrize("labels", [(None, "0,1"), ("0,1", "1,2"), ("0,1", "0,1,2")])
def test_groups_of_one_key_may_not_overlap(labels):
    """A rank would receive the key twice."""
    loads = [load(entry("x", label=label)) for label in labels]
    (conflict,) = met(*loads)[2]
    assert "key 'x': expected one reduce_group per rank, got " in conflict


def test_groups_of_one_key_may_lie_side_by_side():
    """Each tensor-parallel group has its own slot."""
    layout, _, conflicts = met(*[load(entry("x", label=label)) for label in ("0,1", "0,1", "2,3", "2,3")])
    assert ([], 2) == (conflicts, len(layout.wire))
    assert [1] == layout.seen_by(3)[0].tolist()


def test_all_ranks_may_change_their_mind_together():
    """A key whose kind or groups change on all ranks replaces what it was."""
    before, idle, _ = met(load(entry("x"), entry("y", label="0,1")), load())
    after, _, conflicts = met(
        load(entry("x", FAMILY), entry("y", label="0,1,2")), load(), layout=before, idle=idle
    )
    assert [] == conflicts
    assert (entry("x", FAMILY), entry("y", label="0,1,2")) == after.wire


def test_a_known_key_is_not_dropped_when_somebody_else_carries_it():
    """What one export carries here another may carry elsewhere: the slot stays, and both fit."""
    here, elsewhere = load(entry("x")), load(entry("x"), carried=())
    layout, idle, _ = met(here, here)
    assert layout.place(elsewhere).tolist() == []
    after, _, _ = met(elsewhere, load(entry("y")), layout=layout, idle=idle)
    assert [0] == after.place(here).tolist()


def test_slots_leave_at_an_exchange_once_they_were_idle_long():
    """Names made up every step do not pile up, and nothing leaves between exchanges."""
    layout, idle, _ = met(load(entry("old"), entry("young")))
    idle[:] = IDLE_EXPORTS, IDLE_EXPORTS - 1
    after, idle, _ = met(load(entry("new")), layout=layout, idle=idle)
    assert ["new", "young"] == [found.slot.key for found in after.known]
    assert [0, IDLE_EXPORTS - 1] == idle.tolist()


def test_keys_carried_elsewhere_age_by_exchanges():
    """They leave no trace in this group's numbers, so exchanges of full exports that lack them count."""
    layout, idle, _ = met(load(entry("elsewhere"), carried=()))
    for i in range(IDLE_EXPORTS):
        assert "elsewhere" in [found.slot.key for found in layout.known]
        layout, idle, _ = met(load(entry(f"partial{i}")), layout=layout, idle=idle, full=False)
        layout, idle, _ = met(load(entry(f"new{i}")), layout=layout, idle=idle)
    layout, idle, _ = met(load(entry("last")), layout=layout, idle=idle)
    assert "elsewhere" not in [found.slot.key for found in layout.known]


ENTRIES = st.builds(
    entry,
    st.sampled_from("abcd"),
    st.sampled_from([SCALAR, FAMILY, Meta(Kind.COUNTER)]),
    st.sampled_from([None, None, "0,1", "1,2", "0,1,2"]),
)
LOADS = st.lists(ENTRIES, max_size=4, unique_by=lambda found: found.slot).flatmap(
    lambda entries: st.builds(
        load,
        *map(st.just, entries),
        carried=st.sets(st.integers(0, max(0, len(entries) - 1))).map(
            lambda chosen: tuple(i for i in sorted(chosen) if i < len(entries))
        ),
    )
)


@settings(deadline=None)
@given(st.lists(st.lists(LOADS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_after_agreement_everybody_fits(exchanges):
    """Every exchange ends in conflicts and no change, or in a layout that fits all, whoever spoke first."""
    layout, idle = Layout(), NOBODY
    for loads in exchanges:
        new, counts, conflicts = met(*loads, layout=layout, idle=idle)
        again, _, same = met(*reversed(loads), layout=layout, idle=idle)
        assert (bool(conflicts), new.hash) == (bool(same), again.hash)
        if conflicts:
            assert new is layout
            continue
        assert all(new.place(one) is not None for one in loads)
        assert layout.epoch + 1 == new.epoch
        assert len(counts) == len(new.known)
        layout, idle = new, counts


# -- pooling ---------------------------------------------------------------------------------------


def stack_of(*ranks):
    """Return moments, shape (ranks, keys, WORDS), of the values per rank and key; None: not recorded."""
    empty = moments.empty(1)[0]
    return np.stack(
        [
            np.stack([empty if v is None else moments.of(np.array(v, np.float64)) for v in rank])
            for rank in ranks
        ]
    )


def spread_layout(spread):
    found = entry("x", SCALAR._replace(spread=spread))
    return Layout(1, [found], [found.slot])


def test_shares_add_up_to_one_number():
    """Parts 0.25 and 0.75 on two ranks are 1.0, over as many numbers as each rank gave (report c4)."""
    rows, unequal = spread_layout(Spread.SHARES).pool(stack_of([[0.25, 0.5]], [[0.75, 0.5]]))
    assert (1.0, 2, 0) == (moments.mean(rows[0]), rows[0, moments.COUNT], len(unequal))


def test_copies_count_once():
    """A learning rate on eight ranks is one learning rate; ranks without it do not matter (report c4)."""
    rows, unequal = spread_layout(Spread.REPLICATED).pool(stack_of([None], *[[[0.1]]] * 8))
    assert (0.1, 1, 0) == (moments.mean(rows[0]), rows[0, moments.COUNT], len(unequal))


def test_unequal_copies_are_noticed():
    """A replicated value that differs on one rank is reported by position (report c4)."""
    assert [0] == spread_layout(Spread.REPLICATED).pool(stack_of([[0.1]], [[0.1]], [[0.2]]))[1].tolist()
