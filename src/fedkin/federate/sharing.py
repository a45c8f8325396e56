"""One summary per site instead of rounds: a site's first summary, and its answers to the organiser's queries.

Both are signed, readable files. Nothing is written if it is below the site's own thresholds. Once sums have been
shared, sums of changed rows are refused: the difference would reveal the rows that changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, AnyArray, Array, Index, in_file
from fedkin.core import Budget, Query, Summary, private_summary, site_answer, site_summary
from fedkin.data import Rows, deal_folds
from fedkin.errors import DataError, ParameterError
from fedkin.federate import messages
from fedkin.federate.contract import Contract
from fedkin.federate.disclosure import (
    check_count,
    check_disclosure,
    check_point,
    check_query,
    most_folds,
    refuse_disclosure,
)
from fedkin.federate.ledger import What
from fedkin.federate.messages import QueryFile, SummaryFile, round_file
from fedkin.federate.received import data_bounds
from fedkin.federate.settings import fewest_in_fold
from fedkin.federate.site import Site
from fedkin.federate.trust import Pair

Approve = Callable[["Shared"], object]


@dataclass(frozen=True, eq=False)
class Shared:
    """Result of sharing: the summary, its round, and the file to send, which is None after a dry run.

    ``district`` is the district of the site, if the contract asks for one. ``before`` is the day on which exactly
    these numbers were written, if they were.
    """

    summary: Summary
    round: int
    path: Path | None
    district: str = ""
    before: str = ""


def share(
    directory: Path,
    *,
    dry_run: bool = False,
    folds: int | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    rank: int | None = None,
    approve: Approve | None = None,
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
    if rank is not None and folds:
        raise ParameterError(f"a short summary (of rank {rank}) has no folds, got {folds}: leave out --folds")
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


def answer(directory: Path, path: Path, *, dry_run: bool = False, approve: Approve | None = None) -> Shared:
    """Answer the organiser's query: write loss and derivatives at its point, summed over all rows, to a file.

    Raises `SecurityError` unless the organiser signed it for this site and contract, and `DataError` if that round was
    already answered, no more rounds are allowed, there are too few rows, or the point could single out rows.
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
        points = _points_before(site, rows, before.at, query.theta, path)
        findings = check_query(contract, rows, query.theta, [before.at, *points], site.settings, fold_of=fold_of)
        at = tuple(query.theta.tolist())
        known = any(one.what == "refused" and one.at == at for one in site.ledger.sent(rows))
        if findings and findings[0].code != "query_outside" and not (known or dry_run):  # a refusal tells of the rows
            site.record("refused", rows, note=findings[0].code, at=at)
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


def _points_before(site: Site, rows: Rows, start: Array, theta: Array, path: Path) -> list[Array]:
    """Return the points of all earlier sums of these rows, in any federation, except those at ``start`` and ``theta``.

    Raises `DataError` if as many messages have left or been refused, in all federations, as the contract allows.
    """
    given, most = {tuple(start.tolist()), tuple(theta.tolist())}, site.contract.messages
    asked = [one for one in site.ledger.sent(rows) if len(one.at) == theta.size and one.at not in given]
    if len({one.at for one in asked}) + 2 > most:
        words = "messages have left this site, refusals included, and the contract allows no more"
        raise DataError(f"{path}: {most} {words}")
    return [np.array(at) for at in dict.fromkeys(one.at for one in asked if one.what != "refused")]


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
    approve: Approve | None,
    to: str = "the organiser",
) -> Shared:
    named, path = replace(summary, site=str(site.invite.site.id)), _sent_file(site, number)
    within = site.contract.within
    district = site.settings.district if within else ""
    if within and not district:
        hint = f"fedkin site settings {site.directory} --district NAME"
        raise DataError(f"the contract asks for the {within} of {site.name}, which is not stated: {hint}")
    sent, numbers, note = _sent_before(site, number), named.to_plain(), f"message {number}"
    days: list[str] = []
    if sent is not None and messages.canonical(sent.summary) == messages.canonical(numbers):
        days = [one.time[:10] for one in site.ledger.entries() if one.note == note]
    shown = Shared(named, number, None, district, days[-1] if days else "")
    if dry_run:
        return shown
    if approve is not None:
        approve(shown)
    path.parent.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    digest, private = site.contract.digest, summary.privacy
    body = SummaryFile(site.invite.run, site.name, digest, number, numbers, ask, district)
    noise: dict[str, Any] = {}
    if private is not None:
        noise = {"epsilon": private.epsilon, "delta": private.delta, "sums": body.digest}
    what: What = "share" if number == 1 else "answer"
    at, folds = tuple(summary.at.tolist()), _fold_names(site, rows, _folds_of(summary))
    # before the sums are there to be sent
    site.record(what, rows, to, note, at=at, folds=folds, **noise)
    return replace(shown, path=body.write(path, signer))
