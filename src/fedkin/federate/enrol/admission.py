"""What the organiser answers: certificates for sites that were invited, orders for the rounds, and where they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from fedkin._base import check_nonnegative, check_positive, check_whole, in_file, write_file
from fedkin.errors import DataError, ParameterError
from fedkin.federate.enrol import files
from fedkin.federate.enrol.files import Admit, Member, Order, Request, Revoked, Steps, checked, read_text
from fedkin.federate.enrol.notices import NOTICE_SUFFIX, read_notice
from fedkin.federate.enrol.organiser import INVITE_SUFFIX, Organiser, read_invite
from fedkin.federate.enrol.places import host_of
from fedkin.federate.manifest import CENTRE
from fedkin.federate.trust import (
    RENEW_DAYS,
    Pair,
    Sealed,
    SecurityError,
    Signer,
    fingerprint,
    issue,
    kind_of,
    make_key,
    make_request,
    same_fingerprint,
    seal,
    unseal,
    unseal_by_authority,
    unseal_request,
    validity,
)

OfSite = TypeVar("OfSite", Admit, Revoked)
ADMIT_SUFFIX, REQUEST_SUFFIX, ORDER_SUFFIX, REVOKED_SUFFIX = ".admit", ".request", ".order", ".revoked"


@dataclass(frozen=True)
class Admission:
    """What came of a file from a site.

    Attributes
    ----------
    site : str
    path : path
        What goes back to the site; for a notice that it left, the notice.
    fingerprint : str
        Of the site's key, to compare with what the site saw; empty for a notice.
    until : datetime or None
        When the certificate ends; None for a notice.
    renewed : bool
        Whether the site had a certificate already.
    """

    site: str
    path: Path
    fingerprint: str = ""
    until: datetime | None = None
    renewed: bool = False


def admit(
    organiser: Organiser,
    path: Path,
    *,
    again: bool = False,
    expected: str | None = None,
    ca_key: Path | None = None,
    now: datetime | None = None,
) -> Admission:
    """Check a site's request and issue its certificate; or take note that a site has left.

    Parameters
    ----------
    organiser : Organiser
        Whose federation it is.
    path : path
        What the site sent: a request, or the notice of ``fedkin site leave``.
    again : bool
        Whether a site that was admitted may come with another key, unsigned by its old one: after a loss of its
        directory, and after it was asked. What was signed with the old key then counts no more.
    expected : str, optional
        The fingerprint that the site read out; another one is refused.
    ca_key : path, optional
        Key of the organiser's own authority.
    now : datetime, optional
        The present by default.

    Raises
    ------
    SecurityError
        When the request is not for this federation, contract and invite, or not by the site that it names.
    """
    text = read_text(path)
    with in_file(path, SecurityError):
        if kind_of(text) == "notice":
            return _note_leave(organiser, path, text)
        sealed = unseal_request(text, "request", "request", organiser.authority, now=now)
        request = checked(sealed.body, Request)
        member = _check_request(organiser, request, sealed.signer)
        mark = fingerprint(request.request.encode())
        if expected is not None and not same_fingerprint(mark, expected):
            raise SecurityError(f"its key has the fingerprint {mark}, not {expected}: somebody else may have sent it")
        known, lost = recorded(organiser, member.name), revoked(organiser, member.name)
        if mark in lost or (sealed.certificate is not None and fingerprint(sealed.certificate) in lost):
            raise SecurityError(f"{member.name} lost the key that asks, so it counts no more")
        if known is not None and not again:
            _check_second(known, sealed, mark, now)
    place = organiser.directory / files.ADMITTED / f"{member.name}{ADMIT_SUFFIX}"
    if known is None or fingerprint(known) != mark or again:
        pair = organiser.signing(ca_key)
        if again and known is not None and fingerprint(known) != mark:
            keys = (*lost, fingerprint(known))
            gone = Revoked(run=organiser.charter.run, site=member.name, keys=keys)
            text_of = seal("revoked", msgspec.to_builtins(gone), Signer.authority(pair))
            write_file(place.with_name(f"{member.name}{REVOKED_SUFFIX}"), text_of, private=True)
        certificate = issue(pair, request.request.encode(), host_of(member.endpoint), now=now)
        body = Admit(
            run=organiser.charter.run,
            site=member.name,
            contract=organiser.contract.digest,
            certificate=certificate.decode(),
        )
        write_file(place.with_name(f"{member.name}{REQUEST_SUFFIX}"), text, private=True)
        write_file(place, seal("admit", msgspec.to_builtins(body), Signer.authority(pair)), private=True)
        return Admission(member.name, place, mark, validity(certificate)[1], known is not None)
    return Admission(member.name, place, mark, validity(known)[1], True)


def recorded(organiser: Organiser, name: str) -> bytes | None:
    """The newest certificate of a site, PEM; None before it was admitted."""
    found = _own_record(organiser, name, ADMIT_SUFFIX, "admit", Admit)
    return None if found is None else found.certificate.encode()


def revoked(organiser: Organiser, name: str) -> tuple[str, ...]:
    """Fingerprints of keys that a site has lost; what they signed counts no more."""
    found = _own_record(organiser, name, REVOKED_SUFFIX, "revoked", Revoked)
    return () if found is None else found.keys


def _own_record(organiser: Organiser, name: str, suffix: str, kind: str, form: type[OfSite]) -> OfSite | None:
    """What the organiser has signed about a site; None when it has not."""
    path = organiser.directory / files.ADMITTED / f"{name}{suffix}"
    if not path.exists():
        return None
    with in_file(path, SecurityError):
        found = checked(unseal_by_authority(read_text(path), kind, organiser.authority), form)
        if (found.run, found.site) != (organiser.charter.run, name):
            raise SecurityError(f"it is for {found.site} of run {found.run}")
    return found


def admitted_steps(organiser: Organiser) -> dict[str, Steps]:
    """The step rules that admitted sites sent with their requests, by name (placements central and replicas)."""
    found = {}
    for member in organiser.members:
        path = organiser.directory / files.ADMITTED / f"{member.name}{REQUEST_SUFFIX}"
        if path.exists():
            with in_file(path, SecurityError):
                body = unseal_request(read_text(path), "request", "request", organiser.authority).body
                steps = checked(body, Request).steps
            if steps is not None:
                found[member.name] = steps
    return found


def order(
    organiser: Organiser,
    *,
    lam: float | None = None,
    rounds: int | None = None,
    rho: float | None = None,
    ca_key: Path | None = None,
) -> list[tuple[Path, list[str]]]:
    """Sign what holds for the rounds from now on; what is None stays as the contract says.

    Returns
    -------
    list of (path, names)
        Files, and the sites to which each goes: one for all, or where the placement is replicas one per component.
    """
    if lam is not None:
        check_nonnegative("lam", lam)
    if rounds is not None:
        check_whole("rounds", rounds, least=1)
    if rho is not None:
        check_positive("rho", rho)
    before = read_order(organiser.directory / files.ORDER, organiser)
    given = Order(
        run=organiser.charter.run,
        contract=organiser.contract.digest,
        revision=1 if before is None else before.revision + 1,
        lam=None if lam is None else float(lam),
        rounds=rounds,
        rho=None if rho is None else float(rho),
    )
    signer = Signer.authority(organiser.signing(ca_key))
    out = organiser.out()
    sealed = seal("order", msgspec.to_builtins(given), signer)
    if organiser.contract.rounds.placement != "replicas":
        write_file(organiser.directory / files.ORDER, sealed, private=True)
        return [(organiser.directory / files.ORDER, [one.name for one in organiser.members if one.name not in out])]
    steps = admitted_steps(organiser)
    written = []
    labels = organiser.graph.components()
    for label in np.unique(labels).tolist():
        names = [organiser.members[u].name for u in np.flatnonzero(labels == label).tolist()]
        names = [name for name in names if name not in out]
        if missing := [name for name in names if name not in steps]:
            raise DataError(f"{missing[0]} is not admitted yet: replicas need the step numbers of all they stand for")
        path = organiser.directory / f"{names[0]}{ORDER_SUFFIX}" if names else None
        if path is not None:
            own = msgspec.structs.replace(given, steps={name: steps[name] for name in names})
            write_file(path, seal("order", msgspec.to_builtins(own), signer), private=True)
            written.append((path, names))
    write_file(organiser.directory / files.ORDER, sealed, private=True)  # last: it counts the revisions
    return written


def read_order(path: Path, organiser: Organiser) -> Order | None:
    """The newest order; None before there was one."""
    if not path.exists():
        return None
    with in_file(path, SecurityError):
        return checked(unseal_by_authority(read_text(path), "order", organiser.authority), Order)


def centre_pair(organiser: Organiser) -> Pair:
    """A new key and certificate for the central machine, which are never written down."""
    if organiser.charter.centre is None:
        raise ParameterError(f"the contract's placement is {organiser.contract.rounds.placement!r}, not 'central'")
    key = make_key()
    request = make_request(CENTRE, key)
    return Pair(issue(organiser.signing(), request, host_of(organiser.charter.centre)), key)


@dataclass(frozen=True)
class Standing:
    """Where a site is: invited, admitted until a day, out; and the rounds of which its summaries are here."""

    name: str
    invited: bool
    until: datetime | None
    out: bool
    summaries: int

    @property
    def ends_soon(self) -> bool:
        """Whether the site should renew its certificate."""
        return self.until is not None and not self.out and self.until < datetime.now(UTC) + timedelta(days=RENEW_DAYS)


def status(organiser: Organiser) -> list[Standing]:
    """Where every site is, in the order of the list."""
    out = organiser.out()
    folder = organiser.directory

    # north.summary, north@2.summary
    summaries = Counter(path.stem.partition("@")[0] for path in (folder / files.SUMMARIES).glob("*.summary"))

    def one(member: Member) -> Standing:
        certificate = recorded(organiser, member.name)
        return Standing(
            member.name,
            (folder / files.INVITES / f"{member.name}{INVITE_SUFFIX}").exists(),
            None if certificate is None else validity(certificate)[1],
            member.name in out,
            summaries[member.name],
        )

    return [one(member) for member in organiser.members]


def _check_request(organiser: Organiser, request: Request, signer: str) -> Member:
    if request.run != organiser.charter.run:
        raise SecurityError(f"it is for another federation (run {request.run})")
    if request.site not in {member.name for member in organiser.members}:
        raise SecurityError(f"{request.site} is not a site of this federation")
    if signer != request.site:
        raise SecurityError(f"{signer} signed it, but it asks for a certificate for {request.site}")
    if request.contract != organiser.contract.digest:
        raise SecurityError("it was made for another contract; the site must join with the invite of this federation")
    if request.site in organiser.out():
        raise SecurityError(f"{request.site} has left or was expelled, for good: make a new federation to admit it")
    if request.steps is None and organiser.contract.rounds.placement != "peer":
        raise SecurityError(f"it lacks step numbers, which placement {organiser.contract.rounds.placement!r} needs")
    path = organiser.directory / files.INVITES / f"{request.site}{INVITE_SUFFIX}"
    if not path.exists():
        raise SecurityError(f"{request.site} was not invited: there is no {path}")
    if read_invite(path)[1] != request.invite:
        raise SecurityError(f"it does not answer {path}; send that invite to {request.site} and let it join again")
    return organiser.member(request.site)


def _check_second(known: bytes, sealed: Sealed, mark: str, now: datetime | None) -> None:
    """A site with a certificate comes again: with the same key, or with a new one that its newest one signed."""
    newest = fingerprint(known)
    if mark == newest:
        ended = validity(known)[1]
        if (now or datetime.now(UTC)) > ended:
            raise SecurityError(
                f"the certificate of {sealed.signer} ended on {ended:%Y-%m-%d}; ask the site, and admit it with --again"
            )
    elif sealed.certificate is None:
        raise SecurityError(
            f"{sealed.signer} was admitted with another key (fingerprint {newest}); ask the site, and if it lost its "
            "directory admit it with --again"
        )
    elif fingerprint(sealed.certificate) != newest:
        raise SecurityError(f"{sealed.signer} signed it with an old key; a renewal is signed with the newest one")


def _note_leave(organiser: Organiser, path: Path, text: bytes) -> Admission:
    notice = read_notice(path, organiser.charter.run, organiser.authority)
    signed = unseal(text, "notice", organiser.authority, ended=True).certificate
    if signed is not None and fingerprint(signed) in revoked(organiser, notice.site):
        raise SecurityError(f"{notice.site} lost the key with which it was signed")
    if notice.site not in organiser.numbers:
        raise SecurityError(f"{notice.site} is not a site of this federation")
    place = organiser.directory / files.NOTICES / f"{notice.site}{NOTICE_SUFFIX}"
    write_file(place, text, private=True)
    return Admission(notice.site, place)
