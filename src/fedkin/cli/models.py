"""``fedkin predict``, ``inspect`` and ``report``: what to do with a model that was saved."""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedkin._base import AnyArray, Array, check_level, count, listed, probability, write_file
from fedkin.cli.arguments import Json, argument, option, switch
from fedkin.cli.console import messages, note, output, print_facts, print_json
from fedkin.cli.format import (
    finite,
    format_origin,
    model_document,
    model_facts,
    note_lines,
    population_table,
    print_coefficients,
    print_comparison,
    print_groups,
    schema_table,
)
from fedkin.cli.reading import check_new_file, known_ids, read_table, rows_by_site, rows_to_predict
from fedkin.data import near_name, write_csv
from fedkin.errors import ParameterError, TableWarning, UnknownSiteError
from fedkin.fitting import FittedModel, load, position_of
from fedkin.report import model_card, read_coordinates, report_page

Model = Annotated[Path, argument("MODEL", "A model directory that fedkin fit wrote.")]
Level = Annotated[float | None, option("X", "Add intervals of the mean response at this level.")]


def predict(
    model: Model,
    data: Annotated[Path, argument("DATA", "Rows to predict: a file, or a directory with one file per site.")],
    site: Annotated[str | None, option("COL", "Column of the sites; by default the one of the fit.")] = None,
    offset: Annotated[str | None, option("COL", "Column of the offset; by default the one of the fit.")] = None,
    new_site: Annotated[
        bool, switch("--new-site", "Predict sites that were not part of the fit, too (method kin).")
    ] = False,
    rows: Annotated[Path | None, option("FILE", "Labelled rows of new sites, from which they get models.")] = None,
    level: Level = None,
    out: Annotated[Path | None, option("FILE.csv", "File for the predictions; by default standard output.")] = None,
    as_json: Json = False,
) -> None:
    """Predict rows with a fitted model, each with the model of its site."""
    if level is not None:
        check_level(level)
    if out is not None:
        check_new_file(out, "predictions.csv", data, rows, model)
    if rows is not None and not new_site:
        raise ParameterError("--rows are the labelled rows of new sites: add --new-site")
    fitted = load(model)
    column = site or fitted.options.get("site_column")
    if fitted.schema is None:
        federation = read_table(data, site=column, features=fitted.feature_names, offset=offset or fitted.offset_name)
        order = np.argsort(federation.row_order)  # back to the order of the file
        found: list[Hashable] = [federation.sites[u] for u in federation.site_index[order].tolist()]
        X: AnyArray | dict[str, AnyArray] = federation.X[order]
        shift = None if federation.offset is None else federation.offset[order]
    else:
        if offset is not None and fitted.schema.agreed:
            raise ParameterError(f"--offset is for the contract to say ({fitted.schema.offset}): leave it out")
        # in a directory the files are named like the sites, whatever the column was called
        found, X, shift = rows_to_predict(data, site if data.is_dir() else column, fitted, offset)
    sites = known_ids(fitted, found)
    models = _models_of(fitted, sites, new_site, {} if rows is None else rows_by_site(rows, column))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # reading has told of them, with their lines
        columns = _predictions(models, X, sites, shift, level)
    header = ["row", column or "site", *columns]
    table: list[list[Any]] = [[n, *cells] for n, cells in enumerate(zip(sites, *columns.values(), strict=True))]
    if out is not None:
        write_csv(out, header, table)
    if as_json:
        place = {"model": str(model), "data": str(data), "written": None if out is None else str(out)}
        print_json({**place, "columns": header, "predictions": table})
    elif out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *table])
    else:
        messages().print(f"{out}: {count(len(table), 'prediction')} for {count(len(set(sites)), 'site')}")


def _models_of(
    fitted: FittedModel, sites: list[Hashable], new: bool, labelled: Mapping[str, dict[str, AnyArray]]
) -> dict[Hashable, FittedModel]:
    """Return the model of every site: the fitted one, or for a new site one from its labelled rows, if any."""
    unknown = [site for site in dict.fromkeys(sites) if site not in fitted.index]
    if unknown and not new:
        try:
            position_of(unknown[0], fitted.index)
        except UnknownSiteError as error:
            hint = "" if fitted.kin is None else "; --new-site predicts it from what all sites have in common"
            raise UnknownSiteError(f"{error}{hint}") from None
    if new and not unknown:
        note("--new-site makes no difference: all sites of the table were part of the fit, and have their models")
    if idle := [name for name in labelled if name not in {str(site) for site in unknown}]:
        note(f"--rows of {listed(idle)} are not used: they are for sites of the table that were not part of the fit")
    models: dict[Hashable, FittedModel] = {site: fitted for site in sites if site in fitted.index}
    for site in unknown:
        rows = labelled.get(str(site))
        found = fitted.join(rows, name=site)
        models[site] = found.model
        n = 0 if rows is None else len(next(iter(rows.values())))
        text = f"new site {site}: a model from {count(n, 'labelled row')} and what all sites have in common"
        if len(found.groups):
            likely = int(np.argmax(found.groups))
            text += f"; group {likely + 1} with probability {probability(float(found.groups[likely]))}"
        note(text)
    return models


def _predictions(
    models: Mapping[Hashable, FittedModel],
    X: AnyArray | Mapping[str, AnyArray],
    sites: list[Hashable],
    shift: Array | None,
    level: float | None,
) -> dict[str, list[Any]]:
    """Return the columns of predictions, in the order of the rows; each model predicts its own rows at once."""
    owners = {id(model): model for model in models.values()}
    of = np.array([id(models[site]) for site in sites])
    columns: dict[str, list[Any]] = {}
    for key, model in owners.items():
        own = np.flatnonzero(of == key)
        part = X[own] if isinstance(X, np.ndarray) else {name: column[own] for name, column in X.items()}
        ids, offset = [sites[k] for k in own], None if shift is None else shift[own]
        predicted = model.predict(part, ids, offset)
        if predicted.ndim == 2:  # the means of the features
            found = {name: predicted[:, k].tolist() for k, name in enumerate(model.feature_names)}
        else:
            found = {"prediction": predicted.tolist()}
        if model.classes is not None:
            chances = model.predict_proba(part, ids, offset)
            found |= {f"probability:{label}": chances[:, k].tolist() for k, label in enumerate(model.classes)}
        if level is not None:
            interval = model.predict_interval(part, ids, offset, level=level)
            found |= {"low": interval.low.tolist(), "high": interval.high.tolist()}
        for name, values in found.items():
            filled = columns.setdefault(name, [None] * len(sites))
            for k, value in zip(own, values, strict=True):
                filled[k] = value
    return columns


def inspect(
    model: Model,
    card: Annotated[bool, switch("--card", "Print a model card in Markdown instead.")] = False,
    site: Annotated[
        str | None, option("NAME", "Show one site: its parameters with intervals, and its likely kin.")
    ] = None,
    group: Annotated[int | None, option("N", "Show one group: the mean of its members' parameters.")] = None,
    contrast: Annotated[tuple[str, str] | None, option("A B", "Show how two sites differ; group:N is a group.")] = None,
    level: Annotated[float, option("X", "Level of the intervals.")] = 0.95,
    own_rows: Annotated[
        bool, switch("--own-rows", "Intervals from a site's own rows alone, valid for every single site.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a fitted model found: groups, graph, coefficients, and notes on single sites."""
    fitted = load(model)
    if card:
        typer.echo(model_card(fitted), nl=False)
        return
    if site is not None or group is not None or contrast is not None:
        _print_parameters(fitted, site, group, contrast, level, own_rows, as_json)
        return
    if as_json:
        schema = None if fitted.schema is None else fitted.schema.plain()
        more = {"model": str(model), "schema": schema, "options": dict(fitted.options)}
        print_json({**model_document(fitted), **more})
        return
    classes = None if fitted.classes is None else ", ".join(map(str, fitted.classes))
    about = {"target": fitted.target_name, "offset": fitted.offset_name, "classes": classes}
    print_facts(
        {
            "model": f"{model}, written by Fedkin {fitted.fedkin_version}",
            "loss": ", ".join([fitted.loss.name, *(f"{key} {value}" for key, value in about.items() if value)]),
            "sites": f"{fitted.n_sites}, fitted on {count(int(fitted.n_samples.sum()), 'row')}",
            "from": format_origin(fitted),
            **model_facts(fitted),
        }
    )
    console = output()
    if fitted.schema is not None:
        console.print("\nColumns", style="bold")
        console.print(schema_table(fitted.schema))
    print_groups(fitted)
    if fitted.kin is not None:
        console.print("\nThe population of sites: its estimated mean, and how far sites depart from it", style="bold")
        console.print(population_table(fitted.kin))
    print_coefficients(fitted)
    if fitted.comparison:
        print_comparison(fitted.comparison)
    if lines := note_lines(fitted.notes):
        console.print("\nNotes", style="bold")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)


def _print_parameters(
    model: FittedModel,
    site: str | None,
    group: int | None,
    contrast: tuple[str, str] | None,
    level: float,
    own_rows: bool,
    as_json: bool,
) -> None:
    """Print the parameters of a site or a group, or the difference of two; groups count from 1."""
    kind: Any = "site" if own_rows else "average"
    one: Any = _sites(model, contrast[0] if contrast else f"group:{group}" if site is None else site)
    other: Any = _sites(model, contrast[1]) if contrast else None
    found = model.contrast(one, other, kind=kind)
    if not as_json:
        if contrast is not None:
            text = found.summary(level)
        elif site is not None:
            text = model.summary(level, site=one, kind=kind)
        else:
            text = model.summary(level, group=(group or 0) - 1, kind=kind)
        output().print(text, soft_wrap=True)
        return
    keys = ("estimate", "standard_error", "p_value", "low", "high")
    ends = found.confint(level)
    rows = zip(found.names, found.estimate, found.standard_error, found.p_values, *ends.T, strict=True)
    statistic, degrees, tail = found.wald
    print_json(
        {
            "about": found.label,
            "kind": found.kind,
            "level": level,
            "parameters": [
                {"name": name, **{key: finite(float(value)) for key, value in zip(keys, values, strict=True)}}
                for name, *values in rows
            ],
            "wald": {"statistic": statistic, "degrees": degrees, "p_value": tail},
            "probability_of_being_kin": found.probability,
        }
    )


def _sites(model: FittedModel, name: str) -> Any:
    """Return a site by its name, or the members of ``group:N``."""
    if name.startswith("group:") and name[6:].isdigit() and model.kin is not None:
        number, groups = int(name[6:]), int(model.kin.groups.max()) + 1
        if model.kin.resolved and not 1 <= number <= groups:
            raise ParameterError(f"there is no group {number}: groups are 1 to {groups}")
        return model.kin.members(number - 1)
    known = {str(site): site for site in model.sites}
    if name not in known:
        near = near_name(name, known) or f"; its sites are {listed(list(known), 12)}"
        raise UnknownSiteError(f"the model has no site {name!r}{near}")
    return known[name]


def report(
    model: Model,
    out: Annotated[Path, option("PAGE.html", "The page to write.")] = Path("report.html"),
    coordinates: Annotated[
        Path | None, option("FILE.csv", "Where the sites are, for a map: columns site and x, y (or lon, lat).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a model: one HTML page that opens without a network.

    It shows which sites are alike and how sure that is, what each site gained, coefficients with intervals, and how to
    reproduce the fit.
    """
    check_new_file(out, "report.html", model, coordinates)
    size = write_report(load(model), out, coordinates)
    if as_json:
        print_json({"model": str(model), "report": str(out), "bytes": size})
    else:
        messages().print(f"{out}: {size / 1024:.0f} KB, opens in any browser", soft_wrap=True)


def write_report(model: FittedModel, out: Path, coordinates: Path | None = None) -> int:
    """Write the HTML page of a model, and return its size in bytes."""
    places = None if coordinates is None else read_coordinates(coordinates, model.sites)
    page = report_page(model, places).encode()
    write_file(out, page)
    return len(page)
