"""Run directories: made, joined, opened; JSON that carries its checksum; attempts that one process claims."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlog import recover, verify
from eventlog.attempt import LOST
from eventlog.errors import FormatVersionError, LogError, ManifestError, NotARunError, RunDirectoryError
from eventlog.manifest import create_json, read_json, write_json
from eventlog.rundir import RunDir
from eventlog.schema import Stream
from eventlog.writer import Writer
from tests.storage import flip, producer, put_window, tell, write_run

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


# JSON files


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text().filter(lambda key: key != "crc32c"), JSON, max_size=5))
def test_what_is_written_is_read(tmp_path_factory, data):
    """Any JSON object comes back equal."""
    path = tmp_path_factory.mktemp("json") / "a.json"
    write_json(path, data)
    assert data == read_json(path)


def test_values_that_json_lacks_become_text(tmp_path):
    """A config's odd values and keys are written as text, and still pass their checksum."""
    write_json(tmp_path / "a.json", {"path": tmp_path, 10: "ten", 9: "nine", "inf": float("inf")})
    assert {"path": str(tmp_path), "10": "ten", "9": "nine", "inf": float("inf")} == read_json(
        tmp_path / "a.json"
    )


def test_a_damaged_byte_is_noticed_or_changes_nothing(tmp_path):
    """No single flipped bit of a JSON file changes what is read (report b10)."""
    path = tmp_path / "a.json"
    data = {"id": "x", "number": 17, "e": 1.5e300, "text": "Grüße", "list": [1, 2, None, True]}
    write_json(path, data)
    intact = path.read_bytes()
    for offset in range(len(intact)):
        for bit in range(8):
            flip(path, offset, bit)
            with contextlib.suppress(ManifestError):
                assert data == read_json(path)
            path.write_bytes(intact)


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    """Bytes that are no manifest are a ManifestError, whatever they are."""
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_bytes(data)
    with pytest.raises(ManifestError, match="expected"):
        read_json(path)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("[1]", "got list"),
        ("{}", "expected checksum None"),
        ("", "expected a JSON object"),
        ("[" * 10**5, "JSON"),
    ],
)
def test_what_is_no_manifest_is_said(tmp_path, text, got):
    """The message names what came instead, the path last."""
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ManifestError, match=f"{got}.*: {path}$"):
        read_json(path)


def test_a_missing_file_is_a_manifest_error(tmp_path):
    """A file that is not there is named."""
    with pytest.raises(ManifestError, match=r"No such file.*a\.json$"):
        read_json(tmp_path / "a.json")


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    """What cannot be written leaves what was there, and nothing beside it."""
    write_json(tmp_path / "a.json", {"a": 1})
    loop: dict[str, object] = {}
    loop["loop"] = loop
    with pytest.raises(ValueError, match="Circular"):
        write_json(tmp_path / "a.json", loop)
    assert {"a": 1} == read_json(tmp_path / "a.json")
    assert ["a.json"] == [path.name for path in tmp_path.iterdir()]


def test_files_have_the_mode_the_umask_leaves(tmp_path):
    """A shared log directory stays readable for those the user's umask lets in."""
    old = os.umask(0o027)
    try:
        write_json(tmp_path / "a.json", {})
        create_json(tmp_path / "b.json", {})
    finally:
        os.umask(old)
    assert [0o640, 0o640] == [path.stat().st_mode & 0o777 for path in sorted(tmp_path.iterdir())]


def test_claims_work_where_links_do_not_exist(tmp_path, monkeypatch):
    """On a file system without hard links the first writer still wins."""

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert create_json(tmp_path / "a.json", {"first": 1})
    assert not create_json(tmp_path / "a.json", {"second": 2})
    assert {"first": 1} == read_json(tmp_path / "a.json")
    assert ["a.json"] == [path.name for path in tmp_path.iterdir()]


# Making, joining and opening


def test_the_first_one_makes_the_run_the_others_join_it(tmp_path):
    """Whoever comes second gets the first one's id."""
    first = RunDir.create(tmp_path / "deep" / "run")
    assert first.id == RunDir.create(first.path).id == RunDir.open(first.path).id


def test_processes_that_start_together_make_one_run_and_claim_apart(tmp_path):
    """Ranks that start at once agree on the run's id, and every number is claimed once (report b7)."""
    script = (
        "import sys; from eventlog.rundir import RunDir; print('ready', flush=True); sys.stdin.readline(); "
        "run = RunDir.create(sys.argv[1]); print(run.id, *(run.claim_attempt({}) for _ in range(25)))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for rank in ranks:
        assert "ready\n" == rank.stdout.readline()
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    said = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert {RunDir.open(tmp_path / "run").id} == {words[0] for words in said}
    assert list(range(75)) == sorted(int(word) for words in said for word in words[1:])


def test_nothing_is_not_a_run(tmp_path):
    """A path that is missing, a file, or a directory of other things is refused in one line."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    for name, got in (("missing", "nothing"), ("file", "a file"), ("other", "neither run.json nor events")):
        with pytest.raises(NotARunError, match=f"expected a run directory, got {got}.*: {tmp_path / name}$"):
            RunDir.open(tmp_path / name)
    with pytest.raises(NotARunError, match=r"got 'thesis.tex' in it"):
        RunDir.create(tmp_path / "other")
    with pytest.raises(NotARunError, match="got a file"):
        RunDir.create(tmp_path / "file")
    with pytest.raises(NotARunError, match="got a file"):
        RunDir.create(tmp_path / "file" / "run")


def test_hidden_files_do_not_make_a_directory_foreign(tmp_path):
    """A directory with only hidden files can become a run."""
    (tmp_path / ".nfs0001").write_text("")
    assert RunDir.create(tmp_path).id


def test_a_run_that_cannot_be_written_is_said(tmp_path):
    """A directory that takes nothing is an error with the system's reason."""
    path = tmp_path / ("x" * 300)
    with pytest.raises(
        RunDirectoryError, match=f"expected a directory to write to, got File name too long: {path}"
    ):
        RunDir.create(path)


def test_frames_without_a_manifest_are_a_run(tmp_path):
    """Without run.json a run is opened by its frames, under its id, and one can go on in it (report b6)."""
    known = write_run(tmp_path / "lost", 1).id
    (tmp_path / "lost" / "run.json").unlink()
    opened = RunDir.open(tmp_path / "lost")
    assert (None, known) == (opened.manifest, opened.id)
    said = f"is missing: of which run this is the segments alone say: {tmp_path / 'lost' / 'run.json'}"
    assert [said] == list(map(str, opened.problems))
    assert known == RunDir.create(tmp_path / "lost").id
    assert [] == RunDir.open(tmp_path / "lost").problems


def test_the_id_is_what_any_segment_says(tmp_path):
    """Where the first segments are damaged a later one names the run; where all are, its directory does."""
    run = RunDir.create(tmp_path / "lost")
    writer = Writer(run, producer(run), segment_bytes=1)
    for window in range(3):
        put_window(writer, window)
    writer.close()
    (run.path / "run.json").unlink()
    for index in run.path.rglob("*.0000.idx"):
        flip(index, 0)
    assert run.id == RunDir.open(run.path).id
    for index in run.path.rglob("*.idx"):
        flip(index, 1)
    assert RunDir.open(run.path).id == "unknown-lost"


def test_a_damaged_manifest_is_a_problem_beside_frames_and_an_error_without(tmp_path):
    """Frames outlive their manifest; a run that would be written into must be in order."""
    run = write_run(tmp_path, 1)
    flip(tmp_path / "run.json", 20)
    opened = RunDir.open(tmp_path)
    assert (None, ["run.json"]) == (opened.manifest, [problem.path.name for problem in opened.problems])
    with pytest.raises(ManifestError, match=f"expected .*: {tmp_path / 'run.json'}$"):
        RunDir.create(tmp_path)
    for folder in ("events", "commits"):
        (run.path / folder).rename(tmp_path.parent / f"{tmp_path.name}-{folder}")
    with pytest.raises(ManifestError, match="expected"):
        RunDir.open(tmp_path)


def test_a_newer_major_version_is_refused(tmp_path):
    """Nothing is read of, or written into, a run of a newer major version."""
    write_json(tmp_path / "run.json", {"id": "x", "format": [2, 0], "created_us": 1})
    for use in (RunDir.open, RunDir.create):
        with pytest.raises(
            FormatVersionError, match=r"expected format 1\.x, got 2\.0 of a newer release: .*run\.json$"
        ):
            use(tmp_path)


def test_a_newer_minor_version_is_taken(tmp_path):
    """Unknown fields and a newer minor version change nothing."""
    write_json(tmp_path / "run.json", {"id": "x", "format": [1, 9], "created_us": 1, "mood": "good"})
    assert RunDir.open(tmp_path).id == RunDir.create(tmp_path).id == "x"


# Attempts


def test_attempts_are_numbered_and_say_how_they_ended(tmp_path):
    """Each attempt says finished, exception or signal; one that was killed says nothing (report b16)."""
    run = RunDir.create(tmp_path)
    claims = [
        run.claim_attempt({"role": "main", "session": f"s{n}", "resume_step": n or None}) for n in range(4)
    ]
    run.end_attempt(0, "finished")
    run.end_attempt(1, "exception", "ValueError: bad")
    run.end_attempt(2, "signal", "SIGTERM")
    assert [0, 1, 2, 3] == claims
    assert 3 == run.newest_attempt()
    assert ["finished", "exception: ValueError: bad", "signal: SIGTERM", None] == [
        a.outcome for a in run.attempts()
    ]
    assert [None, 1, 2, 3] == [attempt.resume_step for attempt in run.attempts()]
    assert {os.getpid()} == {attempt.pid for attempt in run.attempts()}


def test_an_ending_gives_no_secret_away(tmp_path):
    """The text of an exception is written without what looks like a key, and cut off."""
    run = RunDir.create(tmp_path)
    said = f"401 with token hf_{'A' * 30} and password=hunter2 " + "x" * 1000
    run.end_attempt(run.claim_attempt({}), "exception", said)
    outcome = run.attempts()[0].outcome
    assert "exception: 401 with token <redacted> and password=<redacted> xxx" in outcome
    assert len("exception: ") + 500 == len(outcome)


def test_the_first_ending_stands(tmp_path):
    """An attempt that was ended by a signal does not become finished when its exit handlers run."""
    run = RunDir.create(tmp_path)
    run.end_attempt(run.claim_attempt({}), "signal", "SIGTERM")
    run.end_attempt(0, "finished")
    assert "signal: SIGTERM" == run.attempts()[0].outcome
    with pytest.raises(LogError, match="expected an outcome of finished, exception, signal, got 'done'"):
        run.end_attempt(0, "done")


def test_a_given_number_is_claimed_once(tmp_path):
    """A number that the caller gives is its own, or an error."""
    run = RunDir.create(tmp_path)
    assert 7 == run.claim_attempt({}, 7)
    assert 8 == run.claim_attempt({})
    with pytest.raises(LogError, match="expected attempt 7 to be free"):
        run.claim_attempt({}, 7)


def test_an_unreadable_attempt_is_a_problem_and_keeps_its_number(tmp_path):
    """A damaged claim costs only itself; its number is not given again."""
    run = RunDir.create(tmp_path)
    for _ in range(3):
        run.claim_attempt({})
    flip(tmp_path / "attempts" / "0001.json", 30)
    assert [0, 2] == [attempt.number for attempt in run.attempts()]
    assert ["0001.json"] == [problem.path.name for problem in run.problems]
    assert 3 == run.claim_attempt({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"started_us": "x"}, {"started_us": 2**70}, {"ended_us": -1}, {"resume_step": 1.5}, {"rank": True},
        {"resume_step": 2**63}, {"outcome": 5}, {"config": "text"}, {"host": ["a"]}, {"pid": {}},
        {"session": "\ud800"},
    ],
)  # fmt: skip
def test_an_attempt_that_says_what_cannot_be_is_a_problem(tmp_path, wrong):
    """A right checksum does not make a claim right: it is unreadable, and everything else is read."""
    run, saved = write_run(tmp_path / "run", 1), tmp_path / "saved"
    for _ in range(2):
        run.claim_attempt({})
    path = run.path / "attempts" / "0001.json"
    write_json(path, {**read_json(path), **wrong})
    assert [0] == [attempt.number for attempt in run.attempts()]
    (problem,) = run.problems
    assert (path, True) == (problem.path, problem.reason.startswith(f"expected {next(iter(wrong))} to be "))
    assert [str(problem)] == [one for file in verify(run.path).files for one in file.problems]
    recover(run.path, saved)
    assert verify(saved).clean
    assert [None, LOST] == [attempt.outcome for attempt in RunDir.open(saved).attempts()]


def test_a_copied_claim_is_no_attempt(tmp_path):
    """A copy of a claim under another number supersedes nobody, and is a problem."""
    run = RunDir.create(tmp_path)
    assert 0 == run.claim_attempt({})
    shutil.copy(run.attempt_path(0), run.attempt_path(3))
    for fresh in (run, RunDir.open(tmp_path)):
        assert (0, [0]) == (fresh.newest_attempt(), [attempt.number for attempt in fresh.attempts()])
        assert ["is a copy of the claim of attempt 0: not read"] == [each.reason for each in fresh.problems]
    assert 4 == run.claim_attempt({})
    run.attempt_path(5).write_bytes(b"{")  # damaged, so of the attempt it names
    assert 5 == RunDir.open(tmp_path).newest_attempt()


def test_an_attempt_is_named_by_nine_digits_at_most(tmp_path):
    """A number that no reader would find is not claimed; a file under another name is reported."""
    run = RunDir.create(tmp_path)
    with pytest.raises(LogError, match="expected an attempt of 0 to 999999999, got 1000000000"):
        run.claim_attempt({}, 10**9)
    assert 10**9 - 1 == run.claim_attempt({}, 10**9 - 1)
    with pytest.raises(LogError, match="expected an attempt of 0 to 999999999, got 1000000000"):
        run.claim_attempt({})
    (tmp_path / "attempts" / "9999999999.json").write_bytes(b"{}")
    assert [10**9 - 1] == [attempt.number for attempt in run.attempts()]
    assert ["9999999999.json"] == [problem.path.name for problem in run.problems]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"format": [0, 1]}, r"expected a format version of 1\.0 or above, got \[0, 1\]"),
        ({"format": [True]}, r"expected a format version such as \[1, 0\], got \[True\]"),
        ({"format": [1, "x"]}, "expected a format version such as"),
        ({"format": None}, "expected a format version such as .*, got None"),
        ({"id": {"a": 1}}, "expected the id of a run, got {'a': 1}"),
        ({"id": ""}, "expected the id of a run, got ''"),
        ({"created_us": "now"}, "expected created_us in microseconds, got 'now'"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused(tmp_path, wrong, message):
    """A right checksum does not make run.json right."""
    RunDir.create(tmp_path)
    write_json(tmp_path / "run.json", {**read_json(tmp_path / "run.json"), **wrong})
    with pytest.raises(ManifestError, match=message):
        RunDir.open(tmp_path)


def test_an_attempt_of_a_newer_minor_version_is_read(tmp_path):
    """Fields this version does not know are ignored, those it misses have defaults."""
    run = RunDir.create(tmp_path)
    (tmp_path / "attempts").mkdir()
    write_json(tmp_path / "attempts" / "0000.json", {"number": 0, "host": "h", "weather": "fine"})
    assert ("h", {}, None) == (run.attempts()[0].host, run.attempts()[0].config, run.attempts()[0].outcome)


# Names


@pytest.mark.parametrize("role", ["", "a/b", "../x", "..", ".hidden", "a..b", "rôle", "a b", "x" * 129])
def test_roles_that_are_no_names_are_refused(tmp_path, role):
    """A role that would leave the run directory, or is no file name, is refused with what came."""
    run = RunDir.create(tmp_path)
    with pytest.raises(LogError, match="expected a role of letters"):
        run.producer_dir(Stream.RECORDS, role, 0)


def test_a_rank_is_not_negative(tmp_path):
    """A negative rank is refused."""
    with pytest.raises(LogError, match="expected a rank of 0 to 999999999, got -1"):
        RunDir.create(tmp_path).producer_dir(Stream.RECORDS, "actor", -1)


def test_names_lead_to_files_and_files_to_names(tmp_path):
    """The files of a segment have the documented names, and are found again by them."""
    run = RunDir.create(tmp_path)
    who = producer(run, "eval-rollout", 12, session="0a" * 16, started_us=1_795_961_760_416_779)
    files = [run.segment(stream, who, number) for stream in Stream for number in (0, 1)]
    assert [
        "events/eval-rollout-12/20261129T141600.416779Z-" + "0a" * 16 + ".records.0000.arrows",
        "events/eval-rollout-12/20261129T141600.416779Z-" + "0a" * 16 + ".payload.0001.idx",
        "commits/eval-rollout-12/20261129T141600.416779Z-" + "0a" * 16 + ".0000.arrows",
    ] == [str(path.relative_to(tmp_path)) for path in (files[0].data, files[3].index, files[4].data)]
    for file in files:
        file.folder.mkdir(parents=True, exist_ok=True)
        file.index.touch()
        file.data.touch()
    assert files == run.segments()
    assert files[4:] == run.segments(Stream.COMMITS)
    assert files[:4] == run.segments_of("eval-rollout", 12)


def test_producers_come_by_role_rank_and_start(tmp_path):
    """Ranks sort as numbers."""
    run = RunDir.create(tmp_path)
    for rank in (10, 9, 0):
        file = run.segment(Stream.RECORDS, producer(run, rank=rank), 0)
        file.folder.mkdir(parents=True)
        file.index.touch()
    assert [0, 9, 10] == [file.rank for file in run.segments()]


def test_foreign_names_are_reported_and_others_ignored(tmp_path):
    """A segment under another name is named as a problem; what is no segment is none of our business."""
    run = write_run(tmp_path, 1)
    (folder,) = (tmp_path / "events").iterdir()
    (folder / "copy of records.arrows").touch()
    (folder / "notes.txt").touch()
    (tmp_path / "events" / "README").touch()
    assert 3 == len(run.segments())
    told = {problem.path.name: problem.reason for problem in run.problems}
    assert {"copy of records.arrows": "is not named like a segment: not read"} == {
        name: reason for name, reason in told.items() if name != "README"
    }


@pytest.mark.parametrize("name", ["Copy of actor-0", "actor-00", "actor-1234567890", "actor-٣", "actor"])
def test_a_folder_no_producer_has_is_reported_and_left_alone(tmp_path, name):
    """A folder somebody copied costs nothing but its own files, in reading, checking and saving alike."""
    run = write_run(tmp_path / "run", 2)
    shutil.copytree(run.path / "events" / "actor-0", run.path / "events" / name)
    copied = sorted(path.name for path in (run.path / "events" / name).iterdir())
    told = tell(run.path)
    assert [0, 1] == told.windows()
    assert copied == sorted(p.path.name for p in told.problems if p.path.parent.name == name)
    assert len(copied) == sum(len(file.problems) for file in verify(run.path).files)
    recover(run.path, tmp_path / "saved")
    assert (verify(tmp_path / "saved").clean, [0, 1]) == (True, tell(tmp_path / "saved").windows())


def test_a_manifest_is_plain_json(tmp_path):
    """Any JSON reader reads run.json."""
    manifest = json.loads((RunDir.create(tmp_path).path / "run.json").read_text())
    assert [1, 0] == manifest["format"]
