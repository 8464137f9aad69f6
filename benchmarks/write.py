"""What the writer takes of a disk's speed, and how long until a window is safe.

    python benchmarks/write.py                  # all cases
    python benchmarks/write.py payload seal     # some of them
    python benchmarks/write.py --dir /data      # on another file system than that of temporary files

payload: windows of 16 MB through the log's writer, until they are sealed, against a plain loop of os.write
over the same bytes, in turns, into fresh files of one folder; nothing is synced while it lasts. The writer
checksums what it writes, and takes the space of a large frame (fallocate) before; the loop does neither.
`ratio` is the median of the rounds' ratios: 1 means as fast as the loop; `cpu_ratio` compares the processor's
seconds, all threads and the kernel included, which other processes disturb less.
seal: from before the drain of a window of 7 stats and their mask, 10 kB, until its records and payload are
sealed by their index records (a SIGKILL cannot take them back), against writing its bytes with os.write. The
writer's thread says when, as what it comes to next; `told` is when a caller who waits for it knows, and `cpu`
are the processor's milliseconds until then. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import eventlog
from eventlog.schema import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOWS, WINDOW_SHAPE = 16, (32, 131_072)  # float32: 16 windows of 16 MiB a round
ROUNDS = 9
SEALED, SEALED_SHAPE, SEALED_STATS = 1000, (8, 46), 7
WARM_UP = 50
DRAIN_SECONDS = 120.0


def payload(folder: Path) -> dict[str, Any]:
    """Compare the throughput of large windows."""
    random = np.random.default_rng(0)
    values = [random.standard_normal(WINDOW_SHAPE, np.float32) for _ in range(WINDOWS)]
    plain, ours = [], []
    for number in range(ROUNDS + 1):
        turns = [(plain, _plain), (ours, _logged)]
        for times, write in turns if number % 2 else reversed(turns):
            os.sync()  # what was written before is nobody's to pay for
            times.append(write(folder / f"{write.__name__}{number}", values))
    size = sum(window.nbytes for window in values)
    speed, rival = (size / np.median(times[1:], axis=0)[0] / 1e6 for times in (ours, plain))
    ratios, cpu_ratios = np.divide(plain[1:], ours[1:]).T
    return {
        "name": "payload throughput",
        "ours": round(speed),
        "rival": round(rival),
        "unit": "MB/s",
        "ratio": round(float(np.median(ratios)), 3),
        "ratios": [round(ratio, 2) for ratio in sorted(ratios.tolist())],
        "cpu_ratio": round(float(np.median(cpu_ratios)), 3),
        "sizes": {"window_bytes": size // WINDOWS, "windows": WINDOWS, "rounds": ROUNDS},
    }


def _clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def _plain(path: Path, values: list[np.ndarray]) -> np.ndarray:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    began = _clocks()
    for window in values:
        data, done = memoryview(window).cast("B"), 0
        while done < len(data):
            done += os.write(fd, data[done:])
    seconds = _clocks() - began
    os.close(fd)
    path.unlink()
    return seconds


def _logged(path: Path, values: list[np.ndarray]) -> np.ndarray:
    log = eventlog.start(path)
    recorder = eventlog.Recorder()
    frames = [_window(recorder, window) for window in [values[0], *values]][1:]  # it sizes by the one before
    began = _clocks()
    for frame in frames:
        log.write(frame)
    if not log.writer.flush(DRAIN_SECONDS):
        raise SystemExit(f"the writer did not catch up within {DRAIN_SECONDS:g} s")
    seconds = _clocks() - began
    if log.losses():
        raise SystemExit(f"expected no loss, got {log.losses()}")
    eventlog.stop()
    _remove(path)
    return seconds


def _window(recorder: eventlog.Recorder, values: np.ndarray) -> Any:
    """Return a drained window of one large matrix: what a step's recording leaves behind."""
    recorder.denominator({"m": np.ones(values.shape[1], bool)})
    for row in values:
        recorder.stat("m", {"x": row})
    return eventlog.drain([recorder]).frame


def seal(folder: Path) -> dict[str, Any]:
    """Measure how long a small window takes from its drain to its index records."""
    sealed: list[float] = []

    def note() -> tuple[()]:
        sealed.append(time.perf_counter())
        return ()

    values = np.random.default_rng(0).standard_normal(SEALED_SHAPE, np.float32)
    log = eventlog.start(folder / "seal")
    log.claim_attempt()
    recorder = eventlog.Recorder()
    fd = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    data = values.tobytes() * SEALED_STATS
    ours, told, cpu, plain = [], [], [], []
    for _ in range(WARM_UP + SEALED):
        recorder.denominator({"m": np.ones(SEALED_SHAPE, bool)})
        for i in range(SEALED_STATS):
            recorder.stat("m", {f"stat_{i}": values})
        before = _clocks()
        log.write(eventlog.drain([recorder]).frame)
        log.writer.put(Stream.PAYLOAD, note, nbytes=0, linger=True)  # nothing, behind the window's values
        log.writer.flush(DRAIN_SECONDS)
        waited, used = _clocks() - before
        ours.append(sealed[-1] - before[0])
        told.append(waited)
        cpu.append(used)
        began = time.perf_counter()
        os.write(fd, data)
        plain.append(time.perf_counter() - began)
    os.close(fd)
    eventlog.stop()
    mine, known, used, rival = (float(np.median(times[WARM_UP:])) * 1e3 for times in (ours, told, cpu, plain))
    return {
        "name": "a 10 kB window, from its drain to its index records",
        "ours": round(mine, 4),
        "rival": round(rival, 4),
        "unit": "ms",
        "ratio": round(rival / mine, 4),
        "told": round(known, 4),
        "cpu": round(used, 4),
        "p99": round(float(np.quantile(ours[WARM_UP:], 0.99)) * 1e3, 4),
        "sizes": {"bytes": len(data), "records": SEALED_STATS + 1, "windows": SEALED},
    }


def _remove(path: Path) -> None:
    for each in sorted(path.rglob("*"), reverse=True):
        each.rmdir() if each.is_dir() else each.unlink()
    path.rmdir()


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {"payload": payload, "seal": seal}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}; all if none")
    parser.add_argument("--dir", help="where to write; a temporary folder is made in it")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"expected cases of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    for name in given.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="write-", dir=given.dir) as folder:
            print(json.dumps(CASES[name](Path(folder))), flush=True)


if __name__ == "__main__":
    main()
