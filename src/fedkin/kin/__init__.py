"""Partial pooling that finds who is alike, from one message per site, and says how sure it is.

In: a `Federation` or `Summaries`, and perhaps a `Graph`. Out: a `Kin`: a mean and a spread per coefficient, estimates
per site with covariances, probabilities of being kin, groups. Imports: `core`, `solvers` (the toolkit for kernels) and
below.

| where | what it does |
|---|---|
| `find` | leads from `sources` (rows or summaries) to the result; `beginning` where an earlier one is known |
| `quadratics`, `mixed` | the sites' losses as sums, in common units; mean, spread and noise learned from them |
| `matrices` | the sites' curvatures, whole or of low rank |
| `sampler`, `kernels` | groups inside that spread (their prior: `partitions`); the compiled loops, which a fit loads |
| `display`, `pairs` | probabilities cut into groups, and whether they are resolved; probabilities of many sites |
| `result` | `Kin` and what can be asked of it: intervals, contrasts, predictions, new sites |

`options` has the numbers that sampler and results share, `diagnostics` says how well chains have mixed;
`covariates` makes a graph of what is known about sites, `special` has what scipy takes long to load.
To change when groups count as resolved: `display`. To add a question that a fit can answer: `result`.
"""

from __future__ import annotations

from fedkin.kin.covariates import (
    Covariates,
    covariate_graph,
    covariate_names,
    covariate_remarks,
    hint_of,
    read_covariates,
)
from fedkin.kin.diagnostics import effective_size, split_rhat
from fedkin.kin.display import display_groups
from fedkin.kin.find import find_kin
from fedkin.kin.mixed import MixedModel, fit_mixed
from fedkin.kin.options import QUICK, Length
from fedkin.kin.pairs import Pairs, in_order
from fedkin.kin.priors import Priors
from fedkin.kin.quadratics import Quadratics, Units, common_units
from fedkin.kin.result import (
    Contrast,
    Diagnostics,
    Joined,
    Kin,
    Learned,
    Predicted,
    States,
)

__all__ = [
    "QUICK",
    "Contrast",
    "Covariates",
    "Diagnostics",
    "Joined",
    "Kin",
    "Learned",
    "Length",
    "MixedModel",
    "Pairs",
    "Predicted",
    "Priors",
    "Quadratics",
    "States",
    "Units",
    "common_units",
    "covariate_graph",
    "covariate_names",
    "covariate_remarks",
    "display_groups",
    "effective_size",
    "find_kin",
    "fit_mixed",
    "hint_of",
    "in_order",
    "read_covariates",
    "split_rhat",
]
