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

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import BaseCrossValidator
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedkin._base import Array
from fedkin.data import Federation
from fedkin.errors import DataError, FedkinWarning, ParameterError
from fedkin.fitting.fitting import fit_federation
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import AUTO, DEFAULTS, CvRule, FitOptions, PenaltyName, Solver, documented
from fedkin.graph import Graph
from fedkin.losses import CLASS_LOSSES, Loss
from fedkin.stats import Method, Variance

Devices = ArrayLike | Hashable | None

#: The device of all rows when none are named.
SINGLE_DEVICE = "all"
#: Options that scikit-learn's users know by another name.
_NAMES = {"cv_folds": "cv", "seed": "random_state"}
REGRESSION_LOSSES = ("linear", "huber", "poisson")
_NO_DEVICE = (
    "fit was not told the devices of the rows, so it made ONE model for all of them: pass device= with an id per row "
    "(cross_val_score, GridSearchCV and the like pass it on only with metadata routing; groups= never reaches a "
    "model), or device='all' if one model is what you want"
)


class PerDevice:
    """What all estimators share; before scikit-learn's mixins, whose scores know no devices."""

    loss: str | Loss
    model_: FittedModel
    _metric: ClassVar[Callable[..., float]]
    _auto_loss: ClassVar[str]

    def _loss(self) -> str | Loss:
        return self._auto_loss if self.loss == AUTO else self.loss

    def _seed(self, state: int | np.random.RandomState | None) -> int:
        if isinstance(state, np.random.RandomState):
            state = state.randint(2**31)
        return 0 if state is None else int(state)

    def _check_parameters(self) -> None:
        """Raise before any row is looked at."""

    def _fit(self, federation: Federation, graph: Graph | None) -> FittedModel:
        raise NotImplementedError

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        device: Devices = None,
        graph: Graph | None = None,
        offset: ArrayLike | None = None,
    ) -> Self:
        """Fit a model for every device.

        Parameters
        ----------
        X : array (n, q)
            Rows of all devices, in any order.
        y : array (n,)
            Targets, or class labels.
        device : array (n,) of ids, or one id
            The device of each row, or of all rows. Without it all rows are one device, and a `FedkinWarning` says so.
        graph : Graph or networkx graph, optional
            Between the devices; all pairs without it.
        offset : array (n,), optional
            Known part of the linear predictor, such as the log of an exposure.
        """
        self._check_parameters()
        rows, target = self._checked(X, y)
        if device is None:
            warnings.warn(_NO_DEVICE, FedkinWarning, stacklevel=2)
            device = SINGLE_DEVICE
        each = isinstance(device, Iterable) and not isinstance(device, str | bytes)
        ids: Any = device if each else [device] * len(rows)
        names = getattr(self, "feature_names_in_", None)
        federation = Federation.from_arrays(rows, target, ids, offset=offset, feature_names=names)
        model = self._fit(federation, _as_graph(graph))
        squeezed = model.coef.shape[1] == 1
        self.model_ = model
        self.coef_ = model.coef[:, 0] if squeezed else model.coef
        self.intercept_ = model.intercept[:, 0] if squeezed else model.intercept
        self.devices_: tuple[Hashable, ...] = model.devices
        self.graph_ = model.graph
        self.clusters_ = model.clusters
        return self

    def _html_repr(self) -> str:
        """What notebooks show: scikit-learn's diagram before the fit, the model after it."""
        if hasattr(self, "model_"):
            return self.model_._repr_html_().replace("FittedModel", type(self).__name__, 1)
        return str(super()._html_repr())  # type: ignore[misc]

    def _checked(self, X: ArrayLike, y: ArrayLike) -> tuple[Array, NDArray[Any]]:
        raise NotImplementedError

    def predict(self, X: ArrayLike, device: Devices = None, offset: ArrayLike | None = None) -> NDArray[Any]:
        """Mean responses, or class labels.

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
        return self.model_.predict(rows, device, offset)

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        device: Devices = None,
        offset: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> float:
        """R^2 of a regressor, accuracy of a classifier, over all rows.

        Parameters
        ----------
        X, device, offset
            As in `predict`.
        y : array (n,)
            True targets.
        sample_weight : array (n,), optional
            Weights of the rows.
        """
        return float(self._metric(y, self.predict(X, device, offset), sample_weight=sample_weight))

    def _rows(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        rows: Array = validate_data(self, X, reset=False, dtype=np.float64)
        return rows


class PerDeviceRegressor(PerDevice, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Numbers as targets."""

    _metric = staticmethod(r2_score)
    _auto_loss = REGRESSION_LOSSES[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = _loss_name(self._loss()) == "poisson"
        return tags

    def _checked(self, X: ArrayLike, y: ArrayLike) -> tuple[Array, NDArray[Any]]:
        if self.loss in ("mean", *CLASS_LOSSES):
            other = type(self).__name__.replace("Regressor", "Classifier")
            cure = "fedkin.Problem, as it has no target" if self.loss == "mean" else other
            raise ParameterError(f"loss={self.loss!r} is not for regression; use it with {cure}")
        rows, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        return rows, target


class PerDeviceClassifier(PerDevice, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classes as targets."""

    _metric = staticmethod(accuracy_score)
    _auto_loss = CLASS_LOSSES[0]

    def _checked(self, X: ArrayLike, y: ArrayLike) -> tuple[Array, NDArray[Any]]:
        if _loss_name(self._loss()) not in CLASS_LOSSES:
            raise ParameterError(f"loss={self.loss!r} is not for classes; use {' or '.join(map(repr, CLASS_LOSSES))}")
        rows, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels)
        return rows, labels

    def predict(self, X: ArrayLike, device: Devices = None, offset: ArrayLike | None = None) -> NDArray[Any]:
        """Class labels; arguments as in `PerDevice.predict`."""
        chances = self.predict_proba(X, device, offset)
        labels: NDArray[Any] = self.classes_[chances.argmax(axis=1)]
        return labels

    def predict_proba(self, X: ArrayLike, device: Devices = None, offset: ArrayLike | None = None) -> Array:
        """Probabilities ``(n, C)`` of the classes, in the order of `classes_`; arguments as in `predict`."""
        rows = self._rows(X)
        return self.model_.predict_proba(rows, device, offset)

    def decision_function(self, X: ArrayLike, device: Devices = None, offset: ArrayLike | None = None) -> Array:
        """Logits ``(n,)`` of the second class, or ``(n, C)`` with 0 for the first class; arguments as in `predict`."""
        rows = self._rows(X)
        eta = self.model_.linear_predictor(rows, device, offset)
        if len(self.classes_) == 2:
            return np.asarray(eta[:, 0])
        return np.column_stack([np.zeros(len(eta)), eta])


class _FedADMM(PerDevice):
    """The paper's estimator."""

    def __init__(
        self,
        loss: str | Loss = FitOptions.loss,
        penalty: PenaltyName = FitOptions.penalty,
        lam: float | Literal["cv"] = FitOptions.lam,
        select: Method | Literal["none"] | None = FitOptions.select,
        level: float = FitOptions.level,
        variance: Variance = FitOptions.variance,
        refit: bool = FitOptions.refit,
        fit_intercept: bool = FitOptions.fit_intercept,
        standardize: bool = FitOptions.standardize,
        ridge: float = FitOptions.ridge,
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
        self.max_iter = max_iter
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.solver = solver
        self.rounds = rounds
        self.batch_size = batch_size

    def _options(self) -> FitOptions:
        options = {
            name: getattr(self, _NAMES.get(name, name)) for name in DEFAULTS if hasattr(self, _NAMES.get(name, name))
        }
        return FitOptions(method="fused", **options | {"loss": self._loss(), "seed": self._seed(self.random_state)})

    def _check_parameters(self) -> None:
        self._options()

    def _fit(self, federation: Federation, graph: Graph | None) -> FittedModel:
        model = fit_federation(federation, graph, self._options())
        self.lam_ = model.lam
        self.gap_ = model.gap
        self.n_iter_ = model.n_iter
        if model.selection is not None:
            self.selection_ = model.selection
        elif hasattr(self, "selection_"):
            del self.selection_
        return model


class FedADMMRegressor(_FedADMM, PerDeviceRegressor):
    """A regression for every device, with devices that are alike sharing what they know.

    Minimises ``(1/|V|) sum_u M_u(theta_u) + lam sum_e w_e phi(theta_i - theta_j)`` over the edges of a graph between
    the devices, M_u being the mean loss of device u. All options, their names and defaults are those of
    `fedkin.fitting.FitOptions`, except that `cv` stands for `cv_folds` and `random_state` for `seed`.

    Parameters
    ----------
    <options>

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
    >>> model = FedADMMRegressor().fit(X, y, device=site)
    >>> model.clusters_
    array([0, 0, 1])
    >>> model.predict([[1.0, 0.0]], device="c").round(1)
    array([-1.])
    """

    __doc__ = documented(__doc__, _NAMES, REGRESSION_LOSSES)


class FedADMMClassifier(_FedADMM, PerDeviceClassifier):
    """A logistic regression for every device, with devices that are alike sharing what they know.

    Parameters
    ----------
    <options>

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
    The losses are "logistic", which becomes multinomial for more than two classes, and "multinomial".

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

    __doc__ = documented(__doc__, _NAMES, CLASS_LOSSES)


class WithinDeviceKFold(BaseCrossValidator):  # type: ignore[misc]
    """K folds to which every device gives rows: the devices are the ``groups``.

    Parameters
    ----------
    n_splits : int
        Number of folds.
    seed : int
        Seed of the shuffle within each device.

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
            Only its number of rows matters.
        y : ignored
            Present for the interface.
        groups : array (n,) of ids
            The device of each row.
        """
        if groups is None:
            raise DataError("WithinDeviceKFold needs the device of each row: pass groups=device")
        n = int(X.shape[0]) if hasattr(X, "shape") else len(X)
        rows = Federation.from_arrays(np.zeros((n, 1)), None, groups)  # type: ignore[arg-type]
        fold = np.empty(n, dtype=np.int64)
        fold[rows.row_order] = np.where(rows.n_samples[rows.device_index] > 1, rows.folds(self.n_splits, self.seed), -1)
        empty = np.setdiff1d(np.arange(self.n_splits), fold)
        if empty.size:
            raise DataError(
                f"fold {empty[0]} of {self.n_splits} has no rows, as the devices have few: take fewer folds, or "
                "another seed"
            )
        for k in range(self.n_splits):
            yield np.flatnonzero(fold != k), np.flatnonzero(fold == k)


def _loss_name(loss: Any) -> str:
    return str(getattr(loss, "name", loss))


def _as_graph(graph: Any) -> Graph | None:
    if graph is None or isinstance(graph, Graph):
        return graph
    if hasattr(graph, "is_directed"):
        return Graph.from_networkx(graph)
    raise ParameterError(
        f"graph must be a fedkin.Graph or a networkx graph, got {type(graph).__name__}; see fedkin.Graph"
    )
