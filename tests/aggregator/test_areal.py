"""AReaL's module names lead to ours, with AReaL installed or not, and back again."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import aggregator
import eventlog
import replay
from aggregator import areal
from tests.areal_stand_in import write_areal

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_left():
    """Every test begins and ends without AReaL's names."""
    yield
    areal.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "areal"]:
        del sys.modules[name]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put a stand-in for AReaL on the path."""
    monkeypatch.syspath_prepend(write_areal(tmp_path))


def ours():
    return {name: importlib.import_module(target) for name, target in areal.MODULES.items()}


def served():
    return {name: importlib.import_module(name) for name in areal.MODULES}


def test_serves_ours_without_areal():
    """Where AReaL is not installed, its four module names are our modules themselves."""
    areal.install()
    assert ours() == served()
    from areal.infra import workflow_context
    from areal.utils import stats_tracker
    from areal.utils.evaluator import Evaluator
    from areal.utils.stats_logger import StatsLogger

    assert aggregator.stats_tracker is stats_tracker
    assert aggregator.evaluation.Evaluator is Evaluator
    assert replay.StatsLogger is StatsLogger
    assert eventlog.workflow_context is workflow_context


def test_names_and_arguments_are_those_of_areals_tracker():
    """Every function of its module is here and in every tracker, and takes what it takes."""
    group = {"reduce_group"}
    takes = {
        "stat": {"denominator", "reduce_type", *group}, "denominator": group, "scalar": group,
        "scope": {"name"}, "scope_func_wrapper": {"name"}, "disable_scope": set(), "record_timing": {"key"},
        "export": {"key", "reduce_group", "key_sync_group", "reset"},
        "export_all": {"reduce_group", "key_sync_group", "reset"}, "get": {"name"},
    }  # fmt: skip
    tracker = aggregator.stats_tracker
    for name, arguments in takes.items():
        assert arguments <= set(inspect.signature(getattr(tracker, name)).parameters), name
        if name not in ("export_all", "get"):
            assert callable(getattr(tracker.DistributedStatsTracker("t"), name))
    assert tracker.TRACKERS[""] is tracker.DEFAULT_TRACKER is tracker.get()
    names = ["AVG_MIN_MAX", "AVG", "SUM", "MIN", "MAX", "SCALAR"]
    assert set(names) <= set(tracker.ReduceType.__members__)


@pytest.mark.usefixtures("installed")
def test_serves_ours_beside_areal():
    """Where AReaL is installed, the four modules are ours and everything else of it is AReaL's."""
    areal.install()
    assert ours() == served()
    import areal.utils.logging as other

    assert "areal" == other.ORIGIN
    assert "trainer" == other.getLogger("trainer")


@pytest.mark.usefixtures("installed")
def test_names_only_areal_has_are_found():
    """What only AReaL's own module has is still there under it, lazily; nobody's name is nobody's."""
    areal.install()
    from areal.infra import workflow_context
    from areal.utils import stats_logger
    from areal.utils.stats_logger import resolve_wandb_run_id

    assert "id" == resolve_wandb_run_id(None)
    assert "get_httpx_client" == workflow_context.get_httpx_client.__name__
    with pytest.raises(AttributeError, match="nonesuch"):
        stats_logger.nonesuch  # noqa: B018
    with pytest.raises(AttributeError, match="__nonesuch__"):
        stats_logger.__nonesuch__  # noqa: B018
    from areal.utils import evaluator

    assert "areal" == evaluator.ORIGIN  # a module that looks names up itself falls back, too


@pytest.mark.usefixtures("installed")
def test_uninstall_gives_the_names_back():
    """After `uninstall` the names are AReaL's, and our modules have nothing of it left."""
    areal.install()
    served()
    areal.uninstall()
    areal.uninstall()
    from areal.utils import evaluator, stats_tracker

    assert "areal" == stats_tracker.ORIGIN
    assert "areal" == evaluator.ORIGIN
    for module in ours().values():
        with pytest.raises(AttributeError, match="ORIGIN"):
            module.ORIGIN  # noqa: B018


def test_uninstall_takes_the_stand_ins_away():
    """Where AReaL is not installed, its names are gone again after `uninstall`."""
    areal.install()
    served()
    areal.uninstall()
    with pytest.raises(ModuleNotFoundError, match="No module named 'areal'"):
        importlib.import_module("areal.utils.stats_tracker")


def test_install_again_changes_nothing():
    """A second `install` adds no second hook."""
    areal.install()
    before = list(sys.meta_path)
    areal.install()
    assert before == sys.meta_path


@pytest.mark.usefixtures("installed")
def test_late_install_replaces_and_warns():
    """Modules that were imported before are replaced with a warning that names them, and given back."""
    from areal.utils import stats_logger as theirs

    with pytest.warns(
        UserWarning, match=r"expected install\(\) before .* got areal.utils.stats_logger already"
    ):
        areal.install()
    import areal.utils as package

    assert replay.logger is package.stats_logger
    assert "id" == package.stats_logger.resolve_wandb_run_id(None)
    areal.uninstall()
    assert theirs is package.stats_logger
    assert theirs is importlib.import_module("areal.utils.stats_logger")


@pytest.mark.usefixtures("installed")
def test_our_modules_stay_themselves():
    """Being served under another name leaves a module's own name, package and spec alone."""
    areal.install()
    assert "areal.utils.stats_tracker" == importlib.util.find_spec("areal.utils.stats_tracker").name
    for name, module in served().items():
        assert areal.MODULES[name] == module.__name__ == module.__spec__.name
        assert module is sys.modules[areal.MODULES[name]]


def test_what_is_recorded_under_areals_name_is_recorded():
    """A scope and a scalar recorded through AReaL's name come out of our export."""
    areal.install()
    from areal.infra.workflow_context import WorkflowContext, stat_scope
    from areal.infra.workflow_context import set as set_context
    from areal.utils import stats_tracker

    set_context(WorkflowContext(is_eval=True, task_id=3, sample_idx=0, group_size=4))
    try:
        stats_tracker.get(stat_scope()).scalar(reward=0.25)
        with stats_tracker.scope("ppo_actor"):
            stats_tracker.scalar(lr=0.5)
    finally:
        set_context(WorkflowContext())
    stats = aggregator.stats_tracker.export_all()
    assert {"eval-rollout/reward": 0.25, "ppo_actor/lr": 0.5}.items() <= stats.items()


def test_install_loads_nothing():
    """Installing loads neither torch nor the modules that are served; they come when they are imported."""
    code = """
import sys
from aggregator import areal
areal.install()
served = [*areal.MODULES.values(), "torch", "duckdb"]
print([name for name in served if name in sys.modules])
import areal.utils.evaluator, areal.utils.stats_tracker
print([name for name in ("torch", "duckdb", "replay") if name in sys.modules])
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    assert ["['eventlog.workflow_context']", "[]"] == done.stdout.splitlines()
