"""Twelve sites from a contract to predictions: by one message and by rounds, with rows that never leave their site.

Every site has a machine of its own (a directory), and files travel by copy, as people would send them.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import fedkin
from fedkin.cli import main
from fedkin.federate import read_status
from processes import capped, free_ports, wait_for

pytest.importorskip("zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

NAMES = tuple(f"site{k:02d}" for k in range(12))
ROWS, LAM, ROUNDS = 30, 0.02, 400
CONTRACT = f"""\
name = "heart"
loss = "linear"
method = "fused"
[features]
age = {{unit = "years", low = 20, high = 100, mean = 60, scale = 15}}
weight = {{unit = "kg", low = 30, high = 200, mean = 80, scale = 15}}
[target]
name = "days"
low = 0
high = 60
[rounds]
lam = {LAM}
rounds = {ROUNDS}
"""


class Machines:
    """The organiser's machine and one for each site, and a folder for what pools all rows, which is nobody's."""

    def __init__(self, root: Path, names: Sequence[str], hosts: Sequence[str], seed: int = 0) -> None:
        self.root, self.names = root, tuple(names)
        self.organiser, self.pooled = root / "organiser", root.parent / f"{root.name}-pooled"
        self.tables = {name: table(k, len(names), seed) for k, name in enumerate(names)}
        for place in (self.organiser, self.pooled, *map(self.of, names)):
            place.mkdir(parents=True)
        (self.organiser / "heart.toml").write_text(CONTRACT)
        port = free_ports(len(names))
        lines = [f"{name},{host},{port + k}" for k, (name, host) in enumerate(zip(names, hosts, strict=True))]
        (self.organiser / "list.csv").write_text("\n".join(["site,host,port", *lines]) + "\n")
        pairs = {tuple(sorted((k, (k + step) % len(names)))) for k in range(len(names)) for step in (1, 2)}
        edges = [f"{names[i]},{names[j]}" for i, j in sorted(pairs) if i != j]
        (self.organiser / "edges.csv").write_text("\n".join(["source,target", *edges]) + "\n")
        shutil.copy(self.organiser / "heart.toml", self.pooled)
        shutil.copy(self.organiser / "edges.csv", self.pooled)
        header = "age,weight,days"
        everything = [f"{name},{line}" for name in names for line in lines_of(self.tables[name])]
        (self.pooled / "all.csv").write_text("\n".join([f"site,{header}", *everything]) + "\n")
        for name in names:
            (self.of(name) / "patients.csv").write_text("\n".join([header, *lines_of(self.tables[name])]) + "\n")

    def of(self, name: str) -> Path:
        return self.root / name

    def send(self, path: Path, to: Path) -> Path:
        return Path(shutil.copy(path, to))


def table(k: int, n_sites: int, seed: int) -> np.ndarray:
    """Rows (age, weight, days) whose every number is its own: sites of the second half depend on weight instead."""
    rng = np.random.default_rng([seed, k])
    age, weight = rng.uniform(30, 90, ROWS).round(7), rng.uniform(50, 110, ROWS).round(7)
    slope = 0.15 * (age - 60) if k < n_sites // 2 else 0.15 * (weight - 80)
    return np.column_stack([age, weight, (20 + slope + rng.normal(size=ROWS)).round(7)])


def lines_of(rows: np.ndarray) -> list[str]:
    return [",".join(map(repr, row)) for row in rows.tolist()]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command on a machine."""

    def at(place: Path, *words: str) -> str:
        monkeypatch.chdir(place)
        code = main(list(words))
        said = capsys.readouterr()
        assert code == 0, said
        return said.out + said.err

    return at


def enrol_all(machines: Machines, at: Callable[..., str]) -> None:
    organiser = machines.organiser
    at(organiser, "federation", "new", "heart.toml", "--sites", "list.csv", "--graph", "edges.csv")
    at(organiser, "federation", "invite", "heart")
    for name in machines.names:
        own = machines.of(name)
        machines.send(organiser / "heart" / "invites" / f"{name}.invite", own)
        at(own, "site", "join", f"{name}.invite", "--data", "patients.csv")
        machines.send(own / name / f"{name}.request", organiser)
        at(organiser, "federation", "admit", "heart", f"{name}.request")
        machines.send(organiser / "heart" / "admitted" / f"{name}.admit", own)
        at(own, "site", "accept", name, f"{name}.admit")


def share_all(machines: Machines, at: Callable[..., str], *options: str) -> fedkin.FittedModel:
    """One message of every site; then its part of the model goes back to each."""
    organiser = machines.organiser
    for name in machines.names:
        at(machines.of(name), "site", "share", name)
        machines.send(machines.of(name) / name / "sent" / f"{name}.summary", organiser / "heart" / "summaries")
    at(organiser, "fit", "heart/summaries", "--out", "model", *options)
    at(organiser, "federation", "deliver", "heart", "model")
    for name in machines.names:
        machines.send(organiser / "heart" / "models" / f"{name}.model", machines.of(name))
        at(machines.of(name), "site", "accept", name, f"{name}.model")
    return fedkin.load(organiser / "model")


class Running:
    """The processes of all sites; whatever happens, none stays behind."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            command = [sys.executable, "-m", "fedkin.cli.site_run", name, "--give-up", "300"]
            place = self.machines.of(name)
            with (place / "run.txt").open("ab") as said:
                self.children[name] = subprocess.Popen(command, cwd=place, stdout=said, stderr=said, preexec_fn=capped)

    def round(self, name: str) -> int:
        return read_status(self.machines.of(name) / name).round

    def report(self) -> str:
        texts = [(self.machines.of(name) / "run.txt").read_text() for name in self.children]
        return "\n".join(f"{name} {self.round(name)}: {text}" for name, text in zip(self.children, texts, strict=True))

    def join(self) -> None:
        for child in self.children.values():
            assert child.wait(300) == 0, self.report()


@pytest.fixture
def running() -> Iterator[Callable[[Machines], Running]]:
    made: list[Running] = []

    def make(machines: Machines) -> Running:
        made.append(Running(machines))
        return made[-1]

    yield make
    for one in made:
        for child in one.children.values():
            child.kill()
            child.wait()


def publish_all(machines: Machines, at: Callable[..., str]) -> fedkin.FittedModel:
    """Sites that like to do so hand their coefficients to the organiser."""
    for name in machines.names:
        at(machines.of(name), "site", "settings", name, "--share-result")
        at(machines.of(name), "site", "publish", name)
        machines.send(machines.of(name) / name / "sent" / f"{name}.model", machines.organiser / f"{name}.published")
    files = [f"{name}.published" for name in machines.names]
    at(machines.organiser, "federation", "gather", "heart", *files, "--out", "gathered")
    return fedkin.load(machines.organiser / "gathered")


def fit_pooled(machines: Machines, at: Callable[..., str], *options: str) -> fedkin.FittedModel:
    given = ["--contract", "heart.toml", "--site", "site", "--graph", "edges.csv", "--test-size", "0"]
    at(machines.pooled, "fit", "all.csv", *given, "--out", "model", *options)
    return fedkin.load(machines.pooled / "model")


def predictions(text: str) -> np.ndarray:
    return np.array([line.split(",")[-1] for line in text.splitlines()[1:]], dtype=float)


def marks_of(rows: np.ndarray) -> list[bytes]:
    """How a site's numbers could stand in a file: as text, as eight bytes, and prepared by the contract."""
    prepared = (rows - [60.0, 80.0, 0.0]) / [15.0, 15.0, 1.0]
    numbers = [*rows.ravel().tolist(), *prepared[:, :2].ravel().tolist()]
    return [repr(number).encode() for number in numbers] + [struct.pack("<d", number) for number in numbers]


def check_rows_stayed(machines: Machines) -> None:
    """No file of any machine holds a number of another site's rows; where a site's own are, this finds them."""
    marks = {name: marks_of(machines.tables[name]) for name in machines.names}
    files = [path for path in machines.root.rglob("*") if path.is_file()]
    found: dict[str, set[str]] = {name: set() for name in machines.names}
    for path in files:
        content, where = path.read_bytes(), path.relative_to(machines.root).parts[0]
        for name in machines.names:
            if any(mark in content for mark in marks[name]):
                assert where == name, f"{path} holds numbers of the rows of {name}"
                found[name].add(path.name)
    assert all({"patients.csv", "rows.npz"} <= where for where in found.values())


def test_twelve_sites_by_one_message_and_by_rounds(
    tmp_path: Path, at: Callable[..., str], running: Callable[[Machines], Running]
) -> None:
    machines = Machines(tmp_path / "world", NAMES, ["127.0.0.1"] * len(NAMES))
    enrol_all(machines, at)
    how = ("--select", "none", "--lam", str(LAM), "--tol", "1e-9")
    pooled = fit_pooled(machines, at, *how)
    assert pooled.members() == (NAMES[:6], NAMES[6:])

    shared = share_all(machines, at, *how)
    assert shared.members() == pooled.members()
    np.testing.assert_allclose(shared.coef, pooled.coef, rtol=0, atol=1e-10)
    np.testing.assert_allclose(shared.intercept, pooled.intercept, rtol=0, atol=1e-8)
    by_message = at(machines.of(NAMES[3]), "predict", f"{NAMES[3]}/model", "patients.csv")

    processes = running(machines)
    processes.start(*NAMES)
    wait_for(lambda: all(processes.round(name) >= 20 for name in NAMES), 300, processes.report)
    victims = (NAMES[2], NAMES[7])
    for name in victims:
        assert processes.round(name) < ROUNDS
        processes.children[name].kill()
        processes.children[name].wait()
    processes.start(*victims)
    processes.join()
    rounds = publish_all(machines, at)
    assert rounds.members() == pooled.members()
    scale = np.array([15.0, 15.0])
    assert np.abs((rounds.coef - pooled.coef) * scale).max() < 1e-4
    by_rounds = at(machines.of(NAMES[3]), "predict", f"{NAMES[3]}/model", "patients.csv")
    one, other = predictions(by_message), predictions(by_rounds)
    assert one.shape == (ROWS,) and np.abs(one - other).max() < 1e-3
    assert "(400 rounds)" in at(machines.of(NAMES[3]), "inspect", f"{NAMES[3]}/model")
    check_rows_stayed(machines)
