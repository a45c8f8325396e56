"""``fedkin predict`` and ``inspect``: what to do with a model that was saved."""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedkin._base import AnyArray, Array, check_level, count
from fedkin.cli.models.new_sites import models_of
from fedkin.cli.shared.console import messages, output, print_json
from fedkin.cli.shared.kin_words import Question, answer, kin_document, kin_facts, kin_table, spread_table
from fedkin.cli.shared.model_words import (
    gap_words,
    graph_words,
    group_words,
    groups_table,
    model_document,
    n_distinct,
    note_lines,
    origin_words,
)
from fedkin.cli.shared.options import Json, Model
from fedkin.cli.shared.reading import check_new_file, read_table, rows_to_predict
from fedkin.cli.shared.tables import add_row, plain_table, print_facts, rounded, schema_table
from fedkin.data import write_csv
from fedkin.errors import ParameterError, TableWarning
from fedkin.fitting import FittedModel, load

_MOST_FEATURES = 10  # features that inspect shows
_MOST_COLUMNS = 6  # groups that inspect shows side by side


def predict(
    model: Model,
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Rows to predict: a file, or a directory with one file per site.")
    ],
    site: Annotated[
        str | None, typer.Option(metavar="COL", help="Column of the sites; by default the one of the fit.")
    ] = None,
    offset: Annotated[
        str | None, typer.Option(metavar="COL", help="Column of the offset; by default the one of the fit.")
    ] = None,
    new_site: Annotated[
        bool, typer.Option("--new-site", help="Predict sites that were not part of the fit, too (method kin).")
    ] = False,
    rows: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Labelled rows of new sites, from which they get models.")
    ] = None,
    level: Annotated[
        float | None, typer.Option(metavar="X", help="Add intervals of the mean response at this level, such as 0.95.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="File for the predictions; by default standard output.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict rows with a fitted model, each with the model of its site."""
    if level is not None:
        check_level(level)
    if out is not None:
        check_new_file(out, "predictions.csv", data, rows, model)
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
    sites = _known_ids(fitted, found)
    if rows is not None and not new_site:
        raise ParameterError("--rows are the labelled rows of new sites: add --new-site")
    models = models_of(fitted, sites, new_site, rows, column)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # reading has told of them, with their lines
        columns = _columns(models, X, sites, shift, level)
    header = ["row", column or "site", *columns]
    table: list[list[Any]] = [
        [number, *cells] for number, cells in enumerate(zip(sites, *columns.values(), strict=True))
    ]
    if out is not None:
        write_csv(out, header, table)
    if as_json:
        print_json(
            {
                "model": str(model),
                "data": str(data),
                "written": None if out is None else str(out),
                "columns": header,
                "predictions": table,
            }
        )
    elif out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *table])
    else:
        messages().print(f"{out}: {count(len(table), 'prediction')} for {count(len(set(sites)), 'site')}")


def _known_ids(model: FittedModel, found: Sequence[Hashable]) -> list[Hashable]:
    """Ids as the model has them: a file of whole numbers reads as ints what another file had as text."""
    by_text = {str(known): known for known in model.sites}
    return [site if site in model.index else by_text.get(str(site), site) for site in found]


def _columns(
    models: Mapping[Hashable, FittedModel],
    X: AnyArray | dict[str, AnyArray],
    sites: list[Hashable],
    shift: Array | None,
    level: float | None,
) -> dict[str, list[Any]]:
    """Predictions of all rows, model by model, in the order of the rows."""
    columns: dict[str, list[Any]] = {}
    for model in {id(one): one for one in models.values()}.values():
        own = [k for k, site in enumerate(sites) if models[site] is model]
        part = {name: values[own] for name, values in X.items()} if isinstance(X, dict) else X[own]
        ids, offset = [sites[k] for k in own], None if shift is None else shift[own]
        for name, values in _predicted(model, part, ids, offset, level).items():
            filled = columns.setdefault(name, [None] * len(sites))
            for k, value in zip(own, values, strict=True):
                filled[k] = value
    return columns


def _predicted(
    model: FittedModel, X: object, sites: list[Hashable], shift: Array | None, level: float | None
) -> dict[str, list[Any]]:
    predicted = model.predict(X, sites, shift)
    if predicted.ndim == 2:  # the means of the features
        return {name: predicted[:, k].tolist() for k, name in enumerate(model.feature_names)}
    columns = {"prediction": predicted.tolist()}
    if model.classes is not None:
        chances = model.predict_proba(X, sites, shift)
        columns.update({f"probability:{label}": chances[:, k].tolist() for k, label in enumerate(model.classes)})
    if level is not None:
        found = model.predict_interval(X, sites, shift, level=level)
        columns |= {"low": found.low.tolist(), "high": found.high.tolist()}
    return columns


# --- inspect ---------------------------------------------------------------------------------------------------


def inspect(
    model: Model,
    card: Annotated[bool, typer.Option("--card", help="Print a model card in Markdown instead.")] = False,
    site: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show one site: its parameters with intervals, and its likely kin."),
    ] = None,
    group: Annotated[
        int | None, typer.Option(metavar="N", help="Show one group: the mean of its members' parameters.")
    ] = None,
    contrast: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Show how two sites differ; group:N is a group.")
    ] = None,
    level: Annotated[float, typer.Option(metavar="X", help="Level of the intervals.")] = 0.95,
    own_rows: Annotated[
        bool, typer.Option("--own-rows", help="Intervals from a site's own rows alone, valid for every single site.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a fitted model found: groups, graph, coefficients, and notes on single sites."""
    fitted = load(model)
    if card:
        from fedkin.report import model_card

        typer.echo(model_card(fitted), nl=False)
        return
    if site is not None or group is not None or contrast is not None:
        asked = Question(site, group, contrast, level, "site" if own_rows else "average")
        answer(fitted, asked, as_json)
        return
    if as_json:
        document = {"fedkin_version": fitted.fedkin_version, "model": str(model), **model_document(fitted)}
        schema = None if fitted.schema is None else fitted.schema.plain()
        document |= {"kin": kin_document(fitted), "comparison": fitted.comparison}
        print_json({**document, "schema": schema, "options": dict(fitted.options)})
        return
    console = output()
    classes = None if fitted.classes is None else ", ".join(map(str, fitted.classes))
    about = {"target": fitted.target_name, "offset": fitted.offset_name, "classes": classes}
    print_facts(
        {
            "model": f"{model}, written by Fedkin {fitted.fedkin_version}",
            "loss": ", ".join([fitted.loss.name, *(f"{key} {value}" for key, value in about.items() if value)]),
            "sites": f"{fitted.n_sites}, fitted on {count(int(fitted.n_samples.sum()), 'row')}",
            "from": origin_words(fitted),
            **(_fused_facts(fitted) if fitted.kin is None else kin_facts(fitted)),
        }
    )
    if fitted.schema is not None:
        console.print("\nColumns", style="bold")
        console.print(schema_table(fitted.schema))
    if fitted.kin is None:
        console.print(f"\n{count(fitted.n_groups, 'group')}", style="bold")
        console.print(groups_table(fitted))
    else:
        if fitted.kin.resolved:
            console.print("\nGroups of sites that are alike, and how likely two members are kin", style="bold")
            console.print(kin_table(fitted.kin))
        console.print("\nThe population of sites: its estimated mean, and how far sites depart from it", style="bold")
        console.print(spread_table(fitted.kin))
    _print_coefficients(fitted)
    if fitted.comparison:
        _print_comparison(fitted.comparison)
    lines = note_lines(fitted.notes)
    if lines:
        console.print("Notes", style="bold")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)


def _fused_facts(model: FittedModel) -> dict[str, str]:
    fused = model.fused
    after = "" if fused is None or np.isnan(fused.gap) else f" after {count(fused.n_iter, 'iteration')}"
    return {
        **({} if fused is None else {"penalty": f"{fused.penalty}, lam {fused.lam:.4g}"}),
        "gap": gap_words(model) + after,
        "groups": group_words(model),
        "graph": f"{graph_words(model)}; {count(model.graph.n_components, 'connected component')}",
    }


def _print_coefficients(model: FittedModel) -> None:
    """The features with the largest coefficients: a column per group if there are few, else the spread."""
    labels = sorted(range(model.n_groups), key=lambda k: -int((model.groups == k).sum()))
    by_group = len(labels) <= _MOST_COLUMNS and (len(labels) > 1 or n_distinct(model) == 1)
    by_group = by_group and (model.kin is None or model.kin.resolved)
    parts = [model.groups == k for k in labels] if by_group else [np.full(model.n_sites, True)]
    heads = [f"group {k + 1}" for k in range(len(labels))] if by_group else ["average", "least", "most"]
    # as large as what is shown: the average of all sites, or of one of the groups
    size = np.abs([model.coef[part].mean(axis=0) for part in parts]).max(axis=(0, 1))
    chosen = np.argsort(-size, kind="stable")[:_MOST_FEATURES]
    classes = [None] if model.coef.shape[1] == 1 or model.classes is None else list(model.classes[1:])
    table = plain_table("feature", *heads)
    rows = [("(intercept)", model.intercept)] if model.fit_intercept else []
    units = {} if model.schema is None else {column.name: column.unit for column in model.schema.features}
    for q in chosen.tolist():
        name = model.feature_names[q]
        rows.append((f"{name} (per {units[name]})" if units.get(name) else name, model.coef[:, :, q]))
    for name, values in rows:
        for j, label in enumerate(classes):
            cells = [float(values[part, j].mean()) for part in parts]
            cells += [] if by_group else [float(values[:, j].min()), float(values[:, j].max())]
            add_row(table, name if label is None else f"{name} [{label}]", *(f"{cell:.4g}" for cell in cells))
    title = "Coefficients of the sites"
    if size.size > _MOST_FEATURES:
        title += f": {'the intercept and ' if model.fit_intercept else ''}the {len(chosen)} largest of {size.size}"
    over = "the average of each group's sites" if by_group else "the average of all sites, the least and the most"
    console = output()
    console.print(f"\n{title}", style="bold")
    console.print(f"({over}; in the units of the features)")
    console.print(table)


def _print_comparison(found: Mapping[str, Any]) -> None:
    """The comparison that was made when the model was fitted."""
    table = plain_table("method", str(found["metric"]), "s.e.", "more than Fedkin", "s.e. of it")
    for one in found["methods"]:
        apart = [rounded(one.get("difference"), sign=True), rounded(one.get("difference_error"))]
        cells = ["-", "-"] if one["name"] == "Fedkin" else apart
        add_row(table, str(one["name"]), rounded(one.get("mean"), 4), rounded(one.get("standard_error")), *cells)
    console = output()
    console.print("Error of predictions of rows that were held out, when the model was fitted", style="bold")
    console.print("(lower is better)")
    console.print(table)
    console.print(str(found.get("verdict", "")), soft_wrap=True)
