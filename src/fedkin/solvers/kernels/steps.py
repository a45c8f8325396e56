"""The primal-dual iteration as compiled loops (numba).

Nothing here is called directly: `fedkin.solvers.compiled` drives these kernels, `fedkin.solvers.backend` decides when.
Each is compiled, or loaded from numba's cache, when it is needed. All release the GIL and work on a range ``lo .. hi``
of sites or edges, so that plain threads share one iteration and problems run side by side.
`fedkin.solvers.kernels.bundles` says what they work on.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types

from fedkin.solvers.kernels.bundles import EDGES, R1, R2, SITES, STATE, STEP, W1, W2
from fedkin.solvers.kernels.jit import FLOAT, INT, bundle, outlined, part

L1, L2, LINF = 0, 1, 2
#: Codes of the penalties.
KINDS = {"l1": L1, "l2": L2, "linf": LINF}

# --- parts of the kernels ------------------------------------------------------------------------------------------


@njit(inline="always")
def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


@part
def _project_linf(v: Any, radius: float) -> None:
    """Project ``v`` onto the l1 ball, the dual ball of linf, in place (Michelot's active set)."""
    total = 0.0
    for c in range(v.shape[0]):
        total += abs(v[c])
    if total <= radius:
        return
    if radius == 0.0:
        v[:] = 0.0
        return
    count, threshold = v.shape[0], (total - radius) / v.shape[0]
    while True:
        above, active = 0.0, 0
        for c in range(v.shape[0]):
            if abs(v[c]) > threshold:
                above += abs(v[c])
                active += 1
        if active >= count:  # rounding may let one at the threshold in again
            break
        count, threshold = active, (above - radius) / active
    for c in range(v.shape[0]):
        v[c] = math.copysign(max(abs(v[c]) - threshold, 0.0), v[c])


# --- sites --------------------------------------------------------------------------------------------------------


@outlined(types.void, INT, INT, SITES, STEP, STATE, FLOAT)
def dense_step(lo: int, hi: int, sites: Any, step: Any, state: Any, relax: float) -> None:
    """``xhat = resolvent (b + weight rho x - s)``, ``ahead = 2 xhat - x``, ``x += relax (xhat - x)``."""
    inverse, b, weight, rho = step.resolvent, sites.b, sites.weight, step.rho
    x, s, ahead = state.x, state.s, state.ahead
    p = x.shape[1]
    shares = s.shape[0]
    target = np.empty(p)
    found = np.empty(p)
    for i in range(lo, hi):
        for c in range(p):
            target[c] = b[i, c] + weight[i] * rho[c] * x[i, c] - s[0, i, c]
            found[c] = 0.0
        for t in range(1, shares):
            for c in range(p):
                target[c] -= s[t, i, c]
                s[t, i, c] = 0.0
        k = 0
        while k + 4 <= p:
            v0, v1, v2, v3 = target[k], target[k + 1], target[k + 2], target[k + 3]
            for c in range(p):
                first = inverse[i, k, c] * v0 + inverse[i, k + 1, c] * v1
                found[c] += first + (inverse[i, k + 2, c] * v2 + inverse[i, k + 3, c] * v3)
            k += 4
        while k < p:
            for c in range(p):
                found[c] += inverse[i, k, c] * target[k]
            k += 1
        for c in range(p):
            old = x[i, c]
            ahead[i, c] = 2.0 * found[c] - old
            x[i, c] = old + relax * (found[c] - old)
            s[0, i, c] = 0.0


@outlined(types.void, INT, INT, SITES, STEP, STATE, FLOAT)
def isotropic_step(lo: int, hi: int, sites: Any, step: Any, state: Any, relax: float) -> None:
    """As `dense_step`, where every Gram matrix is ``curvature[i]`` times the identity."""
    curvature, b, weight, rho = sites.curvature, sites.b, sites.weight, step.rho
    x, s, ahead = state.x, state.s, state.ahead
    p = x.shape[1]
    shares = s.shape[0]
    for i in range(lo, hi):
        for t in range(1, shares):
            for c in range(p):
                s[0, i, c] += s[t, i, c]
                s[t, i, c] = 0.0
        for c in range(p):
            pull = weight[i] * rho[c]
            old = x[i, c]
            found = (b[i, c] + pull * old - s[0, i, c]) / (curvature[i] + pull)
            ahead[i, c] = 2.0 * found - old
            x[i, c] = old + relax * (found - old)
            s[0, i, c] = 0.0


@outlined(types.void, INT, INT, R1, R2, STATE, FLOAT)
def box_step(lo: int, hi: int, rho: Any, box: Any, state: Any, relax: float) -> None:
    """Duals of the sparsity term, after a step of the sites; they open the next sum ``s``."""
    z, s, ahead = state.z, state.s, state.ahead
    for i in range(lo, hi):
        for c in range(rho.shape[0]):
            old = z[i, c]
            moved = min(max(old + rho[c] * ahead[i, c], -box[i, c]), box[i, c])
            z[i, c] = old + relax * (moved - old)
            s[0, i, c] = z[i, c]


# --- edges ----------------------------------------------------------------------------------------------------------


@outlined(types.void, INT, INT, EDGES, R1, R2, W2, W2, FLOAT)
def l1_step(lo: int, hi: int, edges: Any, half: Any, ahead: Any, y: Any, s: Any, relax: float) -> None:
    """``yhat = Proj(y + half (D ahead))``, ``y += relax (yhat - y)``, and ``y`` is added to both ends' balances."""
    head, tail, radius = edges.head, edges.tail, edges.radius
    p = y.shape[1]
    if p == 1:
        for e in range(lo, hi):
            i, j = np.uint32(head[e]), np.uint32(tail[e])
            old = y[e, 0]
            new = old + relax * (_clip(old + half[0] * (ahead[i, 0] - ahead[j, 0]), radius[e]) - old)
            y[e, 0] = new
            s[i, 0] += new
            s[j, 0] -= new
        return
    for e in range(lo, hi):
        i, j, r = np.uint32(head[e]), np.uint32(tail[e]), radius[e]
        # four coordinates at a time, all loads before all stores: for all the compiler knows, the rows may overlap
        c = 0
        while c + 4 <= p:
            o0, o1, o2, o3 = y[e, c], y[e, c + 1], y[e, c + 2], y[e, c + 3]
            t0 = o0 + half[c] * (ahead[i, c] - ahead[j, c])
            t1 = o1 + half[c + 1] * (ahead[i, c + 1] - ahead[j, c + 1])
            t2 = o2 + half[c + 2] * (ahead[i, c + 2] - ahead[j, c + 2])
            t3 = o3 + half[c + 3] * (ahead[i, c + 3] - ahead[j, c + 3])
            n0 = o0 + relax * (_clip(t0, r) - o0)
            n1 = o1 + relax * (_clip(t1, r) - o1)
            n2 = o2 + relax * (_clip(t2, r) - o2)
            n3 = o3 + relax * (_clip(t3, r) - o3)
            a0, a1, a2, a3 = s[i, c] + n0, s[i, c + 1] + n1, s[i, c + 2] + n2, s[i, c + 3] + n3
            b0, b1, b2, b3 = s[j, c] - n0, s[j, c + 1] - n1, s[j, c + 2] - n2, s[j, c + 3] - n3
            y[e, c], y[e, c + 1], y[e, c + 2], y[e, c + 3] = n0, n1, n2, n3
            s[i, c], s[i, c + 1], s[i, c + 2], s[i, c + 3] = a0, a1, a2, a3
            s[j, c], s[j, c + 1], s[j, c + 2], s[j, c + 3] = b0, b1, b2, b3
            c += 4
        if c + 2 <= p:
            o0, o1 = y[e, c], y[e, c + 1]
            t0 = o0 + half[c] * (ahead[i, c] - ahead[j, c])
            t1 = o1 + half[c + 1] * (ahead[i, c + 1] - ahead[j, c + 1])
            n0 = o0 + relax * (_clip(t0, r) - o0)
            n1 = o1 + relax * (_clip(t1, r) - o1)
            a0, a1 = s[i, c] + n0, s[i, c + 1] + n1
            b0, b1 = s[j, c] - n0, s[j, c + 1] - n1
            y[e, c], y[e, c + 1] = n0, n1
            s[i, c], s[i, c + 1] = a0, a1
            s[j, c], s[j, c + 1] = b0, b1
            c += 2
        if c < p:
            old = y[e, c]
            new = old + relax * (_clip(old + half[c] * (ahead[i, c] - ahead[j, c]), r) - old)
            y[e, c] = new
            s[i, c] += new
            s[j, c] -= new


@outlined(types.void, INT, INT, EDGES, R1, R2, W2, W2, FLOAT)
def l2_step(lo: int, hi: int, edges: Any, half: Any, ahead: Any, y: Any, s: Any, relax: float) -> None:
    """As `l1_step`."""
    head, tail, radius = edges.head, edges.tail, edges.radius
    p = y.shape[1]
    for e in range(lo, hi):
        i, j, r = np.uint32(head[e]), np.uint32(tail[e]), radius[e]
        square = 0.0
        for c in range(p):
            t0 = y[e, c] + half[c] * (ahead[i, c] - ahead[j, c])
            square += t0 * t0
        shrink = relax if square <= r * r else relax * r / math.sqrt(square)
        keep = 1.0 - relax + shrink
        c = 0
        while c + 4 <= p:
            n0 = keep * y[e, c] + shrink * half[c] * (ahead[i, c] - ahead[j, c])
            n1 = keep * y[e, c + 1] + shrink * half[c + 1] * (ahead[i, c + 1] - ahead[j, c + 1])
            n2 = keep * y[e, c + 2] + shrink * half[c + 2] * (ahead[i, c + 2] - ahead[j, c + 2])
            n3 = keep * y[e, c + 3] + shrink * half[c + 3] * (ahead[i, c + 3] - ahead[j, c + 3])
            a0, a1, a2, a3 = s[i, c] + n0, s[i, c + 1] + n1, s[i, c + 2] + n2, s[i, c + 3] + n3
            b0, b1, b2, b3 = s[j, c] - n0, s[j, c + 1] - n1, s[j, c + 2] - n2, s[j, c + 3] - n3
            y[e, c], y[e, c + 1], y[e, c + 2], y[e, c + 3] = n0, n1, n2, n3
            s[i, c], s[i, c + 1], s[i, c + 2], s[i, c + 3] = a0, a1, a2, a3
            s[j, c], s[j, c + 1], s[j, c + 2], s[j, c + 3] = b0, b1, b2, b3
            c += 4
        if c + 2 <= p:
            n0 = keep * y[e, c] + shrink * half[c] * (ahead[i, c] - ahead[j, c])
            n1 = keep * y[e, c + 1] + shrink * half[c + 1] * (ahead[i, c + 1] - ahead[j, c + 1])
            a0, a1 = s[i, c] + n0, s[i, c + 1] + n1
            b0, b1 = s[j, c] - n0, s[j, c + 1] - n1
            y[e, c], y[e, c + 1] = n0, n1
            s[i, c], s[i, c + 1] = a0, a1
            s[j, c], s[j, c + 1] = b0, b1
            c += 2
        if c < p:
            new = keep * y[e, c] + shrink * half[c] * (ahead[i, c] - ahead[j, c])
            y[e, c] = new
            s[i, c] += new
            s[j, c] -= new


@outlined(types.void, INT, INT, EDGES, R1, R2, W2, W2, FLOAT)
def linf_step(lo: int, hi: int, edges: Any, half: Any, ahead: Any, y: Any, s: Any, relax: float) -> None:
    """As `l1_step`."""
    head, tail, radius = edges.head, edges.tail, edges.radius
    p = y.shape[1]
    moved = np.empty(p)
    for e in range(lo, hi):
        i, j = np.uint32(head[e]), np.uint32(tail[e])
        for c in range(p):
            moved[c] = y[e, c] + half[c] * (ahead[i, c] - ahead[j, c])
        _project_linf(moved, radius[e])
        for c in range(p):
            new = y[e, c] + relax * (moved[c] - y[e, c])
            y[e, c] = new
            s[i, c] += new
            s[j, c] -= new


#: The steps of the edges, by the code of the penalty.
EDGE_STEPS = {L1: l1_step, L2: l2_step, LINF: linf_step}


@outlined(types.void, INT, INT, EDGES, R1, R2, R2, W1)
def edge_moves(lo: int, hi: int, edges: Any, half: Any, ahead: Any, y: Any, moves: Any) -> None:
    """Add ``sum_e (yhat - y)_c^2`` of the coming edge step to ``moves (p,)``; changes nothing else."""
    head, tail, radius, kind = edges.head, edges.tail, edges.radius, edges.kind
    p = y.shape[1]
    moved = np.empty(p)
    total = np.zeros(p)
    for e in range(lo, hi):
        i, j, r = np.uint32(head[e]), np.uint32(tail[e]), radius[e]
        square = 0.0
        for c in range(p):
            moved[c] = y[e, c] + half[c] * (ahead[i, c] - ahead[j, c])
            square += moved[c] * moved[c]
        if kind == L2 or p == 1:
            shrink = 1.0 if square <= r * r else r / math.sqrt(square)
            for c in range(p):
                moved[c] *= shrink
        elif kind == L1:
            for c in range(p):
                moved[c] = _clip(moved[c], r)
        else:
            _project_linf(moved, r)
        for c in range(p):
            total[c] += (moved[c] - y[e, c]) ** 2
    for c in range(p):
        moves[c] += total[c]


@outlined(types.void, INT, INT, EDGES, R2, W2)
def add_balance(lo: int, hi: int, edges: Any, y: Any, s: Any) -> None:
    """Add ``D' y`` to ``s (V, p)``."""
    head, tail = edges.head, edges.tail
    for e in range(lo, hi):
        i, j = np.uint32(head[e]), np.uint32(tail[e])
        for c in range(y.shape[1]):
            s[i, c] += y[e, c]
            s[j, c] -= y[e, c]


# --- a whole stretch of iterations on one thread ----------------------------------------------------------------------


class StepCalls(NamedTuple):
    """Addresses of the kernels that make up an iteration; ``box`` is 0 without sparsity."""

    sites: Any
    box: Any
    edges: Any


STEP_CALLS = bundle(StepCalls, INT, INT, INT)
_sites_at, _box_at, _edges_at = dense_step.at, box_step.at, l1_step.at


@outlined(types.void, INT, SITES, EDGES, STEP, STATE, FLOAT, STEP_CALLS, quickly=True)
def run(n_iter: int, sites: Any, edges: Any, step: Any, state: Any, relax: float, calls: Any) -> None:
    """``n_iter`` iterations."""
    n, n_edges = state.x.shape[0], state.y.shape[0]
    for _ in range(n_iter):
        _sites_at(calls.sites, (0, n, sites, step, state, relax))
        if calls.box != 0:
            _box_at(calls.box, (0, n, step.rho, sites.box, state, relax))
        _edges_at(calls.edges, (0, n_edges, edges, step.half, state.ahead, state.y, state.s[0], relax))
