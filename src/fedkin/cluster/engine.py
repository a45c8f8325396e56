"""Define engines, which run work in this process or elsewhere, the argument ``on=``, and shards.

Shards are stateful objects, each in its own process or thread. All shards of a set run the same method at the same
time, and exchange arrays with their neighbours. If a shard is lost with its process or machine, all shards are restored
from their last saved states and repeat the calls made since then. The result is bitwise identical. States are saved in
a directory of any file system that `pyarrow.fs` supports: local, S3, GCS, HDFS.
"""

from __future__ import annotations

import io
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product
from typing import Any, TypeVar

import numpy as np
from scipy.sparse import coo_array, csr_array

from fedkin._base import Array, Index, check_whole, replacing
from fedkin._storage import place_of
from fedkin.errors import ParameterError, SolverError, argument, missing_dependency

#: Number of consecutive losses of a set of shards after which it is given up.
RESTARTS = 5


class LostError(Exception):
    """The process or machine of one or more shards has ended."""


class AbortedError(Exception):
    """Another shard has failed, so its message will not arrive."""


class Host:
    """The host of one shard: its inbox, and the object itself, which sends to its neighbours through the host."""

    def __init__(self, number: int) -> None:
        self.number, self._turn, self._aborted = number, 0, False
        self._arrived = threading.Condition()
        self._messages: dict[tuple[int, int], Array] = {}
        self._senders: Sequence[Callable[[int, int, Array], object]] = ()
        self._shard: Any = None

    def connect(self, senders: Sequence[Callable[[int, int, Array], object]]) -> None:
        """Set the functions that send ``(turn, number of the sender, array)`` to each shard."""
        self._senders = senders

    def prepare(self, load: Callable[[], object]) -> None:
        """Load what the shard will need, while its parts are on their way."""
        load()

    def make(self, factory: Callable[..., Any], parts: Sequence[object]) -> None:
        """Create the shard, ``factory(host, *parts)``."""
        self._shard = factory(self, *parts)

    def put(self, turn: int, sender: int, message: Array) -> None:
        """Receive a message from another shard."""
        with self._arrived:
            self._messages[turn, sender] = message
            self._arrived.notify()

    def abort(self) -> None:
        """End the waiting exchange."""
        with self._arrived:
            self._aborted = True
            self._arrived.notify()

    def exchange(self, messages: Mapping[int, Array]) -> Mapping[int, Array]:
        """Send an array to each neighbour, by number, and return theirs; all neighbours must do so, too."""
        self.post(messages)
        return self.collect(messages)

    def post(self, messages: Mapping[int, Array]) -> None:
        """Send an array to each neighbour; `collect` returns theirs."""
        self._turn += 1
        for number, message in messages.items():
            self._senders[number](self._turn, self.number, message)

    def collect(self, neighbours: Iterable[int]) -> Mapping[int, Array]:
        """Wait for the arrays of these neighbours."""
        wanted = [(self._turn, number) for number in neighbours]
        with self._arrived:
            self._arrived.wait_for(lambda: self._aborted or all(key in self._messages for key in wanted))
            if self._aborted:
                raise AbortedError
            return {key[1]: self._messages.pop(key) for key in wanted}

    def do(self, method: str, arguments: Sequence[object]) -> Any:
        """Call a method of the shard."""
        return getattr(self._shard, method)(*arguments)

    def save(self, root: str, name: str) -> None:
        """Write the state of the shard to a file of a file system, completely or not at all."""
        folder, held, arrays = place_of(root), io.BytesIO(), dict[str, Any](self._shard.state())
        np.savez(held, **arrays)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{name}.npz") as file, file.open("wb") as stream:
            stream.write(held.getbuffer())

    def restore(self, root: str, name: str) -> None:
        """Restore a saved state."""
        with (place_of(root) / f"{name}.npz").open("rb") as stream, np.load(io.BytesIO(stream.read())) as arrays:
            self._shard.restore(dict(arrays))


class Hosts(ABC):
    """Hosts started by an engine, and the calls of their methods."""

    @abstractmethod
    def run(self, method: str, arguments: Iterable[Sequence[object]]) -> list[Any]:
        """Call a method of each `Host` at the same time, each with its own arguments; may raise `LostError`."""

    @abstractmethod
    def close(self) -> None:
        """End them."""


class Shards:
    """A set of shards, as used by the caller.

    ``make(k)`` returns the factory and the arguments of shard ``k``, which is ``factory(host, *arguments)``. It is
    called again after a loss, and may then return the current state of the shard. ``storage`` is the address of a
    directory for `pyarrow.fs`; without one, a failure undoes all calls so far. ``prepare`` loads what shards need
    in every process while the first call of ``make`` runs here.
    """

    def __init__(
        self,
        start: Callable[[int], Hosts],
        make: Callable[[int], tuple[Callable[..., Any], Sequence[object]]],
        count: int,
        storage: str | None = None,
        prepare: Callable[[], object] = int,
    ) -> None:
        self.count, self._start, self._make, self._storage, self._prepare = count, start, make, storage, prepare
        self._name, self._saved, self._saves = uuid.uuid4().hex, "", 0
        self._calls: list[tuple[str, Sequence[Sequence[object]]]] = []
        #: Number of losses.
        self.lost = 0
        self._hosts: Hosts | None = None
        self._waiting = ThreadPoolExecutor(1)
        self._recover()

    def call(
        self, method: str, *shared: object, each: Sequence[Sequence[object]] | None = None, changes: bool = True
    ) -> list[Any]:
        """Call a method of every shard with ``shared`` arguments and ``each`` shard's own; return the results.

        A call that ``changes`` nothing is not repeated after a loss.
        """
        arguments = [[*shared, *(each[k] if each else ())] for k in range(self.count)]
        call = "do", [(method, given) for given in arguments]
        task = self._waiting.submit(self._surely, *call)
        try:
            return task.result()
        finally:  # also after Ctrl-C all shards have run the same calls
            if task.exception() is None and changes:
                self._calls.append(call)

    def save(self) -> None:
        """Save the state of every shard, if there is storage."""
        if self._storage is None:
            return
        self._saves += 1
        names = [f"{self._name}-{self._saves % 2}-{k}" for k in range(self.count)]
        self._surely("save", [(self._storage, name) for name in names])
        self._saved, self._calls = f"{self._name}-{self._saves % 2}", []

    def remake(self, make: Callable[[int], tuple[Callable[..., Any], Sequence[object]]]) -> None:
        """Create other shards on the same hosts."""
        self._make, self._calls, self._saved = make, [], ""
        assert self._hosts is not None
        try:
            self._hosts.run("make", map(make, range(self.count)))
        except LostError:
            self.lost += 1
            self._recover()

    def renewed(self) -> None:
        """Discard calls and saved states: ``make`` now returns shards in their current state."""
        self._calls, self._saved = [], ""

    def close(self) -> None:
        """End all shards and remove their saved states."""
        self._waiting.shutdown()
        if self._hosts is not None:
            self._hosts.close()
        if self._storage is not None:
            for turn, k in product((0, 1), range(self.count)):
                (place_of(self._storage) / f"{self._name}-{turn}-{k}.npz").unlink(missing_ok=True)

    def _surely(self, what: str, arguments: Sequence[Sequence[object]]) -> list[Any]:
        for _ in range(RESTARTS):
            assert self._hosts is not None
            try:
                return self._hosts.run(what, arguments)
            except LostError:
                self.lost += 1
                self._recover()
        raise SolverError(f"shards were lost {RESTARTS} times in a row: look at the logs of the cluster")

    def _started(self) -> Hosts:
        self._hosts = hosts = self._start(self.count)
        hosts.run("prepare", [(self._prepare,)] * self.count)
        return hosts

    def _recover(self) -> None:
        """Make all shards, and restore their states."""
        for _ in range(RESTARTS):
            if self._hosts is not None:
                self._hosts.close()
            try:
                with ThreadPoolExecutor(1) as starting:
                    started = starting.submit(self._started)
                    first = self._make(0)
                hosts = started.result()
                hosts.run("make", chain([first], map(self._make, range(1, self.count))))
                if self._saved:
                    assert self._storage is not None
                    hosts.run("restore", [(self._storage, f"{self._saved}-{k}") for k in range(self.count)])
                for what, arguments in self._calls:
                    hosts.run(what, arguments)
                return
            except LostError:
                self.lost += 1
        raise SolverError(f"shards were lost {RESTARTS} times in a row: look at the logs of the cluster")


def partition(n_sites: int, edges: Index, shards: int) -> Index:
    """Assign each site to a shard with METIS on the graph with ``edges (E, 2)``; return numbers ``(V,)``.

    Every shard has a site.

    Examples
    --------
    >>> labels = partition(4, np.array([[1, 0], [3, 2]]), 2)
    >>> bool(labels[0] == labels[1] != labels[2] == labels[3])
    True
    """
    even = np.arange(n_sites, dtype=np.int64) * shards // max(n_sites, 1)
    if shards == 1 or not len(edges):
        return even
    try:
        import pymetis
    except ImportError:
        raise missing_dependency("pymetis", "splitting a graph into shards", extra="ray") from None
    i, j = edges.T
    ones = np.ones(2 * i.size, dtype=np.int8)
    pattern = csr_array(coo_array((ones, (np.r_[i, j], np.r_[j, i])), shape=(n_sites, n_sites)))
    adjacency = pymetis.CSRAdjacency(pattern.indptr, pattern.indices)
    labels = np.asarray(pymetis.part_graph(shards, adjacency=adjacency)[1], dtype=np.int64)
    return labels if np.bincount(labels, minlength=shards).all() else even


S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Cut:
    """One of the shards of a graph: its sites and edges, and the sites that other shards need or host.

    An edge between two shards is stored in both, and counts for the shard of its first site. ``ends (E, 2)``, ``give``
    and ``take`` (by shard) are positions in ``sites``.
    """

    sites: Index  # hosted ones first
    hosted: int
    edges: Index  # counted ones first
    counted: int
    ends: Index
    give: dict[int, Index]
    take: dict[int, Index]

    @property
    def border(self) -> Index:
        """Positions of the sites that several shards know."""
        return np.unique(np.concatenate([*self.give.values(), *self.take.values(), self.edges[:0]]))


def cut_graph(n_sites: int, edges: Index, shards: int, order: Index | None = None) -> list[Cut]:
    """Cut a graph into shards, which host their sites in this ``order (V,)``."""
    shards = min(shards, n_sites)
    labels, order = partition(n_sites, edges, shards), np.arange(n_sites) if order is None else order
    return [_cut(edges, labels, order, k) for k in range(shards)]


def _cut(edges: Index, labels: Index, order: Index, k: int) -> Cut:
    own = order[labels[order] == k]
    first, second = (labels[edges] == k).T
    chosen = np.concatenate([np.flatnonzero(first), np.flatnonzero(second & ~first)])
    place = np.full(labels.size, own.size)
    place[own] = np.arange(own.size)
    # counted edges first, and neighbouring sites near each other in memory
    near = place[edges[chosen]]
    chosen = chosen[np.lexsort((near.min(axis=1), near.max(axis=1), ~first[chosen]))]
    ends = edges[chosen]
    crossing = ends[labels[ends[:, 0]] != labels[ends[:, 1]]]
    here = labels[crossing] == k
    mine, theirs = crossing[here], crossing[~here]
    others = np.unique(theirs)
    place[others] = own.size + np.arange(others.size)
    shard_of = labels[theirs]
    give = {int(r): place[np.unique(mine[shard_of == r])] for r in np.unique(shard_of)}
    take = {r: place[others[labels[others] == r]] for r in give}
    return Cut(np.concatenate([own, others]), own.size, chosen, int(first.sum()), place[ends], give, take)


class Engine(ABC):
    """The base class of engines, which run work in this process or elsewhere.

    Parameters
    ----------
    workers : int
        Number of shards, and of simultaneous pieces of work.
    storage : str, optional
        Directory for the states of shards: a path, or an address that `pyarrow.fs` supports, such as
        ``s3://bucket/directory``. All machines must reach it.
    save_every : int
        Iterations, rounds or sweeps between two saved states: the most that the loss of a machine costs.
    """

    def __init__(self, workers: int, storage: str | None = None, save_every: int = 50) -> None:
        check_whole("workers", workers, least=1)
        check_whole("save_every", save_every, least=1)
        self.workers, self.storage, self.save_every = workers, storage, save_every

    @abstractmethod
    def map(self, function: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
        """Yield ``function(item)`` in the order of the items."""

    @abstractmethod
    def _start(self, count: int) -> Hosts:
        """Start hosts."""

    def shards(
        self,
        make: Callable[[int], tuple[Callable[..., Any], Sequence[object]]],
        count: int,
        prepare: Callable[[], object] = int,
    ) -> Shards:
        """Start a set of shards; see `Shards`."""
        return Shards(self._start, make, count, self.storage, prepare)


#: Where to run: ``"local"``, ``"ray"``, ``"ray://host:port"``, or an engine.
On = str | Engine


class LocalEngine(Engine):
    """The engine of this process: pieces run one after another, shards in threads.

    Examples
    --------
    >>> list(LocalEngine(1).map(abs, [-1, 2]))
    [1, 2]
    """

    def map(self, function: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
        return map(function, items)

    def _start(self, count: int) -> Hosts:
        return _Threads(count)


class _Threads(Hosts):
    """Hosts in threads of this process."""

    def __init__(self, count: int) -> None:
        self._hosts, self._pool = [Host(k) for k in range(count)], ThreadPoolExecutor(count)
        for host in self._hosts:
            host.connect([other.put for other in self._hosts])

    def run(self, method: str, arguments: Iterable[Sequence[object]]) -> list[Any]:
        def one(host: Host, given: Sequence[object]) -> Any:
            try:
                return getattr(host, method)(*given)
            except Exception as error:
                for other in self._hosts:
                    other.abort()
                return error

        waiting = [self._pool.submit(one, *each) for each in zip(self._hosts, arguments, strict=True)]
        return gathered([task.result() for task in waiting])

    def close(self) -> None:
        self._pool.shutdown()


def gathered(found: list[Any]) -> list[Any]:
    """Return the results, or raise the first error among them that is not a consequence of others."""
    errors = [one for one in found if isinstance(one, Exception)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, AbortedError))
    return found


_running: ContextVar[Engine | None] = ContextVar("running", default=None)


@contextmanager
def running_on(on: On | None) -> Iterator[None]:
    """Run code on an engine: the final solve of a fit, its rounds of Fed-ADMM, passes over files, held-out splits.

    None keeps the current engine.

    Examples
    --------
    >>> with running_on(LocalEngine(2)):
    ...     running_engine().workers
    2
    """
    before = _running.set(_running.get() if on is None else engine_of(on))
    try:
        yield
    finally:
        _running.reset(before)


def running_engine() -> Engine | None:
    """Return the engine of `running_on`; None outside of it, for work in this process."""
    return _running.get()


def chained(function: Callable[[S], Iterable[T]], items: Sequence[S]) -> Iterator[T]:
    """Yield the results of ``function(item)`` for each item in turn; on the engine of `running_on`, each item is a
    task.

    Examples
    --------
    >>> list(chained(range, [1, 3]))
    [0, 0, 1, 2]
    """
    engine = _running.get()
    each = map(function, items) if engine is None or len(items) < 2 else engine.map(partial(_listed, function), items)
    return chain.from_iterable(each)


def _listed(function: Callable[[S], Iterable[T]], item: S) -> list[T]:
    return list(function(item))


@cache
def _ray_engine(address: str | None) -> Engine:
    from fedkin.cluster.ray import RayEngine

    return RayEngine(address)


def engine_of(on: On) -> Engine | None:
    """Return the engine that ``on`` names; None for ``"local"``.

    Examples
    --------
    >>> engine_of("local") is None
    True
    """
    if isinstance(on, Engine):
        return on
    if on == "local":
        return None
    if on == "ray" or (isinstance(on, str) and on.startswith("ray://")):
        return _ray_engine(None if on == "ray" else on)
    ways = ", ".join(argument("on", way) for way in ("local", "ray", "ray://host:port"))
    raise ParameterError(f"{argument('on', on)} is not an engine; choose one of {ways}, or give a RayEngine")
