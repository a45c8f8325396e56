"""Cut a graph into pieces of about equal size with few edges between them."""

from __future__ import annotations

import numpy as np
from scipy import sparse

from fedkin._base import Index

_SWEEPS = 10
#: A piece may be this much larger than the mean.
_SLACK = 1.05


def small_cut(n_devices: int, edges: Index, pieces: int) -> Index:
    """The piece of each device, ``(V,)``.

    Devices are put in the order of reverse Cuthill-McKee, which keeps neighbours close, and cut into contiguous pieces;
    then devices move to the piece where most of their neighbours are, as long as pieces stay balanced.

    Parameters
    ----------
    n_devices : int
        V.
    edges : int array (E, 2)
        Positions of the ends.
    pieces : int
        From 1 to V.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.federate.partition import small_cut
    >>> ring = np.array([[u + 1, u] for u in range(7)] + [[7, 0]])
    >>> where = small_cut(8, ring, 2)
    >>> int((where[ring[:, 0]] != where[ring[:, 1]]).sum())
    2
    """
    if pieces == 1 or n_devices == 0:
        return np.zeros(n_devices, dtype=np.int64)
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    ends = np.concatenate([edges, edges[:, ::-1]])
    links = sparse.csr_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(n_devices, n_devices))
    order = reverse_cuthill_mckee(sparse.csr_matrix(links), symmetric_mode=True)
    where = np.empty(n_devices, dtype=np.int64)
    where[order] = np.arange(n_devices) * pieces // n_devices
    return _refined(links, where, pieces)


def _refined(links: sparse.csr_array, where: Index, pieces: int) -> Index:
    sizes = np.bincount(where, minlength=pieces)
    largest = max(int(np.ceil(_SLACK * where.size / pieces)), 1)
    smallest = max(int(np.floor(where.size / pieces / _SLACK)), 1)
    starts, ends = links.indptr, links.indices
    for _ in range(_SWEEPS):
        moved = 0
        for u in range(where.size):
            near = np.bincount(where[ends[starts[u] : starts[u + 1]]], minlength=pieces)
            here = where[u]
            allowed = np.where((sizes < largest) | (np.arange(pieces) == here), near, -1)
            best = int(allowed.argmax())
            if near[best] > near[here] and sizes[here] > smallest:
                where[u] = best
                sizes[here] -= 1
                sizes[best] += 1
                moved += 1
        if not moved:
            break
    return where
