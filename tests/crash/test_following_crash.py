"""Producers killed and restarted at random while readers and a follower are at work."""

import json
import os
import random
import select
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest

from eventlog.following import Follower
from eventlog.reader import RunReader
from eventlog.rundir import RunDir
from eventlog.schema import Stream
from tests.storage import records

PRODUCER = """
import sys, time
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import producer, put_window
path, rank, windows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
run = RunDir.open(path)
who = producer(run, rank=rank)
writer = Writer(run, who, segment_bytes=30_000)
print(who.session, flush=True)
for window in range(windows):
    if writer.wait(put_window(writer, window), 60):
        print(window, flush=True)
    time.sleep(0.001)
writer.close()
"""

READER = """
import json, sys
from eventlog.reader import RunReader
reader, passes, frames, problems = RunReader(sys.argv[1]), 0, 0, set()
for line in sys.stdin:  # a pass a line
    seen = sum(1 for _ in reader.records()) + sum(1 for _ in reader.payload())
    assert frames <= seen, (frames, seen)
    frames, passes = seen, passes + 1
    states = reader.sessions()
    problems |= set(map(str, reader.problems))
    print(passes, flush=True)
print(json.dumps([passes, frames, sorted(problems)]))
"""


@dataclass
class Rank:
    """One rank: the process that writes at the moment, its fate, what is left, what was confirmed."""

    path: str
    rank: int
    left: int  # windows
    kills: int  # to come
    confirmed: set = field(default_factory=set)  # (session, window) whose wait() had returned
    fate: int | None = None  # after how many windows the process is killed; else it writes what is left
    child: subprocess.Popen | None = None
    session: str = ""
    killed: list[str] = field(default_factory=list)  # sessions
    rest: bytes = b""
    written: int = 0  # by the process

    def start(self, chosen):
        """Start a process that writes until it is killed, or what is left."""
        self.fate = chosen.randint(1, self.left // (self.kills + 1) + 1) if self.kills else None
        windows = self.left if self.fate is None else 1 << 30
        command = [sys.executable, "-c", PRODUCER, self.path, str(self.rank), str(windows)]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE)
        os.set_blocking(self.child.stdout.fileno(), False)
        self.session, self.rest, self.written = "", b"", 0

    def listen(self):
        """Take in what the process has confirmed."""
        self.rest += self.child.stdout.read() or b""
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            if self.session:
                self.confirmed.add((self.session, int(line)))
                self.left -= 1
                self.written += 1
            else:
                self.session = line.decode()

    def meet_fate(self, chosen):
        """Kill the process when it has written so much, and start another."""
        if self.fate is None or self.written < self.fate:
            return
        time.sleep(chosen.uniform(0, 0.01))
        self.child.kill()
        self.child.wait()
        self.listen()
        self.child.stdout.close()
        self.killed.append(self.session)
        self.kills, self.left = self.kills - 1, max(1, self.left)
        self.start(chosen)

    def done(self):
        """Whether the process has written everything."""
        self.listen()
        if self.child.poll() is None:
            return False
        self.listen()
        return True


SIZES = [
    pytest.param(2, 30, 2, id="short"),
    pytest.param(4, 200, 6, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    pytest.param(8, 2000, 40, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
]


@pytest.mark.parametrize(("producers", "windows", "kills"), SIZES)
def test_a_follower_sees_every_committed_window_once(tmp_path, producers, windows, kills):
    """Processes are killed and restarted at random: every committed window is told once, in order (b2)."""
    print("seed", seed := time.time_ns())
    chosen = random.Random(seed)
    run = RunDir.create(tmp_path / "run")
    ranks = [Rank(str(run.path), rank, windows, kills) for rank in range(producers)]
    command = [sys.executable, "-c", READER, str(run.path)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        told, problems = watch(run, ranks, chosen, reader)
    finally:
        for child in (reader, *(rank.child for rank in ranks if rank.child)):
            child.kill()
    check(run, ranks, told)
    killed = {session for rank in ranks for session in rank.killed}
    assert [] == [problem for problem in problems if not is_unsealed(problem, killed)]
    assert producers * (kills + 1) == len({file.session for file in run.segments(Stream.RECORDS)})


def watch(run, ranks, chosen, reader):
    """Follow the run, and have it read, until all ranks are done; return what was told, and problems."""
    follower, told, asked = Follower(run.path), [], False
    for rank in ranks:
        rank.start(chosen)
    alive = list(ranks)
    while alive:
        told += follower.poll()
        if not asked:
            reader.stdin.write("go\n")
            reader.stdin.flush()
            asked = True
        elif select.select([reader.stdout], [], [], 0)[0]:
            asked = not reader.stdout.readline()
        alive = [rank for rank in alive if not rank.done()]
        for rank in alive:
            rank.meet_fate(chosen)
    reader.stdin.write("go\n")
    told += follower.poll()
    for rank in ranks:
        rank.child.wait()
        rank.child.stdout.close()
    out, _ = reader.communicate(timeout=120)
    passes, frames, problems = json.loads(out.splitlines()[-1])
    print({"told": len(told), "passes": passes, "frames": frames})
    assert passes > 0
    assert frames >= len(told)
    return told, problems + follower.problems


def is_unsealed(problem, killed):
    """Whether it tells of a frame that a killed process wrote and did not live to seal."""
    unsealed = "behind the last sealed frame are not read" in problem
    return unsealed and any(f"-{session}." in problem for session in killed)


def check(run, ranks, told):
    """Every committed window was told once, in order, with its rows; nothing confirmed is missing."""
    seen = [(item.producer.session, window) for item in told for window in item.windows]
    assert {1} == set(Counter(seen).values())
    for rank in ranks:
        assert rank.confirmed <= set(seen)
    reader = RunReader(run.path)
    committed = [(who.session, record.window) for who, record, _ in reader.commits()]
    assert sorted(committed) == sorted(seen)
    by_session = {}
    for item in told:
        assert [records(w).to_pylist() for w in item.windows] == [b.to_pylist() for b in item.records]
        assert () == item.incomplete
        by_session.setdefault(item.producer.session, []).extend(item.windows)
    assert all(list(range(len(windows))) == windows for windows in by_session.values())
