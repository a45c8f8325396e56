"""What a fit remembers in standardised units: plain arrays, enough for new sites and for intervals of single sites."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import Array, Index
from fedkin.kin.options import SHARES
from fedkin.kin.quadratics import Units, apply

if TYPE_CHECKING:  # loads the compiled sampler
    from fedkin.kin.mixed import MixedModel
    from fedkin.kin.sampler.groups import Grouped
    from fedkin.kin.sampler.record import Record

#: States of all chains that are kept.
STATES = 60


@dataclass(frozen=True, eq=False)
class States:
    """Some states of the chains, evenly spaced.

    Attributes
    ----------
    weight : array (S,)
        Of each state among partitions; they sum to 1.
    share : int array (S,)
        Number of the share of the spread that is inside groups.
    z : int array (S, V)
        Group of each site.
    m, w : arrays (S, d)
        Means and variances of the groups' centres.
    """

    weight: Array
    share: Index
    z: Index
    m: Array
    w: Array


@dataclass(frozen=True, eq=False)
class Learned:
    """The fit in standardised units, sites in the order of the result.

    Attributes
    ----------
    units : Units
        The way to the units of the result.
    mean, mean_covariance : arrays (p,), (p, p)
        Of the population of sites; the covariance is what is open about the mean where effects around it are given.
    spread : array (p,)
        Variance of each coefficient between sites.
    noise : float
        Noise variance of a typical site.
    precision, score : arrays (V, p, p), (V, p)
        What the sites' own rows say: minus the log likelihood is ``theta'precision theta / 2 - score'theta``.
    F : array (p, d)
        Whitened effects to parameters; no columns where groups were not looked for.
    weight : float
        Of the model without groups.
    scales : array (R,)
        Probabilities that the spread is this multiple of the learned one, if there are no groups.
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
    spread: Array
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


def learned_from(units: Units, model: MixedModel, found: Grouped) -> Learned:
    """What to remember of a fit."""
    blend, states, p = found.blend, None, len(model.mean)
    if found.kept is not None:
        states = States(*found.kept) if len(found.kept.weight) else None
    elif blend is not None:
        chains = [
            _thinned(weight, record, len(blend.chains.records))
            for weight, record in zip(blend.chains.weights, blend.chains.records, strict=True)
        ]
        states = States(*(np.concatenate([getattr(one, item.name) for one in chains]) for item in fields(States)))
    return Learned(
        units=units,
        mean=model.mean,
        mean_covariance=found.mean_covariance,
        spread=found.spread,
        noise=float(np.exp(np.log(model.noise).mean())),
        precision=model.precision,
        score=model.score,
        F=found.F,
        weight=1.0 if blend is None else blend.weight,
        scales=np.zeros(len(SHARES)) if blend is None else blend.scales,
        states=states,
        one=found.one,
        one_mean=np.zeros(p) if found.common is None else found.common.mean,
        one_covariance=np.zeros((p, p)) if found.common is None else found.common.covariance,
    )


def _thinned(weight: float, record: Record, chains: int) -> States:
    lines = np.unique(np.linspace(0, len(record.z) - 1, STATES // chains).astype(int))
    each = np.full(len(lines), weight / len(lines))
    share = record.trace[lines, 2].astype(np.int64)
    return States(each, share, record.z[lines].astype(np.int64), record.m[lines], record.w[lines])
