"""``python -m fedkin.federate.programs.tune DIR/devices/U``: one device's part in the choice of ``lam``.

What is computed is in `fedkin.federate.tuning.tuner`. Exit codes are those of ``fedkin.federate.programs.run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fedkin.admm import load_checkpoint
from fedkin.errors import DataError, FedkinError, ModelFileError, ParameterError
from fedkin.federate.contract.manifest import Manifest, load_manifest, load_rows
from fedkin.federate.journal import Journal
from fedkin.federate.lockstep import Patience, Stopped
from fedkin.federate.programs.run import (
    FINISHED,
    STOPPED,
    StatusWriter,
    exit_code,
    link_watcher,
    links,
    name_of,
    only_one,
    own_position,
)
from fedkin.federate.setup.departures import read_notices
from fedkin.federate.setup.directory import LOG, STATE, read_selection
from fedkin.federate.tuning.curves import write_curve
from fedkin.federate.tuning.tuner import Tuner, TuneSettings

TUNING_STATE = "tuning-state.npz"


def options_of(settings: TuneSettings, *, by_fold: bool) -> list[str]:
    """The arguments that tell a device process these settings."""
    options = []
    for name, value in asdict(settings).items():
        if value is not None:
            text = ",".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
            options += [f"--{name.replace('_', '-')}", text]
    return [*options, *(["--by-fold"] if by_fold else [])]


def levels(text: str) -> tuple[float, ...]:
    """The numbers in ``0.1,0.05``, the largest first."""
    try:
        return tuple(sorted({float(part) for part in text.split(",") if part.strip()}, reverse=True))
    except ValueError:
        raise ParameterError(f"--lams must be numbers with commas between them, got {text!r}") from None


def tune_device(place: Path, settings: TuneSettings, patience: Patience, *, by_fold: bool) -> int:
    """Run the tuning of the device whose directory is ``place``; returns an exit code."""
    from fedkin.federate.links.zenoh import ZenohTransport

    manifest = load_manifest(place)
    name = name_of(place)
    position = own_position(place, manifest, name)
    check_before(place, manifest)
    run = settings.run_bytes(manifest)
    with only_one(place):
        journal = Journal(name, place / LOG)
        neighbours = {manifest.members[v].name for v in manifest.neighbours(position)}
        _forget_other_runs(place / TUNING_STATE, run)
        on_link = link_watcher(journal, neighbours, manifest.secure)
        transport = ZenohTransport(links(place, manifest), on_link)
        try:
            writer = StatusWriter(place, 0)
            tuner = Tuner(
                manifest,
                position,
                load_rows(place, manifest, position),
                settings,
                transport,
                journal,
                checkpoint=place / TUNING_STATE,
                patience=patience,
                without=read_selection(place, manifest),
                tick=lambda _: writer.tick(),
            )
            writer.status, writer.rounds = tuner.status, tuner.rounds
            lams, losses = tuner.run()
            write_curve(place, run, lams, losses, by_fold=by_fold)
            journal.write("info", "tuned", levels=lams.size, change=tuner.status.change)
            tuner.linger()
            for file in place.glob(f"{Path(TUNING_STATE).stem}.*"):
                file.unlink()
            tuner.status.state = "tuned"
            writer.write(force=True)
            return FINISHED
        except Stopped:
            journal.write("info", "stopped on request")
            return STOPPED
        except FedkinError as error:
            journal.write("error", "cannot go on", why=str(error))
            raise
        finally:
            transport.close()
            journal.close()


def check_before(place: Path, manifest: Manifest) -> None:
    """Raise `DataError` where it is too late to choose ``lam``."""
    if (place / STATE).exists():
        raise DataError(f"{place} has begun its rounds: lam is chosen before them; make a new federation for another")
    if read_notices(place, manifest):
        raise DataError(f"a neighbour of {place} has left for good: lam is chosen before that, by all devices")


def _forget_other_runs(path: Path, run: bytes) -> None:
    """Remove what another tuning, or one of other settings, left behind."""
    try:
        load_checkpoint(path, run.hex())
    except ParameterError:
        path.unlink()
    except ModelFileError:
        if path.exists():
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and tune one device."""
    usual = TuneSettings()
    parser = argparse.ArgumentParser(prog="fedkin peer tune", description="One device's part in the choice of lam.")
    parser.add_argument("place", type=Path)
    parser.add_argument("--lams", type=levels, default=None)
    for name in ("n_lams", "folds", "rounds", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(usual, name))
    for name in ("ratio", "caution"):
        parser.add_argument(f"--{name}", type=float, default=getattr(usual, name))
    parser.add_argument("--by-fold", action="store_true")
    for name, value in vars(Patience(linger=60.0)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, metavar="SECONDS")
    given = vars(parser.parse_args(arguments))
    place, by_fold = given.pop("place"), given.pop("by_fold")
    waits = {name: given.pop(name) for name in vars(Patience())}
    try:
        patience = Patience(**waits)
        return tune_device(place, TuneSettings(**given), patience, by_fold=by_fold)
    except (FedkinError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
