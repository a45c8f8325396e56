"""Fit and compare models: `fit`, `compare`, `FitOptions`, `FittedModel` and the directory of a saved model.

`fedkin.fitting.estimators` has the scikit-learn interface.

To add an option of a fit: a field in `options`. To add a field of a model: `model`, and
`store` for its directory. To add a baseline: `baselines`. To add a method: `methods`.
"""

from __future__ import annotations

from fedkin.fitting.baselines import baseline_models
from fedkin.fitting.comparison import REPEATS, Comparison, compare
from fedkin.fitting.fused import fit_after_kin, with_history
from fedkin.fitting.methods import data_record, fit, naive_confint, with_covariates
from fedkin.fitting.model import FittedModel, FusedFit
from fedkin.fitting.newsite import NewSite
from fedkin.fitting.options import DEFAULTS, DESCRIBED, SHARED, FitOptions, choices
from fedkin.fitting.predicting import Predictor, predict_files
from fedkin.fitting.preparation import Data, join_parts, model_from_theta, prepare
from fedkin.fitting.queries import Queries
from fedkin.fitting.store import check_model_place, load, reserved_place

__all__ = [
    "DEFAULTS",
    "DESCRIBED",
    "REPEATS",
    "SHARED",
    "Comparison",
    "Data",
    "FitOptions",
    "FittedModel",
    "FusedFit",
    "NewSite",
    "Predictor",
    "Queries",
    "baseline_models",
    "check_model_place",
    "choices",
    "compare",
    "data_record",
    "fit",
    "fit_after_kin",
    "join_parts",
    "load",
    "model_from_theta",
    "naive_confint",
    "predict_files",
    "prepare",
    "reserved_place",
    "with_covariates",
    "with_history",
]
