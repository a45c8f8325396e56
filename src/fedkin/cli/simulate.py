"""``fedkin federation simulate``: a whole federation on one machine, with a directory and a process per site.

Everything is done by the functions behind the commands: the organiser's directory, an invite for each site, which joins
with its own part of the table, is admitted, and then runs. Files are carried from directory to directory, as people
would carry them.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, count
from fedkin.cli.console import note, output, say
from fedkin.cli.running import run_all, table
from fedkin.data import device_ids, read_columns, write_csv
from fedkin.errors import DataError, ParameterError
from fedkin.federate import Contract, enrol, steps_of
from fedkin.federate.programs.files import SELECTION
from fedkin.federate.records import read_record, write_record
from fedkin.graph import Graph

#: A process per site: more than this and the machine would only be busy with itself.
MOST_SITES = 50
#: Without a graph all pairs are candidates, up to so many sites.
_MOST_FOR_ALL_PAIRS = 12
_HEART, _SITES, _RECORD, _LAST_PORT = "organiser", "sites", "simulation.json", 65535


@dataclass(frozen=True)
class Simulation:
    """What the user asked for."""

    contract: Path
    data: Path
    site: str
    graph: Path | None
    out: Path
    port: int
    lam: float | None = None
    rounds: int | None = None
    rho: float | None = None
    restarts: int = 10
    give_up: float = 3600.0


def simulate(command: Simulation) -> None:
    """Make the federation, unless it is there already, and run it."""
    places = prepare(command)
    contract = Contract.read(command.contract)
    placement = contract.rounds.placement
    lines = run_all(
        command.out,
        places,
        edge_tests=contract.rounds.select is not None,
        waits=placement == "peer",
        restarts=command.restarts,
        give_up=command.give_up,
    )
    output().print(table(lines))
    sites = [place for place in places if place.parent.name == _SITES]
    say(f"{count(len(sites), 'model')}, one at each site: {sites[0]}/model and so on.")
    if contract.rounds.select is not None:
        dropped = sum(len(read_record(place / SELECTION)["dropped"]) for place in sites) // 2
        note(f"{count(dropped, 'edge')} dropped by edge tests")


def prepare(command: Simulation) -> list[Path]:
    """The directories of a simulation, made or found: the organiser's, if it runs, too, and the sites'."""
    contract = Contract.read(command.contract)
    parts = split(command.data, command.site)
    known = _marks(command)
    if command.out.exists() and any(command.out.iterdir()):
        if not (command.out / _RECORD).exists() or read_record(command.out / _RECORD) != known:
            raise DataError(
                f"{command.out} exists, and is not the simulation of this contract, table, graph and settings: choose "
                "another place with --out, or remove it"
            )
    else:
        _make(command, contract, parts)
        write_record(command.out / _RECORD, known)
    heart = enrol.read_federation(command.out / _HEART)
    sites = [command.out / _SITES / member.name for member in heart.members]
    return [heart.directory, *sites] if contract.rounds.placement == "central" else sites


def split(data: Path, site: str) -> dict[Hashable, dict[str, Any]]:
    """The columns of each site, without the one that says whose a row is."""
    columns = read_columns(data)
    if site not in columns:
        raise DataError(f"{data} has no column {site!r}; its columns are {', '.join(map(str, columns))}")
    ids = np.array(device_ids(columns[site]), dtype=object)
    known = list(dict.fromkeys(ids.tolist()))
    if len(known) > MOST_SITES:
        raise ParameterError(
            f"{data} has {len(known)} sites; a process for each is too much for one machine (at most {MOST_SITES}): "
            "use fedkin mpi run, or fedkin fit"
        )
    rest = {name: column for name, column in columns.items() if name != site}
    return {one: {name: column[ids == one] for name, column in rest.items()} for one in known}


def _marks(command: Simulation) -> dict[str, Any]:
    digests = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in (("contract", command.contract), ("data", command.data), ("graph", command.graph))
        if path is not None
    }
    return {**digests, "site": command.site, "lam": command.lam, "rounds": command.rounds, "rho": command.rho}


def _make(command: Simulation, contract: Contract, parts: Mapping[Hashable, Mapping[str, Any]]) -> None:
    names, out = list(parts), command.out
    if command.port < 1 or command.port + len(names) > _LAST_PORT:
        raise ParameterError(f"--port must be from 1 to {_LAST_PORT - len(names)}, got {command.port}")
    if command.graph is None and len(names) > _MOST_FOR_ALL_PAIRS:
        raise ParameterError(
            f"{len(names)} sites have too many pairs to link all of them: give candidates with --graph"
        )
    edges = Graph.complete(names) if command.graph is None else Graph.read(command.graph, devices=names)
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(PRIVATE_DIRECTORY)
    (out / _SITES).mkdir(mode=PRIVATE_DIRECTORY)
    lines = [[name, "127.0.0.1", command.port + k] for k, name in enumerate(names)]
    write_csv(out / "list.csv", ["site", "host", "port"], lines)
    edges.write(out / "edges.csv")
    centre = f"127.0.0.1:{command.port + len(names)}" if contract.rounds.placement == "central" else None
    graph, sites = out / "edges.csv", out / "list.csv"
    heart = enrol.new(command.contract, out / _HEART, graph=graph, sites=sites, centre=centre)
    graph.unlink()
    sites.unlink()
    enrol.invite(heart)
    for member, columns in zip(heart.members, parts.values(), strict=True):
        place = out / _SITES / member.name
        own = out / _SITES / f"{member.name}.csv"
        try:
            cells = zip(*(column.tolist() for column in columns.values()), strict=True)
            write_csv(own, list(columns), [list(row) for row in cells])
            joined = enrol.join(heart.directory / "invites" / f"{member.name}.invite", own, place, steps=steps_of)
        except DataError as error:
            shutil.rmtree(out)  # so that the same command begins anew
            raise DataError(f"the rows of {member.id!r}: {error}") from None
        finally:
            own.unlink(missing_ok=True)  # the site's directory has its rows
        enrol.accept(place, enrol.admit(heart, joined.request).path)
    set_to = {"lam": command.lam, "rounds": command.rounds, "rho": command.rho}
    if contract.rounds.placement == "replicas" or any(value is not None for value in set_to.values()):
        for path, receivers in enrol.order(heart, **set_to):  # type: ignore[arg-type]
            for name in receivers:
                enrol.accept(out / _SITES / name, path)
