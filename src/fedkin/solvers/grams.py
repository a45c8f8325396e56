"""Gram matrices of a compiled iteration: minimisers, inverses and resolvents, and what similar problems share."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array
from fedkin.objective import QuadraticTerms
from fedkin.solvers.kernels import grams as gram_kernels
from fedkin.solvers.kernels.jit import frozen
from fedkin.solvers.renumber import Numbering
from fedkin.solvers.workload import Crew

#: Inverse Gram matrices with up to this many entries are kept for the certificates, others are factorised again.
ROOM = 20_000_000
#: A Gram matrix with all pivots above this share of its diagonal is regular beyond doubt.
SAFE_PIVOT = 1e-6


class Grams:
    """Dense Gram matrices, and inverses made of them.

    Along a path the matrices, the degrees and the first rho are the same. What follows from them is kept with the
    terms (`QuadraticTerms.shared`), where numbers are the caller's and there is room.
    """

    def __init__(self, quadratic: QuadraticTerms, numbering: Numbering, crew: Crew) -> None:
        self.A, self._order = frozen(quadratic.A), frozen(numbering.devices)
        self._crew, self._ranges = crew, crew.split(quadratic.n_devices)
        self._kept = quadratic.shared if not numbering.changed and self.A.size <= ROOM else None

    def minimizers(self, b: Array) -> tuple[Array | None, Array]:
        """Each device's own minimiser, None when one may not be unique; and inverses, empty without room for them."""
        none = np.empty((0, *self.A.shape[1:]))
        if self.A.size > ROOM:
            return self._solved(b), none
        known = {} if self._kept is None else self._kept
        inverse = known.get("inverse")
        if inverse is None:
            inverse = np.empty_like(self.A)
            n, p = b.shape
            if not self.invert(np.zeros(n), np.ones(p), inverse) > SAFE_PIVOT:
                return None, none
            known["inverse"] = inverse
        if "own" not in known:
            known["own"] = np.matmul(inverse, b[:, :, None])[:, :, 0]
        return known["own"], inverse

    def _solved(self, b: Array) -> Array | None:
        own = np.zeros_like(b)

        def work(_: int, lo: int, hi: int) -> float:
            return float(gram_kernels.local_minimizers(lo, hi, self._order, self.A, b, own))

        return own if min(self._crew.run(work, self._ranges)) > SAFE_PIVOT else None

    def resolvents(self, weight: Array, rho: Array) -> tuple[Array, Array]:
        """``(A_u + weight_u diag(rho))^{-1}``, and the array that may take such inverses for another rho."""
        known = {} if self._kept is None else self._kept
        if "resolvent" in known and np.array_equal(known["rho"], rho) and np.array_equal(known["weight"], weight):
            return known["resolvent"], np.empty_like(self.A)
        found = np.empty_like(self.A)
        self.invert(weight, rho, found)
        if self._kept is None:
            return found, found
        self._kept.update({"rho": rho.copy(), "weight": weight, "resolvent": found})
        return found, np.empty_like(self.A)

    def invert(self, weight: Array, rho: Array, out: Array) -> float:
        """``out[i] = (A_i + weight_i diag(rho))^{-1}``, and the worst relative pivot."""

        def work(_: int, lo: int, hi: int) -> float:
            return float(gram_kernels.invert(lo, hi, self._order, self.A, weight, rho, out))

        return float(min(self._crew.run(work, self._ranges)))
