"""Memory of one pass over Parquet files beside that of loading them.

    python benchmarks/streaming.py [MILLIONS OF ROWS]

Peak memory above that of a process that has imported everything, and processor time, each in a process of its own. Both
end with the sums of 100 sites, and the largest relative difference between these is printed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import fedkin
from fedkin.core import table_size

SITES, FEATURES, PER_FILE = 100, 12, 500_000


def main(millions: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), int(millions * 1e6))
        pattern = str(Path(folder, "*.parquet"))
        rows, columns = table_size(pattern)
        print(f"{rows} rows, {columns} columns, {8 * rows * columns / 1e6:.0f} MB of numbers")
        print("| way | peak memory, MB | processor time, s |")
        print("|---|---|---|")
        found = {}
        for way in ("one pass", "loaded"):
            done = subprocess.run([sys.executable, __file__, way, pattern], capture_output=True, text=True, check=True)
            found[way] = json.loads(done.stdout)
            print(f"| {way} | {found[way]['memory']:.0f} | {found[way]['seconds']:.1f} |", flush=True)
        one, two = (np.array(found[way]["sums"]) for way in found)
        print(f"largest relative difference of the sums: {np.abs(one - two).max() / np.abs(two).max():.1e}")


def write(folder: Path, rows: int) -> None:
    rng = np.random.default_rng(0)
    for number, first in enumerate(range(0, rows, PER_FILE)):
        n = min(PER_FILE, rows - first)
        X = rng.normal(size=(n, FEATURES))
        columns = {"site": [f"s{u:03d}" for u in rng.integers(0, SITES, n)]}
        columns |= {f"x{k}": X[:, k] for k in range(FEATURES)}
        pq.write_table(pa.table({**columns, "y": X.sum(axis=1) + rng.normal(size=n)}), folder / f"{number}.parquet")


def peak() -> int:
    """Peak memory of this process in kB (Linux); getrusage would count that of the process that started it."""
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1])


def measure(way: str, pattern: str) -> None:
    roles = {"site": "site", "target": "y"}
    before, start = peak(), time.process_time()
    if way == "one pass":
        summaries = fedkin.summarise_files(pattern, **roles).summaries
    else:
        summaries = fedkin.summarise(fedkin.Federation.read(pattern, **roles).with_intercept(), "linear")
    seconds = time.process_time() - start
    memory = (peak() - before) / 1e3
    order = np.argsort(np.array(summaries.sites, dtype=str))
    sums = summaries.sums.total().gradient[order, 0]
    print(json.dumps({"memory": memory, "seconds": seconds, "sums": sums.tolist()}))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(*sys.argv[1:])
    else:
        main(float(sys.argv[1]) if len(sys.argv) == 2 else 2.0)
