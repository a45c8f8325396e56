"""Estimators with scikit-learn's interface: `KinRegressor`, `KinClassifier`, `KinSurvival`, and the fused ones.

The site of each row is passed with X, as scikit-learn's metadata is::

    import sklearn
    sklearn.set_config(enable_metadata_routing=True)

    cross_val_score(KinRegressor(), X, y, cv=WithinSiteKFold(5), params={"site": site, "groups": site})

or is a column of X, which ``site_column`` names; then everything of scikit-learn works that knows no metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from fedkin.core import Correction, Variance
from fedkin.data import Spline
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import (
    AUTO,
    DEFAULTS,
    CvRule,
    Debiasing,
    FitOptions,
    PenaltyName,
    Solver,
    Sparsity,
    Unseen,
    documented,
)
from fedkin.fitting.per_site import PerSite, SiteClassifier, SiteRegressor, Sites, SiteSurvival
from fedkin.fitting.scoring import SiteScorer, WithinSiteKFold
from fedkin.kin import Predicted
from fedkin.losses import Loss, loss_names

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
    loss: str | Loss = AUTO
    fit_intercept: bool = True
    random_state: int | np.random.RandomState | None = 0
    warm_start: bool = False
    site_column: str | int | None = None
    unseen: Unseen = "raise"
    fixed: Sequence[str] = ()
    spline: Spline | None = None
    boost: bool = False
    within: dict[Any, Any] | None = None

    def _options(self) -> FitOptions:
        how: dict[str, Any] = {"fit_intercept": self.fit_intercept, "seed": self._seed(), "fixed": self.fixed}
        how["within"] = self.within
        return FitOptions(method="kin", loss=self._loss(), boost=self.boost, **how)

    def _keep(self, model: FittedModel) -> None:
        self.kin_ = model.kin

    def predict_interval(
        self,
        X: ArrayLike,
        site: Sites = None,
        offset: ArrayLike | None = None,
        unseen: Unseen | None = None,
        *,
        level: float = 0.95,
        target: Literal["mean", "observation"] = "mean",
    ) -> Predicted:
        """Predict with intervals; see `FittedModel.predict_interval`.

        Parameters
        ----------
        X, site, offset, unseen
            As in `predict`. Intervals of unseen sites are as wide as sites differ.
        level : float in (0, 1)
            Probability that the intervals promise, on average over sites.
        target : "mean" or "observation"
            Intervals of the mean response, or of a new observation, which has noise of its own.
        """
        rows, site = self._rows(X, site)
        how: dict[str, Any] = {"level": level, "target": target, "unseen": unseen or self.unseen}
        return self.model_.predict_interval(rows, site, offset, **how)

    def summary(self, level: float = 0.95) -> str:
        """Return the population effects, what differs between sites, and groups as text; see `Kin.summary`."""
        check_is_fitted(self)
        assert self.kin_ is not None
        return self.kin_.summary(level)


class KinRegressor(_Kin, SiteRegressor):
    """A regression for every site, pooled as far as the sites are alike.

    Sites differ around a common mean, each coefficient by a spread that is learned, and some of them form groups; see
    `fedkin.find_kin`. Nothing is to be tuned.

    Parameters
    ----------
    loss : str or Loss
        "linear" (also "auto"), "huber", "poisson", "negbinomial" or "gamma". "negbinomial" learns how much counts vary
        beyond Poisson counts (`model_.loss.alpha`). The threshold of "huber" is at 1.345 robust standard
        deviations of residuals; ``HuberLoss(delta)`` has it in units of the target.
    fit_intercept : bool
        Whether every site has an intercept.
    random_state : int, RandomState or None
        Seed of the sampler; None is 0.
    warm_start : bool
        Begin where the fit before ended, which saves time for losses other than least squares. The result is the same
        but for rounding, and for what the sampler makes of that.
    site_column : str, int or None
        Column of X that holds the sites, by name or number; then ``site=`` need not be passed.
    unseen : "raise" or "population"
        What becomes of rows of sites that were not part of the fit: an error, or a prediction by the model of a site
        without rows (`FittedModel.population`), so that ``GroupKFold`` works.
    fixed : sequence of str
        Columns with one effect, the same at all sites (``"x0"``, ``"x1"``, ... for an array): a population effect. So
        have columns that are constant within nearly all sites; a `FedkinWarning` names them.
    spline : sequence of str or int, or mapping, optional
        Columns of X, by name or number, whose effects are curves: natural cubic splines with 5 knots at quantiles. A
        mapping has other numbers of knots, or knots.
    boost : bool
        Whether to add a column: the cross-fitted prediction of one boosting model of all rows (LightGBM), for effects
        that are not linear. For the losses "linear", "logistic" and "poisson".
    within : dict {site: district} or None
        The district of each site: variances are learned at both levels, and no groups are looked for. Unseen sites that
        it has are predicted by what their district has in common.

    Attributes
    ----------
    kin_ : Kin
        Everything that was found: probabilities of being kin, covariances, diagnostics; `kin_.summary()`.
    sites_ : tuple of V ids
    coef_ : array (V, q)
        A row per site, in the order of `sites_`.
    intercept_ : array (V,)
    groups_ : int array (V,)
        Groups that are resolved; where none are, every site is its own, also where all may be equal: estimates differ
        as far as the rows leave open. `kin_.probability` has who is kin, and how likely.
    graph_ : Graph
        The graph that was given, that of the covariates, or one without edges.
    model_ : FittedModel
        `model_.save(directory)` writes it, `fedkin.load` reads it.
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
    """A logistic regression for every site, pooled as far as the sites are alike.

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
    A site may have rows of one class only, or separated ones: the spread between sites holds its parameters back.

    Probabilities are averaged over the uncertainty in the parameters of a site, so those of a site with few rows are
    nearer to equal than its coefficients alone would say; `decision_function` has their log odds.

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
    """Cox's proportional hazards for every site, pooled as far as the sites are alike.

    Every site has its own baseline hazard. Ties are Efron's. See the guide on survival.

    Parameters
    ----------
    random_state, warm_start, site_column, unseen
        As in `KinRegressor`.

    Attributes
    ----------
    coef_ : array (V, q)
        Log hazard ratios per unit of a column, a row per site.
    unique_times_ : array (T,)
        All times of events, and the last time of each site.
    kin_, sites_, groups_, graph_, model_, n_features_in_, feature_names_in_
        As in `KinRegressor`.

    Notes
    -----
    Targets are those of scikit-survival: a structured array with a boolean field (whether the event came) and a field
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
        super().__init__(AUTO, False, random_state, warm_start, site_column, unseen)


# --- the fused estimator ----------------------------------------------------------------------------------------

#: Options that scikit-learn's users know by another name.
_NAMES = {"seed": "random_state"}


@dataclass(eq=False, repr=False)
class _FedADMM(PerSite):
    loss: str | Loss = FitOptions.loss
    penalty: PenaltyName = FitOptions.penalty
    lam: float | Literal["cv"] = FitOptions.lam
    select: Correction | Literal["none"] | None = FitOptions.select
    level: float = FitOptions.level
    variance: Variance = FitOptions.variance
    debias: Debiasing = FitOptions.debias
    refit: bool = FitOptions.refit
    fit_intercept: bool = FitOptions.fit_intercept
    fuse_intercept: bool | Literal["auto"] = FitOptions.fuse_intercept
    standardize: bool = FitOptions.standardize
    ridge: float | Literal["cv"] = FitOptions.ridge
    sparsity: float | Sparsity = FitOptions.sparsity
    radius: float | None = FitOptions.radius
    cv_folds: int = FitOptions.cv_folds
    cv_rule: CvRule = FitOptions.cv_rule
    tol: float = FitOptions.tol
    max_iter: int = FitOptions.max_iter
    random_state: int | np.random.RandomState | None = FitOptions.seed
    n_jobs: int | None = FitOptions.n_jobs
    solver: Solver = FitOptions.solver
    rounds: int = FitOptions.rounds
    batch_size: int | None = FitOptions.batch_size
    fedadmm: dict[str, Any] | None = FitOptions.fedadmm
    warm_start: bool = False
    site_column: str | int | None = None
    unseen: Unseen = "raise"
    spline: Spline | None = None
    boost: bool = False

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
    """A regression for every site, with sites that are alike sharing what they know.

    Minimises ``(1/|V|) sum_u M_u(theta_u) + lam sum_e w_e phi(theta_i - theta_j)`` over the edges of a graph between
    the sites, M_u being the mean loss of site u. All options, their names and defaults are those of
    `fedkin.fitting.FitOptions`, except that `random_state` stands for `seed`.

    Parameters
    ----------
    <options>
    warm_start : bool, default False
        Keep the ``lam`` that the first fit has chosen in later ones, instead of choosing it again; where it is chosen
        together with another level, both are chosen again.
    site_column : str, int or None, default None
        Column of X that holds the sites, by name or number; then ``site=`` need not be passed.
    unseen : "raise" or "population"
        What becomes of rows of sites that were not part of the fit: an error, or a prediction by the model of a site
        without rows (`FittedModel.population`), so that ``GroupKFold`` works.
    spline : sequence of str or int, or mapping, optional
        Columns of X, by name or number, whose effects are curves: natural cubic splines with 5 knots at quantiles. A
        mapping has other numbers of knots, or knots.

    Attributes
    ----------
    sites_ : tuple of V ids
    coef_ : array (V, q)
        A row per site, in the order of `sites_`.
    intercept_ : array (V,)
    groups_ : int array (V,)
        Group of each site: sites joined by edges along which their parameters came out exactly equal.
    graph_ : Graph
        The graph used, after selection.
    lam_, gap_ : float
        The penalty level used, and the certificate: a relative duality gap.
    sparsity_ : float or array (V,)
        The level of the l1 term that was used, or one for each site.
    n_iter_ : int
    selection_ : dict
        Summary of the edge selection; absent with ``select=None``.
    model_ : FittedModel
        Everything together; `model_.save(directory)` writes it, `fedkin.load` reads it.
    n_features_in_, feature_names_in_
        As in scikit-learn.

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
    """A logistic regression for every site, with sites that are alike sharing what they know.

    Parameters
    ----------
    <options>
    warm_start, site_column, unseen, spline
        As in `FedADMMRegressor`.

    Attributes
    ----------
    classes_ : array (C,)
    coef_ : array (V, q), or (V, C - 1, q) for more than two classes
        A row per site, in the order of `sites_`. The first class is the reference.
    intercept_ : array (V,) or (V, C - 1)
    sites_, groups_, graph_, lam_, gap_, sparsity_, n_iter_, selection_, model_, n_features_in_, feature_names_in_
        As in `FedADMMRegressor`.

    Notes
    -----
    The losses are "logistic", which becomes multinomial for more than two classes, and "multinomial".

    A site may have rows of one class only: it learns from the sites that it is joined to. When the data
    do not determine the parameters (separated classes on a whole component of the graph), a ridge of a 25th of one row
    is added and a `DegenerateSiteWarning` says so.

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
