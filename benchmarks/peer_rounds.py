"""Site processes against a bare zenoh exchange of the same thetas, one after the other in one run.

    python benchmarks/peer_rounds.py 10 50                 # rounds per second, memory, start-up
    python benchmarks/peer_rounds.py 4 --p 10000           # bytes on the wire over the theta payload

Both sides: one process per site on this machine, TLS with certificates on both sides and access lists, every site with
four neighbours (a ring with chords of three), thetas of p numbers, lock step per edge. The bare side
(`bare_exchange.py`) imports nothing but zenoh, sends and waits: no gradient, no edge step, no checks, no checkpoint, no
log. Bytes are those that the kernel counts on TCP
sockets of the devices (`ss -ti`: TLS and zenoh framing included; with_headers adds 52 bytes of TCP/IP per segment).
Rounds and bytes are read while all devices are stopped for some milliseconds. cpu_us is processor time per device and
round, all threads: on a machine that does other things, too, it is the steadier of the two ratios.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedkin.admm import Store
from fedkin.data import write_csv
from fedkin.federate import enrol, site_view
from fedkin.federate.contract.manifest import keys_of
from fedkin.federate.links.access import site_links
from fedkin.federate.messages import Kind
from fedkin.federate.programs.files import read_status
from fedkin.graph import Graph

PORT = 21_000


def make_sites(folder: Path, sites: int, p: int, rounds: int, n: int = 30) -> list[Path]:
    """A federation of sites in directories of their own."""
    rng = np.random.default_rng(0)
    names, features = [f"d{u}" for u in range(sites)], [f"x{k}" for k in range(p)]
    # the Gram matrices of linear regression would not fit for p = 10,000; what travels is the same for the mean loss
    linear = p <= 1000
    lines = ['name = "bench"', f'loss = "{"linear" if linear else "mean"}"', "intercept = false", "ridge = 0.1"]
    lines += ["[thresholds]", "rows_per_parameter = 0.0", "[rounds]", "lam = 0.01", f"rounds = {rounds}"]
    lines += ["batch_size = 10", f"checkpoint_every = {100 if p <= 1000 else 31}"]
    lines += (["[target]", 'name = "y"'] if linear else []) + ["[features]", *(f"{name} = {{}}" for name in features)]
    (folder / "bench.toml").write_text("\n".join(lines) + "\n")
    pairs = {tuple(sorted((u, (u + step) % sites))) for u in range(sites) for step in (1, 3)}
    Graph(names, [(names[i], names[j]) for i, j in sorted(pairs) if i != j]).write(folder / "edges.csv")
    write_csv(folder / "list.csv", ["site", "host", "port"], [[x, "127.0.0.1", PORT + k] for k, x in enumerate(names)])
    files = {"graph": folder / "edges.csv", "sites": folder / "list.csv"}
    heart = enrol.new(folder / "bench.toml", folder / "organiser", **files)
    enrol.invite(heart)
    places = []
    for name in names:
        X = rng.normal(size=(n, p))
        cells = np.column_stack([X, X[:, 0] + rng.normal(size=n)]) if linear else X
        write_csv(folder / "rows.csv", [*features, "y"] if linear else features, cells.tolist())
        joined = enrol.join(folder / "organiser" / "invites" / f"{name}.invite", folder / "rows.csv", folder / name)
        enrol.accept(joined.directory, enrol.admit(heart, joined.request).path)
        places.append(joined.directory)
    return places


def prepare_bare(place: Path) -> None:
    """What the bare side needs to know, beside the site."""
    site = enrol.read_site(place)
    view = site_view(site)
    told = {
        "configuration": site_links(view, site.pair(), site.authority),
        "write": keys_of(view, view.here, view.here)[Kind.THETA],
        "read": [keys_of(view, v, view.here)[Kind.THETA] for v in view.partners()],
        "rounds": view.rounds,
        "numbers": view.n_params,
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
    """Child processes that are ended whatever happens."""

    def __init__(self, places: list[Path], run: str, program: list[str], file: str = "") -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.run, self.places = run, places
        self.children = [
            subprocess.Popen([sys.executable, *program, str(place / file)], env=environment, start_new_session=True)
            for place in places
        ]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
            child.wait()

    def wait(self, names: str, seconds: float = 600) -> None:
        """Until every device has that file."""
        deadline = time.monotonic() + seconds
        while not all((place / names).exists() for place in self.places):
            assert time.monotonic() < deadline, f"no {names} after {seconds} s"
            assert all(child.poll() in (None, 0) for child in self.children), "a device died"
            time.sleep(0.02)

    def cpu(self) -> float:
        return sum(cpu_seconds(child.pid) for child in self.children)

    def rounds(self) -> list[int]:
        return [int(read_status(place).get("round", 0)) for place in self.places]

    def still(self, ports: range) -> tuple[np.ndarray, int, int, float]:
        """Round of each device ``(V,)``, bytes and segments sent, and the time; all devices are stopped."""
        now = time.monotonic()
        for child in self.children:
            child.send_signal(signal.SIGSTOP)
        try:
            rounds = np.array([self._round(place) for place in self.places])
            return rounds, *wire(ports), now
        finally:
            for child in self.children:
                child.send_signal(signal.SIGCONT)

    def _round(self, place: Path) -> int:
        # the device has its file for itself: look at a copy
        with tempfile.TemporaryDirectory() as copy:
            for path in place.glob("state.db*"):
                shutil.copy(path, copy)
            return max(Store(f"{copy}/state.db", self.run).saved_rounds(), default=0)


def measure(devices: int, p: int, rounds: int) -> dict[str, object]:
    ports = range(PORT, PORT + devices)
    with tempfile.TemporaryDirectory(prefix="fedkin-bench-") as temporary:
        folder = Path(temporary)
        places = make_sites(folder, devices, p, rounds)
        views = [site_view(place) for place in places]
        degree = np.array([len(view.edges) for view in views])
        row: dict[str, object] = {"devices": devices, "edges": int(degree.sum()) // 2, "p": p, "rounds": rounds}
        for place in places:
            prepare_bare(place)
        bare = str(Path(__file__).with_name("bare_exchange.py"))
        with Run(places, views[0].run, [bare], "bare.json") as run:
            run.wait("ready")
            time.sleep(2.0)  # links
            (folder / "go").touch()
            run.wait("first")
            began, used = time.monotonic(), run.cpu()
            run.wait("last")
            row["bare_cpu_us"] = 1e6 * (run.cpu() - used) / (rounds - 1) / devices
            row["bare_ms_per_round"] = 1000 * (time.monotonic() - began) / (rounds - 1)
            row["bare_pss_mib"] = max(pss(child.pid) for child in run.children)
        began = time.monotonic()
        with Run(places, views[0].run, ["-m", "fedkin.federate.programs.run"]) as run:
            while min(run.rounds()) < 1:
                time.sleep(0.05)
                assert time.monotonic() < began + 300
            row["start_up_s"] = time.monotonic() - began
            time.sleep(1.0)
            (first, sent, segments, start), used = run.still(ports), run.cpu()
            # as on the bare side, nothing looks at the devices while they are timed; then once, before they end
            time.sleep(max(0.6 * rounds * float(row["bare_ms_per_round"]) / 1000, 4.0))  # type: ignore[arg-type]
            last, sent_now, segments_now, now = run.still(ports)
            used = run.cpu() - used
            memory = [pss(child.pid) for child in run.children]
            assert last.max() < rounds - 1, "the run was over before it was measured: give more --rounds"
            per_second = (last - first) / (now - start)
            payload = float(((last - first) * degree).sum()) * 8 * p
            row["ms_per_round"] = 1000 / float(per_second.mean())
            row["ratio_to_bare"] = row["ms_per_round"] / row["bare_ms_per_round"]  # type: ignore[operator]
            row["cpu_us"] = 1e6 * used / float((last - first).sum())
            row["cpu_ratio"] = row["cpu_us"] / row["bare_cpu_us"]  # type: ignore[operator]
            row["pss_mib_mean"], row["pss_mib_max"] = float(np.mean(memory)), max(memory)
            row["bytes_over_payload"] = (sent_now - sent) / payload
            row["bytes_with_headers"] = (sent_now - sent + 52 * (segments_now - segments)) / payload
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    versions = {"python": platform.python_version(), "numpy": np.__version__, "cpu": cpu.partition(": ")[2]}
    return row | versions | {"cores": os.cpu_count(), "load": os.getloadavg()[0], "seed": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="*", default=["10"])
    parser.add_argument("--p", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="CSV file to append to")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that devices are ended, too
    for devices in map(int, given.devices):
        row = measure(devices, given.p, given.rounds)
        print(
            "  ".join(
                f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in row.items()
            )
        )
        if given.out is not None:
            fresh = not given.out.exists()
            with given.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                if fresh:
                    writer.writeheader()
                writer.writerow(row)


if __name__ == "__main__":
    main()
