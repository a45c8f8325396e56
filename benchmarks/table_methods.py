"""What is compared on public tables: a method makes of training rows something that predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import statsmodels.api as sm
from numpy.typing import NDArray
from sklearn import metrics
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, TargetEncoder

from fedkin.data import Federation
from fedkin.fitting import FitOptions, FittedModel, baseline_models, compare, fit, fit_after_kin

Values = NDArray[np.float64]
#: Ridges of scikit-learn's fits.
ALPHAS = np.logspace(-2, 4, 13)


@dataclass(frozen=True)
class Fitted:
    """``predict(test) -> (n,)``: means, or probabilities of the second class."""

    predict: Callable[[Federation], Values]
    groups: int | None = None


#: Makes of training rows and a loss something that predicts.
Fit = Callable[[Federation, str], Fitted]


@dataclass(frozen=True)
class Method:
    """A way to fit, whether it counts among the baselines that the best is taken of, and for how many splits to try."""

    name: str
    fit: Fit
    baseline: bool = False
    skip: Callable[[str, Federation], str | None] = lambda loss, train: None
    splits: int = 10


def score(fitted: Fitted, loss: str, train: Federation, test: Federation) -> dict[str, float]:
    """The error (lower is better), and what people quote."""
    assert test.y is not None
    y, found = test.y.astype(np.float64), fitted.predict(test)
    if loss == "linear":
        error = float(metrics.root_mean_squared_error(y, found))
        return {"error": error, "explained": float(metrics.r2_score(y, found))}
    if loss == "poisson":
        return {"error": float(metrics.mean_poisson_deviance(y, np.maximum(found, 1e-12)))}
    chance = np.clip(found, 1e-12, 1 - 1e-12)
    own = [test.site_index == u for u in range(test.n_sites)]
    areas = [metrics.roc_auc_score(y[one], chance[one]) for one in own if np.unique(y[one]).size == 2]
    return {
        "error": float(metrics.log_loss(y, chance, labels=[0, 1])),
        "auc": float(np.mean(areas)),
        "accuracy": float(metrics.accuracy_score(y, chance > 0.5)),
    }


# --- scikit-learn ---------------------------------------------------------------------------------------------


def _estimator(loss: str) -> Any:
    if loss == "linear":
        return make_pipeline(StandardScaler(), RidgeCV(ALPHAS[::-1]))  # of equally good ridges the largest
    last = LogisticRegressionCV(scoring="neg_log_loss", l1_ratios=(0.0,), use_legacy_attributes=False, max_iter=1000)
    return make_pipeline(StandardScaler(), last)


def _response(model: Any, X: Values) -> Values:
    if isinstance(model, float):
        return np.full(len(X), model)
    return np.asarray(model.predict_proba(X)[:, 1] if hasattr(model, "predict_proba") else model.predict(X))


def _sklearn_fit(loss: str, X: Values, y: Values) -> Any:
    """scikit-learn's fit, or a constant where it has none: one row, or too few of a class for its folds."""
    if loss == "logistic" and min((y == 0).sum(), (y == 1).sum()) < 5:
        return float((y.sum() + 0.5) / (len(y) + 1))
    if len(y) < 2:
        return float(y[0])
    return _estimator(loss).fit(X, y)


def _each_site(train: Federation, loss: str) -> Fitted:
    if loss == "poisson":
        return _baseline("Local")(train, loss)
    models = [_sklearn_fit(loss, train[u].X, train[u].y.astype(float)) for u in train.sites]

    def predict(test: Federation) -> Values:
        out = np.empty(len(test.X))
        for u in np.flatnonzero(test.n_samples):
            own = test.site_index == u
            out[own] = _response(models[u], test.X[own])
        return out

    return Fitted(predict)


def _pooled(train: Federation, loss: str) -> Fitted:
    if loss == "poisson":
        return _baseline("Global")(train, loss)
    model = _sklearn_fit(loss, train.X, train.y.astype(float))
    return Fitted(lambda test: _response(model, test.X))


#: Settings of boosting that are tried on a fifth of each site's training rows.
_SETTINGS = tuple({"learning_rate": rate, "leaves": leaves} for rate in (0.1, 0.03) for leaves in (7, 31))


def _tuned(train: Federation, tried: Callable[[Federation, Federation, dict[str, Any]], tuple[float, int]]) -> Any:
    """The setting, with the number of trees, that predicts a fifth of each site's training rows best."""
    rest, valid = train.split(0.2, 0)
    found = [(*tried(rest, valid, one), one) for one in _SETTINGS]
    _, trees, best = min(found, key=lambda each: each[0])
    return best, trees


def _boosting(train: Federation, loss: str) -> Fitted:
    """scikit-learn's boosting with the site: a category, or its mean target where there are too many for that."""
    kinds = {"linear": "squared_error", "poisson": "poisson"}
    several = train.n_sites > 255
    first = [several is False] + [False] * train.n_features

    def model(some: Federation, one: dict[str, Any], trees: int | None = None) -> tuple[Any, Any]:
        kind = HistGradientBoostingClassifier if loss == "logistic" else HistGradientBoostingRegressor
        how = {} if loss == "logistic" else {"loss": kinds[loss]}
        how |= {"learning_rate": one["learning_rate"], "max_leaf_nodes": one["leaves"], "random_state": 0}
        how |= {"categorical_features": first, "max_iter": trees or 1000, "early_stopping": trees is None}
        exposure = None if some.offset is None else np.exp(some.offset)
        y = some.y if exposure is None else some.y / exposure
        ids, encoder = some.site_index[:, None].astype(float), None
        if several:
            encoder = TargetEncoder(target_type="continuous", random_state=0)
            ids = encoder.fit_transform(ids, y)
        return kind(**how).fit(np.column_stack([ids, some.X]), y, sample_weight=exposure), encoder

    def response(found: tuple[Any, Any], some: Federation) -> Values:
        ids = some.site_index[:, None].astype(float)
        ids = ids if found[1] is None else found[1].transform(ids)
        out = _response(found[0], np.column_stack([ids, some.X]))
        return out if some.offset is None else out * np.exp(some.offset)

    def tried(rest: Federation, valid: Federation, one: dict[str, Any]) -> tuple[float, int]:
        found = model(rest, one)
        error = score(Fitted(lambda some: response(found, some)), loss, rest, valid)["error"]
        return error, found[0].n_iter_

    made = model(train, *_tuned(train, tried))
    return Fitted(lambda test: response(made, test))


# --- mixed models ---------------------------------------------------------------------------------------------


def _columns(train: Federation) -> tuple[Callable[[Values], Values], int]:
    """An intercept and standardised columns, and how many of them have random effects: all where there are few."""
    mean, scale = train.X.mean(axis=0), train.X.std(axis=0)
    scale[scale == 0] = 1.0
    random = 1 + train.n_features if train.n_features <= 4 else 1
    return lambda X: np.column_stack([np.ones(len(X)), (X - mean) / scale]), random


def _statsmodels(train: Federation, loss: str) -> Fitted:
    """statsmodels' mixed model with a random intercept, and a random slope of each column where these are few."""
    columns, random = _columns(train)
    Z = columns(train.X)
    found = sm.MixedLM(train.y, Z, groups=train.site_index, exog_re=Z[:, :random]).fit(reml=True)
    theta = np.tile(found.fe_params, (train.n_sites, 1))
    theta[:, :random] += np.array([np.asarray(found.random_effects[u]) for u in range(train.n_sites)])
    return Fitted(lambda test: np.asarray((columns(test.X) * theta[test.site_index]).sum(axis=1)))


def _linear_only(loss: str, train: Federation) -> str | None:
    return None if loss == "linear" else "least squares only"


_LIKELIHOODS = {"linear": "gaussian", "logistic": "bernoulli_logit", "poisson": "poisson"}


def _gpboost(train: Federation, loss: str) -> Fitted:
    """gpboost's mixed model with a random intercept, and a random slope of each column where these are few."""
    import gpboost as gpb

    columns, random = _columns(train)
    Z, slopes = columns(train.X), random > 1
    how = {"group_rand_coef_data": Z[:, 1:], "ind_effect_group_rand_coef": [1] * train.n_features} if slopes else {}
    model = gpb.GPModel(group_data=train.site_index, likelihood=_LIKELIHOODS[loss], **how)
    model.fit(y=train.y.astype(float), X=Z, offset=train.offset)

    def predict(test: Federation) -> Values:
        here = columns(test.X)
        how = {"group_rand_coef_data_pred": here[:, 1:]} if slopes else {}
        found = model.predict(X_pred=here, group_data_pred=test.site_index, offset_pred=test.offset, **how)
        return np.asarray(found["mu"])

    return Fitted(predict)


def _gpboost_trees(train: Federation, loss: str) -> Fitted:
    """gpboost's boosting with a random intercept of each site."""
    import gpboost as gpb

    # its steps are in units of the target's variance: large targets would take thousands of trees
    middle, scale = (train.y.mean(), train.y.std()) if loss == "linear" else (0.0, 1.0)

    def boosted(some: Federation, one: dict[str, Any], trees: int, valid: Federation | None = None) -> Any:
        model = gpb.GPModel(group_data=some.site_index, likelihood=_LIKELIHOODS[loss])
        data = gpb.Dataset(some.X, (some.y - middle) / scale, init_score=some.offset)
        about = {"learning_rate": one["learning_rate"], "num_leaves": one["leaves"], "verbose": -1, "num_threads": 1}
        how: dict[str, Any] = {}
        if valid is not None:
            model.set_prediction_data(group_data_pred=valid.site_index)
            more = gpb.Dataset(valid.X, (valid.y - middle) / scale, init_score=valid.offset, reference=data)
            how = {"valid_sets": [more], "early_stopping_rounds": 20, "evals_result": {}}
        booster = gpb.train(about, data, trees, gp_model=model, verbose_eval=False, **how)
        return booster, how.get("evals_result")

    def tried(rest: Federation, valid: Federation, one: dict[str, Any]) -> tuple[float, int]:
        booster, found = boosted(rest, one, 1000, valid)
        errors = next(iter(next(iter(found.values())).values()))
        return float(errors[booster.best_iteration - 1]), booster.best_iteration

    made, _ = boosted(train, *_tuned(train, tried))

    def predict(test: Federation) -> Values:
        how = {"group_data_pred": test.site_index, "offset_pred": test.offset, "pred_latent": False}
        return middle + scale * np.asarray(made.predict(data=test.X, **how)["response_mean"])

    return Fitted(predict)


# --- Fedkin ---------------------------------------------------------------------------------------------------


def _of_model(model: FittedModel, groups: int | None = None) -> Fitted:
    def predict(test: Federation) -> Values:
        ids = [test.sites[u] for u in test.site_index.tolist()]
        if model.classes is not None:
            return model.predict_proba(test.X, ids, test.offset)[:, 1]
        return np.asarray(model.predict(test.X, ids, test.offset), dtype=float)

    return Fitted(predict, groups)


def _baseline(name: str) -> Fit:
    """One of the models that ``fedkin fit`` compares with."""
    return lambda train, loss: _of_model(baseline_models(train, FitOptions(loss=loss))[name])


def _fitted(**options: Any) -> Fit:
    return lambda train, loss: _grouped(fit(train, None, FitOptions(loss=loss, **options)))


def _grouped(model: FittedModel) -> Fitted:
    return _of_model(model, model.n_groups if model.n_groups < model.n_sites or model.fused else 1)


_kin, _boosted = _fitted(method="kin"), _fitted(method="kin", boost=True)


def _recommended(train: Federation, loss: str) -> Fitted:
    """Kin with boosting where that is better on a quarter of the training rows."""
    found = compare(train, None, FitOptions(loss=loss, boost=True), repeats=1)
    return (_boosted if found.mean("Fedkin") < found.mean("Without boosting") else _kin)(train, loss)


def _fused_after_kin(train: Federation, loss: str) -> Fitted:
    """The fused estimator on kin's groups (all pairs where none are resolved), in units of kin's spreads."""
    return _grouped(fit_after_kin(train, FitOptions(loss=loss)))


METHODS = (
    Method("ridge at each site, scikit-learn", _each_site, baseline=True, splits=3),
    Method("ridge at each site", _baseline("Local"), baseline=True),
    Method("one ridge", _pooled, baseline=True),
    Method("site intercepts", _baseline("Site intercepts"), baseline=True),
    Method("mixed model, statsmodels", _statsmodels, baseline=True, skip=_linear_only),
    Method("mixed model, gpboost", _gpboost, baseline=True, splits=5),
    Method("gradient boosting", _boosting, baseline=True, splits=5),
    Method("boosting with random effects, gpboost", _gpboost_trees, baseline=True, splits=5),
    Method("kin", _kin),
    Method("kin with boosting", _boosted),
    Method("kin as recommended", _recommended),
    Method("fused", _fitted(method="fused"), splits=5),
    Method("fused after kin", _fused_after_kin, splits=5),
)
