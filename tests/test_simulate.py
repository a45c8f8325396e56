"""``fedkin federation simulate``: a process per site, started again when it dies, stopped, continued."""

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

import heart
from builders import small_problem
from federations import reference, whole_job, write_job
from fedkin._base import is_locked
from fedkin.cli import main, running
from fedkin.cli import simulate as simulating
from fedkin.cli.console import StopRequested
from fedkin.federate import site_plan
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

    return wait_for(arrived)


def test_a_cut_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_wish_to_stop_after_all_is_done_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with 3 although all sites were done."""
    whole = running._supervise

    def then_asked(*arguments: Any, **options: Any) -> None:
        whole(*arguments, **options)
        raise StopRequested

    monkeypatch.setattr(running, "_supervise", then_asked)
    assert main(command_of(tmp_path, 2, 20)) == 0
    assert theta_in(tmp_path, 2).tobytes() == expected(2, 20).tobytes()
    said = capsys.readouterr().out
    assert re.search(
        r"^Relative gap [\d.e-]+: (not converged after 20 rounds|converged at about round \d+)\.$", said, re.M
    )
    assert re.search(r"^next: fedkin predict \S+/model rows\.csv$", said, re.M)


def test_what_dies_is_started_again_and_stop_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(tmp_path, 3, 1_000_000)
    with started(tmp_path, command) as process:
        victim = until_round(tmp_path, capsys, 20, 3)["d1"]
        os.kill(victim["pid"], signal.SIGKILL)

        def again() -> Any:
            line = lines_of(tmp_path, capsys).get("d1", victim)
            return line if line["pid"] not in (None, victim["pid"]) and line["state"] == "running" else None

        line = wait_for(again)
        assert line["restarts"] == 1 and line["round"] >= victim["round"]
        assert main(["site", "status", str(tmp_path / "trial"), "--metrics"]) == 0
        metrics = capsys.readouterr().out
        assert 'fedkin_restarts_total{site="d1"} 1' in metrics and 'fedkin_restarts_total{site="d0"} 0' in metrics
        assert main(command) == 2
        assert "already running: " in capsys.readouterr().err
        assert main(["site", "stop", str(tmp_path / "trial")]) == 0
        assert "d0, d1, d2" in capsys.readouterr().out
        assert process.wait(PATIENCE) == 3  # not that of a run that has finished
        assert not any(is_locked(tmp_path / "trial" / "sites" / f"d{u}" / "lock") for u in range(3))


def test_the_live_view_on_a_small_terminal(tmp_path: Path) -> None:
    """A terminal of 8 lines and 4 sites: no line is lost without a word, and the end is the whole table."""
    command = command_of(tmp_path, 4, 150, select={"level": 0.05})
    code, text = on_terminal([sys.executable, "-m", "fedkin", *command], columns=100, lines=8)
    assert code == 0, text
    assert re.search(r"and 2 more +\d+ to \d+", text), text
    assert "never started" not in text and "Traceback" not in text
    assert re.search(r"[0-9] edges? dropped by edge tests", text), text
    tail = text[text.rindex("waits for") :]
    assert re.findall(r"(d\d) +done +150/150", tail) == [f"d{u}" for u in range(4)]


CONTRACT = """name = "ward"
loss = "linear"
{penalty}
[features]
age = {{unit = "years", low = 18, high = 110, mean = 60, scale = 10}}
dose = {{mean = 0, scale = 1}}
[target]
{target}
"""
FUSED = 'method = "fused"\npenalty = "l2"'
DIED = 'name = "died"\nkind = "category"\nlevels = ["no", "yes"]'


def write_tables(folder: Path, rows: int = 120) -> None:
    """Two kinds of sites, which answer to ``dose`` in two ways, in one table."""
    rng = np.random.default_rng(3)
    lines = ["site,age,dose,days,died"]
    for k, name in enumerate(heart.SITES):
        age, dose = rng.uniform(30, 90, rows).round(2), rng.normal(size=rows).round(4)
        eta = 0.03 * (age - 60) + (1.5 if k < 2 else -1.5) * dose
        died = np.where(rng.random(rows) < 1 / (1 + np.exp(-eta)), "yes", "no")
        days = (20 + 2 * eta + rng.normal(size=rows)).round(4)
        lines += [f"{name},{a},{d},{y},{c}" for a, d, y, c in zip(age, dose, days, died, strict=True)]
    (folder / "all.csv").write_text("\n".join(lines) + "\n")


def simulate(folder: Path, contract: str, *more: str) -> int:
    (folder / "ward.toml").write_text(contract)
    table, out = str(folder / "all.csv"), str(folder / "trial")
    words = ["federation", "simulate", str(folder / "ward.toml"), "--data", table, "--site", "site", "--out", out]
    return main([*words, *more])


def test_rounds_without_lam_are_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tables(tmp_path)
    contract = CONTRACT.format(penalty=FUSED, target='name = "days"')
    assert simulate(tmp_path, contract, "--by", "run") == 2
    assert "--lam" in capsys.readouterr().err and not (tmp_path / "trial").exists()


def test_questions_are_asked_until_the_gap_is_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(tmp_path)
    contract = CONTRACT.format(penalty=FUSED, target=DIED).replace('"linear"', '"logistic"')
    assert simulate(tmp_path, contract) == 0
    said = capsys.readouterr().out
    asked = [int(number) for number in re.findall(r"4 sites answered query (\d+)", said)]
    assert asked == list(range(2, asked[-1] + 1)) and asked[-1] >= 3
    assert "No model yet" not in said
    model = load(tmp_path / "trial" / "model")
    assert model.status == "converged" and model.fused.gap < 1e-6 and model.origin["rounds"] == asked[-1]
    assert len(list((tmp_path / "trial" / "organiser" / "summaries").iterdir())) == 4 * asked[-1]
