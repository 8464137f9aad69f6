from __future__ import annotations

from aggregator.offline.candidates import GROUP, OWN, WORKERS, Member, Part, candidates
from aggregator.offline.timeline import Commit, Export, Window, resolve

ACTORS = [
    Member("a0", 0, "actors"),
    Member("a1", 1, "actors"),
    Member("a2", 2, "actors"),
    Member("a3", 3, "actors"),
]
WORKERS_ = [Member("w0", 0, "w0"), Member("w1", 1, "w1")]
LEADERS = {0: {"a0"}}


def export(session, window=0, export_id="", members=None, time=1, **fields):
    return Export(session, window, time, export_id or f"{session}:{window}", members, **fields)


COMMITS = (Commit("a0", 0, 9, 5, leader=True),)


def found(exports, members=ACTORS, leaders=LEADERS, incomplete=(), steps=None, commits=COMMITS):
    """Return the candidates of exports whose windows are bound to step 5, or to `steps` by window."""
    steps = steps or {}
    windows = {(e.session, e.window) for e in exports}
    bound = [Window(session, number, 0, steps.get(number, 5)) for session, number in sorted(windows)]
    return candidates(exports, resolve(bound, exports, commits), members, leaders, incomplete)


def windows_of(candidate):
    return [(part.session, part.window) for part in candidate.parts]


def test_each_group_export_is_a_candidate():
    """Data-parallel groups of tensor-parallel copies stay apart: nothing is summed across groups."""
    exports = [
        export("a0", export_id="even:1", members=(0, 2)),
        export("a2", export_id="even:1", members=(0, 2)),
        export("a1", export_id="odd:1", members=(1, 3)),
        export("a3", export_id="odd:1", members=(1, 3)),
    ]
    even, odd = found(exports)
    assert (GROUP, 5, "even:1", True) == (even.source, even.step, even.export_id, even.leader)
    assert [("a0", 0), ("a2", 0)] == windows_of(even)
    assert (GROUP, "odd:1", False) == (odd.source, odd.export_id, odd.leader)


def test_ranks_merge_in_the_order_of_the_group():
    """Floats add in the group's order, as they did live, whatever the order of the files."""
    exports = [export(s, export_id="g:1", members=(2, 0, 1)) for s in ("a0", "a1", "a2")]
    (candidate,) = found(exports)
    assert ["a2", "a0", "a1"] == [part.session for part in candidate.parts]


def test_the_committing_process_s_own_exports_are_candidates_one_by_one():
    """The leader's exports without a group may each be what was committed, or all of them together."""
    first, second, both = found([export("a0", 0), export("a0", 1)])
    assert (OWN, [("a0", 0)]) == (first.source, windows_of(first))
    assert (OWN, [("a0", 1)]) == (second.source, windows_of(second))
    assert (OWN, None, [("a0", 0), ("a0", 1)]) == (both.source, both.export_id, windows_of(both))


def test_workers_of_other_worlds_are_one_union():
    """Producers that share no group with the leader count together."""
    (union,) = found([export("w0"), export("w1"), export("w1", 1)], [*ACTORS, *WORKERS_])
    assert (WORKERS, False) == (union.source, union.leader)
    assert [("w0", 0), ("w1", 0), ("w1", 1)] == windows_of(union)


def test_other_ranks_of_the_leader_s_world_are_no_workers():
    """A rank that exports for itself is a copy or a part of what its leader exports: it counts for nobody."""
    assert [] == found([export("a1")])


def test_without_any_leader_all_ungrouped_producers_are_the_union():
    """A run nobody committed still has its workers' account."""
    (union,) = found([export("a1"), export("w0")], [*ACTORS, *WORKERS_], leaders={}, commits=())
    assert [("a1", 0), ("w0", 0)] == windows_of(union)


def test_failed_and_unbound_exports_are_no_candidates():
    """What an export did not return was committed by nobody."""
    exports = [export("a0", 0, "g:1", (0,), ok=False), export("a0", 1, "g:2", (0,))]
    assert [] == found(exports, steps={1: None}, commits=())


def test_an_export_without_reset_is_covered_again():
    """The later export covers the earlier window too, each for its own step."""
    exports = [export("a0", 0, reset=False), export("a0", 1, first=0), export("a0", 2)]
    made = found(exports, steps={0: 5, 1: 6, 2: 7})
    assert [[("a0", 0)], [("a0", 0), ("a0", 1)], [("a0", 2)]] == [windows_of(c) for c in made]


def test_a_reset_in_between_takes_what_it_took():
    """A tracker that was exported with reset is not covered by a later export that reaches back further."""
    exports = [
        export("a0", 0, tracker="x", reset=False),
        export("a0", 1, tracker=""),
        export("a0", 2, first=0),
        export("a0", 3, first=0),
    ]
    made = {c.export_id: c.parts for c in found(exports, steps={0: 1, 1: 2, 2: 3, 3: 4})}
    x, default, everything, after = (made[f"a0:{n}"] for n in range(4))
    assert (Part("a0", 0, ("x", None)),) == x
    assert (Part("a0", 1, ("", None)),) == default
    assert (Part("a0", 0), Part("a0", 1, gone=(("", None),)), Part("a0", 2)) == everything
    assert (Part("a0", 3),) == after


def test_a_single_key_leaves_the_others():
    """`export(key=…)` covers its key only, and a later export the rest of that window."""
    exports = [export("a0", 0, tracker="", key="k"), export("a0", 1, first=0)]
    single, rest = found(exports, steps={0: 5, 1: 6})
    assert (Part("a0", 0, ("", "k")),) == single.parts
    assert (Part("a0", 0, gone=(("", "k"),)), Part("a0", 1)) == rest.parts


def test_the_second_group_of_a_call_is_marked():
    """Keys without a group of their own never travel over key_sync_group."""
    exports = [
        export("a0", export_id="dp:1", members=(0, 1)),
        export("a0", export_id="all:1", members=(0, 1, 2, 3)),
    ]
    first, second = found(exports)
    assert (False, True) == (first.second, second.second)


def test_a_missing_member_or_window_makes_it_incomplete():
    """A rank whose export row or records are gone is said, not guessed."""
    exports = [export(s, export_id="g:1", members=(0, 1)) for s in ("a0", "a1")]
    assert [False] == [c.incomplete for c in found(exports)]
    assert [True] == [c.incomplete for c in found(exports[:1])]
    assert [True] == [c.incomplete for c in found(exports, incomplete={("a1", 0)})]


def test_the_leader_s_step_speaks_for_the_group():
    """Where members of one export were bound to different steps, the leader's is the export's."""
    exports = [export("a1", 0, "g:1", (0, 1)), export("a0", 1, "g:1", (0, 1))]
    (candidate,) = found(exports, steps={0: 4, 1: 6})
    assert 6 == candidate.step
