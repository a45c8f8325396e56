"""What a device writes in every round, so that a process that is killed goes on exactly where it was.

Two files next to the checkpoint. ``NAME.now`` has two places for the state after a round, written in turn, so that one
of them is whole whenever the process dies. ``NAME.sent`` gets every vector before it is sent, and is emptied when a
checkpoint has been written. Neither waits for the disk: what a killed process has written is with the kernel, and that
is enough. It is not enough when the machine loses power; then the number of the boot differs, these files do not count,
and the device goes back to its checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.federate.trust.security import PRIVATE_FILE

#: Larger states are written with checkpoints only.
MOST_BYTES = 4 << 20
_HEAD = struct.Struct("<8s16s8sQII")  # magic, boot, run, round, bytes of the description, bytes of the arrays
_TAIL = struct.Struct("<Q")  # the round again: written last
_SENT = struct.Struct("<BQI")  # kind, round, numbers
_MAGIC = b"fedkin-2"


def boot_number() -> bytes | None:
    """16 bytes that are new whenever the machine starts; None where the system does not say."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return None


class Trail:
    """The two files of one device.

    Parameters
    ----------
    checkpoint : path
        The files are next to it.
    run : bytes
        8 bytes; files of another run do not count.
    boot : bytes
        From `boot_number`.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from fedkin.federate.trail import Trail
    >>> folder = tempfile.TemporaryDirectory()
    >>> trail = Trail(Path(folder.name) / "state.npz", b"run-0001", bytes(16))
    >>> trail.mark(7, {"theta": np.array([0.5, 1.0])}, {"left": []})
    >>> again = Trail(Path(folder.name) / "state.npz", b"run-0001", bytes(16))
    >>> again.last()
    ({'theta': array([0.5, 1. ])}, {'left': [], 'round': 7})
    >>> folder.cleanup()
    """

    def __init__(self, checkpoint: Path, run: bytes, boot: bytes) -> None:
        self._run, self._boot = run, boot
        flags = os.O_RDWR | os.O_CREAT
        self._now = os.open(checkpoint.with_suffix(".now"), flags, PRIVATE_FILE)
        self._sent = os.open(checkpoint.with_suffix(".sent"), flags, PRIVATE_FILE)
        self._place_bytes = 0
        self._end = 0
        self._described: tuple[object, bytes] = (None, b"")

    def close(self) -> None:
        """Close the files."""
        for number in (self._now, self._sent):
            with suppress(OSError):
                os.close(number)

    # --- the state after a round ---

    def mark(self, round: int, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]) -> None:
        """Write the state after a round; that of the round before stays until the next one."""
        parts = [np.ascontiguousarray(part) for part in arrays.values()]
        size = sum(part.nbytes for part in parts)
        if size > MOST_BYTES:
            return
        shapes = (tuple(arrays), tuple((part.dtype.str, part.shape) for part in parts), repr(header))
        if self._described[0] != shapes:
            layout = {name: [part.dtype.str, part.shape] for name, part in zip(arrays, parts, strict=True)}
            self._described = shapes, json.dumps({"arrays": layout, "header": dict(header)}).encode()
        text = self._described[1]
        length = _HEAD.size + len(text) + size + _TAIL.size
        if length > self._place_bytes:
            # places of another size would overlap
            os.ftruncate(self._now, 0)
            self._place_bytes = -(-length // 4096) * 4096
        head = _HEAD.pack(_MAGIC, self._boot, self._run, round, len(text), size)
        filled = [part.data for part in parts if part.size]
        written = os.pwritev(self._now, [head, text, *filled, _TAIL.pack(round)], round % 2 * self._place_bytes)
        if written != length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def last(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
        """The arrays and the header of the last whole mark, with its ``round``; None if this boot has none."""
        found = [one for one in self._marks() if one is not None]
        return max(found, key=lambda one: one[1]["round"], default=None)

    def _marks(self) -> Iterator[tuple[dict[str, NDArray[Any]], dict[str, Any]] | None]:
        content = os.pread(self._now, os.fstat(self._now).st_size, 0)
        # the second place begins at the only other multiple of a page that has a head
        starts = [at for at in range(0, len(content), 4096) if content[at : at + 8] == _MAGIC]
        for at in starts:
            yield self._read_mark(content, at)

    def _read_mark(self, content: bytes, at: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
        try:
            _, boot, run, round, described, size = _HEAD.unpack_from(content, at)
            (again,) = _TAIL.unpack_from(content, at + _HEAD.size + described + size)
            if boot != self._boot or run != self._run or again != round:
                return None
            text = json.loads(content[at + _HEAD.size : at + _HEAD.size + described])
            arrays, place = {}, at + _HEAD.size + described
            for name, (kind, shape) in text["arrays"].items():
                count = int(np.prod(shape, dtype=np.int64))
                arrays[name] = np.frombuffer(content, np.dtype(kind), count, place).reshape(shape).copy()
                place += arrays[name].nbytes
            return arrays, {**text["header"], "round": round}
        except (struct.error, ValueError, KeyError, TypeError):
            return None

    # --- what was sent since the checkpoint ---

    def remember(self, kind: int, round: int, values: NDArray[np.float64]) -> None:
        """Write down a vector that is going to be sent."""
        head = self._boot + self._run + _SENT.pack(kind, round, values.size)
        numbers = np.ascontiguousarray(values, dtype=np.float64)
        written = os.pwritev(self._sent, [head, numbers.data], self._end)
        if written != len(head) + numbers.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += written

    def sent(self) -> list[tuple[int, int, NDArray[np.float64]]]:
        """Kind, round and numbers of what was sent since the last checkpoint; what was cut off by a kill is removed."""
        content, at = os.pread(self._sent, os.fstat(self._sent).st_size, 0), 0
        ours, size = self._boot + self._run, 24 + _SENT.size
        found = []
        while at + size <= len(content):
            kind, round, count = _SENT.unpack_from(content, at + 24)
            end = at + size + 8 * count
            if content[at : at + 24] != ours or end > len(content):
                break
            found.append((kind, round, np.frombuffer(content, np.float64, count, at + size).copy()))
            at = end
        os.ftruncate(self._sent, at)
        self._end = at
        return found

    def forget(self) -> None:
        """Empty the list of what was sent: a checkpoint has it."""
        os.ftruncate(self._sent, 0)
        self._end = 0
