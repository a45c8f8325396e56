"""What ``fedkin peer tune`` does with a whole directory: run the devices, add up their curves, sign the choice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedkin.cli.console import StopRequested, note, output, print_json
from fedkin.cli.peer_commands import (
    check_patience,
    federation_in,
    note_who_is_not_here,
    select_all,
    shown,
    supervised,
    watch,
)
from fedkin.cli.tables import add_row, plain_table
from fedkin.errors import DataError, ParameterError, SolverError
from fedkin.federate import (
    AUTHORITY_KEY,
    DEVICES,
    Choice,
    Manifest,
    Pair,
    Supervisor,
    TuneSettings,
    check_before,
    choose,
    device_directories,
    is_device,
    options_of,
    read_authority,
    read_curve,
    shared_curves,
    sign_again,
)


@dataclass(frozen=True)
class TuneCommand:
    """What the user asked for."""

    place: Path
    settings: TuneSettings
    one_se: bool
    sign: bool
    ca_key: Path | None
    restarts: int
    give_up: float
    as_json: bool


def tune(command: TuneCommand) -> None:
    """One device, when its directory was named; otherwise all that are here, and then the choice."""
    check_patience(command.restarts, command.give_up)
    if is_device(command.place):
        from fedkin.federate.programs.tune import main

        options = options_of(command.settings, by_fold=command.one_se)
        raise SystemExit(main([str(command.place), *options, "--give-up", str(command.give_up)]))
    directory = command.place
    manifest = federation_in(directory, "peer tune", f"fedkin peer tune {directory} does its part")
    authority = _authority(command, manifest)
    with supervised(directory):
        run_devices(command, manifest)
    run = command.settings.run_bytes(manifest)
    curves, reasons = shared_curves(directory, manifest, run, by_fold=command.one_se)
    for position, why in reasons.items():
        note(f"{shown(manifest, position)}: {why}")
    choice = choose(curves, reasons, one_se=command.one_se)
    chosen = manifest.with_lam(choice.lam)
    if authority is not None:
        sign_again(directory, chosen, authority)
    _tell(command, manifest, choice, signed=authority is not None)


def _authority(command: TuneCommand, manifest: Manifest) -> Pair | None:
    """Who signs the choice; asked before the work begins."""
    if manifest.placement != "peer":
        raise ParameterError("lam is chosen between devices that talk to each other, not with --placement central")
    if not any(manifest.edges):
        raise ParameterError("the graph has no edges, so there is no lam to choose")
    manifest.with_lam(1.0)  # says so when the weights of the edges are not known
    if not command.sign:
        return None
    if command.ca_key is None and not (command.place / AUTHORITY_KEY).exists():
        key = command.place / AUTHORITY_KEY
        raise DataError(f"{key} is missing, so the choice cannot be signed: give --ca-key FILE, or --no-sign")
    return read_authority(command.place, command.ca_key)


def run_devices(command: TuneCommand, manifest: Manifest) -> None:
    """Run the tuning of all devices on this machine that have not done it."""
    directory = command.place
    places = device_directories(directory)
    for place in places:
        check_before(place, manifest)
    if manifest.select is not None:
        select_all(directory, command.give_up)
    run = command.settings.run_bytes(manifest)
    places = [place for place in places if read_curve(place, run, by_fold=command.one_se) is None]
    if places:
        note_who_is_not_here(directory, manifest)
    options = (*options_of(command.settings, by_fold=command.one_se), "--give-up", str(command.give_up))
    supervisor = Supervisor(directory, options, command.restarts, "fedkin.federate.programs.tune", places)
    watch(supervisor, manifest)
    if supervisor.stopped() and not supervisor.failed():
        raise StopRequested
    failed = [child.name for child in supervisor.children if child.state == "failed"]
    if failed:
        place = directory / DEVICES / failed[0]
        raise SolverError(f"tuning failed on {', '.join(failed)}: see log.jsonl and stderr.txt in {place}")


def end_of_grid(choice: Choice, *, own_grid: bool) -> str | None:
    """What to say when the first or last level is the best; ``own_grid`` when the devices found the levels."""
    if not choice.at_the_end:
        return None
    if choice.lam != choice.lams[0]:
        return "the chosen level is the smallest of the grid: smaller ones, by --lams, may be better"
    if own_grid:
        return (
            "the chosen level is the largest of the grid that the devices found, where connected devices share one "
            "model: larger ones change nothing (on large sparse graphs, more --rounds make sure of that)"
        )
    return "the chosen level is the largest of --lams: larger ones may be better"


def _tell(command: TuneCommand, manifest: Manifest, choice: Choice, *, signed: bool) -> None:
    if command.as_json:
        print_json(
            {
                "lam": choice.lam,
                "lams": choice.lams.tolist(),
                "mean": choice.mean.tolist(),
                "error": None if choice.error is None else choice.error.tolist(),
                "devices": choice.devices,
                "kept": {manifest.members[u].name: why for u, why in choice.reasons.items()},
                "signed": signed,
            }
        )
    else:
        table = plain_table("lam", "held-out loss", *([] if choice.error is None else ["standard error"]))
        for k, (lam, mean) in enumerate(zip(choice.lams, choice.mean, strict=True)):
            errors = [] if choice.error is None else [f"{choice.error[k]:.2g}"]
            add_row(table, f"{lam:.6g}", f"{mean:.6g}", *errors, style="green" if lam == choice.lam else "")
        output().print(table)
        output().print(f"lam = {choice.lam!r} from the curves of {choice.devices} of {manifest.n_devices} devices")
    words = end_of_grid(choice, own_grid=command.settings.lams is None)
    if words is not None:
        note(words)
    if signed and not command.as_json:
        output().print(f"signed: {command.place / 'manifest.json'}, and those of the devices that are here")
        output().print("carry manifest.json and manifest.sig to devices on other machines, then start them")
    elif not command.as_json:
        output().print(f"not signed: fedkin peer init ... --lam {choice.lam!r} makes a federation with it")
