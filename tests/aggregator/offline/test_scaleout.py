"""The same questions in several processes and on a cluster: the same answers to the bit, whatever dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from aggregator import compact, open_run
from aggregator.offline import scaleout
from aggregator.offline.engine import Engine
from eventlog import errors
from tests import dying
from tests.answers import answers
from tests.runs import RunBuilder
from tests.storage import flip

from .test_compact import SMALL, group, more, record

ROOT = Path(__file__).parents[3]


RANGE = 300  # bytes: a step or two


@pytest.fixture(autouse=True)
def _short_ranges(monkeypatch):
    """Make ranges of steps so small that a small run has several."""
    monkeypatch.setattr(scaleout, "RANGE_BYTES", RANGE)


def test_answers_are_the_same_to_the_bit(tmp_path):
    """One worker or none, from frames or tables: every statistic and refusal is the same (report g13)."""
    path = record(tmp_path / "run")
    before = answers(path)
    assert before == answers(path, engine="local", workers=1)
    compact(path, part_bytes=SMALL, workers=1)
    assert before == answers(path, engine="local", workers=1)
    assert [] == list((path / "tables" / "answers").iterdir())


@pytest.mark.long
def test_two_processes_answer_as_one(tmp_path):
    """Ranges that two processes read give what one process reads."""
    path = record(tmp_path / "run")
    assert answers(path) == answers(path, engine="local", workers=2)


def test_what_is_not_kept_is_counted(tmp_path):
    """Steps without payload are missing in the same places; of none at all the error is the same."""
    path = tmp_path / "run"
    with RunBuilder(path) as run:
        ranks = [run.producer("actor", r, world="w", world_size=2, payload=r == 0) for r in range(2)]
        more(run, ranks, 0, 4)
    assert answers(path) == answers(path, engine="local", workers=1)
    for data in path.glob("events/actor-0/*.payload.*.arrows"):
        data.unlink()
    assert answers(path) == answers(path, engine="local", workers=1)


def test_damage_that_workers_find_is_told(tmp_path):
    """What could not be read is a problem of the session, whoever read it."""
    path = record(tmp_path / "run")
    for data in path.glob("events/*/*.payload.*.arrows"):
        flip(data, data.stat().st_size * 2 // 3)
    with open_run(path) as session:
        whole = str(session.reduce("*", "std").to_pydict())
        said = session.problems
    assert len(said) == len([line for line in said if "expected checksum" in line]) > 0
    for _ in range(2):
        scaleout._histories.cache_clear()
        with open_run(path, engine="local", workers=1) as session:
            assert whole == str(session.reduce("*", "std").to_pydict())
            assert sorted(said) == sorted(session.problems)


def test_two_sessions_that_ask_the_same(tmp_path, monkeypatch):
    """The one that is done first clears its answers away under the other, which answers all the same."""
    path = record(tmp_path / "run")
    with open_run(path) as session:
        whole = str(session.reduce("x", "std").to_pydict())

    class Cleared(scaleout.NewFile):
        def write(self, data):
            shutil.rmtree(path / "tables" / "answers")
            return super().write(data)

    monkeypatch.setattr(scaleout, "NewFile", Cleared)
    with open_run(path, engine="local", workers=1) as session:
        assert whole == str(session.reduce("x", "std").to_pydict())


SCRIPT = """
import sys
from aggregator import compact, open_run

print("the script runs")
print("compacted", compact(sys.argv[1], part_bytes=int(sys.argv[2]), workers=2).parts)
with open_run(sys.argv[1], engine="local", workers=2) as session:
    print("answered", session.reduce("x", "std").num_rows)
assert __file__ == sys.argv[0]
"""


@pytest.mark.long
def test_a_script_needs_no_guard(tmp_path):
    """Workers do not run the script that starts them: it may ask at its top level, as an example does."""
    path = record(tmp_path / "run")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(path), str(SMALL)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert 0 == done.returncode, done.stderr
    first, second, third = done.stdout.splitlines()
    assert "the script runs" == first
    assert int(second.removeprefix("compacted ")) > 1
    assert "answered 9" == third


ASKED = """
import sys
from aggregator import open_run
from aggregator.offline import scaleout

scaleout.RANGE_BYTES = int(sys.argv[2])
plain = scaleout._computed
done = 0

def computed(task):
    global done
    done += 1
    if done > int(sys.argv[3]):
        print("at it", flush=True)
        import time
        time.sleep(60)
    return plain(task)

scaleout._computed = computed
with open_run(sys.argv[1], engine="local", workers=1) as session:
    print(session.reduce("x", ["std"]).to_pydict())
print(done)
"""


def test_a_driver_that_was_killed_goes_on(tmp_path):
    """What was finished before the kill is not read again, and the answer is the same."""
    path = record(tmp_path / "run")
    command = [sys.executable, "-c", ASKED, str(path), str(RANGE)]
    child = subprocess.Popen([*command, "2"], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout
    assert b"at it\n" == child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    finished = list(path.glob("tables/answers/*/*.npz"))
    assert 2 == len(finished)
    finished[0].write_bytes(finished[0].read_bytes()[:-1])  # one of them is damaged: read again
    *answer, read = subprocess.check_output([*command, "99"], cwd=ROOT, text=True).splitlines()
    *whole, tasks = subprocess.check_output([*command, "99"], cwd=ROOT, text=True).splitlines()
    assert whole == answer
    assert int(tasks) - 1 == int(read)
    with open_run(path) as session:
        assert [str(session.reduce("x", ["std"]).to_pydict())] == answer


def test_a_run_that_grows_meanwhile(tmp_path):
    """A worker that reads more of a live run than the session did says so, instead of mixing the two."""
    with RunBuilder(tmp_path / "run") as run:
        ranks = group(run, 0, 0, 4)
        for producer in ranks:
            assert producer.writer.flush(100)
        scaleout._histories.cache_clear()
        with open_run(run.path, engine="local", workers=1) as session:
            before = str(session.reduce("x", ["std"], by=["step", "rank"]).to_pydict())
            more(run, ranks, 4, 6)
            for producer in ranks:
                assert producer.writer.flush(100)
            scaleout._histories.cache_clear()
            assert before == str(
                session.reduce("x", ["std"], by=["step", "rank"]).to_pydict()
            )  # its steps are as they were
            more(run, ranks, 3, 4)
            for producer in ranks:
                assert producer.writer.flush(100)
            scaleout._histories.cache_clear()
            with pytest.raises(
                errors.QueryError, match=r"expected steps . to 3 as they were when the run was"
            ):
                session.reduce("x", ["std"], by=["step", "rank"])


def test_a_run_that_cannot_be_written_to(tmp_path):
    """Without a place for finished ranges there is an answer all the same."""
    path = record(tmp_path / "run")
    (path / "tables").write_text("no directory")
    with open_run(path) as run:
        assert [f"cannot be listed: Not a directory: {path / 'tables'}"] == run.problems
    assert answers(path) == answers(path, engine="local", workers=1)


def test_workers_that_die_are_replaced(tmp_path):
    """A killed process costs its task a second try; a task that kills every worker is an error."""
    with Engine("local", 2) as engine:
        assert [0, 1, 2, 3] == engine.each(dying.once, [(str(tmp_path), i) for i in range(4)])
        with pytest.raises(errors.QueryError, match=r"expected another task, got [78]"):
            engine.each(dying.refuse, [7, 8])


@pytest.mark.long
def test_tasks_that_kill_every_worker_are_an_error():
    """After some tries it is given up."""
    with Engine("local", 2) as engine, pytest.raises(BrokenProcessPool):
        engine.each(dying.always, [0, 1])


def test_wrong_engines_are_refused(tmp_path):
    """An unknown engine, no workers."""
    with pytest.raises(errors.QueryError, match="expected engine to be local or ray, got 'dask'"):
        open_run(record(tmp_path / "run"), engine="dask")
    for workers in (0, "2", True):
        with pytest.raises(errors.QueryError, match="expected at least one worker, got "):
            compact(tmp_path / "run", workers=workers)
    with pytest.raises(errors.QueryError, match="expected workers of an engine, got 2 and no engine"):
        open_run(tmp_path / "run", workers=2)


def test_without_ray_the_extra_is_named(tmp_path):
    """Where Ray is not installed the error says how to get it, before anything is read or written."""
    path = record(tmp_path / "run")
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from cli.app import main\n"
        "sys.argv = ['areal-metrics', 'compact', sys.argv[1], '--engine', 'ray']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert 1 == done.returncode
    assert "install areal-metrics[ray]" in done.stderr
    assert not (path / "tables").exists()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_cluster_of_two_nodes(tmp_path):
    """Ray equals local to the bit, also when a worker, a node, and the driver half-way are killed."""
    pytest.importorskip("ray")
    path = record(tmp_path / "run")
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    env |= {"PYTHONWARNINGS": "ignore", "HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tests" / "ray_cluster.py"), str(path), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=380, check=False)
    assert 0 == done.returncode, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    parts = said.pop("parts")
    assert 2 <= said.pop("left by the first driver") <= parts
    assert {
        "second driver": "done\n",
        "taken over": True,
        "restarted differs from local in": [],
        "nodes": 2,
        "after a worker died": [0, 1, 2, 3],
        "answers": True,
        "after a node died, differs in": [],
        "nodes left": 1,
        "answers of the rest": True,
    } == said
