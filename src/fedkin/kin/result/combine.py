"""The posterior of a weighted sum of sites' parameters, with what sites share counted once."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.options import SHARES
from fedkin.kin.quadratics import apply
from fedkin.kin.result.learned import Learned


def combined_covariance(learned: Learned, sites: Index, weights: Array) -> Array:
    """Covariance ``(p, p)`` of ``sum_u weights_u theta_u`` over some sites, in the units of the result.

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
