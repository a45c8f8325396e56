"""What a fit has learned, in standardised units: plain arrays for new sites, contrasts and single sites."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index
from fedkin.core import RowData, Summaries, Summary
from fedkin.data import Federation, Rows
from fedkin.errors import DataError
from fedkin.kin.chains import States
from fedkin.kin.display import Pairs
from fedkin.kin.partitions import SHARES, are_kin, log_partitions, log_prior
from fedkin.kin.quadratics import Quadratics, Units, apply
from fedkin.kin.sources import Source
from fedkin.losses import Loss

#: No two sites are kin with a higher probability than 1 less this, as far as variances go.
LEAST_APART = 1e-3
#: Expansions of a smooth loss for a new site, and the change of a standardised parameter that ends them.
ROUNDS, STEP = 12, 1e-3


@dataclass(frozen=True, eq=False)
class Learned:
    """The fit in standardised units, sites in the order of the result.

    Attributes
    ----------
    units : Units
        The way to the units of the result.
    mean, mean_covariance : arrays (p,), (p, p)
        Of the population of sites; the covariance is what is open about the mean where effects around it are given.
    variance : array (p,)
        Of each coefficient between sites.
    noise : float
        Noise variance of a typical site.
    precision, score : arrays (V, p, p), (V, p)
        What the sites' own rows say: minus the log likelihood is ``theta'precision theta / 2 - score'theta``.
    F : array (p, d)
        Whitened effects to parameters; no columns where groups were not looked for.
    weight : float
        Of the model without groups.
    scales : array (R,)
        Probabilities that the variance is this multiple of the learned one, if there are no groups.
    states : States or None
    one : float
        Weight of one model for all sites in the estimates: how much is believed that no site differs from any other.
    one_mean, one_covariance : arrays (p,), (p, p)
        The model that all of them have then.
    whole : bool
        Whether all sites of the fit are here; some of them cannot tell what a new site is like.
    """

    units: Units
    mean: Array
    mean_covariance: Array
    variance: Array
    noise: float
    precision: Array
    score: Array
    F: Array
    weight: float
    scales: Array
    states: States | None
    one: float
    one_mean: Array
    one_covariance: Array
    whole: bool = True

    def reordered(self, order: Index) -> Learned:
        """The same with sites in another order."""
        states = None if self.states is None else replace(self.states, z=self.states.z[:, order])
        return replace(self, precision=self.precision[order], score=self.score[order], states=states)

    def own(self) -> tuple[Array, Array]:
        """Estimates ``(V, p)`` from a site's own rows and their covariances, infinite where the rows do not tell."""
        values, vectors = np.linalg.eigh(self.precision)
        full = values[:, 0] > 1e-9 * values[:, -1]
        safe = np.where(full[:, None], values, 1.0)
        inverse = (vectors / safe[:, None, :]) @ np.swapaxes(vectors, 1, 2)
        covariance = self.units.covariance(inverse)
        covariance[~full] = np.inf
        return self.units.theta(apply(inverse, self.score)), covariance

    @cached_property
    def group_sums(self) -> tuple[tuple[Index, Array, Array], ...]:
        """For each state: sizes ``(K,)`` of its groups, and sums ``(K, d, d)`` and ``(K, d)`` of what members say."""
        assert self.states is not None
        W = self.F.T @ self.precision @ self.F
        rest = (self.score - self.precision @ self.mean) @ self.F
        keep = {r: np.linalg.inv(np.eye(W.shape[1]) + SHARES[r] * W) for r in np.unique(self.states.share).tolist()}
        made = []
        for r, z in zip(self.states.share.tolist(), self.states.z, strict=True):
            labels, number, size = np.unique(z, return_inverse=True, return_counts=True)
            H, c = np.zeros((len(labels), *W.shape[1:])), np.zeros((len(labels), W.shape[1]))
            np.add.at(H, number, W @ keep[r])
            np.add.at(c, number, apply(keep[r], rest))
            made.append((size, H, c))
        return tuple(made)


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
    root, S = np.sqrt(learned.variance), learned.precision[sites]
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
    root = np.sqrt(learned.variance)
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


@dataclass(frozen=True, eq=False)
class Joined:
    """What is known about a new site.

    Attributes
    ----------
    theta, covariance : arrays (p,), (p, p)
        Posterior mean and covariance of its parameters; without rows, those of a site like the others. That perhaps no
        site differs at all counts, as far as its own rows allow.
    probability : array (V,)
        That it is kin with each site of the fit.
    precision, score : arrays (p, p), (p,)
        What its own rows say, in standardised units, as in `Learned`.
    """

    theta: Array
    covariance: Array
    probability: Array
    precision: Array
    score: Array


def join_site(learned: Learned, loss: Loss, names: tuple[str, ...], site: Rows | Summary | None) -> Joined:
    """`Kin.join`."""
    p = len(names)
    if site is None:
        return _posterior(learned, Quadratics(np.zeros((1, p, p)), np.zeros((1, p)), np.zeros(1), np.zeros(1)))
    if isinstance(site, Summary):
        source = Source(Summaries.stack([site]))
    elif isinstance(site, Rows):
        source = Source(RowData(Federation({"new": site}), loss))
    else:
        raise DataError(f"a new site comes with Rows, a Summary or nothing, got {type(site).__name__}")
    if len(source.names) != p:
        raise DataError(
            f"the new site has {len(source.names)} parameters, but the fit has {p}: give it the same columns, "
            "the intercept among them"
        )
    if loss.quadratic or not source.movable:
        return _posterior(learned, learned.units.fitted(source.first()))
    units, at = learned.units, learned.mean[None]
    much = 1.0 if loss.threshold is None else learned.noise * units.target**2
    for _ in range(ROUNDS):
        found = _posterior(learned, units.fitted(source.expand(units.theta(at))))
        new = units.to_fitted(found.theta[None])
        step, now = 1.0, source.value(units.theta(at))
        # never to where the rows are much less likely
        while step > 1e-3 and source.value(units.theta(at + step * (new - at))) > now + much:
            step /= 2
        at = at + step * (new - at)
        if np.abs(new - at).max() < STEP:
            break
    return found


def _posterior(learned: Learned, sums: Quadratics) -> Joined:
    """The posterior of one site with these sums, in fitted units, given all that the fit has learned.

    With some probability no site differs from any other, the new one included: its rows say how much so. It is never
    certain beforehand: where none of V differs, the next one does with a chance of 1 in V + 2 (the rule of succession).
    """
    units, one = learned.units, min(learned.one, 1.0 - 1.0 / (len(learned.score) + 2))
    S, c = sums.G[0] / learned.noise, sums.c[0] / learned.noise
    theta, covariance, same, log = _among_others(learned, S, c)
    if one > 0:
        mean, left, log_one = _normal(learned.one_mean, learned.one_covariance, S, c)
        one = one / (one + (1 - one) * float(np.exp(np.clip(log - log_one, -700.0, 700.0))))
        apart = mean - theta
        theta = theta + one * apart
        covariance = (1 - one) * covariance + one * left + one * (1 - one) * np.outer(apart, apart)
        same = one + (1 - one) * same
    return Joined(units.theta(theta), units.covariance(covariance), same, S, c)


def _among_others(learned: Learned, S: Array, c: Array) -> tuple[Array, Array, Array, float]:
    """Mean ``(p,)`` and covariance ``(p, p)`` of a new site where sites differ, its kin ``(V,)``, and the evidence."""
    p, root = len(learned.mean), np.sqrt(learned.variance)
    rest = c - S @ learned.mean
    own = np.linalg.inv(np.eye(p) + root[:, None] * S * root) * np.outer(root, root)
    keep = np.eye(p) - own @ S
    theta = learned.mean + own @ rest
    covariance = own + keep @ learned.mean_covariance @ keep.T
    log = _normal(learned.mean, np.diag(learned.variance) + learned.mean_covariance, S, c)[2]
    if learned.states is None:
        return theta, covariance, np.zeros(len(learned.score)), log
    F = learned.F
    W, e = F.T @ S @ F, F.T @ rest
    plain, plain_log = np.linalg.inv(np.eye(len(W)) + W), _within(W, e, 1.0)[2]
    b, covariance_b, same, group_log = _effect(learned, 0.5 * (W + W.T), e)
    theta = theta + F @ (b - plain @ e)
    covariance = covariance + F @ (covariance_b - plain) @ F.T
    return theta, covariance, same, log + group_log - plain_log


def _normal(mean: Array, covariance: Array, S: Array, c: Array) -> tuple[Array, Array, float]:
    """Posterior mean and covariance of normal parameters given ``exp(c'x - x'S x / 2)``, and the log of its mean."""
    turn = np.eye(len(c)) + covariance @ S
    left = np.linalg.solve(turn, covariance)
    left, rest = 0.5 * (left + left.T), c - S @ mean
    log = float(mean @ (c - 0.5 * S @ mean) + 0.5 * rest @ left @ rest - 0.5 * np.linalg.slogdet(turn)[1])
    return mean + left @ rest, left, log


def _effect(learned: Learned, W: Array, c: Array) -> tuple[Array, Array, Array, float]:
    """Mean ``(d,)`` and covariance ``(d, d)`` of a new effect, who shares its group ``(V,)``, and the log evidence."""
    states, d, V = learned.states, len(c), len(learned.score)
    assert states is not None
    chances, logs, means, covariances, same = [], [], [], [], []
    within = [_within(W, c, share) for share in SHARES]
    most = max(len(sizes) for sizes, _, _ in learned.group_sums)
    before, after = log_partitions(V, most), log_partitions(V + 1, most + 1)

    def add(chance: float, log: float, mean: Array, covariance: Array, kin: Array) -> None:
        chances.append(chance)
        logs.append(chance + log)
        means.append(mean)
        covariances.append(covariance)
        same.append(kin)

    for chance, share, (H, e, k) in zip(learned.scales, SHARES, within, strict=True):
        if chance > 1e-12 and learned.weight > 0:
            everybody = np.full(V, float(share == 0))
            add(np.log(learned.weight * chance), k, share * e, share * (np.eye(d) - share * H), everybody)
    for s, (sizes, Hs, cs) in enumerate(learned.group_sums):
        if (1 - learned.weight) * states.weight[s] < 1e-12:
            continue
        r, m, prior = int(states.share[s]), states.m[s], 1.0 / states.w[s]
        H, e, k = within[r]
        base = np.log((1 - learned.weight) * states.weight[s]) - log_prior(before, sizes)
        B = np.eye(d) - SHARES[r] * H
        rest, at_mean = e - H @ m, k + m @ (e - 0.5 * H @ m)
        number = np.unique(states.z[s], return_inverse=True)[1]
        for group in range(-1, len(sizes)):
            new = group < 0
            Hk = np.zeros((d, d)) if new else Hs[group]
            ck = np.zeros(d) if new else cs[group] - Hk @ m
            joint, alone = _log_marginal(Hk + H, ck + rest, prior), _log_marginal(Hk, ck, prior)
            C = np.linalg.inv(Hk + H + np.diag(prior))
            nu = m + C @ (ck + rest)
            joined = np.append(sizes, 1.0) if new else sizes + (np.arange(len(sizes)) == group)
            kin = (number == group).astype(np.float64) * are_kin(r, len(sizes))
            chance = base + log_prior(after, joined)
            add(chance, at_mean + joint - alone, nu + SHARES[r] * (e - H @ nu), SHARES[r] * B + B @ C @ B, kin)
    weights = np.exp(np.array(logs) - max(logs))
    log = max(logs) + float(np.log(weights.sum()) - np.log(np.exp(chances).sum()))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    apart = np.array(means) - mean
    covariance = np.tensordot(weights, np.array(covariances), 1) + (weights[:, None] * apart).T @ apart
    return mean, covariance, weights @ np.array(same), log


def _within(W: Array, c: Array, share: float) -> tuple[Array, Array, float]:
    """One site's ``H``, ``c`` and ``k`` of `SiteLikelihoods`, for a share of the variance inside groups."""
    keep = np.linalg.inv(np.eye(len(c)) + share * W)
    log = 0.5 * share * float(c @ keep @ c) + 0.5 * float(np.linalg.slogdet(keep)[1])
    return W @ keep, keep @ c, log


def _log_marginal(H: Array, c: Array, prior: Array) -> float:
    total = H + np.diag(prior)
    square = float(c @ np.linalg.solve(total, c))
    return 0.5 * (square - float(np.linalg.slogdet(total)[1]) + float(np.log(prior).sum()))
