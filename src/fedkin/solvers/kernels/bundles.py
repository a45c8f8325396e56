"""What the kernels of the exact solver work on: bundles of arrays for V sites, E edges and p parameters.

Conventions: ``s (T, V, p)`` holds ``D'y`` as one share per thread; a node step reads the shares and sets them back to
zero (the first one to the sparsity duals), an edge step adds to its thread's share. Edge ``e`` joins ``head[e]`` and
``tail[e]``; ``(D x)_e = x[head] - x[tail]``. Arrays that are not needed are empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types

from fedkin.solvers.kernels.jit import FLOAT, INT, bundle, readable, writable
from fedkin.solvers.pdhg import Stopping

I1, L1D = readable(types.int32, 1), readable(types.int64, 1)
B1 = readable(types.boolean, 1)
R1, R2, R3 = (readable(FLOAT, k) for k in (1, 2, 3))
W1, W2, W3 = (writable(FLOAT, k) for k in (1, 2, 3))


class Sites(NamedTuple):
    """The smooth part: ``x' A_u x / 2 - b_u' x + c_u`` on each site.

    ``order (V,)`` is the caller's number of each site: ``A`` and ``c`` are in the caller's order, the others in ours.
    ``own_inverse (V, p, p)`` are the inverses of ``A``, unless these would take too much memory; ``curvature (V,)``
    stands in place of ``A`` where every Gram matrix is a multiple of the identity. ``linked (V,)`` is the number of
    duals of each site, ``weight`` the same with 1 in place of 0, and ``box (V, p)`` bounds the sparsity duals.
    Where some sites are ``singular (V,)``, inverses are generalised, and ``unseen (V, p, p)`` projects onto what lies
    outside the range of ``A``.
    """

    order: Any
    A: Any
    own_inverse: Any
    curvature: Any
    b: Any
    c: Any
    linked: Any
    weight: Any
    box: Any
    singular: Any
    unseen: Any


class Edges(NamedTuple):
    """The penalty: ends of the edges, radii of their dual balls, and which penalty it is (`steps.KINDS`)."""

    head: Any
    tail: Any
    radius: Any
    kind: Any


class Step(NamedTuple):
    """``rho (p,)``, half of it, and the inverses of ``A_u + weight_u diag(rho)`` where Gram matrices are dense."""

    rho: Any
    half: Any
    resolvent: Any


class State(NamedTuple):
    """Where the iteration stands: ``x (V, p)``, edge duals ``y (E, p)``, sparsity duals ``z (V, p)``.

    ``s (T, V, p)`` is the balance of the duals in shares, ``ahead (V, p)`` is ``2 xhat - x``, and free between two
    iterations.
    """

    x: Any
    y: Any
    z: Any
    s: Any
    ahead: Any


class Levels(NamedTuple):
    """Penalty levels that are solved one after the other.

    ``strengths (m,)`` are those of ``theta (m, V, p)`` and ``alpha (m, E, p)``, of which the first may be known and the
    others are filled in. Each begins with ``rho (p,)``. ``ends (m,)`` gets the number of checks that were done
    when a level was. ``component (E,)`` of each edge; empty when it does not matter whether whole ones are fused. No
    site has less ``curvature`` in any direction.
    """

    strengths: Any
    theta: Any
    alpha: Any
    ends: Any
    rho: Any
    edge_weight: Any
    component: Any
    curvature: Any


SITES = bundle(Sites, L1D, R3, R3, R1, R2, R1, R1, R1, R2, B1, R3)
EDGES = bundle(Edges, I1, I1, W1, INT)
STEP = bundle(Step, W1, W1, W3)
STATE = bundle(State, W2, W2, W2, W3, W2)
STOPPING = bundle(Stopping, FLOAT, FLOAT, INT, FLOAT)
LEVELS = bundle(Levels, R1, W3, W3, writable(INT, 1), R1, R1, I1, FLOAT)
