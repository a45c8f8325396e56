"""Where a fit begins that has an earlier one to go by."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from fedkin._base import Array
from fedkin.kin.result import Kin

#: Spreads begin no lower: from nothing none of them would rise again.
LEAST_SPREAD = 1e-4
#: Where the variance of the slopes' means begins, which results do not keep.
RIDGE = 0.1


@dataclass(frozen=True, eq=False)
class Beginning:
    """What an earlier result says, for the sites of the next fit.

    Attributes
    ----------
    theta : array (V, p)
        Estimates in the user's units; the mean for a site that the earlier fit did not have.
    mean : array (p,)
    spread : array (p,)
        Variances between sites, in standardised units.
    parameters : array (p + 2,)
        As in `MixedModel`.
    """

    theta: Array
    mean: Array
    spread: Array
    parameters: Array

    @classmethod
    def of(cls, start: Kin, devices: Sequence[Hashable], names: Sequence[str]) -> Beginning | None:
        """The beginning for these sites; None where the earlier fit had other parameters."""
        if len(start.names) != len(names):
            return None
        place = {device: u for u, device in enumerate(start.devices)}
        mean = np.asarray(start.mean)
        theta = np.array([start.theta[place[one]] if one in place else mean for one in devices])
        spread = np.maximum(start.learned.spread, LEAST_SPREAD)
        noise = max(start.learned.noise, LEAST_SPREAD)
        return cls(theta, mean, spread, np.log(np.concatenate([spread, [RIDGE, noise]])))
