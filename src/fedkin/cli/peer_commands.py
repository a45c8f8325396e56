"""What ``fedkin peer ...`` does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedkin.availability import Availability, recorded_rounds
from fedkin.cli.console import Interrupted, ended_like_ctrl_c, messages, note, output, print_json
from fedkin.cli.peer_endpoints import centre_endpoint, local_endpoints, read_endpoints
from fedkin.cli.tables import add_row, plain_table, read_federation
from fedkin.engine.directory import DEVICES, SELECTION, device_directories, write_federation
from fedkin.engine.directory import collect as collect_results
from fedkin.engine.manifest import Manifest, load_manifest
from fedkin.engine.notices import LEFT, left_devices, write_notice
from fedkin.engine.process import CANNOT
from fedkin.engine.security import Pair, make_authority, read_authority_files
from fedkin.engine.supervisor import STDERR, Line, Supervisor, all_done, check_idle, overview, prometheus, stop_all
from fedkin.errors import DataError, ParameterError, SolverError
from fedkin.federation import Federation
from fedkin.graph import Graph
from fedkin.local import check_variance
from fedkin.problem import Problem
from fedkin.solvers.deploy import device_parts, make_manifest
from fedkin.solvers.fedplan import Settings
from fedkin.tables import write_csv

_CLASSIFIERS = ("logistic", "multinomial")
_LOOK_SECONDS = 0.3
_FRAME_LINES = 6  # of the live view: head, rule, margins, and the line of the prompt


@dataclass(frozen=True)
class InitCommand:
    """What the user asked for."""

    directory: Path
    data: Path
    graph: Path
    lam: float
    device: str | None
    target: str | None
    features: tuple[str, ...] | None
    offset: str | None
    intercept: bool
    loss: str
    penalty: str
    rounds: int
    batch_size: int | None
    gradient: Literal["plain", "saga", "svrg"]
    ridge: float
    seed: int
    endpoints: Path | None
    port: int
    placement: Literal["peer", "central", "replicas"]
    availability: str | None
    centre: str | None
    ca_cert: Path | None
    ca_key: Path | None
    secure: bool
    float32: bool
    checkpoint_every: int | None
    compare_every: int
    select_level: float | None
    variance: str
    share_results: bool


def init(command: InitCommand) -> None:
    """Read everything, plan the run, write the directory."""
    federation = read_federation(
        command.data, device=command.device, target=command.target, features=command.features, offset=command.offset
    )
    federation, classes = _encoded(federation, command.loss)
    if command.intercept and command.loss != "mean":
        federation = federation.with_intercept()
    graph = Graph.read(command.graph, federation.devices)
    problem = Problem(federation, graph, command.loss, command.penalty, command.lam, ridge=command.ridge)
    endpoints, centre = _endpoints(command, federation)
    settings = Settings(batch_size=command.batch_size, gradient=command.gradient, seed=command.seed)
    manifest = make_manifest(
        problem,
        command.rounds,
        settings,
        endpoints,
        absent=command.placement != "peer",
        wire="float32" if command.float32 else "float64",
        checkpoint_every=command.checkpoint_every,
        compare_every=command.compare_every if command.placement == "peer" else 0,
        placement=command.placement,
        centre=centre,
        secure=command.secure,
        classes=classes,
        select=_selection(command),
        absence=_absence(command, federation),
    )
    own = _own_authority(command)
    write_federation(
        command.directory,
        manifest,
        device_parts(problem),
        own or make_authority(f"fedkin {manifest.run}"),
        keep_key=own is None,
        share_result=command.share_results,
    )
    console = output()
    console.print(
        f"{command.directory}: {manifest.n_devices} devices, {len(manifest.edges)} edges, run {manifest.run}",
        soft_wrap=True,
    )
    if not manifest.edges:
        note("the graph has no edges: every device learns from its own rows only")
    if not command.secure:
        note("plain TCP: anybody on the network can read and write; use it on closed test networks only")
    console.print(f"all on this machine: fedkin peer up {command.directory}", soft_wrap=True)
    words = f"one per machine: carry {command.directory / DEVICES}/NAME there, then fedkin peer run NAME"
    console.print(words, soft_wrap=True)


def _selection(command: InitCommand) -> dict[str, Any] | None:
    if command.select_level is None:
        return None
    if not 0 < command.select_level < 1:
        raise ParameterError(f"--select-level must be between 0 and 1, got {command.select_level:g}")
    if command.placement != "peer":
        raise ParameterError(f"--select-level is for --placement peer, not for {command.placement}")
    check_variance(command.variance)
    return {"level": command.select_level, "variance": command.variance}


def _absence(command: InitCommand, federation: Federation) -> dict[str, Any] | None:
    """The pattern of planned absence, for the manifest."""
    given = command.availability
    if given is None:
        return None
    if command.placement != "replicas":
        raise ParameterError("--availability is for --placement replicas: elsewhere absence is what happens")
    try:
        probability = float(given)
    except ValueError:
        bound = Availability.recorded(given, repeat=True).bind(federation.devices)
        trace = bound.rounds(1, recorded_rounds(Path(given)))[0].astype(int)
        lines = ["".join(map(str, line)) for line in trace.tolist()]
        return {"pattern": "recorded", "available": lines, "repeat": True, "weighting": "known"}
    values = Availability.bernoulli(probability).bind(federation.devices).rounds(1, 1)[1][0]
    return {"pattern": "bernoulli", "p": values.tolist(), "weighting": "known"}


def _encoded(federation: Federation, loss: str) -> tuple[Federation, list[Any] | None]:
    if loss not in _CLASSIFIERS or federation.y is None:
        return federation, None
    classes, codes = np.unique(
        federation.y.astype(str) if federation.y.dtype == object else federation.y, return_inverse=True
    )
    if loss == "logistic" and len(classes) != 2:
        raise DataError(f"the logistic loss needs 2 classes, the target has {len(classes)}; use --loss multinomial")
    rows = np.repeat(np.arange(federation.n_devices), federation.n_samples)
    ids = [federation.devices[u] for u in rows]
    made = Federation.from_arrays(
        federation.X, codes.astype(float), ids, offset=federation.offset, feature_names=federation.feature_names
    )
    return made, [one.item() for one in classes]


def _endpoints(command: InitCommand, federation: Federation) -> tuple[list[str], str | None]:
    scheme = "tls" if command.secure else "tcp"
    central = command.placement == "central"
    if command.centre is not None and not central:
        raise ParameterError(f"--centre is for --placement central, not for {command.placement}")
    if command.endpoints is None:
        places, centre = local_endpoints(federation.n_devices, command.port)
    else:
        if central and command.centre is None:
            raise ParameterError("--placement central with --endpoints needs --centre HOST:PORT")
        places, centre = read_endpoints(command.endpoints, federation.devices, distinct=not central), ""
    if command.centre is not None:
        centre = centre_endpoint(command.centre)
    return [f"{scheme}/{place}" for place in places], f"{scheme}/{centre}" if central else None


def _own_authority(command: InitCommand) -> Pair | None:
    if (command.ca_cert is None) != (command.ca_key is None):
        raise ParameterError("--ca-cert and --ca-key go together")
    if command.ca_cert is None or command.ca_key is None:
        return None
    return read_authority_files(command.ca_cert, command.ca_key)


def run_one(place: Path, arguments: Sequence[str]) -> None:
    """Become the device process: what the command line has loaded is not needed any more."""
    os.execv(sys.executable, [sys.executable, "-m", "fedkin.engine.process", str(place), "--echo", *arguments])


def select_one(place: Path, give_up: float) -> None:
    """Run the edge selection of one device."""
    from fedkin.cli.peer_select import main

    raise SystemExit(main([str(place), "--give-up", str(give_up)]))


def select_all(directory: Path, give_up: float) -> None:
    """Run the edge selection of all devices on this machine that have not done it."""
    places = [place for place in device_directories(directory) if not (place / SELECTION).exists()]
    command = [sys.executable, "-m", "fedkin.cli.peer_select", "--give-up", str(give_up)]
    running: list[subprocess.Popen[bytes]] = []
    with ended_like_ctrl_c():
        try:
            for place in places:
                running.append(subprocess.Popen([*command, str(place)], start_new_session=True))
            # who fails is missed by the others: they would wait for long
            while any(process.poll() is None for process in running) and not any(one.returncode for one in running):
                time.sleep(_LOOK_SECONDS)
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


def up(directory: Path, restarts: int, give_up: float, as_json: bool) -> None:
    """Supervise all devices until they end."""
    manifest = load_manifest(directory)
    check_idle(directory)
    supervisor = Supervisor(directory, ("--give-up", str(give_up)), restarts)
    if all_done(directory, manifest):
        note(f"all devices have done their rounds already; fedkin peer collect {directory} gathers what they share")
    else:
        if manifest.select is not None:
            select_all(directory, give_up)
        watch(supervisor, manifest)
    lines = overview(directory, supervisor.children)
    if as_json:
        print_json({"run": manifest.run, "devices": [asdict(line) for line in lines]})
    else:
        output().print(_table(lines, manifest))
    failed = supervisor.failed()
    if failed:
        names = ", ".join(child.name for child in failed)
        raise SolverError(f"{names} failed: {failed[0].why}; see log.jsonl and {STDERR} in {failed[0].place}")


def watch(supervisor: Supervisor, manifest: Manifest) -> None:
    """Start the devices and look after them until they have ended, with a live view on terminals."""
    console = messages()
    with ended_like_ctrl_c():
        try:
            supervisor.start()
            with Live(console=console, auto_refresh=False, transient=True) as live:
                while supervisor.poll():
                    _tell_news(supervisor, console)
                    if manifest.placement == "peer" and _is_missed(supervisor):
                        break
                    if console.is_terminal:
                        lines = overview(supervisor.directory, supervisor.children)
                        live.update(_table(lines, manifest, max(console.height - _FRAME_LINES, 3)), refresh=True)
                    time.sleep(_LOOK_SECONDS)
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
    lines = overview(directory)
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
    output().print(f"asked to stop: {', '.join(stopped)}" if stopped else "no device is running here")


def leave(directory: Path, device: str, ca_key: Path | None = None) -> None:
    """Write the signed notice that a device has left."""
    places = write_notice(directory, device, ca_key)
    output().print(
        f"{device} has left: noted for {', '.join(place.name for place in places) or 'no device on this machine'}"
    )
    words = (
        f"carry {directory / 'left' / device} to the directory 'left' of {device} and its neighbours on other machines"
    )
    output().print(words, soft_wrap=True)


def collect(directory: Path, out: Path) -> None:
    """Write the coefficients that owners share."""
    manifest = load_manifest(directory)
    found, reasons = collect_results(directory, manifest, left_devices(directory))
    for position, why in reasons.items():
        note(f"{manifest.members[position].name}: {why}")
    if not found:
        raise DataError("no device shares a result")
    rows = [[manifest.members[position].id, *theta.tolist()] for position, theta in found.items()]
    write_csv(out, ["device", *coefficient_names(manifest)], rows)
    output().print(f"{out}: {len(found)} of {manifest.n_devices} devices", soft_wrap=True)


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
    if most is not None and len(lines) > most:
        trouble = ("failed", "dead", "starting again", CANNOT)
        ranked = sorted(lines, key=lambda line: (line.state not in trouble, not line.waiting_for, line.round))
        lines, hidden = ranked[: most - 1], ranked[most - 1 :]
    table = plain_table("device", "state", "round", "change", "up", "pulled", "restarts", "waits for", numbers_from=2)
    colours = dict.fromkeys(("failed", "dead", CANNOT), "red") | dict.fromkeys(("done", "finished"), "green")
    for line in lines:
        add_row(
            table,
            line.name,
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
        add_row(
            table, f"and {len(hidden)} more", "", f"{min(rounds)} to {max(rounds)}", "", "", "", "", "", style="dim"
        )
    return table
