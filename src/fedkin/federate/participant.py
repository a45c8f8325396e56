"""Somebody who takes part in a run: a shard, a link to the others, and the state on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from fedkin._base import Array
from fedkin.admm import MOST_PARAMS, RoundConfig, Shard, ShardState, ShareTaker, is_shared, run_rounds
from fedkin.errors import DataError, ModelFileError
from fedkin.federate.checkpoint import CheckpointFile
from fedkin.federate.endpoint import Endpoint
from fedkin.federate.inbox import Patience, Status, Stopped
from fedkin.federate.journal import Journal
from fedkin.federate.links import Arrays, NeighbourLink, ReplicatedLink, make_link
from fedkin.federate.plan import TOO_LONG, SitePlan
from fedkin.federate.transports import Transport


class Participant:
    """A site, or the central machine, without the process: `run` does all rounds.

    ``checkpoint`` is where its state goes; in ``record`` a leader of replicas writes what it decided since then.
    ``left`` are neighbours that have left for good. ``tick`` is called after every round and several times a second
    while waiting; it may raise `Stopped`.
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
        tick: Callable[[Participant], None] | None = None,
    ) -> None:
        self.plan, self.journal, self._on_tick = plan, journal, tick
        self.shard = Shard(plan)
        self.endpoint = Endpoint(plan, transport, journal, patience=patience, tick=self.tick, idle=self.settle)
        self.link = make_link(self.endpoint, self.shard, record)
        self._taker: ShareTaker | None = None
        if isinstance(self.link, NeighbourLink) and plan.n_params <= MOST_PARAMS:
            self._taker = ShareTaker(self.shard)
        self.kept: CheckpointFile | None = None
        if checkpoint is not None and self.link.keeps_state:
            end = self.endpoint
            self.kept = CheckpointFile(checkpoint, plan.run, plan.revision, end.name, end.hold, keep=end.keep)
            self._load(self.kept)
        if isinstance(self.link, ReplicatedLink):
            self.link.replay()
        self.drop(left)
        self.link.open()

    @property
    def done(self) -> int:
        """Rounds that are over."""
        return self.link.done

    @property
    def status(self) -> Status:
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
        self.status.round, self.status.change = t, change
        if self._taker is not None and (is_shared(t) or t == self.plan.rounds):
            self.status.shares.append(self._taker.take(t))
        self.tick()

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
            header = {"left": sorted(self.endpoint.left), "over": self.link.over}
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
        self.link.over = found.header["over"]
        self.endpoint.recall(kept.sent(), found.round)
        state = {name: found.arrays.pop(name) for name in ShardState.__dataclass_fields__}
        self.link.restore(found.arrays, found.round)
        self.drop(found.header["left"])
        try:
            self.shard.restore(ShardState(**state))
        except DataError:
            raise ModelFileError(
                f"{kept.path} was written with another number of rows: join again with the rows of before, or remove "
                "it, on all sites, to start from round 0"
            ) from None

    def _close(self) -> None:
        if self.kept is not None:
            self.kept.close()
