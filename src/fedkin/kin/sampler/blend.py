"""How much to believe of groups and of none: effects averaged over partitions and the mixed model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedkin._base import Array
from fedkin.kin.diagnostics import effective_size, split_rhat
from fedkin.kin.kernels.bundles import unpacked
from fedkin.kin.options import AGREE, ALL_MIXED, CONTINUUM, MOST_PAIRS, NEARLY, SHARES, Sampling, are_kin
from fedkin.kin.pairs import Pairs
from fedkin.kin.quadratics import apply
from fedkin.kin.sampler.chains import Chains, Scouts, go_on
from fedkin.kin.sampler.sites import Sites
from fedkin.kin.special import log_beta

#: How firmly the weight of the mixed model is held at what the evidence says, when SURE hardly tells.
HOLD, HOLD_PER_GAIN = 4.0, 10.0
#: Partitions of each chain from which probabilities of pairs are computed when there are many sites.
DRAWS = 20
#: Log prior of scales of the mixed model's spread, which was learned: it is seldom less.
LOG_SCALES = np.log([0.02, 0.02, 0.02, 0.02, 0.02, 0.9])


@dataclass(frozen=True, eq=False)
class Blend:
    """Effects ``b`` in whitened units, averaged over partitions and the mixed model, which has no groups.

    Attributes
    ----------
    weight : float
        Of the mixed model.
    b : array (V, d)
    scales : array (R,)
        Probabilities that the spread is this multiple of the mixed model's, if there are no groups.
    gain : float
        Lower bound on the log evidence of groups, minus the log evidence of the mixed model.
    evidence : float
        The larger of the two.
    degrees : float
        Effective degrees of freedom.
    sure : float
        Stein's unbiased estimate of the risk, up to a constant of the data.
    """

    chains: Chains
    weight: float
    b: Array
    scales: Array
    gain: float
    evidence: float
    degrees: float
    sure: float

    @property
    def ungrouped(self) -> float:
        """Probability that there are no groups: the weight, or less where the evidence says so.

        That of groups is a lower bound, so it may say that; the weight is what serves estimates best.
        """
        return min(self.weight, _believed(self.gain))

    @property
    def plain(self) -> Array:
        """The effects ``(V, d)`` of the mixed model at its own spread."""
        return np.asarray(self.chains.sites.c[-1])

    def plain_covariance(self) -> Array:
        """Their covariances ``(V, d, d)``."""
        d = self.b.shape[1]
        return np.asarray(np.eye(d) - unpacked(self.chains.sites.H[-1], d))

    def covariance(self, some: int | None = None) -> Array:
        """Covariances ``(n, d, d)`` of the first n sites' ``b``, what differs between groupings included."""
        sites, b = self.chains.sites, self.b[:some]
        b0, b1 = without_groups(sites, self.scales)[:some], with_groups(self.chains)[:some]
        total = self.weight * (covariance_without_groups(sites, self.scales, b0) + outer(b0 - b))
        total += (1 - self.weight) * (self.chains.covariance(b1) + outer(b1 - b))
        return np.asarray(total)

    def mixing(self) -> tuple[Array, Array]:
        """R-hat and effective size of effects, the traced sites' ``(n, d)``.

        What chains trace are expectations given partitions, and they are believed by as much as groups are: both count
        by what they are of the variance that is stated.
        """
        draws = (1 - self.weight) * self.chains.trace(lambda one: one.means)
        variance = np.einsum("ujj->uj", self.covariance(draws.shape[2]))
        return split_rhat(draws, variance), effective_size(draws, variance)

    def mixed(self) -> bool:
        """Whether chains agree well enough, about partitions too: given these, effects are traced."""
        if self.weight > ALL_MIXED:
            return True
        raw = split_rhat(self.chains.trace(lambda one: one.means))
        return bool(raw.max() <= NEARLY and np.median(raw) <= AGREE)

    @property
    def continuum(self) -> float:
        """The chance, with groups, that hardly anything differs between these, so that nobody is kin."""
        shares = self.chains.trace(lambda one: SHARES[one.trace[:, 2].astype(np.int64)])
        return float(self.chains.weights @ (shares > CONTINUUM).mean(axis=1))

    @property
    def same(self) -> Array | Pairs:
        """Probability ``(V, V)`` that two sites have the same parameters but for the spread inside a group."""
        if len(self.b) > MOST_PAIRS:
            return self._drawn()
        chance = (1 - self.ungrouped) * self.chains.average(lambda record: record.same)
        chance += self.ungrouped * self.scales[0]
        chance = 0.5 * (chance + chance.T)
        np.fill_diagonal(chance, 1.0)
        return np.asarray(np.clip(chance, 0.0, 1.0))

    def _drawn(self) -> Pairs:
        """The same from some of the partitions; in a continuum nobody is kin."""
        labels, chance = [], []
        for weight, record in zip(self.chains.weights, self.chains.records, strict=True):
            lines = np.unique(np.linspace(0, len(record.z) - 1, DRAWS).astype(int))
            kin = are_kin(record.trace[lines, 2].astype(np.int64), record.trace[lines, 1].astype(np.int64))
            labels.append(record.z[lines])
            chance.append((1 - self.ungrouped) * weight * kin / len(lines))
        stacked = np.concatenate(chance)
        return Pairs(
            np.concatenate(labels)[stacked > 0].astype(np.int32),
            stacked[stacked > 0],
            float(self.ungrouped * self.scales[0]),
        )


def blend(W: Array, c: Array, scouts: Scouts, sampling: Sampling) -> Blend:
    """The posterior of whitened effects from ``W (V, d, d)`` and ``c (V, d)``.

    Chains that disagree go on, twice as long each time.
    """
    found, longer = _blend(W, c, go_on(scouts, sampling)), sampling.again(*c.shape)
    while longer is not None and not found.mixed():
        scouts.leave_behind(found.chains)
        found, longer = _blend(W, c, go_on(scouts, longer)), longer.again(*c.shape)
    return found


def _blend(W: Array, c: Array, chains: Chains) -> Blend:
    sites = chains.sites
    scales, evidence = scales_without_groups(sites)
    b0, b1 = without_groups(sites, scales), with_groups(chains)
    gain = float(chains.scores.max() - evidence)
    # one after the other: with many sites each of these arrays is large
    degrees = np.array([np.vdot(W, covariance_without_groups(sites, scales, b0)), np.vdot(W, chains.covariance(b1))])
    weight = weight_of_none(W, c, b0, b1, degrees, gain)
    b = weight * b0 + (1 - weight) * b1
    spent = float(degrees @ [weight, 1 - weight])
    return Blend(
        chains=chains,
        weight=weight,
        b=b,
        scales=scales,
        gain=gain,
        evidence=evidence + max(gain, 0.0),
        degrees=spent,
        sure=float((b * (apply(W, b) - 2 * c)).sum()) + 2 * spent,
    )


def without_groups(sites: Sites, scales: Array) -> Array:
    """Effects ``(V, d)`` of the mixed model, averaged over scales of its spread."""
    return np.asarray(np.einsum("r,rud->ud", scales * SHARES, sites.c))


def covariance_without_groups(sites: Sites, scales: Array, b: Array) -> Array:
    """Covariances ``(n, d, d)`` of the first n sites, whose effects are ``b (n, d)``."""
    (n, d), total = b.shape, np.zeros((*b.shape, b.shape[1]))
    for chance, share, e, H in zip(scales, SHARES, sites.c[:, :n], sites.H[:, :n], strict=True):
        if chance > 1e-12:
            total += chance * (share * (np.eye(d) - share * unpacked(H, d)) + outer(share * e - b))
    return total


def with_groups(chains: Chains) -> Array:
    """Effects ``(V, d)``, averaged over partitions."""
    return chains.average(lambda record: record.b)


def scales_without_groups(sites: Sites) -> tuple[Array, float]:
    """Probabilities of the mixed model's spread being scaled by each of the shares, and their joint log evidence.

    The evidence has all scales alike, which it owes to that of groups: theirs is a lower bound.
    """
    V, _ = sites.size
    pairs, edges = V * (V - 1) / 2, float(sites.neighbours.weight.sum()) / 2
    each = sites.k.sum(axis=1)
    evidence = float(np.logaddexp.reduce(each)) - np.log(len(SHARES))
    if edges:
        yes = 2 * (edges + 1) / (pairs + 2)
        evidence += float(log_beta(edges + yes, pairs - edges + 2 - yes) - log_beta(yes, 2 - yes))
    weight = np.exp(each + LOG_SCALES - (each + LOG_SCALES).max())
    return weight / weight.sum(), float(evidence)


def weight_of_none(W: Array, c: Array, b0: Array, b1: Array, degrees: Array, gain: float) -> float:
    """The weight w of the mixed model: least ``SURE(w) / 2 + hold / 2 (w - e)^2``, ``e`` its share of the evidence.

    The evidence of groups is a lower bound, loose where groups are weak: one that favours groups is to be believed,
    one that does not leaves the choice to SURE, which is unbiased whatever the model.
    """
    hold = HOLD + HOLD_PER_GAIN * max(gain, 0.0)
    slope, curvature = _sure(W, c, b0, b1, degrees)
    return float(np.clip((hold * _believed(gain) - slope) / (hold + curvature), 0.0, 1.0))


def chance_of_none(W: Array, c: Array, b0: Array, b1: Array, degrees: Array) -> float:
    """How probable ``b0`` may be at most, where SURE favours ``b1``: the tail area, on both sides, of the difference.

    The weight of `weight_of_none` serves estimates best, which is not to say that it is a probability.
    """
    slope, curvature = _sure(W, c, b0, b1, degrees)
    if (more := 2 * slope + curvature) <= 0 or curvature <= 0:  # or both say the same
        return 1.0
    return math.erfc(more / math.sqrt(8 * curvature))  # SURE's standard deviation is twice the root of the curvature


def _sure(W: Array, c: Array, b0: Array, b1: Array, degrees: Array) -> tuple[float, float]:
    """Slope and curvature of ``SURE(w) / 2`` of ``w b0 + (1 - w) b1`` at w = 0."""
    apart = b0 - b1
    slope = (apart * (apply(W, b1) - c)).sum() + degrees[0] - degrees[1]
    return float(slope), float((apart * apply(W, apart)).sum())


def _believed(gain: float) -> float:
    """Probability of a model against which the log evidence is this."""
    return float(1.0 / (1.0 + np.exp(np.clip(gain, -50.0, 50.0))))


def outer(vectors: Array) -> Array:
    """``v_u v_u'`` for ``(V, d)``."""
    return np.asarray(vectors[:, :, None] * vectors[:, None, :])
