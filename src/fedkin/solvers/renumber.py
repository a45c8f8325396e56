"""Numbers under which a compiled iteration stores devices and edges."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index
from fedkin.graph import Graph

#: Renumbering pays above this many devices when neighbours are farther apart than this share of all numbers.
SCRAMBLED_DEVICES, SCRAMBLED_SHARE = 50_000, 0.05


class Numbering:
    """Internal numbers of devices and edges: the caller's, or a renumbering that keeps neighbours close.

    Attributes
    ----------
    changed : bool
        Whether internal numbers differ from the caller's.
    devices, edges : int array (V,), int array (E,)
        The caller's number of each device and edge; the edges are empty where nothing is changed.
    head, tail : int32 array (E,)
        Internal numbers of the ends of the edges.
    """

    def __init__(self, graph: Graph) -> None:
        i, j = graph.edges[:, 0], graph.edges[:, 1]
        self.changed = graph.n_devices >= SCRAMBLED_DEVICES and bool(np.mean(i - j) > SCRAMBLED_SHARE * graph.n_devices)
        self.devices: Index = np.arange(graph.n_devices)
        self.edges: Index = np.empty(0, dtype=np.int64)
        if self.changed:
            self.devices = _bandwidth_order(graph)
            rank = np.empty(graph.n_devices, dtype=np.int64)
            rank[self.devices] = np.arange(graph.n_devices)
            i, j = rank[i], rank[j]
            self.edges = np.lexsort((np.minimum(i, j), np.maximum(i, j)))
            i, j = i[self.edges], j[self.edges]
        self.head, self.tail = i.astype(np.int32), j.astype(np.int32)

    def devices_to_internal(self, values: NDArray[Any]) -> NDArray[Any]:
        return values[self.devices] if self.changed else np.ascontiguousarray(values)

    def edges_to_internal(self, values: Array) -> Array:
        return values[self.edges] if self.changed else np.ascontiguousarray(values)

    def devices_to_caller(self, values: Array) -> Array:
        return _scattered(values, self.devices) if self.changed else values

    def edges_to_caller(self, values: Array) -> Array:
        return _scattered(values, self.edges) if self.changed else values


def _scattered(values: Array, numbers: Index) -> Array:
    out = np.empty_like(values)
    out[numbers] = values
    return out


def _bandwidth_order(graph: Graph) -> Index:
    from scipy.sparse import coo_array, csr_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    i, j = graph.edges[:, 0], graph.edges[:, 1]
    shape = (graph.n_devices, graph.n_devices)
    pattern = coo_array((np.ones(2 * i.size, dtype=np.int8), (np.r_[i, j], np.r_[j, i])), shape=shape)
    order = reverse_cuthill_mckee(csr_array(pattern), symmetric_mode=True)
    return np.ascontiguousarray(order, dtype=np.int64)
