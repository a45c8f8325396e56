"""Shards on MPI ranks: the bits of one process, and a cut that is small."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federations import in_process, manifest_of, rows_of, small_problem
from fedkin.engine.directory import write_federation
from fedkin.engine.partition import small_cut
from fedkin.engine.security import make_authority

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def mpi_command(ranks: int, *arguments: str) -> list[str]:
    start = [str(MPIEXEC), "--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
    return [*start, sys.executable, "-m", "fedkin.engine.mpi", *arguments]


def mpi(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        mpi_command(ranks, *arguments), env=ENVIRONMENT, timeout=120, capture_output=True, text=True, check=False
    )


needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="mpiexec is not installed")


@needs_mpi
@pytest.mark.parametrize(("ranks", "gradient"), [(2, "plain"), (3, "saga")])
def test_ranks_have_the_bits_of_one_process(tmp_path: Path, ranks: int, gradient: str) -> None:
    pytest.importorskip("mpi4py")
    problem = small_problem(9)
    manifest = manifest_of(problem, 120, gradient=gradient)
    write_federation(tmp_path / "fed", manifest, rows_of(problem), make_authority("test"))
    done = mpi(ranks, str(tmp_path / "fed"), "--checkpoint-every", "50")
    assert done.returncode == 0, done.stderr
    expected = in_process(problem, manifest).gather("average")
    with np.load(tmp_path / "fed" / "mpi" / "theta.npz") as file:
        assert file["theta"].tobytes() == expected.tobytes()


@needs_mpi
def test_a_killed_job_continues(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    problem = small_problem(6)
    manifest = manifest_of(problem, 1500)
    write_federation(tmp_path / "fed", manifest, rows_of(problem), make_authority("test"))
    folder = tmp_path / "fed" / "mpi"
    command = mpi_command(2, str(tmp_path / "fed"), "--checkpoint-every", "100")
    job = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not list(folder.glob("rank-1-*.npz")):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.05)
    finally:
        job.terminate()
        job.wait(30)
    assert not (folder / "theta.npz").exists()
    # one rank may have died before it wrote its last state
    newest = max(folder.glob("rank-0-*.npz"), key=lambda path: int(path.stem.rpartition("-")[2]))
    if len(list(folder.glob("rank-0-*.npz"))) > 1:
        newest.unlink()
    done = mpi(2, str(tmp_path / "fed"), "--checkpoint-every", "100")
    assert done.returncode == 0, done.stderr
    with np.load(folder / "theta.npz") as file:
        assert file["theta"].tobytes() == in_process(problem, manifest).gather("average").tobytes()


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
