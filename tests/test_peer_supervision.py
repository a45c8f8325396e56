"""``fedkin peer up``, ``status`` and ``stop`` when devices are missing, stopped, silent or elsewhere."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from builders import small_problem
from federations import place, write_small_federation
from fedkin.cli import main
from fedkin.federate import (
    Line,
    Supervisor,
    check_idle,
    is_running,
    load_manifest,
    only_supervisor,
    overview,
    prometheus,
)
from fedkin.federate.programs import overview as overview_module
from fedkin.federate.programs.overview import silence
from fedkin.federate.programs.program import only_one
from fedkin.federate.programs.supervisor import supervisor_of
from fleet import Fleet
from processes import capped, free_ports, wait_for

pytest.importorskip("zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
FOR_EVER = 1_000_000  # rounds


@contextmanager
def going_up(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """``fedkin peer up`` with its output kept; whatever happens, nothing of it stays behind."""
    command = [sys.executable, "-m", "fedkin.cli", "peer", "up", str(directory), *options]
    process = subprocess.Popen(command, preexec_fn=capped, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        finally:
            process.kill()
            process.communicate()
            main(["peer", "stop", str(directory)])


def lines_of(directory: Path) -> dict[str, Line]:
    return {line.name: line for line in overview(directory, load_manifest(directory))}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["peer", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, " ".join(captured.err.split())


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_stop_reaches_a_device_that_pauses_before_its_restart(tmp_path: Path) -> None:
    """Killed four times, d1 pauses for four seconds and has no process: stop must reach the supervisor."""
    write_small_federation(tmp_path, 2, FOR_EVER)
    directory = tmp_path / "fed"
    with going_up(directory) as process:
        assert process.stderr is not None
        for _ in range(4):
            victim = wait_for(lambda: (line := lines_of(directory)["d1"]).state == "running" and line.pid)
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda victim=victim: lines_of(directory)["d1"].pid != victim)
        for line in process.stderr:
            if "starting it again in 4 s" in line:
                break
        assert not is_running(place(directory, "d1"))
        assert main(["peer", "stop", str(directory)]) == 0
        out, errors = process.communicate(timeout=20)
        assert process.returncode == 3, errors
        assert "stopped on request" in errors
        assert re.findall(r"(d\d) +(\w+)", out) == [("d0", "stopped"), ("d1", "stopped")]
    assert not any(is_running(place(directory, name)) for name in ("d0", "d1"))


def test_one_device_is_stopped_by_its_own_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_federation(tmp_path, 2, FOR_EVER)
    directory = tmp_path / "fed"
    with going_up(directory) as process:
        wait_for(lambda: all(line.round > 2 for line in lines_of(directory).values()))
        code, out, _ = said(capsys, "stop", str(place(directory, "d1")))
        assert code == 0 and out == "asked to stop: d1\n"
        assert process.stderr is not None
        assert "d1: stopped on request; it is not started again" in process.stderr.readline()
        assert lines_of(directory)["d1"].state == "stopped"
        assert lines_of(directory)["d0"].pid is not None
        assert said(capsys, "stop", str(directory))[1] == "asked to stop: d0, the supervisor\n"
        process.communicate(timeout=20)
        assert process.returncode == 3


def test_stop_ends_the_edge_selection(tmp_path: Path) -> None:
    """One device is missing, so that the selection of the others waits."""
    write_small_federation(tmp_path, 3, select={"level": 0.05, "variance": "model"})
    directory = tmp_path / "fed"
    place(directory, "d2").rename(tmp_path / "elsewhere")
    with going_up(directory) as process:
        wait_for(lambda: all((place(directory, name) / "log.jsonl").exists() for name in ("d0", "d1")))
        assert main(["peer", "stop", str(directory)]) == 0
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 3 and "stopping the edge selection" in errors
        assert "d2 is not started: there is no directory" in errors and "the others wait for it" in errors


def test_devices_that_were_just_stopped_are_not_starting(tmp_path: Path) -> None:
    manifest = write_small_federation(tmp_path, 2, FOR_EVER)
    directory = tmp_path / "fed"
    supervisor = Supervisor(directory)
    try:
        supervisor.start()
    finally:
        supervisor.stop()
    assert [child.state for child in supervisor.children] == ["stopped", "stopped"] and supervisor.stopped()
    assert {line.state for line in overview(directory, manifest, supervisor.by_name)} == {"stopped"}


def test_there_is_one_supervisor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_federation(tmp_path)
    directory = tmp_path / "fed"
    with only_supervisor(directory):
        assert supervisor_of(directory) == os.getpid()
        check_idle(directory)
        code, _, errors = said(capsys, "up", str(directory))
        assert code == 2
        assert f"already running: fedkin peer up, process {os.getpid()}" in errors
    assert supervisor_of(directory) is None  # the file is still there, its holder is not
    with only_supervisor(directory):
        pass


def test_who_looks_does_not_keep_a_device_from_starting(tmp_path: Path) -> None:
    """To see whether a lock is held one has to try it, which takes a moment: that must not look like another device."""
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    moment = threading.Timer(0.15, os.close, (descriptor,))
    moment.start()
    try:
        with only_one(tmp_path):
            assert is_running(tmp_path)
    finally:
        moment.join()
    assert not is_running(tmp_path)


# --- a device's own directory -----------------------------------------------------------------------------------------


def test_status_and_metrics_of_a_device_that_was_carried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_federation(tmp_path)
    carried = tmp_path / "machine"
    place(tmp_path / "fed", "d1").rename(carried)
    code, out, _ = said(capsys, "status", str(carried))
    assert code == 0 and re.search(r"d1 +never started +0/5", out)
    code, out, _ = said(capsys, "status", str(carried), "--json")
    assert [line["name"] for line in json.loads(out)["devices"]] == ["d1"]
    code, out, _ = said(capsys, "status", str(carried), "--metrics")
    assert code == 0 and 'fedkin_running{device="d1"} 0' in out and "d0" not in out
    assert said(capsys, "stop", str(carried))[:2] == (0, "no device is running here\n")
    with only_one(carried):
        (carried / "status.json").write_text(json.dumps({"pid": os.getpid(), "time": time.time(), "state": "running"}))
        assert 'fedkin_running{device="d1"} 1' in said(capsys, "status", str(carried), "--metrics")[1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["up"], "fedkin peer run {} runs the device"),
        (["collect", "--out", "coef.csv"], "the parameters of this one are in its result.npz"),
        (["leave", "d0"], "run it where the key of the authority is"),
        (["mpi", "run"], "ranks need the rows of all devices"),
    ],
)
def test_other_commands_say_that_they_need_the_federation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], words: str
) -> None:
    write_small_federation(tmp_path)
    device = place(tmp_path / "fed", "d1")
    if command[0] == "mpi":
        called, code = "mpi run", main(["mpi", "run", str(device)])
        errors = " ".join(capsys.readouterr().err.split())
    else:
        called = f"peer {command[0]}"
        code, _, errors = said(capsys, command[0], str(device), *command[1:])
    assert code == 2
    assert f"fedkin {called} needs that of the federation" in errors and words.format(device) in errors


@pytest.mark.parametrize("command", [["select"], ["run"]])
def test_commands_for_a_device_say_so_in_a_federation(tmp_path: Path, command: list[str]) -> None:
    write_small_federation(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "fedkin.cli", "peer", *command, "."],
        cwd=tmp_path / "fed",
        preexec_fn=capped,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "is the directory of a federation: give that of a device, devices/NAME" in done.stderr


# --- devices that are not there ---------------------------------------------------------------------------------------


def test_status_lists_devices_that_are_elsewhere_or_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small_federation(tmp_path)
    directory = tmp_path / "fed"
    place(directory, "d0").rename(tmp_path / "elsewhere")
    (place(directory, "d1") / "device.json").unlink()
    code, out, errors = said(capsys, "status", str(directory))
    assert code == 0
    assert re.search(r"d0 +not here", out) and re.search(r"d1 +damaged", out) and re.search(r"d2 +never started", out)
    assert f"d0: there is no directory {place(directory, 'd0')}" in errors
    assert f"d1: {place(directory, 'd1') / 'device.json'} is missing" in errors
    metrics = said(capsys, "status", str(directory), "--metrics")[1]
    assert 'device="d0"' not in metrics and 'fedkin_trouble{device="d1"} 1' in metrics
    errors = said(capsys, "collect", str(directory), "--out", str(tmp_path / "coef.csv"))[2]
    assert "d0: its directory is not on this machine" in errors
    assert "device.json is missing, so nobody knows whether its owner shares it" in errors
    (place(directory, "d1") / "device.json").write_text('{"device"')
    assert "device.json cannot be read" in said(capsys, "status", str(directory))[2]
    errors = said(capsys, "collect", str(directory), "--out", str(tmp_path / "coef.csv"))[2]
    assert "device.json cannot be read" in errors


def test_up_does_not_let_the_others_wait_for_a_damaged_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_small_federation(tmp_path)
    directory = tmp_path / "fed"
    (place(directory, "d1") / "device.json").unlink()
    code, _, errors = said(capsys, "up", str(directory), "--give-up", "5")
    assert code == 2
    assert "d1 cannot be started, and the others would wait for it" in errors and "device.json is missing" in errors
    assert not (place(directory, "d0") / "log.jsonl").exists()


def test_up_names_who_is_elsewhere_and_starts_the_others(tmp_path: Path) -> None:
    """As with one device on another machine: the run ends, and its status says where the third one is."""
    manifest = write_small_federation(tmp_path, 3, 20)
    directory = tmp_path / "fed"
    place(directory, "d2").rename(tmp_path / "elsewhere")
    other = subprocess.Popen(
        [sys.executable, "-m", "fedkin.federate.programs.run", str(tmp_path / "elsewhere"), "--give-up", "40"],
        preexec_fn=capped,
        stderr=subprocess.DEVNULL,
    )
    try:
        with going_up(directory, "--give-up", "40") as process:
            out, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
            assert "d2 is not started: there is no directory" in errors
            assert re.search(r"d2 +not here", out)
        assert other.wait(30) == 0
    finally:
        other.kill()
        other.wait()
    assert manifest.n_devices == 3


# --- devices that say nothing -----------------------------------------------------------------------------------------


def test_a_device_that_cannot_write_is_told_by_up_and_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file of the device may grow any more: neither its status nor its log can tell."""
    monkeypatch.setattr(overview_module, "SILENT_SECONDS", 4.0)
    manifest = write_small_federation(tmp_path, 2, FOR_EVER, checkpoint_every=5)
    directory = tmp_path / "fed"
    supervisor = Supervisor(directory)
    news: list[str] = []

    def polled() -> list[str]:
        supervisor.poll()
        news.extend(supervisor.news)
        supervisor.news.clear()
        return news

    try:
        supervisor.start()
        wait_for(lambda: polled() or all(line.round > 2 for line in lines_of(directory).values()))
        assert not news
        child = supervisor.by_name["d1"].process
        assert child is not None
        infinite = resource.RLIM_INFINITY
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (0, infinite))
        wait_for(polled)
        assert news[0].startswith("d1: its process runs, but has not written status.json for"), news
        assert f"cannot write in {place(directory, 'd1')}" in news[0]
        line = {one.name: one for one in overview(directory, manifest, supervisor.by_name)}["d1"]
        assert line.state == "silent"
        code, out, errors = said(capsys, "status", str(directory))
        assert code == 0 and re.search(r"d1 +silent", out) and "has not written status.json for" in errors
        assert 'fedkin_trouble{device="d1"} 1' in said(capsys, "status", str(directory), "--metrics")[1]
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (infinite, infinite))
        wait_for(lambda: len(polled()) > 1)
        assert news[1:] == ["d1: it goes on"]
        assert lines_of(directory)["d1"].state == "running"
    finally:
        supervisor.stop()


def test_a_full_disk_is_named_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_federation(tmp_path)
    device = place(tmp_path / "fed", "d0")
    status = {"pid": os.getpid(), "time": time.time() - 5.0, "state": "running"}
    with only_one(device):
        assert silence(device, status) is None  # five seconds may be a long round
        full = os.statvfs_result((4096, 4096, 1000, 0, 0, 1000, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda path: full)
        assert f"for 5 s: the disk of {device} is full; make room" in str(silence(device, status))
        assert silence(device, status | {"time": time.time()}) is None
        # a status of the process before says nothing about this one, which has only just begun
        assert silence(device, status | {"pid": 1}) is None


def test_a_device_that_holds_logs_ever_less_often(tmp_path: Path) -> None:
    def tight() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))

    with Fleet.make(tmp_path / "fed", small_problem(3), 60, checkpoint_every=10) as fleet:
        fleet.start("d0", "d1")
        fleet.start("d2", preexec=tight)
        event = "checkpoint failed, holding"

        def seconds() -> list[float]:
            return [entry["seconds"] for entry in fleet.log("d2") if entry["event"] == event]

        wait_for(lambda: len(seconds()) >= 3)
        # after about 1, 3 and 7 s, not in every second
        told = seconds()
        assert told[0] == 0 and told[-1] >= 2 ** (len(told) - 1) - 1, told
        resource.prlimit(fleet.children["d2"].pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        fleet.join()


# --- names ------------------------------------------------------------------------------------------------------------


def test_ids_that_are_no_names_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    names = ["São Paulo", 'the "old" town', "north"]
    lines = [f'"{name.replace(chr(34), chr(34) * 2)}",{k % 3},{k}' for name in names for k in range(8)]
    (tmp_path / "rows.csv").write_text("site,x,y\n" + "\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "edges.csv").write_text("source,target\nSão Paulo,north\n", encoding="utf-8")
    options = ["--data", str(tmp_path / "rows.csv"), "--device", "site", "--target", "y", "--lam", "0.1"]
    code, out, _ = said(capsys, "init", str(tmp_path / "fed"), *options, "--graph", str(tmp_path / "edges.csv"))
    assert code == 0
    made = {member.id: member.name for member in load_manifest(tmp_path / "fed").members}
    assert made["north"] == "north" and made["São Paulo"].startswith("device-")
    assert f"devices/{made['São Paulo']} is 'São Paulo'" in out and "devices/north" not in out
    code, out, _ = said(capsys, "status", str(tmp_path / "fed"))
    assert code == 0 and re.search(rf"{made['São Paulo']} +São Paulo +never started", out)
    metrics = said(capsys, "status", str(tmp_path / "fed"), "--metrics")[1]
    assert f'fedkin_round{{device="{made["São Paulo"]}",id="São Paulo"}} 0' in metrics
    assert r'id="the \"old\" town"' in metrics and 'fedkin_round{device="north"} 0' in metrics
    errors = said(capsys, "collect", str(tmp_path / "fed"), "--out", str(tmp_path / "coef.csv"))[2]
    assert f"{made['São Paulo']} (São Paulo): its owner keeps it" in errors
    code, out, _ = said(capsys, "leave", str(tmp_path / "fed"), "São Paulo")  # the id will do, too
    assert code == 0 and out.startswith(f"{made['São Paulo']} has left: noted for north")


def test_labels_are_escaped() -> None:
    line = Line("device-0", "running", 1, 2, None, 0, (), 0, 0, 0, None, None, 'a\\b"c\nd')
    assert r'fedkin_round{device="device-0",id="a\\b\"c\nd"} 1' in prometheus([line]).splitlines()


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["peer", "central"])
def test_a_short_patience_is_honoured(tmp_path: Path, placement: str) -> None:
    """The first complaint would come after 40 seconds; nobody else runs."""
    changes: dict[str, Any] = {}
    if placement == "central":
        changes = {"placement": "central", "centre": f"tls/127.0.0.1:{free_ports(1)}", "compare_every": 0}
    write_small_federation(tmp_path, **changes)
    device = place(tmp_path / "fed", "d0" if placement == "peer" else "centre")
    waits = ["--give-up", "1", "--gather", "0", "--complain", "40"]
    done = subprocess.run(
        [sys.executable, "-m", "fedkin.federate.programs.run", str(device), *waits],
        preexec_fn=capped,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    seconds = re.search(r"for (\d+) s", done.stderr)
    assert seconds is not None and int(seconds[1]) < 20, done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["up", "--give-up", "nan"], "--give-up must be a number of seconds above 0, got nan"),
        (["up", "--give-up", "-1"], "--give-up must be a number of seconds above 0, got -1"),
        (["up", "--restarts", "-1"], "--restarts must be at least 0, got -1"),
        (["run", "--linger", "-1"], "--linger must be a number of seconds at least 0, got -1"),
        (["run", "--complain", "0"], "--complain must be a number of seconds above 0, got 0"),
        (["select", "--give-up", "0"], "--give-up must be a number of seconds above 0, got 0"),
    ],
)
def test_waits_that_are_no_times_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    write_small_federation(tmp_path)
    command, *rest = options
    directory = tmp_path / "fed" if command == "up" else place(tmp_path / "fed", "d0")
    code, _, errors = said(capsys, command, str(directory), *rest)
    assert code == 2 and errors == f"error: {words}"


def test_the_options_of_a_device_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, "run", "--help")
    for option in ("--first-pull", "--last-pull", "--complain", "--give-up", "--linger", "--gather", "--deadline"):
        assert option in out
