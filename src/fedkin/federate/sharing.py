"""One summary instead of rounds: what a site says about its rows, and what the organiser collects.

A site's summary, and its answers to queries, are signed readable files. Nothing is written below the site's own
thresholds. Sums of rows that were shared once are not shared again of other rows: the difference would give away the
rows that changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, AnyArray, in_file, listed, write_file
from fedkin.core import Budget, Query, Summary, private_summary, site_answer, site_summary
from fedkin.data import Rows
from fedkin.errors import DataError, ParameterError
from fedkin.federate import messages
from fedkin.federate.contract import Contract
from fedkin.federate.disclosure import check_disclosure, data_bounds, refuse_disclosure
from fedkin.federate.envelope import Signer
from fedkin.federate.messages import QueryFile, SummaryFile, round_file
from fedkin.federate.organiser import Organiser
from fedkin.federate.site import Site
from fedkin.federate.trust import SecurityError
from fedkin.losses import describe_loss

_SUFFIX = ".summary"
_RECORD = "rows.json"  #: digest of the rows of which sums were shared


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
    """Sum up the site's rows and write the summary; ``summary.described()`` says what every number tells.

    - ``folds``: in how many folds to give sums, from which ``lam`` is chosen; 0 for sums over all rows only. By default
      as many as the thresholds allow, at most the contract's.
    - ``epsilon``, ``delta``: differential privacy. Noise is added so that replacing one row changes the odds of any
      summary by at most ``exp(epsilon)``, except with probability ``delta``. For the linear and the mean loss.
    - ``rank``: for many coefficients, a short summary with products of columns as a diagonal plus this rank, over all
      rows only (`Summary.short`). For kin; the same rank as before where sums were shared before.
    - ``dry_run``: nothing is written.
    """
    site = Site.read(directory)
    signer, rows, contract = Signer.site(site.pair()), site.rows(), site.contract
    before = _first_summary(site)
    rank = _chosen_rank(contract, before, rank)
    folds = _chosen_folds(site, rows, before, folds if rank is None else 0)
    _check_rows(site, rows, folds)
    budget = None if epsilon is None else Budget(epsilon, delta, *data_bounds(contract))
    _check_noise(site, before, budget)
    member, loss, how = site.invite.site.id, contract.loss_object(), _how(contract, folds)
    if budget is None:
        summary = site_summary(member, rows, loss, **how)
    else:
        summary = private_summary(member, rows, loss, budget, **how, by_fold=folds > 0)
    return _written(site, signer, rows, _formed(summary, folds, contract, rank), 1, None, dry_run)


def answer(directory: Path, path: Path, *, dry_run: bool = False) -> Shared:
    """Answer the organiser's query in a file: loss and derivatives, summed over rows, at the parameters that it names.

    Raises `SecurityError` when the organiser did not sign it for this site and contract, and `DataError` when that
    round was answered already, there were enough rounds, or there are too few rows.
    """
    site = Site.read(directory)
    signer, rows, contract = Signer.site(site.pair()), site.rows(), site.contract
    asked = site.invite.verifier.read(path, QueryFile, site=site.name).body
    with in_file(path, DataError):
        query = Query.from_plain(asked.ask)
    before = _first_summary(site)
    if before is None:
        raise DataError(f"{site.name} has shared no summary yet, so there is nothing to ask about: fedkin site share")
    if before.privacy is not None:
        raise DataError(
            f"{site.name} has shared sums with noise; an answer has none, and would break what was promised"
        )
    folds, rank = _folds_of(before), None if before.curvature is None else before.curvature.rank
    _check_round(site, query, asked.digest, path)
    _check_rows(site, rows, folds)
    named = msgspec.structs.replace(query, site=site.invite.site.id)
    summary = site_answer(named, rows, contract.loss_object(), **_how(contract, folds))
    summary = _formed(summary, folds, contract, rank)
    return _written(site, signer, rows, summary, query.round, asked.digest, dry_run)


def _how(contract: Contract, folds: int) -> dict[str, Any]:
    return {"feature_names": contract.column_names, "folds": max(folds, 2), "seed": contract.seed}


def _sent_before(site: Site, number: int) -> SummaryFile | None:
    path = round_file(site.directory / messages.SENT, site.name, number, _SUFFIX)
    return site.invite.verifier.read(path, SummaryFile, by="site", ended=True).body if path.exists() else None


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
    most, member = site.contract.folds, site.invite.site.id
    if wanted is not None and (wanted == 1 or not 0 <= wanted <= most):
        raise ParameterError(f"--folds must be 0 or a whole number from 2 to {most}, as in the contract, got {wanted}")
    if before is None:
        check = partial(check_disclosure, site.contract, rows, site.settings, site=member)
        return next((k for k in range(most, 1, -1) if not check(folds=k)), 0) if wanted is None else wanted
    shared = _folds_of(before)
    if wanted not in (None, shared):
        words = f"in {shared} folds" if shared else "over all rows only"
        raise DataError(
            f"sums {words} were shared before; other folds would tell more about single rows than either of them"
        )
    return shared


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


def _check_rows(site: Site, rows: Rows, folds: int) -> None:
    """Refuse rows that are too few, and other rows than before: their sums differ by the rows that changed."""
    findings = check_disclosure(site.contract, rows, site.settings, site=site.invite.site.id, folds=folds)
    refuse_disclosure(findings, "nothing is shared")
    path = site.directory / messages.SENT / _RECORD
    if not path.exists():
        return
    try:
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, str]).get("rows")
    except (msgspec.MsgspecError, ValueError):
        raise DataError(
            f"{path} is damaged, so nobody knows of which rows sums were shared; remove {path.parent} if all that was "
            "shared has been withdrawn"
        ) from None
    if known != rows.digest:
        raise DataError(
            "sums of other rows were shared before: the difference would give away the rows that changed. Join with "
            f"the table of that time; or, if all that was shared has been withdrawn, remove {path.parent}"
        )


def _check_noise(site: Site, before: Summary | None, budget: Budget | None) -> None:
    """Refuse a second summary, with other noise or none, where noise protects the first one."""
    if before is not None and ((noisy := before.privacy is not None) or budget is not None):
        path = round_file(site.directory / messages.SENT, site.name, 1, _SUFFIX)
        raise DataError(
            f"sums {'with' if noisy else 'without'} noise were shared before: send {path} again if it was lost. "
            "Another summary of the same rows would tell more than was promised"
        )


def _check_round(site: Site, query: Query, digest: str, path: Path) -> None:
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


def _written(
    site: Site, signer: Signer, rows: Rows, summary: Summary, number: int, ask: str | None, dry_run: bool
) -> Shared:
    named, folder = replace(summary, site=str(site.invite.site.id)), site.directory / messages.SENT
    if dry_run:
        return Shared(named, number, None)
    folder.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
    # before the sums are there to be sent
    write_file(folder / _RECORD, msgspec.json.encode({"rows": rows.digest}) + b"\n", private=True, durable=True)
    path, digest = round_file(folder, site.name, number, _SUFFIX), site.contract.digest
    body = SummaryFile(site.invite.run, site.name, digest, number, messages.today(), named.to_plain(), ask)
    return Shared(named, number, body.write(path, signer))


@dataclass(frozen=True, eq=False)
class Collected:
    """The summaries of one round, by site id (text), in the order of the organiser's list where that is here.

    ``round`` is 1 for first summaries, else that of the queries they answer; ``missing`` are names of sites that are on
    the organiser's list, not out, and have sent nothing.
    """

    contract: Contract
    summaries: dict[str, Summary]
    round: int
    missing: tuple[str, ...] = ()


def read_summaries(directory: Path, federation: Path | None = None, *, now: datetime | None = None) -> Collected:
    """Read the newest summaries in a folder, each of a site that was admitted, under one contract.

    All trust comes from the organiser's ``federation.json`` (a file, or the directory with it), which is by default
    looked for in the folder and the one above. Certificates must be valid ``now``: for a fit of old files say when they
    came. Errors name the file: not signed by a site of the federation, changed, of another contract, of a site that is
    out or has lost its key, a second one of the same site, or of a round that not all sites have answered.
    """
    charter_file = _find_charter(directory, federation)
    place, charter = charter_file.parent, messages.read_charter(charter_file)
    contract, verifier = charter.terms, charter.verifier
    organiser = Organiser.read(place) if (place / messages.SITES).exists() else None  # None where the charter is alone
    out = verifier.departures(place / messages.NOTICES)
    rounds: dict[int, dict[str, tuple[Path, SummaryFile]]] = {}
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        sealed = verifier.read(path, SummaryFile, by="site", now=now)
        found = sealed.body
        if organiser is not None:
            organiser.check_signer(path, sealed, out)
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
    newest = max(rounds)
    _check_complete(rounds, newest)
    order = {name: k for k, name in enumerate(known)}
    names = sorted(rounds[newest], key=lambda name: (order.get(name, len(order)), name))
    summaries = {}
    for name in names:
        path, found = rounds[newest][name]
        summary = _summary_in(path, found, contract)
        # a site speaks for itself only: its id is its name, or what the organiser's list says
        if str(summary.site) != (name if organiser is None else str(organiser.member(name).id)):
            raise SecurityError(f"{path}: {name} signed it, but its sums say that they are of {summary.site!r}")
        summaries[str(summary.site)] = summary
    return Collected(contract, summaries, newest, tuple(name for name in known if name not in names))


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
    loss = contract.loss_object()
    with in_file(path, DataError):
        summary = Summary.from_plain(found.summary, loss)
    agreed = (describe_loss(loss), contract.column_names, contract.folds, contract.seed)
    if (describe_loss(summary.loss), summary.feature_names, summary.folds, summary.seed) != agreed:
        raise DataError(f"{path}: its loss, columns or folds are not those of the contract; let the site share again")
    return summary


def _check_complete(rounds: Mapping[int, Mapping[str, tuple[Path, SummaryFile]]], newest: int) -> None:
    if silent := sorted({name for same in rounds.values() for name in same} - rounds[newest].keys()):
        path, found = next(iter(rounds[newest].values()))
        raise DataError(
            f"{path} is the answer of {found.site} to question {newest}, which {listed(silent, 8)} have not answered "
            "yet: wait for them"
        )
