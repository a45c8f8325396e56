"""The primal-dual iteration on compiled kernels, and the threads that share its work.

numpy is the reference. The kernels take the same steps several times faster; compiling them takes some seconds once per
installation, and loading them a seventh of a second once per process, so ``"auto"`` uses them wherever there are any.
The state lives in arrays that are updated in place, so that a million sites fit in memory. Large problems use threads,
each with its range of sites and of edges, and scrambled large graphs are renumbered first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from fedkin._base import Array, Index, available_threads, tracked
from fedkin.core import FusedObjective, QuadraticTerms, SiteTerms
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.solvers import kernels
from fedkin.solvers.pdhg import INTERIOR, RELAXATION, Iteration, Moves, PrimalDual, starting_point, weights_of_sites

Backend = Literal["auto", "numpy", "numba"]
T = TypeVar("T")

#: Nanoseconds of one thread for an edge's coordinate, and for an entry of a Gram matrix, in compiled iterations.
EDGE_COST, GRAM_COST = 1.0, 0.3
#: Threads share an iteration that takes longer than this many nanoseconds; below, problems run side by side, unless
#: iterations are so short that threads would mostly wait for each other.
THREADING_PAYS, SIDE_BY_SIDE_PAYS = 1e6, 1e4
#: Renumbering pays from so many sites on, when neighbours are farther apart than this share of all numbers.
SCRAMBLED_SITES, SCRAMBLED_SHARE = 50_000, 0.05
#: A Gram matrix with all pivots above this share of its diagonal is regular beyond doubt.
SAFE_PIVOT = 1e-6
#: Inverse Gram matrices with up to this many entries are kept with the terms, for the other levels of a path.
KEPT = 20_000_000


def uses_kernels(backend: Backend, objective: FusedObjective) -> bool:
    """Return whether ``backend`` stands for compiled kernels."""
    if backend not in get_args(Backend):
        raise ParameterError(f"unknown backend {backend!r}; choose one of {', '.join(get_args(Backend))}")
    name = objective.penalty.name
    if backend == "numba" and name not in kernels.KINDS:
        raise ParameterError(f"there are no kernels for the penalty {name!r}; use backend='numpy'")
    return backend != "numpy" and name in kernels.KINDS


def iteration_cost(objective: FusedObjective, terms: SiteTerms) -> float:
    """Return the nanoseconds that a compiled iteration takes on one thread, roughly."""
    isotropic = isinstance(terms, QuadraticTerms) and terms.isotropic
    entries = terms.n_sites * terms.n_params * (1 if isotropic else terms.n_params)
    return EDGE_COST * objective.graph.n_edges * terms.n_params + GRAM_COST * entries


def iteration_is_shared(objective: FusedObjective, terms: SiteTerms) -> bool:
    """Return whether a compiled iteration is long enough for several threads to share it."""
    return objective.cliques is None and iteration_cost(objective, terms) > THREADING_PAYS


def threads_for(objective: FusedObjective, backend: Backend) -> int:
    """Return the number of solves to run side by side: compiled ones that do not use threads themselves."""
    if not uses_kernels(backend, objective) or iteration_is_shared(objective, objective.terms):
        return 1
    return available_threads() if iteration_cost(objective, objective.terms) > SIDE_BY_SIDE_PAYS else 1


def run_side_by_side(tasks: Sequence[Callable[[], T]], n_threads: int, text: str = "working") -> list[T]:
    """Return the results of the tasks in order; when one fails or Ctrl-C comes, those that wait are dropped."""
    if n_threads == 1 or len(tasks) == 1:
        return [task() for task in tracked(tasks, text)]
    with ThreadPoolExecutor(min(n_threads, len(tasks))) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in tracked(futures, text)]
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
        """Return ``size`` consecutive ranges that cover ``0 .. n-1``."""
        return list(pairwise(n * k // self.size for k in range(self.size + 1)))

    def run(self, work: Callable[[int, int, int], Any], ranges: Sequence[tuple[int, int]]) -> list[Any]:
        """Call ``work(thread, lo, hi)`` on every range; all are done on return, also after an interruption."""
        if self._pool is None or len(ranges) == 1:
            return [work(0, *ranges[0])]
        others = [self._pool.submit(work, t, *ranges[t]) for t in range(1, len(ranges))]
        try:
            first = work(0, *ranges[0])
        finally:
            done = [other.result() for other in others]
        return [first, *done]


class Numbering:
    """Internal numbers of sites and edges: the caller's, or, where ``changed``, others that keep neighbours close.

    ``sites (V,)`` and ``edges (E,)`` are the caller's numbers (the edges empty where nothing is changed), ``head``
    and ``tail (E,)`` the internal numbers of the ends of the edges.
    """

    def __init__(self, graph: Graph) -> None:
        i, j = graph.edges[:, 0], graph.edges[:, 1]
        self.changed = graph.n_sites >= SCRAMBLED_SITES and bool(np.mean(i - j) > SCRAMBLED_SHARE * graph.n_sites)
        self.sites: Index = np.arange(graph.n_sites)
        self.edges: Index = np.empty(0, dtype=np.int64)
        if self.changed:
            shape = (graph.n_sites, graph.n_sites)
            pattern = coo_array((np.ones(2 * i.size, dtype=np.int8), (np.r_[i, j], np.r_[j, i])), shape=shape)
            order = reverse_cuthill_mckee(csr_array(pattern), symmetric_mode=True)
            self.sites = np.ascontiguousarray(order, dtype=np.int64)
            rank = np.empty(graph.n_sites, dtype=np.int64)
            rank[self.sites] = np.arange(graph.n_sites)
            i, j = rank[i], rank[j]
            self.edges = np.lexsort((np.minimum(i, j), np.maximum(i, j)))
            i, j = i[self.edges], j[self.edges]
        self.head, self.tail = i.astype(np.int32), j.astype(np.int32)

    def internal(self, values: NDArray[Any], numbers: Index) -> NDArray[Any]:
        """Return values of sites or edges, whose ``numbers`` these are, in the internal order."""
        return values[numbers] if self.changed else np.ascontiguousarray(values)

    def caller(self, values: Array, numbers: Index) -> Array:
        """Return the way back."""
        out = np.empty_like(values) if self.changed else values
        if self.changed:
            out[numbers] = values
        return out


class CompiledIteration(Iteration):
    """`fedkin.solvers.pdhg.NumpyIteration` on kernels, with as many threads as pay."""

    recovers = True

    def __init__(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: PrimalDual | None = None
    ) -> None:
        kernels.load_kernels()
        self._objective = objective
        self._crew = crew = Crew(available_threads() if iteration_is_shared(objective, quadratic) else 1)
        self._numbering = numbering = Numbering(objective.graph)
        self._site_ranges, self._edge_ranges = crew.split(quadratic.n_sites), crew.split(objective.graph.n_edges)
        radius = np.array(numbering.internal(objective.edge_radius, numbering.edges))
        kind = kernels.L1 if quadratic.n_params == 1 else kernels.KINDS[objective.penalty.name]
        self._edges = kernels.Edges(numbering.head, numbering.tail, radius, kind)
        internal, (n, p) = self.arranged, quadratic.b.shape
        self._linked = internal(weights_of_sites(objective))
        alone = self._linked == 0
        A = inverse = self._resolvent = np.empty((0, p, p))
        curvature, b = np.empty(0), internal(quadratic.b)
        # what follows from the matrices alone is the same along a path
        self._keeps = quadratic.A.size <= KEPT and not numbering.changed
        self._known = quadratic.shared if self._keeps else {}
        own: Array | None = None
        if quadratic.isotropic:
            curvature = internal(quadratic.A)
            own = b / curvature[:, None] if (curvature > 0).all() else None
        else:
            A = np.ascontiguousarray(quadratic.A)
            own, inverse = self._minimizers(A, b)
        self.regular = own is not None
        singular = np.zeros(n, dtype=bool)
        if own is None:
            own, singular = internal(quadratic.minimizers()), internal(quadratic.singular)
        box = np.empty((0, p)) if objective.box is None else internal(objective.box)
        weight, ball = np.where(alone, 1.0, self._linked), float(objective.radius or np.inf)
        self._sites = kernels.Sites(numbering.sites, A, inverse, curvature, b, quadratic.c, weight, box, ball)
        x, y, z = np.empty((n, p)), np.zeros((numbering.head.size, p)), np.zeros(box.shape)
        x[:] = starting_point(start and replace(start, theta=internal(start.theta)), own, singular, alone)
        if start is not None:
            y[:] = numbering.internal(start.alpha, numbering.edges)
            z[:] = z if start.zeta is None else internal(start.zeta)
        self._state = kernels.Iterates(x, y, z, np.empty((crew.size, n, p)), np.empty((n, p)))
        self._balance_duals()
        super().__init__(rho)

    def _minimizers(self, A: Array, b: Array) -> tuple[Array | None, Array]:
        """Return each site's own minimiser, None when one may not be unique, and inverses."""
        (n, p), known = b.shape, self._known
        if "inverse" not in known:
            inverse = np.empty_like(A)
            if not self._invert(A, np.zeros(n), np.ones(p), inverse) > SAFE_PIVOT:
                return None, np.empty((0, p, p))
            known["inverse"], known["own"] = inverse, np.matmul(inverse, b[:, :, None])[:, :, 0]
        return known["own"], known["inverse"]

    def _invert(self, A: Array, weight: Array, rho: Array, out: Array) -> float:
        order = self._numbering.sites
        pivots = self._crew.run(lambda _, lo, hi: kernels.invert(lo, hi, order, A, weight, rho, out), self._site_ranges)
        return float(min(pivots))

    def _set_rho(self, rho: Array) -> None:
        self.rho, sites = rho, self._sites
        self._rho = rho + np.zeros(sites.b.shape[1])
        if not sites.A.size:
            return
        known, found = self._known, self._known.get("resolvent")
        same = found is not None and np.array_equal(known["rho"], self._rho)
        if found is not None and same and np.array_equal(known["weight"], sites.weight):
            self._resolvent = found
            return
        if self._resolvent.size == 0 or self._resolvent is found:
            self._resolvent = np.empty_like(sites.A)
        self._invert(sites.A, sites.weight, self._rho, self._resolvent)
        if found is None and self._keeps:
            known.update(rho=self._rho, weight=sites.weight, resolvent=self._resolvent)

    def _balance_duals(self) -> None:
        edges, (_, y, z, s, _) = self._edges, self._state
        s[:] = 0.0
        if z.size:
            s[0] = z
        self._crew.run(lambda t, lo, hi: kernels.add_balance(lo, hi, edges, y, s[t]), self._edge_ranges)

    def advance(self, n: int) -> None:
        try:
            super().advance(n)
        except KeyboardInterrupt:
            # half a step may be done: any point is good to start from, once the balance fits the duals again
            self._balance_duals()
            self._run(1, 1.0, measure=False)
            self.n_iter += 1
            raise

    def _run(self, n: int, last: float, measure: bool) -> Moves | None:
        state, moves = self._state, np.zeros((self._crew.size, self._rho.size if measure else 0))
        if self._crew.size == 1:
            given = (self._sites, self._edges, self._rho, self._resolvent, state)
            kernels.run(n, *given, RELAXATION, last, moves[0])
        else:
            for _ in range(n - 1):
                self._shared_step(RELAXATION, moves[:, :0])
            self._shared_step(last, moves)
        # ahead = x + 2 dx and the new x = x + last dx
        moved = (state.ahead - state.x) / (2.0 - last) if measure else None
        return None if moved is None else (moves.sum(axis=0), self._linked @ moved**2)

    def _shared_step(self, relax: float, moves: Array) -> None:
        """Take one step on all threads, and add its moves to those of each thread, ``moves (T, p)``, unless empty."""
        sites, edges, rho, resolvent, state = self._sites, self._edges, self._rho, self._resolvent, self._state
        _, y, _, s, ahead = state

        def step_edges(t: int, lo: int, hi: int) -> None:
            if moves.size:
                kernels.edge_moves(lo, hi, edges, rho, ahead, y, moves[t])
            kernels.edge_step(lo, hi, edges, rho, ahead, y, s[t], relax)

        self._crew.run(
            lambda t, lo, hi: kernels.node_step(lo, hi, sites, rho, resolvent, state, relax, moves[t]),
            self._site_ranges,
        )
        self._crew.run(step_edges, self._edge_ranges)

    def inside(self) -> Array | None:
        return None if self._objective.radius is None else self._objective.inside(self._state.x)

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        sites, edges, state, parts = self._sites, self._edges, self._state, self._edge_ranges
        x = state.x if theta is None else theta
        found = self._crew.run(
            lambda t, lo, hi: kernels.gap((lo, hi), parts[t], sites, edges, x, state), self._site_ranges
        )
        return sum(value for value, _ in found), sum(gap for _, gap in found)

    def fused(self) -> Array:
        edges, crew, (x, y, z, _, out) = self._edges, self._crew, self._state
        # columns of other penalties than l1 belong together
        columns = crew.split(x.shape[1]) if edges.kind == kernels.L1 and crew.size > 1 else [(0, x.shape[1])]
        box = self._sites.box
        crew.run(lambda _, lo, hi: kernels.fuse(lo, hi, edges, y, 1.0 - INTERIOR, z, box, x, out), columns)
        return self._objective.inside(np.asarray(out))

    def arranged(self, theta: NDArray[Any]) -> NDArray[Any]:
        return self._numbering.internal(theta, self._numbering.sites)

    def pair(self, theta: Array | None = None) -> PrimalDual:
        numbering, state = self._numbering, self._state
        x, y = numbering.caller(state.x if theta is None else theta, numbering.sites), state.y
        z = numbering.caller(state.z, numbering.sites) if state.z.size else None
        balance = numbering.caller(state.s[0] if self._crew.size == 1 else state.s.sum(axis=0), numbering.sites)
        return PrimalDual(x, numbering.caller(y, numbering.edges), z, balance, self.rho)

    def close(self) -> None:
        self._crew.close()
