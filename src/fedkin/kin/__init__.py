"""Partial pooling that finds who is alike, from one message per site, and says how sure it is.

In: sums over the rows of each site. Out: a mean and a spread per coefficient, estimates per site with covariances.
Imports: `stats`, `solvers` (the toolkit for kernels) and below.

`quadratics` are the sites' losses as sums, and their common units; `mixed` learns mean, spread and noise from them.
"""

from __future__ import annotations

from fedkin.kin.mixed import MixedModel, Priors, fit_mixed
from fedkin.kin.quadratics import Quadratics, Units, common_units

__all__ = ["MixedModel", "Priors", "Quadratics", "Units", "common_units", "fit_mixed"]
