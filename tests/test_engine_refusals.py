"""Refusals found in zenoh's log, and nothing else taken for one."""

from __future__ import annotations

import socket
import time

import pytest

from fedkin.federate.refusals import EndedConnections, LogReader, Refusal

ACCESS = "zenoh::net::routing::interceptor::access_control:"


def line(words: str, thread: int = 5, level: str = "TRACE") -> str:
    return f"2026-01-01T00:00:00.0Z {level} rx-0 ThreadId({thread:02d}) {words}\n"


def read(*lines: str) -> list[Refusal]:
    return LogReader({"ab12": "d3"}).read("".join(lines).encode())


def denied(key: str, thread: int = 5, flow: str = "ingress") -> str:
    subject = "ab12 on Interface(lo)+CertCommonName(d3)+Transport(Tls)+ab12"
    return line(f"{ACCESS} {subject} is unauthorized to Put ({flow}) on {key}", thread)


def test_what_zenoh_works_out_in_advance_is_no_refusal() -> None:
    caching = line(f"{ACCESS} ACL (ingress): caching permissions for `run/theta/d5` ...")
    assert read(caching, denied("run/theta/d5")) == []
    # another thread, another key, and what zenoh remembers of that work are refusals
    assert read(caching, denied("run/theta/d5", 6)) == [Refusal("d3", "Put", "run/theta/d5")]
    assert read(caching, denied("run/theta/d1")) == [Refusal("d3", "Put", "run/theta/d1")]
    cached = line(f"{ACCESS} Using cached result: ab12 is unauthorized to Put (ingress) on run/theta/d5")
    assert read(caching, cached) == [Refusal("d3", "Put", "run/theta/d5")]


def test_what_is_allowed_or_not_sent_is_no_refusal() -> None:
    allowed = f"{ACCESS} Using cached result: ab12 is authorized to Put (ingress) on run/theta/d3"
    assert read(denied("run/theta/d5", flow="egress"), line(allowed), "nonsense\n", "\n") == []


def test_links_that_were_refused() -> None:
    reader = LogReader({})
    words = "zenoh_link_tls::unicast: invalid peer certificate: BadSignature. Hint: increase the limit."
    assert reader.read(line(words, level="WARN").encode()) == []
    assert [why for _, why in reader.links] == ["invalid peer certificate: BadSignature"]
    away = "zenoh::net::runtime::orchestrator: Unable to connect to configured peer tls/192.0.2.1:7447! "
    bad = line(away + "Can not create a new link: invalid peer certificate: UnknownIssuer. Retry in 2s.")
    (found,) = reader.read(bad.encode())
    assert (found.peer, found.what, found.address) == ("192.0.2.1", "link", "tls/192.0.2.1:7447")
    assert "UnknownIssuer" in found.why
    bad = line(away + "Can not create: bad certificate at /build/zenoh/io/src/unicast.rs:253.. Retry in 2s.")
    assert [one.why for one in reader.read(bad.encode())] == ["Can not create: bad certificate"]
    words = "zenoh_link_tls::unicast: bad certificate at /build/a.rs:61. at /build/b.rs:338."
    assert reader.read(line(words, level="WARN").encode()) == []
    assert reader.links[-1][1] == "bad certificate"
    assert reader.read(line(away + "Connection refused. Retry in 2s.").encode()) == []


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernel_tells_which_connections_ended(family: int, host: str) -> None:
    with socket.socket(family) as listening:
        try:
            listening.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} here")
        listening.listen()
        watch = EndedConnections(listening.getsockname()[1])
        if watch._socket is None:
            pytest.skip("the system does not tell")
        coming = socket.create_connection(listening.getsockname()[:2])
        port = coming.getsockname()[1]
        listening.accept()[0].close()
        coming.close()
        found: list[str] = []
        deadline = time.monotonic() + 5
        while not found:
            found = watch.read()
            assert time.monotonic() < deadline
        assert found == [f"{host}:{port}" if family == socket.AF_INET else f"[{host}]:{port}"]
        watch.close()
