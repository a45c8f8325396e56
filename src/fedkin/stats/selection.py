"""Which edges join devices that do not differ (section 3.2 of the paper).

A Wald test on every candidate edge, from the devices' own fits, with a correction for the number of tests.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fedkin._base import Array, Mask
from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.objective import LossLike
from fedkin.stats.local import LocalFit, Variance, check_variance, local_fit
from fedkin.stats.wald import wald_tests

Method = Literal["bonferroni", "holm", "bh", "by"]

ERROR_CONTROLLED: Mapping[str, str] = {
    "bonferroni": "probability of dropping any edge between devices with equal parameters, at most level",
    "holm": "probability of dropping any edge between devices with equal parameters, at most level",
    "bh": "expected share, among the dropped edges, of edges between devices with equal parameters, at most level "
    "(proved for independent or positively dependent tests)",
    "by": "expected share, among the dropped edges, of edges between devices with equal parameters, at most level, "
    "whatever the dependence",
}


@dataclass(frozen=True, eq=False)
class EdgeSelection:
    """Edges that were kept, and the test of every candidate.

    Attributes
    ----------
    graph : Graph
        The candidates whose null hypothesis "equal parameters" was not rejected.
    candidates : Graph
        All edges that were tested, devices in the federation's order.
    statistic : array (E,)
        ``W_e^2`` (eq. test_statistic_def).
    p_value : array (E,)
    reference_dof : array (E,)
        Denominator degrees of freedom of the F reference, infinite where the reference is chi-square.
    kept : bool array (E,)
        ``p_value >= threshold``.
    threshold : float
        The p-value below which an edge is dropped, after the correction.
    critical : float or None
        The threshold on the scale of the statistic, ``chi2_p(threshold)`` (upper quantile; for Bonferroni the paper's
        ``chi2_p(level / |E|)``), when every reference is chi-square; else None.
    level : float
    method : "bonferroni" | "holm" | "bh" | "by"
    variance : "model" | "sandwich" | "bartlett"
    error_controlled : str
        The error that the method keeps below ``level``.
    notes : dict {device: str}
        Devices without an estimate of their own, see `LocalFit`.
    """

    graph: Graph
    candidates: Graph
    statistic: Array
    p_value: Array
    reference_dof: Array
    kept: Mask
    threshold: float
    critical: float | None
    level: float
    method: Method
    variance: Variance
    error_controlled: str
    notes: Mapping[Hashable, str]


def select_edges(
    federation: Federation,
    graph: Graph | None = None,
    loss: LossLike = "linear",
    level: float = 0.05,
    method: Method = "bonferroni",
    variance: Variance | None = None,
    local: LocalFit | None = None,
) -> EdgeSelection:
    """Keep the candidate edges along which the devices' own fits do not differ significantly.

    Parameters
    ----------
    federation : Federation
        The devices and their rows.
    graph : Graph, optional
        Candidate edges (Fed-ADMM-ES); all pairs of devices when None (Fed-ADMM-Local-ES).
    loss : str, Loss or mapping {device: loss}
        As in `local_fit`.
    level : float
        Between 0 and 1.
    method : "bonferroni" | "holm" | "bh" | "by"
        Correction for the number of edges. An edge is *dropped* when its null hypothesis is rejected, so Bonferroni and
        Holm bound the probability of dropping any true edge, and Benjamini-Hochberg and Benjamini-Yekutieli the
        expected share of true edges among the dropped ones. None bounds the number of false edges that stay: these are
        errors of the second kind.
    variance : "model" | "sandwich" | "bartlett", optional
        As in `local_fit`; "model" by default. "bartlett" is the paper's: with the linear loss it takes the noise
        variance for 1, so with larger noise it drops true edges and with smaller noise it keeps false ones.
    local : LocalFit, optional
        Fits of the same federation, to save fitting again; its variance is used.

    Returns
    -------
    EdgeSelection
        Without NaN, whatever the devices: `LocalFit` says how those without an own fit are handled, ``notes`` names
        them.

    Notes
    -----
    With d the difference of the two fits and Omega_u their covariances, ``W^2 = d' (Omega_i + Omega_j)^{-1} d``. Where
    nothing about the covariances is estimated (apart from theta), the reference is chi-square with p degrees of
    freedom. Where they are estimated, chi-square rejects too often, the more so the smaller the level, and the
    reference is F. With ``P_u = (Omega_i + Omega_j)^{-1} Omega_u`` the share of device u in the variance and f_u its
    degrees of freedom, let

        nu = p (p + 2) / sum_u {tr(P_u)^2 + 2 tr(P_u^2)} / f_u,

    which is Satterthwaite's (Welch's) number for p = 1. When only the scales of Omega_u are estimated ("model"),
    ``W^2 / {p (1 + c)}`` is compared with F(p, nu), where matching the first two moments to the order 1/f gives
    ``c = sum_u (2 / f_u) tr(P_u^2) / p - 2 / nu``, which is 0 for proportional covariances (the idea of Kenward and
    Roger). The shares use noise variances steadied across devices (Smyth), because plugging in a variance on few
    degrees of freedom that came out small would hide its own uncertainty. When whole matrices are estimated
    ("sandwich"), it is Hotelling's ``(nu - p + 1) W^2 / (nu p)`` against F(p, nu - p + 1) (Krishnamoorthy and Yu),
    with f_u from the leverages of the rows (Bell and McCaffrey); this errs on the side of keeping edges.

    Ends without an estimate of their own show fewer than p directions, and the statistic is small in the others. The
    reference then counts, instead of p, the part of ``tr(P_i + P_j)`` that comes from the rows rather than from the
    ridge's prior, plus 1 for each such end to cover its shrinkage. Columns that are redundant on a device (an
    intercept next to a full set of indicators, categories that it does not have) therefore cost hardly any power.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_devices=20, seed=0)
    >>> chosen = fedkin.select_edges(design.federation, design.graph)
    >>> chosen.candidates.n_edges, chosen.graph.n_edges, round(chosen.graph.fidelity(design.truth), 2)
    (44, 27, 1.0)
    """
    _check(level, method)
    if local is None:
        check_variance(variance or "model")
        local = local_fit(federation, loss, variance or "model")
    elif local.devices != federation.devices:
        raise ParameterError("local holds fits of other devices than the federation; fit it on this federation")
    elif variance is not None and variance != local.variance:
        raise ParameterError(f"variance={variance!r} was asked for, but local was fitted with {local.variance!r}")
    candidates = Graph.complete(federation.devices) if graph is None else graph.aligned(federation.devices)
    statistic, p_value, dof = wald_tests(local, candidates.edges)
    threshold = threshold_of(p_value, level, method)
    kept = p_value >= threshold
    return EdgeSelection(
        graph=candidates.keep(kept),
        candidates=candidates,
        statistic=statistic,
        p_value=p_value,
        reference_dof=dof,
        kept=kept,
        threshold=threshold,
        critical=_chi_square_quantile(local.theta.shape[1], threshold) if np.isinf(dof).all() else None,
        level=level,
        method=method,
        variance=local.variance,
        error_controlled=ERROR_CONTROLLED[method],
        notes=dict(local.notes),
    )


def _check(level: float, method: str) -> None:
    if not 0 < level < 1:
        raise ParameterError(f"level is the size of a test, between 0 and 1, got {level!r}")
    if method not in get_args(Method):
        raise ParameterError(f"unknown method {method!r}; choose one of {', '.join(get_args(Method))}")


def threshold_of(p_value: Array, level: float, method: Method) -> float:
    """The p-value below which edges are dropped."""
    m = p_value.size
    if m == 0:
        return level
    ordered = np.sort(p_value)
    rank = np.arange(1, m + 1)
    if method == "bonferroni":
        return level / m
    if method == "holm":
        # reject in order of p-values, until one is not small compared with the number still in play
        stays = np.flatnonzero(ordered >= level / (m - rank + 1))
        return level / (m - stays[0]) if stays.size else level
    if method == "by":
        level = level / float((1 / rank).sum())
    small = np.flatnonzero(ordered < level * rank / m)
    return float(level * (small[-1] + 1 if small.size else 1) / m)


def _chi_square_quantile(p: int, tail: float) -> float:
    from scipy.special import chdtri

    return float(chdtri(p, tail))
