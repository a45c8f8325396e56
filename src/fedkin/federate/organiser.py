"""The organiser's directory: a federation made, its sites invited, admitted, given orders, queried, and expelled.

The organiser sees no rows and no site's private key. ``federation.json`` fixes, signed, what was agreed: the contract,
the run, the authority, and the digests of the contract's file, the graph and the list of sites.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, check_nonnegative, check_positive, check_whole, in_file, write_file
from fedkin.core import Query
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.federate import messages, trust
from fedkin.federate.addresses import centre_endpoint, hosts_of, read_members, write_members
from fedkin.federate.contract import Contract
from fedkin.federate.envelope import Sealed, Signer, canonical, kind_of
from fedkin.federate.messages import Charter, Member, ModelFile, Notice, Order, Request, Steps, read_invite
from fedkin.federate.trust import Pair, SecurityError
from fedkin.graph import Graph

_STATE = "fit.json"  #: in the folder of queries: what the organiser remembers until they are answered


@dataclass(frozen=True)
class Admission:
    """What came of a file from a site; for a notice that it left, ``path`` is the notice and ``until`` is None."""

    site: str
    path: Path
    fingerprint: str = ""
    until: datetime | None = None
    renewed: bool = False


@dataclass(frozen=True)
class Standing:
    """Where a site is: invited, admitted until a day, out; and how many of its summaries are here."""

    name: str
    invited: bool
    until: datetime | None
    out: bool
    summaries: int

    @property
    def ends_soon(self) -> bool:
        """Whether the site should renew its certificate."""
        left = timedelta(days=trust.RENEW_DAYS)
        return self.until is not None and not self.out and self.until < datetime.now(UTC) + left


@dataclass(frozen=True, eq=False)
class Organiser:
    """An organiser's directory, whose signature and digests fit; ``members[k].number`` is k.

    ``ca_key`` is the file with the key of the organiser's own authority, where it has one that is not in the directory.
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
        """Make the organiser's directory, new or empty, for a contract in TOML.

        ``sites`` is a table with the columns site, and host and port where sites run rounds; by default the sites of
        the ``graph`` take part, a file of candidate edges, without which nobody has neighbours. ``centre`` is
        ``host:port`` of the central machine, for that placement; ``authority`` the organiser's own, whose key is not
        kept.
        """
        agreed, members = Contract.read(contract), read_members(sites, graph)
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise DataError(f"{directory} exists and is not empty: choose another place, or remove it")
        placement = agreed.rounds.placement
        if (centre is not None) != (placement == "central"):
            raise ParameterError(f"--centre HOST:PORT goes with placement = 'central'; the contract says {placement!r}")
        edges = None if graph is None else Graph.read(graph, sites=[member.id for member in members])
        own = trust.make_authority(f"{agreed.name[:48]} organiser") if authority is None else authority
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(PRIVATE_DIRECTORY)
        for folder in (messages.INVITES, messages.ADMITTED, messages.SUMMARIES, messages.QUERIES, messages.NOTICES):
            (directory / folder).mkdir(mode=PRIVATE_DIRECTORY)
        write_file(directory / messages.CONTRACT, contract.read_bytes(), private=True)
        write_members(directory / messages.SITES, members)
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
            write_file(directory / messages.AUTHORITY_KEY, own.key, private=True)
        charter.write(directory / messages.FEDERATION, Signer.authority(own))
        return cls(directory, charter, members)

    @classmethod
    def read(cls, directory: Path, ca_key: Path | None = None) -> Organiser:
        """Read the organiser's directory; raises `SecurityError` when a file in it was changed after `create`."""
        if not (directory / messages.FEDERATION).exists():
            raise DataError(f"{directory} is not an organiser's directory: it has no {messages.FEDERATION}")
        charter = messages.read_charter(directory / messages.FEDERATION)
        for name, digest in charter.digests.items():
            if _digest(directory / name) != digest:
                raise SecurityError(
                    f"{directory / name} was changed after fedkin federation new: sites hold what was agreed then; "
                    "put it back, or make a new federation"
                )
        return cls(directory, charter, read_members(directory / messages.SITES, None), ca_key)

    @property
    def contract(self) -> Contract:
        """What all sites agree on."""
        return self.charter.terms

    @property
    def authority(self) -> bytes:
        """The authority's certificate, PEM."""
        return self.charter.authority.encode()

    @cached_property
    def graph(self) -> Graph:
        """Candidate edges between the sites, in the order of ``members``; without edges where none were given."""
        ids = [member.id for member in self.members]
        path = self.directory / messages.GRAPH
        return Graph.read(path, sites=ids) if messages.GRAPH in self.charter.digests else Graph(ids, [])

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each site by its name and by its id."""
        by_id = {str(member.id): member.number for member in self.members}
        return by_id | {member.name: member.number for member in self.members}

    def member(self, name: str) -> Member:
        """Return the site of that name or id; raises `UnknownSiteError`."""
        if name not in self.numbers:
            raise UnknownSiteError(f"{self.directory / messages.SITES} has no site {name!r}")
        return self.members[self.numbers[name]]

    def neighbours(self) -> list[list[tuple[int, float]]]:
        """Return for each site the numbers of its neighbours, increasing, with the weights of the edges."""
        ends, weights = np.concatenate([self.graph.edges, self.graph.edges[:, ::-1]]), np.tile(self.graph.weights, 2)
        order = np.lexsort((ends[:, 1], ends[:, 0]))
        cuts = np.searchsorted(ends[order, 0], np.arange(1, len(self.members)))
        pairs = list(zip(ends[order, 1].tolist(), weights[order].tolist(), strict=True))
        return [pairs[start:stop] for start, stop in pairwise([0, *cuts.tolist(), len(pairs)])]

    def remaining_neighbours(self, name: str) -> list[str]:
        """Return the names of the neighbours of a site that are not out."""
        out, around = self.out(), self.neighbours()[self.member(name).number]
        return [self.members[v].name for v, _ in around if self.members[v].name not in out]

    def out(self) -> frozenset[str]:
        """Return the names of sites that have left or were expelled, by the valid notices in the directory."""
        return self.charter.verifier.departures(self.directory / messages.NOTICES)

    def signing(self) -> Pair:
        """Return the authority with its key."""
        path = self.ca_key or self.directory / messages.AUTHORITY_KEY
        if not path.exists():
            own = "give the key of your own authority with --ca-key FILE, or put it there for commands without it"
            raise SecurityError(f"{path} is missing, so nothing can be signed; {own}")
        pair = Pair(self.authority, trust.read_private(path))
        with in_file(path, SecurityError):
            fit = trust.belong_together(pair.certificate, pair.key)
        if not fit:
            raise SecurityError(f"{path} is not the key of the authority that signed {self.directory}")
        return pair

    def centre_pair(self) -> Pair:
        """Make a key and certificate for the central machine, which are never written down."""
        if self.charter.centre is None:
            raise ParameterError(f"the contract's placement is {self.contract.rounds.placement!r}, not 'central'")
        key = trust.make_key()
        request = trust.make_request(messages.CENTRE, key)
        return Pair(trust.issue(self.signing(), request, hosts_of(self.charter.centre)), key)

    def status(self) -> list[Standing]:
        """Return where every site is, in the order of the list."""
        out, folder, found = self.out(), self.directory, []
        # north.summary, north@2.summary
        summaries = Counter(path.stem.partition("@")[0] for path in (folder / messages.SUMMARIES).glob("*.summary"))
        for name in (member.name for member in self.members):
            certificate = self.certificate(name)
            until = None if certificate is None else trust.validity(certificate)[1]
            invited = (folder / messages.INVITES / f"{name}.invite").exists()
            found.append(Standing(name, invited, until, name in out, summaries[name]))
        return found

    def invite(self, names: Sequence[str] = ()) -> list[Path]:
        """Write invites, for all sites or those of these names; one that is there already is replaced.

        Each has the contract, the site and its neighbours, and nothing about anybody else.
        """
        chosen, out = [self.member(name) for name in names] or list(self.members), self.out()
        if gone := [member.name for member in chosen if names and member.name in out]:
            raise DataError(f"{gone[0]} has left or was expelled, for good: make a new federation to invite it again")
        charter, signer = self.charter, Signer.authority(self.signing())
        central = self.contract.rounds.placement == "central"
        around: Sequence[Sequence[tuple[int, float]]] = [()] * len(self.members) if central else self.neighbours()
        same = ("run", "federation", "authority", "n_sites", "centre")
        common: dict[str, Any] = {name: getattr(charter, name) for name in same}
        common |= {"contract": msgspec.Raw(canonical(charter.contract)), "n_edges": self.graph.n_edges}  # encoded once
        connected, degrees, paths = self._components(), self.graph.degree, []
        for member in chosen:
            given = messages.Invite(
                **common,
                site=member,
                neighbours=tuple(messages.Neighbour(self.members[v], weight) for v, weight in around[member.number]),
                degree=int(degrees[member.number]),
                code=secrets.token_hex(16),
                **connected.get(member.number, {}),
            )
            paths.append(given.write(self.directory / messages.INVITES / f"{member.name}.invite", signer))
        return paths

    def order(
        self, *, lam: float | None = None, rounds: int | None = None, rho: float | None = None
    ) -> list[tuple[Path, list[str]]]:
        """Sign what holds for the rounds from now on; what is None stays as the contract says.

        Returns files, and the names of sites to which each goes: one for all, or for replicas one per component.
        """
        if lam is not None:
            check_nonnegative("lam", lam)
        if rounds is not None:
            check_whole("rounds", rounds, least=1)
        if rho is not None:
            check_positive("rho", rho)
        before, signer, out = self.newest_order(), Signer.authority(self.signing()), self.out()
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
                raise DataError(f"{missing[0]} is not admitted yet: replicas need the steps of all they stand for")
            if names:
                own = msgspec.structs.replace(given, steps={name: steps[name] for name in names})
                written.append((own.write(self.directory / f"{names[0]}.order", signer), names))
        given.write(path, signer)  # last: it counts the revisions
        return written

    def newest_order(self) -> Order | None:
        """Return the newest order; None before there was one."""
        return self.charter.verifier.find(self.directory / messages.ORDER, Order)

    def expel(self, name: str) -> Path:
        """Sign that a site is out, for good; returns the notice, for its neighbours."""
        member = self.member(name)
        notice = Notice(run=self.charter.run, site=member.name, what="expelled", day=messages.today())
        path = self.directory / messages.NOTICES / f"{member.name}.notice"
        return notice.write(path, Signer.authority(self.signing()))

    def write_queries(self, queries: Iterable[Query], state: Mapping[str, Any]) -> list[Path]:
        """Write the queries of a round, one file for each site, and the plain values to remember until the answers."""
        signer, run, digest = Signer.authority(self.signing()), self.charter.run, self.contract.digest
        folder, paths = self.directory / messages.QUERIES, []
        for query in queries:
            name = self.member(str(query.site)).name
            body = messages.QueryFile(run=run, site=name, contract=digest, ask=query.to_plain())
            paths.append(body.write(messages.round_file(folder, name, query.round, ".ask"), signer))
        messages.FitState(run=run, contract=digest, state=dict(state)).write(folder / _STATE, signer)
        return paths

    def read_state(self) -> dict[str, Any] | None:
        """Return what `write_queries` remembered last; None before anything was asked."""
        found = self.charter.verifier.find(self.directory / messages.QUERIES / _STATE, messages.FitState)
        return None if found is None else found.state

    def deliver(self, folders: Mapping[str, Path]) -> list[Path]:
        """Sign each site's part of a model, in the directory given for it, for that site alone; returns the files."""
        signer, place, paths = Signer.authority(self.signing()), self.directory / messages.MODELS, []
        place.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        for name, folder in folders.items():
            site = self.member(name).name
            packed = ModelFile.pack(self.charter.run, site, self.contract.digest, folder)
            paths.append(packed.write(place / f"{site}.model", signer))
        return paths

    def admit(
        self, path: Path, *, again: bool = False, expected: str | None = None, now: datetime | None = None
    ) -> Admission:
        """Check a site's request and issue its certificate; or take note that a site has left.

        Another key than the one with the ``expected`` fingerprint, which the site read out, is refused. With ``again``
        a site that was admitted may come with another key, unsigned by its old one: after a loss of its directory, and
        after it was asked. What was signed with the old key then counts no more.
        """
        text = trust.read_whole(path, Request.most_bytes)
        with in_file(path, SecurityError):
            kind = kind_of(text)
        if kind == Notice.kind:
            return self._note_leave(path, text)
        sealed = self.charter.verifier.read_request(path, now=now)
        request, name = sealed.body, sealed.body.site
        mark = trust.fingerprint(request.request.encode())
        with in_file(path, SecurityError):
            self._check_request(request)
            known, lost = self.certificate(name), self.revoked(name)
            if expected is not None and not trust.same_fingerprint(mark, expected):
                raise SecurityError(f"its key has the fingerprint {mark}, not {expected}: is it from the site?")
            if mark in lost or (sealed.certificate is not None and trust.fingerprint(sealed.certificate) in lost):
                raise SecurityError(f"{name} lost the key that asks, so it counts no more")
            if known is not None and not again:
                _check_second(known, sealed, mark, now)
        place = self.directory / messages.ADMITTED / f"{name}.admit"
        if known is not None and trust.fingerprint(known) == mark and not again:
            return Admission(name, place, mark, trust.validity(known)[1], True)
        pair = self.signing()
        signer, run = Signer.authority(pair), self.charter.run
        if known is not None and again and trust.fingerprint(known) != mark:
            gone = messages.Revoked(run=run, site=name, keys=(*lost, trust.fingerprint(known)))
            gone.write(place.with_suffix(".revoked"), signer)
        certificate = trust.issue(pair, request.request.encode(), hosts_of(self.member(name).endpoint), now=now)
        write_file(place.with_name(f"{name}.request"), text, private=True)
        admit = messages.Admit(run=run, site=name, contract=self.contract.digest, certificate=certificate.decode())
        return Admission(name, admit.write(place, signer), mark, trust.validity(certificate)[1], known is not None)

    def certificate(self, name: str) -> bytes | None:
        """Return the newest certificate of a site, PEM; None before it was admitted."""
        path = self.directory / messages.ADMITTED / f"{name}.admit"
        found = self.charter.verifier.find(path, messages.Admit, name)
        return None if found is None else found.certificate.encode()

    def revoked(self, name: str) -> tuple[str, ...]:
        """Return the fingerprints of keys that a site has lost; what they signed counts no more."""
        path = self.directory / messages.ADMITTED / f"{name}.revoked"
        found = self.charter.verifier.find(path, messages.Revoked, name)
        return () if found is None else found.keys

    def steps(self) -> dict[str, Steps]:
        """Return the step rules that admitted sites sent with their requests, by name."""
        paths = {one.name: self.directory / messages.ADMITTED / f"{one.name}.request" for one in self.members}
        read = self.charter.verifier.read_request
        found = {name: read(path).body.steps for name, path in paths.items() if path.exists()}
        return {name: steps for name, steps in found.items() if steps is not None}

    def read_published(self, path: Path) -> ModelFile:
        """Read what a site published: signed by itself, with a key that it has not lost, under this contract."""
        sealed = self.charter.verifier.read(path, ModelFile, by="site")
        self.check_signer(path, sealed, self.out())
        return sealed.body

    def check_signer(self, path: Path, sealed: Sealed[Any], out: frozenset[str]) -> None:
        """Raise when the site that signed a file has lost the key for it, or is among those that are ``out``."""
        name = sealed.signer
        if sealed.certificate is not None and trust.fingerprint(sealed.certificate) in self.revoked(name):
            raise SecurityError(f"{path}: {name} lost the key with which it was signed; let it send the file again")
        if name in out:
            raise DataError(f"{path}: {name} has left or was expelled, so it counts no more; remove the file")

    def _check_request(self, request: Request) -> None:
        name, path = request.site, self.directory / messages.INVITES / f"{request.site}.invite"
        if name not in {member.name for member in self.members}:
            raise SecurityError(f"{name} is not a site of this federation")
        if name in self.out():
            raise SecurityError(f"{name} has left or was expelled, for good: make a new federation to admit it")
        if request.steps is None and self.contract.rounds.placement != "peer":
            raise SecurityError(f"it lacks step numbers, which placement {self.contract.rounds.placement!r} needs")
        if not path.exists():
            raise SecurityError(f"{name} was not invited: there is no {path}")
        if read_invite(path).digest != request.invite:
            raise SecurityError(f"it does not answer {path}; send that invite to {name} and let it join again")

    def _note_leave(self, path: Path, text: bytes) -> Admission:
        sealed = self.charter.verifier.read_notice(path)
        name = sealed.body.site
        if name not in {member.name for member in self.members}:
            raise SecurityError(f"{path}: {name} is not a site of this federation")
        if sealed.certificate is not None:
            self.check_signer(path, sealed, frozenset())
        place = self.directory / messages.NOTICES / f"{name}.notice"
        write_file(place, text, private=True)
        return Admission(name, place)

    def _components(self) -> dict[int, dict[str, Any]]:
        """Return for each site all members and edges of its component, where the placement needs them."""
        if self.contract.rounds.placement != "replicas":
            return {}
        labels, edges = self.graph.components(), self.graph.edges
        known: dict[int, dict[str, Any]] = {}
        for label in np.unique(labels).tolist():
            inside, numbers = np.flatnonzero(labels[edges[:, 0]] == label), np.flatnonzero(labels == label).tolist()
            pairs = zip(edges[inside].tolist(), self.graph.weights[inside].tolist(), strict=True)
            component = tuple(self.members[u] for u in numbers)
            given = {"component": component, "edges": tuple((i, j, weight) for (i, j), weight in pairs)}
            known |= dict.fromkeys(numbers, given)
        return known


def _check_second(known: bytes, sealed: Sealed[Request], mark: str, now: datetime | None) -> None:
    """Check a site with a certificate that comes again: with the same key, or a new one that its newest one signed."""
    newest, ended = trust.fingerprint(known), trust.validity(known)[1]
    if mark == newest and (now or datetime.now(UTC)) > ended:
        raise SecurityError(
            f"the certificate of {sealed.signer} ended on {ended:%Y-%m-%d}; ask the site, and admit it with --again"
        )
    if mark != newest and sealed.certificate is None:
        raise SecurityError(
            f"{sealed.signer} was admitted with another key (fingerprint {newest}); ask the site, and if it lost its "
            "directory admit it with --again"
        )
    if mark != newest and sealed.certificate is not None and trust.fingerprint(sealed.certificate) != newest:
        raise SecurityError(f"{sealed.signer} signed it with an old key; a renewal is signed with the newest one")


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise SecurityError(f"{path} cannot be read ({error.strerror}); put it back") from None
