"""``fedkin federation simulate``: a whole federation on one machine, with a directory and a process per site.

What a site does is a command of its own, in a process of its own: it joins with its own part of the table, accepts its
certificate, and then shares its sums (`simulate_shared`) or runs. The organiser's part is done here. Files
are carried from directory to directory, as people would carry them, and the same command continues where it was cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedkin._base import PRIVATE_DIRECTORY, count
from fedkin.cli.shared.console import ended_like_ctrl_c, note, output, say
from fedkin.cli.sites.errands import Board
from fedkin.cli.sites.running import run_all, table
from fedkin.cli.sites.simulate_shared import join_all, refuse, share_all
from fedkin.data import read_columns, site_ids, write_csv
from fedkin.errors import DataError, ParameterError
from fedkin.federate import STOP_SIGNAL, Contract, Organiser, only_supervisor
from fedkin.federate.messages import ADMIT, ADMITTED, ORDER
from fedkin.federate.records import SELECTION, read_record, write_record
from fedkin.graph import Graph

#: A process per site: more than this and the machine would only be busy with itself. Who shares does it in turn.
MOST_SITES = {"run": 50, "share": 500}
#: Without a graph all pairs are candidates, up to so many sites.
_MOST_FOR_ALL_PAIRS = 12
_HEART, _SITES, _MODEL, _RECORD, _LAST_PORT = "organiser", "sites", "model", "simulation.json", 65535


@dataclass(frozen=True)
class Simulation:
    """What the user asked for."""

    contract: Path
    data: Path
    site: str
    graph: Path | None
    out: Path
    port: int = 7447
    by: Literal["share", "run"] = "share"
    lam: float | None = None
    rounds: int | None = None
    rho: float | None = None
    restarts: int = 10
    give_up: float = 3600.0


def simulate(command: Simulation) -> None:
    """Make the federation, unless it is there already, and let its sites share their sums, or run."""
    if command.by == "run":
        _run(command)
        return
    for name, value in _orders(command).items():
        if value is not None:
            raise ParameterError(f"--{name} is for rounds, and here every site shares its sums: add --by run")
    parts = _begin(command)
    heart = Organiser.read(command.out / _HEART)
    share_all(heart, command.out / _SITES, list(parts.values()), command.out / _MODEL)


def _run(command: Simulation) -> None:
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
    """The directories of sites that run, made or found: the organiser's, if it runs, too, and the sites'."""
    parts = _begin(command)
    heart = Organiser.read(command.out / _HEART)
    _enrol(command, heart, list(parts.values()))
    sites = [command.out / _SITES / member.name for member in heart.members]
    return [heart.directory, *sites] if heart.contract.rounds.placement == "central" else sites


def _begin(command: Simulation) -> Mapping[Hashable, Mapping[str, Any]]:
    """Make the directory of a simulation, or check that it is of this one; gives the sites' parts of the table."""
    contract = Contract.read(command.contract)
    if command.by == "run":
        contract.check_rounds(str(command.contract))
    parts = split(command.data, command.site, MOST_SITES[command.by])
    known = _marks(command)
    if command.out.exists() and any(command.out.iterdir()):
        if not (command.out / _RECORD).exists() or read_record(command.out / _RECORD) != known:
            raise DataError(
                f"{command.out} exists, and is not the simulation of this contract, table, graph and settings: choose "
                "another place with --out, or remove it"
            )
        return parts
    _organise(command, contract, list(parts))
    write_record(command.out / _RECORD, known)
    return parts


def split(data: Path, site: str, most: int) -> dict[Hashable, dict[str, Any]]:
    """The columns of each site, without the one that says whose a row is."""
    columns = read_columns(data)
    if site not in columns:
        raise DataError(f"{data} has no column {site!r}; its columns are {', '.join(map(str, columns))}")
    ids = np.array(site_ids(columns[site]), dtype=object)
    known = list(dict.fromkeys(ids.tolist()))
    if len(known) > most:
        raise ParameterError(
            f"{data} has {len(known)} sites; a process for each is too much for one machine (at most {most}): "
            "use fedkin fit"
        )
    rest = {name: column for name, column in columns.items() if name != site}
    return {one: {name: column[ids == one] for name, column in rest.items()} for one in known}


def _marks(command: Simulation) -> dict[str, Any]:
    digests = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in (("contract", command.contract), ("data", command.data), ("graph", command.graph))
        if path is not None
    }
    return {**digests, "by": command.by, "site": command.site, **_orders(command)}


def _orders(command: Simulation) -> dict[str, float | None]:
    """What an order may say instead of the contract."""
    return {"lam": command.lam, "rounds": command.rounds, "rho": command.rho}


def _organise(command: Simulation, contract: Contract, names: Sequence[Hashable]) -> None:
    """The organiser's directory, with an invite for every site."""
    out, runs = command.out, command.by == "run"
    if command.port < 1 or command.port + len(names) > _LAST_PORT:
        raise ParameterError(f"--port must be from 1 to {_LAST_PORT - len(names)}, got {command.port}")
    if runs and command.graph is None and len(names) > _MOST_FOR_ALL_PAIRS:
        raise ParameterError(
            f"{len(names)} sites have too many pairs to link all of them: give candidates with --graph"
        )
    edges = None if command.graph is None else Graph.read(command.graph, sites=names)
    if runs and edges is None:
        edges = Graph.complete(names)
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(PRIVATE_DIRECTORY)
    (out / _SITES).mkdir(mode=PRIVATE_DIRECTORY)
    # who shares needs no address
    lines = [[name, *(["127.0.0.1", command.port + k] if runs else ["", ""])] for k, name in enumerate(names)]
    sites, graph = out / "list.csv", out / "edges.csv"
    write_csv(sites, ["site", "host", "port"], lines)
    if edges is not None:
        edges.write(graph)
    centre = f"127.0.0.1:{command.port + len(names)}" if contract.rounds.placement == "central" else None
    given = None if edges is None else graph
    heart = Organiser.create(command.contract, out / _HEART, graph=given, sites=sites, centre=centre)
    graph.unlink(missing_ok=True)
    sites.unlink()
    heart.invite()


def _enrol(command: Simulation, heart: Organiser, parts: Sequence[Mapping[str, Any]]) -> None:
    """Let all sites join, each in a process of its own, admit them, and send them their orders."""
    sites, set_to = command.out / _SITES, _orders(command)
    ordered = heart.contract.rounds.placement == "replicas" or any(value is not None for value in set_to.values())
    needed = [ADMIT, ORDER] if ordered else [ADMIT]
    names = [member.name for member in heart.members]
    if all((sites / name / paper).exists() for name in names for paper in needed):
        return
    board = Board(dict.fromkeys(names, "invited"))
    with ended_like_ctrl_c(STOP_SIGNAL), only_supervisor(command.out):
        join_all(board, heart, sites, parts)
        papers = {name: [heart.directory / ADMITTED / f"{name}.admit"] for name in names}
        for path, receivers in heart.order(**set_to) if ordered else ():  # type: ignore[arg-type]
            for name in receivers:
                papers[name].append(path)
        words = {name: [["site", "accept", str(sites / name), *map(str, given)]] for name, given in papers.items()}
        refuse(board.run(words, "accepts its certificate", "is admitted"))
