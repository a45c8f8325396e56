"""What a site says about its rows: its summary, and answers to the organiser's questions, as signed readable files.

Nothing is written below the site's own thresholds. Sums of rows that were shared once are not shared again of other
rows: the difference would give away the rows that changed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, AnyArray, in_file, write_file
from fedkin.core import Budget, Query, Summary, private_summary, site_answer, site_summary
from fedkin.data import INTERCEPT, Finding, Rows
from fedkin.errors import DataError, ParameterError
from fedkin.federate.contract.contract import Contract
from fedkin.federate.enrol.files import checked, read_text
from fedkin.federate.enrol.site import Site, read_site
from fedkin.federate.sharing.files import SENT, SUMMARY_SUFFIX, AskFile, SummaryFile, round_file
from fedkin.federate.sharing.limits import limits_of
from fedkin.federate.sharing.thresholds import too_little
from fedkin.federate.trust import SecurityError, Signer, canonical, seal, unseal, unseal_by_authority

_RECORD = "rows.json"  #: digest of the rows of which sums were shared


@dataclass(frozen=True, eq=False)
class Shared:
    """What a site shares: the sums, and the file to send; None where it was only to be shown."""

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
    """Sum up the site's rows and write the summary.

    Parameters
    ----------
    directory : path
        The site's.
    dry_run : bool
        Whether nothing is to be written.
    folds : int, optional
        In how many folds to give sums, from which ``lam`` is chosen; 0 for sums over all rows only. By default as many
        as the thresholds allow, at most the contract's.
    epsilon, delta : float
        Differential privacy: noise is added so that replacing one row changes the odds of any message by at most
        ``exp(epsilon)``, except with probability ``delta``. For the linear and the mean loss; by default no noise.
    rank : int, optional
        For many coefficients: a short message, with products of columns as a diagonal plus this rank, over all rows
        only (`Summary.short`). For kin; the same rank as before where sums were shared before.

    Returns
    -------
    Shared
        ``summary.described()`` says what every number tells.

    Raises
    ------
    DataError
        When there are too few rows, or sums of other rows were shared before.
    """
    site = read_site(directory)
    signer = Signer.site(site.pair())
    rows = site.rows()
    rank = _chosen_rank(site, rank)
    folds = _chosen_folds(site, rows, folds if rank is None else 0)
    _check_enough(site, rows, folds)
    _check_same_rows(site, rows)
    contract = site.contract
    budget = None if epsilon is None else Budget(epsilon, delta, *limits_of(contract))
    _check_noise(site, budget)
    summary = in_folds(_summed(site, rows, folds, budget), folds, contract.folds)
    if rank is not None:
        summary = summary.short(rank)
    return _written(site, signer, rows, summary, 1, None, dry_run)


def _summed(site: Site, rows: Rows, folds: int, budget: Budget | None) -> Summary:
    member, contract = site.invite.site.id, site.contract
    loss, names, parts = contract.loss_object(), column_names(contract), max(folds, 2)
    if budget is None:
        return site_summary(member, rows, loss, feature_names=names, folds=parts, seed=contract.seed)
    return private_summary(
        member,
        rows,
        loss,
        budget,
        feature_names=names,
        folds=parts,
        seed=contract.seed,
        by_fold=folds > 0,
    )


def answer(directory: Path, question: Path, *, dry_run: bool = False) -> Shared:
    """Answer the organiser's question: loss and derivatives, summed over rows, at the parameters that it names.

    Parameters
    ----------
    directory : path
        The site's.
    question : path
        What came from the organiser.
    dry_run : bool
        Whether nothing is to be written.

    Raises
    ------
    SecurityError
        When the organiser did not sign it for this site and contract.
    DataError
        When that round was answered already, there were enough rounds, or there are too few rows.
    """
    site = read_site(directory)
    signer = Signer.site(site.pair())
    ask, digest = read_ask(question, site)
    rows = site.rows()
    first = _sent_before(site, 1)
    if first is None:
        raise DataError(f"{site.name} has shared no summary yet, so there is nothing to ask about: fedkin site share")
    if first.summary.get("privacy") is not None:
        raise DataError(
            f"{site.name} has shared sums with noise; an answer has none, and would break what was promised"
        )
    folds = _folds_of(first)
    _check_round(site, ask, digest, question)
    _check_enough(site, rows, folds)
    _check_same_rows(site, rows)
    contract = site.contract
    summary = site_answer(
        msgspec.structs.replace(ask, site=site.invite.site.id),
        rows,
        contract.loss_object(),
        feature_names=column_names(contract),
        folds=max(folds, 2),
        seed=contract.seed,
    )
    summary = in_folds(summary, folds, contract.folds)
    if (curvature := Summary.from_plain(first.summary).curvature) is not None:
        summary = summary.short(curvature.rank)
    return _written(site, signer, rows, summary, ask.round, digest, dry_run)


def read_ask(path: Path, site: Site) -> tuple[Query, str]:
    """A question to this site, and its digest."""
    with in_file(path, SecurityError):
        body = unseal_by_authority(read_text(path), "ask", site.authority)
        file = checked(body, AskFile)
        if file.run != site.invite.run:
            raise SecurityError(f"it belongs to another federation (run {file.run})")
        if file.contract != site.contract.digest:
            raise SecurityError("it was asked under another contract")
        if file.site != site.name:
            raise SecurityError(f"it is for {file.site}, but this is {site.name}")
    try:
        return Query.from_plain(file.ask), hashlib.sha256(canonical(body)).hexdigest()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def column_names(contract: Contract) -> tuple[str, ...]:
    """Names of the columns of prepared rows."""
    return (INTERCEPT, *contract.schema.names) if contract.intercept else contract.schema.names


def in_folds(summary: Summary, folds: int, most: int) -> Summary:
    """The sums of a summary in ``folds`` folds, or none, as those of the first of ``most`` folds."""

    def moved(parts: AnyArray) -> AnyArray:
        out = np.zeros((most + 1, *parts.shape[1:]), dtype=parts.dtype)
        out[:folds], out[-1] = parts[:folds], parts[folds:].sum(axis=0)
        return out

    return replace(
        summary,
        count=moved(summary.count),
        value=moved(summary.value),
        gradient=moved(summary.gradient),
        hessian=moved(summary.hessian),
        scores=None if summary.scores is None else moved(summary.scores),
    )


def _folds_of(shared: SummaryFile) -> int:
    """In how many folds a summary has given sums."""
    summary = Summary.from_plain(shared.summary)
    return int((summary.count[: summary.folds] > 0).sum())


def _chosen_folds(site: Site, rows: Rows, wanted: int | None) -> int:
    """In how many folds to share: those that were shared before, those that are wanted, or as many as there may be."""
    most, before = site.contract.folds, _sent_before(site, 1)
    if wanted is not None and (wanted == 1 or not 0 <= wanted <= most):
        raise ParameterError(f"--folds must be 0 or a whole number from 2 to {most}, as in the contract, got {wanted}")
    if before is None:
        return _most_folds(site, rows) if wanted is None else wanted
    shared = _folds_of(before)
    if wanted not in (None, shared):
        words = f"in {shared} folds" if shared else "over all rows only"
        raise DataError(
            f"sums {words} were shared before; other folds would tell more about single rows than either of them"
        )
    return shared


def _chosen_rank(site: Site, wanted: int | None) -> int | None:
    """The rank of the second derivatives to share: that of what was shared before, or the one that is wanted."""
    if wanted is not None and site.contract.method != "kin":
        raise ParameterError('--rank is for method = "kin": the fused estimator needs all sums, so leave it out')
    before = _sent_before(site, 1)
    if before is None:
        return wanted
    curvature = Summary.from_plain(before.summary).curvature
    shared = None if curvature is None else curvature.rank
    more = curvature is not None and curvature.exact and wanted is not None and wanted > curvature.rank
    if wanted not in (None, shared) and not more:
        words = "everything" if shared is None else f"rank {shared}"
        raise DataError(f"sums of {words} were shared before: leave out --rank, or say the same")
    return shared


def _most_folds(site: Site, rows: Rows) -> int:
    """The most folds, at most the contract's, in which no part of the sums is of too few rows; 0 for none."""
    for folds in range(site.contract.folds, 1, -1):
        if not _too_little(site, rows, folds):
            return folds
    return 0


def _too_little(site: Site, rows: Rows, folds: int) -> list[Finding]:
    return too_little(site.contract, rows, site.settings.thresholds, site.invite.site.id, folds)


def _check_enough(site: Site, rows: Rows, folds: int) -> None:
    findings = _too_little(site, rows, folds)
    if findings:
        lines = "".join(f"\n  {finding}" for finding in findings)
        raise DataError(f"nothing is shared, because single rows could be recognised:{lines}")


def _check_noise(site: Site, budget: Budget | None) -> None:
    """Noise protects one message: a second one, with other noise or none, takes it away."""
    before = _sent_before(site, 1)
    noisy = before is not None and before.summary.get("privacy") is not None
    if before is not None and (noisy or budget is not None):
        path = round_file(site.directory / SENT, site.name, 1, SUMMARY_SUFFIX)
        raise DataError(
            f"sums {'with' if noisy else 'without'} noise were shared before: send {path} again if it was lost. "
            "Another message about the same rows would tell more than was promised"
        )


def _check_same_rows(site: Site, rows: Rows) -> None:
    """Sums over two sets of rows that differ in one row give that row away."""
    path = site.directory / SENT / _RECORD
    if not path.exists():
        return
    try:
        known = json.loads(path.read_bytes())["rows"]
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"{path} is damaged, so nobody knows of which rows sums were shared; remove {path.parent} if all that was "
            "shared has been withdrawn"
        ) from None
    if known != rows.digest:
        raise DataError(
            "sums of other rows were shared before: the difference would give away the rows that changed. Join with "
            f"the table of that time; or, if all that was shared has been withdrawn, remove {path.parent}"
        )


def _check_round(site: Site, ask: Query, digest: str, path: Path) -> None:
    if ask.round > site.contract.messages:
        raise DataError(
            f"{path} is question {ask.round}, but the contract allows {site.contract.messages} messages of a site at "
            "most, because each tells more"
        )
    for number in range(2, site.contract.messages + 1):
        before = _sent_before(site, number)
        if before is not None and (number > ask.round or (number == ask.round and before.ask != digest)):
            raise DataError(f"{path} is question {ask.round}, but question {number} was answered already: replayed?")


def _sent_before(site: Site, number: int) -> SummaryFile | None:
    path = round_file(site.directory / SENT, site.name, number, SUMMARY_SUFFIX)
    if not path.exists():
        return None
    with in_file(path, SecurityError):
        return checked(unseal(read_text(path), "summary", site.authority, ended=True).body, SummaryFile)


def _written(
    site: Site, signer: Signer, rows: Rows, summary: Summary, number: int, ask: str | None, dry_run: bool
) -> Shared:
    named = replace(summary, site=str(site.invite.site.id))
    if dry_run:
        return Shared(named, number, None)
    folder = site.directory / SENT
    folder.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    body = SummaryFile(
        run=site.invite.run,
        contract=site.contract.digest,
        site=site.name,
        round=number,
        day=f"{datetime.now(UTC):%Y-%m-%d}",
        summary=named.to_plain(),
        ask=ask,
    )
    # before the sums are there to be sent
    write_file(folder / _RECORD, json.dumps({"rows": rows.digest}) + "\n", private=True, durable=True)
    path = round_file(folder, site.name, number, SUMMARY_SUFFIX)
    write_file(path, seal("summary", msgspec.to_builtins(body), signer), private=True)
    return Shared(named, number, path)
