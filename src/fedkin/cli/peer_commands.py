"""What ``fedkin peer ...`` does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedkin._base import wait_until
from fedkin.cli.console import (
    Interrupted,
    StopRequested,
    ended_like_ctrl_c,
    messages,
    note,
    output,
    print_json,
)
from fedkin.cli.tables import add_row, plain_table
from fedkin.data import write_csv
from fedkin.errors import DataError, ParameterError, SolverError
from fedkin.federate import (
    DEVICES,
    LEFT,
    NOT_HERE,
    SELECTION,
    STDERR,
    STOP_SIGNAL,
    TROUBLE,
    Line,
    Manifest,
    Patience,
    Supervisor,
    all_done,
    check_idle,
    device_directories,
    expected_names,
    is_device,
    left_devices,
    load_manifest,
    missing_or_damaged,
    only_supervisor,
    overview,
    prometheus,
    stop_all,
    write_departure,
)
from fedkin.federate import collect as collect_results

_FRAME_LINES = 6  # of the live view: head, rule, margins, and the line of the prompt


def run_one(place: Path, patience: Patience, echo: bool) -> None:
    """Become the device process: what the command line has loaded is not needed any more."""
    options = [f"--{name.replace('_', '-')}={value!r}" for name, value in vars(patience).items()]
    echoes = ["--echo"] if echo else []
    os.execv(sys.executable, [sys.executable, "-m", "fedkin.federate.programs.run", str(place), *echoes, *options])


def select_one(place: Path, give_up: float) -> None:
    """Run the edge selection of one device."""
    from fedkin.federate.programs.select import main

    check_patience(0, give_up)
    raise SystemExit(main([str(place), "--give-up", str(give_up)]))


def select_all(directory: Path, give_up: float) -> None:
    """Run the edge selection of all devices on this machine that have not done it."""
    places = [place for place in device_directories(directory) if not (place / SELECTION).exists()]
    command = [sys.executable, "-m", "fedkin.federate.programs.select", "--give-up", str(give_up)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for place in places:
            running.append(subprocess.Popen([*command, str(place)], start_new_session=True))
        # who fails is missed by the others: they would wait for long
        wait_until(lambda: all(one.poll() is not None for one in running) or any(one.returncode for one in running))
        codes = [process.returncode for process in running]
    except (Interrupted, KeyboardInterrupt):
        note("stopping the edge selection; the same command begins it again")
        raise
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = [place.name for place, code in zip(places, codes, strict=True) if code]
    if failed:
        raise SolverError(
            f"edge selection failed on {', '.join(failed)}: see log.jsonl in {directory / DEVICES}/{failed[0]}"
        )


@contextmanager
def supervised(directory: Path) -> Iterator[None]:
    """Within this context signals and ``fedkin peer stop`` end the command, and no other looks after the devices."""
    with ended_like_ctrl_c(STOP_SIGNAL), only_supervisor(directory):
        yield


def up(directory: Path, restarts: int, give_up: float, as_json: bool) -> None:
    """Supervise all devices until they end."""
    check_patience(restarts, give_up)
    manifest = federation_in(directory, "peer up", f"fedkin peer run {directory} runs the device")
    check_idle(directory)
    supervisor = Supervisor(directory, ("--give-up", str(give_up)), restarts)
    stopped = False
    if all_done(directory, manifest):
        note(
            "all devices have done their rounds already; what they share is gathered by: "
            f"fedkin peer collect {directory} --out coef.csv"
        )
    else:
        note_who_is_not_here(directory, manifest)
        try:
            with supervised(directory):
                if manifest.select is not None:
                    select_all(directory, give_up)
                watch(supervisor, manifest)
        except StopRequested:
            stopped = True
    lines = overview(directory, manifest, supervisor.by_name)
    if as_json:
        print_json({"run": manifest.run, "devices": [asdict(line) for line in lines]})
    else:
        output().print(_table(lines, manifest))
    failed = supervisor.failed()
    if failed:
        names = ", ".join(child.name for child in failed)
        raise SolverError(f"{names} failed: {failed[0].why}; see log.jsonl and {STDERR} in {failed[0].place}")
    if stopped or supervisor.stopped():
        raise StopRequested


def check_patience(restarts: int, give_up: float) -> None:
    """Raise `ParameterError` for numbers that a supervisor cannot have."""
    Patience(give_up=give_up)
    if restarts < 0:
        raise ParameterError(f"--restarts must be at least 0, got {restarts}")


def watch(supervisor: Supervisor, manifest: Manifest) -> None:
    """Start the devices and look after them until they have ended, with a live view on terminals."""
    console = messages()

    def is_over() -> bool:
        if not supervisor.poll():
            return True
        _tell_news(supervisor, console)
        if manifest.placement == "peer" and _is_missed(supervisor):
            return True
        if console.is_terminal:
            lines = overview(supervisor.directory, manifest, supervisor.by_name)
            live.update(_table(lines, manifest, max(console.height - _FRAME_LINES, 3)), refresh=True)
        return False

    try:
        supervisor.start()
        with Live(console=console, auto_refresh=False, transient=True) as live:
            wait_until(is_over)
    except (Interrupted, KeyboardInterrupt):
        note("stopping the devices; the same command continues later")
        raise
    finally:
        _tell_news(supervisor, console)
        supervisor.stop()


def _tell_news(supervisor: Supervisor, console: Console) -> None:
    while supervisor.news:
        note(supervisor.news.pop(0), console)


def _is_missed(supervisor: Supervisor) -> bool:
    """Whether a device has failed for good that the others wait for, since nobody has declared that it left."""
    missed = [child.name for child in supervisor.failed() if not (supervisor.directory / LEFT / child.name).exists()]
    if missed:
        note(f"stopping the devices, which wait for {', '.join(missed)}; the same command continues later")
    return bool(missed)


def status(directory: Path, metrics: bool, as_json: bool) -> None:
    """Print what the devices last said."""
    manifest = load_manifest(directory)
    lines = overview(directory, manifest)
    if metrics:
        sys.stdout.write(prometheus(lines))
    elif as_json:
        print_json({"run": manifest.run, "devices": [asdict(line) for line in lines]})
    else:
        output().print(_table(lines, manifest))
        for line in lines:
            if line.why:
                note(f"{line.name}: {line.why}")


def stop(directory: Path) -> None:
    """Ask devices to stop."""
    load_manifest(directory)
    stopped = stop_all(directory)
    output().print(f"asked to stop: {', '.join(stopped)}" if stopped else "no device is running here", soft_wrap=True)


def leave(directory: Path, device: str, ca_key: Path | None = None) -> None:
    """Write the signed notice that a device has left."""
    manifest = federation_in(
        directory, "peer leave", "run it where the key of the authority is, and carry the notice here"
    )
    device = next((member.name for member in manifest.members if str(member.id) == device), device)
    places = write_departure(directory, device, ca_key)
    output().print(
        f"{device} has left: noted for {', '.join(place.name for place in places) or 'no device on this machine'}"
    )
    words = (
        f"carry {directory / 'left' / device} to the directory 'left' of {device} and its neighbours on other machines"
    )
    output().print(words, soft_wrap=True)


def collect(directory: Path, out: Path) -> None:
    """Write the coefficients that owners share."""
    manifest = federation_in(directory, "peer collect", "the parameters of this one are in its result.npz")
    found, reasons = collect_results(directory, manifest, left_devices(directory))
    for position, why in reasons.items():
        note(f"{shown(manifest, position)}: {why}")
    if not found:
        raise DataError("no device shares a result")
    rows = [[manifest.members[position].id, *theta.tolist()] for position, theta in found.items()]
    write_csv(out, ["device", *coefficient_names(manifest)], rows)
    output().print(f"{out}: {len(found)} of {manifest.n_devices} devices", soft_wrap=True)


def shown(manifest: Manifest, position: int) -> str:
    """The name of a device, and its id where that is another."""
    member = manifest.members[position]
    return member.name if str(member.id) == member.name else f"{member.name} ({member.id})"


def coefficient_names(manifest: Manifest) -> list[str]:
    """A name for each parameter."""
    names = list(manifest.feature_names)
    blocks = manifest.n_params // max(len(names), 1)
    if blocks <= 1 or manifest.classes is None:
        return names
    return [f"{label}:{name}" for label in list(manifest.classes)[1 : blocks + 1] for name in names]


def _table(lines: Sequence[Line], manifest: Manifest, most: int | None = None) -> Table:
    """A line per device; where there is room for ``most`` lines only, those in trouble and those behind come first."""
    hidden: Sequence[Line] = ()
    with_ids = any(line.id is not None for line in lines)
    if most is not None and len(lines) > most:
        ranked = sorted(lines, key=lambda line: (line.state not in TROUBLE, not line.waiting_for, line.round))
        lines, hidden = ranked[: most - 1], ranked[most - 1 :]
    heads = ["device", *(["id"] if with_ids else []), "state"]
    table = plain_table(*heads, "round", "change", "up", "pulled", "restarts", "waits for", numbers_from=len(heads))
    colours = dict.fromkeys(TROUBLE, "red") | dict.fromkeys(("done", "finished"), "green") | {"starting again": ""}
    for line in lines:
        add_row(
            table,
            line.name,
            *([str(line.name if line.id is None else line.id)] if with_ids else []),
            line.state,
            f"{line.round}/{line.rounds or manifest.rounds}",
            "" if line.change is None else f"{line.change:.1e}",
            str(line.up),
            str(line.pulled),
            str(line.restarts),
            ", ".join(line.waiting_for),
            style=colours.get(line.state, ""),
        )
    if hidden:
        rounds = [line.round for line in hidden]
        cells = [f"and {len(hidden)} more", *[""] * (len(heads) - 1), f"{min(rounds)} to {max(rounds)}"]
        add_row(table, *cells, *[""] * 5, style="dim")
    return table


def federation_in(directory: Path, command: str, instead: str) -> Manifest:
    """The manifest in the directory of a federation.

    Parameters
    ----------
    directory : path
        That was given.
    command : str
        That needs it, for the message.
    instead : str
        What to do where it is the directory of one device.
    """
    if is_device(directory):
        raise DataError(
            f"{directory} is the directory of one device, but fedkin {command} needs that of the federation, "
            f"which fedkin peer init made: {instead}"
        )
    manifest = load_manifest(directory)
    if not (directory / DEVICES).is_dir():
        raise DataError(f"{directory} has no directory {DEVICES}, so no device is here")
    return manifest


def note_who_is_not_here(directory: Path, manifest: Manifest) -> None:
    """Name the devices that cannot be started from this directory.

    Raises
    ------
    DataError
        When a device is here, but its directory is damaged, and others would wait for it.
    """
    left = left_devices(directory)
    for name in expected_names(manifest):
        found = None if name in left else missing_or_damaged(directory / DEVICES / name)
        if found is None:
            continue
        state, why = found
        waits = manifest.placement == "peer"
        if state != NOT_HERE and waits:
            raise DataError(f"{name} cannot be started, and the others would wait for it: {why}")
        wait = "; the others wait for it" if waits and len(manifest.neighbours(manifest.position(name))) else ""
        note(f"{name} is not started: {why}{wait}")
