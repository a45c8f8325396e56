"""Set up a federation of many sites: seconds and bytes of ``federation new`` and ``invite``, and of one site.

    python benchmarks/enrolment.py [SITES] [ring|nearest]

``nearest`` links each site to 8 others. The contract has 30 features.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedkin.federate import Organiser, Site

FEATURES = 30


def main(n_sites: int, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_inputs(place, n_sites, 1 if kind == "ring" else 4)
        began = time.perf_counter()
        made = Organiser.create(place / "c.toml", place / "heart", graph=place / "graph.csv", sites=place / "sites.csv")
        new = time.perf_counter() - began
        made.invite()
        invited = time.perf_counter() - began - new
        print(f"{n_sites:,} sites, {made.graph.n_edges:,} edges")
        print(f"federation new     {new:6.1f} s")
        print(f"federation invite  {invited:6.1f} s, {1e6 * invited / n_sites:.0f} microseconds per site")
        whole, blocks = size(place / "heart")
        print(f"organiser's directory {whole / 1e6:.0f} MB ({blocks / 1e6:.0f} MB in blocks of the disk)")

        print(f"largest memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")

        name = made.members[n_sites // 2].name
        write_table(place / "t.csv")
        began = time.perf_counter()
        done, _ = Site.join(place / "heart" / "invites" / f"{name}.invite", place / "t.csv", place / name)
        joined = time.perf_counter() - began
        began = time.perf_counter()
        again = Organiser.read(place / "heart")
        read = time.perf_counter() - began
        Site.read(done.directory).accept(again.admit(done.request).path)
        admitted = time.perf_counter() - began - read
        print(f"site join {joined:.2f} s; federation admit {read + admitted:.2f} s, of which {read:.2f} s reading")
        print(
            f"one site's directory {size(done.directory)[0]:,} bytes, of which rows 1,000 x {FEATURES + 1}: "
            f"{(done.directory / 'rows.npz').stat().st_size:,}"
        )


def write_inputs(place: Path, n_sites: int, reach: int) -> None:
    features = "\n".join(f'x{k} = {{unit = "mmol/l", low = 0, high = {k + 1}}}' for k in range(FEATURES))
    target = '[target]\nname = "days"\nlow = 0\nhigh = 100'
    (place / "c.toml").write_text(f'name = "heart"\nloss = "linear"\n[features]\n{features}\n{target}\n')
    pairs = [f"s{u},s{(u + step) % n_sites}" for step in range(1, reach + 1) for u in range(n_sites)]
    (place / "graph.csv").write_text("source,target\n" + "\n".join(pairs) + "\n")
    sites = [f"s{u},10.{u // 65536}.{u // 256 % 256}.{u % 256},7447" for u in range(n_sites)]
    (place / "sites.csv").write_text("site,host,port\n" + "\n".join(sites) + "\n")


def write_table(path: Path, n: int = 1000) -> None:
    rng = np.random.default_rng(0)
    X = rng.random((n, FEATURES)) * np.arange(1, FEATURES + 1)
    header = ",".join([*(f"x{k}" for k in range(FEATURES)), "days"])
    np.savetxt(path, np.column_stack([X, rng.random(n) * 50]), fmt="%.4f", delimiter=",", header=header, comments="")


def size(directory: Path) -> tuple[int, int]:
    """Bytes of all files, and of the blocks that they take."""
    found = [path.stat() for path in directory.rglob("*") if path.is_file()]
    return sum(one.st_size for one in found), sum(512 * one.st_blocks for one in found)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, sys.argv[2] if len(sys.argv) > 2 else "nearest")
