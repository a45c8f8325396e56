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

#: Sweeps of each chain by whose partitions effects in all directions are averaged, and how many of these at most.
SWEEPS, PARTITIONS = 20, 6
#: Chances below this are nothing, and so is what log evidences that are lower by this leave.
LEAST, FAR = 1e-3, 8.0


@dataclass(frozen=True, eq=False)
class Whole:
    """Effects in all directions: ``F (p, d)``, ``W (V, d, d)``, ``c (V, d)``; ``turn (d, k)``: those sampled.

    ``plain (V, d, d)``: ``(I + W)^-1``, covariances of the mixed model. What was sampled are effects over the root of
    ``stretch``: noise is larger in directions that were chosen for how much sites differ there.
    """

    F: Array
    W: Array
    c: Array
    turn: Array
    plain: Array
    stretch: float = 1.0

    def effects(self, chains: Chains, weight: float, scales: Array) -> tuple[Array, Array]:
        """Means ``(V, d)`` and covariances ``(V, d, d)``, given the weight of the model without groups.

        In directions that were not sampled, groups have the spread of the mixed model.
        """
        parts = self._partitions(chains, weight) if weight < 1 - LEAST else []
        odds = self._shares(parts)
        chances, means, total = [], [], np.zeros_like(self.W)
        for r, share in enumerate(SHARES):
            none = weight * float(scales[r])
            if none < LEAST and not any(part.chance * odds[k, r] > LEAST for k, part in enumerate(parts)):
                continue
            inside = self._within(float(share))
            if none > LEAST:
                chances.append(none)
                means.append(share * inside.c)
                total += none * share * inside.B
            for part, chance in zip(parts, odds, strict=True):
                each = part.chance * float(chance[r])
                if each > LEAST:
                    chances.append(each)
                    means.append(part.add_effects(inside, each, total))
        chance = np.array(chances) / sum(chances)
        middle = np.tensordot(chance, np.array(means), 1)
        total /= sum(chances)
        for one, mean in zip(chance, means, strict=True):
            total += one * (mean - middle)[:, :, None] * (mean - middle)[:, None, :]
        return np.asarray(middle), total

    def _partitions(self, chains: Chains, weight: float) -> list[_Part]:
        """The likeliest partitions of the chains; one that was drawn again counts once more, with mean widths."""
        rest = np.eye(len(self.turn)) - self.turn @ self.turn.T
        found: dict[bytes, list[tuple[float, Array, Array]]] = {}
        for each, record in zip((1 - weight) * chains.weights, chains.records, strict=True):
            lines = np.unique(np.linspace(0, len(record.z) - 1, SWEEPS).astype(int)).tolist()
            for s in lines:
                groups = np.unique(record.z[s], return_index=True, return_inverse=True)
                z = np.argsort(np.argsort(groups[1]))[groups[2]].astype(np.int64)  # by first member
                found.setdefault(z.tobytes(), []).append((each / len(lines), record.m[s], record.w[s]))
        made = []
        for z_bytes, drawn in sorted(found.items(), key=lambda item: -sum(one[0] for one in item[1]))[:PARTITIONS]:
            share = np.array([one[0] for one in drawn])
            m = np.average([one[1] for one in drawn], axis=0, weights=share)
            w = np.exp(np.average([np.log(one[2]) for one in drawn], axis=0, weights=share))
            m, w = np.sqrt(self.stretch) * m, self.stretch * w
            precision = (self.turn / w) @ self.turn.T + rest
            made.append(_Part(float(share.sum()), np.frombuffer(z_bytes, np.int64), precision, self.turn @ (m / w)))
        return made

    def _shares(self, parts: list[_Part]) -> Array:
        """Probabilities ``(P, R)`` of the shares of the spread inside groups, learned anew: there is more to see.

        They are asked from none on, until the evidence of all partitions is far behind.
        """
        logs = np.full((len(parts), len(SHARES)), -np.inf)
        for r, share in enumerate(SHARES) if parts else ():
            inside = self._within(float(share))
            logs[:, r] = [part.log_evidence(inside) for part in parts]
            if r and (logs[:, r] < logs.max(axis=1) - FAR).all():
                break
        odds = np.exp(logs + LOG_SHARES - (logs + LOG_SHARES).max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))

    def _within(self, share: float) -> _Inside:
        V, d = self.c.shape
        if share == 0:
            return _Inside(share, np.broadcast_to(np.eye(d), (V, d, d)), self.W, self.c, 0.0)
        B = self.plain if share == 1 else np.asarray(np.linalg.inv(np.eye(d) + share * self.W), dtype=np.float64)
        c = apply(B, self.c)
        log = 0.5 * (share * float((c * self.c).sum()) + float(np.linalg.slogdet(B)[1].sum()))
        H = (np.eye(d) - B) / share  # B W
        return _Inside(share, B, np.asarray(H), c, log)


class _Inside(NamedTuple):
    """With effects inside groups integrated out: ``B = (I + share W)^-1``, ``H = B W``, ``c``, and the log evidence."""

    share: float
    B: Array
    H: Array
    c: Array
    log: float


class _Part(NamedTuple):
    """A partition ``z (V,)`` with its chance, and the prior of its groups' centres."""

    chance: float
    z: Index
    precision: Array
    pull: Array

    def groups(self, inside: _Inside) -> list[tuple[Index, Array, Array]]:
        """Members of each group, and what they say about its centre: precision ``(d, d)`` and pull ``(d,)``."""
        members = [np.flatnonzero(self.z == group) for group in range(int(self.z.max()) + 1)]
        return [
            (mine, inside.H[mine].sum(axis=0) + self.precision, inside.c[mine].sum(axis=0) + self.pull)
            for mine in members
        ]

    def log_evidence(self, inside: _Inside) -> float:
        """But for a constant of the partition."""
        log = inside.log
        for _, Q, e in self.groups(inside):
            root = np.linalg.cholesky(0.5 * (Q + Q.T))
            log += 0.5 * float((np.linalg.solve(root, e) ** 2).sum()) - float(np.log(np.diag(root)).sum())
        return log

    def add_effects(self, inside: _Inside, chance: float, total: Array) -> Array:
        """Means ``(V, d)`` of effects; adds ``chance`` times their covariances to ``total (V, d, d)``."""
        mean = inside.share * inside.c
        for mine, Q, e in self.groups(inside):
            C = np.asarray(np.linalg.inv(Q))
            mean[mine] += inside.B[mine] @ (C @ e)
            for u in mine.tolist():
                B = inside.B[u]
                total[u] += chance * (inside.share * B + B @ C @ B if inside.share else C)
        return np.asarray(mean)
