"""Losses: what a device minimises on its own rows.

A loss is the mean over a device's rows of ``m(z; theta)``. `interface` says what a loss has to offer, `builtin` holds
the ones that have a name, and `UserLoss` wraps functions that somebody else wrote.
"""

from __future__ import annotations

from fedkin.losses.builtin import (
    LOSS_NAMES,
    HuberLoss,
    LinearLoss,
    LogisticLoss,
    MeanLoss,
    MultinomialLoss,
    PoissonLoss,
    make_loss,
)
from fedkin.losses.custom import UserLoss
from fedkin.losses.interface import Loss, RowLoss, weighted_gram
from fedkin.losses.named import describe_loss, restore_loss

__all__ = [
    "LOSS_NAMES",
    "HuberLoss",
    "LinearLoss",
    "LogisticLoss",
    "Loss",
    "MeanLoss",
    "MultinomialLoss",
    "PoissonLoss",
    "RowLoss",
    "UserLoss",
    "describe_loss",
    "make_loss",
    "restore_loss",
    "weighted_gram",
]
