"""Cuts, flips, holes and kills: a reader never raises, never serves a wrong row, and misses no damage."""

import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventlog.reader import RunReader
from eventlog.rundir import Problems, RunDir
from eventlog.schema import ENTRY_SIZE, RecordType, Stream
from eventlog.sealed import SealedSegment
from eventlog.writer import Writer
from tests.storage import commits, flip, payload, producer, put_window, records, settle, tell

BATCHES = {Stream.RECORDS: records, Stream.PAYLOAD: payload, Stream.COMMITS: commits}


@dataclass
class Tiny:
    """A run of two windows, and where its frames lie: (key, data file, index file, slot, start, end)."""

    path: Path
    frames: list[tuple] = field(default_factory=list)

    @property
    def keys(self):
        """Return what names each frame in `Told.frames`."""
        return {frame[0] for frame in self.frames}

    def files(self):
        """Return every file, the smallest first."""
        return sorted(
            (path for path in self.path.rglob("*.*") if path.is_file()), key=lambda p: p.stat().st_size
        )

    def left_of(self, file, size):
        """Return the frames that are left when a file is cut to that size."""
        return {
            key
            for key, data, index, slot, _, end in self.frames
            if not (data == file and end > size) and not (index == file and (2 + slot) * ENTRY_SIZE > size)
        }

    def without(self, file, offset):
        """Return the frames that are left when the byte at that offset of a file is wrong."""
        header = offset < ENTRY_SIZE
        return {
            key
            for key, data, index, slot, start, end in self.frames
            if not (data == file and start <= offset < end)
            and not (index == file and (header or offset // ENTRY_SIZE - 1 == slot))
        }


@pytest.fixture(scope="module", params=["finished", "killed"])
def tiny(request, tmp_path_factory):
    """Return a run that was closed, and one whose writer was never closed."""
    root = tmp_path_factory.mktemp("tiny")
    run = RunDir.create(root / "run")
    run.claim_attempt({"role": "actor", "config": {"lr": 1e-5}})
    writer = Writer(run, producer(run))
    for window in range(2):
        put_window(writer, window)
    settle(writer)
    if request.param == "killed":
        shutil.copytree(run.path, root / "killed")
    writer.close()
    found = Tiny(root / ("run" if request.param == "finished" else "killed"))
    for file in RunDir.open(found.path).segments():
        with SealedSegment(file, Problems(), newest=True) as segment:
            for slot, record in segment.entries():
                if record.type == RecordType.FRAME:
                    key = (
                        file.stream,
                        "actor",
                        0,
                        file.session,
                        record.window,
                        record.frame,
                        record.first_id,
                    )
                    place = (file.data, file.index, slot, record.offset, record.offset + record.length)
                    found.frames.append((key, *place))
    assert 6 == len(found.frames) == len(tell(found.path).frames)
    return found


def places(size, step):
    """Return every step-th offset, and all near both ends."""
    return sorted({*range(0, size, step), *range(min(size, 9)), *range(max(0, size - 9), size)})


def check(told, expected):
    """The rows served are those expected, and right; the sessions' states agree with them."""
    assert expected == set(told.frames)
    for key, rows in told.frames.items():
        assert BATCHES[key[0]](key[4]).to_pylist() == rows
    whole = {key[4] for key in expected if key[0] is Stream.RECORDS}
    assert whole == {window for state in told.states for window in state.complete}


STEPS = [
    pytest.param(97, id="thinned"),
    pytest.param(1, id="every-byte", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("step", STEPS)
def test_a_run_cut_anywhere_keeps_all_whole_frames(tiny, step):
    """Every file cut at every byte: exactly the frames that are whole are served (reports a15, g1, g2)."""
    for file in tiny.files():
        intact = file.read_bytes()
        try:
            for size in places(len(intact), step):
                file.write_bytes(intact[:size])
                told = tell(tiny.path)
                check(told, tiny.left_of(file, size))
                if file.suffix == ".arrows":
                    assert told.problems
        finally:
            file.write_bytes(intact)


@pytest.mark.parametrize("step", STEPS)
def test_no_flipped_bit_is_missed(tiny, step):
    """Every byte of every file with a bit flipped: detected, or harmless, and never a wrong row (g1)."""
    chosen = random.Random(step)
    count = Counter()
    for file in tiny.files():
        intact = file.read_bytes()
        manifests = (RunDir.open(tiny.path).manifest, RunDir.open(tiny.path).attempts())
        try:
            for offset in places(len(intact), step):
                flip(file, offset, chosen.randrange(8))
                told = tell(tiny.path)
                check(told, tiny.without(file, offset))
                same = (told.reader.run.manifest, told.reader.run.attempts()) == manifests
                if told.problems:
                    count["detected"] += 1
                elif file.suffix == ".json" and same:
                    count["harmless"] += 1
                else:
                    count["missed"] += 1
                    print("missed:", file.name, offset)
                file.write_bytes(intact)
        finally:
            file.write_bytes(intact)
    print(dict(count))
    assert 0 == count["missed"]
    assert 50 < count["detected"]


DAMAGE = st.tuples(
    st.integers(0, 20),
    st.sampled_from(["zeros", "noise", "cut out", "doubled", "truncated", "appended", "swapped"]),
    st.integers(0, 10_000),
    st.integers(1, 3_000),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(damages=st.lists(DAMAGE, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_any_damage_costs_only_what_it_covers(tiny, tmp_path_factory, damages, seed):
    """Whatever is done to the files, reading ends without an error and serves only true rows (report b10)."""
    path = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(tiny.path, path)
    damage(path, damages, seed)
    told = tell(path)
    assert set(told.frames) <= tiny.keys
    for key, rows in told.frames.items():
        assert BATCHES[key[0]](key[4]).to_pylist() == rows
    shutil.rmtree(path)


def damage(path, damages, seed):
    """Do to the files of a run what a strategy of DAMAGE says."""
    files = sorted(path.rglob("*.*"))
    for number, kind, start, size in damages:
        _damage(files[number % len(files)], files[seed % len(files)], kind, start, size, random.Random(seed))


def _damage(file, other, kind, start, size, chosen):
    data = bytearray(file.read_bytes())
    start %= max(1, len(data))
    piece = data[start : start + size]
    if kind == "zeros":
        data[start : start + size] = bytes(len(piece))
    elif kind == "noise":
        data[start : start + size] = chosen.randbytes(len(piece))
    elif kind == "cut out":
        del data[start : start + size]
    elif kind == "doubled":
        data[start:start] = piece
    elif kind == "truncated":
        del data[start:]
    elif kind == "appended":
        data += chosen.randbytes(size)
    else:
        data = bytearray(other.read_bytes())
    file.write_bytes(data)


# Kills


CHILD = """
import sys, time
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import payload, producer, put_window
payload(0)  # what Arrow loads with the first batch takes its time
run = RunDir.create(sys.argv[1])
writer = Writer(run, producer(run), segment_bytes=int(sys.argv[2]))
print("started", flush=True)
window = 0
while True:
    if writer.wait(put_window(writer, window, values=window % 7 * 1000), 60):
        print(window, flush=True)
    window += 1
    time.sleep(float(sys.argv[3]))
"""


def _kill(path, first, delay, segment_bytes):
    """Let a process commit windows, kill it, and return the windows whose wait() it saw return.

    It is killed `delay` seconds after it has begun, or, with `first`, has confirmed one.
    """
    command = [sys.executable, "-c", CHILD, str(path), str(segment_bytes), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert "started\n" == child.stdout.readline()
        before = child.stdout.readline() if first else ""
        time.sleep(delay)
        child.kill()
        lines = (before + child.stdout.read()).split("\n")
    return [int(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
        pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_what_was_written_survives_a_kill(tmp_path, kills):
    """SIGKILL at random moments: every window whose wait() had returned is read as it was (b11, g2)."""
    print("seed", seed := time.time_ns())
    chosen = random.Random(seed)
    survived = 0
    for number in range(kills):
        path = tmp_path / str(number)
        first = number % 2  # every other one is killed only when something was confirmed
        confirmed = _kill(path, first, chosen.uniform(0, 0.3), chosen.choice([4_000, 20_000, 1 << 28]))
        told = tell(path)
        assert [] == told.problems
        for stream in (Stream.RECORDS, Stream.COMMITS):
            assert confirmed == told.windows(stream)[: len(confirmed)]
            assert len(told.windows(stream)) <= len(confirmed) + 1
        for key, rows in told.frames.items():
            values = key[4] % 7 * 1000
            expected = payload(key[4], values) if key[0] is Stream.PAYLOAD else BATCHES[key[0]](key[4])
            assert expected.to_pylist() == rows
        (state,) = told.states
        assert (set(told.windows()), False) == (state.complete, state.ended)
        survived += len(confirmed)
        shutil.rmtree(path)
    assert survived >= kills // 2


@pytest.mark.parametrize(
    "passes", [pytest.param(15), pytest.param(40, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_a_reader_of_a_live_run_sees_only_whole_windows(tmp_path, passes):
    """However often a run is read while it is written: no problem, no hole, never less than before (b2)."""
    command = [sys.executable, "-c", CHILD, str(tmp_path / "run"), "20000", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        try:
            while not list(tmp_path.rglob("*.payload.0001.idx")):
                time.sleep(0.01)
            reader, seen = RunReader(tmp_path / "run"), 0
            for _ in range(passes):
                windows = [record.window for _, record, _ in reader.records()]
                assert list(range(len(windows))) == windows
                assert seen <= len(windows)
                seen = len(windows)
                assert {*range(seen)} <= {window for state in reader.sessions() for window in state.complete}
                assert [] == reader.problems
        finally:
            child.kill()
    assert seen > 1
