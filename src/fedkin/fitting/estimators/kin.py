"""The scikit-learn face of `find_kin`: `KinRegressor` and `KinClassifier`."""

from __future__ import annotations

import numpy as np

from fedkin.fitting.estimators.per_site import PerSite, PerSiteClassifier, PerSiteRegressor
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import AUTO, FitOptions
from fedkin.fitting.preparation import Prepared
from fedkin.fitting.ways import fit_prepared, silent
from fedkin.graph import Graph
from fedkin.kin import Kin
from fedkin.losses import Loss


class _Kin(PerSite):
    """What both share."""

    kin_: Kin

    def __init__(
        self,
        loss: str | Loss = AUTO,
        fit_intercept: bool = True,
        random_state: int | np.random.RandomState | None = 0,
        warm_start: bool = False,
        site_column: str | int | None = None,
    ) -> None:
        self.loss = loss
        self.fit_intercept = fit_intercept
        self.random_state = random_state
        self.warm_start = warm_start
        self.site_column = site_column

    def _options(self) -> FitOptions:
        seed = self._seed(self.random_state)
        return FitOptions(method="kin", loss=self._loss(), fit_intercept=self.fit_intercept, seed=seed)

    def _fit(self, prepared: Prepared, graph: Graph | None, options: FitOptions) -> FittedModel:
        model = fit_prepared(
            prepared, graph, options, silent, getattr(self, "model_", None) if self.warm_start else None
        )
        assert model.kin is not None
        self.kin_ = model.kin
        return model


class KinRegressor(_Kin, PerSiteRegressor):
    """A regression for every site, pooled as far as the sites are alike.

    Sites differ around a common mean, each coefficient by a spread that is learned, and some of them form groups; see
    `fedkin.find_kin`. Nothing is to be tuned.

    Parameters
    ----------
    loss : str or Loss
        "linear" (also "auto"), "huber", "poisson" or "gamma". The threshold of "huber" is at 1.345 robust standard
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

    Attributes
    ----------
    kin_ : Kin
        Everything that was found: probabilities of being kin, covariances, diagnostics; `kin_.summary()`.
    sites_ : tuple of V ids
    coef_ : array (V, q)
        A row per site, in the order of `sites_`.
    intercept_ : array (V,)
    clusters_ : int array (V,)
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
    >>> model.clusters_
    array([0, 0, 0, 0, 1, 1, 1, 1])
    >>> model.predict([[1.0, 0.0]], site="h").round(1)
    array([-1.])
    """


class KinClassifier(_Kin, PerSiteClassifier):
    """A logistic regression for every site, pooled as far as the sites are alike.

    Parameters
    ----------
    loss : str or Loss
        "logistic" (also "auto"), which becomes multinomial for more than two classes, or "multinomial".
    fit_intercept : bool
        Whether every site has an intercept.
    random_state : int, RandomState or None
        Seed of the sampler; None is 0.
    warm_start : bool
        Begin where the fit before ended, which saves time for losses other than least squares. The result is the same
        but for rounding, and for what the sampler makes of that.
    site_column : str, int or None
        Column of X that holds the sites, by name or number; then ``site=`` need not be passed.

    Attributes
    ----------
    classes_ : array (C,)
    coef_ : array (V, q), or (V, C - 1, q) for more than two classes
        The first class is the reference.
    intercept_ : array (V,) or (V, C - 1)
    kin_, sites_, clusters_, graph_, model_, n_features_in_, feature_names_in_
        As in `KinRegressor`.

    Notes
    -----
    A site may have rows of one class only, or separated ones: the spread between sites holds its parameters back.

    Probabilities are averaged over what is open about the parameters of a site, so those of a site with few rows are
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
