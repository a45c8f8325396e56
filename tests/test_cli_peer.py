"""``fedkin peer``: from a table to coefficients, with the commands a user types."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from msgspec.structs import replace

from builders import small_problem
from federations import in_process, write_tables
from fedkin.admm import Store, fed_admm
from fedkin.cli import main
from fedkin.cli.app import make_app
from fedkin.data import Federation
from fedkin.federate import (
    SecurityError,
    is_running,
    load_manifest,
    make_authority,
    read_departures,
    read_result,
    write_departure,
)
from fedkin.graph import Graph
from fedkin.objective import Problem
from fedkin.solvers import solve
from fedkin.stats import select_edges
from processes import capped, free_ports, on_terminal, wait_for

pytest.importorskip("zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def init(folder: Path, rounds: int, *options: str, devices: int = 3) -> Problem:
    problem = small_problem(devices)
    write_tables(problem, folder)
    command = [
        "peer",
        "init",
        str(folder / "fed"),
        "--data",
        str(folder / "rows.csv"),
        "--device",
        "site",
        "--target",
        "y",
    ]
    command += ["--graph", str(folder / "edges.csv"), "--lam", "0.02", "--rounds", str(rounds), "--batch-size", "4"]
    command += ["--seed", "5", "--no-intercept", "--port", str(free_ports(devices + 1)), *options]
    assert main(command) == 0
    return problem


def started(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "fedkin.cli", "peer", *arguments], preexec_fn=capped)


def ended(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Whatever happens in a test, nothing of it stays behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        main(["peer", "stop", str(directory)])


def status_of(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["peer", "status", str(directory), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["devices"]


def test_init_up_status_collect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = init(tmp_path, 40, "--share-results")
    directory = tmp_path / "fed"
    process = started("up", str(directory), "--give-up", "30")
    try:
        assert process.wait(100) == 0
    finally:
        ended(process, directory)
    assert {line["state"] for line in status_of(directory, capsys)} == {"done"}
    assert main(["peer", "status", str(directory), "--metrics"]) == 0
    assert 'fedkin_round{device="d1"} 40' in capsys.readouterr().out
    owner = directory / "devices" / "d2" / "device.json"
    owner.write_text(owner.read_text().replace("true", "false"))
    assert main(["peer", "collect", str(directory), "--out", str(tmp_path / "coef.csv")]) == 0
    assert "d2: its owner keeps it" in capsys.readouterr().err
    with (tmp_path / "coef.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["device"] for row in rows] == ["d0", "d1"]
    theta = np.array([[float(row[name]) for name in problem.federation.feature_names] for row in rows])
    expected = fed_admm(problem, 40, batch_size=4, seed=5, backend="numpy").theta
    assert theta.tobytes() == expected[:2].tobytes()


def test_the_page_of_commands_has_all_options() -> None:
    text = (Path(__file__).parent.parent / "docs" / "command-line.md").read_text(encoding="utf-8")
    root = typer.main.get_command(make_app([]))
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        for inner in getattr(command, "commands", {"": command}).values():
            options = [max(one.opts, key=len) for one in inner.params if one.opts[0].startswith("-")]
            missing = [option for option in options if f"{option}" not in text and option != "--help"]
            assert not missing, (name, inner.name, missing)


@pytest.mark.parametrize("page", ["README.md", "docs/peer.md", "docs/command-line.md"])
def test_commands_of_the_pages_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / page).read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"fedkin peer ([a-z]+)([^\n`#(]*)", text)
    assert len(found) >= 3
    for command, rest in found:
        capsys.readouterr()
        assert main(["peer", command, "--help"]) == 0, command
        known = capsys.readouterr().out
        assert all(option in known for option in re.findall(r"--[a-z][a-z-]+", rest)), (command, rest)


def run_all(directory: Path) -> None:
    process = started("up", str(directory), "--give-up", "30")
    try:
        assert process.wait(100) == 0
    finally:
        ended(process, directory)


@pytest.mark.parametrize("kind", ["rsa", "ec"])
def test_the_users_own_authority(tmp_path: Path, kind: str) -> None:
    """A company's authority, made with openssl: it signs manifest and certificates, and its key is not copied."""
    key, certificate = tmp_path / "company.key", tmp_path / "company.crt"
    how = ["-newkey", "rsa:2048"] if kind == "rsa" else ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command = ["openssl", "req", "-x509", *how, "-noenc", "-keyout", str(key), "-out", str(certificate)]
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run([*command, "-days", "30", "-subj", "/CN=company"], check=True, capture_output=True)
    problem = init(tmp_path, 30, "--ca-cert", str(certificate), "--ca-key", str(key))
    directory = tmp_path / "fed"
    assert not list(directory.rglob("ca.key"))
    assert (directory / "ca.crt").read_bytes() == certificate.read_bytes()
    own = str(directory / "devices" / "d1" / "device.crt")
    checked = subprocess.run(["openssl", "verify", "-CAfile", str(certificate), own], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout
    run_all(directory)
    theta = np.stack([read_result(directory / "devices" / f"d{u}") for u in range(3)])
    assert theta.tobytes() == fed_admm(problem, 30, batch_size=4, seed=5, backend="numpy").theta.tobytes()


def test_a_key_that_is_not_the_authoritys_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make_authority("one"), make_authority("other")
    (tmp_path / "ca.crt").write_bytes(one.certificate)
    (tmp_path / "ca.key").write_bytes(other.key)
    write_tables(small_problem(3), tmp_path)
    command = ["peer", "init", str(tmp_path / "fed"), "--data", str(tmp_path / "rows.csv"), "--device", "site"]
    command += ["--target", "y", "--graph", str(tmp_path / "edges.csv"), "--lam", "0.1"]
    command += ["--ca-cert", str(tmp_path / "ca.crt"), "--ca-key", str(tmp_path / "ca.key")]
    assert main(command) == 2
    assert "does not belong to" in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()


def test_plain_tcp_on_request(tmp_path: Path) -> None:
    problem = init(tmp_path, 30, "--plain-tcp")
    directory = tmp_path / "fed"
    links = json.loads((directory / "devices" / "d1" / "zenoh.json5").read_text())
    assert "access_control" not in links
    assert all(place.startswith("tcp/") for place in links["listen"]["endpoints"] + links["connect"]["endpoints"])
    run_all(directory)
    theta = np.stack([read_result(directory / "devices" / f"d{u}") for u in range(3)])
    assert theta.tobytes() == fed_admm(problem, 30, batch_size=4, seed=5, backend="numpy").theta.tobytes()


def test_labels_and_the_logistic_loss(tmp_path: Path) -> None:
    """Words for classes in the table; the run is that of `fed_admm` on their codes."""
    problem = small_problem(3)
    fed = problem.federation
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", *fed.feature_names, "sick"])
        for name in fed.devices:
            for x, y in zip(fed[name].X.tolist(), fed[name].y.tolist(), strict=True):
                writer.writerow([name, *map(repr, x), "yes" if y > 0 else "no"])
    problem.graph.write(tmp_path / "edges.csv")
    command = ["peer", "init", str(tmp_path / "fed"), "--data", str(tmp_path / "rows.csv"), "--device", "site"]
    command += ["--target", "sick", "--graph", str(tmp_path / "edges.csv"), "--lam", "0.02", "--loss", "logistic"]
    command += ["--rounds", "30", "--batch-size", "4", "--seed", "5", "--ridge", "0.01"]
    assert main([*command, "--port", str(free_ports(3)), "--share-results"]) == 0
    directory = tmp_path / "fed"
    manifest = load_manifest(directory)
    assert list(manifest.classes or ()) == ["no", "yes"] and manifest.loss == {"name": "logistic"}
    run_all(directory)
    assert main(["peer", "collect", str(directory), "--out", str(tmp_path / "coef.csv")]) == 0
    with (tmp_path / "coef.csv").open() as file:
        rows = list(csv.DictReader(file))
    theta = np.array([[float(row[name]) for name in manifest.feature_names] for row in rows])
    data = {name: (fed[name].X, (fed[name].y > 0).astype(float)) for name in fed.devices}
    coded = Federation(data).with_intercept()
    ridge = np.array([0.0, 0.01, 0.01, 0.01])  # as in fit, none on the intercept
    same = Problem(coded, Graph(list(fed.devices), problem.graph.edge_ids()), "logistic", lam=0.02, ridge=ridge)
    expected = fed_admm(same, 30, batch_size=4, seed=5, backend="numpy").theta
    assert theta.tobytes() == expected.tobytes()


def test_the_live_view_on_a_small_terminal(tmp_path: Path) -> None:
    """A terminal of 10 lines and 6 devices: no line is lost without a word, and the end is the whole table."""
    init(tmp_path, 150, devices=6)
    up = [sys.executable, "-m", "fedkin.cli", "peer", "up", str(tmp_path / "fed"), "--give-up", "30"]
    code, text = on_terminal(up, columns=100, lines=10)
    main(["peer", "stop", str(tmp_path / "fed")])
    assert code == 0, text
    assert re.search(r"and 3 more +\d+ to \d+", text), text
    assert "never started" not in text and "Traceback" not in text
    tail = text[text.rindex("waits for") :]
    assert re.findall(r"(d\d) +done +150/150", tail) == [f"d{u}" for u in range(6)]


def test_three_machines_as_in_the_readme(tmp_path: Path) -> None:
    """Three addresses, three directories carried elsewhere, three commands in any order."""
    problem = small_problem(3)
    write_tables(problem, tmp_path)
    port = free_ports(1)
    lines = [f"d{u},127.0.0.{u + 2},{port}" for u in range(3)]
    (tmp_path / "endpoints.csv").write_text("\n".join(["device,host,port", *lines]) + "\n")
    command = ["peer", "init", str(tmp_path / "fed"), "--data", str(tmp_path / "rows.csv"), "--device", "site"]
    command += ["--target", "y", "--graph", str(tmp_path / "edges.csv"), "--lam", "0.02", "--rounds", "60"]
    command += ["--batch-size", "4", "--endpoints", str(tmp_path / "endpoints.csv")]
    assert main(command) == 0
    running = []
    try:
        for u in (2, 0, 1):
            machine = tmp_path / f"machine-{u}"
            machine.mkdir()
            (tmp_path / "fed" / "devices" / f"d{u}").rename(machine / "carried")
            running.append(started("run", str(machine / "carried"), "--give-up", "60"))
            time.sleep(0.3)
        assert [process.wait(100) for process in running] == [0, 0, 0]
    finally:
        for process in running:
            process.kill()
            process.wait()
    with_intercept = Problem(problem.federation.with_intercept(), problem.graph, lam=0.02)
    expected = fed_admm(with_intercept, 60, batch_size=4, backend="numpy").theta
    theta = np.stack([read_result(tmp_path / f"machine-{u}" / "carried") for u in range(3)])
    assert theta.tobytes() == expected.tobytes()


def test_edges_are_selected_by_the_devices_first(tmp_path: Path) -> None:
    problem = init(tmp_path, 40, "--select-level", "0.05", devices=4)
    directory = tmp_path / "fed"
    process = started("up", str(directory), "--give-up", "30")
    try:
        assert process.wait(120) == 0
    finally:
        ended(process, directory)
    manifest = load_manifest(directory)
    kept = select_edges(problem.federation, problem.graph, level=0.05).kept
    assert 0 < kept.sum() < kept.size
    edges = [edge for edge, stays in zip(manifest.edges, kept, strict=True) if stays]
    radius = [one for one, stays in zip(manifest.edge_radius, kept, strict=True) if stays]
    expected = in_process(problem, replace(manifest, edges=edges, edge_radius=radius)).gather("average")
    theta = np.stack([read_result(directory / "devices" / f"d{u}") for u in range(4)])
    assert theta.tobytes() == expected.tobytes()


def test_up_starts_again_what_dies_and_stop_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(tmp_path, 1_000_000)
    directory = tmp_path / "fed"
    place = directory / "devices" / "d1"
    process = started("up", str(directory))
    try:
        deadline = time.monotonic() + 60
        victim = None
        while victim is None or victim["round"] < 30:
            victim = next(line for line in status_of(directory, capsys) if line["name"] == "d1")
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.kill(victim["pid"], signal.SIGKILL)
        again = None
        # between its lock and its first status, a process is shown with what the one before wrote
        while again is None or again["pid"] in (None, victim["pid"]) or again["state"] != "running":
            again = next(line for line in status_of(directory, capsys) if line["name"] == "d1")
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert again["restarts"] == 1 and again["round"] >= victim["round"]
        assert main(["peer", "status", str(directory), "--metrics"]) == 0
        metrics = capsys.readouterr().out
        assert 'fedkin_restarts_total{device="d1"} 1' in metrics and 'fedkin_restarts_total{device="d0"} 0' in metrics
        assert main(["peer", "stop", str(directory)]) == 0
        assert "d0, d1, d2" in capsys.readouterr().out
        assert process.wait(30) == 3  # not that of a run that has finished
        assert not is_running(place)
    finally:
        ended(process, directory)


def test_a_device_that_never_comes_back_leaves_by_a_signed_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--compare-every", "7", "--batch-size", "12", "--share-results")
    problem = init(tmp_path, 400, *options, devices=4)
    directory = tmp_path / "fed"
    quick = ["--complain", "0.5", "--give-up", "120", "--linger", "20"]
    running = [started("run", str(directory / "devices" / f"d{u}"), *quick) for u in range(3)]
    try:
        wait_for(lambda: status_of(directory, capsys)[0]["waiting_for"] == ["d3"], 100)
        assert main(["peer", "leave", str(directory), "d3"]) == 0
        assert [process.wait(60) for process in running] == [0, 0, 0]
    finally:
        for process in running:
            process.kill()
            process.wait()
    # what is left is the problem without d3, at the same lam * |V|
    names = ["d0", "d1", "d2"]
    kept = Federation({name: (problem.federation[name].X, problem.federation[name].y) for name in names})
    edges = [pair for pair in problem.graph.edge_ids() if "d3" not in pair]
    rest = Problem(kept, Graph(names, edges), lam=problem.lam * 4 / 3)
    theta = np.stack([read_result(directory / "devices" / name) for name in names])
    assert np.abs(theta - solve(rest, 1e-10).theta).max() < 1e-5


def test_a_forged_notice_is_refused(tmp_path: Path) -> None:
    init(tmp_path, 5)
    place = tmp_path / "fed" / "devices" / "d0"
    write_departure(tmp_path / "fed", "d1")
    assert read_departures(place, load_manifest(place)) == {1}
    (place / "left" / "d2").write_bytes((place / "left" / "d1").read_bytes())
    with pytest.raises(SecurityError):
        read_departures(place, load_manifest(place))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--loss", "nonsense"], "unknown loss 'nonsense'; choose one of mean, linear, logistic"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--rounds", str(2**32)], "--rounds must be at most 4294967295"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--batch-size", "999"], "--batch-size is 999, but device 'd0' has only 12 rows: use at most 12, or leave it"),
        (["--compare-every", "-1"], "--compare-every must be at least 0 (0: never), got -1"),
        (["--checkpoint-every", "0"], "--checkpoint-every must be at least 1, got 0"),
        (["--lam", "nan"], "--lam must be a finite number, at least 0, got nan"),
        (["--ridge", "-1"], "--ridge must be a finite number, at least 0, got -1"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--ca-cert", "x.pem"], "go together"),
        (["--port", "65534"], "--port 65534 leaves no room"),
        (["--port", "0"], "--port must be a whole number from 1 to 65535, got 0"),
        (["--port", "70000"], "--port must be a whole number from 1 to 65535, got 70000"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    write_tables(small_problem(3), tmp_path)
    command = ["peer", "init", str(tmp_path / "fed"), "--data", str(tmp_path / "rows.csv"), "--device", "site"]
    command += ["--target", "y", "--graph", str(tmp_path / "edges.csv"), "--lam", "0.1", *options]
    assert main(command) == 2
    errors = capsys.readouterr().err
    assert words in errors and len(errors.splitlines()) == 1
    assert "None" not in errors and "object" not in errors  # words of Python
    assert not (tmp_path / "fed").exists()


def until_round(directory: Path, capsys: pytest.CaptureFixture[str], least: int) -> list[dict[str, Any]]:
    def arrived() -> list[dict[str, Any]]:
        lines = status_of(directory, capsys)
        return lines if min(line["round"] for line in lines) >= least else []

    return wait_for(arrived, 120)


def heard(*arguments: str) -> subprocess.Popen[str]:
    """As `started`, with standard error kept."""
    command = [sys.executable, "-m", "fedkin.cli", "peer", *arguments]
    return subprocess.Popen(command, preexec_fn=capped, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run_to_end(place: Path, *options: str) -> None:
    """One device on its own, which ends well within half a minute."""
    process = heard("run", str(place), *options)
    try:
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_up_stops_the_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    init(tmp_path, 1_000_000, devices=2)
    directory = tmp_path / "fed"
    process = heard("up", str(directory))
    try:
        until_round(directory, capsys, 3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "stopping the devices" in errors
        assert {line["state"] for line in status_of(directory, capsys)} == {"stopped"}
        assert not any(is_running(directory / "devices" / f"d{u}") for u in range(2))
    finally:
        ended(process, directory)


def test_a_signal_to_up_stops_the_edge_selection(tmp_path: Path) -> None:
    """One device is missing, so that the selection of the others waits."""
    init(tmp_path, 10, "--select-level", "0.05")
    directory = tmp_path / "fed"
    (directory / "devices" / "d2").rename(tmp_path / "elsewhere")
    process = heard("up", str(directory))
    try:
        logs = [directory / "devices" / f"d{u}" / "log.jsonl" for u in range(2)]
        wait_for(lambda: all(log.exists() for log in logs), 60)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            pytest.skip("no list of child processes on this system")
        numbers = children.read_text().split()
        assert len(numbers) == 2
        process.terminate()
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130 and "stopping the edge selection" in errors
        assert not any(Path(f"/proc/{number}").exists() for number in numbers)
    finally:
        ended(process, directory)


def test_up_beside_running_devices_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The supervisor was killed, its devices go on: that is no failure of theirs."""
    init(tmp_path, 1_000_000, devices=2)
    directory = tmp_path / "fed"
    process = started("up", str(directory))
    try:
        before = until_round(directory, capsys, 3)
        process.kill()
        process.wait()
        assert main(["peer", "up", str(directory)]) == 2
        errors = capsys.readouterr().err
        assert "already running: d0, d1" in errors and f"fedkin peer stop {directory}" in errors
        after = status_of(directory, capsys)
        assert [line["pid"] for line in after] == [line["pid"] for line in before]
        assert {line["state"] for line in after} == {"running"}
    finally:
        ended(process, directory)
    wait_for(lambda: not any(is_running(directory / "devices" / f"d{u}") for u in range(2)), 20)


def test_a_port_in_use_is_told_at_once_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(tmp_path, 20, devices=2)
    directory = tmp_path / "fed"
    port = int(load_manifest(directory).members[1].endpoint.rpartition(":")[2])
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        process = heard("up", str(directory), "--restarts", "1")
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            ended(process, directory)
        assert process.returncode == 1
        assert re.search(
            rf"note: d1: cannot listen on \S+:{port}: .*starting it again in 0.5 s \(1 of 1 times\)", errors
        )
        assert re.search(rf"error: d1 failed: cannot listen on \S+:{port}: .*end that one, or", errors)
        lines = status_of(directory, capsys)
        assert [line["state"] for line in lines] == ["stopped", "cannot go on"]
        assert "cannot listen" in lines[1]["why"] and lines[1]["restarts"] == 1
        # what systemd sees: not the code of wrong input, after which it does not try again
        process = heard("run", str(directory / "devices" / "d1"))
        assert process.wait(60) == 4
        process.communicate()
    process = started("up", str(directory), "--give-up", "30")
    try:
        assert process.wait(60) == 0
    finally:
        ended(process, directory)
    lines = status_of(directory, capsys)
    assert [line["state"] for line in lines] == ["done", "done"] and lines[1]["why"] is None


def test_what_is_done_stays_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(tmp_path, 20, devices=2)
    directory = tmp_path / "fed"
    place = directory / "devices" / "d1"
    run_all(directory)
    before = status_of(directory, capsys)
    assert main(["peer", "up", str(directory)]) == 0
    said = capsys.readouterr()
    assert "all devices have done their rounds already" in said.err and said.out.count("20/20") == 2
    assert status_of(directory, capsys) == before
    # one device alone, all of whose neighbours are known to have finished: it need not wait for them
    run_to_end(place)
    assert [(line["state"], line["round"]) for line in status_of(directory, capsys)] == [("done", 20)] * 2


def test_who_stays_for_neighbours_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As if the device had been killed before its neighbour said that it has finished."""
    init(tmp_path, 20, devices=2)
    directory = tmp_path / "fed"
    place = directory / "devices" / "d1"
    run_all(directory)
    store = Store(place / "state.db", load_manifest(directory).run)
    kept = store.load()
    assert kept is not None and kept.header["over"] is True
    store.save(kept.round, kept.arrays, kept.header | {"over": False}, durable=True)
    store.close()
    (place / "log.jsonl").unlink()
    run_to_end(place, "--linger", "3")
    lines = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    staying = [line for line in lines if line["event"] == "finished, staying for neighbours that have not"]
    assert staying and staying[0]["peers"] == staying[0]["down"] == ["d0"] and 0 < staying[0]["at_most"] < 3
    assert next(line for line in status_of(directory, capsys) if line["name"] == "d1")["round"] == 20


def test_ridge_leaves_the_intercept_alone_as_in_fit(tmp_path: Path) -> None:
    init(tmp_path, 5, "--ridge", "0.5", "--intercept")
    manifest = load_manifest(tmp_path / "fed")
    assert manifest.ridge == [0.0] + [0.5] * (manifest.n_params - 1)
