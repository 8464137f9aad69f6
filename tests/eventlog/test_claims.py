"""Attempts whose claims are gone: told, saved, and their numbers given to nobody else."""

import shutil
from contextlib import closing

import pytest

import eventlog
from aggregator import open_run, recover, stats_tracker, verify
from eventlog.attempt import LOST
from eventlog.errors import LogError
from eventlog.rundir import RunDir
from tests.storage import flip


def step(log, number, value):
    """Record a loss and commit it."""
    stats_tracker.scalar(loss=value)
    assert log.commit(0, number, number, [stats_tracker.export_all()])


def live(run, steps, resumed, offset):
    """Let a process lead an attempt through some steps, whose losses tell them apart; return its number."""
    log = eventlog.start(run, role="actor", rank=0, world_size=1)
    attempt = log.claim_attempt(resume_step=resumed)
    for number in steps:
        step(log, number, offset + number)
    eventlog.stop()
    return attempt


def losses(run, **asked):
    """Return the losses that are served of a run, by step, and its problems."""
    with open_run(run) as session:
        rows = session.metrics(["loss"], **asked).to_pylist()
        return {row["step"]: row["value"] for row in rows}, session.problems


@pytest.fixture
def two(tmp_path):
    """Return a run of two attempts: steps 0 to 5, and 3 to 8 anew."""
    run = tmp_path / "run"
    assert [0, 1] == [live(run, range(6), 0, 100.0), live(run, range(3, 9), 3, 200.0)]
    return run


def claim(run, number):
    """Return the file of a claim."""
    return run / "attempts" / f"{number:04d}.json"


WHOLE = {**{n: 100.0 + n for n in range(3)}, **{n: 200.0 + n for n in range(3, 9)}}


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)])
def test_a_claim_that_is_gone_is_told(two, lost):
    """Whoever led an attempt had claimed it: a claim that is not there is a problem of the run."""
    for number in lost:
        claim(two, number).unlink()
    served, problems = losses(two)
    assert WHOLE == served
    found = verify(two)
    bad = [(file.path.name, file.kind) for file in found.files if file.problems]
    assert ([(claim(two, n).name, "manifest") for n in lost], False) == (bad, found.clean)
    assert len(lost) == len(problems)
    for number, problem in zip(lost, problems, strict=True):
        assert problem.startswith("is missing: the attempt was led by session ")
        assert problem.endswith(str(claim(two, number)))


def test_superseded_steps_do_not_come_back_without_a_word(tmp_path):
    """Steps that nothing but the lost claim had superseded are served again, and the run says why."""
    run = tmp_path / "run"
    live(run, range(6), 0, 100.0)
    live(run, [5], 3, 200.0)  # it had nothing to commit of steps 3 and 4
    assert ({0: 100.0, 1: 101.0, 2: 102.0, 5: 205.0}, []) == losses(run)
    claim(run, 1).unlink()
    served, problems = losses(run)
    assert ([0, 1, 2, 3, 4, 5], 205.0) == (list(served), served[5])
    assert "is missing: the attempt was led by" in problems[0]


@pytest.mark.parametrize("source", ["committed", "recomputed"])
def test_a_number_is_not_given_twice(two, source):
    """With all claims gone a restart gets the number behind those that commits name, and its steps count."""
    shutil.rmtree(two / "attempts")
    assert 2 == live(two, range(6, 8), 6, 300.0)
    served, _ = losses(two, source=source)
    assert {n: v for n, v in WHOLE.items() if n < 6} | {6: 306.0, 7: 307.0} == served


def test_the_number_of_an_attempt_without_a_commit_is_not_given_twice(two):
    """Records name their attempt, too: one that was killed before its first commit keeps its number."""
    log = eventlog.start(two, role="actor", rank=0, world_size=1)
    assert 2 == log.claim_attempt(resume_step=9)
    stats_tracker.scalar(loss=1.0)
    stats_tracker.export_all()
    eventlog.stop()
    claim(two, 2).unlink()
    assert 3 == live(two, [9], 9, 300.0)


def test_the_claims_of_one_process_are_known_one_by_one(tmp_path):
    """A process that claimed anew between its commits led both attempts."""
    run = tmp_path / "run"
    log = eventlog.start(run, role="actor", rank=0, world_size=1)
    for attempt in range(3):
        assert attempt == log.claim_attempt(resume_step=attempt)
        step(log, attempt, 1.0)
    eventlog.stop()
    for number in (1, 2):
        claim(run, number).unlink()
    bad = [file.path.name for file in verify(run).files if file.problems]
    assert ["0001.json", "0002.json"] == bad
    assert 3 == live(run, [3], 3, 1.0)


def test_a_given_number_whose_claim_is_gone_is_refused(two):
    """A number that somebody led is taken, though its claim is gone."""
    claim(two, 1).unlink()
    log = eventlog.start(two, role="actor", attempt=1)
    with pytest.raises(LogError, match="expected attempt 1 to be free, got a claim of it"):
        log.claim_attempt()


def test_a_given_number_that_others_name_first_is_free(two):
    """Processes that were told the number may commit before the leader claims it."""
    told = eventlog.Options(run_dir=str(two), role="worker", attempt=2)
    with closing(eventlog.Log(told)) as worker:
        assert worker.commit(0, 9, 9, [{"x": 1.0}])
    log = eventlog.start(two, role="actor", attempt=2)
    assert 2 == log.claim_attempt(resume_step=9)
    eventlog.stop()
    assert verify(two).clean


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_copy_says_that_a_claim_was_lost(two, tmp_path, how):
    """In the place of a lost claim the copy has one that says so, keeps the number and changes no answer."""
    if how == "damaged":
        flip(claim(two, 1), 30)
    else:
        claim(two, 1).unlink()
    before, copy = losses(two)[0], tmp_path / "copy"
    report = recover(two, copy)
    assert [claim(two, 1).name] == [file.path.name for file in report.files if file.discarded]
    assert not report.complete
    assert (before, []) == losses(copy)
    assert verify(copy).clean
    with open_run(copy) as session:
        assert ["finished", LOST] == [attempt["outcome"] for attempt in session.info()["attempts"]]
    first, second = RunDir.open(copy).attempts()
    assert (LOST, None) == (second.outcome, second.resume_step)
    assert ("actor", 0, first.host, first.pid) == (second.role, second.rank, second.host, second.pid)
    assert 2 == live(copy, range(6, 8), 6, 300.0)
    assert {n: v for n, v in WHOLE.items() if n < 6} | {6: 306.0, 7: 307.0} == losses(copy)[0]


def test_a_copy_keeps_the_number_of_a_damaged_claim_that_nobody_led(two, tmp_path):
    """Also where no commit names the attempt its number is not given again."""
    run = RunDir.open(two)
    number = run.claim_attempt({"role": "actor", "session": "x"})
    flip(claim(two, number), 30)
    recover(two, tmp_path / "copy")
    assert ["finished", "finished", LOST] == [a.outcome for a in RunDir.open(tmp_path / "copy").attempts()]
    assert 3 == live(tmp_path / "copy", [9], 9, 300.0)
