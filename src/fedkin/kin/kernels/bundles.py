"""What kernels take: sites as rows of sums, groups as blocks of lanes, and room to work in."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fedkin._base import Array, Index
from fedkin.solvers.jit import FLOAT, INT, bundle, writable

#: Groups whose marginals are computed at once, one in each lane of vector instructions.
LANES = 8


class Moving(NamedTuple):
    """What sites say at one share of the spread, where they are, and in which order they move.

    ``sums (V, T + p)``: upper triangle of ``H``, row by row (`packed`), then ``c``: the log likelihood of ``nu`` is
    ``c'nu - nu'H nu / 2``. ``alone (V,)``: log marginals of groups of one. ``chance (V,)``: uniform draws. Neighbours
    of site u are ``neighbour[first[u]:first[u + 1]]``, and their edges count as ``weight`` of an edge, at most 1.
    """

    sums: Any
    alone: Any
    chance: Any
    weight: Any
    z: Any
    order: Any
    first: Any
    neighbour: Any


class Groups(NamedTuple):
    """Sums over members. Group k is in lane ``k % LANES`` of block ``k // LANES``.

    ``sums (B, T + p, LANES)`` as sites have them; ``n (B LANES,)`` members; no group from ``used (1,)`` on has any;
    ``log (B LANES,)`` log marginals; ``new`` what they would be with another site.
    """

    sums: Any
    n: Any
    used: Any
    log: Any
    new: Any


class Room(NamedTuple):
    """To work in: ``R (T + p, LANES)``, ``x (p, LANES)``, ``one (1, T + p, LANES)``, ``take``, ``out (LANES,)``."""

    R: Any
    x: Any
    one: Any
    take: Any
    out: Any


class Prior(NamedTuple):
    """Of the groups' centres: precisions ``(p,)``, and precisions times means ``(p,)``."""

    precision: Any
    pull: Any


I1 = writable(INT, 1)
W1, W2, W3 = (writable(FLOAT, n) for n in (1, 2, 3))
MOVING = bundle(Moving, W2, W1, W1, W1, I1, I1, I1, I1)
GROUPS = bundle(Groups, W3, I1, I1, W1, W1)
ROOM = bundle(Room, W2, W2, W3, W1, W1)
PRIOR = bundle(Prior, W1, W1)


def make_room(p: int) -> Room:
    length = p * (p + 1) // 2 + p
    return Room(*(np.zeros(shape) for shape in ((length, LANES), (p, LANES), (1, length, LANES), LANES, LANES)))


def make_groups(most: int, length: int) -> Groups:
    """Room for ``most`` groups, all of them empty, of sites with ``length`` sums."""
    blocks = (most + LANES - 1) // LANES
    n = blocks * LANES
    counts = np.zeros(n, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return Groups(np.zeros((blocks, length, LANES)), *counts, np.zeros(n), np.zeros(n))


def in_lanes(rows: Array, blocks: int) -> Array:
    """Rows ``(n, L)`` as ``(blocks, L, LANES)``, the rest zeros."""
    made = np.zeros((blocks * LANES, rows.shape[1]))
    made[: len(rows)] = rows
    return np.ascontiguousarray(made.reshape(blocks, LANES, -1).transpose(0, 2, 1))


def packed(matrices: Array) -> Array:
    """Upper triangles ``(..., T)`` of symmetric matrices ``(..., p, p)``, row by row."""
    i, j = triangle(matrices.shape[-1])
    return np.asarray(matrices[..., i, j])


def unpacked(triangles: Array, p: int) -> Array:
    """The way back."""
    return np.asarray(triangles[..., _places(p)])


@cache
def triangle(p: int) -> tuple[Index, Index]:
    """Rows and columns of the entries of a triangle."""
    i, j = np.triu_indices(p)
    return i, j


@cache
def _places(p: int) -> Index:
    """Where in its triangle each entry of a symmetric matrix ``(p, p)`` is."""
    i, j = triangle(p)
    places = np.empty((p, p), dtype=np.int64)
    places[i, j] = places[j, i] = np.arange(len(i))
    return places
