"""What holds for every test: it may be slow, and leaves nothing for the log of a later one to write down."""

import pytest
from hypothesis import HealthCheck, settings

import eventlog
import tests.patience  # noqa: F401
from eventlog.recorder import recorders
from eventlog.spill import begin_log

# How long an example takes, or to draw it, says something of the machine and what else it does.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items):
    """Let what is long take long, however busy the machine is."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def forgotten():
    """End the log, where the test did not; let recorders that outlive it hold nothing, at no step."""
    yield
    eventlog.stop()
    eventlog.set_step(None)
    eventlog.workflow_context.set(eventlog.workflow_context.WorkflowContext())
    for recorder in recorders():
        recorder.set_step(None)
        begin_log(recorder)
        recorder.let_go([*recorder.masks], {**recorder.series})
