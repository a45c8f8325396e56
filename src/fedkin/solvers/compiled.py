"""The primal-dual iteration of `fedkin.solvers.pdhg` on compiled kernels: the same steps, the same checks.

The state lives in one set of arrays that is updated in place, so that a million sites fit in memory. Large problems
use threads, each with its range of sites and of edges, and scrambled large graphs are renumbered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, available_threads
from fedkin.core import FusedObjective, QuadraticTerms, Solution
from fedkin.solvers.backend import USUAL, Crew, Limits, iteration_is_shared, iteration_work
from fedkin.solvers.kernels import checks as check_kernels
from fedkin.solvers.kernels import gaps as gap_kernels
from fedkin.solvers.kernels import steps as kernels
from fedkin.solvers.kernels.bundles import Edges, Levels, Sites, State, Step
from fedkin.solvers.kernels.checks import Calls, Memory
from fedkin.solvers.kernels.jit import Outlined, frozen, nothing
from fedkin.solvers.layout import Grams, Numbering
from fedkin.solvers.pdhg import (
    COLD,
    INTERIOR,
    RELAXATION,
    Checked,
    Iteration,
    PrimalDual,
    Rebalancing,
    Start,
    Stopping,
    weights_of_sites,
)

_NO_PAIRS = np.empty((0, 0, 0))
NO_LEVELS = Levels(
    strengths=nothing(0),
    theta=_NO_PAIRS,
    alpha=_NO_PAIRS,
    ends=np.empty(0, dtype=np.int64),
    rho=nothing(0),
    edge_weight=nothing(0),
    component=nothing(0, dtype=np.int32),
    curvature=1.0,
)


@cache
def _calls(dense: bool, edge_step: Outlined, reroutes: bool, in_levels: bool) -> Calls:
    """What `check_kernels.settle` drives."""
    return Calls(
        node_step=(kernels.dense_step if dense else kernels.isotropic_step).address,
        edge_step=edge_step.address,
        edge_moves=kernels.edge_moves.address,
        invert=gap_kernels.invert.address if dense else 0,
        node_gap=(gap_kernels.dense_gap if dense else gap_kernels.isotropic_gap).address,
        edge_gap=gap_kernels.edge_gap.address,
        fuse=gap_kernels.fuse.address,
        reroute=gap_kernels.reroute.address if reroutes else 0,
        begin=check_kernels.begin.address if in_levels else 0,
        keep=check_kernels.keep.address if in_levels else 0,
    )


class KernelIteration(Iteration):
    """What iterations on kernels share: threads, and the checks of sites and edges that they work on."""

    _crew: Crew
    _sites: Sites
    _edges: Edges

    def _certified(self, x: Array, y: Array, s: Array) -> tuple[float, float]:
        """Objective value and duality gap of parameters ``x``, duals ``y`` with balance ``s``, without sparsity."""
        crew, sites, edges = self._crew, self._sites, self._edges
        node_gap = gap_kernels.dense_gap if sites.A.size else gap_kernels.isotropic_gap
        of_sites = crew.run(lambda _, lo, hi: node_gap(lo, hi, sites, x, s), crew.split(x.shape[0]))
        of_edges = crew.run(lambda _, lo, hi: gap_kernels.edge_gap(lo, hi, edges, x, y), crew.split(y.shape[0]))
        value, gap = (sum(part) for part in zip(*of_sites, *of_edges, strict=True))
        return float(value), float(gap)

    def _fused(self, x: Array, y: Array, z: Array, out: Array) -> Array:
        """Parameters ``out`` in which fused sites are exactly equal."""
        crew, edges, box = self._crew, self._edges, self._sites.box
        # columns of other penalties than l1 belong together
        columns = crew.split(x.shape[1]) if edges.kind == kernels.L1 and crew.size > 1 else [(0, x.shape[1])]
        crew.run(lambda _, lo, hi: gap_kernels.fuse(lo, hi, edges, y, 1.0 - INTERIOR, z, box, x, out), columns)
        return out

    def close(self) -> None:
        self._crew.close()


class CompiledIteration(KernelIteration):
    """`fedkin.solvers.pdhg.NumpyIteration` on kernels, by default with as many threads as pay."""

    recovers = True

    def __init__(
        self,
        objective: FusedObjective,
        quadratic: QuadraticTerms,
        rho: Array,
        start: Start = COLD,
        n_threads: int | None = None,
        limits: Limits = USUAL,
    ) -> None:
        threads = available_threads() if iteration_is_shared(objective, quadratic) else 1
        self._crew = Crew(threads if n_threads is None else n_threads)
        self._limits, self._graph = limits, objective.graph
        self._numbering = numbering = Numbering(objective.graph, limits.scrambled_sites)
        self._site_ranges = self._crew.split(quadratic.n_sites)
        self._edge_ranges = self._crew.split(objective.graph.n_edges)
        radius = np.array(numbering.edges_to_internal(objective.edge_radius))
        self._edges = Edges(numbering.head, numbering.tail, radius, kernels.KINDS[objective.penalty.name])
        self._edge_step = kernels.EDGE_STEPS[kernels.L1 if quadratic.n_params == 1 else self._edges.kind]
        self._node_step = kernels.isotropic_step if quadratic.isotropic else kernels.dense_step
        self._edge_weight = frozen(numbering.edges_to_internal(objective.graph.weights))
        self._grams = None if quadratic.isotropic else Grams(quadratic, numbering, self._crew, limits.room)
        own = self._set_sites(objective, quadratic)
        self.regular = own is not None
        #: Whether kernels can certify a pair on their own.
        alone = limits.checks > 0 and self._crew.size == 1 and objective.sparsity is None
        self.checks = alone and (self.regular or self._anchored())
        self._state = self._started(quadratic, own, start)
        self._rebalancing = Rebalancing()
        self._in_one_go = max(1, int(limits.one_go / iteration_work(objective, quadratic)))
        self._factor: Array | None = None
        self._last_checks = np.empty((0, 3))
        self.n_iter = 0
        self.rho = rho
        full = np.empty(quadratic.n_params)
        full[:] = rho
        if self._grams is None:
            first = own_step = np.empty((0, full.size, full.size))
        else:
            first, own_step = self._grams.resolvents(self._sites.weight, full)
        self._step = self._first = Step(full, 0.5 * full, first)
        self._memory = self._memorised(own_step)

    def _memorised(self, own: Array) -> Memory:
        """What `settle` keeps; ``own`` takes other resolvents than the first."""
        y, s = self._state.y[:0], self._state.s[:0]
        if self._sites.singular.size and self.checks:
            y, s = np.empty_like(self._state.y), np.empty_like(self._state.s)
        counters = np.zeros(check_kernels.N_COUNTERS, dtype=np.int64)
        return Memory(counters, np.empty((2, self._step.rho.size)), own, y, s)

    def _set_sites(self, objective: FusedObjective, quadratic: QuadraticTerms) -> Array | None:
        """Arrange the smooth part; returns each site's own minimiser, None when one may not be unique."""
        internal, p = self._numbering.sites_to_internal, quadratic.n_params
        b, linked = internal(quadratic.b), internal(weights_of_sites(objective))
        A = own_inverse = unseen = nothing(0, p, p)
        curvature, own, singular = nothing(0), None, nothing(0, dtype=np.bool_)
        if self._grams is None:
            curvature = internal(quadratic.A)
            own = b / curvature[:, None] if (curvature > 0).all() else None
        else:
            A = self._grams.A
            own, own_inverse = self._grams.minimizers(b)
            if own is None and A.size <= self._limits.room and quadratic.factors is None:
                own_inverse, singular = internal(quadratic.inverses), internal(quadratic.singular)
                unseen = np.zeros_like(A)
                unseen[quadratic.singular] = quadratic.unseen
                unseen = internal(unseen)
        box = nothing(0, p) if objective.sparsity is None else internal(objective.sparsity)
        weight = np.where(linked > 0, linked, 1.0)
        arrays = (self._numbering.sites, A, own_inverse, curvature, b, quadratic.c, linked, weight, box)
        self._sites = Sites(*(frozen(array) for array in (*arrays, singular, unseen)))
        return own

    def _anchored(self) -> bool:
        """Whether all singular sites are known, and those with edges have regular neighbours."""
        bad, (head, tail, radius, kind) = self._sites.singular, self._edges
        if bad.size == 0 or kind == kernels.LINF:
            return False
        mixed = (bad[head] != bad[tail]) & (radius > 0)
        served = (self._sites.linked == 0) | ~bad
        served[head[mixed]] = served[tail[mixed]] = True
        return bool(served.all())

    def _started(self, quadratic: QuadraticTerms, own: Array | None, start: Start) -> State:
        theta, alpha, zeta = start
        (n, p), internal = self._sites.b.shape, self._numbering.sites_to_internal
        alone = self._sites.linked == 0
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
        y = np.zeros((self._edge_weight.size, p))
        if alpha is not None:
            y[:] = self._numbering.edges_to_internal(alpha)
        z = np.zeros(self._sites.box.shape) if zeta is None else np.array(internal(zeta), dtype=np.float64)
        state = State(x, y, z, np.zeros((self._crew.size, n, p)), np.empty((n, p)))
        self._reset_balance(state)
        return state

    def _reset_balance(self, state: State) -> None:
        state.s[:] = 0.0
        if state.z.size:
            state.s[0] = state.z
        self._crew.run(
            lambda t, lo, hi: kernels.add_balance(lo, hi, self._edges, state.y, state.s[t]), self._edge_ranges
        )

    @property
    def live(self) -> bool:
        return bool(self._state.y.size > self._limits.copied) and not self._numbering.changed

    # --- whole solves in one call ------------------------------------------------------------------------------------

    def settle(self, stopping: Stopping) -> Checked | None:
        """Iterations and checks without coming back here in between."""
        if not self.checks:
            return None
        self._apply_factor()
        count, known, rebalancing = self._memory.counters, len(self._last_checks), self._rebalancing
        rows = np.empty((known + self._limits.checks, 3))
        rows[:known] = self._last_checks
        count[check_kernels.CHECKS], count[check_kernels.DONE] = known, self.n_iter
        count[check_kernels.LOOK_AT], count[check_kernels.INTERVAL] = rebalancing.next, rebalancing.interval
        self._settle(rows, self.n_iter + self._in_one_go, stopping)
        self.n_iter = int(count[check_kernels.DONE])
        rebalancing.next, rebalancing.interval = count[[check_kernels.LOOK_AT, check_kernels.INTERVAL]].tolist()
        if count[check_kernels.REBALANCED]:
            self._step = self._step._replace(resolvent=self._memory.own)
            self.rho = self._step.rho[: self.rho.size].copy()
        rows = rows[: count[check_kernels.CHECKS]]
        self._last_checks = rows[-2:]
        return Checked(rows[known:], self._state.ahead if count[check_kernels.FUSED] else None)

    def _settle(self, rows: Array, pause: int, stopping: Stopping, levels: Levels | None = None) -> None:
        state = (self._sites, self._edges, self._step, self._state, self._memory)
        calls = _calls(self._grams is not None, self._edge_step, self._memory.y.size > 0, levels is not None)
        check_kernels.settle(rows, pause, stopping, *state, NO_LEVELS if levels is None else levels, calls)

    def settle_levels(
        self, known: Sequence[tuple[float, Solution]], strengths: Array, stopping: Stopping, fuse_components: bool
    ) -> tuple[list[tuple[PrimalDual, Array]], bool]:
        """Pairs at the first of some penalty strengths, with the checks of each ``(m, 3)``, as far as a kernel gets.

        At most two are ``known``. Also whether components may be fused at the last one, where the iteration then
        stands; with ``fuse_components`` the kernel stops there.
        """
        numbering, (n, p) = self._numbering, self._sites.b.shape
        before, m = len(known), len(known) + strengths.size
        theta, alpha = np.empty((m, n, p)), np.empty((m, self._edge_weight.size, p))
        for k, (_, solution) in enumerate(known):
            theta[k] = numbering.sites_to_internal(solution.theta)
            alpha[k] = numbering.edges_to_internal(solution.alpha)
        at = np.concatenate([[strength for strength, _ in known], strengths])
        ends, rows = np.zeros(m, dtype=np.int64), np.empty((strengths.size * self._limits.checks, 3))
        component, curvature = self._components if fuse_components else (nothing(0, dtype=np.int32), 1.0)
        rho, count = self._first.rho.copy(), self._memory.counters
        count[:] = 0
        count[check_kernels.LEVEL] = before
        self._step = self._first
        levels = Levels(frozen(at), theta, alpha, ends, frozen(rho), self._edge_weight, component, curvature)
        self._settle(rows, self._in_one_go, stopping, levels)
        self._step.rho[:] = rho
        found = []
        for k in range(before, int(count[check_kernels.LEVEL])):
            checks = rows[0 if k == before else ends[k - 1] : ends[k]]
            x, y = numbering.sites_to_caller(theta[k]), numbering.edges_to_caller(alpha[k])
            found.append((PrimalDual(x, y, None, self._state.s[0], self.rho, int(checks[-1, 0])), checks))
        return found, not count[check_kernels.APART]

    @cached_property
    def _components(self) -> tuple[NDArray[np.int32], float]:
        """The component of each edge, and what no site's curvature is less than in any direction."""
        component = self._graph.components()[self._graph.edges[:, 0]].astype(np.int32)
        component = frozen(self._numbering.edges_to_internal(component))
        if self._grams is None:
            return component, float(self._sites.curvature.min())
        inverse = self._sites.own_inverse
        return component, 1.0 / float(np.sqrt(np.einsum("upq,upq->u", inverse, inverse).max()))

    # --- iterations -----------------------------------------------------------------------------------------------

    def advance(self, n: int) -> None:
        try:
            self._advance(n)
        except KeyboardInterrupt:
            # half a step may be done: any point is good to start from, once the balance fits the duals again
            self._reset_balance(self._state)
            self._single_step(1.0, measure=False)
            raise

    def _advance(self, n: int) -> None:
        end = self.n_iter + n
        while self.n_iter < end:
            self._apply_factor()
            stop = min(self._rebalancing.next, end)
            self._run(stop - self.n_iter - 1, RELAXATION)
            relax = 1.0 if stop == end else RELAXATION
            if stop == self._rebalancing.next:
                self._single_step(relax, measure=True)
            else:
                self._run(1, relax)

    def _run(self, n: int, relax: float) -> None:
        if self._crew.size > 1:
            for _ in range(n):
                self._single_step(relax, measure=False)
        elif n > 0:
            box = kernels.box_step.address if self._state.z.size else 0
            calls = kernels.StepCalls(self._node_step.address, box, self._edge_step.address)
            kernels.run(n, self._sites, self._edges, self._step, self._state, relax, calls)
            self.n_iter += n

    def _single_step(self, relax: float, measure: bool) -> None:
        sites, edges, step, state, crew = self._sites, self._edges, self._step, self._state, self._crew
        x, y, z, s, ahead = state

        before = z.copy() if measure else z
        crew.run(lambda _, lo, hi: self._node_step(lo, hi, sites, step, state, relax), self._site_ranges)
        if z.size:
            crew.run(
                lambda _, lo, hi: kernels.box_step(lo, hi, step.rho, sites.box, state, relax), self._site_ranges
            )
        if measure:
            dual = np.zeros((crew.size, step.rho.size))
            crew.run(
                lambda t, lo, hi: kernels.edge_moves(lo, hi, edges, step.half, ahead, y, dual[t]), self._edge_ranges
            )
            # ahead = x + 2 dx and the new x = x + relax dx
            dx = (ahead - x) / (2.0 - relax)
            duals = 2.0 * dual.sum(axis=0) + (((z - before) / relax) ** 2).sum(axis=0)
            self._factor = self._rebalancing.factor(duals, sites.linked @ dx**2, self.rho)
        crew.run(lambda t, lo, hi: self._edge_step(lo, hi, edges, step.half, ahead, y, s[t], relax), self._edge_ranges)
        self.n_iter += 1

    def _apply_factor(self) -> None:
        """Change rho where the last look at it said so."""
        if self._factor is None:
            return
        self.rho, self._factor = self.rho * self._factor, None
        self._step.rho[:] = self.rho
        self._step.half[:] = 0.5 * self._step.rho
        if self._grams is not None:
            self._grams.invert(self._sites.weight, self._step.rho, self._memory.own)
            self._step = self._step._replace(resolvent=self._memory.own)

    # --- where it stands ------------------------------------------------------------------------------------------

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        state, box = self._state, self._sites.box
        x = state.x if theta is None else theta
        value, gap = self._certified(x, state.y, state.s)
        if box.size:
            size = box * np.abs(x)
            value, gap = value + float(size.sum()), gap + float((size - state.z * x).sum())
        return value, gap

    def fused(self) -> Array:
        state = self._state  # whose `ahead` is free between two iterations
        return self._fused(state.x, state.y, state.z, state.ahead)

    def arranged(self, theta: Array) -> Array:
        return self._numbering.sites_to_internal(theta)

    def pair(self, theta: Array | None = None) -> PrimalDual:
        numbering, state = self._numbering, self._state
        x = numbering.sites_to_caller(state.x if theta is None else theta)
        y = numbering.edges_to_caller(state.y)
        z = numbering.sites_to_caller(state.z) if state.z.size else None
        balance = numbering.sites_to_caller(state.s[0].copy() if self._crew.size == 1 else state.s.sum(axis=0))
        if not (self.live or numbering.changed):
            x, y, z = x.copy(), y.copy(), None if z is None else z.copy()
        return PrimalDual(x, y, z, balance, self.rho, self.n_iter)
