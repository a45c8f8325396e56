"""Summaries with differential privacy: sums of clipped rows with Gaussian noise, calibrated by dp-accounting."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedkin._base import Array, Index, check_positive
from fedkin.core.quadratics import assign_folds
from fedkin.core.summary import Privacy, Summary
from fedkin.data import INTERCEPT, Federation, Rows
from fedkin.errors import DataError, ParameterError, missing_dependency
from fedkin.losses import Loss


@dataclass(frozen=True)
class Budget:
    """What is to be promised, and within which bounds rows are.

    Parameters
    ----------
    epsilon, delta : float
        The promise: replacing a row changes the probability of any message by a factor of at most ``exp(epsilon)``,
        except with probability ``delta``. A delta well below 1 / n is usual.
    limits : sequence of q float, optional
        Bounds on the absolute values of the columns, from the contract's ranges and never from the rows; larger values
        are cut. By default 1 for every column.
    target_limit : float
        The same for the target (less the offset).
    bound : float, optional
        L2 bound on a row in units of its limits, the constant and the target included; longer rows are shortened. By
        default ``sqrt(q + 1)``, which shortens none. A smaller one means less noise, and some bias.
    """

    epsilon: float
    delta: float = 1e-5
    limits: Sequence[float] | None = None
    target_limit: float = 1.0
    bound: float | None = None

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)
        check_positive("target_limit", self.target_limit)
        if not 0 < self.delta < 1:
            raise ParameterError(f"delta must lie between 0 and 1, got {self.delta!r}")
        if self.bound is not None:
            check_positive("bound", self.bound)


def private_summary(
    site: Hashable,
    rows: Rows,
    loss: Loss,
    budget: Budget,
    *,
    feature_names: Sequence[str],
    folds: int = 5,
    seed: int = 0,
    by_fold: bool = True,
    rng: np.random.Generator | None = None,
) -> Summary:
    """The summary of one site with noise, so that nobody can tell whether any row was replaced by another.

    Parameters
    ----------
    site, rows, loss, feature_names, folds, seed
        As in `site_summary`; the loss is "linear" or "mean".
    budget : Budget
        What is promised. Every further message about the same rows would need a budget of its own.
    by_fold : bool
        Whether to give the sums of every fold. Without them there is less noise, and nothing to choose ``lam`` from.
    rng : Generator, optional
        Of the noise, for experiments. By default the operating system's randomness: a seed that somebody can guess
        takes the noise away.

    Returns
    -------
    Summary
        ``summary.privacy`` says what is promised and how large the noise is; fits take it into account.

    Notes
    -----
    Of every row ``z = (x, y)`` the upper triangle of ``z z'`` is summed up in the row's fold. A row is in one fold,
    whose number depends on its position only, so that one draw of noise for each fold is all that a row pays for. With
    ``|z_c| <= 1`` and ``|z| <= B`` the triangle has length at most ``sqrt((B^4 + B^2) / 2 - 1)``, the 1 for the
    constant. The number of rows and how they are spread over folds is public. Noise is drawn in floating point, which
    is not hardened against somebody who looks at the last bits of sums.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.losses import LinearLoss
    >>> rng = np.random.default_rng(0)
    >>> rows = Rows(np.column_stack([np.ones(500), rng.uniform(-1, 1, 500)]), rng.uniform(-1, 1, 500))
    >>> names = ["(intercept)", "age"]
    >>> summary = private_summary("north", rows, LinearLoss(), Budget(2.0, 1e-6), feature_names=names)
    >>> summary.privacy.epsilon, int(summary.n_samples)
    (2.0, 500)
    """
    location = loss.location
    if not loss.quadratic:
        raise ParameterError(
            f"noise is for the sums of the linear and the mean loss; the {loss.name} loss takes several messages, each "
            "of which would need its share of epsilon"
        )
    federation = Federation({site: rows}, feature_names)
    made = _limits(budget.limits, federation.n_features, 1.0 if location else budget.target_limit)
    Z = _clipped_entries(federation, made, location)
    constant = _constant(federation, location)
    longest = float(np.sqrt(Z.shape[1])) if budget.bound is None else budget.bound
    Z = _shortened(Z, longest, constant)
    sensitivity = np.sqrt(max((longest**4 + longest**2) / 2 - (constant is not None), 1e-12))
    noise = float(noise_multiplier(budget.epsilon, budget.delta) * sensitivity)
    privacy = Privacy(budget.epsilon, budget.delta, longest, made, noise)
    fold_of = assign_folds(federation, folds, seed) if by_fold else np.full(len(Z), -1)
    rng = np.random.default_rng() if rng is None else rng
    count = np.zeros(folds + 1, dtype=np.int64)
    sums = np.zeros((folds + 1, Z.shape[1], Z.shape[1]))
    upper = np.triu_indices(Z.shape[1])
    for fold in np.unique(fold_of):
        own = Z[fold_of == fold]
        drawn = np.zeros_like(sums[0])
        drawn[upper] = privacy.noise * rng.standard_normal(upper[0].size)
        drawn = drawn + np.triu(drawn, 1).T
        if constant is not None:
            drawn[constant, constant] = 0.0
        count[fold], sums[fold] = len(own), own.T @ own + drawn
    sums = 0.5 * (sums + np.swapaxes(sums, 1, 2)) * np.outer(made, made)
    return _summary(site, loss, federation.feature_names, seed, count, sums, privacy, location)


@lru_cache(maxsize=32)
def noise_multiplier(epsilon: float, delta: float) -> float:
    """Standard deviation of the noise in units of the length of a row's part, when rows may be replaced."""
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
    except ImportError:
        raise missing_dependency("dp-accounting", "differential privacy", "privacy") from None

    def fresh() -> PLDAccountant:
        return PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)

    return float(dp_accounting.calibrate_dp_mechanism(fresh, dp_accounting.GaussianDpEvent, epsilon, delta))


def _limits(limits: Sequence[float] | None, q: int, target: float) -> Array:
    given = np.ones(q) if limits is None else np.asarray(limits, dtype=np.float64)
    if given.shape != (q,) or not (np.isfinite(given) & (given > 0)).all():
        raise ParameterError(f"limits must be {q} positive numbers, one for each column, got {limits!r}")
    return np.append(given, target)


def _clipped_entries(federation: Federation, limits: Array, location: bool) -> Array:
    """Rows ``(n, q + 1)`` in units of their limits, cut to [-1, 1]: columns and target, or columns and a constant."""
    if location:
        last = np.ones(len(federation.X))
    else:
        assert federation.y is not None
        last = federation.y if federation.offset is None else federation.y - federation.offset
    Z = np.column_stack([federation.X, last]) / limits
    if not np.isfinite(Z).all():
        raise DataError("rows have a number that is not finite")
    return np.clip(Z, -1.0, 1.0)


def _constant(federation: Federation, location: bool) -> int | None:
    """The column that is 1 in every row, which tells nothing."""
    if location:
        return federation.n_features
    if federation.feature_names[0] != INTERCEPT:
        return None
    if not (federation.X[:, 0] == 1).all():
        raise DataError("the column (intercept) is not 1 in every row")
    return 0


def _shortened(Z: Array, bound: float, constant: int | None) -> Array:
    """Rows of length at most ``bound``; a constant stays 1."""
    free = np.ones(Z.shape[1], dtype=bool)
    room = bound
    if constant is not None:
        free[constant] = False
        room = float(np.sqrt(max(bound**2 - 1.0, 0.0)))
        if not room > 0:
            raise ParameterError(f"bound must be greater than 1, the length of the constant alone, got {bound:g}")
    length = np.sqrt((Z[:, free] ** 2).sum(axis=1))
    out = Z.copy()
    out[:, free] *= np.minimum(1.0, room / np.maximum(length, 1e-300))[:, None]
    return out


def _summary(
    site: Hashable,
    loss: Loss,
    names: tuple[str, ...],
    seed: int,
    count: Index,
    sums: Array,
    privacy: Privacy,
    location: bool,
) -> Summary:
    """Sums of products as a summary; what else it has follows from them."""
    last, second = sums[:, :-1, -1], sums[:, :-1, :-1]
    whole = second.sum(axis=0)
    if location:
        value, hessian, scores = 0.5 * np.einsum("kpp->k", second), count.astype(np.float64), second
        column_sums = last.sum(axis=0)
    else:
        value, hessian, scores = 0.5 * sums[:, -1, -1], second, None
        column_sums = whole[0] if names[0] == INTERCEPT else np.zeros(len(names))
    return Summary(
        site,
        loss,
        names,
        seed,
        np.zeros(len(names)),
        count,
        value,
        -last,
        hessian,
        column_sums,
        np.diagonal(whole).copy(),
        scores=scores,
        privacy=privacy,
    )
