"""The smallest nonzero eigenvalue of a graph's Laplacian: the second one of each connected component."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import Array, Index
from fedkin.errors import GraphError

if TYPE_CHECKING:
    from scipy import sparse


def smallest_nonzero_eigenvalue(
    laplacian: sparse.csr_array, labels: Index, dense_size: int = 1500, factor_entries: int = 5 * 10**7
) -> float:
    """Of a Laplacian ``(V, V)`` whose components are numbered by ``labels (V,)``; infinity without any edge.

    Components of more than ``dense_size`` sites are left to an iterative routine, which is quicker there; it uses a
    sparse factor that has no more than ``factor_entries``.
    """
    from scipy import sparse  # slow to load

    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    smallest = math.inf
    for members in np.split(order, np.cumsum(sizes)[:-1]):
        if len(members) > 1:
            block = laplacian if len(sizes) == 1 else laplacian[members][:, members]
            dense = len(members) <= dense_size
            second = (
                np.linalg.eigvalsh(block.toarray())[1]
                if dense
                else _second_eigenvalue(sparse.csr_array(block), factor_entries)
            )
            smallest = min(smallest, float(second))
    return smallest


def _second_eigenvalue(laplacian: sparse.csr_array, factor_entries: int) -> float:
    from scipy.sparse.linalg import LinearOperator, eigsh

    size = laplacian.shape[0]
    solve = _grounded_solver(laplacian, factor_entries)

    def pseudo_inverse(vector: Array) -> Array:
        centred = vector - vector.mean()
        solved = solve(centred)
        solved -= solved.mean()
        return solved

    # 1/lambda_2 is the largest eigenvalue of the pseudo-inverse and stands well apart there.
    operator = LinearOperator((size, size), matvec=pseudo_inverse, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    largest = eigsh(operator, k=1, which="LA", v0=start, tol=1e-9, return_eigenvectors=False)
    return float(1.0 / largest[0])


def _grounded_solver(laplacian: sparse.csr_array, factor_entries: int) -> Callable[[Array], Array]:
    """Solutions of ``laplacian @ x = b`` for b of mean zero: by a sparse factor if it is small, else by iteration.

    The band under a Cuthill-McKee order says how large a factor may get: small for paths, grids and maps, where
    the iteration is slow; large for random graphs, where it takes a few steps.
    """
    from scipy import sparse  # slow to load
    from scipy.sparse.csgraph import reverse_cuthill_mckee
    from scipy.sparse.linalg import LinearOperator, cg, splu

    size = laplacian.shape[0]
    order = reverse_cuthill_mckee(laplacian, symmetric_mode=True)
    place = np.argsort(order)
    entries = laplacian.tocoo()
    band = np.zeros(size, dtype=np.int64)
    np.maximum.at(band, place[entries.coords[0]], place[entries.coords[0]] - place[entries.coords[1]])
    if int(band.sum()) <= factor_entries:
        # With one site held at zero the rest is positive definite.
        rest = order[1:]
        factor = splu(sparse.csc_array(laplacian[rest][:, rest]), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0)

        def by_factor(b: Array) -> Array:
            x = np.zeros(size)
            x[rest] = factor.solve(b[rest])
            return x

        return by_factor
    diagonal = laplacian.diagonal()
    jacobi = LinearOperator((size, size), matvec=lambda v: v / diagonal, dtype=np.float64)

    def by_iteration(b: Array) -> Array:
        x, failed = cg(laplacian, b, rtol=1e-10, maxiter=20 * size, M=jacobi)
        if failed:
            raise GraphError("the algebraic connectivity of this graph could not be computed: the iteration stalled")
        return np.asarray(x)

    return by_iteration
