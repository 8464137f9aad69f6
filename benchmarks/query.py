"""What questions to a recorded run cost, before and after compaction, and how that grows.

    python benchmarks/query.py                        # 1000 steps, 8 ranks, 50 keys of 1250 values: 2 GB
    python benchmarks/query.py metrics percentiles    # some of the cases
    python benchmarks/query.py --steps 100 --plot cost.png --dir /data

tables: what compaction costs and saves.
metrics: a run is opened and the metrics of all keys and steps are read, averages, extremes and sums from the
    moments of every rank among them; rivals: the same answer from the values, opening included (`from
    values`; `same` says that it is equal to the bit); a loop over verified frames that reduces every list of
    values and does not ask whose it is (`a loop over values`); DuckDB over unnest of the values in memory
    (`from SQL`), of as many steps as it can hold, times how many more there are.
percentiles: p50 and p99 of all keys by step, exact, of a run of 40 million values; rival: DuckDB's
    approx_quantile over unnest, of the same in memory as Arrow.
memory: 20 million values under a limit of 256 MB.
curve: the time of the standard metrics against steps, ranks and keys, three points each, and the slope of a
    log-log fit.
engines: a statistic of all values in 1 and 2 processes and on a Ray cluster, where Ray is installed.

Every number is the best of some rounds on a warm cache, `cpu` the processor's seconds of the best round, all
threads included, which other processes disturb less. One JSON object a line.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from aggregator import compact, open_run  # noqa: E402
from aggregator.offline.grouping import merge, pool  # noqa: E402
from aggregator.offline.statistics import SUMMARIES  # noqa: E402
from aggregator.offline.tally import Tally  # noqa: E402
from eventlog import RunReader, moments  # noqa: E402
from tests.runs import RunBuilder  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 3
MORE_ROUNDS = 7  # of what takes less than a second
STANDARD = ["avg", "min", "max", "sum", "count"]
KEY = "ppo_actor/key_{:04d}"
ALL = "ppo_actor/key_*"
LIMIT = 256 << 20
HELD = 40_000_000  # values that the rival has in memory
FEW = 20_000_000  # values that are asked under a limit


class Size(NamedTuple):
    """How large a run is; `values` a record."""

    steps: int
    ranks: int
    keys: int
    values: int

    @property
    def records(self) -> int:
        return self.steps * self.ranks * self.keys

    def told(self) -> dict[str, int]:
        return {**self._asdict(), "records": self.records, "payload_bytes": 4 * self.values * self.records}


class Given(NamedTuple):
    """Where runs are made, how large, and where a picture is drawn."""

    folder: Path
    size: Size
    plot: Path | None


def record(path: Path, size: Size) -> Path:
    """Record a run of `keys` keys, one of them the mask, on every rank; nothing if it is there."""
    if path.exists():
        return path
    pool = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    mask, names = np.ones(size.values, np.bool_), [KEY.format(i) for i in range(size.keys - 1)]
    starts = iter(np.random.default_rng(1).integers(0, len(pool) - size.values, size.records).tolist())
    with RunBuilder(path) as run:
        ranks = [
            run.producer("actor", r, world="w", world_size=size.ranks, attempt=0) for r in range(size.ranks)
        ]
        run.attempt(leader=ranks[0])
        for step in range(size.steps):
            for producer in ranks:
                producer.tracker().denominator({"ppo_actor/n_tokens": mask})
                values = {name: pool[(at := next(starts)) : at + size.values] for name in names}
                producer.tracker().stat("ppo_actor/n_tokens", values)
            stats = run.export(ranks, time=10 * step)
            for producer in ranks:
                leads = producer is ranks[0]
                producer.commit(step, stats if leads else (), time=10 * step + 5, leader=leads)
                if step % 8 == 0:
                    producer.writer.flush(60)
    return path


def best(ask: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """Return wall clock and processor seconds of the best of some rounds."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        ask()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in times), min(cpu for _, cpu in times)


def line(
    name: str, ours: tuple[float, float], rival: tuple[float, float], size: Size, **more: Any
) -> dict[str, Any]:
    """Return what is printed of two times."""
    return {
        "name": name,
        "ours": round(ours[0], 4),
        "rival": round(rival[0], 4),
        "unit": "s",
        "ratio": round(rival[0] / ours[0], 2),
        "cpu": round(ours[1], 4),
        "rival_cpu": round(rival[1], 4),
        "cpu_ratio": round(rival[1] / max(ours[1], 1e-9), 2),
        **more,
        "sizes": size.told(),
    }


def base(given: Given) -> Path:
    return record(given.folder / "run", given.size)


def compacted(given: Given) -> Path:
    """Return the run beside tables of its own: its sources are linked, not copied."""
    path = given.folder / "compacted"
    if not path.exists():
        shutil.copytree(base(given), path, copy_function=lambda old, new: Path(new).hardlink_to(old))
        compact(path, workers=1)
    return path


# -- cases -------------------------------------------------------------------------------------------------


def _standard(path: Path) -> pa.Table:
    with open_run(path) as run:
        run.metrics()
        return run.reduce(ALL, STANDARD)


def _from_values(path: Path) -> pa.Table:
    """Answer the same, with all that the product does for it, but from the values instead of the moments."""
    with open_run(path) as run:
        run.metrics()
        histories = run._histories
        asked = run._asked(ALL, "step", None, None)
        made = pool(histories, asked)
        seen = Tally(histories, made, asked, run._wanted(None))
        (records,), (of,) = made.records, made.of
        rows = moments.empty(len(records))
        for at, _, drawn in seen.draw_of(0, np.arange(len(records))):
            rows[at] = moments.of(drawn.values)
        merged = merge(histories, made.records, made.steps, [rows], [of], len(made))
        told = {name: pa.array(SUMMARIES[name](merged)) for name in STANDARD}
        return pa.table({**made.columns, **told}).drop_columns(["run"])


def _from_payload(path: Path) -> None:
    """Reduce every list of values in the frames, whosever they are: the least that values can cost."""
    for _, _, batch in RunReader(path).payload():
        lists = batch["values32"]
        offsets, items = lists.offsets.to_numpy(), lists.values.to_numpy()
        for start, stop in itertools.pairwise(offsets.tolist()):
            if stop > start:
                moments.of(items[start:stop])


def metrics(given: Given) -> Iterator[dict[str, Any]]:
    """Compare the standard metrics from the moments with the same from the values, opening included."""
    size = given.size
    held, steps = _held(given)
    sql = best(lambda: _unnested(held, _STANDARD), 1)
    sql = sql[0] * size.steps / steps, sql[1] * size.steps / steps
    loop = best(lambda: _from_payload(base(given)), 1)
    for name, path in (("frames", base(given)), ("tables", compacted(given))):
        ours = best(lambda p=path: _standard(p), MORE_ROUNDS)
        same = _standard(path).equals(_from_values(path))
        values = best(lambda p=path: _from_values(p), 1)
        named = f"standard metrics, opening included, {name}"
        yield line(f"{named}; from values", ours, values, size, same=same)
        yield line(f"{named}; a loop over values", ours, loop, size)
        yield line(f"{named}; from SQL", ours, sql, size, rival_steps=steps)


def percentiles(given: Given) -> Iterator[dict[str, Any]]:
    """Compare exact percentiles of all keys with DuckDB's approximate ones, of a run that it can hold."""
    size, steps = given.size, _steps(given.size)
    held = given if steps == size.steps else Given(given.folder / "held", size._replace(steps=steps), None)
    values, _ = _held(held)
    rival = best(lambda: _unnested(values, _APPROXIMATE))
    for name, path in (("frames", base(held)), ("tables", compacted(held))):
        with open_run(path) as run:
            ours = best(lambda r=run: r.percentiles(ALL, [0.5, 0.99]))
        yield line(f"p50 and p99 of all keys by step, {name}", ours, rival, held.size)


def _held(given: Given) -> tuple[Any, int]:
    """Return the values of as many steps as DuckDB can hold, in memory as Arrow lists, and how many steps."""
    steps = _steps(given.size)
    with open_run(base(given)) as run:
        query = f"select key, step, values::float[] as values from tensors where step < {steps}"
        return run.sql(query), steps


def _steps(size: Size) -> int:
    return min(size.steps, max(1, HELD // (size.values * size.ranks * size.keys)))


_STANDARD = "avg(v), min(v), max(v), sum(v), count(*)"
_APPROXIMATE = "approx_quantile(v, [0.5, 0.99])"


def _unnested(values: Any, asked: str) -> None:
    with duckdb.connect() as con:
        con.register("t", values)
        con.sql(
            f"select key, step, {asked} from (select key, step, unnest(values) as v from t) group by all"
        ).to_arrow_table()


def tables(given: Given) -> Iterator[dict[str, Any]]:
    """Say what compaction costs, and what opening and statistics of the values cost without and with it."""
    size, path = given.size, base(given)
    began = time.perf_counter(), time.process_time()
    other = compacted(given)
    spent = time.perf_counter() - began[0], time.process_time() - began[1]
    held = sum(file.stat().st_size for file in (other / "tables").iterdir() if file.is_file())
    yield {
        "name": "compaction",
        "ours": round(spent[0], 3),
        "unit": "s",
        "cpu": round(spent[1], 3),
        "bytes": held,
        "of_sources": round(held / sum(f.stat().st_size for f in path.rglob("*") if f.is_file()), 3),
        "sizes": size.told(),
    }
    asked: dict[str, Callable[[Path], object]] = {
        "open": lambda p: open_run(p).close(),
        "open, p50 and p99 of one key by step": lambda p: _ask(p, [0.5, 0.99]),
        "open, std of one key over the run": lambda p: _ask(p, None),
    }
    for name, ask in asked.items():
        times = [best(lambda p=p, a=ask: a(p)) for p in (other, path)]
        yield line(f"{name}: tables against frames", times[0], times[1], size)


def _ask(path: Path, q: list[float] | None) -> None:
    with open_run(path) as run:
        if q is None:
            run.reduce(KEY.format(0), ["std"], by=[])
        else:
            run.percentiles(KEY.format(0), q)


LIMITED = """
import sys, time
import numpy as np
from aggregator import open_run
began = time.perf_counter(), time.process_time()
with open_run(sys.argv[1], memory_limit=int(sys.argv[2])) as run:
    run.percentiles("*key*", [0.5, 0.99], by=[])
    run.reduce("*key*", ["std"], by=["step"])
    run.histogram("*key*", 50)
    run.sql("select key, avg(len(values)) from payload group by key")
# Not ru_maxrss: that begins with what the process had that started this one.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.perf_counter() - began[0], time.process_time() - began[1], peak)
"""


def memory(given: Given) -> Iterator[dict[str, Any]]:
    """Ask 20 million values (or what the run has, if less) under a limit."""
    size = given.size
    steps = min(size.steps, max(1, math.ceil(FEW / (size.values * size.ranks * (size.keys - 1)))))
    size = size._replace(steps=steps)
    path = record(given.folder / "memory", size)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), str(LIMIT)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    wall, cpu, peak = map(float, done.stdout.split())
    yield {
        "name": f"{(size.keys - 1) * size.steps * size.ranks * size.values} values under a limit",
        "ours": round(wall, 3),
        "unit": "s",
        "cpu": round(cpu, 3),
        "limit": LIMIT,
        "peak_resident": int(peak) << 10,
        "sizes": size.told(),
    }


def curve(given: Given) -> Iterator[dict[str, Any]]:
    """Say how the time of a question grows with steps, ranks and keys, one at a time."""
    full = given.size._replace(values=min(given.size.values, 16))
    drawn: dict[str, list[tuple[int, float]]] = {}
    for name in ("steps", "ranks", "keys"):
        least = max(2 if name == "keys" else 1, getattr(full, name) // 4)  # of the keys one is the mask
        for point in (least, 2 * least, 4 * least):
            size = full._replace(**{name: point})
            path = record(given.folder / f"curve-{name}-{point}", size)
            wall, cpu = best(lambda p=path: _standard(p), 5)
            drawn.setdefault(name, []).append((point, cpu))
            yield {
                "name": f"cost curve, {name}",
                "ours": round(wall, 4),
                "unit": "s",
                "cpu": round(cpu, 4),
                "sizes": size.told(),
            }
        slope = float(np.polyfit(*np.log(np.array(drawn[name]).T), 1)[0])
        yield {
            "name": f"cost curve, {name}: log-log slope",
            "ours": round(slope, 3),
            "unit": "",
            "at_most": 1.1,
        }
    if given.plot is not None:
        _draw(drawn, given.plot)


def _draw(drawn: dict[str, list[tuple[int, float]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(drawn), figsize=(9, 3), sharey=True, layout="constrained")
    for ax, (name, points) in zip(np.atleast_1d(axes), drawn.items(), strict=True):
        x, y = np.array(points).T
        slope, offset = np.polyfit(np.log(x), np.log(y), 1)
        ax.loglog(x, y, "o", color="#1f77b4")
        ax.loglog(x, np.exp(offset) * x**slope, color="#1f77b4", label=f"slope {slope:.2f}")
        ax.loglog(x, y[-1] * x / x[-1], "--", color="#999999", label="proportional")
        ax.set_xlabel(name)
        ax.set_xticks(x, [f"{n:.0f}" for n in x], minor=False)
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize="small")
    np.atleast_1d(axes)[0].set_ylabel("CPU seconds, opening included")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def engines(given: Given) -> Iterator[dict[str, Any]]:
    """Compare a statistic of all values of the run in one process, in two, and on a Ray cluster."""
    path = compacted(given)
    ways: list[tuple[str, dict[str, Any]]] = [("local, 1 worker", {"engine": "local", "workers": 1})]
    ways += [("local, 2 workers", {"engine": "local", "workers": 2})]
    if importlib.util.find_spec("ray"):
        ways += [
            ("ray, 1 worker", {"engine": "ray", "workers": 1}),
            ("ray, 2 workers", {"engine": "ray", "workers": 2}),
        ]
    answers: list[Any] = []
    for name, options in ways:
        with open_run(path, **options) as run:
            run.reduce(KEY.format(1), ["std"], until=1)  # workers start and read the run
            began = time.perf_counter()
            answers.append(run.reduce(ALL, ["std", "avg"], by=[]).to_pydict())
            wall = time.perf_counter() - began
        same = answers[-1] == answers[0]
        yield {
            "name": f"std of all keys, {name}",
            "ours": round(wall, 3),
            "unit": "s",
            "same": same,
            "sizes": given.size.told(),
        }


CASES: dict[str, Callable[[Given], Iterator[dict[str, Any]]]] = {
    "tables": tables,
    "metrics": metrics,
    "percentiles": percentiles,
    "memory": memory,
    "curve": curve,
    "engines": engines,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}; all if none")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--keys", type=int, default=50, help="records of a rank at a step, the mask's included"
    )
    parser.add_argument("--values", type=int, default=1250, help="of a record")
    parser.add_argument("--dir", help="where to write; a temporary folder is made in it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the cost curve (PNG)")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"expected cases of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    size = Size(given.steps, given.ranks, given.keys, given.values)
    with tempfile.TemporaryDirectory(prefix="query-", dir=given.dir) as folder:
        for name in given.cases or CASES:
            for told in CASES[name](Given(Path(folder), size, given.plot)):
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
