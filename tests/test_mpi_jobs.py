"""``fedkin mpi run`` as a job: it ends as a whole, runs once, and says early what cannot work."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders import small_problem
from federations import write_job
from fedkin.cli import main
from fedkin.errors import DataError
from fedkin.federate import check_no_job, job_folder
from fedkin.federate.mpi import only_job
from processes import PATIENCE, capped, wait_for

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.processes
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or not Path("/proc/self/cmdline").exists(), reason="needs mpiexec and a list of processes"
)


def job_of(folder: Path, rounds: int, **changes: Any) -> list[str]:
    """Arguments of a job whose rounds take long."""
    words = write_job(folder, small_problem(4), rounds=rounds, batch_size=4, **changes)
    return [*words, "--out", str(folder / "model")]


def processes_of(directory: Path) -> list[int]:
    """Numbers of the processes whose command line names this directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(directory).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def long_job(directory: Path, words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """``fedkin mpi run`` on two ranks that have begun; whatever happens, nothing of it stays behind."""
    command = [sys.executable, "-m", "fedkin.cli", "mpi", "run", *words, "-n", "2", "--checkpoint-every", "50"]
    job = subprocess.Popen(command, preexec_fn=capped, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: list(directory.glob("model.job/rank-1-*.db")) or job.poll() is not None)
        assert job.poll() is None
        yield job
    finally:
        for number in processes_of(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        job.communicate()


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_command_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("mpi4py")
    directory, words = tmp_path, job_of(tmp_path, 10_000_000)
    with long_job(directory, words) as job:
        assert len(processes_of(directory)) >= 4  # the command, mpiexec and two ranks
        job.send_signal(number)
        _, errors = job.communicate(timeout=PATIENCE)
        assert job.returncode == 130, errors
        assert "stopping the ranks; the same command goes on from the last checkpoint" in errors
        assert processes_of(directory) == []


@needs_mpi
def test_a_second_job_on_the_same_directory_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also without the command; but a lock of processes that were killed does not stand in the way."""
    pytest.importorskip("mpi4py")
    directory, words = tmp_path, job_of(tmp_path, 10_000_000)
    again = ["mpi", "run", *words, "-n", "1", "--fresh"]
    with long_job(directory, words):
        assert main(again) == 2
        assert "is in use by another job (rank 0 is process" in capfd.readouterr().err
        # a launcher of one's own calls the ranks without the command
        command = [str(MPIEXEC), "--oversubscribe", "--allow-run-as-root", "-n", "1", sys.executable, "-m"]
        command += ["fedkin.cli.mpi_rank", *words, "--fresh"]
        direct = subprocess.run(
            command, preexec_fn=capped, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert direct.returncode == 2 and "is in use by another job" in direct.stderr
        assert list(directory.glob("model.job/rank-1-of-2.db")) and not list(directory.glob("model.job/rank-*-of-1*"))
    assert (directory / "model.job" / "lock").exists()

    def free() -> bool:
        with contextlib.suppress(DataError):
            check_no_job(directory / "model")
            return True
        return False

    wait_for(free)  # processes that were killed need a moment to end


def test_the_lock_is_free_after_its_holder(tmp_path: Path) -> None:
    folder = job_folder(tmp_path / "model")
    folder.mkdir()
    with only_job(folder):
        with pytest.raises(DataError, match=f"rank 0 is process {os.getpid()} on "):
            check_no_job(tmp_path / "model")
        with pytest.raises(DataError, match="in use by another job"), only_job(folder):
            pass
    check_no_job(tmp_path / "model")


@needs_mpi
def test_a_placement_that_ranks_do_not_have_is_noted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mpi4py")
    words = job_of(tmp_path, 5, placement="replicas", compare_every=0)
    assert main(["mpi", "run", *words, "-n", "1"]) == 0
    errors = capfd.readouterr().err
    assert "placement replicas is not used: on ranks all sites are there" in errors
