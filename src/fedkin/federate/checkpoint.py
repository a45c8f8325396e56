"""The state of one site on disk: where it goes on after a crash, and what it still can tell its neighbours.

What makes crashes harmless: the vector of a round is a function of the state after the round before. A site that
starts from an older state computes the same numbers again; the neighbours ignore what they know already, and hand out
their own last vectors, of which everybody keeps as many as lie between two durable states, and two more. A process that
is killed has its state with the kernel, at most `LAG_SECONDS` of rounds ago; a machine that lost power starts from the
last durable state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedkin.admm import Saved, Sent, Store
from fedkin.errors import DataError, ModelFileError, ParameterError

Arrays = Mapping[str, NDArray[Any]]
#: Calls a function until the disk takes what it writes: ``hold(write, path, round)``.
Hold = Callable[[Callable[[], None], Path, int], None]

#: Larger states are written with durable saves only.
MOST_BYTES = 4 << 20
#: Work that a process may lose when it is killed, and does again: quick rounds are written together.
LAG_SECONDS = 0.05


class CheckpointFile:
    """The file of one site; states of another run or revision are refused.

    ``hold(write, path, round)`` calls ``write`` until the disk takes it. Sent vectors are kept for ``keep`` rounds.
    States above ``most_bytes`` are written with durable saves only.

    `save` writes at once, `note` when ``lag`` seconds have gone by since the last write; `settle` writes what was noted
    last.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        revision: int,
        site: str,
        hold: Hold,
        *,
        keep: int = 1,
        most_bytes: int = MOST_BYTES,
        lag: float = LAG_SECONDS,
    ) -> None:
        self.path, self.site, self._hold = path, site, hold
        self._most_bytes, self._lag = most_bytes, lag
        self._store = Store(path, run, revision, sent=keep)
        self._noted: Callable[[], None] | None = None
        self._written = -math.inf

    def save(
        self, round: int, arrays: Arrays, header: Mapping[str, Any], sent: Sequence[Sent] = (), *, durable: bool
    ) -> bool:
        """Write the state after a round; False when it is too large for a save that is not durable."""
        if not durable and sum(part.nbytes for part in arrays.values()) > self._most_bytes:
            return False
        whole, self._noted = {"site": self.site, **header}, None
        self._hold(lambda: self._store.save(round, arrays, whole, sent, durable=durable), self.path, round)
        self._written = time.monotonic()
        return True

    def note(self, write: Callable[[], None]) -> None:
        """Call ``write``, which calls `save` with the state as it is now: now, or later unless a newer one is noted."""
        self._noted = write
        if time.monotonic() - self._written >= self._lag:
            self.settle()

    def settle(self) -> None:
        """Write what was noted and is not yet written."""
        write, self._noted = self._noted, None
        if write is not None:
            write()

    def load(self) -> Saved | None:
        """The last state, or None; raises when the file is damaged, or of another run, revision or site."""
        try:
            found = self._store.load()
            others = [] if found is not None else self._store.others()
        except ModelFileError as error:
            raise ModelFileError(f"{error}; docs/rounds.md, 'A checkpoint is damaged', says what can be done") from None
        if others:
            raise ParameterError(
                f"{self.path}: was written by another run, or by another revision of this one (after its round "
                f"{others[0][2]}); remove it to start from round 0, on all sites"
            )
        if found is not None and found.header.get("site") != self.site:
            raise DataError(
                f"{self.path} is the state of {found.header.get('site')}, not of {self.site}: put back that of "
                f"{self.site}; docs/rounds.md, 'A checkpoint is damaged', says what can be done without"
            )
        return found

    def sent(self) -> list[Sent]:
        """Vectors that were sent and are still kept, oldest first."""
        return self._store.sent()

    def close(self) -> None:
        """Close the file, without what was noted only; the next save opens it again."""
        self._noted = None
        self._store.close()
