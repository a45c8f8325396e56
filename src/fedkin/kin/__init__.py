"""Partial pooling that finds who is alike, from one message per site, and says how sure it is.

In: a `Federation` or `Summaries`, and perhaps a `Graph`. Out: a `Kin`: a mean and a spread per coefficient, estimates
per site with covariances, probabilities of being kin, groups. Imports: `stats`, `solvers` (the toolkit for kernels) and
below.

`find` leads from `sources` (rows or summaries) to the `result`, which keeps what it has `learned` as plain arrays.
`quadratics` are the sites' losses as sums, and their common units; `mixed` learns mean, spread and noise from them.
Inside that spread `groups` finds sites that are alike: `starts` and `chains` drive the compiled sampler of `kernels`,
and `diagnostics` say how well it has mixed. `display` cuts probabilities (of many sites: `pairs`) into groups and
decides whether they are resolved; `inference` (with `combine`) has intervals, contrasts and predictions, `text` prints,
and `join` takes in new sites. `neighbours` and `options` are light. Only a fit loads the sampler.
"""

from __future__ import annotations

from fedkin.kin.diagnostics import effective_size, split_rhat
from fedkin.kin.display import display_groups
from fedkin.kin.find import find_kin
from fedkin.kin.inference import Contrast, Predicted
from fedkin.kin.join import Joined
from fedkin.kin.learned import Learned, States
from fedkin.kin.mixed import MixedModel, Priors, fit_mixed
from fedkin.kin.pairs import Pairs, in_order
from fedkin.kin.quadratics import Quadratics, Units, common_units
from fedkin.kin.result import Diagnostics, Kin

__all__ = [
    "Contrast",
    "Diagnostics",
    "Joined",
    "Kin",
    "Learned",
    "MixedModel",
    "Pairs",
    "Predicted",
    "Priors",
    "Quadratics",
    "States",
    "Units",
    "common_units",
    "display_groups",
    "effective_size",
    "find_kin",
    "fit_mixed",
    "in_order",
    "split_rhat",
]
