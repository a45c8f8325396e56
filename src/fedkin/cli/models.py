"""``fedkin predict``, ``inspect`` and ``report``; a fitted model in the terminal and as JSON."""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from fedkin._base import (
    AnyArray,
    Array,
    check_level,
    count,
    decimals_for,
    fixed,
    in_file,
    listed,
    probability,
    progress,
    some_of,
    write_file,
)
from fedkin.cli.console import (
    Json,
    add_row,
    argument,
    flag,
    messages,
    note,
    option,
    output,
    plain_table,
    print_facts,
    print_json,
    schema_table,
    switch,
)
from fedkin.cli.reading import batches_by_schema, check_new_file, no_sites, read_districts, read_table
from fedkin.data import (
    DecimalMark,
    Federation,
    RawColumns,
    near_name,
    raise_findings,
    read_columns,
    site_ids,
    write_batches,
)
from fedkin.errors import DataError, ParameterError, TableWarning, UnknownSiteError
from fedkin.fitting import FittedModel, load, position_of
from fedkin.kin import Kin, population_sd, population_tests
from fedkin.report import model_card, read_coordinates, report_page
from fedkin.report.text import (
    comparison_table,
    comparison_title,
    facts,
    gains_text,
    group_labels,
    members,
    method_text,
    note_lines,
    origin_text,
)

Model = Annotated[Path, argument("MODEL", "A model directory that fedkin fit wrote.")]
Level = Annotated[float | None, option("X", "Add intervals at this level.")]
Interval = Literal["mean", "observation"]
#: Level of intervals that are asked for without one.
_LEVEL = 0.95
_MOST_ROWS, _MOST_COLUMNS = 12, 6  # groups or features below each other, groups side by side


def predict(
    model: Model,
    data: Annotated[Path, argument("DATA", "Rows to predict: a file, or a directory with one file per site.")],
    site: Annotated[str | None, option("COL", "Column of the sites; by default the one of the fit.")] = None,
    offset: Annotated[str | None, option("COL", "Column of the offset; by default the one of the fit.")] = None,
    new_site: Annotated[
        bool, switch("--new-site", "Predict sites that were not part of the fit, too (method kin).")
    ] = False,
    rows: Annotated[
        Path | None,
        option("FILE", "Labelled rows: new sites get models from them, known sites the baselines that a model lacks."),
    ] = None,
    level: Level = None,
    interval: Annotated[
        Interval | None, typer.Option(help="Add intervals of the mean response (default), or of a new observation.")
    ] = None,
    survival: Annotated[
        str | None, option("T,T,...", "Add the probability that the event comes later than each time (cox).")
    ] = None,
    decimal: Annotated[
        DecimalMark | None, typer.Option(help="What stands before decimals; by default as in the fit.")
    ] = None,
    out: Annotated[
        Path | None, option("FILE", "CSV or Parquet file for the predictions; by default standard output.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict rows with a fitted model, each with the model of its site."""
    level = _LEVEL if level is None and interval is not None else level
    if level is not None:
        check_level(level)
    if out is not None:
        check_new_file(out, "predictions.csv", data, rows, model)
    fitted, times = load(model), _times(survival)
    if rows is not None and not new_site and (not times or fitted.baseline is not None):
        raise ParameterError("--rows are the labelled rows of new sites: add --new-site")
    column = site or fitted.options.get("site_column")
    mark: DecimalMark = decimal or fitted.options.get("decimal") or "."
    if times and fitted.baseline is None:
        fitted, rows = _with_baseline(fitted, model, rows, column, mark), None
    labelled = {} if rows is None else _rows_by_site(rows, column, mark)
    # a file of whole numbers reads as ints what another file had as text
    by_text = {str(known): known for known in fitted.sites}
    models: dict[Hashable, FittedModel] = {}
    district, places = fitted.options.get("within_column"), dict[str, Hashable]()
    if district is not None and new_site:
        places = {str(one): place for one, place in read_districts(data, column, district, mark).items()}
    done = 0

    def predicted() -> Iterator[dict[str, list[Any]]]:
        nonlocal done
        for found, X, shift in _rows_to_predict(data, site, fitted, offset, mark):
            sites = [one if one in fitted.index else by_text.get(str(one), one) for one in found]
            models.update(_models_of(fitted, [one for one in sites if one not in models], new_site, labelled, places))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TableWarning)  # reading has told of them, with their lines
                columns = _predictions(models, X, sites, shift, level, interval or "mean", times)
            numbers = list(range(done, done + len(sites)))
            done += len(sites)
            yield {"row": numbers, column or "site": sites, **columns}

    if out is not None and not as_json:
        with progress(f"predicting {data}"):
            write_batches(out, predicted())
        messages().print(f"{out}: {count(done, 'prediction')} for {count(len(models), 'site')}")
        return
    batches = list(predicted())
    header = list(batches[0])
    table = [list(cells) for batch in batches for cells in zip(*batch.values(), strict=True)]
    if as_json:
        if out is not None:
            write_batches(out, batches)
        place = {"model": str(model), "data": str(data), "written": None if out is None else str(out)}
        print_json({**place, "columns": header, "predictions": table})
    else:
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *table])


def _with_baseline(
    fitted: FittedModel, model: Path, rows: Path | None, column: str | None, decimal: DecimalMark
) -> FittedModel:
    """Return the model of the sites of labelled rows, with baseline hazards of these rows."""
    schema = fitted.schema
    if schema is None or schema.event is None:
        raise ParameterError(
            f"{flag('survival')} is for models of times until an event, and {model} is none: leave it out"
        )
    if rows is None:
        raise ParameterError(
            f"{model} has no baseline hazards, which are not in summaries: add --rows FILE, labelled rows"
        )
    with in_file(rows, DataError):
        columns = read_columns(rows, decimal)
        if fitted.n_sites == 1 and (column is None or column not in columns):
            column = column or "site"
            columns = {**columns, column: np.full(len(next(iter(columns.values()), ())), fitted.sites[0], dtype=object)}
        if column is None:
            raise no_sites(rows, list(columns))
        found = Federation.from_schema(columns, schema, site=column)
    by_text = {str(known): known for known in fitted.sites}
    sites = [by_text.get(str(one), one) for one in found.sites]
    return fitted.with_baseline(Federation(dict(zip(sites, map(found.__getitem__, found.sites), strict=True))))


def _times(given: str | None) -> dict[str, float]:
    """Return the times of ``--survival`` by their spelling."""
    try:
        return {} if given is None else {part.strip(): float(part) for part in given.split(",")}
    except ValueError:
        raise ParameterError(f"{flag('survival')} takes times with commas between them, got {given!r}") from None


def _rows_to_predict(
    path: Path, site: str | None, model: FittedModel, offset: str | None, decimal: DecimalMark
) -> Iterator[tuple[list[Hashable], AnyArray | RawColumns, Array | None]]:
    """Yield the site of each row, the rows, and the offset if another column has it; one site need not be named.

    Parquet files and large CSV files come in batches.
    """
    schema, trained = model.schema, model.options.get("site_column")
    if schema is None:
        names, offset = model.feature_names, offset or model.offset_name
        federation = read_table(path, site=site or trained, features=names, offset=offset, decimal=decimal)
        order = np.argsort(federation.row_order)  # back to the order of the file
        ids: list[Hashable] = [federation.sites[u] for u in federation.site_index[order].tolist()]
        yield ids, federation.X[order], None if federation.offset is None else federation.offset[order]
        return
    if offset is not None and schema.agreed:
        raise ParameterError(f"--offset is for the contract to say ({schema.offset}): leave it out")
    # in a directory the files are named like the sites, whatever the column was called
    site = site if path.is_dir() else site or trained
    needed = schema if offset is None else replace(schema, offset=offset)
    told: set[str] = set()
    for columns, column, places in batches_by_schema(path, site, needed, schema.features, decimal):
        if site is not None and site not in columns and (model.n_sites > 1 or site != trained):
            has = ", ".join(list(columns)[:20])
            raise DataError(f"{path}: there is no column {site!r} for the site{near_name(site, columns)}; it has {has}")
        if column is not None and column in columns:
            gap = next((row for row, cell in enumerate(columns[column].tolist()) if cell is None or cell != cell), None)
            if gap is not None:
                raise DataError(f"{path}, {places(gap)}: the site is missing (column {column!r}): fill it in")
            ids = site_ids(columns[column])
        elif model.n_sites == 1:
            ids = [model.sites[0]] * len(next(iter(columns.values()), ()))
        else:
            raise no_sites(path, list(columns))
        with in_file(path, DataError):
            findings = needed.check(columns, target=False, at=places)
            raise_findings(findings)
        for one in findings:
            if one.code == "unknown_level" and one.column not in told:
                told.add(one.column)
                note(str(one))
        yield ids, columns, None if offset is None else needed.offset_of(columns)


def _rows_by_site(path: Path, column: str | None, decimal: DecimalMark) -> dict[str, RawColumns]:
    """Return the labelled rows of each site."""
    with in_file(path, DataError):
        columns = read_columns(path, decimal)
        if column is None or column not in columns:
            raise no_sites(path, list(columns))
        ids = np.array([str(site) for site in site_ids(columns[column])], dtype=object)
    return {site: {name: values[ids == site] for name, values in columns.items()} for site in dict.fromkeys(ids)}


def _models_of(
    fitted: FittedModel,
    sites: list[Hashable],
    new: bool,
    labelled: Mapping[str, RawColumns],
    districts: Mapping[str, Hashable],
) -> dict[Hashable, FittedModel]:
    """Return the model of every site: the fitted one, or for a new site one from its labelled rows, if any."""
    unknown = [site for site in dict.fromkeys(sites) if site not in fitted.index]
    if unknown and not new:
        try:
            position_of(unknown[0], fitted.index)
        except UnknownSiteError as error:
            hint = "" if fitted.kin is None else "; --new-site predicts it from what all sites have in common"
            raise UnknownSiteError(f"{error}{hint}") from None
    models: dict[Hashable, FittedModel] = {site: fitted for site in sites if site in fitted.index}
    for site in unknown:
        rows = labelled.get(str(site))
        within = districts.get(str(site))
        found = fitted.join(rows, name=site, within=within)
        models[site] = found.model
        n = 0 if rows is None else len(next(iter(rows.values())))
        common = "all sites have in common" if within is None else f"the sites of {within} have in common"
        text = f"new site {site}: a model from {count(n, 'labelled row')} and what {common}"
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
    target: Interval,
    times: Mapping[str, float],
) -> dict[str, list[Any]]:
    """Return the columns of predictions, in the order of the rows; each model predicts its own rows at once."""
    owners = {id(model): model for model in models.values()}
    of = np.array([id(models[site]) for site in sites])
    columns: dict[str, list[Any]] = {}
    for key, model in owners.items():
        own = np.flatnonzero(of == key)
        if not own.size and len(sites):
            continue
        whole = own.size == len(sites)
        part: Any = X
        if not whole:
            part = X[own] if isinstance(X, np.ndarray) else {name: column[own] for name, column in X.items()}
        ids, offset = [sites[k] for k in own.tolist()], None if shift is None else shift[own]
        predicted = model.predict(part, ids, offset)
        if predicted.ndim == 2:  # the means of the features
            found = {name: predicted[:, k].tolist() for k, name in enumerate(model.feature_names)}
        else:
            found = {"prediction": predicted.tolist()}
        if model.classes is not None:
            chances = model.predict_proba(part, ids, offset)
            found |= {f"probability:{label}": chances[:, k].tolist() for k, label in enumerate(model.classes)}
        if level is not None:
            interval = model.predict_interval(part, ids, offset, level=level, target=target)
            found |= {"low": interval.low.tolist(), "high": interval.high.tolist()}
        if times:
            curves = model.predict_survival(part, ids, list(times.values()), offset)
            found |= {f"survival:{name}": curves[:, k].tolist() for k, name in enumerate(times)}
        if whole:
            return found
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
            "model": f"{model}, written by Fedkin {fitted.fedkin_version}, {method_text(fitted)}",
            "loss": ", ".join([fitted.loss.name, *(f"{key} {value}" for key, value in about.items() if value)]),
            "sites": f"{fitted.n_sites}, fitted on {count(int(fitted.n_samples.sum()), 'row')}",
            "from": origin_text(fitted),
            **facts(fitted),
        }
    )
    console = output()
    if fitted.schema is not None:
        console.print("\nColumns", style="bold")
        console.print(schema_table(fitted.schema))
    print_groups(fitted)
    if fitted.kin is not None:
        print_population(fitted.kin)
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
    keys = ("name", "estimate", "standard_error", "p_value", "low", "high")
    ends = found.confint(level)
    rows = zip(found.names, found.estimate, found.standard_error, found.p_values, *ends.T, strict=True)
    print_json(
        {
            "about": found.label,
            "kind": found.kind,
            "level": level,
            "parameters": [dict(zip(keys, row, strict=True)) for row in rows],
            "wald": dict(zip(("statistic", "degrees", "p_value"), found.wald, strict=True)),
            "probability_of_being_kin": found.probability,
        }
    )


def _sites(model: FittedModel, name: str) -> Any:
    """Return a site by its name, or the members of ``group:N``."""
    if name.startswith("group:") and model.kin is not None:
        groups = int(model.kin.groups.max()) + 1 if model.kin.resolved else 0
        number = int(name[6:]) if name[6:].isdecimal() else 0
        if not 1 <= number <= groups:
            known = f"groups are 1 to {groups}" if groups else "no groups are resolved"
            raise ParameterError(f"there is no group {name[6:]}: {known}")
        return model.kin.members(number - 1)
    by_name = {str(site): site for site in model.sites}
    if name not in by_name:
        near = near_name(name, by_name) or f"; its sites are {listed(list(by_name), 12)}"
        raise UnknownSiteError(f"the model has no site {name!r}{near}")
    return by_name[name]


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


# --- a model in the terminal and as JSON ------------------------------------------------------------------------------


def print_groups(model: FittedModel) -> None:
    """Print the largest groups with their members, and for kin how likely these are alike; nothing where none are."""
    groups, kin = members(model), model.kin
    if not groups:
        return
    inside = None if kin is None else kin.cohesion()[0]
    table = plain_table("group", "sites", *([] if kin is None else ["P(kin)"]), "members", numbers_from=9)
    for k, sites in enumerate(groups[:_MOST_ROWS]):
        chance = [] if inside is None else [probability(float(inside[k])) if len(sites) > 1 else "-"]
        add_row(table, str(k + 1), str(len(sites)), *chance, some_of(sites, 10))
    if rest := groups[_MOST_ROWS:]:
        more = f"in {count(len(rest), 'smaller group')}"
        add_row(table, "...", str(sum(map(len, rest))), *([] if kin is None else [""]), more)
    title = "belong together" if kin is None else "are alike, and how likely two members are"
    output().print(f"\n{count(len(groups), 'group')} of sites that {title}", style="bold")
    output().print(table)


def print_population(kin: Kin) -> None:
    """Print the population effects with intervals and tests, and how much sites differ, in the order of columns."""
    heads = ("parameter", "population mean", "std err", "95% interval", "df", "p", "sd between sites")
    table, error, between = plain_table(*heads), np.sqrt(np.diag(kin.mean_covariance)), population_sd(kin)
    ends, (_, tails) = kin.population(0.95), population_tests(kin)
    for j, name in enumerate(kin.names[:_MOST_ROWS]):
        decimals = decimals_for([float(error[j])])
        mean, low, high, se, sd = (fixed(float(one), decimals) for one in (*ends[j], error[j], between[j]))
        tail = "<0.001" if tails[j] < 0.001 else fixed(float(tails[j]), 3)
        add_row(table, name, mean, se, f"{low} to {high}", fixed(float(kin.degrees[j]), 1), tail, sd)
    if len(kin.names) > _MOST_ROWS:
        add_row(table, f"and {len(kin.names) - _MOST_ROWS} more", *[""] * (len(heads) - 1))
    output().print("\nThe population of sites: its estimated mean, and how far sites depart from it", style="bold")
    output().print(table)
    if kin.loss.ratio is None:
        return
    ratios = plain_table("parameter", kin.loss.ratio, "95% interval")
    for name, ends_of in zip(kin.names[:_MOST_ROWS], np.exp(ends), strict=False):
        mean, low, high = (f"{one:.3g}" for one in ends_of.tolist())
        add_row(ratios, name, mean, f"{low} to {high}")
    output().print(f"\n{kin.loss.ratio.capitalize()}s of the population, per unit of a column", style="bold")
    output().print(ratios)


def print_coefficients(model: FittedModel) -> None:
    """Print the features with the largest coefficients: a column per group if there are few, else the range."""
    groups, resolved = group_labels(model)
    n_groups = int(groups.max()) + 1
    by_group = n_distinct(model) == 1 or (resolved and n_groups <= _MOST_COLUMNS)
    parts = [groups == k for k in range(n_groups)] if by_group else [np.full(model.n_sites, True)]
    heads = [f"group {k + 1}" for k in range(n_groups)] if by_group else ["average", "least", "most"]
    # as large as what is shown: the average of all sites, or of one of the groups
    size = np.abs([model.coef[part].mean(axis=0) for part in parts]).max(axis=(0, 1))
    chosen = np.argsort(-size, kind="stable")[:_MOST_ROWS]
    classes = [None] if model.coef.shape[1] == 1 or model.classes is None else list(model.classes[1:])
    rows = [("(intercept)", model.intercept)] if model.fit_intercept else []
    units = {} if model.schema is None else {column.name: column.unit for column in model.schema.features}
    for q in chosen.tolist():
        name = model.feature_names[q]
        rows.append((f"{name} (per {units[name]})" if units.get(name) else name, model.coef[:, :, q]))
    table = plain_table("feature", *heads)
    for name, values in rows:
        for j, label in enumerate(classes):
            cells = [float(values[part, j].mean()) for part in parts]
            cells += [] if by_group else [float(values[:, j].min()), float(values[:, j].max())]
            add_row(table, name if label is None else f"{name} [{label}]", *(f"{cell:.4g}" for cell in cells))
    most = f", the {len(chosen)} largest of {size.size}" if size.size > _MOST_ROWS else ""
    over = "the average of each group's sites" if by_group else "the average of all sites, the least and the most"
    output().print(f"\nCoefficients of the sites{most}", style="bold")
    output().print(f"({over}; in the units of the features)")
    output().print(table)


def print_comparison(found: Mapping[str, Any]) -> None:
    """Print the errors of all methods on held-out rows, which sites gain and lose, and the verdict."""
    console = output()
    console.print(f"\n{comparison_title(found)}", style="bold", soft_wrap=True)
    head, *rows = comparison_table(found)
    table = plain_table(*head)
    means = [np.inf if one.get("mean") is None else float(one["mean"]) for one in found["methods"]]
    for mean, cells in zip(means, rows, strict=True):
        add_row(table, *cells, style="bold green" if mean == min(means) else "")
    console.print(table)
    for line in gains_text(found):
        console.print(line, soft_wrap=True)
    console.print(str(found.get("verdict", "")), style="bold", soft_wrap=True)


def n_distinct(model: FittedModel) -> int:
    """Return how many different models the sites hold; more than groups where a group is joined, but not fused."""
    stacked = np.concatenate([model.intercept[:, :, None], model.coef], axis=2).reshape(model.n_sites, -1)
    return len(np.unique(stacked, axis=0))


def model_document(model: FittedModel) -> dict[str, Any]:
    """Return what there is to say about a model, for ``--json``."""
    fused = model.fused
    about = {"method": "kin", "penalty": None, "lam": None, "gap": None, "n_iter": None, "selection": None}
    if fused is not None:
        about = {"method": "fused"} | {name: getattr(fused, name) for name in about if name != "method"}
    return {
        "fedkin_version": model.fedkin_version,
        **about,
        "loss": model.loss.name,
        "status": model.status,
        "target": model.target_name,
        "offset": model.offset_name,
        "features": model.feature_names,
        "classes": model.classes,
        "n_sites": model.n_sites,
        "n_rows": int(model.n_samples.sum()),
        "n_groups": model.n_groups,
        "n_distinct_models": n_distinct(model),
        "groups": sorted(model.members(), key=len, reverse=True),
        "edges": model.graph.n_edges,
        "origin": model.origin,
        "notes": [{"site": site, "notes": lines} for site, lines in model.notes.items()],
        "comparison": model.comparison,
        "kin": None if model.kin is None else _kin_document(model.kin, model.options.get("covariates")),
    }


def _kin_document(kin: Kin, covariates: Any) -> dict[str, Any]:
    found = kin.diagnostics
    inside = kin.cohesion()[0].tolist() if kin.resolved else []
    errors, tails = np.sqrt(np.diag(kin.mean_covariance)), population_tests(kin)[1]
    numbers = np.column_stack([kin.mean, errors, *kin.population(0.95).T[1:], kin.degrees, tails, population_sd(kin)])
    heads = ("name", "mean", "standard_error", "low", "high", "df", "p", "sd")
    names = {"chains": "starts", "sweeps": "draws", "rhat": "rhat", "effective_size": "size"}
    return {
        "resolved": kin.resolved,
        "groups": [{"sites": kin.members(k), "probability": chance} for k, chance in enumerate(inside)],
        "n_groups": kin.n_groups.tolist(),
        "weight_without_groups": kin.weight_mixed,
        "graph_use": kin.graph_use,
        "covariates": covariates,
        "graph_rates": kin.rates,
        "sure": kin.sure,
        "parameters": [
            dict(zip(heads, (name, *row), strict=True)) for name, row in zip(kin.names, numbers.tolist(), strict=True)
        ],
        "ratios": kin.loss.ratio
        and {"what": kin.loss.ratio, **dict(zip(kin.names, np.exp(kin.population(0.95)).tolist(), strict=True))},
        "sampler": found and {name: getattr(found, own) for name, own in names.items()},
    }
