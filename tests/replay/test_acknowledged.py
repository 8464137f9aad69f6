"""What a target has acknowledged, as spans: never more than was told, and all that was told alike."""

from __future__ import annotations

import json
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from replay.acknowledged import ANY_ATTEMPT, Acknowledged, Span, Telling
from replay.steps import Histogram, Row, newest


def row(step: int, time: float, *keys: str, attempt: int = 0) -> Row:
    return Row(step, dict.fromkeys(keys or ("v",), 1.0), time, {attempt: time})


def begun(telling: Telling = Telling()) -> Acknowledged:  # noqa: B008  (frozen)
    told = Acknowledged()
    told.begin(telling)
    return told


def test_an_ordinary_run_is_one_span() -> None:
    """A thousand commits one after another, each with keys of its own, take no more room than one."""
    told = begun()
    for step in range(1000):
        told.take(row(step, 10.0 + step, *(("v", "eval") if step % 10 == 0 else ("v",))))
    assert [[0, 0, 0, 999, 10.0, 1009.0]] == [span.as_list() for span in told.spans]
    assert [("eval", "v")] == [telling.keys for telling in told.tellings]
    assert told.tellings == [Telling.of(telling.as_dict()) for telling in told.tellings]
    assert Telling(keys=("v",)) == Telling.of({"chosen": "", "added": "", "named": "", "keys": ["v"]})


def test_a_commit_that_was_not_told_lies_in_no_span() -> None:
    """In the middle, late, of another attempt: what the target did not get is not known."""
    told = begun()
    for step in (0, 1, 2):
        told.take(row(step, 10.0 + step))
    late = row(1, 12.5)
    told.miss(late)
    told.miss(row(3, 13.0))
    for step in (4, 5):
        told.take(row(step, 10.0 + step))
    assert [True, True, True, False, True, True] == [told.knows(row(step, 10.0 + step)) for step in range(6)]
    assert not told.knows(late)
    assert not told.knows(row(2, 12.0, attempt=1))
    assert 2 == len(told.spans)


def test_a_session_goes_on_beside_what_it_passes() -> None:
    """Of a story read from its beginning the new rows lengthen the span; those of a part of it do not."""
    told = begun()
    for step in range(3):
        told.take(row(step, 10.0 + step))
    told.begin(Telling())
    assert [True] * 3 == [told.passes(row(step, 10.0 + step)) for step in range(3)]
    told.take(row(3, 13.0))
    assert 1 == len(told.spans)
    told.begin(Telling())
    told.take(row(6, 16.0))
    assert [(0, 3), (6, 6)] == [(span.first, span.last) for span in told.spans]


def test_what_is_told_otherwise_is_compared_by_its_names() -> None:
    """Fewer keys were told, too; other names, statistics and histograms were not."""
    told = begun()
    told.take(row(0, 10.0, "a", "b"))
    histogram = Row(0, {"a": 1.0}, 10.0, {0: 10.0}, {"a/histogram": Histogram((0.0, 1.0), (1,))})
    for telling, asked, known in (
        (Telling("a"), row(0, 10.0, "a"), True),
        (Telling("", "p99"), row(0, 10.0, "a", "a/p99"), False),
        (Telling("", "histogram"), histogram, False),
        (Telling("", "", "a = b"), row(0, 10.0, "b"), False),
    ):
        told.begin(telling)
        assert known == told.knows(asked), telling
    told.take(histogram)  # told with "a = b" as the renaming: known then, and only so
    assert told.knows(histogram)


def test_what_lay_there_unseen_is_believed_as_far_as_it_can_be() -> None:
    """What must have been told, under its own names; not what an older cursor believed of any attempt."""
    told = Acknowledged([Telling("found", keys=None)], [Span(0, ANY_ATTEMPT, 0, 9, 0.0, 200.0)])
    assert (9, True) == (told.found, told.knows(row(9, 99.0, attempt=3)))
    told.believe([(0, 0, 2, 10.0, 30.0), (0, 4, 5, 50.0, 60.0)])
    assert (None, True) == (told.found, told.knows(row(5, 55.0)))
    assert not any(told.knows(row(step, time)) for step, time in ((3, 40.0), (6, 55.0), (5, 61.0)))
    assert not told.knows(row(5, 55.0, attempt=3))
    for telling in (Telling("", "", "v = w"), Telling("", "p99")):
        told.begin(telling)
        assert not told.knows(row(5, 55.0))


def test_a_commit_that_seemed_told_is_left_out_once_it_is_missed() -> None:
    """It came behind those around it, with an earlier time: they stay told, and a session later it is not."""
    told = begun()
    for step in range(5):
        told.take(row(step, 10.0 * step))
    late = row(2, 25.0)
    told.miss(late)
    told.take(row(5, 50.0))
    again = Acknowledged(told.tellings, [Span.of(span.as_list()) for span in told.spans])
    again.begin(Telling())
    assert [True] * 6 == [again.knows(row(step, 10.0 * step)) for step in range(6)]
    assert not again.knows(late)


def test_what_was_told_to_the_run_before_is_known_and_not_shown() -> None:
    """Of the run that goes on nothing is told again, and the new one does not hold it, whatever follows."""
    told = begun()
    for step in range(3):
        told.take(row(step, 10.0 * step))
    told.miss(row(1, 25.0))
    new = told.elsewhere()
    assert [True, False] == [some.holds(row(1, 10.0)) for some in (told, new)]
    new.take(row(3, 30.0))
    again = Acknowledged(
        [Telling.of(telling.as_dict()) for telling in new.tellings],
        [Span.of(span.as_list()) for span in new.spans],
    )
    again.begin(Telling())
    assert [True] * 4 == [again.passes(row(step, 10.0 * step)) for step in range(4)]
    again.take(row(4, 40.0))
    assert [False, False, False, True, True] == [again.holds(row(step, 10.0 * step)) for step in range(5)]
    assert not again.knows(row(1, 25.0))


class Commit(NamedTuple):
    step: int
    time: float
    attempt: int
    keys: frozenset[str]

    def row(self, chosen: str) -> Row:
        keys = self.keys & set(chosen or "ab")
        return Row(self.step, dict.fromkeys(sorted(keys), 0.0), self.time, {self.attempt: self.time})


KEYS = st.sampled_from(["a", "b", "ab"]).map(frozenset)
COMMITS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1), KEYS), max_size=25).map(
    lambda all_: [Commit(step, float(time), attempt, keys) for time, (step, attempt, keys) in enumerate(all_)]
)
SESSIONS = st.lists(
    st.tuples(
        st.sampled_from(["live", "replay", "follow"]),
        st.sampled_from(["", "", "a", "b"]),  # which keys
        st.integers(0, 12),  # since
        st.sets(st.integers(0, 12)),  # refused or lost
        st.integers(-1, 12),  # what the target turns out to hold after it
    ),
    max_size=4,
)


@given(COMMITS, SESSIONS)
def test_it_never_says_more_than_was_told(commits: list[Commit], sessions: list[tuple]) -> None:
    """Live in the order of time, replayed in that of steps, followed as it comes: known is what was told.

    Whatever was lost. The target takes ascending steps only; after each session it may turn out to hold less.
    """
    told, truth, made = Acknowledged(), dict[Commit, set[str]](), set[Commit]()
    for kind, chosen, since, lost, last in sessions:
        told.begin(Telling(chosen))
        seen = [commit for commit in commits if commit.step >= since and commit.row(chosen).metrics]
        before = told.copy()
        if kind == "live":  # what is told live was never there before
            seen = [commit for commit in seen if commit not in made]
        made.update(seen)
        if kind == "replay":
            seen.sort()
        elif kind == "follow":  # several processes, of which one is a little behind
            seen.sort(key=lambda commit: (commit.time // 3, -commit.time))
        top = max((commit.step for commit in truth), default=-1)
        steps: list[list[Commit]] = []
        for commit in seen:
            if commit.step > top:
                steps.append([commit])
                top = commit.step
            elif steps and steps[-1][0].step == commit.step:  # merged into the step that is open
                steps[-1].append(commit)
            elif kind == "live" or not (before if kind == "follow" else told).passes(commit.row(chosen)):
                told.miss(commit.row(chosen))
        for group in steps:
            parts = [commit.row(chosen) for commit in group]
            times = newest(*(part.commits for part in parts))
            merged = Row(group[0].step, {k: 0.0 for p in parts for k in p.metrics}, parts[0].time, times)
            if merged.step in lost:
                told.miss(merged)
                continue
            told.take(merged)
            assert kind == "follow" or all(map(told.knows, parts))
            for commit, part in zip(group, parts, strict=True):
                truth.setdefault(commit, set()).update(part.metrics)
        told.cut(last)
        truth = {commit: keys for commit, keys in truth.items() if commit.step <= last}
        if not told.spans:
            assert {} == truth
        written = json.loads(json.dumps([span.as_list() for span in told.spans]))
        assert told.spans == [Span.of(some) for some in written]
        for asked in ("", "a", "b"):
            told.begin(Telling(asked))
            for commit in commits:
                part = commit.row(asked)
                if told.knows(part):
                    assert part.metrics.keys() <= truth.get(commit, set())
