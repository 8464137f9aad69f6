"""How long a log waits for the disk: so long in all, and not again before the writer gets any further."""

import threading

import pytest

from eventlog.patience import Patience
from eventlog.rundir import RunDir
from eventlog.schema import Stream
from eventlog.writer import Writer
from tests.storage import commits, producer

FAR = 60.0


class Door:
    """A commit that is written only when it is let, as on a disk that hangs."""

    def __init__(self, writer: Writer) -> None:
        """Hand it over."""
        self.reached, self.opened = threading.Event(), threading.Event()
        self.ticket = writer.put(Stream.COMMITS, self.encode, window=0, nbytes=300)

    def encode(self):
        """Wait, then write."""
        self.reached.set()
        assert self.opened.wait(FAR)
        return [commits(0)]


@pytest.fixture
def writer(tmp_path):
    """Return a writer, closed in the end."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    yield writer
    writer.close()


@pytest.fixture
def asked(writer, monkeypatch):
    """Return for how long the writer was waited for, wait by wait."""
    seconds = []
    wait = writer.wait
    monkeypatch.setattr(writer, "wait", lambda ticket, most: seconds.append(most) or wait(ticket, most))
    return seconds


def test_a_wait_in_vain_counts_towards_the_next(writer, asked):
    """An export that waited a while leaves the commit the rest of its time, and nothing to the one after."""
    patience, door = Patience(writer), Door(writer)
    assert door.reached.wait(FAR)
    assert not patience.wait(door.ticket, 0.05)
    assert not patience.wait(door.ticket, 0.2)
    assert not patience.wait(door.ticket, 0.2)
    assert [0.05, pytest.approx(0.15), 0.0] == asked
    door.opened.set()
    assert writer.flush(FAR)


def test_a_writer_that_gets_on_is_waited_for_again(writer, asked):
    """What was waited in vain is forgotten when something was written since."""
    patience, door = Patience(writer), Door(writer)
    assert door.reached.wait(FAR)
    assert "no answer yet" == patience.why_not(door.ticket, 0.05)
    door.opened.set()
    assert writer.flush(FAR)
    second = Door(writer)
    assert second.reached.wait(FAR)
    assert not patience.wait(second.ticket, 0.05)
    second.opened.set()
    assert None is patience.why_not(second.ticket, FAR)
    assert [0.05, 0.05] == asked[:2]
