"""Transport of frames between machines: the `Transport` protocol, and one over zenoh.

Links are TLS with certificates on both sides, in zenoh's peer mode: no router, no server. Each site controls access on
every connection by the common name at its other end, which includes the fingerprint of the key: a neighbour may write
only its own keys and read only what this site publishes for it. Other sites may only answer when this site asks for a
newer list of keys. A new transport is a class with the methods of `Transport`.
"""

from __future__ import annotations

import base64
import errno
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from fedkin._base import wait_until
from fedkin.errors import DataError, FedkinError, missing_dependency
from fedkin.federate.inbox import PeerError
from fedkin.federate.plan import SitePlan, list_key
from fedkin.federate.trust import Pair

try:
    import zenoh
    import zenoh.handlers
except ImportError:  # the extra "peer" brings it
    _ZENOH = False
else:
    _ZENOH = True

#: How long to try to open again, as the port may be free only after a moment.
_AGAIN_SECONDS = 30.0
#: Bounds for who connects and says nothing: so many at a time, each for so many milliseconds, and so many links.
_LINKS = {"accept_timeout": 2000, "accept_pending": 4096, "max_sessions": 4096}
#: What a message has around its payload, and the least that a link must take.
_AROUND, _LEAST_BYTES = 4096, 65536
#: A pull that is not answered within so many seconds is asked again by the site.
PULL_SECONDS = 5.0
#: Largest payload that is looked at, unless a run needs more.
MOST_BYTES = 1 << 20
#: Where in zenoh's source code something was said.
_SOURCE = re.compile(r"\s+at \S*\.rs:\d+\.?(?!\d)")

OnFrame = Callable[[bytes], object]
OnPull = Callable[[int], bytes | None]
OnPresence = Callable[[bool], None]


class Transport(Protocol):
    """Protocol to push frames under a key, to pull them by key and round, and to announce presence.

    Pushed frames may be lost, or arrive twice or late. Callbacks run in the transport's threads. Callbacks for frames
    delay what follows, so they only record a frame and return.
    """

    def publish(self, key: str, frame: bytes) -> None:
        """Push a frame to all subscribers of ``key``."""

    def subscribe(self, key: str, on_frame: OnFrame) -> None:
        """Call ``on_frame`` for every frame pushed under ``key``."""

    def answer(self, key: str, on_pull: OnPull) -> None:
        """Serve pulls of ``key``: ``on_pull(round)`` returns the frame, or None."""

    def pull(self, key: str, round: int, on_frame: OnFrame) -> None:
        """Ask the server of ``key`` for the frame of a round, without waiting."""

    def announce(self, key: str) -> None:
        """Announce presence under ``key`` until `close`."""

    def watch(self, key: str, on_presence: OnPresence) -> None:
        """Call ``on_presence(True)`` when ``key`` is announced, ``on_presence(False)`` when it is gone."""

    def close(self) -> None:
        """Close the connection."""


#: Permissions of a neighbour, by its common name, on a connection: key expressions that it may write and read. Without
#: a name they apply to every holder of a certificate of the authority.
Grant = tuple[str | None, Sequence[str], Sequence[str]]


def access_list(grants: Sequence[Grant]) -> dict[str, Any]:
    """Return the ``access_control`` part of a zenoh configuration: what is not granted is refused.

    A neighbour's rules apply in two directions. What it writes may enter, and requests for it (subscriptions, queries)
    may leave; what it reads may leave, and requests for it may enter.
    """
    told = ["put", "reply", "declare_queryable", "liveliness_token"]
    asked = ["declare_subscriber", "query", "liveliness_query", "declare_liveliness_subscriber"]
    rules, policies, subjects = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for name, writes, reads in grants:
        subject, before = name or "anybody", len(rules)
        subjects.append({"id": subject, **({"cert_common_names": [name]} if name else {})})
        for label, flow, keys, messages in (
            ("writes", "ingress", writes, told),
            ("asked for", "egress", writes, asked),
            ("reads", "egress", reads, told),
            ("asks for", "ingress", reads, asked),
        ):
            if keys:
                rule = {"id": f"{subject} {label}", "permission": "allow", "flows": [flow], "messages": messages}
                rules.append({**rule, "key_exprs": list(keys)})
        if len(rules) > before:
            policies.append({"subjects": [subject], "rules": [rule["id"] for rule in rules[before:]]})
    return {"enabled": True, "default_permission": "deny", "rules": rules, "subjects": subjects, "policies": policies}


def link_configuration(
    listen: Sequence[str],
    connect: Sequence[str],
    grants: Sequence[Grant] | None,
    pair: Pair,
    authority: bytes,
    most_bytes: int = 1 << 20,
    lease: float = 10.0,
) -> dict[str, Any]:
    """Return a zenoh configuration: explicit endpoints, no scouting, TLS on both sides, and the access list.

    It contains the private key of ``pair``, and is never written to disk. Endpoints are ``tls/host:port``; without
    ``grants`` there is no access list, as for an intruder. Payloads above ``most_bytes`` are dropped before they are
    assembled; a connection that receives nothing for ``lease`` seconds is considered broken.
    """
    own, key, root = (base64.b64encode(text).decode() for text in (pair.certificate, pair.key, authority))
    tls = {
        "enable_mtls": True,
        "verify_name_on_connect": True,
        "close_link_on_expiration": True,
        "root_ca_certificate_base64": root,
        "listen_certificate_base64": own,
        "listen_private_key_base64": key,
        "connect_certificate_base64": own,
        "connect_private_key_base64": key,
    }
    retry = {"period_init_ms": 100, "period_max_ms": 2000, "period_increase_factor": 1.5}
    configuration: dict[str, Any] = {
        "mode": "peer",
        "listen": {"endpoints": list(listen), "exit_on_failure": True},
        "connect": {"endpoints": list(connect), "timeout_ms": -1, "exit_on_failure": False, "retry": retry},
        "scouting": {"multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "transport": {
            "shared_memory": {"enabled": False},
            "unicast": _LINKS,
            "link": {
                "protocols": ["tls"],
                "tls": tls,
                "tx": {"lease": int(1000 * lease), "keep_alive": 4},
                "rx": {"max_message_size": max(most_bytes, _LEAST_BYTES) + _AROUND},
            },
        },
    }
    if grants is not None:
        configuration["access_control"] = access_list(grants)
    return configuration


def site_links(
    plan: SitePlan,
    pair: Pair,
    authority: bytes,
    out: Collection[str],
    links: Mapping[str, str],
    listen: str | None = None,
    lease: float = 10.0,
) -> dict[str, Any]:
    """Return the zenoh configuration of a site: grants follow `SitePlan.all_keys`, and sites in ``out`` get none.

    ``links`` maps names to the common names with valid keys; all others are refused.

    Of two neighbours the one with the larger number connects to the other, if that one listens. ``listen`` replaces the
    endpoint on which the site itself listens, for example behind NAT or in a container.
    """
    here = plan.here
    others = [v for v in plan.partners() if plan.name(v) not in out]
    grants: list[Grant] = [
        (links[plan.name(v)], plan.all_keys(v, here), plan.all_keys(here, v)) for v in others if plan.name(v) in links
    ]
    grants.append((None, [list_key(plan.run, "*", plan.name(here))], []))
    own = plan.endpoint(here) if plan.placement != "central" or plan.is_centre else None
    connect = []
    for v in others:
        there = plan.endpoint(v)
        if there is None and own is None:
            raise DataError(
                f"neither {plan.name(here)} nor {plan.name(v)} has an address where the other could reach it: "
                "the organiser's list of sites needs host and port of one of them"
            )
        if there is not None and (own is None or v < here):
            connect.append(there)
    listening = [] if own is None else [listen or own]
    return link_configuration(listening, connect, grants, pair, authority, plan.most_bytes, lease)


class EndpointError(FedkinError, ValueError):
    """An endpoint that can never be opened on this machine."""


def not_opened(listen: Sequence[str], words: str) -> FedkinError:
    """Return the error to raise, with a hint, if zenoh reports these words instead of opening a session.

    A `PeerError` may pass, for example if another process still has the port; an `EndpointError` does not.
    """
    why = f"cannot {f'listen on {listen[0]}' if listen else 'open links'}: {_SOURCE.sub('', words)}"
    host = listen[0].partition("/")[2].rpartition(":")[0] if listen else ""
    again = "let the organiser correct its line in the list of sites"
    nat = "behind NAT or in a container, let it listen elsewhere: fedkin site run DIR --listen 0.0.0.0:PORT"
    if f"os error {errno.EADDRINUSE}" in words:
        return PeerError(
            f"{why}; another process uses the port (ss -ltnp shows which): end that one, or listen on another port"
        )
    if f"os error {errno.EADDRNOTAVAIL}" in words:
        return EndpointError(
            f"{why}; {host}, the host of this site, is not an address of this machine: run it on the machine that has "
            f"it, or {again}; {nat}"
        )
    if "lookup address" in words:
        return PeerError(
            f"{why}; {host}, the host of this site, cannot be resolved on this machine: add it to /etc/hosts or the "
            f"name server, or {again}; {nat}"
        )
    if f"os error {errno.EACCES}" in words:
        return EndpointError(f"{why}; this user may not listen there: use a port from 1024 onwards, {again}")
    return PeerError(why)


class ZenohTransport:
    """A transport over a zenoh session with the configuration that ``configure()`` returns (`link_configuration`).

    ``on_link(common_name, address, opened)`` is called for every connection that opens or closes; the name is None
    without TLS. ``on_refused(key, size)`` is called for payloads above ``most_bytes``, which are not even copied.
    """

    def __init__(
        self,
        configure: Callable[[], Mapping[str, Any]],
        on_link: Callable[[str | None, str, bool], object] = lambda *_: None,
        on_refused: Callable[[str, int], object] = lambda *_: None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        if not _ZENOH:
            raise missing_dependency("eclipse-zenoh", "the process of a site", "peer")
        self._configure, self._on_refused, self._most_bytes = configure, on_refused, most_bytes
        self._lock = threading.RLock()
        #: Functions that declare something to the session, and what they returned.
        self._declarations: list[Callable[[], object]] = []
        self._kept: list[object] = []
        #: Bytes that were published so far.
        self.sent = 0
        self._open()

        def on_event(event: Any) -> None:
            on_link(event.link.auth_identifier, event.link.dst, event.kind == zenoh.SampleKind.PUT)

        self._declare(lambda: self._session.info.declare_link_events_listener(on_event, history=True))

    def _open(self) -> None:
        configuration = self._configure()
        try:
            checked = zenoh.Config.from_json5(json.dumps(dict(configuration)))
        except zenoh.ZError as error:
            raise EndpointError(f"zenoh rejects its configuration: {_SOURCE.sub('', str(error))}") from None
        zenoh.init_log_from_env_or("error")  # unless RUST_LOG says something else
        try:
            self._session = zenoh.open(checked)
        except zenoh.ZError as error:
            raise not_opened(configuration["listen"]["endpoints"], str(error)) from None
        self._publishers: dict[str, Any] = {}

    def reopen(self) -> None:
        """Close all connections and open new ones, only to sites that still have grants.

        Frames in transit meanwhile are lost, as on any network; receivers pull them.
        """
        failures: list[PeerError] = []

        def is_open() -> bool:
            try:
                self._open()
            except PeerError as error:
                failures.append(error)
                return False
            return True

        with self._lock:
            self.close()
            if not wait_until(is_open, _AGAIN_SECONDS, pause=0.2, sleep=time.sleep):
                raise failures[-1]
            self._kept = [declare() for declare in self._declarations]

    def _declare(self, declare: Callable[[], object]) -> None:
        with self._lock:
            self._declarations.append(declare)
            self._kept.append(declare())

    def publish(self, key: str, frame: bytes) -> None:
        publisher = self._publishers.get(key)
        if publisher is None:
            block = zenoh.CongestionControl.BLOCK
            publisher = self._session.declare_publisher(key, congestion_control=block, express=True)
            self._publishers[key] = publisher
        publisher.put(frame)
        self.sent += len(frame)

    def subscribe(self, key: str, on_frame: OnFrame) -> None:
        # in zenoh's own thread, which saves a thread and a switch for every frame: `on_frame` must not wait for anybody
        hand = partial(self._hand, key, on_frame)
        made = zenoh.handlers.Callback
        self._declare(lambda: self._session.declare_subscriber(key, made(hand, indirect=False)))

    def _hand(self, key: str, on_frame: OnFrame, sample: Any) -> None:
        payload = sample.payload
        if len(payload) > self._most_bytes:
            self._on_refused(key, len(payload))
        else:
            on_frame(payload.to_bytes())

    def answer(self, key: str, on_pull: OnPull) -> None:
        def on_query(query: Any) -> None:
            with query, suppress(ValueError):
                frame = on_pull(int(query.parameters.get("round", "-1")))
                if frame is not None:
                    query.reply(query.key_expr, frame)

        self._declare(lambda: self._session.declare_queryable(key, on_query))

    def pull(self, key: str, round: int, on_frame: OnFrame) -> None:
        def on_reply(reply: Any) -> None:
            if reply.ok is not None:
                self._hand(key, on_frame, reply.ok)

        # everybody who serves the key is asked, and each reply is handed on at once: one that says nothing, or
        # something else, keeps no answer back
        everybody, each = zenoh.QueryTarget.ALL, zenoh.ConsolidationMode.NONE
        asked = f"{key}?round={round}"
        self._session.get(asked, on_reply, target=everybody, consolidation=each, timeout=PULL_SECONDS)

    def announce(self, key: str) -> None:
        self._declare(lambda: self._session.liveliness().declare_token(key))

    def watch(self, key: str, on_presence: OnPresence) -> None:
        def on_sample(sample: Any) -> None:
            on_presence(sample.kind == zenoh.SampleKind.PUT)

        self._declare(lambda: self._session.liveliness().declare_subscriber(key, on_sample, history=True))

    def close(self) -> None:
        with suppress(zenoh.ZError):
            self._session.close()  # type: ignore[no-untyped-call]
