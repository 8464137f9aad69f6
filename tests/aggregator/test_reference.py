"""Any program of record calls, on real ranks: every export says what the oracle says, and so does the log."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aggregator
from aggregator import merge_worker_stats, open_run
from eventlog import Kind, ReduceType, RunReader, Spread
from eventlog.errors import MergeError
from tests.gloo import Ranks
from tests.players import Answer, meet, play
from tests.programs import program, smallest
from tests.reference import (
    Call,
    Expected,
    Export,
    Key,
    Numbers,
    Program,
    Step,
    differences,
    expected,
    unlike,
)

WORLD = 4


class Stage:
    """Ranks that stay for all programs; after a failure that may have left some waiting, new ones."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def play(self, programs: list[Program], folder: Path) -> list[list[Any]]:
        """Play programs; return what the exports said, by rank, program, step and export."""
        if self._ranks is None:
            self._ranks = Ranks(WORLD)
            self._ranks.run(meet)
        try:
            said = self._ranks.run(play, programs, str(folder))
        except BaseException:
            self.close()
            raise
        if "DesyncError" in repr(said):
            self.close()
        return said

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    found = Stage()
    yield found
    found.close()


def check(stage: Stage, batch: list[Program]) -> None:
    """Play programs on real ranks, and compare every export and every step of the log with the oracle."""
    with tempfile.TemporaryDirectory() as folder:
        said = stage.play(batch, Path(folder))
        for number, program in enumerate(batch):
            wanted = expected(program)
            for rank in program.ranks:
                _check_answers(rank, wanted, said[rank][number])
            _check_merging(program, wanted, [of_rank[number] for of_rank in said])
            _check_metrics(Path(folder) / str(number), wanted)
            _check_values(Path(folder) / str(number), wanted)


def _check_answers(rank: int, wanted: list[Expected], said: list[list[Answer]]) -> None:
    for number, step in enumerate(wanted):
        for which, answers in enumerate(step.answers):
            answer, got = answers[rank], said[number][which]
            where = f"rank {rank}, step {number}, export {which}"
            if answer is None:
                assert str(got).startswith("AgreementError: "), where
            else:
                assert not isinstance(got, str), f"{where}: {got}"
                assert {} == differences(answer, got), where


def _check_merging(program: Program, wanted: list[Expected], said: list[list[list[Answer]]]) -> None:
    """Merge the exports of the groups of each export, or of ranks that had none, as a controller does."""
    if any(key.groups for key in program.keys):
        return  # those keys were put together over other ranks
    for number, step in enumerate(program.steps):
        for which, export in enumerate(step.exports):
            groups = export.reduce_groups or [(rank,) for rank in program.ranks]
            exports = [said[group[0]][number][which] for group in groups]
            if any(isinstance(each, str) for each in exports):
                continue
            answer, where = wanted[number].merged[which], f"merged, step {number}, export {which}"
            for sent in (exports, [aggregator.Export.from_json(each.to_json()) for each in exports]):
                got = _merge(sent)
                assert (answer is None) == (got is None), where
                assert {} == differences(answer or {}, got or {}), where


def _merge(exports: list[aggregator.Export]) -> Numbers | None:
    try:
        return merge_worker_stats(exports)
    except MergeError:
        return None


def _check_metrics(path: Path, wanted: list[Expected]) -> None:
    """Compare the committed steps and those that the log recomputes."""
    with open_run(path) as run:
        committed, recomputed = (
            _steps(run.metrics(source=s).to_pylist()) for s in ("committed", "recomputed")
        )
    for number, step in enumerate(wanted):
        assert {} == differences(step.committed, committed.get(number, {})), f"committed, step {number}"
        assert {} == unlike(step, recomputed.get(number, {})), f"recomputed, step {number}"


def _steps(rows: list[dict[str, Any]]) -> dict[int, Numbers]:
    steps: dict[int, Numbers] = {}
    for row in rows:
        assert not row.get("differs"), row
        number = row["value"] if row["value_int"] is None else row["value_int"]
        steps.setdefault(row["step"], {})[row["key"]] = number
    return steps


def _check_values(path: Path, wanted: list[Expected]) -> None:
    """Compare the values in the payload, by rank and key, with those that were selected and exported."""
    reader = RunReader(path)
    frames = list(reader.records())
    whole = {(who.session, record.window) for who, record, _ in frames if record.last_of_window}
    keys = {
        (who.rank, row["record_id"]): row["key"]
        for who, record, batch in frames
        for row in batch.to_pylist()
        if row["kind"] not in ("export", "denominator") and (who.session, record.window) in whole
    }  # what no export took is written at the end, in a window that is not whole
    got: dict[tuple[int, str], list[float]] = {}
    for who, _, batch in reader.payload():
        for row in batch.to_pylist():
            if key := keys.get((who.rank, row["record_id"])):
                got.setdefault((who.rank, key), []).extend(row["values32"] or row["values64"] or [])
    said = {place: values for place, values in wanted[-1].logged.items() if len(values)}
    assert said.keys() == {place for place, values in got.items() if values}
    for place, values in said.items():
        np.testing.assert_array_equal(np.sort(values), np.sort(got[place]), str(place))


def explore(stage: Stage, count: int) -> None:
    """Check programs of new seeds, ten at a time over the same groups."""
    first = random.randrange(2**32)
    for seed in range(first, first + count, 10):
        batch = [program(each) for each in range(seed, min(seed + 10, first + count))]
        if (error := failure(stage, batch)) is not None:
            small, error = smaller(stage, batch, error)
            raise AssertionError(f"seed {seed}, made smaller: {small}") from error


def failure(stage: Stage, batch: list[Program]) -> Exception | None:
    """Return what is wrong with a batch."""
    try:
        check(stage, batch)
    except Exception as error:  # noqa: BLE001 - whatever a rank or the log raised
        return error
    return None


def smaller(stage: Stage, batch: list[Program], error: Exception) -> tuple[list[Program], Exception]:
    """Return the smallest batch that still fails, as far as a minute goes, and its error."""
    give_up = time.monotonic() + 60
    errors = [error]

    def fails(less: list[Program]) -> bool:
        found = failure(stage, less) if time.monotonic() < give_up else None
        errors.extend([found] if found else [])
        return found is not None

    return smallest(batch, fails), errors[-1]


def test_exports_and_the_log_say_what_the_oracle_says(stage: Stage) -> None:
    """Whatever 1 to 4 ranks record and export, in whatever groups: live, log and oracle agree."""
    explore(stage, 60)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_500_programs(stage: Stage) -> None:
    """The same for 500 programs."""
    explore(stage, 500)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_10_000_programs(stage: Stage) -> None:
    """The same for 10 000 programs."""
    explore(stage, 10_000)


# -- programs made by hand -----------------------------------------------------------------------------

N = Key("n", Kind.DENOMINATOR)
X = Key("x", Kind.STAT, denominator="n")
AVG, SUM, MIN = (replace(X, reduce_type=ReduceType[name]) for name in ("AVG", "SUM", "MIN"))
NAN, INF = math.nan, math.inf


def n(*bits: int, name: str = "n") -> Call:
    return Call(replace(N, name=name), np.array(bits, np.bool_))


def x(*numbers: float, key: Key = X, dtype: str = "float64", **changes: Any) -> Call:
    return Call(replace(key, **changes), np.array(numbers, np.float64), dtype)


def s(value: float, name: str = "s", **changes: Any) -> Call:
    return Call(Key(name, Kind.SCALAR, **changes), value)


def made(calls: Sequence[list[Call]], *exports: Export) -> Program:
    """Return a program of one step: what each rank records, then exports (else one over all ranks)."""
    ranks = tuple(range(len(calls)))
    keys = dict.fromkeys(call.key for those in calls for call in those)
    step = Step(dict(enumerate(calls)), list(exports) or [Export(reduce_groups=(ranks,))])
    return Program(ranks, tuple(keys), [step])


LR = {"name": "lr", "spread": Spread.REPLICATED}
SHARE = {"name": "share", "spread": Spread.SHARES}
R = Key("rollout/r", Kind.SCALAR, "rollout")
L = Key("train/l", Kind.SCALAR, "train")
BOTH = ((0, 1),)

# report: what each rank records, and by hand what every rank must read then (None: an error)
REPORTS: dict[str, tuple[Program, list[Numbers | None]]] = {
    "c2": (
        made([[n(1), x(1, key=AVG)], [n(*[1] * 99), x(*[0] * 99, key=AVG)]]),
        [{"n": 100, "x": 0.01}],
    ),
    "c3": (
        made([[n(1, 1), x(2, 4), n(0, 0), x(9, 9)]]),
        [{"n": 2, "x/avg": 3.0, "x/min": 2.0, "x/max": 4.0}],
    ),
    "c4 shares": (made([[s(0.25, **SHARE)], [s(0.75, **SHARE)]]), [{"share": 1.0, "share__count": 1}]),
    "c4 copies": (made([[s(0.1, **LR)] for _ in range(4)]), [{"lr": 0.1, "lr__count": 1}]),
    "c4 no copies": (made([[s(0.1, **LR)], [s(0.2, **LR)]]), [None]),
    "c6": (
        made([[*[n(1), x(1, key=AVG)] * 4, s(1.0), n(1), x(5, key=AVG), s(5.0)]]),
        [{"n": 5, "x": 1.8, "s": 3.0, "s__count": 2}],
    ),
    "c7": (made([[n(*[1] * 5), x(*[2] * 5, key=AVG), n(1), x(6, key=AVG)]]), [{"n": 6, "x": 16 / 6}]),
    "c8": (
        made([
            [n(*[1] * 256), x(*[0.7] * 256, key=AVG)],
            [n(*[1] * 266), x(*[0.8] * 256, *[0.9] * 10, key=AVG)],
        ]),
        [{"n": 522, "x": (0.7 * 256 + 0.8 * 256 + 0.9 * 10) / 522}],
    ),
    "c10": (
        made([[n(*[1] * 1000), x(*[1] * 1000, key=SUM, dtype="bfloat16")]]),
        [{"n": 1000, "x": 1000.0}],
    ),
    "c11": (
        made([[Call(Key("c", Kind.COUNTER), count), s(30_565_379)] for count in (16_777_217, 1, 1)]),
        [{"c": 16_777_219, "s": 30_565_379.0, "s__count": 3}],
    ),
    "c14": (
        made([[n(1, 0), x(7, NAN), s(1.0)], [s(3.0)]]),
        [{"n": 1, "x/avg": 7.0, "x/min": 7.0, "x/max": 7.0, "s": 2.0, "s__count": 2}],
    ),
    "c17": (
        made([[s(i, name) for i, name in enumerate("abc")], [s(i, name) for i, name in enumerate("cba")]]),
        [{"a": 1.0, "b": 1.0, "c": 1.0, "a__count": 2, "b__count": 2, "c__count": 2}],
    ),
    "c18": (
        made([[n(1, 1), x(-3, 1)], [n(1, 1), x(5, 9)]]),
        [{"n": 4, "x/avg": 3.0, "x/min": -3.0, "x/max": 9.0}],
    ),
    "c20": (
        made([[n(0, 0), x(NAN, INF)], [n(1, 0), x(4, NAN)]]),
        [{"n": 1, "x/avg": 4.0, "x/min": 4.0, "x/max": 4.0}],
    ),
    "c20 nowhere": (made([[n(0, 0), x(NAN, INF)], [n(0), x(1)]]), [{"n": 0}]),
    "c21": (
        made([[n(1, 0, 1, 0), x(1, NAN, 3, INF)]]),
        [{"n": 2, "x/avg": 2.0, "x/min": 1.0, "x/max": 3.0}],
    ),
    "c22": (
        made([[s(1.0, "math")], [s(0.5, "code")], []]),
        [{"math": 1.0, "math__count": 1, "code": 0.5, "code__count": 1}],
    ),
    "c23": (made([[n(1, 1, 1, 1), n(0, 0, 0, 0)]]), [{"n": 4}]),
    "c27": (
        made([
            [
                n(1, 1, 1, 1, name="all"), n(1, 1, 0, 0, name="kept"),
                x(1, 1, 0, 0, key=AVG, name="r_all", denominator="all"),
                x(1, 1, 0, 0, key=AVG, name="r_kept", denominator="kept"),
            ],
        ]),
        [{"all": 4, "kept": 2, "r_all": 0.5, "r_kept": 1.0}],
    ),
    "c31": (
        made(
            [[Call(R, 1.0), Call(L, 2.0)], [Call(R, 3.0)]],
            *(Export(tracker, reduce_groups=BOTH) for tracker in ("train", "rollout", "rollout")),
        ),
        [{"train/l": 2.0, "train/l__count": 1}, {"rollout/r": 2.0, "rollout/r__count": 2}, {}],
    ),
}  # fmt: skip

# Programs that were answered wrongly once, as small as they get.
ONCE_WRONG = {
    "a key exported alone left the next mask no room for rows": Program(
        (0,), (N, X), [
            Step({0: [n(1), x(1)]}, [Export("", "x"), Export()]),
            Step({0: [n(1), x(1)]}, [Export()]),
        ],
    ),
    "a mask logged with a key exported alone was missing from its own step": Program(
        (0, 1), (N, X), [
            Step({0: [], 1: [n(1), x(1)]}, [Export("", "x", BOTH)]),
            Step({0: [], 1: []}, [Export(reduce_groups=BOTH)]),
        ],
    ),
    "keys without a group were logged as reduced over key_sync_group": made(
        [[s(1.0)], [s(3.0)]], Export(sync_groups=BOTH)
    ),
    "copies that differ by the sign of a zero could not be merged": made(
        [[s(0.0, **LR)], [s(-0.0, **LR)]], Export()
    ),
    "a run without records could not be recomputed": made([[], []]),
    "a rank that failed in its second group was left out of the first": made(
        [
            [s(1.0, "lr", spread=Spread.REPLICATED, groups=((0, 1), (2,)))],
            [s(2.0, "lr", spread=Spread.REPLICATED, groups=((0, 1), (2,))), s(1.0)],
            [s(3.0, "lr", spread=Spread.REPLICATED, groups=((0, 1), (2,))), s(3.0)],
        ],
        Export(reduce_groups=((0,), (1, 2)), sync_groups=((0, 1), (2,))),
    ),
    "a key whose own group is its rank could not be exported without a group": made(
        [[s(1.0, groups=((0,), (1,)))], [s(3.0, groups=((0,), (1,)))]], Export()
    ),
    "of exports that differ in nothing but quantiles the log took another's": made(
        [[n(1, 1), x(1, 5, key=MIN, quantiles=(1.0,))], [n(1, 1), x(1, 9, key=MIN, quantiles=(1.0,))]],
        Export(reduce_groups=BOTH, reset=False),
        Export(),
    ),
    "a sum of nothing that was exported later took the quantiles with it": made(
        [[n(0), x(1, key=SUM, quantiles=(0.5,))], [n(1), x(2, key=SUM, quantiles=(0.5,))]],
        Export(reduce_groups=BOTH, reset=False),
        Export(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("report", REPORTS)
def test_reports(stage: Stage, report: str) -> None:
    """What people reported comes out right: by hand, by the oracle, on real ranks.

    (reports c2, c3, c4, c6, c7, c8, c10, c11, c14, c17, c18, c20, c21, c22, c23, c27, c31)
    """
    program, wanted = REPORTS[report]
    (step,) = expected(program)
    for by_hand, answers in zip(wanted, step.answers, strict=True):
        for answer in answers.values():
            assert (by_hand is None) == (answer is None)
            assert {} == differences(by_hand or {}, answer or {})
    check(stage, [program])


@pytest.mark.parametrize("what", ONCE_WRONG)
def test_once_wrong(stage: Stage, what: str) -> None:
    """A program that was answered wrongly once is answered rightly."""
    check(stage, [ONCE_WRONG[what]])
