"""A device's log: private, structured, and bounded whatever an intruder does."""

from __future__ import annotations

import json
from pathlib import Path

from fedkin.federate import Journal


def test_lines_are_json_and_private(tmp_path: Path) -> None:
    journal = Journal("north", tmp_path / "log.jsonl")
    journal.write("info", "started", round=3)
    journal.close()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["device"], entry["event"], entry["round"]) == ("north", "started", 3)
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
