"""Simpler models from sums alone, tuned: a ridge at every site, one for all, one with site intercepts.

The ridge of a fold that is held out is chosen by the other folds, each held out in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkin._base import Array, Mask
from fedkin.core import Quadratics
from fedkin.fitting.comparison.baselines import GLOBAL, INTERCEPTS, LOCAL

#: Candidates, in units of one row's curvature; features have a standard deviation of about 1.
RIDGES = np.geomspace(1e-3, 10.0, 7)
#: What keeps systems without enough rows solvable, as a share of the curvature.
_LEAST = 1e-10


@dataclass(frozen=True, eq=False)
class FoldRidges:
    """Sums of V sites in K folds, of which ``intercepts (p,)`` are never shrunk."""

    sums: Quadratics
    intercepts: Mask

    @cached_property
    def _quadratics(self) -> tuple[Array, Array, Array]:
        """Sums ``n (V, K+1)``, ``A (V, K+1, p, p)`` and ``b (V, K+1, p)``: ``theta'A theta / 2 - b'theta`` and more."""
        n, A, at = self.sums.count.astype(np.float64), self.sums.hessian, self.sums.at
        if A.ndim == 2:
            A = A[:, :, None, None] * np.eye(at.shape[1])
        return n, A, np.einsum("vkij,vj->vki", A, at) - self.sums.gradient

    def models(self, held_out: int) -> dict[str, Array]:
        """Parameters ``(V, p)`` of each method, from all folds but one."""
        folds = [k for k in range(self.sums.folds) if k != held_out and self.sums.count[:, k].any()]
        loss = {name: np.zeros((len(RIDGES), len(self.sums.at))) for name in self._names}
        for k in folds:
            seen = np.flatnonzero(self.sums.count[:, k])
            test = self.sums.take(seen).terms(k)
            for m, ridge in enumerate(RIDGES):
                for name, theta in self._fits((held_out, k), np.full(len(self.sums.at), ridge)).items():
                    loss[name][m, seen] += self.sums.count[seen, k] * test.values(theta[seen])
        best = {name: RIDGES[each.sum(axis=1).argmin()] for name, each in loss.items()}
        own = RIDGES[loss[LOCAL].argmin(axis=0)]
        untested = ~np.any([self.sums.count[:, k] > 0 for k in folds], axis=0) if folds else np.ones(len(own), bool)
        chosen = {name: np.full(len(own), ridge) for name, ridge in best.items()}
        chosen[LOCAL] = np.where(untested, best[LOCAL], own)
        return {name: self._fits((held_out,), chosen[name])[name] for name in self._names}

    @property
    def _names(self) -> tuple[str, ...]:
        return (LOCAL, GLOBAL, INTERCEPTS) if self.intercepts.any() and len(self.sums.at) > 1 else (LOCAL, GLOBAL)

    def _fits(self, without: tuple[int, ...], ridge: Array) -> dict[str, Array]:
        """All methods with these ridges ``(V,)``, of which the pooled ones take the first."""
        kept = [k for k in range(self.sums.folds + 1) if k not in without]
        n, A, b = (part[:, kept].sum(axis=1) for part in self._quadratics)
        slopes = ~self.intercepts
        tiny = _LEAST * max(float(np.einsum("vii->", A)), 1e-300) / A.shape[1]
        shrink = np.diag(slopes.astype(np.float64))
        own = A + (n * ridge)[:, None, None] * shrink + tiny / len(n) * np.eye(A.shape[1])
        held = n.sum() * ridge[0] * shrink + tiny * np.eye(A.shape[1])
        pooled = np.linalg.solve(A.sum(axis=0) + held, b.sum(axis=0))
        found = {LOCAL: np.linalg.solve(own, b[:, :, None])[:, :, 0], GLOBAL: np.tile(pooled, (len(n), 1))}
        if INTERCEPTS not in self._names:
            return found
        # intercepts of the sites, minimised out
        free = self.intercepts
        level = A[:, free][:, :, free] + tiny / len(n) * np.eye(int(free.sum()))
        cross = A[:, slopes][:, :, free]
        start = np.linalg.solve(level, b[:, free, None])
        steep = np.linalg.solve(level, np.swapaxes(cross, 1, 2))
        left = (A[:, slopes][:, :, slopes] - cross @ steep).sum(axis=0) + held[slopes][:, slopes]
        common = np.linalg.solve(left, (b[:, slopes] - (cross @ start)[:, :, 0]).sum(axis=0))
        theta = np.empty_like(b)
        theta[:, slopes] = common
        theta[:, free] = start[:, :, 0] - steep @ common
        return found | {INTERCEPTS: theta}
