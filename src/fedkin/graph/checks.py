"""Checks and orderings of the edges that come into a `Graph`."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from fedkin._base import Array, Index, count, listed
from fedkin.data import site_ids
from fedkin.errors import DataError, GraphError, GraphWarning


def plain_ids(values: Iterable[object], what: str) -> list[Hashable]:
    if isinstance(values, int):
        raise GraphError(f"{what} must be an iterable of ids, got {values!r}: use range({values})")
    try:
        return site_ids(values)
    except DataError as error:
        raise GraphError(f"{what}: {error}") from None


def positions(sites: Iterable[object]) -> tuple[tuple[Hashable, ...], dict[Hashable, int]]:
    ids = tuple(plain_ids(sites, "sites"))
    if not ids:
        raise GraphError("a graph needs at least one site, got none")
    position = {site: number for number, site in enumerate(ids)}
    if len(position) < len(ids):
        twice = next(site for number, site in enumerate(ids) if position[site] != number)
        raise GraphError(f"site {twice!r} is given twice: every site must be named once")
    return ids, position


def ids_for(sites: Iterable[object] | None, size: int, what: str) -> tuple[Hashable, ...]:
    """Ids of sites that come with ``size`` things, one for each; 0..size-1 by default."""
    ids, _ = positions(range(size) if sites is None else sites)
    if len(ids) != size:
        raise GraphError(f"{count(size, what)} for {count(len(ids), 'site')}: give one {what} per site")
    return ids


def checked_edges(ids: tuple[Hashable, ...], index: Index, weights: npt.ArrayLike | None) -> tuple[Index, Array]:
    """Oriented and sorted edges with their weights, or the error that names the culprit."""
    loops = index[:, 0] == index[:, 1]
    if loops.any():
        site = ids[index[np.flatnonzero(loops)[0], 0]]
        raise GraphError(f"edge {(site, site)!r} is a self-loop: remove it, a site is always like itself")
    checked = None if weights is None else checked_weights(ids, index, weights)
    edges, ordered = sorted_edges(index, checked)
    again = (edges[1:] == edges[:-1]).all(axis=1)
    if not again.any():
        return edges, ordered
    for at in np.flatnonzero(again & (ordered[1:] != ordered[:-1])):
        i, j = edges[at]
        raise GraphError(
            f"edge {(ids[j], ids[i])!r} is given twice, with the weights {ordered[at]:g} and {ordered[at + 1]:g}: "
            "give every pair once"
        )
    i, j = edges[np.flatnonzero(again)[0]]
    more = f" (and {int(again.sum()) - 1} more)" if again.sum() > 1 else ""
    warnings.warn(
        f"edge {(ids[j], ids[i])!r} is given twice{more}, maybe once in each direction: it counts once",
        GraphWarning,
        stacklevel=3,
    )
    first = np.concatenate([[True], ~again])
    return edges[first], ordered[first]


def warn_of_unnamed(sites: Sequence[Hashable]) -> None:
    """Say which sites have no edges because a graph does not name them."""
    if sites:
        have = "has" if len(sites) == 1 else "have"
        warnings.warn(f"the graph does not name {named(sites)}, which {have} no edges", GraphWarning, stacklevel=3)


def named(sites: Sequence[Hashable]) -> str:
    """``site 'a'``, or ``2 sites 'a', 'b'``."""
    return f"site {sites[0]!r}" if len(sites) == 1 else f"{len(sites)} sites {listed(sites)}"


def checked_weights(ids: tuple[Hashable, ...], index: Index, weights: npt.ArrayLike) -> Array:
    try:
        values = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise GraphError("weights must be numbers, one per edge") from None
    if values.shape != (len(index),):
        raise GraphError(f"weights have the shape {values.shape}, expected ({len(index)},), one per edge")
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        u, v = (ids[end] for end in index[at])
        raise GraphError(
            f"edge {(u, v)!r} has the weight {values[at]}, expected a positive number: "
            "leave out edges that do not count"
        )
    return values


def checked_site_weights(ids: tuple[Hashable, ...], weights: npt.ArrayLike) -> Array:
    """Positive weights ``(V,)`` of the sites of cliques."""
    try:
        values = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.shape != (len(ids),) or not (np.isfinite(values) & (values > 0)).all():
        raise GraphError(f"weights must be {count(len(ids), 'positive number')}, one per site")
    return values


def sorted_edges(index: Index, weights: Array | None) -> tuple[Index, Array]:
    """Pairs with the larger position first, in lexicographic order."""
    i, j = index.max(axis=1), index.min(axis=1)
    order = np.argsort(i * (i.max(initial=0) + 1) + j, kind="stable")
    return np.column_stack([i[order], j[order]]), np.ones(len(index)) if weights is None else weights[order]


def pair_numbers(edges: Index) -> Index:
    """Number of the pair (i, j), i > j, in the list (1, 0), (2, 0), (2, 1), (3, 0), ..."""
    i, j = edges[:, 0], edges[:, 1]
    return i * (i - 1) // 2 + j


def pairs_of_numbers(numbers: Index) -> Index:
    """The inverse of `pair_numbers`, exact below 2**50."""
    i = ((1 + np.sqrt(1 + 8 * numbers.astype(np.float64))) / 2).astype(np.int64)
    return np.column_stack([i, numbers - i * (i - 1) // 2])
