"""The log of a process: started by hand or by the environment, told windows, ended by anything."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest

import eventlog
from eventlog import Recorder, RunDir, RunReader, drain
from eventlog.errors import LogError, NotARunError, RecordingError, StepError
from eventlog.options import place_in_world


@pytest.fixture(autouse=True)
def no_log_left():
    """Every test ends without a started log."""
    yield
    eventlog.stop()


def run_python(code, env=None, *, check=True):
    """Run code in a fresh interpreter; return its standard output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done.stdout


def record(value=1.0, key="x"):
    recorder = Recorder()
    recorder.scalar({key: value})
    return drain([recorder]).frame


def records_of(path):
    return [row for _, _, batch in RunReader(path).records() for row in batch.to_pylist()]


def commits_of(path):
    return [row for _, _, batch in RunReader(path).commits() for row in batch.to_pylist()]


def payload_of(path):
    return [row for _, _, batch in RunReader(path).payload() for row in batch.to_pylist()]


def test_windows_and_commits_are_read_back(tmp_path):
    """A window, an export row and a commit come back as they went in, bound by the window range."""
    log = eventlog.start(tmp_path / "run", role="actor")
    frame = record(0.5)
    log.write(frame)
    log.write_export(
        export_id="g:0", members=None, window=frame.window, window_first=frame.window, step=None,
        reset=True, outcome="ok",
    )  # fmt: skip
    assert log.commit(0, 1, 7, [{"x": 0.5}])
    scalar, export = records_of(tmp_path / "run")
    assert ("x", 0.5, frame.window) == (scalar["key"], scalar["sum"], scalar["window"])
    assert ("export", "g:0") == (export["kind"], export["export_id"])
    marker, entry = commits_of(tmp_path / "run")
    assert (7, 0, frame.window) == (marker["global_step"], marker["window_first"], marker["window_last"])
    assert ("x", 0.5) == (entry["key"], entry["value"])
    eventlog.stop()  # a commit does not wait for payload
    (values,) = payload_of(tmp_path / "run")
    assert [0.5] == values["values64"]


def test_an_export_row_has_the_attempt_its_window_had(tmp_path):
    """Who knows no leader takes the highest claim when the window was drained, for all that is said of it."""
    log = eventlog.start(tmp_path, role="rollout")
    RunDir.open(tmp_path).claim_attempt({})
    frame = record()
    log.write(frame)
    RunDir.open(tmp_path).claim_attempt({})
    log.write_export(
        export_id="g:0", members=None, window=frame.window, window_first=frame.window, step=None,
        reset=True, outcome="ok",
    )  # fmt: skip
    eventlog.stop()
    assert [0, 0] == [row["attempt"] for row in records_of(tmp_path)]


def test_each_commit_covers_what_was_drained_since_the_last(tmp_path):
    """Commit ranges follow one another without gap or overlap; an empty one is null."""
    log = eventlog.start(tmp_path)
    windows = []
    for step in range(3):
        if step != 1:
            for _ in range(2):
                frame = record()
                log.write(frame)
                windows.append(frame.window)
        log.commit(0, step, step)
    found = [(row["window_first"], row["window_last"]) for row in commits_of(tmp_path)]
    assert found[1] == (None, None)
    assert found[0][1] == windows[1]
    assert (windows[1] + 1, windows[3]) == found[2]


def test_a_commit_survives_sigkill(tmp_path):
    """Every step whose commit returned is on disk when the process ends by SIGKILL (report b11)."""
    run_python(
        f"""
        import os, signal, eventlog
        import tests.patience
        from eventlog import Recorder, drain
        log = eventlog.start({str(tmp_path)!r})
        recorder = Recorder()
        for step in range(500):
            recorder.scalar({{"x": step}})
            log.write(drain([recorder]).frame)
            assert log.commit(0, step, step, [{{"x": step}}])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        check=False,
    )
    assert list(range(500)) == [row["sum"] for row in records_of(tmp_path)]
    assert list(range(500)) == [row["value"] for row in commits_of(tmp_path) if row["key"]]


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        ("pass", "finished"),
        ("raise KeyError('boom')", "exception"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", "signal"),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        ("eventlog.stop(); eventlog.stop()", "finished"),
    ],
)
def test_how_an_attempt_ended_is_recorded(tmp_path, ending, outcome):
    """A clean end, an exception and a signal are told apart; SIGKILL leaves no word (reports b11, b16)."""
    run_python(
        f"""
        import os, signal, time, eventlog
        import tests.patience
        from eventlog import Recorder, drain
        log = eventlog.start({str(tmp_path)!r})
        log.claim_attempt()
        recorder = Recorder()
        recorder.scalar({{"x": 1}})
        log.write(drain([recorder]).frame)
        if {ending!r}.startswith("os.kill(os.getpid(), signal.SIGKILL"):
            log.commit(0, 0, 0)
        {ending}
        """,
        check=False,
    )
    (attempt,) = RunDir.open(tmp_path).attempts()
    assert outcome == (attempt.outcome and attempt.outcome.split(":")[0])
    assert [1.0] == [row["sum"] for row in records_of(tmp_path)]


def test_a_handled_sigterm_stays_with_its_handler(tmp_path):
    """Where the program handles SIGTERM itself, the log does not take it over."""
    out = run_python(
        f"""
        import os, signal, eventlog
        signal.signal(signal.SIGTERM, lambda *_: print("mine"))
        eventlog.start({str(tmp_path)!r})
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    assert out == "mine\n"


def test_the_environment_starts_the_log(tmp_path):
    """AREAL_METRICS_DIR and its siblings start the log at the first use, with no code at all."""
    env = {
        "AREAL_METRICS_DIR": str(tmp_path), "AREAL_METRICS_ROLE": "rollout", "AREAL_METRICS_RANK": "3",
        "AREAL_METRICS_PAYLOAD": "off", "AREAL_METRICS_ATTEMPT": "2",
    }  # fmt: skip
    code = """
        import eventlog
        from eventlog import Recorder, drain
        log = eventlog.current()
        if log is not None:
            recorder = Recorder()
            recorder.scalar({"x": 1})
            log.write(drain([recorder]).frame)
    """
    run_python(code, env)
    (producer,) = RunReader(tmp_path).producers()
    assert ("rollout", 3) == (producer.role, producer.rank)
    assert [2] == [row["attempt"] for row in records_of(tmp_path)]
    assert payload_of(tmp_path) == []
    run_python(code, {**env, "AREAL_METRICS_DISABLED": "1", "AREAL_METRICS_RANK": "4"})
    assert len(RunReader(tmp_path).producers()) == 1


def test_one_log_per_process(tmp_path):
    """A second start says which log runs; stop makes room."""
    eventlog.start(tmp_path / "a")
    with pytest.raises(LogError, match=r"expected no started log, got one.*a$"):
        eventlog.start(tmp_path / "b")
    eventlog.stop()
    assert eventlog.current() is None
    eventlog.start(tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"role": "../up"}, LogError, r"role.*'\.\./up'"),
        ({"rank": -1}, RecordingError, "expected rank of 0 or more, got -1"),
        ({"rank": "0"}, RecordingError, r"expected rank \(an integer\), got str '0'"),
        ({"rank": 0, "world_size": -2}, RecordingError, "expected world_size of 0 or more, got -2"),
        ({"rank": 2**70}, LogError, "expected a rank of 0 to 999999999, got 1180591620717411303424"),
        ({"rank": 2, "world_size": 2}, LogError, "expected rank from 0 to below world_size 2, got 2"),
        ({"rank": 0, "world_size": 0}, LogError, "expected world_size of 1 to 999999999, got 0"),
        ({"attempt": -1}, RecordingError, "expected attempt of 0 or more, got -1"),
        ({"attempt": 10**9}, LogError, "expected an attempt of 0 to 999999999, got 1000000000"),
        ({"role": None}, LogError, "expected a role of letters, .*, got None"),
        ({"role": 5}, LogError, "expected a role of letters, .*, got 5"),
        ({"payload": None}, LogError, "expected payload to be full, sample, sample:N or off, got 'None'"),
        ({"payload_budget": 0}, LogError, "expected a payload budget in bytes of 1 or more.*got 0"),
        ({"payload_budget": "5 apples"}, LogError, "with a unit such as '2GB', got '5 apples'"),
        ({"payload": "some"}, LogError, "expected payload to be full, sample, sample:N or off, got 'some'"),
        ({"payload": "sample:0"}, LogError, "sample:N or off, got 'sample:0'"),
        ({"payload": "off:3"}, LogError, "sample:N or off, got 'off:3'"),
        ({"resume": "perhaps"}, LogError, "allow, must or never, got 'perhaps'"),
        ({"fsync": "often"}, LogError, "got 'often'"),
        ({"resume": "must"}, NotARunError, "run"),
    ],
)
def test_bad_options_are_refused(tmp_path, options, error, message):
    """Bad options raise at start, leave nothing started and no directory behind that looks like a run."""
    with pytest.raises(error, match=message):
        eventlog.start(tmp_path / "new", **options)
    assert eventlog.current() is None
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", ["", None, 5, b"run", "a\0b"])
def test_what_is_no_path_is_refused(path):
    """A run directory is a path as text."""
    with pytest.raises(LogError, match="expected a run directory, got "):
        eventlog.start(path)


@pytest.mark.parametrize(
    ("variables", "got"),
    [
        ({"DIR": "/proc/nothing"}, "RunDirectoryError expected a directory to write to, got"),
        ({"ROLE": "../x"}, "LogError expected a role of letters"),
        ({"RANK": "x"}, "LogError expected AREAL_METRICS_RANK to be an integer, got 'x'"),
        ({"PAYLOAD": "some"}, "LogError expected payload to be full"),
        ({"DISABLED": "perhaps"}, "LogError expected AREAL_METRICS_DISABLED to be 1, true, yes or on, or 0"),
        ({"FSYNC": "yes"}, "LogError expected fsync to be False, 'periodic' or 'commit', got 'yes'"),
    ],
)
def test_an_environment_that_starts_nothing_is_told_by_every_record(tmp_path, variables, got):
    """Nobody trains for days without the log that was asked for; ON_MISTAKE=warn warns once and goes on."""
    env = {f"AREAL_METRICS_{name}": value for name, value in {"DIR": str(tmp_path), **variables}.items()}
    code = """
        import warnings
        from aggregator import stats_tracker
        for value in range(3):
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    stats_tracker.scalar(x=value)
                print("recorded", *(one.message for one in caught))
            except Exception as error:
                print(type(error).__name__, error)
    """
    told = run_python(code, env).splitlines()
    assert [True] * 3 == [line.startswith(got) for line in told]
    told = run_python(code, {**env, "AREAL_METRICS_ON_MISTAKE": "warn"}).splitlines()
    assert got.partition(" ")[2] in told[0]
    assert told[0].startswith("recorded nothing is logged: ")
    assert ["recorded", "recorded"] == told[1:]


@pytest.mark.parametrize(
    ("word", "off"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("False", False), ("no", False)],
)
def test_the_log_is_turned_off_by_words_that_say_so(tmp_path, word, off):
    """AREAL_METRICS_DISABLED is a switch, whatever way it is written."""
    env = {"AREAL_METRICS_DIR": str(tmp_path), "AREAL_METRICS_DISABLED": word}
    assert f"{off}\n" == run_python("import eventlog; print(eventlog.current() is None)", env)


@pytest.mark.parametrize(
    ("word", "fsync"),
    [
        ("False", False),
        ("off", False),
        ("NO", False),
        ("0", False),
        ("Commit", "commit"),
        ("periodic", "periodic"),
    ],
)
def test_fsync_is_turned_off_by_the_same_words(tmp_path, word, fsync):
    """AREAL_METRICS_FSYNC takes every word for no, and its levels, in any case."""
    env = {"AREAL_METRICS_DIR": str(tmp_path), "AREAL_METRICS_FSYNC": word}
    assert f"{fsync!r}\n" == run_python("import eventlog; print(repr(eventlog.current().options.fsync))", env)


def test_resume_never_refuses_an_earlier_attempt(tmp_path):
    """resume="never" insists on a run nobody began."""
    eventlog.start(tmp_path).claim_attempt()
    eventlog.stop()
    with pytest.raises(LogError, match=r"expected no earlier attempt \(resume='never'\), got 1"):
        eventlog.start(tmp_path, resume="never")


def test_a_second_process_of_the_same_rank_gets_its_own_files(tmp_path):
    """Two live processes of one role and rank both keep their rows, and the second is warned (report b7)."""
    log = eventlog.start(tmp_path, role="actor", rank=0)
    log.write(record(1.0, "first"))
    out = run_python(
        f"""
        import eventlog, warnings
        from eventlog import Recorder, drain
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            log = eventlog.start({str(tmp_path)!r}, role="actor", rank=0)
        print(caught[0].message)
        recorder = Recorder()
        recorder.scalar({{"second": 2}})
        log.write(drain([recorder]).frame)
        """
    )
    assert "role 'actor' rank 0 is recorded by another live process too" in out
    eventlog.stop()
    assert {"first", "second"} == {row["key"] for row in records_of(tmp_path)}
    assert len(RunReader(tmp_path).producers()) == 2


def test_a_restart_does_not_warn(tmp_path):
    """The files of a process that is gone are no rival."""
    run_python(f"import eventlog, os; eventlog.start({str(tmp_path)!r}); os._exit(0)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eventlog.start(tmp_path)


def _child_records(queue):
    log = eventlog.current()
    log.write(record(2.0, "child"))
    eventlog.stop()
    queue.put(log.producer.session)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_a_session_of_its_own(tmp_path):
    """After a fork parent and child both go on, each in its own files; nothing is written twice."""
    log = eventlog.start(tmp_path)
    log.write(record(1.0, "before"))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child_records, args=(queue,))
    child.start()
    child_session = queue.get()
    child.join(60)
    log.write(record(3.0, "after"))
    eventlog.stop()
    assert child_session != log.producer.session
    assert ["after", "before", "child"] == sorted(row["key"] for row in records_of(tmp_path))


def test_attempts_are_claimed_given_or_learnt(tmp_path):
    """A leader claims the next number; others learn it from an export, or take the highest claim."""
    log = eventlog.start(tmp_path)
    assert log.attempt is None
    assert (0, 1) == (log.claim_attempt(), log.claim_attempt())
    assert not log.superseded()
    eventlog.stop()
    worker = eventlog.start(tmp_path, role="rollout")
    assert worker.attempt == 1
    worker.learn_attempt(0)
    assert worker.attempt == 0
    assert worker.superseded()


def test_a_given_attempt_that_is_taken_is_refused(tmp_path):
    """attempt= names an attempt of one's own: one that somebody claimed is refused, with the way out."""
    log = eventlog.start(tmp_path, attempt=3)
    assert (3, 3) == (log.attempt, log.claim_attempt())
    with pytest.raises(LogError, match="expected attempt 3 to be free, got a claim of it"):
        log.claim_attempt()


def test_a_newer_claim_is_seen(tmp_path):
    """A leader sees that somebody claimed a newer attempt (split brain)."""
    log = eventlog.start(tmp_path)
    log.claim_attempt(config={"lr": 1}, version_info={"commit_id": "abc"}, resume_step=5)
    RunDir.open(tmp_path).claim_attempt({})
    assert log.superseded()
    first, _ = RunDir.open(tmp_path).attempts()
    assert ({"lr": 1}, {"commit_id": "abc"}, 5) == (first.config, first.version_info, first.resume_step)


def test_every_attempt_of_a_process_ends(tmp_path):
    """A log that claims a second attempt notes how that one ended, too."""
    log = eventlog.start(tmp_path, role="actor")
    for _ in range(2):
        log.claim_attempt()
        log.end("finished")
    eventlog.stop()
    assert ["finished", "finished"] == [attempt.outcome for attempt in RunDir.open(tmp_path).attempts()]


def test_place_in_world_follows_the_environment(monkeypatch):
    """Rank and world size come from the arguments, else from RANK and WORLD_SIZE."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert place_in_world() == (3, 8)
    assert place_in_world(rank=1) == (1, 1)
    assert place_in_world(rank=1, world_size=2) == (1, 2)


@pytest.mark.parametrize(
    ("commit", "error", "message"),
    [
        ((0, 0, -1, [{"a": 1.0}]), StepError, "got -1"),
        ((0, 0, 1.5, [{"a": 1.0}]), StepError, "integral step, got 1.5"),
        ((0, 0, None, [{"a": 1.0}]), StepError, "got NoneType None"),
        ((-1, 0, 0, [{"a": 1.0}]), StepError, "got -1"),
        ((0, 0, 1, {"a": 1.0}), RecordingError, "expected metrics as a list of dicts, got dict"),
        ((0, 0, 1, [3]), RecordingError, "expected metrics as a list of dicts, got one of int"),
        ((0, 0, 1, None), RecordingError, "expected metrics as a list of dicts, got NoneType"),
        ((0, 0, 1, [{"a": "x"}]), RecordingError, "expected a number for 'a', got str"),
        ((0, 0, 1, [{1: 2.0}]), RecordingError, r"expected a metric name \(str\), got int 1"),
        ((0, 0, 1, [{"\ud800": 2.0}]), RecordingError, "valid Unicode"),
    ],
)
def test_a_bad_commit_is_refused_and_commits_nothing(tmp_path, commit, error, message):
    """Bad steps, names and values are refused at the call; the next commit covers what was drained."""
    log = eventlog.start(tmp_path)
    frame = record()
    log.write(frame)
    with pytest.raises(error, match=message):
        log.commit(*commit)
    assert log.commit(0, 0, 0, [{"a": 2**70, "b": 2**63 - 1}])
    marker, *entries = commits_of(tmp_path)
    assert (0, frame.window) == (marker["commit"], marker["window_last"])
    assert [(2.0**70, None), (2.0**63, 2**63 - 1)] == [(row["value"], row["value_int"]) for row in entries]


def test_a_finished_run_that_begins_anew_warns(tmp_path):
    """Starting a finished run again from the beginning warns once, loudly; going on does not."""
    for restored, first in ((None, 6), (None, 0), (5, 0), (None, 6)):
        log = eventlog.start(tmp_path)
        log.claim_attempt()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (first, first + 1):
                log.commit(0, step, step, [{"x": 1.0}], restored_step=restored)
        expected = ["attempt 0 of this run had finished; attempt 1 restored nothing and begins at step 0"]
        assert (expected if log.attempt == 1 else []) == [str(w.message).split(":")[0] for w in caught]
        eventlog.stop()


def test_a_commit_after_stop_is_not_durable(tmp_path):
    """A log that was stopped takes nothing more, and says so."""
    log = eventlog.start(tmp_path)
    eventlog.stop()
    with pytest.warns(UserWarning, match="expected step 9 on disk, got a log that is closed"):
        assert not log.commit(0, 9, 9, [{"z": 1.0}])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "x", "expected AREAL_METRICS_RANK to be an integer, got 'x'"),
        ("FSYNC", "comit", "expected fsync to be False, 'periodic' or 'commit', got 'comit'"),
    ],
)
def test_a_bad_variable_is_named(tmp_path, monkeypatch, name, value, message):
    """A variable that says nothing sensible raises, naming it, instead of being passed over."""
    monkeypatch.setattr("eventlog.process._environment_read", False)
    monkeypatch.setenv("AREAL_METRICS_DIR", str(tmp_path))
    monkeypatch.setenv(f"AREAL_METRICS_{name}", value)
    with pytest.raises(LogError, match=message):
        eventlog.current()


def test_a_disk_that_does_not_answer_is_counted(tmp_path, monkeypatch):
    """A commit whose rows are not written in time warns, counts itself, and training goes on."""
    log, answers = eventlog.start(tmp_path), threading.Event()
    monkeypatch.setattr("eventlog.log.COMMIT_SECONDS", 0.05)
    monkeypatch.setattr("eventlog.log.encode.commit", lambda _: [] if answers.wait(60) else 1 / 0)
    with pytest.warns(UserWarning, match=r"expected step 3 on disk within 0.05 s"):
        assert not log.commit(0, 0, 3)
    assert log.not_durable == 1
    answers.set()


def test_a_lost_record_is_no_durable_commit(tmp_path, monkeypatch):
    """A commit whose window could not be written says so; the next one is durable again."""
    log = eventlog.start(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("eventlog.log.encode.records", lambda *_: 1 / 0)
        log.write(record())
        with pytest.warns(UserWarning, match="expected step 3 on disk within 60 s, got a loss"):
            assert not log.commit(0, 0, 3)
    log.write(record())
    assert log.commit(0, 0, 4)
    assert (1, 1) == (log.not_durable, len(log.losses()))


def test_sigterm_drains(tmp_path):
    """SIGTERM writes what is queued before the process dies of it."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(
            f"""
            import time, eventlog
            import tests.patience
            from eventlog import Recorder, drain
            log = eventlog.start({str(tmp_path)!r})
            recorder = Recorder()
            for i in range(1000):
                recorder.scalar({{"x": i}})
                log.write(drain([recorder]).frame)
            print("ready", flush=True)
            time.sleep(60)
            """
        )],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM
    child.stdout.close()
    assert len(records_of(tmp_path)) == 1000
