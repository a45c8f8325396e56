"""Groups inside the spread of a mixed model: whitening, chains, how much to believe of either, the graph's guard."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import betaln, logsumexp

from fedkin._base import Array, Mask
from fedkin.kin.kernels.bundles import unpacked
from fedkin.kin.mixed import MixedModel, OneModel
from fedkin.kin.options import ALL_MIXED, MANY_SITES, MOST_PAIRS, SHARES, Sampling
from fedkin.kin.pairs import Pairs
from fedkin.kin.quadratics import apply
from fedkin.kin.sampler.chains import Chains, Scouts, go_on, scout
from fedkin.kin.sampler.neighbours import Neighbours
from fedkin.kin.sampler.sites import Sites, integrate_effects
from fedkin.kin.sampler.wide import Whole

#: Directions of parameters about which sites know less than this share of what their spread leaves open are left out.
SEEN = 0.02
#: Groups are looked for in at most so many directions, those in which sites differ most; they pool in all of them.
MOST_DIRECTIONS = 50
#: How firmly the weight of the mixed model is held at what the evidence says, when SURE hardly tells.
HOLD, HOLD_PER_GAIN = 4.0, 10.0
#: A graph is dropped when SURE without it is lower by this, or by twice the standard deviation of the difference.
GRAPH_MARGIN = 10.0
#: Partitions of each chain from which probabilities of pairs are computed when there are many sites.
DRAWS = 20
#: Probabilities of one model for all below this are nothing.
LEAST_ONE = 1e-6
#: Log prior of scales of the mixed model's spread, which was learned: it is seldom less.
LOG_SCALES = np.log([0.02, 0.02, 0.02, 0.02, 0.02, 0.9])
#: Fewer sites than this have no groups.
FEWEST = 4


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

    def covariance(self) -> Array:
        """Covariances ``(V, d, d)`` of ``b``, what differs between groupings included."""
        b0, b1 = without_groups(self.chains.sites, self.scales), with_groups(self.chains)
        total = self.weight * (covariance_without_groups(self.chains.sites, self.scales, b0) + outer(b0 - self.b))
        total += (1 - self.weight) * (self.chains.covariance(b1) + outer(b1 - self.b))
        return np.asarray(total)

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
        """The same from some of the partitions; one group with a spread inside is a continuum, where nobody is kin."""
        labels, chance = [], []
        for weight, record in zip(self.chains.weights, self.chains.records, strict=True):
            lines = np.unique(np.linspace(0, len(record.z) - 1, DRAWS).astype(int))
            kin = (record.trace[lines, 2] == 0) | (record.trace[lines, 1] > 1)
            labels.append(record.z[lines])
            chance.append((1 - self.ungrouped) * weight * kin / len(lines))
        stacked = np.concatenate(chance)
        return Pairs(
            np.concatenate(labels)[stacked > 0].astype(np.int32),
            stacked[stacked > 0],
            float(self.ungrouped * self.scales[0]),
        )


def blend(W: Array, c: Array, scouts: Scouts, sampling: Sampling) -> Blend:
    """The posterior of whitened effects from ``W (V, d, d)`` and ``c (V, d)``."""
    chains = go_on(scouts, sampling)
    sites = chains.sites
    scales, evidence = scales_without_groups(sites)
    b0, b1 = without_groups(sites, scales), with_groups(chains)
    gain = float(chains.scores.max() - evidence)
    spread_out = (covariance_without_groups(sites, scales, b0), chains.covariance(b1))
    degrees = np.array([np.vdot(W, C) for C in spread_out])
    weight = _weight(W, c, b0, b1, degrees, gain)
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
    """Their covariances ``(V, d, d)``."""
    d, total = b.shape[1], np.zeros((*b.shape, b.shape[1]))
    for chance, share, e, H in zip(scales, SHARES, sites.c, sites.H, strict=True):
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
    evidence = float(logsumexp(each)) - np.log(len(SHARES))
    if edges:
        yes = 2 * (edges + 1) / (pairs + 2)
        evidence += float(betaln(edges + yes, pairs - edges + 2 - yes) - betaln(yes, 2 - yes))
    weight = np.exp(each + LOG_SCALES - (each + LOG_SCALES).max())
    return weight / weight.sum(), float(evidence)


def _weight(W: Array, c: Array, b0: Array, b1: Array, degrees: Array, gain: float) -> float:
    """The weight w of the mixed model: least ``SURE(w) / 2 + hold / 2 (w - e)^2``, ``e`` its share of the evidence.

    The evidence of groups is a lower bound, loose where groups are weak: one that favours groups is to be believed,
    one that does not leaves the choice to SURE, which is unbiased whatever the model.
    """
    apart = b0 - b1
    hold = HOLD + HOLD_PER_GAIN * max(gain, 0.0)
    curvature = (apart * apply(W, apart)).sum()
    slope = (apart * (apply(W, b1) - c)).sum() + degrees[0] - degrees[1]
    return float(np.clip((hold * _believed(gain) - slope) / (hold + curvature), 0.0, 1.0))


def _believed(gain: float) -> float:
    """Probability of a model against which the log evidence is this."""
    return float(1.0 / (1.0 + np.exp(np.clip(gain, -50.0, 50.0))))


@dataclass(frozen=True, eq=False)
class Grouped:
    """Estimates with groups, in the units of the mixed model.

    ``mean_covariance`` is what is open about the mean given effects, ``F (p, d)`` maps whitened effects to parameters;
    ``blend`` is None where there are too few sites or nothing differs between them.
    ``with_graph`` says whether the graph's edges count, ``sure_other`` the SURE of the choice not taken, ``one`` is the
    probability that sites do not differ at all.
    """

    theta: Array
    covariance: Array
    degrees: float
    spread: Array
    mean: Array
    mean_covariance: Array
    F: Array
    blend: Blend | None
    with_graph: bool
    sure_other: float | None
    one: float = 0.0

    def without_spread(self, model: MixedModel, one: OneModel) -> Grouped:
        """The same, averaged with one model for all.

        Its weight is the probability that sites do not differ, or where the likelihood hardly tells, what SURE says:
        a graph may show groups that the spread alone does not.
        """
        S, every = model.precision, np.tile(one.mean, (len(self.theta), 1))
        degrees = np.array([float(np.vdot(S.sum(axis=0), one.covariance)), self.degrees])
        weight = _weight(S, model.score, every, self.theta, degrees, one.log_odds)
        if weight < LEAST_ONE:
            return self
        theta = (1 - weight) * self.theta + weight * one.mean
        total = (1 - weight) * (self.covariance + outer(self.theta - theta))
        total += weight * (one.covariance + outer(one.mean - theta))
        return replace(self, theta=theta, covariance=total, one=weight)

    def kinship(self) -> tuple[Array | Pairs, Array, float]:
        """Probabilities of being kin, of 0, 1, 2... groups, and the weight of models without groups in estimates."""
        V, blend = len(self.theta), self.blend
        n_groups, weight = np.array([0.0, 1.0]), 1.0
        same: Array | Pairs = np.eye(V) if V <= MOST_PAIRS else Pairs(np.zeros((0, V), np.int32), np.zeros(0), 0.0)
        if blend is not None:
            same, weight = blend.same, blend.weight
            lines = blend.chains.trace(lambda one: one.trace[:, 1].astype(np.int64))
            each = [np.bincount(line, minlength=int(lines.max()) + 1) / len(line) for line in lines]
            n_groups = (1 - blend.ungrouped) * (blend.chains.weights @ np.array(each))
            n_groups[1] += blend.ungrouped
        n_groups = (1 - self.one) * n_groups
        n_groups[1] += self.one
        if isinstance(same, Pairs):
            same = Pairs(same.labels, (1 - self.one) * same.chance, self.one + (1 - self.one) * same.base)
        else:
            same = self.one + (1 - self.one) * same
        return same, n_groups, self.one + (1 - self.one) * weight


def find_groups(
    model: MixedModel, slopes: Mask, neighbours: Neighbours, seed: int, sampling: Sampling, *, guard: bool = True
) -> Grouped:
    """Groups inside the spread of a mixed model.

    Effects are whitened by their own spreads, or by one spread for all slopes if that explains the data better:
    spreads that were estimated apart are noisy, unless there are many sites.
    """
    V = len(model.theta)
    spreads = [model.spread]
    if slopes.sum() > 1 and V < MANY_SITES:
        spreads.append(np.where(slopes, model.spread[slopes].mean(), model.spread))
    whites = [_White.of(model, spread) for spread in spreads]
    if V < FEWEST or not all(white.F.shape[1] for white in whites):
        degrees, nothing = float(model.degrees.sum()), np.zeros((len(model.mean), 0))
        return Grouped(
            model.theta,
            model.covariance,
            degrees,
            model.spread,
            model.mean,
            model.mean_covariance,
            nothing,
            None,
            False,
            None,
        )

    scouts = [scout(integrate_effects(white.W, white.c, neighbours), seed, sampling) for white in whites]
    evidence = [max(float(one.scores[0]), scales_without_groups(one.sites)[1]) for one in scouts]
    # a spread that was not fitted apart saves a parameter
    best = int(len(whites) > 1 and evidence[1] + slopes.sum() - 1 > evidence[0])
    chosen, white = blend(whites[best].W, whites[best].c, scouts[best], sampling), whites[best]
    if best and chosen.weight > ALL_MIXED:  # without groups the spreads stay apart
        chosen, white = blend(whites[0].W, whites[0].c, scouts[0], sampling), whites[0]
    with_graph, other = neighbours.neighbour.size > 0, None
    if with_graph and guard:
        alone = chosen.chains.sites.with_neighbours(Neighbours.none(V))
        bare = blend(white.W, white.c, scout(alone, seed, sampling), sampling)
        apart = chosen.b - bare.b
        deviation = 2 * np.sqrt(max(float((apart * apply(white.W, apart)).sum()), 0.0))
        other = bare.sure
        if chosen.sure > bare.sure + max(GRAPH_MARGIN, 2 * deviation):
            chosen, other, with_graph = bare, chosen.sure, False
    if white.whole is None:
        F, W, b, plain_b, degrees = white.F, white.W, chosen.b, chosen.plain, chosen.degrees
        found, plain = chosen.covariance(), chosen.plain_covariance()
    else:
        F, W = white.whole.F, white.whole.W
        b, found = white.whole.effects(chosen.chains, chosen.weight, chosen.scales)
        plain = np.asarray(np.linalg.inv(np.eye(W.shape[1]) + W))
        plain_b, degrees = apply(plain, white.whole.c), float(np.vdot(W, found))
    theta = white.theta + (b - plain_b) @ F.T
    open_mean = _open_mean(model.mean_covariance, F, chosen.weight)
    centre = white.covariance(model, open_mean)
    covariance = centre + F @ (found - plain) @ F.T
    degrees += float(np.vdot(model.precision, centre)) - float(np.vdot(W, plain))
    return Grouped(theta, covariance, degrees, white.spread, model.mean, open_mean, white.F, chosen, with_graph, other)


def _open_mean(covariance: Array, F: Array, weight: float) -> Array:
    """What is open about the mean where effects around it are given, ``(p, p)``.

    All of it without groups (which have this weight). With groups only what is not in their directions: there their
    centres follow their members, wherever the mean is.
    """
    rest = np.eye(len(F)) - F @ np.linalg.pinv(F)
    return np.asarray(weight * covariance + (1 - weight) * rest @ covariance @ rest.T)


@dataclass(frozen=True, eq=False)
class _White:
    """Effects in units of a spread, without directions that nobody sees."""

    spread: Array
    F: Array  # (p, d)
    W: Array  # (V, d, d)
    c: Array  # (V, d)
    theta: Array  # (V, p) the mixed model's estimates at this spread
    whole: Whole | None  # where there are too many directions to sample

    @classmethod
    def of(cls, model: MixedModel, spread: Array) -> _White:
        root, S = np.sqrt(spread), model.precision
        rest = model.score - S @ model.mean
        scaled = root[:, None] * S * root
        values, vectors = np.linalg.eigh(scaled.mean(axis=0))
        # LAPACK leaves signs to rounding: fixed, sums from rows and from summaries are sampled alike
        vectors *= np.where(1.0 / np.sqrt(np.arange(2.0, len(root) + 2)) @ vectors < 0, -1.0, 1.0)
        F = root[:, None] * vectors[:, values > SEEN]
        scaled[:, np.arange(len(root)), np.arange(len(root))] += 1.0
        effects = root * np.linalg.solve(scaled, (root * rest)[:, :, None])[:, :, 0]
        W, c = F.T @ S @ F, rest @ F
        whole = None
        if F.shape[1] > MOST_DIRECTIONS:
            turn, less, score = _most_different(W, c)
            whole = Whole(F, 0.5 * (W + np.swapaxes(W, 1, 2)), c, turn)
            F, W, c = F @ turn, less, score
        return cls(spread, F, 0.5 * (W + np.swapaxes(W, 1, 2)), c, model.mean + effects, whole)

    def covariance(self, model: MixedModel, open_mean: Array) -> Array:
        """Covariances ``(V, p, p)`` of the mixed model's estimates at this spread, with so much open about the mean."""
        root, S = np.sqrt(self.spread), model.precision
        own = np.linalg.inv(np.eye(len(root)) + root[:, None] * S * root) * np.outer(root, root)
        keep = np.eye(len(root)) - own @ S
        return np.asarray(own + keep @ open_mean @ np.swapaxes(keep, 1, 2))


def _most_different(W: Array, c: Array) -> tuple[Array, Array, Array]:
    """The directions ``(d, k)`` in which the mixed model's effects differ most, and what sites say about them alone.

    Effects in the other directions are integrated out as the mixed model has them.
    """
    d = W.shape[1]
    posterior = np.asarray(np.linalg.inv(W + np.eye(d)), dtype=np.float64)
    effects = apply(posterior, c)
    _, _, directions = np.linalg.svd(effects, full_matrices=False)
    turn = directions[:MOST_DIRECTIONS].T
    inside = np.asarray(np.linalg.inv(turn.T @ posterior @ turn), dtype=np.float64)
    return turn, inside - np.eye(turn.shape[1]), apply(inside, effects @ turn)


def outer(vectors: Array) -> Array:
    """``v_u v_u'`` for ``(V, d)``."""
    return np.asarray(vectors[:, :, None] * vectors[:, None, :])
