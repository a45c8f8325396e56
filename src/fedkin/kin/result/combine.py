"""The posterior of a weighted sum of sites' parameters, with what sites share counted once."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.options import SHARES
from fedkin.kin.pairs import Pairs
from fedkin.kin.quadratics import apply
from fedkin.kin.result.learned import Learned

#: No two sites are kin with a higher probability than 1 less this, as far as variances go.
LEAST_APART = 1e-3


def covariance_of_sum(learned: Learned, theta: Array, sites: Index, weights: Array) -> Array:
    """Covariance ``(p, p)`` of ``sum_u weights_u theta_u`` over some sites, whose estimates are ``theta (V, p)``.

    With some probability no site differs: then the sum is that of one model, and a difference is nothing.
    """
    given, one, whole = combined_covariance(learned, sites, weights), learned.one, float(weights.sum())
    if not 0 < one < 1:
        return given if not one else whole**2 * learned.units.covariance(learned.one_covariance)
    apart = (weights @ theta[sites] - whole * learned.units.theta(learned.one_mean)) / (1 - one)
    total = (1 - one) * (given + one * np.outer(apart, apart))
    return np.asarray(total + one * whole**2 * learned.units.covariance(learned.one_covariance))


def unseen(learned: Learned, same: Array, i: Index, j: Index) -> Array:
    """How many squares of the difference of sites ``i`` and ``j`` its variance lacks, given how likely they are kin.

    Two sites that are together in all kept states differ by nothing there. With a small probability they are apart:
    then their difference is as many times larger as this is smaller, and the variance has that square.
    """
    states, apart = learned.states, np.maximum(1.0 - same, LEAST_APART)
    if states is None:
        return np.zeros_like(apart)
    differ = (states.z[:, i] != states.z[:, j]) | (SHARES[states.share] > 0).reshape(-1, *(1,) * np.ndim(i))
    seen = learned.weight * (1.0 - learned.scales[0]) + (1.0 - learned.weight) * np.tensordot(states.weight, differ, 1)
    return np.asarray((1.0 - apart) / apart * np.maximum(1.0 - (1.0 - learned.one) * seen / apart, 0.0))


def combined_covariance(learned: Learned, sites: Index, weights: Array) -> Array:
    """Covariance ``(p, p)`` of ``sum_u weights_u theta_u`` over some sites that differ, in the units of the result.

    Sites lean on a common mean, and members of a group on its centre, so their errors go together: two kin differ by
    less than the errors of each would allow. Averaged over the states that were kept of the chains.
    """
    p, F = len(learned.mean), learned.F
    root, S = np.sqrt(learned.spread), learned.precision[sites]
    own = np.linalg.inv(np.eye(p) + root[:, None] * S * root) * np.outer(root, root)
    keep = np.tensordot(weights, np.eye(p) - own @ S, 1)
    total = np.tensordot(weights**2, own, 1) + keep @ learned.mean_covariance @ keep.T
    if learned.states is not None:
        W = F.T @ S @ F
        plain = np.linalg.inv(np.eye(W.shape[1]) + W)
        _, covariance = _effects(learned, sites, weights, W, (learned.score[sites] - S @ learned.mean) @ F)
        total = total + F @ (covariance - np.tensordot(weights**2, plain, 1)) @ F.T
    return learned.units.covariance(total)


def _effects(learned: Learned, sites: Index, weights: Array, W: Array, e: Array) -> tuple[Array, Array]:
    """Mean ``(d,)`` and covariance ``(d, d)`` of the weighted sum of whitened effects."""
    states, d = learned.states, W.shape[1]
    assert states is not None
    chances, means, covariances = [], [], []
    within = {}
    for r, share in enumerate(SHARES):
        B = np.linalg.inv(np.eye(d) + share * W)
        # what the sites' own rows add to their groups' centres, and what remains open about them
        within[r] = (B, share * (weights @ apply(B, e)), share * np.tensordot(weights**2, B, 1))
        chance = learned.weight * learned.scales[r]
        if chance > 0:
            chances.append(chance)
            means.append(within[r][1])
            covariances.append(within[r][2])
    for s, (_, sums, scores) in enumerate(learned.group_sums):
        chance = (1 - learned.weight) * states.weight[s]
        if chance < 1e-12:
            continue
        B, mean, covariance = within[int(states.share[s])]
        number = np.unique(states.z[s], return_inverse=True)[1][sites]
        for group in np.unique(number):
            mine = number == group
            turn = np.tensordot(weights[mine], B[mine], 1)
            C = np.linalg.inv(sums[group] + np.diag(1.0 / states.w[s]))
            centre = states.m[s] + C @ (scores[group] - sums[group] @ states.m[s])
            mean, covariance = mean + turn @ centre, covariance + turn @ C @ turn.T
        chances.append(chance)
        means.append(mean)
        covariances.append(covariance)
    chance = np.array(chances) / sum(chances)
    middle = chance @ np.array(means)
    apart = np.array(means) - middle
    return middle, np.tensordot(chance, np.array(covariances), 1) + (chance[:, None] * apart).T @ apart


def difference_errors(learned: Learned, theta: Array, same: Array | Pairs) -> Array:
    """Standard errors ``(V, V, p)`` of all differences of two sites, whose estimates are ``theta (V, p)``.

    ``same (V, V)`` are probabilities of being kin. The errors are those of contrasts, for all pairs at once. A site's
    variance is that of what it has to itself plus that of what it may share; only the latter goes together with that of
    others.
    """
    p, A, S = len(learned.mean), learned.units.A, learned.precision
    root = np.sqrt(learned.spread)
    own = np.linalg.inv(np.eye(p) + root[:, None] * S * root) * np.outer(root, root)
    alone = _diagonal(A, own)
    values, vectors = np.linalg.eigh(learned.mean_covariance)
    lean = A @ (np.eye(p) - own @ S) @ (vectors * np.sqrt(np.maximum(values, 0.0)))
    shared = np.matmul(lean.transpose(1, 0, 2), lean.transpose(1, 2, 0))  # (p, V, V)
    if learned.states is not None:
        alone += _share_effects(learned, A @ learned.F, shared)
    total = alone + np.einsum("jvv->vj", shared)
    variance = total[:, None] + total[None] - 2 * shared.transpose(1, 2, 0)
    if 0 < learned.one < 1:
        variance += learned.one * ((theta[:, None] - theta[None]) / (1 - learned.one)) ** 2
    variance *= 1 - learned.one
    i, j = np.indices((len(S), len(S)))
    variance += unseen(learned, np.asarray(same[i, j]), i, j)[:, :, None] * (theta[:, None] - theta[None]) ** 2
    variance[np.arange(len(S)), np.arange(len(S))] = 0.0
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def _share_effects(learned: Learned, G: Array, shared: Array) -> Array:
    """Variances ``(V, p)`` that effects add to what sites have to themselves; adds to ``shared`` what they share."""
    states, S, F = learned.states, learned.precision, learned.F
    assert states is not None
    W, e = F.T @ S @ F, (learned.score - S @ learned.mean) @ F
    d = W.shape[1]
    open_ = {r: np.linalg.inv(np.eye(d) + share * W) for r, share in enumerate(SHARES)}
    inside = {r: (share * apply(open_[r], e), share * _diagonal(G, open_[r])) for r, share in enumerate(SHARES)}
    chances = [float(learned.weight * learned.scales[r]) for r in open_]
    chances += ((1 - learned.weight) * states.weight).tolist()
    whole = sum(chance for chance in chances if chance >= 1e-12)
    alone = -_diagonal(G, np.asarray(np.linalg.inv(np.eye(d) + W), dtype=np.float64))
    middle, kept = np.zeros((len(S), len(G))), []
    for c, chance in enumerate(one / whole for one in chances):
        if chance * whole < 1e-12:
            continue
        s = c - len(SHARES)
        r = c if s < 0 else int(states.share[s])
        mean, variance = inside[r]
        alone += chance * variance
        if s >= 0:
            _, sums, scores = learned.group_sums[s]
            number = np.unique(states.z[s], return_inverse=True)[1]
            C = np.asarray(np.linalg.inv(sums + np.diag(1.0 / states.w[s])), dtype=np.float64)
            centre = states.m[s] + apply(C, scores - sums @ states.m[s])
            mean = mean + apply(open_[r], centre[number])
            lean = (G @ open_[r] @ np.linalg.cholesky(C)[number]).transpose(1, 0, 2)
            for group in range(len(C)):
                mine = np.flatnonzero(number == group)
                part = lean[:, mine]
                shared[:, mine[:, None], mine] += chance * np.matmul(part, part.transpose(0, 2, 1))
        kept.append(np.sqrt(chance) * (mean @ G.T))
        middle += np.sqrt(chance) * kept[-1]
    apart = np.stack(kept) - np.sqrt(np.array([c for c in chances if c >= 1e-12]) / whole)[:, None, None] * middle
    shared += np.matmul(apart.transpose(2, 1, 0), apart.transpose(2, 0, 1))
    return alone


def _diagonal(G: Array, matrices: Array) -> Array:
    """Diagonals ``(V, q)`` of ``G M_u G'``."""
    return np.asarray(((G @ matrices) * G).sum(axis=2))
