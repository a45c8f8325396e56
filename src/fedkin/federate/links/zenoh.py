"""The `fedkin.federate.links.memory.Transport` over zenoh, in peer mode: no router, no server, TLS on every link."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fedkin.errors import FedkinError, missing_dependency
from fedkin.federate.links.memory import OnFrame, OnPresence, OnPull
from fedkin.federate.lockstep import PeerError
from fedkin.federate.refusals import Refusal, RefusalWatch, without_source

try:
    import zenoh
except ImportError:
    raise missing_dependency("eclipse-zenoh", "a device process", "peer") from None

#: A pull that is not answered within so many seconds is asked again by the device.
PULL_SECONDS = 5.0
#: What zenoh itself writes to standard output.
_ZENOH_LOG = "error"


class TransportError(PeerError):
    """The network could not be reached as configured; that may pass, as when another process still has the port."""


class EndpointError(FedkinError, ValueError):
    """Links that cannot be opened on this machine, at any time."""


def not_opened(listen: Sequence[str], words: str) -> FedkinError:
    """What to raise when zenoh does not open a session, with the cure.

    Parameters
    ----------
    listen : sequence of str
        Where it was asked to listen.
    words : str
        What zenoh says.
    """
    why = f"cannot {f'listen on {listen[0]}' if listen else 'open links'}: {without_source(words)}"
    host = listen[0].partition("/")[2].rpartition(":")[0] if listen else ""
    again = "correct its line in the table of --endpoints (or --centre, or --port) and run fedkin peer init again"
    nat = "behind NAT or in a container, let it listen on all addresses: docs/peer.md, 'Behind NAT and in containers'"
    if f"os error {errno.EADDRINUSE}" in words:
        return TransportError(
            f"{why}; another process uses the port (ss -ltnp shows which): end that one, or give this device another "
            f"port: {again}"
        )
    if f"os error {errno.EADDRNOTAVAIL}" in words:
        return EndpointError(
            f"{why}; {host}, the host of this device in the endpoints, is not an address of this machine: run the "
            f"device on the machine that has it, or {again}; {nat}"
        )
    if "lookup address" in words:
        return TransportError(
            f"{why}; {host}, the host of this device in the endpoints, is not a name that this machine knows: add it "
            f"to /etc/hosts or the name server, or {again}; {nat}"
        )
    if f"os error {errno.EACCES}" in words:
        return EndpointError(f"{why}; this user may not listen there: use a port from 1024 on, {again}")
    return TransportError(why)


class ZenohTransport:
    """A zenoh session.

    Parameters
    ----------
    configuration : mapping
        From `fedkin.federate.security.link_configuration`, with absolute paths.
    on_link : callable, optional
        ``on_link(common_name, address, opened)`` for every link that opens or closes; the name is None without TLS.
    on_refusal : callable, optional
        Called for what zenoh refuses. Takes over the standard output of the process, see `fedkin.federate.refusals`.
    """

    def __init__(
        self,
        configuration: Mapping[str, Any],
        on_link: Callable[[str | None, str, bool], None] | None = None,
        on_refusal: Callable[[Refusal], None] | None = None,
    ) -> None:
        try:
            checked = zenoh.Config.from_json5(json.dumps(dict(configuration)))
        except zenoh.ZError as error:
            raise EndpointError(
                f"zenoh.json5 is not a configuration of zenoh ({without_source(str(error))}); carry it again from "
                "where peer init made it"
            ) from None
        self._watch: RefusalWatch | None = None
        listen = configuration.get("listen", {}).get("endpoints", [])
        if on_refusal is not None:
            self._watch = RefusalWatch(on_refusal, _port(listen[0]) if listen else None)
        zenoh.init_log_from_env_or(_ZENOH_LOG)  # unless RUST_LOG says something else
        try:
            self._session = zenoh.open(checked)
        except zenoh.ZError as error:
            if self._watch is not None:
                self._watch.close()
            raise not_opened(listen, str(error)) from None
        self._publishers: dict[str, Any] = {}
        self._kept: list[Any] = []
        self._kept.append(self._watch_links(on_link or (lambda name, address, opened: None)))

    def _watch_links(self, on_link: Callable[[str | None, str, bool], None]) -> Any:
        def on_event(event: Any) -> None:
            link, opened = event.link, event.kind == zenoh.SampleKind.PUT
            if opened and self._watch is not None:
                self._watch.on_link(str(link.zid), link.auth_identifier, link.dst)
            on_link(link.auth_identifier, link.dst, opened)

        return self._session.info.declare_link_events_listener(on_event, history=True)

    def publish(self, key: str, frame: bytes) -> None:
        publisher = self._publishers.get(key)
        if publisher is None:
            publisher = self._session.declare_publisher(
                key, congestion_control=zenoh.CongestionControl.BLOCK, express=True
            )
            self._publishers[key] = publisher
        publisher.put(frame)

    def subscribe(self, key: str, on_frame: OnFrame) -> None:
        self._kept.append(self._session.declare_subscriber(key, lambda sample: on_frame(sample.payload.to_bytes())))

    def answer(self, key: str, on_pull: OnPull) -> None:
        def on_query(query: Any) -> None:
            with query, suppress(ValueError):
                frame = on_pull(int(query.parameters.get("round", "-1")))
                if frame is not None:
                    query.reply(query.key_expr, frame)

        self._kept.append(self._session.declare_queryable(key, on_query))

    def pull(self, key: str, round: int, on_frame: OnFrame) -> None:
        def on_reply(reply: Any) -> None:
            if reply.ok is not None:
                on_frame(reply.ok.payload.to_bytes())

        self._session.get(f"{key}?round={round}", on_reply, timeout=PULL_SECONDS)

    def announce(self, key: str) -> None:
        self._kept.append(self._session.liveliness().declare_token(key))

    def watch(self, key: str, on_presence: OnPresence) -> None:
        def on_sample(sample: Any) -> None:
            on_presence(sample.kind == zenoh.SampleKind.PUT)

        self._kept.append(self._session.liveliness().declare_subscriber(key, on_sample, history=True))

    def close(self) -> None:
        with suppress(zenoh.ZError):
            self._session.close()  # type: ignore[no-untyped-call]
        if self._watch is not None:
            self._watch.close()


def _port(endpoint: str) -> int | None:
    digits = endpoint.rpartition(":")[2].partition("?")[0]
    return int(digits) if digits.isdigit() else None
