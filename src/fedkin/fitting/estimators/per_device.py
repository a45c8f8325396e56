"""What all estimators share: the device of each row, rows that come later, predictions that must know the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedkin._base import Array, listed
from fedkin.data import Federation
from fedkin.errors import DataError, FedkinWarning, ParameterError
from fedkin.fitting.estimators.scoring import AtDevices, split_column
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import AUTO
from fedkin.graph import Graph
from fedkin.losses import CLASS_LOSSES, Loss

Devices = ArrayLike | Hashable | None

#: The device of all rows when none are named.
SINGLE_DEVICE = "all"
REGRESSION_LOSSES = ("linear", "huber", "poisson")
_NO_DEVICE = (
    "fit was not told the devices of the rows, so it made ONE model for all of them: pass device= with an id per row "
    "(cross_val_score, GridSearchCV and the like pass it on only with metadata routing; groups= never reaches a "
    "model), name a column of X with device_column=, or say device='all' if one model is what you want"
)
_SAY_DEVICE = (
    "the model has {n} devices, so it must be told which one each row belongs to: device= one of {some}, or a list "
    "with an id per row. Where scikit-learn calls it (scoring=, permutation_importance, CalibratedClassifierCV), use "
    "fedkin.DeviceScorer with metadata routing, model.at(device), or ids in a column of X that device_column= names"
)


class PerDevice:
    """What all estimators share; before scikit-learn's mixins, whose scores know no devices."""

    # scikit-learn's way to say which metadata methods want without being asked: nobody has to call set_fit_request
    __metadata_request__fit = {"device": True, "graph": True, "offset": True}  # noqa: RUF012
    __metadata_request__partial_fit = {"device": True, "graph": True, "offset": True}  # noqa: RUF012
    __metadata_request__predict = {"device": True, "offset": True}  # noqa: RUF012
    __metadata_request__predict_proba = {"device": True, "offset": True}  # noqa: RUF012
    __metadata_request__decision_function = {"device": True, "offset": True}  # noqa: RUF012
    __metadata_request__score = {"device": True, "offset": True}  # noqa: RUF012

    loss: str | Loss
    device_column: str | int | None
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
            The device of each row, or of all rows. Without it, and without ``device_column``, all rows are one device,
            and a `FedkinWarning` says so.
        graph : Graph or networkx graph, optional
            Between the devices; all pairs without it.
        offset : array (n,), optional
            Known part of the linear predictor, such as the log of an exposure.
        """
        self._check_parameters()
        X, device = self._apart(X, device)
        rows, target = self._checked(X, y)
        if device is None:
            warnings.warn(_NO_DEVICE, FedkinWarning, stacklevel=2)
            device = SINGLE_DEVICE
        return self._fit_seen(self._stacked(rows, target, device, offset), graph)

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        device: Devices = None,
        graph: Graph | None = None,
        offset: ArrayLike | None = None,
    ) -> Self:
        """Add rows to those of earlier fits: of devices that were there, or of new ones.

        Parameters
        ----------
        X, y, device, graph, offset
            As in `fit`.

        Notes
        -----
        The result is that of `fit` on all rows, to the bit, for every loss: the estimator keeps the rows. Where they
        must not be kept, sums do for least squares: `fedkin.summarise` every part, and fit the summaries.
        """
        if not hasattr(self, "model_") or not hasattr(self, "_seen"):
            return self.fit(X, y, device, graph, offset)
        seen: Federation = self._seen
        X, device = self._apart(X, device)
        rows, target = self._checked(X, y, reset=False)
        if device is None and seen.devices != (SINGLE_DEVICE,):
            raise DataError("partial_fit was not told the devices of the rows: pass device= with an id per row")
        more = self._stacked(rows, target, SINGLE_DEVICE if device is None else device, offset)
        if (more.offset is None) != (seen.offset is None):
            raise DataError("rows of one model have an offset all or none: give offset= as before")
        return self._fit_seen(_appended(seen, more), graph)

    def _apart(self, X: Any, device: Devices) -> tuple[Any, Devices]:
        """X without the column of devices, and the devices: those given, or those of the column."""
        if self.device_column is None:
            return X, device
        rest, ids = split_column(X, self.device_column)
        if ids is None and device is None:
            raise DataError(
                f"X has no column {self.device_column!r}, which device_column= names: add it, or pass device="
            )
        return rest, ids if device is None else device

    def _stacked(self, rows: Array, target: NDArray[Any], device: Devices, offset: ArrayLike | None) -> Federation:
        each = isinstance(device, Iterable) and not isinstance(device, str | bytes)
        ids: Any = device if each else [device] * len(rows)
        names = getattr(self, "feature_names_in_", None)
        return Federation.from_arrays(rows, target, ids, offset=offset, feature_names=names)

    def _fit_seen(self, federation: Federation, graph: Any) -> Self:
        model = self._fit(federation, _as_graph(graph))
        self._seen = federation
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

    def _checked(self, X: ArrayLike, y: ArrayLike, reset: bool = True) -> tuple[Array, NDArray[Any]]:
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
        rows, device = self._rows(X, device)
        return self.model_.predict(rows, device, offset)

    def at(self, device: Devices, offset: ArrayLike | None = None) -> AtDevices:
        """The fitted model for certain rows: it predicts them without being told their devices again.

        Parameters
        ----------
        device : array (n,) of ids, or one id
            The devices of the rows that it will see, in their order.
        offset : array (n,), optional
            Their offsets.

        Examples
        --------
        >>> import numpy as np
        >>> from sklearn.inspection import permutation_importance
        >>> from fedkin import KinRegressor
        >>> rng = np.random.default_rng(0)
        >>> X, site = rng.normal(size=(120, 2)), np.repeat(["a", "b", "c"], 40)
        >>> y = X[:, 0] + 0.1 * rng.normal(size=120)
        >>> model = KinRegressor().fit(X, y, device=site)
        >>> found = permutation_importance(model.at(site), X, y, random_state=0).importances_mean
        >>> bool(found[0] > 1 > abs(found[1]))
        True
        """
        check_is_fitted(self)
        return AtDevices(self, device, offset)

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

    def _rows(self, X: ArrayLike, device: Devices) -> tuple[Array, Devices]:
        check_is_fitted(self)
        X, device = self._apart(X, device)
        rows: Array = validate_data(self, X, reset=False, dtype=np.float64)
        if device is None and len(self.devices_) > 1:
            raise DataError(_SAY_DEVICE.format(n=len(self.devices_), some=listed(self.devices_)))
        return rows, device


class PerDeviceRegressor(PerDevice, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Numbers as targets."""

    _metric = staticmethod(r2_score)
    _auto_loss = REGRESSION_LOSSES[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = _loss_name(self._loss()) == "poisson"
        return tags

    def _checked(self, X: ArrayLike, y: ArrayLike, reset: bool = True) -> tuple[Array, NDArray[Any]]:
        if self.loss in ("mean", *CLASS_LOSSES):
            other = type(self).__name__.replace("Regressor", "Classifier")
            cure = "fedkin.Problem, as it has no target" if self.loss == "mean" else other
            raise ParameterError(f"loss={self.loss!r} is not for regression; use it with {cure}")
        rows, target = validate_data(self, X, y, reset=reset, dtype=np.float64, y_numeric=True)
        return rows, target


class PerDeviceClassifier(PerDevice, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classes as targets."""

    classes_: NDArray[Any]
    _metric = staticmethod(accuracy_score)
    _auto_loss = CLASS_LOSSES[0]

    def _checked(self, X: ArrayLike, y: ArrayLike, reset: bool = True) -> tuple[Array, NDArray[Any]]:
        if _loss_name(self._loss()) not in CLASS_LOSSES:
            raise ParameterError(f"loss={self.loss!r} is not for classes; use {' or '.join(map(repr, CLASS_LOSSES))}")
        rows, labels = validate_data(self, X, y, reset=reset, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_ = np.unique(labels if reset else np.concatenate([self.classes_, labels]))
        return rows, labels

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        device: Devices = None,
        graph: Graph | None = None,
        offset: ArrayLike | None = None,
        classes: ArrayLike | None = None,
    ) -> Self:
        """Add rows to those of earlier fits, see `PerDevice.partial_fit`.

        Parameters
        ----------
        X, y, device, graph, offset
            As in `fit`.
        classes : array (C,), optional
            Labels that may occur; others are refused. Without it, a class may come with any rows.
        """
        unknown = [] if classes is None else np.setdiff1d(np.asarray(y), np.asarray(classes)).tolist()
        if unknown:
            raise DataError(f"class {unknown[0]!r} of y is not among classes=: add it there, or leave classes out")
        return super().partial_fit(X, y, device, graph, offset)

    def predict(self, X: ArrayLike, device: Devices = None, offset: ArrayLike | None = None) -> NDArray[Any]:
        """Class labels; arguments as in `PerDevice.predict`."""
        chances = self.predict_proba(X, device, offset)
        labels: NDArray[Any] = self.classes_[chances.argmax(axis=1)]
        return labels

    def predict_proba(self, X: ArrayLike, device: Devices = None, offset: ArrayLike | None = None) -> Array:
        """Probabilities ``(n, C)`` of the classes, in the order of `classes_`; arguments as in `predict`."""
        rows, device = self._rows(X, device)
        return self.model_.predict_proba(rows, device, offset)

    def decision_function(self, X: ArrayLike, device: Devices = None, offset: ArrayLike | None = None) -> Array:
        """Logits ``(n,)`` of the second class, or ``(n, C)`` with 0 for the first class; arguments as in `predict`."""
        rows, device = self._rows(X, device)
        eta = self.model_.linear_predictor(rows, device, offset)
        if len(self.classes_) == 2:
            return np.asarray(eta[:, 0])
        return np.column_stack([np.zeros(len(eta)), eta])


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


def _appended(seen: Federation, more: Federation) -> Federation:
    """The rows of both, as if they had come in one table: the earlier ones first."""

    def both(name: str) -> Any:
        first, second = getattr(seen, name), getattr(more, name)
        if first is None:
            return None
        # in the order in which the rows came
        return np.concatenate([_unstacked(seen, first), _unstacked(more, second)])

    ids = [one.devices[u] for one in (seen, more) for u in _unstacked(one, one.device_index).tolist()]
    parts = {name: both(name) for name in ("X", "y", "offset")}
    return Federation.from_arrays(parts["X"], parts["y"], ids, offset=parts["offset"], feature_names=seen.feature_names)


def _unstacked(federation: Federation, stacked: NDArray[Any]) -> NDArray[Any]:
    out = np.empty_like(stacked)
    out[federation.row_order] = stacked
    return out
