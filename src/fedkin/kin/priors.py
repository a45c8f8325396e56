"""What is believed about spreads before any row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkin._base import Array, Mask

#: With fewer sites than this the likelihood of a spread does not fall fast enough for a prior that rises.
FEWEST = 4


@dataclass(frozen=True)
class Priors:
    """What is believed before any row, in standardised units.

    Attributes
    ----------
    likeness : float
        Standard deviation of the slopes' log spreads around their mean: it steadies few sites and many columns.
        Infinite to leave them apart.
    log_spread : (float, float)
        Mean and standard deviation of any log spread, a very weak hold against running away.
    ridge : float or None
        Variance of the slopes' means; None to learn it.
    level : float
        Power of the slopes' spread, a variance, in the prior of its level. With 1/2 the density of the standard
        deviation rises from 0 in proportion (Chung et al. 2013), so that the spread does not come out as nothing where
        the likelihood hardly tells: it is then about 0.7 of its standard error. Intercepts have none: they seldom
        agree, and where they do another direction would only blur groups. Left out with fewer than `FEWEST` sites.
    """

    likeness: float = 0.7
    log_spread: tuple[float, float] = (-8.0, 20.0)
    ridge: float | None = None
    level: float = 0.5

    def of(self, logs: Array, slopes: Mask, V: int) -> tuple[float, Array, Array]:
        """The log prior of log spreads ``(p,)`` of V sites, its gradient, and minus its second derivatives.

        Examples
        --------
        >>> import numpy as np
        >>> from fedkin.kin import Priors
        >>> value, gradient, _ = Priors(log_spread=(0.0, np.inf)).of(np.zeros(2), np.ones(2, dtype=bool), 10)
        >>> value, gradient.tolist()
        (0.0, [0.25, 0.25])
        """
        value, gradient, curvature = 0.0, np.zeros(len(logs)), np.zeros((len(logs), len(logs)))
        if slopes.sum() > 1 and np.isfinite(self.likeness):
            apart = np.where(slopes, logs - logs[slopes].mean(), 0.0) / self.likeness
            value -= 0.5 * float(apart @ apart)
            gradient -= apart / self.likeness
            curvature += (np.diag(slopes * 1.0) - np.outer(slopes, slopes / slopes.sum())) / self.likeness**2
        if self.level and slopes.any() and V >= FEWEST:
            lift = self.level * slopes / slopes.sum()
            value += float(lift @ logs)
            gradient += lift
        centre, width = self.log_spread
        if np.isfinite(width):
            value -= 0.5 * float((((logs - centre) / width) ** 2).sum())
            gradient -= (logs - centre) / width**2
            curvature += np.eye(len(logs)) / width**2
        return value, gradient, curvature

    def freedom(self, logs: Array, slopes: Mask, information: Array) -> float:
        """What the log evidence is less by because slopes have spreads of their own, which the likelihood does not say.

        Laplace's approximation of the integral over the log spreads' differences, about which the likelihood tells
        ``information (p, p)``: the log prior where they are, and how much narrower than the prior they are known.
        """
        if slopes.sum() < 2 or not np.isfinite(self.likeness):
            return 0.0
        apart = (logs[slopes] - logs[slopes].mean()) / self.likeness
        told = information[np.ix_(slopes, slopes)] * self.likeness**2
        told = told - told.mean(axis=0)
        told = told - told.mean(axis=1)[:, None]
        return float(0.5 * apart @ apart + 0.5 * np.linalg.slogdet(np.eye(len(told)) + told)[1])
