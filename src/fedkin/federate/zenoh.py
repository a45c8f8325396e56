"""The `Transport` over zenoh, in peer mode: no router, no server, TLS on every link."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fedkin.errors import FedkinError, missing_dependency
from fedkin.federate.inbox import PeerError
from fedkin.federate.transports import OnFrame, OnPresence, OnPull

try:
    import zenoh
    import zenoh.handlers
except ImportError:
    raise missing_dependency("eclipse-zenoh", "the process of a site", "peer") from None

#: A pull that is not answered within so many seconds is asked again by the site.
PULL_SECONDS = 5.0
#: Largest payload that is looked at, unless a run needs more.
MOST_BYTES = 1 << 20
#: Where in zenoh's source code something was said.
_SOURCE = re.compile(r"\s+at \S*\.rs:\d+\.?(?!\d)")


class EndpointError(FedkinError, ValueError):
    """Links that cannot be opened on this machine, at any time."""


def not_opened(listen: Sequence[str], words: str) -> FedkinError:
    """What to raise, with the cure, when zenoh says these words instead of opening a session that listens there.

    A `PeerError` may pass, as when another process still has the port; an `EndpointError` does not.
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
            f"{why}; {host}, the host of this site, is not a name that this machine knows: add it to /etc/hosts or the "
            f"name server, or {again}; {nat}"
        )
    if f"os error {errno.EACCES}" in words:
        return EndpointError(f"{why}; this user may not listen there: use a port from 1024 on, {again}")
    return PeerError(why)


class ZenohTransport:
    """A zenoh session, configured by `fedkin.federate.transports`.

    ``on_link(common_name, address, opened)`` hears of every link that opens or closes; the name is None without TLS.
    ``on_refused(key, size)`` hears of payloads above ``most_bytes``, which are not even copied.
    """

    def __init__(
        self,
        configuration: Mapping[str, Any],
        on_link: Callable[[str | None, str, bool], None] | None = None,
        on_refused: Callable[[str, int], None] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._most_bytes, self._on_refused = most_bytes, on_refused or (lambda key, size: None)
        try:
            checked = zenoh.Config.from_json5(json.dumps(dict(configuration)))
        except zenoh.ZError as error:
            raise EndpointError(f"zenoh does not take its configuration: {_SOURCE.sub('', str(error))}") from None
        listen = configuration.get("listen", {}).get("endpoints", [])
        zenoh.init_log_from_env_or("error")  # unless RUST_LOG says something else
        try:
            self._session = zenoh.open(checked)
        except zenoh.ZError as error:
            raise not_opened(listen, str(error)) from None
        self._publishers: dict[str, Any] = {}

        def on_event(event: Any) -> None:
            if on_link is not None:
                on_link(event.link.auth_identifier, event.link.dst, event.kind == zenoh.SampleKind.PUT)

        self._kept: list[Any] = [self._session.info.declare_link_events_listener(on_event, history=True)]

    def publish(self, key: str, frame: bytes) -> None:
        publisher = self._publishers.get(key)
        if publisher is None:
            block = zenoh.CongestionControl.BLOCK
            publisher = self._session.declare_publisher(key, congestion_control=block, express=True)
            self._publishers[key] = publisher
        publisher.put(frame)

    def subscribe(self, key: str, on_frame: OnFrame) -> None:
        # in zenoh's own thread, which saves a thread and a switch for every frame: `on_frame` must not wait for anybody
        handler = zenoh.handlers.Callback(partial(self._hand, key, on_frame), indirect=False)
        self._kept.append(self._session.declare_subscriber(key, handler))

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

        self._kept.append(self._session.declare_queryable(key, on_query))

    def pull(self, key: str, round: int, on_frame: OnFrame) -> None:
        def on_reply(reply: Any) -> None:
            if reply.ok is not None:
                self._hand(key, on_frame, reply.ok)

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
