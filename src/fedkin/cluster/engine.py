"""The seam: what an engine does, the engine of this process, and the argument ``on=``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

from fedkin._base import check_whole
from fedkin.cluster.shards import AbortedError, Host, Hosts, Shards
from fedkin.errors import ParameterError, argument

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
