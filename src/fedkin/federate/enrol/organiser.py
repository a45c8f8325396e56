"""The organiser's directory: a federation made, its sites invited, admitted, given orders, and expelled.

The organiser sees no rows and no site's private key. ``federation.json`` fixes, signed, what was agreed: the contract,
the run, the authority, and the digests of the graph and the list of sites beside it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, Index, in_file, write_file
from fedkin.data import write_csv
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.federate.contract.contract import Contract
from fedkin.federate.enrol import files
from fedkin.federate.enrol.files import Charter, Invite, Member, Neighbour, contract_of, read_text
from fedkin.federate.enrol.notices import NOTICE_SUFFIX, make_notice, read_notices
from fedkin.federate.enrol.places import centre_endpoint, checked_site_ids, read_sites
from fedkin.federate.manifest import plain_names
from fedkin.federate.trust import (
    Pair,
    SecurityError,
    Signer,
    belong_together,
    canonical,
    make_authority,
    read_private,
    seal,
    unseal_invitation,
)
from fedkin.graph import Graph

INVITE_SUFFIX = ".invite"


@dataclass(frozen=True, eq=False)
class Organiser:
    """An organiser's directory, whose signature and digests fit.

    Attributes
    ----------
    directory : path
    charter : Charter
        What was fixed when the federation was made.
    contract : Contract
        What all sites agree on.
    members : tuple of Member
        All sites; ``members[k].number`` is k.
    """

    directory: Path
    charter: Charter
    contract: Contract
    members: tuple[Member, ...]

    @property
    def authority(self) -> bytes:
        """The authority's certificate, PEM."""
        return self.charter.authority.encode()

    @cached_property
    def graph(self) -> Graph:
        """Candidate edges between the sites, in the order of ``members``; without edges where none were given."""
        ids = [member.id for member in self.members]
        path = self.directory / files.GRAPH
        return Graph.read(path, sites=ids) if files.GRAPH in self.charter.digests else Graph(ids, [])

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each site by its name and by its id."""
        by_id = {str(member.id): member.number for member in self.members}
        return by_id | {member.name: member.number for member in self.members}

    def member(self, name: str) -> Member:
        """The site of that name or id; raises `UnknownSiteError`."""
        if name not in self.numbers:
            raise UnknownSiteError(f"{self.directory / files.SITES} has no site {name!r}")
        return self.members[self.numbers[name]]

    def signing(self, ca_key: Path | None = None) -> Pair:
        """The authority with its key: from the directory, or from ``ca_key`` where the key is the user's own."""
        path = self.directory / files.AUTHORITY_KEY if ca_key is None else ca_key
        if not path.exists():
            own = "give the key of your own authority with --ca-key FILE, or put it there for commands without it"
            cure = f"; {own}" if ca_key is None else ""
            raise SecurityError(f"{path} is missing, so nothing can be signed{cure}")
        pair = Pair(self.authority, read_private(path))
        with in_file(path, SecurityError):
            fit = belong_together(pair.certificate, pair.key)
        if not fit:
            raise SecurityError(f"{path} is not the key of the authority that signed {self.directory}")
        return pair

    def neighbours(self) -> list[list[tuple[int, float]]]:
        """For each site the numbers of its neighbours, increasing, with the weights of the edges."""
        ends, weights = np.concatenate([self.graph.edges, self.graph.edges[:, ::-1]]), np.tile(self.graph.weights, 2)
        order = np.lexsort((ends[:, 1], ends[:, 0]))
        cuts = np.searchsorted(ends[order, 0], np.arange(1, len(self.members)))
        pairs = list(zip(ends[order, 1].tolist(), weights[order].tolist(), strict=True))
        bounds = [0, *cuts.tolist(), len(pairs)]
        return [pairs[start:stop] for start, stop in pairwise(bounds)]

    def out(self) -> frozenset[str]:
        """Names of the sites that have left or were expelled, by the valid notices in the directory."""
        return read_notices(self.directory / files.NOTICES, self.charter.run, self.authority)


def new(
    contract: Path,
    directory: Path,
    *,
    graph: Path | None = None,
    sites: Path | None = None,
    centre: str | None = None,
    authority: Pair | None = None,
) -> Organiser:
    """Make the organiser's directory of a federation.

    Parameters
    ----------
    contract : path
        The contract, TOML.
    directory : path
        Must not exist, or be empty.
    graph : path, optional
        Candidate edges between sites, CSV or GraphML; without it nobody has neighbours, and sites share summaries.
    sites : path, optional
        Table with the columns site, and host and port where sites run rounds; by default the sites of the graph.
    centre : str, optional
        ``host:port`` of the central machine, for the placement central.
    authority : Pair, optional
        The organiser's own authority, whose key is not kept; by default one is made.

    Returns
    -------
    Organiser
    """
    agreed = Contract.read(contract)
    members = _members(sites, graph)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DataError(f"{directory} exists and is not empty: choose another place, or remove it")
    placement = agreed.rounds.placement
    if (centre is not None) != (placement == "central"):
        raise ParameterError(f"--centre HOST:PORT goes with placement = 'central'; the contract says {placement!r}")
    edges = None if graph is None else Graph.read(graph, sites=[member.id for member in members])
    own = make_authority(f"{agreed.name[:48]} organiser") if authority is None else authority
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(PRIVATE_DIRECTORY)
    for folder in (files.INVITES, files.ADMITTED, files.SUMMARIES, files.ASKS, files.NOTICES):
        (directory / folder).mkdir(mode=PRIVATE_DIRECTORY)
    write_file(directory / files.CONTRACT, contract.read_bytes(), private=True)
    _write_sites(directory / files.SITES, members)
    fixed = [files.CONTRACT, files.SITES]
    if edges is not None:
        edges.write(directory / files.GRAPH)
        fixed.append(files.GRAPH)
    charter = Charter(
        federation=agreed.name,
        run=secrets.token_hex(8),
        contract=msgspec.json.decode(agreed.to_bytes()),
        authority=own.certificate.decode(),
        n_sites=len(members),
        digests={name: _digest(directory / name) for name in fixed},
        centre=None if centre is None else centre_endpoint(centre),
    )
    if authority is None:
        write_file(directory / files.AUTHORITY_KEY, own.key, private=True)
    sealed = seal("federation", msgspec.to_builtins(charter), Signer.authority(own))
    write_file(directory / files.FEDERATION, sealed, private=True)
    return Organiser(directory, charter, agreed, members)


def read_federation(directory: Path) -> Organiser:
    """The organiser's directory; raises `SecurityError` when a file in it was changed after `new`."""
    charter = read_charter(directory / files.FEDERATION)
    for name, digest in charter.digests.items():
        if _digest(directory / name) != digest:
            raise SecurityError(
                f"{directory / name} was changed after fedkin federation new: sites hold what was agreed then; "
                "put it back, or make a new federation"
            )
    members = _members(directory / files.SITES, None)
    return Organiser(directory, charter, contract_of(charter.contract), members)


def read_charter(path: Path) -> Charter:
    """What an organiser fixed, from ``federation.json``, which may be passed on: it holds no secrets."""
    if not path.exists():
        raise DataError(f"{path.parent} is not an organiser's directory: it has no {path.name}")
    with in_file(path, SecurityError):
        return files.checked(unseal_invitation(read_text(path), "federation", "authority"), Charter)


def invite(organiser: Organiser, names: Sequence[str] = (), ca_key: Path | None = None) -> list[Path]:
    """Write invites, for all sites or those of these names; one that is there already is replaced.

    Each has the contract, the site and its neighbours, and nothing about anybody else.
    """
    chosen = [organiser.member(name) for name in names] if names else list(organiser.members)
    out = organiser.out()
    if gone := [member.name for member in chosen if names and member.name in out]:
        raise DataError(f"{gone[0]} has left or was expelled, for good: make a new federation to invite it again")
    charter, members = organiser.charter, organiser.members
    central = organiser.contract.rounds.placement == "central"
    around: Sequence[Sequence[tuple[int, float]]] = [()] * len(members) if central else organiser.neighbours()
    signer = Signer.authority(organiser.signing(ca_key))
    common: dict[str, Any] = {
        "federation": charter.federation,
        "run": charter.run,
        "authority": charter.authority,
        "contract": msgspec.Raw(canonical(charter.contract)),  # encoded once for all
        "n_sites": charter.n_sites,
        "n_edges": organiser.graph.n_edges,
        "centre": charter.centre,
    }
    connected, degrees = _components(organiser), organiser.graph.degree
    paths = []
    for member in chosen:
        body = common | {
            "site": member,
            "degree": int(degrees[member.number]),
            "neighbours": [Neighbour(members[v], weight) for v, weight in around[member.number]],
            "code": secrets.token_hex(16),
            "component": None,
            "edges": None,
        }
        if connected is not None:
            body |= connected[member.number]
        path = organiser.directory / files.INVITES / f"{member.name}{INVITE_SUFFIX}"
        write_file(path, seal("invite", body, signer), private=True)
        paths.append(path)
    return paths


def expel(organiser: Organiser, name: str, ca_key: Path | None = None) -> tuple[Path, list[str]]:
    """Sign that a site is out, for good; returns the notice and the names of the neighbours that must get it."""
    member = organiser.member(name)
    signer = Signer.authority(organiser.signing(ca_key))
    path = organiser.directory / files.NOTICES / f"{member.name}{NOTICE_SUFFIX}"
    write_file(path, make_notice(organiser.charter.run, member.name, "expelled", signer), private=True)
    out = organiser.out()
    around = [organiser.members[v].name for v, _ in organiser.neighbours()[member.number]]
    return path, [one for one in around if one not in out]


def read_invite(path: Path) -> tuple[Invite, str]:
    """An invite and the digest by which an answer shows that it was seen; raises `SecurityError`."""
    with in_file(path, SecurityError):
        body = unseal_invitation(read_text(path), "invite", "authority")
        return files.checked(body, Invite), hashlib.sha256(canonical(body)).hexdigest()


def _members(sites: Path | None, graph: Path | None) -> tuple[Member, ...]:
    ids: list[str | int]
    places: Sequence[str | None]
    if sites is not None:
        ids, places = read_sites(sites)
    elif graph is not None:
        ids = checked_site_ids(graph, Graph.read(graph).sites)
        places = [None] * len(ids)
    else:
        raise ParameterError("say who takes part: --sites FILE.csv with a column site, or --graph FILE.csv")
    names = plain_names(ids)
    parts = enumerate(zip(ids, names, places, strict=True))
    return tuple(Member(one, name, k, None if place is None else f"tls/{place}") for k, (one, name, place) in parts)


def _write_sites(path: Path, members: Iterable[Member]) -> None:
    def cells(member: Member) -> list[object]:
        if member.endpoint is None:
            return [member.id, "", ""]
        host, _, port = member.endpoint.partition("/")[2].rpartition(":")
        return [member.id, host, port]

    write_csv(path, ["site", "host", "port"], [cells(member) for member in members])


def _components(organiser: Organiser) -> list[dict[str, Any]] | None:
    """For each site all members and edges of its component, where the placement needs them."""
    if organiser.contract.rounds.placement != "replicas":
        return None
    labels: Index = organiser.graph.components()
    of_edge = labels[organiser.graph.edges[:, 0]] if organiser.graph.n_edges else np.empty(0, dtype=np.int64)
    known = {}
    for label in np.unique(labels).tolist():
        inside = np.flatnonzero(of_edge == label)
        pairs = zip(organiser.graph.edges[inside].tolist(), organiser.graph.weights[inside].tolist(), strict=True)
        known[label] = {
            "component": [organiser.members[u] for u in np.flatnonzero(labels == label).tolist()],
            "edges": [(i, j, weight) for (i, j), weight in pairs],
        }
    return [known[label] for label in labels.tolist()]


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise SecurityError(f"{path} cannot be read ({error.strerror}); put it back") from None
