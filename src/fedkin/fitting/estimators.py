"""Estimators with scikit-learn's interface: `KinRegressor`, `KinClassifier`, `KinSurvival`, and the fused ones.

Pass the site of each row as scikit-learn metadata::

    import sklearn
    sklearn.set_config(enable_metadata_routing=True)

    cross_val_score(KinRegressor(), X, y, cv=WithinSiteKFold(5), params={"site": site, "groups": site})

or name a column of X that holds it with ``site_column``, for scikit-learn tools without metadata routing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from fedkin.fitting.inputs import Unseen
from fedkin.fitting.model import Each, FittedModel
from fedkin.fitting.options import DEFAULTS, SHARED, FitOptions, SharedOptions, documented
from fedkin.fitting.per_site import PerSite, SiteClassifier, SiteRegressor, Sites, SiteSurvival
from fedkin.fitting.scoring import SiteScorer, WithinSiteKFold
from fedkin.kin import Predicted
from fedkin.kin.inference import Interval
from fedkin.losses import loss_names

__all__ = [
    "FedADMMClassifier",
    "FedADMMRegressor",
    "KinClassifier",
    "KinRegressor",
    "KinSurvival",
    "SiteScorer",
    "WithinSiteKFold",
]


@dataclass(eq=False, repr=False)
class _Kin(PerSite):
    fit_intercept: bool = True
    fixed: Sequence[str] = ()
    boost: bool = False
    within: dict[Any, Any] | None = None

    def _options(self) -> FitOptions:
        options = {name: getattr(self, name) for name in SHARED if hasattr(self, name)}
        return FitOptions(**options | {"method": "kin", "loss": self._loss(), "seed": self._seed()})

    def _keep(self, model: FittedModel) -> None:
        self.kin_ = model.kin

    def predict_interval(
        self,
        X: ArrayLike,
        site: Sites = None,
        offset: Each = None,
        unseen: Unseen | None = None,
        *,
        level: float = 0.95,
        interval: Interval = "mean",
    ) -> Predicted:
        """Predict with intervals; see `FittedModel.predict_interval`."""
        rows, site = self._rows(X, site)
        return self.model_.predict_interval(
            rows, site, offset, unseen=unseen or self.unseen, level=level, interval=interval
        )

    def summary(self, level: float = 0.95, *, site: Hashable | None = None, group: int | None = None) -> str:
        """Return population effects, variances between sites and groups as text, or one site; see `Kin.summary`."""
        check_is_fitted(self)
        return self.model_.summary(level, site=site, group=group)


class KinRegressor(_Kin, SiteRegressor):
    """Regression with a model for each site, partially pooled between similar sites.

    Each coefficient varies between sites around a common mean, with an estimated variance, and some sites may form
    groups; see `fedkin.find_kin`. There is nothing to tune.

    Parameters
    ----------
    loss : str or Loss
        "linear" (also "auto"), "huber", "poisson", "negbinomial" or "gamma". "negbinomial" estimates the overdispersion
        of counts (`model_.loss.alpha`). The threshold of "huber" is 1.345 robust standard deviations of the residuals;
        ``HuberLoss(delta)`` sets it in units of the target.
    fit_intercept : bool
        Whether every site has an intercept.
    random_state : int, RandomState or None
        Seed of the sampler; None is 0.
    warm_start : bool
        Start from the previous fit, which saves time for losses other than least squares. The result is the same up to
        rounding and its effect on the sampler.
    site_column : str, int or None
        Column of X that holds the sites, by name or number; then ``site=`` need not be passed.
    unseen : "raise" or "population"
        How to treat rows of sites that were not part of the fit: an error, or a prediction by the model of a site
        without rows (`FittedModel.population`), so that ``GroupKFold`` works.
    fixed : sequence of str
        Columns with one effect for all sites, a population effect (``"x0"``, ``"x1"``, ... for an array). Columns that
        are constant within nearly all sites are treated this way, too; a `FedkinWarning` names them.
    spline : sequence of str or int, or mapping, optional
        Columns of X, by name or number, whose effects are curves: natural cubic splines with 5 knots at quantiles. A
        mapping gives other numbers of knots, or the knots.
    boost : bool
        Whether to add a column for nonlinear effects: the cross-fitted prediction of one boosting model of all rows
        (LightGBM). For the losses "linear", "logistic" and "poisson".
    within : dict {site: district} or None
        The district of each site: variances are estimated at both levels, and no groups are sought. Unseen sites that
        it lists are predicted from their district.

    Attributes
    ----------
    kin_ : Kin
        The result: probabilities of being alike, covariances, diagnostics; see `kin_.summary()`.
    sites_ : tuple of V ids
    coef_ : array (V, q)
        A row per site, in the order of `sites_`.
    intercept_ : array (V,)
    groups_ : int array (V,)
        Resolved groups. If there are none, each site is its own group, even if all sites may be equal.
        `kin_.probability` has the probability that each pair of sites is alike.
    graph_ : Graph
        The given graph, the graph of the covariates, or a graph without edges.
    model_ : FittedModel
        `model_.save(directory)` writes it; `fedkin.load` reads it.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin import KinRegressor
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(400, 2)), np.repeat(list("abcdefgh"), 50)
    >>> y = X[:, 0] * np.where(site > "d", -1.0, 1.0) + 0.1 * rng.normal(size=400)
    >>> model = KinRegressor().fit(X, y, site=site)
    >>> model.groups_
    array([0, 0, 0, 0, 1, 1, 1, 1])
    >>> model.predict([[1.0, 0.0]], site="h").round(1)
    array([-1.])
    """


class KinClassifier(_Kin, SiteClassifier):
    """Logistic regression with a model for each site, partially pooled between similar sites.

    Parameters
    ----------
    loss : str or Loss
        "logistic" (also "auto"), which becomes multinomial for more than two classes, or "multinomial".
    fit_intercept, random_state, warm_start, site_column, unseen, fixed, spline, boost, within
        As in `KinRegressor`.

    Attributes
    ----------
    classes_ : array (C,)
    coef_ : array (V, q), or (V, C - 1, q) for more than two classes
        The first class is the reference.
    intercept_ : array (V,) or (V, C - 1)
    kin_, sites_, groups_, graph_, model_, n_features_in_, feature_names_in_
        As in `KinRegressor`.

    Notes
    -----
    A site may have rows of one class only, or separated classes: shrinkage keeps its parameters finite.

    Probabilities are averaged over the uncertainty in a site's parameters, so for a site with few rows they are less
    extreme than its coefficients alone imply; `decision_function` returns their log odds.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin import KinClassifier
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(600, 1)), np.repeat(np.arange(6), 100)
    >>> y = np.where(3 * X[:, 0] + rng.logistic(size=600) > 0, "yes", "no")
    >>> KinClassifier().fit(X, y, site=site).predict([[3.0], [-3.0]], site=[1, 2]).tolist()
    ['yes', 'no']
    """


class KinSurvival(_Kin, SiteSurvival):
    """Cox proportional hazards with a model for each site, partially pooled between similar sites.

    Each site has its own baseline hazard. Ties are handled by Efron's method. The documentation has a page on survival.

    Parameters
    ----------
    random_state, warm_start, site_column, unseen
        As in `KinRegressor`.

    Attributes
    ----------
    coef_ : array (V, q)
        Log hazard ratios per unit of a column, a row per site.
    unique_times_ : array (T,)
        All event times, and the last time of each site.
    kin_, sites_, groups_, graph_, model_, n_features_in_, feature_names_in_
        As in `KinRegressor`.

    Notes
    -----
    Targets are as in scikit-survival: a structured array with a boolean field (whether the event occurred) and a field
    of times; or an array (n, 2) of events and times. `predict` gives risks, higher for earlier events, `score` the
    concordance within sites, and `summary` hazard ratios.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin import KinSurvival
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(300, 1)), np.repeat(["a", "b", "c"], 100)
    >>> time, ends = rng.exponential(np.exp(-X[:, 0])), rng.exponential(2.0, size=300)
    >>> y = np.column_stack([time <= ends, np.minimum(time, ends)])
    >>> model = KinSurvival().fit(X, y, site=site)
    >>> model.predict([[1.0]], site="a") > model.predict([[0.0]], site="a")
    array([ True])
    >>> model.predict_survival_function([[0.0]], site="b", times=[0.5, 1.0]).shape
    (1, 2)
    """

    def __init__(
        self,
        *,
        random_state: int | np.random.RandomState | None = 0,
        warm_start: bool = False,
        site_column: str | int | None = None,
        unseen: Unseen = "raise",
    ) -> None:
        super().__init__(
            fit_intercept=False,
            unseen=unseen,
            random_state=random_state,
            warm_start=warm_start,
            site_column=site_column,
        )


# --- the fused estimator ----------------------------------------------------------------------------------------

#: Options that have another name in scikit-learn.
_NAMES = {"seed": "random_state"}


@dataclass(eq=False, repr=False)
class _FedADMM(SharedOptions, PerSite):
    def _options(self) -> FitOptions:
        named = {name: _NAMES.get(name, name) for name in DEFAULTS}
        options = {name: getattr(self, own) for name, own in named.items() if hasattr(self, own)}
        alone = self.lam == "cv" and not isinstance(self.ridge, str) and not isinstance(self.sparsity, str)
        if self.warm_start and alone and hasattr(self, "lam_"):
            options["lam"] = self.lam_
        return FitOptions(method="fused", **options | {"loss": self._loss(), "seed": self._seed()})

    def _keep(self, model: FittedModel) -> None:
        assert model.fused is not None
        self.lam_: float = model.fused.lam
        self.gap_, self.n_iter_ = model.fused.gap, model.fused.n_iter
        level = (model.history or {}).get("choice", {}).get("sparsity", model.options["sparsity"])
        self.sparsity_ = level if np.isscalar(level) else np.array(level)
        if model.fused.selection is not None:
            self.selection_ = model.fused.selection
        elif hasattr(self, "selection_"):
            del self.selection_


class FedADMMRegressor(_FedADMM, SiteRegressor):
    """Regression with a model for each site, fused between similar sites (the paper's estimator).

    Minimises ``(1/|V|) sum_u M_u(theta_u) + lam sum_e w_e phi(theta_i - theta_j)`` over the edges of a graph between
    the sites, M_u being the mean loss of site u. All options, their names and defaults are those of
    `fedkin.fitting.FitOptions`, except that `random_state` replaces `seed`.

    Parameters
    ----------
    <options>
    warm_start : bool, default False
        Keep the ``lam`` of the first fit in later fits instead of choosing it again. If it is chosen together with
        another penalty level, both are chosen again.
    site_column, unseen, spline
        As in `KinRegressor`.

    Attributes
    ----------
    groups_ : int array (V,)
        Group of each site: sites joined by edges along which their estimated parameters are exactly equal.
    graph_ : Graph
        The graph used, after selection.
    lam_, gap_ : float
        The penalty level used, and the certificate: a relative duality gap.
    sparsity_ : float or array (V,)
        The level of the l1 term, or one level per site.
    n_iter_ : int
    selection_ : dict
        Summary of the edge selection; absent with ``select=None``.
    sites_, coef_, intercept_, model_, n_features_in_, feature_names_in_
        As in `KinRegressor`.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin import FedADMMRegressor
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(300, 2)), np.repeat(["a", "b", "c"], 100)
    >>> y = X[:, 0] * np.where(site == "c", -1.0, 1.0) + 0.1 * rng.normal(size=300)
    >>> model = FedADMMRegressor().fit(X, y, site=site)
    >>> model.groups_
    array([0, 0, 1])
    >>> model.predict([[1.0, 0.0]], site="c").round(1)
    array([-1.])
    """

    __doc__ = documented(__doc__, _NAMES, loss_names("number", "count", "positive"))


class FedADMMClassifier(_FedADMM, SiteClassifier):
    """Logistic regression with a model for each site, fused between similar sites.

    Parameters
    ----------
    <options>
    warm_start, site_column, unseen, spline
        As in `FedADMMRegressor`.

    Attributes
    ----------
    classes_, coef_, intercept_
        As in `KinClassifier`.
    sites_, groups_, graph_, lam_, gap_, sparsity_, n_iter_, selection_, model_, n_features_in_, feature_names_in_
        As in `FedADMMRegressor`.

    Notes
    -----
    The losses are "logistic", which becomes multinomial for more than two classes, and "multinomial".

    A site may have rows of one class only: it learns from its neighbours. When the data do not determine the parameters
    (separated classes on a whole component of the graph), a ridge worth 1/25 of a row is added, with a
    `DegenerateSiteWarning`.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin import FedADMMClassifier
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(400, 1)), np.repeat([1, 2], 200)
    >>> y = np.where(X[:, 0] + rng.logistic(size=400) > 0, "yes", "no")
    >>> model = FedADMMClassifier(lam=0.1).fit(X, y, site=site)
    >>> model.predict([[3.0], [-3.0]], site=[1, 2]).tolist()
    ['yes', 'no']
    """

    __doc__ = documented(__doc__, _NAMES, loss_names("class"))
