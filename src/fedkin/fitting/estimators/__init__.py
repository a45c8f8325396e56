"""The scikit-learn face: estimators, folds and scorers that know which row is of which site.

In: ``X, y`` and the sites of the rows. Out: fitted estimators, each with its `FittedModel`.
`kin` and `fused` have the estimators, `per_site` what they share, `scoring` folds and scorers.
To add an argument: `fedkin.fitting.options` first, then the constructors here.
Imports: scikit-learn (so nothing else in Fedkin imports this before it is asked for), and all of `fitting` but
`comparison`.
"""

from __future__ import annotations

from fedkin.fitting.estimators.fused import FedADMMClassifier, FedADMMRegressor
from fedkin.fitting.estimators.kin import KinClassifier, KinRegressor
from fedkin.fitting.estimators.scoring import SiteScorer, WithinSiteKFold

__all__ = [
    "FedADMMClassifier",
    "FedADMMRegressor",
    "KinClassifier",
    "KinRegressor",
    "SiteScorer",
    "WithinSiteKFold",
]
