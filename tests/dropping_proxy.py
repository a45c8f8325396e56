"""A TCP proxy that can swallow everything for a while, like a cable that was pulled out."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards a local port to another one, unless it is cut."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.cut = False
        self.swallowed = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.cut:
                    # what TCP had promised is gone, so this connection is broken for good; its ends do not know yet
                    self.swallowed += len(data)
                    while source.recv(65536):
                        self.swallowed += 1
                    break
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                one.close()
