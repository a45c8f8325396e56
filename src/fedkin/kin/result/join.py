"""A model for a site that was not part of the fit, from nothing, from a few rows, or from its summary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkin._base import Array
from fedkin.core import Summaries, Summary
from fedkin.data import Federation, Rows
from fedkin.errors import DataError
from fedkin.kin.options import SHARES, are_kin
from fedkin.kin.partitions import log_partitions, log_prior
from fedkin.kin.quadratics import Quadratics
from fedkin.kin.result.learned import Learned
from fedkin.kin.sources import RowSource, SummarySource
from fedkin.losses import Loss

#: Expansions of a smooth loss, and the change of a standardised parameter that ends them.
ROUNDS, STEP = 12, 1e-3


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
        source: RowSource | SummarySource = SummarySource(Summaries.stack([site]))
    elif isinstance(site, Rows):
        source = RowSource(Federation({"new": site}), loss)
    else:
        raise DataError(f"a new site comes with Rows, a Summary or nothing, got {type(site).__name__}")
    if len(source.names) != p:
        raise DataError(
            f"the new site has {len(source.names)} parameters, but the fit has {p}: give it the same columns, "
            "the intercept among them"
        )
    if loss.quadratic or isinstance(source, SummarySource):
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
    p, root = len(learned.mean), np.sqrt(learned.spread)
    rest = c - S @ learned.mean
    own = np.linalg.inv(np.eye(p) + root[:, None] * S * root) * np.outer(root, root)
    keep = np.eye(p) - own @ S
    theta = learned.mean + own @ rest
    covariance = own + keep @ learned.mean_covariance @ keep.T
    log = _normal(learned.mean, np.diag(learned.spread) + learned.mean_covariance, S, c)[2]
    if learned.states is None:
        return theta, covariance, np.zeros(len(learned.score)), log
    F = learned.F
    W, e = F.T @ S @ F, F.T @ rest
    plain, plain_log = np.linalg.inv(np.eye(len(W)) + W), _within(W, e, 1.0)[2]
    b, spread, same, group_log = _effect(learned, 0.5 * (W + W.T), e)
    theta = theta + F @ (b - plain @ e)
    covariance = covariance + F @ (spread - plain) @ F.T
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
    """One site's ``H``, ``c`` and ``k`` of `Sites`, for a share of the spread inside groups."""
    keep = np.linalg.inv(np.eye(len(c)) + share * W)
    log = 0.5 * share * float(c @ keep @ c) + 0.5 * float(np.linalg.slogdet(keep)[1])
    return W @ keep, keep @ c, log


def _log_marginal(H: Array, c: Array, prior: Array) -> float:
    total = H + np.diag(prior)
    square = float(c @ np.linalg.solve(total, c))
    return 0.5 * (square - float(np.linalg.slogdet(total)[1]) + float(np.log(prior).sum()))
