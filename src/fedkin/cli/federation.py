"""Commands of the organiser: ``fedkin federation ...``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.text import Text

from fedkin._base import check_positive, count, listed, write_file
from fedkin.cli.console import (
    WRONG_INPUT,
    Deadline,
    Echo,
    Gather,
    GiveUp,
    Json,
    Linger,
    argument,
    ask_fingerprint,
    messages,
    note,
    option,
    output,
    print_facts,
    print_findings,
    print_json,
    print_rows,
    print_schema,
    say,
    switch,
)
from fedkin.cli.running import become
from fedkin.cli.simulate import deliver_model, simulate
from fedkin.data import Finding, read_columns, row_places, site_ids
from fedkin.errors import DataError, ParameterError
from fedkin.federate import Contract, Organiser, Patience, draft_contract
from fedkin.federate.messages import ADMITTED, KEYS
from fedkin.federate.program import spread_keys
from fedkin.federate.trust import fingerprint as key_fingerprint
from fedkin.federate.trust import read_authority_files
from fedkin.fitting import check_model_place, join_parts, load
from fedkin.graph import Graph
from fedkin.report.text import headline

federation = typer.Typer(no_args_is_help=True)

Directory = Annotated[Path, argument("DIR", "The organiser's directory (fedkin federation new).")]
CaKey = Annotated[Path | None, option("FILE", "Key of your own authority, if it is not in the directory.")]
SiteColumn = Annotated[str | None, typer.Option("--site", metavar="COL", help="Column with the site of each row.")]


@federation.callback()
def _root() -> None: ...


@federation.command()
def draft(
    table: Annotated[Path, argument("TABLE", "An example table, CSV or Parquet.")],
    target: Annotated[str | None, option("COL", "Column to predict; guessed by default.")] = None,
    site: SiteColumn = None,
    name: Annotated[str | None, typer.Option(help="Name of the federation; by default the name of the file.")] = None,
    out: Annotated[Path | None, option("FILE.toml", "File to write; by default standard output.")] = None,
) -> None:
    """Draft a contract from an example table: guess kinds, levels, ranges and loss; you add the units.

    The draft reveals no single rows: ranges are rounded outward, and rare levels are left out.
    """
    if out is not None and out.exists():
        raise DataError(f"{out} already exists: choose another name, or remove it")
    called = name or (table if out is None else out).stem
    plain = "".join(mark if mark.isascii() and (mark.isalnum() or mark in "_.-") else "-" for mark in called)
    made = draft_contract(read_columns(table), plain.strip("-_.")[:40] or "federation", target, site)
    if out is None:
        output().print(Text(made.text), soft_wrap=True, end="")
    else:
        write_file(out, made.text)
    contract = Contract.from_toml(made.text)
    messages().print(
        f"{'drafted' if out is None else out}: {contract.loss['name']} loss for {made.target}, "
        f"{count(len(contract.schema.features), 'feature')}, {count(contract.n_params, 'parameter')}",
        soft_wrap=True,
    )
    for column, reason in made.left_out.items():
        note(f"{column} was left out: {reason}")
    if made.site_column is not None and site is None:
        note(f"{made.site_column} was taken as the site column")
    note("units are not in the table: fill them in, and check ranges and levels, before you send the contract to sites")


@federation.command()
def check(
    contract: Annotated[Path, argument("CONTRACT", "The TOML file of a contract.")],
    data: Annotated[Path | None, option("TABLE", "A table to check against the contract, CSV or Parquet.")] = None,
    site: SiteColumn = None,
    as_json: Json = False,
) -> None:
    """Check a contract, or a table against it, and list all mismatches by column.

    The exit code is 2 if the rows cannot be used unchanged.
    """
    agreed = Contract.read(contract)
    found = {} if data is None else _findings_by_site(agreed, data, site)
    if as_json:
        findings = [
            {"site": one or None, "column": each.column or None, "words": each.text, "refuses": each.refuses}
            for one, some in found.items()
            for each in some
        ]
        about = {"contract": str(contract), "name": agreed.name, "digest": agreed.digest, "loss": agreed.loss}
        more = {"parameters": list(agreed.parameter_names), "schema": agreed.schema.plain(), "findings": findings}
        print_json({**about, **more})
    else:
        _print_contract(contract, agreed)
        if data is not None:
            print_findings(data, found)
    if any(finding.refuses for some in found.values() for finding in some):
        raise typer.Exit(WRONG_INPUT)


@federation.command()
def new(
    contract: Annotated[Path, argument("CONTRACT", "The contract, TOML (fedkin federation draft).")],
    sites: Annotated[
        Path | None, option("FILE.csv", "CSV file with a column site, and host and port of sites that run rounds.")
    ] = None,
    graph: Annotated[Path | None, option("FILE", "Candidate edges between sites, CSV or GraphML.")] = None,
    out: Annotated[Path | None, option("DIR", "Directory to create. [the contract's name]")] = None,
    centre: Annotated[str | None, option("HOST:PORT", "Address of the central machine, for placement central.")] = None,
    ca_cert: Annotated[Path | None, option("FILE", "Your own certificate authority, PEM.")] = None,
    ca_key: Annotated[Path | None, option("FILE", "Its key, PEM; it is not copied.")] = None,
) -> None:
    """Create the directory of a federation, with an authority that admits sites. Needs no rows."""
    if (ca_cert is None) != (ca_key is None):
        raise ParameterError("--ca-cert and --ca-key go together: give both, or none for a new authority")
    own = read_authority_files(ca_cert, ca_key) if ca_cert is not None and ca_key is not None else None
    place = Path(Contract.read(contract).name) if out is None else out
    made = Organiser.create(contract, place, graph=graph, sites=sites, centre=centre, authority=own)
    edges = f", {count(made.graph.n_edges, 'candidate edge')}" if made.graph.n_edges else ""
    say(
        f"created {place} on this machine, the organiser's: {count(len(made.members), 'site')}{edges}.",
        f"The authority's fingerprint is {key_fingerprint(made.authority)}: read it to the sites over a channel "
        f"other than that of the invites. Next: fedkin federation invite {place}",
    )


@federation.command()
def invite(
    directory: Directory,
    sites: Annotated[list[str] | None, argument("[SITE]...", "Names of sites; by default all.")] = None,
    ca_key: CaKey = None,
) -> None:
    """Write invites, each with the contract and the neighbours of that site only."""
    paths = Organiser.read(directory, ca_key).invite(sites or ())
    _say_written(paths, "invite", "fedkin site join SITE.invite --data TABLE")


@federation.command()
def admit(
    directory: Directory,
    requests: Annotated[list[Path], argument("FILE...", "Requests that sites sent, or notices of sites that left.")],
    fingerprint: Annotated[
        str | None, option("HEX", "Fingerprint of the key, as the site reads it out; other keys are refused.")
    ] = None,
    again: Annotated[
        bool, switch("--again", "Admit a site that lost its directory with a new key, after asking the site.")
    ] = False,
    yes: Annotated[bool, switch("--yes", "Skip the prompts for fingerprints, for automation.")] = False,
    ca_key: CaKey = None,
) -> None:
    """Check a site's request against its invite, and issue a short-lived certificate."""
    if fingerprint is not None and len(requests) > 1:
        raise ParameterError("--fingerprint is for a single site: admit sites one by one")
    organiser = Organiser.read(directory, ca_key)
    for path in requests:
        heard, asked = fingerprint, organiser.needs_fingerprint(path, again=again)
        if asked:
            heard = ask_fingerprint(fingerprint, f"Fingerprint of the key in {path}, as the site reads it out", yes)
        done = organiser.admit(path, again=again, expected=heard)
        if done.until is None:
            _say_out(organiser, done.site, "has left", done.path)
            continue
        say(
            f"{done.site} is {'renewed' if done.renewed else 'admitted'} until {done.until:%Y-%m-%d}, with a key whose "
            f"fingerprint is {done.fingerprint}.",
            f"Send {done.path} to {done.site}. At the site: fedkin site accept {done.site} {done.path.name}",
        )
        if asked and not heard:
            note(
                f"nobody compared the fingerprint: before you send the certificate, ask {done.site} to read out that "
                "of its key; if it is another one, do not send it"
            )
        if done.lost:
            say("Sites with the new list of keys refuse connections and signatures of the lost key.")
            _spread(organiser)


@federation.command()
def renew(
    directory: Directory,
    every: Annotated[float | None, option("HOURS", "Keep running, and repeat at this interval.")] = None,
    ca_key: CaKey = None,
) -> None:
    """Renew certificates that expire soon, with the same keys, and send them to running sites."""
    if every is not None:
        check_positive("--every", every)
    while True:
        organiser = Organiser.read(directory, ca_key)
        if names := organiser.renew():
            say(
                f"renewed {listed(names, 8)}: {directory / ADMITTED}; at a site that is not running: fedkin site accept"
            )
        else:
            say("No certificate expires soon.")
        _spread(organiser)
        if every is None:
            return
        time.sleep(3600 * every)


@federation.command()
def order(
    directory: Directory,
    lam: Annotated[float | None, option("X", "Penalty level.")] = None,
    rounds: Annotated[int | None, option("T", "Number of rounds.")] = None,
    rho: Annotated[float | None, option("X", "Step size of the edge duals.")] = None,
    ca_key: CaKey = None,
) -> None:
    """Sign settings of all further rounds; the others stay as in the contract."""
    organiser = Organiser.read(directory, ca_key)
    for path, names in organiser.order(lam=lam, rounds=rounds, rho=rho):
        say(
            f"wrote {path} on this machine, the organiser's.",
            f"Send it to {listed(names, 8)}. At each site: fedkin site accept SITE {path.name}",
        )


@federation.command()
def expel(
    directory: Directory, site: Annotated[str, argument("SITE", "Name of the site.")], ca_key: CaKey = None
) -> None:
    """Expel a site permanently. Its neighbours close their connections once they are notified."""
    organiser = Organiser.read(directory, ca_key)
    _say_out(organiser, organiser.member(site).name, "is expelled", organiser.expel(site))


@federation.command()
def deliver(
    directory: Directory,
    model: Annotated[Path, argument("MODEL", "The model that fedkin fit wrote from the summaries.")],
    sites: Annotated[list[str] | None, argument("[SITE]...", "Names of sites; by default all.")] = None,
    ca_key: CaKey = None,
) -> None:
    """Write each site's part of a model, for that site only."""
    paths = deliver_model(Organiser.read(directory, ca_key), model, sites or ())
    _say_written(paths, "model", "fedkin site accept SITE SITE.model")


@federation.command()
def gather(
    directory: Directory,
    published: Annotated[list[Path], argument("FILE...", "Models that sites published after the rounds.")],
    out: Annotated[Path, option("MODEL", "Directory for the model.")],
) -> None:
    """Join the models that sites published after the rounds."""
    check_model_place(out)
    organiser = Organiser.read(directory)
    found = {}
    dropped: set[frozenset[int]] = set()
    with tempfile.TemporaryDirectory() as folder:
        for path in published:
            file = organiser.read_published(path)
            member = organiser.member(file.site)
            if member.number in found:
                raise DataError(f"{path}: there are two files from {file.site}; keep one")
            file.unpack(Path(folder, file.site))
            part = load(Path(folder, file.site))
            if [str(site) for site in part.sites] != [str(member.id)] or part.schema != organiser.contract.schema:
                raise DataError(f"{path}: expected a model of {file.site} alone, with the columns of the contract")
            found[member.number] = part
            dropped |= {frozenset((member.number, organiser.member(name).number)) for name in file.dropped}
    numbers, graph = sorted(found), organiser.graph
    place = np.full(len(organiser.members), -1)
    place[numbers] = np.arange(len(numbers))
    kept = np.array([frozenset(edge) not in dropped for edge in graph.edges.tolist()], dtype=bool)
    kept &= (place[graph.edges] >= 0).all(axis=1)
    sites = [found[number].sites[0] for number in numbers]
    edges = Graph.from_indices(sites, place[graph.edges[kept]], graph.weights[kept])
    model = join_parts([found[number] for number in numbers], edges)
    model.save(out)
    say(f"wrote {out}: {headline(model)[0]}")


@federation.command()
def status(directory: Directory, as_json: Json = False) -> None:
    """Show for every site whether it is invited, admitted (and until when) or has left, and its
    summaries."""
    organiser = Organiser.read(directory)
    standings = organiser.status()
    if as_json:
        sites = [{**vars(one), "until": None if one.until is None else f"{one.until:%Y-%m-%d}"} for one in standings]
        print_json({"run": organiser.charter.run, "authority": key_fingerprint(organiser.authority), "sites": sites})
        return
    rows = []
    for one in standings:
        is_now = "out" if one.out else "admitted" if one.until else "invited" if one.invited else "not invited"
        until = "" if one.until is None else f"{one.until:%Y-%m-%d}"
        until += " (renew)" if one.ends_soon else ""
        rows.append([one.name, is_now, until, str(one.summaries or "")])
    print_rows(("site", "status", "certificate until", "summaries"), rows)
    output().print(f"authority {key_fingerprint(organiser.authority)}, run {organiser.charter.run}")


@federation.command("run")
def run_centre(
    directory: Directory,
    echo: Echo = True,
    give_up: GiveUp = 3600.0,
    linger: Linger = 600.0,
    gather: Gather = 60.0,
    deadline: Deadline = 5.0,
) -> None:
    """Run the central machine (placement central), which sees parameters, not rows."""
    patience = Patience(give_up=give_up, linger=linger, gather=gather, deadline=deadline)
    become(directory, patience, echo=echo, listen=None, centre=True)


federation.command()(simulate)


def _say_written(paths: Sequence[Path], what: str, command: str) -> None:
    where = str(paths[0]) if len(paths) == 1 else f"{paths[0].parent}/ ({count(len(paths), what)})"
    say(f"wrote {where} on this machine, the organiser's.", f"Send each site its own file. At the site: {command}")


def _say_out(organiser: Organiser, site: str, what: str, path: Path) -> None:
    say(
        f"{site} {what} permanently: its certificate will not be renewed, and its summaries no longer count.",
        f"The signed notice is in {path}.",
    )
    _spread(organiser)


def _spread(organiser: Organiser) -> None:
    """Send the newest list of keys to running sites."""
    if organiser.contract.method != "fused":
        return  # without rounds there are no connections
    path = organiser.directory / KEYS
    if have := spread_keys(organiser):
        say(f"{listed(have, 8)} {'has' if len(have) == 1 else 'have'} {path} now, and pass it on.")
    else:
        say(
            f"No running site could be reached from here. Send {path} to one of them, which passes it on. "
            f"At the site: fedkin site accept SITE {path.name}"
        )


def _findings_by_site(contract: Contract, data: Path, site_column: str | None) -> dict[str, list[Finding]]:
    """Return the mismatches of the table as a whole (key "") and of each site in it."""
    columns = read_columns(data)
    places = row_places(data, columns)
    if site_column is None:
        return {"": contract.check(columns, at=places)}
    if site_column not in columns:
        raise DataError(f"there is no column {site_column!r} for the sites; the table has {', '.join(columns)}")
    ids = np.array([str(one) for one in site_ids(columns[site_column])], dtype=object)
    found = {}
    for site in dict.fromkeys(ids.tolist()):
        own = np.flatnonzero(ids == site)
        part = {name: column[own] for name, column in columns.items()}
        found[site] = contract.check(part, at=lambda row, own=own: places(int(own[row])))  # type: ignore[misc]
    # errors common to all sites, such as a missing column, are reported once
    common = [one for one in next(iter(found.values()), ()) if all(one in some for some in found.values())]
    if len(found) == 1 or not common:
        return found
    return {"": common} | {site: [one for one in some if one not in common] for site, some in found.items()}


def _print_contract(path: Path, contract: Contract) -> None:
    """Print a contract as a few lines and a table of its columns."""
    thresholds, schema = contract.thresholds, contract.schema
    how = "by kin" if contract.method == "kin" else f"fused by the {contract.penalty} penalty"
    target = "no target" if schema.target is None else f"target {schema.target.name}"
    print_facts(
        {
            "contract": f"{path}: {contract.name}, digest {contract.digest[:16]}",
            "model": f"{contract.loss['name']} loss, {how}, {target}, {count(contract.n_params, 'parameter')}",
            "thresholds": f"{thresholds.rows} rows, {thresholds.rows_per_parameter:g} for each parameter, "
            f"{thresholds.cell} with each level that occurs",
        }
    )
    print_schema(schema)
