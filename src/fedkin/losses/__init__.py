"""Losses: what a site minimises on its own rows, the mean over them of ``m(z; theta)``.

In: rows. Out: values, derivatives, predictions, and everything else that depends on the loss (start values, plausible
sizes, whether a minimiser exists, the name in compiled loops, the description in files). Other packages ask the loss,
not which loss it is, except where "To add a loss" says so. Imports: `_base` and `errors`.

A `Loss` is any function of theta; a `RowLoss` sees rows through linear predictors and states a few pointwise functions;
`UserLoss` makes a loss of your own functions.
To add a loss, files in this order. The first two make it known to estimators, commands and contracts; the others know
losses by name, and matter as far as they apply:
1. `losses/builtin`: a class; what solvers, rounds and kin need is asked of it (means over uncertain predictors:
   `losses/averages`). `losses/__init__` exports it.
2. `losses/named`: its entry in `_NAMED`, at the end (the first of its kind is what "auto" means to estimators).
3. `fitting/comparison/metrics`: its held-out metric, in `METRICS` and `row_errors` (which else takes squares), and in
   `more_scores`.
4. `admm/in_process/kernels`: its slope, if it says ``compiled = True``. `fitting/estimators/per_site`: whether
   targets must be positive. For a kind of `Loss.noise` that is new: `losses/interface` (its `Literal`) and
   `kin/result/inference`.
5. `federate/contract/draft`, `cli/models/hints`: when to propose it. `cli/models/fit`, `cli/models/fit_table`,
   `cli/models/streamed`: checks of ``fedkin fit``.
6. docs/command-line.md, docs/contract.md and docs/getting-started.md list the names; ``web/src/coefficients.ts`` says
   which have log-odds (then ``make web``).
7. Tests keep lists of their own: `LOSS_NAMES` in ``tests/builders.py``, `LOSSES` in ``tests/test_losses.py``, and
   ``tests/cvxpy_reference.py``.
Only for classes, where logistic becomes multinomial: `fitting/preparation`, `core/rereading`,
`federate/contract/contract`, `federate/contract/files`.
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
from fedkin.losses.scale import scaled_huber

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
    "scaled_huber",
    "weighted_gram",
]
