"""Pipes, devices, links to nothing and to themselves where a run's files belong: never waited for, told."""

import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from eventlog.errors import ManifestError, NotARunError, RunDirectoryError
from eventlog.files import open_file, read_file
from eventlog.following import Follower
from eventlog.manifest import read_json, write_json
from eventlog.reader import RunReader
from eventlog.recovery import recover, verify
from eventlog.rundir import RunDir
from tests.storage import tell, write_run
from tests.strange import KINDS, as_somebody, names, put

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def whole():
    """Return a run with a file of every kind, where any user may look."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    run = write_run(root / "run", 3)
    run.claim_attempt({"role": "actor"})
    (run.path / "cursors").mkdir()
    write_json(run.path / "cursors" / "memory-1.json", {"backend": "memory"})
    yield run.path
    shutil.rmtree(root)


@pytest.fixture
def each(whole):
    """Return a function that yields copies of the run, another file or folder replaced in each."""

    def replaced(kind):
        for name in names(whole):
            path = whole.with_name("copy")
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(whole, path)
            put(path / name, kind)
            with as_somebody(path.parent) if kind == "unreadable" else nullcontext():
                yield path, name
            shutil.rmtree(path)

    return replaced


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_lies_there_is_told_by_verify(each, kind):
    """No file of a run may be something else without verify telling of it, its name last (b10)."""
    for path, name in each(kind):
        told = [problem for file in verify(path).files for problem in file.problems]
        assert any(name in problem for problem in told), name


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_lies_there_is_read_around(each, kind):
    """Reading, and following, end without an error, and serve all that lies in the other files (b10)."""
    for path, name in each(kind):
        told = tell(path)
        streams = {"events": 6, "commits": 3}
        hurt = {root for root in streams if name.startswith(root)}
        assert len(told.frames) >= sum(frames for root, frames in streams.items() if root not in hurt)
        if hurt:
            assert any(name in str(problem) for problem in told.problems), name
        follower = Follower(path)
        seen = len(list(follower.poll()))
        assert follower.finished() in (True, False)
        assert hurt or seen == 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unreadable"])
def test_whatever_lies_there_is_recovered_around(each, kind):
    """The copy reads without a problem, and what is missing in it is counted (report g2)."""
    for path, name in each(kind):
        done = recover(path, path.with_name("saved"))
        assert verify(done.into).files
        assert [] == tell(done.into).problems, name
        if name.endswith((".idx", ".arrows", "0.json", "n.json")) and "cursors" not in name:
            assert not done.complete or any(file.unverified for file in done.files), name
        shutil.rmtree(done.into)


def test_files_are_opened_at_once_or_not(tmp_path):
    """A plain file is read; of a pipe, a device and a folder the system's error says what is wrong."""
    (tmp_path / "file").write_bytes(b"abc")
    assert b"abc" == read_file(tmp_path / "file")
    for kind in ("pipe", "device", "folder"):
        put(tmp_path / kind, kind)
        with pytest.raises(OSError, match="Not a regular file"):
            open_file(tmp_path / kind)
        with pytest.raises(ManifestError, match="Not a regular file"):
            read_json(tmp_path / kind)


@pytest.mark.parametrize("kind", ["pipe", "loop", "nothing", "device"])
def test_a_run_that_is_no_folder_is_refused(tmp_path, kind):
    """What is no directory is no run, and no place to recover into."""
    put(tmp_path / "run", kind)
    with pytest.raises(NotARunError, match="expected a run directory"):
        RunDir.open(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="expected a new or an empty directory"):
        recover(write_run(tmp_path / "other", 1).path, tmp_path / "run")


def test_a_run_one_may_not_enter_is_refused():
    """The reason is the system's, not that there is nothing."""
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o755)
        put(root / "run", "folder")
        (root / "run").chmod(0)
        with as_somebody(root), pytest.raises(NotARunError, match="Permission denied"):
            RunReader(root / "run")
    finally:
        shutil.rmtree(root)


def test_a_copy_that_cannot_be_written_is_one_error(tmp_path):
    """What the system says while the copy is written is told as an error of the distribution."""
    run = write_run(tmp_path / "run", 1)
    put(tmp_path / "file", "folder")
    (tmp_path / "file").rmdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="expected to write a copy of the run, got Not a directory"):
        recover(run.path, tmp_path / "file" / "saved")
