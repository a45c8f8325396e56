"""Whatever moment a process dies at, its store has a whole state, and nothing of another run or revision counts."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkin.admm import Saved, Sent, Store
from fedkin.errors import DataError, ParameterError
from fedkin.federate.participant import CheckpointFile

pytestmark = pytest.mark.clocks

KEEP = 4


def store(folder: Path, run: str = "run-1", revision: int = 0, **more: int) -> Store:
    return Store(folder / "state.db", run, revision, **({"sent": KEEP} | more))


def state(t: int, edges: int = 2) -> dict[str, np.ndarray]:
    return {
        "theta": np.full((1, 3), float(t)),
        "alpha": np.arange(edges * 3.0).reshape(edges, 3) * t,
        "table": np.zeros((0, 1)),
        "looked": np.array([t % 2 == 0]),
    }


def vectors(t: int) -> list[Sent]:
    return [Sent(1, t, np.full(3, float(t))), *([Sent(2, t, np.arange(6.0) * t)] if t % 2 == 0 else [])]


def save(made: Store, t: int, edges: int = 2, *, durable: bool = False) -> None:
    made.save(t, state(t, edges), {"left": [4]}, vectors(t), durable=durable)


def assert_state(found: Saved | None, t: int, edges: int = 2) -> None:
    assert found is not None and found.header == {"left": [4]} and found.round == t
    for name, part in state(t, edges).items():
        assert found.arrays[name].dtype == part.dtype and found.arrays[name].shape == part.shape
        assert found.arrays[name].tobytes() == part.tobytes()


def copied(folder: Path, to: Path) -> Path:
    """The files as they are now: what a process that dies leaves behind."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for path in folder.glob("state.db*"):
        shutil.copy(path, to)
    return to


def test_the_last_state_is_found(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with closing(store(tmp_path / "here")) as made:
        assert made.load() is None
        for t in range(1, 6):
            save(made, t)
            assert_state(store(copied(tmp_path / "here", tmp_path / "copy")).load(), t)
        there = copied(tmp_path / "here", tmp_path / "copy")
        for other in (store(there, run="run-2"), store(there, revision=1)):
            assert other.load() is None and other.sent() == [] and other.others() == [("run-1", 0, 5)]
        assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "here").iterdir())
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["state.db"]
    assert_state(store(tmp_path / "here").load(), 5)


@pytest.mark.parametrize("durable", [None, 2, 4])
def test_a_log_that_was_cut_off_or_lost_leaves_a_whole_state(tmp_path: Path, durable: int | None) -> None:
    """A kill cuts the log where a write ended; a loss of power cuts it anywhere, or takes all of it."""
    (tmp_path / "here").mkdir()
    with closing(store(tmp_path / "here")) as made:
        for t in range(1, 6):
            save(made, t, durable=t == durable)
        there = copied(tmp_path / "here", tmp_path / "copy")
    log = (there / "state.db-wal").read_bytes()
    file = (there / "state.db").read_bytes()
    reached = set()
    for cut in [*range(0, len(log), 509), len(log)]:
        for path in there.iterdir():
            path.unlink()
        (there / "state.db").write_bytes(file)
        (there / "state.db-wal").write_bytes(log[:cut])
        again = store(there)
        found = again.load()
        done = 0 if found is None else found.round
        if done:
            assert_state(found, done)
        assert [one.round for one in again.sent() if one.kind == 1] == list(range(max(done - KEEP, 0) + 1, done + 1))
        reached.add(done)
    assert reached == set(range(durable or 0, 6))


def test_states_of_other_sizes(tmp_path: Path) -> None:
    with closing(store(tmp_path)) as made:
        for t, edges in ((100, 2), (200, 1), (300, 500)):
            save(made, t, edges, durable=True)
            assert_state(made.load(), t, edges)


def test_what_was_sent_is_kept_for_some_rounds(tmp_path: Path) -> None:
    with closing(store(tmp_path)) as made:
        for t in range(1, 8):
            save(made, t)
        assert [(one.kind, one.round, one.values.tolist()) for one in made.sent()] == [
            (1, 4, [4.0] * 3),
            (2, 4, (np.arange(6.0) * 4).tolist()),
            (1, 5, [5.0] * 3),
            (1, 6, [6.0] * 3),
            (2, 6, (np.arange(6.0) * 6).tolist()),
            (1, 7, [7.0] * 3),
        ]


def test_a_full_disk_is_an_error_and_then_forgotten(tmp_path: Path) -> None:
    with closing(store(tmp_path)) as made:
        save(made, 1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            for _ in range(2):
                with pytest.raises(OSError, match=r"state\.db"):
                    save(made, 2, 5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert_state(made.load(), 1)
        save(made, 2, 5000)
        assert_state(made.load(), 2, 5000)


WRITER = """
import sys
from pathlib import Path
from test_store import save, store
made, t = store(Path(sys.argv[1])), int(sys.argv[2])
while True:
    save(made, t, durable=t % 50 == 0)
    print(t, flush=True)
    t += 1
"""


@pytest.mark.processes
def test_kill_9_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    reached = 0
    for rounds in (3, 60, 120):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(reached + 1)]
        child = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        try:
            for _ in range(rounds):
                reached = int(child.stdout.readline())
        finally:
            os.kill(child.pid, signal.SIGKILL)
            with child:
                rest = child.stdout.read().split()
        reached = max([reached, *map(int, rest)])
        found = store(tmp_path).load()
        # its line may not have been written any more
        assert found is not None and reached <= found.round <= reached + 1
        assert_state(found, found.round)
        reached = found.round


def kept(folder: Path, site: str = "d0", revision: int = 0, **more: Any) -> CheckpointFile:
    about = folder / "state.db", "run-1", revision, site
    return CheckpointFile(*about, lambda write, *_: write(), vectors, **{"keep": KEEP, **more})


def test_the_state_of_another_site_run_or_revision(tmp_path: Path) -> None:
    with closing(kept(tmp_path)) as made:
        made.keep(3, state(3), {"over": False}, durable=True)
    found = kept(tmp_path).load()
    assert found is not None and found.header == {"site": "d0", "over": False}
    with pytest.raises(DataError, match=r"state\.db is the state of d0, not of d1"):
        kept(tmp_path, "d1").load()
    with pytest.raises(ParameterError, match=r"another revision of this one \(after its round 3\)"):
        kept(tmp_path, revision=1).load()


def test_a_state_that_is_large_is_saved_where_it_must_be(tmp_path: Path) -> None:
    with closing(kept(tmp_path, most_bytes=100, lag=0.0)) as made:
        for t, size, durable, newest in ((1, 12, False, 1), (2, 13, False, 1), (3, 13, True, 3)):
            made.keep(t, {"theta": np.zeros(size)}, {}, durable=durable)
            assert made.load().round == newest  # type: ignore[union-attr]


def test_quick_rounds_are_written_together_and_the_newest_counts(tmp_path: Path) -> None:
    def on_disk() -> int:
        found = store(copied(tmp_path / "here", tmp_path / "copy")).load()
        return 0 if found is None else found.round

    (tmp_path / "here").mkdir()
    lazy = kept(tmp_path / "here", lag=3600.0)
    for t in (1, 2, 3, 4):
        lazy.keep(t, state(t), {}, durable=False)
    assert on_disk() == 1  # the first one at once: nothing had been written before
    lazy.settle()
    assert on_disk() == 4
    lazy.keep(5, state(5), {}, durable=False)
    lazy.keep(6, state(6), {}, durable=True)
    lazy.settle()
    assert on_disk() == 6  # what waited before is not written over it
    lazy.keep(7, state(7), {}, durable=False)
    lazy.end()
    assert on_disk() == 6
    slow = kept(tmp_path / "here", lag=0.0)
    for t in (7, 8):
        slow.keep(t, state(t), {}, durable=False)
        assert on_disk() == t
    slow.end()
