"""From the user's rows to the problem's, and back: classes as numbers, an intercept column, standardised features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array
from fedkin.data import Federation
from fedkin.errors import DataError, ParameterError
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import AUTO, FitOptions
from fedkin.graph import Graph
from fedkin.losses import CLASS_LOSSES, Loss, make_loss


@dataclass(frozen=True, eq=False)
class Prepared:
    """Rows as the solver sees them, and the way back."""

    federation: Federation
    original: Federation
    loss: Loss
    classes: tuple[Any, ...] | None
    fit_intercept: bool
    mean: Array
    scale: Array

    @property
    def n_outputs(self) -> int:
        return max(self.loss.n_outputs, 1)

    def per_feature(self, value: float) -> Array:
        """A penalty level for each parameter ``(p,)``, 0 for the intercept."""
        levels = np.full((self.n_outputs, self.federation.n_features), value)
        if self.fit_intercept:
            levels[:, 0] = 0.0
        return levels.reshape(-1)

    def model(self, theta: Array, graph: Graph, options: FitOptions) -> FittedModel:
        """A model with these parameters ``(V, p)``, in the user's units."""
        blocks = theta.reshape(len(theta), self.n_outputs, -1)
        coef, intercept = blocks, np.zeros(blocks.shape[:2])
        if self.fit_intercept:
            coef, intercept = blocks[:, :, 1:] / self.scale, blocks[:, :, 0]
            # sorted out feature by feature, as 0 * mean must stay exactly 0
            intercept = intercept - np.einsum("vkq,q->vk", coef, self.mean)
        elif self.loss.location:
            coef = blocks * self.scale + self.mean
        else:
            coef = blocks / self.scale
        return FittedModel(
            devices=self.original.devices,
            coef=coef,
            intercept=intercept,
            feature_names=self.original.feature_names,
            clusters=np.zeros(len(theta), dtype=np.int64),
            n_samples=self.original.n_samples,
            loss=self.loss,
            penalty=options.penalty,
            lam=0.0,
            gap=0.0,
            n_iter=0,
            status="converged",
            graph=graph,
            fit_intercept=self.fit_intercept,
            classes=self.classes,
            target_name=self.original.target_name,
            offset_name=None if self.original.offset is None else "offset",
            options=options.plain(),
        )


def prepare(federation: Federation, options: FitOptions) -> Prepared:
    """The rows of a federation as ``options`` want them fitted."""
    if not federation.n_samples.all():
        empty = federation.devices[int(np.flatnonzero(federation.n_samples == 0)[0])]
        raise DataError(f"device {empty!r} has no rows to fit: leave it out or give it data")
    loss, classes, encoded = _encoded(federation, options.loss)
    has_intercept = options.fit_intercept and not loss.location
    mean, scale = np.zeros(federation.n_features), np.ones(federation.n_features)
    if options.standardize:
        centred, mean, scale = encoded.standardized()
        if has_intercept or loss.location:
            encoded = centred
        else:
            # without an intercept a shift of the features would be another model
            mean = np.zeros_like(mean)
            encoded = _with_rows(encoded, X=encoded.X / scale)
    if has_intercept:
        encoded = encoded.with_intercept()
    if loss.n_params(encoded.n_features) != max(loss.n_outputs, 1) * encoded.n_features:
        raise ParameterError(
            f"the {loss.name} loss has {loss.n_params(encoded.n_features)} parameters for {encoded.n_features} columns "
            "(the intercept among them); a model has one for each column: use Problem and solve for other losses"
        )
    return Prepared(encoded, federation, loss, classes, has_intercept, mean, scale)


def _encoded(federation: Federation, loss: str | Loss) -> tuple[Loss, tuple[Any, ...] | None, Federation]:
    """The loss, the classes (None for regression), and the federation with targets 0, 1, ... for classes."""
    y = federation.y
    if loss == AUTO:
        loss = "linear" if y is None or y.dtype.kind == "f" else "logistic"
    name = loss if isinstance(loss, str) else loss.name
    if name not in CLASS_LOSSES:
        return make_loss(loss, y), None, federation
    if y is None:
        raise DataError(f"the federation has no target, but the {name} loss needs classes")
    classes, codes = encoded_classes(y, name, federation.target_name)
    if isinstance(loss, str):
        loss = "multinomial" if len(classes) > 2 or name == "multinomial" else "logistic"
    elif len(classes) > loss.n_params(1) + 1:
        raise DataError(f"the target has {len(classes)} classes, more than the given {name} loss has")
    return make_loss(loss, codes), classes, _with_rows(federation, y=codes)


def encoded_classes(y: NDArray[Any], loss: str, target: str | None = None) -> tuple[tuple[Any, ...], Array]:
    """The classes of a target in order, whole numbers as ints, and the number of each row's class.

    Parameters
    ----------
    y : array (n,)
        Labels of any kind.
    loss, target : str
        Names to use in errors.

    Examples
    --------
    >>> import numpy as np
    >>> encoded_classes(np.array(["no", "yes", "no"]), "logistic")
    (('no', 'yes'), array([0., 1., 0.]))
    """
    labels, codes = np.unique(y, return_inverse=True)
    if labels.dtype.kind == "f":
        fractions = labels[labels != np.floor(labels)]
        if fractions.size:
            named = "" if target is None else f" {target!r}"
            raise DataError(
                f"the target{named} has numbers such as {fractions[0]:g}, but the {loss} loss needs classes: "
                'use loss="linear", or a column of labels'
            )
        labels = labels.astype(np.int64)
    classes = tuple(labels.tolist())
    if len(classes) < 2:
        raise DataError(
            f"all {len(codes)} rows have the class {classes[0]!r}; a classifier needs at least two classes in the "
            "federation (a single device may have one class only)"
        )
    return classes, codes.astype(np.float64)


def class_numbers(y: NDArray[Any], classes: tuple[Any, ...]) -> Array:
    """The number of each label of new rows among the classes of a fit."""
    number = {label: k for k, label in enumerate(classes)}
    unknown = [label for label in np.unique(y).tolist() if label not in number]
    if unknown:
        raise DataError(f"class {unknown[0]!r} is in the held-out rows, but not in the training rows")
    return np.array([number[label] for label in y.tolist()], dtype=np.float64)


def _with_rows(federation: Federation, **arrays: Array) -> Federation:
    """The federation with another ``X`` or ``y`` of the same size."""
    rows = replace(federation.rows, **arrays)
    parts = (federation.row_order, federation.feature_names, federation.target_name)
    return Federation._of(federation.devices, federation.n_samples, rows, *parts)
