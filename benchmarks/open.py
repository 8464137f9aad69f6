"""What it takes to open a run and ask it.

    python benchmarks/open.py               # both cases
    python benchmarks/open.py many          # one of them
    python benchmarks/open.py --dir /data   # on another file system than that of temporary files

many: a run of 1024 producers, 10 steps, 20 keys: every file opened and the standard metrics asked, in a fresh
process; `ours` is its peak memory, `rival` the bound that it must stay below.
deep: a run of 8 producers, 1000 steps, 50 keys. `read` is the processor's time for every record and commit
through the verified reader, against Arrow's own reader over the same streams, which checks nothing; `ask` is
that of open_run and the standard metrics in a fresh process, imports left out, against the bound of a second.
One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa

from eventlog import RunReader
from eventlog.schema import RECORDS, Stream
from tests.runs import RunBuilder

MEMORY_MIB = 1024
ASK_SECONDS = 1.0
_EXPORT = ("export_id", "members", "window_first", "window_last", "reset", "outcome")
OF_RECORDS = [name for name in RECORDS.names if name not in _EXPORT]
OF_EXPORTS = ["record_id", "time", "window", "step", "attempt", "tracker", "key", "kind", *_EXPORT]

ASK = """
import json, resource, sys, time
from aggregator import open_run
import duckdb
cpu, wall = time.process_time(), time.perf_counter()
with open_run(sys.argv[1]) as run:
    rows = run.metrics().num_rows
    windows = run.sql("select count(*) as n from windows").column(0)[0].as_py()
seconds = [time.process_time() - cpu, time.perf_counter() - wall]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"rows": rows, "windows": windows, "cpu": seconds[0], "wall": seconds[1], "peak": peak}))
"""


def write(path: Path, producers: int, steps: int, keys: int) -> None:
    """Record a run, a process after the other; every step is exported by all together."""
    names = [f"ppo_actor/k{i}" for i in range(keys)]
    members = list(range(producers))
    with RunBuilder(path) as run:
        for rank in members:
            who = run.producer("actor", rank, world="w", world_size=producers, attempt=0, payload=False)
            if not rank:
                run.attempt(leader=who)
            for step in range(steps):
                who.tracker().scalar({name: float(step + rank + i) for i, name in enumerate(names)})
                who.drain(time=10 * step)
                who.note_export(f"g:{step}", members=members, time=10 * step)
                stats = {name: step + (producers - 1) / 2 + i for i, name in enumerate(names)}
                who.commit(step, {} if rank else stats, time=10 * step + 5, leader=not rank)
            who.close()


def ask(path: Path) -> dict[str, Any]:
    """Open the run and ask it in a fresh process."""
    command = [sys.executable, "-c", ASK, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return json.loads(done.stdout)


def many(folder: Path) -> None:
    producers, steps, keys = 1024, 10, 20
    write(folder, producers, steps, keys)
    found = ask(folder)
    tell(
        "open_many_memory",
        found["peak"],
        MEMORY_MIB,
        "MiB",
        producers=producers,
        steps=steps,
        keys=keys,
        **found,
    )


def deep(folder: Path) -> None:
    producers, steps, keys = 8, 1000, 50
    sizes = {"producers": producers, "steps": steps, "keys": keys}
    write(folder, producers, steps, keys)
    ours, plain = [], []
    for _ in range(3):
        ours.append(timed(lambda: verified(folder)))
        plain.append(timed(lambda: unverified(folder)))
    tell("open_deep_read", min(ours), min(plain), "s", **sizes)
    found = ask(folder)
    tell("open_deep_ask", found["cpu"], ASK_SECONDS, "s", **sizes, **found)


def timed(work: Any) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def verified(folder: Path) -> None:
    reader = RunReader(folder)
    for stream, columns, last in (
        (Stream.COMMITS, None, None),
        (Stream.RECORDS, OF_RECORDS, False),
        (Stream.RECORDS, OF_EXPORTS, True),
    ):
        wanted = None if last is None else (lambda _, entries, last=last: (entries["window"] < 0) == last)
        pa.Table.from_batches([block.batch for block in reader.blocks(stream, columns, wanted)])


def unverified(folder: Path) -> None:
    tables = [pa.ipc.open_stream(file.read_bytes()).read_all() for file in sorted(folder.rglob("*.arrows"))]
    for names in {tuple(table.column_names) for table in tables}:
        pa.concat_tables(
            [table.replace_schema_metadata() for table in tables if tuple(table.column_names) == names]
        ).combine_chunks()


def tell(name: str, ours: float, rival: float, unit: str, **sizes: Any) -> None:
    said = {"name": name, "ours": round(ours, 4), "rival": round(rival, 4), "unit": unit}
    print(json.dumps({**said, "ratio": round(ours / rival, 3), **sizes}), flush=True)


CASES = {"many": many, "deep": deep}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="all if none")
    parser.add_argument("--dir", type=Path, help="where to write the runs")
    given = parser.parse_args()
    for name in given.cases or CASES:
        with tempfile.TemporaryDirectory(dir=given.dir) as folder:
            CASES[name](Path(folder) / "run")


if __name__ == "__main__":
    main()
