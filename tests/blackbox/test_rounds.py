"""Rounds between processes: the bits of `fedkin.fed_admm` in one process, whatever dies, stops or leaves meanwhile."""

from __future__ import annotations

import json
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import cvxpy as cp
import numpy as np
import pytest

import fedkin
from processes import PATIENCE, capped, free_ports, wait_for

from .federations import (
    CONTRACT,
    KIN,
    PROGRAM,
    Processes,
    body_of,
    cli,
    document,
    enrol,
    organise,
    process,
    site_rounds,
    write_all,
    write_ring,
)

pytest.importorskip("zenoh")

NAMES = ("d0", "d1", "d2")
RING = [(0, 1), (1, 2), (2, 0)]
ROWS, LAM, RHO, RADIUS, BATCH = 14, 0.02, 0.5, 1000.0, 4
STATED = """\
name = "small"
loss = "linear"
intercept = false
method = "fused"
penalty = "{penalty}"
[thresholds]
rows = 2
rows_per_parameter = 0.0
[target]
name = "y"
[features]
x0 = {{}}
x1 = {{}}
[rounds]
lam = {lam}
rho = {rho}
radius = {radius}
rounds = {rounds}
"""


def contract(rounds: int, penalty: str = "l1", batch: int | None = BATCH, **more: object) -> str:
    """Rows are used as they are: no scale, no intercept."""
    text = STATED.format(penalty=penalty, lam=LAM, rho=RHO, radius=RADIUS, rounds=rounds)
    more |= {} if batch is None else {"batch_size": batch}
    return text + "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())


def rows_of(k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([5, k])
    X = rng.normal(size=(ROWS, 2))
    return X, X @ ([1.0, -1.0] if k < 2 else [-1.0, 0.5]) + 0.3 * rng.normal(size=ROWS)


def write_rows(path: Path, names: tuple[str, ...], site: bool) -> Path:
    """The rows of these sites, to the last bit."""
    lines = ["site,x0,x1,y" if site else "x0,x1,y"]
    for name in names:
        X, y = rows_of(NAMES.index(name))
        for x, target in zip(X.tolist(), y.tolist(), strict=True):
            lines.append(",".join([name] * site + [*map(repr, x), repr(target)]))
    path.write_text("\n".join(lines) + "\n")
    return path


def federate(folder: Path, text: str, names: tuple[str, ...] = NAMES) -> Path:
    """Sites side by side in a folder, admitted and ready to run."""
    heart = organise(folder, text, names)
    for name in names:
        enrol(heart, name, table=write_rows(folder / f"{name}.csv", (name,), site=False))
    return heart


def expected(rounds: int, penalty: str = "l1", batch: int | None = BATCH, **how: Any) -> np.ndarray:
    """What one process makes of the same run: Fed-ADMM from the sites' own estimates."""
    federation = fedkin.Federation({name: rows_of(k) for k, name in enumerate(NAMES)})
    graph = fedkin.Graph(NAMES, [("d0", "d1"), ("d1", "d2"), ("d2", "d0")])
    problem = fedkin.Problem(federation, graph, loss="linear", penalty=penalty, lam=LAM, radius=RADIUS)
    own = [fedkin.local_fit(fedkin.Federation({name: rows_of(k)}), "linear").theta for k, name in enumerate(NAMES)]
    start = fedkin.Solution(
        theta=np.concatenate(own), alpha=np.zeros((3, 2)), objective=0.0, gap=0.0, n_iter=0, status="converged",
        trace={},
    )  # fmt: skip
    return fedkin.fed_admm(problem, rounds, batch, rho=RHO, warm_start=start, backend="numpy", **how).theta


def minimiser(names: tuple[str, ...], edges: list[tuple[int, int]], penalty: int = 1) -> np.ndarray:
    """By cvxpy; the strength of an edge is that of the federation of three, also when a site has left."""
    theta = cp.Variable((len(names), 2))
    rows = [rows_of(NAMES.index(name)) for name in names]
    losses = [cp.sum_squares(X @ theta[k] - y) / (2 * ROWS) for k, (X, y) in enumerate(rows)]
    fused = sum(cp.norm(theta[i] - theta[j], penalty) for i, j in edges)
    cp.Problem(cp.Minimize(sum(losses) + LAM * len(NAMES) * fused)).solve(cp.CLARABEL)
    return theta.value


def check_rows_stayed(folder: Path) -> None:
    """No file has a number of a site's rows, as text or as eight bytes, but its table and files in its directory."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for k, name in enumerate(NAMES):
        numbers = np.column_stack(rows_of(k)).ravel().tolist()
        marks = [mark for number in numbers for mark in (repr(number).encode(), struct.pack("<d", number))]
        found = {path.relative_to(folder).parts[0] for path in files if any(mark in files[path] for mark in marks)}
        assert found == {name, f"{name}.csv"}


def thetas(folder: Path, names: tuple[str, ...] = NAMES) -> np.ndarray:
    return np.stack([fedkin.load(folder / name / "model").coef.ravel() for name in names])


def simulation(folder: Path, text: str) -> tuple[object, ...]:
    """The command for all sites of one table."""
    (folder / "small.toml").write_text(text)
    table, graph = write_rows(folder / "all.csv", NAMES, site=True), write_ring(folder / "edges.csv", NAMES)
    where = ("--out", folder / "trial", "--port", free_ports(len(NAMES) + 1))
    words = ("federation", "simulate", folder / "small.toml", "--data", table, "--site", "site", "--graph", graph)
    return (*words, "--by", "run", *where, *(["--below-minima"] if "batch_size" in text else []))


@contextmanager
def watching(folder: Path) -> Iterator[str]:
    """``fedkin watch`` in the background; gives the address that it prints, and ends it by Ctrl-C."""
    command = [*PROGRAM, "watch", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=capped) as child:
        try:
            found = re.search(r"http://\S+", child.stdout.readline())
            assert found is not None
            yield found[0]
            child.send_signal(signal.SIGINT)
            assert child.wait(PATIENCE) == 130
        finally:
            child.kill()


# --- between processes ------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_simulation_has_the_bits_of_one_process_and_a_page_to_watch_it(tmp_path: Path) -> None:
    process(*simulation(tmp_path, contract(60)))
    sites = tmp_path / "trial" / "sites"
    assert thetas(sites).tobytes() == expected(60).tobytes()
    lines = document("site", "status", tmp_path / "trial", "--json")["sites"]
    assert {(line["name"], line["state"], line["round"]) for line in lines} == {(name, "done", 60) for name in NAMES}
    assert "d1" in cli("site", "status", tmp_path / "trial", "--metrics")
    with watching(tmp_path / "trial") as address:
        assert address.startswith("http://127.0.0.1:")
        with urlopen(address, timeout=PATIENCE) as page:
            content = page.read().decode()
        assert page.status == 200 and all(name in content for name in NAMES)
        with pytest.raises(HTTPError) as refusal:
            urlopen(address.partition("?")[0], timeout=PATIENCE)
        assert refusal.value.code == 403
        refusal.value.close()


@pytest.mark.processes
def test_sites_that_are_stopped_continue_with_the_same_command_and_publish_if_they_like(tmp_path: Path) -> None:
    heart = federate(tmp_path, contract(2000, "l2", batch=None))
    cli("federation", "order", heart, "--rounds", 3500)
    for name in NAMES:
        cli("site", "accept", tmp_path / name, heart / "order.json")
    with Processes(tmp_path) as running:
        running.run_site(*NAMES)
        wait_for(lambda: min(site_rounds(tmp_path).values()) >= 10)
        assert "d0" in cli("site", "stop", tmp_path)
        running.join(code=3)
    assert max(site_rounds(tmp_path).values()) < 3500 and not (tmp_path / "d0" / "model").exists()
    with Processes(tmp_path) as running:
        running.run_site(*NAMES)
        running.join()
    assert thetas(tmp_path).tobytes() == expected(3500, "l2", batch=None).tobytes()
    np.testing.assert_allclose(thetas(tmp_path), minimiser(NAMES, RING, 2), atol=1e-5)
    assert "--share-result" in cli("site", "publish", tmp_path / "d0", code=2)
    published = []
    for name in NAMES:
        cli("site", "settings", tmp_path / name, "--share-result")
        cli("site", "publish", tmp_path / name)
        published.append(tmp_path / name / "sent" / f"{name}.model")
    cli("federation", "gather", heart, *published, "--out", tmp_path / "model")
    gathered = fedkin.load(tmp_path / "model")
    assert gathered.sites == NAMES
    np.testing.assert_array_equal(gathered.coef.reshape(3, 2), thetas(tmp_path))
    check_rows_stayed(tmp_path)


@pytest.mark.processes
def test_the_others_go_on_without_a_site_that_leaves(tmp_path: Path) -> None:
    federate(tmp_path, contract(4000, batch=None))
    with Processes(tmp_path) as running:
        running.run_site(*NAMES)
        wait_for(lambda: min(site_rounds(tmp_path).values()) >= 10)
        running.kill("d2")
        cli("site", "leave", tmp_path / "d2", "--yes")
        for name in NAMES[:2]:
            cli("site", "accept", tmp_path / name, tmp_path / "d2" / "notices" / "d2.notice")
        del running.children["d2"]
        running.join()
    np.testing.assert_allclose(thetas(tmp_path, NAMES[:2]), minimiser(NAMES[:2], [(0, 1)]), atol=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("placement", ["central", "replicas"])
def test_other_placements_have_the_bits_of_one_process_with_who_was_there(tmp_path: Path, placement: str) -> None:
    process(*simulation(tmp_path, contract(60, placement=placement, compare_every=0)))
    (presence,) = (tmp_path / "trial").rglob("presence.npz")
    with np.load(presence) as file:
        here = file["available"]
    assert here.shape == (60, 3)
    there = fedkin.Availability.recorded(here.astype(int), weighting="estimated")
    assert thetas(tmp_path / "trial" / "sites").tobytes() == expected(60, availability=there).tobytes()


@pytest.mark.processes
def test_a_site_says_whom_it_waits_for_and_what_is_damaged(tmp_path: Path) -> None:
    federate(tmp_path, contract(5))
    assert "d0" in process("site", "run", tmp_path / "d1", "--give-up", 1, code=4).stderr
    state = tmp_path / "d1" / "state.db"
    state.unlink(missing_ok=True)
    state.write_bytes(b"PK\x03\x04 and then the power went")
    assert "state.db" in process("site", "run", tmp_path / "d1", "--give-up", 1, code=2).stderr


# --- without a process ------------------------------------------------------------------------------------------------


def test_an_older_order_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    heart = federate(tmp_path, contract(5), NAMES[:2])
    cli("federation", "order", heart, "--lam", 0.25)
    older = Path(shutil.copy(heart / "order.json", tmp_path / "older.json"))
    cli("federation", "order", heart, "--lam", 0.5, "--rounds", 7)
    newer = body_of(heart / "order.json")
    assert newer["lam"] == 0.5 and newer["rounds"] == 7 and newer["revision"] > body_of(older)["revision"]
    assert "0.5" in cli("site", "accept", tmp_path / "d0", heart / "order.json")
    assert "older.json" in cli("site", "accept", tmp_path / "d0", older, code=2)


def test_what_cannot_be_simulated_by_rounds_is_told_with_the_option_that_helps(tmp_path: Path) -> None:
    (tmp_path / "heart.toml").write_text(KIN)
    table, out = write_all(tmp_path / "all.csv"), tmp_path / "trial"
    words = ("federation", "simulate", tmp_path / "heart.toml", "--data", table, "--out", out)
    assert "fused" in cli(*words, "--site", "site", "--by", "run", code=2)
    (tmp_path / "heart.toml").write_text(CONTRACT)
    assert "clinic" in cli(*words, "--site", "clinic", "--by", "run", "--lam", 0.1, code=2)
    lines = [f"s{k // 40},{20 + k % 40},{'ABC'[k % 3]},{k % 7},no" for k in range(40 * 51)]
    table.write_text("\n".join(["site,age,ward,days,died", *lines]) + "\n")
    assert "51" in cli(*words, "--site", "site", "--by", "run", "--lam", 0.1, code=2)
    assert not out.exists()


@pytest.mark.parametrize(
    ("more", "culprit"),
    [
        ({"batch_size": 0}, "batch"),
        ({"placement": "nowhere"}, "nowhere"),
        ({"gradient": "sgaa"}, "sgaa"),
        ({"rounds": 0}, "rounds"),
        ({"lam": -1.0}, "lam"),
    ],
)
def test_a_mistake_in_the_keys_of_rounds_is_named(tmp_path: Path, more: dict[str, object], culprit: str) -> None:
    keys = {"lam": 0.1} | more
    text = CONTRACT + "[rounds]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    (tmp_path / "heart.toml").write_text(text)
    assert culprit in cli("federation", "check", tmp_path / "heart.toml", code=2)


@pytest.mark.processes
def test_a_run_is_watched_before_it_starts_and_a_file_is_refused(tmp_path: Path) -> None:
    assert "edges.csv is a file" in cli("watch", write_ring(tmp_path / "edges.csv"), "--no-browser", code=2)
    with watching(tmp_path / "trial") as address, urlopen(address, timeout=PATIENCE) as page:
        assert page.status == 200
