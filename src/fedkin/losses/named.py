"""Losses by name, and as files and messages keep them: name and parameters, never code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from numpy.typing import NDArray

from fedkin.errors import DataError, FedkinWarning, ModelFileError, ParameterError
from fedkin.losses.builtin import HuberLoss, LinearLoss, LogisticLoss, MeanLoss, MultinomialLoss, PoissonLoss
from fedkin.losses.custom import UserLoss
from fedkin.losses.interface import Loss

_NAMED: dict[str, type[Loss]] = {
    kind.name: kind for kind in (MeanLoss, LinearLoss, LogisticLoss, PoissonLoss, HuberLoss, MultinomialLoss)
}
LOSS_NAMES = tuple(_NAMED)
#: Losses whose targets are classes.
CLASS_LOSSES = tuple(name for name, kind in _NAMED.items() if kind.needs_classes)
#: Losses whose targets are numbers.
REGRESSION_LOSSES = tuple(name for name, kind in _NAMED.items() if kind.needs_target and not kind.needs_classes)
#: Losses that compiled loops know.
COMPILED_LOSSES = tuple(name for name, kind in _NAMED.items() if kind.compiled)


def make_loss(loss: str | Loss, y: NDArray[Any] | None = None) -> Loss:
    """The loss of that name; ``y`` (all sites' targets) tells "multinomial" its number of classes.

    Examples
    --------
    >>> from fedkin.losses import make_loss
    >>> make_loss("huber").name
    'huber'
    """
    if isinstance(loss, Loss):
        return loss
    if loss not in _NAMED:
        raise ParameterError(f"unknown loss {loss!r}; choose one of {', '.join(LOSS_NAMES)}, or pass a Loss object")
    if loss == MultinomialLoss.name:
        if y is None or y.size == 0 or y.dtype.kind not in "fiub":
            raise DataError("the multinomial loss needs numeric classes 0, 1, 2, ... as target")
        return MultinomialLoss(max(int(y.max()) + 1, 2))
    return _NAMED[loss]()


def describe_loss(loss: Loss) -> dict[str, Any]:
    """Name and parameters of a loss in plain values; of a custom loss ("own"), what is left of it without its code."""
    if _NAMED.get(loss.name) is not type(loss):
        return {"name": loss.name, "own": True, "own_prediction": loss.has_prediction}
    return {"name": loss.name} | (asdict(loss) if is_dataclass(loss) else {})


def described_loss(described: Mapping[str, Any]) -> Loss:
    """The built-in loss that `describe_loss` described.

    Examples
    --------
    >>> from fedkin.losses import HuberLoss, describe_loss, described_loss
    >>> described_loss(describe_loss(HuberLoss(2.0)))
    HuberLoss(delta=2.0)
    """
    parameters = dict(described)
    name = parameters.pop("name", None)
    if name not in _NAMED:
        raise ParameterError(f"unknown loss {name!r}; choose one of {', '.join(LOSS_NAMES)}")
    try:
        return _NAMED[name](**parameters)
    except TypeError:
        raise ParameterError(f"the {name} loss does not have the parameters {parameters}") from None


def restore_loss(described: Mapping[str, Any], given: Loss | None, path: Path) -> Loss:
    """The loss of a model file; ``given`` is the user's, ``path`` the file to name in errors."""
    if described.get("own"):
        if given is not None:
            return given
        if described.get("own_prediction"):
            warnings.warn(
                f"{path}: the model was fitted with the custom loss {described['name']!r}, whose code is not stored, "
                "so predictions are linear predictors. Pass the loss to load(..., loss=...) to predict with it",
                FedkinWarning,
                stacklevel=3,
            )
        return UserLoss(_no_code, _no_code, name=str(described["name"]))
    if given is not None and describe_loss(given) != dict(described):
        raise ModelFileError(
            f"{path}: the model has the loss {dict(described)}, not {describe_loss(given)}: leave loss= out"
        )
    try:
        return described_loss(described)
    except ParameterError as error:
        raise ModelFileError(f"{path}: {error}; was it written by a later version of Fedkin?") from None


def _no_code(*_: object) -> NoReturn:
    raise ParameterError(
        "this loss was loaded from a file, which holds its name only: pass the loss to load(..., loss=...)"
    )
