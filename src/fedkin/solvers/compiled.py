"""Run the primal-dual iteration on compiled kernels with multiple threads.

numpy is the reference. The kernels take the same steps several times faster; ``"auto"`` uses them if available. Arrays
are updated in place, so a million sites fit in memory. On large problems, each thread handles a range of sites and of
edges, and large graphs without locality are renumbered first.
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

from fedkin._base import Array, Index, available_threads, frozen, tracked
from fedkin.core import FusedObjective, QuadraticTerms, SiteTerms
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.solvers import pdhg_kernels as kernels
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
    """Return whether ``backend`` selects compiled kernels."""
    if backend not in get_args(Backend):
        raise ParameterError(f"unknown backend {backend!r}; choose one of {', '.join(get_args(Backend))}")
    name = objective.penalty.name
    if backend == "numba" and name not in kernels.KINDS:
        raise ParameterError(f"there are no kernels for the penalty {name!r}; use backend='numpy'")
    return backend != "numpy" and name in kernels.KINDS


def iteration_cost(objective: FusedObjective, terms: SiteTerms) -> float:
    """Estimate the nanoseconds that a compiled iteration takes on one thread."""
    isotropic = isinstance(terms, QuadraticTerms) and terms.isotropic
    entries = terms.n_sites * terms.n_params * (1 if isotropic else terms.n_params)
    return EDGE_COST * objective.graph.n_edges * terms.n_params + GRAM_COST * entries


def iteration_is_shared(objective: FusedObjective, terms: SiteTerms) -> bool:
    """Return whether a compiled iteration is long enough to be shared by several threads."""
    return objective.cliques is None and iteration_cost(objective, terms) > THREADING_PAYS


def threads_for(objective: FusedObjective, backend: Backend) -> int:
    """Return the number of solves to run in parallel: compiled ones that do not use threads themselves."""
    if not uses_kernels(backend, objective) or iteration_is_shared(objective, objective.terms):
        return 1
    return available_threads() if iteration_cost(objective, objective.terms) > SIDE_BY_SIDE_PAYS else 1


def run_side_by_side(tasks: Sequence[Callable[[], T]], n_threads: int, text: str = "working") -> list[T]:
    """Return the results of the tasks in order; after an error or Ctrl-C, pending tasks are cancelled."""
    if n_threads == 1 or len(tasks) == 1:
        return [task() for task in tracked(tasks, text)]
    with ThreadPoolExecutor(min(n_threads, len(tasks))) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in tracked(futures, text)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Crew:
    """Thread pool that works on parts of a range, including the calling thread."""

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
        """Call ``work(thread, lo, hi)`` on every range; all are finished on return, even after an interruption."""
        if self._pool is None or len(ranges) == 1:
            return [work(0, *ranges[0])]
        others = [self._pool.submit(work, t, *ranges[t]) for t in range(1, len(ranges))]
        try:
            first = work(0, *ranges[0])
        finally:
            done = [other.result() for other in others]
        return [first, *done]


class Numbering:
    """The caller's numbers of ``sites (V,)`` and ``edges (E,)``, None for all in order, and new ends of the edges."""

    def __init__(self, graph: Graph) -> None:
        self.sites: Index | None = None
        self.edges: Index | None = None
        self.ends = graph.edges
        i, j = graph.edges[:, 0], graph.edges[:, 1]
        if graph.n_sites < SCRAMBLED_SITES or not np.mean(i - j) > SCRAMBLED_SHARE * graph.n_sites:
            return
        shape = (graph.n_sites, graph.n_sites)
        pattern = coo_array((np.ones(2 * i.size, dtype=np.int8), (np.r_[i, j], np.r_[j, i])), shape=shape)
        order = reverse_cuthill_mckee(csr_array(pattern), symmetric_mode=True)
        self.sites = np.ascontiguousarray(order, dtype=np.int64)
        ends = restored(np.arange(graph.n_sites), self.sites)[graph.edges]
        self.edges = np.lexsort((ends.min(axis=1), ends.max(axis=1)))
        self.ends = ends[self.edges]


def renumbered(values: NDArray[Any], numbers: Index | None) -> NDArray[Any]:
    """Return values of sites or edges in the order of the caller's ``numbers``."""
    return np.ascontiguousarray(values) if numbers is None else values[numbers]


def restored(values: NDArray[Any], numbers: Index | None) -> NDArray[Any]:
    """Return values in the caller's order."""
    if numbers is None:
        return values
    out = np.empty_like(values)
    out[numbers] = values
    return out


def _fixed(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view."""
    return frozen(array.view())


class KernelProblem:
    """Data of an iteration on kernels: all sites, or those that a shard hosts, and the edges that touch them.

    The hosted sites have the caller's numbers ``sites (B,)``, and the edges ``edges (E,)``; None stands for all. A
    shard knows ``n_known`` sites, the hosted ones first; only its first ``n_counted`` edges count in sums over edges.
    ``head`` and ``tail (E,)`` are the ends of the edges, ``radius (E,)`` the radii of their dual balls, and ``kind`` is
    the penalty's code. For the hosted sites, ``order (B,)`` are their places in ``terms``, ``b (B, p)`` the linear
    terms, ``linked (B,)`` the numbers of duals, and ``box (B, p)`` the levels of sparsity, if any.
    """

    def __init__(
        self,
        objective: FusedObjective,
        quadratic: QuadraticTerms,
        start: PrimalDual | None,
        sites: Index | None,
        edges: Index | None,
        ends: Index,
        n_known: int | None = None,
        n_counted: int | None = None,
    ) -> None:
        self.terms, self.in_order = quadratic, sites is None or n_known is not None
        self.order = np.arange(quadratic.n_sites) if sites is None else sites
        if n_known is not None and sites is not None:
            self.terms, self.order = quadratic.take(sites), np.arange(sites.size)
        self.n_known = self.order.size if n_known is None else n_known
        self.n_counted = len(ends) if n_counted is None else n_counted
        self.head, self.tail = np.ascontiguousarray(ends.T.astype(np.int32))
        self.radius = np.array(renumbered(objective.edge_radius, edges))
        self.kind = kernels.L1 if quadratic.n_params == 1 else kernels.KINDS[objective.penalty.name]
        self.b, self.linked = renumbered(quadratic.b, sites), renumbered(weights_of_sites(objective), sites)
        self.box = np.empty((0, quadratic.n_params)) if objective.box is None else renumbered(objective.box, sites)
        self.ball, self.start = float(objective.radius or np.inf), start
        if start is not None:
            zeta = None if start.zeta is None else renumbered(start.zeta, sites)
            theta, alpha = renumbered(start.theta, sites), renumbered(start.alpha, edges)
            self.start = replace(start, theta=theta, alpha=alpha, zeta=zeta)


class CompiledIteration(Iteration):
    """Compiled counterpart of `fedkin.solvers.pdhg.NumpyIteration`, with as many threads as are worthwhile."""

    def __init__(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: PrimalDual | None = None
    ) -> None:
        self._objective = objective
        self._numbering = numbering = Numbering(objective.graph)
        given = KernelProblem(objective, quadratic, start, numbering.sites, numbering.edges, numbering.ends)
        self._stand(given, available_threads() if iteration_is_shared(objective, quadratic) else 1)
        super().__init__(rho)

    def _stand(self, part: KernelProblem, threads: int) -> None:
        kernels.load_kernels()
        self._part, self._crew, quadratic, b = part, Crew(threads), part.terms, part.b
        n, p = b.shape
        self._site_ranges, self._edge_ranges = self._crew.split(n), self._crew.split(part.head.size)
        self._counted_ranges = self._crew.split(part.n_counted)
        # read-only, as they are in shards, and thus of one type for compiled kernels
        self._edges = kernels.EdgeArrays(_fixed(part.head), _fixed(part.tail), _fixed(part.radius), part.kind)
        A = inverse = self._resolvent = np.empty((0, p, p))
        curvature = np.empty(0)
        # what follows from the matrices alone is the same along a path
        self._keeps = quadratic.A.size <= KEPT and part.in_order
        self._known = quadratic.shared if self._keeps else {}
        own: Array | None = None
        if quadratic.isotropic:
            curvature = np.ascontiguousarray(quadratic.A[part.order])
            own = b / curvature[:, None] if (curvature > 0).all() else None
        else:
            A = np.ascontiguousarray(quadratic.A)
            own, inverse = self._minimizers(A, b)
        self.regular = own is not None
        singular = np.zeros(n, dtype=bool)
        if own is None:
            own, singular = quadratic.minimizers()[part.order], quadratic.singular[part.order]
        weight = np.where(part.linked == 0, 1.0, part.linked)
        known = *map(_fixed, (curvature, b, quadratic.c, weight, part.box)), part.ball
        self._sites = kernels.SiteArrays(_fixed(part.order), _fixed(A), inverse, *known)
        state = kernels.Iterates(
            np.zeros((part.n_known, p)),
            np.zeros((part.head.size, p)),
            np.zeros(part.box.shape),
            np.zeros((self._crew.size, part.n_known, p)),
            np.zeros((part.n_known, p)),
        )
        self._state, start = state, part.start
        state.x[:n] = starting_point(start, own, singular, part.linked == 0)
        if start is not None:
            state.y[:] = start.alpha
            state.z[:] = state.z if start.zeta is None else start.zeta
        self.balance_duals()

    def _minimizers(self, A: Array, b: Array) -> tuple[Array | None, Array]:
        """Return each site's own minimiser, None when one may not be unique, and inverses."""
        (n, p), known = b.shape, self._known
        if "inverse" not in known:
            inverse = np.empty_like(A)
            if not self._invert(_fixed(A), frozen(np.zeros(n)), frozen(np.ones(p)), inverse) > SAFE_PIVOT:
                return None, np.empty((0, p, p))
            known["inverse"], known["own"] = inverse, np.matmul(inverse, b[:, :, None])[:, :, 0]
        return known["own"], known["inverse"]

    def _invert(self, A: Array, weight: Array, rho: Array, out: Array) -> float:
        order = _fixed(self._part.order)
        pivots = self._crew.run(lambda _, lo, hi: kernels.invert(lo, hi, order, A, weight, rho, out), self._site_ranges)
        return float(min(pivots))

    def set_rho(self, rho: Array) -> None:
        self.rho, sites = rho, self._sites
        self._rho = frozen(rho + np.zeros(sites.b.shape[1]))
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

    def balance_duals(self) -> None:
        edges, (_, y, z, s, _) = self._edges, self._state
        s[:] = 0.0
        if z.size:
            s[0, : len(z)] = z
        self._crew.run(lambda t, lo, hi: kernels.add_balance(lo, hi, edges, y, s[t]), self._edge_ranges)

    def run(self, n: int, last: float, measure: bool) -> Moves | None:
        state, moves = self._state, np.zeros((self._crew.size, self._rho.size if measure else 0))
        if self._crew.size == 1 and self._part.n_known == self._part.linked.size:
            given = (self._sites, self._edges, self._rho, self._resolvent, state)
            kernels.run(n, *given, RELAXATION, last, moves[0])
        else:
            for _ in range(n - 1):
                self._shared_step(RELAXATION, moves[:, :0])
            self._shared_step(last, moves)
        if not measure:
            return None
        n = self._part.linked.size
        # ahead = x + 2 dx and the new x = x + last dx
        moved = (state.ahead[:n] - state.x[:n]) / (2.0 - last)
        return moves.sum(axis=0), self._part.linked @ moved**2

    def _shared_step(self, relax: float, moves: Array) -> None:
        """Take one step on all threads, and add its moves to those of each thread, ``moves (T, p)``, unless empty."""
        sites, edges, rho, resolvent, state = self._sites, self._edges, self._rho, self._resolvent, self._state
        (_, y, _, s, ahead), counted = state, self._part.n_counted

        def step_edges(t: int, lo: int, hi: int) -> None:
            if moves.size:
                kernels.edge_moves(lo, min(hi, counted), edges, rho, ahead, y, moves[t])
            kernels.edge_step(lo, hi, edges, rho, ahead, y, s[t], relax)

        self._crew.run(
            lambda t, lo, hi: kernels.node_step(lo, hi, sites, rho, resolvent, state, relax, moves[t]),
            self._site_ranges,
        )
        self._crew.run(step_edges, self._edge_ranges)

    def inside(self) -> Array | None:
        return None if self._objective.radius is None else self._objective.inside(self._state.x)

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        sites, edges, state, parts = self._sites, self._edges, self._state, self._counted_ranges
        x = state.x if theta is None else theta
        found = self._crew.run(
            lambda t, lo, hi: kernels.gap((lo, hi), parts[t], sites, edges, x, state), self._site_ranges
        )
        return sum(value for value, _ in found), sum(gap for _, gap in found)

    def fused(self) -> Array:
        groups = self._group_sums()
        self._crew.run(lambda _, lo, hi: kernels.group_means(lo, hi, groups), self._columns)
        return self._objective.inside(groups.out)

    @property
    def _columns(self) -> list[tuple[int, int]]:
        """Ranges of columns for threads; for penalties other than l1, columns fuse together."""
        p, separate = self._part.b.shape[1], self._edges.kind == kernels.L1 and self._crew.size > 1
        return self._crew.split(p) if separate else [(0, p)]

    def _group_sums(self) -> kernels.Groups:
        """Return the groups of sites that should be equal, with sums over those hosted here."""
        edges, box, (x, y, z, _, out), hosted = self._edges, self._sites.box, self._state, self._part.linked.size
        groups = kernels.empty_groups(edges, out, z)
        given = (edges, y, 1.0 - INTERIOR, z, box, x[:hosted], groups)
        self._crew.run(lambda _, lo, hi: kernels.group_sums(lo, hi, *given), self._columns)
        return groups

    def pair(self, theta: Array | None = None) -> PrimalDual:
        sites, state = self._numbering.sites, self._state
        x, alpha = state.x if theta is None else theta, restored(state.y, self._numbering.edges)
        z = restored(state.z, sites) if state.z.size else None
        balance = state.s[0] if self._crew.size == 1 else state.s.sum(axis=0)
        return PrimalDual(restored(x, sites), alpha, z, restored(balance, sites), self.rho)

    def close(self) -> None:
        self._crew.close()
