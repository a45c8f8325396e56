"""The primal-dual iteration on compiled kernels, when to use it, and the threads that share its work.

numpy is the reference. The kernels take the same steps several times faster, but loading them takes a third of a
second, so ``"auto"`` uses them where the work ahead, by its size alone, is worth that. The state lives in arrays that
are updated in place, so that a million sites fit in memory. Large problems use threads, each with its range of sites
and of edges, and scrambled large graphs are renumbered first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from fedkin.solvers.fusing import INTERIOR
from fedkin.solvers.pdhg import COLD, Iteration, PrimalDual, Start, weights_of_sites

Backend = Literal["auto", "numpy", "numba"]
Resolved = Literal["numpy", "numba"]
T = TypeVar("T")

#: Penalties that have kernels.
COMPILED_PENALTIES = ("l1", "l2", "linf")
#: Seconds of numpy work that outweigh loading kernels.
LOADING_PAYS = 0.2
#: What a solve usually takes: iterations, and numpy's nanoseconds for an edge's coordinate and for an entry of a Gram.
USUAL_ITERATIONS, NUMPY_EDGE_COST, NUMPY_GRAM_COST = 60, 20.0, 3.0
#: Nanoseconds of one thread for an edge's coordinate, and for an entry of a Gram matrix, in compiled iterations.
EDGE_COST, GRAM_COST = 1.0, 0.3
#: Edges that cost as much as a site that is sorted into its clique.
SORTING = 20
#: Threads share an iteration that takes longer than this many nanoseconds; below, problems run side by side.
THREADING_PAYS = 1e6
#: Renumbering pays from so many sites on, when neighbours are farther apart than this share of all numbers.
SCRAMBLED_SITES, SCRAMBLED_SHARE = 50_000, 0.05
#: A Gram matrix with all pivots above this share of its diagonal is regular beyond doubt.
SAFE_PIVOT = 1e-6
#: Inverse Gram matrices with up to this many entries are kept with the terms, for the other levels of a path.
KEPT = 20_000_000
#: Pairs with more edge duals than this are not copied: they change when the iteration goes on.
COPIED = 1_000_000


def resolve_backend(backend: Backend, objective: FusedObjective, n_solves: float = 1) -> Resolved:
    """Return the backend for ``n_solves`` problems with the size and penalty of ``objective``."""
    if backend not in get_args(Backend):
        raise ParameterError(f"unknown backend {backend!r}; choose one of {', '.join(get_args(Backend))}")
    name = objective.penalty.name
    if backend == "numba" and name not in COMPILED_PENALTIES:
        raise ParameterError(f"there are no kernels for the penalty {name!r}; use backend='numpy'")
    if backend != "auto":
        return backend
    edges, entries = _sizes(objective, objective.terms)
    seconds = 1e-9 * USUAL_ITERATIONS * (NUMPY_EDGE_COST * edges + NUMPY_GRAM_COST * entries)
    return "numba" if name in COMPILED_PENALTIES and n_solves * seconds > LOADING_PAYS else "numpy"


def _sizes(objective: FusedObjective, terms: SiteTerms) -> tuple[int, int]:
    """Return numbers of edge duals and of entries of the Gram matrices."""
    p = terms.n_params
    isotropic = isinstance(terms, QuadraticTerms) and terms.isotropic
    duals = objective.graph.n_edges if objective.cliques is None else SORTING * terms.n_sites
    return duals * p, terms.n_sites * (p if isotropic else p * p)


def iteration_is_shared(objective: FusedObjective, terms: SiteTerms) -> bool:
    """Return whether a compiled iteration is long enough for several threads to share it."""
    edges, entries = _sizes(objective, terms)
    return objective.cliques is None and EDGE_COST * edges + GRAM_COST * entries > THREADING_PAYS


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
    """`fedkin.solvers.pdhg.NumpyIteration` on kernels, by default with as many threads as pay."""

    recovers = True

    def __init__(
        self,
        objective: FusedObjective,
        quadratic: QuadraticTerms,
        rho: Array,
        start: Start = COLD,
        n_threads: int | None = None,
    ) -> None:
        kernels.load_kernels()
        threads = available_threads() if iteration_is_shared(objective, quadratic) else 1
        self._crew = crew = Crew(threads if n_threads is None else n_threads)
        self._numbering = numbering = Numbering(objective.graph)
        self._site_ranges, self._edge_ranges = crew.split(quadratic.n_sites), crew.split(objective.graph.n_edges)
        radius = np.array(numbering.internal(objective.edge_radius, numbering.edges))
        kind = kernels.L1 if quadratic.n_params == 1 else kernels.KINDS[objective.penalty.name]
        self._edges = kernels.Edges(numbering.head, numbering.tail, radius, kind)
        internal, p = self.arranged, quadratic.n_params
        self._linked = internal(weights_of_sites(objective))
        A = inverse = np.empty((0, p, p))
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
        #: Each site has a minimiser of its own.
        self.regular = own is not None
        weight = np.where(self._linked > 0, self._linked, 1.0)
        box = np.empty((0, p)) if objective.sparsity is None else internal(objective.sparsity)
        self._sites = kernels.Sites(numbering.sites, A, inverse, curvature, b, quadratic.c, weight, box)
        self._state = self._started(quadratic, own, start)
        self.live = self._state.y.size > COPIED and not numbering.changed
        self._resolvent = np.empty((0, p, p))
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
        self._rho = np.array(np.broadcast_to(rho, sites.b.shape[1:]))
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

    def _started(self, quadratic: QuadraticTerms, own: Array | None, start: Start) -> Any:
        theta, alpha, zeta = start
        (n, p), internal, alone = self._sites.b.shape, self.arranged, self._linked == 0
        if own is None:
            own = internal(quadratic.minimizers())
        if theta is None:
            x = own.copy()
            if not self.regular:
                x[internal(quadratic.singular) & ~alone] = 0.0
        else:
            x = np.array(internal(theta), dtype=np.float64)
            # a site without duals is on its own from the start, and stays there
            x[alone] = own[alone]
        y = np.zeros((self._edges.head.size, p))
        if alpha is not None:
            y[:] = self._numbering.internal(alpha, self._numbering.edges)
        z = np.zeros(self._sites.box.shape) if zeta is None else np.array(internal(zeta), dtype=np.float64)
        state = kernels.State(x, y, z, np.zeros((self._crew.size, n, p)), np.empty((n, p)))
        self._reset_balance(state)
        return state

    def _reset_balance(self, state: Any) -> None:
        state.s[:] = 0.0
        if state.z.size:
            state.s[0] = state.z
        add = kernels.add_balance
        self._crew.run(lambda t, lo, hi: add(lo, hi, self._edges, state.y, state.s[t]), self._edge_ranges)

    def advance(self, n: int) -> None:
        try:
            super().advance(n)
        except KeyboardInterrupt:
            # half a step may be done: any point is good to start from, once the balance fits the duals again
            self._reset_balance(self._state)
            self._step(1.0, measure=False)
            self.n_iter += 1
            raise

    def _steps(self, n: int, relax: float) -> None:
        if self._crew.size > 1:
            super()._steps(n, relax)
        elif n > 0:
            kernels.run(n, self._sites, self._edges, self._rho, self._resolvent, self._state, relax)

    def _step(self, relax: float, measure: bool) -> tuple[Array, Array] | None:
        sites, edges, state, crew, rho = self._sites, self._edges, self._state, self._crew, self._rho
        if crew.size == 1 and not measure:
            kernels.run(1, sites, edges, rho, self._resolvent, state, relax)
            return None
        x, y, z, s, ahead = state
        before, moves = z.copy() if measure else z, None
        crew.run(
            lambda _, lo, hi: kernels.node_step(lo, hi, sites, rho, self._resolvent, state, relax), self._site_ranges
        )
        if measure:
            dual = np.zeros((crew.size, rho.size))
            crew.run(lambda t, lo, hi: kernels.edge_moves(lo, hi, edges, rho, ahead, y, dual[t]), self._edge_ranges)
            # ahead = x + 2 dx and the new x = x + relax dx
            primal = self._linked @ ((ahead - x) / (2.0 - relax)) ** 2
            moves = 2.0 * dual.sum(axis=0) + (((z - before) / relax) ** 2).sum(axis=0), primal
        crew.run(lambda t, lo, hi: kernels.edge_step(lo, hi, edges, rho, ahead, y, s[t], relax), self._edge_ranges)
        return moves

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        sites, edges, (x, y, z, s, _) = self._sites, self._edges, self._state
        x = x if theta is None else theta
        of_sites = self._crew.run(lambda _, lo, hi: kernels.node_gap(lo, hi, sites, x, s), self._site_ranges)
        of_edges = self._crew.run(lambda _, lo, hi: kernels.edge_gap(lo, hi, edges, x, y), self._edge_ranges)
        value, gap = (float(sum(part)) for part in zip(*of_sites, *of_edges, strict=True))
        if sites.box.size:
            size = sites.box * np.abs(x)
            value, gap = value + float(size.sum()), gap + float((size - z * x).sum())
        return value, gap

    def fused(self) -> Array:
        edges, crew, (x, y, z, _, out) = self._edges, self._crew, self._state
        # columns of other penalties than l1 belong together
        columns = crew.split(x.shape[1]) if edges.kind == kernels.L1 and crew.size > 1 else [(0, x.shape[1])]
        box = self._sites.box
        crew.run(lambda _, lo, hi: kernels.fuse(lo, hi, edges, y, 1.0 - INTERIOR, z, box, x, out), columns)
        return np.asarray(out)

    def arranged(self, theta: NDArray[Any]) -> NDArray[Any]:
        return self._numbering.internal(theta, self._numbering.sites)

    def pair(self, theta: Array | None = None) -> PrimalDual:
        numbering, state = self._numbering, self._state
        caller, sites = numbering.caller, numbering.sites
        x, y = caller(state.x if theta is None else theta, sites), caller(state.y, numbering.edges)
        z = caller(state.z, sites) if state.z.size else None
        balance = caller(state.s[0].copy() if self._crew.size == 1 else state.s.sum(axis=0), sites)
        if not (self.live or numbering.changed):
            x, y, z = x.copy(), y.copy(), None if z is None else z.copy()
        return PrimalDual(x, y, z, balance, self.rho, self.n_iter)

    def close(self) -> None:
        self._crew.close()
