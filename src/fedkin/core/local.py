"""Each site's fit on its own rows, with its variance; fits that pool sites; and tests of the edges between sites.

A site has an *own* estimate when its mean loss has a unique minimiser. When it has none, a stated rule gives a finite
estimate together with a variance that is wide where the rows say nothing (`LocalFit`, Notes).
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from scipy.special import chdtrc, chdtri, digamma, fdtrc, polygamma

from fedkin._base import Array, Index, Mask, check_choice, check_positive
from fedkin.core.ownfits import OwnFits, fit_sites, minimise_functions
from fedkin.core.quadratics import RANK_TOLERANCE, inverse_of, least_eigenvalue, unit_diagonal
from fedkin.core.sitedata import LossLike, RowData, site_data
from fedkin.core.summaries import Summaries
from fedkin.data import Federation
from fedkin.errors import DataError, DegenerateSiteWarning, ParameterError, UnknownSiteError
from fedkin.graph import Graph
from fedkin.losses import by_loss

Variance = Literal["model", "sandwich", "bartlett"]
Weights = Literal["samples", "sites"]


@dataclass(frozen=True, eq=False)
class LocalFit:
    """The sites' own estimates and how sure each site is of its own.

    Notes
    -----
    **Variance.** With H the Hessian and S the mean outer product of the scores: "bartlett" is ``(n H)^{-1}``, the
    paper's, right when the loss is a negative log-likelihood with nothing left to estimate (for the linear loss: noise
    of variance 1); "model" is ``dispersion * (n H)^{-1}``, which allows a noise variance (the same for all rows of a
    site); "sandwich" is ``H^{-1} S H^{-1} / (n - p)``, which allows any noise. For the mean loss "model" is the
    sandwich too, with ``n - 1`` in the place of ``n - p``: that is the sample covariance of the mean. With no more rows
    than columns it gives way to one variance for all columns.

    **Sites without an estimate of their own** are those whose design does not have full rank (fewer rows than
    features, constant or repeated columns), whose likelihood has no maximum (separated classes, one class only, no
    counts), or whose user-defined loss has no unique minimiser. They get a ridge fit: ``sum_c ridge_c theta_c^2 / 2``
    is added to M_u, and the variance is ``dispersion * {n (H + diag(ridge))}^{-1}``: what remains unknown after seeing
    the rows, when before them ``theta_c`` had variance ``size / scale_c``. Here ``scale_c`` is the mean square of
    feature c in the federation, and ``size`` is the mean square of the response (the larger one of the site's and
    the federation's) or, for logits, 25 (odds of 148 to 1), and for log rates 25 plus the squared log of the mean
    rate: any feature alone might explain everything. So ``ridge_c = dispersion * scale_c / (n * size)``, less than one
    row's worth, and directions of which the rows say nothing keep a variance so wide that no difference of plausible
    size is significant along them. For a user-defined loss, whose scale is not known, ``ridge_c`` is the curvature at
    0 divided by n: one row's worth. These sites keep "model" when "sandwich" was asked for, because the scores of a
    (nearly) perfect fit tell nothing of noise.

    **Sites without residual degrees of freedom** (no more rows than parameters) take the dispersion pooled over the
    other sites of the same loss; when no site has any, the mean square of the response is used, which is wide.

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

    sites: tuple[Hashable, ...]
    theta: Array  # (V, p), minimisers of the sites' mean losses M_u, or what the rules above put in their place
    hessian: Array  # (V, p, p), of M_u at theta, without any ridge
    covariance: Array  # (V, p, p), the paper's Omega_u (already divided by n_u); always finite and positive definite
    n_samples: Index  # (V,)
    dispersion: Array  # (V,), by what the variance of a score exceeds the Hessian (linear loss: the noise variance)
    residual_dof: Array  # (V,), behind the covariance; infinite where nothing about it is estimated apart from theta
    matrix_estimated: Mask  # (V,), where the covariance is estimated as a whole (sandwich), not at most its scale
    prior_precision: Array  # (V, p), 1 / variance of each coordinate before the rows were seen; 0 for sites not rescued
    rescued: Mask  # (V,), sites without an estimate of their own
    notes: Mapping[Hashable, str]  # why a site had no estimate or no variance of its own, and which rule was used
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
        The sites and their rows, or what these said about them (see Notes).
    loss : str, Loss or mapping {site: loss}
        What each site minimises; summaries know it.
    variance : "model" | "sandwich" | "bartlett"
        How the covariance is estimated; see `LocalFit`.
    radius : float, optional
        Of the paper's parameter space: estimates are minimisers over ``||theta_u||_2 <= radius``. Covariances are those
        of the loss at the estimate, and `LocalFit.notes` names the sites at the border.

    Returns
    -------
    LocalFit
        Finite on every site; `LocalFit.notes` names the sites that had no estimate of their own.

    Notes
    -----
    Summaries of quadratic losses tell the same as rows, up to rounding (designs whose features are nearly collinear
    lose more digits: a Gram matrix squares the condition number). For other losses the estimates are those that the
    sites found by themselves, each with the rules of a federation of one. The variance "sandwich" needs rows. Where
    sums are noisy (`fedkin.core.private_summary`), the variance that noise gives to the estimates is added.

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
                'variance="sandwich" needs the squares of every row\'s score, which summaries do not hold: use "model"'
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
    # a location models nothing else: its columns may be correlated and of any scale
    if variance == "model" and not fits.loss.location:
        return model, fits.dof, none
    paid = 1.0 if fits.loss.location else float(fits.n_params)
    sandwich = bread @ fits.score_cov @ bread / np.maximum(n - paid, 1.0)
    sandwich = 0.5 * (sandwich + np.swapaxes(sandwich, 1, 2))
    usable = ~fits.rescued & (fits.matrix_dof > 0)
    # a sandwich that is flat where the model is not would be sure of what it cannot know
    usable &= (least_eigenvalue(sandwich) > RANK_TOLERANCE) & (np.einsum("mpp->mp", sandwich) > 0).all(axis=1)
    short = np.flatnonzero(~usable & ~fits.rescued)
    fits.note(short, "too few rows for a sandwich variance: the model's is used")
    covariance = np.where(usable[:, None, None], sandwich, model)
    return covariance, np.where(usable, fits.matrix_dof, fits.dof), usable


def global_fit(
    federation: Federation | Summaries,
    loss: LossLike = "linear",
    weights: Weights = "samples",
    radius: float | None = None,
) -> Array:
    """Fit one parameter for all sites.

    Parameters
    ----------
    federation : Federation or Summaries
        The sites and their rows, or what these said about them (quadratic losses and ``weights="samples"`` only).
    loss : str, Loss or mapping {site: loss}
        What each site minimises.
    weights : "samples" or "sites"
        "samples" minimises ``sum_u n_u M_u``, every row counting alike: the pooled fit that section 5 calls Global.
        "sites" minimises ``sum_u M_u``, every site counting alike: what the penalised estimator becomes when lam
        grows without bound on a connected graph. They agree when all n_u are equal.
    radius : float, optional
        As in `local_fit`.

    Returns
    -------
    array (p,)

    Warns
    -----
    DegenerateSiteWarning
        When the pooled loss has no unique minimiser and a rule of `LocalFit` was used.

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
    """Fit one parameter for each group of sites: what one could do knowing who is alike.

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
        raise ParameterError(f'weights={weights!r} needs rows; summaries give every row the same weight: "samples"')
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
    """Return the common minimiser ``(p,)`` of some sites, and why it is not an ordinary one ("" when it is)."""
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


# --- edges that join sites that do not differ (section 3.2 of the paper) --------------------------------------------

Correction = Literal["bonferroni", "holm", "bh", "by"]
#: Methods that bound the probability of any wrong drop; the others bound the share of wrong ones among the dropped.
FAMILY_WISE: tuple[Correction, ...] = ("bonferroni", "holm")

_CHI_SQUARE_DOF = 1e8  # from here on F and chi-square cannot be told apart


@dataclass(frozen=True, eq=False)
class EdgeSelection:
    """Edges that were kept, and the test of every candidate."""

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
    notes: Mapping[Hashable, str]  # sites without an estimate of their own, see `LocalFit`


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
    federation : Federation or Summaries
        The sites and their rows, or what these said about them.
    graph : Graph, optional
        Candidate edges (Fed-ADMM-ES); all pairs of sites when None (Fed-ADMM-Local-ES).
    loss : str, Loss or mapping {site: loss}
        As in `local_fit`.
    level : float
        Between 0 and 1.
    method : "bonferroni" | "holm" | "bh" | "by"
        Correction for the number of edges. An edge is *dropped* when its null hypothesis is rejected, so Bonferroni and
        Holm bound the probability of dropping any true edge, and Benjamini-Hochberg (for independent or positively
        dependent tests) and Benjamini-Yekutieli the expected share of true edges among the dropped ones. None bounds
        the number of false edges that stay: these are errors of the second kind.
    variance : "model" | "sandwich" | "bartlett", optional
        As in `local_fit`; "model" by default. "bartlett" is the paper's: with the linear loss it takes the noise
        variance for 1, so with larger noise it drops true edges and with smaller noise it keeps false ones.
    local : LocalFit, optional
        Fits of the same federation, to save fitting again; its variance is used.
    radius : float, optional
        As in `local_fit`.

    Returns
    -------
    EdgeSelection
        Without NaN, whatever the sites: `LocalFit` says how those without an own fit are handled, ``notes`` names
        them.

    Notes
    -----
    With d the difference of the two fits and Omega_u their covariances, ``W^2 = d' (Omega_i + Omega_j)^{-1} d``. Where
    nothing about the covariances is estimated (apart from theta), the reference is chi-square with p degrees of
    freedom. Where they are estimated, chi-square rejects too often, the more so the smaller the level, and the
    reference is F. With ``P_u = (Omega_i + Omega_j)^{-1} Omega_u`` the share of site u in the variance and f_u its
    degrees of freedom, let

        nu = p (p + 2) / sum_u {tr(P_u)^2 + 2 tr(P_u^2)} / f_u,

    which is Satterthwaite's (Welch's) number for p = 1. When only the scales of Omega_u are estimated ("model"),
    ``W^2 / {p (1 + c)}`` is compared with F(p, nu), where matching the first two moments to the order 1/f gives
    ``c = sum_u (2 / f_u) tr(P_u^2) / p - 2 / nu``, which is 0 for proportional covariances (the idea of Kenward and
    Roger). The shares use noise variances moderated across sites (Smyth), because plugging in a variance on few
    degrees of freedom that came out small would hide its own uncertainty. When whole matrices are estimated
    ("sandwich"), it is Hotelling's ``(nu - p + 1) W^2 / (nu p)`` against F(p, nu - p + 1) (Krishnamoorthy and Yu),
    with f_u from the leverages of the rows (Bell and McCaffrey); this errs on the side of keeping edges.

    Ends without an estimate of their own show fewer than p directions, and the statistic is small in the others. The
    reference then counts, instead of p, the part of ``tr(P_i + P_j)`` that comes from the rows rather than from the
    ridge's prior, plus 1 for each such end to cover its shrinkage. Columns that are redundant on a site (an
    intercept next to a full set of indicators, categories that it does not have) therefore cost hardly any power.

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
        raise ParameterError("local holds fits of other sites than the federation; fit it on this federation")
    elif variance is not None and variance != local.variance:
        raise ParameterError(f"variance={variance!r} was asked for, but local was fitted with {local.variance!r}")
    candidates = Graph.complete(federation.sites) if graph is None else graph.aligned(federation.sites)
    statistic, p_value, dof = wald_tests(local, candidates.edges)
    threshold = threshold_of(p_value, level, method)
    kept = p_value >= threshold
    critical = float(chdtri(local.theta.shape[1], threshold)) if np.isinf(dof).all() else None
    tests = candidates.keep(kept), candidates, statistic, p_value, dof, kept, threshold, critical
    return EdgeSelection(*tests, level, method, local.variance, dict(local.notes))


def bonferroni(level: float, n_edges: int) -> float:
    """Return the p-value below which edges are dropped, which needs no p-values of other edges: sites can use it."""
    return level / max(n_edges, 1)


def threshold_of(p_value: Array, level: float, method: Correction) -> float:
    """Return the p-value below which edges are dropped."""
    m = p_value.size
    if m == 0 or method == "bonferroni":
        return bonferroni(level, m)
    ordered = np.sort(p_value)
    rank = np.arange(1, m + 1)
    if method == "holm":
        # reject in order of p-values, until one is not small compared with the number still in play
        stays = np.flatnonzero(ordered >= level / (m - rank + 1))
        return level / (m - stays[0]) if stays.size else level
    if method == "by":
        level = level / float((1 / rank).sum())
    small = np.flatnonzero(ordered < level * rank / m)
    return float(level * (small[-1] + 1 if small.size else 1) / m)


def wald_tests(local: LocalFit, edges: Index, *, chunk_entries: int = 2**20) -> tuple[Array, Array, Array]:
    """Statistic, p-value and degrees of freedom ``(E,)`` of the tests of "equal parameters" on ``edges (E, 2)``."""
    p = local.theta.shape[1]
    statistic, p_value, dof = (np.empty(len(edges)) for _ in range(3))
    factor = moderation(local)
    step = max(1, chunk_entries // (p * p))
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
    """Numerator degrees of freedom ``(E,)``: p, or fewer when an end without an estimate of its own does not show all.

    There the covariance is ``Omega = V + Omega N Omega``, with V the part that comes from noise in the rows and N the
    prior precision, and the statistic has the mean ``sum_u tr{(Omega_i + Omega_j)^{-1} V_u}`` plus the square of the
    shrinkage, which the prior keeps below 1 for each such end.
    """
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
    """Factors ``(V,)`` that turn the sites' noise variances into steadier guesses, for weighing the ends of edges.

    A noise variance on few degrees of freedom that came out too small would also claim too small a share of the edge's
    variance, and so hide that it is uncertain. All sites' variances together tell how much true variances differ
    (a scaled inverse chi-square prior with d0 degrees of freedom, Smyth 2004): the guess is the posterior mean.
    """
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

    Two groups become one where the test of "equal parameters at all of their sites" does not reject at ``level``,
    divided by ``V (V - 1)``: joins are chosen among all pairs. With Q the sum of squared distances of the sites' own
    fits from their weighted mean, in the metric of their precisions, ``Q / d`` is compared with F(d, f), where
    ``d = (sites - 1) p`` and f is the sum of the residual degrees of freedom. Variances are moderated across sites as
    in `select_edges`.

    The smaller the level, the larger the groups: weak differences are pooled, which costs less than not pooling equal
    sites as long as the differences are within the sites' own errors.
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
        spread = float(square[a] + square[b] - pulled / scale[0] @ np.linalg.solve(total[0], pulled / scale[0]))
        d, f = (size - 1) * p, dof[a] + dof[b]
        chance = chdtrc(d, max(spread, 0.0)) if f >= _CHI_SQUARE_DOF else fdtrc(d, f, max(spread, 0.0) / d)
        if chance < bonferroni(level, V * (V - 1)):
            refused.add((a, b, *sizes))
            continue
        weight[a], pull[a], square[a], dof[a] = whole, pulled, square[a] + square[b], f
        members[a] += members[b]
        root[members[b]] = a
    first = {label: k for k, label in enumerate(dict.fromkeys(root.tolist()))}
    return np.array([first[label] for label in root.tolist()], dtype=np.int64)
