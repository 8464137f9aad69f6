"""Lost commits of one process: no other's number takes their place, and nothing is bound to another step."""

from __future__ import annotations

import shutil

import pytest

from aggregator import open_run
from eventlog import RunReader, recover
from eventlog.schema import RecordType, Stream
from replay import MemoryBackend, follow, play

STEPS = 4


def build(run, *, claims=True, late=False):
    """Two ranks that both commit `x` of each step, as ranks of one program do; rank 1's is 100 more."""
    ranks = [run.producer("actor", rank, attempt=0) for rank in range(2)]
    if claims:
        run.attempt(leader=ranks[0], outcome="finished")
    for step in range(STEPS):
        for rank, producer in enumerate(ranks):
            producer.tracker().scalar({"x": 100.0 * rank + step})
            stats = run.export(producer, time=10 * step + rank)
            producer.commit(step, stats, time=10 * step + rank + 0.5, leader=claims and not rank)
            if late and step == 2:  # an evaluation of step 0 has come to an end
                producer.commit(
                    0, {"eval": 100.0 * rank}, time=10 * step + 5 + rank, leader=claims and not rank
                )
    run.close()
    return run.path


def files_of(path, rank):
    """Return the segment of a rank's commits."""
    (file,) = (file for file in RunReader(path).run.segments(Stream.COMMITS) if file.rank == rank)
    return file


def flip(path, rank, number):
    """Flip one bit in the frame of a commit."""
    reader, file = RunReader(path), files_of(path, rank)
    with reader.opened(file, newest=True) as segment:
        frames = [r for _, r in segment.entries() if r and r.type == RecordType.FRAME and r.window == number]
    data = bytearray(file.data.read_bytes())
    data[frames[0].offset + frames[0].length // 2] ^= 1
    file.data.write_bytes(data)


def hide(path, rank, number):
    """Damage the index record of a commit: not even its number is known."""
    file = files_of(path, rank)
    index = bytearray(file.index.read_bytes())
    index[64 * (number + 2) + 8] ^= 1
    file.index.write_bytes(index)


def swap(path, rank, kind):
    """Put the file of the other rank in the place of one."""
    here, there = (getattr(files_of(path, r), kind) for r in (rank, 1 - rank))
    here.write_bytes(there.read_bytes())


def to_folder(file):
    """Make a folder of a file."""
    file.unlink()
    file.mkdir()


WHOLE = {
    "data emptied": lambda path, rank: files_of(path, rank).data.write_bytes(b""),
    "data gone": lambda path, rank: files_of(path, rank).data.unlink(),
    "data a folder": lambda path, rank: to_folder(files_of(path, rank).data),
    "data another's": lambda path, rank: swap(path, rank, "data"),
    "index emptied": lambda path, rank: files_of(path, rank).index.write_bytes(b""),
    "index gone": lambda path, rank: files_of(path, rank).index.unlink(),
    "index a folder": lambda path, rank: to_folder(files_of(path, rank).index),
    "index renamed": lambda path, rank: files_of(path, rank).index.rename(
        files_of(path, rank).index.with_suffix(".bak")
    ),
    "index another's": lambda path, rank: swap(path, rank, "index"),
    "folder gone": lambda path, rank: shutil.rmtree(files_of(path, rank).folder),
    "folder renamed": lambda path, rank: files_of(path, rank).folder.rename(path / "commits" / "x"),
}


def append(file, content):
    """Put bytes behind a file."""
    with file.open("ab") as target:
        target.write(content)


FOREIGN = {
    "bytes behind the data": lambda path: append(files_of(path, 0).data, bytes(8)),
    "another's data behind it": lambda path: append(
        files_of(path, 0).data, files_of(path, 1).data.read_bytes()
    ),
    "bytes behind the index": lambda path: append(files_of(path, 0).index, bytes(8)),
    "a page behind the index": lambda path: append(files_of(path, 0).index, bytes(4096)),
    "a copied folder": lambda path: shutil.copytree(
        files_of(path, 0).folder, path / "commits" / "actor-0 (copy)"
    ),
    "a folder copied to a rank": lambda path: shutil.copytree(
        files_of(path, 0).folder, path / "commits" / "actor-7"
    ),
}


def values(path):
    """Return the metrics (step, key) → value, and what is damaged."""
    with open_run(path) as session:
        rows = session.metrics().to_pylist()
        return {(row["step"], row["key"]): row["value"] for row in rows}, session.problems


def told(path):
    """Return what the two ways to tell trackers tell, key by key."""
    found = []
    for tell, options in ((play, {}), (follow, {"poll": 0.01, "wait": 0.01, "give_up": 5})):
        backend = MemoryBackend()
        (report,) = tell(path, [backend], **options)
        assert report.problems
        found.append({(step, key): v for step, row, _ in backend.rows for key, v in row.items()})
    return found


@pytest.mark.parametrize("claims", [True, False])
@pytest.mark.parametrize("number", range(STEPS))
@pytest.mark.parametrize("damage", [flip, hide])
def test_no_other_rank_speaks_where_the_leaders_commit_is_damaged(run, claims, number, damage):
    """One bit of the leader's commit: its metrics are absent, the other rank's are not told (report a1)."""
    path = build(run, claims=claims)
    damage(path, 0, number)
    found, problems = values(path)
    expected = {(step, "x"): float(step) for step in range(STEPS) if step != number}
    assert expected == {place: value for place, value in found.items() if place[1] == "x"}
    assert problems
    assert [expected, expected] == told(path)


@pytest.mark.parametrize("damage", WHOLE.values(), ids=WHOLE.keys())
def test_no_other_rank_speaks_where_all_commits_of_the_leader_are_gone(run, damage):
    """Whatever became of the file, its owner is known to have committed: none is another's (report a1)."""
    path = build(run)
    damage(path, 0)
    found, problems = values(path)
    assert {} == found
    assert problems
    assert [{}, {}] == told(path)


@pytest.mark.parametrize("name", ["data emptied", "index gone", "folder gone"])
def test_a_recovered_run_knows_what_could_not_be_recovered(run, tmp_path, name):
    """The copy notes that commits are lost: it serves no other rank's numbers as the run's."""
    path = build(run)
    WHOLE[name](path, 0)
    recover(path, tmp_path / "recovered")
    found, _ = values(tmp_path / "recovered")
    assert {} == {place: value for place, value in found.items() if value >= 100}


def test_no_other_rank_speaks_where_nothing_at_all_is_left_of_the_leader(run):
    """The claim names a process of which no file is there (report a1)."""
    path = build(run)
    for folder in ("events", "commits"):
        shutil.rmtree(path / folder / "actor-0")
    assert {} == values(path)[0]
    assert [{}, {}] == told(path)


def test_a_late_evaluation_is_not_another_ranks_either(run):
    """A lost commit may be of any step that its process had behind it (report a1)."""
    path = build(run, late=True)
    hide(path, 0, 3)
    found, _ = values(path)
    assert {(step, "x"): float(step) for step in range(STEPS)} == {
        place: value for place, value in found.items() if not place[1].endswith("__count")
    }
    assert (0, "eval") not in told(path)[0] | told(path)[1]


def keyed(run):
    """Two ranks that each commit a key of their own."""
    ranks = [run.producer("actor", rank, attempt=0) for rank in range(2)]
    run.attempt(leader=ranks[0], outcome="finished")
    for step in range(STEPS):
        for producer, key in zip(ranks, "xy", strict=True):
            producer.tracker().scalar({key: 1.0})
            producer.commit(step, run.export(producer, time=step), time=step + 0.5, leader=key == "x")
    run.close()
    return run.path


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_does_not_belong_there_costs_nothing(run, foreign):
    """Bytes and files beside the commits of a leader that ended hide no other rank's metrics (report b10)."""
    path = keyed(run)
    expected, none = values(path)
    foreign(path)
    found, problems = values(path)
    assert (4 * STEPS, [], expected) == (len(found), none, found)
    assert problems


@pytest.mark.parametrize("foreign", ["a copied folder", "a folder copied to a rank"])
def test_a_copied_folder_costs_nothing_of_a_killed_run(run, foreign):
    """What lies in its place, too, hides nothing though nobody says how many commits there were (b10)."""
    path = keyed(run)
    for index in path.rglob("*.idx"):
        index.write_bytes(index.read_bytes()[:-64])
    expected, none = values(path)
    FOREIGN[foreign](path)
    found, problems = values(path)
    assert (4 * STEPS, [], expected) == (len(found), none, found)
    assert problems


def test_damage_to_another_rank_costs_the_leader_nothing(run):
    """The leader's word stands, whatever is lost of rank 1."""
    path = build(run)
    flip(path, 1, 1)
    expected = {(step, "x"): float(step) for step in range(STEPS)}
    assert expected == {place: value for place, value in values(path)[0].items() if place[1] == "x"}


@pytest.mark.parametrize("damage", WHOLE.values(), ids=WHOLE.keys())
def test_windows_whose_commits_are_lost_are_of_no_step(run, damage):
    """A process that had commits of its own is not bound by the time of another's (report a1)."""
    path = build(run)
    damage(path, 1)
    with open_run(path) as session:
        rows = session.sql("select rank, step, bound_by from windows order by all").to_pylist()
        assert [(0, step, "commit") for step in range(STEPS)] + [(1, None, None)] * STEPS == [
            (row["rank"], row["step"], row["bound_by"]) for row in rows
        ]
        assert STEPS == session.info()["unbound_windows"]
        assert [(step, 1, float(step)) for step in range(STEPS)] == [
            tuple(row.values())[:3] for row in session.reduce("x", ["count", "avg"], by=["step"]).to_pylist()
        ]


@pytest.mark.parametrize("number", range(STEPS))
@pytest.mark.parametrize("damage", [flip, hide])
def test_the_window_of_one_lost_commit_is_of_no_step(run, number, damage):
    """Of a damaged commit alone its windows are unbound, the last one's too (report a1)."""
    path = build(run)
    damage(path, 1, number)
    with open_run(path) as session:
        rows = session.sql('select step from windows where rank = 1 order by "window"').to_pylist()
    expected = [None if step == number else step for step in range(STEPS)]
    assert expected == [row["step"] for row in rows]


@pytest.mark.parametrize("damage", [flip, hide])
def test_what_an_attempt_took_back_with_a_lost_commit_does_not_come_again(run, damage):
    """The first commit of a resumed attempt is lost: the older value of its step is not the run's again."""
    for attempt, steps in enumerate([range(4), range(2, 5)]):
        leader = run.producer("actor", attempt, attempt=attempt, started=100 * attempt)
        run.attempt(attempt, leader=leader, started=100 * attempt)
        for step in steps:
            leader.tracker().scalar({"x": 10.0 * attempt + step})
            stats, time = run.export(leader, time=100 * attempt + step), 100 * attempt + step + 0.5
            leader.commit(step, stats, time=time, leader=True, restored=1 if attempt else None)
    run.close()
    damage(run.path, 1, 0)
    found, problems = values(run.path)
    assert problems
    assert {(0, "x"): 0.0, (1, "x"): 1.0, (3, "x"): 13.0, (4, "x"): 14.0} == {
        place: value for place, value in found.items() if place[1] == "x"
    }
