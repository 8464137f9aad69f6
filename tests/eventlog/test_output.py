"""Files that are made of runs: whole or not at all, whoever else writes the same."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from eventlog import replacing

if TYPE_CHECKING:
    from pathlib import Path


def test_two_who_write_one_file_do_not_meet(tmp_path: Path) -> None:
    """Each writes a file of its own; the last to end is what stands there, whole."""
    place = tmp_path / "m.csv"
    with replacing(place) as late:
        late.write_text("the first to begin")
        with replacing(place) as soon:
            soon.write_text("a")
        assert "a" == place.read_text()
        assert "the first to begin" == late.read_text()
    assert ["the first to begin"] == [file.read_text() for file in tmp_path.iterdir()]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """What the file system says without a path, or of the unfinished file, is told of the path itself."""
    place = tmp_path / "m.csv"
    with pytest.raises(OSError, match=f"No space left on device: '{place}'"), replacing(place) as unfinished:
        raise OSError(errno.ENOSPC, "No space left on device")
    place = tmp_path / "none" / "m.csv"
    with pytest.raises(FileNotFoundError, match=f"'{place}'"), replacing(place) as unfinished:
        unfinished.write_text("")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_is_not_finished_replaces_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    """After an error there is what was there before, and nothing beside it."""
    place = tmp_path / "m.csv"
    place.write_text("before")

    def write() -> None:
        with replacing(place) as unfinished:
            unfinished.write_text("hal")
            raise error

    with pytest.raises(error):
        write()
    assert {place: "before"} == {file: file.read_text() for file in tmp_path.iterdir()}
