"""``python -m fedkin.federate.programs.tune DIR/devices/NAME``: one device's part in the choice of ``lam``.

What is computed is in `fedkin.federate.tuning`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fedkin.errors import DataError, ParameterError
from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.programs.program import DeviceParser, Program, run_program
from fedkin.federate.setup.departures import read_departures
from fedkin.federate.setup.directory import STATE, read_selection
from fedkin.federate.tuning.curves import write_curve
from fedkin.federate.tuning.tuner import Tuner, TuneSettings
from fedkin.federate.waiting import Patience

TUNING_STATE = "tuning-state.db"


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


def tune(program: Program, settings: TuneSettings, patience: Patience, *, by_fold: bool) -> None:
    """Do the device's part and write its curve."""
    place, manifest, status = program.place, program.manifest, program.status
    check_before(place, manifest)
    run = settings.run_bytes(manifest)
    with program.linked() as transport:
        tuner = Tuner(
            manifest,
            program.position,
            program.rows(),
            settings,
            transport,
            program.journal,
            checkpoint=place / TUNING_STATE,
            patience=patience,
            without=read_selection(place, manifest),
            tick=status.tick,
        )
        status.begin(tuner.status, tuner.rounds)
        lams, losses = tuner.run()
        write_curve(place, run, lams, losses, by_fold=by_fold)
        program.journal.write("info", "tuned", levels=lams.size, change=tuner.status.change)
        tuner.linger()
        for file in place.glob(f"{Path(TUNING_STATE).stem}.*"):
            file.unlink()
        status.end("tuned")


def check_before(place: Path, manifest: Manifest) -> None:
    """Raise `DataError` where it is too late to choose ``lam``."""
    if (place / STATE).exists():
        raise DataError(f"{place} has begun its rounds: lam is chosen before them; make a new federation for another")
    if read_departures(place, manifest):
        raise DataError(f"a neighbour of {place} has left for good: lam is chosen before that, by all devices")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments and tune one device."""
    usual = TuneSettings()
    parser = DeviceParser("tune", "One device's part in the choice of lam.", Patience(linger=60.0))
    parser.add_argument("--lams", type=lambda text: parser.checked(lambda: levels(text)), default=None)
    for name in ("n_lams", "folds", "rounds", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(usual, name))
    for name in ("ratio", "caution"):
        parser.add_argument(f"--{name}", type=float, default=getattr(usual, name))
    parser.add_argument("--by-fold", action="store_true")
    place, patience, given = parser.parsed(arguments)
    by_fold = given.pop("by_fold")
    settings = parser.checked(lambda: TuneSettings(**given))
    return run_program(place, lambda program: tune(program, settings, patience, by_fold=by_fold))


if __name__ == "__main__":
    sys.exit(main())
