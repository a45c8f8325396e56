"""Groups inside the spread of a mixed model: whitening, chains, the graph's guard."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedkin._base import Array, Mask
from fedkin.kin.matrices import Dense, shrunk
from fedkin.kin.mixed import MixedModel, OneModel
from fedkin.kin.options import MANY_SITES, MOST_PAIRS, TEMPER, Sampling, are_kin
from fedkin.kin.pairs import Pairs
from fedkin.kin.quadratics import apply
from fedkin.kin.sampler.blend import Blend, blend, chance_of_none, outer, scales_without_groups, weight_of_none
from fedkin.kin.sampler.chains import Scouts, scout
from fedkin.kin.sampler.neighbours import Neighbours
from fedkin.kin.sampler.record import Record
from fedkin.kin.sampler.sites import Sites, integrate_effects
from fedkin.kin.sampler.wide import Kept, Whole

#: Directions of parameters about which sites know less than this share of what their spread leaves open are left out.
SEEN = 0.02
#: Groups are looked for in at most so many directions, those in which sites differ most; they pool in all of them.
MOST_DIRECTIONS = 50
#: A graph is dropped when SURE without it is lower by this, or by twice the standard deviation of the difference.
GRAPH_MARGIN = 10.0
#: Probabilities of one model for all below this are nothing.
LEAST_ONE = 1e-6
#: With a higher probability that no site differs, two to one, covariances are those of one model for all.
MOSTLY_ONE = 2 / 3
#: With less weight than this of groups, spreads that the model has apart are held together less.
HARDLY = 0.1
#: Shares below this are nothing, and from one minus this on all.
LEAST_SHARE = 0.02
#: Fewer sites than this have no groups.
FEWEST = 4


@dataclass(frozen=True, eq=False)
class Grouped:
    """Estimates with groups, in the units of the mixed model.

    ``mean_covariance`` is what is open about the mean given effects, ``F (p, d)`` maps whitened effects to parameters;
    ``blend`` is None where there are too few sites or nothing differs between them.
    ``with_graph`` says whether the graph's edges count, ``sure_other`` the SURE of the choice not taken, ``one`` is the
    weight of one model for all, ``common``, and ``alike`` the probability that sites do not differ at all. Where groups
    were looked for in some directions, ``kept`` are partitions in all of them, and ``whole`` is what sites say there.
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
    alike: float = 0.0
    common: OneModel | None = None
    kept: Kept | None = None
    whole: Whole | None = None

    @classmethod
    def none(cls, model: MixedModel) -> Grouped:
        """The mixed model alone: nobody has looked for groups."""
        return cls(
            theta=model.theta,
            covariance=model.covariance,
            degrees=float(model.degrees.sum()),
            spread=model.spread,
            mean=model.mean,
            mean_covariance=model.mean_covariance,
            F=np.zeros((len(model.mean), 0)),
            blend=None,
            with_graph=False,
            sure_other=None,
        )

    def without_spread(self, model: MixedModel, one: OneModel) -> Grouped:
        """The same, averaged with one model for all.

        Its weight is the probability that sites do not differ, or where the likelihood hardly tells, what SURE says:
        a graph may show groups that the spread alone does not. Estimates are averaged, covariances are those of one of
        the two, around the average: the mean of both would be too wide if sites are alike, and too narrow if not.
        """
        S, every = model.precision, np.tile(one.mean, (len(self.theta), 1))
        degrees = np.array([float(np.vdot(S.sum(axis=0), one.covariance)), self.degrees])
        weight = weight_of_none(S, model.score, every, self.theta, degrees, one.log_odds)
        if weight < LEAST_ONE:
            return self
        theta = (1 - weight) * self.theta + weight * one.mean
        if weight > MOSTLY_ONE:
            total = one.covariance + outer(one.mean - theta)
        else:
            total = self.covariance + outer(self.theta - theta)
        alike = min(weight, chance_of_none(S, model.score, every, self.theta, degrees))
        return replace(self, theta=theta, covariance=total, one=weight, alike=alike, common=one)

    def kinship(self) -> tuple[Array | Pairs, Array, float]:
        """Probabilities of being kin, of 0, 1, 2... groups, and the weight of models without groups in estimates."""
        V, blend = len(self.theta), self.blend
        n_groups, weight = np.array([0.0, 1.0]), 1.0
        same: Array | Pairs = np.eye(V) if V <= MOST_PAIRS else Pairs(np.zeros((0, V), np.int32), np.zeros(0), 0.0)
        if blend is not None:
            same, weight = blend.same, blend.weight
            lines = blend.chains.trace(_numbers)
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


def _numbers(record: Record) -> Array:
    """Numbers of groups, one in a continuum."""
    groups, share = record.trace[:, 1].astype(np.int64), record.trace[:, 2].astype(np.int64)
    return np.asarray(np.where(are_kin(share, groups), groups, 1))


def find_groups(
    model: MixedModel, slopes: Mask, neighbours: Neighbours, seed: int, sampling: Sampling, *, guard: bool = True
) -> Grouped:
    """Groups inside the spread of a mixed model.

    Effects are whitened by their own spreads, by one spread for all slopes, or by a mean of both, as far as either
    explains the data better: spreads that were estimated apart are noisy, unless there are many sites.
    """
    V = len(model.theta)
    several = bool(slopes.sum() > 1 and V < MANY_SITES)
    # very many coefficients are not asked, which takes long: half way
    alike = several and len(slopes) <= MOST_DIRECTIONS
    ends = [_White.of(model, slopes, share) for share in (0.0, 1.0)] if alike else []
    white, share = _White.of(model, slopes, 0.5 * several), 0.5 * several
    if V < FEWEST or not all(one.F.shape[1] for one in (*ends, white)):
        return Grouped.none(model)
    scouts = scout(white.sites(neighbours), seed, sampling)
    if alike:
        scouts = scouts.walk(sampling.burn, sampling.chains)
        asked = [scouts.in_units(end.sites(neighbours)).walk(sampling.scout, 1) for end in ends]
        share = _share_alike(asked, slopes)
        white = _White.of(model, slopes, share)
        scouts = scouts.in_units(white.sites(neighbours))
        sampling = replace(sampling, burn=sampling.burn // 2)
    chosen = blend(white.W, white.c, scouts, sampling)
    if alike and share > 0 and chosen.weight > 1 - HARDLY:  # without groups the spreads stay apart
        share = _ends(share * (1 - chosen.weight) / HARDLY)
        white = _White.of(model, slopes, share)
        chosen = blend(white.W, white.c, scouts.in_units(white.sites(neighbours)), sampling)
    with_graph, other = neighbours.neighbour.size > 0, None
    if with_graph and guard:
        alone = chosen.chains.sites.with_neighbours(Neighbours.none(V))
        bare = blend(white.W, white.c, scout(alone, seed, sampling), sampling)
        apart = chosen.b - bare.b
        deviation = 2 * np.sqrt(max(float((apart * apply(white.W, apart)).sum()), 0.0))
        other = bare.sure
        # where hardly anything differs between groups, the graph has drawn them: it stays if estimates gain by it
        margin = -GRAPH_MARGIN if chosen.continuum > 0.5 else max(GRAPH_MARGIN, 2 * deviation)
        if chosen.sure > bare.sure + margin:
            chosen, other, with_graph = bare, chosen.sure, False
        del alone, bare  # with many sites the chains of the choice not taken are large
    if white.whole is not None:
        return _in_all_directions(model, white.spread, white.whole, chosen, with_graph, other)
    F, W, plain = white.F, white.W, chosen.plain_covariance()
    theta = white.theta + (chosen.b - chosen.plain) @ F.T
    open_mean = _open_mean(model.mean_covariance, F, chosen.weight)
    centre = white.covariance(model, open_mean)
    degrees = chosen.degrees + (float(np.vdot(model.precision, centre)) - float(np.vdot(W, plain)))
    covariance = centre + F @ (chosen.covariance() - plain) @ F.T
    return Grouped(theta, covariance, degrees, white.spread, model.mean, open_mean, white.F, chosen, with_graph, other)


def _in_all_directions(
    model: MixedModel, spread: Array, whole: Whole, chosen: Blend, with_graph: bool, other: float | None
) -> Grouped:
    """Estimates with groups that were found in some directions, and pool in all."""
    root, weight = np.sqrt(spread), chosen.weight
    b, covariance, kept = whole.effects(chosen.chains, weight, chosen.scales)
    values, vectors = np.linalg.eigh(whole.W.sum() / len(b))
    open_mean = _open_mean(model.mean_covariance, root[:, None] * vectors[:, values > SEEN], weight)
    apart, outer_root = open_mean / np.outer(root, root), np.outer(root, root)
    for u in range(len(b)):  # one site after another: such arrays are large
        covariance[u] = outer_root * (covariance[u] + shrunk(whole.mixed[0], u, apart))
    theta, degrees = model.mean + root * b, float(np.vdot(model.precision, covariance))
    F = np.diag(root)
    return Grouped(
        theta, covariance, degrees, spread, model.mean, open_mean, F, chosen, with_graph, other, kept=kept, whole=whole
    )


def _share_alike(scouts: list[Scouts], slopes: Mask) -> float:
    """How far one spread for all slopes explains the data better than spreads apart: tempered, since it is by bounds.

    It saves a parameter for each slope but one.
    """
    apart, alike = (max(float(one.scores[0]), scales_without_groups(one.sites)[1]) for one in scouts)
    ahead = (alike + float(slopes.sum()) - 1 - apart) / TEMPER
    return _ends(1.0 / (1.0 + float(np.exp(-np.clip(ahead, -50.0, 50.0)))))


def _ends(share: float) -> float:
    """A share, or none or all of it where it is next to that."""
    return 0.0 if share < LEAST_SHARE else 1.0 if share > 1 - LEAST_SHARE else share


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
    def of(cls, model: MixedModel, slopes: Mask, together: float) -> _White:
        """In units of the model's spreads, or of a mean of those and of one for all slopes with this share."""
        spread, S = model.spread, model.precision
        if together:
            spread = np.where(slopes, together * spread[slopes].mean() + (1 - together) * spread, spread)
        root = np.sqrt(spread)
        rest = model.score - S @ model.mean
        if len(root) > MOST_DIRECTIONS and (wide := cls._wide(model, spread, rest)) is not None:
            return wide
        scaled = root[:, None] * S * root
        values, vectors = np.linalg.eigh(scaled.mean(axis=0))
        # LAPACK leaves signs to rounding: fixed, sums from rows and from summaries are sampled alike
        vectors *= np.where(1.0 / np.sqrt(np.arange(2.0, len(root) + 2)) @ vectors < 0, -1.0, 1.0)
        F = root[:, None] * vectors[:, values > SEEN]
        scaled[:, np.arange(len(root)), np.arange(len(root))] += 1.0
        effects = root * np.linalg.solve(scaled, (root * rest)[:, :, None])[:, :, 0]
        W, c = F.T @ S @ F, rest @ F
        return cls(spread, F, 0.5 * (W + np.swapaxes(W, 1, 2)), c, model.mean + effects, None)

    @classmethod
    def _wide(cls, model: MixedModel, spread: Array, rest: Array) -> _White | None:
        """In the directions in which sites differ most, where there are too many to sample."""
        root, V = np.sqrt(spread), len(rest)
        S = Dense(model.precision) if model.short is None else model.short
        scaled = S.scaled(root, np.ones(V))
        if (np.linalg.eigvalsh(scaled.sum() / V) > SEEN).sum() <= MOST_DIRECTIONS:
            return None
        whole = Whole.of(scaled, root * rest, MOST_DIRECTIONS)
        W, c = whole.sampled()
        F = np.sqrt(whole.stretch) * (root[:, None] * whole.turn)
        return cls(spread, F, 0.5 * (W + np.swapaxes(W, 1, 2)), c, model.theta, whole)

    def sites(self, neighbours: Neighbours) -> Sites:
        """What sites say about groups."""
        return integrate_effects(self.W, self.c, neighbours)

    def covariance(self, model: MixedModel, open_mean: Array) -> Array:
        """Covariances ``(V, p, p)`` of the mixed model's estimates at this spread, with so much open about the mean."""
        root, S = np.sqrt(self.spread), model.precision
        own = np.linalg.inv(np.eye(len(root)) + root[:, None] * S * root) * np.outer(root, root)
        keep = np.eye(len(root)) - own @ S
        return np.asarray(own + keep @ open_mean @ np.swapaxes(keep, 1, 2))
