"""Many coefficients: groups are looked for in some directions, and pool in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.options import SHARES
from fedkin.kin.quadratics import apply
from fedkin.kin.sampler.chains import Chains
from fedkin.kin.sampler.walk import LOG_SHARES

#: Partitions of each chain by which effects in all directions are averaged.
PARTITIONS = 6


@dataclass(frozen=True, eq=False)
class Whole:
    """Effects in all directions: ``F (p, d)``, ``W (V, d, d)``, ``c (V, d)``; ``turn (d, k)``: those sampled."""

    F: Array
    W: Array
    c: Array
    turn: Array

    def effects(self, chains: Chains, weight: float, scales: Array) -> tuple[Array, Array]:
        """Means ``(V, d)`` and covariances ``(V, d, d)``, given the weight of the model without groups.

        In directions that were not sampled, groups have the spread of the mixed model.
        """
        inside = [self._within(share) for share in SHARES]
        chances: list[float] = []
        means: list[Array] = []
        total = np.zeros_like(self.W)

        def add(chance: float, mean: Array, covariance: Array) -> None:
            if chance > 1e-4:
                chances.append(chance)
                means.append(mean)
                total[...] += chance * covariance

        for chance, share, one in zip(weight * scales, SHARES, inside, strict=True):
            add(float(chance), share * one.c, share * one.B)
        rest = np.eye(len(self.turn)) - self.turn @ self.turn.T
        for each, record in zip((1 - weight) * chains.weights, chains.records, strict=True):
            lines = np.unique(np.linspace(0, len(record.z) - 1, PARTITIONS).astype(int)).tolist()
            for s in lines if each > 1e-4 else ():
                precision = (self.turn / record.w[s]) @ self.turn.T + rest
                pull = self.turn @ (record.m[s] / record.w[s])
                found = [
                    _pooled(one, share, record.z[s], precision, pull) for share, one in zip(SHARES, inside, strict=True)
                ]
                # the share of the spread inside groups is learned anew: in all directions there is more to see
                logs = np.array([log for log, _, _ in found]) + LOG_SHARES
                odds = np.exp(logs - logs.max())
                for chance, (_, mean, covariance) in zip(odds / odds.sum(), found, strict=True):
                    add(float(each * chance) / len(lines), mean, covariance)
        chance = np.array(chances) / sum(chances)
        middle = np.tensordot(chance, np.array(means), 1)
        apart = np.sqrt(chance)[:, None, None] * (np.array(means) - middle)
        return np.asarray(middle), np.asarray(total / sum(chances) + np.einsum("sui,suj->uij", apart, apart))

    def _within(self, share: float) -> _Inside:
        B = np.asarray(np.linalg.inv(np.eye(self.W.shape[1]) + share * self.W))
        c = apply(B, self.c)
        log = 0.5 * (share * float((c * self.c).sum()) + float(np.linalg.slogdet(B)[1].sum()))
        return _Inside(B, B @ self.W, c, log)


class _Inside(NamedTuple):
    """With effects inside groups integrated out: ``B = (I + share W)^-1``, ``H = B W``, ``c``, and the log evidence."""

    B: Array
    H: Array
    c: Array
    log: float


def _pooled(one: _Inside, share: float, z: Index, precision: Array, pull: Array) -> tuple[float, Array, Array]:
    """Log evidence of groups ``z`` but for a constant, means and covariances of effects."""
    log, mean, covariance = one.log, share * one.c, share * one.B
    for group in np.unique(z):
        mine = z == group
        Q, e = one.H[mine].sum(axis=0) + precision, one.c[mine].sum(axis=0) + pull
        C = np.asarray(np.linalg.inv(Q))
        log += 0.5 * float(e @ C @ e - np.linalg.slogdet(Q)[1])
        mean[mine] += one.B[mine] @ (C @ e)
        covariance[mine] += one.B[mine] @ C @ one.B[mine]
    return log, mean, covariance
