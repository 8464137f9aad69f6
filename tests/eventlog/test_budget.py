"""A payload budget: the oldest values go, noted before they do; records, moments and commits stay."""

import os
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest

import eventlog
from eventlog.budget import Budget, as_bytes, shown
from eventlog.errors import LogError
from eventlog.rundir import Problems, RunDir
from eventlog.schema import LossCause, RecordType, Stream
from eventlog.sealed import SealedSegment
from eventlog.segment import SegmentWriter
from eventlog.writer import Writer
from tests.storage import producer, put_window, settle, tell

BUDGET = 1_000_000
VALUES = 25_000  # float32: 100 kB a window


def streams(run):
    """Return the payload streams that are there, and their bytes."""
    files = [f.data for f in run.segments(Stream.PAYLOAD) if f.data.exists()]
    return files, sum(file.stat().st_size for file in files)


def index(run, number):
    """Return the index records of a payload segment."""
    (file,) = [f for f in run.segments(Stream.PAYLOAD) if f.number == number]
    with SealedSegment(file, Problems(), newest=False) as segment:
        return [entry[1] for entry in segment.entries()]


@pytest.fixture
def full(tmp_path):
    """Return a closed run that wrote five times its budget of payload, and its writer."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run), payload_budget=BUDGET)
    for window in range(50):
        put_window(writer, window, VALUES)
        settle(writer)
        assert streams(run)[1] <= BUDGET
    assert writer.close()
    return run, writer


def test_five_times_the_budget_keeps_the_newest_values_and_all_records(full):
    """Payload never exceeds the budget; what is left is the newest, records are whole (report b14)."""
    run, writer = full
    told = tell(run.path)
    assert ([], []) == (told.problems, writer.losses())
    kept = told.windows(Stream.PAYLOAD)
    assert list(range(50))[-len(kept) :] == kept
    assert 0.75 * BUDGET < streams(run)[1] <= BUDGET
    assert list(range(50)) == told.windows(Stream.RECORDS) == told.windows(Stream.COMMITS)
    (state,) = told.states
    assert (set(range(50)), set(kept)) == (state.complete, state.payload)


def test_what_was_pruned_is_listed(full):
    """Every removed segment is noted once, with its windows, rows and bytes; its index is its tombstone."""
    run, writer = full
    gone = [f for f in run.segments(Stream.PAYLOAD) if not f.data.exists()]
    assert [f.number for f in gone] == [pruned.number for pruned in writer.pruned()]
    notes = {}
    for file in run.segments(Stream.PAYLOAD):
        for record in index(run, file.number):
            if record.type == RecordType.PRUNE:
                assert record.last_id not in notes
                notes[record.last_id] = (record.window, record.first_id), record.rows, record.length
    assert {p.number: (p.windows, p.rows, p.bytes) for p in writer.pruned()} == notes
    for file in gone:
        windows = [record.window for record in index(run, file.number) if record.type == RecordType.FRAME]
        assert ((windows[0], windows[-1]), len(windows)) == notes[file.number][:2]
    told = tell(run.path)
    missing = sorted(set(range(50)) - set(told.windows(Stream.PAYLOAD)))
    assert missing == [w for (first, last), *_ in notes.values() for w in range(first, last + 1)]


def test_a_frame_larger_than_the_budget_is_kept_alone(tmp_path):
    """One frame may be larger than the budget: then nothing else is kept (report b14: budget + one frame)."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run), payload_budget=BUDGET)
    for window, values in enumerate([VALUES, VALUES, 20 * VALUES, VALUES]):
        put_window(writer, window, values)
        settle(writer)
        if window == 2:
            assert [2] == tell(run.path).windows(Stream.PAYLOAD)
    assert writer.close()
    assert [3] == tell(run.path).windows(Stream.PAYLOAD)
    assert [] == writer.losses()


def test_the_user_is_warned_well_before_and_once(tmp_path):
    """Warnings come at 80 % of the budget and with the first removal, each once (report b14)."""
    log = eventlog.start(tmp_path, payload_budget="1MB")
    caught = []
    recorder = eventlog.Recorder()
    for step in range(30):
        recorder.denominator({"m": np.ones((100, 250), bool)})
        recorder.stat("m", {"x": np.full((100, 250), step, np.float32)})
        log.write(eventlog.drain([recorder]).frame)
        assert log.writer.flush(60)
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            assert log.commit(0, step, step)
        caught += [(step, str(one.message)) for one in now]
    eventlog.stop()
    (early, first), (late, second) = caught
    assert early < late < 12
    assert "kB of 1 MB of the payload budget are used: soon the oldest values are removed" in first
    assert "the payload budget is used up" in second
    assert second.endswith(f"records stay: {tmp_path}")
    assert log.pruned()[0].windows[0] == min(p.windows[0] for p in log.pruned())


def test_payload_that_cannot_be_removed_keeps_new_payload_out(tmp_path, monkeypatch):
    """Where old values cannot be removed the budget holds all the same: new ones are lost and listed."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run), payload_budget=BUDGET)
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink", _refuse)
        for window in range(15):
            put_window(writer, window, VALUES)
        settle(writer)
        assert streams(run)[1] <= BUDGET
    lost = {loss.window for loss in writer.losses()}
    assert {LossCause.BUDGET} == {loss.cause for loss in writer.losses()}
    assert {12, 13, 14} <= lost
    put_window(writer, 15, VALUES)
    writer.close()
    told = tell(run.path)
    assert 15 in told.windows(Stream.PAYLOAD)
    assert list(range(16)) == told.windows(Stream.RECORDS)
    assert [] == told.problems


def _refuse(path, **_):
    raise PermissionError(1, "Operation not permitted", str(path))


def test_a_kill_between_note_and_removal_costs_nothing(tmp_path):
    """A process that dies after the note and before the removal leaves values that are still read."""
    code = """
    import os, sys, pathlib
    from eventlog.rundir import RunDir
    from eventlog.writer import Writer
    from tests.storage import producer, put_window, settle
    run = RunDir.create(sys.argv[1])
    writer = Writer(run, producer(run), payload_budget=1_000_000)
    pathlib.Path.unlink = lambda *_, **__: os.kill(os.getpid(), 9)
    for window in range(20):
        put_window(writer, window, 25_000)
        settle(writer)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run")], timeout=60, check=False
    )
    assert -9 == done.returncode
    told = tell(tmp_path / "run")
    windows = told.windows(Stream.PAYLOAD)
    assert ([], list(range(len(windows)))) == (told.problems, windows)


def test_pruning_survives_a_failing_disk(tmp_path, monkeypatch):
    """Whatever fails while segments are pruned, none is missing without a note of it."""
    real, count = os.write, [0]

    def write(fd, data):
        count[0] += 1
        if count[0] % 7 == 0:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run), payload_budget=BUDGET)
    monkeypatch.setattr(os, "write", write)
    for window in range(60):
        put_window(writer, window, VALUES)
        settle(writer)
        assert streams(run)[1] <= BUDGET
    monkeypatch.undo()
    writer.close()
    told = tell(run.path)
    assert [] == [str(p) for p in told.problems if "missing" in p.reason]
    lost = {loss.window for loss in writer.losses() if loss.stream is Stream.PAYLOAD}
    pruned = {w for p in writer.pruned() for w in range(p.windows[0], p.windows[1] + 1)}
    assert set(range(60)) == lost | pruned | set(told.windows(Stream.PAYLOAD))


READER = """
import sys
from eventlog.reader import RunReader
from eventlog.schema import Stream
reader = RunReader(sys.argv[1])
newest = -1
while newest < int(sys.argv[2]):
    windows = [record.window for _, record, _ in reader.payload()]
    assert windows == sorted(windows), windows
    newest = max([newest, *windows])
    (state,) = reader.sessions()
    if reader.problems:
        sys.exit("\\n".join(map(str, reader.problems)))
print("done", len(windows))
"""


def test_a_run_is_read_while_it_is_pruned(tmp_path):
    """A reader beside a pruning writer never fails, and never takes a pruned segment for damage."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run), payload_budget=100_000)
    put_window(writer, 0, 1000)
    settle(writer)
    command = [sys.executable, "-c", READER, str(run.path), "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        window = 1
        while window < 600 and reader.poll() is None:
            put_window(writer, window, 1000)
            settle(writer)
            window += 1
        put_window(writer, 100_000, 1000)
        writer.close()
        out, err = reader.communicate(timeout=60)
    assert ("", "done") == (err, out.split()[0])
    assert len(writer.pruned()) > 100


@pytest.mark.parametrize(
    ("given", "expected"),
    [(1, 1), ("1", 1), ("2GB", 2 * 10**9), ("1.5 MiB", 3 << 19), ("500kb", 500_000), (" 3 TB ", 3 * 10**12)],
)
def test_amounts_are_read(given, expected):
    """Bytes may be given as a number or with a unit, decimal or binary."""
    assert expected == as_bytes(given)


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "", "GB", "2 XB", "-3MB", "0.1", None])
def test_amounts_that_are_none_are_refused(given):
    """What is no positive amount is refused, with an example of one."""
    with pytest.raises(
        LogError, match="expected a payload budget in bytes of 1 or more, or with a unit such as '2GB'"
    ):
        as_bytes(given)


def test_amounts_are_shown():
    """Amounts are told in the unit that suits them."""
    assert ["999 bytes", "1 kB", "1.5 MB", "2 GB", "30 TB"] == [
        shown(n) for n in (999, 1000, 1_500_000, 2 * 10**9, 30 * 10**12)
    ]


def test_without_a_budget_nothing_is_removed(tmp_path):
    """Without a limit segments have their usual size and all of them stay."""
    run = RunDir.create(tmp_path / "run")
    budget = Budget(None)
    with_frame = SegmentWriter(run.segment(Stream.PAYLOAD, producer(run), 0), producer(run))
    assert (5, None) == (budget.segment_bytes(5), budget.news(10**12))
    budget.keep(with_frame)
    assert budget.make_room(with_frame, 10**12, sync=False)
    with_frame.close()
    assert with_frame.file.data.exists()


@pytest.mark.parametrize(("given", "expected"), [(0, 0), ("0", 0), ("0MB", 0), (1, 1), ("1kB", 1000)])
def test_an_amount_may_be_none_where_that_means_something(given, expected):
    """With `least=0` nothing is an amount, too: no limit, say."""
    assert expected == as_bytes(given, least=0)


@pytest.mark.parametrize("given", [-1, False, "-1", "0 XB", "0.5"])
def test_less_than_nothing_is_refused(given):
    """What is asked for is what is taken: 0 or more."""
    with pytest.raises(LogError, match=r"expected spill_bytes in bytes of 0 or more, .*, got"):
        as_bytes(given, "spill_bytes", least=0)
