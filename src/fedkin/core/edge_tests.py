"""Test edges for equal parameters at both ends, using the sites' own fits (section 3.2 of the paper)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.special import chdtrc, chdtri, digamma, fdtrc, polygamma

from fedkin._base import Array, Index, Mask
from fedkin.core.linalg import unit_diagonal
from fedkin.core.local import LocalFit, Variance, local_fit
from fedkin.core.sitedata import LossLike
from fedkin.core.summaries import Summaries
from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.graph import Graph

Correction = Literal["bonferroni", "holm", "bh", "by"]
#: Methods that control the family-wise error rate; the others control the false discovery rate.
FAMILY_WISE: tuple[Correction, ...] = ("bonferroni", "holm")

_CHI_SQUARE_DOF = 1e8  # above this, F and chi-square are indistinguishable
_CHUNK = 2**20  # covariance entries tested per batch


@dataclass(frozen=True, eq=False)
class EdgeSelection:
    """Selected edges and the test result of every candidate edge."""

    graph: Graph  # the candidates whose null hypothesis "equal parameters" was not rejected
    candidates: Graph  # all edges that were tested, sites in the federation's order
    statistic: Array  # (E,), ``W_e^2`` (eq. test_statistic_def)
    p_value: Array  # (E,)
    reference_dof: Array  # (E,), denominator of the F reference, infinite where the reference is chi-square
    kept: Mask  # (E,), ``p_value >= threshold``
    threshold: float  # the p-value below which an edge is dropped, after the correction
    critical: float | None  # ``chi2_p(threshold)`` (upper quantile) where every reference is chi-square
    level: float
    method: Correction
    variance: Variance
    notes: Mapping[Hashable, str]  # sites without an estimate of their own; see `LocalFit`


def select_edges(
    federation: Federation | Summaries,
    graph: Graph | None = None,
    loss: LossLike = "linear",
    level: float = 0.05,
    method: Correction = "bonferroni",
    variance: Variance | None = None,
    local: LocalFit | None = None,
    radius: float | None = None,
) -> EdgeSelection:
    """Keep the candidate edges along which the sites' own fits do not differ significantly.

    Parameters
    ----------
    federation, loss, radius
        As in `local_fit`.
    graph : Graph, optional
        Candidate edges (Fed-ADMM-ES); all pairs of sites when None (Fed-ADMM-Local-ES).
    level : float
        Between 0 and 1.
    method : "bonferroni" | "holm" | "bh" | "by"
        Multiple-testing correction. Bonferroni and Holm bound the probability of dropping any true edge,
        Benjamini-Hochberg (for independent or positively dependent tests) and Benjamini-Yekutieli the expected share of
        true edges among the dropped ones. None of them bounds the number of false edges kept.
    variance : "model" | "sandwich" | "bartlett", optional
        As in `local_fit`; "model" by default. "bartlett" is the paper's.
    local : LocalFit, optional
        Fits of the same federation, to avoid refitting; its variance is used.

    Returns
    -------
    EdgeSelection
        ``notes`` names the sites without a fit of their own; see `LocalFit`.

    Notes
    -----
    With d the difference of the two fits and Omega_u their covariances, ``W^2 = d' (Omega_i + Omega_j)^{-1} d``. When
    the covariances contain no estimated quantity apart from theta, the reference is chi-square with p degrees of
    freedom. When they are estimated, chi-square rejects too often, especially at small levels, so the reference is F.
    With ``P_u = (Omega_i + Omega_j)^{-1} Omega_u`` the share of site u in the variance and f_u its degrees of freedom,
    let

        nu = p (p + 2) / sum_u {tr(P_u)^2 + 2 tr(P_u^2)} / f_u,

    which is Satterthwaite's (Welch's) formula for p = 1. When only the scales of Omega_u are estimated ("model"),
    ``W^2 / {p (1 + c)}`` is compared with F(p, nu), where matching the first two moments to the order 1/f gives
    ``c = sum_u (2 / f_u) tr(P_u^2) / p - 2 / nu``, which is 0 for proportional covariances (the idea of Kenward and
    Roger). The shares use noise variances moderated across sites (Smyth), because a variance estimated too small from
    few degrees of freedom would hide its own uncertainty. When whole matrices are estimated ("sandwich"), it is
    Hotelling's ``(nu - p + 1) W^2 / (nu p)`` against F(p, nu - p + 1) (Krishnamoorthy and Yu), with f_u from the
    leverages of the rows (Bell and McCaffrey); this errs on the side of keeping edges.

    A site without an estimate of its own determines fewer than p directions, and the statistic is small in the others.
    The reference then replaces p by the part of ``tr(P_i + P_j)`` that comes from the rows rather than the ridge prior,
    plus 1 for each such site to cover its shrinkage. Columns that are redundant on a site (an intercept with a full set
    of indicators, absent categories) therefore cost little power.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=20, seed=0)
    >>> chosen = fedkin.select_edges(design.federation, design.graph)
    >>> chosen.candidates.n_edges, chosen.graph.n_edges, round(chosen.graph.fidelity(design.truth), 2)
    (44, 27, 1.0)
    """
    if not 0 < level < 1:
        raise ParameterError(f"level is the size of a test, between 0 and 1, got {level!r}")
    if method not in get_args(Correction):
        raise ParameterError(f"unknown method {method!r}; choose one of {', '.join(get_args(Correction))}")
    if local is None:
        local = local_fit(federation, loss, variance or "model", radius)
    elif local.sites != federation.sites:
        raise ParameterError("local was fitted on different sites; call local_fit on this federation")
    elif variance is not None and variance != local.variance:
        raise ParameterError(f"variance={variance!r} was requested, but local was fitted with {local.variance!r}")
    candidates = Graph.complete(federation.sites) if graph is None else graph.aligned(federation.sites)
    statistic, p_value, dof = wald_tests(local, candidates.edges)
    threshold = threshold_of(p_value, level, method)
    kept = p_value >= threshold
    critical = float(chdtri(local.theta.shape[1], threshold)) if np.isinf(dof).all() else None
    tests = candidates.keep(kept), candidates, statistic, p_value, dof, kept, threshold, critical
    return EdgeSelection(*tests, level, method, local.variance, dict(local.notes))


def bonferroni(level: float, n_edges: int) -> float:
    """Return the p-value below which a site drops an edge without seeing the p-values of other edges."""
    return level / max(n_edges, 1)


def threshold_of(p_value: Array, level: float, method: Correction) -> float:
    """Return the p-value below which edges are dropped."""
    m = p_value.size
    if m == 0 or method == "bonferroni":
        return bonferroni(level, m)
    ordered = np.sort(p_value)
    rank = np.arange(1, m + 1)
    if method == "holm":
        # reject in order of p-values until one exceeds its threshold
        stays = np.flatnonzero(ordered >= level / (m - rank + 1))
        return level / (m - stays[0]) if stays.size else level
    if method == "by":
        level = level / float((1 / rank).sum())
    small = np.flatnonzero(ordered < level * rank / m)
    return float(level * (small[-1] + 1 if small.size else 1) / m)


def wald_tests(local: LocalFit, edges: Index) -> tuple[Array, Array, Array]:
    """Return statistic, p-value and degrees of freedom ``(E,)`` of tests of "equal parameters" on ``edges (E, 2)``."""
    p = local.theta.shape[1]
    statistic, p_value, dof = (np.empty(len(edges)) for _ in range(3))
    factor = moderation(local)
    step = max(1, _CHUNK // (p * p))
    for start in range(0, len(edges), step):
        part = slice(start, start + step)
        statistic[part], p_value[part], dof[part] = _test_chunk(local, factor, edges[part])
    return statistic, p_value, dof


def _test_chunk(local: LocalFit, factor: Array, edges: Index) -> tuple[Array, Array, Array]:
    i, j = edges.T
    p = local.theta.shape[1]
    first, second = local.covariance[i], local.covariance[j]
    total, scale = unit_diagonal(first + second)
    d = (local.theta[i] - local.theta[j]) / scale
    solved = np.linalg.solve(total, d[:, :, None])[:, :, 0]
    statistic = np.maximum(np.einsum("ep,ep->e", d, solved), 0.0)
    k = _directions(local, i, j)
    f_i, f_j = local.residual_dof[i], local.residual_dof[j]
    if np.isinf(f_i).all() and np.isinf(f_j).all():
        return statistic, np.asarray(chdtrc(k, statistic)), np.full(len(edges), np.inf)
    first = factor[i][:, None, None] * first
    total, scale = unit_diagonal(first + factor[j][:, None, None] * second)
    share = np.linalg.solve(total, first / (scale[:, :, None] * scale[:, None, :]))
    # the two shares add up to the identity, so one of them tells all four traces
    trace_i = np.clip(np.einsum("epp->e", share), 0.0, p)
    square_i = np.clip(np.einsum("epq,eqp->e", share, share), 0.0, p)
    trace_j, square_j = p - trace_i, np.maximum(p - 2 * trace_i + square_i, 0.0)
    uncertain = (trace_i**2 + 2 * square_i) / f_i + (trace_j**2 + 2 * square_j) / f_j
    nu = np.divide(p * (p + 2.0), uncertain, out=np.full(len(edges), np.inf), where=uncertain > 0)
    whole = local.matrix_estimated[i] | local.matrix_estimated[j]
    # scales estimated: W^2 / (p (1 + c)) is F(p, nu)
    inflation = np.maximum(2 * (square_i / f_i + square_j / f_j) / p - 2 / nu, 0.0)
    # matrices estimated: Hotelling; with fewer than p degrees of freedom, count as p, the widest reference there is
    enough = np.maximum(nu, p)
    dof = np.where(whole, enough - p + 1, nu)
    # written so that infinite degrees of freedom leave the statistic alone
    ratio = np.where(whole, 1 - (p - 1) / enough, 1 / (1 + inflation)) * statistic
    plain = dof >= _CHI_SQUARE_DOF
    p_value = np.where(plain, chdtrc(k, ratio), fdtrc(k, np.where(plain, 1.0, dof), ratio / k))
    return statistic, p_value, np.where(plain, np.inf, dof)


def _directions(local: LocalFit, i: Index, j: Index) -> Array:
    """Return numerator degrees of freedom ``(E,)``: p, or fewer for sites without their own estimate."""
    # there Omega = V + Omega N Omega, with V from noise in the rows and N the prior precision: the statistic has the
    # mean sum_u tr{(Omega_i + Omega_j)^-1 V_u} plus the square of the shrinkage, below 1 for each such end
    p = local.theta.shape[1]
    k = np.full(i.size, float(p))
    poor = np.flatnonzero(local.rescued[i] | local.rescued[j])
    if poor.size:
        ends = i[poor], j[poor]
        covariance = [local.covariance[end] for end in ends]
        total, scale = unit_diagonal(covariance[0] + covariance[1])
        unknown = np.zeros(poor.size)
        for end, own in zip(ends, covariance, strict=True):
            own = own / scale[:, None, :]
            share = np.linalg.solve(total, np.swapaxes(own, 1, 2))
            unknown += np.einsum("ep,epq,eqp->e", local.prior_precision[end], own, share) - local.rescued[end]
        k[poor] = np.clip(p - unknown, 1.0, p)
    return k


def moderation(local: LocalFit) -> Array:
    """Return factors ``(V,)`` that moderate the sites' noise variances: posterior means (Smyth 2004)."""
    factor = np.ones(local.theta.shape[0])
    usable = np.isfinite(local.residual_dof) & ~local.matrix_estimated & ~local.rescued
    names = np.array(local.losses)
    for name in np.unique(names[usable]):
        who = np.flatnonzero(usable & (names == name))
        if who.size < 2:
            continue
        half, variance = local.residual_dof[who] / 2, local.dispersion[who]
        centred = np.log(variance) - digamma(half) + np.log(half)
        excess = float(centred.var(ddof=1) - polygamma(1, half).mean())
        if excess <= 0:
            prior_dof, prior = np.inf, float(np.average(variance, weights=half))
            guess = np.full(who.size, prior)
        else:
            prior_dof = 2 * inverse_trigamma(excess)
            prior = float(np.exp(centred.mean() + digamma(prior_dof / 2) - np.log(prior_dof / 2)))
            guess = (prior_dof * prior + 2 * half * variance) / (prior_dof + 2 * half)
        factor[who] = guess / variance
    return factor


def inverse_trigamma(value: float) -> float:
    """Return the x with ``trigamma(x) = value``, by Newton's method for ``1 / trigamma`` (Smyth 2004)."""
    x, step = 0.5 + 1.0 / value, np.inf
    while abs(step) > 1e-9 * x:
        now = float(polygamma(1, x))
        step = now * (1.0 - now / value) / float(polygamma(2, x))
        x += step
    return x


def alike_groups(local: LocalFit, edges: Index, level: float = 0.05) -> Index:
    """Return groups ``(V,)`` of sites, joined along ``edges (E, 2)`` in their order, that do not differ significantly.

    Two groups are merged if the test of "equal parameters at all of their sites" does not reject at
    ``level / (V (V - 1))``. With Q the sum of squared distances of the sites' own fits from their weighted mean, in the
    metric of their precisions, ``Q / d`` is compared with F(d, f), where ``d = (sites - 1) p`` and f is the sum of the
    residual degrees of freedom.
    """
    V, p = local.theta.shape
    weight: Array = np.asarray(np.linalg.inv(local.covariance * moderation(local)[:, None, None]), dtype=np.float64)
    pull = np.einsum("vpq,vq->vp", weight, local.theta)
    square, dof = np.einsum("vp,vp->v", local.theta, pull), local.residual_dof.copy()
    root, members = np.arange(V), [[u] for u in range(V)]
    refused = set[tuple[int, ...]]()  # pairs of groups, with their sizes, as groups grow
    for i, j in edges.tolist():
        a, b = sorted((int(root[i]), int(root[j])))
        sizes = len(members[a]), len(members[b])
        if a == b or (a, b, *sizes) in refused:
            continue
        whole, pulled, size = weight[a] + weight[b], pull[a] + pull[b], sum(sizes)
        total, scale = unit_diagonal(whole[None])
        squares = float(square[a] + square[b] - pulled / scale[0] @ np.linalg.solve(total[0], pulled / scale[0]))
        d, f = (size - 1) * p, dof[a] + dof[b]
        chance = chdtrc(d, max(squares, 0.0)) if f >= _CHI_SQUARE_DOF else fdtrc(d, f, max(squares, 0.0) / d)
        if chance < bonferroni(level, V * (V - 1)):
            refused.add((a, b, *sizes))
            continue
        weight[a], pull[a], square[a], dof[a] = whole, pulled, square[a] + square[b], f
        members[a] += members[b]
        root[members[b]] = a
    first = {label: k for k, label in enumerate(dict.fromkeys(root.tolist()))}
    return np.array([first[label] for label in root.tolist()], dtype=np.int64)
