"""A run lies where it was started, wherever the process goes, and whoever moves or removes its files."""

import multiprocessing
import os
import shutil
import time
import warnings

import pytest

import eventlog
from aggregator import open_run
from eventlog import Options, Recorder, RunDir, RunReader, drain, follow
from eventlog.errors import NotARunError, RunDirectoryError
from eventlog.log import Log
from eventlog.schema import LossCause, Stream


@pytest.fixture(autouse=True)
def no_log_left():
    """Every test ends without a started log."""
    yield
    eventlog.stop()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return the directory that the process is in, which has one named job."""
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def step(log, number):
    """Record a step of a log; return whether it is on the disk."""
    recorder = Recorder()
    recorder.scalar({"x": float(number)})
    log.write(drain([recorder]).frame)
    return log.commit(0, number, number)


def steps_of(path):
    """Return the steps that were committed, in order; of whatever cannot be read there is none."""
    reader = RunReader(path)
    found = [row["global_step"] for *_, batch in reader.commits() for row in batch.to_pylist()]
    assert [] == reader.problems
    return sorted(found)


def names(folder):
    """Return what lies in a folder, in order."""
    return sorted(entry.name for entry in folder.iterdir())


# Another directory


def test_a_process_that_changes_its_directory_records_where_it_began(here):
    """Attempts, events and commits of a relative run directory stay where it was meant."""
    log = eventlog.start("run")
    os.chdir("job")
    log.claim_attempt()
    assert all(step(log, number) for number in range(3))
    eventlog.stop()
    assert ([], ["attempts", "commits", "events", "run.json"]) == (names(here / "job"), names(here / "run"))
    assert ([0, 1, 2], ["finished"]) == (
        steps_of(here / "run"),
        [attempt.outcome for attempt in RunDir.open(here / "run").attempts()],
    )


def _child_records():
    os.chdir("job")
    assert step(eventlog.current(), 1)
    eventlog.stop()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_records_where_its_parent_began(here, monkeypatch):
    """A child that goes elsewhere before its first record joins the run all the same."""
    monkeypatch.setenv("AREAL_METRICS_DIR", "run")
    monkeypatch.setattr("eventlog.process._environment_read", False)
    assert step(eventlog.current(), 0)
    child = multiprocessing.get_context("fork").Process(target=_child_records)
    child.start()
    child.join(60)
    eventlog.stop()
    assert (0, [0, 1], []) == (child.exitcode, steps_of(here / "run"), names(here / "job"))


def test_a_log_of_its_own_stays_where_it_began(here):
    """A log beside the started one, as a logger with run= makes it, goes nowhere with the process."""
    log = Log(Options("run"))
    os.chdir("job")
    assert step(log, 0)
    log.close()
    assert ([0], str(here / "run")) == (steps_of(here / "run"), log.options.run_dir)


def test_what_reads_a_run_stays_where_it_began(here):
    """Readers, sessions and followers opened by a relative path go on after the directory changed."""
    log = eventlog.start("run")
    log.claim_attempt()
    assert step(log, 0)
    assert log.writer.flush(60)
    follower, reader = eventlog.Follower("run"), RunReader("run")
    with open_run("run") as session:
        os.chdir("job")
        assert [0] == [told.step for told in follower.poll()]
        assert [1] == session.percentiles("x", [0.5], by=["rank"])["count"].to_pylist()
        assert [str(here / "run")] == [session.info()["path"]]
        assert step(log, 1)
    assert ([1], 2) == ([told.step for told in follower.poll()], len(list(reader.commits())))


def test_a_directory_that_is_gone_is_told(here):
    """Where a process whose directory was removed means a run by a relative path there is none."""
    os.chdir("job")
    (here / "job").rmdir()
    with pytest.raises(RunDirectoryError, match="expected a directory to write to, got No such file"):
        eventlog.start("run")
    with pytest.raises(NotARunError, match="expected a run directory, got nothing: run"):
        RunDir.open("run")
    assert [] == list(follow("run", timeout=0, poll=0))


# Files that are removed or moved


def warned(log, number):
    """Record a step; return whether it is on the disk, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        durable = step(log, number)
    return durable, [str(each.message).rsplit(": ", 1)[0] for each in caught]


LOST = "expected step 3 on disk within 60 s, got a loss (1 such commits)"
MOVED = "files of the run were removed or moved while it is recorded, it goes on in new ones"


@pytest.mark.parametrize(
    ("harm", "lost"),
    [
        (lambda run: shutil.rmtree(run.parent), {Stream.RECORDS, Stream.PAYLOAD, Stream.COMMITS}),
        (lambda run: shutil.rmtree(run / "commits"), {Stream.COMMITS}),
        (lambda run: shutil.rmtree(run / "events"), {Stream.RECORDS, Stream.PAYLOAD}),
        (lambda run: run.parent.rename(run.parent.with_name("away")), set(Stream)),
        (
            lambda run: [
                run.rename(run.with_name("old")),
                shutil.copytree(run.with_name("old"), run),
                shutil.rmtree(run.with_name("old")),
            ],
            set(Stream),
        ),
    ],
    ids=["run", "commits", "events", "moved", "replaced by a copy"],
)
def test_a_run_that_is_removed_or_moved_goes_on_and_is_told(tmp_path, monkeypatch, harm, lost):
    """The next commit is not durable and warns, once; those after it lie in new files."""
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 1e6)  # it is the commit that finds out
    place = tmp_path / "runs" / "a"
    log = eventlog.start(place)
    log.claim_attempt()
    assert all(step(log, number) for number in range(3))
    assert log.writer.flush(60)
    before = log.run.id
    harm(place)
    assert (False, [LOST, MOVED]) == warned(log, 3)
    assert lost == {loss.stream for loss in log.losses()}
    assert {LossCause.PREVIOUS_SEGMENT} == {loss.cause for loss in log.losses()}
    assert [True, True] == [step(log, number) for number in (4, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the claim, which is gone
        eventlog.stop()
    reader = RunReader(place)
    told = {row["global_step"] for *_, batch in reader.commits() for row in batch.to_pylist()}
    (state,) = reader.sessions()
    assert ({3, 4, 5} <= told, before) == (True, reader.run.id)
    assert lost <= {loss.stream for loss in state.losses if loss.cause is LossCause.PREVIOUS_SEGMENT}


def test_what_is_removed_is_missed_without_a_commit(tmp_path, monkeypatch):
    """A process that commits nothing, as a worker's, finds out with its next sign of life."""
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 0.01)
    log = eventlog.start(tmp_path / "run")
    recorder = Recorder()
    recorder.scalar({"x": 1.0})
    log.write(drain([recorder]).frame)
    assert log.writer.flush(60)
    shutil.rmtree(tmp_path / "run")
    while not log.losses() or not list((tmp_path / "run").rglob("*.records.0001.idx")):
        time.sleep(0.01)
    assert [MOVED] == [said.rsplit(": ", 1)[0] for said in log.writer.news if "moved" in said]
    log.writer.news.clear()


def test_nothing_is_written_into_another_run_that_took_the_place(tmp_path):
    """A run begun anew in a directory that was emptied stays its own: what the old one records is lost."""
    place = tmp_path / "run"
    log = eventlog.start(place)
    assert step(log, 0)
    assert log.writer.flush(60)
    shutil.rmtree(place)
    other = RunDir.create(place)
    assert not warned(log, 1)[0]
    assert not warned(log, 2)[0]
    assert {"another run lies there"} == {
        loss.detail.partition("] ")[2] for loss in log.losses() if loss.cause is LossCause.WRITE_FAILED
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eventlog.stop()
    assert (["run.json"], other.id) == (names(place), RunDir.open(place).id)


def test_a_segment_in_which_nothing_stands_is_no_loss(tmp_path):
    """Files that were removed before anything was recorded are made anew, and nothing is lost."""
    log = eventlog.start(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(UserWarning, match=MOVED):
        assert log.commit(0, 0, 0)
    assert step(log, 1)
    eventlog.stop()
    assert ([], [0, 1]) == (log.losses(), steps_of(tmp_path / "run"))
