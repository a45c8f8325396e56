"""Whole solves in one compiled call: iterations, checks, changes of rho, and one penalty level after the other.

On small problems Python between the kernels takes as long as the kernels. Solves release the GIL, so that several of
them run side by side on threads.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from fedkin.solvers.kernels.bundles import EDGES, LEVELS, R2, SITES, STATE, STEP, STOPPING, W2, W3, Step
from fedkin.solvers.kernels.gaps import dense_gap, edge_gap, fuse, invert, reroute
from fedkin.solvers.kernels.jit import FLOAT, INT, bundle, outlined, part, writable
from fedkin.solvers.kernels.steps import L1, dense_step, edge_moves, l1_step
from fedkin.solvers.pdhg import (
    FIRST_REBALANCE,
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
#: ``state.ahead``), rows written, whether the gap is small enough, whether rho has changed, the level to solve, and
#: whether no component was fused at the one before.
DONE, CHECK_AT, LOOK_AT, INTERVAL, FUSING_HELPED, FUSED, CHECKS, SETTLED, REBALANCED, LEVEL, APART = range(11)
N_COUNTERS = 11


class Calls(NamedTuple):
    """Addresses of the kernels that `settle` drives; 0 for those it has no use for."""

    node_step: int
    edge_step: int
    edge_moves: int
    invert: int
    node_gap: int
    edge_gap: int
    fuse: int
    reroute: int
    begin: int
    keep: int


class Memory(NamedTuple):
    """What `settle` keeps between calls.

    ``counters``; ``moves (2, p)``; ``own (V, p, p)`` for another resolvent than the first; duals ``y (E, p)`` and
    balance ``s (1, V, p)`` where some sites are singular, which have to be rerouted for a check.
    """

    counters: Any
    moves: Any
    own: Any
    y: Any
    s: Any


CALLS = bundle(Calls, *(INT,) * 10)
MEMORY = bundle(Memory, COUNTERS, W2, W3, W2, W3)


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
    p = rho.shape[0]
    for c in range(p):
        dual, primal = 0.0, 0.0
        for k in range(0 if together else c, p if together else c + 1):
            dual += 2.0 * moves[0, k]
            primal += moves[1, k]
        if dual > _TINY or primal > _TINY:
            ratio = math.sqrt(dual / max(primal, _TINY)) / rho[c]
            if ratio > REBALANCE_AT or ratio < 1.0 / REBALANCE_AT:
                rho[c] *= min(max(ratio, 1.0 / REBALANCE_BY), REBALANCE_BY)
                changed = True
    return changed


@part
def _primal_moves(moves: Any, relax: float, linked: Any, x: Any, ahead: Any) -> None:
    """Squared moves of the parameters ``moves[1]`` in the iteration whose node step is done; 0 for the duals."""
    for c in range(x.shape[1]):
        moves[0, c] = moves[1, c] = 0.0
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            # ahead = x + 2 dx and the new x = x + relax dx
            dx = (ahead[i, c] - x[i, c]) / (2.0 - relax)
            moves[1, c] += linked[i] * dx * dx


# --- levels -----------------------------------------------------------------------------------------------------------


@part
def _predict(level: int, strengths: Any, solved: Any, out: Any, scales: bool) -> None:
    """Where to start at a level, given those before: on the line through the last two, which a path often follows."""
    at, last = strengths[level], strengths[level - 1]
    step, scale = 0.0, at / last if scales else 1.0  # duals grow with the strength
    if level > 1 and strengths[level - 2] > last > at:
        step, scale = (last - at) / (strengths[level - 2] - last), 1.0
    before = max(level - 2, 0)
    for i in range(out.shape[0]):
        for c in range(out.shape[1]):
            near = solved[level - 1, i, c]
            out[i, c] = scale * near + step * (near - solved[before, i, c])


@outlined(types.void, INT, COUNTERS, LEVELS, EDGES, STEP, STATE, quickly=True, inner=True)
def begin(edge_step: int, counters: Any, levels: Any, edges: Any, step: Any, state: Any) -> None:
    """Start a level: its radii, the first rho, duals inside their balls and their balance."""
    level, strength = counters[LEVEL], levels.strengths[counters[LEVEL]]
    x, y, s, ahead, half = state.x, state.y, state.s, state.ahead, step.half
    counters[DONE] = counters[CHECK_AT] = counters[FUSING_HELPED] = counters[FUSED] = counters[REBALANCED] = 0
    counters[LOOK_AT] = counters[INTERVAL] = FIRST_REBALANCE
    for e in range(edges.radius.shape[0]):
        edges.radius[e] = strength * levels.edge_weight[e]
    if level > 0:
        _predict(level, levels.strengths, levels.theta, x, False)
        _predict(level, levels.strengths, levels.alpha, y, True)
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            s[0, i, c] = ahead[i, c] = 0.0
    for c in range(half.shape[0]):
        half[c] = 0.0
    # a step of length 0 leaves the duals in their balls, and their sums in the balance
    _edge_step(edge_step, (0, y.shape[0], edges, half, ahead, y, s[0], 1.0))
    for c in range(half.shape[0]):
        step.rho[c], half[c] = levels.rho[c], 0.5 * levels.rho[c]


@outlined(types.boolean, INT, LEVELS, EDGES, R2, R2, FLOAT, quickly=True, inner=True)
def keep(level: int, levels: Any, edges: Any, x: Any, y: Any, distance: float) -> bool:
    """Write down what was found at a level; whether no component is fused.

    That is, whether every component that has edges has one whose ends differ by more than ``distance`` somewhere.
    """
    theta, alpha, component, head, tail = levels.theta, levels.alpha, levels.component, edges.head, edges.tail
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            theta[level, i, c] = x[i, c]
    for e in range(y.shape[0]):
        for c in range(y.shape[1]):
            alpha[level, e, c] = y[e, c]
    apart = np.zeros(x.shape[0], dtype=np.bool_)
    for e in range(component.shape[0]):
        if not apart[component[e]]:
            for c in range(x.shape[1]):
                if abs(x[head[e], c] - x[tail[e], c]) > distance:
                    apart[component[e]] = True
    fused = 0
    for e in range(component.shape[0]):
        fused += not apart[component[e]]
    return fused == 0


# --- solves -----------------------------------------------------------------------------------------------------------

_node_step, _edge_step, _edge_moves, _invert = dense_step.at, l1_step.at, edge_moves.at, invert.at
_node_gap, _edge_gap, _fuse, _reroute, _begin, _keep = dense_gap.at, edge_gap.at, fuse.at, reroute.at, begin.at, keep.at


@outlined(types.void, W2, INT, STOPPING, SITES, EDGES, STEP, STATE, MEMORY, LEVELS, CALLS, quickly=True)
def settle(
    rows: Any,
    pause: int,
    stopping: Any,
    sites: Any,
    edges: Any,
    step: Any,
    state: Any,
    memory: Any,
    levels: Any,
    calls: Any,
) -> None:
    """Iterations and checks until the gap is small, ``rows`` are full or ``pause`` iterations are done.

    It comes back after a check; on one thread, without sparsity, and only where singular sites have regular
    neighbours. ``rows (m, 3)`` gets iteration, value and relative gap of each check. When rho changes it is changed in
    place, and the resolvent is ``memory.own`` from then on: the caller makes it that of ``step``.

    With ``levels``, they are solved one after the other as long as the gap gets small, from ``counters[LEVEL]`` on; the
    step is the first one of each. It also comes back after one at which a whole component may be fused: the caller
    knows how to do that.
    """
    counters, moves, rho, half = memory.counters, memory.moves, step.rho, step.half
    x, y, s, ahead = state.x, state.y, state.s, state.ahead
    n, n_edges, n_levels = x.shape[0], y.shape[0], levels.strengths.shape[0]
    limit, tol, floor = stopping.limit, stopping.tol, stopping.floor
    current, first = step, 0
    starts = n_levels > 0
    while True:
        if starts:
            _begin(calls.begin, (calls.edge_step, counters, levels, edges, step, state))
            current, first, starts = step, counters[CHECKS], False
        done = counters[DONE]
        if done >= limit:
            return
        if counters[CHECK_AT] <= done:
            counters[CHECK_AT] = min(done + _until_check(done, rows[first : counters[CHECKS]], tol), limit)
        while done < counters[CHECK_AT]:
            if done == counters[LOOK_AT]:
                counters[INTERVAL] *= 2
                counters[LOOK_AT] += counters[INTERVAL]
                if _rebalance(moves, rho, edges.kind != L1):
                    for c in range(half.shape[0]):
                        half[c] = 0.5 * rho[c]
                    counters[REBALANCED] = 1
                    current = Step(rho, half, memory.own)
                    if sites.curvature.shape[0] == 0:
                        _invert(calls.invert, (0, n, sites.order, sites.A, sites.weight, rho, memory.own))
            # the last step before a check is not relaxed: it leaves a feasible pair
            relax = 1.0 if done + 1 == counters[CHECK_AT] else RELAXATION
            _node_step(calls.node_step, (0, n, sites, current, state, relax))
            if done + 1 == counters[LOOK_AT]:
                _primal_moves(moves, relax, sites.linked, x, ahead)
                _edge_moves(calls.edge_moves, (0, n_edges, edges, half, ahead, y, moves[0]))
            _edge_step(calls.edge_step, (0, n_edges, edges, half, ahead, y, s[0], relax))
            done += 1
        counters[DONE] = done

        # value and gap of the pair, or of the same with sites fused (in ``ahead``) where that is better
        duals, balance = y, s
        if sites.singular.shape[0] > 0:
            duals, balance = memory.y, memory.s
            _reroute(calls.reroute, (sites, edges, y, s, duals, balance))
        value, gap = 0.0, math.inf
        counters[FUSED] = 0
        theta = x
        for turn in range(2):
            if turn == 0:
                # with fused sites better last time, it takes only one of the two to be good enough
                if counters[FUSING_HELPED] == 1:
                    continue
            else:
                near = gap <= stopping.fusing_helps * tol * max(abs(value), floor)
                if not (counters[FUSING_HELPED] == 1 or near or done >= limit):
                    break
                _fuse(calls.fuse, (0, x.shape[1], edges, y, 1.0 - INTERIOR, state.z, sites.box, x, ahead))
                theta = ahead
            smooth, lost = _node_gap(calls.node_gap, (0, n, sites, theta, balance))
            penalty, slack = _edge_gap(calls.edge_gap, (0, n_edges, edges, theta, duals))
            if turn == 0:
                value, gap = smooth + penalty, lost + slack
            else:
                if counters[FUSING_HELPED] == 0 and lost + slack < gap:
                    counters[FUSING_HELPED] = 1
                if lost + slack <= max(gap, tol * max(abs(smooth + penalty), floor)):
                    value, gap, counters[FUSED] = smooth + penalty, lost + slack, 1

        scale = max(abs(value), floor)
        relative = max(gap, 0.0) / scale
        row = counters[CHECKS]
        rows[row, 0], rows[row, 1], rows[row, 2] = done, value, relative
        counters[CHECKS] += 1
        counters[SETTLED] = relative <= tol
        if n_levels > 0 and counters[SETTLED]:
            level = counters[LEVEL]
            # by its curvature, each site is at most so far from its optimum
            reach = math.sqrt(2.0 * relative * scale / levels.curvature)
            theta = ahead if counters[FUSED] else x
            starts = _keep(calls.keep, (level, levels, edges, theta, y, 2.0 * reach))
            levels.ends[level], counters[APART] = counters[CHECKS], starts
            counters[LEVEL] += 1
            if not starts or counters[LEVEL] == n_levels or counters[CHECKS] == rows.shape[0]:
                return
        elif counters[SETTLED] or counters[CHECKS] == rows.shape[0] or done >= pause:
            return
