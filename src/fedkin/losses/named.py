"""A loss as a model file keeps it: by its name and parameters, never by its code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedkin.errors import FedkinWarning, ModelFileError, ParameterError
from fedkin.losses.builtin import HuberLoss, MultinomialLoss, make_loss
from fedkin.losses.custom import UserLoss
from fedkin.losses.interface import Loss


def describe_loss(loss: Loss) -> dict[str, Any]:
    """Name and parameters of a loss in plain values; of a loss of one's own, what is left of it without its code."""
    known: dict[str, Any] = {"name": loss.name}
    if isinstance(loss, HuberLoss | MultinomialLoss):
        return known | asdict(loss)
    if _has_known_name(loss):
        return known
    return known | {"own": True, "own_prediction": getattr(loss, "predict_fn", loss) is not None}


def restore_loss(described: Mapping[str, Any], given: Loss | None, path: Path) -> Loss:
    """The loss that `describe_loss` described; ``given`` is the user's, ``path`` the file to name in errors."""
    name = described["name"]
    if described.get("own"):
        if given is not None:
            return given
        if described.get("own_prediction"):
            warnings.warn(
                f"{path}: the model was fitted with the loss {name!r}, which is not one of Fedkin's; its code is not "
                "stored, so predictions are linear predictors. Pass the loss to load(..., loss=...) to have its own",
                FedkinWarning,
                stacklevel=3,
            )
        return UserLoss(_no_code, _no_code, name=str(name))
    if given is not None and describe_loss(given) != dict(described):
        raise ModelFileError(
            f"{path}: the model has the loss {dict(described)}, not {describe_loss(given)}: leave loss= out"
        )
    if name == "huber":
        return HuberLoss(float(described["delta"]))
    if name == "multinomial":
        return MultinomialLoss(int(described["n_classes"]))
    try:
        return make_loss(str(name))
    except ParameterError as error:
        raise ModelFileError(f"{path}: {error}; was it written by a later version of Fedkin?") from None


def _has_known_name(loss: Loss) -> bool:
    try:
        return type(make_loss(loss.name, np.zeros(1))) is type(loss)
    except ParameterError:
        return False


def _no_code(*_: object) -> NoReturn:
    raise ParameterError(
        "this loss was loaded from a file, which holds its name only: pass the loss to load(..., loss=...)"
    )
