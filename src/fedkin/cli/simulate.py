"""Define ``fedkin federation simulate``: a whole federation on one machine, with a directory for each site.

Each simulated site works in its own directory: it joins with its part of the table, accepts its certificate, and then
shares its sums or runs in its own process. Files are copied between directories as users would send them. An
interrupted command continues when it is run again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from fedkin._base import PRIVATE_DIRECTORY, count, tracked, write_file
from fedkin._progress import progress
from fedkin.cli.console import (
    argument,
    ended_like_ctrl_c,
    interrupts_later,
    note,
    option,
    say,
    switch,
)
from fedkin.cli.fit import fit_opened, print_result
from fedkin.cli.reading import Opened, open_summaries
from fedkin.cli.running import run_all, say_end
from fedkin.data import read_columns, site_ids, write_csv
from fedkin.errors import DataError, FedkinError, ParameterError
from fedkin.federate import SELECTION, STOP_SIGNAL, Contract, Organiser, Site, only_supervisor, sharing, steps_of
from fedkin.federate.ledger import PLACE
from fedkin.federate.messages import ADMIT, ADMITTED, INVITE, INVITES, KEYS, ORDER, QUERIES, SENT, SUMMARIES
from fedkin.federate.records import CHOICE, Choice, read_record, write_record
from fedkin.federate.trust import fingerprint
from fedkin.fitting import FittedModel, Queries, load
from fedkin.graph import Graph

#: Largest number of sites on one machine: running sites have a process each, sharing sites take turns.
MOST_SITES = {"run": 50, "share": 500}
_MOST_FOR_ALL_PAIRS = 12  # without a graph all pairs are candidates, up to this many sites
_ORGANISER, _SITES, _MODEL, _RECORD, _LAST_PORT = "organiser", "sites", "model", "simulation.json", 65535


def simulate(
    contract: Annotated[Path, argument("CONTRACT", "The contract, TOML (fedkin federation draft).")],
    data: Annotated[Path, option("TABLE", "The rows of all sites.")],
    site: Annotated[str, option("COL", "Column with the site of each row.")],
    out: Annotated[Path, option("DIR", "Directory to create; run the command again to continue in it.")],
    graph: Annotated[Path | None, option("FILE", "Candidate edges, CSV or GraphML. [all pairs]")] = None,
    by: Annotated[
        Literal["share", "run"],
        typer.Option(help="share: each site sends its summary and the organiser fits; run: rounds between neighbours."),
    ] = "share",
    lam: Annotated[float | None, option("X", "run: penalty level. [the contract's]")] = None,
    rounds: Annotated[int | None, option("T", "run: number of rounds. [the contract's]")] = None,
    rho: Annotated[float | None, option("X", "run: step size of the edge duals. [the contract's]")] = None,
    port: Annotated[int, typer.Option(help="run: sites listen on this port of 127.0.0.1 and the next ones.")] = 7447,
    restarts: Annotated[int, typer.Option(help="run: maximum number of restarts of a site.")] = 10,
    give_up: Annotated[float, option("SECONDS", "run: maximum wait for another site.")] = 3600.0,
    below_minima: Annotated[
        bool, switch("--below-minima", "Let sites join as with site join --below-minima; rounds in batches need it.")
    ] = False,
) -> None:
    """Try a whole federation on one machine: split one table, with a directory and a process per site.

    Exit codes: 0 all sites finished, 1 a site failed, 2 wrong input, 3 fedkin site stop, 130 Ctrl-C or a signal.
    """
    orders = {"lam": lam, "rounds": rounds, "rho": rho}
    for name, value in orders.items():
        if by == "share" and value is not None:
            raise ParameterError(f"--{name} is for rounds, but these sites share sums: add --by run")
    agreed = Contract.read(contract)
    if by == "run":
        agreed.check_rounds(str(contract))
        if agreed.rounds.lam is None and lam is None:
            raise ParameterError(f"{contract}: no lam is set: add --lam X, or lam to [rounds] in the contract")
    parts = split(data, site, MOST_SITES[by])
    named = {"contract": contract, "data": data, "graph": graph}
    record: dict[str, Any] = {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in named.items() if path is not None
    }
    record |= {"by": by, "site": site, **orders, **({"below_minima": True} if below_minima else {})}
    if by == "run" and agreed.rounds.batch_size is not None and not below_minima:
        hint = "leave out batch_size, or add --below-minima"
        raise ParameterError(f"{contract}: rounds in batches can reveal single rows: {hint}")
    if not out.exists() or not any(out.iterdir()):
        _organise(agreed, contract, list(parts), out, graph, by == "run", port)
        write_record(out / _RECORD, record)
    elif not (out / _RECORD).exists() or read_record(out / _RECORD) != record:
        raise DataError(
            f"{out} exists, but is a simulation with another contract, table, graph or settings: choose another "
            "directory with --out, or remove it"
        )
    # nothing leaves this machine: the user's own ledgers stay as they are
    os.environ.setdefault(PLACE, str((out / "ledgers").absolute()))
    organiser = Organiser.read(out / _ORGANISER)
    if by == "share":
        _share_all(organiser, out, list(parts.values()), below_minima)
        return
    _enrol(organiser, out, list(parts.values()), orders, below_minima)
    sites = [out / _SITES / member.name for member in organiser.members]
    places = [organiser.directory, *sites] if agreed.rounds.placement == "central" else sites
    tested, waits = agreed.rounds.select is not None, agreed.rounds.placement == "peer"
    lines = run_all(out, places, edge_tests=tested, waits=waits, restarts=restarts, give_up=give_up)
    say_end(lines, places)
    if agreed.rounds.lam == "cv" and lam is None:
        levels = sorted({read_record(place / CHOICE, Choice).lam for place in sites}, reverse=True)
        say(f"lam {', '.join(f'{level:.4g}' for level in levels)}, chosen by the sites on held-out rows.")
    if tested:
        dropped = sum(len(read_record(place / SELECTION)["dropped"]) for place in sites) // 2
        note(f"{count(dropped, 'edge')} dropped by edge tests")


def split(data: Path, site: str, most: int) -> dict[Hashable, dict[str, Any]]:
    """Return the columns of each site, without the site column."""
    columns = read_columns(data)
    if site not in columns:
        raise DataError(f"{data} has no column {site!r}; its columns are {', '.join(map(str, columns))}")
    ids = np.array(site_ids(columns[site]), dtype=object)
    known = list(dict.fromkeys(ids.tolist()))
    if len(known) > most:
        words = f"which is too much for one machine (at most {most}): use fedkin fit"
        raise ParameterError(f"{data} has {len(known)} sites, {words}")
    rest = {name: column for name, column in columns.items() if name != site}
    return {one: {name: column[ids == one] for name, column in rest.items()} for one in known}


def _organise(
    contract: Contract, path: Path, names: Sequence[Hashable], out: Path, graph: Path | None, runs: bool, port: int
) -> None:
    """Create the organiser's directory, with an invite for every site."""
    if port < 1 or port + len(names) > _LAST_PORT:
        raise ParameterError(f"--port must be from 1 to {_LAST_PORT - len(names)}, got {port}")
    if runs and graph is None and len(names) > _MOST_FOR_ALL_PAIRS:
        words = "sites have too many pairs to connect them all: give candidate edges with --graph"
        raise ParameterError(f"{len(names)} {words}")
    edges = None if graph is None else Graph.read(graph, sites=names)
    if runs and edges is None:
        edges = Graph.complete(names)
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(PRIVATE_DIRECTORY)
    (out / _SITES).mkdir(mode=PRIVATE_DIRECTORY)
    # sharing needs no address
    lines = [[name, *(["127.0.0.1", port + k] if runs else ["", ""])] for k, name in enumerate(names)]
    listed, candidates = out / "list.csv", out / "edges.csv"
    write_csv(listed, ["site", "host", "port"], lines)
    if edges is not None:
        edges.write(candidates)
    centre = f"127.0.0.1:{port + len(names)}" if contract.rounds.placement == "central" else None
    given = None if edges is None else candidates
    organiser = Organiser.create(path, out / _ORGANISER, graph=given, sites=listed, centre=centre)
    candidates.unlink(missing_ok=True)
    listed.unlink()
    organiser.invite()


def _each(names: Iterable[str], doing: str, task: Callable[[str], object]) -> dict[str, FedkinError]:
    """Do a task for each site; return the errors of those that failed. Ctrl-C waits for the end of a task."""
    failed: dict[str, FedkinError] = {}
    with progress(doing):
        for name in tracked(list(names), doing):
            try:
                with interrupts_later():
                    task(name)
            except FedkinError as error:
                failed[name] = error
    return failed


def _refuse(failed: Mapping[str, FedkinError]) -> None:
    for name, error in failed.items():
        raise DataError(f"{name}: {error}")


def _accept(place: Path, *received: Path) -> None:
    for path in received:
        Site.read(place).accept(path)


def _join_all(organiser: Organiser, sites: Path, parts: Sequence[Mapping[str, Any]], below_minima: bool) -> None:
    """Let every site join with its own rows, and admit it."""
    own = dict(zip([member.name for member in organiser.members], parts, strict=True))
    seal = fingerprint(organiser.authority)

    def join(name: str) -> None:
        table, columns = sites / f"{name}.csv", own[name]
        try:
            cells = zip(*(column.tolist() for column in columns.values()), strict=True)
            write_csv(table, list(columns), [list(row) for row in cells])
            invite = organiser.directory / INVITES / f"{name}.invite"
            Site.join(invite, table, sites / name, expected=seal, steps=steps_of, below_minima=below_minima)
        finally:
            table.unlink(missing_ok=True)

    new = [name for name in own if not (sites / name / INVITE).exists()]
    for name, error in _each(new, "sites join", join).items():
        shutil.rmtree(sites.parent)  # so that the same command starts again
        raise DataError(f"rows of {organiser.member(name).id!r}: {error}")
    for name in own:
        if not (organiser.directory / ADMITTED / f"{name}.admit").exists():
            organiser.admit(sites / name / f"{name}.request")
    say(f"{count(len(own), 'site')} joined, each with its own key, and were admitted.")


def _enrol(
    organiser: Organiser,
    out: Path,
    parts: Sequence[Mapping[str, Any]],
    orders: Mapping[str, float | None],
    below_minima: bool,
) -> None:
    """Let all sites join, admit them, and send them their orders."""
    sites = out / _SITES
    ordered = organiser.contract.rounds.placement == "replicas" or any(one is not None for one in orders.values())
    needed = [ADMIT, ORDER] if ordered else [ADMIT]
    names = [member.name for member in organiser.members]
    if all((sites / name / paper).exists() for name in names for paper in needed):
        return
    with ended_like_ctrl_c(STOP_SIGNAL), only_supervisor(out):
        _join_all(organiser, sites, parts, below_minima)
        keys = organiser.directory / KEYS
        papers = {name: [organiser.directory / ADMITTED / f"{name}.admit", keys] for name in names}
        for path, receivers in organiser.order(**orders) if ordered else ():  # type: ignore[arg-type]
            for name in receivers:
                papers[name].append(path)
        accept = "sites accept their certificates"
        _refuse(_each(papers, accept, lambda name: _accept(sites / name, *papers[name])))


def _share_all(organiser: Organiser, out: Path, parts: Sequence[Mapping[str, Any]], below_minima: bool) -> None:
    """Fit a model for each site from one message per site, or more if the loss needs them."""
    sites, model_place = out / _SITES, out / _MODEL

    def share(name: str) -> None:
        _accept(sites / name, organiser.directory / ADMITTED / f"{name}.admit")
        sharing.share(sites / name)

    with ended_like_ctrl_c(STOP_SIGNAL), only_supervisor(out):
        _join_all(organiser, sites, parts, below_minima)
        names = [member.name for member in organiser.members]
        new = [name for name in names if not (sites / name / SENT / f"{name}.summary").exists()]
        failed = _each(new, "sites share their sums", share)
        for name, error in failed.items():
            note(f"{name}: {error}")
        if len(failed) == len(names):
            raise DataError("no site shares a summary, so there is no model: see the reasons above")
        say(f"{count(_carry(organiser, sites), 'file')} with sums were sent to the organiser.")
        model, opened = _fit(organiser, sites)
        model.save(model_place)
        paths = {path.stem: path for path in deliver_model(organiser, model_place, ())}
        _refuse(_each(paths, "sites accept their models", lambda name: _accept(sites / name, paths[name])))
    print_result(model, opened, organiser.directory / SUMMARIES, model_place)
    first = sites / next(iter(paths))
    each = f"{count(len(paths), 'model')}, one at each site: {first}/model and so on"
    say(f"{each}. The organiser's model of all sites: {model_place}")


def _fit(organiser: Organiser, sites: Path) -> tuple[FittedModel, Opened]:
    """Fit the model of all sites, after as many queries as the loss needs."""
    asked: dict[str, Path] = {}
    while True:
        asked.clear()
        for query in sorted((organiser.directory / QUERIES).glob("*.ask")):
            name, _, number = query.stem.rpartition("@")
            if not (sites / name / SENT / f"{query.stem}.summary").exists():
                asked[name] = query
        if asked:
            doing = f"sites answer query {number}"
            _refuse(_each(asked, doing, lambda name: sharing.answer(sites / name, asked[name])))
            say(f"{count(len(asked), 'site')} answered query {number} of the organiser.")
        _carry(organiser, sites)
        with progress("fitting") as report:
            opened = open_summaries(organiser.directory / SUMMARIES, {})
            found = fit_opened(opened, report)
        if not isinstance(found, Queries):
            return found, opened
        assert opened.ask is not None
        opened.ask(found)


def _carry(organiser: Organiser, sites: Path) -> int:
    """Copy the sites' files to the organiser, as users would send them; return the number of its files."""
    folder = organiser.directory / SUMMARIES
    for path in sites.glob(f"*/{SENT}/*.summary"):
        if not (folder / path.name).exists():
            write_file(folder / path.name, path.read_bytes(), private=True)
    return len(list(folder.glob("*.summary")))


def deliver_model(organiser: Organiser, model: Path, sites: Sequence[str]) -> list[Path]:
    """Write the parts of a model for some or all of its sites."""
    fitted, out = load(model), organiser.out()
    ids = {str(site): site for site in fitted.sites}
    with tempfile.TemporaryDirectory() as folder:
        parts = {}
        for name in sites or list(ids):
            member = organiser.member(name)
            if member.name in out:
                raise DataError(f"{member.name} has left or was expelled, so nothing is sent to it")
            if str(member.id) not in ids:
                raise DataError(f"{model} has no model of {name}, which sent no summary in time")
            parts[member.name] = Path(folder, member.name)
            fitted.part([ids[str(member.id)]]).save(parts[member.name])
        return organiser.deliver(parts)
