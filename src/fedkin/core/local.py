"""Fit each site on its own rows, or sites pooled, with variance estimates.

A site has its *own* estimate when its mean loss has a unique minimiser. Otherwise a ridge fit gives a finite estimate,
with a large variance in directions that the rows do not determine (see the notes of `LocalFit`).
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from fedkin._base import Array, Index, Mask, check_choice, check_positive
from fedkin.core.linalg import RANK_TOLERANCE, inverse_of, least_eigenvalue
from fedkin.core.ownfits import OwnFits, fit_sites, minimise_functions
from fedkin.core.sitedata import LossLike, RowData, site_data
from fedkin.core.summaries import Summaries
from fedkin.data import Federation
from fedkin.errors import DataError, DegenerateSiteWarning, ParameterError, UnknownSiteError
from fedkin.losses import by_loss

Variance = Literal["model", "sandwich", "bartlett"]
Weights = Literal["samples", "sites"]


@dataclass(frozen=True, eq=False)
class LocalFit:
    """Separate estimates of the sites, with their covariances.

    Notes
    -----
    **Variance.** With H the Hessian and S the mean outer product of the scores: "bartlett" is ``(n H)^{-1}``, the
    paper's, for negative log-likelihoods with known dispersion (for the linear loss, noise variance 1). "model" is
    ``dispersion * (n H)^{-1}``. "sandwich" is ``H^{-1} S H^{-1} / (n - p)``, which is robust to heteroscedastic noise.
    For the mean loss "model" is the sandwich with ``n - 1`` instead of ``n - p``, the sample covariance of the mean.

    **Sites without an estimate of their own** are those whose design does not have full rank, whose likelihood has no
    maximum (separated classes, one class only, all-zero counts), or whose user-defined loss has no unique minimiser.
    They get a ridge fit: ``sum_c ridge_c theta_c^2 / 2`` is added to M_u, with
    ``ridge_c = dispersion * scale_c / (n * size)``, less information than one row. The variance is the posterior
    variance when ``theta_c`` has prior variance ``size / scale_c``. Here ``scale_c`` is the mean square of feature c in
    the federation, and ``size`` that of the response or, for logits, 25 (odds of 148 to 1), and for log rates 25 plus
    the squared log of the mean rate: any single feature might explain the whole response. For a user-defined loss
    ``ridge_c`` is the curvature at 0 divided by n. These sites use "model" even when "sandwich" is requested.

    **Sites without residual degrees of freedom** use the dispersion pooled over the other sites with the same loss. If
    no site has any, the mean square of the response is used, which is conservative.
    """

    sites: tuple[Hashable, ...]
    theta: Array  # (V, p), minimisers of the sites' mean losses M_u, or the ridge fits above
    hessian: Array  # (V, p, p), of M_u at theta, without any ridge
    covariance: Array  # (V, p, p), the paper's Omega_u (already divided by n_u); always finite and positive definite
    n_samples: Index  # (V,)
    dispersion: Array  # (V,), ratio of the score variance to the Hessian (linear loss: the noise variance)
    residual_dof: Array  # (V,), of the covariance; infinite where only theta is estimated
    matrix_estimated: Mask  # (V,), True where the whole covariance is estimated (sandwich), not only its scale
    prior_precision: Array  # (V, p), prior precision of each coordinate; 0 for sites that are not rescued
    rescued: Mask  # (V,), sites without an estimate of their own
    notes: Mapping[Hashable, str]  # why a site had no estimate or variance of its own, and which rule was used
    variance: Variance
    losses: tuple[str, ...]  # their names


def local_fit(
    federation: Federation | Summaries,
    loss: LossLike = "linear",
    variance: Variance = "model",
    radius: float | None = None,
) -> LocalFit:
    """Fit every site on its own rows (the paper's eq. naive_est) and estimate how precise each fit is.

    Parameters
    ----------
    federation : Federation or Summaries
        Rows of the sites, or their summaries (see Notes).
    loss : str, Loss or mapping {site: loss}
        Loss of each site; summaries carry their own.
    variance : "model" | "sandwich" | "bartlett"
        How the covariance is estimated; see `LocalFit`.
    radius : float, optional
        Radius of the paper's parameter space: estimates minimise over ``||theta_u||_2 <= radius``.

    Returns
    -------
    LocalFit
        Finite on every site; its notes name sites without an estimate of their own, and those on the boundary.

    Notes
    -----
    For quadratic losses, summaries give the same result as rows up to rounding. For others, the estimates are those
    that each site computed alone. For private summaries, the variance due to the privacy noise is added.

    Examples
    --------
    >>> import numpy as np, fedkin
    >>> rng = np.random.default_rng(0)
    >>> fed = fedkin.Federation({u: (rng.normal(size=(9, 2)), rng.integers(0, 2, 9)) for u in "ab"})
    >>> fedkin.local_fit(fed, "logistic").covariance.shape
    (2, 2, 2)
    """
    if variance not in get_args(Variance):
        raise ParameterError(f"unknown variance {variance!r}; choose one of {', '.join(get_args(Variance))}")
    data = site_data(federation, loss)
    if radius is not None:
        check_positive("radius", radius)
    if not data.in_memory:
        if variance == "sandwich" and not (data.loss.location and data.loss.quadratic):
            raise ParameterError(
                'variance="sandwich" needs the score of every row, which summaries do not contain: use variance="model"'
            )
        data = data.repaired()
    parts: list[dict[str, Any]] = []
    notes: dict[int, str] = {}
    kinds = [fit_sites(data, members, one, radius=radius) for members, one in by_loss(data.losses)]
    for fits in kinds:
        part = {name: getattr(fits, name) for name in ("members", "theta", "hessian", "dispersion", "rescued")}
        part["covariance"], part["residual_dof"], part["matrix_estimated"] = _covariances(fits, variance)
        if fits.noise_covariance is not None:
            part["covariance"] = part["covariance"] + fits.noise_covariance
        noise = 1.0 if variance == "bartlett" else fits.dispersion[:, None]
        parts.append(part | {"prior_precision": fits.n[:, None] * fits.ridge / noise})
        notes.update({int(fits.members[k]): "; ".join(lines) for k, lines in fits.notes.items()})
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns.pop("members"))
    arrays = {name: column[order] for name, column in columns.items()} | {"n_samples": federation.n_samples}
    told, losses = {federation.sites[u]: notes[u] for u in sorted(notes)}, tuple(one.name for one in data.losses)
    return LocalFit(federation.sites, notes=told, variance=variance, losses=losses, **arrays)


def _covariances(fits: OwnFits, variance: Variance) -> tuple[Array, Array, Mask]:
    """Return covariances ``(M, p, p)``, their degrees of freedom, and where a sandwich was used."""
    n = fits.n[:, None, None]
    bread = inverse_of(fits.curvature + fits.ridge[:, :, None] * np.eye(fits.n_params))
    none = np.zeros(fits.members.size, dtype=bool)
    if variance == "bartlett":
        return bread / n, np.full(n.size, np.inf), none
    model = fits.dispersion[:, None, None] * bread / n
    # a mean makes no other assumption: its columns may be correlated and of any scale
    if variance == "model" and not fits.loss.location:
        return model, fits.dof, none
    paid = 1.0 if fits.loss.location else float(fits.n_params)
    sandwich = bread @ fits.score_cov @ bread / np.maximum(n - paid, 1.0)
    sandwich = 0.5 * (sandwich + np.swapaxes(sandwich, 1, 2))
    usable = ~fits.rescued & (fits.matrix_dof > 0)
    # a sandwich that is singular where the model is not would claim certainty that it cannot have
    usable &= (least_eigenvalue(sandwich) > RANK_TOLERANCE) & (np.einsum("mpp->mp", sandwich) > 0).all(axis=1)
    short = np.flatnonzero(~usable & ~fits.rescued)
    fits.note(short, "too few rows for a sandwich variance: the model-based variance is used")
    covariance = np.where(usable[:, None, None], sandwich, model)
    return covariance, np.where(usable, fits.matrix_dof, fits.dof), usable


def global_fit(
    federation: Federation | Summaries,
    loss: LossLike = "linear",
    weights: Weights = "samples",
    radius: float | None = None,
) -> Array:
    """Fit one parameter vector shared by all sites.

    Parameters
    ----------
    federation, loss, radius
        As in `local_fit`; summaries of quadratic losses with ``weights="samples"`` only.
    weights : "samples" or "sites"
        "samples" minimises ``sum_u n_u M_u``: the pooled fit, called Global in section 5. "sites" minimises
        ``sum_u M_u``: the limit of the penalised estimator on a connected graph as lam grows.

    Returns
    -------
    array (p,)

    Warns
    -----
    DegenerateSiteWarning
        When the pooled loss has no unique minimiser, so that a ridge fit is used (see `LocalFit`).

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0], [0.0], [0.0]], "b": [[4.0]]})
    >>> fedkin.global_fit(fed, "mean").tolist(), fedkin.global_fit(fed, "mean", weights="sites").tolist()
    ([1.0], [2.0])
    """
    return np.asarray(oracle_fit(federation, [0] * federation.n_sites, loss, weights, radius)[0])


def oracle_fit(
    federation: Federation | Summaries,
    labels: Mapping[Hashable, object] | Sequence[object],
    loss: LossLike = "linear",
    weights: Weights = "samples",
    radius: float | None = None,
) -> Array:
    """Fit one parameter vector per known group of sites (the oracle estimator).

    Parameters
    ----------
    federation, loss, weights, radius
        As in `global_fit`, within each group.
    labels : mapping {site: label}, or sequence of V labels in site order
        Sites with the same label share a fit.

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
    check_choice("weights", weights, get_args(Weights))
    data = site_data(federation, loss)
    if not data.in_memory and weights != "samples":
        raise ParameterError(f'weights={weights!r} needs rows; with summaries, use weights="samples"')
    groups: dict[object, list[int]] = {}
    if isinstance(labels, Mapping):
        for site in data.sites:
            if site not in labels:
                raise UnknownSiteError(f"no label is given for site {site!r}")
        labels = [labels[site] for site in data.sites]
    if len(labels) != data.n_sites:
        raise DataError(f"got {len(labels)} labels for {data.n_sites} sites; give one label per site")
    for u, label in enumerate(labels):
        groups.setdefault(label, []).append(u)
    theta = np.empty((data.n_sites, data.loss.n_params(data.n_features)))
    for label, group in groups.items():
        members = np.asarray(group)
        theta[members], problem = _pooled(data, members, weights, radius)
        if problem:
            who = "1 site" if members.size == 1 else f"{members.size} sites"
            text = f"group {label!r} of {who} has no unique minimiser: {problem}"
            warnings.warn(text, DegenerateSiteWarning, stacklevel=2)
    return theta


def _pooled(data: RowData | Summaries, members: Index, weights: Weights, radius: float | None) -> tuple[Array, str]:
    """Return the common minimiser ``(p,)`` of some sites, and why a ridge was needed ("" if none)."""
    group = data.take(members)
    if not group.in_memory:
        group = group.pooled()
    else:
        loss, n = group.loss, group.n
        total = float(n.sum())
        share = n / total if weights == "samples" else np.full(members.size, 1.0 / members.size)
        if len(by_loss(group.losses)) > 1 or not (loss.rowwise or loss.quadratic):
            theta, _, problem = minimise_functions(group.terms(np.zeros(group.n_params)), share, total, radius)
            return theta, problem
        rows = group.rows.rows
        if weights == "sites":
            factor = np.repeat(share * total / n, group.n_samples)
            rows = replace(rows, weight=factor if rows.weight is None else factor * rows.weight)
        group = RowData(Federation({0: rows}, group.feature_names), loss)
    fits = fit_sites(group, np.zeros(1, dtype=np.int64), group.loss, describe=False, radius=radius)
    return fits.theta[0], "; ".join(fits.notes.get(0, [])) if fits.rescued[0] else ""
