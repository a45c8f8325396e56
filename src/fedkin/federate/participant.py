"""Somebody who takes part in a run: a shard, a link to the others, and the state on disk.

What makes crashes harmless: the vector of a round is a function of the state after the round before. A site that
starts from an older state computes the same numbers again; the neighbours ignore what they know already, and hand out
their own last vectors, of which everybody keeps as many as lie between two durable states, and two more. A process
that is killed has its state with the kernel, at most `LAG_SECONDS` of rounds ago; a machine that lost power starts
from the last durable state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedkin._base import Array
from fedkin.admm import (
    MOST_PARAMS,
    RoundConfig,
    Saved,
    Sent,
    Shard,
    ShardState,
    ShareTaker,
    Store,
    is_shared,
    run_rounds,
)
from fedkin.errors import DataError, ModelFileError, ParameterError
from fedkin.federate.arrivals import Arrivals
from fedkin.federate.endpoint import Endpoint
from fedkin.federate.inbox import Patience, Stopped
from fedkin.federate.links import Arrays, ReplicatedLink, make_link
from fedkin.federate.plan import TOO_LONG, SitePlan, planned_rows
from fedkin.federate.records import MOST_SHARES, Journal, SiteStatus
from fedkin.federate.transports import Transport

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


class Participant:
    """A site, or the central machine, without the process: `run` does all rounds.

    ``checkpoint`` is where its state goes; in ``record`` a leader of replicas writes what it decided since then.
    ``left`` are neighbours that have left for good; ``arrivals`` the rows that arrive while it runs. ``tick`` is
    called after every round and several times a second while waiting; it may raise `Stopped`.
    """

    def __init__(
        self,
        plan: SitePlan,
        transport: Transport,
        journal: Journal,
        *,
        checkpoint: Path | None = None,
        record: Path | None = None,
        patience: Patience | None = None,
        left: Iterable[int] = (),
        arrivals: Arrivals | None = None,
        tick: Callable[[Participant], None] | None = None,
    ) -> None:
        self.arrivals = arrivals
        self.plan, self.journal, self._on_tick = plan, journal, tick
        self.shard = Shard(plan)
        self._rows = None if plan.rows is None else plan.rows.data.digest
        self.endpoint = Endpoint(plan, transport, journal, patience=patience, tick=self.tick, idle=self.settle)
        self.link = make_link(self.endpoint, self.shard, record)
        self._taker: ShareTaker | None = None
        if self.link.certifies and plan.n_params <= MOST_PARAMS:
            self._taker = ShareTaker(self.shard)
        self.kept: CheckpointFile | None = None
        if checkpoint is not None and self.link.keeps_state:
            end = self.endpoint
            self.kept = CheckpointFile(checkpoint, plan.run, plan.revision, end.name, end.hold, keep=end.keep)
            self._load(self.kept)
        if isinstance(self.link, ReplicatedLink):
            self.link.replay()
        self.drop(left)
        self._take_arrived(self.done)
        self.link.open()

    @property
    def done(self) -> int:
        """Rounds that are over."""
        return self.link.done

    @property
    def status(self) -> SiteStatus:
        """What the owner may want to know."""
        return self.endpoint.status

    def tick(self) -> None:
        """Tell the owner that this process is alive."""
        if self._on_tick is not None:
            self._on_tick(self)

    def settle(self) -> None:
        """Write the state after the last round, if that has not been done."""
        if self.kept is not None:
            self.kept.settle()

    def run(self) -> Array:
        """Do all rounds that are left, and return the averaged parameters ``(p,)``, of a central machine ``(V, p)``."""
        plan, status, link = self.plan, self.status, self.link
        link.gather()
        status.state, status.round = "running", self.done
        config = RoundConfig(
            plan.rounds,
            plan.wire,
            names=[self.endpoint.name] if plan.placement != "central" else None,
            hint=TOO_LONG,
            constrained=plan.constrained,
            save_every=plan.checkpoint_every,
            save_all=link.keeps_all,
            after=self._after,
        )
        try:
            run_rounds(self.shard, link, config, self)
            result = link.result()
        except Stopped:
            self.settle()
            raise
        finally:
            self._close()
        self.journal.write("info", "finished", round=self.done)
        status.state = "finished"
        return result

    def _after(self, t: int, change: float) -> None:
        self.status.round, self.status.change = t, change if math.isfinite(change) else None
        if self._taker is not None and (is_shared(t) or t == self.plan.rounds):
            share = vars(self._taker.take(t)).values()
            self.status.shares.append([one if math.isfinite(one) else None for one in share])
            del self.status.shares[:-MOST_SHARES]
        if self.arrivals is not None:
            if t % self.plan.checkpoint_every == 0 and t < self.plan.rounds:  # the state after it is safely on disk
                self.arrivals.look(t, self.shard.average[0])
            self._take_arrived(t)
        self.tick()

    def _take_arrived(self, t: int) -> None:
        """Go on, after round t, with the rows that count from the next round on."""
        if self.arrivals is None:
            return
        self.arrivals.tell(self.status)
        rows = self.arrivals.rows_from(t + 1)
        if rows is not None:
            self.shard.take_rows(*planned_rows(self.plan, self.arrivals.site, rows))
            if self._taker is not None:
                self._taker = ShareTaker(self.shard)
            self.status.shares.clear()  # of another objective

    def linger(self) -> None:
        """Stay until all others have finished, since they may need the last vectors."""
        self.link.linger(self._note_the_end)

    def _note_the_end(self) -> None:
        self.save(self.done, self.shard, True)
        self._close()

    def drop(self, gone: Iterable[int]) -> None:
        """Go on without neighbours that have left for good: their edges leave the objective, with duals set to 0.

        Only the site's own part changes, so neighbours of the same leaver need not agree on the round.
        """
        if new := self.endpoint.drop(gone):
            for v in sorted(new):
                self.journal.write("warning", "edge dropped", peer=self.plan.name(v), round=self.done)
            self.shard.drop(new)
            self.status.shares.clear()  # of another objective

    def save(self, t: int, shard: Shard, durable: bool) -> None:
        """Keep the state after round t."""
        if self.kept is not None:
            arrays = {**vars(shard.state()), **self.link.arrays()}
            header = {"left": sorted(self.endpoint.left), "over": self.link.over, "rows": self._rows}
            write = partial(self._write, self.kept, t, arrays, header, durable)
            if durable:
                write()
            else:
                self.kept.note(write)

    def _write(self, kept: CheckpointFile, t: int, arrays: Arrays, header: dict[str, Any], durable: bool) -> None:
        if kept.save(t, arrays, header, self.endpoint.unsaved(t), durable=durable):
            self.endpoint.saved(t)
            self.link.saved(t)

    def _load(self, kept: CheckpointFile) -> None:
        found = kept.load()
        if found is None:
            return
        if found.header.get("rows") != self._rows:
            raise ModelFileError(
                f"{kept.path} was computed from other rows: join again with the rows of before, or remove it, on all "
                "sites, to start from round 0"
            )
        self.link.over = found.header["over"]
        self.endpoint.recall(kept.sent(), found.round)
        state = {name: found.arrays.pop(name) for name in ShardState.__dataclass_fields__}
        self.link.restore(found.arrays, found.round)
        self.drop(found.header["left"])
        self.shard.restore(ShardState(**state))

    def _close(self) -> None:
        if self.kept is not None:
            self.kept.close()
