"""What kernels pass to each other, bundled, and the numbers that are built into them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import typeof

from fedkin._base import Array
from fedkin.solvers.kernels.jit import FLOAT, INT, bundle, readable, writable

#: Prior precision of the groups' common mean, in units of the spread between sites.
MEAN_PRECISION = 4.0
#: Where the typical width of groups may lie (log-uniform), and shapes of the widths' inverse gamma prior (uniform).
TYPICAL_WIDTH = np.exp(np.linspace(np.log(0.03), np.log(30.0), 48))
SHAPES = np.array([0.5, 1.0, 2.0, 5.0, 20.0])
#: Widths and rates keep away from what cannot be computed with.
LEAST, LEAST_RATE = 1e-6, 1e-6
#: Sweeps from one draw of the within-group share to the next.
SHARE_EVERY = 3
#: Groups whose marginals are computed at once, one in each lane of vector instructions.
LANES = 8


class Sites(NamedTuple):
    """What sites say, with effects inside groups integrated out for each of R shares of the spread.

    ``H (R, V, T)`` (upper triangles, row by row: `packed`), ``c (R, V, p)``: the log likelihood of ``nu`` is
    ``c'nu - nu'H nu / 2 + k``, ``k (R, V)``; ``share (R,)``; neighbours of site u are
    ``neighbour[first[u]:first[u + 1]]``, and their edges count as ``weight`` of an edge, at most 1.
    """

    H: Any
    c: Any
    k: Any
    share: Any
    first: Any
    neighbour: Any
    weight: Any


class State(NamedTuple):
    """Where a chain stands: groups ``z (V,)``, number of the share ``(1,)``, ``m (p,)``, ``w (p,)`` and scalars.

    The scalars are typical width, shape, rate of edges inside and between groups.
    """

    z: Any
    share: Any
    m: Any
    w: Any
    scalars: Any


class Record(NamedTuple):
    """What a chain leaves: sums over kept sweeps, and a line for each of them.

    ``b (V, p)`` and ``bb (V, T)``: means of effects and of their squares (upper triangles) given the partition;
    ``same (V, V)``: probabilities of sharing a group, empty for many sites; ``trace (S, 5)``: bound on the evidence,
    groups, number of the share, rates;
    ``means (S, T, p)``: ``b`` of the first T sites; ``z (S, V)``, ``m (S, p)``, ``w (S, p)``: the states.
    ``best (V,)`` is the partition with the highest density of all sweeps.
    """

    b: Any
    bb: Any
    same: Any
    trace: Any
    means: Any
    z: Any
    m: Any
    w: Any
    best: Any


class Course(NamedTuple):
    """Sweeps before the first that is kept, most groups; whether edges count, groups are integrated out,
    hyper-parameters move, and groups split and merge as a whole; the log prior of partitions by the number of groups
    (`log_partitions`)."""

    burn: Any
    most: Any
    edges: Any
    collapsed: Any
    moves: Any
    splits: Any
    partitions: Any


class Groups(NamedTuple):
    """Sums over members, and room to work in. Group k is in lane ``k % LANES`` of block ``k // LANES``.

    ``H (B, p, p, LANES)`` (upper triangles), ``c (B, p, LANES)``, ``n (B LANES,)``, log marginals ``log``, what they
    would be with another site ``new``, means and draws ``(B LANES, p)``; ``phi (B, p + T, LANES)``: what a site's
    ``c`` and ``H`` are multiplied by for its log likelihood at the draw; no group from number ``used (1,)`` on has
    members. ``take (LANES,)``, ``lanes (p, p, LANES)``, ``x (p, LANES)``, ``row (p + 1, LANES)`` are room for
    `log_marginals`, ``R (p, p)``, ``y (p,)`` for `log_marginal`.
    """

    H: Any
    c: Any
    n: Any
    log: Any
    new: Any
    draw: Any
    mean: Any
    phi: Any
    used: Any
    take: Any
    lanes: Any
    x: Any
    row: Any
    R: Any
    y: Any


I1 = writable(INT, 1)
J1 = readable(INT, 1)
R1, R2, R3 = (readable(FLOAT, n) for n in (1, 2, 3))
_I2 = writable(INT, 2)
_W1, _W2, _W3 = (writable(FLOAT, n) for n in (1, 2, 3))
SITES = bundle(Sites, R3, R3, R2, R1, J1, J1, R1)
STATE = bundle(State, I1, I1, _W1, _W1, _W1)
RECORD = bundle(Record, _W2, _W2, _W2, _W2, _W3, _I2, _W2, _W2, I1)
COURSE = bundle(Course, INT, INT, INT, INT, INT, INT, R1)
RANDOM = typeof(np.random.default_rng(0))  # type: ignore[no-untyped-call]


def packed(matrices: Array) -> Array:
    """Upper triangles ``(..., T)`` of symmetric matrices ``(..., p, p)``, row by row."""
    i, j = np.triu_indices(matrices.shape[-1])
    return np.asarray(matrices[..., i, j])


def unpacked(triangles: Array, p: int) -> Array:
    """The way back."""
    i, j = np.triu_indices(p)
    full = np.empty((*triangles.shape[:-1], p, p))
    full[..., i, j] = triangles
    full[..., j, i] = triangles
    return full
