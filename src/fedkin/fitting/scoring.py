"""Scores of scikit-learn for models that must be told the device of each row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import get_scorer
from sklearn.utils.metadata_routing import MetadataRequest


class DeviceScorer:
    """One of scikit-learn's scorers, by name, that hands ``device`` and ``offset`` on to ``predict``.

    scikit-learn's own scorers pass such things to the metric, never to the model, so they cannot score a model of
    several devices. This one can be used as ``scoring=`` wherever metadata routing is on.

    Parameters
    ----------
    scoring : str
        A name that `sklearn.metrics.get_scorer` knows: "roc_auc", "neg_mean_squared_error", ...
    per_device : bool
        Average the scores of the devices with more than one value of y, instead of scoring all rows together.

    Examples
    --------
    >>> import numpy as np, sklearn
    >>> from sklearn.model_selection import cross_val_score
    >>> from fedkin import FedADMMRegressor
    >>> from fedkin.fitting.estimators import WithinDeviceKFold
    >>> from fedkin.fitting.scoring import DeviceScorer
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(90, 2)), np.repeat(["a", "b", "c"], 30)
    >>> y = X[:, 0] + 0.1 * rng.normal(size=90)
    >>> with sklearn.config_context(enable_metadata_routing=True):
    ...     model = FedADMMRegressor(lam=0.01).set_fit_request(device=True)
    ...     scores = cross_val_score(
    ...         model, X, y, scoring=DeviceScorer("neg_mean_squared_error"),
    ...         cv=WithinDeviceKFold(3), params={"device": site, "groups": site},
    ...     )
    >>> bool((scores > -0.02).all())
    True
    """

    def __init__(self, scoring: str, per_device: bool = False) -> None:
        self.scoring = scoring
        self.per_device = per_device
        self._scorer = get_scorer(scoring)

    def __call__(
        self,
        estimator: Any,
        X: Any,
        y: ArrayLike,
        device: ArrayLike | None = None,
        offset: ArrayLike | None = None,
    ) -> float:
        """Score of ``estimator`` on rows ``X (n, q)`` with targets ``y (n,)`` of the given devices."""
        if not self.per_device or device is None:
            return float(self._scorer(_AtDevices(estimator, device, offset), X, y))
        ids, y = np.asarray(device), np.asarray(y)
        scores = []
        for one in np.unique(ids):
            rows = np.flatnonzero(ids == one)
            part = None if offset is None else np.asarray(offset)[rows]
            if np.unique(y[rows]).size > 1:
                scores.append(float(self._scorer(_AtDevices(estimator, ids[rows], part), _rows(X, rows), y[rows])))
        return float(np.mean(scores)) if scores else float("nan")

    def get_metadata_routing(self) -> MetadataRequest:
        """What scikit-learn should hand to this scorer."""
        request = MetadataRequest(owner=self)
        request.score.add_request(param="device", alias=True)
        request.score.add_request(param="offset", alias=True)
        return request

    def __repr__(self) -> str:
        return f"DeviceScorer({self.scoring!r}, per_device={self.per_device})"


class _AtDevices:
    """A fitted model together with the devices and offsets of the rows that it is about to see."""

    def __init__(self, estimator: Any, device: ArrayLike | None, offset: ArrayLike | None) -> None:
        self._estimator, self._device, self._offset = estimator, device, offset

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._estimator, name)
        if name not in ("predict", "predict_proba", "decision_function"):
            return found
        named = {"device": self._device, "offset": self._offset}
        given = {key: value for key, value in named.items() if value is not None}

        def at_devices(X: Any) -> Any:
            return found(X, **given)

        at_devices.__name__ = name  # scikit-learn tells methods apart by their names
        return at_devices

    def __sklearn_tags__(self) -> Any:
        return self._estimator.__sklearn_tags__()


def _rows(X: Any, rows: NDArray[np.int64]) -> Any:
    return X.iloc[rows] if hasattr(X, "iloc") else np.asarray(X)[rows]
