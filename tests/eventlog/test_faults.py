"""File systems that fail: training goes on, what is lost is listed with its step, what is left is right."""

import json
import warnings
from contextlib import ExitStack

import pytest

import eventlog
from eventlog.rundir import RunDir
from eventlog.schema import LossCause as Cause
from eventlog.schema import Stream
from eventlog.writer import Writer
from tests.disk import FAULTS, Disk, small
from tests.storage import commits, payload, producer, put_window, records, settle, tell

BATCHES = {Stream.RECORDS: records, Stream.PAYLOAD: payload, Stream.COMMITS: commits}
STREAMS = sorted(Stream)
LONG = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
def disk(tmp_path):
    """Return a file system whose faults a child process chooses."""
    return Disk(tmp_path)


TRAIN = """
import json
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import producer, put_window, settle
run = RunDir.create(root + "/run")
writer = Writer(run, producer(run), fsync={fsync!r}, segment_bytes=20_000)
for window in range(30):
    fault.set({letter!r} if 10 <= window < 20 else "0")
    put_window(writer, window, 1000)
    settle(writer)
    writer.bind(window, window, 100 + window)
fault.set("0")
closed = writer.close()
print(json.dumps([closed, [[int(x.stream), int(x.cause), x.window, x.step] for x in writer.losses()]]))
"""


def check_left(path):
    """Whatever is read of a run is as it was written; return its windows a stream."""
    told = tell(path)
    for key, rows in told.frames.items():
        stream, window = key[0], key[4]
        expected = payload(window, 1000) if stream is Stream.PAYLOAD else BATCHES[stream](window)
        assert expected.to_pylist() == rows
    return told, {stream: set(told.windows(stream)) for stream in STREAMS}


@pytest.mark.parametrize("name", ["EIO", "ENOSPC", "EDQUOT", "cut", "open"])
def test_a_failing_disk_costs_what_was_recorded_meanwhile(disk, name):
    """Ten windows meet a disk that fails: no more than those are lost, all that are lost are listed."""
    code = TRAIN.format(letter=FAULTS[name], fsync=False)
    closed, lost = json.loads(disk.run(code).stdout)
    told, windows = check_left(disk.root / "run")
    assert closed
    for stream in STREAMS:
        missing = set(range(30)) - windows[stream]
        assert missing == {window for s, _, window, _ in lost if s == stream}
        assert missing <= set(range(10, 20))
    assert name == "open" or set(range(10, 20)) == set(range(30)) - windows[Stream.RECORDS]
    assert {Cause.WRITE_FAILED} >= {cause for _, cause, *_ in lost}
    assert all(step == 100 + window for s, _, window, step in lost if s != Stream.COMMITS)
    (state,) = told.states
    noted = sorted([int(x.stream), int(x.cause), x.window] for x in state.losses)
    assert (sorted(loss[:3] for loss in lost), True) == (noted, state.ended)
    assert [] == told.problems


def test_short_writes_lose_nothing(disk):
    """A file system that takes half of every write gets the rest in further ones."""
    closed, lost = json.loads(disk.run(TRAIN.format(letter=FAULTS["short"], fsync=False)).stdout)
    told, windows = check_left(disk.root / "run")
    assert (True, []) == (closed, lost)
    assert [set(range(30))] * 3 == [windows[stream] for stream in STREAMS]
    assert [] == told.problems


@pytest.mark.parametrize("name", ["sync", "close"])
def test_what_the_system_fails_to_keep_is_counted(disk, name):
    """A sync or a close that fails is counted as what it may have cost; here, all is read."""
    closed, lost = json.loads(disk.run(TRAIN.format(letter=FAULTS[name], fsync="commit")).stdout)
    told, windows = check_left(disk.root / "run")
    assert closed
    assert {Cause.PREVIOUS_SEGMENT} == {cause for _, cause, *_ in lost}
    assert [set(range(30))] * 3 == [windows[stream] for stream in STREAMS]
    assert [] == told.problems


def test_files_never_shrink(disk):
    """What was on the disk before a fault is there after it, byte for byte, in files that only grew."""
    script = """
    import hashlib, pathlib
    from eventlog.rundir import RunDir
    from eventlog.writer import Writer
    from tests.storage import producer, put_window, settle
    run = RunDir.create(root + "/run")
    writer = Writer(run, producer(run))
    for window in range(40):
        fault.set("P" if window % 4 == 3 else "0")
        files = [p for p in pathlib.Path(root).rglob("*.arrows")]
        before = {p: p.read_bytes() for p in files}
        put_window(writer, window, 1000)
        settle(writer)
        fault.set("0")
        for path, data in before.items():
            assert path.read_bytes()[: len(data)] == data
    writer.close()
    """
    disk.run(script)
    _, windows = check_left(disk.root / "run")
    assert {w for w in range(40) if w % 4 < 3} <= windows[Stream.RECORDS]


RANDOM = """
import json, random
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import producer, put_window, settle
chosen = random.Random({seed})
run = RunDir.create(root + "/run")
writer = Writer(run, producer(run), fsync=chosen.choice([False, "commit"]), segment_bytes=20_000)
for window in range({windows}):
    fault.set(chosen.choice("00000ENQPSOFC"))
    put_window(writer, window, 1000)
    settle(writer)
fault.set("0")
writer.close()
print(json.dumps([[int(x.stream), int(x.cause), x.window] for x in writer.losses()]))
"""


@pytest.mark.parametrize(
    ("seeds", "windows"),
    [pytest.param(range(2), 50), pytest.param(range(100, 115), 200, marks=LONG)],
)
def test_any_mix_of_faults_is_accounted_for(tmp_path, seeds, windows):
    """Whatever fails when: every window is read as it was or listed as lost, live and on the disk."""
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        disk = Disk(folder)
        lost = json.loads(disk.run(RANDOM.format(seed=seed, windows=windows), timeout=300).stdout)
        told, found = check_left(disk.root / "run")
        for stream in STREAMS:
            listed = {window for s, cause, window in lost if s == stream and cause != Cause.PREVIOUS_SEGMENT}
            assert set(range(windows)) == found[stream] | listed, (seed, stream)
            assert not found[stream] & listed, (seed, stream)
        (state,) = told.states
        noted = sorted([int(x.stream), int(x.cause), x.window] for x in state.losses)
        assert sorted(loss for loss in lost if loss[2] >= 0) == [loss for loss in noted if loss[2] >= 0]
        cut = [problem for problem in told.problems if "bytes of an index record" in problem.reason]
        assert cut == told.problems, seed  # a note of which half was written is told from no other damage


# What hangs


@pytest.mark.parametrize("name", ["hang", "hang open"])
def test_a_process_on_a_hanging_disk_ends(disk, name):
    """Exports, commits, stop and exit come back from a disk that never answers (report b15)."""
    script = f"""
    import warnings, eventlog
    import tests.patience
    from eventlog import log as house, process
    warnings.simplefilter("ignore")
    log = eventlog.start(root + "/run")
    log.claim_attempt()
    recorder = eventlog.Recorder()
    def step(number):
        recorder.scalar({{"x": number}})
        log.write(eventlog.drain([recorder]).frame)
        return log.commit(0, number, number)
    assert step(0)
    house.COMMIT_SECONDS = house.EXPORT_SECONDS = 0.3
    process.CLOSE_SECONDS, process.END_SECONDS = 1.0, 0.3
    fault.set({FAULTS[name]!r})
    if {name == "hang open"}:
        log.writer._segments._bytes = 1  # so that the next frame begins a file
    waited, wait = [], log.writer.wait
    log.writer.wait = lambda ticket, timeout: waited.append(timeout) or wait(ticket, timeout)
    assert [False] * 20 == [step(number) for number in range(1, 21)]
    assert 20 == log.not_durable
    assert [0] * 38 == waited[2:]  # a disk that is stuck is waited for once
    eventlog.stop()
    assert {{"CLOSE_TIMED_OUT"}} == {{loss.cause.name for loss in log.losses()}}
    """
    disk.run(script)
    (state,) = tell(disk.root / "run").states
    assert ({0}, False) == (set(state.complete) & {0}, state.ended)


def test_a_sigterm_on_a_hanging_disk_ends_the_process(disk):
    """SIGTERM drains no longer than it may: the process dies of the signal all the same (report b15)."""
    script = """
    import os, signal, eventlog
    from eventlog import process
    process.CLOSE_SECONDS, process.END_SECONDS = 1.0, 0.3
    if os.fork() == 0:
        log = eventlog.start(root + "/run")
        log.claim_attempt()
        fault.set("H")
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.wait()
    assert signal.SIGTERM == os.WTERMSIG(status), status
    """
    disk.run(script)


# Real file systems


@pytest.fixture
def mounted(tmp_path):
    """Return a function that mounts a small memory file system, where that is allowed."""
    with ExitStack() as stack:
        yield lambda options: stack.enter_context(small(tmp_path / "disk", options))


def fill(path):
    """Take all space that is left."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1000))
        except OSError:
            return


def test_a_full_disk_does_not_stop_training(mounted):
    """A run goes on while the disk is full: commits say so, lost steps are listed, later ones are whole."""
    root = mounted("size=2m")
    log = eventlog.start(root / "run")
    recorder, windows = eventlog.Recorder(), set()

    def step(number):
        for i in range(2000):
            recorder.scalar({f"key{i % 20}": i})
        frame = eventlog.drain([recorder]).frame
        windows.add(frame.window)
        log.write(frame)
        durable = log.commit(0, number, number)
        log.writer.flush(60)
        return durable

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(step(number) for number in range(5))
        fill(root / "ballast")
        during = [step(number) for number in range(5, 15)]
        (root / "ballast").unlink()
        assert all(step(number) for number in range(15, 20))
        eventlog.stop()
    assert not all(during)
    assert during.count(False) == log.not_durable
    lost = {loss.step for loss in log.losses()}
    assert {number for number, durable in enumerate(during, 5) if not durable} <= lost <= set(range(5, 15))
    reader = eventlog.RunReader(root / "run")
    found = {row["global_step"] for *_, batch in reader.commits() for row in batch.to_pylist()}
    assert {*range(5), *range(15, 20)} <= found
    (state,) = reader.sessions()
    assert windows == state.complete | state.incomplete
    assert [] == reader.problems


def test_a_disk_without_room_for_files_is_survived(mounted):
    """Where no file can be created any more, what is open goes on; the rest is lost and listed."""
    root = mounted("size=4m,nr_inodes=24")
    run = RunDir.create(root / "run")
    writer = Writer(run, producer(run), segment_bytes=10_000)
    for window in range(60):
        put_window(writer, window, 1000)
        settle(writer)
    closed = writer.close()
    told, windows = check_left(run.path)
    assert closed
    for stream in STREAMS:
        listed = {loss.window for loss in writer.losses() if loss.stream is stream}
        assert set(range(60)) == windows[stream] | listed
    assert set(range(60)) == windows[Stream.RECORDS]
    assert [] == told.problems
