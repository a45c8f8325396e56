"""Find groups with many coefficients: in the directions in which sites differ most, but pool in all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from fedkin._base import Array, Index
from fedkin.kin.chains import DRAWS, Chains, States
from fedkin.kin.likelihoods import Matrices, apply, shrunk
from fedkin.kin.partitions import SHARES, UNLIKELY
from fedkin.kin.sampler import LOG_SHARES


@dataclass(frozen=True, eq=False)
class FullEffects:
    """Effects in all directions: site likelihoods, with ``W`` of V matrices ``(d, d)`` and ``c (V, d)``.

    ``turn (d, k)`` holds the sampled directions; ``mixed`` holds ``W (I + W)^-1`` and ``log |I + W|``. Effects are
    divided by the root of ``stretch``, because directions chosen for large differences between sites also have more
    noise.
    """

    W: Matrices
    c: Array
    turn: Array
    mixed: tuple[Matrices, Array]
    stretch: float = 1.0

    @classmethod
    def from_likelihoods(cls, W: Matrices, c: Array, most: int) -> FullEffects:
        """Return the effects, with at most ``most`` directions in which those of the mixed model differ most."""
        mixed: tuple[Matrices, Array] = W.resolved()
        H = mixed[0]
        turn = signed(np.linalg.svd(c - apply(H, c), full_matrices=False)[2][:most].T)
        return cls(W, c, turn, mixed, _stretch(H.sum() / len(c), len(c), turn.shape[1]))

    def sampled(self) -> tuple[Array, Array]:
        """Return site likelihoods of effects in the sampled directions: ``(V, k, k)`` and ``(V, k)``."""
        # effects in the other directions are integrated out as the mixed model has them
        H, k = self.mixed[0], self.turn.shape[1]
        effects = (self.c - apply(H, self.c)) @ self.turn
        seen = np.stack([self.turn.T @ H.times(u, self.turn) for u in range(len(self.c))])
        inside = np.asarray(np.linalg.inv(np.eye(k) - seen), dtype=np.float64)
        score = np.matmul(inside, effects[:, :, None])[:, :, 0]
        return inside - np.eye(k), np.asarray(score / np.sqrt(self.stretch))

    def effects(self, chains: Chains, weight: float) -> tuple[Array, Array, States]:
        """Return means ``(V, d)``, covariances ``(V, d, d)``, and the partitions used for averaging."""
        # groups have the mixed model's variance in all directions: sampled widths are of directions that the data have
        # chosen, and around the few that tell groups apart, centres look nearer to each other than they are
        parts = self._partitions(chains, weight) if weight < 1 - UNLIKELY else []
        odds = self._shares(parts)
        (V, d), kept = self.c.shape, []
        chances, means, total = [], [], np.zeros((V, d, d))
        for r, share in enumerate(SHARES):
            none = weight if share == 1 else 0.0
            if none < UNLIKELY and not any(part.chance * odds[k, r] > UNLIKELY for k, part in enumerate(parts)):
                continue
            inside = self._within(float(share))
            if none > UNLIKELY:
                chances.append(none)
                means.append(share * inside.c)
                for u in range(V) if share else ():
                    total[u] += none * share * (np.eye(d) - share * inside.H.of(u))
            for part, chance in zip(parts, odds, strict=True):
                if (each := part.chance * float(chance[r])) > UNLIKELY:
                    chances.append(each)
                    means.append(part.add_effects(inside, each, total))
                    kept.append((each, r, part.z))
        chance = np.array(chances) / sum(chances)
        middle = np.tensordot(chance, np.array(means), 1)
        total /= sum(chances)
        for one, mean in zip(chance, means, strict=True):
            apart = mean - middle
            for u in range(V) if one < 1 else ():
                total[u] += one * np.outer(apart[u], apart[u])
        odds, shares = np.array([one[0] for one in kept]), np.array([one[1] for one in kept], dtype=np.int64)
        z = np.array([one[2] for one in kept], dtype=np.int64).reshape(len(kept), V)
        states = States(odds / odds.sum(), shares, z, np.zeros((len(kept), d)), np.ones((len(kept), d)))
        return np.asarray(middle), total, states

    def noise(self, chains: Chains, n: float, misfit: float) -> float:
        """Return the noise factor with which the most likely partition explains ``n`` numbers best.

        ``misfit`` is what is left where effects are 0. Differences inside groups look like noise, so the share of the
        variance inside groups is learned with it: from none on, as long as more is better.
        """
        part, (V, d) = self._partitions(chains, 0.0)[0], self.c.shape
        plain = part.sums(self._within(0.0))

        def cost(log_factor: float, r: int) -> float:
            factor = float(np.exp(log_factor))
            free = -0.5 * (n * log_factor + misfit / factor) + float(LOG_SHARES[r])
            if not r:  # without a share, sums of groups are only scaled
                return -free - log_centres(plain, factor)
            less = replace(self, W=self.W.scaled(np.ones(d), np.full(V, 1.0 / factor)), c=self.c / factor)
            return -free - part.log_evidence(less._within(float(SHARES[r])))

        best, found, most = np.inf, 0.0, np.log(1e5)
        for r in range(len(SHARES) - 1):
            told = minimize_scalar(
                cost, bounds=(np.log(0.1), most), args=(r,), method="bounded", options={"xatol": 0.02}
            )
            if told.fun > best:
                break
            best, found, most = told.fun, float(told.x), float(told.x) + 0.1
        return float(np.exp(found))

    def _partitions(self, chains: Chains, weight: float) -> list[_Part]:
        """Return the six likeliest partitions of the chains; one that was drawn again counts once more."""
        found: dict[bytes, float] = {}
        states = chains.states(DRAWS)
        for each, drawn in zip((1 - weight) * states.weight, states.z, strict=True):
            _, first, number = np.unique(drawn, return_index=True, return_inverse=True)
            z = np.argsort(np.argsort(first))[number].astype(np.int64)  # by first member
            found[z.tobytes()] = found.get(z.tobytes(), 0.0) + float(each)
        likeliest = sorted(found.items(), key=lambda item: -item[1])[:6]
        return [_Part(chance, np.frombuffer(z_bytes, np.int64)) for z_bytes, chance in likeliest]

    def _shares(self, parts: list[_Part]) -> Array:
        """Return probabilities ``(P, R)`` of the shares of the variance inside groups, relearned."""
        # asked from none on, until the evidence of all partitions is far behind
        logs = np.full((len(parts), len(SHARES)), -np.inf)
        for r, share in enumerate(SHARES) if parts else ():
            inside = self._within(float(share))
            logs[:, r] = [part.log_evidence(inside) for part in parts]
            if r and (logs[:, r] < logs.max(axis=1) + np.log(UNLIKELY)).all():
                break
        odds = np.exp(logs + LOG_SHARES - (logs + LOG_SHARES).max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))

    def _within(self, share: float) -> _Inside:
        if share == 0:
            return _Inside(share, self.W, self.c, 0.0)
        V, d = self.c.shape
        one = np.ones(d)
        H, logs = self.mixed if share == 1 else self.W.scaled(one, np.full(V, share)).resolved()
        c = self.c - apply(H, self.c)
        log = 0.5 * (share * float((c * self.c).sum()) - float(logs.sum()))
        return _Inside(share, H.scaled(one, np.full(V, 1.0 / share)), c, log)


class _Inside(NamedTuple):
    """With effects inside groups integrated out: ``H = W (I + share W)^-1``, ``c``, and the log evidence."""

    share: float
    H: Matrices
    c: Array
    log: float


class _Part(NamedTuple):
    """A partition ``z (V,)`` with its chance. Centres of groups have mean 0 and variance 1 in every direction."""

    chance: float
    z: Index

    def sums(self, inside: _Inside) -> list[tuple[Index, Array, Array]]:
        """Return members of each group, and the likelihood of its centre: precision ``(d, d)`` and linear term
        ``(d,)``."""
        groups = [np.flatnonzero(self.z == group) for group in range(int(self.z.max()) + 1)]
        return [(mine, inside.H.sum(mine), inside.c[mine].sum(axis=0)) for mine in groups]

    def log_evidence(self, inside: _Inside) -> float:
        """Return the log evidence, up to a constant of the partition."""
        return inside.log + log_centres(self.sums(inside))

    def add_effects(self, inside: _Inside, chance: float, total: Array) -> Array:
        """Return means ``(V, d)`` of effects; add ``chance`` times their covariances to ``total (V, d, d)``."""
        share, H, mean = inside.share, inside.H, inside.share * inside.c
        for mine, Q, e in self.sums(inside):
            C = np.asarray(np.linalg.inv(Q + np.eye(len(e))))
            C = 0.5 * (C + C.T)
            centre = C @ e
            for u in mine.tolist():
                mean[u] += centre - share * H.times(u, centre[:, None])[:, 0]
                own = share * (np.eye(len(C)) - share * H.of(u)) + shrunk(H, u, C, share) if share else C
                total[u] += chance * own
        return np.asarray(mean)


def log_centres(sums: list[tuple[Index, Array, Array]], factor: float = 1.0) -> float:
    """Return the log evidence from the likelihoods of group centres over ``factor``, up to a constant."""
    log = 0.0
    for _, Q, e in sums:
        root = np.linalg.cholesky(0.5 * (Q + Q.T) / factor + np.eye(len(e)))
        log += 0.5 * float((np.linalg.solve(root, e / factor) ** 2).sum()) - float(np.log(np.diag(root)).sum())
    return log


def signed(vectors: Array) -> Array:
    """Return columns with fixed signs, which LAPACK leaves to rounding, so that rows and summaries are sampled
    alike."""
    return np.asarray(vectors * np.where(1.0 / np.sqrt(np.arange(2.0, len(vectors) + 2)) @ vectors < 0, -1.0, 1.0))


def _stretch(known: Array, V: int, k: int) -> float:
    """Return how much larger noise is in the k directions in which V sites differ most than in others."""
    # by simulation of sites that differ at random, with effects that vary by ``known (d, d)``
    sizes = np.maximum(np.linalg.eigvalsh(known), 0.0)
    drawn = np.random.default_rng(0).standard_normal((V, len(sizes))) * np.sqrt(sizes)
    _, found, directions = np.linalg.svd(drawn, full_matrices=False)
    return float((found[:k] ** 2).sum() / (V * (directions[:k] ** 2 @ sizes).sum()))
