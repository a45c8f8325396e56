"""Fits that need no graph: each device alone, all devices pooled, and devices pooled by known groups.

Terms: a device has an *own* estimate when its mean loss has a unique minimiser. When it has none, a stated rule gives a
finite estimate together with a variance that is wide where the rows say nothing (`LocalFit`, Notes).
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import DegenerateDeviceWarning, ParameterError
from fedkin.federation import Federation
from fedkin.losses import LogisticLoss, Loss, MeanLoss, MultinomialLoss, PoissonLoss, RowLoss, weighted_gram
from fedkin.problem import LossLike, check_labels, resolve_losses
from fedkin.solvers.newton import damped_newton, unit_diagonal
from fedkin.solvers.rowfit import (
    RANK_TOLERANCE,
    RowBatch,
    has_jeffreys,
    minimise,
    minimise_with_jeffreys,
    minimise_with_ridge,
)
from fedkin.terms import row_blocks

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Index = NDArray[np.int64]
Variance = Literal["model", "sandwich", "bartlett"]
Weights = Literal["samples", "devices"]

_BATCH_ENTRIES = 2**22  # rows times features that are worked on at once
_LOGIT_SIZE = 25.0  # mean square of a logit or log rate that is still plausible: 5 is odds of 148 to 1


@dataclass(frozen=True, eq=False)
class LocalFit:
    """The devices' own estimates and how sure each device is of its own.

    Attributes
    ----------
    devices : tuple of V ids
    theta : array (V, p)
        Minimisers of the devices' mean losses M_u, or what the rules below put in their place.
    hessian : array (V, p, p)
        Hessians of M_u at theta, without any ridge.
    covariance : array (V, p, p)
        Variance of theta_u, the paper's Omega_u (already divided by n_u); always finite and positive definite.
    n_samples : int array (V,)
    dispersion : array (V,)
        Factor by which the variance of a score exceeds the Hessian (the noise variance of the linear loss).
    residual_dof : array (V,)
        Degrees of freedom behind the covariance, infinite where nothing about it is estimated apart from theta.
    matrix_estimated : bool array (V,)
        True where the covariance is estimated as a whole matrix (sandwich), False where at most its scale is.
    rescued : bool array (V,)
        Devices without an estimate of their own.
    notes : dict {device: str}
        Why a device had no estimate or no variance of its own, and which rule was used.
    variance : "model" | "sandwich" | "bartlett"
    losses : tuple of V str
        Names of the losses.

    Notes
    -----
    **Variance.** With H the Hessian and S the mean outer product of the scores: "bartlett" is ``(n H)^{-1}``, the
    paper's, right when the loss is a negative log-likelihood with nothing left to estimate (for the linear loss: noise
    of variance 1); "model" is ``dispersion * (n H)^{-1}``, which allows a noise variance (the same for all rows of a
    device, and for the mean loss for all coordinates); "sandwich" is ``H^{-1} S H^{-1} / (n - p)``, which allows any
    noise (for the mean loss ``n - 1`` takes the place of ``n - p``).

    **Rules for devices without an own estimate.**

    1. *Firth.* The design has full rank, but the likelihood (logistic, multinomial, Poisson) has no maximum: separated
       classes, one class only, no counts. The likelihood is multiplied by the Jeffreys prior ``det(n H)^{1/2}``. The
       estimate is finite, and its variance is ``(n H)^{-1}`` there.
    2. *Ridge.* The design does not have full rank (fewer rows than features, constant or repeated columns), or a loss
       of one's own has no unique minimiser. ``sum_c ridge_c theta_c^2 / 2`` is added to M_u, and the variance is
       ``dispersion * {n (H + diag(ridge))}^{-1}``: what remains unknown after seeing the rows, when before them
       ``theta_c`` had variance ``size / scale_c``. Here ``scale_c`` is the mean square of feature c in the federation
       and ``size`` is the mean square of the response (the larger one of the device's and the federation's), or 25 for
       logits and log rates (for these plus the squared log of the mean rate): any feature alone might explain all.
       So ``ridge_c = dispersion * scale_c / (n * size)``, less than one row's worth, and directions of which the rows
       say nothing keep a variance so wide that no difference of plausible size is significant along them. For a loss
       of one's own, whose scale is not known, ``ridge_c`` is the curvature at 0 divided by n: one row's worth.

    In both cases "sandwich" falls back on "model", because the scores of a (nearly) perfect fit tell nothing of noise.

    **Devices without residual degrees of freedom** (no more rows than parameters) take the dispersion pooled over the
    other devices of the same loss; when no device has any, the mean square of the response stands in, which is wide.

    Examples
    --------
    >>> import numpy as np, fedkin
    >>> X = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    >>> fed = fedkin.Federation({"long": (X, [0.0, 1.0, 2.0, 4.0]), "short": (X[:1], [0.5])})
    >>> fit = fedkin.local_fit(fed)
    >>> fit.theta[0].round(2).tolist()
    [-0.2, 1.3]
    >>> fit.rescued.tolist(), sorted(fit.notes)
    ([False, True], ['short'])
    """

    devices: tuple[Hashable, ...]
    theta: Array
    hessian: Array
    covariance: Array
    n_samples: Index
    dispersion: Array
    residual_dof: Array
    matrix_estimated: Bools
    rescued: Bools
    notes: Mapping[Hashable, str]
    variance: Variance
    losses: tuple[str, ...]


def local_fit(federation: Federation, loss: LossLike = "linear", variance: Variance = "model") -> LocalFit:
    """Fit every device on its own rows (the paper's eq. naive_est) and estimate how precise each fit is.

    Parameters
    ----------
    federation : Federation
        The devices and their rows.
    loss : str, Loss or mapping {device: loss}
        What each device minimises.
    variance : "model" | "sandwich" | "bartlett"
        How the covariance is estimated; see `LocalFit`.

    Returns
    -------
    LocalFit
        Finite on every device; `LocalFit.notes` names the devices that had no estimate of their own.

    Examples
    --------
    >>> import numpy as np, fedkin
    >>> rng = np.random.default_rng(0)
    >>> fed = fedkin.Federation({u: (rng.normal(size=(9, 2)), rng.integers(0, 2, 9)) for u in "ab"})
    >>> fedkin.local_fit(fed, "logistic").covariance.shape
    (2, 2, 2)
    """
    check_variance(variance)
    losses = resolve_losses(loss, federation)
    n_devices, p = federation.n_devices, losses[0].n_params(federation.n_features)
    out = LocalFit(
        devices=federation.devices,
        theta=np.empty((n_devices, p)),
        hessian=np.empty((n_devices, p, p)),
        covariance=np.empty((n_devices, p, p)),
        n_samples=federation.n_samples,
        dispersion=np.ones(n_devices),
        residual_dof=np.full(n_devices, np.inf),
        matrix_estimated=np.zeros(n_devices, dtype=bool),
        rescued=np.zeros(n_devices, dtype=bool),
        notes={},
        variance=variance,
        losses=tuple(one.name for one in losses),
    )
    notes: dict[Hashable, str] = {}
    for members, one in _kinds(losses, np.arange(n_devices)):
        draft = _Draft(federation, members, one)
        if isinstance(one, MeanLoss):
            _fit_means(draft)
        elif isinstance(one, RowLoss):
            _fit_rows(draft)
        else:
            _fit_functions(draft)
        covariance, dof, whole = _covariances(draft, variance)
        out.theta[members], out.hessian[members], out.covariance[members] = draft.theta, draft.hessian, covariance
        out.dispersion[members], out.residual_dof[members] = draft.dispersion, dof
        out.matrix_estimated[members], out.rescued[members] = whole, draft.rescued
        notes.update({federation.devices[members[k]]: "; ".join(lines) for k, lines in sorted(draft.notes.items())})
    object.__setattr__(out, "notes", notes)
    return out


def global_fit(federation: Federation, loss: LossLike = "linear", weights: Weights = "samples") -> Array:
    """One parameter for all devices.

    Parameters
    ----------
    federation : Federation
        The devices and their rows.
    loss : str, Loss or mapping {device: loss}
        What each device minimises.
    weights : "samples" or "devices"
        "samples" minimises ``sum_u n_u M_u``, every row counting alike: the pooled fit that section 5 calls Global.
        "devices" minimises ``sum_u M_u``, every device counting alike: what the penalised estimator becomes when lam
        grows without bound on a connected graph. They agree when all n_u are equal.

    Returns
    -------
    array (p,)

    Warns
    -----
    DegenerateDeviceWarning
        When the pooled loss has no unique minimiser and a rule of `LocalFit` was used.

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0], [0.0], [0.0]], "b": [[4.0]]})
    >>> fedkin.global_fit(fed, "mean").tolist(), fedkin.global_fit(fed, "mean", weights="devices").tolist()
    ([1.0], [2.0])
    """
    return np.asarray(oracle_fit(federation, [0] * federation.n_devices, loss, weights)[0])


def oracle_fit(
    federation: Federation,
    labels: Mapping[Hashable, object] | Sequence[object],
    loss: LossLike = "linear",
    weights: Weights = "samples",
) -> Array:
    """One parameter for each group of devices: what one could do knowing who is alike.

    Parameters
    ----------
    federation : Federation
        The devices and their rows.
    labels : mapping {device: label}, or sequence of V labels in device order
        Devices with the same label share a fit.
    loss : str, Loss or mapping {device: loss}
        What each device minimises.
    weights : "samples" or "devices"
        As in `global_fit`, within each group.

    Returns
    -------
    array (V, p)

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0]], "b": [[2.0]], "c": [[9.0]]})
    >>> fedkin.oracle_fit(fed, {"a": "low", "b": "low", "c": "high"}, "mean").ravel().tolist()
    [1.0, 1.0, 9.0]
    """
    if weights not in get_args(Weights):
        raise ParameterError(f"weights must be 'samples' or 'devices', got {weights!r}")
    losses = resolve_losses(loss, federation)
    groups: dict[object, list[int]] = {}
    for u, label in enumerate(check_labels(labels, federation.devices)):
        groups.setdefault(label, []).append(u)
    theta = np.empty((federation.n_devices, losses[0].n_params(federation.n_features)))
    for label, group in groups.items():
        members = np.asarray(group)
        theta[members], problem = _pooled(federation, members, losses, weights)
        if problem:
            warnings.warn(
                f"group {label!r} of {members.size} devices has no unique minimiser: {problem}",
                DegenerateDeviceWarning,
                stacklevel=2,
            )
    return theta


def check_variance(variance: str) -> None:
    """Raise `ParameterError` unless ``variance`` is one of the three."""
    if variance not in get_args(Variance):
        raise ParameterError(f"unknown variance {variance!r}; choose one of {', '.join(get_args(Variance))}")


# ---------------------------------------------------------------- estimates


@dataclass(eq=False)
class _Draft:
    """The devices of one loss while they are being fitted; arrays are indexed by position in ``members``."""

    federation: Federation
    members: Index
    loss: Loss
    theta: Array = field(init=False)
    hessian: Array = field(init=False)
    ridge: Array = field(init=False)  # (M, p), 0 where there is none
    score_cov: Array = field(init=False)  # mean outer product of the scores
    curvature: Array = field(init=False)  # stands for the Hessian in variances
    dispersion: Array = field(init=False)
    dof: Array = field(init=False)
    matrix_dof: Array = field(init=False)  # of the sandwich, 0 where it cannot be used
    rescued: Bools = field(init=False)
    notes: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        m, p = self.members.size, self.loss.n_params(self.federation.n_features)
        self.theta, self.ridge = np.empty((m, p)), np.zeros((m, p))
        self.hessian, self.score_cov, self.curvature = (np.empty((m, p, p)) for _ in range(3))
        self.dispersion, self.dof, self.matrix_dof = np.ones(m), np.full(m, np.inf), np.zeros(m)
        self.rescued = np.zeros(m, dtype=bool)

    @property
    def n(self) -> Index:
        return self.federation.n_samples[self.members]

    @property
    def n_params(self) -> int:
        return int(self.theta.shape[1])

    def note(self, who: Index, text: str) -> None:
        for k in who.tolist():
            self.notes.setdefault(k, []).append(text)


def _fit_means(draft: _Draft) -> None:
    p = draft.n_params
    draft.hessian[:] = draft.curvature[:] = np.eye(p)
    for block in row_blocks(draft.federation, draft.members):
        where = np.searchsorted(draft.members, block.devices)
        mean = block.X.mean(axis=1)
        centred = block.X - mean[:, None, :]
        draft.theta[where] = mean
        draft.score_cov[where] = np.matmul(np.swapaxes(centred, 1, 2), centred) / block.X.shape[1]
    degrees = np.asarray((draft.n - 1.0) * p, dtype=np.float64)
    total = np.einsum("mpp->m", draft.score_cov) * draft.n
    spread = draft.federation.X - draft.federation.X.mean(axis=0)
    _share_dispersion(draft, total, degrees, float((spread**2).mean()))
    # n - 1 degrees of freedom span R^p only when there are at least p of them
    draft.matrix_dof = np.where(draft.n > p, draft.n - 1.0, 0.0)


def _fit_rows(draft: _Draft) -> None:
    loss = draft.loss
    assert isinstance(loss, RowLoss)
    batches = list(_batches(draft.federation, draft.members, loss))
    p = draft.n_params
    scale = np.tile((draft.federation.X**2).mean(axis=0), loss.n_outputs)
    scale[scale == 0] = 1.0  # a column of zeros has no scale
    rank = np.empty(draft.members.size, dtype=np.int64)
    size = np.empty(draft.members.size)
    for where, batch in batches:
        rank[where], size[where] = batch.rank, _predictor_size(batch)
        _fit_own(draft, where, batch)
    size = np.maximum(size, np.average(size, weights=draft.n))
    size[size == 0] = 1.0
    unfit = draft.rescued & np.isnan(draft.theta).any(axis=1)
    degrees = draft.n - rank * (p / draft.federation.n_features)
    if loss.estimates_scale:
        # a light ridge shows how large the noise is, and the noise then how large the ridge should be
        draft.ridge[unfit] = 1e-3 * scale / draft.n[unfit, None]
        _fit_ridge(draft, batches, unfit)
        total = _residual_sums(draft, batches)
        _share_dispersion(draft, total, degrees, float(np.average(size, weights=draft.n)))
        draft.dispersion = np.maximum(draft.dispersion, 1e-20 * size)  # exact fits keep a variance above rounding
    draft.ridge[unfit] = (draft.dispersion / (draft.n * size))[unfit, None] * scale
    _fit_ridge(draft, batches, unfit)
    for k in np.flatnonzero(unfit):
        why = f"{draft.n[k]} rows and a design of rank {rank[k]} for {draft.federation.n_features} features"
        draft.notes.setdefault(int(k), []).insert(
            0, f"{why}: ridge fit, wide in the directions that the rows do not show"
        )
    for where, batch in batches:
        _describe_rows(draft, where, batch)


def _fit_own(draft: _Draft, where: Index, batch: RowBatch) -> None:
    """Own estimates where they exist, Firth's where only the likelihood's maximum is missing, NaN elsewhere."""
    draft.theta[where] = np.nan
    full = np.flatnonzero(batch.full_rank)
    if full.size:
        theta, exists = minimise(batch.take(full))
        draft.theta[where[full[exists]]] = theta[exists]
        lost = full[~exists]
        if lost.size and has_jeffreys(batch.loss):
            theta, found = minimise_with_jeffreys(batch.take(lost))
            draft.theta[where[lost[found]]] = theta[found]
            draft.note(
                where[lost[found]],
                "the likelihood has no maximum (separated classes, one class only or no counts): Firth's penalised fit",
            )
        draft.rescued[where[lost]] = True
    draft.rescued[where[~batch.full_rank]] = True


def _fit_ridge(draft: _Draft, batches: Sequence[tuple[Index, RowBatch]], unfit: Bools) -> None:
    for where, batch in batches:
        poor = np.flatnonzero(unfit[where])
        if poor.size:
            draft.theta[where[poor]] = minimise_with_ridge(batch.take(poor), draft.ridge[where[poor]])


def _describe_rows(draft: _Draft, where: Index, batch: RowBatch) -> None:
    """Hessians, score covariances and the degrees of freedom of a sandwich at the estimates."""
    everyone = np.arange(where.size)
    theta, n, p = draft.theta[where], batch.n_rows, draft.n_params
    eta = batch.predictors(theta, everyone)
    slope, weights = batch.loss.slope_at(eta, batch.y), batch.loss.curvature_at(eta, batch.y)
    draft.hessian[where] = weighted_gram(batch.X, weights)
    draft.score_cov[where] = weighted_gram(batch.X, slope[..., :, None] * slope[..., None, :])
    draft.curvature[where] = draft.hessian[where]
    own = ~draft.rescued[where]
    flat = own & (np.linalg.eigvalsh(unit_diagonal(draft.hessian[where])[0])[:, 0] <= RANK_TOLERANCE)
    if flat.any():
        # Huber's Hessian misses the rows beyond the corner; its expected value is their share times the Gram matrix
        share = np.einsum("bnkk->b", weights) / (n * batch.loss.n_outputs)
        eye = np.eye(batch.loss.n_outputs)
        spread = np.einsum("kl,bqr->bkqlr", eye, batch.gram[flat]).reshape(-1, p, p)
        draft.curvature[where[flat]] = np.maximum(share[flat], 1.0 / n)[:, None, None] * spread
        draft.note(where[flat], "the Hessian at the estimate is singular: its expected value stands in for it")
    if n > p:
        usable = np.flatnonzero(own & ~flat)
        inverse = _inverse(draft.hessian[where[usable]])
        k = batch.loss.n_outputs
        blocks = inverse.reshape(usable.size, k, -1, k, p // k)
        X = batch.X[usable]
        leverage = np.einsum("bnq,bkqlr,bnr,bnkl->bn", X, blocks, X, weights[usable], optimize=True)
        # how far the mean of squared scores is from a Wishart matrix depends on how uneven the leverages are
        uneven = np.maximum(3.0 * (leverage**2).mean(axis=1) / (p * (p + 2.0)), 1e-300)
        draft.matrix_dof[where[usable]] = np.minimum((n - p) / uneven, n - p)


def _fit_functions(draft: _Draft) -> None:
    """Devices with a loss that is known only as functions."""
    for k, u in enumerate(draft.members):
        data = draft.federation[draft.federation.devices[u]]
        rows = (data.X, data.y, data.offset)
        theta, ridge, problem = _minimise_sum([(1.0, draft.loss, rows)], data.n_samples, draft.n_params)
        draft.theta[k], draft.ridge[k] = theta, ridge
        draft.rescued[k] = bool(problem)
        if problem:
            draft.note(np.array([k]), problem)
        draft.hessian[k] = draft.curvature[k] = draft.loss.hessian(theta, *rows)
        scores = draft.loss.scores(theta, *rows)
        draft.score_cov[k] = scores.T @ scores / data.n_samples
        draft.dispersion[k] = draft.loss.dispersion(theta, *rows)
    degrees = draft.n.astype(np.float64) - draft.n_params
    if draft.loss.estimates_scale:
        _share_dispersion(draft, draft.dispersion * np.maximum(degrees, 1.0), degrees, 1.0)
    draft.matrix_dof = np.where(draft.rescued, 0.0, np.maximum(degrees, 0.0))


def _minimise_sum(
    parts: Sequence[tuple[float, Loss, tuple[Array, Array | None, Array | None]]], n_rows: int, p: int
) -> tuple[Array, Array, str]:
    """Minimiser of a weighted sum of mean losses, the ridge that it needed (0 for none), and why."""

    def sums(theta: Array, ridge: Array) -> tuple[float, Array, Array]:
        value, gradient, hessian = 0.5 * float(ridge @ theta**2), ridge * theta, np.diag(ridge)
        for factor, loss, data in parts:
            value += factor * loss.value(theta, *data)
            gradient = gradient + factor * loss.gradient(theta, *data)
            hessian = hessian + factor * loss.hessian(theta, *data)
        return value, gradient, hessian

    def run(ridge: Array) -> tuple[Array, bool]:
        result = damped_newton(
            lambda theta, who: np.array([sums(row, ridge)[0] for row in theta]),
            lambda theta, who: (sums(theta[0], ridge)[1][None], sums(theta[0], ridge)[2][None]),
            np.zeros((1, p)),
            max_iter=300,
        )
        return result.theta[0], bool(result.converged[0])

    none = np.zeros(p)
    start = np.einsum("pp->p", sums(none, none)[2])
    theta, converged = run(none)
    if converged and np.isfinite(theta).all():
        hessian = sums(theta, none)[2]
        # curvature that has vanished, in some direction or compared with where the iterations began, means no minimiser
        regular = np.linalg.eigvalsh(unit_diagonal(hessian)[0])[0] > RANK_TOLERANCE
        if regular and n_rows * np.diag(hessian).max() > 1e-6 * start.max():
            return theta, none, ""
    scale = np.where(start > 0, start, start[start > 0].mean() if (start > 0).any() else 1.0)
    ridge = scale / n_rows
    return run(ridge)[0], ridge, "the loss has no unique minimiser: ridge fit with one row's worth of curvature"


# ---------------------------------------------------------------- variances


def _covariances(draft: _Draft, variance: Variance) -> tuple[Array, Array, Bools]:
    """Covariances ``(M, p, p)``, their degrees of freedom, and where a sandwich was used."""
    n = draft.n[:, None, None].astype(np.float64)
    diagonal = np.arange(draft.n_params)
    precision = draft.curvature.copy()
    precision[:, diagonal, diagonal] += draft.ridge
    bread = _inverse(precision)
    none = np.zeros(draft.members.size, dtype=bool)
    if variance == "bartlett":
        return bread / n, np.full(n.size, np.inf), none
    model = draft.dispersion[:, None, None] * bread / n
    if variance == "model":
        return model, draft.dof, none
    paid = 1.0 if isinstance(draft.loss, MeanLoss) else float(draft.n_params)
    sandwich = bread @ draft.score_cov @ bread / np.maximum(n - paid, 1.0)
    sandwich = 0.5 * (sandwich + np.swapaxes(sandwich, 1, 2))
    usable = ~draft.rescued & (draft.matrix_dof > 0)
    # a sandwich that is flat where the model is not would be sure of what it cannot know
    relative = np.linalg.eigvalsh(unit_diagonal(sandwich)[0])[:, 0]
    usable &= (relative > RANK_TOLERANCE) & (np.einsum("mpp->mp", sandwich) > 0).all(axis=1)
    short = np.flatnonzero(~usable & ~draft.rescued)
    draft.note(short, "too few rows for a sandwich variance: the model's is used")
    covariance = np.where(usable[:, None, None], sandwich, model)
    return covariance, np.where(usable, draft.matrix_dof, draft.dof), usable


def _share_dispersion(draft: _Draft, total: Array, degrees: Array, fallback: float) -> None:
    """Set dispersions ``total / degrees``, and those of devices without degrees of freedom from the others."""
    own = degrees > 0
    draft.dispersion = np.divide(total, degrees, out=np.ones_like(total), where=own)
    draft.dof = np.where(own, degrees, np.inf)
    if not own.all():
        without = np.flatnonzero(~own)
        if own.any():
            pooled, pooled_dof = float(total[own].sum() / degrees[own].sum()), float(degrees[own].sum())
            text = f"no residual degrees of freedom: noise variance pooled over {own.sum()} other devices"
        else:
            pooled, pooled_dof = fallback, float(draft.n.sum())
            text = "no device has residual degrees of freedom: the mean square of the response stands in for the noise"
        draft.dispersion[without], draft.dof[without] = pooled, pooled_dof
        draft.note(without, text)
    draft.dispersion = np.maximum(draft.dispersion, 1e-100)


def _residual_sums(draft: _Draft, batches: Sequence[tuple[Index, RowBatch]]) -> Array:
    """Dispersions times the degrees of freedom that `Loss.dispersion` divides by."""
    total = np.empty(draft.members.size)
    for where, batch in batches:
        for b, k in enumerate(where.tolist()):
            offset = None if batch.offset is None else batch.offset[b]
            total[k] = batch.loss.dispersion(draft.theta[k], batch.X[b], batch.y[b], offset)
        total[where] *= max(batch.n_rows - batch.loss.degrees_of_freedom(batch.X.shape[2]), 1)
    return total


def _predictor_size(batch: RowBatch) -> Array:
    """Mean square ``(B,)`` that a device's linear predictor may plausibly have."""
    offset = np.zeros_like(batch.y) if batch.offset is None else batch.offset
    if isinstance(batch.loss, LogisticLoss | MultinomialLoss):
        return np.full(batch.n_devices, _LOGIT_SIZE)
    if isinstance(batch.loss, PoissonLoss):
        top = offset.max(axis=1)
        exposure = top + np.log(np.exp(offset - top[:, None]).mean(axis=1))
        rate = np.log(np.maximum(batch.y.mean(axis=1), 0.5 / batch.n_rows)) - exposure
        return np.asarray(_LOGIT_SIZE + rate**2)
    return np.asarray(((batch.y - offset) ** 2).mean(axis=1))


def _inverse(matrices: Array) -> Array:
    """Inverses of positive definite matrices, exactly symmetric."""
    scaled, scale = unit_diagonal(matrices)
    inverse = np.linalg.inv(scaled) / (scale[:, :, None] * scale[:, None, :])
    return np.asarray(0.5 * (inverse + np.swapaxes(inverse, 1, 2)))


# ---------------------------------------------------------------- rows


def _kinds(losses: Sequence[Loss], members: Index) -> Iterator[tuple[Index, Loss]]:
    """Devices grouped by loss; equal losses that are distinct objects count as one."""
    groups: dict[object, list[int]] = {}
    for u in members.tolist():
        loss = losses[u]
        stateless = not vars(loss)
        groups.setdefault(type(loss) if stateless else loss, []).append(u)
    for group in groups.values():
        yield np.asarray(group), losses[group[0]]


def _batches(federation: Federation, members: Index, loss: RowLoss) -> Iterator[tuple[Index, RowBatch]]:
    """Batches of devices with equally many rows, and their positions in ``members`` (which ascend)."""
    for block in row_blocks(federation, members):
        assert block.y is not None
        y = block.y.astype(np.float64, copy=False)
        step = max(1, _BATCH_ENTRIES // max(block.X[0].size * loss.n_outputs, 1))
        for start in range(0, block.devices.size, step):
            part = slice(start, start + step)
            offset = None if block.offset is None else block.offset[part]
            yield np.searchsorted(members, block.devices[part]), RowBatch(loss, block.X[part], y[part], offset)


def _pooled(federation: Federation, members: Index, losses: Sequence[Loss], weights: Weights) -> tuple[Array, str]:
    """Common minimiser ``(p,)`` of some devices, and why it is not an ordinary one ("" when it is)."""
    sizes = federation.n_samples[members]
    n_rows = int(sizes.sum())
    share = sizes / n_rows if weights == "samples" else np.full(members.size, 1.0 / members.size)
    kinds = list(_kinds(losses, members))
    if len(kinds) > 1 or not isinstance(losses[members[0]], RowLoss | MeanLoss):
        data = [federation[federation.devices[u]] for u in members]
        parts = [
            (float(share[k]), losses[u], (data[k].X, data[k].y, data[k].offset)) for k, u in enumerate(members.tolist())
        ]
        theta, _, problem = _minimise_sum(parts, n_rows, losses[members[0]].n_params(federation.n_features))
        return theta, problem
    rows = np.concatenate([np.arange(federation.starts[u], federation.starts[u + 1]) for u in members])
    weight = None if weights == "samples" else np.repeat(share * n_rows / sizes, sizes)
    X, loss = federation.X[rows], kinds[0][1]
    if isinstance(loss, MeanLoss):
        return np.average(X, axis=0, weights=weight), ""
    assert isinstance(loss, RowLoss)
    assert federation.y is not None
    y = federation.y[rows].astype(np.float64, copy=False)[None]
    offset = None if federation.offset is None else federation.offset[rows][None]
    batch = RowBatch(loss, X[None], y, offset, None if weight is None else weight[None])
    if batch.full_rank[0]:
        theta, exists = minimise(batch)
        if exists[0]:
            return theta[0], ""
        if has_jeffreys(loss):
            theta, exists = minimise_with_jeffreys(batch)
            if exists[0]:
                return theta[0], "the likelihood has no maximum; Firth's penalised fit is used"
    scale = np.tile((X**2).mean(axis=0), loss.n_outputs)
    scale[scale == 0] = 1.0
    ridge = scale / (n_rows * max(float(_predictor_size(batch)[0]), 1e-100))
    if loss.estimates_scale:
        light = minimise_with_ridge(batch, 1e-3 * scale[None] / n_rows)
        ridge = ridge * max(loss.dispersion(light[0], X, y[0], None if offset is None else offset[0]), 1e-100)
    theta = minimise_with_ridge(batch, ridge[None])
    return theta[0], f"the design has rank {batch.rank[0]} for {X.shape[1]} features; a ridge fit is used"
