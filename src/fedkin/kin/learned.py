"""Learned quantities of a fit, in standardised units: plain arrays for new sites, contrasts and single sites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fedkin._base import Array, Index
from fedkin.core import RowData, Summaries, Summary
from fedkin.data import Federation, Rows
from fedkin.errors import DataError
from fedkin.kin.chains import States
from fedkin.kin.likelihoods import QuadraticLikelihoods, Units, apply, given_mean
from fedkin.kin.mixed import Nested, Population
from fedkin.kin.partitions import SHARES, UNLIKELY, Pairs, are_kin, log_partitions, log_prior
from fedkin.kin.sources import ROUNDS, STEP, Source
from fedkin.losses import Loss


@dataclass(frozen=True, eq=False)
class Learned:
    """A fit in standardised units, with sites in the order of the result."""

    units: Units  # the way to the units of the result
    mean: Array  # (p,) of the population of sites
    mean_covariance: Array  # (p, p) its uncertainty where effects around it are given
    variance: Array  # (p,) of each coefficient between sites
    noise: float  # variance of a typical site
    precision: Array  # (V, p, p), and
    score: Array  # (V, p): minus a site's own log likelihood is theta'precision theta / 2 - score'theta
    F: Array  # (p, d) whitened effects to parameters; no columns where groups were not looked for
    weight: float  # of the model without groups
    states: States | None
    one: float  # weight of one model for all: how much is believed that no site differs from any other
    one_mean: Array  # (p,) the model that all of them have then
    one_covariance: Array  # (p, p)
    population: Population
    nested: Nested | None = None  # where sites are within districts
    unseen: Array | None = None  # (p,) what to add to the mean for a site without rows
    whole: bool = True  # whether all sites of the fit are here; some of them cannot tell what a new site is like

    def reordered(self, order: Index) -> Learned:
        """Return the fit with sites in another order."""
        states = None if self.states is None else replace(self.states, z=self.states.z[:, order])
        nested = None if self.nested is None else replace(self.nested, index=self.nested.index[order])
        made = replace(self, precision=self.precision[order], score=self.score[order])
        return replace(made, states=states, nested=nested)

    def around(self, district: int | None) -> Learned:
        """Return the fit for sites of one district, by number; None for a district that is not in the fit."""
        if self.nested is None:
            return self
        if district is None:
            return replace(self, variance=self.variance + self.nested.variance, nested=None)
        covariance = self.nested.covariance(self.mean_covariance)[district]
        return replace(self, mean=self.nested.mean[district], mean_covariance=covariance, nested=None)

    def own(self) -> tuple[Array, Array]:
        """Return estimates ``(V, p)`` from each site's own rows, given the population's fixed coefficients, and their
        covariances, infinite where the rows carry no information."""
        fixed, free = np.flatnonzero(self.units.fixed_mask), np.flatnonzero(~self.units.fixed_mask)
        values, vectors = np.linalg.eigh(self.precision[:, free[:, None], free])
        full = values[:, 0] > 1e-9 * values[:, -1]
        inverse = (vectors / np.where(full[:, None], values, 1.0)[:, None, :]) @ np.swapaxes(vectors, 1, 2)
        cross = self.precision[:, free[:, None], fixed]
        lean = np.tile(np.eye(len(self.mean))[:, fixed], (len(values), 1, 1))
        lean[:, free] = -inverse @ cross
        covariance = lean @ self.mean_covariance[np.ix_(fixed, fixed)] @ np.swapaxes(lean, 1, 2)
        covariance[:, free[:, None], free] += inverse
        theta = np.tile(self.mean, (len(values), 1))
        theta[:, free] = apply(inverse, self.score[:, free] - cross @ self.mean[fixed])
        covariance = self.units.covariance(covariance)
        covariance[~full] = np.inf
        return self.units.theta(theta), covariance

    @cached_property
    def group_sums(self) -> tuple[tuple[Index, Array, Array], ...]:
        """For each state: the sizes ``(K,)`` of its groups, and sums ``(K, d, d)`` and ``(K, d)`` of their members'
        likelihoods."""
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
    """Return the covariance ``(p, p)`` of ``sum_u weights_u theta_u`` over some sites, whose estimates are ``theta (V,
    p)``."""
    # with some probability no site differs: then the sum is that of one model, and a difference is nothing
    given, one, whole = combined_covariance(learned, sites, weights), learned.one, float(weights.sum())
    if not 0 < one < 1:
        return given if not one else whole**2 * learned.units.covariance(learned.one_covariance)
    apart = (weights @ theta[sites] - whole * learned.units.theta(learned.one_mean)) / (1 - one)
    total = (1 - one) * (given + one * np.outer(apart, apart))
    return np.asarray(total + one * whole**2 * learned.units.covariance(learned.one_covariance))


def unseen(learned: Learned, same: Array, i: Index, j: Index) -> Array:
    """Return the correction of the variance of the difference of sites ``i`` and ``j``, in squared differences, given
    the probability that they are alike.

    In all kept states the two sites are together and do not differ. With a small probability they are apart, and their
    difference is inversely proportional to this probability; the variance needs its square.
    """
    states, apart = learned.states, np.maximum(1.0 - same, UNLIKELY)
    if states is None:
        return np.zeros_like(apart)
    kin = are_kin(states.share, np.array([len(np.unique(z)) for z in states.z]))
    differ = (states.z[:, i] != states.z[:, j]) | ~kin.reshape(-1, *(1,) * np.ndim(i))
    seen = learned.weight + (1.0 - learned.weight) * np.tensordot(states.weight, differ, 1)
    return np.asarray((1.0 - apart) / apart * np.maximum(1.0 - (1.0 - learned.one) * seen / apart, 0.0))


class _Component(NamedTuple):
    """Whitened effects of n sites at one scale without groups, or in one state of the chains."""

    chance: float
    open: Array  # (n, d, d) covariances given the centres, and with the share, what sites leave of a centre
    share: float
    mean: Array  # (n, d)
    number: Index  # (n,) of the group of each site; empty without groups
    centres: Array  # (K, d, d) covariances of the groups' centres


def _components(learned: Learned, sites: Index) -> list[_Component]:
    """Return all components; their chances sum to 1."""
    states, S, F = learned.states, learned.precision[sites], learned.F
    assert states is not None
    W, e = F.T @ S @ F, (learned.score[sites] - S @ learned.mean) @ F
    B = [np.asarray(np.linalg.inv(np.eye(W.shape[1]) + share * W)) for share in SHARES]
    inside = [share * apply(one, e) for share, one in zip(SHARES, B, strict=True)]
    made = [_Component(learned.weight, B[-1], 1.0, inside[-1], np.zeros(0, np.int64), W[:0])]
    for s, (_, sums, scores) in enumerate(learned.group_sums):
        r, number = int(states.share[s]), np.unique(states.z[s], return_inverse=True)[1][sites]
        C = np.asarray(np.linalg.inv(sums + np.diag(1.0 / states.w[s])), dtype=np.float64)
        centre = states.m[s] + apply(C, scores - sums @ states.m[s])
        mean = inside[r] + apply(B[r], centre[number])
        made.append(_Component((1 - learned.weight) * states.weight[s], B[r], SHARES[r], mean, number, C))
    made = [one for one in made if one.chance >= 1e-12]
    whole = sum(one.chance for one in made)
    return [one._replace(chance=one.chance / whole) for one in made]


def _joint(learned: Learned, sites: Index) -> tuple[Array, Iterator[tuple[Index, Array]]]:
    """Return the joint covariance of n sites that differ, in the user's units.

    The parts that sites do not share are ``(n, p, p)``. All share the error of the mean, and members of a group that of
    its centre: for each of these errors, the sites that share it, and factors ``L (m, p, k)`` with covariances ``L_u
    L_v'``.
    """
    A, G, S = learned.units.A, learned.units.A @ learned.F, learned.precision[sites]
    given, left = given_mean(learned.variance, S)
    own, parts = A @ given @ A.T, [] if learned.states is None else _components(learned, sites)
    if parts:
        own -= G @ np.linalg.inv(np.eye(G.shape[1]) + learned.F.T @ S @ learned.F) @ G.T
    for part in parts:
        own += part.chance * part.share * G @ part.open @ G.T

    def root(covariance: Array) -> Array:
        values, vectors = np.linalg.eigh(covariance)
        return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))

    def factors() -> Iterator[tuple[Index, Array]]:
        everybody, middle, nested = np.arange(len(S)), sum(part.chance * part.mean for part in parts), learned.nested
        if nested is None:
            yield everybody, A @ left @ root(learned.mean_covariance)
        else:
            index = nested.index[sites]
            known, rest = given_mean(nested.variance, nested.precision)
            yield everybody, A @ left @ rest[index] @ root(learned.mean_covariance)
            for k in np.unique(index):
                mine = np.flatnonzero(index == k)
                yield mine, A @ left[mine] @ root(known[k])
        for part in parts:
            yield everybody, np.sqrt(part.chance) * ((part.mean - middle) @ G.T)[:, :, None]
            for group in np.unique(part.number):
                mine = np.flatnonzero(part.number == group)
                yield mine, np.sqrt(part.chance) * G @ part.open[mine] @ np.linalg.cholesky(part.centres[group])

    return own, factors()


def combined_covariance(learned: Learned, sites: Index, weights: Array) -> Array:
    """Return the covariance ``(p, p)`` of ``sum_u weights_u theta_u`` over some sites that differ."""
    own, factors = _joint(learned, sites)
    total = np.tensordot(weights**2, own, 1)
    for who, L in factors:
        lean = np.tensordot(weights[who], L, 1)
        total += lean @ lean.T
    return np.asarray(total)


def difference_errors(learned: Learned, theta: Array, same: Array | Pairs) -> Array:
    """Return standard errors ``(V, V, p)`` of all differences of two sites with estimates ``theta (V, p)``.

    ``same (V, V)`` holds the probabilities of being alike. The errors are those of contrasts, computed for all pairs at
    once.
    """
    V, p = theta.shape
    (own, factors), shared = _joint(learned, np.arange(V)), np.zeros((p, V, V))
    for who, L in factors:
        lean = L.transpose(1, 0, 2)
        shared[:, who[:, None], who] += lean @ lean.transpose(0, 2, 1)
    total = np.einsum("ujj->uj", own) + np.einsum("juu->uj", shared)
    variance = total[:, None] + total[None] - 2 * shared.transpose(1, 2, 0)
    if 0 < learned.one < 1:
        variance += learned.one * ((theta[:, None] - theta[None]) / (1 - learned.one)) ** 2
    variance *= 1 - learned.one
    i, j = np.indices((V, V))
    variance += unseen(learned, np.asarray(same[i, j]), i, j)[:, :, None] * (theta[:, None] - theta[None]) ** 2
    variance[np.arange(V), np.arange(V)] = 0.0
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


@dataclass(frozen=True, eq=False)
class Joined:
    """Model of a new site.

    Attributes
    ----------
    theta, covariance : arrays (p,), (p, p)
        Posterior mean and covariance of its parameters; without rows, those of a typical site. They include the
        possibility that no site differs, as far as its own rows allow.
    probability : array (V,)
        Probability that it is like each site of the fit.
    precision, score : arrays (p, p), (p,)
        Log likelihood of its own rows, in standardised units, as in `Learned`.
    """

    theta: Array
    covariance: Array
    probability: Array
    precision: Array
    score: Array


def join_site(learned: Learned, loss: Loss, names: tuple[str, ...], site: Rows | Summary | None) -> Joined:
    """Implement `Kin.join`."""
    p = len(names)
    if site is None:
        nothing = QuadraticLikelihoods.from_products(np.zeros((1, p, p)), np.zeros((1, p)), np.zeros(1), np.zeros(1))
        found = _posterior(learned, nothing)
        if learned.unseen is None:
            return found
        return replace(found, theta=found.theta + (1 - learned.one) * learned.units.A @ learned.unseen)
    if isinstance(site, Summary):
        source = Source(Summaries.stack([site]))
    elif isinstance(site, Rows):
        source = Source(RowData(Federation({"new": site}), loss))
    else:
        raise DataError(f"a new site needs Rows, a Summary or None, got {type(site).__name__}")
    if len(source.names) != p:
        wrong = f"the new site has {len(source.names)} parameters, but the fit has {p}"
        raise DataError(f"{wrong}: give it the same columns, including the intercept")
    if loss.quadratic or not source.has_rows:
        return _posterior(learned, learned.units.fitted(source.first()))
    at, losses = learned.mean[None], source.in_units(learned.units)
    for _ in range(ROUNDS):
        found = _posterior(learned, losses.expand(at))
        new = learned.units.to_fitted(found.theta[None])
        step, now = 1.0, losses.value(at)
        # never to where the rows are much less likely
        while step > 1e-3 and losses.value(at + step * (new - at)) > now + learned.noise:
            step /= 2
        at = at + step * (new - at)
        if np.abs(new - at).max() < STEP:
            break
    return found


def _posterior(learned: Learned, sums: QuadraticLikelihoods) -> Joined:
    """Return the posterior of one site with these sums, in fitted units, given all that the fit has learned.

    With some probability no site differs from any other, including the new one; its rows update that probability. It is
    never certain in advance: if none of V sites differs, the next one does with probability 1 / (V + 2) (the rule of
    succession).
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
    """Return the mean ``(p,)`` and covariance ``(p, p)`` of a new site if sites differ, its kin ``(V,)``, and the
    evidence."""
    (own, keep), rest, F = given_mean(learned.variance, S), c - S @ learned.mean, learned.F
    theta, covariance = learned.mean + own @ rest, own + keep @ learned.mean_covariance @ keep.T
    log = _normal(learned.mean, np.diag(learned.variance) + learned.mean_covariance, S, c)[2]
    if learned.states is None:
        return theta, covariance, np.zeros(len(learned.score)), log
    W, e = F.T @ S @ F, F.T @ rest
    b0, plain, plain_log = _normal(np.zeros(len(e)), np.eye(len(e)), W, e)
    b, covariance_b, same, group_log = _effect(learned, 0.5 * (W + W.T), e)
    return theta + F @ (b - b0), covariance + F @ (covariance_b - plain) @ F.T, same, log + group_log - plain_log


def _normal(mean: Array, covariance: Array, S: Array, c: Array) -> tuple[Array, Array, float]:
    """Return the posterior mean and covariance of normal parameters given ``exp(c'x - x'S x / 2)``, and its log
    mean."""
    turn = np.eye(len(c)) + covariance @ S
    left = np.linalg.solve(turn, covariance)
    left, rest = 0.5 * (left + left.T), c - S @ mean
    log = float(mean @ (c - 0.5 * S @ mean) + 0.5 * rest @ left @ rest - 0.5 * np.linalg.slogdet(turn)[1])
    return mean + left @ rest, left, log


def _effect(learned: Learned, W: Array, c: Array) -> tuple[Array, Array, Array, float]:
    """Return the mean ``(d,)`` and covariance ``(d, d)`` of a new effect, its group's sites ``(V,)``, and the log
    evidence."""
    states, d, V = learned.states, len(c), len(learned.score)
    assert states is not None
    parts: list[tuple[float, float, Array, Array, Array]] = []  # log chance, log evidence, mean, covariance, kin
    # what a site leaves of a group's centre, and the log evidence, for each share of the variance inside groups
    left = [np.linalg.inv(np.eye(d) + share * W) for share in SHARES]
    logs = [_normal(np.zeros(d), share * np.eye(d), W, c)[2] for share in SHARES]
    most = max(len(sizes) for sizes, _, _ in learned.group_sums)
    before, after = log_partitions(V, most), log_partitions(V + 1, most + 1)

    if learned.weight > 0:
        parts.append((np.log(learned.weight), logs[-1], left[-1] @ c, left[-1], np.zeros(V)))
    for s, (sizes, Hs, cs) in enumerate(learned.group_sums):
        if (1 - learned.weight) * states.weight[s] < 1e-12:
            continue
        r, m, width = int(states.share[s]), states.m[s], np.diag(states.w[s])
        B, share = left[r], SHARES[r]
        base = np.log((1 - learned.weight) * states.weight[s]) - log_prior(before, sizes)
        number = np.unique(states.z[s], return_inverse=True)[1]
        for group in range(-1, len(sizes)):
            H, e = (Hs[group], cs[group]) if group >= 0 else (np.zeros((d, d)), np.zeros(d))
            centre, C, joint = _normal(m, width, H + W @ B, e + B @ c)
            evidence = logs[r] + joint - _normal(m, width, H, e)[2]
            joined = np.append(sizes, 1.0) if group < 0 else sizes + (np.arange(len(sizes)) == group)
            kin = (number == group).astype(np.float64) * are_kin(r, len(sizes))
            mean, covariance = B @ (share * c + centre), share * B + B @ C @ B
            parts.append((base + log_prior(after, joined), evidence, mean, covariance, kin))
    chances, evidences, means, covariances, same = (np.array(part) for part in zip(*parts, strict=True))
    top = float((chances + evidences).max())
    weights = np.exp(chances + evidences - top)
    whole = top + float(np.log(weights.sum()) - np.log(np.exp(chances).sum()))
    weights /= weights.sum()
    mean = weights @ means
    apart = means - mean
    return mean, np.tensordot(weights, covariances, 1) + (weights[:, None] * apart).T @ apart, weights @ same, whole
