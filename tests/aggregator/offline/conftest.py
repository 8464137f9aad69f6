"""A run builder in a fresh directory, and sessions that are closed."""

from __future__ import annotations

import pytest

from aggregator import open_run
from tests.runs import RunBuilder


@pytest.fixture
def run(tmp_path):
    """Yield a builder; `run.open()` closes it and opens what it wrote."""
    sessions = []

    class Openable(RunBuilder):
        def open(self, *more, **options):
            self.close()
            sessions.append(open_run(self.path, *more, **options))
            return sessions[-1]

    with Openable(tmp_path / "run") as builder:
        yield builder
    for session in sessions:
        session.close()
