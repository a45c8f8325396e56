"""A whole solve in one compiled call: iterations, checks and changes of rho.

On small problems Python between the kernels takes as long as the kernels. Solves release the GIL, so that several of
them run side by side on threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from fedkin.solvers.kernels.bundles import DEVICES, EDGES, STATE, STEP, STOPPING, W2, W3, Step
from fedkin.solvers.kernels.gaps import edge_gap, fuse, invert, node_gap, reroute
from fedkin.solvers.kernels.jit import INT, kernel, part, writable
from fedkin.solvers.kernels.steps import L1, edge_moves, edge_step, node_step
from fedkin.solvers.pdhg import (
    INTERIOR,
    LEAST_STRETCH,
    REBALANCE_AT,
    REBALANCE_BY,
    RELAXATION,
)

COUNTERS = writable(INT, 1)
_TINY = float(np.finfo(np.float64).tiny)

#: Places in the counters of `settle`: iterations done, iterations of the next check and of the next look at rho, the
#: interval of such looks, whether fusing helped, whether the last check is about fused parameters (left in
#: ``state.ahead``), rows written, whether the gap is small enough, and whether rho has changed.
DONE, CHECK_AT, LOOK_AT, INTERVAL, FUSING_HELPED, FUSED, CHECKS, SETTLED, REBALANCED = range(9)
N_COUNTERS = 9


@part
def _certificate(devices: Any, edges: Any, x: Any, s: Any, y: Any) -> tuple[float, float]:
    """Value and duality gap, without sparsity."""
    value, gap = node_gap(0, x.shape[0], devices, x, s)
    penalty, slack = edge_gap(0, y.shape[0], edges, x, y)
    return value + penalty, gap + slack


@part
def _until_check(done: int, rows: Any, tol: float) -> int:
    """As `fedkin.solvers.pdhg.check_after`."""
    usual = max(5, done // 10)
    m = rows.shape[0]
    if m < 2 or not 0.0 < rows[m - 1, 2] < rows[m - 2, 2] < math.inf:
        return usual
    rate = math.log(rows[m - 2, 2] / rows[m - 1, 2]) / (rows[m - 1, 0] - rows[m - 2, 0])
    return int(min(max(math.ceil(math.log(rows[m - 1, 2] / tol) / rate), LEAST_STRETCH), 2 * usual))


@part
def _rebalance(moves: Any, rho: Any, together: bool) -> bool:
    """As `fedkin.solvers.pdhg.Rebalancing.factor`, which it applies to ``rho (p,)``; whether that has changed."""
    changed = False
    for c in range(rho.shape[0]):
        dual, primal = moves[0, c], moves[1, c]
        if together:
            dual, primal = moves[0].sum(), moves[1].sum()
        dual *= 2.0
        if dual > _TINY or primal > _TINY:
            ratio = np.sqrt(dual / max(primal, _TINY)) / rho[c]
            if ratio > REBALANCE_AT or ratio < 1.0 / REBALANCE_AT:
                rho[c] *= min(max(ratio, 1.0 / REBALANCE_BY), REBALANCE_BY)
                changed = True
    return changed


@part
def _measure(moves: Any, relax: float, devices: Any, edges: Any, half: Any, state: Any) -> None:
    """Squared moves of duals and parameters ``(2, p)`` in the iteration whose node step is done."""
    x, ahead, linked = state.x, state.ahead, devices.linked
    moves[:] = 0.0
    edge_moves(0, state.y.shape[0], edges, half, ahead, state.y, moves[0])
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            # ahead = x + 2 dx and the new x = x + relax dx
            dx = (ahead[i, c] - x[i, c]) / (2.0 - relax)
            moves[1, c] += linked[i] * dx * dx


@part
def _check(counters: Any, stopping: Any, devices: Any, edges: Any, state: Any) -> tuple[float, float]:
    """Value and gap of the pair, or of the same with devices fused (in ``state.ahead``) where that is better."""
    x, y, s, ahead = state.x, state.y, state.s, state.ahead
    if devices.singular.shape[0] > 0:
        y, s = y.copy(), s.copy()
        reroute(devices, edges, y, s)
    value, gap = 0.0, math.inf
    counters[FUSED] = 0
    if counters[FUSING_HELPED] == 0:
        value, gap = _certificate(devices, edges, x, s, y)
    # with fused devices better last time, it takes only one of the two to be good enough
    near = gap <= stopping.fusing_helps * stopping.tol * max(abs(value), stopping.floor)
    if counters[FUSING_HELPED] == 1 or near or counters[DONE] >= stopping.limit:
        fuse(0, x.shape[1], edges, state.y, 1.0 - INTERIOR, state.z, devices.box, x, ahead)
        fused, slack = _certificate(devices, edges, ahead, s, y)
        if counters[FUSING_HELPED] == 0:
            counters[FUSING_HELPED] = 1 if slack < gap else 0
        if slack <= max(gap, stopping.tol * max(abs(fused), stopping.floor)):
            value, gap, counters[FUSED] = fused, slack, 1
    return value, gap


@kernel(types.void, COUNTERS, W2, W2, INT, STOPPING, DEVICES, EDGES, STEP, W3, STATE)
def settle(
    counters: Any,
    rows: Any,
    moves: Any,
    pause: int,
    stopping: Any,
    devices: Any,
    edges: Any,
    step: Any,
    own: Any,
    state: Any,
) -> None:
    """Iterations and checks until the gap is small, ``rows`` are full or ``pause`` iterations are done.

    It comes back after a check; on one thread, without sparsity, and only where singular devices have regular
    neighbours. ``rows (m, 3)`` gets iteration, value and relative gap of each check. ``moves (2, p)`` is memory between
    calls. When rho changes it is changed in place, and the resolvent is ``own (V, p, p)`` from then on: the caller
    makes it that of ``step``.
    """
    n, n_edges = state.x.shape[0], state.y.shape[0]
    current = step
    done = counters[DONE]
    while done < stopping.limit:
        if counters[CHECK_AT] <= done:
            ahead = _until_check(done, rows[: counters[CHECKS]], stopping.tol)
            counters[CHECK_AT] = min(done + ahead, stopping.limit)
        while done < counters[CHECK_AT]:
            if done == counters[LOOK_AT]:
                counters[INTERVAL] *= 2
                counters[LOOK_AT] += counters[INTERVAL]
                if _rebalance(moves, step.rho, edges.kind != L1):
                    step.half[:] = 0.5 * step.rho
                    counters[REBALANCED] = 1
                    current = Step(step.rho, step.half, own)
                    if devices.curvature.shape[0] == 0:
                        invert(0, n, devices.order, devices.A, devices.weight, step.rho, own)
            # the last step before a check is not relaxed: it leaves a feasible pair
            relax = 1.0 if done + 1 == counters[CHECK_AT] else RELAXATION
            node_step(0, n, devices, current, state, relax)
            if done + 1 == counters[LOOK_AT]:
                _measure(moves, relax, devices, edges, step.half, state)
            edge_step(0, n_edges, edges, step.half, state.ahead, state.y, state.s[0], relax)
            done += 1
        counters[DONE] = done
        value, gap = _check(counters, stopping, devices, edges, state)
        relative = max(gap, 0.0) / max(abs(value), stopping.floor)
        row = counters[CHECKS]
        rows[row, 0], rows[row, 1], rows[row, 2] = done, value, relative
        counters[CHECKS] += 1
        counters[SETTLED] = relative <= stopping.tol
        if counters[SETTLED] or counters[CHECKS] == rows.shape[0] or done >= pause:
            return
