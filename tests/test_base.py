"""Files written in one step, and waits: `fedkin._base`."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path

import numpy as np
import pytest

from fedkin._base import (
    check_level,
    count,
    frozen,
    html_card,
    listed,
    percent,
    replacing,
    replacing_directory,
    some_of,
    wait_until,
    whole,
    write_arrays,
    write_file,
)
from fedkin.errors import ParameterError

pytestmark = pytest.mark.clocks


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "note.txt"
    write_file(path, "é\n", durable=durable)
    assert path.read_bytes() == "é\n".encode()
    with pytest.raises(OSError, match="no room"), replacing(path, durable=durable) as temporary:
        assert temporary.parent == tmp_path and temporary.suffix == ".txt"
        temporary.write_text("half")
        assert path.read_text(encoding="utf-8") == "é\n"
        raise OSError("no room")
    assert path.read_text(encoding="utf-8") == "é\n"
    assert held(tmp_path) == ["note.txt"]


def test_a_full_disk_names_the_place_and_keeps_what_was_there(tmp_path: Path) -> None:
    for make, name in ((replacing, "note.txt"), (replacing_directory, "model")):
        with make(tmp_path / name) as fresh:
            (fresh / "one.txt" if make is replacing_directory else fresh).write_text("old")
        with pytest.raises(OSError, match="so it was not written") as caught, make(tmp_path / name):
            raise OSError(errno.ENOSPC, "No space left on device")  # as writes raise it: without a name
        assert caught.value.filename == str(tmp_path / name)
    assert held(tmp_path) == ["model", "note.txt"]
    assert (tmp_path / "note.txt").read_text() == (tmp_path / "model" / "one.txt").read_text() == "old"


def test_a_private_file_is_private_from_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    path.chmod(0o644)
    before = os.umask(0)
    try:
        with replacing(path, private=True) as temporary:
            assert temporary.stat().st_mode & 0o777 == 0o600
            temporary.write_text("new")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "new"


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_keep_the_name_of_their_file(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "theta"  # numpy alone would write theta.npz
    write_arrays(path, {"theta": np.arange(3.0)}, compressed=compressed)
    assert held(tmp_path) == ["theta"]
    with np.load(path) as file:
        assert file["theta"].tolist() == [0.0, 1.0, 2.0]


def test_a_directory_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "model"
    for text in ("one", "two"):
        with replacing_directory(place) as fresh:
            (fresh / f"{text}.txt").write_text(text)
        assert held(place) == [f"{text}.txt"]
    with pytest.raises(OSError, match="no room"), replacing_directory(place) as fresh:
        (fresh / "three.txt").write_text("three")
        raise OSError("no room")
    assert held(place) == ["two.txt"]
    assert held(tmp_path) == ["model"]


def test_waiting_ends_with_success_or_with_the_time() -> None:
    looks: list[float] = []
    assert wait_until(lambda: looks.append(0.0) or len(looks) == 4, 60.0, pause=0.001)
    assert len(looks) == 4
    began = time.monotonic()
    assert not wait_until(lambda: False, 0.05, pause=0.001)
    assert time.monotonic() - began >= 0.05
    assert not wait_until(lambda: False, 0.0)  # it looks once


def test_pauses_grow_and_complaints_come_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pauses, complaints = [0.0], [], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    ended = wait_until(
        lambda: False, 100.0, pause=1.0, longest_pause=2.0, complain=complaints.append, silence=10.0, sleep=sleep
    )
    assert not ended and clock[0] == 100.0
    assert pauses[:3] == [1.0, 1.5, 2.0] and max(pauses) == 2.0
    assert len(complaints) == 4 and complaints[0] == 0.0 and complaints[1] >= 10.0
    assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(complaints))


def test_words_and_frozen_arrays() -> None:
    assert (count(0, "row"), count(1, "row"), count(2000, "row")) == ("0 rows", "1 row", "2,000 rows")
    assert listed(range(7)) == "0, 1, 2, 3, 4 and 2 more" and listed(["a"]) == "'a'"
    assert (whole(15362), some_of(range(4), 2)) == ("15,362", "0, 1 and 2 more")
    assert (percent(0.069, 1), percent(-0.25, sign=True), percent(float("nan"))) == ("6.9%", "-25%", "–")
    assert "&lt;b&gt;" in html_card("Graph", {"site": "<b>"})
    with pytest.raises(ParameterError, match="for 95%"):
        check_level(95)
    with pytest.raises(ValueError, match="read-only"):
        frozen(np.zeros(2))[0] = 1.0
