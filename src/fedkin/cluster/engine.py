"""Engines, which run work in this process or elsewhere, the argument ``on=``, and shards that take steps together.

Shards are objects with a state, each in a process or a thread of its own. All shards of a set run the same method at
the same time, and exchange arrays with their neighbours on the way. A shard that is lost with its process or machine is
made again, and so are all others: each from its last saved state, after which the calls since then are repeated. The
result is the same to the bit. Their states are in a directory of any file system that `pyarrow.fs` knows: local, S3,
GCS, HDFS.
"""

from __future__ import annotations

import io
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from scipy.sparse import coo_array, csr_array

from fedkin._base import Array, Index, check_whole
from fedkin.errors import DataError, ParameterError, SolverError, argument, missing_dependency


def file_system(address: str) -> tuple[Any, str]:
    """Return the file system and the path that an address such as ``s3://bucket/directory`` stands for."""
    try:
        from pyarrow import ArrowException, fs
    except ImportError:
        raise missing_dependency("pyarrow", f"storage at {address}", extra="parquet") from None
    try:
        place = address if "://" in address else str(Path(address).absolute())
        found: tuple[Any, str] = fs.FileSystem.from_uri(place)
    except (ArrowException, ValueError) as error:
        raise DataError(f"{address} is no address of a directory that pyarrow.fs knows: {error}") from None
    return found


def write_state(address: str, name: str, state: Mapping[str, Array]) -> None:
    """Write arrays to a file of that name, whole or not at all."""
    system, root = file_system(address)
    system.create_dir(root, recursive=True)
    held = io.BytesIO()
    arrays: dict[str, Any] = dict(state)
    np.savez(held, **arrays)
    with system.open_output_stream(f"{root}/{name}.part") as stream:
        stream.write(held.getbuffer())
    system.move(f"{root}/{name}.part", f"{root}/{name}.npz")


def read_state(address: str, name: str) -> dict[str, Array]:
    """Return the arrays of a file of that name."""
    system, root = file_system(address)
    with system.open_input_file(f"{root}/{name}.npz") as stream, np.load(io.BytesIO(stream.read())) as arrays:
        return dict(arrays)


def remove_states(address: str, names: Sequence[str]) -> None:
    """Remove the files of these names, where there are any."""
    from pyarrow import fs

    system, root = file_system(address)
    for name in names:
        path = f"{root}/{name}.npz"
        if system.get_file_info(path).type != fs.FileType.NotFound:
            system.delete_file(path)


#: A set of shards that is lost so often in a row, without a call that succeeds, is given up.
RESTARTS = 5


class Peers(Protocol):
    """How a shard reaches its neighbours."""

    def exchange(self, messages: Mapping[int, Array]) -> Mapping[int, Array]:
        """Send an array to each neighbour, by number, and return theirs; all neighbours must do so, too."""


class Hosted(Protocol):
    """What an object needs to be a shard, besides the methods that are called."""

    def state(self) -> dict[str, Array]:
        """Return everything that changes."""

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go back to a `state`."""


class LostError(Exception):
    """A process or a machine ended, and the shards with it."""


class AbortedError(Exception):
    """Another shard failed, so that there is nothing to wait for."""


class Host:
    """The place of one shard: its inbox, and the object itself."""

    def __init__(self, number: int) -> None:
        self.number, self._turn, self._aborted = number, 0, False
        self._arrived = threading.Condition()
        self._messages: dict[tuple[int, int], Array] = {}
        self._senders: Sequence[Callable[[int, int, Array], object]] = ()
        self._shard: Any = None

    def connect(self, senders: Sequence[Callable[[int, int, Array], object]]) -> None:
        """Learn how to send ``(turn, number of the sender, array)`` to each shard."""
        self._senders = senders

    def make(self, factory: Callable[..., Any], parts: Sequence[object]) -> None:
        """Make the shard, ``factory(peers, *parts)``."""
        self._shard = factory(self, *parts)

    def put(self, turn: int, sender: int, message: Array) -> None:
        """Take a message of another shard."""
        with self._arrived:
            self._messages[turn, sender] = message
            self._arrived.notify()

    def abort(self) -> None:
        """End the exchange that waits."""
        with self._arrived:
            self._aborted = True
            self._arrived.notify()

    def exchange(self, messages: Mapping[int, Array]) -> Mapping[int, Array]:
        """Send and receive, as `Peers` say."""
        self._turn += 1
        for number, message in messages.items():
            self._senders[number](self._turn, self.number, message)
        wanted = [(self._turn, number) for number in messages]
        with self._arrived:
            self._arrived.wait_for(lambda: self._aborted or all(key in self._messages for key in wanted))
            if self._aborted:
                raise AbortedError
            return {key[1]: self._messages.pop(key) for key in wanted}

    def do(self, method: str, arguments: Sequence[object]) -> Any:
        """Call a method of the shard."""
        return getattr(self._shard, method)(*arguments)

    def save(self, root: str, name: str) -> None:
        """Write the state of the shard to a directory of a file system."""
        write_state(root, name, self._shard.state())

    def restore(self, root: str, name: str) -> None:
        """Go back to a state that was saved."""
        self._shard.restore(read_state(root, name))


class Hosts(ABC):
    """Some hosts that an engine started, and how their methods are called."""

    @abstractmethod
    def run(self, method: str, arguments: Sequence[Sequence[object]]) -> list[Any]:
        """Call a method of each `Host` at the same time, each with its own arguments; may raise `LostError`."""

    @abstractmethod
    def close(self) -> None:
        """End them."""


class Shards:
    """A set of shards as their caller sees it.

    ``make(k)`` returns factory and arguments of shard ``k``, which is ``factory(peers, *arguments)``. It is called
    again after a loss and may then return what the shard has become. ``storage`` is an address of a directory for
    `pyarrow.fs`; without one a loss costs all calls since ``make``.
    """

    def __init__(
        self,
        start: Callable[[int], Hosts],
        make: Callable[[int], tuple[Callable[..., Any], Sequence[object]]],
        count: int,
        storage: str | None = None,
    ) -> None:
        self.count, self._start, self._make, self._storage = count, start, make, storage
        self._name, self._saved, self._saves = uuid.uuid4().hex, "", 0
        self._calls: list[tuple[str, Sequence[Sequence[object]]]] = []
        #: How often shards were lost.
        self.lost = 0
        self._hosts: Hosts | None = None
        self._recover()

    def call(
        self, method: str, *shared: object, each: Sequence[Sequence[object]] | None = None, changes: bool = True
    ) -> list[Any]:
        """Call a method of every shard with ``shared`` arguments and ``each`` shard's own; return what they return.

        A call that ``changes`` nothing is not repeated after a loss.
        """
        arguments = [[*shared, *(each[k] if each else ())] for k in range(self.count)]
        call = "do", [(method, given) for given in arguments]
        with ThreadPoolExecutor(1) as waiting:
            task = waiting.submit(self._surely, *call)
            try:
                return task.result()
            finally:  # also after Ctrl-C all shards have done the same calls
                if task.exception() is None and changes:
                    self._calls.append(call)

    def save(self) -> None:
        """Save the state of every shard, where there is a storage."""
        if self._storage is None:
            return
        self._saves += 1
        names = [f"{self._name}-{self._saves % 2}-{k}" for k in range(self.count)]
        self._surely("save", [(self._storage, name) for name in names])
        self._saved, self._calls = f"{self._name}-{self._saves % 2}", []

    def remake(self, make: Callable[[int], tuple[Callable[..., Any], Sequence[object]]]) -> None:
        """Make other shards in the same places."""
        self._make, self._calls, self._saved = make, [], ""
        self._surely("make", [make(k) for k in range(self.count)])

    def renewed(self) -> None:
        """Forget calls and saved states: from now on ``make`` makes the shards as they are."""
        self._calls, self._saved = [], ""

    def close(self) -> None:
        """End all shards and remove what they saved."""
        if self._hosts is not None:
            self._hosts.close()
        if self._storage is not None:
            remove_states(self._storage, [f"{self._name}-{turn}-{k}" for turn in (0, 1) for k in range(self.count)])

    def _surely(self, what: str, arguments: Sequence[Sequence[object]]) -> list[Any]:
        for _ in range(RESTARTS):
            assert self._hosts is not None
            try:
                return self._hosts.run(what, arguments)
            except LostError:
                self.lost += 1
                self._recover()
        raise SolverError(f"shards were lost {RESTARTS} times in a row: look at the logs of the cluster")

    def _recover(self) -> None:
        """Make all shards, and bring them to where they should be."""
        for _ in range(RESTARTS):
            if self._hosts is not None:
                self._hosts.close()
            try:
                self._hosts = hosts = self._start(self.count)
                hosts.run("make", [self._make(k) for k in range(self.count)])
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
    """Return the number of the shard of each site ``(V,)``, by METIS on the graph with ``edges (E, 2)``.

    Examples
    --------
    >>> labels = partition(4, np.array([[1, 0], [3, 2]]), 2)
    >>> bool(labels[0] == labels[1] != labels[2] == labels[3])
    True
    """
    if shards == 1 or not len(edges):
        return np.arange(n_sites, dtype=np.int64) * shards // max(n_sites, 1)
    try:
        import pymetis
    except ImportError:
        raise missing_dependency("pymetis", "cutting a graph into shards", extra="ray") from None
    i, j = edges.T
    ones = np.ones(2 * i.size, dtype=np.int8)
    pattern = csr_array(coo_array((ones, (np.r_[i, j], np.r_[j, i])), shape=(n_sites, n_sites)))
    adjacency = pymetis.CSRAdjacency(pattern.indptr, pattern.indices)
    return np.asarray(pymetis.part_graph(shards, adjacency=adjacency)[1], dtype=np.int64)


S = TypeVar("S")
T = TypeVar("T")


class Engine(ABC):
    """Where work runs.

    Parameters
    ----------
    workers : int
        Number of shards, and of pieces of work at the same time.
    storage : str, optional
        Directory for the states of shards: a path, or an address that `pyarrow.fs` knows, such as
        ``s3://bucket/directory``. All machines must reach it.
    save_every : int
        Iterations or rounds between two saved states, which is what the loss of a machine costs at most.
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

    def shards(self, make: Callable[[int], tuple[Callable[..., Any], Sequence[object]]], count: int) -> Shards:
        """Start a set of shards, see `Shards`."""
        return Shards(self._start, make, count, self.storage)


#: Where to run: ``"local"``, ``"ray"``, ``"ray://host:port"``, or an engine.
On = str | Engine


class LocalEngine(Engine):
    """This process: pieces one after another, shards in threads.

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

    def run(self, method: str, arguments: Sequence[Sequence[object]]) -> list[Any]:
        def one(host: Host, given: Sequence[object]) -> Any:
            try:
                return getattr(host, method)(*given)
            except Exception:
                for other in self._hosts:
                    other.abort()
                raise

        waiting = [self._pool.submit(one, *each) for each in zip(self._hosts, arguments, strict=True)]
        return gathered([task.result for task in waiting])

    def close(self) -> None:
        self._pool.shutdown()


def gathered(results: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return all results; of several errors the first one that is no consequence of others is raised."""
    found: list[Any] = []
    errors: list[Exception] = []
    for result in results:
        try:
            found.append(result())
        except Exception as error:
            errors.append(error)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, AbortedError))
    return found


_running: ContextVar[Engine | None] = ContextVar("running", default=None)


@contextmanager
def running_on(on: On) -> Iterator[None]:
    """Run what follows on an engine: the final solve of a fit, its rounds of Fed-ADMM, and passes over files.

    Examples
    --------
    >>> with running_on(LocalEngine(2)):
    ...     running_engine().workers
    2
    """
    before = _running.set(engine_of(on))
    try:
        yield
    finally:
        _running.reset(before)


def running_engine() -> Engine | None:
    """Return the engine of `running_on`; None outside of it, where nothing is shared out."""
    return _running.get()


@cache
def _ray_engine(address: str | None) -> Engine:
    from fedkin.cluster.ray import RayEngine

    return RayEngine(address)


def engine_of(on: On) -> Engine | None:
    """Return the engine that ``on`` names; None for ``"local"``, where nothing is shared out.

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
    raise ParameterError(f"{argument('on', on)} is no place to run; choose one of {ways}, or give a RayEngine")
