"""How much work an iteration is, and how many threads it is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fedkin.problem import FusedObjective
from fedkin.terms import DeviceTerms, QuadraticTerms

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
