"""A model for a site that was not part of the fit, from nothing, from a few rows, or from its summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import Array
from fedkin.data import Federation, Rows
from fedkin.errors import DataError
from fedkin.kin.options import SHARES
from fedkin.kin.quadratics import Quadratics
from fedkin.kin.sources import RowSource, SummarySource
from fedkin.losses import Loss
from fedkin.objective import Summaries, Summary

if TYPE_CHECKING:  # results import this module
    from fedkin.kin.groups import Blend
    from fedkin.kin.result import Parts

#: States of all chains that a new site is compared with.
STATES = 60
#: Expansions of a smooth loss, and the change of a standardised parameter that ends them.
ROUNDS, STEP = 12, 1e-3


@dataclass(frozen=True, eq=False)
class Joined:
    """What is known about a new site.

    Attributes
    ----------
    theta, covariance : arrays (p,), (p, p)
        Posterior mean and covariance of its parameters; without rows, those of a site like the others.
    probability : array (V,)
        That it is kin with each site of the fit.
    """

    theta: Array
    covariance: Array
    probability: Array


def join_site(parts: Parts, loss: Loss, names: tuple[str, ...], site: Rows | Summary | None) -> Joined:
    """`Kin.join`, with the sites of the fit in canonical order."""
    p = len(names)
    noise = float(np.exp(np.log(parts.model.noise).mean()))
    if site is None:
        return _posterior(parts, Quadratics(np.zeros((1, p, p)), np.zeros((1, p)), np.zeros(1), np.zeros(1)), noise)
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
        return _posterior(parts, parts.units.fitted(source.first()), noise)
    units, at = parts.units, parts.model.mean[None]
    for _ in range(ROUNDS):
        found = _posterior(parts, units.fitted(source.expand(units.theta(at))), noise)
        new = units.to_fitted(found.theta[None])
        step, now = 1.0, source.value(units.theta(at))
        # never to where the rows are much less likely
        while step > 1e-3 and source.value(units.theta(at + step * (new - at))) > now + 1.0:
            step /= 2
        at = at + step * (new - at)
        if np.abs(new - at).max() < STEP:
            break
    return found


def _posterior(parts: Parts, sums: Quadratics, noise: float) -> Joined:
    """The posterior of one site with these sums, in fitted units, given all that the fit has learned."""
    model, found, units = parts.model, parts.found, parts.units
    S, c = sums.G[0] / noise, sums.c[0] / noise
    root = np.sqrt(found.spread)
    rest = c - S @ model.mean
    own = np.linalg.inv(np.eye(len(root)) + root[:, None] * S * root) * np.outer(root, root)
    keep = np.eye(len(root)) - own @ S
    theta = model.mean + own @ rest
    covariance = own + keep @ model.mean_covariance @ keep.T
    V = len(model.theta)
    if found.blend is None:
        return Joined(units.theta(theta), units.covariance(covariance), np.zeros(V))
    F = found.F
    W, e = F.T @ S @ F, F.T @ rest
    plain = np.linalg.inv(np.eye(len(W)) + W)
    b, spread, same = _effect(found.blend, 0.5 * (W + W.T), e)
    theta = theta + F @ (b - plain @ e)
    covariance = covariance + F @ (spread - plain) @ F.T
    return Joined(units.theta(theta), units.covariance(covariance), same)


def _effect(blend: Blend, W: Array, c: Array) -> tuple[Array, Array, Array]:
    """Mean ``(d,)`` and covariance ``(d, d)`` of a new effect, and who shares its group ``(V,)``."""
    from fedkin.kin.kernels.bundles import unpacked

    d, sites = len(c), blend.chains.sites
    V = sites.c.shape[1]
    logs, means, covariances, same = [], [], [], []
    within = [_within(W, c, share) for share in SHARES]

    def add(log: float, mean: Array, covariance: Array, kin: Array) -> None:
        logs.append(log)
        means.append(mean)
        covariances.append(covariance)
        same.append(kin)

    for chance, share, (H, e, k) in zip(blend.scales, SHARES, within, strict=True):
        if chance > 1e-12 and blend.weight > 0:
            everybody = np.full(V, float(share == 0))
            add(np.log(blend.weight * chance) + k, share * e, share * (np.eye(d) - share * H), everybody)
    for weight, record in zip(blend.chains.weights, blend.chains.records, strict=True):
        lines = np.unique(np.linspace(0, len(record.z) - 1, STATES // len(blend.chains.records)).astype(int))
        for s in lines if (1 - blend.weight) * weight > 1e-9 else []:
            r = int(record.trace[s, 2])
            H, e, k = within[r]
            m, prior, z = record.m[s], 1.0 / record.w[s], record.z[s]
            base = np.log((1 - blend.weight) * weight / len(lines)) + k + m @ (e - 0.5 * H @ m)
            base -= np.log(record.alpha[s] + V)
            B = np.eye(d) - SHARES[r] * H
            rest = e - H @ m
            for group in [*np.unique(z), -1]:
                members = z == group
                Hk = unpacked(sites.H[r, members].sum(axis=0), d)
                ck = sites.c[r, members].sum(axis=0) - Hk @ m
                joint, alone = _log_marginal(Hk + H, ck + rest, prior), _log_marginal(Hk, ck, prior)
                C = np.linalg.inv(Hk + H + np.diag(prior))
                nu = m + C @ (ck + rest)
                odds = np.log(members.sum() if group >= 0 else record.alpha[s])
                kin = members.astype(np.float64) if r == 0 or len(np.unique(z)) > 1 else np.zeros(V)
                add(base + odds + joint - alone, nu + SHARES[r] * (e - H @ nu), SHARES[r] * B + B @ C @ B, kin)
    weights = np.exp(np.array(logs) - max(logs))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    apart = np.array(means) - mean
    covariance = np.tensordot(weights, np.array(covariances), 1) + (weights[:, None] * apart).T @ apart
    return mean, covariance, weights @ np.array(same)


def _within(W: Array, c: Array, share: float) -> tuple[Array, Array, float]:
    """One site's ``H``, ``c`` and ``k`` of `Sites`, for a share of the spread inside groups."""
    keep = np.linalg.inv(np.eye(len(c)) + share * W)
    log = 0.5 * share * float(c @ keep @ c) + 0.5 * float(np.linalg.slogdet(keep)[1])
    return W @ keep, keep @ c, log


def _log_marginal(H: Array, c: Array, prior: Array) -> float:
    total = H + np.diag(prior)
    square = float(c @ np.linalg.solve(total, c))
    return 0.5 * (square - float(np.linalg.slogdet(total)[1]) + float(np.log(prior).sum()))
