"""Site processes against a bare zenoh exchange of the same thetas, side by side and in turns.

    python benchmarks/peer_rounds.py 10 50                 # rounds per second, memory, start-up
    python benchmarks/peer_rounds.py 4 --p 10000           # bytes on the wire over the theta payload

Both sides: one process per site on this machine, TLS with certificates on both sides and access lists, every site with
four neighbours (a ring with chords of three), thetas of p numbers, lock step per edge. The bare side
(`bare_exchange.py`) imports nothing but zenoh and the standard library, sends and waits: no gradient, no edge step, no
checks, no checkpoint, no log. Both are up all the time, and take turns of a second or so while the other one is stopped
(SIGSTOP), so that other work on the machine slows down both alike: ratio is the median over turns, with quartiles.
Rounds and bytes are read while all are stopped; those of sites from their state on disk, which is at most 50 ms old.
Bytes are those that the kernel counts on TCP sockets of the sites (`ss -ti`: TLS and zenoh framing included;
with_headers adds 52 bytes of TCP/IP per segment). cpu_us is processor time per site and round, all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedkin.admm import Store
from fedkin.data import write_csv
from fedkin.federate import Organiser, Site, site_plan
from fedkin.federate.inbox import Kind
from fedkin.federate.records import read_status
from fedkin.federate.transports import site_links
from fedkin.federate.trust import link_name
from fedkin.graph import Graph
from measure import surroundings

PORT, BARE_PORT, ROUNDS = 21_000, 22_000, 10_000_000


def make_sites(folder: Path, sites: int, p: int, port: int, n: int = 30) -> list[Path]:
    """A federation of sites in directories of their own."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    names, features = [f"d{u}" for u in range(sites)], [f"x{k}" for k in range(p)]
    # the Gram matrices of linear regression would not fit for p = 10,000; what travels is the same for the mean loss
    linear = p <= 1000
    lines = ['name = "bench"', f'loss = "{"linear" if linear else "mean"}"', "intercept = false", "ridge = 0.1"]
    lines += ['method = "fused"']
    lines += ["[thresholds]", "rows_per_parameter = 0.0", "[rounds]", "lam = 0.01", f"rounds = {ROUNDS}"]
    lines += ["batch_size = 10", f"checkpoint_every = {100 if p <= 1000 else 31}"]
    lines += (["[target]", 'name = "y"'] if linear else []) + ["[features]", *(f"{name} = {{}}" for name in features)]
    (folder / "bench.toml").write_text("\n".join(lines) + "\n")
    pairs = {tuple(sorted((u, (u + step) % sites))) for u in range(sites) for step in (1, 3)}
    Graph(names, [(names[i], names[j]) for i, j in sorted(pairs) if i != j]).write(folder / "edges.csv")
    write_csv(folder / "list.csv", ["site", "host", "port"], [[x, "127.0.0.1", port + k] for k, x in enumerate(names)])
    files = {"graph": folder / "edges.csv", "sites": folder / "list.csv"}
    heart = Organiser.create(folder / "bench.toml", folder / "organiser", **files)
    heart.invite()
    places = []
    for name in names:
        X = rng.normal(size=(n, p))
        cells = np.column_stack([X, X[:, 0] + rng.normal(size=n)]) if linear else X
        write_csv(folder / "rows.csv", [*features, "y"] if linear else features, cells.tolist())
        invite = folder / "organiser" / "invites" / f"{name}.invite"
        joined, _ = Site.join(invite, folder / "rows.csv", folder / name, below_minima=True)
        Site.read(joined.directory).accept(heart.admit(joined.request).path)
        places.append(joined.directory)
    return places


def prepare_bare(place: Path) -> None:
    """What the bare side needs to know, beside the site."""
    site = Site.read(place)
    plan = site_plan(site)
    keys = Organiser.read(place.parent / "organiser").keys().keys
    links = {plan.name(v): link_name(plan.name(v), keys[v]) for v in plan.partners()}
    told = {
        "configuration": site_links(plan, site.pair(), site.authority, site.out, links),
        "write": plan.key(Kind.THETA, plan.here, plan.here),
        "read": [plan.key(Kind.THETA, v, plan.here) for v in plan.partners()],
        "numbers": plan.n_params,
        "folder": str(place),
    }
    (place / "bare.json").write_text(json.dumps(told))


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss(pid: int) -> float:
    """Resident memory of a process in MiB, shared pages counted in part."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1]) / 1024  # type: ignore[index]


def wire(ports: range) -> tuple[int, int]:
    """Bytes and segments sent on the TCP sockets of these ports."""
    out = subprocess.run(["ss", "-tniHO"], capture_output=True, text=True, check=True).stdout
    sent = segments = 0
    for line in out.splitlines():
        fields = line.split()
        local, remote = (int(field.rpartition(":")[2]) for field in fields[3:5])
        if local in ports or remote in ports:
            found = re.search(r"bytes_sent:(\d+)", line)
            sent += int(found[1]) if found else 0
            found = re.search(r"segs_out:(\d+)", line)
            segments += int(found[1]) if found else 0
    return sent, segments


class Run:
    """Processes that are ended whatever happens; they stand still except within `turn`."""

    def __init__(self, places: list[Path], program: list[str], file: str = "") -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.places = places
        self.children = [
            subprocess.Popen([sys.executable, *program, str(place / file)], env=environment, start_new_session=True)
            for place in places
        ]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.send_signal(signal.SIGKILL)
            child.wait()

    def signal(self, number: int) -> None:
        for child in self.children:
            child.send_signal(number)

    def wait(self, ready: Callable[[Path], bool], seconds: float = 600) -> None:
        """Until all are so far."""
        deadline = time.monotonic() + seconds
        while not all(map(ready, self.places)):
            assert time.monotonic() < deadline, f"not so far after {seconds} s"
            assert all(child.poll() is None for child in self.children), "a process died"
            time.sleep(0.05)

    def cpu(self) -> float:
        return sum(cpu_seconds(child.pid) for child in self.children)

    def turn(self, seconds: float, round_of: Callable[[Path], int]) -> tuple[np.ndarray, float, float]:
        """Rounds that each did ``(V,)``, seconds, and processor seconds of all."""
        before, used = np.array([round_of(place) for place in self.places]), self.cpu()
        began = time.monotonic()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        took = time.monotonic() - began
        return np.array([round_of(place) for place in self.places]) - before, took, self.cpu() - used


def bare_round(place: Path) -> int:
    return int.from_bytes((place / "round").read_bytes(), "little")


def site_round(place: Path) -> int:
    # the site has its file for itself: look at a copy
    with tempfile.TemporaryDirectory() as copy:
        for path in place.glob("state.db*"):
            shutil.copy(path, copy)
        saved = Store(f"{copy}/state.db", site_plan(place).run).load()
        return 0 if saved is None else saved.round


def measure(sites: int, p: int, turns: int, seconds: float) -> dict[str, object]:
    ports = range(PORT, PORT + sites)
    with tempfile.TemporaryDirectory(prefix="fedkin-bench-") as temporary:
        folder = Path(temporary)
        bare_places = make_sites(folder / "bare", sites, p, BARE_PORT)
        places = make_sites(folder / "sites", sites, p, PORT)
        degree = np.array([len(site_plan(place).edges) for place in places])
        row: dict[str, object] = {"sites": sites, "edges": int(degree.sum()) // 2, "p": p, "turns": turns}
        for place in bare_places:
            prepare_bare(place)
        bare_program = [str(Path(__file__).with_name("bare_exchange.py"))]
        with (
            Run(bare_places, bare_program, "bare.json") as bare,
            Run(places, ["-m", "fedkin.federate.program"]) as run,
        ):
            began = time.monotonic()
            run.wait(lambda place: read_status(place).round > 20)
            row["start_up_s"] = time.monotonic() - began
            run.signal(signal.SIGSTOP)
            bare.wait(lambda place: (place / "ready").exists())
            time.sleep(2.0)  # links
            (folder / "bare" / "go").touch()
            bare.wait(lambda place: (place / "round").exists() and bare_round(place) > 20)
            bare.signal(signal.SIGSTOP)
            ratios, cpu_ratios, payload = [], [], 0.0
            sent, segments = wire(ports)
            for _ in range(turns):
                theirs, their_time, their_cpu = bare.turn(seconds, bare_round)
                ours, our_time, our_cpu = run.turn(seconds, site_round)
                ratios.append((our_time / ours.mean()) / (their_time / theirs.mean()))
                cpu_ratios.append((our_cpu / ours.sum()) / (their_cpu / theirs.sum()))
                payload += float((ours * degree).sum()) * 8 * p
            sent_now, segments_now = wire(ports)
            row["ms_per_round"], row["bare_ms_per_round"] = (
                1e3 * our_time / ours.mean(),
                1e3 * their_time / theirs.mean(),
            )
            for name, found in (("ratio", ratios), ("cpu_ratio", cpu_ratios)):
                low, middle, high = np.quantile(found, [0.25, 0.5, 0.75])
                row |= {name: float(middle), f"{name}_low": float(low), f"{name}_high": float(high)}
            row["cpu_us"], row["bare_cpu_us"] = 1e6 * our_cpu / ours.sum(), 1e6 * their_cpu / theirs.sum()
            row["pss_mib"] = max(pss(child.pid) for child in run.children)
            row["bare_pss_mib"] = max(pss(child.pid) for child in bare.children)
            row["bytes_over_payload"] = (sent_now - sent) / payload
            row["bytes_with_headers"] = (sent_now - sent + 52 * (segments_now - segments)) / payload
    return row | surroundings()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sites", nargs="*", default=["10"])
    parser.add_argument("--p", type=int, default=20)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that sites are ended, too
    for sites in map(int, given.sites):
        row = measure(sites, given.p, given.turns, given.seconds)
        print(
            "  ".join(
                f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()
            )
        )


if __name__ == "__main__":
    main()
