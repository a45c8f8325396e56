"""The scikit-learn face of the paper's estimator: `FedADMMRegressor`, `FedADMMClassifier`.

The site of each row travels beside X, as scikit-learn's metadata does::

    import sklearn
    sklearn.set_config(enable_metadata_routing=True)

    model = FedADMMRegressor().set_fit_request(site=True).set_score_request(site=True)
    cross_val_score(model, X, y, cv=WithinSiteKFold(5), params={"site": site, "groups": site})

or in a column of X, which ``site_column`` names; then everything of scikit-learn works that knows no metadata.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedkin.core import Method, Variance
from fedkin.fitting.estimators.per_site import PerSite, PerSiteClassifier, PerSiteRegressor
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import DEFAULTS, CvRule, Debiasing, FitOptions, PenaltyName, Solver, documented
from fedkin.fitting.preparation import Prepared
from fedkin.fitting.ways import fit_prepared, silent
from fedkin.graph import Graph
from fedkin.losses import Loss, loss_names

#: Options that scikit-learn's users know by another name.
_NAMES = {"cv_folds": "cv", "seed": "random_state"}


class _FedADMM(PerSite):
    """The paper's estimator."""

    lam_: float

    def __init__(
        self,
        loss: str | Loss = FitOptions.loss,
        penalty: PenaltyName = FitOptions.penalty,
        lam: float | Literal["cv"] = FitOptions.lam,
        select: Method | Literal["none"] | None = FitOptions.select,
        level: float = FitOptions.level,
        variance: Variance = FitOptions.variance,
        debias: Debiasing = FitOptions.debias,
        refit: bool = FitOptions.refit,
        fit_intercept: bool = FitOptions.fit_intercept,
        fuse_intercept: bool | Literal["auto"] = FitOptions.fuse_intercept,
        standardize: bool = FitOptions.standardize,
        ridge: float | Literal["cv"] = FitOptions.ridge,
        sparsity: float = FitOptions.sparsity,
        cv: int = FitOptions.cv_folds,
        cv_rule: CvRule = FitOptions.cv_rule,
        tol: float = FitOptions.tol,
        max_iter: int = FitOptions.max_iter,
        random_state: int | np.random.RandomState | None = FitOptions.seed,
        n_jobs: int | None = FitOptions.n_jobs,
        solver: Solver = FitOptions.solver,
        rounds: int = FitOptions.rounds,
        batch_size: int | None = FitOptions.batch_size,
        warm_start: bool = False,
        site_column: str | int | None = None,
    ) -> None:
        self.loss = loss
        self.penalty = penalty
        self.lam = lam
        self.select = select
        self.level = level
        self.variance = variance
        self.debias = debias
        self.refit = refit
        self.fit_intercept = fit_intercept
        self.fuse_intercept = fuse_intercept
        self.standardize = standardize
        self.ridge = ridge
        self.sparsity = sparsity
        self.cv = cv
        self.cv_rule = cv_rule
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.solver = solver
        self.rounds = rounds
        self.batch_size = batch_size
        self.warm_start = warm_start
        self.site_column = site_column

    def _options(self) -> FitOptions:
        options = {
            name: getattr(self, _NAMES.get(name, name)) for name in DEFAULTS if hasattr(self, _NAMES.get(name, name))
        }
        return FitOptions(method="fused", **options | {"loss": self._loss(), "seed": self._seed(self.random_state)})

    def _fit(self, prepared: Prepared, graph: Graph | None, options: FitOptions) -> FittedModel:
        if self.warm_start and hasattr(self, "lam_") and options.lam == "cv":
            options = replace(options, lam=self.lam_)
        model = fit_prepared(prepared, graph, options, silent)
        self.lam_ = model.lam
        self.gap_ = model.gap
        self.n_iter_ = model.n_iter
        if model.selection is not None:
            self.selection_ = model.selection
        elif hasattr(self, "selection_"):
            del self.selection_
        return model


class FedADMMRegressor(_FedADMM, PerSiteRegressor):
    """A regression for every site, with sites that are alike sharing what they know.

    Minimises ``(1/|V|) sum_u M_u(theta_u) + lam sum_e w_e phi(theta_i - theta_j)`` over the edges of a graph between
    the sites, M_u being the mean loss of site u. All options, their names and defaults are those of
    `fedkin.fitting.FitOptions`, except that `cv` stands for `cv_folds` and `random_state` for `seed`.

    Parameters
    ----------
    <options>
    warm_start : bool, default False
        Keep the ``lam`` that the first fit has chosen in later ones, instead of choosing it again.
    site_column : str, int or None, default None
        Column of X that holds the sites, by name or number; then ``site=`` need not be passed.

    Attributes
    ----------
    sites_ : tuple of V ids
    coef_ : array (V, q)
        A row per site, in the order of `sites_`.
    intercept_ : array (V,)
    clusters_ : int array (V,)
        Group of each site: with `select`, sites joined by kept edges; without it, sites joined by edges whose
        parameters came out exactly equal.
    graph_ : Graph
        The graph used, after selection.
    lam_, gap_ : float
        The penalty level used, and the certificate: a relative duality gap.
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
    >>> model.clusters_
    array([0, 0, 1])
    >>> model.predict([[1.0, 0.0]], site="c").round(1)
    array([-1.])
    """

    __doc__ = documented(__doc__, _NAMES, loss_names("number", "count", "positive"))


class FedADMMClassifier(_FedADMM, PerSiteClassifier):
    """A logistic regression for every site, with sites that are alike sharing what they know.

    Parameters
    ----------
    <options>
    warm_start : bool, default False
        Keep the ``lam`` that the first fit has chosen in later ones, instead of choosing it again.
    site_column : str, int or None, default None
        Column of X that holds the sites, by name or number; then ``site=`` need not be passed.

    Attributes
    ----------
    classes_ : array (C,)
    coef_ : array (V, q), or (V, C - 1, q) for more than two classes
        A row per site, in the order of `sites_`. The first class is the reference.
    intercept_ : array (V,) or (V, C - 1)
    sites_, clusters_, graph_, lam_, gap_, n_iter_, selection_, model_, n_features_in_, feature_names_in_
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
