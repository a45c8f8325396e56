"""The primal-dual iteration as compiled loops (numba).

Nothing here is called directly: `fedkin.solvers.compiled` drives these kernels, `fedkin.solvers.backend` decides when.
Importing the module compiles them, or loads them from numba's cache. All release the GIL and work on a range
``lo .. hi`` of devices or edges, so that plain threads share one iteration and problems run side by side.

Conventions: ``s (T, V, p)`` holds ``D'y`` as one share per thread; a node step reads the shares and sets them back to
zero (the first one to the sparsity duals), an edge step adds to its thread's share. Edge ``e`` joins ``head[e]`` and
``tail[e]``; ``(D x)_e = x[head] - x[tail]``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types

from fedkin.solvers.kernels.jit import FLOAT, INT, kernel, readable, writable

_I1, _L1 = readable(types.int32, 1), readable(types.int64, 1)
_R1, _R2, _R3 = (readable(FLOAT, k) for k in (1, 2, 3))
_W1, _W2, _W3 = (writable(FLOAT, k) for k in (1, 2, 3))

L1, L2, LINF = 0, 1, 2
#: Codes of the penalties.
KINDS = {"l1": L1, "l2": L2, "linf": LINF}

# --- parts of the kernels ------------------------------------------------------------------------------------------


@njit(nogil=True)
def _box_step(lo: int, hi: int, rho: Any, s: Any, ahead: Any, relax: float, z: Any, box: Any) -> None:
    """Duals of the sparsity term; they open the next sum ``s``."""
    for i in range(lo, hi):
        for c in range(rho.shape[0]):
            old = z[i, c]
            moved = min(max(old + rho[c] * ahead[i, c], -box[i, c]), box[i, c])
            z[i, c] = old + relax * (moved - old)
            s[0, i, c] = z[i, c]


@njit(inline="always")
def _clip(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


@njit(nogil=True)
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


# --- devices --------------------------------------------------------------------------------------------------------


@kernel(types.void, INT, INT, _R3, _R2, _R1, _R1, _W2, _W3, _W2, FLOAT, _W2, _R2)
def node_step_dense(
    lo: int,
    hi: int,
    inverse: Any,
    b: Any,
    weight: Any,
    rho: Any,
    x: Any,
    s: Any,
    ahead: Any,
    relax: float,
    z: Any,
    box: Any,
) -> None:
    """``xhat = inverse (b + weight rho x - s)``, ``ahead = 2 xhat - x``, ``x += relax (xhat - x)``."""
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
    if box.shape[0] > 0:
        _box_step(lo, hi, rho, s, ahead, relax, z, box)


@kernel(types.void, INT, INT, _R1, _R2, _R1, _R1, _W2, _W3, _W2, FLOAT, _W2, _R2)
def node_step_isotropic(
    lo: int,
    hi: int,
    curvature: Any,
    b: Any,
    weight: Any,
    rho: Any,
    x: Any,
    s: Any,
    ahead: Any,
    relax: float,
    z: Any,
    box: Any,
) -> None:
    """As `node_step_dense`, where every Gram is ``curvature[i]`` times the identity."""
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
    if box.shape[0] > 0:
        _box_step(lo, hi, rho, s, ahead, relax, z, box)


# --- edges ----------------------------------------------------------------------------------------------------------


@kernel(types.void, INT, INT, _I1, _I1, _R1, _R1, _R2, _W2, _W2, FLOAT, INT)
def edge_step(
    lo: int,
    hi: int,
    head: Any,
    tail: Any,
    radius: Any,
    half: Any,
    ahead: Any,
    y: Any,
    s: Any,
    relax: float,
    kind: int,
) -> None:
    """``yhat = Proj(y + half (D ahead))``, ``y += relax (yhat - y)``, and ``y`` is added to both ends' balances."""
    p = y.shape[1]
    if p == 1:
        for e in range(lo, hi):
            i, j = np.uint32(head[e]), np.uint32(tail[e])
            old = y[e, 0]
            new = old + relax * (_clip(old + half[0] * (ahead[i, 0] - ahead[j, 0]), radius[e]) - old)
            y[e, 0] = new
            s[i, 0] += new
            s[j, 0] -= new
    elif kind == L1:
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
    elif kind == L2:
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
    else:
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


@kernel(types.void, INT, INT, _I1, _I1, _R1, _R1, _R2, _R2, INT, _W1)
def edge_moves(
    lo: int,
    hi: int,
    head: Any,
    tail: Any,
    radius: Any,
    half: Any,
    ahead: Any,
    y: Any,
    kind: int,
    moves: Any,
) -> None:
    """Add ``sum_e (yhat - y)_c^2`` of the coming edge step to ``moves (p,)``; changes nothing else."""
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


@kernel(types.void, INT, INT, _I1, _I1, _R2, _W2)
def add_balance(lo: int, hi: int, head: Any, tail: Any, y: Any, s: Any) -> None:
    """Add ``D' y`` to ``s (V, p)``."""
    for e in range(lo, hi):
        i, j = np.uint32(head[e]), np.uint32(tail[e])
        for c in range(y.shape[1]):
            s[i, c] += y[e, c]
            s[j, c] -= y[e, c]


# --- a whole stretch of iterations on one thread ----------------------------------------------------------------------


@kernel(types.void, INT, INT, _R3, _R1, _R2, _R1, _R1, _W2, _W3, _W2, FLOAT, _W2, _R2, _I1, _I1, _R1, _R1, _W2, INT)
def run(
    n_iter: int,
    dense: int,
    inverse: Any,
    curvature: Any,
    b: Any,
    weight: Any,
    rho: Any,
    x: Any,
    s: Any,
    ahead: Any,
    relax: float,
    z: Any,
    box: Any,
    head: Any,
    tail: Any,
    radius: Any,
    half: Any,
    y: Any,
    kind: int,
) -> None:
    """``n_iter`` iterations."""
    for _ in range(n_iter):
        if dense:
            node_step_dense(0, x.shape[0], inverse, b, weight, rho, x, s, ahead, relax, z, box)
        else:
            node_step_isotropic(0, x.shape[0], curvature, b, weight, rho, x, s, ahead, relax, z, box)
        edge_step(0, y.shape[0], head, tail, radius, half, ahead, y, s[0], relax, kind)
