"""The primal-dual iteration on compiled kernels, with threads or shards that share its work.

numpy is the reference. The kernels take the same steps several times faster: ``"auto"`` uses them where there are any.
The state lives in arrays that are updated in place, so that a million sites fit in memory. Large problems use threads,
each with its range of sites and of edges, and scrambled large graphs are renumbered first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from fedkin._base import Array, Index, available_threads, tracked
from fedkin.cluster import Engine, Peers, partition
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


@dataclass(frozen=True, eq=False)
class Part:
    """What an iteration on kernels starts from: some sites, and the edges that touch them, in internal numbers.

    Hosted sites come first; of ``n_known`` sites the others are neighbours that another shard hosts. The first
    ``n_counted`` edges count here for sums over edges. ``head`` and ``tail (E,)`` are ends of edges, ``radius (E,)``
    the radii of their dual balls, and ``kind`` the penalty's code. Of the hosted sites ``order (B,)`` are the places in
    ``terms``, ``b (B, p)``, ``linked (B,)`` the number of duals, and ``box (B, p)`` the levels of sparsity, if any.
    ``start`` has parameters of hosted sites, and duals.
    """

    terms: QuadraticTerms
    order: Index
    n_known: int
    n_counted: int
    head: Any
    tail: Any
    radius: Array
    kind: int
    b: Array
    linked: Array
    box: Array
    ball: float
    start: PrimalDual | None
    in_order: bool  # whether all sites are here, in the order of the terms

    @classmethod
    def of(
        cls, objective: FusedObjective, quadratic: QuadraticTerms, numbering: Numbering, start: PrimalDual | None
    ) -> Part:
        """Return all sites of an objective."""
        internal, sites, edges = numbering.internal, numbering.sites, numbering.edges
        if start is not None:
            zeta = None if start.zeta is None else internal(start.zeta, sites)
            start = replace(start, theta=internal(start.theta, sites), alpha=internal(start.alpha, edges), zeta=zeta)
        return cls(
            terms=quadratic,
            order=sites,
            n_known=sites.size,
            n_counted=numbering.head.size,
            head=numbering.head,
            tail=numbering.tail,
            radius=np.array(internal(objective.edge_radius, edges)),
            kind=kernels.L1 if quadratic.n_params == 1 else kernels.KINDS[objective.penalty.name],
            b=internal(quadratic.b, sites),
            linked=internal(weights_of_sites(objective), sites),
            box=np.empty((0, quadratic.n_params)) if objective.box is None else internal(objective.box, sites),
            ball=float(objective.radius or np.inf),
            start=start,
            in_order=not numbering.changed,
        )


class CompiledIteration(Iteration):
    """`fedkin.solvers.pdhg.NumpyIteration` on kernels, with as many threads as pay."""

    recovers = True

    def __init__(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: PrimalDual | None = None
    ) -> None:
        self._objective = objective
        self._numbering = numbering = Numbering(objective.graph)
        part = Part.of(objective, quadratic, numbering, start)
        self._stand(part, available_threads() if iteration_is_shared(objective, quadratic) else 1)
        super().__init__(rho)

    def _stand(self, part: Part, threads: int) -> None:
        """Go to where the part starts."""
        kernels.load_kernels()
        self._part, self._crew, quadratic, b = part, Crew(threads), part.terms, part.b
        n, p = b.shape
        self._site_ranges, self._edge_ranges = self._crew.split(n), self._crew.split(part.head.size)
        self._edges = kernels.Edges(part.head, part.tail, part.radius, part.kind)
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
        self._sites = kernels.Sites(part.order, A, inverse, curvature, b, quadratic.c, weight, part.box, part.ball)
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
        self._balance_duals()

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
        order = self._part.order
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
            s[0, : len(z)] = z
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
        if self._crew.size == 1 and self._part.n_known == self._part.linked.size:
            given = (self._sites, self._edges, self._rho, self._resolvent, state)
            kernels.run(n, *given, RELAXATION, last, moves[0])
        else:
            for _ in range(n - 1):
                self._shared_step(RELAXATION, moves[:, :0])
            self._shared_step(last, moves)
        return self._moves(moves, last) if measure else None

    def _moves(self, dual: Array, last: float) -> Moves:
        """Return the moves of the last step, given those of the duals by thread."""
        state, n = self._state, self._part.linked.size
        # ahead = x + 2 dx and the new x = x + last dx
        moved = (state.ahead[:n] - state.x[:n]) / (2.0 - last)
        return dual.sum(axis=0), self._part.linked @ moved**2

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
        self._meet(ahead)
        self._crew.run(step_edges, self._edge_ranges)

    def _meet(self, values: Array) -> None:
        """Learn values ``(n_known, p)`` of sites that others host."""

    def inside(self) -> Array | None:
        return None if self._objective.radius is None else self._objective.inside(self._state.x)

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        sites, edges, state, parts = self._sites, self._edges, self._state, self._crew.split(self._part.n_counted)
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


# --- the iteration on shards ----------------------------------------------------------------------------------------

# An edge between two shards is in both: only ``ahead`` of the sites at such edges travels, once an iteration.


class SolverShard(CompiledIteration):
    """One shard. ``give`` and ``take`` are its numbers of the sites that each neighbour needs, and hosts."""

    def __init__(self, peers: Peers, part: Part, give: Mapping[int, Index], take: Mapping[int, Index]) -> None:
        self._peers, self._give, self._take = peers, give, take
        self._stand(part, 1)

    def is_regular(self) -> bool:
        """Return whether every hosted site has a minimiser of its own."""
        return self.regular

    def set_rho(self, rho: Array) -> None:
        """Set ``rho (p,)`` or ``(1,)``."""
        self._set_rho(rho)

    def run(self, n: int, last: float, measure: bool) -> Moves | None:
        """Take ``n`` steps, all over-relaxed but the last."""
        return self._run(n, last, measure)

    def value_and_gap(self, theta: Array | None = None) -> tuple[float, float]:
        """Return this shard's part of value and gap, also of other parameters ``theta (n_known, p)``."""
        if theta is None:
            self._meet(self._state.x)
        return self.certificate(theta)

    def parts(self, duals: bool) -> tuple[Array, ...]:
        """Return parameters of hosted sites and, if asked for, counted edge duals, site duals and balances."""
        part, (x, y, z, s, _) = self._part, self._state
        hosted = part.linked.size
        return (x[:hosted], y[: part.n_counted], z, s[0, :hosted]) if duals else (x[:hosted],)

    def free(self) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """Return 0 where counted edge duals, and site duals, are inside their balls, 1 elsewhere, for `fuse`."""
        part, y, z = self._part, self._state.y, self._state.z
        limit, y = (1.0 - INTERIOR) * part.radius[: part.n_counted, None], y[: part.n_counted]
        size = np.abs(y)
        if part.kind != kernels.L1:
            size = np.sqrt((y * y).sum(axis=1))[:, None] if part.kind == kernels.L2 else size.sum(axis=1)[:, None]
        inside = np.abs(z) < (1.0 - INTERIOR) * part.box
        return (size >= limit).astype(np.int8), (~inside).astype(np.int8)

    def state(self) -> dict[str, Array]:
        """Return everything that changes."""
        hosted, (x, y, z, _, _) = self._part.linked.size, self._state
        return {"x": x[:hosted], "y": y, "z": z, "rho": self.rho}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go back to a `state`."""
        self._state.x[: self._part.linked.size] = state["x"]
        self._state.y[:], self._state.z[:] = state["y"], state["z"]
        self._balance_duals()
        self._set_rho(state["rho"])

    def _meet(self, values: Array) -> None:
        self._state.s[:, self._part.linked.size :] = 0.0  # nobody needs the balances of others
        found = self._peers.exchange({number: values[sites] for number, sites in self._give.items()})
        for number, theirs in found.items():
            values[self._take[number]] = theirs


@dataclass(frozen=True, eq=False)
class Cut:
    """One shard of a graph: the numbers of its sites and edges, and of the sites that other shards need or host."""

    sites: Index  # hosted ones first
    hosted: int
    edges: Index  # counted ones first
    counted: int
    ends: Index  # (E, 2), local numbers
    give: dict[int, Index]
    take: dict[int, Index]

    @classmethod
    def of(cls, edges: Index, labels: Index, order: Index, k: int) -> Cut:
        """Return shard ``k`` of sites with ``labels (V,)``, hosted in an ``order`` that keeps neighbours close."""
        own = order[labels[order] == k]
        first, second = (labels[edges] == k).T
        chosen = np.concatenate([np.flatnonzero(first), np.flatnonzero(second & ~first)])
        ends = edges[chosen]
        crossing = ends[labels[ends[:, 0]] != labels[ends[:, 1]]]
        here = labels[crossing] == k
        mine, theirs = crossing[here], crossing[~here]
        others = np.unique(theirs)
        place = np.empty(labels.size, dtype=np.int64)
        place[own], place[others] = np.arange(own.size), own.size + np.arange(others.size)
        shard_of = labels[theirs]
        give = {int(r): place[np.unique(mine[shard_of == r])] for r in np.unique(shard_of)}
        take = {r: place[others[labels[others] == r]] for r in give}
        return cls(np.concatenate([own, others]), own.size, chosen, int(first.sum()), place[ends], give, take)

    def part(self, objective: FusedObjective, quadratic: QuadraticTerms, start: PrimalDual | None) -> Part:
        """Return what the shard starts from."""
        own, edges, box = self.sites[: self.hosted], self.edges, objective.box
        if start is not None:
            zeta, nothing = None if start.zeta is None else start.zeta[own], np.empty((0, quadratic.n_params))
            start = PrimalDual(start.theta[own], start.alpha[edges], zeta, nothing, start.rho)
        head, tail = np.ascontiguousarray(self.ends.T.astype(np.int32))
        return Part(
            terms=quadratic.take(own),
            order=np.arange(self.hosted),
            n_known=self.sites.size,
            n_counted=self.counted,
            head=head,
            tail=tail,
            radius=objective.edge_radius[edges],
            kind=kernels.L1 if quadratic.n_params == 1 else kernels.KINDS[objective.penalty.name],
            b=quadratic.b[own],
            linked=weights_of_sites(objective)[own],
            box=np.empty((0, quadratic.n_params)) if box is None else box[own],
            ball=float(objective.radius or np.inf),
            start=start,
            in_order=True,
        )


class Sharding:
    """The shards of a graph on an engine, for one iteration after the other."""

    def __init__(self, engine: Engine, graph: Graph) -> None:
        self.engine, edges, order = engine, graph.edges, Numbering(graph).sites
        labels = partition(graph.n_sites, edges, min(engine.workers, graph.n_sites))
        self.cuts: Sequence[Cut] = [Cut.of(edges, labels, order, k) for k in np.unique(labels).tolist()]
        self.shards: Any = None

    def iteration(
        self, objective: FusedObjective, quadratic: QuadraticTerms, rho: Array, start: PrimalDual | None
    ) -> ShardedIteration:
        """Return an iteration, which ends the one before."""

        def make(k: int) -> tuple[type[SolverShard], Sequence[object]]:
            cut = self.cuts[k]
            return SolverShard, (cut.part(objective, quadratic, start), cut.give, cut.take)

        if self.shards is None:
            self.shards = self.engine.shards(make, len(self.cuts))
        else:
            self.shards.remake(make)
        return ShardedIteration(self, objective, rho)

    def close(self) -> None:
        """End the shards."""
        if self.shards is not None:
            self.shards.close()


class ShardedIteration(Iteration):
    """`fedkin.solvers.compiled.CompiledIteration` on shards; sites are in the caller's order."""

    recovers = True

    def __init__(self, sharding: Sharding, objective: FusedObjective, rho: Array) -> None:
        self._sharding, self._shards, self._objective = sharding, sharding.shards, objective
        self.regular = all(self._shards.call("is_regular", changes=False))
        self._unsaved = 0
        super().__init__(rho)

    def _set_rho(self, rho: Array) -> None:
        self.rho = rho
        self._shards.call("set_rho", rho)

    def advance(self, n: int) -> None:
        try:
            super().advance(n)
        except KeyboardInterrupt:
            self._run(1, 1.0, measure=False)
            self.n_iter += 1
            raise

    def _run(self, n: int, last: float, measure: bool) -> Moves | None:
        every = self._sharding.engine.save_every
        while n > 0:
            steps = min(n, every - self._unsaved)
            n -= steps
            found = self._shards.call("run", steps, RELAXATION if n else last, measure and not n)
            self._unsaved += steps
            if self._unsaved == every:
                self._shards.save()
                self._unsaved = 0
        if not measure:
            return None
        dual, primal = (np.sum([moves[k] for moves in found], axis=0) for k in (0, 1))
        return dual, primal

    def _gathered(self, duals: bool) -> list[Array]:
        """Return parameters and, if asked for, edge duals, site duals and balances in the caller's order."""
        cuts, found = self._sharding.cuts, self._shards.call("parts", duals, changes=False)
        (n, p), rows = (sum(cut.hosted for cut in cuts), found[0][0].shape[1]), self._objective.graph.n_edges
        out = [np.empty((size, p)) for size in ((n, rows, n if found[0][2].size else 0, n) if duals else (n,))]
        for cut, parts in zip(cuts, found, strict=True):
            own = cut.sites[: cut.hosted]
            for k, (whole, part) in enumerate(zip(out, parts, strict=True)):
                if whole.size:
                    whole[cut.edges[: cut.counted] if k == 1 else own] = part
        return out

    def inside(self) -> Array | None:
        return None if self._objective.radius is None else self._objective.inside(self._gathered(False)[0])

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        each = None if theta is None else [(theta[cut.sites],) for cut in self._sharding.cuts]
        found = self._shards.call("value_and_gap", each=each, changes=False)
        return sum(value for value, _ in found), sum(gap for _, gap in found)

    def fused(self) -> Array:
        x, cuts, graph = self._gathered(False)[0], self._sharding.cuts, self._objective.graph
        (n, p), box = x.shape, self._objective.box
        edges, sites = np.empty((graph.n_edges, p), dtype=np.int8), np.empty((0 if box is None else n, p), np.int8)
        for cut, (of_edges, of_sites) in zip(cuts, self._shards.call("free", changes=False), strict=True):
            edges[cut.edges[: cut.counted]] = of_edges
            if box is not None:
                sites[cut.sites[: cut.hosted]] = of_sites
        kind = kernels.L1 if p == 1 else kernels.KINDS[self._objective.penalty.name]
        head, tail = np.ascontiguousarray(graph.edges.T.astype(np.int32))
        # 0 is inside a ball of radius 1, 1 is not inside 1 - INTERIOR of it, in any norm
        known = kernels.Edges(head, tail, np.ones(graph.n_edges), kind)
        out, ones = np.empty_like(x), np.ones(sites.shape)
        kernels.fuse(0, p, known, edges, 1.0 - INTERIOR, sites, ones, x, out)
        return self._objective.inside(out)

    def pair(self, theta: Array | None = None) -> PrimalDual:
        x, alpha, zeta, balance = self._gathered(True)
        return PrimalDual(x if theta is None else theta, alpha, zeta if zeta.size else None, balance, self.rho)
