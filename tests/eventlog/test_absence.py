"""What is gone of a process that is gone: ends of indexes, files, kinds of files, folders; others' files."""

import os
import shutil
from dataclasses import replace

import pytest

import eventlog
from aggregator import stats_tracker
from aggregator.offline.union import merge_runs
from eventlog.manifest import read_json
from eventlog.reader import RunReader
from eventlog.recovery import recover, verify
from eventlog.rundir import RunDir
from eventlog.schema import ENTRY_SIZE, IndexHeader, IndexRecord, RecordType, Stream
from eventlog.segment import FrameInfo, SegmentWriter
from eventlog.writer import Writer
from tests.storage import only, producer, put_window, records, settle, tell, write_run
from tests.strange import put

STREAMS = {
    "records": "events/*/*.records.0000.",
    "payload": "events/*/*.payload.0000.",
    "commits": "commits/*/*.",
}


def index_of(run, kind):
    """Return the index of a kind's only segment."""
    (found,) = run.glob(f"{STREAMS[kind]}idx")
    return found


def entries(index):
    """Return the records of an index."""
    content = index.read_bytes()
    return [content[at : at + ENTRY_SIZE] for at in range(ENTRY_SIZE, len(content), ENTRY_SIZE)]


def rewrite(index, found):
    """Give an index other records."""
    index.write_bytes(index.read_bytes()[:ENTRY_SIZE] + b"".join(found))


@pytest.fixture
def ended(tmp_path):
    """Return a run of five windows whose process ended in order."""
    return write_run(tmp_path / "run", 5).path


def saved(run):
    """Recover a run; return the report and the copy, which reads without a problem."""
    copy = run.with_name("saved")
    report = recover(run, copy)
    assert "" == tell(copy).reasons()
    return report, copy


def windows(run):
    """Return the windows and commits that can be read of each stream."""
    told = tell(run)
    return {stream: told.windows(stream) for stream in Stream}


# Of an index


@pytest.mark.parametrize("kind", ["payload", "commits"])
def test_an_index_cut_to_its_header_is_told(ended, kind):
    """Where nothing of a stream is sealed, what lies in it is told; recovery brings it back."""
    before = windows(ended)
    rewrite(index_of(ended, kind), [])
    assert "bytes that nothing seals are not read" in tell(ended).reasons()
    assert not verify(ended).clean
    report, copy = saved(ended)
    assert (True, before) == (report.complete, windows(copy))


@pytest.mark.parametrize("kind", ["payload", "commits"])
def test_an_index_without_its_last_records_is_told(ended, kind):
    """A whole frame behind the last sealed one of a process that is gone is told; recovery brings it back."""
    before = windows(ended)
    index = index_of(ended, kind)
    rewrite(index, entries(index)[:-2])
    assert "behind the last sealed frame are not read (recover" in tell(ended).reasons()
    report, copy = saved(ended)
    assert (True, before) == (report.complete, windows(copy))
    assert verify(copy).clean


def test_records_without_their_end_and_the_last_window_are_told(tmp_path):
    """The same of the records of a process that fell silent long ago."""
    run = RunDir.create(tmp_path / "run")
    who = producer(run, started_us=1_000_000_000_000_000)
    segment = SegmentWriter(run.segment(Stream.RECORDS, who, 0), who)
    for window in range(3):
        frame = [records(window).serialize()]
        segment.append(frame, FrameInfo(window, 0, True, 100 * window, 100 * window + 2, 3))
    segment.close()
    index = index_of(run.path, "records")
    assert "" == tell(run.path).reasons()
    rewrite(index, entries(index)[:-1])
    aged(index)
    assert "behind the last sealed frame are not read (recover" in tell(run.path).reasons()


def aged(index):
    """Let a segment have been opened an hour ago."""
    content = index.read_bytes()
    header = IndexHeader.unpack(content[:ENTRY_SIZE])
    old = replace(header, opened_us=header.opened_us - 3_600_000_000)
    index.write_bytes(old.pack() + content[ENTRY_SIZE:])


def test_a_whole_frame_of_a_live_process_is_on_its_way(tmp_path):
    """A frame whose index record is still to come is no damage while its process lives."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    put_window(writer, 0)
    settle(writer)
    with only(run.path, "*.records.0000.arrows").open("ab") as data:
        data.write(records(1).serialize())
    assert "" == tell(run.path).reasons()
    writer.close()


@pytest.mark.parametrize("kind", ["records", "payload", "commits"])
def test_a_record_cut_out_of_an_index_is_told(ended, kind):
    """Frames lie end to end: bytes between two of them that no record seals are told and recovered."""
    before = windows(ended)
    index = index_of(ended, kind)
    found = entries(index)
    rewrite(index, [*found[:3], *found[4:]])
    assert "lacks the records of" in tell(ended).reasons()
    (state,) = RunReader(ended).sessions()
    assert (kind == "records") is (2 in state.incomplete)
    assert not verify(ended).clean
    report, copy = saved(ended)
    assert (True, before) == (report.complete, windows(copy))


# Files


@pytest.mark.parametrize("kind", list(STREAMS))
def test_a_kind_of_file_that_is_gone_is_told(ended, kind):
    """A process that ended in order says what it had written: a stream without a file is missing."""
    for path in ended.glob(f"{STREAMS[kind]}*"):
        path.unlink()
    assert "is missing, with all that its process wrote there" in tell(ended).reasons()
    assert not verify(ended).clean
    report, copy = saved(ended)
    assert not report.complete
    assert not verify(copy).clean


def test_a_kind_of_file_that_is_gone_of_a_killed_process_is_told(tmp_path, monkeypatch):
    """Its last sign of life says what there was; what nobody spoke of is not missed."""
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 0.02)
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    put_window(writer, 0)
    settle(writer)
    while not any(state.told.commits == 1 for state in RunReader(run.path).sessions()):
        pass
    killed = tmp_path / "killed"
    shutil.copytree(run.path, killed)
    writer.close()
    assert "" == tell(killed).reasons()
    shutil.rmtree(killed / "commits")
    assert "is missing, with all that its process wrote there" in tell(killed).reasons()


@pytest.mark.parametrize("kind", ["payload", "commits"])
def test_emptied_files_are_told(ended, kind):
    """Files of no bytes hold nothing of what their process wrote there."""
    for path in ended.glob(f"{STREAMS[kind]}*"):
        path.write_bytes(b"")
    assert "seals nothing" in tell(ended).reasons()
    report, copy = saved(ended)
    assert (False, False) == (report.complete, verify(copy).clean)


def test_streams_cut_together_lack_their_end(ended):
    """Where stream and index are cut at the same place, the end that the process wrote is missing."""
    index = index_of(ended, "commits")
    found = entries(index)
    rewrite(index, found[:-2])
    uid = index.read_bytes()[16:32]
    os.truncate(index.with_suffix(".arrows"), IndexRecord.unpack(found[-2], uid).offset)
    assert "has no end, though its process ended in order" in tell(ended).reasons()
    assert not verify(ended).clean


@pytest.mark.parametrize("gone", ["commits", "events", "commits/actor-0", "events/actor-0"])
def test_folders_that_are_gone_are_told(ended, gone):
    """Whatever of a process is left says that there was more."""
    shutil.rmtree(ended / gone)
    assert not verify(ended).clean
    assert not saved(ended)[0].complete


def test_a_process_of_which_only_its_claim_is_left_is_told(tmp_path):
    """An attempt names the process that claimed it: without a file of it all of that is gone."""
    log = eventlog.start(tmp_path / "run", role="actor", rank=0)
    log.claim_attempt()
    stats_tracker.scalar(x=1.0)
    log.commit(0, 0, 0, [stats_tracker.export_all()])
    eventlog.stop()
    assert verify(tmp_path / "run").clean
    for name in ("events", "commits"):
        shutil.rmtree(tmp_path / "run" / name)
    assert "nothing of it is left" in tell(tmp_path / "run").reasons()
    assert not saved(tmp_path / "run")[0].complete


@pytest.mark.parametrize("policy", ["off", "full"])
def test_a_process_that_wrote_little_lacks_nothing(tmp_path, policy):
    """Without payload, and without a commit, there are no files of these, and none is missed."""
    eventlog.start(tmp_path / policy, role="actor", rank=0, payload=policy)
    if policy == "off":
        stats_tracker.scalar(x=1.0)
        stats_tracker.export_all()
    eventlog.stop()
    assert verify(tmp_path / policy).clean


def test_a_process_without_a_word_of_its_files_lacks_nothing(tmp_path):
    """Runs of before the signs of life said how many segments there are: nothing is concluded."""
    run = write_run(tmp_path / "run", 2).path
    index = index_of(run, "records")
    uid, found = index.read_bytes()[16:32], entries(index)
    end = IndexRecord.unpack(found[-1], uid)
    assert (RecordType.END, 1, 1) == (end.type, end.frame, end.last_id)
    rewrite(index, [*found[:-1], replace(end, frame=0, last_id=-1).pack(uid)])
    shutil.rmtree(run / "commits")
    assert verify(run).clean


# Of another run


@pytest.fixture
def other(tmp_path):
    """Return another run."""
    return write_run(tmp_path / "other", 2).path


@pytest.mark.parametrize("root", ["commits", "events"])
def test_files_of_another_run_are_not_read(ended, other, root):
    """A segment says which run it is of: one of another is told, not read and not recovered."""
    before = windows(ended)
    shutil.copytree(other / root, ended / root, dirs_exist_ok=True)
    told = tell(ended)
    assert "is of another run" in told.reasons()
    assert before == windows(ended)
    assert not verify(ended).clean
    report, copy = saved(ended)
    assert (False, before) == (report.complete, windows(copy))
    assert verify(copy).clean


def test_merging_leaves_files_of_another_run_behind(ended, other, tmp_path):
    """A merged run gets what the inputs hold of their own, and says what it left behind."""
    third = write_run(tmp_path / "third", 1).path
    shutil.copytree(other / "commits", ended / "commits", dirs_exist_ok=True)
    made = merge_runs(tmp_path / "merged", ended, third)
    assert any("is of another run" in problem for problem in made[0].problems)
    assert verify(tmp_path / "merged").clean
    assert 2 == len(RunReader(tmp_path / "merged").producers())


def test_the_run_json_of_another_run_is_told(ended, other):
    """Where all segments agree it is run.json that does not belong here; the copy gets the true id."""
    before, name = windows(ended), read_json(ended / "run.json")["id"]
    shutil.copy(other / "run.json", ended / "run.json")
    assert "all segments of run" in tell(ended).reasons()
    assert before == windows(ended)
    _, copy = saved(ended)
    assert (name, True) == (read_json(copy / "run.json")["id"], verify(copy).clean)


@pytest.mark.parametrize("manifest", ["gone", "of another run"])
def test_a_process_of_which_nothing_is_left_but_a_name_is_of_the_run(ended, other, manifest):
    """The copy of a run that has a header alone of a killed process is one run, under its id, and clean."""
    before, name = windows(ended), read_json(ended / "run.json")["id"]
    index = index_of(ended, "records")
    begun = index.with_name(f"20991231T000000.000000Z-{'a' * 32}.records.0000.idx")
    begun.write_bytes(index.read_bytes()[:ENTRY_SIZE])
    if manifest == "gone":
        (ended / "run.json").unlink()
    else:
        shutil.copy(other / "run.json", ended / "run.json")
    report, copy = saved(ended)
    assert "run.json" in [file.path.name for file in report.files if file.discarded]
    assert (name, before) == (read_json(copy / "run.json")["id"], windows(copy))
    assert verify(copy).clean


def test_a_run_whose_manifest_is_lost_is_told(ended):
    """That run.json is gone is damage, of a file that is named."""
    (ended / "run.json").unlink()
    found = verify(ended)
    assert [("run.json", "manifest")] == [(str(f.path), f.kind) for f in found.files if f.problems]
    assert not found.clean


def test_a_run_whose_manifest_is_lost_goes_on_under_its_id(ended):
    """A process that joins a run without run.json makes it anew with the id that the segments say."""
    name = read_json(ended / "run.json")["id"]
    (ended / "run.json").unlink()
    run = RunDir.create(ended)
    assert name == run.id
    writer = Writer(run, producer(run, "late"))
    put_window(writer, 7)
    writer.close()
    assert "" == tell(ended).reasons()


# Recovery of what is no file


@pytest.mark.parametrize("kind", ["pipe", "socket", "nothing", "loop"])
@pytest.mark.parametrize("place", ["commits/actor-0", "commits", "events/actor-0"])
def test_recovery_around_a_folder_that_is_none_is_not_complete(ended, place, kind):
    """What cannot even be listed is not recovered, and that is said."""
    put(ended / place, kind)
    assert not saved(ended)[0].complete
