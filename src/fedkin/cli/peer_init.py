"""What ``fedkin peer init`` does: read rows and graph, plan the run, write the directory of a federation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedkin._base import count
from fedkin.admm import Settings
from fedkin.cli.console import note, output
from fedkin.cli.tables import read_federation
from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.federate import (
    DEVICES,
    Manifest,
    Pair,
    centre_endpoint,
    device_parts,
    local_endpoints,
    make_authority,
    make_manifest,
    read_authority_files,
    read_endpoints,
    write_federation,
)
from fedkin.fitting import FitOptions, prepare
from fedkin.graph import Graph
from fedkin.objective import Problem
from fedkin.stats import check_variance

_MOST_NAMES = 20  # written out
_MOST_ROUNDS = 2**32 - 1  # that a message can count


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
    _check_numbers(command)
    federation = read_federation(
        command.data, device=command.device, target=command.target, features=command.features, offset=command.offset
    )
    _check_batch(command, federation)
    # as `fedkin fit --no-standardize` prepares them, so that lam and ridge mean the same
    options = FitOptions(
        loss=command.loss,
        penalty=command.penalty,  # type: ignore[arg-type]
        lam=command.lam,
        fit_intercept=command.intercept,
        standardize=False,
        ridge=command.ridge,
    )
    prepared = prepare(federation, options)
    federation = prepared.rows
    graph = Graph.read(command.graph, federation.devices)
    ridge = prepared.units.per_feature(command.ridge)
    problem = Problem(federation, graph, prepared.loss, command.penalty, command.lam, ridge=ridge)
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
        classes=None if prepared.units.classes is None else list(prepared.units.classes),
        select=_selection(command),
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
        f"{command.directory}: {count(manifest.n_devices, 'device')}, {count(len(manifest.edges), 'edge')}, "
        f"run {manifest.run}",
        soft_wrap=True,
    )
    if not manifest.edges:
        note("the graph has no edges: every device learns from its own rows only")
    if not command.secure:
        note("plain TCP: anybody on the network can read and write; use it on closed test networks only")
    _print_names(manifest)
    console.print(f"all on this machine: fedkin peer up {command.directory}", soft_wrap=True)
    words = f"one per machine: carry {command.directory / DEVICES}/NAME there, then fedkin peer run NAME"
    console.print(words, soft_wrap=True)


def _check_numbers(command: InitCommand) -> None:
    """Raise `ParameterError` for numbers that no run could have, before anything is read."""
    least: dict[str, tuple[float | None, float]] = {
        "--rounds": (command.rounds, 1),
        "--batch-size": (command.batch_size, 1),
        "--checkpoint-every": (command.checkpoint_every, 1),
        "--compare-every": (command.compare_every, 0),
        "--lam": (command.lam, 0),
        "--ridge": (command.ridge, 0),
        "--seed": (command.seed, 0),
    }
    for option, (value, bound) in least.items():
        if value is not None and not (math.isfinite(value) and value >= bound):
            finite = " a finite number," if isinstance(value, float) else ""
            never = " (0: never)" if option == "--compare-every" else ""
            raise ParameterError(f"{option} must be{finite} at least {bound:g}{never}, got {value:g}")
    if command.rounds > _MOST_ROUNDS:
        raise ParameterError(f"--rounds must be at most {_MOST_ROUNDS}, got {command.rounds}")


def _check_batch(command: InitCommand, federation: Federation) -> None:
    """Raise `ParameterError` when a device has fewer rows than a batch."""
    fewest = int(federation.n_samples.min())
    if command.batch_size is not None and command.batch_size > fewest:
        device = federation.devices[int(federation.n_samples.argmin())]
        raise ParameterError(
            f"--batch-size is {command.batch_size}, but device {device!r} has only {count(fewest, 'row')}: "
            f"use at most {fewest}, or leave it away for all rows"
        )


def _print_names(manifest: Manifest) -> None:
    """Say which device is meant by which name, where ids cannot be names of directories."""
    others = [member for member in manifest.members if str(member.id) != member.name]
    for member in others[:_MOST_NAMES]:
        output().print(f"{DEVICES}/{member.name} is {member.id!r}", soft_wrap=True)
    if len(others) > _MOST_NAMES:
        output().print(f"and {len(others) - _MOST_NAMES} more: fedkin peer status tells all")


def _selection(command: InitCommand) -> dict[str, Any] | None:
    if command.select_level is None:
        return None
    if not 0 < command.select_level < 1:
        raise ParameterError(f"--select-level must be between 0 and 1, got {command.select_level:g}")
    if command.placement != "peer":
        raise ParameterError(f"--select-level is for --placement peer, not for {command.placement}")
    check_variance(command.variance)
    return {"level": command.select_level, "variance": command.variance}


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
