"""Bytes that no writer writes, as indexes and manifests: parsed without a foreign error, and never believed.

The inputs are those of corpus/ and what hypothesis makes of them. What fails is written there, so that it is
tried ever after.
"""

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from eventlog.errors import FormatVersionError, ManifestError
from eventlog.manifest import read_json
from eventlog.reader import RunReader
from eventlog.recovery import verify
from eventlog.rundir import Problems
from eventlog.schema import ENTRY_SIZE, IndexHeader, IndexRecord, RecordType, Stream
from eventlog.sealed import SealedSegment
from eventlog.source import Source
from tests.storage import records, write_run

CORPUS = Path(__file__).with_name("corpus")
FOLDERS = {"index": "index", "commits": "index", "manifest": "manifest"}
SEEDS = {kind: sorted((CORPUS / folder).iterdir()) for kind, folder in FOLDERS.items()}
WINDOWS = 4
MINUTES = 10
SOAK = [pytest.mark.soak, pytest.mark.timeout(180 * MINUTES)]  # a busy machine is no failure


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run whose files are given other contents."""
    run = write_run(tmp_path_factory.mktemp("fuzz") / "run", WINDOWS)
    run.claim_attempt({"config": {"lr": 1.0}})
    return run


# What is tried


def uid_of(data):
    """Return what a segment's records are sealed with."""
    header = IndexHeader.unpack(data[:ENTRY_SIZE])
    return header.segment_uid if header else bytes(16)


INT64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 5)
UINT64 = st.integers(0, (1 << 64) - 1) | st.integers(0, 4096)
RECORDS = st.builds(
    IndexRecord,
    st.integers(0, 255) | st.sampled_from([*RecordType]),
    st.integers(-3, 1000),
    st.integers(0, 255),
    st.integers(0, 65535),
    st.integers(0, 9) | st.integers(0, (1 << 32) - 1),
    INT64,
    INT64,
    UINT64,
    UINT64,
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 32) - 1),
)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "zero", "cut", "insert", "double", "sealed"]),
        st.integers(0, 4096),
        st.integers(1, 200),
        st.binary(max_size=80),
        RECORDS,
    ),
    min_size=1,
    max_size=5,
)


def edited(data, edits, uid=b""):
    """Return some bytes with edits made to them; "sealed" puts in any record, sealed as ours are."""
    out = bytearray(data)
    for kind, place, size, more, record in edits:
        at = place % (len(out) + 1)
        if kind == "flip" and at < len(out):
            out[at] ^= 1 << size % 8
        elif kind == "zero":
            out[at : at + size] = bytes(len(out[at : at + size]))
        elif kind == "cut":
            del out[at : at + size]
        elif kind == "insert":
            out[at:at] = more
        elif kind == "double":
            out[at:at] = out[at : at + size]
        elif uid:
            at -= at % ENTRY_SIZE
            out[at : at + ENTRY_SIZE] = record.pack(uid)
    return bytes(out)


# What must hold


def check_index(run, content):
    """Whatever an index holds: no error, only sealed records, no row that was not written."""
    file = run.segments(Stream.RECORDS)[0]
    intact = file.index.read_bytes()
    try:
        file.index.write_bytes(content)
        for newest in (True, False):
            with SealedSegment(file, Problems(), newest=newest) as segment:
                check_entries(segment, content)
        reader = RunReader(run.path)
        for _, record, batch in reader.records():
            assert records(record.window).to_pylist() == batch.to_pylist()
        (state,) = reader.sessions()
        assert len(state.complete) <= WINDOWS
        verify(run.path)
        with Source(file) as source:
            assert all(nearly(record, entry, source.uid) for record, entry in listed(source))
    finally:
        file.index.write_bytes(intact)


def nearly(record, entry, uid):
    """Whether a record is what stands there, or would but for one bit."""
    unlike = int.from_bytes(record.pack(uid)) ^ int.from_bytes(entry)
    return record == IndexRecord.unpack(entry, uid) or 1 == unlike.bit_count()


def check_entries(segment, content):
    """The records come in order, and each is what stands at its place."""
    before = -1  # 0 is the schema's, told only when it is damaged
    for slot, record in segment.entries():
        assert before < slot
        before = slot
        if record is not None:
            place = (1 + slot) * ENTRY_SIZE
            assert record.pack(uid_of(content)) == content[place : place + ENTRY_SIZE]


def listed(source):
    """Return the records of an index with their bytes."""
    return [
        (record, source.index[(1 + slot) * ENTRY_SIZE : (2 + slot) * ENTRY_SIZE])
        for slot, record in source.records()
    ]


def check_manifest(run, content):
    """Whatever a JSON file holds: it is what was written, or an error of ours says what is wrong."""
    for path in (run.path / "run.json", run.path / "attempts" / "0000.json"):
        intact, known = path.read_bytes(), read_json(path)
        try:
            path.write_bytes(content)
            with suppress(ManifestError):
                found = read_json(path)
                assert found == {k: v for k, v in json.loads(content).items() if k != "crc32c"}
            with suppress(FormatVersionError):
                reader = RunReader(run.path)
                assert len(reader.run.attempts()) <= 1
                assert WINDOWS == len(list(reader.records()))
        finally:
            path.write_bytes(intact)
        assert known == read_json(path)


def check_commits(run, content):
    """Whatever an index of commits holds: only commits that were made, and few losses whatever it says."""
    file = run.segments(Stream.COMMITS)[0]
    intact = file.index.read_bytes()
    try:
        file.index.write_bytes(content)
        reader = RunReader(run.path)
        assert {*map(str, range(WINDOWS))} >= {
            str(batch["commit"][0]) for _, _, batch in reader.commits() if batch.num_rows
        }
        (state,) = reader.sessions()
        assert len(state.losses) <= len(content) // ENTRY_SIZE + 1
        assert all(0 <= loss.rows < 1 << 32 for loss in state.losses)
        verify(run.path)
    finally:
        file.index.write_bytes(intact)


def file_of(run, kind):
    """Return the file that is given other contents."""
    if kind == "manifest":
        return run.path / "run.json"
    return run.segments(Stream.COMMITS if kind == "commits" else Stream.RECORDS)[0].index


CHECKS = {"index": check_index, "commits": check_commits, "manifest": check_manifest}


@pytest.mark.parametrize(
    ("kind", "path"),
    [(kind, path) for kind, paths in SEEDS.items() for path in paths],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_the_corpus_holds(run, kind, path):
    """Every input that was of interest once is parsed as it has to be."""
    CHECKS[kind](run, path.read_bytes())


def keep(kind, content):
    """Add what failed to the corpus."""
    name = hashlib.blake2b(content, digest_size=8).hexdigest()
    (CORPUS / FOLDERS[kind] / f"found-{name}").write_bytes(content)


def fuzz(run, kind, examples, number):
    """Try so many inputs made of the corpus and of what the run has; returns how many."""
    own = file_of(run, kind).read_bytes()
    seeds = [own, *(path.read_bytes() for path in SEEDS[kind])]
    tried, last = 0, b""

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(st.sampled_from(seeds), EDITS)
    def law(begun, edits):
        nonlocal tried, last
        tried += 1
        last = edited(begun, edits, b"" if kind == "manifest" else uid_of(begun))
        CHECKS[kind](run, last)

    try:
        law()
    except Exception:
        keep(kind, last)  # the smallest that fails is tried last
        raise
    return tried


@pytest.mark.parametrize("kind", SEEDS)
def test_made_up_bytes_are_parsed(run, kind):
    """Edits of indexes and manifests, also such that are sealed like ours, break nothing."""
    assert fuzz(run, kind, 60, 0) >= 60


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SOAK) for kind in SEEDS])
def test_made_up_bytes_are_parsed_for_minutes(run, kind):
    """The same for ten minutes."""
    begin, number, tried = time.monotonic(), time.time_ns() % 1_000_000, 0
    while time.monotonic() - begin < 60 * MINUTES:
        number += 1
        tried += fuzz(run, kind, 100, number)
    print({"kind": kind, "tried": tried, "failed": 0})
    assert tried > 0
