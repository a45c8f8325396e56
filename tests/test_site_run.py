"""``fedkin site run``: what is wrong is named with its cure before anything is written, and not tried again in vain."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cvxpy as cp
import numpy as np
import pytest

from builders import small_problem
from federations import join_site, make_heart, make_sites, plan_of, small_sites
from fedkin.cli import main, site_run
from fedkin.errors import SolverError
from fedkin.federate import Journal, Participant, Site
from fedkin.federate.program import Result, only_one
from fedkin.federate.records import read_status
from fedkin.fitting import load
from fleet import Fleet
from memory_network import MemoryNetwork
from processes import PATIENCE, capped

pytest.importorskip("zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.clocks]


@dataclass(frozen=True)
class Ended:
    """How a site ended: its exit code, and what it wrote to standard error."""

    returncode: int
    stderr: str


def run(place: Path, *options: str) -> Ended:
    """What ``fedkin site run`` becomes, in this process."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = site_run.run([str(place), "--give-up", "2", *options])
    return Ended(code, said.getvalue())


def refused(place: Path, *words: str, code: int = 2) -> str:
    """What a site says that does not start: one line, no traceback, the same in its log if it has one."""
    ended = run(place)
    assert ended.returncode == code, ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr
    return ended.stderr


def lonely(folder: Path, **rounds: Any) -> Path:
    """A site without neighbours, which runs alone."""
    problem = small_problem(1)
    make_sites(folder, problem, **{"rounds": 5, **rounds})
    return folder / "d0"


# --- files ------------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    """Leave only the first half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("site.key", Path.unlink),
        ("site.key", cut),
        ("admit.json", cut),
        ("invite.json", cut),
        ("site.toml", cut),
        ("rows.npz", Path.unlink),
        ("rows.npz", cut),
        ("state.db", lambda path: path.write_bytes(b"PK\x03\x04 and then the power went")),
    ],
)
def test_a_damaged_file_is_named_and_not_tried_again(tmp_path: Path, file: str, damage: Any) -> None:
    small_sites(tmp_path)
    damage(tmp_path / "d0" / file)
    refused(tmp_path / "d0", file)


def test_a_site_that_is_not_admitted_does_not_run(tmp_path: Path) -> None:
    small_sites(tmp_path)
    (tmp_path / "d0" / "admit.json").unlink()
    refused(tmp_path / "d0", "not admitted yet", "d0.request")
    assert not (tmp_path / "d0" / "lock").exists() and not (tmp_path / "d0" / "log.jsonl").exists()


def test_a_site_whose_certificate_has_ended_does_not_start_and_is_told_the_cure(tmp_path: Path) -> None:
    heart = small_sites(tmp_path)
    place, long_ago = tmp_path / "d0", datetime.now(UTC) - timedelta(days=100)
    Site.read(place).accept(heart.admit(place / "d0.request", again=True).path)
    admitted = heart.admit(place / "d0.request", again=True, now=long_ago).path
    (place / "admit.json").write_bytes(admitted.read_bytes())
    refused(place, "the certificate of d0 ended on", "fedkin site renew")
    assert not (place / "log.jsonl").exists() and not (place / "lock").exists()


def test_a_site_runs_once(tmp_path: Path) -> None:
    small_sites(tmp_path)
    with only_one(tmp_path / "d0"):
        refused(tmp_path / "d0", "in use by another process")


def test_the_organisers_directory_is_not_that_of_a_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heart = small_sites(tmp_path)
    refused(heart.directory, "is the organiser's directory")
    refused(tmp_path / "nowhere", "is not a site's directory")
    assert main(["site", "status", str(tmp_path / "d0" / "notices")]) == 2
    assert "is not a site's directory, and has none in it" in capsys.readouterr().err


def test_a_directory_that_others_may_write_is_refused_before_it_is_written_to(tmp_path: Path) -> None:
    small_sites(tmp_path)
    (tmp_path / "d0").chmod(0o777)
    refused(tmp_path / "d0", "others may write")
    assert not (tmp_path / "d0" / "lock").exists() and not (tmp_path / "d0" / "log.jsonl").exists()
    (tmp_path / "d0").chmod(0o700)
    (tmp_path / "d0" / "rows.npz").chmod(0o644)
    refused(tmp_path / "d0", "rows.npz", "others may read")


def test_a_ball_that_the_contract_states_is_a_constraint(tmp_path: Path) -> None:
    own = lonely(tmp_path, rounds=2000, radius=0.5)
    assert run(own).returncode == 0
    rows, found = Site.read(own).rows(), load(own / "model").coef.ravel()
    theta = cp.Variable(found.size)
    least = cp.Problem(cp.Minimize(cp.sum_squares(rows.X @ theta - rows.y)), [cp.norm(theta) <= 0.5])
    least.solve(solver="CLARABEL", **{f"tol_{name}": 1e-12 for name in ("gap_abs", "gap_rel", "feas")})
    assert abs(np.linalg.norm(found) - 0.5) < 1e-6 and np.abs(found - theta.value).max() < 1e-5


def test_who_ends_at_the_border_of_a_ball_by_default_has_diverged(tmp_path: Path) -> None:
    plan = plan_of(small_problem(1), 5, None, radius=0.01)
    with closing(MemoryNetwork()) as network, pytest.raises(SolverError, match="site 'd0' diverged to the boundary"):
        Participant(plan, network.join(), Journal("d0")).run()


def test_a_site_alone_ends_with_its_own_estimate(tmp_path: Path) -> None:
    """As systemd would run it, in a process of its own."""
    own = lonely(tmp_path, rounds=2000)
    command = [sys.executable, "-m", "fedkin.cli.site_run", str(own)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, preexec_fn=capped, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    rows = Site.read(own).rows()
    expected = np.linalg.lstsq(rows.X, rows.y, rcond=None)[0]
    assert np.abs(load(own / "model").coef.ravel() - expected).max() < 1e-6


def test_a_run_that_ends_says_so_before_the_model_is_written_and_names_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, write, seen = lonely(tmp_path), site_run.write_model, []

    def slow(result: Result) -> None:
        seen.append(read_status(own))
        write(result)

    monkeypatch.setattr(site_run, "write_model", slow)
    assert run(own, "--echo").returncode == 0
    assert [(one.state, one.round, one.rounds) for one in seen] == [("finished", 5, 5)]
    assert capsys.readouterr().out.startswith(
        f"{own / 'model'} has the model of d0; fedkin predict {own / 'model'} TABLE"
    )


def test_a_table_that_grows_is_followed(tmp_path: Path) -> None:
    own = lonely(tmp_path, rounds=4000)
    joined, rng = Site.read(own).rows(), np.random.default_rng(1)
    X = np.vstack([joined.X, rng.normal(size=(60, 3))])
    y = np.concatenate([joined.y, X[joined.n_samples :].sum(axis=1) + rng.normal(size=60)])
    lines = [",".join(map(repr, [*x, target])) for x, target in zip(X.tolist(), y.tolist(), strict=True)]
    table = tmp_path / "grows.csv"
    table.write_text("\n".join(["x0,x1,x2,y", *lines]) + "\n")
    os.utime(table, (1e9, 1e9))  # complete since long ago
    ended = run(own, "--follow", str(table), "--echo")
    assert ended.returncode == 0 and "rows arrived" in ended.stderr, ended.stderr
    model = load(own / "model")
    assert np.abs(model.coef.ravel() - np.linalg.lstsq(X, y, rcond=None)[0]).max() < 1e-6
    assert model.n_samples.tolist() == [72]
    told = json.loads((own / "status.json").read_text())
    assert told["arrived"] == 60 and told["new_loss"] > 0 and told["changed"] is None


def test_what_is_done_stays_done_and_gives_the_same_model(tmp_path: Path) -> None:
    own = lonely(tmp_path, rounds=30, batch_size=4)
    assert run(own).returncode == 0
    before = load(own / "model").coef
    shutil.rmtree(own / "model")
    assert run(own).returncode == 0
    assert load(own / "model").coef.tobytes() == before.tobytes()


def test_another_order_begins_anew_and_is_not_mixed_up(tmp_path: Path) -> None:
    problem = small_problem(1)
    heart = make_sites(tmp_path, problem, rounds=30, batch_size=4)
    own = tmp_path / "d0"
    assert run(own).returncode == 0
    ((path, _),) = heart.order(rounds=40)
    Site.read(own).accept(path)
    refused(own, "was written by another run, or by another revision of this one")
    (own / "state.db").unlink()
    assert run(own).returncode == 0
    assert load(own / "model").fused.n_iter == 40


# --- who is out -------------------------------------------------------------------------------------------------------


def test_a_site_that_has_left_says_so(tmp_path: Path) -> None:
    small_sites(tmp_path)
    Site.read(tmp_path / "d0").leave()
    refused(tmp_path / "d0", "d0 has left or was expelled permanently")


def test_a_forged_notice_is_refused_while_the_site_goes_on(tmp_path: Path) -> None:
    forger = make_heart(tmp_path / "forger", small_problem(3), rounds=5)
    notice = forger.expel("d1")
    with Fleet.make(tmp_path / "fed", small_problem(3), 1_000_000) as fleet:
        fleet.start()
        fleet.wait_for_round("d0", 10)
        shutil.copy(notice, fleet.place("d0") / "notices" / notice.name)
        fleet.wait_for_event("d0", "file refused")
        fleet.wait_for_round("d0", fleet.round("d0") + 100)
        assert not fleet.events("d0", "edge dropped")


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "words", "code"),
    [
        ("192.0.2.1:7447", "is not an address of this machine", 2),
        ("no-such-name.invalid:7447", "cannot be resolved on this machine", 4),
    ],
)
def test_addresses_that_cannot_be_are_told_as_such(tmp_path: Path, listen: str, words: str, code: int) -> None:
    small_sites(tmp_path)
    ended = run(tmp_path / "d0", "--listen", listen)
    assert ended.returncode == code and words in ended.stderr, ended.stderr


def test_a_port_in_use_is_told_as_such(tmp_path: Path) -> None:
    heart = small_sites(tmp_path)
    port = int(heart.members[0].endpoint.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        refused(tmp_path / "d0", "another process uses the port", code=4)


def test_neighbours_without_any_address_are_named(tmp_path: Path) -> None:
    problem = small_problem(2)
    heart = make_heart(tmp_path, problem, ports=["", ""], rounds=5)
    join_site(heart, problem, "d0")
    refused(tmp_path / "d0", "neither d0 nor d1 has an address", "needs host and port of one of them")


# --- waits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["peer", "replicas"])
def test_a_short_patience_is_honoured_and_the_neighbour_named(tmp_path: Path, placement: str) -> None:
    changes = {} if placement == "peer" else {"compare_every": 0}
    small_sites(tmp_path, 2, placement=placement, **changes)
    refused(tmp_path / "d1", "from d0 (it is down: start it, then this site)", code=4)
    status = json.loads((tmp_path / "d1" / "status.json").read_text())
    assert status["state"] == "cannot go on" and "d0" in status["why"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["run", "--give-up", "0"], "--give-up must be a number of seconds above 0, got 0"),
        (["run", "--linger", "-1"], "--linger must be a number of seconds at least 0, got -1"),
        (["select", "--give-up", "nan"], "--give-up must be a number of seconds above 0, got nan"),
    ],
)
def test_waits_that_are_no_times_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    small_sites(tmp_path, 2)
    assert main(["site", options[0], str(tmp_path / "d0"), *options[1:]]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_not_tried_again(tmp_path: Path) -> None:
    small_sites(tmp_path)
    (tmp_path / "d0").chmod(0o500)
    try:
        refused(tmp_path / "d0", "cannot be written")
    finally:
        (tmp_path / "d0").chmod(0o700)


def test_edges_are_tested_by_the_sites_first(tmp_path: Path) -> None:
    heart = small_sites(tmp_path, 3, select={"level": 0.05})
    refused(tmp_path / "d0", "edges have not been tested yet; to test them: fedkin site select")
    command = [sys.executable, "-m", "fedkin", "site", "select", "--give-up", str(PATIENCE)]
    running = [subprocess.Popen([*command, str(tmp_path / f"d{u}")], preexec_fn=capped) for u in range(3)]
    try:
        assert [process.wait(PATIENCE) for process in running] == [0, 0, 0]
    finally:
        for process in running:
            process.kill()
            process.wait()
    chosen = [json.loads((tmp_path / f"d{u}" / "selection.json").read_text()) for u in range(3)]
    for i, j in heart.graph.edges.tolist():
        assert chosen[i]["p_values"][f"d{j}"] == chosen[j]["p_values"][f"d{i}"]
        assert (f"d{j}" in chosen[i]["dropped"]) == (f"d{i}" in chosen[j]["dropped"])
    assert chosen[0]["threshold"] == 0.05 / heart.graph.n_edges
