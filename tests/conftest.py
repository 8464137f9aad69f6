"""What a test leaves behind: nothing that the log of a later one would find old, and write down."""

import pytest

import eventlog
from eventlog.recorder import recorders
from eventlog.spill import begin_log


@pytest.fixture(autouse=True)
def forgotten():
    """End the log, where the test did not; let recorders that outlive it hold nothing."""
    yield
    eventlog.stop()
    for recorder in recorders():
        begin_log(recorder)
        recorder.let_go([*recorder.masks], {**recorder.series})
