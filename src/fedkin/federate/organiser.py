"""The organiser's directory: create a federation, and invite, admit, order, query and expel its sites.

The organiser sees no rows and no site's private key. The signed file ``federation.json`` records what was agreed: the
contract, the run, the authority, and the digests of the contract's file, the graph and the list of sites.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, check_nonnegative, check_positive, check_whole, in_file, listed, write_file
from fedkin.core import Query
from fedkin.data import write_csv
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.federate import messages, trust
from fedkin.federate.contract import Contract
from fedkin.federate.members import centre_endpoint, components_of, hosts, read_members
from fedkin.federate.messages import CENTRE, Charter, Member, ModelFile, Notice, Order, Request, Steps, read_invite
from fedkin.federate.trust import Pair, SecurityError
from fedkin.graph import Graph

_STATE = "fit.json"  #: in the folder of queries: what the organiser remembers until they are answered
_EARLIER = "earlier"  #: end of the name of the file with the fingerprints of a site's earlier keys


@dataclass(frozen=True)
class Admission:
    """Outcome of a file from a site; for a notice of leaving, ``path`` is the notice and ``until`` is None."""

    site: str
    path: Path
    fingerprint: str = ""
    until: datetime | None = None
    renewed: bool = False
    lost: bool = False  # whether another key of the site is no longer valid


@dataclass(frozen=True)
class Standing:
    """State of a site: invited, admitted (until when) or out; and the number of its summaries here."""

    name: str
    invited: bool
    until: datetime | None
    out: bool
    summaries: int
    ends_soon: bool  # whether its certificate should be renewed


@dataclass(frozen=True, eq=False)
class Organiser:
    """An organiser's directory, with signature and digests checked; ``members[k].number`` is k.

    ``ca_key`` is the file with the authority's key if the organiser keeps it outside the directory.
    """

    directory: Path
    charter: Charter
    members: tuple[Member, ...]
    ca_key: Path | None = None

    @classmethod
    def create(
        cls,
        contract: Path,
        directory: Path,
        *,
        graph: Path | None = None,
        sites: Path | None = None,
        centre: str | None = None,
        authority: Pair | None = None,
    ) -> Organiser:
        """Create an organiser's directory, which must be new or empty, for a contract in TOML.

        ``sites`` is a table with the column site, and host and port if sites run rounds; by default the sites of the
        ``graph`` take part. ``graph`` is a file of candidate edges; without it no site has neighbours. ``centre`` is
        the ``host:port`` of the central machine, for that placement; ``authority`` is the organiser's own authority,
        whose key is not stored.
        """
        agreed, members = Contract.read(contract), read_members(sites, graph)
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise DataError(f"{directory} exists and is not empty: choose another place, or remove it")
        placement = agreed.rounds.placement
        if (centre is not None) != (placement == "central"):
            raise ParameterError(f"--centre HOST:PORT needs placement = 'central'; the contract says {placement!r}")
        edges = None if graph is None else Graph.read(graph, sites=[member.id for member in members])
        own = trust.make_authority(f"{agreed.name[:48]} organiser") if authority is None else authority
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(PRIVATE_DIRECTORY)
        for folder in (messages.INVITES, messages.ADMITTED, messages.SUMMARIES, messages.QUERIES, messages.NOTICES):
            (directory / folder).mkdir(mode=PRIVATE_DIRECTORY)
        write_file(directory / messages.CONTRACT, contract.read_bytes(), private=True)
        rows = [[one.id, *(one.endpoint or "/:").partition("/")[2].rpartition(":")[::2]] for one in members]
        write_csv(directory / messages.SITES, ["site", "host", "port"], rows)
        if edges is not None:
            edges.write(directory / messages.GRAPH)
        fixed = [messages.CONTRACT, messages.SITES, *([] if edges is None else [messages.GRAPH])]
        charter = Charter(
            run=secrets.token_hex(8),
            federation=agreed.name,
            contract=msgspec.json.decode(agreed.to_bytes()),
            authority=own.certificate.decode(),
            n_sites=len(members),
            digests={name: _digest(directory / name) for name in fixed},
            centre=None if centre is None else centre_endpoint(centre),
        )
        if authority is None:
            trust.write_key(directory / messages.AUTHORITY_KEY, own.key)
        charter.write(directory / messages.FEDERATION, own)
        return cls(directory, charter, members)

    @classmethod
    def read(cls, directory: Path, ca_key: Path | None = None) -> Organiser:
        """Read an organiser's directory; raise `SecurityError` if a file in it was changed after `create`."""
        if not (directory / messages.FEDERATION).exists():
            raise DataError(f"{directory} is not an organiser's directory: it has no {messages.FEDERATION}")
        charter = messages.read_charter(directory / messages.FEDERATION)
        for name, digest in charter.digests.items():
            if _digest(directory / name) != digest:
                raise SecurityError(
                    f"{directory / name} was changed after fedkin federation new, but sites have the original; "
                    "put it back, or make a new federation"
                )
        return cls(directory, charter, read_members(directory / messages.SITES, None), ca_key)

    @property
    def contract(self) -> Contract:
        """The contract that all sites agreed on."""
        return self.charter.terms

    @property
    def authority(self) -> bytes:
        """The authority's certificate, PEM."""
        return self.charter.authority.encode()

    @cached_property
    def graph(self) -> Graph:
        """Candidate edges between the sites, in the order of ``members``; no edges if none were given."""
        ids = [member.id for member in self.members]
        path = self.directory / messages.GRAPH
        return Graph.read(path, sites=ids) if messages.GRAPH in self.charter.digests else Graph(ids, [])

    @cached_property
    def _by_name(self) -> dict[str, Member]:
        return {str(one.id): one for one in self.members} | {one.name: one for one in self.members}

    def member(self, name: str) -> Member:
        """Return the site with this name or id; raise `UnknownSiteError` if there is none."""
        if name not in self._by_name:
            known = listed(self._by_name, 8)
            raise UnknownSiteError(f"{self.directory / messages.SITES} has no site {name!r}, only {known}")
        return self._by_name[name]

    def out(self) -> frozenset[str]:
        """Return the names of sites that have left or were expelled, from the list of keys and the valid notices."""
        listed = {member.name for member in self.members if member.number in self.keys().out}
        return self.charter.departures(self.directory) | listed

    def signing(self) -> Pair:
        """Return the authority's certificate with its key."""
        path = self.ca_key or self.directory / messages.AUTHORITY_KEY
        if not path.exists():
            own = "give the key of your own authority with --ca-key FILE, or put it there for commands without it"
            raise SecurityError(f"{path} is missing, so nothing can be signed; {own}")
        pair = Pair(self.authority, trust.read_key(path))
        with in_file(path, SecurityError):
            fits = pair.fits()
        if not fits:
            raise SecurityError(f"{path} is not the key of the authority that signed {self.directory}")
        return pair

    def link_pair(self) -> Pair:
        """Make a key and certificate for the organiser's own connections; they are never written to disk."""
        key = trust.make_key()
        listens, request = hosts(self.charter.centre), trust.make_request(CENTRE, key)
        return Pair(trust.issue(self.signing(), request, listens, name=CENTRE), key)

    def status(self) -> list[Standing]:
        """Return the state of every site, in the order of the list."""
        out, folder, found = self.out(), self.directory, []
        # north.summary, north@2.summary
        summaries = Counter(path.stem.partition("@")[0] for path in (folder / messages.SUMMARIES).glob("*.summary"))
        for name in (member.name for member in self.members):
            certificate = self.certificate(name)
            until = None if certificate is None else trust.validity(certificate)[1]
            soon = certificate is not None and name not in out and trust.ends_soon(certificate)
            invited = self._file(name, "invite").exists()
            found.append(Standing(name, invited, until, name in out, summaries[name], soon))
        return found

    # --- what the organiser signs ---------------------------------------------------------------------------------

    def invite(self, names: Sequence[str] = ()) -> list[Path]:
        """Write invites for all sites, or for those with these names; replace existing ones.

        Each contains the contract, the site and its neighbours, and nothing about other sites.
        """
        chosen, out = [self.member(name) for name in names] or list(self.members), self.out()
        if gone := [member.name for member in chosen if names and member.name in out]:
            raise DataError(f"{gone[0]} has left or was expelled permanently: make a new federation to invite it again")
        charter, signer = self.charter, self.signing()
        central = self.contract.rounds.placement == "central"
        around: list[list[messages.Neighbour]] = [[] for _ in self.members]
        pairs = zip(self.graph.edges.tolist(), self.graph.weights.tolist(), strict=True)
        for (u, v), weight in pairs if not central else ():
            around[u].append(messages.Neighbour(self.members[v], weight))
            around[v].append(messages.Neighbour(self.members[u], weight))
        same = ("run", "federation", "authority", "n_sites", "centre")
        common: dict[str, Any] = {name: getattr(charter, name) for name in same}
        common |= {"contract": msgspec.Raw(messages.canonical(charter.contract)), "n_edges": self.graph.n_edges}
        replicas = self.contract.rounds.placement == "replicas"
        connected = components_of(self.members, self.graph) if replicas else {}
        degrees, paths = self.graph.degree, list[Path]()
        for member in chosen:
            given = messages.Invite(
                **common,
                site=member,
                neighbours=tuple(sorted(around[member.number], key=lambda one: one.member.number)),
                degree=int(degrees[member.number]),
                code=secrets.token_hex(16),
                **connected.get(member.number, {}),
            )
            paths.append(given.write(self._file(member.name, "invite"), signer))
        return paths

    def order(
        self, *, lam: float | None = None, rounds: int | None = None, rho: float | None = None
    ) -> list[tuple[Path, list[str]]]:
        """Sign settings for all further rounds; None keeps the contract's setting.

        Returns files with the names of their recipients: one for all sites, or with replicas one per component.
        """
        if lam is not None:
            check_nonnegative("lam", lam)
        if rounds is not None:
            check_whole("rounds", rounds, least=1)
        if rho is not None:
            check_positive("rho", rho)
        before, signer, out = self.newest_order(), self.signing(), self.out()
        given = Order(
            run=self.charter.run,
            contract=self.contract.digest,
            revision=1 if before is None else before.revision + 1,
            lam=None if lam is None else float(lam),
            rounds=rounds,
            rho=None if rho is None else float(rho),
        )
        path = self.directory / messages.ORDER
        if self.contract.rounds.placement != "replicas":
            return [(given.write(path, signer), [one.name for one in self.members if one.name not in out])]
        steps, labels, written = self.steps(), self.graph.components(), []
        for label in np.unique(labels).tolist():
            inside = [self.members[u].name for u in np.flatnonzero(labels == label).tolist()]
            names = [name for name in inside if name not in out]
            if missing := [name for name in names if name not in steps]:
                raise DataError(f"{missing[0]} is not admitted yet: replicas need the steps of all sites")
            if names:
                own = msgspec.structs.replace(given, steps={name: steps[name] for name in names})
                written.append((own.write(self.directory / f"{names[0]}.order", signer), names))
        given.write(path, signer)  # last: it counts the revisions
        return written

    def newest_order(self) -> Order | None:
        """Return the newest order; None before the first."""
        return self.charter.find(self.directory / messages.ORDER, Order)

    def expel(self, name: str) -> Path:
        """Expel a site permanently: sign a notice and a list of keys without its key; return the notice."""
        site, signer = self.member(name).name, self.signing()
        notice = Notice(run=self.charter.run, site=site, what="expelled")
        path = notice.write(self._file(site, "notice"), signer)
        self._list_keys(site, "", signer)
        return path

    def write_queries(self, queries: Iterable[Query], state: Mapping[str, Any]) -> list[Path]:
        """Write the queries of a round, one file for each site, and the state to keep until they are answered."""
        signer, run, digest = self.signing(), self.charter.run, self.contract.digest
        folder, paths = self.directory / messages.QUERIES, []
        for query in queries:
            name = self.member(str(query.site)).name
            body = messages.QueryFile(run=run, site=name, contract=digest, ask=query.to_plain())
            paths.append(body.write(messages.round_file(folder, name, query.round, ".ask"), signer))
        messages.FitState(run=run, contract=digest, state=dict(state)).write(folder / _STATE, signer)
        return paths

    def read_state(self) -> dict[str, Any] | None:
        """Return the state that `write_queries` kept last; None before the first query."""
        found = self.charter.find(self.directory / messages.QUERIES / _STATE, messages.FitState)
        return None if found is None else found.state

    def deliver(self, folders: Mapping[str, Path]) -> list[Path]:
        """Sign each site's part of a model, from its own directory and for that site alone; return the files."""
        signer, place, paths = self.signing(), self.directory / messages.MODELS, []
        place.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        for name, folder in folders.items():
            site = self.member(name).name
            packed = ModelFile.pack(self.charter.run, site, self.contract.digest, folder)
            paths.append(packed.write(place / f"{site}.model", signer))
        return paths

    # --- what comes from sites ------------------------------------------------------------------------------------

    def admit(
        self, path: Path, *, again: bool = False, expected: str | None = None, now: datetime | None = None
    ) -> Admission:
        """Check a site's request and issue its certificate, or record that a site has left.

        Keys without the ``expected`` fingerprint, which the site reads out, are refused. With ``again`` a known site
        may use a new key that its old one did not sign, after it lost its directory and confirmed that. Files signed
        with the old key are then no longer valid.
        """
        text, kind = messages.read_kind(path)
        if kind == Notice.kind:
            return self._note_leave(path, text)
        request, signed_with = self.charter.read(path, Request, now=now)
        name, asked = request.site, request.request.encode()
        mark = trust.fingerprint(asked)
        with in_file(path, SecurityError):
            self._check_request(request)
            known, lost = self.certificate(name), self.keys().lost
            if expected is not None and not trust.same_fingerprint(mark, expected):
                raise SecurityError(f"its key does not have the fingerprint {expected}: ask the site again")
            if mark in lost or (signed_with is not None and trust.fingerprint(signed_with) in lost):
                raise SecurityError(f"{name} has lost the key of this request, so it is no longer valid")
            if known is not None and not again:
                _check_second(name, known, signed_with, mark, now)
        place = self._file(name, "admit")
        if known is not None and trust.fingerprint(known) == mark and not again:
            return Admission(name, place, mark, trust.validity(known)[1], True)
        loses = again and known is not None and trust.fingerprint(known) != mark
        earlier = self._earlier_keys(name)
        if known is not None:
            marks = "\n".join({**earlier, trust.fingerprint(known): None})
            write_file(self._file(name, _EARLIER), marks, private=True)
        write_file(self._file(name, "request"), text, private=True)
        self._list_keys(name, mark, self.signing(), loses=[*earlier] if loses else None)
        until = self._issue(name, now)
        return Admission(name, place, mark, until, known is not None, loses)

    def needs_fingerprint(self, path: Path, *, again: bool = False) -> bool:
        """Return whether people must confirm that a request comes from the site, since it is for a new key.

        A thief may have signed it with a copy of the old one.
        """
        if messages.read_kind(path)[1] != Request.kind:
            return False
        request, _ = self.charter.read(path, Request)
        known = self.certificate(request.site)
        return again or known is None or trust.fingerprint(known) != trust.fingerprint(request.request.encode())

    def _earlier_keys(self, name: str) -> dict[str, None]:
        """Return the fingerprints of all keys that a site has had, oldest first."""
        path = self._file(name, _EARLIER)
        return dict.fromkeys(path.read_text().split("\n") if path.exists() else ())

    def renew(self, now: datetime | None = None) -> list[str]:
        """Renew certificates that expire soon, for the same keys; return the names of the sites.

        Sites that left or were expelled, and lost keys, get no certificate.
        """
        due = [one.name for one in self.status() if one.ends_soon]
        for name in due:
            self._issue(name, now)
        return due

    def _issue(self, name: str, now: datetime | None = None) -> datetime:
        """Write a site's admission with a certificate for the key of its last request; return when it expires."""
        path = self._file(name, "request")
        asked = self.charter.read(path, Request, ended=True)[0].request.encode()
        signer, listens = self.signing(), hosts(self.member(name).endpoint)
        days = trust.LINK_DAYS if self.contract.method == "fused" else trust.FILE_DAYS
        certificate = trust.issue(signer, asked, listens, days=days, now=now)
        keys = trust.read_whole(self.directory / messages.KEYS).decode()
        about = {"run": self.charter.run, "site": name, "contract": self.contract.digest}
        messages.Admit(**about, certificate=certificate.decode(), keys=keys).write(self._file(name, "admit"), signer)
        return trust.validity(certificate)[1]

    def certificate(self, name: str) -> bytes | None:
        """Return the newest certificate of a site, PEM; None before it is admitted."""
        found = self.charter.find(self._file(name, "admit"), messages.Admit, name)
        return None if found is None else found.certificate.encode()

    def keys(self) -> messages.KeyList:
        """Return the newest list of keys."""
        return self.charter.keys(self.directory)

    def admission(self, name: str, revision: int) -> bytes | None:
        """Return the admission for a site with this revision of the list of keys; None if that is the newest.

        A site whose certificate expires soon asks as if it had no list, and gets a new certificate.
        """
        keys, path = self.keys(), self._file(name, "admit")
        if revision >= keys.revision or not path.exists():
            return None
        if keys.keys[self.member(name).number] and trust.ends_soon(self.certificate(name) or b""):
            self._issue(name)
        admit, _ = self.charter.read(path, messages.Admit, site=name)
        newest = msgspec.structs.replace(admit, keys=trust.read_whole(self.directory / messages.KEYS).decode())
        return messages.seal(newest.kind, newest, self.signing())

    def _list_keys(self, name: str, mark: str, signer: Pair, *, loses: Sequence[str] | None = None) -> None:
        """Sign the list in which a site has the key with this fingerprint, or no key if it is out.

        ``loses``: the earlier keys of a site that has lost its previous one; none of them counts any more.
        """
        before, number, path = self.keys(), self.member(name).number, self.directory / messages.KEYS
        keys, out = list(before.keys), {*before.out, *(() if mark else (number,))}
        lost = before.lost if loses is None else tuple({**dict.fromkeys((*before.lost, *loses)), keys[number]: None})
        keys[number] = mark
        if (changed := (tuple(keys), lost, tuple(sorted(out)))) != (before.keys, before.lost, before.out):
            stamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            messages.KeyList(self.charter.run, before.revision + 1, stamp, *changed).write(path, signer)

    def steps(self) -> dict[str, Steps]:
        """Return the step rules that admitted sites sent with their requests, by site name."""
        paths = {one.name: self._file(one.name, "request") for one in self.members}
        there = {name: path for name, path in paths.items() if path.exists()}
        found = {name: self.charter.read(path, Request, ended=True)[0].steps for name, path in there.items()}
        return {name: steps for name, steps in found.items() if steps is not None}

    def read_published(self, path: Path) -> ModelFile:
        """Read a published model, signed by its site with a key that is still valid, under this contract."""
        body, certificate = self.charter.read(path, ModelFile, by="site")
        self.keys().check_signer(path, body.site, certificate, self.out())
        return body

    def _check_request(self, request: Request) -> None:
        name, path = request.site, self._file(request.site, "invite")
        self._check_member(name)
        if name in self.out():
            raise SecurityError(f"{name} has left or was expelled permanently: make a new federation to admit it")
        if request.steps is None and self.contract.rounds.placement != "peer":
            raise SecurityError(f"it lacks step numbers, which placement {self.contract.rounds.placement!r} needs")
        if not path.exists():
            raise SecurityError(f"{name} was not invited: there is no {path}")
        if read_invite(path).digest != request.invite:
            raise SecurityError(f"it does not answer {path}; send that invite to {name} and let it join again")

    def _note_leave(self, path: Path, text: bytes) -> Admission:
        notice, certificate = self.charter.read(path, Notice)
        with in_file(path, SecurityError):
            self._check_member(notice.site)
        self.keys().check_signer(path, notice.site, certificate, frozenset())
        write_file(place := self._file(notice.site, "notice"), text, private=True)
        self._list_keys(notice.site, "", self.signing())
        return Admission(notice.site, place)

    def _check_member(self, name: str) -> None:
        if not any(member.name == name for member in self.members):
            raise SecurityError(f"{name} is not a site of this federation")

    def _file(self, name: str, kind: str) -> Path:
        folder = {"invite": messages.INVITES, "notice": messages.NOTICES}.get(kind, messages.ADMITTED)
        return self.directory / folder / f"{name}.{kind}"


def _check_second(name: str, known: bytes, signed_with: bytes | None, mark: str, now: datetime | None) -> None:
    """Check a new request of a certified site: it has the same key, or one that its newest key signed."""
    newest, ended = trust.fingerprint(known), trust.validity(known)[1]
    if mark == newest and (now or datetime.now(UTC)) > ended:
        raise SecurityError(
            f"the certificate of {name} ended on {ended:%Y-%m-%d}; ask the site, and admit it with --again"
        )
    if mark != newest and signed_with is None:
        raise SecurityError(
            f"{name} was admitted with another key (fingerprint {newest}); ask the site, and if it lost its directory "
            "admit it with --again"
        )
    if mark != newest and signed_with is not None and trust.fingerprint(signed_with) != newest:
        raise SecurityError(f"{name} signed it with an old key; a renewal must be signed with the newest one")


def _digest(path: Path) -> str:
    return hashlib.sha256(trust.read_whole(path)).hexdigest()
