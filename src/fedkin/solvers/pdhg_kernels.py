"""The primal-dual iteration, its certificates and groups of equal sites as compiled loops (numba).

V sites, E edges, p parameters. Kernels release the GIL and work on a range ``lo .. hi`` of sites or edges, so that
plain threads share one iteration and problems run side by side. Edge ``e`` joins ``head[e]`` and ``tail[e]``, with
``(D x)_e = x[head] - x[tail]``. Arrays that are not needed are empty.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fedkin._base import Array, frozen
from fedkin._compiling import kernel, load

#: Codes of the penalties.
L1, L2, LINF = 0, 1, 2
KINDS = {"l1": L1, "l2": L2, "linf": LINF}


class SiteArrays(NamedTuple):
    """Smooth part of the objective: ``x' A_u x / 2 - b_u' x + c_u`` at each site."""

    order: Any  # (V,), the caller's number of each site; A and c are in the caller's order, the others in ours
    A: Any  # (V, p, p)
    inverse: Any  # (V, p, p), of A
    curvature: Any  # (V,), replaces both if every Gram matrix is a multiple of the identity
    b: Any  # (V, p)
    c: Any  # (V,)
    weight: Any  # (V,), number of duals of each site, 1 instead of 0
    box: Any  # (V, p), levels of sparsity
    ball: Any  # its radius, or infinity


class EdgeArrays(NamedTuple):
    """Ends of the edges, radii of their dual balls, and the code of the penalty."""

    head: Any
    tail: Any
    radius: Any
    kind: Any


class Iterates(NamedTuple):
    """State of the iteration.

    ``s`` is the balance ``D'y + z`` as one share per thread: a node step reads the shares and clears them, an edge step
    adds to its thread's share.
    """

    x: Any  # (V, p)
    y: Any  # (E, p), duals of edges
    z: Any  # (V, p), duals of sites
    s: Any  # (T, V, p)
    ahead: Any  # (V, p), 2 xhat - x, and unused between two iterations


# --- an iteration -----------------------------------------------------------------------------------------------------


@kernel
def node_step(lo: int, hi: int, sites: Any, rho: Any, resolvent: Any, state: Any, relax: float, moves: Any) -> None:
    """Compute ``xhat = (A + weight rho)^-1 (b + weight rho x - s)``, ``ahead = 2 xhat - x``, ``x += relax (xhat - x)``.

    The duals of sparsity and ball start the next balance ``s``; their squared moves are added to ``moves``.
    """
    b, weight, box, ball, curvature = sites.b, sites.weight, sites.box, sites.ball, sites.curvature
    x, z, s, ahead = state.x, state.z, state.s, state.ahead
    p, shares, sparse, dense = x.shape[1], s.shape[0], box.shape[0] > 0, curvature.shape[0] == 0
    if p == 1 and shares == 1 and not dense and not sparse:
        for i in range(lo, hi):
            pull, old = weight[i] * rho[0], x[i, 0]
            new = (b[i, 0] + pull * old - s[0, i, 0]) / (curvature[i] + pull)
            ahead[i, 0] = 2.0 * new - old
            x[i, 0] = old + relax * (new - old)
            s[0, i, 0] = 0.0
        return
    target, found = np.empty(p), np.empty(p)
    for i in range(lo, hi):
        for c in range(p):
            target[c] = b[i, c] + weight[i] * rho[c] * x[i, c] - s[0, i, c]
            s[0, i, c] = 0.0
        for t in range(1, shares):
            for c in range(p):
                target[c] -= s[t, i, c]
                s[t, i, c] = 0.0
        if dense:
            for c in range(p):
                found[c] = 0.0
            k = 0
            while k + 4 <= p:  # four columns at a time make the vector loop worth its overhead
                v0, v1, v2, v3 = target[k], target[k + 1], target[k + 2], target[k + 3]
                for c in range(p):
                    first = resolvent[i, k, c] * v0 + resolvent[i, k + 1, c] * v1
                    found[c] += first + (resolvent[i, k + 2, c] * v2 + resolvent[i, k + 3, c] * v3)
                k += 4
            while k < p:
                for c in range(p):
                    found[c] += resolvent[i, k, c] * target[k]
                k += 1
        else:
            for c in range(p):
                found[c] = target[c] / (curvature[i] + weight[i] * rho[c])
        for c in range(p):
            old = x[i, c]
            ahead[i, c] = 2.0 * found[c] - old
            x[i, c] = old + relax * (found[c] - old)
        if sparse:
            inside = 0.0
            if ball < np.inf:
                length = 0.0
                for c in range(p):
                    target[c] = z[i, c] + rho[c] * ahead[i, c]
                    target[c] -= min(max(target[c], -box[i, c]), box[i, c])
                    length += target[c] * target[c]
                # with a ball rho is the same for all coordinates
                inside = 1.0 - min(1.0, ball * rho[0] / math.sqrt(length)) if length > 0.0 else 0.0
            for c in range(p):
                old = z[i, c]
                move = min(max(old + rho[c] * ahead[i, c], -box[i, c]), box[i, c]) - old
                if inside > 0.0:
                    move += inside * target[c]
                z[i, c] = old + relax * move
                s[0, i, c] = z[i, c]
                if moves.shape[0]:
                    moves[c] += move * move


@kernel
def _project(v: Any, radius: float, kind: int) -> None:
    """Project ``v`` onto the dual ball, in place."""
    p = v.shape[0]
    if kind == L1:
        for c in range(p):
            v[c] = min(max(v[c], -radius), radius)
        return
    total = 0.0
    if kind == L2:
        for c in range(p):
            total += v[c] * v[c]
        if total > radius * radius:
            shrink = radius / math.sqrt(total)
            for c in range(p):
                v[c] *= shrink
        return
    for c in range(p):
        total += abs(v[c])
    if total <= radius:
        return
    if radius == 0.0:
        v[:] = 0.0
        return
    # onto the l1 ball, the dual ball of linf (Michelot's active set)
    count, threshold = p, (total - radius) / p
    while True:
        above, active = 0.0, 0
        for c in range(p):
            if abs(v[c]) > threshold:
                above += abs(v[c])
                active += 1
        if active >= count:  # rounding may let one at the threshold in again
            break
        count, threshold = active, (above - radius) / active
    for c in range(p):
        v[c] = math.copysign(max(abs(v[c]) - threshold, 0.0), v[c])


@kernel
def edge_step(lo: int, hi: int, edges: Any, rho: Any, ahead: Any, y: Any, s: Any, relax: float) -> None:
    """Compute ``yhat = Proj(y + rho / 2 (D ahead))``, ``y += relax (yhat - y)``, and add y to both ends' balances."""
    head, tail, radius, kind = edges.head, edges.tail, edges.radius, edges.kind
    p = y.shape[1]
    moved = np.empty(p)
    if p == 1:
        half = 0.5 * rho[0]
        for e in range(lo, hi):
            i, j, old = np.uint32(head[e]), np.uint32(tail[e]), y[e, 0]
            new = min(max(old + half * (ahead[i, 0] - ahead[j, 0]), -radius[e]), radius[e])
            y[e, 0] = old + relax * (new - old)
            s[i, 0] += y[e, 0]
            s[j, 0] -= y[e, 0]
        return
    # one loop over the coordinates of an edge, for what it reads and writes: it is vectorised, several are not
    for e in range(lo, hi):
        i, j, r = np.uint32(head[e]), np.uint32(tail[e]), radius[e]
        if kind == L1:
            for c in range(p):
                old = y[e, c]
                new = min(max(old + 0.5 * rho[c] * (ahead[i, c] - ahead[j, c]), -r), r)
                new = old + relax * (new - old)
                y[e, c] = new
                s[i, c] += new
                s[j, c] -= new
        elif kind == L2:
            square = 0.0
            for c in range(p):
                new = y[e, c] + 0.5 * rho[c] * (ahead[i, c] - ahead[j, c])
                square += new * new
            shrink = relax if square <= r * r else relax * r / math.sqrt(square)
            keep = 1.0 - relax + shrink
            for c in range(p):
                new = keep * y[e, c] + shrink * 0.5 * rho[c] * (ahead[i, c] - ahead[j, c])
                y[e, c] = new
                s[i, c] += new
                s[j, c] -= new
        else:
            for c in range(p):
                moved[c] = y[e, c] + 0.5 * rho[c] * (ahead[i, c] - ahead[j, c])
            _project(moved, r, kind)
            for c in range(p):
                new = y[e, c] + relax * (moved[c] - y[e, c])
                y[e, c] = new
                s[i, c] += new
                s[j, c] -= new


@kernel
def edge_moves(lo: int, hi: int, edges: Any, rho: Any, ahead: Any, y: Any, moves: Any) -> None:
    """Add ``sum_e (yhat - y)_c^2`` of the next edge step to ``moves (p,)``; nothing else changes."""
    head, tail, radius = edges.head, edges.tail, edges.radius
    p = y.shape[1]
    moved = np.empty(p)
    for e in range(lo, hi):
        for c in range(p):
            moved[c] = y[e, c] + 0.5 * rho[c] * (ahead[head[e], c] - ahead[tail[e], c])
        _project(moved, radius[e], edges.kind)
        for c in range(p):
            moves[c] += 2.0 * (moved[c] - y[e, c]) ** 2


@kernel
def _relaxed(n: int, sites: Any, edges: Any, rho: Any, resolvent: Any, state: Any, relax: float, nothing: Any) -> None:
    """Take ``n`` iterations; inside `run` this loop would be slower."""
    for _ in range(n):
        node_step(0, state.x.shape[0], sites, rho, resolvent, state, relax, nothing)
        edge_step(0, state.y.shape[0], edges, rho, state.ahead, state.y, state.s[0], relax)


@kernel
def run(
    n: int, sites: Any, edges: Any, rho: Any, resolvent: Any, state: Any, relax: float, last: float, moves: Any
) -> None:
    """Take ``n`` iterations on one thread; the last has its own relaxation and adds to ``moves``, unless empty."""
    _relaxed(n - 1, sites, edges, rho, resolvent, state, relax, moves[:0])
    node_step(0, state.x.shape[0], sites, rho, resolvent, state, last, moves)
    if moves.shape[0]:
        edge_moves(0, state.y.shape[0], edges, rho, state.ahead, state.y, moves)
    edge_step(0, state.y.shape[0], edges, rho, state.ahead, state.y, state.s[0], last)


@kernel
def add_balance(lo: int, hi: int, edges: Any, y: Any, s: Any) -> None:
    """Add ``D' y`` to ``s (V, p)``."""
    for e in range(lo, hi):
        for c in range(y.shape[1]):
            s[edges.head[e], c] += y[e, c]
            s[edges.tail[e], c] -= y[e, c]


# --- Gram matrices ----------------------------------------------------------------------------------------------------


@kernel
def invert(lo: int, hi: int, order: Any, A: Any, weight: Any, rho: Any, inverse: Any) -> float:
    """Compute ``(A[order[i]] + weight[i] diag(rho))^-1``; return the worst relative pivot, -1 for a negative one."""
    p = rho.shape[0]
    worst = 1.0
    row, column, diagonal = np.empty(p), np.empty(p), np.empty(p)
    for i in range(lo, hi):
        matrix = inverse[i]
        for k in range(p):
            for c in range(p):
                matrix[k, c] = A[order[i], k, c]
            matrix[k, k] += weight[i] * rho[k]
            diagonal[k] = matrix[k, k]
        # Gauss-Jordan in place; positive definite matrices need no pivoting
        for k in range(p):
            pivot = matrix[k, k]
            if not pivot > 0.0:
                return -1.0
            worst = min(worst, pivot / diagonal[k])
            for m in range(p):
                column[m] = matrix[m, k]
                matrix[m, k] = 0.0
            column[k] = 0.0
            matrix[k, k] = 1.0
            for c in range(p):
                row[c] = matrix[k, c] / pivot
                matrix[k, c] = row[c]
            for m in range(p):
                for c in range(p):
                    matrix[m, c] -= column[m] * row[c]
    return worst


# --- certificates -----------------------------------------------------------------------------------------------------


@kernel
def gap(some: Any, links: Any, sites: Any, edges: Any, x: Any, state: Any) -> tuple[float, float]:
    """Return the contributions of ranges of sites and edges to objective value and duality gap at ``x``.

    The gap of sites is ``r' A^-1 r / 2`` with ``r = A x - b + s``, that of edges ``r_e phi(d_e) - <y_e, d_e>`` with ``d
    = D x``, and that of sparsity and ball ``box |x| - z x + ball ||z - clip(z, -box, box)||``.
    """
    order, A, inverse, curvature, b, box = sites.order, sites.A, sites.inverse, sites.curvature, sites.b, sites.box
    p, dense, s = x.shape[1], curvature.shape[0] == 0, state.s
    value, slack = 0.0, 0.0
    residual = np.empty(p)
    for i in range(some[0], some[1]):
        u = order[i]
        value += sites.c[u]
        for k in range(p):
            applied = 0.0
            if dense:
                for c in range(p):
                    applied += A[u, k, c] * x[i, c]
            else:
                applied = curvature[i] * x[i, k]
            value += (0.5 * applied - b[i, k]) * x[i, k]
            residual[k] = applied - b[i, k]
        for t in range(s.shape[0]):
            for k in range(p):
                residual[k] += s[t, i, k]
        for k in range(p):
            applied = 0.0
            if dense:
                for c in range(p):
                    applied += inverse[i, k, c] * residual[c]
            else:
                applied = residual[k] / curvature[i]
            slack += 0.5 * residual[k] * applied
        if box.shape[0]:
            beyond = 0.0
            for k in range(p):
                size, dual = box[i, k] * abs(x[i, k]), state.z[i, k]
                value += size
                slack += size - dual * x[i, k]
                beyond += max(abs(dual) - box[i, k], 0.0) ** 2
            if sites.ball < np.inf:
                slack += sites.ball * math.sqrt(beyond)
    head, tail, kind = edges.head, edges.tail, edges.kind
    for e in range(links[0], links[1]):
        i, j = head[e], tail[e]
        size, inner = 0.0, 0.0
        for c in range(p):
            d = x[i, c] - x[j, c]
            inner += state.y[e, c] * d
            if kind == L1:
                size += abs(d)
            elif kind == L2:
                size += d * d
            else:
                size = max(size, abs(d))
        size = edges.radius[e] * (math.sqrt(size) if kind == L2 else size)
        value += size
        slack += size - inner
    return value, slack


# --- sites that should be equal ---------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """Groups of sites that should be equal, in each column or in all, known by their smallest members."""

    parent: Any  # (V, p) or (V, 1), the smallest member
    size: Any  # of the same shape, the number of members, at the smallest one
    zero: Any  # (V, p), whether the group is 0, if any may be
    out: Any  # (V, p), sums at the smallest member, and in the end means at all


def empty_groups(edges: EdgeArrays, out: Array, z: Array) -> Groups:
    """Return groups before the first member, with an array for sums ``out (V, p)``, given site duals ``z``."""
    shape = (len(out), out.shape[1] if edges.kind == L1 else 1)
    zero = np.zeros(out.shape if z.size else z.shape, dtype=np.bool_)
    return Groups(np.empty(shape, dtype=np.int32), np.zeros(shape), zero, out)


@kernel
def _join(parent: Any, i: int, j: int, c: int) -> None:
    """Put sites ``i`` and ``j`` into one group of column ``c``, by the smaller number of the two roots."""
    while parent[i, c] != i:
        parent[i, c] = parent[parent[i, c], c]
        i = parent[i, c]
    while parent[j, c] != j:
        parent[j, c] = parent[parent[j, c], c]
        j = parent[j, c]
    # one pass in ascending order then finds every root
    parent[max(i, j), c] = min(i, j)


@kernel
def group_sums(lo: int, hi: int, edges: Any, y: Any, share: float, z: Any, box: Any, x: Any, groups: Any) -> None:
    """Sum ``x``, of the first sites, over groups joined by edges whose dual is inside ``share`` of its ball.

    For l1 each of the columns ``lo .. hi`` is separate. A group is 0 if the sparsity dual of a member is in its box.
    """
    head, tail, radius, kind = edges.head, edges.tail, edges.radius, edges.kind
    parent, size, zero, out = groups
    p, sparse = x.shape[1], zero.shape[0] > 0
    first, end = (lo, hi) if kind == L1 else (0, 1)
    for i in range(parent.shape[0]):
        parent[i, first:end] = i
    for e in range(y.shape[0]):
        i, j, limit = head[e], tail[e], share * radius[e]
        if kind == L1:
            for c in range(first, end):
                if parent[i, c] != parent[j, c] and abs(y[e, c]) < limit:
                    _join(parent, i, j, c)
        elif parent[i, 0] != parent[j, 0]:
            length = 0.0
            for c in range(p):
                length += y[e, c] * y[e, c] if kind == L2 else abs(y[e, c])
            if (math.sqrt(length) if kind == L2 else length) < limit:
                _join(parent, i, j, 0)
    out[:, lo:hi] = 0.0
    for i in range(parent.shape[0]):
        for c in range(first, end):
            parent[i, c] = parent[parent[i, c], c]
    for i in range(x.shape[0]):
        for c in range(first, end):
            size[parent[i, c], c] += 1.0
        for c in range(lo, hi):
            root = parent[i, c if kind == L1 else 0]
            out[root, c] += x[i, c]
            if sparse and abs(z[i, c]) < share * box[i, c]:
                zero[root, c] = True


@kernel
def group_means(lo: int, hi: int, groups: Any) -> None:
    """Replace the sums of `group_sums` by means, at every member."""
    parent, size, zero, out = groups
    for i in range(parent.shape[0]):
        for c in range(lo, hi):
            k = min(c, parent.shape[1] - 1)
            # a root comes before its members
            if parent[i, k] != i:
                out[i, c] = out[parent[i, k], c]
            elif zero.shape[0] and zero[i, c]:
                out[i, c] = 0.0
            else:
                out[i, c] /= size[i, k]


@cache
def load_kernels() -> None:
    """Compile the kernels for the types that iterations use, or read them from numba's cache."""
    one, matrix, cube = np.ones(1), np.ones((1, 1)), np.ones((1, 1, 1))
    # data are read-only, as they are in shards
    fixed, b, A = (frozen(array.copy()) for array in (one, matrix, cube))
    ends, order = (frozen(np.zeros(1, dtype=kind)) for kind in (np.int32, np.int64))
    sites = SiteArrays(order, A, cube, fixed, b, fixed, fixed, b, np.inf)
    edges, state = EdgeArrays(ends, ends, fixed, L1), Iterates(matrix, matrix, matrix, cube, matrix)
    load(run, 1, sites, edges, fixed, cube, state, 1.0, 1.0, one)
    load(node_step, 0, 1, sites, fixed, cube, state, 1.0, one)
    load(edge_step, 0, 1, edges, fixed, matrix, matrix, matrix, 1.0)
    load(edge_moves, 0, 1, edges, fixed, matrix, matrix, one)
    load(add_balance, 0, 1, edges, matrix, matrix)
    load(invert, 0, 1, order, A, fixed, fixed, cube)
    load(gap, (0, 1), (0, 1), sites, edges, matrix, state)
    groups = Groups(np.zeros((1, 1), dtype=np.int32), matrix, matrix > 1, matrix)
    load(group_sums, 0, 1, edges, matrix, 1.0, matrix, b, matrix, groups)
    load(group_means, 0, 1, groups)
