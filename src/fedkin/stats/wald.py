"""The Wald test of "equal parameters" on every edge, from the devices' own fits."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, Index
from fedkin.objective import unit_diagonal
from fedkin.stats.local import LocalFit

_CHI_SQUARE_DOF = 1e8  # from here on F and chi-square cannot be told apart


def wald_tests(local: LocalFit, edges: Index, *, chunk_entries: int = 2**20) -> tuple[Array, Array, Array]:
    """Test "equal parameters" on every edge.

    Parameters
    ----------
    local : LocalFit
        Fits of V devices.
    edges : int array (E, 2)
        Positions of the end points.
    chunk_entries : int
        Numbers in one stack of p x p matrices: edges are tested that many at once, to save memory.

    Returns
    -------
    statistic, p_value, reference_dof : arrays (E,)

    Examples
    --------
    >>> import numpy as np, fedkin
    >>> from fedkin.stats import wald_tests
    >>> fed = fedkin.Federation({"a": [[0.0], [2.0]], "b": [[1.0], [3.0]]})
    >>> statistic, p_value, dof = wald_tests(fedkin.local_fit(fed, "mean"), np.array([[1, 0]]))
    >>> statistic.tolist(), p_value.round(3).tolist(), dof.tolist()  # Welch's t-test, squared
    ([0.5], [0.553], [2.0])
    """
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
        return statistic, chi_square_tail(k, statistic), np.full(len(edges), np.inf)
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
    p_value = np.where(plain, chi_square_tail(k, ratio), f_tail(k, np.where(plain, 1.0, dof), ratio / k))
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
    """Factors ``(V,)`` that turn the devices' noise variances into steadier guesses, for weighing the ends of edges.

    A noise variance on few degrees of freedom that came out too small would also claim too small a share of the edge's
    variance, and so hide that it is uncertain. All devices' variances together tell how much true variances differ
    (a scaled inverse chi-square prior with d0 degrees of freedom, Smyth 2004): the guess is the posterior mean.
    """
    from scipy.special import digamma, polygamma

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
    """The x with ``trigamma(x) = value``, by Newton's iteration on its reciprocal (Smyth 2004, appendix)."""
    from scipy.special import polygamma

    x = 0.5 + 1.0 / value
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1.0 - trigamma / value) / float(polygamma(2, x))
        x += step
        if abs(step) < 1e-9 * x:
            break
    return x


# scipy.special rather than scipy.stats: accurate far out in the tail, and quick to import


def chi_square_tail(p: Array | int, x: Array) -> Array:
    """Upper tail of chi-square with p degrees of freedom."""
    from scipy.special import chdtrc

    return np.asarray(chdtrc(p, x))


def f_tail(p: Array | int, dof: Array, x: Array) -> Array:
    """Upper tail of F with p and dof degrees of freedom."""
    from scipy.special import betainc

    return np.asarray(betainc(dof / 2, p / 2, dof / (dof + p * x)))
