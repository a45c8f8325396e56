"""Whatever moment a process dies at, its trail has a whole state, and nothing of another boot or run counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedkin.federate.trail import MOST_BYTES, Trail

RUN, BOOT = b"run-0001", bytes(range(16))


def trail(folder: Path, run: bytes = RUN, boot: bytes = BOOT) -> Trail:
    return Trail(folder / "state.npz", run, boot)


def state(t: int, edges: int = 2) -> dict[str, np.ndarray]:
    return {
        "theta": np.full((1, 3), float(t)),
        "alpha": np.arange(edges * 3.0).reshape(edges, 3) * t,
        "table": np.zeros((0, 1)),
        "looked": np.array([t % 2 == 0]),
    }


def assert_state(found: object, t: int, edges: int = 2) -> None:
    arrays, header = found  # type: ignore[misc]
    assert header == {"left": [4], "round": t}
    for name, part in state(t, edges).items():
        assert arrays[name].dtype == part.dtype and arrays[name].shape == part.shape
        assert arrays[name].tobytes() == part.tobytes()


def test_the_last_whole_state_is_found(tmp_path: Path) -> None:
    made = trail(tmp_path)
    assert made.last() is None
    for t in range(1, 6):
        made.mark(t, state(t), {"left": [4]})
        assert_state(trail(tmp_path).last(), t)
    # another run, another boot
    assert trail(tmp_path, run=b"run-0002").last() is None
    assert trail(tmp_path, boot=bytes(16)).last() is None
    assert (tmp_path / "state.now").stat().st_mode & 0o077 == 0


def test_a_write_that_was_cut_off_leaves_the_state_before(tmp_path: Path) -> None:
    made = trail(tmp_path)
    for t in (1, 2):
        made.mark(t, state(t), {"left": [4]})
    path = tmp_path / "state.now"
    before = path.read_bytes()
    made.mark(3, state(3), {"left": [4]})
    after = path.read_bytes()
    places = [k for k in range(len(after)) if after[k : k + 1] != before[k : k + 1]]
    assert places
    for cut in range(places[0], places[-1] + 1):
        # the kernel had copied everything up to here
        path.write_bytes(after[:cut] + before[cut:])
        assert_state(trail(tmp_path).last(), 2)
    path.write_bytes(after)
    assert_state(trail(tmp_path).last(), 3)


def test_a_state_of_another_size_and_one_that_is_too_large(tmp_path: Path) -> None:
    made = trail(tmp_path)
    made.mark(1, state(1), {"left": [4]})
    made.mark(2, state(2, 1), {"left": [4]})
    assert_state(made.last(), 2, 1)
    made.mark(3, state(3, 500), {"left": [4]})
    assert_state(made.last(), 3, 500)
    made.mark(4, {"theta": np.zeros(MOST_BYTES)}, {"left": [4]})
    assert_state(made.last(), 3, 500)


@pytest.mark.parametrize("cut", range(1, 40))
def test_what_was_sent(tmp_path: Path, cut: int) -> None:
    made = trail(tmp_path)
    for t in (1, 2, 3):
        made.remember(1, t, np.arange(t * 1.0))
    path = tmp_path / "state.sent"
    path.write_bytes(path.read_bytes()[:-cut])
    again = trail(tmp_path)
    assert [(kind, t, values.tolist()) for kind, t, values in again.sent()] == [(1, 1, [0.0]), (1, 2, [0.0, 1.0])]
    # what follows a record that was cut off is found, too
    again.remember(2, 3, np.ones(1))
    assert [t for _, t, _ in trail(tmp_path).sent()] == [1, 2, 3]
    assert trail(tmp_path, boot=bytes(16)).sent() == []
    again.forget()
    assert trail(tmp_path).sent() == []
