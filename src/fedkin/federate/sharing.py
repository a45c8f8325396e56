"""Share one summary instead of rounds: what a site writes about its rows, and what the organiser collects and checks.

A site's summary, and its answers to queries, are signed readable files. Nothing is written below the site's own
thresholds. Sums of rows that were shared once are not shared again of other rows: the difference would give away the
rows that changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, AnyArray, Array, Index, in_file, listed
from fedkin.core import (
    Budget,
    Query,
    Summary,
    least_eigenvalue,
    private_summary,
    site_answer,
    site_summary,
)
from fedkin.data import Column, Rows, deal_folds
from fedkin.errors import DataError, ParameterError
from fedkin.federate import messages
from fedkin.federate.contract import Contract
from fedkin.federate.disclosure import (
    check_count,
    check_disclosure,
    check_point,
    check_query,
    fewest_rows,
    most_folds,
    refuse_disclosure,
    required,
)
from fedkin.federate.messages import QueryFile, SummaryFile, round_file
from fedkin.federate.organiser import Organiser
from fedkin.federate.site import Site
from fedkin.federate.trust import Pair, SecurityError
from fedkin.losses import describe_loss

_SUFFIX = ".summary"


@dataclass(frozen=True, eq=False)
class Shared:
    """What a site shares: the summary, its round, and the file to send; None where it was only to be shown."""

    summary: Summary
    round: int
    path: Path | None


def share(
    directory: Path,
    *,
    dry_run: bool = False,
    folds: int | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    rank: int | None = None,
) -> Shared:
    """Sum up the site's rows and write the summary; `describe_summary` says what every number tells.

    - ``folds``: in how many folds to give sums, from which ``lam`` is chosen; 0 for sums over all rows only. By default
      as many as the thresholds allow, at most the contract's.
    - ``epsilon``, ``delta``: differential privacy. Noise is added so that replacing one row changes the odds of any
      summary by at most ``exp(epsilon)``, except with probability ``delta``. For the linear and the mean loss.
    - ``rank``: for many coefficients, a short summary with products of columns as a diagonal plus this rank, over all
      rows only (`Summary.short`). For kin; the same rank as before where sums were shared before.
    - ``dry_run``: nothing is written.
    """
    site = Site.read(directory)
    signer, rows, contract, before = site.pair(), site.rows(), site.contract, _first_summary(site)
    budget = None if epsilon is None else Budget(epsilon, delta, *data_bounds(contract))
    private, resend = None if epsilon is None else (epsilon, delta), str(_sent_file(site, 1))
    fewest = fewest_rows(contract, site.settings)
    site.ledger.check("share", rows, fewest, private=private, budget=site.settings.epsilon, resend=resend)
    rank = _chosen_rank(contract, before, rank)
    wanted, member, loss = folds if rank is None else 0, site.invite.site.id, contract.loss_object()
    if budget is None:
        folds = _chosen_folds(site, rows, before, wanted)
        findings = check_disclosure(contract, rows, site.settings, site=member, folds=folds)
        refuse_disclosure(findings, "nothing is shared")
        summary = site_summary(member, rows, loss, **_how(contract, folds))
        findings = check_point(contract, rows, summary.at, site.settings, _folds(site, rows, folds))
        if findings and folds and wanted is None and before is None:
            folds, summary = 0, site_summary(member, rows, loss, **_how(contract, 0))
            findings = check_point(contract, rows, summary.at, site.settings)
        refuse_disclosure(findings, "nothing is shared", "the sums at this site's own estimate")
    else:
        folds = _public_folds(site, rows.n_samples, wanted)
        summary = private_summary(member, rows, loss, budget, **_how(contract, folds), by_fold=folds > 0)
    made = _formed(summary, folds, contract, rank)
    return _write(site, signer, rows, made, 1, None, dry_run)


def answer(directory: Path, path: Path, *, dry_run: bool = False) -> Shared:
    """Answer the organiser's query in a file: loss and derivatives, summed over all rows, at the point that it names.

    Raises `SecurityError` when the organiser did not sign it for this site and contract, and `DataError` when that
    round was answered already, there were enough rounds, there are too few rows, or the point could single rows out.
    """
    site = Site.read(directory)
    signer, contract, before = site.pair(), site.contract, _first_summary(site)
    asked, _ = site.invite.read(path, QueryFile, site=site.name)
    with in_file(path, DataError):
        query = Query.from_plain(asked.ask)
    if before is None:
        raise DataError(f"{site.name} has shared no summary yet, so there is nothing to ask about: fedkin site share")
    rows = site.allowed_rows("answer")
    _check_round(site, query, asked.digest, path)
    if query.theta.size == contract.n_params:
        fold_of = _folds(site, rows, _folds_of(before))
        points = _points_before(site, rows, query.theta, path)
        findings = check_query(contract, rows, query.theta, [before.at, *points], site.settings, fold_of=fold_of)
        refuse_disclosure(findings, f"{path} is not answered", "the point")
    named = msgspec.structs.replace(query, site=site.invite.site.id)
    summary = site_answer(named, rows, contract.loss_object(), **_how(contract, 0))
    rank = None if before.curvature is None else before.curvature.rank
    return _write(site, signer, rows, _formed(summary, 0, contract, rank), query.round, asked.digest, dry_run)


def _how(contract: Contract, folds: int) -> dict[str, Any]:
    return {"feature_names": contract.column_names, "folds": max(folds, 2), "seed": contract.seed}


def _sent_file(site: Site, number: int) -> Path:
    return round_file(site.directory / messages.SENT, site.name, number, _SUFFIX)


def _sent_before(site: Site, number: int) -> SummaryFile | None:
    path = _sent_file(site, number)
    return site.invite.read(path, SummaryFile, ended=True)[0] if path.exists() else None


def _points_before(site: Site, rows: Rows, theta: Array, path: Path) -> list[Array]:
    """Return the points of all answers about these rows, from any directory and in any federation, but for theta.

    Raises `DataError` when this site has answered as many questions as its contract allows.
    """
    sent, point, most = site.ledger.sent(rows.digest), tuple(theta.tolist()), site.contract.messages
    points = {one.at: one.run for one in sent if one.what == "answer" and len(one.at) == len(point) and one.at != point}
    if sum(run == site.invite.run for run in points.values()) + 2 > most:
        raise DataError(f"{path}: {most} messages have left this site, which is as many as the contract allows")
    return [np.array(one) for one in points]


def _first_summary(site: Site) -> Summary | None:
    sent = _sent_before(site, 1)
    return None if sent is None else Summary.from_plain(sent.summary)


def _chosen_rank(contract: Contract, before: Summary | None, wanted: int | None) -> int | None:
    """Return the rank of the second derivatives to share: that of what was shared before, or the one wanted."""
    if wanted is not None and contract.method != "kin":
        raise ParameterError('--rank is for method = "kin": the fused estimator needs all sums, so leave it out')
    if before is None:
        return wanted
    curvature = before.curvature
    shared = None if curvature is None else curvature.rank
    more = curvature is not None and curvature.exact and wanted is not None and wanted > curvature.rank
    if wanted not in (None, shared) and not more:
        words = "everything" if shared is None else f"rank {shared}"
        raise DataError(f"sums of {words} were shared before: leave out --rank, or give the same")
    return shared


def _chosen_folds(site: Site, rows: Rows, before: Summary | None, wanted: int | None) -> int:
    """Return the number of folds: those that were shared before, those wanted, or as many as there may be."""
    most = site.contract.folds if site.contract.loss_object().additive else 0
    if wanted is not None and (wanted == 1 or not 0 <= wanted <= most):
        raise ParameterError(f"--folds must be 0 or a whole number from 2 to {most}, as in the contract, got {wanted}")
    if before is None:
        if wanted is None:
            wanted = most_folds(site.contract, rows, site.settings, site=site.invite.site.id) if most else 0
        others = {one.folds for one in site.ledger.sent(rows.digest) if one.what == "share" and one.folds}
        if wanted and (other := others - {_fold_names(site, wanted)}):
            raise DataError(
                f"sums of these rows in {min(other)} were shared before; other folds would tell more about single "
                "rows than either of them: give --folds 0, or put back what was in the folder sent"
            )
        return wanted
    shared = _folds_of(before)
    if wanted not in (None, shared):
        words = f"in {shared} folds" if shared else "over all rows only"
        raise DataError(
            f"sums {words} were shared before; other folds would tell more about single rows than either of them"
        )
    return shared


def _fold_names(site: Site, folds: int) -> str:
    """Return what tells the folds of this site's rows from others; nothing for none."""
    return f"{folds} folds of {site.invite.site.id}, seed {site.contract.seed}" if folds else ""


def _public_folds(site: Site, n: int, wanted: int | None) -> int:
    """Return the number of folds of a private summary: a function of contract, settings and n, and of no row."""
    contract, most = site.contract, site.contract.folds
    refuse_disclosure(check_count(contract, n, site.settings), "nothing is shared")
    fewest = max(required(contract, site.settings).rows, contract.n_params + 1)
    if wanted is not None and (wanted == 1 or not 0 <= wanted <= min(most, n // fewest)):
        raise ParameterError(
            f"--folds must be 0 or a whole number from 2 to {most}, with at least {fewest} rows in each, got {wanted}"
        )
    return wanted if wanted is not None else most if n // most >= fewest else 0


def _folds(site: Site, rows: Rows, folds: int) -> Index | None:
    """Return in which fold each row is; None without folds."""
    return deal_folds(site.invite.site.id, rows.n_samples, folds, site.contract.seed) if folds else None


def _folds_of(summary: Summary) -> int:
    """Return in how many folds a summary has given sums."""
    return int((summary.count[: summary.folds] > 0).sum())


def _formed(summary: Summary, folds: int, contract: Contract, rank: int | None) -> Summary:
    """Return sums in ``folds`` folds, or none, as those of the first of the contract's folds; or short ones."""

    def moved(parts: AnyArray) -> AnyArray:
        out = np.zeros((contract.folds + 1, *parts.shape[1:]), dtype=parts.dtype)
        out[:folds], out[-1] = parts[:folds], parts[folds:].sum(axis=0)
        return out

    names = ["count", "value", "gradient", "hessian", *([] if summary.scores is None else ["scores"])]
    sums: dict[str, Any] = {name: moved(getattr(summary, name)) for name in names}
    made = replace(summary, **sums)
    return made if rank is None else made.short(rank)


def _check_round(site: Site, query: Query, digest: str, path: Path) -> None:
    """Refuse a question beyond the contract's number of messages, and one that came before the last one answered."""
    most = site.contract.messages
    if query.round > most:
        raise DataError(
            f"{path} is question {query.round}, but the contract allows {most} messages of a site at most, because "
            "each tells more"
        )
    for number in range(2, most + 1):
        before = _sent_before(site, number)
        if before is not None and (number > query.round or (number == query.round and before.ask != digest)):
            raise DataError(f"{path} is question {query.round}, but question {number} was answered already: replayed?")


def _write(
    site: Site, signer: Pair, rows: Rows, summary: Summary, number: int, ask: str | None, dry_run: bool
) -> Shared:
    named, path = replace(summary, site=str(site.invite.site.id)), _sent_file(site, number)
    if dry_run:
        return Shared(named, number, None)
    path.parent.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    # before the sums are there to be sent
    entry = site.entry("share" if number == 1 else "answer", rows, note=f"message {number}")
    entry = msgspec.structs.replace(entry, at=tuple(summary.at.tolist()), folds=_fold_names(site, _folds_of(summary)))
    if summary.privacy is not None:
        entry = msgspec.structs.replace(entry, epsilon=summary.privacy.epsilon, delta=summary.privacy.delta)
    site.ledger.record(entry, rows)
    digest, day = site.contract.digest, messages.today()
    body = SummaryFile(site.invite.run, site.name, digest, number, day, named.to_plain(), ask)
    return Shared(named, number, body.write(path, signer))


# --- at the organiser -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Collected:
    """The summaries of one round, by site id (text), in the order of the organiser's list where that is here.

    ``round`` is 1 for first summaries, else that of the queries they answer; ``missing`` are names of sites that are on
    the organiser's list, not out, and have sent nothing; ``alone`` those whose sums would distort the fit of all
    others, and why (`stand_alone`): their summaries are left out.
    """

    contract: Contract
    summaries: dict[str, Summary]
    round: int
    missing: tuple[str, ...] = ()
    alone: Mapping[str, str] = field(default_factory=dict)


def read_summaries(directory: Path, federation: Path | None = None, *, now: datetime | None = None) -> Collected:
    """Read the newest summaries in a folder, each of a site that was admitted, under one contract.

    All trust comes from the organiser's ``federation.json`` (a file, or the directory with it), which is by default
    looked for in the folder and the one above. Certificates must be valid ``now``: for a fit of old files say when they
    came. Errors name the file: not signed by a site of the federation, changed, of another contract, of a site that is
    out or has lost its key, a second one of the same site, or of a round that not all sites have answered.
    """
    charter_file = _find_charter(directory, federation)
    place, charter = charter_file.parent, messages.read_charter(charter_file)
    organiser = Organiser.read(place) if (place / messages.SITES).exists() else None  # None where the charter is alone
    out = charter.departures(place)
    rounds: dict[int, dict[str, tuple[Path, SummaryFile]]] = {}
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        found, certificate = charter.read(path, SummaryFile, now=now, most_bytes=_most_bytes(charter.terms))
        if organiser is not None:
            organiser.check_signer(path, found.site, certificate, out)
        elif found.site in out:
            raise DataError(f"{path}: {found.site} has left or was expelled, so it counts no more; remove the file")
        same = rounds.setdefault(found.round, {})
        if found.site in same:
            raise DataError(f"{path} and {same[found.site][0]} are both of {found.site}, round {found.round}: keep one")
        same[found.site] = (path, found)
    known = [] if organiser is None else [member.name for member in organiser.members if member.name not in out]
    if not rounds:
        whose = f"; those of {listed(known, 8)} are missing" if known else ""
        raise DataError(
            f"no summaries have arrived in {directory}{whose}: put there what sites send, the files "
            f"*{_SUFFIX} of fedkin site share"
        )
    newest = rounds[max(rounds)]
    if silent := sorted({name for same in rounds.values() for name in same} - newest.keys()):
        path, found = next(iter(newest.values()))
        raise DataError(
            f"{path} is the answer of {found.site} to question {max(rounds)}, which {listed(silent, 8)} have not "
            "answered yet: wait for them"
        )
    order = {name: k for k, name in enumerate(known)}
    names = sorted(newest, key=lambda name: (order.get(name, len(order)), name))
    summaries = {}
    for name in names:
        path, found = newest[name]
        summary = _summary_in(path, found, charter.terms)
        # a site speaks for itself only: its id is its name, or what the organiser's list says
        if str(summary.site) != (name if organiser is None else str(organiser.member(name).id)):
            raise SecurityError(f"{path}: {name} signed it, but its sums say that they are of {summary.site!r}")
        summaries[str(summary.site)] = summary
    _refuse_twins({name: newest[name][0] for name in names}, summaries)
    missing = tuple(name for name in known if name not in names)
    alone = stand_alone(summaries)
    kept = {site: summary for site, summary in summaries.items() if site not in alone}
    return Collected(charter.terms, kept, max(rounds), missing, alone)


def _find_charter(directory: Path, federation: Path | None) -> Path:
    if not directory.is_dir():
        raise DataError(f"there is no folder {directory}")
    if federation is not None:
        return federation / messages.FEDERATION if federation.is_dir() else federation
    for place in (directory, directory.absolute().parent):
        if (place / messages.FEDERATION).exists():
            return place / messages.FEDERATION
    raise DataError(
        f"neither {directory} nor the folder above has {messages.FEDERATION}, without which nobody knows whose sums "
        "these are: ask the organiser for it, and give it with --federation FILE"
    )


def _summary_in(path: Path, found: SummaryFile, contract: Contract) -> Summary:
    """Return the summary in a file, which the contract's rows may have; raises `DataError` that names file and site."""
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
            wrong = f"its numbers cannot be used ({type(error).__name__})"
        if wrong is not None:
            raise DataError(f"the summary of {found.site} cannot be: {wrong}; ask the site for it again")
    return summary


def _most_bytes(contract: Contract) -> int:
    """Return how long a summary may be: each of its numbers takes at most 32 bytes."""
    p, q = contract.n_params, len(contract.column_names)
    return 2**20 + 32 * ((contract.folds + 1) * (p * p + p + 2) + p * p + 6 * (p + q))


def _refuse_twins(paths: Mapping[str, Path], summaries: Mapping[str, Summary]) -> None:
    """Refuse two sites with the same sums: one of them has signed what it got from the other."""
    seen: dict[bytes, str] = {}
    for name, summary in zip(paths, summaries.values(), strict=True):
        sums = summary.gradient.tobytes() + summary.hessian.tobytes() + summary.value.tobytes()
        if (first := seen.setdefault(sums, name)) != name and summary.n_samples > 0:
            raise DataError(
                f"{paths[first]} and {paths[name]} hold the same sums: ask {first} and {name} whose they are"
            )


# --- whether a summary may be that of rows which fit the contract ---------------------------------------------------

# Ranges come from the contract, the rest from algebra: the constant column counts rows, squares add up to the diagonal
# of the products, and products of columns and target are positive semi-definite. Noise is allowed for.

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
