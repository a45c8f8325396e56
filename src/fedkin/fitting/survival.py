"""Baseline hazards of sites, survival curves, and the scores of survival models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from fedkin._base import TINY, Array, Index
from fedkin.data import Federation
from fedkin.losses import Loss

#: Number of times at which the Brier score is integrated, and their range in quantiles of event times.
_GRID, _FIRST, _LAST = 50, 0.1, 0.9


@dataclass(frozen=True, eq=False)
class Baselines:
    """Cumulative baseline hazards of V sites, as step functions, for a row with the features ``at``.

    Attributes
    ----------
    at : array (q,)
        The features of the row, by default the means of all rows.
    times : tuple of V arrays (K_u,)
        Ascending; the last one is the site's last time, of an event or censored.
    hazards : tuple of V arrays (K_u, 2 + q)
        Cumulative hazard up to each time (Breslow's estimate, ties by Efron's method), its variance, and its gradient
        with respect to the coefficients.
    degrees : float
        Degrees of freedom of the variance between sites, for a site without rows; infinite for sites with rows.
    """

    at: Array
    times: tuple[Array, ...]
    hazards: tuple[Array, ...]
    degrees: float = np.inf

    @classmethod
    def from_rows(cls, loss: Loss, theta: Array, rows: Federation, at: Array | None = None) -> Baselines:
        """Estimate the baselines from the rows of V sites, given ``theta (V, q)``."""
        centre = rows.X.mean(axis=0) if at is None else at
        parts = [rows[site] for site in rows.sites]
        found = [
            loss.cumulative_hazard(own, part.X - centre, part.y, part.offset)
            for own, part in zip(theta, parts, strict=True)
        ]
        return cls(centre, tuple(times for times, _ in found), tuple(hazard for _, hazard in found))

    def take(self, sites: Iterable[int]) -> Baselines:
        """Return the baselines of some sites, by number."""
        chosen = list(sites)
        return Baselines(self.at, tuple(self.times[u] for u in chosen), tuple(self.hazards[u] for u in chosen))

    def pooled(self) -> Baselines:
        """Return the baseline of a new site: at each time, the mean hazard of the sites with rows still at risk.

        Sites have equal weights, as in the mean of their coefficients. The variance is that between sites plus that of
        their mean, both relative to the hazard and averaged up to each time with the hazard as weight. The hazards are
        constant once half of the sites have no rows at risk.
        """
        moments = np.unique(np.concatenate(self.times))
        steps, observed, V = np.zeros(len(moments)), np.zeros(len(moments)), len(self.times)
        for times, hazard in zip(self.times, self.hazards, strict=True):
            steps[np.searchsorted(moments, times)] += np.diff(hazard[:, 0], prepend=0.0)
            observed += moments <= times[-1]
        pooled = np.zeros((len(moments), 2 + len(self.at)))
        pooled[:, 0] = np.cumsum(steps / observed)
        values, own = np.stack([self.cumulative(u, moments)[:, :2] for u in range(V)], axis=2).transpose(1, 0, 2)
        here = moments[:, None] <= np.array([times[-1] for times in self.times])
        mean, own = (np.where(here, one, 0.0).sum(axis=1) / observed for one in (values, own))
        apart = np.where(here, (values - mean[:, None]) ** 2, 0.0).sum(axis=1) / np.maximum(observed - 1, 1)
        weight = np.diff(pooled[:, 0], prepend=0.0)[:, None]
        relative = np.column_stack([apart - own, apart / observed]) / np.where(mean > 0, mean, 1.0)[:, None] ** 2
        relative = np.cumsum(weight * relative, axis=0) / np.maximum(np.cumsum(weight, axis=0), TINY)
        last = np.flatnonzero(observed >= V / 2)[-1]
        relative[last:] = relative[last]
        pooled[:, 1] = pooled[:, 0] ** 2 * np.log1p(np.maximum(relative[:, 0], 0.0) + relative[:, 1])
        return Baselines(self.at, (moments,), (pooled,), max(V - 1.0, 1.0))

    def cumulative(self, u: int, times: Array) -> Array:
        """Return the entries of `hazards` ``(T, 2 + q)`` of site number u, constant after the site's last time."""
        found = [step_values(self.times[u], column, times, 0.0) for column in self.hazards[u].T]
        return np.column_stack(found)

    def survival(
        self, u: int, times: Array, hazard: Array, X: Array, covariance: Array | None = None, level: float = 0.95
    ) -> Array:
        """Return survival ``(n, T)`` of rows at site number u, or with the ends of intervals ``(3, n, T)``.

        ``hazard (n,)`` is the hazard of rows relative to the baseline, and ``X (n, q)`` holds their features relative
        to ``at``. A ``covariance`` of the coefficients adds intervals, normal for the logarithm of the cumulative
        hazard. The hazard of a site without rows is lognormal around its mean.
        """
        steps = self.cumulative(u, times)
        with np.errstate(divide="ignore", invalid="ignore"):
            centre = np.log(np.outer(hazard, steps[:, 0]))
            if covariance is None:
                return np.asarray(np.exp(-np.exp(centre)))
            relative = np.where(steps[:, :1] > 0, steps[:, 1:] / steps[:, :1], 0.0)
            baseline = relative[:, 0] / np.where(steps[:, 0] > 0, steps[:, 0], 1.0)
            away = X[:, None, :] + relative[:, 1:]
            width = baseline + np.einsum("ntq,qr,ntr->nt", away, covariance, away)
            middle = centre - 0.5 * baseline * np.isfinite(self.degrees)
            half = stdtrit(self.degrees, 0.5 + level / 2) * np.sqrt(width)
            return np.asarray(np.exp(-np.exp(np.stack([centre, middle + half, middle - half]))))

    def __post_init__(self) -> None:
        shapes = [(times.shape, (len(times), 2 + len(self.at))) for times in self.times]
        if not self.times or shapes != [((hazard.shape[0],), hazard.shape) for hazard in self.hazards]:
            raise ValueError("the baseline hazards are inconsistent")


def step_values(at: Array, values: Array, times: Array, before: float) -> Array:
    """Evaluate at ``times (T,)`` the step function with ``values (K,)`` from the times ``at (K,)`` onwards."""
    return np.append(before, values)[np.searchsorted(at, times, side="right")]


# --- scores ---------------------------------------------------------------------------------------------------------


class Concordance(NamedTuple):
    """Concordance: of two rows of a site, how often the one with the higher risk has the earlier event."""

    each: Array  # (V,), of every site; NaN where no two rows can be compared
    pairs: Array  # (V,), pairs of rows that can be compared

    @property
    def pooled(self) -> float:
        """The share over the pairs of all sites."""
        known = self.pairs > 0
        return float(np.average(self.each[known], weights=self.pairs[known])) if known.any() else float("nan")


def site_concordances(y: Array, risk: Array, starts: Index) -> Concordance:
    """Return Harrell's concordance at each site, from signed times ``y (n,)`` and ``risk (n,)``.

    A row with an event is compared with all rows with later times, and with rows censored at the same time. Equal risks
    count as one half.
    """
    each, pairs = np.full(len(starts) - 1, np.nan), np.zeros(len(starts) - 1)
    for u, (first, last) in enumerate(pairwise(starts.tolist())):
        time, event, own = np.abs(y[first:last]), y[first:last] > 0, risk[first:last]
        good = 0.0
        for row in np.flatnonzero(event).tolist():
            others = own[(time > time[row]) | ((time == time[row]) & ~event)]
            good += float((others < own[row]).sum() + 0.5 * (others == own[row]).sum())
            pairs[u] += len(others)
        if pairs[u]:
            each[u] = good / pairs[u]
    return Concordance(each, pairs)


def brier_times(train: Array, test: Array) -> Array:
    """Return times ``(T,)`` between quantiles of the events, within the observed times of training and held-out
    rows."""
    events = np.concatenate([train, test])
    events = events[events > 0]
    if not events.size:
        return np.empty(0)
    low, high = np.quantile(events, (_FIRST, _LAST))
    return np.unique(np.linspace(low, min(high, np.abs(train).max(), np.abs(test).max()), _GRID))


def integrated_brier(train: Array, test: Array, survival: Array, times: Array, starts: tuple[Index, Index]) -> float:
    """Return the Brier score of ``survival (n, T)`` at ``times (T,)``, averaged over them.

    Rows are weighted by the inverse probability of being uncensored (Graf et al. 1999), from the Kaplan-Meier estimate
    of each site's censoring in its training rows. ``starts`` are the starts of the sites in the training and the test
    rows. Rows beyond the last training time of their site have no weight.
    """
    score, mass = np.zeros(len(times)), np.zeros(len(times))
    for (a, b), (first, last) in zip(*(pairwise(one.tolist()) for one in starts), strict=True):
        if first == last:
            continue
        kept_at, kept = _uncensored(train[a:b])
        y, curves = test[first:last], survival[first:last]
        time, event = np.abs(y), y > 0
        at_own = step_values(kept_at, kept, np.nextafter(time, 0.0), 1.0)[:, None]  # just before
        dead, alive = event[:, None] & (time[:, None] <= times), time[:, None] > times
        chance = np.where(dead, at_own, step_values(kept_at, kept, times, 1.0))
        weight = np.divide(dead | alive, chance, out=np.zeros_like(chance), where=chance > 0)
        score += (weight * (alive - curves) ** 2).sum(axis=0)
        mass += len(y)
    return float(np.trapezoid(score / mass, times) / (times[-1] - times[0]))


def _uncensored(y: Array) -> tuple[Array, Array]:
    """Return times and the Kaplan-Meier estimate of not being censored up to each; events come first at a tie."""
    moments, at = np.unique(np.abs(y), return_inverse=True)
    gone, lost = np.bincount(at), np.bincount(at, weights=y < 0)
    left = len(y) - np.cumsum(gone) + lost  # at risk of being censored: later rows, and those censored now
    return moments, np.cumprod(1.0 - np.divide(lost, left, out=np.zeros(len(left)), where=left > 0))
