"""Whoever is not allowed in gets nothing and changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_problem
from federations import in_process, place
from fedkin._base import write_file
from fedkin.federate import (
    AUTHORITY_KEY,
    Kind,
    ManifestError,
    Pair,
    SecurityError,
    encode,
    load_manifest,
    make_authority,
    with_absolute_paths,
)
from fedkin.federate.contract.reading import AUTHORITY, MANIFEST, load_rows
from fedkin.federate.trust.security import issue, link_configuration
from fleet import Fleet
from processes import wait_for

zenoh = pytest.importorskip("zenoh")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def authority_of(fleet: Fleet) -> Pair:
    return Pair((fleet.directory / AUTHORITY).read_bytes(), (fleet.directory / AUTHORITY_KEY).read_bytes())


@contextmanager
def session(
    folder: Path, authority: Pair, trusted: bytes, name: str, target: str, mode: str = "client"
) -> Iterator[Any]:
    """A zenoh session of somebody with the certificate ``name``, connected to ``target``, without rules of his own.

    A peer sends only what somebody has subscribed to, so what is forged would never leave it; a client sends it.
    """
    folder.mkdir()
    pair = issue(authority, name, ["127.0.0.1"])
    for file, content in (("ca.crt", trusted), ("device.crt", pair.certificate), ("device.key", pair.key)):
        write_file(folder / file, content, private=True)
    configuration = link_configuration([], [target], [])
    del configuration["access_control"]
    configuration["connect"]["timeout_ms"] = 2000
    configuration["mode"] = mode
    opened = zenoh.open(zenoh.Config.from_json5(json.dumps(with_absolute_paths(configuration, folder))))
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


def events(fleet: Fleet, name: str, event: str) -> list[dict[str, Any]]:
    return [entry for entry in fleet.log(name) if entry["event"] == event]


def wait_for_event(fleet: Fleet, name: str, event: str, **fields: object) -> None:
    wait_for(lambda: any(fields.items() <= entry.items() for entry in events(fleet, name, event)), report=fleet.report)


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Fleet]:
    """d0, d1 and d2 of six run and wait for the others, whose certificates the tests may borrow."""
    problem = small_problem(6)
    with Fleet.make(tmp_path / "fed", problem, 40) as fleet:
        fleet.start("d0", "d1", "d2")
        for name in ("d0", "d1", "d2"):
            wait_for_event(fleet, name, "waiting")
        yield fleet


def test_strangers_with_and_without_the_right_authority(waiting: Fleet, tmp_path: Path) -> None:
    fleet = waiting
    manifest, authority = fleet.manifest, authority_of(fleet)
    run = manifest.run
    forged = encode(manifest.run_bytes, Kind.THETA, 1, 1, np.full(3, 9.0))
    foreign = make_authority("test")
    target = manifest.members[0].endpoint
    with session(tmp_path / "foreign", foreign, authority.certificate, "d1", target, "peer") as opened:
        heard = listen(opened)
        time.sleep(1.0)
        assert opened.info.peers_zid() == []  # not even a link
        opened.put(f"{run}/theta/d1", forged)
        assert pulled(opened, f"{run}/theta/d0") == []
        assert [one for one in heard if one[1] != forged] == []
    # d4 is a device of this federation, but no neighbour of d0 (ring with chords of three)
    assert 4 not in manifest.neighbours(0).tolist()
    with session(tmp_path / "other", authority, authority.certificate, "d4", manifest.members[0].endpoint) as opened:
        heard = listen(opened)
        wait_for(lambda: len(opened.info.peers_zid()) == 1)
        opened.put(f"{run}/theta/d1", forged)
        opened.put(f"{run}/theta/d0", forged)
        for name in ("d0", "d1", "d4"):
            assert pulled(opened, f"{run}/theta/{name}") == []
            assert pulled(opened, f"{run}/ask/theta/d0/{name}") == []
        assert [one for one in heard if one[1] != forged] == []
        wait_for_event(fleet, "d0", "link from a stranger: all it does is refused", peer="d4")


def test_a_neighbour_may_write_its_own_key_only_and_nonsense_is_refused(waiting: Fleet, tmp_path: Path) -> None:
    fleet = waiting
    manifest, authority, run = fleet.manifest, authority_of(fleet), fleet.manifest.run
    true = encode(manifest.run_bytes, Kind.THETA, 3, 1, np.zeros(3))
    with session(tmp_path / "d3", authority, authority.certificate, "d3", manifest.members[0].endpoint) as opened:
        wait_for(lambda: len(opened.info.peers_zid()) == 1)
        # another's key: zenoh drops it, d0 goes on waiting for d5 although "its" theta was sent
        for name in ("d5", "d1", "d0"):
            opened.put(f"{run}/theta/{name}", encode(manifest.run_bytes, Kind.THETA, 5, 1, np.zeros(3)))
            opened.put(f"{run}/live/{name}", b"")
        # what d0 publishes for its neighbours may be read by d3, what others publish may not
        assert pulled(opened, f"{run}/ask/theta/d0/d3") != []
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
            encode(manifest.run_bytes, Kind.THETA, 2, 1, np.zeros(3)),
            encode(manifest.run_bytes, Kind.THETA, 3, 1, np.zeros(30)),
            encode(manifest.run_bytes, Kind.THETA, 3, 1, np.array([0.0, np.nan, 0.0])),
            encode(manifest.run_bytes, Kind.THETA, 3, 1, np.array([0.0, np.inf, 0.0])),
            *(np.random.default_rng(k).bytes(52) for k in range(2000)),
        ):
            # a put may be dropped when the link is busy, unless it blocks
            opened.put(f"{run}/theta/d3", frame, congestion_control=zenoh.CongestionControl.BLOCK)
        for round in (0, 7, 2**32 - 1):  # replays, and the far future
            frame = encode(manifest.run_bytes, Kind.THETA, 3, round, np.zeros(3))
            opened.put(f"{run}/theta/d3", frame, congestion_control=zenoh.CongestionControl.BLOCK)
        wait_for_event(fleet, "d0", "message refused", peer="d3")
        wait_for_event(fleet, "d0", "old round ignored", peer="d3")
        wait_for_event(fleet, "d0", "round too far ahead ignored", peer="d3")
        why = {entry["why"].split()[0] for entry in events(fleet, "d0", "message refused")}
        assert len(why) >= 3
        still = events(fleet, "d0", "waiting")[-1]
        assert set(still["peers"]) == {"d3", "d5"}
    assert all(child.poll() is None for child in fleet.children.values())
    # after all that, the run ends with the right bits
    fleet.start("d3", "d4", "d5")
    fleet.join()
    problem = small_problem(6)
    assert fleet.theta().tobytes() == in_process(problem, fleet.manifest).gather("average").tobytes()


def test_who_stands_in_for_a_neighbour_without_its_certificate_gets_no_link(tmp_path: Path) -> None:
    with Fleet.make(tmp_path / "fed", small_problem(3), 40) as fleet:
        authority, foreign = authority_of(fleet), make_authority("test")
        target = fleet.manifest.members[0].endpoint
        folder = tmp_path / "impostor"
        folder.mkdir()
        pair = issue(foreign, "d0", ["127.0.0.1"])
        for file, content in (
            ("ca.crt", authority.certificate),
            ("device.crt", pair.certificate),
            ("device.key", pair.key),
        ):
            write_file(folder / file, content, private=True)
        configuration = link_configuration([target], [], [])
        del configuration["access_control"]
        with zenoh.open(zenoh.Config.from_json5(json.dumps(with_absolute_paths(configuration, folder)))) as impostor:
            fleet.start("d1")
            wait_for_event(fleet, "d1", "waiting")
            assert impostor.info.peers_zid() == []
        assert events(fleet, "d1", "link opened") == []


def test_files_are_private_and_changes_are_noticed(tmp_path: Path) -> None:
    fleet = Fleet.make(tmp_path / "fed", small_problem(3), 5)
    for path in fleet.directory.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    own = place(fleet.directory, "d1")
    assert not any("key" in path.name for path in own.iterdir() if path.name not in ("device.key",))
    rows = own / "rows.npz"
    manifest = load_manifest(own)
    assert load_rows(own, manifest, 1).X.shape == (12, 3)
    rows.chmod(0o640)
    with pytest.raises(SecurityError, match="others may read"):
        load_rows(own, manifest, 1)
    text = (own / MANIFEST).read_bytes()
    (own / MANIFEST).write_bytes(text.replace(b'"rounds": 5', b'"rounds": 6'))
    with pytest.raises(SecurityError, match="changed after signing"):
        load_manifest(own)
    (own / MANIFEST).write_bytes(text)
    assert load_manifest(own).shared() == load_manifest(fleet.directory).shared()
    (own / AUTHORITY).write_bytes(make_authority("test").certificate)
    with pytest.raises(SecurityError):
        load_manifest(own)
    with pytest.raises(ManifestError, match="not the directory"):
        load_manifest(tmp_path)
