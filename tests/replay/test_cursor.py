"""What a target has acknowledged, across processes and accidents."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from eventlog.errors import ManifestError, RunDirectoryError
from replay.acknowledged import Telling
from replay.cursor import Cursor, CursorFile, CursorInMemory, Lineage
from replay.steps import Row

if TYPE_CHECKING:
    from pathlib import Path


def test_a_cursor_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    """Steps beyond 32 bits, times per attempt, the target's own id."""
    cursor = Cursor("trackio", "p/r", refused={3, 4, 5, 9}, run_id="abc")
    cursor.told.begin(Telling("a/*", "p99", "a = b"))
    for attempt, step in ((0, 7), (1, 2**31 + 5)):
        cursor.took(Row(step, {"b/p99": 1.0}, 1000.25, {attempt: 2000.5}))
    assert cursor.tries(Row(3, {"b/p99": 1.0}, 3000.0, {2: 3000.0}))
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


def test_the_newest_run_that_was_begun_anew_is_gone_on_with(tmp_path: Path) -> None:
    """Each first run has one of its own; without a folder, or only looking, nothing is kept (report a16)."""
    for name in ("a-2", "a-3"):
        Lineage(tmp_path / "cursors", "b").begin("server p/a", name)
    Lineage(tmp_path / "cursors", "b", keeps=False).begin("server p/a", "a-4")
    Lineage().begin("server p/a", "a-5")
    known = Lineage(tmp_path / "cursors", "b")
    assert ("a-3", None) == (known.newest("server p/a"), known.newest("server p/other"))
    assert (None, None) == (Lineage(tmp_path / "cursors", "c").newest("server p/a"), Lineage().newest("a"))
    other = Lineage(tmp_path / "other", "b", beside=tmp_path / "cursors")
    assert "a-3" == other.newest("server p/a")
    other.begin("server p/a", "a-4")
    assert ("a-4", "a-3") == (other.newest("server p/a"), known.newest("server p/a"))
    (file,) = (tmp_path / "cursors").iterdir()
    file.write_text("{")
    with pytest.raises(ManifestError, match=f"{file.name}$"):
        known.newest("server p/a")


def test_a_lineage_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run that was begun is told all the same."""
    (tmp_path / "cursors").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        Lineage(tmp_path / "cursors", "b").begin("server p/a", "a-2")
    assert "b: a later replay goes on with the first run, not with a-2" in caplog.text


def killed() -> Cursor:
    """Return a cursor that was told steps 0 to 3 when a kill came over 4."""
    cursor = Cursor("b", "t")
    for step in range(4):
        cursor.took(row(step))
    assert not cursor.tries(row(4))
    return cursor


def row(step: int, attempt: int = 0, behind: float = 0.0) -> Row:
    return Row(step, {"a": 1.0}, 10.0 * step + behind, {attempt: 10.0 * step + behind})


@pytest.mark.parametrize(("last", "known"), [(3, 4), (4, 5), (5, 4), (1, 2)])
def test_what_was_on_its_way_when_a_kill_came_is_there_if_the_target_ends_on_it(
    last: int, known: int
) -> None:
    """That very commit: not one of another attempt, nor a late one of its step."""
    cursor = killed()
    cursor.settle(last, completes=False)
    assert [step < known for step in range(6)] == [cursor.knows(row(step)) for step in range(6)]
    assert not cursor.knows(row(4, attempt=1))
    assert not cursor.knows(row(4, behind=1.0))
    assert min(last, 4) == cursor.last_step or last == 5


@pytest.mark.parametrize("last", [2, 3, 4])
def test_what_a_target_ends_on_is_completed_by_the_same_commit_alone(last: int) -> None:
    """Told again is what was told, or on its way; others of the step are barred, those above are not."""
    cursor = killed()
    cursor.settle(last, completes=True)
    assert [step < last for step in range(5)] == [cursor.knows(row(step)) for step in range(5)]
    bars = [cursor.bars(some, completes=True) for some in (row(last), row(last, 1), row(last, 0, 50.0))]
    assert [False, True, True, False] == [*bars, cursor.bars(row(last + 1, 1), completes=True)]
    assert cursor.holds(row(last))
    cursor.took(row(last))
    cursor.settle(last, completes=True)
    assert cursor.bars(row(last, 1), completes=True) or cursor.again is None
