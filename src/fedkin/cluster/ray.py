"""Run work on a Ray cluster: pieces of work are tasks, shards are actors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from fedkin.cluster.engine import Engine, Host, Hosts, LostError, gathered
from fedkin.errors import missing_dependency

try:
    import ray
    from ray.exceptions import RayActorError, RayTaskError
except ImportError:
    raise missing_dependency("ray", "running on a cluster", extra="ray") from None

S = TypeVar("S")
T = TypeVar("T")
#: Queued tasks per worker, and seconds that actors may take to start before the cores are counted again.
QUEUED, START = 2, 120.0


class RayEngine(Engine):
    """The engine of a Ray cluster.

    Parameters
    ----------
    address : str, optional
        ``"ray://host:port"`` or ``"host:port"``. By default, it uses the cluster that this process is connected to, the
        one on this machine, or a new one with all its cores.
    workers : int, optional
        Number of shards; by default the cores of the cluster.
    storage, save_every
        As in `Engine`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        storage: str | None = None,
        save_every: int = 50,
    ) -> None:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        super().__init__(_cores() if workers is None else workers, storage, save_every)

    def map(self, function: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
        task: Any = ray.remote(_applied).options(max_retries=5)
        shared, waiting = ray.put(function), deque[Any]()
        for item in items:
            waiting.append(task.remote(shared, item))
            if len(waiting) >= QUEUED * self.workers:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())

    def _start(self, count: int) -> Hosts:
        return _Actors(count)


def _applied(function: Callable[[S], T], item: S) -> T:
    return function(item)


def _cores() -> int:
    resources: Any = ray.cluster_resources  # not annotated in Ray
    return max(1, int(resources().get("CPU", 1)))


def _result(reference: Any) -> Any:
    """Return the value of a reference; raise errors of Fedkin unwrapped."""
    try:
        return ray.get(reference)
    except RayActorError as lost:
        raise LostError(str(lost)) from None
    except RayTaskError as error:
        raise error.cause from None


class _Actors(Hosts):
    """Hosts in actors, with one core each if the cluster has enough."""

    def __init__(self, count: int) -> None:
        # after the loss of a machine shards share the remaining cores
        share = 1.0 / math.ceil(count / _cores())
        kind: Any = ray.remote(Host)
        kind = kind.options(num_cpus=share, max_concurrency=2, scheduling_strategy="SPREAD")
        self._actors: list[Any] = [kind.remote(k) for k in range(count)]
        try:
            self.run("connect", [([_Sender(actor) for actor in self._actors],)] * count, START)
        except LostError:
            self.close()
            raise

    def run(self, method: str, arguments: Iterable[Sequence[object]], timeout: float | None = None) -> list[Any]:
        calls = zip(self._actors, arguments, strict=True)
        references = [getattr(actor, method).remote(*given) for actor, given in calls]
        left, found = list(references), dict[Any, Any]()
        while left:
            done, left = ray.wait(left, timeout=timeout)
            if not done:
                raise LostError("actors do not start")
            for reference in done:
                try:
                    found[reference] = _result(reference)
                except LostError:
                    raise
                except Exception as error:
                    found[reference] = error
                    for actor in self._actors:
                        actor.abort.remote()
        return gathered([found[reference] for reference in references])

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


class _Sender:
    """Sends messages to the inbox of an actor; large arrays travel by reference, from machine to machine."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __call__(self, turn: int, number: int, message: object) -> None:
        self._actor.put.remote(turn, number, message)
