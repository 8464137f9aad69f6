"""Keys asked together: conditions, correlations and sequences, against numpy on what was recorded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator import open_run
from eventlog import errors
from tests.runs import RunBuilder


def close(want, got):
    if want is None or got is None:
        return want is got
    return (math.isnan(want) and math.isnan(got)) or math.isclose(want, got, rel_tol=1e-9, abs_tol=1e-9)


def commit(run, ranks, step):
    stats = run.export(ranks, time=10 * step)
    for producer in ranks:
        leads = producer is ranks[0]
        producer.commit(step, stats if leads else (), time=10 * step + 5, epoch=step // 2, leader=leads)


# -- the question nobody else answers --------------------------------------------------------------------


def batch(rng, n, width, odd):
    """One micro-batch: KL per token and reward per sequence, under masks of their own."""
    kl = rng.normal(size=(n, width)).astype(np.float32)
    reward = rng.normal(size=n).astype(np.float32)
    if odd:
        kl.flat[rng.integers(kl.size)] = rng.choice([np.nan, np.inf, -np.inf])
        reward[rng.integers(n)] = rng.choice([np.nan, np.inf, -np.inf])
    return {
        "kl": kl,
        "reward": reward,
        "tokens": rng.random((n, width)) < 0.6,
        "seqs": rng.random(n) < 0.8,
    }


def record(tracker, made, packed=False):
    with tracker.scope("ppo_actor"):
        tokens, kl, about = made["tokens"], made["kl"], None
        if packed:
            n, width = tokens.shape
            about = {"cu_seqlens": np.arange(0, n * width + 1, width)}
            tokens, kl = tokens.reshape(-1), kl.reshape(-1)
        tracker.denominator({"n_valid_tokens": tokens, "n_seqs": made["seqs"]}, about=about)
        tracker.stat("n_valid_tokens", {"kl_rewards": kl})
        tracker.stat("n_seqs", {"final_reward": made["reward"]})


def pooled(those, condition):
    """Return the KL of the selected tokens of the sequences that meet a condition on their reward."""
    with np.errstate(invalid="ignore"):
        parts = [
            m["kl"][m["tokens"] & (m["seqs"] & condition(m["reward"].astype(np.float64)))[:, None]]
            for m in those
        ]
    return np.concatenate([*parts, np.empty(0)]).astype(np.float64)


CONDITIONS = {
    "ppo_actor/final_reward > 0": lambda r: r > 0,
    "ppo_actor/final_reward <= -0.5 or ppo_actor/final_reward>=1e0": lambda r: (r <= -0.5) | (r >= 1),
    "not (ppo_actor/final_reward < 0.25)": lambda r: ~(r < 0.25),
    "ppo_actor/n_seqs and ppo_actor/final_reward != 0": lambda r: r != 0,
}


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 3),
    packed=st.booleans(),
    odd=st.booleans(),
    condition=st.sampled_from(sorted(CONDITIONS)),
)
def test_mean_kl_over_sequences_whose_reward_is_positive(
    tmp_path_factory, seed, steps, packed, odd, condition
):
    """A condition per sequence selects its tokens: every statistic is numpy's (report f10)."""
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("run")
    made: dict[tuple[int, int], list] = {}
    with RunBuilder(path) as run:
        ranks = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
        for step in range(steps):
            for producer in ranks:
                for _ in range(rng.integers(1, 4)):
                    one = batch(rng, int(rng.integers(1, 5)), 6, odd)
                    record(producer.tracker(), one, packed)
                    made.setdefault((step, producer.rank), []).append(one)
            commit(run, ranks, step)
    stats = ["avg", "sum", "count", "std", "median", "p90", "min", "max", "nonfinite"]
    with open_run(path) as session:
        for by in (["step"], ["step", "rank"], []):
            groups: dict[tuple, list] = {}
            for (step, rank), those in made.items():
                groups.setdefault((step, rank)[: len(by)], []).extend(those)
            try:
                rows = session.reduce("ppo_actor/kl_rewards", stats, by, where=condition).to_pylist()
            except errors.QueryError:
                assert not sum(len(pooled(those, CONDITIONS[condition])) for those in groups.values())
                continue
            assert sorted(groups) == [tuple(row[name] for name in by) for row in rows]
            for row in rows:
                v = pooled(groups[tuple(row[name] for name in by)], CONDITIONS[condition])
                assert (len(v), 0, 0) == (row["count"], row["missing"], row["unmatched"])
                assert np.count_nonzero(~np.isfinite(v)) == row["nonfinite"]
                if len(v) > 1:
                    with np.errstate(invalid="ignore"):
                        want = {"avg": v.mean(), "sum": v.sum(), "std": v.std(ddof=1)}
                        want |= {"min": v.min(), "max": v.max()}
                        if np.isfinite(v).all():
                            want |= {"median": np.quantile(v, 0.5), "p90": np.quantile(v, 0.9)}
                    assert [] == [(n, w, row[n]) for n, w in want.items() if not close(w, row[n])]


@pytest.fixture
def trained(run):
    """Two ranks, two steps, two micro-batches; returns (session, what was recorded)."""
    rng = np.random.default_rng(11)
    ranks = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
    made = []
    for step in range(2):
        for producer in ranks:
            for _ in range(2):
                made.append({"step": step, "rank": producer.rank, **batch(rng, 3, 4, odd=False)})
                record(producer.tracker(), made[-1])
            producer.tracker().scalar({"lr": 0.1})
            producer.tracker().counter({"seen": 3})
        commit(run, ranks, step)
    return run.open(), made


def test_a_mask_is_a_condition(trained):
    """A denominator by itself selects where it is true; `not` where it is not."""
    session, made = trained
    table = session.reduce(
        "ppo_actor/kl_rewards", ["sum", "count"], by=[], where="not ppo_actor/n_seqs"
    ).to_pylist()
    v = np.concatenate([m["kl"][m["tokens"] & ~m["seqs"][:, None]] for m in made]).astype(float)
    assert table[0]["sum"] == pytest.approx(v.sum(), rel=1e-9)
    assert len(v) == table[0]["count"]


def test_masks_can_be_counted_under_a_condition(trained):
    """How many tokens the rewarded sequences have is a sum of the mask."""
    session, made = trained
    rows = session.reduce(
        "ppo_actor/n_valid_tokens", ["sum", "count", "avg"], where="ppo_actor/final_reward > 0"
    ).to_pylist()
    for row in rows:
        own = [m for m in made if m["step"] == row["step"]]
        n = sum(int(m["tokens"][m["seqs"] & (m["reward"] > 0)].sum()) for m in own)
        assert (n, n, 1.0) == (row["sum"], row["count"], row["avg"])


def test_percentiles_and_histograms_take_conditions(trained):
    """Each question that reads values takes `where`."""
    session, made = trained
    where = "ppo_actor/final_reward > 0"
    v = pooled(made, CONDITIONS[where])
    row = session.percentiles("ppo_actor/kl_rewards", [0.1, 0.9], [], where=where).to_pylist()[0]
    assert [row["p10"], row["p90"]] == pytest.approx(np.quantile(v, [0.1, 0.9]).tolist(), rel=1e-12)
    counts = session.histogram("ppo_actor/kl_rewards", 5, where=where)["count"].to_pylist()
    assert np.histogram(v, 5)[0].tolist() == counts


def test_several_keys_are_answered_in_one_pass(trained):
    """Globs and lists give a column `key`."""
    session, _ = trained
    table = session.reduce("ppo_actor/*", ["count", "p50"], by=[])
    assert [
        "ppo_actor/final_reward",
        "ppo_actor/kl_rewards",
        "ppo_actor/n_seqs",
        "ppo_actor/n_valid_tokens",
    ] == (table["key"].to_pylist())
    single = session.reduce("ppo_actor/kl_rewards", ["count", "p50"], by=[]).to_pylist()[0]
    assert single == {k: v for k, v in table.to_pylist()[1].items() if k != "key"}
    assert "key" in session.percentiles(["lr"], 0.5).column_names


# -- what belongs together, and what does not ------------------------------------------------------------


def test_elements_under_one_mask_are_compared_one_by_one(run):
    """A condition on a stat under the same mask, or of the same shape, works element by element."""
    leader = run.producer()
    rng = np.random.default_rng(0)
    x, y, z = rng.normal(size=(3, 4, 5)).astype(np.float32)
    mask, other = rng.random((2, 4, 5)) < 0.7
    tracker = leader.tracker()
    tracker.denominator({"m": mask, "o": other})
    tracker.stat("m", {"x": x, "y": y})
    tracker.stat("o", {"z": z})
    commit(run, [leader], 0)
    session = run.open()

    def total(where):
        return session.reduce("x", "sum", where=where).to_pylist()[0]["sum"]

    f = x.astype(float)
    assert total("y > 0") == pytest.approx(f[mask & (y > 0)].sum(), rel=1e-9)
    assert total("z > 0") == pytest.approx(f[mask & other & (z > 0)].sum(), rel=1e-9)
    assert total("o") == pytest.approx(f[mask & other].sum(), rel=1e-9)
    assert total("not (z > 0)") == pytest.approx(f[mask & other & ~(z > 0)].sum(), rel=1e-9)
    assert total("y > 0 or z > 0") == pytest.approx(f[mask & ((y > 0) | (other & (z > 0)))].sum(), rel=1e-9)


def test_unequal_numbers_of_batches_are_refused(run):
    """Two mini-batches of one key beside four of another: nobody knows which belong together."""
    leader = run.producer()
    tracker = leader.tracker()
    for n in range(4):
        tracker.denominator({"m": np.ones(3, bool)} | ({"o": np.ones(3, bool)} if n % 2 else {}))
        tracker.stat("m", {"x": np.ones(3)})
        tracker.stat("o", {"y": np.ones(3)}) if n % 2 else None
    commit(run, [leader], 7)
    with pytest.raises(
        errors.QueryError,
        match=r"expected as many batches of 'y' as of 'x', got 2 and 4: .* is not known; step 7, main-0",
    ):
        run.open().reduce("x", where="y > 0")


def test_a_key_recorded_twice_under_one_mask_is_refused_beside_one_recorded_once(run):
    """The refusal counts the records under the mask, not its batches, which are one."""
    leader = run.producer()
    tracker = leader.tracker()
    tracker.denominator({"m": np.ones(3, bool)})
    tracker.stat("m", {"x": np.ones(3)})
    tracker.stat("m", {"x": np.ones(3), "y": np.ones(3)})
    commit(run, [leader], 7)
    with pytest.raises(
        errors.UnansweredError,
        match=r"expected as many records under one mask of 'x' as of 'y', got 2 and 1: .*; step 7, main-0",
    ):
        run.open().reduce("y", where="x > 0")


def test_a_key_recorded_in_some_batches_only_is_paired_by_its_masks(run):
    """Masks are registered in every batch: they tell in which of them a key was recorded."""
    leader = run.producer()
    tracker = leader.tracker()
    for n in range(4):
        tracker.denominator({"m": np.ones(2, bool), "o": np.ones(2, bool)})
        tracker.stat("m", {"x": np.full(2, float(n))})
        tracker.stat("o", {"y": np.full(2, float(n))}) if n % 2 else None
    commit(run, [leader], 0)
    row = run.open().reduce("x", ["sum", "count"], where="y > 0").to_pylist()[0]
    assert {"step": 0, "sum": 8.0, "count": 4, "missing": 0, "unmatched": 4} == row


def test_shapes_that_do_not_meet_are_refused(run):
    """A value per token cannot select sequences."""
    leader = run.producer()
    tracker = leader.tracker()
    tracker.denominator({"seqs": np.ones(3, bool), "tokens": np.ones((3, 4), bool)})
    tracker.stat("seqs", {"reward": np.ones(3)})
    tracker.stat("tokens", {"kl": np.ones((3, 4))})
    commit(run, [leader], 0)
    with pytest.raises(
        errors.QueryError, match=r"expected 'kl' in the shape \[3\] of 'reward', .*, got the shape \[3, 4\]"
    ):
        run.open().reduce("reward", where="kl > 0")


def test_scalars_are_paired_call_by_call(run):
    """What was filtered or failed stays in the log: the mean over all and over used ones (report f12)."""
    worker = run.producer("rollout")
    status = [0.0] * 6 + [1.0] * 3 + [2.0]  # used, filtered, errored
    for i, one in enumerate(status):
        worker.tracker("rollout").scalar({"reward": float(i), "status": one})
    commit(run, [worker], 0)
    session = run.open()
    assert [4.5] == session.reduce("rollout/reward")["avg"].to_pylist()
    assert [2.5] == session.reduce("rollout/reward", where="rollout/status = 0")["avg"].to_pylist()
    assert [9.0] == session.reduce("rollout/reward", where="rollout/status = 2")["avg"].to_pylist()
    shares = session.sql(
        "select value, count(*) as n from scalars where key = 'rollout/status' group by 1 order by 1"
    )
    assert [(0, 6), (1, 3), (2, 1)] == [tuple(row.values()) for row in shares.to_pylist()]


def test_statuses_may_be_masks_too(run):
    """Recorded as tensors, a mask says which rollouts were used (report f12)."""
    leader = run.producer()
    used = np.arange(10) < 6
    leader.tracker().denominator({"all": np.ones(10, bool), "used": used})
    leader.tracker().stat("all", {"reward": np.arange(10.0)})
    commit(run, [leader], 0)
    session = run.open()
    assert [4.5] == session.reduce("reward")["avg"].to_pylist()
    assert [2.5] == session.reduce("reward", where="used")["avg"].to_pylist()


def test_scalars_of_other_calls_are_refused(run):
    """Two scalars that were recorded in calls of their own have nothing to do with each other."""
    leader = run.producer()
    for value in range(3):
        leader.tracker().scalar({"a": value})
    leader.tracker().scalar({"b": 1.0})
    leader.tracker().denominator({"m": np.ones(3, bool)})
    leader.tracker().stat("m", {"x": np.ones(3)})
    commit(run, [leader], 0)
    session = run.open()
    with pytest.raises(
        errors.QueryError, match="expected 'b' and 'a' recorded in the same calls, got 1 and 3"
    ):
        session.reduce("a", where="b > 0")
    with pytest.raises(errors.QueryError, match="expected 'a' recorded under masks, as 'x' was"):
        session.reduce("x", where="a > 0")


def test_ranks_without_the_condition_are_counted(run):
    """Where a process did not record the condition's key, its values are told as unmatched."""
    ranks = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
    for producer in ranks:
        producer.tracker().denominator({"m": np.ones(3, bool)})
        producer.tracker().stat("m", {"x": np.full(3, 1.0 + producer.rank)})
    ranks[1].tracker().stat("m", {"y": np.array([1.0, -1.0, 1.0])})
    commit(run, ranks, 0)
    session = run.open()
    row = session.reduce("x", ["sum", "count"], where="y > 0").to_pylist()[0]
    assert {"step": 0, "sum": 4.0, "count": 2, "missing": 0, "unmatched": 3} == row


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "ppo_actor/final_rewrd > 0",
            "expected a recorded key in the condition, got .*; near: .*final_reward'",
        ),
        (
            "ppo_actor/final_reward",
            "expected a comparison with 'ppo_actor/final_reward', as in .* got it alone",
        ),
        ("ppo_actor/final_reward > ", "expected a number, got the end in the condition"),
        ("ppo_actor/final_reward > high", "expected a number, got 'high' in the condition"),
        ("(ppo_actor/n_seqs", r"expected '\)', got the end"),
        ("ppo_actor/n_seqs ppo_actor/n_seqs", "expected the end, 'and' or 'or', got 'ppo_actor/n_seqs'"),
        ("", "expected a key, got the end"),
        ("and", "expected a key, got 'and'"),
        ("ppo_actor/final_reward ! 0", "expected the end, 'and' or 'or', got '!'"),
    ],
)
def test_bad_conditions_are_explained(trained, where, message):
    """The error says what was expected at which word, and shows what a condition looks like."""
    with pytest.raises(errors.QueryError, match=message):
        trained[0].reduce("ppo_actor/kl_rewards", where=where)


def test_keys_in_conditions_may_be_quoted(run):
    """A key with spaces or brackets stands in double quotes."""
    leader = run.producer()
    key = 'a (b) "c" > 0'
    leader.tracker().denominator({"m": np.ones(2, bool)})
    leader.tracker().stat("m", {"x": np.array([1.0, 2.0]), key: np.array([0.0, 1.0])})
    commit(run, [leader], 0)
    quoted = key.replace('"', '""')
    assert [2.0] == run.open().reduce("x", where=f'"{quoted}" > 0')["avg"].to_pylist()


@pytest.mark.parametrize("scale", [1e-200, 5e-322, 1e200, 1e307])
def test_a_correlation_has_no_scale(run, scale):
    """Values whose squares float64 does not know are correlated as others are."""
    leader = run.producer()
    leader.tracker().denominator({"m": np.ones(4, bool)})
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 2.0, 4.0])
    leader.tracker().stat("m", {"x": x * scale, "y": -y / scale if scale > 1e-300 else -y})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    (found,) = run.open().correlation("x", "y")["correlation"].to_pylist()
    assert -0.8 == pytest.approx(found, rel=1e-9)


# -- correlation -----------------------------------------------------------------------------------------


def test_keys_that_share_a_mask_correlate(run):
    """Pearson's correlation over the pairs of all ranks and calls, as numpy has it."""
    rng = np.random.default_rng(5)
    ranks = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
    found = {}
    for step in range(2):
        for producer in ranks:
            for _ in range(3):
                mask = rng.random((4, 6)) < 0.7
                x = rng.normal(size=(4, 6)).astype(np.float32) + 100
                y = (0.5 * x + rng.normal(size=(4, 6))).astype(np.float32)
                producer.tracker().denominator({"m": mask})
                producer.tracker().stat("m", {"x": x, "y": y})
                found.setdefault(step, []).append((x[mask], y[mask]))
        commit(run, ranks, step)
    session = run.open()
    for row in session.correlation("x", "y", by="step").to_pylist():
        x, y = (np.concatenate(those).astype(float) for those in zip(*found[row["step"]], strict=True))
        assert row["correlation"] == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-9)
        assert len(x) == row["count"]
    assert session.correlation("x", "y").equals(session.correlation("x", "y"))
    assert session.correlation("x", "x")["correlation"].to_pylist() == pytest.approx([1.0], rel=1e-15)


def test_correlations_of_nothing_constants_and_nan(run):
    """Null of one pair and of a constant, NaN where a value is NaN or infinite (report g14)."""
    leader = run.producer()
    tracker = leader.tracker()
    for step, (x, y) in enumerate(
        [([1.0], [2.0]), ([1, 2], [5.4, 5.4]), ([1, math.nan], [1, 2]), ([1, 2], [4, 2])]
    ):
        tracker.denominator({"m": np.ones(len(x), bool)})
        tracker.stat("m", {"x": np.array(x, float), "y": np.array(y, float)})
        commit(run, [leader], step)
    found = run.open().correlation("x", "y", by=["step"])["correlation"].to_pylist()
    assert [None, None] == found[:2]
    assert math.isnan(found[2])
    assert -1.0 == pytest.approx(found[3], rel=1e-15)


def test_a_value_per_sequence_correlates_with_its_tokens(trained):
    """It stands for each of them."""
    session, made = trained
    x = np.concatenate([m["kl"][m["tokens"] & m["seqs"][:, None]] for m in made])
    y = np.concatenate(
        [np.repeat(m["reward"], 4).reshape(3, 4)[m["tokens"] & m["seqs"][:, None]] for m in made]
    )
    row = session.correlation("ppo_actor/kl_rewards", "ppo_actor/final_reward").to_pylist()[0]
    assert row["correlation"] == pytest.approx(np.corrcoef(x.astype(float), y.astype(float))[0, 1], rel=1e-9)
    assert len(x) == row["count"]


# -- sequences -------------------------------------------------------------------------------------------


def test_statistics_by_sequence(trained):
    """Every sequence of every call has a row, the empty ones too."""
    session, made = trained
    table = session.reduce("ppo_actor/kl_rewards", ["count", "avg", "max", "std", "p90"], by="sequence")
    names = [
        "step",
        "role",
        "rank",
        "window",
        "call",
        "sequence",
        "sample_id",
        "count",
        "avg",
        "max",
        "std",
        "p90",
        "missing",
    ]
    assert names == table.column_names
    rows = table.to_pylist()
    want = [(m["step"], m["rank"], i) for m in made for i in range(3)]
    assert want == [(row["step"], row["rank"], row["sequence"]) for row in rows]
    values = [m["kl"][i][m["tokens"][i]].astype(float) for m in made for i in range(3)]
    for v, row in zip(values, rows, strict=True):
        assert len(v) == row["count"]
        if len(v) > 1:
            assert (row["avg"], row["max"], row["std"], row["p90"]) == pytest.approx(
                (v.mean(), v.max(), v.std(ddof=1), np.quantile(v, 0.9)), rel=1e-9
            )
    sql = session.sql("select step, rank, sequence, count, avg from by_sequence('ppo_actor/kl_rewards')")
    assert sql.to_pylist() == [{name: row[name] for name in sql.column_names} for row in rows]


def test_packed_sequences_have_their_bounds(run):
    """Of a packed batch the sequences lie between cu_seqlens, and have the ids they were given."""
    leader = run.producer()
    mask, values = np.array([1, 1, 0, 1, 1, 1], bool), np.arange(6.0)
    about = {"cu_seqlens": np.array([0, 2, 3, 6]), "sample_ids": ["a", "b", "c"]}
    leader.tracker().denominator({"tokens": mask, "seqs": np.array([True, True, False])}, about=about)
    leader.tracker().stat("tokens", {"x": values})
    leader.tracker().stat("seqs", {"reward": np.array([1.0, -1.0, 5.0])})
    commit(run, [leader], 0)
    session = run.open()
    rows = session.reduce("x", ["count", "avg"], by="sequence").to_pylist()
    assert [(0, "a", 2, 0.5), (1, "b", 0, None), (2, "c", 3, 4.0)] == [
        tuple(row[name] for name in ("sequence", "sample_id", "count", "avg")) for row in rows
    ]
    assert [2, 0, 3] == session.reduce("tokens", "sum", by="sequence")["sum"].to_pylist()
    assert [0.5] == session.reduce("x", where="reward > 0")["avg"].to_pylist()
    samples = session.sql("select sample_id, value from samples where key = 'reward' order by 1").to_pylist()
    assert [("a", 1.0), ("b", -1.0)] == [tuple(row.values()) for row in samples]
    by_sequence = session.sql("select sample_id, count, avg from by_sequence('x')").to_pylist()
    assert [("a", 2, 0.5), ("b", 0, None), ("c", 3, 4.0)] == [tuple(row.values()) for row in by_sequence]


def test_sequences_of_scalars_are_refused(trained):
    """A scalar has no mask, and so no sequences."""
    with pytest.raises(
        errors.QueryError, match=r"expected a key recorded under a mask, .*, got 'lr', .* a scalar"
    ):
        trained[0].reduce("lr", by="sequence")
    with pytest.raises(errors.QueryError, match="expected to group by anything but sequence"):
        trained[0].histogram("ppo_actor/kl_rewards", by="sequence")


def test_extremes_of_what_the_moments_do_not_know(trained):
    """Counters and masks keep no extremes: they are read from the values."""
    session, _ = trained
    assert [{"min": 3.0, "max": 3.0, "sum": 12.0, "missing": 0}] == session.reduce(
        "seen", ["min", "max", "sum"], by=[]
    ).to_pylist()
    assert [{"min": 1.0, "max": 1.0, "missing": 0}] == session.reduce(
        "ppo_actor/n_seqs", ["min", "max"], by=[]
    ).to_pylist()
