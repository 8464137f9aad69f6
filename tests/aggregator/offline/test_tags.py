"""What a batch is tagged with is known of all that was recorded under its mask."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aggregator import compact, open_run
from eventlog import errors
from tests.runs import RunBuilder

KINDS = ("text", "image")


def record(path):
    """Record two tagged batches and one without tags on each of two ranks, and a tagged scalar."""
    with RunBuilder(path) as run:
        ranks = [run.producer("actor", rank, world="w", world_size=2, attempt=0) for rank in range(2)]
        run.attempt(leader=ranks[0])
        for rank in ranks:
            tracker = rank.tracker()
            for value, kind in enumerate([*KINDS, None]):
                tags = {"modality": kind, "shard": rank.rank} if kind else None
                ids = [f"{kind}-{i}" for i in range(2)] if kind else None
                tracker.denominator({"m": np.ones((2, 3), bool)}, about={"tags": tags, "sample_ids": ids})
                tracker.stat("m", {"kl": np.full((2, 3), float(value + 10 * rank.rank), np.float32)})
                tracker.denominator({"n": np.ones(2, bool)}, about={"tags": tags, "sample_ids": ids})
                tracker.stat("n", {"reward": np.full(2, float(value), np.float32)})
                tracker.stat("m", {"ratio": np.full((2, 3), float(value), np.float32)}, quantiles=(0.5,))
            tracker.samples("score", {"a": 1.0}, tags={"modality": "text"})
        stats = run.export(ranks, time=1)
        ranks[0].commit(0, stats, time=2, leader=True)
        ranks[1].commit(0, time=2)
    return path


@pytest.fixture(scope="module", params=["frames", "tables"])
def session(request, tmp_path_factory):
    """Open the run, as it was recorded and compacted."""
    path = record(tmp_path_factory.mktemp("tags") / "run")
    if request.param == "tables":
        compact(path, drop_sources=True, workers=1)
    with open_run(path) as session:
        yield session


def test_a_stat_has_the_tags_of_its_mask_in_the_records(session):
    """Averages by tag are those of the batches; a batch without tags has none."""
    rows = session.sql(
        "select tags->>'modality' as modality, sum(sum) / sum(count) as avg from records where key = 'kl' "
        "group by modality order by modality nulls last"
    ).to_pylist()
    assert [("image", 6.0), ("text", 5.0), (None, 7.0)] == [(row["modality"], row["avg"]) for row in rows]


def test_own_tags_stand_beside_those_of_the_mask(session):
    """A stat that says something itself, as of quantiles, says it still."""
    rows = session.sql(
        "select distinct tags from records where key = 'ratio' and rank = 0 order by all nulls last"
    )
    said = [json.loads(text) for text in rows["tags"].to_pylist()]
    of_batches = [{"quantiles": [0.5], "modality": kind, "shard": 0} for kind in sorted(KINDS)]
    assert [*of_batches, {"quantiles": [0.5]}] == said


@pytest.mark.parametrize("view", ["payload", "tensors", "masks"])
def test_the_values_have_them_too(session, view):
    """Every view with the values of a batch says what the batch was tagged with."""
    key = "m" if view == "masks" else "kl"
    rows = session.sql(
        f"select tags->>'shard' as shard, count(*) as n from {view} where key = '{key}' group by 1"
    )
    assert {"0": 2, "1": 2, None: 2} == dict(
        zip(rows["shard"].to_pylist(), rows["n"].to_pylist(), strict=True)
    )


def test_samples_have_the_tags_of_their_batch(session):
    """A sample's values come with the tags of the batch it was in; a scalar's with those given with it."""
    rows = session.sql(
        "select distinct key, sample_id, tags->>'modality' as kind from samples where key != 'ratio'"
    )
    found = {(row["key"], row["sample_id"], row["kind"]) for row in rows.to_pylist()}
    of_batches = {("reward", f"{kind}-{i}", kind) for kind in KINDS for i in range(2)}
    assert {("score", "a", "text"), *of_batches} == found
    rows = session.sql("select distinct tags->>'modality' as kind from scalars").to_pylist()
    assert [{"kind": "text"}] == rows


def test_statistics_are_grouped_by_a_tag(session):
    """`by="tags.NAME"` pools the batches that say the same of it; those that say nothing are a group."""
    rows = session.reduce("kl", ["avg", "median", "count"], by=["step", "tags.modality"]).to_pylist()
    found = {row["tags.modality"]: (row["avg"], row["median"], row["count"]) for row in rows}
    assert {"image": (6.0, 6.0, 12), "text": (5.0, 5.0, 12), None: (7.0, 7.0, 12)} == found
    by_shard = session.percentiles(["kl", "score"], [0.5], by="tags.shard").to_pylist()
    assert {("kl", "0"): 0.5, ("kl", "1"): 10.5, ("kl", None): 7.0, ("score", None): 1.0} == {
        (row["key"], row["tags.shard"]): row["p50"] for row in by_shard
    }
    sequences = session.reduce("kl", "avg", by=["sequence", "tags.modality"]).to_pylist()
    assert {"text-0", "text-1"} == {r["sample_id"] for r in sequences if r["tags.modality"] == "text"}


def test_a_tag_that_nothing_has_is_refused(session):
    """Grouping by it would pool everything silently."""
    with pytest.raises(errors.UnansweredError, match=r"got 'tags.modalty'; near: 'tags.modality'"):
        session.reduce("kl", "avg", by=["tags.modalty"])
    with pytest.raises(errors.QueryError, match=r"and tags, as in 'tags.modality', got 'modality'"):
        session.reduce("kl", "avg", by=["modality"])
