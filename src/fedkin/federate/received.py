"""Summaries at the organiser: collected, and refused if no rows that fit the contract can have them.

Ranges come from the contract, the rest from algebra: the constant column counts rows, squares add up to the diagonal of
the products, and products of columns and target are positive semi-definite. Noise is allowed for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from fedkin._base import TINY, Array, hidden_text, in_file, listed
from fedkin.core import Query, Summary, least_eigenvalue
from fedkin.data import Column
from fedkin.errors import DataError, ParameterError
from fedkin.federate import messages
from fedkin.federate.contract import Contract
from fedkin.federate.messages import SummaryFile
from fedkin.federate.organiser import Organiser
from fedkin.federate.trust import SecurityError
from fedkin.losses import describe_loss

_ROUNDING = 1e-9
#: Noise is at most this many standard deviations, and its scale at most this many times the one needed.
_FAR_NOISE, _MOST_NOISE = 10.0, 4.0
#: One site may change the pooled noise variance by at most this factor.
_MOST_INFLUENCE = 5.0
_LONGEST_NOTE, _FAR_OFF = 400, 1e3  # characters; how much larger derivatives of a short message may be
_LARGEST = 1e30
_LARGEST_RIDGE = 1e9  # in units of the largest mean square of a column, and of the target for dispersions
_FEWEST_SITES = 3  # with fewer, no site can be judged by the others


@dataclass(frozen=True, eq=False)
class Collected:
    """Summaries of one round, by site id (text), in the order of the organiser's list if that is available.

    ``round`` is 1 for first summaries, else that of the queries they answer; ``missing`` has the names of listed sites
    that are not out and have sent nothing; ``alone`` those whose sums would distort the fit of all others, with the
    reason (`stand_alone`): their summaries are left out. ``districts`` has the district of each site, if the contract
    asks for one.
    """

    contract: Contract
    summaries: dict[str, Summary]
    round: int
    missing: tuple[str, ...] = ()
    alone: Mapping[str, str] = field(default_factory=dict)
    districts: Mapping[str, str] | None = None


def read_summaries(directory: Path, federation: Path | None = None, *, now: datetime | None = None) -> Collected:
    """Read the newest summaries of admitted sites in a folder, all under one contract.

    All trust comes from the organiser's ``federation.json`` (the file or its directory) with ``keys.json`` next to it;
    by default it is searched for in the folder and the one above. Certificates must be valid ``now``: to fit old files,
    state when they arrived. Errors name the file: not signed by a site of the federation, changed, of another contract,
    of a site that is out or has lost its key, a duplicate of the same site, or of a round that not all sites have
    answered.
    """
    charter_file = _find_charter(directory, federation)
    place, charter = charter_file.parent, messages.read_charter(charter_file)
    organiser = Organiser.read(place) if (place / messages.SITES).exists() else None  # None if only the charter is here
    out, keys = None if organiser is None else organiser.out(), charter.keys(place)
    rounds: dict[int, dict[str, tuple[Path, SummaryFile]]] = {}
    for path in sorted(directory.glob(f"*{messages.SUMMARY}")):
        found, certificate = charter.read(path, SummaryFile, now=now, most_bytes=_most_bytes(charter.terms))
        if not keys.revision:
            raise DataError(f"{place} has no {messages.KEYS}, which is needed to check who may sign: get it, too")
        keys.check_signer(path, found.site, certificate, out)
        same = rounds.setdefault(found.round, {})
        if found.site in same:
            both = f"{path} and {same[found.site][0]}"
            raise DataError(f"{both} are both from {found.site}, round {found.round}: keep one")
        same[found.site] = (path, found)
    known = [] if organiser is None else [member.name for member in organiser.members if member.name not in (out or ())]
    if not rounds:
        whose = f"; those of {listed(known, 8)} are missing" if known else ""
        raise DataError(
            f"{directory} has no summaries{whose}: put there the files *{messages.SUMMARY} that sites send "
            "(fedkin site share writes them)"
        )
    newest = rounds[max(rounds)]
    if silent := sorted({name for same in rounds.values() for name in same} - newest.keys()):
        path, found = next(iter(newest.values()))
        raise DataError(
            f"{path} is the answer of {found.site} to query {max(rounds)}, still unanswered by {listed(silent, 8)}: "
            "wait for all answers"
        )
    order = {name: k for k, name in enumerate(known)}
    names = sorted(newest, key=lambda name: (order.get(name, len(order)), name))
    summaries, districts = {}, {}
    for name in names:
        path, found = newest[name]
        summary = _summary_in(path, found, charter.terms)
        # a site may send only its own sums: its id is its name, or that in the organiser's list
        if str(summary.site) != (name if organiser is None else str(organiser.member(name).id)):
            raise SecurityError(f"{path}: {name} signed it, but its sums name the site {summary.site!r}")
        if charter.terms.within and not found.district:
            raise DataError(f"{path} does not state the {charter.terms.within} of {name}: let it share again")
        summaries[str(summary.site)], districts[str(summary.site)] = summary, found.district
    _refuse_twins({name: newest[name][0] for name in names}, summaries)
    missing = tuple(name for name in known if name not in names)
    alone = stand_alone(summaries)
    kept = {site: summary for site, summary in summaries.items() if site not in alone}
    within = {site: districts[site] for site in kept} if charter.terms.within else None
    return Collected(charter.terms, kept, max(rounds), missing, alone, within)


def _find_charter(directory: Path, federation: Path | None) -> Path:
    if not directory.is_dir():
        raise DataError(f"there is no folder {directory}")
    if federation is not None:
        return federation / messages.FEDERATION if federation.is_dir() else federation
    for place in (directory, directory.absolute().parent):
        if (place / messages.FEDERATION).exists():
            return place / messages.FEDERATION
    raise DataError(
        f"neither {directory} nor the folder above has {messages.FEDERATION}, which is needed to check the signatures "
        "of summaries: ask the organiser for it, and give it with --federation FILE"
    )


def _summary_in(path: Path, found: SummaryFile, contract: Contract) -> Summary:
    """Return the summary in a file; raise `DataError` with file and site if no rows of the contract can have it."""
    loss = contract.loss_object()
    with in_file(path, DataError):
        try:
            summary = Summary.from_plain(found.summary, loss)
            agreed = (describe_loss(loss), contract.column_names, contract.folds, contract.seed)
            if (describe_loss(summary.loss), summary.feature_names, summary.folds, summary.seed) != agreed:
                raise DataError("its loss, columns or folds are not those of the contract; let the site share again")
            with np.errstate(all="ignore"):
                wrong = impossible(summary, contract)
        except (ArithmeticError, ValueError, TypeError, MemoryError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            wrong = f"its numbers are not usable ({type(error).__name__})"
        if wrong is not None:
            raise DataError(f"the summary of {found.site} is impossible: {wrong}; ask the site for it again")
    return summary


def _most_bytes(contract: Contract) -> int:
    """Return the largest size of a summary in bytes: each of its numbers takes at most 32."""
    p, q = contract.n_params, len(contract.column_names)
    return 2**20 + 32 * ((contract.folds + 1) * (p * p + p + 2) + p * p + 6 * (p + q))


def _refuse_twins(paths: Mapping[str, Path], summaries: Mapping[str, Summary]) -> None:
    """Refuse two sites with the same sums: one of them has signed those of the other."""
    seen: dict[bytes, str] = {}
    for name, summary in zip(paths, summaries.values(), strict=True):
        sums = summary.gradient.tobytes() + summary.hessian.tobytes() + summary.value.tobytes()
        if (first := seen.setdefault(sums, name)) != name and summary.n_samples > 0:
            raise DataError(
                f"{paths[first]} and {paths[name]} hold the same sums: ask {first} and {name} whose they are"
            )


def impossible(summary: Summary, contract: Contract) -> str | None:
    """Return why no rows that fit the contract can have this summary; None if some can."""
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
    return _impossible_derivatives(summary, contract)


def _impossible_derivatives(summary: Summary, contract: Contract) -> str | None:
    """Return why no rows can have these derivatives of a loss that is not quadratic, and this estimate."""
    rowwise, survival, n = summary.loss.rowwise, summary.loss.target == "survival", float(summary.n_samples)
    if not np.linalg.norm(summary.at) <= contract.radius * (1 + _ROUNDING):
        return f"it is expanded around a point outside the contract's ball of radius {contract.radius:.3g}"
    squares = summary.column_squares
    # of survival, each event has the difference of a row and a mean
    slope = 2 * np.sqrt(n) if survival else np.inf if rowwise is None else rowwise.slope_bound
    bend = n if survival else np.inf if rowwise is None else rowwise.curvature_bound
    short = summary.curvature is not None and not summary.curvature.exact  # with derivatives of a quadratic nearby
    slope, least = (_FAR_OFF * slope, -_FAR_OFF * n) if short else (slope, -_ROUNDING * n)
    if np.isfinite(slope) and (summary.value < least).any():
        return f"its loss is {summary.value.min():.6g}, but no row has less than 0"
    gradient = np.abs(summary.gradient.sum(axis=0)).reshape(-1, squares.size)
    if (gradient > slope * np.sqrt(n * squares) * (1 + 1e-6) + _ROUNDING).any():
        return "its gradient is larger than its columns allow"
    diagonal = np.einsum("kpp->p", summary.hessian).reshape(-1, squares.size)
    if (diagonal > bend * squares * (1 + 1e-6) + _ROUNDING).any():
        return "its second derivatives are larger than its columns allow"
    if (own := summary.own) is None:
        return None
    most, target = _LARGEST_RIDGE * max(float(squares.max()) / n, 1.0), contract.schema.target
    if (own.ridge > most).any():
        return f"the ridge of its estimate is {own.ridge.max():.3g}, and at most {most:.3g}"
    ends = () if target is None or target.low is None or target.high is None else (target.low, target.high)
    if not 1 / _LARGEST <= own.dispersion <= (_LARGEST_RIDGE * max(1.0, *map(abs, ends)) ** 2 if ends else _LARGEST):
        return f"its dispersion is {own.dispersion:.3g}"
    if len(own.note) > _LONGEST_NOTE or hidden_text(own.note) is not None:
        return f"its note is not one line of at most {_LONGEST_NOTE} printable characters"
    return None


def check_queries(queries: Iterable[Query], collected: Collected) -> None:
    """Refuse queries outside the contract's ball, which a site's numbers must have led out; name that site."""
    radius = collected.contract.radius
    if all(np.linalg.norm(one.theta) <= radius for one in queries):
        return

    def pull(summary: Summary) -> float:
        gradient, hessian = summary.gradient.sum(axis=0), summary.hessian.sum(axis=0)
        step = np.linalg.lstsq(hessian, gradient, rcond=1e-12)[0]
        return float(np.linalg.norm(summary.at - step)) + float(np.linalg.norm(gradient)) / summary.n_samples

    site = max(collected.summaries, key=lambda site: pull(collected.summaries[site]))
    raise DataError(
        f"the next queries would lie outside the contract's ball of radius {radius:.3g}, and every site would refuse "
        f"them. The summary of {site} pulls furthest: ask {site} about its rows, or remove its files"
    )


def stand_alone(summaries: Mapping[str, Summary]) -> dict[str, str]:
    """Return the sites whose sums are possible but would distort the fit of all others, with the reason.

    The noise of a quadratic loss is learned from all sites. A site that changes its pooled variance more than fivefold
    is left out, the worst first, while at least half of the sites remain. Noise added for privacy is taken into
    account.
    """
    parts = {site: one for site, one in summaries.items() if one.loss.quadratic and one.n_samples > one.n_params}
    found = {site: _residuals(one) for site, one in parts.items()}
    out: dict[str, str] = {}
    while len(found) >= max(_FEWEST_SITES, len(parts) / 2 + 1):
        ratios = {}
        for site, (squares, slack, freedom) in found.items():
            others = [one for name, one in found.items() if name != site]
            typical = max(sum(one[0] for one in others) / sum(one[2] for one in others), TINY)
            own = float(np.clip(typical * freedom, squares - slack, squares + slack))
            total = freedom + sum(one[2] for one in others)
            ratios[site] = (own / typical + total - freedom) / total, own / freedom / typical
        worst = max(ratios, key=lambda site: abs(np.log(max(ratios[site][0], TINY))))
        pooled, times = ratios[worst]
        if 1 / _MOST_INFLUENCE <= pooled <= _MOST_INFLUENCE:
            break
        out[worst] = f"the variance of its noise is {times:.3g} times that of the others"
        del found[worst]
    return out


def _residuals(summary: Summary) -> tuple[float, float, float]:
    """Return the residual sum of squares of a site's own fit, how far noise may move it, and its degrees of freedom."""
    gradient, hessian, n = summary.gradient.sum(axis=0), summary.hessian.sum(axis=0), float(summary.n_samples)
    theta = np.linalg.lstsq(hessian, -gradient, rcond=1e-12)[0]
    squares = max(2 * float(summary.value.sum()) + float(gradient @ theta), 0.0)
    privacy, columns = summary.privacy, summary.n_params if summary.loss.location else 1
    largest = 0.0 if privacy is None else float(np.max(privacy.limits)) ** 2 * (1 + float(np.abs(theta).sum())) ** 2
    slack = 0.0 if privacy is None else _FAR_NOISE * np.sqrt(summary.folds) * privacy.noise * largest
    return squares, slack, n * columns - summary.n_params


def _impossible_products(summary: Summary, contract: Contract) -> str | None:
    """Return why no rows can have these sums of products of columns and target; None if some can."""
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
    """Return the smallest and largest values of prepared columns, infinite where the contract has no range."""
    low, high = ([1.0], [1.0]) if contract.intercept else ([], [])
    for column in contract.schema.features:
        centre, scale = column.centre_and_scale
        for ends, found in zip((low, high), column.ranges, strict=True):
            ends.extend(((found - (centre if contract.intercept else 0.0)) / scale).tolist())
    return np.array(low), np.array(high)


def data_bounds(contract: Contract) -> tuple[list[float], float]:
    """Return the largest absolute values of prepared columns and of the target, which determine the scale of the
    noise."""
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
