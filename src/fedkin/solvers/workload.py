"""How much work an iteration is, and the threads that share it or run side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

from fedkin.objective import DeviceTerms, FusedObjective, QuadraticTerms

T = TypeVar("T")

#: Nanoseconds of one thread for an edge's coordinate, and for an entry of a Gram matrix, in compiled iterations.
EDGE_COST, GRAM_COST = 1.0, 0.3
#: Threads share an iteration that takes longer than this many nanoseconds; below, problems run side by side.
THREADING_PAYS = 1e6


def sizes(objective: FusedObjective, terms: DeviceTerms) -> tuple[int, int]:
    """Numbers of edge duals and of entries of the Gram matrices."""
    p = terms.n_params
    isotropic = isinstance(terms, QuadraticTerms) and terms.isotropic
    return objective.graph.n_edges * p, terms.n_devices * (p if isotropic else p * p)


def iteration_is_shared(objective: FusedObjective, terms: DeviceTerms) -> bool:
    """Whether a compiled iteration is long enough for several threads to share it."""
    return iteration_work(objective, terms) > THREADING_PAYS


def iteration_work(objective: FusedObjective, terms: DeviceTerms) -> float:
    """Nanoseconds of one thread for a compiled iteration, roughly."""
    edges, entries = sizes(objective, terms)
    return EDGE_COST * edges + GRAM_COST * entries


def run_side_by_side(tasks: Sequence[Callable[[], T]], n_threads: int) -> list[T]:
    """The results of the tasks, in their order; when one fails or Ctrl-C comes, those that wait are dropped."""
    if n_threads == 1 or len(tasks) == 1:
        return [task() for task in tasks]
    with ThreadPoolExecutor(min(n_threads, len(tasks))) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Crew:
    """Threads that work on parts of a range, the calling thread among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size - 1) if size > 1 else None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def split(self, n: int) -> list[tuple[int, int]]:
        """``size`` consecutive ranges that cover ``0 .. n-1``."""
        return list(pairwise(n * k // self.size for k in range(self.size + 1)))

    def run(self, work: Callable[[int, int, int], Any], ranges: Sequence[tuple[int, int]]) -> list[Any]:
        """``work(thread, lo, hi)`` on every range; all are done on return, also after an interruption."""
        if self._pool is None or len(ranges) == 1:
            return [work(0, *ranges[0])]
        others = [self._pool.submit(work, t, *ranges[t]) for t in range(1, len(ranges))]
        try:
            first = work(0, *ranges[0])
        finally:
            done = [other.result() for other in others]
        return [first, *done]
