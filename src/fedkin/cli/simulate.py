"""Define ``fedkin demo`` and ``study`` on generated sites, and ``fedkin federation simulate``.

Each simulated site works in its own directory: it joins with its part of the table, accepts its certificate, and then
shares its sums or runs in its own process. Files are copied between directories as users would send them. An
interrupted command continues when it is run again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from fedkin import __version__
from fedkin._base import PRIVATE_DIRECTORY, Array, Say, count, percent, tracked, write_file
from fedkin._progress import progress
from fedkin.cli.console import (
    Json,
    add_row,
    argument,
    ended_like_ctrl_c,
    interrupts_later,
    note,
    option,
    output,
    plain_table,
    print_facts,
    print_json,
    say,
    switch,
)
from fedkin.cli.fit import command_line, fit_opened, print_result
from fedkin.cli.models import write_report
from fedkin.cli.reading import Opened, open_summaries
from fedkin.cli.running import run_all, say_end
from fedkin.core import global_fit, local_fit, oracle_fit
from fedkin.data import Federation, read_columns, site_ids, write_csv
from fedkin.datasets import Design, paper_design
from fedkin.errors import DataError, FedkinError, ParameterError
from fedkin.federate import SELECTION, STOP_SIGNAL, Contract, Organiser, Site, only_supervisor, sharing, steps_of
from fedkin.federate.ledger import PLACE
from fedkin.federate.messages import ADMIT, ADMITTED, INVITE, INVITES, KEYS, ORDER, QUERIES, SENT, SUMMARIES
from fedkin.federate.records import CHOICE, Choice, read_record, write_record
from fedkin.federate.trust import fingerprint
from fedkin.fitting import FitOptions, FittedModel, Queries, fit, load
from fedkin.graph import Graph
from fedkin.report import demo_picture
from fedkin.report.text import facts
from fedkin.studies import launch

#: Largest number of sites on one machine: running sites have a process each, sharing sites take turns.
MOST_SITES = {"run": 50, "share": 500}
_MOST_FOR_ALL_PAIRS = 12  # without a graph all pairs are candidates, up to this many sites
_ORGANISER, _SITES, _MODEL, _RECORD, _LAST_PORT = "organiser", "sites", "model", "simulation.json", 65535

#: A task of a site.
Task = Callable[[], object]


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
    restarts: Annotated[int, typer.Option(help="run: how often to restart a site that dies.")] = 10,
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


# --- what sites do ----------------------------------------------------------------------------------------------------


def _join(invite: Path, place: Path, columns: Mapping[str, Any], seal: str, below_minima: bool) -> None:
    with _own_table(place, columns) as table:
        Site.join(invite, table, place, expected=seal, steps=steps_of, below_minima=below_minima)


def _accept(place: Path, *received: Path) -> None:
    for path in received:
        Site.read(place).accept(path)


def _accept_and_share(place: Path, admitted: Path) -> None:
    _accept(place, admitted)
    sharing.share(place)


def _do(tasks: Mapping[str, Task], doing: str) -> dict[str, FedkinError]:
    """Run the tasks of these sites; return the errors of those that failed. Ctrl-C waits for the end of a task."""
    failed: dict[str, FedkinError] = {}
    with progress(doing):
        for name in tracked(list(tasks), doing):
            try:
                with interrupts_later():
                    tasks[name]()
            except FedkinError as error:
                failed[name] = error
    return failed


def _refuse(failed: Mapping[str, FedkinError]) -> None:
    for name, error in failed.items():
        raise DataError(f"{name}: {error}")


# --- steps ------------------------------------------------------------------------------------------------------------


@contextmanager
def _own_table(place: Path, columns: Mapping[str, Any]) -> Iterator[Path]:
    """Write a site's part of the table next to its directory, until the site has joined."""
    path = place.with_name(f"{place.name}.csv")
    try:
        cells = zip(*(column.tolist() for column in columns.values()), strict=True)
        write_csv(path, list(columns), [list(row) for row in cells])
        yield path
    finally:
        path.unlink(missing_ok=True)


def _join_all(organiser: Organiser, sites: Path, parts: Sequence[Mapping[str, Any]], below_minima: bool) -> None:
    """Let every site join with its own rows, and admit it."""
    seal = fingerprint(organiser.authority)
    own = dict(zip([member.name for member in organiser.members], parts, strict=True))
    invites = {name: organiser.directory / INVITES / f"{name}.invite" for name in own}
    new = [name for name in own if not (sites / name / INVITE).exists()]
    how = (seal, below_minima)
    joins: dict[str, Task] = {name: partial(_join, invites[name], sites / name, own[name], *how) for name in new}
    for name, error in _do(joins, "sites join").items():
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
        accepts: dict[str, Task] = {name: partial(_accept, sites / name, *given) for name, given in papers.items()}
        _refuse(_do(accepts, "sites accept their certificates"))


def _share_all(organiser: Organiser, out: Path, parts: Sequence[Mapping[str, Any]], below_minima: bool) -> None:
    """Fit a model for each site from one message per site, or more if the loss needs them."""
    sites, model_place = out / _SITES, out / _MODEL
    with ended_like_ctrl_c(STOP_SIGNAL), only_supervisor(out):
        _join_all(organiser, sites, parts, below_minima)
        shares: dict[str, Task] = {}
        for member in organiser.members:
            place = sites / member.name
            if not (place / SENT / f"{member.name}.summary").exists():
                admitted = organiser.directory / ADMITTED / f"{member.name}.admit"
                shares[member.name] = partial(_accept_and_share, place, admitted)
        failed = _do(shares, "sites share their sums")
        for name, error in failed.items():
            note(f"{name}: {error}")
        if len(failed) == len(organiser.members):
            raise DataError("no site shares a summary, so there is no model: see the reasons above")
        say(f"{count(_carry(organiser, sites), 'file')} with sums were sent to the organiser.")
        model, opened = _fit(organiser, sites)
        model.save(model_place)
        paths = {path.stem: path for path in deliver_model(organiser, model_place, ())}
        accepts: dict[str, Task] = {name: partial(_accept, sites / name, path) for name, path in paths.items()}
        _refuse(_do(accepts, "sites accept their models"))
    print_result(model, opened, organiser.directory / SUMMARIES, model_place)
    first = sites / next(iter(paths))
    each = f"{count(len(paths), 'model')}, one at each site: {first}/model and so on"
    say(f"{each}. The organiser's model of all sites: {model_place}")


def _fit(organiser: Organiser, sites: Path) -> tuple[FittedModel, Opened]:
    """Fit the model of all sites, after as many queries as the loss needs."""
    while True:
        answers: dict[str, Task] = {}
        for query in sorted((organiser.directory / QUERIES).glob("*.ask")):
            name, _, number = query.stem.rpartition("@")
            if not (sites / name / SENT / f"{query.stem}.summary").exists():
                answers[name] = partial(sharing.answer, sites / name, query)
        if answers:
            _refuse(_do(answers, f"sites answer query {number}"))
            say(f"{count(len(answers), 'site')} answered query {number} of the organiser.")
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


# --- fedkin demo and fedkin study: methods compared with a known truth ---- ------------------------------------------

GROUPS = 5
LOCAL, GLOBAL, GIVEN, SELECTED, KIN, ORACLE = "Local", "Global", "Fed-ADMM", "Fed-ADMM-ES", "Kin", "Oracle"
_MEANING = {
    LOCAL: "each site alone",
    GLOBAL: "one model for all",
    GIVEN: "the graph as given",
    SELECTED: "its edges tested first",
    KIN: "finds similar sites",
    ORACLE: "told the true groups",
}
_CALLED = {KIN: "Fedkin", GIVEN: "Graph as given", SELECTED: "Edges tested first"}  # in the report


def demo(
    out: Annotated[Path, option("DIR", "Directory for the report and the data of the demonstration.")] = Path(
        "demo-report"
    ),
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 60,
    rows: Annotated[int, typer.Option(min=2, help="Training rows per site, and as many test rows.")] = 60,
    features: Annotated[int, typer.Option(min=1, help="Number of features.")] = 20,
    varrho: Annotated[float, typer.Option(help="Share of the graph that is wrong.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    as_json: Json = False,
    *,
    context: typer.Context,
) -> None:
    """Generate sites with a partly wrong graph, and compare how close each method comes to the truth."""
    if sites < GROUPS:
        raise ParameterError(f"--sites must be at least {GROUPS}, the number of true groups, got {sites}")
    if out.is_file():
        raise ParameterError(f"--out {out} is a file, expected a directory for the report")
    with progress("generating sites") as say:
        design = _named(paper_design(sites, 2 * rows, features, GROUPS, varrho=varrho, seed=seed))
        out.mkdir(parents=True, exist_ok=True)  # before the work, to report an unwritable path at once
        train, test = design.federation.split(0.5, seed)
        theta, model = _estimates(train, design, seed, say)
        error = {name: design.error(estimate) for name, estimate in theta.items()}
        each = {name: _squared_errors(estimate, test) for name, estimate in theta.items()}
        held_out = {name: float(errors.mean()) for name, errors in each.items()}  # sites have equally many rows
        summary = _summary(design, model, rows, error)
        name, other = sorted(_called(held_out).keys() - {ORACLE}, key=_called(held_out).__getitem__)[:2]
        much = percent(1 - _called(held_out)[name] / _called(held_out)[other], 1)
        comparison = {
            "metric": "mean squared error",
            "repeats": 1,
            "test_size": 0.5,
            "verdict": f"Use {name}: mean squared error {much} lower than the next best ({other}).",
            "remarks": [summary],
            "methods": [{"name": name, "mean": value} for name, value in _called(held_out).items()],
            "sites": [
                {"site": site, **{name: float(errors[u]) for name, errors in _called(each).items()}}
                for u, site in enumerate(model.sites)
            ],
            "more": {"squared distance from the truth": _called(error)},
        }
        shown = replace(model, comparison=comparison, history={"command": command_line(context)})
        write_report(shown, out / "report.html")
        kin = model.kin
        assert kin is not None
        likely = kin.graph("probability", least=0.5)
        write_file(out / "picture.svg", demo_picture(error, KIN, design.graph, likely, design.labels))
        _write_data(design, out)
    if as_json:
        print_json(
            {
                "fedkin_version": __version__,
                "report": str(out / "report.html"),
                "estimation_error": error,
                "held_out_error": held_out,
                "n_groups": model.n_groups,
                "true_groups": GROUPS,
                "resolved": kin.resolved,
                "summary": summary,
            }
        )
        return
    console = output()
    table = plain_table("method", "", "held-out", "estimation", "x oracle", numbers_from=2)
    for name, value in error.items():
        cells = (name, _MEANING[name], f"{held_out[name]:.4g}", f"{value:.3g}", f"{value / error[ORACLE]:.2f}")
        add_row(table, *cells, style="bold green" if name == KIN else "")
    console.print("Error of each method on held-out rows and against the true parameters", style="bold")
    console.print(table)
    console.print(f"{summary}\n")
    print_facts({**facts(model, brief=True), "report": str((out / "report.html").resolve())})
    console.print("\nThe same sites from their files, as you would fit your own:")
    program = "fedkin" if shutil.which("fedkin") else f"{sys.executable} -m fedkin"
    command = f"{program} fit {out / 'data.csv'} --site site --target y --graph {out / 'graph.csv'}"
    console.print(command, style="bold", soft_wrap=True)


def _named(design: Design) -> Design:
    """Rename sites from numbers to names."""
    fed, graph = design.federation, design.graph
    names = [f"site{u:0{len(str(fed.n_sites - 1))}d}" for u in range(fed.n_sites)]
    named = Federation.from_arrays(fed.X, fed.y, np.repeat(names, fed.n_samples))
    return replace(design, federation=named, graph=Graph.from_indices(names, graph.edges, graph.weights))


def _called(by_method: dict[str, Any]) -> dict[str, Any]:
    return {_CALLED.get(name, name): value for name, value in by_method.items()}


def _estimates(train: Federation, design: Design, seed: int, say: Say) -> tuple[dict[str, Array], FittedModel]:
    """Return the parameters of all methods, and the model of Fedkin's default fit."""
    # as in the paper: no intercept, features as they are
    plain = FitOptions(method="fused", fit_intercept=False, standardize=False, select="none", seed=seed)
    say("Local, Global and Oracle")
    theta = {LOCAL: local_fit(train).theta, GLOBAL: np.tile(global_fit(train), (train.n_sites, 1))}
    for name, how in ((GIVEN, plain), (SELECTED, replace(plain, select="bonferroni"))):
        theta[name] = fit(train, design.graph, how, lambda text, name=name: say(f"{_MEANING[name]}: {text}")).coef[:, 0]
    model = fit(train, design.graph, FitOptions(fit_intercept=False, seed=seed), say)
    return {**theta, KIN: model.coef[:, 0], ORACLE: oracle_fit(train, design.labels.tolist())}, model


def _squared_errors(theta: Array, test: Federation) -> Array:
    """Return the mean squared error of each site."""
    assert test.y is not None
    error = (test.y - np.einsum("np,np->n", test.X, theta[test.site_index])) ** 2
    return np.asarray(np.bincount(test.site_index, weights=error) / test.n_samples)


def _summary(design: Design, model: FittedModel, rows: int, error: dict[str, float]) -> str:
    wrong = int((design.labels[design.graph.edges[:, 0]] != design.labels[design.graph.edges[:, 1]]).sum())
    found, true = model.groups.tolist(), design.labels.tolist()
    right = len(set(zip(found, true, strict=True))) == len(set(found)) == len(set(true))  # the same partition
    resolved = model.kin is not None and model.kin.resolved
    groups = f"{count(model.n_groups, 'group')} of sites" if resolved else "no resolved groups"
    alone, told = (f"{error[KIN] / error[name]:.2f} times" for name in (LOCAL, ORACLE))
    return (
        f"Each of the {model.n_sites} sites kept its own {rows} rows. A graph stated which sites may be alike, "
        f"but {wrong} of its {design.graph.n_edges} edges were wrong. Fedkin found {groups}"
        f"{', exactly the true ones' if right else f'; in truth there are {GROUPS}'}. "
        f"Its error is {alone} that of a site on its own and {told} that of an oracle that knows the groups."
    )


def _write_data(design: Design, out: Path) -> None:
    fed, graph = design.federation, design.graph
    assert fed.y is not None
    rows = (
        [fed.sites[u], round(float(y), 6), *np.round(x, 6).tolist()]
        for u, y, x in zip(fed.site_index.tolist(), fed.y, fed.X, strict=True)
    )
    write_csv(out / "data.csv", ["site", "y", *fed.feature_names], rows)
    write_csv(out / "graph.csv", ["source", "target"], ([fed.sites[j], fed.sites[i]] for i, j in graph.edges.tolist()))


def study(
    name: Annotated[
        str | None,
        argument(
            "NAME",
            "estimation, sensitivity, convergence, availability, selection, error-rates, rate, sparse, kin, "
            "coverage, population, election, paper (all figures of the paper, on one page), all, or the path of a "
            "study's TOML file; omit it with --config.",
        ),
    ] = None,
    out: Annotated[Path, option("DIR", "Directory for rows, figures, tables and pages.")] = Path("studies"),
    quick: Annotated[
        bool, switch("--quick", "Fewer settings and replications: minutes, not hours. Writes to NAME-quick.")
    ] = False,
    config: Annotated[Path | None, option("FILE.toml", "A custom study instead of NAME.")] = None,
    jobs: Annotated[int | None, option("N", "Number of processes; by default one per core.")] = None,
    data: Annotated[Path | None, option("DIR", "Directory of the election data, for the study election.")] = None,
    redraw: Annotated[
        bool, switch("--redraw", "Compute nothing: redraw from the rows.parquet of an earlier run.")
    ] = False,
    replications: Annotated[int | None, option("N", "Maximum number of replications of every setting.")] = None,
) -> None:
    """Run a study: figure, table, page and the underlying rows.

    Finished cells are kept in DIR: a stopped run resumes, and a finished run is only redrawn.
    """
    launch(name, out=out, quick=quick, config=config, jobs=jobs, data=data, redraw=redraw, replications=replications)
