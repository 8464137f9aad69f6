"""A Ray cluster of two nodes on this machine, and what it does with a run; prints what came of it as JSON.

    python tests/ray_cluster.py RUN FOLDER

Runs in a process of its own: Ray's threads and processes end with it. The run is compacted and asked while a
worker, a node and a driver are killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from aggregator import compact
from aggregator.offline import scaleout
from aggregator.offline.engine import Engine
from tests import dying
from tests.answers import answers

ROOT = Path(__file__).parents[1]  # on PYTHONPATH, so that workers find what they run
SMALL = 4096  # bytes of a part and of a range, so that there are many
DRIVER = """
import sys
from aggregator import compact, open_run
from aggregator.offline import scaleout
scaleout.RANGE_BYTES = {small}
compact(sys.argv[1], engine="ray", part_bytes={small})
with open_run(sys.argv[1], engine="ray") as session:
    session.reduce("*", ["std"], by=["step"])
print("done")
"""


def differing(one: Path, other: Path) -> list[str]:
    """Return the files of the tables that two runs do not both hold, or not with the same bytes.

    A name with a dot in front is an unfinished file: a worker was killed at it, or lives on without its node.
    """

    def held(path: Path) -> dict[str, bytes]:
        files = [file for file in (path / "tables").iterdir() if file.is_file() and file.name[0] != "."]
        return {file.name: file.read_bytes() for file in files}

    left, right = held(one), held(other)
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def driver(path: Path, address: str) -> subprocess.Popen[bytes]:
    """Start a process that compacts and asks the run on the cluster."""
    code = DRIVER.format(small=SMALL)
    env = {**os.environ, "RAY_ADDRESS": address}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], env=env, cwd=ROOT, stdout=subprocess.PIPE
    )


def main(run: Path, folder: Path) -> None:
    """Do everything once."""
    scaleout.RANGE_BYTES = SMALL
    said: dict[str, object] = {}
    before = answers(run)
    local = Path(shutil.copytree(run, folder / "local"))
    compact(local, part_bytes=SMALL, workers=1)
    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=options)
    other = cluster.add_node(**{k: v for k, v in options.items() if k != "include_dashboard"})
    cluster.wait_for_nodes()
    restarted = Path(shutil.copytree(run, folder / "restarted"))
    first = driver(restarted, cluster.address)
    while len(list((restarted / "tables").glob("[0-9]*.json"))) < 2 and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    left = {p.name: p.stat().st_mtime_ns for p in (restarted / "tables").glob("[0-9]*.json")}
    said["left by the first driver"] = len(left)
    second = driver(restarted, cluster.address)
    said["second driver"] = second.communicate(timeout=120)[0].decode()
    said["taken over"] = all((restarted / "tables" / n).stat().st_mtime_ns == t for n, t in left.items())
    said["restarted differs from local in"] = differing(restarted, local)
    said["parts"] = len(list((local / "tables").glob("[0-9]*.json")))
    ray.init(address=cluster.address, log_to_driver=False)
    with Engine("ray") as engine:
        said["nodes"] = len(set(engine.each(dying.slowly, [0.3] * 8)))
        said["after a worker died"] = engine.each(dying.once, [(str(folder), i) for i in range(4)])
    said["answers"] = answers(run, engine="ray") == before
    remote = Path(shutil.copytree(run, folder / "remote"))

    def remove(done: int, _: int) -> None:
        if done == 2:
            cluster.remove_node(other, allow_graceful=False)

    compact(remote, engine="ray", part_bytes=SMALL, done=remove)
    said["after a node died, differs in"] = differing(remote, local)
    for _ in range(300):
        said["nodes left"] = sum(node["Alive"] for node in ray.nodes())
        if said["nodes left"] == 1:
            break
        time.sleep(0.1)
    said["answers of the rest"] = answers(remote, engine="ray") == before
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
