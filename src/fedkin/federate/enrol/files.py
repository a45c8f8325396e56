"""What is in the files that travel between organiser and sites, and what files in their directories are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from fedkin.federate.contract.contract import Contract, Count, Nonnegative, Positive, Whole
from fedkin.federate.contract.words import in_words
from fedkin.federate.manifest import PLAIN_NAME
from fedkin.federate.manifest import Member as Member
from fedkin.federate.manifest import Steps as Steps
from fedkin.federate.trust import SecurityError, canonical, read_whole

# --- in the organiser's directory ---
FEDERATION = "federation.json"  #: signed: name, run, contract, authority, digests of the files beside it
CONTRACT, GRAPH, SITES = "contract.toml", "graph.csv", "sites.csv"
AUTHORITY_KEY = "authority.key"
INVITES, ADMITTED, SUMMARIES, ASKS, NOTICES, ORDER = "invites", "admitted", "summaries", "asks", "notices", "order.json"

# --- in a site's directory ---
INVITE, ADMIT = "invite.json", "admit.json"
KEY, NEXT_KEY = "site.key", "next.key"  #: the second one waits for its certificate
ROWS, SETTINGS, MODEL = "rows.npz", "site.toml", "model"

Name = Annotated[str, Meta(pattern=PLAIN_NAME)]
Run = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]


class Neighbour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another end of an edge."""

    member: Member
    weight: Positive = 1.0


class Charter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The organiser's own record of a federation (kind ``federation``)."""

    federation: str
    run: Run
    contract: dict[str, Any]
    authority: str
    n_sites: Count
    digests: dict[str, str]
    centre: str | None = None


class Invite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What a site gets first: the contract, the authority's certificate, itself and its neighbours (kind ``invite``).

    ``n_sites`` is the V of ``lam * V``, ``n_edges`` the number of edges that are tested, ``degree`` that of the site's
    own edges, which it needs for its steps also where it does not learn its neighbours (placement central).
    ``component`` and ``edges`` (pairs of numbers with a weight) are there only where the placement is replicas, in
    which every site knows all it is connected with. ``code`` is random: whoever answers with the digest of this file
    has seen it.
    """

    federation: str
    run: Run
    contract: dict[str, Any]
    authority: str
    site: Member
    neighbours: tuple[Neighbour, ...]
    n_sites: Count
    n_edges: Whole
    degree: Whole
    code: str
    centre: str | None = None
    component: tuple[Member, ...] | None = None
    edges: tuple[tuple[int, int, float], ...] | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a site answers: a certificate request for a key that it made itself (kind ``request``)."""

    run: Run
    site: Name
    contract: str
    invite: str
    request: str
    steps: Steps | None = None


class Admit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The certificate of a site (kind ``admit``)."""

    run: Run
    site: Name
    contract: str
    certificate: str


class Revoked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fingerprints of keys that a site has lost, in the organiser's directory (kind ``revoked``)."""

    run: Run
    site: Name
    keys: tuple[str, ...]


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the organiser sets for the rounds after the contract was agreed (kind ``order``); None: as in the contract.

    ``revision`` grows with every order. ``steps`` is there only where the placement is replicas.
    """

    run: Run
    contract: str
    revision: Count
    lam: Nonnegative | None = None
    rounds: Count | None = None
    rho: Positive | None = None
    steps: dict[str, Steps] | None = None


class Notice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site is out, for good: the organiser expelled it, or it says itself that it left (kind ``notice``)."""

    run: Run
    site: Name
    what: Literal["left", "expelled"]
    day: str


_T = TypeVar("_T")


def checked(body: dict[str, Any], kind: type[_T]) -> _T:
    """The body of an unsealed file as what it must be."""
    try:
        return msgspec.convert(body, type=kind)
    except msgspec.ValidationError as error:
        raise SecurityError(f"it {in_words(error)}") from None


def contract_of(body: dict[str, Any]) -> Contract:
    """The contract in an invite or charter."""
    return Contract.from_bytes(canonical(body))


def read_text(path: Path) -> bytes:
    """The content of a file that may be signed."""
    if path.is_dir():
        raise SecurityError(f"{path} is a directory, expected a file")
    return read_whole(path)
