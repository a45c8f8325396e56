"""Survival: targets, baseline hazards of sites, concordance and the Brier score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin._base import Array, Index
from fedkin.data import Federation
from fedkin.errors import DataError, ModelFileError
from fedkin.losses import Loss

#: Times at which the Brier score is integrated, and the quantiles of all times of events between which they lie.
_GRID, _FIRST, _LAST = 50, 0.1, 0.9


@dataclass(frozen=True, eq=False)
class Baselines:
    """Cumulative hazards of V sites for a row with the features ``at``: steps at the times of events.

    Attributes
    ----------
    at : array (q,)
        The features of the row, by default the means of all rows.
    times : tuple of V arrays (K_u,)
        Ascending; the last one is the site's last time, of an event or censored.
    hazards : tuple of V arrays (K_u,)
        Cumulative hazard up to each time (Breslow's estimate, ties by Efron's method).
    """

    at: Array
    times: tuple[Array, ...]
    hazards: tuple[Array, ...]

    @classmethod
    def from_rows(cls, loss: Loss, theta: Array, rows: Federation, at: Array | None = None) -> Baselines:
        """Return the baselines that the rows of V sites have, given ``theta (V, q)``."""
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
        """Return the baseline of a new site: at every time, the mean hazard of the sites that still observe rows.

        Every site counts alike, as in the mean of their coefficients.
        """
        moments = np.unique(np.concatenate(self.times))
        steps, observed = np.zeros(len(moments)), np.zeros(len(moments))
        for times, hazard in zip(self.times, self.hazards, strict=True):
            steps[np.searchsorted(moments, times)] += np.diff(hazard, prepend=0.0)
            observed += moments <= times[-1]
        return Baselines(self.at, (moments,), (np.cumsum(steps / observed),))

    def cumulative(self, u: int, times: Array) -> Array:
        """Return the cumulative hazard ``(T,)`` of site number u at ``times (T,)``; it stays after the site's last."""
        return step_values(self.times[u], self.hazards[u], times, 0.0)

    def plain(self) -> dict[str, Any]:
        """Return the baselines as JSON can hold them."""
        sites = [{"time": t, "hazard": h} for t, h in zip(self.times, self.hazards, strict=True)]
        return {"at": self.at, "sites": sites}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Baselines:
        """Read what `plain` returned."""
        try:
            arrays = [[np.array(one[name], dtype=np.float64) for one in plain["sites"]] for name in ("time", "hazard")]
            made = cls(np.array(plain["at"], dtype=np.float64), *map(tuple, arrays))
            good = all(len(t) == len(h) > 0 for t, h in zip(made.times, made.hazards, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelFileError(f"the baseline hazards cannot be read: {error}") from None
        if not good:
            raise ModelFileError("the baseline hazards do not hold together")
        return made


def step_values(at: Array, values: Array, times: Array, before: float) -> Array:
    """Return a function that steps to ``values (K,)`` at the times ``at (K,)``, at ``times (T,)``."""
    return np.append(before, values)[np.searchsorted(at, times, side="right")]


# --- targets ------------------------------------------------------------------------------------------------------


def survival_target(y: ArrayLike) -> Array:
    """Return times ``(n,)`` with a minus sign where they are censored.

    Parameters
    ----------
    y : structured array (n,), or array (n, 2)
        As in scikit-survival, with a boolean field of events and a field of times; or columns of events (0 or 1) and
        times.

    Examples
    --------
    >>> survival_target([(True, 2.0), (False, 3.0)]).tolist()
    [2.0, -3.0]
    """
    raw: NDArray[Any] = np.asarray(y)
    if raw.dtype.names is not None:
        kinds = {name: raw.dtype[name].kind for name in raw.dtype.names}
        events, times = ([n for n, k in kinds.items() if (k == "b") == wanted] for wanted in (True, False))
        if raw.ndim != 1 or len(events) != 1 or len(times) != 1 or kinds[times[0]] not in "fiu":
            raise DataError(f"y needs a boolean field of events and a numeric field of times, got {raw.dtype}")
        event, time = raw[events[0]], raw[times[0]].astype(np.float64)
    elif raw.ndim == 2 and raw.shape[1] == 2 and raw.dtype.kind in "biuf":
        event, time = raw[:, 0], raw[:, 1].astype(np.float64)
        if wrong := [one for one in np.unique(event).tolist() if one not in (0, 1)]:
            raise DataError(f"the first column of y is 1 for an event and 0 for a censored time, got {wrong[0]:g}")
    else:
        raise DataError(
            "y must be a structured array with a boolean field of events and a field of times, or an array (n, 2) of "
            f"events and times, got {raw.dtype} of shape {raw.shape}"
        )
    if (bad := ~(np.isfinite(time) & (time > 0))).any():
        row = int(np.argmax(bad))
        raise DataError(f"row {row}: the time is {time[row]:g}, expected a number above 0")
    return np.where(event.astype(bool), time, -time)


# --- scores -------------------------------------------------------------------------------------------------------


class Concordance(NamedTuple):
    """How often, of two rows of a site, the one with the higher risk has the earlier event."""

    each: Array  # (V,), of every site; NaN where no two rows can be compared
    pairs: Array  # (V,), pairs of rows that can be compared

    @property
    def pooled(self) -> float:
        """The share over the pairs of all sites."""
        known = self.pairs > 0
        return float(np.average(self.each[known], weights=self.pairs[known])) if known.any() else float("nan")


def site_concordances(y: Array, risk: Array, starts: Index) -> Concordance:
    """Return Harrell's concordance of rows at each site, from signed times ``y (n,)`` and ``risk (n,)``.

    A row with an event is compared with all rows of later times, and with those censored at the same time. Equal risks
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
    """Return times ``(T,)`` between quantiles of the events, within what training and held-out rows observe."""
    events = np.concatenate([train, test])
    events = events[events > 0]
    if not events.size:
        return np.empty(0)
    low, high = np.quantile(events, (_FIRST, _LAST))
    return np.unique(np.linspace(low, min(high, np.abs(train).max(), np.abs(test).max()), _GRID))


def integrated_brier(train: Array, test: Array, survival: Array, times: Array, starts: tuple[Index, Index]) -> float:
    """Return the Brier score of ``survival (n, T)`` at ``times (T,)``, averaged over them.

    Rows count by the inverse probability of being observed (Graf et al. 1999), by the Kaplan-Meier estimate of each
    site's censoring in its training rows; ``starts`` are those of sites in training and test. Rows whose censoring time
    no training row of the site reaches have no weight.
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
