"""Who waits for the writer is woken when what it waits for has come, and not before."""

import threading

from eventlog.backlog import Change


def test_callers_are_woken_only_for_what_they_wait_for():
    """A word that something else moved leaves a waiting thread asleep; the right one ends its wait."""
    change, asked, found = Change(), [], []
    state = {"come": False}

    def come():
        asked.append(threading.current_thread())
        return state["come"]

    def wait():
        with change:
            found.append(change.until(come, 30))

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not change._waiters:
        pass
    for _ in range(3):
        with change:
            change.tell()
    with change:
        assert [waiter] == [each for each in asked if each is waiter]
        state["come"] = True
        change.tell()
    waiter.join(30)
    assert [True] == found


def test_a_wait_in_vain_ends_and_is_forgotten():
    """After its time nothing is waited for any more."""
    change = Change()
    with change:
        assert not change.until(lambda: False, 0.01)
        assert change.until(lambda: True, 0)
        change.tell()
    assert [] == change._awaited
