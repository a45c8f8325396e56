"""Losses: what a device minimises on its own rows, the mean over them of ``m(z; theta)``.

In: rows. Out: values, derivatives, predictions, and everything else that depends on the loss (start values, plausible
sizes, whether a minimiser exists, the name in compiled loops, the description in files). Other packages ask the loss,
not which loss it is, except where "To add a loss" says so. Imports: `_base` and `errors`.

A `Loss` is any function of theta; a `RowLoss` sees rows through linear predictors and states a few pointwise functions;
`UserLoss` makes a loss of your own functions.
To add a loss: a class in `builtin` and an entry in `named`; estimators, commands and contracts then know it. What goes
by name, as far as it applies: its held-out metric (`fitting/comparison/metrics`: `METRICS` and a branch of
`row_errors`, which else takes squares), its slope in compiled rounds (`admm/in_process/kernels`), when a draft of a
contract proposes it (`federate/contract/draft`), hints and checks of ``fedkin fit`` (`cli/models/hints`,
`cli/models/fit`, `cli/models/fit_table`, `cli/models/streamed`), targets that must be positive for scikit-learn
(`fitting/estimators/per_device`), intervals of new observations by `Loss.noise` (`kin/result/inference`), and that
logistic becomes multinomial (`fitting/preparation`, `stats/rereading`, `federate/contract/contract`,
`federate/contract/files`).
"""

from __future__ import annotations

from fedkin.losses.builtin import HuberLoss, LinearLoss, LogisticLoss, MeanLoss, MultinomialLoss, PoissonLoss
from fedkin.losses.custom import UserLoss
from fedkin.losses.interface import LOGIT_SIZE, Loss, RowLoss, by_loss, weighted_gram
from fedkin.losses.named import (
    CLASS_LOSSES,
    COMPILED_LOSSES,
    LOSS_NAMES,
    REGRESSION_LOSSES,
    describe_loss,
    described_loss,
    make_loss,
    restore_loss,
)

__all__ = [
    "CLASS_LOSSES",
    "COMPILED_LOSSES",
    "LOGIT_SIZE",
    "LOSS_NAMES",
    "REGRESSION_LOSSES",
    "HuberLoss",
    "LinearLoss",
    "LogisticLoss",
    "Loss",
    "MeanLoss",
    "MultinomialLoss",
    "PoissonLoss",
    "RowLoss",
    "UserLoss",
    "by_loss",
    "describe_loss",
    "described_loss",
    "make_loss",
    "restore_loss",
    "weighted_gram",
]
