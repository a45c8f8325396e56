"""Arrays as text for pages: small, exact enough to look at, read back by ``web/src/data.ts``."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index

#: Up to this many sites the page has every pair; above it, blocks of neighbouring sites.
MOST_PAIRED_SITES = 1000
#: Blocks on a side of the matrix of many sites.
BLOCKS = 300


def packed(values: ArrayLike, kind: str) -> str:
    """An array in base64: ``kind`` is "f4", "i4" or "u1", little endian.

    Examples
    --------
    >>> packed([1, 2], "i4")
    'AQAAAAIAAAA='
    """
    return base64.b64encode(np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def number(value: float | str | None) -> float | None:
    """A number of six significant digits, or None for what is no number; JSON has no others.

    Files of models hold numbers that are not finite as text.

    Examples
    --------
    >>> number(1 / 3), number(float("nan")), number("inf")
    (0.333333, None, None)
    """
    return None if value is None or not math.isfinite(float(value)) else float(f"{float(value):.6g}")


def numbers(values: ArrayLike) -> list[float | None]:
    """A list of `number`."""
    return [number(value) for value in np.asarray(values, dtype=np.float64).ravel().tolist()]


def pair_matrix(values: Array, order: Index) -> dict[str, Any]:
    """Shares between 0 and 1 for all pairs of sites ``(V, V)``, or for blocks of ``order`` where there are many.

    A pair takes a byte. Of all pairs only those below the diagonal are kept, line by line, sites in their own order.
    """
    n = len(order)
    if n <= MOST_PAIRED_SITES:
        i, j = np.tril_indices(n, -1)
        return {"kind": "pairs", "values": packed(np.rint(255 * values[i, j]), "u1")}
    starts = np.linspace(0, n, BLOCKS + 1).astype(np.int64)
    sorted_rows = np.add.reduceat(values[order], starts[:-1], axis=0)
    sums = np.add.reduceat(sorted_rows[:, order], starts[:-1], axis=1)
    sizes = np.diff(starts)
    means = sums / np.outer(sizes, sizes)
    return {"kind": "blocks", "starts": starts.tolist(), "values": packed(np.rint(255 * np.clip(means, 0, 1)), "u1")}


def nearest_kin(values: Array, most: int = 12) -> dict[str, Any]:
    """For every site the others with the largest share, for pages that do not have all pairs."""
    own = values.copy()
    np.fill_diagonal(own, -1.0)
    most = min(most, len(own) - 1)
    chosen = np.argpartition(-own, most - 1, axis=1)[:, :most]
    shares = np.take_along_axis(own, chosen, axis=1)
    rank = np.argsort(-shares, axis=1, kind="stable")
    return {
        "each": most,
        "sites": packed(np.take_along_axis(chosen, rank, axis=1), "i4"),
        "values": packed(np.rint(255 * np.take_along_axis(shares, rank, axis=1)), "u1"),
    }


def display_order(values: Array, groups: Index) -> Index:
    """Sites in the order of the matrix: by group, and within groups alike ones beside each other."""
    n = len(groups)
    if n < 3:
        return np.argsort(groups, kind="stable")
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    apart = 1.0 - (values + values.T) / 2
    np.fill_diagonal(apart, 0.0)
    leaves = leaves_list(linkage(squareform(np.maximum(apart, 0.0), checks=False), "average"))
    place = np.empty(n, dtype=np.int64)
    place[leaves] = np.arange(n)
    return np.lexsort((place, groups))
