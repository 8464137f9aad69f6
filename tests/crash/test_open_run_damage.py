"""A run asked with a cut or a flipped bit in any of its files: no foreign error, no wrong number."""

import json
import random
from collections import Counter

import pytest
import torch

from aggregator import open_run
from eventlog.errors import ArealMetricsError
from tests.runs import RunBuilder
from tests.storage import flip

STEPS = [
    pytest.param(16 * 61, id="thinned"),
    pytest.param(16, id="every-16th", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a run of one process and one step, with a scalar and a tensor."""
    path = tmp_path_factory.mktemp("tiny") / "run"
    with RunBuilder(path) as run:
        main = run.producer("main", attempt=0)
        run.attempt(leader=main, config={"lr": 1e-5})
        tracker = main.tracker()
        tracker.scalar({"loss": 2.5})
        tracker.denominator({"mask": torch.tensor([True, False, True, True])})
        tracker.stat("mask", {"adv": torch.tensor([1.0, 9.0, 3.0, 5.0])})
        stats = run.export(main, step=7)
        main.commit(7, stats, time=5, leader=True)
    return path


def answers(path):
    """Return what a run answers to the questions people ask, and whether it said that something is wrong."""
    with open_run(path) as run:
        said = {
            "committed": run.metrics(),
            "recomputed": run.metrics(source="recomputed").select(["step", "key", "value", "incomplete"]),
        }
        try:
            said["percentiles"] = run.percentiles("adv", [0.5])
        except ArealMetricsError:  # the key, or all its values, are gone
            said["percentiles"] = None
        found = {name: [] if table is None else table.to_pylist() for name, table in said.items()}
        return found, run.problems


def wrong(found, intact):
    """Return the numbers that are neither right nor marked as incomplete."""
    bad = [row for row in found["committed"] if row not in intact["committed"]]
    bad += [row for row in found["recomputed"] if row not in intact["recomputed"] and not row["incomplete"]]
    right = {row["p50"] for row in intact["percentiles"]}
    return bad + [row for row in found["percentiles"] if row["p50"] not in right and not row["missing"]]


def places(size, step):
    """Return every step-th offset, and the last one."""
    return sorted({*range(0, size, step), size - 1})


def files(path):
    """Return every file of a run."""
    return sorted(file for file in path.rglob("*.*") if file.is_file())


@pytest.mark.parametrize("step", STEPS)
def test_a_cut_file_gives_no_wrong_answer(tiny, step):
    """Every file cut at every so many bytes: the rest is answered, rightly (reports g2, g4)."""
    intact, problems = answers(tiny)
    assert [] == problems
    count = Counter()
    for file in files(tiny):
        content = file.read_bytes()
        try:
            for size in places(len(content), step):
                file.write_bytes(content[:size])
                found, problems = answers(tiny)
                assert [] == wrong(found, intact), (file.name, size)
                same = same_as(found, intact)
                count["reported" if problems else "harmless" if same else "not yet written"] += 1
        finally:
            file.write_bytes(content)
    print(dict(count))
    assert count["reported"] > 5


def same_as(found, intact):
    """Return whether two answers say the same; NaN is NaN."""
    return json.dumps(found, default=str) == json.dumps(intact, default=str)


@pytest.mark.parametrize("step", STEPS)
def test_no_flipped_bit_gives_a_wrong_answer(tiny, step):
    """A bit flipped in a byte of every so many: detected or harmless, missed 0 (reports g1, g4)."""
    intact, _ = answers(tiny)
    chosen = random.Random(step)
    count = Counter(missed=0)
    for file in files(tiny):
        content = file.read_bytes()
        try:
            for offset in places(len(content), step):
                flip(file, offset, chosen.randrange(8))
                found, problems = answers(tiny)
                assert [] == wrong(found, intact), (file.name, offset)
                count["detected" if problems else "harmless" if same_as(found, intact) else "missed"] += 1
                file.write_bytes(content)
        finally:
            file.write_bytes(content)
    print(dict(count))
    assert 0 == count["missed"]
    assert count["detected"] > 5
