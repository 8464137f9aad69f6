"""The rows that targets are told, from the table of a run's metrics."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.metrics import without_counts
from replay.steps import Row
from replay.story import Story

COLUMNS = {
    "step": pa.int64(),
    "key": pa.string(),
    "value": pa.float64(),
    "value_int": pa.int64(),
    "time": pa.timestamp("us", "UTC"),
    "attempt": pa.int64(),
    "sub_index": pa.int64(),
    "superseded": pa.bool_(),
}


def table(*rows: tuple) -> pa.Table:
    """Build a table of rows (step, key, value, seconds, attempt=0, sub_index=0, superseded=False)."""
    filled = [(*row, *(0, 0, False)[len(row) - 4 :]) for row in rows]
    said = [
        {
            "step": step,
            "key": key,
            "value": float(value),
            "value_int": value if isinstance(value, int) else None,
            "time": int(seconds * 1e6),
            "attempt": attempt,
            "sub_index": part,
            "superseded": superseded,
        }
        for step, key, value, seconds, attempt, part, superseded in filled
    ]
    return pa.Table.from_pylist(said, schema=pa.schema(COLUMNS))


def told(story: Story) -> list[tuple[int, dict[str, float], float]]:
    return [(row.step, dict(row.metrics), row.time) for row in story]


def test_a_row_holds_all_keys_of_a_step_in_the_order_of_steps() -> None:
    """Whatever the order of the table, steps rise, each is one row, integers stay integers (report a2)."""
    story = Story(table((7, "b", 0.5, 3.0), (1, "a", 2**53 + 1, 1.0), (7, "a", 2.0, 3.0)))
    assert [(1, {"a": 2**53 + 1}, 1.0), (7, {"a": 2.0, "b": 0.5}, 3.0)] == told(story)
    assert told(story) == told(story)
    assert (2, 0) == (story.counts.steps, story.counts.superseded)


def test_commits_are_told_apart_and_merged_by_the_gate() -> None:
    """Two commits of a step stay two commits, and become one row with the time of the first (report a9)."""
    story = Story(table((0, "a", 1.0, 1.0), (0, "b", 2.0, 4.0)))
    assert [Row(0, {"a": 1.0}, 1.0, {0: 1.0}), Row(0, {"b": 2.0}, 4.0, {0: 4.0})] == list(story.commits())
    assert [Row(0, {"a": 1.0, "b": 2.0}, 1.0, {0: 4.0})] == list(story)


def test_the_parts_of_a_list_commit_are_one_step() -> None:
    """Sub-indexes are commits of one step, the last value of a key wins (report s8)."""
    story = Story(table((0, "a", 1.0, 1.0, 0, 0), (0, "a", 2.0, 1.0, 0, 1), (0, "b", 3.0, 1.0, 0, 1)))
    assert [(0, {"a": 2.0, "b": 3.0}, 1.0)] == told(story)


def test_the_trackers_counts_are_left_out_per_commit() -> None:
    """`k__count` goes where `k` is in the same commit, and stays where it is not (report s9)."""
    story = Story(
        table((0, "a", 1.0, 1.0), (0, "a__count", 5, 1.0), (0, "b", 1.0, 1.0), (0, "b__count", 2, 9.0))
    )
    assert [(0, {"a": 1.0, "b": 1.0, "b__count": 2}, 1.0)] == told(story)


def test_superseded_rows_are_counted_and_left_out() -> None:
    """What a later attempt took back is counted by attempt and step, and told only on request (report a1)."""
    rows = [
        (0, "a", 0.0, 0.0, 0, 0, False),
        (1, "a", 1.0, 1.0, 0, 0, True),
        (2, "a", 2.0, 2.0, 0, 0, True),
        (2, "b", 2.5, 2.0, 0, 0, True),
        (1, "a", 101.0, 3.0, 1, 0, False),
    ]
    assert [(0, {"a": 0.0}, 0.0), (1, {"a": 101.0}, 3.0)] == told(Story(table(*rows)))
    everything = Story(table(*rows), superseded=True)
    assert [(0, {"a": 0.0}, 0.0), (1, {"a": 101.0}, 3.0), (2, {"a": 2.0, "b": 2.5}, 2.0)] == told(everything)
    assert 2 == everything.counts.superseded


def test_a_table_of_the_latest_attempts_alone_will_do() -> None:
    """Without the column nothing is superseded."""
    latest = table((0, "a", 0.0, 0.0)).drop_columns(["superseded"])
    assert [(0, {"a": 0.0}, 0.0)] == told(Story(latest))
    assert 0 == Story(latest).counts.superseded


@pytest.mark.parametrize("at_a_time", [1, 2, 7, 10_000])
def test_long_runs_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    """However few rows are held at a time, commits and steps stay whole."""
    monkeypatch.setattr("replay.story._ROWS_AT_A_TIME", at_a_time)
    rows = [(step, key, float(step), float(step)) for step in range(9) for key in "abc"]
    expected = [(step, dict.fromkeys("abc", float(step)), float(step)) for step in range(9)]
    assert expected == told(Story(table(*rows)))


def test_an_empty_run_has_nothing_to_tell() -> None:
    """A run without commits is an empty story."""
    assert [] == told(Story(table()))
    assert (0, 0) == (Story(table()).counts.steps, Story(table()).counts.superseded)


NAMES = ("a", "a__count", "b", "c__count")
NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
SAID = st.tuples(
    st.integers(0, 2),
    st.sampled_from(NAMES),
    NUMBERS,
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 1),
)


@given(st.lists(SAID, max_size=40), st.sets(st.tuples(st.integers(0, 1), st.integers(0, 2))), st.booleans())
def test_rows_and_counts_are_those_of_the_table_read_row_by_row(
    said: list, gone: set[tuple[int, int]], everything: bool
) -> None:
    """Whatever was said by whom and taken back: each commit as said, and every value told once or counted."""
    rows = [
        (*row, (row[4], row[0]) in gone) for row in sorted(said, key=lambda row: (row[0], row[4], *row[3:]))
    ]
    kept = [row for row in rows if everything or not row[-1]]
    commits: dict[tuple, dict[str, float]] = {}
    for step, key, value, seconds, attempt, part, _ in sorted(kept, key=lambda row: row[1]):
        commits.setdefault((step, attempt, seconds, part), {})[key] = value
    story = Story(table(*rows), superseded=everything)
    if len({attempt for _, attempt, _, _ in commits}) < 2:  # else the later attempt's values are told
        expected = [
            Row(step, without_counts(metrics), float(seconds), {attempt: float(seconds)})
            for (step, attempt, seconds, _), metrics in sorted(commits.items())
        ]
        assert expected == list(story.commits())
    places = [(row[4], row[0], row[1]) for row in rows if not str(row[1]).endswith("__count")]
    told = {(row[4], row[0], row[1]) for row in kept}.intersection(places)
    folded = sum(place in told for place in places) - len(told)
    assert (folded, len({row[0] for row in kept})) == (story.counts.folded, story.counts.steps)
    back = {(row[4], row[0]) for row in rows if row[-1]}
    assert len(back) == story.counts.superseded
