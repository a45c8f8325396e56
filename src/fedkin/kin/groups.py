"""Groups within the variance of a mixed model: whitened effects, chains over partitions, averaging with no groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import betaln, expit

from fedkin._base import Array, Mask
from fedkin.kin.chains import (
    AGREE,
    DRAWS,
    NEARLY,
    Chains,
    PilotChains,
    Sampling,
    States,
    effective_size,
    split_rhat,
)
from fedkin.kin.directions import FullEffects, signed
from fedkin.kin.evidence import FEWEST
from fedkin.kin.likelihoods import FEW, apply, carried, given_mean
from fedkin.kin.mixed import MixedModel, OneModel, Population, outer
from fedkin.kin.partitions import (
    CONTINUUM,
    SHARES,
    UNLIKELY,
    GraphUse,
    Neighbours,
    Pairs,
    SiteLikelihoods,
    are_kin,
    unpacked,
)
from fedkin.kin.sampler import MANY_SITES, MOST_PAIRS
from fedkin.kin.sharded import sharded

#: Directions of parameters about which sites know less than this share of what their variance leaves open are left out.
SEEN = 0.02


class Blend:
    """Effects ``b (V, d)`` in whitened units, averaged over partitions and the mixed model without groups.

    Sites have log likelihoods ``c'b - b'W b / 2``, with ``W (V, d, d)`` and ``c (V, d)``.

    Attributes
    ----------
    weight : float
        Of the mixed model: the w that minimises ``SURE(w) / 2 + hold / 2 (w - e)^2``, where ``e`` is its share of the
        evidence. The evidence of groups is a lower bound, which is loose for weak groups. So evidence for groups is
        trusted, and evidence against them is checked by SURE, which is unbiased under any model.
    gain : float
        Lower bound on the log evidence of groups, minus the log evidence of the mixed model.
    degrees : float
        Effective degrees of freedom.
    """

    def __init__(self, W: Array, c: Array, chains: Chains) -> None:
        sites, self.chains, self.b1 = chains.sites, chains, chains.average("b")
        V, b0 = len(c), sites.c[-1]
        # the evidence of the mixed model has edges at random
        pairs, edges = V * (V - 1) / 2, float(sites.neighbours.weight.sum()) / 2
        yes = 2 * (edges + 1) / (pairs + 2)
        at_random = float(betaln(edges + yes, pairs - edges + 2 - yes) - betaln(yes, 2 - yes))
        self.gain = float(chains.scores.max()) - float(sites.k[-1].sum()) - at_random
        # one after the other: with many sites each of these arrays is large
        without = float(np.vdot(W, _covariance_without_groups(sites)))
        degrees = np.array([without, float(np.vdot(W, chains.covariance(self.b1)))])
        apart, hold = b0 - self.b1, 4.0 + 10.0 * max(self.gain, 0.0)
        slope = float((apart * (apply(W, self.b1) - c)).sum() + degrees[0] - degrees[1])
        curvature = float((apart * apply(W, apart)).sum())
        self.weight = float(np.clip((hold * expit(-self.gain) - slope) / (hold + curvature), 0.0, 1.0))
        self.b = self.weight * b0 + (1 - self.weight) * self.b1
        self.degrees = float(degrees @ [self.weight, 1 - self.weight])

    @property
    def ungrouped(self) -> float:
        """Probability that there are no groups: the weight used for estimates, or less if the evidence says so."""
        return min(self.weight, float(expit(-self.gain)))

    def covariance(self, some: int | None = None) -> Array:
        """Return covariances ``(n, d, d)`` of the first n sites' ``b``, including differences between groupings."""
        sites, b, b1 = self.chains.sites, self.b[:some], self.b1[:some]
        b0 = sites.c[-1, :some]
        total = self.weight * (_covariance_without_groups(sites, some) + outer(b0 - b))
        total += (1 - self.weight) * (self.chains.covariance(b1) + outer(b1 - b))
        return np.asarray(total)

    def mixing(self) -> tuple[Array, Array]:
        """Return R-hat and effective sample size of the traced effects ``(n, d)``, relative to the reported
        variance."""
        # chains trace expectations given partitions, weighted by the probability of groups
        draws = (1 - self.weight) * self.chains.trace("means")
        variance = np.einsum("ujj->uj", self.covariance(draws.shape[2]))
        return split_rhat(draws, variance), effective_size(draws, variance)

    def mixed(self) -> bool:
        """Return whether chains agree well enough, on partitions as well."""
        if self.weight > 1 - UNLIKELY:
            return True
        raw = split_rhat(self.chains.trace("means"))
        return bool(raw.max() <= NEARLY and np.median(raw) <= AGREE)

    @property
    def continuum(self) -> float:
        """Probability that groups hardly differ, so that sites form a continuum and no two count as alike."""
        shares = SHARES[self.chains.trace("trace")[:, :, 2].astype(np.int64)]
        return float(self.chains.weights @ (shares > CONTINUUM).mean(axis=1))

    @property
    def same(self) -> Array | Pairs:
        """Probability ``(V, V)`` that two sites have the same parameters, apart from the variance inside a group."""
        if len(self.b) > MOST_PAIRS:  # from some of the partitions; in a continuum no two sites count as alike
            states = self.chains.states(DRAWS)
            groups = np.array([len(np.unique(z)) for z in states.z])
            chance = (1 - self.ungrouped) * states.weight * are_kin(states.share, groups)
            return Pairs(states.z[chance > 0].astype(np.int32), chance[chance > 0], 0.0)
        chance = (1 - self.ungrouped) * self.chains.average("same")
        chance = 0.5 * (chance + chance.T)
        np.fill_diagonal(chance, 1.0)
        return np.asarray(np.clip(chance, 0.0, 1.0))


def _blend(white: Whitened, neighbours: Neighbours, seed: int, sampling: Sampling) -> Blend:
    """Run chains from the best starts and average them; those that disagree run again, twice as long each time."""
    sites = SiteLikelihoods.from_effects(white.W, white.c, neighbours)
    with sharded(sites) as shards:
        pilots, longer = PilotChains(sites, seed, sampling, shards), sampling
        found = Blend(white.W, white.c, pilots.run_chains(sampling))
        while (again := longer.again(*white.c.shape)) is not None and not found.mixed():
            longer = again
            found = Blend(white.W, white.c, pilots.run_chains(longer))
    return found


def evidence_of_graph(neighbours: Neighbours, seed: int, sampling: Sampling) -> float:
    """Return the log evidence of the edges alone, from chains over partitions of sites without rows.

    The evidence of rows and edges, less this one, is that of the rows if partitions are as likely beforehand as the
    edges say. So a graph has to explain rows; edges that only explain each other count for nothing.
    """
    V = len(neighbours.first) - 1
    sites = SiteLikelihoods.from_effects(np.zeros((V, 1, 1)), np.zeros((V, 1)), neighbours)
    return float(PilotChains(sites, seed, sampling).run_chains(sampling).scores.max())


def _covariance_without_groups(sites: SiteLikelihoods, some: int | None = None) -> Array:
    """Return covariances ``(n, d, d)`` of the first n sites' effects in the mixed model."""
    d = sites.size[1]
    return np.asarray(np.eye(d) - unpacked(sites.H[-1, :some], d))


@dataclass(frozen=True, eq=False)
class Grouped:
    """Estimates with groups, in the units of the mixed model.

    ``mean_covariance`` is the uncertainty of the mean given effects, and ``F (p, d)`` maps whitened effects to
    parameters; ``blend`` is None if there are too few sites or nothing differs between them. ``with_graph`` states
    whether the graph's edges count; ``one`` is the probability that no site differs, the weight of ``common``. If
    groups were sought in some directions only, ``kept`` holds partitions in all of them, and ``full`` the effects
    there.
    """

    theta: Array
    covariance: Array
    degrees: float
    variance: Array
    mean_covariance: Array
    F: Array
    blend: Blend | None = None
    with_graph: bool = False
    one: float = 0.0
    common: OneModel | None = None
    kept: States | None = None
    full: FullEffects | None = None

    def with_one_model(self, one: OneModel) -> Grouped:
        """Average these estimates with one model for all sites.

        Its weight is the probability that no site differs: one model, variances alone and groups are equally likely
        beforehand, and compared by their evidence. Covariances are those of sites that differ, around the average, so
        that intervals cover whether sites differ or not.
        """
        log_odds, none = one.log_odds, 1.0
        if self.blend is not None:
            log_odds, none = log_odds + float(np.logaddexp(0.0, self.blend.gain)), self.blend.weight
        weight, apart = float(expit(-log_odds)), self.theta + none * one.shift
        theta = (1 - weight) * apart + weight * one.mean
        covariance = self.covariance + none * one.spread + outer(apart - theta)
        return replace(self, theta=theta, covariance=covariance, one=weight, common=one)

    def kinship(self) -> tuple[Array | Pairs, Array, float]:
        """Return probabilities of being alike, of 0, 1, 2... groups, and the weight of models without groups."""
        V, blend = len(self.theta), self.blend
        n_groups, weight = np.array([0.0, 1.0]), 1.0
        same: Array | Pairs = np.eye(V) if V <= MOST_PAIRS else Pairs(np.zeros((0, V), np.int32), np.zeros(0), 0.0)
        if blend is not None:
            same, weight = blend.same, blend.weight
            _, numbers, shares = np.moveaxis(blend.chains.trace("trace")[:, :, :3].astype(np.int64), 2, 0)
            lines = np.where(are_kin(shares, numbers), numbers, 1)  # a continuum counts as one
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

    def graph_use(self) -> tuple[GraphUse, tuple[float, float] | None]:
        """Return how the graph was used: it counts if the log odds of an edge differ by two standard deviations."""
        blend = self.blend
        if blend is None or not self.with_graph:
            return "ignored", None
        weights = blend.chains.weights
        rates = blend.chains.trace("trace")[:, :, 3:5]
        inside, between = (weights @ rates.mean(axis=1)).tolist()
        odds = np.log(rates / (1 - rates))
        contrast = odds[:, :, 0] - odds[:, :, 1]
        mean = float(weights @ contrast.mean(axis=1))
        deviation = float(np.sqrt(weights @ ((contrast - mean) ** 2).mean(axis=1)))
        if blend.weight > 0.5 or abs(mean) < 2 * deviation:
            return "ignored", (inside, between)
        return ("used" if mean > 0 else "inverted"), (inside, between)

    def sure(self, model: MixedModel) -> dict[str, float]:
        """Return unbiased estimates of ``sum_u e_u'S_u e_u`` for the sites' errors ``e_u``, up to a noise term."""
        S, c, fitted = model.precision, model.score, self.theta
        values, vectors = np.linalg.eigh(S)
        seen = values > 1e-9 * np.maximum(values[:, -1:], 1e-300)
        turned = apply(np.swapaxes(vectors, 1, 2), c)
        explained, rank = float((turned[seen] ** 2 / values[seen]).sum()), float(seen.sum())
        total, pooled = S.sum(axis=0), c.sum(axis=0)
        one = np.linalg.lstsq(total, pooled, rcond=None)[0]
        common = float(np.linalg.matrix_rank(total, hermitian=True))
        misfit = float((fitted * (apply(S, fitted) - 2 * c)).sum())
        return {
            "kin": misfit + explained - rank + 2 * self.degrees,
            "Local": rank,
            "Global": explained - float(pooled @ one) - rank + 2 * common,
        }


def find_groups(
    model: MixedModel, slopes: Mask, neighbours: Neighbours, seed: int, sampling: Sampling, *, guard: bool = True
) -> Grouped:
    """Find groups within the variance of a mixed model; sites in districts have none."""
    # whitened half way between own variances and one for all slopes: few sites make own ones noisy
    V = len(model.theta)
    white = Whitened.from_model(model, slopes, 0.5 if V < MANY_SITES else 0.0)
    if model.nested is not None or V < FEWEST or not white.F.shape[1]:
        degrees, nothing = float(model.degrees.sum()), np.zeros((len(model.mean), 0))
        return Grouped(model.theta, model.covariance, degrees, model.variance, model.mean_covariance, nothing)
    chosen = _blend(white, neighbours, seed, sampling)
    with_graph = neighbours.neighbour.size > 0
    if with_graph and guard:
        bare = _blend(white, Neighbours.none(V), seed, sampling)
        told = float(chosen.chains.scores.max()) - evidence_of_graph(neighbours, seed, sampling.brief())
        if told < bare.chains.scores.max() or chosen.continuum > 0.5:  # where no two sites are alike, edges say nothing
            chosen, with_graph = bare, False
        del bare  # with many sites the chains of the choice not taken are large
    if white.full is not None:
        return _in_all_directions(model, white.variance, white.full, chosen, with_graph)
    # the mixed model's effects at its own variance give way to those with groups
    F, W, sites, d = white.F, white.W, chosen.chains.sites, white.F.shape[1]
    theta, plain = white.theta + (chosen.b - sites.c[-1]) @ F.T, np.eye(d) - unpacked(sites.H[-1], d)
    open_mean = _open_mean(model, white.variance, F, chosen.weight)
    own, keep = given_mean(white.variance, model.precision)
    centre = own + keep @ open_mean @ np.swapaxes(keep, 1, 2)
    degrees = chosen.degrees + (float(np.vdot(model.precision, centre)) - float(np.vdot(W, plain)))
    covariance = centre + F @ (chosen.covariance() - plain) @ F.T
    return Grouped(theta, covariance, degrees, white.variance, open_mean, F, chosen, with_graph)


def _in_all_directions(
    model: MixedModel, variance: Array, full: FullEffects, chosen: Blend, with_graph: bool
) -> Grouped:
    """Return estimates with groups that were found in some directions, and pool in all."""
    varying, weight = ~model.fixed, chosen.weight
    root, place = np.sqrt(variance[varying]), np.ix_(varying, varying)
    b, inside, kept = full.effects(chosen.chains, weight)
    values, vectors = np.linalg.eigh(full.W.sum() / len(b))
    F = np.zeros((len(variance), int((values > SEEN).sum())))
    F[varying] = root[:, None] * vectors[:, values > SEEN]
    open_mean, covariance = _open_mean(model, variance, F, weight), np.empty_like(model.precision)
    for u in range(len(b)):  # one site after another: such arrays are large
        covariance[u] = carried(model.matrices, full.mixed[0], root, varying, u, open_mean)
        covariance[u][place] += root[:, None] * root * inside[u]
    theta, degrees = np.tile(model.mean, (len(b), 1)), float(np.vdot(model.precision, covariance))
    theta[:, varying] += root * b
    F = np.diag(np.sqrt(variance))[:, varying]
    found = Grouped(theta, covariance, degrees, variance, open_mean, F, chosen, with_graph)
    return replace(found, kept=kept, full=full)


def _open_mean(model: MixedModel, variance: Array, F: Array, weight: float) -> Array:
    """Return the uncertainty of the mean where effects around it are given, ``(p, p)``."""
    # with groups only what is not in their directions: there their centres follow their members. Columns of F over the
    # standard deviations are orthonormal, and directions that nobody sees are orthogonal to them in these units. That
    # of fixed coefficients, and of all others through them, stays
    covariance, fixed = model.mean_covariance, model.fixed
    by_fixed = covariance[:, fixed] @ np.linalg.pinv(covariance[np.ix_(fixed, fixed)], hermitian=True)
    stays = by_fixed @ covariance[fixed]
    rest = np.eye(len(F)) - F @ np.divide(F, variance[:, None], out=np.zeros_like(F), where=~fixed[:, None]).T
    return np.asarray(stays + weight * (covariance - stays) + (1 - weight) * rest @ (covariance - stays) @ rest.T)


@dataclass(frozen=True, eq=False)
class Whitened:
    """Effects in units of their standard deviation, without directions that no site has information about."""

    variance: Array
    F: Array  # (p, d)
    W: Array  # (V, d, d)
    c: Array  # (V, d)
    theta: Array  # (V, p) the mixed model's estimates at this variance
    full: FullEffects | None  # where there are too many directions to sample

    @classmethod
    def from_model(cls, model: MixedModel, slopes: Mask, together: float) -> Whitened:
        """Whiten by the model's variances, or by a mean of these and a common variance of slopes with this weight."""
        varying, variance = ~model.fixed, model.variance
        slopes = slopes & varying
        if together and slopes.sum() > 1:
            variance = np.where(slopes, together * variance[slopes].mean() + (1 - together) * variance, variance)
        root, S = np.sqrt(variance[varying]), model.precision[:, varying][:, :, varying]
        rest = (model.score - model.precision @ model.mean)[:, varying]
        if len(root) > FEW and (wide := cls._wide(model, variance, rest)) is not None:
            return wide
        scaled = root[:, None] * S * root
        values, vectors = np.linalg.eigh(scaled.mean(axis=0))
        directions = root[:, None] * signed(vectors)[:, values > SEEN]
        F = np.zeros((len(variance), directions.shape[1]))
        F[varying] = directions
        scaled[:, np.arange(len(root)), np.arange(len(root))] += 1.0
        theta = np.tile(model.mean, (len(S), 1))
        theta[:, varying] += root * np.linalg.solve(scaled, (root * rest)[:, :, None])[:, :, 0]
        W, c = directions.T @ S @ directions, rest @ directions
        return cls(variance, F, 0.5 * (W + np.swapaxes(W, 1, 2)), c, theta, None)

    @classmethod
    def _wide(cls, model: MixedModel, variance: Array, rest: Array) -> Whitened | None:
        """Whiten in the directions in which sites differ most, where there are too many to sample."""
        varying, V = ~model.fixed, len(rest)
        root = np.sqrt(variance[varying])
        scaled = model.matrices.part(varying).scaled(root, np.ones(V))
        if (np.linalg.eigvalsh(scaled.sum() / V) > SEEN).sum() <= FEW:
            return None
        full = FullEffects.from_likelihoods(scaled, root * rest, FEW)
        W, c = full.sampled()
        F = np.zeros((len(variance), full.turn.shape[1]))
        F[varying] = np.sqrt(full.stretch) * (root[:, None] * full.turn)
        return cls(variance, F, 0.5 * (W + np.swapaxes(W, 1, 2)), c, model.theta, full)


def with_population(found: Grouped, model: MixedModel, population: Population) -> tuple[Grouped, MixedModel]:
    """Return estimates and model, with fixed coefficients inserted and the others adjusted to them."""
    fixed = model.fixed
    if not fixed.any():
        return found, model
    square = np.ix_(fixed, fixed)
    C = population.covariance[square]

    def leaning(theta: Array, covariance: Array) -> tuple[Array, Array]:
        own = covariance[:, fixed][:, :, fixed]
        lean = covariance[:, :, fixed] @ np.linalg.pinv(own, hermitian=True)
        moved = theta + apply(lean, population.mean[fixed] - theta[:, fixed])
        moved[:, fixed] = population.mean[fixed]
        return moved, covariance + lean @ (C - own) @ np.swapaxes(lean, 1, 2)

    theta, covariance = leaning(found.theta, found.covariance)
    mean, mean_covariance = leaning(model.mean[None], found.mean_covariance[None])
    found = replace(found, theta=theta, covariance=covariance, mean_covariance=mean_covariance[0])
    if model.nested is not None:
        means = leaning(model.nested.mean, model.nested.covariance(model.mean_covariance))[0]
        model = replace(model, nested=replace(model.nested, mean=means))
    if (one := found.common) is not None:
        one_mean, one_covariance = leaning(one.mean[None], one.covariance[None])
        found = replace(found, common=one._replace(mean=one_mean[0], covariance=one_covariance[0]))
    return found, replace(model, mean=mean[0])
