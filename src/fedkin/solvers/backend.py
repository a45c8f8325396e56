"""What carries out the iterations (numpy or compiled kernels), how much work they are, and the threads that share it.

numpy is the reference. The kernels take the same steps several times faster, but loading them takes about half a
second, and compiling those that a problem needs, once per machine, about 10. So ``"auto"`` uses them when they are
loaded already, or when the work ahead is worth the wait; a first small fit never waits for a compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from fedkin._base import tracked
from fedkin.core import FusedObjective, QuadraticTerms, SiteTerms
from fedkin.errors import ParameterError
from fedkin.solvers.kernels import cached

Backend = Literal["auto", "numpy", "numba"]
Resolved = Literal["numpy", "numba"]
T = TypeVar("T")

#: Penalties that have kernels.
COMPILED_PENALTIES = ("l1", "l2", "linf")
#: Seconds of numpy work that outweigh loading kernels from their cache, and compiling them: all, or that of cliques.
LOADING_PAYS, COMPILING_PAYS, COMPILING_ONE_PAYS = 1.0, 15.0, 3.0
#: What a solve usually takes: iterations, and numpy's nanoseconds for an edge's coordinate and for an entry of a Gram.
USUAL_ITERATIONS, NUMPY_EDGE_COST, NUMPY_GRAM_COST = 60, 20.0, 3.0
#: Nanoseconds of one thread for an edge's coordinate, and for an entry of a Gram matrix, in compiled iterations.
EDGE_COST, GRAM_COST = 1.0, 0.3
#: Edges that cost as much as a site that is sorted into its clique.
SORTING = 20
#: Threads share an iteration that takes longer than this many nanoseconds; below, problems run side by side.
THREADING_PAYS = 1e6
_KERNELS = "fedkin.solvers.kernels.steps"


class Limits(NamedTuple):
    """Sizes at which compiled iterations change how they work, not what they find."""

    #: Renumbering sites may pay from so many on.
    scrambled_sites: int = 50_000
    #: Inverse Gram matrices with up to this many entries are kept for the certificates, others are factorised again.
    room: int = 20_000_000
    #: Pairs with more edge duals than this are not copied: they change when the iteration goes on.
    copied: int = 1_000_000
    #: Iterations that take this many nanoseconds are done in one go (Ctrl-C waits for them), with so many checks.
    one_go: float = 5e7
    checks: int = 64


USUAL = Limits()


def resolve_backend(
    backend: Backend, objective: FusedObjective, n_solves: float = 1, in_cache: Callable[[], bool] = cached
) -> Resolved:
    """The backend for ``n_solves`` problems with the size and penalty of ``objective``; kernels may be ``in_cache``."""
    if backend not in get_args(Backend):
        raise ParameterError(f"unknown backend {backend!r}; choose one of {', '.join(get_args(Backend))}")
    if backend == "numpy":
        return "numpy"
    name = objective.penalty.name
    if backend == "numba":
        if name not in COMPILED_PENALTIES:
            raise ParameterError(f"there are no kernels for the penalty {name!r}; use backend='numpy'")
        return _compiled(objective)
    if name not in COMPILED_PENALTIES:
        return "numpy"
    if _KERNELS in sys.modules:
        return "numba"
    work = n_solves * expected_seconds(objective)
    if work < LOADING_PAYS:
        return "numpy"
    pays = COMPILING_PAYS if objective.cliques is None else COMPILING_ONE_PAYS
    return _compiled(objective) if work > pays or in_cache() else "numpy"


def _compiled(objective: FusedObjective) -> Resolved:
    """The compiled backend, with the kernels that the problem needs."""
    terms = objective.terms
    _prepare_kernels(
        objective.penalty.name,
        terms.n_params == 1,
        cliques=objective.cliques is not None,
        isotropic=isinstance(terms, QuadraticTerms) and terms.isotropic,
        sparse=objective.sparsity is not None,
        threads=iteration_is_shared(objective, terms),
        quadratic=isinstance(terms, QuadraticTerms),
    )
    return "numba"


@cache
def _prepare_kernels(penalty: str, scalar: bool, **kind: bool) -> None:
    """Kernels that are in no cache are compiled at once, which whoever listens is told."""
    from fedkin.solvers.kernels.needs import needed_kernels

    missing = [kernel for kernel in needed_kernels(penalty, scalar, **kind) if not kernel.ready]
    for kernel in tracked(missing, "compiling kernels, once on this machine") if missing else ():
        kernel.load()


def expected_seconds(objective: FusedObjective) -> float:
    """Rough time of one solve with numpy."""
    edges, entries = sizes(objective, objective.terms)
    return 1e-9 * USUAL_ITERATIONS * (NUMPY_EDGE_COST * edges + NUMPY_GRAM_COST * entries)


def compile_kernels() -> None:
    """Compile all kernels now and leave them in numba's cache; a second call only loads them."""
    from fedkin.solvers.kernels import chains, checks, cliques, gaps, steps
    from fedkin.solvers.kernels.jit import Outlined

    for module in (steps, gaps, checks, chains, cliques):
        for kernel in vars(module).values():
            if isinstance(kernel, Outlined):
                kernel.load()


def sizes(objective: FusedObjective, terms: SiteTerms) -> tuple[int, int]:
    """Numbers of edge duals and of entries of the Gram matrices."""
    p = terms.n_params
    isotropic = isinstance(terms, QuadraticTerms) and terms.isotropic
    duals = objective.graph.n_edges if objective.cliques is None else SORTING * terms.n_sites
    return duals * p, terms.n_sites * (p if isotropic else p * p)


def iteration_is_shared(objective: FusedObjective, terms: SiteTerms) -> bool:
    """Whether a compiled iteration is long enough for several threads to share it."""
    return objective.cliques is None and iteration_work(objective, terms) > THREADING_PAYS


def iteration_work(objective: FusedObjective, terms: SiteTerms) -> float:
    """Nanoseconds of one thread for a compiled iteration, roughly."""
    edges, entries = sizes(objective, terms)
    return EDGE_COST * edges + GRAM_COST * entries


def run_side_by_side(tasks: Sequence[Callable[[], T]], n_threads: int, words: str = "working") -> list[T]:
    """The results of the tasks, in their order; when one fails or Ctrl-C comes, those that wait are dropped.

    ``words`` say what is being done, to whom listens.
    """
    if n_threads == 1 or len(tasks) == 1:
        return [task() for task in tracked(tasks, words)]
    with ThreadPoolExecutor(min(n_threads, len(tasks))) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in tracked(futures, words)]
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
