"""One summary per site instead of rounds: sites write them, and the organiser collects and checks them.

A site's summary and its answers to queries are signed, readable files. Nothing is written if it is below the site's own
thresholds. Once sums have been shared, sums of changed rows are refused: the difference would reveal the rows that
changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, TINY, AnyArray, Array, Index, in_file, listed
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
    fewest_in_fold,
    most_folds,
    refuse_disclosure,
)
from fedkin.federate.messages import QueryFile, SummaryFile, round_file
from fedkin.federate.organiser import Organiser
from fedkin.federate.site import Site
from fedkin.federate.trust import Pair, SecurityError
from fedkin.losses import describe_loss


@dataclass(frozen=True, eq=False)
class Shared:
    """Result of sharing: the summary, its round, and the file to send, which is None after a dry run.

    ``district`` is the district of the site, if the contract asks for one.
    """

    summary: Summary
    round: int
    path: Path | None
    district: str = ""


def share(
    directory: Path,
    *,
    dry_run: bool = False,
    folds: int | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    rank: int | None = None,
    approve: Callable[[Shared], object] | None = None,
    to: str = "the organiser",
) -> Shared:
    """Compute the summary of a site's rows and write it; `describe_summary` explains every number.

    - ``folds``: number of folds with separate sums, from which ``lam`` is chosen; 0 for sums over all rows only. By
      default as many as the thresholds allow, at most the contract's.
    - ``epsilon``, ``delta``: differential privacy. Noise is added so that replacing one row changes the odds of any
      summary by a factor of at most ``exp(epsilon)``, except with probability ``delta``. For linear and mean losses.
    - ``rank``: for many coefficients, a short summary with products of columns as a diagonal plus this rank, over all
      rows only (`Summary.short`). For the method "kin"; a site that has shared sums must keep their rank.
    - ``dry_run``: nothing is written.
    - ``approve``: called with the summary before it is written, with exactly these numbers; raises to stop.
    - ``to``: who will learn of it, for the ledger.
    """
    site = Site.read(directory)
    signer, rows, contract, before = site.pair(), site.rows(), site.contract, _first_summary(site)
    budget = None if epsilon is None else Budget(epsilon, delta, *data_bounds(contract))
    private, resend = None if epsilon is None else (epsilon, delta), str(_sent_file(site, 1))
    site.ledger.check("share", rows, site.settings, private=private, budget=site.settings.epsilon, resend=resend)
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
    return _write(site, signer, rows, made, 1, None, dry_run, approve, to)


def share_with_neighbours(directory: Path, epsilon: float, delta: float = 1e-5) -> None:
    """Add noise to a site's sums, once, for rounds that use these sums instead of its rows.

    Sums that were shared with noise are used as they are.
    """
    site = Site.read(directory)
    site.contract.check_rounds(str(directory))
    if (noisy := site.noisy_sums()) is None:
        share(directory, folds=0, epsilon=epsilon, delta=delta, to="its neighbours")
        return
    given = noisy[0].privacy
    if given is not None and (given.epsilon, given.delta) != (epsilon, delta):
        raise ParameterError(
            f"noise with epsilon {given.epsilon:g} and delta {given.delta:g} was added to the sums of these rows "
            "before, and rounds use these sums: leave out --epsilon and --delta"
        )


def answer(
    directory: Path, path: Path, *, dry_run: bool = False, approve: Callable[[Shared], object] | None = None
) -> Shared:
    """Answer the organiser's query: write loss and derivatives at its point, summed over all rows, to a file.

    Raises `SecurityError` unless the organiser signed it for this site and contract, and `DataError` if that round was
    already answered, no more rounds are allowed, there are too few rows, or the point could single rows out.
    """
    site = Site.read(directory)
    signer, contract, before = site.pair(), site.contract, _first_summary(site)
    asked, _ = site.invite.read(path, QueryFile, site=site.name)
    with in_file(path, DataError):
        query = Query.from_plain(asked.ask)
    if before is None:
        raise DataError(f"{site.name} has not shared a first summary yet; to share it: fedkin site share")
    rows = site.allowed_rows("answer")
    _check_round(site, query, asked.digest, path)
    if query.theta.size == contract.n_params:
        fold_of = _folds(site, rows, _folds_of(before))
        points = _points_before(site, rows, query.theta, path)
        findings = check_query(contract, rows, query.theta, [before.at, *points], site.settings, fold_of=fold_of)
        at = tuple(query.theta.tolist())
        known = any(one.what == "refused" and one.at == at for one in site.ledger.sent(rows))
        if findings and findings[0].code != "query_outside" and not (known or dry_run):  # a refusal tells of the rows
            entry = msgspec.structs.replace(site.entry("refused", rows, note=findings[0].code), at=at)
            site.ledger.record(entry, rows)
        refuse_disclosure(findings, f"{path} is not answered", "the point")
    named = msgspec.structs.replace(query, site=site.invite.site.id)
    summary = site_answer(named, rows, contract.loss_object(), **_how(contract, 0))
    rank = None if before.curvature is None else before.curvature.rank
    return _write(site, signer, rows, _formed(summary, 0, contract, rank), query.round, asked.digest, dry_run, approve)


def _how(contract: Contract, folds: int) -> dict[str, Any]:
    return {"feature_names": contract.column_names, "folds": max(folds, 2), "seed": contract.seed}


def _sent_file(site: Site, number: int) -> Path:
    return round_file(site.directory / messages.SENT, site.name, number, messages.SUMMARY)


def _sent_before(site: Site, number: int) -> SummaryFile | None:
    path = _sent_file(site, number)
    return site.invite.read(path, SummaryFile, ended=True)[0] if path.exists() else None


def _points_before(site: Site, rows: Rows, theta: Array, path: Path) -> list[Array]:
    """Return the points of all earlier answers about these rows, in any federation, except theta.

    Raises `DataError` if this site has answered or refused as many queries as its contract allows.
    """
    sent, point, most = site.ledger.sent(rows), tuple(theta.tolist()), site.contract.messages
    asked = [one for one in sent if one.what in ("answer", "refused") and len(one.at) == len(point) and one.at != point]
    if len({one.at for one in asked if one.run == site.invite.run}) + 2 > most:
        words = "messages have left this site, refusals included, and the contract allows no more"
        raise DataError(f"{path}: {most} {words}")
    return [np.array(at) for at in dict.fromkeys(one.at for one in asked if one.what == "answer")]


def _first_summary(site: Site) -> Summary | None:
    sent = _sent_before(site, 1)
    return None if sent is None else Summary.from_plain(sent.summary)


def _chosen_rank(contract: Contract, before: Summary | None, wanted: int | None) -> int | None:
    """Return the rank of the second derivatives to share: that of earlier sums, or the one wanted."""
    if wanted is not None and contract.method != "kin":
        raise ParameterError('--rank is for method = "kin"; leave it out, since the fused estimator needs all sums')
    if before is None:
        return wanted
    curvature = before.curvature
    shared = None if curvature is None else curvature.rank
    more = curvature is not None and curvature.exact and wanted is not None and wanted > curvature.rank
    if wanted not in (None, shared) and not more:
        words = "everything" if shared is None else f"rank {shared}"
        raise DataError(f"sums of {words} were shared before: leave out --rank, or give the same one")
    return shared


def _chosen_folds(site: Site, rows: Rows, before: Summary | None, wanted: int | None) -> int:
    """Return the number of folds: that of earlier sums, the number wanted, or the largest allowed."""
    most = site.contract.folds if site.contract.loss_object().additive else 0
    if wanted is not None and (wanted == 1 or not 0 <= wanted <= most):
        raise ParameterError(f"--folds must be 0 or a whole number from 2 to {most}, as in the contract, got {wanted}")
    if before is None:
        if wanted is None:
            wanted = most_folds(site.contract, rows, site.settings, site=site.invite.site.id) if most else 0
        others = {one.folds for one in site.ledger.sent(rows) if one.what == "share" and one.folds}
        if wanted and (other := others - {_fold_names(site, rows, wanted)}):
            raise DataError(
                f"sums of these rows in {min(other)} were shared before; different folds would reveal more about "
                "single rows than either set of sums: give --folds 0, or restore the files of the folder sent"
            )
        return wanted
    shared = _folds_of(before)
    if wanted not in (None, shared):
        words = f"in {shared} folds" if shared else "over all rows only"
        raise DataError(
            f"sums {words} were shared before; different folds would reveal more about single rows than either set "
            "of sums"
        )
    return shared


def _fold_names(site: Site, rows: Rows, folds: int) -> str:
    """Return a label that identifies the folds of rows in this order; an empty one without folds."""
    if not folds:
        return ""
    cells = site.contract.in_table_units(rows)
    order = hashlib.sha256(b"".join(cells[name].tobytes() for name in sorted(cells))).hexdigest()[:8]
    return f"{folds} folds of {site.invite.site.id}, seed {site.contract.seed}, order {order}"


def _public_folds(site: Site, n: int, wanted: int | None) -> int:
    """Return the number of folds of a private summary, which depends on contract, settings and n but on no row."""
    contract, most = site.contract, site.contract.folds
    refuse_disclosure(check_count(contract, n, site.settings), "nothing is shared")
    fewest = fewest_in_fold(contract, site.settings)
    if wanted is not None and (wanted == 1 or not 0 <= wanted <= min(most, n // fewest)):
        raise ParameterError(
            f"--folds must be 0 or a whole number from 2 to {most}, with at least {fewest} rows in each, got {wanted}"
        )
    return wanted if wanted is not None else most if n // most >= fewest else 0


def _folds(site: Site, rows: Rows, folds: int) -> Index | None:
    """Return the fold of each row; None without folds."""
    return deal_folds(site.invite.site.id, rows.n_samples, folds, site.contract.seed) if folds else None


def _folds_of(summary: Summary) -> int:
    """Return the number of folds with sums in a summary."""
    return int((summary.count[: summary.folds] > 0).sum())


def _formed(summary: Summary, folds: int, contract: Contract, rank: int | None) -> Summary:
    """Return the summary with sums in the first ``folds`` of the contract's folds, or a short one."""

    def moved(parts: AnyArray) -> AnyArray:
        out = np.zeros((contract.folds + 1, *parts.shape[1:]), dtype=parts.dtype)
        out[:folds], out[-1] = parts[:folds], parts[folds:].sum(axis=0)
        return out

    names = ["count", "value", "gradient", "hessian", *([] if summary.scores is None else ["scores"])]
    sums: dict[str, Any] = {name: moved(getattr(summary, name)) for name in names}
    made = replace(summary, **sums)
    return made if rank is None else made.short(rank)


def _check_round(site: Site, query: Query, digest: str, path: Path) -> None:
    """Refuse a query beyond the contract's number of messages, and one older than the last one answered."""
    most = site.contract.messages
    if query.round > most:
        raise DataError(
            f"{path} is query {query.round}, but the contract allows a site at most {most} messages, because "
            "each reveals more"
        )
    for number in range(2, most + 1):
        before = _sent_before(site, number)
        if before is not None and (number > query.round or (number == query.round and before.ask != digest)):
            raise DataError(f"{path} is query {query.round}, but query {number} was already answered: is it a replay?")


def _write(
    site: Site,
    signer: Pair,
    rows: Rows,
    summary: Summary,
    number: int,
    ask: str | None,
    dry_run: bool,
    approve: Callable[[Shared], object] | None,
    to: str = "the organiser",
) -> Shared:
    named, path = replace(summary, site=str(site.invite.site.id)), _sent_file(site, number)
    within = site.contract.within
    district = site.settings.district if within else ""
    if within and not district:
        hint = f"fedkin site settings {site.directory} --district NAME"
        raise DataError(f"the contract asks for the {within} of {site.name}, which is not stated: {hint}")
    shown = Shared(named, number, None, district)
    if dry_run:
        return shown
    if approve is not None:
        approve(shown)
    path.parent.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    digest, day, private = site.contract.digest, messages.today(), summary.privacy
    body = SummaryFile(site.invite.run, site.name, digest, number, day, named.to_plain(), ask, district)
    entry = site.entry("share" if number == 1 else "answer", rows, to, f"message {number}")
    more: dict[str, Any] = {"at": tuple(summary.at.tolist()), "folds": _fold_names(site, rows, _folds_of(summary))}
    if private is not None:
        more |= {"epsilon": private.epsilon, "delta": private.delta, "sums": body.digest}
    site.ledger.record(msgspec.structs.replace(entry, **more), rows)  # before the sums are there to be sent
    return Shared(named, number, body.write(path, signer), district)


# --- at the organiser -------------------------------------------------------------------------------------------------


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

    All trust comes from the organiser's ``federation.json`` (the file or its directory); by default it is searched for
    in the folder and the one above. Certificates must be valid ``now``: to fit old files, state when they arrived.
    Errors name the file: not signed by a site of the federation, changed, of another contract, of a site that is out or
    has lost its key, a duplicate of the same site, or of a round that not all sites have answered.
    """
    charter_file = _find_charter(directory, federation)
    place, charter = charter_file.parent, messages.read_charter(charter_file)
    organiser = Organiser.read(place) if (place / messages.SITES).exists() else None  # None if only the charter is here
    out = charter.departures(place)
    rounds: dict[int, dict[str, tuple[Path, SummaryFile]]] = {}
    for path in sorted(directory.glob(f"*{messages.SUMMARY}")):
        found, certificate = charter.read(path, SummaryFile, now=now, most_bytes=_most_bytes(charter.terms))
        if organiser is not None:
            organiser.check_signer(path, found.site, certificate, out)
        elif found.site in out:
            raise DataError(f"{path}: {found.site} has left or was expelled, so the file is not valid; remove it")
        same = rounds.setdefault(found.round, {})
        if found.site in same:
            raise DataError(f"{path} and {same[found.site][0]} are both of {found.site}, round {found.round}: keep one")
        same[found.site] = (path, found)
    known = [] if organiser is None else [member.name for member in organiser.members if member.name not in out]
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


# --- whether a summary may be that of rows which fit the contract ---------------------------------------------------

# Ranges come from the contract, the rest from algebra: the constant column counts rows, squares add up to the diagonal
# of the products, and products of columns and target are positive semi-definite. Noise is allowed for.

_ROUNDING = 1e-9
#: Noise is at most this many standard deviations, and its scale at most this many times the one needed.
_FAR_NOISE, _MOST_NOISE = 10.0, 4.0
#: One site may change the pooled noise variance by at most this factor.
_MOST_INFLUENCE = 5.0
_FEWEST_SITES = 3  # with fewer, no site can be judged by the others


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
    rowwise = loss.rowwise
    bound = np.inf if rowwise is None else rowwise.curvature_bound
    diagonal = np.einsum("kpp->p", summary.hessian).reshape(-1, len(names))
    if (diagonal > bound * squares * (1 + 1e-6) + _ROUNDING).any():
        return "its second derivatives are larger than its columns allow"
    return None


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
