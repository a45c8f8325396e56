"""The scikit-learn face: `FedADMMRegressor`, `FedADMMClassifier`, and folds cut within devices.

The device of each row travels beside X, as scikit-learn's metadata does::

    import sklearn
    sklearn.set_config(enable_metadata_routing=True)

    model = FedADMMRegressor().set_fit_request(device=True).set_score_request(device=True)
    cross_val_score(model, X, y, cv=WithinDeviceKFold(5), params={"device": device, "groups": device})

Folds have to be cut within devices: an unshuffled `KFold` puts whole devices into the test, and a device without
training rows has no model to be tested.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import BaseCrossValidator
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedkin.data import Federation
from fedkin.errors import DataError, ParameterError
from fedkin.fitting.fitting import fit_federation
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import plain_classes
from fedkin.graph import Graph
from fedkin.losses import CLASS_LOSSES, Loss

Array = NDArray[np.float64]

#: The device of all rows when none are named.
SINGLE_DEVICE = "all"


class _FedADMM(BaseEstimator):  # type: ignore[misc]
    """What regressor and classifier share."""

    model_: FittedModel

    def __init__(
        self,
        loss: str | Loss = "linear",
        penalty: str = "l1",
        lam: float | Literal["cv"] = "cv",
        select: str | None = None,
        level: float = 0.05,
        variance: str = "model",
        refit: bool = False,
        fit_intercept: bool = True,
        standardize: bool = False,
        ridge: float = 0.0,
        sparsity: float = 0.0,
        cv: int = 5,
        cv_rule: str = "min",
        tol: float = 1e-6,
        random_state: int | np.random.RandomState | None = None,
        n_jobs: int | None = None,
        solver: str = "exact",
        rounds: int = 1000,
        batch_size: int | None = None,
    ) -> None:
        self.loss = loss
        self.penalty = penalty
        self.lam = lam
        self.select = select
        self.level = level
        self.variance = variance
        self.refit = refit
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.ridge = ridge
        self.sparsity = sparsity
        self.cv = cv
        self.cv_rule = cv_rule
        self.tol = tol
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.solver = solver
        self.rounds = rounds
        self.batch_size = batch_size

    def _options(self) -> FitOptions:
        state = self.random_state
        if isinstance(state, np.random.RandomState):
            state = int(state.randint(2**31))
        return FitOptions(
            loss=self.loss,
            penalty=self.penalty,
            lam=self.lam,
            select=self.select,  # type: ignore[arg-type]
            level=self.level,
            variance=self.variance,  # type: ignore[arg-type]
            refit=self.refit,
            fit_intercept=self.fit_intercept,
            standardize=self.standardize,
            ridge=self.ridge,
            sparsity=self.sparsity,
            cv_folds=self.cv,
            cv_rule=self.cv_rule,  # type: ignore[arg-type]
            tol=self.tol,
            seed=0 if state is None else int(state),
            n_jobs=self.n_jobs,
            solver=self.solver,  # type: ignore[arg-type]
            rounds=self.rounds,
            batch_size=self.batch_size,
        )

    def _fit(
        self,
        X: Array,
        y: NDArray[Any],
        device: Any,
        graph: Any,
        offset: ArrayLike | None,
        classes: tuple[Any, ...] | None = None,
    ) -> Self:
        ids = np.full(len(X), SINGLE_DEVICE) if device is None else device
        names = getattr(self, "feature_names_in_", None)
        federation = Federation.from_arrays(X, y, ids, offset=offset, feature_names=names)
        model = replace(fit_federation(federation, _as_graph(graph), self._options()), classes=classes)
        squeezed = model.coef.shape[1] == 1
        self.model_ = model
        self.coef_ = model.coef[:, 0] if squeezed else model.coef
        self.intercept_ = model.intercept[:, 0] if squeezed else model.intercept
        self.devices_: tuple[Hashable, ...] = model.devices
        self.graph_ = model.graph
        self.clusters_ = model.clusters
        self.lam_ = model.lam
        self.gap_ = model.gap
        self.n_iter_ = model.n_iter
        if self.select is not None:
            self.selection_ = model.selection
        elif hasattr(self, "selection_"):
            del self.selection_
        return self

    def _rows(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        rows: Array = validate_data(self, X, reset=False, dtype=np.float64)
        return rows


class FedADMMRegressor(RegressorMixin, _FedADMM):  # type: ignore[misc]
    """A regression for every device, with devices that are alike sharing what they know.

    Minimises ``(1/|V|) sum_u M_u(theta_u) + lam sum_e w_e phi(theta_i - theta_j)`` over the edges of a graph between
    the devices, M_u being the mean loss of device u.

    Parameters
    ----------
    loss : "linear" | "huber" | "poisson" or Loss, default "linear"
        Squared error, Huber's loss, counts with a log link, or a custom loss (`fedkin.losses.UserLoss`).
    penalty : "l1" | "l2" | "linf", default "l1"
        phi. l1 fuses coefficient by coefficient, l2 and linf whole devices.
    lam : float or "cv", default "cv"
        The penalty level, or its choice by cross-validation within devices; 0 with one device or without edges.
    select : None | "bonferroni" | "holm" | "bh" | "by", default None
        Test the edges first (section 3.2 of the paper) and keep those whose ends look alike.
    level : float, default 0.05
        Of that test.
    variance : "model" | "sandwich" | "bartlett", default "model"
        Of that test; see `fedkin.select_edges`.
    refit : bool, default False
        Fit each group of devices in `clusters_` once more, pooled and without penalty.
    fit_intercept : bool, default True
        Add a constant, which is fused like the coefficients, but not subject to `ridge` and `sparsity`.
    standardize : bool, default False
        Fit on features of pooled mean 0 and standard deviation 1; `coef_` is in the units of X all the same.
    ridge, sparsity : float, default 0
        The extras ``(1/|V|) sum_u ridge ||theta_u||^2 / 2`` and ``(1/|V|) sum_u sparsity ||theta_u||_1``.
    cv : int, default 5
        Folds of the choice of lam.
    cv_rule : "min" | "1se", default "min"
        The best lam, or the largest within one standard error of it.
    tol : float, default 1e-6
        Relative duality gap to reach.
    random_state : int, RandomState or None, default None
        Of the folds. None is the same as 0: a fit can always be repeated.
    n_jobs : int or None
        Folds at the same time.
    solver : "exact" | "fedadmm", default "exact"
        `fedkin.solve`, or the rounds that devices between themselves would do (`fedkin.fed_admm`).
    rounds, batch_size : int, default 1000 and None
        Of "fedadmm": the most rounds, and the rows that a device draws in each (all by default; SAGA on batches).

    Attributes
    ----------
    devices_ : tuple of V ids
    coef_ : array (V, q)
        A row per device, in the order of `devices_`.
    intercept_ : array (V,)
    clusters_ : int array (V,)
        Group of each device: with `select`, devices joined by kept edges; without it, devices joined by edges whose
        parameters came out exactly equal.
    graph_ : Graph
        The graph used, after selection.
    lam_, gap_ : float
        The penalty level used, and the certificate: a relative duality gap.
    n_iter_ : int
    selection_ : dict
        Summary of the edge selection, with `select` only.
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
    >>> model = FedADMMRegressor(select="bonferroni").fit(X, y, device=site)
    >>> model.clusters_
    array([0, 0, 1])
    >>> model.predict([[1.0, 0.0]], device="c").round(1)
    array([-1.])
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.loss == "poisson" or getattr(self.loss, "name", None) == "poisson"
        return tags

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        device: ArrayLike | None = None,
        graph: Graph | None = None,
        offset: ArrayLike | None = None,
    ) -> Self:
        """Fit a model for every device.

        Parameters
        ----------
        X : array (n, q)
            Rows of all devices, in any order.
        y : array (n,)
            Targets.
        device : array (n,) of ids, optional
            The device of each row; without it all rows are one device.
        graph : Graph or networkx graph, optional
            Between the devices; all pairs without it.
        offset : array (n,), optional
            Known part of the linear predictor, such as the log of an exposure.
        """
        if self.loss == "mean" or (isinstance(self.loss, str) and self.loss in CLASS_LOSSES):
            cure = "FedADMMClassifier" if self.loss in CLASS_LOSSES else "fedkin.Problem, as it has no target"
            raise ParameterError(f"loss={self.loss!r} is not for regression; use it with {cure}")
        rows, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        return self._fit(rows, target, device, graph, offset)

    def predict(
        self, X: ArrayLike, device: ArrayLike | Hashable | None = None, offset: ArrayLike | None = None
    ) -> Array:
        """Mean responses.

        Parameters
        ----------
        X : array (n, q)
            Rows to predict.
        device : array (n,) of ids, or one id
            The device of each row, or of all rows. It may be left out only when one device was fitted.
        offset : array (n,), optional
            Needed when the fit had one.

        Returns
        -------
        array (n,)
        """
        rows = self._rows(X)
        return np.asarray(self.model_.predict(rows, device, offset))

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        device: ArrayLike | Hashable | None = None,
        offset: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> float:
        """R^2 over all rows.

        Parameters
        ----------
        X, device, offset
            As in `predict`.
        y : array (n,)
            True targets.
        sample_weight : array (n,), optional
            Weights of the rows.
        """
        return float(r2_score(y, self.predict(X, device, offset), sample_weight=sample_weight))


class FedADMMClassifier(ClassifierMixin, _FedADMM):  # type: ignore[misc]
    """A logistic regression for every device, with devices that are alike sharing what they know.

    Parameters
    ----------
    loss : "logistic" | "multinomial" or Loss, default "logistic"
        "logistic" is binary for two classes and multinomial for more.
    penalty, lam, select, level, variance, refit, fit_intercept, standardize, ridge, sparsity, cv, cv_rule, tol, \
random_state, n_jobs, solver, rounds, batch_size
        As in `FedADMMRegressor`.

    Attributes
    ----------
    classes_ : array (C,)
    coef_ : array (V, q), or (V, C - 1, q) for more than two classes
        A row per device, in the order of `devices_`. The first class is the reference.
    intercept_ : array (V,) or (V, C - 1)
    devices_, clusters_, graph_, lam_, gap_, n_iter_, selection_, model_, n_features_in_, feature_names_in_
        As in `FedADMMRegressor`.

    Notes
    -----
    A device may have rows of one class only: it learns from the devices that it is joined to. When nothing holds the
    parameters back (separated classes on a whole component of the graph), a ridge of a 25th of one row is added and a
    `DegenerateDeviceWarning` says so.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin import FedADMMClassifier
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(400, 1)), np.repeat([1, 2], 200)
    >>> y = np.where(X[:, 0] + rng.logistic(size=400) > 0, "yes", "no")
    >>> model = FedADMMClassifier(lam=0.1).fit(X, y, device=site)
    >>> model.predict([[3.0], [-3.0]], device=[1, 2]).tolist()
    ['yes', 'no']
    """

    def __init__(
        self,
        loss: str | Loss = "logistic",
        penalty: str = "l1",
        lam: float | Literal["cv"] = "cv",
        select: str | None = None,
        level: float = 0.05,
        variance: str = "model",
        refit: bool = False,
        fit_intercept: bool = True,
        standardize: bool = False,
        ridge: float = 0.0,
        sparsity: float = 0.0,
        cv: int = 5,
        cv_rule: str = "min",
        tol: float = 1e-6,
        random_state: int | np.random.RandomState | None = None,
        n_jobs: int | None = None,
        solver: str = "exact",
        rounds: int = 1000,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(
            loss=loss,
            penalty=penalty,
            lam=lam,
            select=select,
            level=level,
            variance=variance,
            refit=refit,
            fit_intercept=fit_intercept,
            standardize=standardize,
            ridge=ridge,
            sparsity=sparsity,
            cv=cv,
            cv_rule=cv_rule,
            tol=tol,
            random_state=random_state,
            n_jobs=n_jobs,
            solver=solver,
            rounds=rounds,
            batch_size=batch_size,
        )

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        device: ArrayLike | None = None,
        graph: Graph | None = None,
        offset: ArrayLike | None = None,
    ) -> Self:
        """Fit a model for every device.

        Parameters
        ----------
        X : array (n, q)
            Rows of all devices, in any order.
        y : array (n,)
            Class labels.
        device : array (n,) of ids, optional
            The device of each row; without it all rows are one device.
        graph : Graph or networkx graph, optional
            Between the devices; all pairs without it.
        offset : array (n,), optional
            Known part of the linear predictor.
        """
        name = self.loss if isinstance(self.loss, str) else self.loss.name
        if name not in CLASS_LOSSES:
            raise ParameterError(f"loss={self.loss!r} is not for classes; use {' or '.join(map(repr, CLASS_LOSSES))}")
        rows, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(
                f"all {len(rows)} rows have the class {self.classes_[0]!r}; a classifier needs at least two classes "
                "(a single device may have one class only)"
            )
        return self._fit(rows, codes, device, graph, offset, plain_classes(self.classes_))

    def predict(
        self, X: ArrayLike, device: ArrayLike | Hashable | None = None, offset: ArrayLike | None = None
    ) -> NDArray[Any]:
        """Class labels.

        Parameters
        ----------
        X : array (n, q)
            Rows to predict.
        device : array (n,) of ids, or one id
            The device of each row, or of all rows. It may be left out only when one device was fitted.
        offset : array (n,), optional
            Needed when the fit had one.

        Returns
        -------
        array (n,)
        """
        chances = self.predict_proba(X, device, offset)
        labels: NDArray[Any] = self.classes_[chances.argmax(axis=1)]
        return labels

    def predict_proba(
        self, X: ArrayLike, device: ArrayLike | Hashable | None = None, offset: ArrayLike | None = None
    ) -> Array:
        """Probabilities ``(n, C)`` of the classes, in the order of `classes_`; arguments as in `predict`."""
        rows = self._rows(X)
        return self.model_.predict_proba(rows, device, offset)

    def decision_function(
        self, X: ArrayLike, device: ArrayLike | Hashable | None = None, offset: ArrayLike | None = None
    ) -> Array:
        """Logits ``(n,)`` of the second class, or ``(n, C)`` with 0 for the first class; arguments as in `predict`."""
        rows = self._rows(X)
        eta = self.model_.linear_predictor(rows, device, offset)
        if len(self.classes_) == 2:
            return np.asarray(eta[:, 0])
        return np.column_stack([np.zeros(len(eta)), eta])

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        device: ArrayLike | Hashable | None = None,
        offset: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> float:
        """Accuracy over all rows.

        Parameters
        ----------
        X, device, offset
            As in `predict`.
        y : array (n,)
            True labels.
        sample_weight : array (n,), optional
            Weights of the rows.
        """
        return float(accuracy_score(y, self.predict(X, device, offset), sample_weight=sample_weight))


class WithinDeviceKFold(BaseCrossValidator):  # type: ignore[misc]
    """K folds to which every device gives rows: the devices are the ``groups``.

    Parameters
    ----------
    n_splits : int
        Number of folds.
    seed : int
        Of the shuffle within each device.

    Notes
    -----
    A device with fewer rows than folds gives its rows to some of the folds, one each, so it always keeps training
    rows; a device with one row stays in the training part.

    Examples
    --------
    >>> import numpy as np
    >>> device = np.repeat(["a", "b"], 4)
    >>> for train, test in WithinDeviceKFold(2).split(np.zeros((8, 1)), groups=device):
    ...     print(device[test])
    ['a' 'a' 'b' 'b']
    ['a' 'a' 'b' 'b']
    """

    # scikit-learn's way to say that split() wants groups without being asked
    __metadata_request__split = {"groups": True}  # noqa: RUF012

    def __init__(self, n_splits: int = 5, seed: int = 0) -> None:
        self.n_splits = n_splits
        self.seed = seed

    def get_n_splits(self, X: object = None, y: object = None, groups: object = None) -> int:
        """Number of folds."""
        return self.n_splits

    def split(
        self, X: Any, y: object = None, groups: ArrayLike | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Row numbers of training and test for every fold.

        Parameters
        ----------
        X : array (n, q)
            Its number of rows matters only.
        y : ignored
            Present for the interface.
        groups : array (n,) of ids
            The device of each row.
        """
        if groups is None:
            raise DataError("WithinDeviceKFold needs the device of each row: pass groups=device")
        rows = Federation.from_arrays(np.zeros((_n_rows(X), 1)), None, groups)  # type: ignore[arg-type]
        fold = np.empty(len(rows.X), dtype=np.int64)
        fold[rows.row_order] = np.where(rows.n_samples[rows.device_index] > 1, rows.folds(self.n_splits, self.seed), -1)
        for k in range(self.n_splits):
            yield np.flatnonzero(fold != k), np.flatnonzero(fold == k)


def _n_rows(X: Any) -> int:
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)


def _as_graph(graph: Any) -> Graph | None:
    if graph is None or isinstance(graph, Graph):
        return graph
    if hasattr(graph, "is_directed"):
        return Graph.from_networkx(graph)
    raise ParameterError(
        f"graph must be a fedkin.Graph or a networkx graph, got {type(graph).__name__}; see fedkin.Graph"
    )
