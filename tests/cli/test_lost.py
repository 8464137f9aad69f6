"""What never reached the log of a run is said by every command that answers from it: exit code 3."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Ask, write_run
from tests.disk import Disk

RECORD = """
import warnings
import eventlog, numpy as np
from aggregator import stats_tracker

warnings.simplefilter("ignore")
log = eventlog.start(root + "/run", role="actor", rank=0, world_size=1)
log.claim_attempt()
for step in range(8):
    if step in (3, 5):
        assert log.writer.flush(60)  # no step is half on the disk
        fault.set("N" if step == 3 else "0")
    stats_tracker.denominator(m=np.ones(4, bool))
    stats_tracker.stat(denominator="m", x=np.arange(4.0) + step)
    log.commit(0, step, step, [stats_tracker.export_all()])
eventlog.stop()
"""
COMMITS = "lost: actor-0: commits of steps 3-4\n"
ALL = "lost: actor-0: records of steps 3-4; commits of steps 3-4\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose disk was full at steps 3 and 4."""
    disk = Disk(tmp_path_factory.mktemp("lost"))
    disk.run(RECORD)
    return disk.root / "run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["metrics", "RUN", "x/avg"], COMMITS),
        (["metrics", "RUN", "x/avg", "--source", "recomputed"], ALL),
        (["metrics", "RUN", "x/avg", "--until", "3"], COMMITS.replace("3-4", "3")),
        (["percentiles", "RUN", "x"], ALL),
        (["reduce", "RUN", "x"], ALL),
        (["histogram", "RUN", "x"], ALL),
        (["keys", "RUN"], ALL),
        (["sql", "RUN", "select count(*) from metrics"], ALL),
        (["watch", "RUN", "--once"], COMMITS),
        (["watch", "RUN", "--json"], COMMITS),
        (["replay", "RUN", "--to", "tensorboard", "-o", "tensorboard.path=TMP/tb"], COMMITS),
        (["compact", "RUN"], ALL),
    ],
    ids=lambda one: " ".join(one[::2]) if isinstance(one, list) else "",
)
def test_what_was_lost_is_said(ask: Ask, run: Path, tmp_path: Path, words: list[str], said: str) -> None:
    """Whose and of which steps, in a line, of what the command answers from."""
    answer = ask(*(word.replace("RUN", str(run)).replace("TMP", str(tmp_path)) for word in words))
    assert (3, said) == (answer.code, answer.err)


def test_what_is_written_to_a_file_is_said_to_lack_it_too(ask: Ask, run: Path, tmp_path: Path) -> None:
    """An export and a merged run are as they can be; the exit code says so."""
    exported = ask("export", run, tmp_path / "m.csv")
    assert (3, f"wrote 24 rows to {tmp_path / 'm.csv'}\n{COMMITS}") == (exported.code, exported.err)
    merged = ask("merge", tmp_path / "merged", run, write_run(tmp_path / "other", [range(2)], gain=1.0))
    assert (3, ALL) == (merged.code, merged.err)


def test_what_no_asked_step_lost_is_not_said(ask: Ask, run: Path) -> None:
    """Of other steps the answer is whole."""
    assert [0, 0] == [
        ask(*words, run, "x/avg"[: 1 if words[0] == "reduce" else None], "--since", "5").code
        for words in (["metrics"], ["reduce"])
    ]


def test_a_replay_counts_what_was_lost(ask: Ask, run: Path, tmp_path: Path) -> None:
    """Each commit is one; followed, too, it is said and no success."""
    for i, more in enumerate([[], ["--follow", "--wait", "0.1"]]):
        to = ["--to", "tensorboard", "-o", f"tensorboard.path={tmp_path / str(i)}", "--json"]
        answer = ask("replay", run, *to, *more)
        assert (3, 2, 6) == (answer.code, answer.json[0]["lost"], answer.json[0]["sent"])
        assert answer.err.endswith(COMMITS)
