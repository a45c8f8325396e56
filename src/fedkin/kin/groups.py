"""Groups inside the spread of a mixed model: whitening, chains, how much to believe of either, the graph's guard."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import betaln

from fedkin._base import Array, Index, Mask
from fedkin.kin.chains import Chains, Scouts, go_on, integrate_effects, scout
from fedkin.kin.kernels import Sites
from fedkin.kin.mixed import MixedModel
from fedkin.kin.options import ALL_MIXED, SHARES, Sampling
from fedkin.kin.quadratics import apply

#: Directions of parameters about which sites know less than this share of what their spread leaves open are left out.
SEEN = 0.02
#: How firmly the weight of the mixed model is held at what the evidence says, when SURE hardly tells.
HOLD, HOLD_PER_GAIN = 4.0, 10.0
#: A graph is dropped when SURE without it is lower by this, or by twice the standard deviation of the difference.
GRAPH_MARGIN = 10.0
#: Fewer sites than this have no groups.
FEWEST = 4


@dataclass(frozen=True, eq=False)
class Blend:
    """Effects ``b`` in whitened units, averaged over partitions and the mixed model, which has no groups.

    Attributes
    ----------
    weight : float
        Of the mixed model.
    b, covariance : arrays (V, d), (V, d, d)
    plain, plain_covariance : arrays (V, d), (V, d, d)
        The effects of the mixed model at its own spread.
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
    covariance: Array
    plain: Array
    plain_covariance: Array
    scales: Array
    gain: float
    evidence: float
    degrees: float
    sure: float

    @property
    def same(self) -> Array:
        """Probability ``(V, V)`` that two sites have the same parameters but for the spread inside a group."""
        chance = (1 - self.weight) * self.chains.average(lambda record: record.same) + self.weight * self.scales[0]
        chance = 0.5 * (chance + chance.T)
        np.fill_diagonal(chance, 1.0)
        return np.asarray(np.clip(chance, 0.0, 1.0))


def blend(W: Array, c: Array, scouts: Scouts, sampling: Sampling) -> Blend:
    """The posterior of whitened effects from ``W (V, d, d)`` and ``c (V, d)``."""
    chains = go_on(scouts, sampling)
    sites, d = chains.sites, W.shape[1]
    scales, evidence = _without_groups(sites)
    b0 = np.einsum("r,rud->ud", scales * SHARES, sites.c)
    C0 = sum(
        v * (g * (np.eye(d) - g * H) + outer(g * e - b0))
        for v, g, e, H in zip(scales, SHARES, sites.c, sites.H, strict=True)
    )
    b1 = chains.average(lambda record: record.b)
    C1 = chains.average(lambda record: record.bb) - outer(b1)
    gain = float(chains.scores.max() - evidence)
    degrees = np.array([(W * C0).sum(), (W * C1).sum()])
    weight = _weight(W, c, b0, b1, degrees, gain)
    b = weight * b0 + (1 - weight) * b1
    spent = float(degrees @ [weight, 1 - weight])
    return Blend(
        chains=chains,
        weight=weight,
        b=b,
        covariance=weight * (C0 + outer(b0 - b)) + (1 - weight) * (C1 + outer(b1 - b)),
        plain=sites.c[-1],
        plain_covariance=np.eye(d) - sites.H[-1],
        scales=scales,
        gain=gain,
        evidence=evidence + max(gain, 0.0),
        degrees=spent,
        sure=float((b * (apply(W, b) - 2 * c)).sum()) + 2 * spent,
    )


def _without_groups(sites: Sites) -> tuple[Array, float]:
    """Probabilities of the mixed model's spread being scaled by each of the shares, and their joint log evidence."""
    V = sites.c.shape[1]
    pairs, edges = V * (V - 1) / 2, sites.neighbour.size / 2
    logs = sites.k.sum(axis=1) - np.log(len(SHARES))
    if edges:
        yes = 2 * (edges + 1) / (pairs + 2)
        logs = logs + betaln(edges + yes, pairs - edges + 2 - yes) - betaln(yes, 2 - yes)
    top = logs.max()
    weight = np.exp(logs - top)
    return weight / weight.sum(), float(top + np.log(weight.sum()))


def _weight(W: Array, c: Array, b0: Array, b1: Array, degrees: Array, gain: float) -> float:
    """The weight w of the mixed model: least ``SURE(w) / 2 + hold / 2 (w - e)^2``, ``e`` its share of the evidence.

    The evidence of groups is a lower bound, loose where groups are weak: one that favours groups is to be believed,
    one that does not leaves the choice to SURE, which is unbiased whatever the model.
    """
    apart = b0 - b1
    believed = 1.0 / (1.0 + np.exp(np.clip(gain, -50.0, 50.0)))
    hold = HOLD + HOLD_PER_GAIN * max(gain, 0.0)
    curvature = (apart * apply(W, apart)).sum()
    slope = (apart * (apply(W, b1) - c)).sum() + degrees[0] - degrees[1]
    return float(np.clip((hold * believed - slope) / (hold + curvature), 0.0, 1.0))


@dataclass(frozen=True, eq=False)
class Grouped:
    """Estimates with groups, in the units of the mixed model.

    ``F (p, d)`` maps whitened effects to parameters; ``centre (V, p)`` and ``covariance`` are the mixed model's own,
    at the spread that whitens; ``blend`` is None where there are too few sites or nothing differs between them.
    ``with_graph`` says whether the graph's edges count, ``sure_other`` the SURE of the choice not taken.
    """

    theta: Array
    covariance: Array
    degrees: float
    spread: Array
    mean: Array
    F: Array
    blend: Blend | None
    with_graph: bool
    sure_other: float | None


def find_groups(
    model: MixedModel, slopes: Mask, edges: Index, seed: int, sampling: Sampling, *, guard: bool = True
) -> Grouped:
    """Groups inside the spread of a mixed model.

    Effects are whitened by their own spreads, or by one spread for all slopes if that explains the data better:
    spreads that were estimated apart are noisy.
    """
    V = len(model.theta)
    spreads = [model.spread]
    if slopes.sum() > 1:
        spreads.append(np.where(slopes, model.spread[slopes].mean(), model.spread))
    whites = [_White.of(model, spread) for spread in spreads]
    if V < FEWEST or not all(white.F.shape[1] for white in whites):
        degrees, nothing = float(model.degrees.sum()), np.zeros((len(model.mean), 0))
        return Grouped(model.theta, model.covariance, degrees, model.spread, model.mean, nothing, None, False, None)

    def scouted(white: _White, edges: Index) -> Scouts:
        return scout(integrate_effects(white.W, white.c, *adjacency(V, edges)), seed, sampling)

    scouts = [scouted(white, edges) for white in whites]
    evidence = [max(float(one.scores[0]), _without_groups(one.sites)[1]) for one in scouts]
    # a spread that was not fitted apart saves a parameter
    best = int(len(whites) > 1 and evidence[1] + slopes.sum() - 1 > evidence[0])
    chosen, white = blend(whites[best].W, whites[best].c, scouts[best], sampling), whites[best]
    if best and chosen.weight > ALL_MIXED:  # without groups the spreads stay apart
        chosen, white = blend(whites[0].W, whites[0].c, scouts[0], sampling), whites[0]
    with_graph, other = len(edges) > 0, None
    if with_graph and guard:
        bare = blend(white.W, white.c, scouted(white, edges[:0]), sampling)
        apart = chosen.b - bare.b
        deviation = 2 * np.sqrt(max(float((apart * apply(white.W, apart)).sum()), 0.0))
        other = bare.sure
        if chosen.sure > bare.sure + max(GRAPH_MARGIN, 2 * deviation):
            chosen, other, with_graph = bare, chosen.sure, False
    theta = white.theta + (chosen.b - chosen.plain) @ white.F.T
    covariance = white.covariance + white.F @ (chosen.covariance - chosen.plain_covariance) @ white.F.T
    in_white = float((white.W * chosen.plain_covariance).sum())
    degrees = float((model.precision * white.covariance).sum()) + chosen.degrees - in_white
    return Grouped(theta, covariance, degrees, white.spread, model.mean, white.F, chosen, with_graph, other)


@dataclass(frozen=True, eq=False)
class _White:
    """Effects in units of a spread, without directions that nobody sees."""

    spread: Array
    F: Array  # (p, d)
    W: Array  # (V, d, d)
    c: Array  # (V, d)
    theta: Array  # (V, p) the mixed model's estimates at this spread
    covariance: Array  # (V, p, p)

    @classmethod
    def of(cls, model: MixedModel, spread: Array) -> _White:
        root, S = np.sqrt(spread), model.precision
        rest = model.score - S @ model.mean
        scaled = root[:, None] * S * root
        values, vectors = np.linalg.eigh(scaled.mean(axis=0))
        F = root[:, None] * vectors[:, values > SEEN]
        own = np.linalg.inv(np.eye(len(root)) + scaled) * np.outer(root, root)
        keep = np.eye(len(root)) - own @ S
        uncertain = keep @ model.mean_covariance @ np.swapaxes(keep, 1, 2)
        W = F.T @ S @ F
        W = 0.5 * (W + np.swapaxes(W, 1, 2))
        return cls(spread, F, W, rest @ F, model.mean + apply(own, rest), own + uncertain)


def adjacency(V: int, edges: Index) -> tuple[Index, Index]:
    """Where the neighbours of each site begin ``(V + 1,)``, and the neighbours of all ``(2 E,)``."""
    ends = np.concatenate([edges[:, 0], edges[:, 1]])
    others = np.concatenate([edges[:, 1], edges[:, 0]])
    order = np.lexsort([others, ends])
    first = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=V))])
    return first.astype(np.int64), others[order].astype(np.int64)


def outer(vectors: Array) -> Array:
    """``v_u v_u'`` for ``(V, d)``."""
    return np.asarray(vectors[:, :, None] * vectors[:, None, :])
