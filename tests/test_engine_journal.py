"""A site's log: private, structured, and bounded whatever an intruder does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedkin.federate import Journal

pytestmark = pytest.mark.clocks


def test_lines_are_json_and_private(tmp_path: Path) -> None:
    journal = Journal("north", tmp_path / "log.jsonl")
    journal.write("info", "started", round=3)
    journal.close()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["site"], entry["event"], entry["round"]) == ("north", "started", 3)
    assert (tmp_path / "log.jsonl").stat().st_mode & 0o077 == 0


def test_a_flood_of_refusals_takes_twenty_lines(tmp_path: Path) -> None:
    journal = Journal("north", tmp_path / "log.jsonl")
    for k in range(100_000):
        journal.sparingly("warning", "message refused", peer="south", why=f"reason {k}")
    journal.close()
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(lines) == 17
    assert json.loads(lines[-1])["times"] == 65536
    assert len(journal.counts) == 2


def test_what_others_choose_cannot_make_a_line_of_its_own(tmp_path: Path) -> None:
    """A certificate whose name, or a message whose reason, has a line break in it."""
    journal = Journal("north", tmp_path / "log.jsonl")
    forged = json.dumps({"site": "north", "event": "edge dropped", "peer": "south"})
    for end in ("\n", "\r\n", "\u2028", "\x00", "\x85"):
        journal.write("info", "link opened", peer=f"mallory{end}{forged}{end}")
    journal.close()
    lines = (tmp_path / "log.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 6 and lines[-1] == b""
    assert [json.loads(line)["event"] for line in lines[:-1]] == ["link opened"] * 5


def test_a_log_is_bounded_and_its_last_lines_are_kept(tmp_path: Path) -> None:
    journal = Journal("north", tmp_path / "log.jsonl", most_bytes=20_000)
    for k in range(5000):
        journal.write("info", "neighbour up", peer="south", k=k)
    journal.close()
    old, new = (tmp_path / name for name in ("log.jsonl.old", "log.jsonl"))
    assert old.stat().st_size + new.stat().st_size <= 40_000
    kept = [json.loads(line)["k"] for path in (old, new) for line in path.read_text().splitlines()]
    assert kept == list(range(kept[0], 5000)) and len(kept) > 150
    assert old.stat().st_mode & 0o077 == new.stat().st_mode & 0o077 == 0


def test_half_a_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "sta')
    journal = Journal("north", path)
    journal.write("info", "started")
    journal.close()
    assert json.loads(path.read_bytes().split(b"\n")[1])["event"] == "started"


def test_a_full_disk_costs_lines_only() -> None:
    journal = Journal("north", Path("/dev/full"))
    journal.write("info", "started")
    journal.close()
    assert journal.counts["log lines lost"] == 1
