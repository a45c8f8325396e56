"""Define the losses ``m(z; theta)``, whose mean over its rows each site minimises.

To add a loss, write a file with its class (`ScalarLoss` for one linear predictor), and add the class to `LOSSES` here
and to the losses of the tests (docs/architecture.md). All other packages get what they need from the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from numpy.typing import NDArray

from fedkin.errors import FedkinWarning, ModelFileError, ParameterError
from fedkin.losses.base import LOGIT_SIZE, Loss, RowLoss, ScalarLoss, TargetKind, by_loss, weighted_gram
from fedkin.losses.cox import CoxLoss
from fedkin.losses.custom import UserLoss
from fedkin.losses.gamma import GammaLoss
from fedkin.losses.huber import HuberLoss
from fedkin.losses.linear import LinearLoss
from fedkin.losses.logistic import LogisticLoss
from fedkin.losses.mean import MeanLoss
from fedkin.losses.multinomial import MultinomialLoss
from fedkin.losses.negbinomial import NegativeBinomialLoss
from fedkin.losses.poisson import PoissonLoss

__all__ = [
    "COMPILED_LOSSES", "LOGIT_SIZE", "LOSSES", "LOSS_NAMES", "CoxLoss", "GammaLoss", "HuberLoss", "LinearLoss",
    "LogisticLoss", "Loss", "MeanLoss", "MultinomialLoss", "NegativeBinomialLoss", "PoissonLoss", "RowLoss",
    "ScalarLoss", "UserLoss", "by_loss", "describe_loss", "described_loss", "loss_for", "loss_kind", "loss_names",
    "make_loss", "restore_loss", "weighted_gram",
]  # fmt: skip

#: Losses by name. "auto" selects the first one for a kind of target.
LOSSES: dict[str, type[Loss]] = {
    kind.name: kind
    for kind in (
        MeanLoss, LinearLoss, LogisticLoss, PoissonLoss, NegativeBinomialLoss, HuberLoss, GammaLoss, MultinomialLoss,
        CoxLoss,
    )
}  # fmt: skip
LOSS_NAMES = tuple(LOSSES)
#: Losses supported by compiled rounds; their slopes are compiled in this order.
COMPILED_LOSSES: tuple[type[ScalarLoss], ...] = tuple(kind for kind in LOSSES.values() if issubclass(kind, ScalarLoss))


def loss_names(*targets: TargetKind) -> tuple[str, ...]:
    """Return the names of the losses for these kinds of targets."""
    return tuple(name for name, kind in LOSSES.items() if kind.target in targets)


def loss_kind(loss: str | Loss) -> type[Loss]:
    """Return the class of a loss given by name or as an object."""
    if isinstance(loss, Loss):
        return type(loss)
    if loss not in LOSSES:
        raise ParameterError(f"unknown loss {loss!r}; choose one of {', '.join(LOSS_NAMES)}, or pass a Loss object")
    return LOSSES[loss]


def loss_for(target: TargetKind, n_classes: int = 2) -> Loss:
    """Return the default loss for a kind of target."""
    return LOSSES[loss_names(target)[0]].from_classes(n_classes)


def make_loss(loss: str | Loss, y: NDArray[Any] | None = None) -> Loss:
    """Return the loss of that name; ``y`` (all sites' targets) determines the number of classes."""
    return loss if isinstance(loss, Loss) else loss_kind(loss).from_target(y)


def describe_loss(loss: Loss) -> dict[str, Any]:
    """Return name and parameters of a loss as plain values; for a custom loss ("own"), without its code."""
    if LOSSES.get(loss.name) is not type(loss):
        return {"name": loss.name, "own": True, "own_prediction": loss.has_prediction}
    return {"name": loss.name} | (asdict(loss) if is_dataclass(loss) else {})


def described_loss(described: Mapping[str, Any]) -> Loss:
    """Return the built-in loss from the result of `describe_loss`."""
    parameters = dict(described)
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise ParameterError(f"the name of a loss must be text, got {name!r}")
    kind = loss_kind(name)
    try:
        return kind(**parameters)
    except TypeError:
        raise ParameterError(f"the {name} loss does not have the parameters {parameters}") from None


def restore_loss(described: Mapping[str, Any], given: Loss | None, path: Path) -> Loss:
    """Return the loss of a model file; ``given`` is the user's loss, ``path`` is named in errors."""
    if not isinstance(described.get("name"), str):
        raise ModelFileError(f"{path}: its loss has no name; the file is damaged: copy the model again or refit it")
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
            f"{path}: the model has the loss {dict(described)}, not {describe_loss(given)}: omit loss="
        )
    try:
        return described_loss(described)
    except ParameterError as error:
        raise ModelFileError(f"{path}: {error}; was it written by a later version of Fedkin?") from None


def _no_code(*_: object) -> NoReturn:
    raise ParameterError(
        "this loss was loaded from a file, which stores only its name: pass the loss to load(..., loss=...)"
    )
