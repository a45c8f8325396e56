"""Groups inside the variance of a mixed model: whitened effects, chains over partitions, averages with no groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import betaln, expit

from fedkin._base import Array, Index, Mask
from fedkin.kin.chains import (
    AGREE,
    NEARLY,
    TEMPER,
    Chains,
    FullEffects,
    PilotChains,
    Sampling,
    States,
    effective_size,
    signed,
    split_rhat,
)
from fedkin.kin.likelihoods import apply, given_mean, shrunk
from fedkin.kin.mixed import MixedModel, OneModel, Population
from fedkin.kin.partitions import CONTINUUM, SHARES, GraphUse, Neighbours, Pairs, SiteLikelihoods, are_kin, unpacked
from fedkin.kin.sampler import MANY_SITES, MOST_PAIRS

#: With a weight of the mixed model above this there are no groups.
ALL_MIXED = 0.999
#: How firmly the weight of the mixed model is held at what the evidence says, when SURE hardly tells.
HOLD, HOLD_PER_GAIN = 4.0, 10.0
#: Partitions of each chain from which probabilities of pairs are computed when there are many sites.
DRAWS = 20
#: Log prior of scales of the mixed model's variance, which was learned: it is seldom less.
LOG_SCALES = np.log([0.02, 0.02, 0.02, 0.02, 0.02, 0.9])
#: Directions of parameters about which sites know less than this share of what their variance leaves open are left out.
SEEN = 0.02
#: Groups are looked for in at most so many directions, those in which sites differ most; they pool in all of them.
MOST_DIRECTIONS = 50
#: A graph is dropped when SURE without it is lower by this, or by twice the standard deviation of the difference.
GRAPH_MARGIN = 10.0
#: Probabilities of one model for all below this are nothing.
LEAST_ONE = 1e-6
#: With a higher probability that no site differs, two to one, covariances are those of one model for all.
MOSTLY_ONE = 2 / 3
#: With less weight than this of groups, variances that the model has apart are held together less.
HARDLY = 0.1
#: Shares below this are nothing, and from one minus this on all.
LEAST_SHARE = 0.02
#: Fewer sites than this have no groups.
FEWEST = 4


@dataclass(frozen=True, eq=False)
class Blend:
    """Effects ``b (V, d)`` in whitened units, averaged over partitions and the mixed model, which has no groups.

    Attributes
    ----------
    weight : float
        Of the mixed model.
    scales : array (R,)
        Probabilities that the variance is this multiple of the mixed model's, if there are no groups.
    gain : float
        Lower bound on the log evidence of groups, minus the log evidence of the mixed model.
    degrees, sure : float
        Effective degrees of freedom; Stein's unbiased estimate of the risk, up to a constant of the data.
    """

    chains: Chains
    weight: float
    b: Array
    scales: Array
    gain: float
    degrees: float
    sure: float

    @classmethod
    def from_chains(cls, W: Array, c: Array, chains: Chains) -> Blend:
        """Average over chains whose sites have likelihoods ``c'b - b'W b / 2``, ``W (V, d, d)`` and ``c (V, d)``."""
        sites = chains.sites
        scales, evidence = scales_without_groups(sites)
        b0, b1 = _without_groups(sites, scales), chains.average(lambda record: record.b)
        gain = float(chains.scores.max() - evidence)
        # one after the other: with many sites each of these arrays is large
        without = float(np.vdot(W, _covariance_without_groups(sites, scales, b0)))
        degrees = np.array([without, float(np.vdot(W, chains.covariance(b1)))])
        weight = weight_of_none(W, c, b0, b1, degrees, gain)
        b = weight * b0 + (1 - weight) * b1
        spent = float(degrees @ [weight, 1 - weight])
        sure = float((b * (apply(W, b) - 2 * c)).sum()) + 2 * spent
        return cls(chains, weight, b, scales, gain, spent, sure)

    @property
    def ungrouped(self) -> float:
        """Probability that there are no groups: the weight, which serves estimates best, or less by the evidence."""
        return min(self.weight, float(expit(-self.gain)))

    def covariance(self, some: int | None = None) -> Array:
        """Return covariances ``(n, d, d)`` of the first n sites' ``b``, what differs between groupings included."""
        sites, b = self.chains.sites, self.b[:some]
        b0, b1 = _without_groups(sites, self.scales)[:some], self.chains.average(lambda record: record.b)[:some]
        total = self.weight * (_covariance_without_groups(sites, self.scales, b0) + outer(b0 - b))
        total += (1 - self.weight) * (self.chains.covariance(b1) + outer(b1 - b))
        return np.asarray(total)

    def mixing(self) -> tuple[Array, Array]:
        """Return R-hat and effective size of effects, the traced sites' ``(n, d)``.

        What chains trace are expectations given partitions, and they are believed by as much as groups are: both count
        by what they are of the variance that is stated.
        """
        draws = (1 - self.weight) * self.chains.trace(lambda one: one.means)
        variance = np.einsum("ujj->uj", self.covariance(draws.shape[2]))
        return split_rhat(draws, variance), effective_size(draws, variance)

    def mixed(self) -> bool:
        """Return whether chains agree well enough, about partitions too: given these, effects are traced."""
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
        """Probability ``(V, V)`` that two sites have the same parameters but for the variance inside a group."""
        if len(self.b) > MOST_PAIRS:
            return self._drawn_pairs()
        chance = (1 - self.ungrouped) * self.chains.average(lambda record: record.same)
        chance += self.ungrouped * self.scales[0]
        chance = 0.5 * (chance + chance.T)
        np.fill_diagonal(chance, 1.0)
        return np.asarray(np.clip(chance, 0.0, 1.0))

    def _drawn_pairs(self) -> Pairs:
        """Return the same from some of the partitions; in a continuum nobody is kin."""
        states = self.chains.states(DRAWS)
        groups = np.array([len(np.unique(z)) for z in states.z])
        chance = (1 - self.ungrouped) * states.weight * are_kin(states.share, groups)
        drawn: Index = states.z[chance > 0].astype(np.int32)
        return Pairs(drawn, chance[chance > 0], float(self.ungrouped * self.scales[0]))


def _blend(W: Array, c: Array, pilots: PilotChains, sampling: Sampling) -> Blend:
    """Run chains from the pilots and average them; those that disagree run again, twice as long each time."""
    found, longer = Blend.from_chains(W, c, pilots.run_chains(sampling)), sampling.again(*c.shape)
    while longer is not None and not found.mixed():
        pilots.restart_stuck(found.chains)
        found, longer = Blend.from_chains(W, c, pilots.run_chains(longer)), longer.again(*c.shape)
    return found


def _without_groups(sites: SiteLikelihoods, scales: Array) -> Array:
    """Return effects ``(V, d)`` of the mixed model, averaged over scales of its variance."""
    return np.asarray(np.einsum("r,rud->ud", scales * SHARES, sites.c))


def _covariance_without_groups(sites: SiteLikelihoods, scales: Array, b: Array) -> Array:
    """Return covariances ``(n, d, d)`` of the first n sites, whose effects are ``b (n, d)``."""
    (n, d), total = b.shape, np.zeros((*b.shape, b.shape[1]))
    for chance, share, e, H in zip(scales, SHARES, sites.c[:, :n], sites.H[:, :n], strict=True):
        if chance > 1e-12:
            total += chance * (share * (np.eye(d) - share * unpacked(H, d)) + outer(share * e - b))
    return total


def scales_without_groups(sites: SiteLikelihoods) -> tuple[Array, float]:
    """Return probabilities ``(R,)`` that shares scale the mixed model's variance, and their joint log evidence."""
    # the evidence has all scales alike, which it owes to that of groups: theirs is a lower bound
    V, _ = sites.size
    pairs, edges = V * (V - 1) / 2, float(sites.neighbours.weight.sum()) / 2
    each = sites.k.sum(axis=1)
    evidence = float(np.logaddexp.reduce(each)) - np.log(len(SHARES))
    if edges:
        yes = 2 * (edges + 1) / (pairs + 2)
        evidence += float(betaln(edges + yes, pairs - edges + 2 - yes) - betaln(yes, 2 - yes))
    weight = np.exp(each + LOG_SCALES - (each + LOG_SCALES).max())
    return weight / weight.sum(), float(evidence)


def weight_of_none(W: Array, c: Array, b0: Array, b1: Array, degrees: Array, gain: float) -> float:
    """Return the weight w of ``b0``: least ``SURE(w) / 2 + hold / 2 (w - e)^2``, ``e`` its share of the evidence.

    The evidence of groups is a lower bound, loose where groups are weak: one that favours groups is to be believed,
    one that does not leaves the choice to SURE, which is unbiased whatever the model.
    """
    hold = HOLD + HOLD_PER_GAIN * max(gain, 0.0)
    slope, curvature = _sure(W, c, b0, b1, degrees)
    return float(np.clip((hold * expit(-gain) - slope) / (hold + curvature), 0.0, 1.0))


def chance_of_none(W: Array, c: Array, b0: Array, b1: Array, degrees: Array) -> float:
    """Return how probable ``b0`` may be at most, where SURE favours ``b1``: the two-sided tail of the difference."""
    # the weight of `weight_of_none` serves estimates best, but is no probability
    slope, curvature = _sure(W, c, b0, b1, degrees)
    if (more := 2 * slope + curvature) <= 0 or curvature <= 0:  # or both say the same
        return 1.0
    return math.erfc(more / math.sqrt(8 * curvature))  # SURE's standard deviation is twice the root of the curvature


def _sure(W: Array, c: Array, b0: Array, b1: Array, degrees: Array) -> tuple[float, float]:
    """Return slope and curvature of ``SURE(w) / 2`` of ``w b0 + (1 - w) b1`` at w = 0."""
    apart = b0 - b1
    slope = (apart * (apply(W, b1) - c)).sum() + degrees[0] - degrees[1]
    return float(slope), float((apart * apply(W, apart)).sum())


def outer(vectors: Array) -> Array:
    """Return ``v_u v_u'`` for ``(V, d)``."""
    return np.asarray(vectors[:, :, None] * vectors[:, None, :])


@dataclass(frozen=True, eq=False)
class Grouped:
    """Estimates with groups, in the units of the mixed model.

    ``mean_covariance`` is the uncertainty of the mean given effects, ``F (p, d)`` maps whitened effects to parameters;
    ``blend`` is None where there are too few sites or nothing differs between them. ``with_graph`` says whether the
    graph's edges count; ``one`` is the weight of one model for all, ``common``, and ``alike`` the probability that
    sites do not differ at all. Where groups were looked for in some directions, ``kept`` are partitions in all of them,
    and ``full`` has the effects there.
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
    alike: float = 0.0
    common: OneModel | None = None
    kept: States | None = None
    full: FullEffects | None = None

    def with_one_model(self, model: MixedModel, one: OneModel) -> Grouped:
        """Average these estimates with one model for all.

        Its weight is the probability that sites do not differ, or where the likelihood hardly tells, what SURE says:
        a graph may show groups that the variance alone does not. Estimates are averaged, covariances are those of one
        of the two, around the average: the mean of both would be too wide if sites are alike, and too narrow if not.
        """
        S, every = model.precision, np.tile(one.mean, (len(self.theta), 1))
        degrees = np.array([float(np.vdot(S.sum(axis=0), one.covariance)), self.degrees])
        weight = weight_of_none(S, model.score, every, self.theta, degrees, one.log_odds)
        if weight < LEAST_ONE:
            return self
        theta = (1 - weight) * self.theta + weight * one.mean
        centre, spread = (one.mean, one.covariance) if weight > MOSTLY_ONE else (self.theta, self.covariance)
        total = spread + outer(centre - theta)
        alike = min(weight, chance_of_none(S, model.score, every, self.theta, degrees))
        return replace(self, theta=theta, covariance=total, one=weight, alike=alike, common=one)

    def kinship(self) -> tuple[Array | Pairs, Array, float]:
        """Return probabilities of being kin, of 0, 1, 2... groups, and the weight of models without groups."""
        V, blend = len(self.theta), self.blend
        n_groups, weight = np.array([0.0, 1.0]), 1.0
        same: Array | Pairs = np.eye(V) if V <= MOST_PAIRS else Pairs(np.zeros((0, V), np.int32), np.zeros(0), 0.0)
        if blend is not None:
            same, weight = blend.same, blend.weight
            _, numbers, shares = np.moveaxis(blend.chains.trace(lambda one: one.trace[:, :3].astype(np.int64)), 2, 0)
            lines = np.where(are_kin(shares, numbers), numbers, 1)  # a continuum counts as one
            each = [np.bincount(line, minlength=int(lines.max()) + 1) / len(line) for line in lines]
            n_groups = (1 - blend.ungrouped) * (blend.chains.weights @ np.array(each))
            n_groups[1] += blend.ungrouped
        n_groups = (1 - self.alike) * n_groups
        n_groups[1] += self.alike
        if isinstance(same, Pairs):
            same = Pairs(same.labels, (1 - self.alike) * same.chance, self.alike + (1 - self.alike) * same.base)
        else:
            same = self.alike + (1 - self.alike) * same
        return same, n_groups, self.one + (1 - self.one) * weight

    def graph_use(self) -> tuple[GraphUse, tuple[float, float] | None]:
        """Return what was made of the graph: it counts when the odds of an edge differ by two standard deviations."""
        blend = self.blend
        if blend is None or not self.with_graph:
            return "ignored", None
        weights = blend.chains.weights
        rates = blend.chains.trace(lambda one: one.trace[:, 3:5])
        inside, between = (weights @ rates.mean(axis=1)).tolist()
        odds = np.log(rates / (1 - rates))
        contrast = odds[:, :, 0] - odds[:, :, 1]
        mean = float(weights @ contrast.mean(axis=1))
        deviation = float(np.sqrt(weights @ ((contrast - mean) ** 2).mean(axis=1)))
        if blend.weight > 0.5 or abs(mean) < 2 * deviation:
            return "ignored", (inside, between)
        return ("used" if mean > 0 else "inverted"), (inside, between)

    def sure(self, model: MixedModel) -> dict[str, float]:
        """Return unbiased estimates of ``sum_u e_u'S_u e_u``, errors ``e_u`` of sites, but for that of the noise."""
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
    """Find groups inside the variance of a mixed model."""
    # whitened by own variances, one for all slopes or a mean of both, by evidence: few sites make own ones noisy
    V = len(model.theta)
    several = bool(slopes.sum() > 1 and V < MANY_SITES)
    # very many coefficients are not asked, which takes long: half way
    alike = several and len(slopes) <= MOST_DIRECTIONS
    ends = [Whitened.from_model(model, slopes, share) for share in (0.0, 1.0)] if alike else []
    white, share = Whitened.from_model(model, slopes, 0.5 * several), 0.5 * several
    if V < FEWEST or not all(one.F.shape[1] for one in (*ends, white)):
        degrees, nothing = float(model.degrees.sum()), np.zeros((len(model.mean), 0))
        return Grouped(model.theta, model.covariance, degrees, model.variance, model.mean_covariance, nothing)
    pilots = PilotChains.from_starts(white.sites(neighbours), seed, sampling)
    if alike:
        pilots = pilots.run(sampling.burn, sampling.chains)
        asked = [pilots.in_units(end.sites(neighbours)).run(sampling.pilot, 1) for end in ends]
        # how far one variance for all slopes explains more: tempered, since it is by bounds; it saves parameters
        apart, together = (max(float(one.scores[0]), scales_without_groups(one.sites)[1]) for one in asked)
        share = _rounded(float(expit((together + float(slopes.sum()) - 1 - apart) / TEMPER)))
        white = Whitened.from_model(model, slopes, share)
        pilots = pilots.in_units(white.sites(neighbours))
        sampling = replace(sampling, burn=sampling.burn // 2)
    chosen = _blend(white.W, white.c, pilots, sampling)
    if alike and share > 0 and chosen.weight > 1 - HARDLY:  # without groups the variances stay apart
        share = _rounded(share * (1 - chosen.weight) / HARDLY)
        white = Whitened.from_model(model, slopes, share)
        chosen = _blend(white.W, white.c, pilots.in_units(white.sites(neighbours)), sampling)
    with_graph = neighbours.neighbour.size > 0
    if with_graph and guard:
        alone = replace(chosen.chains.sites, neighbours=Neighbours.none(V))
        bare = _blend(white.W, white.c, PilotChains.from_starts(alone, seed, sampling), sampling)
        difference = chosen.b - bare.b
        deviation = 2 * np.sqrt(max(float((difference * apply(white.W, difference)).sum()), 0.0))
        # where hardly anything differs between groups, the graph has drawn them: it stays if estimates gain by it
        margin = -GRAPH_MARGIN if chosen.continuum > 0.5 else max(GRAPH_MARGIN, 2 * deviation)
        if chosen.sure > bare.sure + margin:
            chosen, with_graph = bare, False
        del alone, bare  # with many sites the chains of the choice not taken are large
    if white.full is not None:
        return _in_all_directions(model, white.variance, white.full, chosen, with_graph)
    # the mixed model's effects at its own variance give way to those with groups
    F, W, sites, d = white.F, white.W, chosen.chains.sites, white.F.shape[1]
    theta, plain = white.theta + (chosen.b - sites.c[-1]) @ F.T, np.eye(d) - unpacked(sites.H[-1], d)
    open_mean = _open_mean(model.mean_covariance, np.sqrt(white.variance), F, chosen.weight)
    own, keep = given_mean(white.variance, model.precision)
    centre = own + keep @ open_mean @ np.swapaxes(keep, 1, 2)
    degrees = chosen.degrees + (float(np.vdot(model.precision, centre)) - float(np.vdot(W, plain)))
    covariance = centre + F @ (chosen.covariance() - plain) @ F.T
    return Grouped(theta, covariance, degrees, white.variance, open_mean, F, chosen, with_graph)


def _in_all_directions(
    model: MixedModel, variance: Array, full: FullEffects, chosen: Blend, with_graph: bool
) -> Grouped:
    """Return estimates with groups that were found in some directions, and pool in all."""
    root, weight = np.sqrt(variance), chosen.weight
    b, covariance, kept = full.effects(chosen.chains, weight, chosen.scales)
    values, vectors = np.linalg.eigh(full.W.sum() / len(b))
    open_mean = _open_mean(model.mean_covariance, root, root[:, None] * vectors[:, values > SEEN], weight)
    outer_root = np.outer(root, root)
    apart = open_mean / outer_root
    for u in range(len(b)):  # one site after another: such arrays are large
        covariance[u] = outer_root * (covariance[u] + shrunk(full.mixed[0], u, apart))
    theta, degrees = model.mean + root * b, float(np.vdot(model.precision, covariance))
    found = Grouped(theta, covariance, degrees, variance, open_mean, np.diag(root), chosen, with_graph)
    return replace(found, kept=kept, full=full)


def _rounded(share: float) -> float:
    """Return a share, or none or all of it where it is next to that."""
    return 0.0 if share < LEAST_SHARE else 1.0 if share > 1 - LEAST_SHARE else share


def _open_mean(covariance: Array, root: Array, F: Array, weight: float) -> Array:
    """Return the uncertainty of the mean where effects around it are given, ``(p, p)``."""
    # with groups only what is not in their directions: there their centres follow their members. Columns of F over the
    # standard deviations are orthonormal, and directions that nobody sees are orthogonal to them in these units
    rest = np.eye(len(F)) - F @ (F / root[:, None] ** 2).T
    return np.asarray(weight * covariance + (1 - weight) * rest @ covariance @ rest.T)


@dataclass(frozen=True, eq=False)
class Whitened:
    """Effects in units of their standard deviation, without directions that nobody sees."""

    variance: Array
    F: Array  # (p, d)
    W: Array  # (V, d, d)
    c: Array  # (V, d)
    theta: Array  # (V, p) the mixed model's estimates at this variance
    full: FullEffects | None  # where there are too many directions to sample

    @classmethod
    def from_model(cls, model: MixedModel, slopes: Mask, together: float) -> Whitened:
        """Whiten by the model's variances, or by a mean of those and of one for all slopes with this share."""
        variance, S = model.variance, model.precision
        if together:
            variance = np.where(slopes, together * variance[slopes].mean() + (1 - together) * variance, variance)
        root = np.sqrt(variance)
        rest = model.score - S @ model.mean
        if len(root) > MOST_DIRECTIONS and (wide := cls._wide(model, variance, rest)) is not None:
            return wide
        scaled = root[:, None] * S * root
        values, vectors = np.linalg.eigh(scaled.mean(axis=0))
        F = root[:, None] * signed(vectors)[:, values > SEEN]
        scaled[:, np.arange(len(root)), np.arange(len(root))] += 1.0
        effects = root * np.linalg.solve(scaled, (root * rest)[:, :, None])[:, :, 0]
        W, c = F.T @ S @ F, rest @ F
        return cls(variance, F, 0.5 * (W + np.swapaxes(W, 1, 2)), c, model.mean + effects, None)

    @classmethod
    def _wide(cls, model: MixedModel, variance: Array, rest: Array) -> Whitened | None:
        """Whiten in the directions in which sites differ most, where there are too many to sample."""
        root, V = np.sqrt(variance), len(rest)
        scaled = model.matrices.scaled(root, np.ones(V))
        if (np.linalg.eigvalsh(scaled.sum() / V) > SEEN).sum() <= MOST_DIRECTIONS:
            return None
        full = FullEffects.from_likelihoods(scaled, root * rest, MOST_DIRECTIONS)
        W, c = full.sampled()
        F = np.sqrt(full.stretch) * (root[:, None] * full.turn)
        return cls(variance, F, 0.5 * (W + np.swapaxes(W, 1, 2)), c, model.theta, full)

    def sites(self, neighbours: Neighbours) -> SiteLikelihoods:
        return SiteLikelihoods.from_effects(self.W, self.c, neighbours)


# --- fixed coefficients and districts -------------------------------------------------------------------------------


def groups_of(
    model: MixedModel, slopes: Mask, neighbours: Neighbours, seed: int, sampling: Sampling, *, guard: bool = True
) -> Grouped:
    """Find groups by the coefficients that vary, and return the estimates of all; of nested sites as they are."""
    if model.nested is not None:
        degrees, none = float(model.degrees.sum()), np.zeros((len(model.mean), 0))
        return Grouped(model.theta, model.covariance, degrees, model.variance, model.mean_covariance, none)
    fixed, varying = model.fixed, ~model.fixed
    found = find_groups(model.given_fixed(), slopes[varying], neighbours, seed, sampling, guard=guard)
    if not fixed.any():
        return found
    given, lean = np.zeros((1 + len(model.theta), len(fixed), len(fixed))), model.lean()
    given[:, varying[:, None] & varying] = np.concatenate([found.mean_covariance[None], found.covariance]).reshape(
        len(given), -1
    )
    # how everything leans on the fixed ones
    border = np.zeros((len(given), len(fixed), int(fixed.sum())))
    border[:, varying], border[:, fixed] = lean, np.eye(int(fixed.sum()))
    more = border @ model.mean_covariance[np.ix_(fixed, fixed)] @ np.swapaxes(border, 1, 2)
    theta, variance, F = model.theta.copy(), model.variance.copy(), np.zeros((len(fixed), found.F.shape[1]))
    theta[:, varying], variance[varying], F[varying] = found.theta, found.variance, found.F
    return replace(
        found,
        theta=theta,
        covariance=given[1:] + more[1:],
        degrees=found.degrees + float(np.vdot(model.precision, more[1:])),
        variance=variance,
        mean_covariance=given[0] + more[0],
        F=F,
    )


def with_population(found: Grouped, model: MixedModel, population: Population) -> tuple[Grouped, MixedModel]:
    """Return both with the population's fixed coefficients, and others as these let them be."""
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
        found = replace(found, common=OneModel(one.log_odds, one_mean[0], one_covariance[0]))
    return found, replace(model, mean=mean[0])
