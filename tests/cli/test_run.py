"""`areal-metrics run`: a training written for AReaL, recorded as it stands, in every process it starts."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aggregator import open_run
from eventlog import RunReader
from tests.areal_stand_in import write_areal

ROOT = Path(__file__).parents[2]
MAIN = "from cli.app import main; main()"

# Rollout workers run episodes and hand their exports over; the trainer trains, evaluates, merges, commits.
WORKER = """
import json, sys
from areal.infra import workflow_context
from areal.utils import stats_tracker

for line in sys.stdin:
    step, rank = map(int, line.split())
    for episode in range(1 + rank):
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=step + 0.5 * episode)
    print(json.dumps(dict(stats_tracker.export_all())), flush=True)
"""

TRAINER = """
import json, os, subprocess, sys
from types import SimpleNamespace

import numpy as np

from areal.infra import workflow_context
from areal.utils import logging, stats_tracker
from areal.utils.evaluator import Evaluator
from areal.utils.stats_logger import StatsLogger, resolve_wandb_run_id

assert "areal" == logging.ORIGIN  # the rest of AReaL is AReaL's
assert "id" == resolve_wandb_run_id(None)

def start(rank):
    env = {**os.environ, "RANK": str(rank)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    return subprocess.Popen([sys.executable, "worker.py"], **pipes)

def rollout(step):
    exports = []
    for rank, worker in workers.items():
        worker.stdin.write(f"{step} {rank}\\n")
        worker.stdin.flush()
        exports.append(json.loads(worker.stdout.readline()))
    count = sum(export["rollout/reward__count"] for export in exports)
    total = sum(export["rollout/reward"] * export["rollout/reward__count"] for export in exports)
    return {"rollout/reward": total / count, "rollout/reward__count": count}

def evaluate():
    workflow_context.set(workflow_context.WorkflowContext(is_eval=True))
    stats_tracker.get(workflow_context.stat_scope()).scalar(reward=1.0)
    workflow_context.set(workflow_context.WorkflowContext())

trial = SimpleNamespace(experiment_name="e", trial_name="t", fileroot=os.getcwd())
config = SimpleNamespace(stats_logger=trial, seed=1)
spec = SimpleNamespace(total_train_epochs=1, steps_per_epoch=4, total_train_steps=4)
when = SimpleNamespace(freq_epochs=None, freq_steps=2, freq_secs=None, eval_before_train=False)
workers = {rank: start(rank) for rank in (1, 2)}
logger, evaluator = StatsLogger(config, spec), Evaluator(when, spec)
for step in range(4):
    with stats_tracker.record_timing("train_step"), stats_tracker.scope("ppo_actor"):
        mask = np.array([True, True, False])
        stats_tracker.denominator(n_valid_tokens=mask)
        stats_tracker.stat(advantages=np.array([1.0, 2.0, 100.0]) + step, denominator="n_valid_tokens")
    evaluator.evaluate(evaluate, 0, step, step)
    stats = stats_tracker.export_all()
    stats.update(rollout(step))
    logger.commit(0, step, step, stats)
logger.close()
for worker in workers.values():
    worker.stdin.close()
    worker.wait()
sys.exit(3)
"""


def environment(*paths, **more):
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), str(ROOT)]), **more}


@pytest.fixture(autouse=True)
def signals_stay():
    """A command that cannot be started leaves this process's signals as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start(*words, env=None, cwd=None):
    """Run `areal-metrics` with these words in a process of its own."""
    command = [sys.executable, "-c", MAIN, *map(str, words)]
    env = env or environment()
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=90, check=False)


def python(code):
    return [sys.executable, "-c", textwrap.dedent(code)]


# -- a whole training ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Run the training above, once; return its directory and how it ended."""
    folder = write_areal(tmp_path_factory.mktemp("training"))
    (folder / "worker.py").write_text(WORKER)
    (folder / "trainer.py").write_text(TRAINER)
    words = ["run", "--log-dir", "run", "--role", "actor", "--", sys.executable, "trainer.py"]
    return folder, start(*words, env=environment(folder), cwd=folder)


def test_the_training_ends_as_it_would_alone(training):
    """The exit code is the training's own, and nothing of ours is on its streams."""
    _, done = training
    assert 3 == done.returncode, done.stderr
    assert "" == done.stderr


def test_what_was_committed_is_read_back(training):
    """Every step the training committed is there, with the numbers it computed."""
    folder, _ = training
    with open_run(folder / "run") as run:
        wanted = ["ppo_actor/advantages/avg", "ppo_actor/n_valid_tokens", "rollout/reward"]
        rows = run.metrics(wanted, wide=True).to_pylist()
        evaluated = run.metrics(["eval-rollout/reward"]).to_pylist()
    assert [0, 1, 2, 3] == [row["step"] for row in rows]
    assert [1.5 + step for step in range(4)] == [row["ppo_actor/advantages/avg"] for row in rows]
    assert [2.0] * 4 == [row["ppo_actor/n_valid_tokens"] for row in rows]
    means = [step + (0.0 + 0.5 + 0.0 + 0.5 + 1.0) / 5 for step in range(4)]
    assert means == pytest.approx([row["rollout/reward"] for row in rows])
    assert [(1, 1.0), (3, 1.0)] == [(row["step"], row["value"]) for row in evaluated]


def test_every_record_of_every_process_is_bound_to_its_step(training):
    """Workers that commit nothing have their records at the steps that used them."""
    folder, _ = training
    with open_run(folder / "run") as run:
        ranks = run.sql("select distinct role, rank from records order by rank").to_pylist()
        unbound = run.sql("select key from records where step is null").to_pylist()
        rewards = run.sql(
            "select rank, step, count, sum from records where key = 'rollout/reward' order by rank, step"
        ).to_pylist()
        values = run.sql("select step, values from tensors order by step").to_pylist()
    assert [("actor", 0), ("actor", 1), ("actor", 2)] == [(row["role"], row["rank"]) for row in ranks]
    assert [] == unbound
    expected = [(1, step, 2, 2 * step + 0.5) for step in range(4)]
    expected += [(2, step, 3, 3 * step + 1.5) for step in range(4)]
    assert expected == [(row["rank"], row["step"], row["count"], row["sum"]) for row in rewards]
    assert [[1.0 + step, 2.0 + step] for step in range(4)] == [row["values"] for row in values]


def test_the_log_remembers_the_evaluations(training):
    """The commits of the steps with an evaluation say so."""
    folder, _ = training
    firsts = [batch.slice(0, 1).to_pylist()[0] for _, _, batch in RunReader(folder / "run").commits()]
    tags = [(row["global_step"], json.loads(row["tags"])) for row in firsts if row["tags"]]
    assert [(1, {"evaluation/2": 2}), (3, {"evaluation/4": 4})] == tags


# -- the command -----------------------------------------------------------------------------------


def test_arguments_and_exit_code_are_the_commands():
    """Options after the command are the command's, and so is the exit code."""
    done = start("run", "--", *python("import sys; print(sys.argv[1:]); sys.exit(7)"), "--log-dir", "--", "x")
    assert (7, "['--log-dir', '--', 'x']\n") == (done.returncode, done.stdout)


def test_signals_reach_the_command():
    """SIGTERM is the command's to handle, and the way it dies is seen."""
    code = """
    import signal, sys
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    print("ready", flush=True)
    signal.pause()
    """
    command = [sys.executable, "-c", MAIN, "run", "--", *python(code)]
    for number, expected in ((signal.SIGTERM, 5), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
            assert "ready\n" == process.stdout.readline()
            process.send_signal(number)
            assert expected == process.wait(60)


def test_pythons_started_by_the_command_are_covered(tmp_path):
    """A process of a process imports ours under AReaL's name, started by exec or by multiprocessing."""
    (tmp_path / "inner.py").write_text("import areal.utils.stats_tracker as s; print(s.__name__)")
    (tmp_path / "outer.py").write_text(
        textwrap.dedent("""
        import multiprocessing, subprocess, sys

        def show():
            import areal.utils.evaluator as e
            print(e.__name__, flush=True)

        if __name__ == "__main__":
            subprocess.run([sys.executable, "inner.py"], check=True)
            process = multiprocessing.get_context("spawn").Process(target=show)
            process.start()
            process.join()
        """)
    )
    done = start("run", "--", "sh", "-c", f"{sys.executable} outer.py", cwd=tmp_path)
    assert (0, "") == (done.returncode, done.stderr)
    assert ["aggregator.stats_tracker", "aggregator.evaluation"] == done.stdout.splitlines()


def test_processes_without_areal_are_left_alone():
    """A Python that does not import AReaL loads nothing of ours."""
    code = (
        "import sys; print([n for n in ('aggregator', 'eventlog', 'numpy', 'pathlib') if n in sys.modules])"
    )
    assert "[]\n" == start("run", "--", *python(code)).stdout


def test_another_sitecustomize_runs_too(tmp_path):
    """A `sitecustomize` that was on the path already is imported as ever."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.chained = __file__\n")
    code = "import sys, sitecustomize; print(sys.chained == sitecustomize.__file__, sys.chained)"
    done = start("run", "--", *python(code), env=environment(tmp_path))
    assert f"True {tmp_path / 'sitecustomize.py'}\n" == done.stdout


def test_run_within_run_is_one_run():
    """A command that is itself run by `areal-metrics run` is not covered twice."""
    code = "import sys; print(sum('shim' in entry for entry in sys.path))"
    assert "1\n" == start("run", "--", sys.executable, "-c", MAIN, "run", "--", *python(code)).stdout


def test_a_python_that_lacks_us_says_so(tmp_path):
    """Where a Python without this package imports AReaL, training goes on and one line says why."""
    write_areal(tmp_path)
    code = """
    import sys
    sys.modules["aggregator"] = None
    import areal.utils.stats_tracker as s; import areal.infra; print(s.__name__)
    """
    done = start("run", "--", *python(code), env=environment(tmp_path), cwd=tmp_path)
    assert (0, "areal.utils.stats_tracker\n") == (done.returncode, done.stdout)
    got = "import of aggregator halted; None in sys.modules"
    said = f"nothing is recorded, expected the package in {sys.executable}, got {got}"
    assert f"areal-metrics: {said}\n" == done.stderr


@pytest.mark.parametrize("first", ["replay", "areal"])
def test_a_replay_buffer_of_the_project_stays_the_projects(tmp_path, first):
    """A project with modules named replay and cli imports its own by these names, and records with ours."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "replay.py").write_text("class ReplayBuffer: ...")
    (project / "cli.py").write_text("raise SystemExit('not asked for')")
    lines = ["from replay import ReplayBuffer", "from areal.utils.stats_logger import StatsLogger"]
    (project / "train.py").write_text(
        "\n".join(lines if first == "replay" else lines[::-1])
        + textwrap.dedent("""
        import replay
        from types import SimpleNamespace
        from areal.utils import stats_tracker

        trial = SimpleNamespace(experiment_name="e", trial_name="t", fileroot="unused")
        with StatsLogger(trial) as logger:
            stats_tracker.scalar(x=1.0)
            logger.commit(0, 0, 0, stats_tracker.export_all())
        assert replay.ReplayBuffer is ReplayBuffer
        """)
    )
    done = start("run", "--log-dir", "run", "--", sys.executable, project / "train.py", cwd=tmp_path)
    assert (0, "") == (done.returncode, done.stderr)
    with open_run(tmp_path / "run") as run:
        assert [1.0] == run.metrics("x")["value"].to_pylist()


@pytest.mark.parametrize("name", ["eventlog", "aggregator"])
def test_a_module_that_hides_ours_is_told_at_once(tmp_path, name):
    """A module of the project that hides one of ours is an error as AReaL is imported: which, what to do."""
    (tmp_path / f"{name}.py").write_text("class Buffer: ...")
    (tmp_path / "train.py").write_text(f"from {name} import Buffer\nimport areal.utils.stats_tracker")
    done = start("run", "--", sys.executable, "train.py", cwd=tmp_path)
    assert 1 == done.returncode
    said = f"ImportError: expected `{name}` to be the package of areal-metrics, got a module that hides it"
    assert said in done.stderr
    assert f": {tmp_path / name}.py\n" in done.stderr


# -- without --log-dir -----------------------------------------------------------------------------

FAMILY = """
import multiprocessing, os, sys
from types import SimpleNamespace

def work():
    from areal.utils import stats_tracker
    stats_tracker.get("rollout").scalar(reward=1.0)
    stats_tracker.export_all()
    stats_tracker.export_all()

def child():
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    assert 0 == process.exitcode

if __name__ == "__main__":
    from areal.utils import stats_tracker
    from areal.utils.stats_logger import StatsLogger

    if "early" in sys.argv:
        child()
    logger = StatsLogger(SimpleNamespace(experiment_name="e", trial_name="t", fileroot="out"))
    if "late" in sys.argv:
        child()
    stats_tracker.scalar(loss=2.0)
    logger.commit(0, 0, 0, stats_tracker.export_all())
    logger.close()
    assert "early" in sys.argv or "AREAL_METRICS_DIR" not in os.environ
"""


def family(folder, *words, **more):
    """Run a training with a worker that records; return it, and the keys that each of its runs holds."""
    (folder / "family.py").write_text(FAMILY)
    options = ["--log-dir", "out/run"] if "told" in words else []
    env = environment(**more)
    done = start("run", *options, "--", sys.executable, "family.py", *words, cwd=folder, env=env)
    assert 0 == done.returncode, done.stderr
    keys = []
    for path in sorted(folder.rglob("run.json")):
        with open_run(path.parent) as run:
            keys.append(sorted(run.sql("select distinct key from records")["key"].to_pylist()))
    return done, keys


def test_what_a_recording_process_starts_records_into_its_run(tmp_path):
    """Without --log-dir the log that a StatsLogger starts is its children's, too, as long as it is open."""
    done, keys = family(tmp_path, "late")
    assert [["loss", "rollout/reward"]] == keys
    assert "expected a log for what this process exports" not in done.stderr


def test_what_is_not_recorded_is_said(tmp_path):
    """A process that exports before there is a log says once that it is in none, and what would record it."""
    done, keys = family(tmp_path, "early")
    assert [["loss"]] == keys
    said = "expected a log for what this process exports, got none: without --log-dir RUN_DIR"
    assert 1 == done.stderr.count(said)


@pytest.mark.parametrize("told", [True, False])
def test_nothing_is_said_where_it_is_known(tmp_path, told):
    """With --log-dir every process has its log; with the log switched off nobody expects one."""
    if told:
        done, keys = family(tmp_path, "early", "told")
        assert [["loss", "rollout/reward"]] == keys
    else:
        done, _ = family(tmp_path, "early", AREAL_METRICS_DISABLED="1")
    assert "expected a log" not in done.stderr


def test_the_environment_says_where_to_record(tmp_path):
    """The log directory, made absolute, and the role are in the command's environment."""
    code = "import os; print(os.environ['AREAL_METRICS_DIR'], os.environ['AREAL_METRICS_ROLE'])"
    done = start("run", "--log-dir", "runs/a", "--role", "rollout", "--", *python(code), cwd=tmp_path)
    assert f"{tmp_path}/runs/a rollout\n" == done.stdout


def test_refuses_where_it_cannot_record(ask, tmp_path):
    """A directory that is no run and a role that is no file name are refused before anything is started."""
    (tmp_path / "notes.txt").write_text("mine")
    answer = ask("run", "--log-dir", tmp_path, "--", "true")
    assert 1 == answer.code
    assert f"expected a run or an empty directory, got 'notes.txt' in it: {tmp_path}" in answer.err
    for where in ([], ["--log-dir", tmp_path / "b"]):
        answer = ask("run", *where, "--role", "../x", "--", "true")
        assert (2, True) == (answer.code, "expected a role of letters" in answer.err)
    assert not (tmp_path / "b").exists()


def test_commands_that_cannot_be_run(ask, tmp_path):
    """A command that is not there is 127, one that cannot be executed 126, none at all a wrong call."""
    (tmp_path / "data.txt").write_text("no program")
    answer = ask("run", "--", "no-such-command")
    assert 127 == answer.code
    assert "areal-metrics: expected a command, got 'no-such-command', which is not found\n" == answer.err
    answer = ask("run", "--", tmp_path / "data.txt")
    assert 126 == answer.code
    assert "Permission denied" in answer.err
    assert 2 == ask("run", "--log-dir", tmp_path / "run").code
