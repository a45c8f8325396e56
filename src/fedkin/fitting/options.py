"""How to fit: the options of a fit, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from fedkin._base import check_nonnegative
from fedkin.errors import ParameterError
from fedkin.losses import Loss, describe_loss
from fedkin.objective import make_penalty
from fedkin.stats import Method, Variance

Progress = Callable[[str], None]
CvRule = Literal["min", "1se"]


@dataclass(frozen=True)
class FitOptions:
    """How to fit.

    Parameters
    ----------
    loss : str or Loss
        "linear", "logistic" (more than two classes make it multinomial), "poisson", "huber", "multinomial", "mean",
        or an object.
    penalty : "l1" | "l2" | "linf"
        Of the difference of two neighbours: l1 fuses coefficient by coefficient, l2 and linf whole devices.
    lam : float or "cv"
        Strength of the penalty on the scale of the objective, or its choice by cross-validation within devices.
    select : None | "bonferroni" | "holm" | "bh" | "by"
        Test the edges first and keep those whose ends look alike; see `fedkin.select_edges`.
    level : float
        Of that test.
    variance : "model" | "sandwich" | "bartlett"
        Of that test.
    refit : bool
        Replace the estimate of each group of devices (`FittedModel.clusters`) by its pooled fit without any penalty.
        A chain of kept edges makes one group, even when its ends differ: for groups that stand well apart only.
    fit_intercept : bool
        Add a constant column; its coefficient is fused like the others, but neither shrunk nor made sparse.
    standardize : bool
        Fit on features of pooled mean 0 and standard deviation 1. ``lam``, ``ridge`` and ``sparsity`` then refer to
        these; coefficients are still reported in the units of the features.
    ridge : float
        The extra ``(1/|V|) sum_u ridge ||theta_u||^2 / 2``.
    sparsity : float
        The extra ``(1/|V|) sum_u sparsity ||theta_u||_1``.
    cv_folds : int
    cv_rule : "min" | "1se"
        The best ``lam``, or the largest within one standard error of it.
    tol : float
        Relative duality gap to reach.
    seed : int
        Of the folds.
    n_jobs : int, optional
        Folds at the same time.
    solver : "exact" | "fedadmm"
        Solve by `fedkin.solve`, or by the rounds that devices between themselves would do (`fedkin.fed_admm`, until
        ``tol`` or ``rounds`` are reached). ``lam`` is chosen with exact solutions in both cases.
    rounds, batch_size : int
        Of "fedadmm"; all rows of a device in every round when ``batch_size`` is None, else SAGA on batches.

    Examples
    --------
    >>> FitOptions(loss="logistic", select="holm").penalty
    'l1'
    """

    loss: str | Loss = "linear"
    penalty: str = "l1"
    lam: float | Literal["cv"] = "cv"
    select: Method | None = None
    level: float = 0.05
    variance: Variance = "model"
    refit: bool = False
    fit_intercept: bool = True
    standardize: bool = False
    ridge: float = 0.0
    sparsity: float = 0.0
    cv_folds: int = 5
    cv_rule: CvRule = "min"
    tol: float = 1e-6
    seed: int = 0
    n_jobs: int | None = None
    solver: Literal["exact", "fedadmm"] = "exact"
    rounds: int = 1000
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lam, str):
            if self.lam != "cv":
                raise ParameterError(f"lam must be a number of at least 0 or 'cv', got {self.lam!r}")
        else:
            check_nonnegative("lam", self.lam)
        check_nonnegative("ridge", self.ridge)
        check_nonnegative("sparsity", self.sparsity)
        make_penalty(self.penalty)
        _check_choice("select", self.select, (None, *get_args(Method)))
        _check_choice("variance", self.variance, get_args(Variance))
        _check_choice("cv_rule", self.cv_rule, get_args(CvRule))
        _check_choice("solver", self.solver, ("exact", "fedadmm"))
        if not 0 < self.level < 1:
            raise ParameterError(f"level must lie between 0 and 1, got {self.level!r}")
        if not self.tol > 0:
            raise ParameterError(f"tol must be positive, got {self.tol!r}")
        if self.cv_folds < 2:
            raise ParameterError(f"cv_folds must be at least 2, got {self.cv_folds!r}")

    def plain(self) -> dict[str, Any]:
        """The options in plain values, as a model file keeps them."""
        made = {item.name: getattr(self, item.name) for item in fields(self)}
        made["loss"] = self.loss if isinstance(self.loss, str) else describe_loss(self.loss)
        return made


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ParameterError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def silent(line: str) -> None:
    """The progress that nobody asked for."""
