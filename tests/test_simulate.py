"""``fedkin federation simulate``: a process per site, watched, started again when it dies, stopped, continued."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_problem
from federations import reference, whole_job, write_job
from fedkin.cli import main, running
from fedkin.cli import simulate as simulating
from fedkin.cli.console import StopRequested
from fedkin.data import write_csv
from fedkin.federate import Site, site_plan
from fedkin.federate.status import is_running
from fedkin.fitting import load
from processes import PATIENCE, capped, free_ports, on_terminal, wait_for

pytest.importorskip("zenoh")
pytestmark = pytest.mark.processes


def command_of(folder: Path, sites: int, rounds: int, **changes: Any) -> list[str]:
    """The command."""
    words = write_job(folder, small_problem(sites), **{"rounds": rounds, "batch_size": 4, "rho": 0.5} | changes)
    where = ["--out", str(folder / "trial"), "--port", str(free_ports(sites + 1))]
    return ["federation", "simulate", *words, "--by", "run", *where]


def expected(sites: int, rounds: int) -> np.ndarray:
    """The parameters that the sites must end with."""
    problem = small_problem(sites)
    return reference(problem, whole_job(problem, rounds=rounds, batch_size=4, rho=0.5))


def theta_in(folder: Path, sites: int) -> np.ndarray:
    return np.stack([load(folder / "trial" / "sites" / f"d{u}" / "model").coef.ravel() for u in range(sites)])


@contextmanager
def started(folder: Path, words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The command in the background; whatever happens, nothing of it stays behind."""
    command = [sys.executable, "-m", "fedkin", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=capped)
    try:
        yield process
    finally:
        if (folder / "trial" / "sites").is_dir():
            main(["site", "stop", str(folder / "trial")])
        try:
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()


def lines_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    if main(["site", "status", str(folder / "trial"), "--json"]):
        return {}
    return {line["name"]: line for line in json.loads(capsys.readouterr().out)["sites"]}


def until_round(folder: Path, capsys: pytest.CaptureFixture[str], t: int, n: int) -> dict[str, dict[str, Any]]:
    def arrived() -> Any:
        lines = lines_of(folder, capsys)
        return lines if len(lines) == n and all(line["round"] >= t for line in lines.values()) else None

    return wait_for(arrived, 90)


def test_a_simulation_from_a_table_to_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(tmp_path, 4, 60)
    assert main(command) == 0
    out = capsys.readouterr().out
    assert re.findall(r"(d\d) +done +60/60", out) == ["d0", "d1", "d2", "d3"]
    assert theta_in(tmp_path, 4).tobytes() == expected(4, 60).tobytes()
    assert not list((tmp_path / "trial").rglob("*.csv.tmp")) and not list((tmp_path / "trial" / "sites").glob("*.csv"))
    # the same command finds that all is done; another contract needs another place
    assert main(command) == 0
    (tmp_path / "small.toml").write_text((tmp_path / "small.toml").read_text().replace("rounds = 60", "rounds = 61"))
    assert main(command) == 2
    assert "is not the simulation of this contract" in capsys.readouterr().err


def test_sites_join_in_other_processes_and_a_cut_is_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a site's command in the process of the simulation")

    for name in ("join", "accept"):
        monkeypatch.setattr(Site, name, here)
    monkeypatch.setattr(simulating, "run_all", lambda *arguments, **options: [])
    command = [*command_of(tmp_path, 3, 20), "--lam", "0.02"]
    assert main(command) == 0
    sites = tmp_path / "trial" / "sites"
    keys = [(sites / f"d{u}" / "site.key").read_bytes() for u in range(3)]
    assert len(set(keys)) == 3 and site_plan(sites / "d0").lam == 0.02
    # cut short while certificates were carried to the sites: nobody makes another key
    (sites / "d1" / "admit.json").unlink()
    (sites / "d2" / "order.json").unlink()
    assert main(command) == 0
    assert [(sites / f"d{u}" / "site.key").read_bytes() for u in range(3)] == keys
    assert [site_plan(sites / f"d{u}").lam for u in range(3)] == [0.02] * 3
    assert not list(sites.glob("*.csv"))


def test_a_wish_to_stop_after_all_is_done_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with 3 although all sites were done."""
    whole = running._supervise

    def then_asked(*arguments: Any, **options: Any) -> None:
        whole(*arguments, **options)
        raise StopRequested

    monkeypatch.setattr(running, "_supervise", then_asked)
    assert main(command_of(tmp_path, 2, 20)) == 0
    assert theta_in(tmp_path, 2).tobytes() == expected(2, 20).tobytes()


@pytest.mark.parametrize("placement", ["central", "replicas"])
def test_sites_that_come_and_go(tmp_path: Path, placement: str) -> None:
    command = command_of(tmp_path, 3, 40, placement=placement, compare_every=0)
    assert main(command) == 0
    assert np.isfinite(theta_in(tmp_path, 3)).all()


def test_edges_are_tested_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(tmp_path, 3, 20, select={"level": 0.05})
    assert main(command) == 0
    assert (tmp_path / "trial" / "sites" / "d0" / "selection.json").exists()
    assert "dropped by edge tests" in capsys.readouterr().err


def test_what_dies_is_started_again_and_stop_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(tmp_path, 3, 1_000_000)
    with started(tmp_path, command) as process:
        victim = until_round(tmp_path, capsys, 20, 3)["d1"]
        os.kill(victim["pid"], signal.SIGKILL)

        def again() -> Any:
            line = lines_of(tmp_path, capsys).get("d1", victim)
            return line if line["pid"] not in (None, victim["pid"]) and line["state"] == "running" else None

        line = wait_for(again, 60)
        assert line["restarts"] == 1 and line["round"] >= victim["round"]
        assert main(["site", "status", str(tmp_path / "trial"), "--metrics"]) == 0
        metrics = capsys.readouterr().out
        assert 'fedkin_restarts_total{site="d1"} 1' in metrics and 'fedkin_restarts_total{site="d0"} 0' in metrics
        assert main(command) == 2
        assert "already running: " in capsys.readouterr().err
        assert main(["site", "stop", str(tmp_path / "trial")]) == 0
        assert "d0, d1, d2" in capsys.readouterr().out
        assert process.wait(PATIENCE) == 3  # not that of a run that has finished
        assert not any(is_running(tmp_path / "trial" / "sites" / f"d{u}") for u in range(3))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_sites_and_the_same_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    command = command_of(tmp_path, 2, 1500)
    with started(tmp_path, command) as process:
        until_round(tmp_path, capsys, 3, 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130 and "stopping the sites" in errors
        assert {line["state"] for line in lines_of(tmp_path, capsys).values()} == {"stopped"}
    assert main(command) == 0
    assert theta_in(tmp_path, 2).tobytes() == expected(2, 1500).tobytes()


def test_the_live_view_on_a_small_terminal(tmp_path: Path) -> None:
    """A terminal of 10 lines and 6 sites: no line is lost without a word, and the end is the whole table."""
    command = command_of(tmp_path, 6, 150)
    code, text = on_terminal([sys.executable, "-m", "fedkin", *command], columns=100, lines=10)
    assert code == 0, text
    assert re.search(r"and 3 more +\d+ to \d+", text), text
    assert "never started" not in text and "Traceback" not in text
    tail = text[text.rindex("waits for") :]
    assert re.findall(r"(d\d) +done +150/150", tail) == [f"d{u}" for u in range(6)]


def test_rounds_need_the_fused_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(tmp_path, 2, 5)
    contract = tmp_path / "small.toml"
    contract.write_text(contract.read_text().replace('method = "fused"', 'method = "kin"'))
    assert main(command) == 2
    said = capsys.readouterr().err
    assert 'small.toml: method = "kin" takes one summary' in said and 'set method = "fused" in the contract' in said
    assert not (tmp_path / "trial").exists()


def test_what_cannot_be_simulated_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(tmp_path, 2, 5)
    assert main([*command, "--site", "ward"]) == 2
    assert "has no column 'ward'" in capsys.readouterr().err
    assert main([*command, "--port", "65535"]) == 2
    assert "--port must be from 1 to" in capsys.readouterr().err
    rows = [[f"s{k // 4}", 1.0 * k, 2.0, 3.0, 4.0] for k in range(4 * 60)]
    write_csv(tmp_path / "rows.csv", ["site", "x0", "x1", "x2", "y"], rows)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "60 sites" in error and "at most 50" in error and "fedkin fit" in error
    assert not (tmp_path / "trial").exists()
