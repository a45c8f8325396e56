"""What can be done to a site from outside: giant messages, connections that say nothing."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from builders import small_problem
from fleet import Fleet
from processes import PATIENCE, wait_for
from test_engine_peer_intruders import session

zenoh = pytest.importorskip("zenoh")
pytestmark = pytest.mark.processes


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
            fleet.wait_for_event("d0", "message refused", lambda entry: entry["peer"] == "d1")
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
