"""What a site lets its links do: who may connect, what each neighbour may write and read, and how much at a time.

Links are TLS with certificates on both sides. Each site enforces, for every link by the common name at its other end: a
neighbour may write only its own keys and read only what this site publishes for it; anybody else may do nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fedkin.errors import DataError
from fedkin.federate.manifest import Manifest, all_keys
from fedkin.federate.trust import Pair


@dataclass(frozen=True)
class Grant:
    """What one neighbour may do on a link: keys that it writes and keys that it reads.

    Attributes
    ----------
    name : str
        Common name of the neighbour.
    writes, reads : sequence of str
        Key expressions.
    """

    name: str
    writes: Sequence[str]
    reads: Sequence[str]


def access_list(grants: Sequence[Grant]) -> dict[str, Any]:
    """The ``access_control`` part of a zenoh configuration: what is not granted is refused.

    A neighbour's rules come in two directions. What it writes may enter, and what asks for it (subscriptions, queries)
    may leave; what it reads may leave, and what asks for that may enter.
    """
    rules: list[dict[str, Any]] = []
    for grant in grants:
        told = ["put", "reply", "declare_queryable", "liveliness_token"]
        asked = ["declare_subscriber", "query", "liveliness_query", "declare_liveliness_subscriber"]
        for label, flow, keys, messages in (
            ("writes", "ingress", grant.writes, told),
            ("asked for", "egress", grant.writes, asked),
            ("reads", "egress", grant.reads, told),
            ("asks for", "ingress", grant.reads, asked),
        ):
            if keys:
                rules.append(
                    {
                        "id": f"{grant.name} {label}",
                        "permission": "allow",
                        "flows": [flow],
                        "messages": messages,
                        "key_exprs": list(keys),
                    }
                )
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": [{"id": grant.name, "cert_common_names": [grant.name]} for grant in grants],
        "policies": [
            {
                "subjects": [grant.name],
                "rules": [rule["id"] for rule in rules if rule["id"].startswith(f"{grant.name} ")],
            }
            for grant in grants
            if grant.writes or grant.reads
        ],
    }


#: Bounds for who connects and says nothing: so many at a time, each for so many milliseconds, and so many links.
_LINKS = {"accept_timeout": 2000, "accept_pending": 4096, "max_sessions": 4096}
#: What a message has beside its payload, and the least that a link must take.
_AROUND, _LEAST_BYTES = 4096, 65536


def link_configuration(
    listen: Sequence[str],
    connect: Sequence[str],
    grants: Sequence[Grant] | None,
    pair: Pair,
    authority: bytes,
    most_bytes: int = 1 << 20,
    lease: float = 10.0,
) -> dict[str, Any]:
    """A zenoh configuration: explicit endpoints, no scouting, TLS on both sides, and the access list.

    It has the private key of ``pair``, and is never written down.

    Parameters
    ----------
    listen, connect : sequence of str
        Endpoints, ``tls/host:port``.
    grants : sequence of Grant or None
        None for no access list: what an intruder would do.
    pair, authority
        The site's own certificate and key, and the authority whose certificates are believed.
    most_bytes : int
        Of the largest payload. The transport drops what is longer before it is put together.
    lease : float
        Seconds after which a link on which nothing came is taken for broken.
    """
    configuration: dict[str, Any] = {
        "mode": "peer",
        "listen": {"endpoints": list(listen), "exit_on_failure": True},
        "connect": {
            "endpoints": list(connect),
            "timeout_ms": -1,
            "exit_on_failure": False,
            "retry": {"period_init_ms": 100, "period_max_ms": 2000, "period_increase_factor": 1.5},
        },
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "transport": {
            "shared_memory": {"enabled": False},
            "unicast": _LINKS,
            "link": {
                "tx": {"lease": int(1000 * lease), "keep_alive": 4},
                "rx": {"max_message_size": max(most_bytes, _LEAST_BYTES) + _AROUND},
            },
        },
    }
    if grants is not None:
        configuration["access_control"] = access_list(grants)
    own, key = _base64(pair.certificate), _base64(pair.key)
    configuration["transport"]["link"] |= {
        "protocols": ["tls"],
        "tls": {
            "enable_mtls": True,
            "verify_name_on_connect": True,
            "close_link_on_expiration": True,
            "root_ca_certificate_base64": _base64(authority),
            "listen_certificate_base64": own,
            "listen_private_key_base64": key,
            "connect_certificate_base64": own,
            "connect_private_key_base64": key,
        },
    }
    return configuration


def _base64(text: bytes) -> str:
    return base64.b64encode(text).decode()


def site_links(
    manifest: Manifest,
    pair: Pair,
    authority: bytes,
    out: Collection[str] = (),
    listen: str | None = None,
    lease: float = 10.0,
) -> dict[str, Any]:
    """The zenoh configuration of a site: grants follow `all_keys`, and who is ``out`` gets none.

    Of two neighbours the one with the larger number connects to the other, if that listens. ``listen`` replaces the
    endpoint on which the site itself listens, where it is behind NAT or in a container.
    """
    here = manifest.here
    others = [v for v in manifest.partners() if manifest.name(v) not in out]
    grants = [Grant(manifest.name(v), all_keys(manifest, v, here), all_keys(manifest, here, v)) for v in others]
    own = manifest.endpoint(here) if manifest.placement != "central" or here == manifest.n_sites else None
    connect = []
    for v in others:
        there = manifest.endpoint(v)
        if there is None and own is None:
            raise DataError(
                f"neither {manifest.name(here)} nor {manifest.name(v)} has an address where the other could reach it: "
                "the organiser's list of sites needs host and port of one of them"
            )
        if there is not None and (own is None or v < here):
            connect.append(there)
    return link_configuration(
        [] if own is None else [listen or own], connect, grants, pair, authority, manifest.most_bytes, lease
    )
