"""The choice of lam between devices: the curves and the choice of one process, with only thetas travelling."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_problem
from federations import in_threads
from fedkin.admm import Settings, fed_admm
from fedkin.cli import main
from fedkin.data import Federation
from fedkin.errors import DataError, ParameterError
from fedkin.federate import (
    Faults,
    Journal,
    Manifest,
    MemoryNetwork,
    Patience,
    TuneSettings,
    choose,
    device_parts,
    load_manifest,
    make_authority,
    make_manifest,
    read_curve,
    read_result,
    write_federation,
)
from fedkin.federate.programs.overview import holder
from fedkin.federate.tuning.curves import Curve, write_curve
from fedkin.federate.tuning.tuner import Tuner, flood_rounds
from fedkin.graph import Graph
from fedkin.objective import Problem
from fedkin.solvers import cross_validate_lam, lam_max, lattice
from fedkin.solvers.crossvalidation import cut_folds
from processes import capped, free_ports

pytestmark = pytest.mark.timeout(180)
QUICK = Patience(first_pull=0.1, last_pull=0.5, complain=1.0, give_up=60.0, linger=5.0)


def noisy_problem(v: int = 5, loss: str = "linear", penalty: str = "l1", weighted: bool = False) -> Problem:
    """Two groups, so much noise that neither end of the grid is best, and devices of different sizes."""
    rng = np.random.default_rng(4)
    names = [f"d{u}" for u in range(v)]
    data = {}
    for u, name in enumerate(names):
        X = rng.normal(size=(20 + 3 * u, 3))
        eta = X @ (np.array([1.0, -0.5, 0.3]) * (1.0 if u < v / 2 else -1.0))
        y = (rng.random(eta.size) < 1 / (1 + np.exp(-eta))) if loss == "logistic" else eta + rng.normal(size=eta.size)
        data[name] = (X, y.astype(float))
    base = small_problem(v).graph
    weights = rng.uniform(0.5, 2.0, base.n_edges) if weighted else None
    graph = Graph.from_indices(names, base.edges, weights)
    return Problem(Federation(data), graph, loss, penalty, lam=0.02)


def manifest_for(problem: Problem, rounds: int = 50, batch_size: int | None = 5, **options: Any) -> Manifest:
    first = free_ports(problem.n_devices)
    places = [f"tls/127.0.0.1:{first + u}" for u in range(problem.n_devices)]
    return make_manifest(problem, rounds, Settings(batch_size=batch_size), places, **options)


def tuned(
    problem: Problem, manifest: Manifest, settings: TuneSettings, faults: Faults | None = None
) -> dict[int, tuple[Any, Any]]:
    """All devices in threads, to the end: their grids and held-out losses."""
    network, rows, found = MemoryNetwork(faults), device_parts(problem), {}

    def one(u: int) -> None:
        tuner = Tuner(manifest, u, rows[u], settings, network.join(), Journal(str(u)), patience=QUICK)
        found[u] = tuner.run()
        tuner.linger()

    in_threads(one, problem.n_devices, 60)
    network.close()
    assert len(found) == problem.n_devices
    return found


def in_process(problem: Problem, manifest: Manifest, settings: TuneSettings, lams: Any) -> Any:
    """Held-out losses ``(V, folds, m)``: each fold and level with `fed_admm` on its own, the folds of `Federation`."""
    fold_of = problem.federation.folds(settings.folds, settings.seed)
    fold_of[(problem.federation.n_samples < 2)[problem.federation.device_index]] = -1
    losses = np.full((problem.n_devices, settings.folds, len(lams)), np.nan)
    rho = 4.0 * manifest.rho  # planned for mini-batches; without noise four times as much is right
    for fold in np.unique(fold_of[fold_of >= 0]).tolist():
        train = replace(problem, federation=problem.federation.take(fold_of != fold))
        held_out = cut_folds(problem, fold_of, [fold])[0]
        for k, lam in enumerate(lams):
            theta = fed_admm(train.with_lam(float(lam)), settings.rounds, rho=rho, backend="numpy").theta
            losses[held_out.seen, fold, k] = held_out.held_out.values(theta[held_out.seen])
    return losses


@pytest.mark.parametrize(
    ("loss", "penalty", "weighted"), [("linear", "l1", False), ("linear", "l2", True), ("logistic", "linf", False)]
)
def test_devices_have_the_curves_of_fed_admm_to_the_bit(loss: str, penalty: str, weighted: bool) -> None:
    problem = noisy_problem(4, loss, penalty, weighted)
    manifest, settings = manifest_for(problem), TuneSettings(n_lams=4, folds=3, rounds=120, seed=2)
    found = tuned(problem, manifest, settings)
    lams = found[0][0]
    assert all(own.tobytes() == lams.tobytes() for own, _ in found.values())
    curves = np.stack([found[u][1] for u in range(4)])
    assert curves.tobytes() == in_process(problem, manifest, settings, lams).tobytes()


@pytest.mark.parametrize(("penalty", "norm"), [("l1", np.inf), ("l2", 2), ("linf", 1)])
def test_the_grid_begins_above_lam_max_where_the_electrical_flow_says(penalty: str, norm: float) -> None:
    problem = noisy_problem(5, penalty=penalty, weighted=True)
    lams = tuned(problem, manifest_for(problem), TuneSettings(n_lams=7, folds=2, rounds=300))[3][0]
    # duals that hold all devices at the common minimiser: the shortest solution of D'y = -g
    A, b = problem.terms.hessians(np.zeros((5, 3))), -problem.terms.gradients(np.zeros((5, 3)))
    common = np.linalg.solve(A.sum(axis=0), b.sum(axis=0))
    D = np.zeros((problem.graph.n_edges, 5))
    for e, (i, j) in enumerate(problem.graph.edges):
        D[e, i], D[e, j] = 1.0, -1.0
    flow = np.linalg.pinv(D.T) @ -(A @ common - b)
    top = (np.linalg.norm(flow, norm, axis=1) / problem.graph.weights).max() / 5
    assert lams.tobytes() == lattice(top, 7, 1e-3).tobytes()
    assert lam_max(problem) <= top <= lams[0]


def test_loss_duplication_and_reordering_do_not_change_a_bit() -> None:
    problem = noisy_problem(4)
    manifest, settings = manifest_for(problem), TuneSettings(n_lams=3, folds=2, rounds=30)
    good = tuned(problem, manifest, settings)
    bad = tuned(problem, manifest, settings, Faults(loss=0.1, duplication=0.1, delay=0.004))
    assert all(good[u][1].tobytes() == bad[u][1].tobytes() for u in range(4))


class Crash(Exception):
    """Stands for SIGKILL: nothing is written on the way out."""


def test_a_device_that_dies_in_any_stage_catches_up(tmp_path: Path) -> None:
    problem = noisy_problem(4)
    manifest, settings = manifest_for(problem), TuneSettings(n_lams=3, folds=2, rounds=60)
    good = tuned(problem, manifest, settings)
    stages = 60 + flood_rounds(manifest, 0)
    crashes = {1: [stages + 45, stages + 1, 61, 60, 25, 3], 2: [stages + 59, stages, 30]}
    network, rows, found = MemoryNetwork(), device_parts(problem), {}

    def live(u: int) -> None:
        def tick(tuner: Tuner) -> None:
            if crashes.get(u) and tuner.done >= crashes[u][-1]:
                crashes[u].pop()
                raise Crash

        while u not in found:
            transport, state = network.join(), tmp_path / f"{u}.npz"
            try:
                options = {"checkpoint": state, "patience": QUICK, "tick": tick}
                tuner = Tuner(manifest, u, rows[u], settings, transport, Journal(str(u)), **options)
                curve = tuner.run()
                tuner.linger()
                found[u] = curve
            except Crash:
                transport.close()

    in_threads(live, 4)
    network.close()
    assert crashes == {1: [], 2: []}
    for u in range(4):
        assert found[u][0].tobytes() == good[u][0].tobytes()
        assert found[u][1].tobytes() == good[u][1].tobytes()


def test_devices_that_were_told_something_else_do_not_understand_each_other() -> None:
    manifest = manifest_for(noisy_problem(3))
    settings = TuneSettings()
    runs = {
        settings.run_bytes(manifest),
        replace(settings, seed=1).run_bytes(manifest),
        replace(settings, lams=(0.1, 0.01)).run_bytes(manifest),
        settings.run_bytes(manifest.with_lam(0.5)),
        manifest.run_bytes,
        manifest.with_lam(0.5).run_bytes,
    }
    assert len(runs) == 6


def test_components_have_levels_in_common_and_a_lonely_device_has_none() -> None:
    whole = noisy_problem(6)
    names = whole.federation.devices
    edges = [("d1", "d0"), ("d3", "d2"), ("d4", "d3"), ("d4", "d2")]
    problem = replace(whole, graph=Graph(names, edges))
    settings = TuneSettings(n_lams=5, folds=2, rounds=150)
    manifest = manifest_for(problem)
    assert [flood_rounds(manifest, u) for u in range(6)] == [2, 2, 2, 2, 2, 0]
    found = tuned(problem, manifest, settings)
    assert found[0][0].tobytes() == found[1][0].tobytes()
    assert found[2][0].tobytes() == found[3][0].tobytes() == found[4][0].tobytes()
    assert found[5][0].size == 0
    curves = {u: Curve(lams, losses.mean(axis=0), 2) for u, (lams, losses) in found.items()}
    choice = choose(curves, {}, one_se=False)
    exact = cross_validate_lam(problem, choice.lams, folds=2, backend="numpy", tol=1e-8)
    assert abs(int((choice.lams == choice.lam).argmax()) - int((exact.lams == exact.lam).argmax())) <= 1


@pytest.mark.parametrize("top", [0.07, 0.1, 0.5, 1.0, 3.0e-7])
def test_lattices_of_different_tops_are_one_lattice(top: float) -> None:
    lams = lattice(top, 4, 1e-3)
    assert top <= lams[0] * (1 + 1e-8) and lams[1] < top
    assert np.allclose(np.log10(lams), np.round(np.log10(lams)), atol=1e-9)


def test_the_rules_are_those_of_cross_validation_in_one_process(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lams = np.array([1.0, 0.5, 0.25, 0.125])
    losses = rng.normal(size=(6, 5, 4)) * 0.3 + np.array([1.2, 1.0, 1.01, 1.3])
    scores = losses.mean(axis=0)
    mean, error = scores.mean(axis=0), scores.std(axis=0, ddof=1) / np.sqrt(5)
    for u in range(6):
        (tmp_path / f"d{u}").mkdir()
        write_curve(tmp_path / f"d{u}", b"01234567", lams, losses[u], by_fold=False)
    curves = {u: read_curve(tmp_path / f"d{u}", b"01234567", by_fold=False) for u in range(6)}
    best = choose(curves, {}, one_se=False)  # type: ignore[arg-type]
    assert best.lam == lams[mean.argmin()]
    assert np.allclose(best.mean, mean, rtol=1e-14)
    # one number per level and the number of folds, nothing else, leaves a device
    assert set(json.loads((tmp_path / "d0" / "tuning.json").read_text())) == {"run", "lams", "folds", "curve"}
    assert ((tmp_path / "d0" / "tuning.json").stat().st_mode & 0o777) == 0o600
    assert read_curve(tmp_path / "d0", b"76543210", by_fold=False) is None
    assert read_curve(tmp_path / "d0", b"01234567", by_fold=True) is None
    losses[2, 3] = np.nan  # a device with few rows
    scores = np.nanmean(losses, axis=0)
    mean, error = scores.mean(axis=0), scores.std(axis=0, ddof=1) / np.sqrt(5)
    for u in range(6):
        write_curve(tmp_path / f"d{u}", b"01234567", lams, losses[u], by_fold=True)
    curves = {u: read_curve(tmp_path / f"d{u}", b"01234567", by_fold=True) for u in range(6)}
    within = choose(curves, {}, one_se=True)  # type: ignore[arg-type]
    assert np.allclose(within.mean, mean, rtol=1e-14)
    assert within.lam == lams[np.flatnonzero(mean <= mean.min() + error[mean.argmin()])[0]]
    (tmp_path / "d0" / "tuning.json").write_text(
        '{"run": "3031323334353637", "lams": [1.0], "folds": 2, "curve": [1, 2]}'
    )
    with pytest.raises(DataError, match="a number for each level"):
        read_curve(tmp_path / "d0", b"01234567", by_fold=False)
    with pytest.raises(DataError, match="no device shares a curve"):
        choose({}, {}, one_se=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"lams": ()},
        {"lams": (0.1, 0.2)},
        {"lams": (0.1, -1.0)},
        {"n_lams": 1},
        {"ratio": 1.0},
        {"folds": 1},
        {"rounds": 0},
        {"caution": 0.0},
        {"seed": -1},
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        TuneSettings(**changes)


# --- real processes ---


def federation(folder: Path, problem: Problem, **options: Any) -> Manifest:
    manifest = manifest_for(problem, **options)
    write_federation(folder, manifest, device_parts(problem), make_authority("test"), share_result=True)
    return manifest


def tune(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedkin.cli", "peer", "tune", str(folder), "--give-up", "60", "--json", *options]
    return subprocess.Popen(command, preexec_fn=capped, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes], folder: Path, seconds: float = 120) -> tuple[dict[str, Any], str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.communicate()
        main(["peer", "stop", str(folder)])
    assert process.returncode == 0, err.decode()
    return json.loads(out), err.decode()


@pytest.mark.processes
def test_five_processes_choose_the_lam_of_one_and_sign_it(tmp_path: Path) -> None:
    pytest.importorskip("zenoh")
    problem, folder = noisy_problem(5), tmp_path / "fed"
    before = federation(folder, problem)
    owner = folder / "devices" / "d2" / "device.json"
    owner.write_text(owner.read_text().replace("true", "false"))
    told, notes = ended(tune(folder, "--n-lams", "6", "--rounds", "200"), folder)
    assert "d2: its owner keeps its curve" in notes
    assert (told["devices"], list(told["kept"])) == (4, ["d2"])
    settings = TuneSettings(n_lams=6, rounds=200)
    expected = in_process(problem, before, settings, told["lams"])
    run = settings.run_bytes(before)
    for u in range(5):
        curve = read_curve(folder / "devices" / f"d{u}", run, by_fold=False)
        assert curve is not None
        assert curve.lams.tolist() == told["lams"]
        assert curve.mean.tobytes() == expected[u].mean(axis=0).tobytes()
    sharing = expected[[0, 1, 3, 4]].mean(axis=(0, 1))
    assert told["lam"] == told["lams"][int(sharing.argmin())]
    # the exact solver on all devices chooses the same level or the one beside it
    exact = cross_validate_lam(problem, told["lams"], backend="numpy", tol=1e-8)
    assert abs(told["lams"].index(told["lam"]) - exact.lams.tolist().index(exact.lam)) <= 1
    assert np.abs(expected.mean(axis=(0, 1)) - exact.mean).max() < 1e-4
    # and the rounds are those of that lam
    after = load_manifest(folder)
    assert (after.lam, after.revision, after.run) == (told["lam"], 1, before.run)
    assert load_manifest(folder / "devices" / "d4").shared() == after.shared()
    assert not list(folder.glob("devices/*/tuning-state.*"))
    assert main(["peer", "up", str(folder), "--give-up", "60"]) == 0
    theta = np.stack([read_result(folder / "devices" / f"d{u}") for u in range(5)])
    assert theta.tobytes() == fed_admm(problem.with_lam(told["lam"]), 50, 5, backend="numpy").theta.tobytes()


@pytest.mark.processes
def test_a_process_killed_while_tuning_is_started_again_and_nothing_changes(tmp_path: Path) -> None:
    pytest.importorskip("zenoh")
    problem, folder = noisy_problem(3), tmp_path / "fed"
    before = federation(folder, problem)
    lams, rounds = "0.1,0.02,0.004", 3000
    process = tune(folder, "--lams", lams, "--rounds", str(rounds), "--folds", "2", "--no-sign")
    place, deadline = folder / "devices" / "d1", time.monotonic() + 60
    log, killed = place / "tuning-state.db-wal", set[int]()
    try:
        while len(killed) < 2 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            begun = log.exists() and log.stat().st_size > 50_000
            pid = holder(place / "lock") if begun else None
            if pid is not None and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
    except BaseException:
        process.terminate()  # it stops its devices first
        process.communicate(timeout=30)
        raise
    told, _ = ended(process, folder)
    assert len(killed) == 2
    started = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    assert sum(entry["event"] == "started" and entry["round"] > 0 for entry in started) >= 1
    settings = TuneSettings((0.1, 0.02, 0.004), rounds=rounds, folds=2)
    expected = in_process(problem, before, settings, settings.lams)
    for u in range(3):
        curve = read_curve(folder / "devices" / f"d{u}", settings.run_bytes(before), by_fold=False)
        assert curve is not None and curve.mean.tobytes() == expected[u].mean(axis=0).tobytes()
    assert load_manifest(folder) == before
    assert told["signed"] is False


@pytest.mark.processes
def test_edges_that_were_dropped_by_selection_are_dropped_here_too(tmp_path: Path) -> None:
    pytest.importorskip("zenoh")
    problem, folder = small_problem(4), tmp_path / "fed"
    before = federation(folder, problem, select={"level": 0.05, "variance": "model"})
    told, _ = ended(tune(folder, "--lams", "0.3,0.03", "--rounds", "1500", "--folds", "2", "--one-se"), folder)
    dropped = {
        tuple(sorted((name, other)))
        for name in problem.federation.devices
        for other in json.loads((folder / "devices" / name / "selection.json").read_text())["dropped"]
    }
    assert 0 < len(dropped) < problem.graph.n_edges
    kept = [pair for pair in problem.graph.edge_ids() if tuple(sorted(pair)) not in dropped]
    rest = replace(problem, graph=Graph(problem.federation.devices, kept))
    settings = TuneSettings((0.3, 0.03), rounds=1500, folds=2)
    curve = read_curve(folder / "devices" / "d0", settings.run_bytes(before), by_fold=True)
    assert curve is not None and curve.by_fold is not None
    exact = cross_validate_lam(rest, settings.lams, folds=2, backend="numpy", tol=1e-9)
    assert np.abs(np.array(told["mean"]) - exact.mean).max() < 1e-4
    assert told["error"] is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lams", "a,b"], "--lams must be numbers"),
        (["--lams", "0.1,-2"], "different positive numbers"),
        (["--folds", "1"], "folds must be at least 2"),
        (["--ca-key", "nowhere.pem"], "nowhere.pem cannot be read (No such file or directory)"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    federation(tmp_path / "fed", noisy_problem(3))
    assert main(["peer", "tune", str(tmp_path / "fed"), *options]) == 2
    assert words in capsys.readouterr().err


def test_it_is_too_late_after_the_first_round_or_a_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fed"
    federation(folder, noisy_problem(3))
    (folder / "devices" / "d1" / "state.db").write_bytes(b"")
    assert main(["peer", "tune", str(folder)]) == 2
    assert "has begun its rounds" in capsys.readouterr().err
    (folder / "devices" / "d1" / "state.db").unlink()
    assert main(["peer", "leave", str(folder), "d0"]) == 0
    assert main(["peer", "tune", str(folder)]) == 2
    assert "has left for good" in capsys.readouterr().err


def test_nobody_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fed"
    manifest = federation(folder, noisy_problem(3))
    settings = TuneSettings((0.1, 0.01))
    for u in range(3):
        place = folder / "devices" / f"d{u}"
        write_curve(place, settings.run_bytes(manifest), np.array(settings.lams), np.ones((5, 2)), by_fold=False)
        (place / "device.json").write_text(json.dumps({"device": f"d{u}", "share_result": False}))
    assert main(["peer", "tune", str(folder), "--lams", "0.1,0.01"]) == 2
    assert "no device shares a curve" in capsys.readouterr().err
    assert load_manifest(folder) == manifest
