"""Checks and orderings of the edges that come into a `Graph`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from fedkin.data import device_ids
from fedkin.errors import DataError, GraphError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def plain_ids(values: Iterable[object], what: str) -> list[Hashable]:
    if isinstance(values, int):
        raise GraphError(f"{what} must be an iterable of ids, got {values!r}: use range({values})")
    try:
        return device_ids(values)
    except DataError as error:
        raise GraphError(f"{what}: {error}") from None


def positions(devices: Iterable[object]) -> tuple[tuple[Hashable, ...], dict[Hashable, int]]:
    ids = tuple(plain_ids(devices, "devices"))
    if not ids:
        raise GraphError("a graph needs at least one device, got none")
    position = {device: number for number, device in enumerate(ids)}
    if len(position) < len(ids):
        twice = next(device for number, device in enumerate(ids) if position[device] != number)
        raise GraphError(f"device {twice!r} is given twice: every device must be named once")
    return ids, position


def checked_edges(
    ids: tuple[Hashable, ...], index: IntArray, weights: npt.ArrayLike | None
) -> tuple[IntArray, FloatArray]:
    """Oriented and sorted edges with their weights, or the error that names the culprit."""
    loops = index[:, 0] == index[:, 1]
    if loops.any():
        device = ids[index[np.flatnonzero(loops)[0], 0]]
        raise GraphError(f"edge {(device, device)!r} is a self-loop: remove it, a device is always like itself")
    checked = None if weights is None else checked_weights(ids, index, weights)
    edges, ordered = sorted_edges(index, checked)
    same = np.flatnonzero((edges[1:] == edges[:-1]).all(axis=1))
    if len(same):
        i, j = edges[same[0]]
        more = f" (and {len(same) - 1} more)" if len(same) > 1 else ""
        raise GraphError(
            f"edge {(ids[j], ids[i])!r} is given twice{more}, maybe once in each direction: give every pair once"
        )
    return edges, ordered


def checked_weights(ids: tuple[Hashable, ...], index: IntArray, weights: npt.ArrayLike) -> FloatArray:
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


def sorted_edges(index: IntArray, weights: FloatArray | None) -> tuple[IntArray, FloatArray]:
    """Pairs with the larger position first, in lexicographic order."""
    i, j = index.max(axis=1), index.min(axis=1)
    order = np.argsort(i * (i.max(initial=0) + 1) + j)
    return np.column_stack([i[order], j[order]]), np.ones(len(index)) if weights is None else weights[order]


def pair_numbers(edges: IntArray) -> IntArray:
    """Number of the pair (i, j), i > j, in the list (1, 0), (2, 0), (2, 1), (3, 0), ..."""
    i, j = edges[:, 0], edges[:, 1]
    return i * (i - 1) // 2 + j


def pairs_of_numbers(numbers: IntArray) -> IntArray:
    """The inverse of `pair_numbers`, exact below 2**50."""
    i = ((1 + np.sqrt(1 + 8 * numbers.astype(np.float64))) / 2).astype(np.int64)
    return np.column_stack([i, numbers - i * (i - 1) // 2])


def listed(ids: Sequence[object], most: int = 5) -> str:
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(repr(device) for device in ids[:most]) + more


def counted(ids: Sequence[object]) -> str:
    return "device" if len(ids) == 1 else f"{len(ids)} devices"
