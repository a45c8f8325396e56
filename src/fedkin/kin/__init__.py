"""Partial pooling that finds who is alike, from one message per site, and says how sure it is.

In: sums over the rows of each site. Out: a mean and a spread per coefficient, estimates per site with covariances.
Imports: `stats`, `solvers` (the toolkit for kernels) and below.

`quadratics` are the sites' losses as sums, and their common units; `mixed` learns mean, spread and noise from them.
Inside that spread `groups` finds sites that are alike: `starts` and `chains` drive the compiled sampler of `kernels`,
and `diagnostics` say how well it has mixed.
"""

from __future__ import annotations

from fedkin.kin.diagnostics import effective_size, split_rhat
from fedkin.kin.mixed import MixedModel, Priors, fit_mixed
from fedkin.kin.quadratics import Quadratics, Units, common_units

__all__ = ["MixedModel", "Priors", "Quadratics", "Units", "common_units", "effective_size", "fit_mixed", "split_rhat"]
