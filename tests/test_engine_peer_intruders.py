"""Strangers get nothing and change nothing, not even with giant messages or connections that say nothing."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_problem
from federations import in_process
from fedkin.federate import Site, read_status
from fedkin.federate.inbox import Kind, encode
from fedkin.federate.program import spread_keys
from fedkin.federate.transports import link_configuration
from fedkin.federate.trust import Pair, issue, make_authority, make_key, make_request
from fleet import Fleet
from processes import PATIENCE, wait_for

zenoh = pytest.importorskip("zenoh")
pytestmark = pytest.mark.processes


def certified(authority: Pair, name: str) -> Pair:
    """A certificate that the authority would give to a site of that name, with another key than it has."""
    key = make_key()
    return Pair(issue(authority, make_request(name, key), ["127.0.0.1"]), key)


@contextmanager
def session(pair: Pair, trusted: bytes, target: str, mode: str = "client") -> Iterator[Any]:
    """A zenoh session of somebody with that key, connected to ``target``, without rules of his own.

    A peer sends only what somebody has subscribed to, so what is forged would never leave it; a client sends it.
    """
    configuration = link_configuration([], [target], None, pair, trusted)
    configuration["connect"]["timeout_ms"] = 20_000
    configuration["mode"] = mode
    opened = zenoh.open(zenoh.Config.from_json5(json.dumps(configuration)))
    try:
        yield opened
    finally:
        opened.close()


def listen(opened: Any) -> list[tuple[str, bytes]]:
    heard: list[tuple[str, bytes]] = []
    opened.declare_subscriber("**", lambda sample: heard.append((str(sample.key_expr), sample.payload.to_bytes())))
    return heard


def pulled(opened: Any, key: str) -> list[bytes]:
    return [reply.ok.payload.to_bytes() for reply in opened.get(f"{key}?round=1", timeout=1) if reply.ok is not None]


def crowd(query: Any) -> None:
    """Answer a query with a hundred false lists of keys."""
    with query:
        for k in range(100):
            query.reply(query.key_expr, b"%d" % k)


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Fleet]:
    """d0, d1 and d2 of six run and wait for the others, whose certificates the tests may borrow."""
    problem = small_problem(6)
    with Fleet.make(tmp_path / "fed", problem, 40) as fleet:
        fleet.start("d0", "d1", "d2")
        for name in ("d0", "d1", "d2"):
            fleet.wait_for_event(name, "waiting")
        yield fleet


def test_strangers_with_and_without_the_right_authority(waiting: Fleet, tmp_path: Path) -> None:
    fleet = waiting
    plan, authority = fleet.plan, fleet.heart.signing()
    run = plan.run
    forged = encode(plan.run_bytes, Kind.THETA, 1, 1, np.full(3, 9.0))
    foreign = make_authority("test")
    target = plan.members[0].endpoint
    with session(certified(foreign, "d1"), authority.certificate, target, "peer") as opened:
        heard = listen(opened)
        time.sleep(1.0)
        assert opened.info.peers_zid() == []  # not even a link
        opened.put(f"{run}/theta/d1", forged)
        assert pulled(opened, f"{run}/theta/d0") == []
        assert [one for one in heard if one[1] != forged] == []
    # d4 is a site of this federation, but no neighbour of d0 (ring with chords of three)
    assert 4 not in plan.neighbours(0)
    with session(fleet.pair("d4"), authority.certificate, plan.members[0].endpoint) as opened:
        heard = listen(opened)
        wait_for(lambda: len(opened.info.peers_zid()) == 1)
        opened.put(f"{run}/theta/d1", forged)
        opened.put(f"{run}/theta/d0", forged)
        for name in ("d0", "d1", "d4"):
            assert pulled(opened, f"{run}/theta/{name}") == []
            assert pulled(opened, f"{run}/ask/theta/d0/{name}") == []
        assert [one for one in heard if one[1] != forged] == []
        fleet.wait_for_event("d0", "link from a stranger: all it does is refused", peer="d4")


def test_a_neighbour_may_write_its_own_key_only_and_nonsense_is_refused(waiting: Fleet, tmp_path: Path) -> None:
    fleet = waiting
    plan, authority, run = fleet.plan, fleet.heart.signing(), fleet.plan.run
    true = encode(plan.run_bytes, Kind.THETA, 3, 1, np.zeros(3))
    with session(fleet.pair("d3"), authority.certificate, plan.members[0].endpoint) as opened:
        wait_for(lambda: len(opened.info.peers_zid()) == 1)
        # another's key: zenoh drops it, d0 goes on waiting for d5 although "its" theta was sent
        for name in ("d5", "d1", "d0"):
            opened.put(f"{run}/theta/{name}", encode(plan.run_bytes, Kind.THETA, 5, 1, np.zeros(3)))
            opened.put(f"{run}/live/{name}", b"")
        # what d0 publishes for its neighbours may be read by d3, what others publish may not
        wait_for(lambda: pulled(opened, f"{run}/ask/theta/d0/d3"), report=fleet.report)
        assert pulled(opened, f"{run}/ask/theta/d0/d1") == []
        assert pulled(opened, f"{run}/theta/d0") == []
        assert pulled(opened, f"{run}/theta/d1") == []
        assert pulled(opened, f"{run}/alpha/d0/d1") == []
        # its own key, but nonsense
        for frame in (
            b"",
            true[:-3],
            true + b"x",
            b"\xff" * 200,
            b"\x00" * 100_000,
            encode(b"another!", Kind.THETA, 3, 1, np.zeros(3)),
            encode(plan.run_bytes, Kind.THETA, 2, 1, np.zeros(3)),
            encode(plan.run_bytes, Kind.THETA, 3, 1, np.zeros(30)),
            encode(plan.run_bytes, Kind.THETA, 3, 1, np.array([0.0, np.nan, 0.0])),
            encode(plan.run_bytes, Kind.THETA, 3, 1, np.array([0.0, np.inf, 0.0])),
            *(np.random.default_rng(k).bytes(52) for k in range(2000)),
        ):
            # a put may be dropped when the link is busy, unless it blocks
            opened.put(f"{run}/theta/d3", frame, congestion_control=zenoh.CongestionControl.BLOCK)
        for round in (0, 7, 2**32 - 1):  # replays, and the far future
            frame = encode(plan.run_bytes, Kind.THETA, 3, round, np.zeros(3))
            opened.put(f"{run}/theta/d3", frame, congestion_control=zenoh.CongestionControl.BLOCK)
        fleet.wait_for_event("d0", "message refused", peer="d3")
        fleet.wait_for_event("d0", "old round ignored", peer="d3")
        fleet.wait_for_event("d0", "round too far ahead ignored", peer="d3")
        why = {entry["why"].split()[0] for entry in fleet.events("d0", "message refused")}
        assert len(why) >= 3
        still = fleet.events("d0", "waiting")[-1]
        assert set(still["peers"]) == {"d3", "d5"}
    assert all(child.poll() is None for child in fleet.children.values())
    # after all that, the run ends with the right bits
    fleet.start("d3", "d4", "d5")
    fleet.join()
    problem = small_problem(6)
    assert fleet.theta().tobytes() == in_process(problem, fleet.plan).average.tobytes()


def test_who_stands_in_for_a_neighbour_without_its_certificate_gets_no_link(tmp_path: Path) -> None:
    with Fleet.make(tmp_path / "fed", small_problem(3), 40) as fleet:
        authority, foreign = fleet.heart.signing(), make_authority("test")
        target = fleet.plan.members[0].endpoint
        configuration = link_configuration([target], [], None, certified(foreign, "d0"), authority.certificate)
        with zenoh.open(zenoh.Config.from_json5(json.dumps(configuration))) as impostor:
            fleet.start("d1")
            fleet.wait_for_event("d1", "waiting")
            assert impostor.info.peers_zid() == []
        assert fleet.events("d1", "link opened") == []


def test_files_are_private_and_say_nothing_about_others(tmp_path: Path) -> None:
    fleet = Fleet.make(tmp_path / "fed", small_problem(6), 5)
    for name in fleet.names:
        for path in fleet.place(name).rglob("*"):
            assert path.stat().st_mode & 0o077 == 0, path
    others = {f"d{u}" for u in range(6)} - {"d0"} - {f"d{v}" for v in fleet.plan.neighbours(0)}
    assert others
    text = b"".join(path.read_bytes() for path in fleet.place("d0").rglob("*") if path.is_file())
    assert not any(f'"{name}"'.encode() in text for name in others) and b'"d1"' in text


def test_an_expelled_site_gets_nothing_and_no_neighbour_has_to_do_anything(tmp_path: Path) -> None:
    """Not one message, although its certificate is still good, it asks for more, and it offers lists of keys itself."""
    problem = small_problem(4)
    with Fleet.make(tmp_path / "fed", problem, 100_000) as fleet:
        fleet.start()
        run, target = fleet.plan.run, fleet.plan.members[0].endpoint
        heard: list[bytes] = []
        with session(fleet.pair("d3"), fleet.heart.authority, target, "peer") as opened:
            opened.declare_subscriber(f"{run}/theta/d0", lambda sample: heard.append(sample.payload.to_bytes()))
            swallowed: list[Any] = []  # requests for lists: some are never answered, the others by many false ones
            for name in ("centre", "d1", "d3"):
                opened.declare_queryable(f"{run}/keys/{name}/d0", swallowed.append, complete=True)
                opened.declare_queryable(f"{run}/keys/{name}/d0", crowd, complete=True)
            wait_for(lambda: len(heard) > 20 and len(swallowed) > 5, report=fleet.report)
            assert pulled(opened, f"{run}/ask/done/d0/d3") == []  # not yet
            fleet.heart.expel("d3")
            assert spread_keys(fleet.heart, PATIENCE) == ["d0", "d1", "d2"]
            for name in ("d0", "d2"):
                fleet.wait_for_event(
                    name, "permanently out: its link is closed, and nothing more is sent to it", peer="d3"
                )
                fleet.wait_for_event(name, "edge dropped", peer="d3")
            fleet.wait_for_event("d0", "link from a stranger: all it does is refused", peer="d3")
            fleet.wait_for_round("d0", fleet.round("d0") + 50)
            before = len(heard)
            fleet.wait_for_round("d0", fleet.round("d0") + 200)
            assert len(heard) == before
            # the last theta that it got is of the round that was under way when the list came
            (dropped,) = [one["round"] for one in fleet.events("d0", "edge dropped")]
            assert max(int.from_bytes(frame[16:20], "little") for frame in heard) <= dropped + 1
            assert pulled(opened, f"{run}/ask/theta/d0/d3") == []


def test_a_thief_with_a_copied_directory_gets_and_says_nothing_once_the_site_is_admitted_again(tmp_path: Path) -> None:
    """No neighbour accepts anything: the list of keys comes from the site with the new key, which restarts nobody."""
    problem = small_problem(4)
    with Fleet.make(tmp_path / "fed", problem, 6000) as fleet, ExitStack() as stack:
        fleet.start()
        run, near = fleet.plan.run, ("d0", "d2")
        stolen = fleet.pair("d3")
        heard: dict[str, list[float]] = {name: [] for name in near}
        links = {}
        for name in near:
            target = next(one.endpoint for one in fleet.plan.members if one.name == name)
            links[name] = stack.enter_context(session(stolen, fleet.heart.authority, target, "peer"))
            times = heard[name]
            links[name].declare_subscriber(f"{run}/theta/{name}", lambda _, times=times: times.append(time.monotonic()))
            wait_for(lambda times=times: len(times) > 20, report=fleet.report)
        request, _ = Site.read(fleet.place("d3")).renew()
        done = fleet.heart.admit(request, again=True)
        admitted = time.monotonic()
        Site.read(fleet.place("d3")).accept(done.path)
        for name in near:
            fleet.wait_for_event(name, "key replaced: links with the old one are refused", peer="d3")
            fleet.wait_for_event(name, "link with a key that is not on the list: all it does is refused", peer="d3")
        fleet.signal("d1", signal.SIGSTOP)  # the thief has five seconds; rounds wait
        time.sleep(max(0.0, admitted + 5.0 - time.monotonic()))
        fleet.signal("d1", signal.SIGCONT)
        for name, opened in links.items():
            assert pulled(opened, f"{run}/ask/theta/{name}/d3") == []
            t = fleet.round(name)
            for round in range(t, t + 200):  # a theta of d3 that would be taken
                forged = encode(fleet.plan.run_bytes, Kind.THETA, 3, round, np.full(3, 9.0))
                opened.put(f"{run}/theta/d3", forged, congestion_control=zenoh.CongestionControl.BLOCK)
            assert "a key of d3 that is not on the list" in str(read_status(fleet.place(name)).why)
        before = [len(times) for times in heard.values()]
        fleet.wait_for_round("d0", fleet.round("d0") + 200)
        assert [len(times) for times in heard.values()] == before
        assert all(max(times) < admitted + 5.0 for times in heard.values())
        fleet.join()
        expected = in_process(problem, fleet.plan).average
        assert fleet.theta().tobytes() == expected.tobytes(), fleet.report()


def test_a_copy_of_a_key_in_use_is_noticed(waiting: Fleet) -> None:
    event = "two links with one key: is there a copy of the site's directory?"
    with session(waiting.pair("d1"), waiting.heart.authority, waiting.plan.members[0].endpoint, "peer"):
        waiting.wait_for_event("d0", event, peer="d1")
        wait_for(lambda: "have the same key of d1" in str(read_status(waiting.place("d0")).why))
    assert {entry["peer"] for entry in waiting.events("d0", event)} == {"d1"}
    assert waiting.events("d2", event) == []


@pytest.mark.parametrize("placement", ["peer", "central"])
def test_certificates_that_end_soon_are_renewed_by_themselves(tmp_path: Path, placement: str) -> None:
    """With a central machine nobody does anything; between peers the organiser says ``federation renew``."""
    problem, compare = small_problem(3), {"compare_every": 0} if placement == "central" else {}
    with Fleet.make(tmp_path / "fed", problem, 4000, placement=placement, **compare) as fleet:
        heart, names = fleet.heart, [one.name for one in fleet.heart.members]
        for name in names:
            request = fleet.place(name) / f"{name}.request"
            old = heart.admit(request, again=True, now=datetime.now(UTC) - timedelta(days=12))
            Site.read(fleet.place(name)).accept(old.path)
        keys = {name: Site.read(fleet.place(name)).key for name in names}
        fleet.start()
        if placement == "peer":
            fleet.wait_for_round("d1", 20)
            assert spread_keys(heart, PATIENCE) == names
        for name in names:
            fleet.wait_for_event(name, "certificate renewed: links are reopened")
            site = Site.read(fleet.place(name))
            assert not site.renewal_due() and site.key == keys[name] and fleet.round(name) < 4000
        if placement == "peer":
            fleet.join()
            assert fleet.theta().tobytes() == in_process(problem, fleet.plan).average.tobytes()


def test_a_certificate_is_renewed_while_the_rounds_go_on(tmp_path: Path) -> None:
    problem = small_problem(3)
    with Fleet.make(tmp_path / "fed", problem, 4000) as fleet:
        fleet.start()
        fleet.wait_for_round("d1", 20)
        place = fleet.place("d1")
        old = Site.read(place).certificate
        request, by_itself = Site.read(place).renew()
        assert by_itself
        Site.read(place).accept(fleet.heart.admit(request).path)
        fleet.wait_for_event("d1", "certificate renewed: links are reopened")
        assert fleet.round("d1") < 4000 and Site.read(place).certificate != old
        fleet.join()
        assert fleet.theta().tobytes() == in_process(problem, fleet.plan).average.tobytes()


# --- what can be done from outside -----------------------------------------------------------------------------------


def resident(pid: int) -> float:
    """Resident memory of a process, in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def test_a_giant_message_from_a_neighbour_takes_no_memory(tmp_path: Path) -> None:
    with Fleet.make(tmp_path / "fed", small_problem(3), 40) as fleet:
        fleet.start("d0")
        fleet.wait_for_event("d0", "waiting")
        pid = fleet.children["d0"].pid
        before = resident(pid)
        authority, plan = fleet.heart.signing(), fleet.plan
        with session(fleet.pair("d1"), authority.certificate, plan.members[0].endpoint) as opened:
            wait_for(lambda: len(opened.info.peers_zid()) == 1)
            block = zenoh.CongestionControl.BLOCK
            opened.put(f"{plan.run}/theta/d1", bytes(600_000_000), congestion_control=block)
            # longer than the largest message, and short enough to be put together
            opened.put(f"{plan.run}/theta/d1", bytes(20_000), congestion_control=block)
            fleet.wait_for_event("d0", "message refused", peer="d1")
        assert resident(pid) - before < 50
        assert fleet.children["d0"].poll() is None


def test_connections_that_say_nothing_do_not_keep_neighbours_out(tmp_path: Path) -> None:
    """400 of them; what a process needs to start is not counted."""
    with Fleet.make(tmp_path / "fed", small_problem(2), 5) as fleet, ExitStack() as held:
        host, port = fleet.plan.members[0].endpoint.partition("/")[2].split(":")
        fleet.start("d0")
        wait_for(lambda: _connected(host, int(port)))
        for _ in range(400):
            held.enter_context(closing(socket.create_connection((host, int(port)), PATIENCE)))
        launched = time.monotonic()
        fleet.start("d1")
        fleet.wait_for_event("d1", "started")
        began = time.monotonic()
        fleet.wait_for_event("d1", "finished")
        # three times what it takes a process to start, which is long on a busy machine
        assert time.monotonic() - began < max(5.0, 3 * (began - launched))
        fleet.join()


def _connected(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True
