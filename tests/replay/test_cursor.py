"""What a target has acknowledged, across processes and accidents."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from eventlog.errors import ManifestError, RunDirectoryError
from replay.cursor import Cursor, CursorFile, CursorInMemory
from replay.steps import Row

if TYPE_CHECKING:
    from pathlib import Path


def test_a_cursor_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    """Steps beyond 32 bits, times per attempt, the target's own id."""
    cursor = Cursor("trackio", "p/r", 2**31 + 5, {0: 1000.25, 1: 2000.5}, withheld="3-5, 9", run_id="abc")
    CursorFile(tmp_path / "cursors", "trackio", "p/r").save(cursor)
    assert cursor == CursorFile(tmp_path / "cursors", "trackio", "p/r").load()


def test_two_targets_of_one_backend_are_kept_apart(tmp_path: Path) -> None:
    """A cursor belongs to a backend and a target."""
    one, two = CursorFile(tmp_path, "b", "one"), CursorFile(tmp_path, "b", "two")
    one.save(Cursor("b", "one", 7))
    assert (7, None) == (one.load().last_step, two.load().last_step)


def test_what_was_acknowledged_is_known_again() -> None:
    """Commits up to the newest acknowledged one of their attempt are known, no others."""
    cursor = Cursor("b", "t")
    cursor.took(Row(5, {"a": 1.0}, 10.0, {0: 12.0}))
    cursor.took(Row(3, {"a": 1.0}, 8.0, {0: 8.0}))
    assert 5 == cursor.last_step
    assert cursor.knows(Row(4, {}, 11.0, {0: 11.0}))
    assert cursor.knows(Row(4, {}, 12.0, {0: 12.0}))
    assert not cursor.knows(Row(4, {}, 13.0, {0: 13.0}))
    assert not cursor.knows(Row(4, {}, 11.0, {1: 11.0}))


@pytest.mark.parametrize("damage", [b"{", b'{"backend": "b"}', b"[]", b""])
def test_a_damaged_cursor_is_passed_over_where_the_target_can_speak(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A cursor is a hint: a damaged one is said and ignored, but not where it is all there is."""
    store = CursorFile(tmp_path, "b", "t")
    store.save(Cursor("b", "t", 7))
    store.path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert Cursor("b", "t") == store.load()
    assert "a damaged cursor is passed over" in caplog.text
    with pytest.raises(ManifestError, match=store.path.name):
        store.load(required=True)


def test_a_cursor_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    """An unwritable folder is an error that names another way (report b5)."""
    (tmp_path / "cursors").write_text("in the way")
    with pytest.raises(RunDirectoryError, match=r"another folder can be given as cursors.*cursors/b-"):
        CursorFile(tmp_path / "cursors", "b", "t").save(Cursor("b", "t"))


def test_a_target_in_memory_has_its_cursor_there() -> None:
    """The cursor of a target that ends with the process is found by the same object, and by no other."""

    class Mine:
        pass

    mine, other = Mine(), Mine()
    CursorInMemory(mine, "b", "t").save(Cursor("b", "t", 7))
    assert 7 == CursorInMemory(mine, "b", "t").load().last_step
    assert None is CursorInMemory(other, "b", "t").load().last_step
    CursorInMemory([], "b", "t").save(Cursor("b", "t", 7))  # cannot be remembered: no error
