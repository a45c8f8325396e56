"""Whether a summary may be that of rows which fit the contract: what came from elsewhere is hostile until then.

Ranges come from the contract, the rest from algebra: the constant column counts rows, squares add up to the diagonal of
the products, and products of columns and target are positive semi-definite. Noise is given its room, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedkin._base import Array
from fedkin.core import Summary, least_eigenvalue
from fedkin.data import Column
from fedkin.errors import DataError, ParameterError
from fedkin.federate.contract import Contract

_ROUNDING = 1e-9
#: Noise is not larger than this many standard deviations, nor its size than this many times what is needed.
_FAR_NOISE, _MOST_NOISE = 10.0, 4.0
#: One site may change the pooled variance of the noise by this factor at most.
_MOST_INFLUENCE = 5.0
_FEWEST_SITES = 3  # of which one can be told from the others


def impossible(summary: Summary, contract: Contract) -> str | None:
    """Return what about a summary no rows have that fit the contract; None when rows may have it."""
    n, loss, privacy = float(summary.n_samples), summary.loss, summary.privacy
    sums, squares, names = summary.column_sums, summary.column_squares, contract.column_names
    low, high = _prepared_ranges(contract)
    size, noise = np.maximum(np.abs(low), np.abs(high)), np.zeros(len(names))
    if privacy is not None:
        bounds, target = data_bounds(contract)
        if not np.allclose(privacy.limits, [*bounds, target], rtol=1e-9):
            return "the limits of its noise are not those of the contract"
        classical = np.sqrt(2 * np.log(1.25 / min(privacy.delta, 1.0))) / min(privacy.epsilon, 1.0)
        if not privacy.noise <= _MOST_NOISE * classical * max(privacy.bound, 1.0) ** 2:
            return "its noise is larger than its epsilon and delta need"
        noise = _FAR_NOISE * np.sqrt(contract.folds) * privacy.noise * privacy.limits[:-1]
    slack = _ROUNDING * n * np.where(np.isfinite(size), size, 0.0)
    for k in np.flatnonzero((sums < n * low - slack - noise) | (sums > n * high + slack + noise)).tolist():
        return f"the sum of {names[k]} is {sums[k]:.6g} for {n:.0f} rows, outside the range of the contract"
    for k in np.flatnonzero(squares > n * size**2 * (1 + _ROUNDING) + noise * size).tolist():
        return f"the squares of {names[k]} add up to {squares[k]:.6g} for {n:.0f} rows, outside the contract's range"
    if contract.intercept and (abs(sums[0] - n) > _ROUNDING * n or abs(squares[0] - n) > _ROUNDING * n):
        return f"the constant column adds up to {sums[0]:.6g} and {squares[0]:.6g} for {n:.0f} rows"
    if loss.quadratic:
        return _impossible_products(summary, contract)
    rowwise = loss.rowwise
    bound = np.inf if rowwise is None else rowwise.curvature_bound
    diagonal = np.einsum("kpp->p", summary.hessian).reshape(-1, len(names))
    if (diagonal > bound * squares * (1 + 1e-6) + _ROUNDING).any():
        return "its second derivatives are larger than its columns allow"
    return None


def stand_alone(summaries: Mapping[str, Summary]) -> dict[str, str]:
    """Return the sites whose sums may be true but would distort the fit of all others, and why.

    The noise of a quadratic loss is learned from all sites. One that changes its pooled variance more than 5 times is
    left out, the worst first, until at least half of the sites are left. Noise for privacy counts for a site.
    """
    parts = {site: one for site, one in summaries.items() if one.loss.quadratic and one.n_samples > one.n_params}
    found = {site: _residuals(one) for site, one in parts.items()}
    out: dict[str, str] = {}
    while len(found) >= max(_FEWEST_SITES, len(parts) / 2 + 1):
        ratios = {}
        for site, (squares, slack, freedom) in found.items():
            others = [one for name, one in found.items() if name != site]
            typical = max(sum(one[0] for one in others) / sum(one[2] for one in others), np.finfo(float).tiny)
            own = float(np.clip(typical * freedom, squares - slack, squares + slack))
            total = freedom + sum(one[2] for one in others)
            ratios[site] = (own / typical + total - freedom) / total, own / freedom / typical
        worst = max(ratios, key=lambda site: abs(np.log(max(ratios[site][0], np.finfo(float).tiny))))
        pooled, times = ratios[worst]
        if 1 / _MOST_INFLUENCE <= pooled <= _MOST_INFLUENCE:
            break
        out[worst] = f"the variance of its noise is {times:.3g} times that of the others"
        del found[worst]
    return out


def _residuals(summary: Summary) -> tuple[float, float, float]:
    """Return the sum of squared residuals of a site's own fit, how far noise may move it, and its freedom."""
    gradient, hessian, n = summary.gradient.sum(axis=0), summary.hessian.sum(axis=0), float(summary.n_samples)
    theta = np.linalg.lstsq(hessian, -gradient, rcond=1e-12)[0]
    squares = max(2 * float(summary.value.sum()) + float(gradient @ theta), 0.0)
    privacy, columns = summary.privacy, summary.n_params if summary.loss.location else 1
    largest = 0.0 if privacy is None else float(np.max(privacy.limits)) ** 2 * (1 + float(np.abs(theta).sum())) ** 2
    slack = 0.0 if privacy is None else _FAR_NOISE * np.sqrt(summary.folds) * privacy.noise * largest
    return squares, slack, n * columns - summary.n_params


def _impossible_products(summary: Summary, contract: Contract) -> str | None:
    """Return what about sums of products of columns and target no rows have."""
    location, count, privacy = summary.loss.location, summary.count.astype(np.float64), summary.privacy
    if summary.at.any():
        return "it is expanded around another point than 0"
    target = contract.schema.target
    if target is not None and target.low is not None and target.high is not None and contract.schema.offset is None:
        largest = max(abs(target.low), abs(target.high)) ** 2
        most = float(count.sum()) * largest
        if privacy is not None:
            most += _FAR_NOISE * np.sqrt(contract.folds) * privacy.noise * largest
        if 2 * float(summary.value.sum()) > most * (1 + _ROUNDING):
            return f"the squares of {target.name} add up to more than the contract's range allows"
    if privacy is not None or summary.curvature is not None:
        return None
    products = summary.scores if summary.scores is not None else summary.hessian
    if not np.allclose(np.einsum("kpp->p", products), summary.column_squares, rtol=1e-6, atol=_ROUNDING):
        return "its products of columns are not those of its 'column_squares'"
    if contract.intercept and not np.allclose(products[:, 0, 0], count, rtol=1e-6):
        return "the constant column is not 1 in every row"
    # sums of [x, y] [x, y]', or of [x, 1] [x, 1]' for the mean
    last = count if location else 2 * summary.value
    edge = -summary.gradient[:, :, None]
    whole = np.block([[products, edge], [np.swapaxes(edge, 1, 2), last[:, None, None]]])
    if (last < 0).any() or not (least_eigenvalue(whole) >= -1e-7).all():
        return "its sums of products with the target are larger than any rows have"
    return None


def _prepared_ranges(contract: Contract) -> tuple[Array, Array]:
    """Return the least and largest values of prepared columns, infinite where the contract has none."""
    low, high = ([1.0], [1.0]) if contract.intercept else ([], [])
    for column in contract.schema.features:
        centre, scale = column.centre_and_scale
        for ends, found in zip((low, high), column.ranges, strict=True):
            ends.extend(((found - (centre if contract.intercept else 0.0)) / scale).tolist())
    return np.array(low), np.array(high)


def data_bounds(contract: Contract) -> tuple[list[float], float]:
    """Return the largest absolute values of prepared columns and of the target: what noise is measured by."""
    schema = contract.schema
    if not contract.loss_object().quadratic:
        raise ParameterError(
            f"--epsilon is for the linear and the mean loss; the {contract.loss['name']} loss of the contract takes "
            "several messages, each of which would need its share of epsilon"
        )
    if schema.offset is not None:
        raise DataError(
            f"noise needs bounds on all numbers, but the contract gives none for the offset {schema.offset!r}"
        )
    for column in schema.features:
        if column.kind != "category":
            _range(column)
    low, high = _prepared_ranges(contract)
    bounds = np.maximum(np.abs(low), np.abs(high)).tolist()
    return bounds, 1.0 if schema.target is None else max(map(abs, _range(schema.target)))


def _range(column: Column) -> tuple[float, float]:
    if column.low is None or column.high is None:
        raise DataError(
            f"noise needs bounds on all numbers, but the contract gives {column.name!r} no plausible range (low, high)"
        )
    return column.low, column.high
