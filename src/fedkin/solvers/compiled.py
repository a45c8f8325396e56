"""The primal-dual iteration of `fedkin.solvers.pdhg` on compiled kernels: the same steps, the same checks.

The state lives in one set of arrays that is updated in place, so that a million devices fit in memory. Large problems
use threads, each with its range of devices and of edges, and scrambled large graphs are renumbered first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedkin._base import available_threads
from fedkin.objective import FusedObjective, QuadraticTerms
from fedkin.solvers.fuse import INTERIOR
from fedkin.solvers.kernels import checks as check_kernels
from fedkin.solvers.kernels import gaps as gap_kernels
from fedkin.solvers.kernels import grams as gram_kernels
from fedkin.solvers.kernels import levels as level_kernels
from fedkin.solvers.kernels import steps as kernels
from fedkin.solvers.pdhg import RELAXATION, Checked, PrimalDual, Rebalancing, Stopping, weights_of_devices
from fedkin.solvers.renumber import Places
from fedkin.solvers.workload import Crew, iteration_is_shared, iteration_work

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Inverse Gram matrices with up to this many entries are kept for the certificates, others are factorised again.
ROOM = 20_000_000
#: Pairs with more edge duals than this are not copied: they change when the iteration goes on.
COPIED = 1_000_000
#: Iterations that take this many nanoseconds are done in one go: Ctrl-C waits for them.
ONE_GO = 5e7
#: Checks in one go.
CHECKS = 64
#: A Gram matrix with all pivots above this share of its diagonal is regular beyond doubt.
SAFE_PIVOT = 1e-6


class CompiledIteration:
    """The iteration on kernels; `fedkin.solvers.pdhg.Iteration` says what its methods do.

    Parameters
    ----------
    objective : FusedObjective
        Graph, penalty and radii; its terms are not looked at.
    quadratic : QuadraticTerms
        The smooth part to minimise.
    theta, alpha, zeta, rho
        Where to start; each device's own minimiser, and no duals, where they are None.
    n_threads : int, optional
        As many as pay, by default.
    """

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
    ) -> None:
        self._kind = kernels.KINDS[objective.penalty.name]
        threads = available_threads() if iteration_is_shared(objective, quadratic) else 1
        self._crew = Crew(threads if n_threads is None else n_threads)
        self._places = Places(objective.graph)
        self._set_problem(objective, quadratic)
        self._start(quadratic, theta, alpha, zeta)
        self._rebalancing = Rebalancing()
        self._borrowed = False
        self._in_one_go = max(1, int(ONE_GO / iteration_work(objective, quadratic)))
        self._factor: Array | None = None
        self._counters = np.zeros(check_kernels.N_COUNTERS, dtype=np.int64)
        self._last_checks = np.empty((0, 3))
        self.n_iter = 0
        self._set_rho(rho)

    def _set_problem(self, objective: FusedObjective, quadratic: QuadraticTerms) -> None:
        places, p = self._places, quadratic.n_params
        self._isotropic, self._shared = quadratic.isotropic, quadratic.shared
        self._may_share = not places.moved and not quadratic.isotropic and quadratic.A.size <= ROOM
        self._b = places.devices_in(quadratic.b)
        self._c = np.ascontiguousarray(quadratic.c)
        self._A = np.empty((0, p, p)) if quadratic.isotropic else np.ascontiguousarray(quadratic.A)
        self._curvature = places.devices_in(quadratic.A) if quadratic.isotropic else np.empty(0)
        self._own_inverse = np.empty((0, p, p))
        self._radius = places.edges_in(objective.edge_radius)
        self._edge_weight = places.edges_in(objective.graph.weights)
        self._box = np.empty((0, p)) if objective.sparsity is None else places.devices_in(objective.sparsity)
        self._linked = places.devices_in(weights_of_devices(objective))
        self._weight = np.where(self._linked > 0, self._linked, 1.0)

    def _start(self, quadratic: QuadraticTerms, theta: Array | None, alpha: Array | None, zeta: Array | None) -> None:
        (n, p), edges = self._b.shape, self._radius.size
        self._device_ranges, self._edge_ranges = self._crew.split(n), self._crew.split(edges)
        self._ahead = np.empty((n, p))
        own = self._own_minimizers()
        self.regular = own is not None
        if own is None:
            own = self._places.devices_in(quadratic.minimizers())
        if theta is None:
            self._x = own.copy() if own is self._shared.get("own") else own
            if not self.regular:
                unsure = self._places.devices_in(quadratic.singular) & (self._linked > 0)
                self._x[unsure] = 0.0
        else:
            self._x = self._places.devices_in(theta).copy()
            # a device without duals is on its own from the start, and stays there
            self._x[self._linked == 0] = own[self._linked == 0]
        self._y = np.zeros((edges, p)) if alpha is None else self._places.edges_in(alpha).copy()
        self._z = np.zeros(self._box.shape) if zeta is None else self._places.devices_in(zeta).copy()
        self._inverse = np.empty((0, p, p))
        self._s = np.zeros((self._crew.size, n, p))
        self._reset_balance()

    def _own_minimizers(self) -> Array | None:
        """Each device's own minimiser, or None when there is doubt whether one is unique."""
        if self._isotropic:
            return self._b / self._curvature[:, None] if (self._curvature > 0).all() else None
        if self._A.size <= ROOM:
            known = self._shared.get("inverse") if self._may_share else None
            if known is None:
                known = np.empty_like(self._A)
                if not self._invert(np.zeros(self._b.shape[0]), np.ones(self._b.shape[1]), known) > SAFE_PIVOT:
                    return None
            if self._may_share:
                self._shared["inverse"] = known
            self._own_inverse = known
            own, worst = self._shared.get("own") if self._may_share else None, 1.0
            if own is None:
                own = np.matmul(known, self._b[:, :, None])[:, :, 0]
            if self._may_share:
                self._shared["own"] = own
        else:
            own, order = np.zeros_like(self._b), self._places.devices

            def work(_: int, lo: int, hi: int) -> float:
                return float(gram_kernels.local_minimizers(lo, hi, order, self._A, self._b, own))

            worst = float(min(self._crew.run(work, self._device_ranges)))
        return own if worst > SAFE_PIVOT else None

    def settle(self, stopping: Stopping) -> Checked | None:
        """Iterations and checks without coming back here in between, on one thread and without sparsity."""
        if self._crew.size > 1 or not self.regular or self._box.size:
            return None
        try:
            return self._settled(stopping)
        except KeyboardInterrupt:
            # the duals may be relaxed: a plain step makes a feasible pair of them
            self._step(1.0, measure=False)
            raise

    def _settled(self, stopping: Stopping) -> Checked:
        moves, count, known = np.empty((2, self._rho.size)), self._counters, len(self._last_checks)
        rows = np.empty((known + CHECKS, 3))
        rows[:known] = self._last_checks
        pause = self.n_iter + self._in_one_go
        count[check_kernels.CHECKS], count[check_kernels.DONE] = known, self.n_iter
        while count[check_kernels.CHECKS] == known or (
            self.n_iter < min(pause, stopping.limit) and count[check_kernels.CHECKS] < len(rows)
        ):
            if self._factor is not None:
                self._set_rho(self.rho * self._factor)
            self._settle(stopping, max(pause, self.n_iter + 1), rows, moves)
            self.n_iter = int(count[check_kernels.DONE])
            if count[check_kernels.STATUS] == check_kernels.SETTLED:
                break
            if count[check_kernels.STATUS] == check_kernels.LOOK_AT_RHO:
                self._factor = self._rebalancing.factor(2.0 * moves[0], moves[1], self.rho)
        rows = rows[: count[check_kernels.CHECKS]]
        self._last_checks = rows[-2:]
        return Checked(rows[known:], self._ahead if count[check_kernels.FUSED] else None)

    def _settle(self, stopping: Stopping, pause: int, rows: Array, moves: Array) -> None:
        places = self._places
        check_kernels.settle(
            self._counters,
            rows,
            pause,
            stopping.limit,
            self._rebalancing.next,
            stopping.tol,
            stopping.floor,
            stopping.fusing_helps,
            RELAXATION,
            1.0 - INTERIOR,
            0 if self._isotropic else 1,
            places.devices,
            self._A,
            self._own_inverse,
            self._inverse,
            self._curvature,
            self._b,
            self._c,
            self._weight,
            self._linked,
            self._rho,
            self._half,
            self._x,
            self._s,
            self._ahead,
            self._z,
            self._box,
            places.head,
            places.tail,
            self._radius,
            self._y,
            self._kind,
            moves,
        )

    def settle_levels(
        self,
        strengths: Array,
        known: int,
        theta: Array,
        alpha: Array,
        component: NDArray[np.int32],
        stopping: Stopping,
    ) -> tuple[int, Array, Array]:
        """Levels one after the other, on one thread and without sparsity; `level_kernels.settle_levels` says how.

        It starts anew: each level with the first rho, and the first one, where none is ``known``, at the state.

        Returns
        -------
        done : int
        table : array (m, N_COLUMNS)
        checks : array (m, CHECKS, 3)
        """
        table = np.empty((strengths.size, level_kernels.N_COLUMNS))
        checks = np.empty((strengths.size, CHECKS, 3))
        done = level_kernels.settle_levels(
            table,
            checks,
            strengths,
            known,
            min(self._in_one_go, stopping.limit),
            stopping.tol,
            stopping.floor,
            stopping.fusing_helps,
            1.0 - INTERIOR,
            0 if self._isotropic else 1,
            self._places.devices,
            self._A,
            self._own_inverse,
            self._inverse,
            self._curvature,
            self._b,
            self._c,
            self._weight,
            self._linked,
            self._rho,
            self.rho.size,
            self._places.head,
            self._places.tail,
            self._edge_weight,
            component,
            self._least_curvature(),
            self._kind,
            theta,
            alpha,
            self._x,
            self._y,
        )
        return int(done), table, checks

    def _least_curvature(self) -> float:
        """No device's curvature is less than this in any direction."""
        if self._isotropic:
            return float(self._curvature.min())
        return 1.0 / float(np.sqrt(np.einsum("upq,upq->u", self._own_inverse, self._own_inverse).max()))

    def _set_rho(self, rho: Array) -> None:
        self.rho = rho
        self._factor = None
        self._rho = np.ascontiguousarray(np.broadcast_to(rho, self._b.shape[1:]))
        self._half = 0.5 * self._rho
        if self._isotropic:
            return
        first = self.n_iter == 0
        if first and self._borrow_resolvent():
            return
        if first or self._borrowed:
            self._inverse, self._borrowed = np.empty_like(self._A), False
        self._invert(self._weight, self._rho, self._inverse)
        if first and self._may_share:
            self._shared |= {"resolvent": self._inverse, "rho": self._rho, "weight": self._weight}
            self._borrowed = True

    def _borrow_resolvent(self) -> bool:
        """Take the first resolvent of a problem with the same matrices and degrees: the same along a path."""
        known = self._shared if self._may_share else {}
        same = "resolvent" in known and np.array_equal(known["rho"], self._rho)
        self._borrowed = bool(same and np.array_equal(known["weight"], self._weight))
        if self._borrowed:
            self._inverse = known["resolvent"]
        return self._borrowed

    def _invert(self, weight: Array, rho: Array, out: Array) -> float:
        """``out[i] = (A_i + weight_i diag(rho))^{-1}``, and the worst relative pivot."""

        def work(_: int, lo: int, hi: int) -> float:
            return float(gram_kernels.invert(lo, hi, self._places.devices, self._A, weight, rho, out))

        return float(min(self._crew.run(work, self._device_ranges)))

    def _reset_balance(self) -> None:
        self._s[:] = 0.0
        if self._z.size:
            self._s[0] = self._z
        head, tail = self._places.head, self._places.tail
        self._crew.run(
            lambda t, lo, hi: kernels.add_balance(lo, hi, head, tail, self._y, self._s[t]), self._edge_ranges
        )

    @property
    def live(self) -> bool:
        return self._y.size > COPIED and not self._places.moved

    # --- iterations -----------------------------------------------------------------------------------------------

    def advance(self, n: int) -> None:
        """``n`` iterations, the last one without over-relaxation: it leaves a feasible primal-dual pair."""
        try:
            self._advance(n)
        except KeyboardInterrupt:
            # half a step may be done: any point is good to start from, once the balance fits the duals again
            self._reset_balance()
            self._step(1.0, measure=False)
            raise

    def _advance(self, n: int) -> None:
        end = self.n_iter + n
        while self.n_iter < end:
            if self._factor is not None:
                self._set_rho(self.rho * self._factor)
            stop = min(self._rebalancing.next, end)
            self._run(stop - self.n_iter - 1, RELAXATION)
            relax = 1.0 if stop == end else RELAXATION
            if stop == self._rebalancing.next:
                self._step(relax, measure=True)
            else:
                self._run(1, relax)

    def _run(self, n: int, relax: float) -> None:
        if self._crew.size > 1:
            for _ in range(n):
                self._step(relax, measure=False)
            return
        if n == 0:
            return
        places = self._places
        kernels.run(
            n,
            0 if self._isotropic else 1,
            self._inverse,
            self._curvature,
            self._b,
            self._weight,
            self._rho,
            self._x,
            self._s,
            self._ahead,
            relax,
            self._z,
            self._box,
            places.head,
            places.tail,
            self._radius,
            self._half,
            self._y,
            self._kind,
        )
        self.n_iter += n

    def _step(self, relax: float, measure: bool) -> None:
        step = kernels.node_step_isotropic if self._isotropic else kernels.node_step_dense
        curvature = self._curvature if self._isotropic else self._inverse
        head, tail, kind = self._places.head, self._places.tail, self._kind
        b, weight, rho, half, radius = self._b, self._weight, self._rho, self._half, self._radius
        x, y, z, s, ahead, box = self._x, self._y, self._z, self._s, self._ahead, self._box

        before = z.copy() if measure else z
        self._crew.run(
            lambda _, lo, hi: step(lo, hi, curvature, b, weight, rho, x, s, ahead, relax, z, box), self._device_ranges
        )
        if measure:
            dual = np.zeros((self._crew.size, rho.size))
            self._crew.run(
                lambda t, lo, hi: kernels.edge_moves(lo, hi, head, tail, radius, half, ahead, y, kind, dual[t]),
                self._edge_ranges,
            )
            # ahead = x + 2 dx and the new x = x + relax dx
            dx = (ahead - x) / (2.0 - relax)
            duals = 2.0 * dual.sum(axis=0) + (((z - before) / relax) ** 2).sum(axis=0)
            self._factor = self._rebalancing.factor(duals, self._linked @ dx**2, self.rho)
        self._crew.run(
            lambda t, lo, hi: kernels.edge_step(lo, hi, head, tail, radius, half, ahead, y, s[t], relax, kind),
            self._edge_ranges,
        )
        self.n_iter += 1

    # --- where it stands ------------------------------------------------------------------------------------------

    def certificate(self, theta: Array | None = None) -> tuple[float, float]:
        """Objective value and duality gap of the pair, or of other parameters with the same duals."""
        x = self._x if theta is None else theta
        s, b, c, order = self._s, self._b, self._c, self._places.devices
        y, radius, kind, head, tail = self._y, self._radius, self._kind, self._places.head, self._places.tail
        if self._isotropic:
            devices = self._crew.run(
                lambda _, lo, hi: gap_kernels.node_gap_isotropic(lo, hi, order, self._curvature, b, c, x, s),
                self._device_ranges,
            )
        else:
            devices = self._crew.run(
                lambda _, lo, hi: gap_kernels.node_gap_dense(lo, hi, order, self._A, self._own_inverse, b, c, x, s),
                self._device_ranges,
            )
        edges = self._crew.run(
            lambda _, lo, hi: gap_kernels.edge_gap(lo, hi, head, tail, radius, x, y, kind), self._edge_ranges
        )
        value, gap = (sum(part) for part in zip(*devices, *edges, strict=True))
        if self._box.size:
            size = self._box * np.abs(x)
            value, gap = value + size.sum(), gap + (size - self._z * x).sum()
        return float(value), float(gap)

    def fused(self) -> Array:
        """Parameters in which fused devices are exactly equal, for `certificate` and `pair`."""
        out = self._ahead  # free between two iterations
        head, tail, share = self._places.head, self._places.tail, 1.0 - INTERIOR
        p = self._x.shape[1]
        columns = self._crew.split(p) if self._kind == kernels.L1 and self._crew.size > 1 else [(0, p)]

        def work(_: int, lo: int, hi: int) -> None:
            gap_kernels.fuse(
                lo, hi, head, tail, self._radius, self._y, share, self._kind, self._z, self._box, self._x, out
            )

        self._crew.run(work, columns)
        return out

    def arranged(self, theta: Array) -> Array:
        return self._places.devices_in(theta)

    def pair(self, theta: Array | None = None) -> PrimalDual:
        places = self._places
        x = places.devices_out(self._x if theta is None else theta)
        y = places.edges_out(self._y)
        z = places.devices_out(self._z) if self._z.size else None
        balance = places.devices_out(self._s[0].copy() if self._crew.size == 1 else self._s.sum(axis=0))
        if not (self.live or places.moved):
            x, y, z = x.copy(), y.copy(), None if z is None else z.copy()
        return PrimalDual(x, y, z, balance, self.rho, self.n_iter)

    def close(self) -> None:
        """End the threads."""
        self._crew.close()
