"""Pipes, devices and links where a run's files belong: questions, tables and merging go on without them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from aggregator import compact, merge_runs, open_run, verify
from eventlog import errors
from tests.runs import RunBuilder
from tests.storage import only
from tests.strange import names, put

KINDS = ("pipe", "loop", "folder")


def record(path, role="actor"):
    """Record three steps of one process."""
    with RunBuilder(path) as run:
        who = run.producer(role, attempt=0)
        run.attempt(leader=who)
        for step in range(3):
            who.tracker().denominator({"mask": np.array([True, False, True])})
            who.tracker().stat("mask", {"x": np.array([1.0 * step, 9.0, 3.0])})
            who.commit(step, run.export(who, time=10 * step), time=10 * step + 5, leader=True)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run that was compacted; tests work on copies of it."""
    path = record(tmp_path_factory.mktemp("whole") / "run")
    compact(path, workers=1)
    return path


@pytest.fixture
def each(whole, tmp_path):
    """Return a function that yields copies of the run, another file or folder replaced in each."""

    def replaced(kind, among=""):
        for name in [name for name in names(whole) if name.startswith(among)]:
            path = shutil.copytree(whole, tmp_path / "run")
            put(path / name, kind)
            yield path, name
            shutil.rmtree(path)

    return replaced


def answers(path):
    """Return what a run says of x, and its problems."""
    with open_run(path) as session:
        committed = session.metrics().to_pylist()
        session.metrics(source="recomputed")
        try:
            found = session.percentiles("x", [0.5]).to_pylist()
        except errors.QueryError:  # nothing is left of it
            found = []
        assert session.info()["problems"] is not None
        return committed, found, session.problems


def unseen(name):
    """Whether no question looks at a file."""
    return name.startswith("cursors")


@pytest.mark.parametrize("kind", KINDS)
def test_questions_are_answered_without_it(each, whole, kind):
    """What lies there is told, no number is wrong, and no question waits for it (b10)."""
    committed, values, problems = answers(whole)
    assert [] == problems
    for path, name in each(kind):
        told, found, problems = answers(path)
        assert all(row in committed for row in told)
        assert all(row in values or row["missing"] for row in found)
        assert unseen(name) or any(name in problem for problem in problems), name


@pytest.mark.parametrize("kind", KINDS)
def test_compaction_goes_on_without_it(each, kind):
    """What lies there is told; where it is in the way of the tables themselves, in an error of ours."""
    for path, name in each(kind):
        shutil.rmtree(path / "tables") if not name.startswith("tables") else None
        written_anew = name.startswith("tables/") and "payload" not in name  # that is not looked at
        if name == "tables" or (written_anew and kind == "folder"):
            with pytest.raises(errors.RunDirectoryError, match="expected to write the tables of the run"):
                compact(path, workers=1)
        else:
            made = compact(path, workers=1)
            known = any(name in problem for problem in made.problems)
            assert known or unseen(name) or name.startswith("tables"), name


@pytest.mark.parametrize("kind", KINDS)
def test_merging_goes_on_without_it(each, tmp_path, kind):
    """What lies there is told, and is missing in the new run."""
    other = record(tmp_path / "other", "critic")
    for path, name in each(kind):
        made = merge_runs(tmp_path / "merged", path, other, offsets=[3])
        known = any(name in problem for one in made for problem in one.problems)
        assert known or unseen(name) or name.startswith("tables"), name
        committed, _, _ = answers(tmp_path / "merged")
        assert len(committed) in (12, 24)  # of one run or of both
        shutil.rmtree(tmp_path / "merged")


def test_what_no_index_vouches_for_is_not_merged(whole, tmp_path):
    """Frames whose index is gone have steps that nobody could move: they stay behind, and that is told."""
    path = shutil.copytree(whole, tmp_path / "run")
    index = only(path / "commits", "*.idx")
    index.write_bytes(index.read_bytes()[:50])
    (made, _) = merge_runs(tmp_path / "merged", path, record(tmp_path / "other", "critic"), offsets=[3])
    assert any(index.name in problem for problem in made.problems)
    assert not list((tmp_path / "merged" / "commits" / "main-0").glob("*.arrows"))


@pytest.mark.parametrize("kind", KINDS)
def test_verification_of_tables_goes_on_without_it(each, kind):
    """Whatever lies in a file's place below RUN/tables is told by its name."""
    for path, name in each(kind, "tables"):
        problems = [problem for file in verify(path).files for problem in file.problems]
        assert any(name in problem for problem in problems), name
