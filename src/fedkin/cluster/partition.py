"""Which shard hosts which site: few edges should join different shards."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array, csr_array

from fedkin._base import Index
from fedkin.errors import missing_dependency


def partition(n_sites: int, edges: Index, shards: int) -> Index:
    """Return the number of the shard of each site ``(V,)``, by METIS on the graph with ``edges (E, 2)``.

    Examples
    --------
    >>> labels = partition(4, np.array([[1, 0], [3, 2]]), 2)
    >>> bool(labels[0] == labels[1] != labels[2] == labels[3])
    True
    """
    if shards == 1 or not len(edges):
        return np.arange(n_sites, dtype=np.int64) * shards // max(n_sites, 1)
    try:
        import pymetis
    except ImportError:
        raise missing_dependency("pymetis", "cutting a graph into shards", extra="ray") from None
    i, j = edges.T
    ones = np.ones(2 * i.size, dtype=np.int8)
    pattern = csr_array(coo_array((ones, (np.r_[i, j], np.r_[j, i])), shape=(n_sites, n_sites)))
    adjacency = pymetis.CSRAdjacency(pattern.indptr, pattern.indices)
    return np.asarray(pymetis.part_graph(shards, adjacency=adjacency)[1], dtype=np.int64)
