"""The primal-dual iteration of `fedkin.solvers.pdhg` on compiled kernels: the same steps, the same checks.

The state lives in one set of arrays that is updated in place, so that a million devices fit in memory. Large problems
use threads, each with its range of devices and of edges, and scrambled large graphs are renumbered first.
"""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, available_threads
from fedkin.objective import FusedObjective, QuadraticTerms, Solution
from fedkin.solvers.backend import USUAL, Crew, Limits, iteration_is_shared, iteration_work
from fedkin.solvers.kernels import checks as check_kernels
from fedkin.solvers.kernels import gaps as gap_kernels
from fedkin.solvers.kernels import steps as kernels
from fedkin.solvers.kernels.bundles import Devices, Edges, State, Step
from fedkin.solvers.kernels.jit import frozen
from fedkin.solvers.layout import Grams, Numbering
from fedkin.solvers.pdhg import (
    INTERIOR,
    RELAXATION,
    Checked,
    Iteration,
    PrimalDual,
    Rebalancing,
    Stopping,
    weights_of_devices,
)


class KernelIteration(Iteration):
    """What iterations on kernels share: threads, and the checks of devices and edges that they work on."""

    _crew: Crew
    _devices: Devices
    _edges: Edges

    def _certified(self, x: Array, y: Array, s: Array) -> tuple[float, float]:
        """Objective value and duality gap of parameters ``x``, duals ``y`` with balance ``s``, without sparsity."""
        crew, devices, edges = self._crew, self._devices, self._edges
        of_devices = crew.run(lambda _, lo, hi: gap_kernels.node_gap(lo, hi, devices, x, s), crew.split(x.shape[0]))
        of_edges = crew.run(lambda _, lo, hi: gap_kernels.edge_gap(lo, hi, edges, x, y), crew.split(y.shape[0]))
        value, gap = (sum(part) for part in zip(*of_devices, *of_edges, strict=True))
        return float(value), float(gap)

    def _fused(self, x: Array, y: Array, z: Array, out: Array) -> Array:
        """Parameters ``out`` in which fused devices are exactly equal."""
        crew, edges, box = self._crew, self._edges, self._devices.box
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
        theta: Array | None,
        alpha: Array | None,
        zeta: Array | None,
        rho: Array,
        n_threads: int | None = None,
        limits: Limits = USUAL,
    ) -> None:
        threads = available_threads() if iteration_is_shared(objective, quadratic) else 1
        self._crew = Crew(threads if n_threads is None else n_threads)
        self._limits = limits
        self._numbering = numbering = Numbering(objective.graph, limits.scrambled_devices)
        self._device_ranges = self._crew.split(quadratic.n_devices)
        self._edge_ranges = self._crew.split(objective.graph.n_edges)
        radius = np.array(numbering.edges_to_internal(objective.edge_radius))
        self._edges = Edges(
            frozen(numbering.head), frozen(numbering.tail), radius, kernels.KINDS[objective.penalty.name]
        )
        self._edge_weight = frozen(numbering.edges_to_internal(objective.graph.weights))
        self._grams = None if quadratic.isotropic else Grams(quadratic, numbering, self._crew, limits.room)
        own = self._set_devices(objective, quadratic)
        self.regular = own is not None
        #: Whether kernels can certify a pair on their own.
        alone = limits.checks > 0 and self._crew.size == 1 and objective.sparsity is None
        self.checks = alone and (self.regular or self._anchored())
        self._state = self._started(quadratic, own, theta, alpha, zeta)
        self._rebalancing = Rebalancing()
        self._in_one_go = max(1, int(limits.one_go / iteration_work(objective, quadratic)))
        self._factor: Array | None = None
        self._counters = np.zeros(check_kernels.N_COUNTERS, dtype=np.int64)
        self._moves = np.empty((2, quadratic.n_params))
        self._last_checks = np.empty((0, 3))
        self.n_iter = 0
        self.rho = rho
        full = np.array(np.broadcast_to(rho, quadratic.n_params))
        none = np.empty((0, full.size, full.size))
        first, self._own = (none, none) if self._grams is None else self._grams.resolvents(self._devices.weight, full)
        self._step = Step(full, 0.5 * full, first)
        self._first = full.copy(), first

    def _set_devices(self, objective: FusedObjective, quadratic: QuadraticTerms) -> Array | None:
        """Arrange the smooth part; returns each device's own minimiser, None when one may not be unique."""
        internal, p = self._numbering.devices_to_internal, quadratic.n_params
        b, linked = internal(quadratic.b), internal(weights_of_devices(objective))
        A = own_inverse = unseen = np.empty((0, p, p))
        curvature, own, singular = np.empty(0), None, np.empty(0, dtype=bool)
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
        box = np.empty((0, p)) if objective.sparsity is None else internal(objective.sparsity)
        weight = np.where(linked > 0, linked, 1.0)
        arrays = (self._numbering.devices, A, own_inverse, curvature, b, quadratic.c, linked, weight, box)
        self._devices = Devices(*(frozen(array) for array in (*arrays, singular, unseen)))
        return own

    def _anchored(self) -> bool:
        """Whether all singular devices are known, and those with edges have regular neighbours."""
        bad, (head, tail, radius, kind) = self._devices.singular, self._edges
        if bad.size == 0 or kind == kernels.LINF:
            return False
        mixed = (bad[head] != bad[tail]) & (radius > 0)
        served = (self._devices.linked == 0) | ~bad
        served[head[mixed]] = served[tail[mixed]] = True
        return bool(served.all())

    def _started(
        self, quadratic: QuadraticTerms, own: Array | None, theta: Array | None, alpha: Array | None, zeta: Array | None
    ) -> State:
        (n, p), internal = self._devices.b.shape, self._numbering.devices_to_internal
        alone = self._devices.linked == 0
        if own is None:
            own = internal(quadratic.minimizers())
        if theta is None:
            x = own.copy()
            if not self.regular:
                x[internal(quadratic.singular) & ~alone] = 0.0
        else:
            x = np.array(internal(theta))
            # a device without duals is on its own from the start, and stays there
            x[alone] = own[alone]
        y = np.zeros((self._edge_weight.size, p))
        if alpha is not None:
            y[:] = self._numbering.edges_to_internal(alpha)
        z = np.zeros(self._devices.box.shape) if zeta is None else np.array(internal(zeta))
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
        count, known, rebalancing = self._counters, len(self._last_checks), self._rebalancing
        rows = np.empty((known + self._limits.checks, 3))
        rows[:known] = self._last_checks
        count[check_kernels.CHECKS], count[check_kernels.DONE] = known, self.n_iter
        count[check_kernels.LOOK_AT], count[check_kernels.INTERVAL] = rebalancing.next, rebalancing.interval
        check_kernels.settle(
            count,
            rows,
            self._moves,
            self.n_iter + self._in_one_go,
            stopping,
            self._devices,
            self._edges,
            self._step,
            self._own,
            self._state,
        )
        self.n_iter = int(count[check_kernels.DONE])
        rebalancing.next, rebalancing.interval = count[[check_kernels.LOOK_AT, check_kernels.INTERVAL]].tolist()
        if count[check_kernels.REBALANCED]:
            self._step = self._step._replace(resolvent=self._own)
            self.rho = self._step.rho[: self.rho.size].copy()
        rows = rows[: count[check_kernels.CHECKS]]
        self._last_checks = rows[-2:]
        return Checked(rows[known:], self._state.ahead if count[check_kernels.FUSED] else None)

    def restart(self, strength: float, start: Solution | None) -> None:
        """Begin anew with another penalty strength, the first rho, and the parameters and duals of ``start``."""
        self._edges.radius[:] = strength * self._edge_weight
        state, (rho, resolvent) = self._state, self._first
        if start is not None:
            state.x[:] = self._numbering.devices_to_internal(start.theta)
            state.y[:] = self._numbering.edges_to_internal(start.alpha)
        self._reset_balance(state)
        self._rebalancing, self._factor, self.n_iter = Rebalancing(), None, 0
        self._counters[:] = 0
        self._last_checks = np.empty((0, 3))
        self.rho = rho[: self.rho.size].copy()
        self._step = Step(rho.copy(), 0.5 * rho, resolvent)

    def least_curvature(self) -> float:
        """No device's curvature is less than this in any direction."""
        if self._grams is None:
            return float(self._devices.curvature.min())
        inverse = self._devices.own_inverse
        return 1.0 / float(np.sqrt(np.einsum("upq,upq->u", inverse, inverse).max()))

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
            kernels.run(n, self._devices, self._edges, self._step, self._state, relax)
            self.n_iter += n

    def _single_step(self, relax: float, measure: bool) -> None:
        devices, edges, step, state, crew = self._devices, self._edges, self._step, self._state, self._crew
        x, y, z, s, ahead = state

        before = z.copy() if measure else z
        crew.run(lambda _, lo, hi: kernels.node_step(lo, hi, devices, step, state, relax), self._device_ranges)
        if measure:
            dual = np.zeros((crew.size, step.rho.size))
            crew.run(
                lambda t, lo, hi: kernels.edge_moves(lo, hi, edges, step.half, ahead, y, dual[t]), self._edge_ranges
            )
            # ahead = x + 2 dx and the new x = x + relax dx
            dx = (ahead - x) / (2.0 - relax)
            duals = 2.0 * dual.sum(axis=0) + (((z - before) / relax) ** 2).sum(axis=0)
            self._factor = self._rebalancing.factor(duals, devices.linked @ dx**2, self.rho)
        crew.run(
            lambda t, lo, hi: kernels.edge_step(lo, hi, edges, step.half, ahead, y, s[t], relax), self._edge_ranges
        )
        self.n_iter += 1

    def _apply_factor(self) -> None:
        """Change rho where the last look at it said so."""
        if self._factor is None:
            return
        self.rho, self._factor = self.rho * self._factor, None
        self._step.rho[:] = self.rho
        self._step.half[:] = 0.5 * self._step.rho
        if self._grams is not None:
            self._grams.invert(self._devices.weight, self._step.rho, self._own)
            self._step = self._step._replace(resolvent=self._own)

    # --- where it stands ------------------------------------------------------------------------------------------

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        state, box = self._state, self._devices.box
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
        return self._numbering.devices_to_internal(theta)

    def pair(self, theta: Array | None = None) -> PrimalDual:
        numbering, state = self._numbering, self._state
        x = numbering.devices_to_caller(state.x if theta is None else theta)
        y = numbering.edges_to_caller(state.y)
        z = numbering.devices_to_caller(state.z) if state.z.size else None
        balance = numbering.devices_to_caller(state.s[0].copy() if self._crew.size == 1 else state.s.sum(axis=0))
        if not (self.live or numbering.changed):
            x, y, z = x.copy(), y.copy(), None if z is None else z.copy()
        return PrimalDual(x, y, z, balance, self.rho, self.n_iter)
