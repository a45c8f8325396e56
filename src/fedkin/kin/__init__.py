"""Partial pooling that finds which sites are alike: `find_kin` and its result, a `Kin`.

`find` is the entry point: it reads `sources` (rows or summaries), expands losses that are not quadratic, and returns a
`result`. `mixed` learns mean, variances, noise and population effects. `groups` searches for groups within the
variances, with `chains` (`sampler`, `kernels`) over `partitions`, which also provide the reported groups; of many
coefficients in a few `directions`. `inference` and `learned` answer questions about sites, pairs and new sites.
"""

from __future__ import annotations

from fedkin.kin.chains import QUICK, Diagnostics, Length, States, effective_size, split_rhat
from fedkin.kin.covariates import (
    Covariates,
    covariate_graph,
    covariate_names,
    covariate_remarks,
    hint_of,
    read_covariates,
)
from fedkin.kin.evidence import Priors
from fedkin.kin.find import find_kin
from fedkin.kin.inference import (
    Contrast,
    Kind,
    Predicted,
    Sites,
    population_sd,
    population_tests,
    predicted,
    variance_facts,
)
from fedkin.kin.learned import Joined, Learned
from fedkin.kin.likelihoods import QuadraticLikelihoods, Units, common_units
from fedkin.kin.mixed import Nested, Population, fit_mixed
from fedkin.kin.partitions import AGREEMENT, Pairs, by_size, display_groups
from fedkin.kin.result import Kin
from fedkin.kin.sources import memory_of

__all__ = [
    "AGREEMENT", "QUICK", "Contrast", "Covariates", "Diagnostics", "Joined", "Kin", "Kind", "Learned", "Length",
    "Nested", "Pairs", "Population", "Predicted", "Priors", "QuadraticLikelihoods", "Sites", "States", "Units",
    "by_size", "common_units", "covariate_graph", "covariate_names", "covariate_remarks", "display_groups",
    "effective_size", "find_kin", "fit_mixed", "hint_of", "memory_of", "population_sd", "population_tests", "predicted",
    "read_covariates", "split_rhat", "variance_facts",
]  # fmt: skip
