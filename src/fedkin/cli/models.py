"""``fedkin fit``, ``predict`` and ``inspect``: models in directories."""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedkin import __version__
from fedkin._base import Array, count
from fedkin.cli.console import Report, messages, note, output, print_json, working
from fedkin.cli.options import Json, Model, flag, takes_fit_options
from fedkin.cli.tables import (
    MOST_GROUPS,
    add_row,
    gap_words,
    graph_words,
    group_words,
    groups_table,
    model_document,
    n_distinct,
    note_lines,
    plain_table,
    print_facts,
    read_federation,
)
from fedkin.data import Federation, write_csv
from fedkin.errors import (
    ConvergenceWarning,
    DataError,
    DegenerateDeviceWarning,
    ModelFileError,
    ParameterError,
    SolverError,
)
from fedkin.fitting import Comparison, FitOptions, FittedModel, check_model_place, compare, fit_federation, load
from fedkin.graph import Graph

_MOST_FEATURES = 10  # features that inspect shows
_MOST_COLUMNS = 6  # groups that inspect shows side by side


@takes_fit_options
def fit(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="CSV or Parquet file, or a directory with one file per device.")
    ],
    options: dict[str, Any],
    device: Annotated[
        str | None,
        typer.Option(metavar="COL", help="Column that says which device a row belongs to. (A directory needs none.)"),
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="COL", help="Column to predict.")] = None,
    features: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Columns to predict from; by default all others.")
    ] = None,
    offset: Annotated[
        str | None, typer.Option(metavar="COL", help="Column that is added to the linear predictor as it is.")
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Edges between devices, CSV or GraphML; by default all pairs."),
    ] = None,
    test_size: Annotated[
        float, typer.Option(help="Share of each device's rows to hold out for the comparison; 0 for no comparison.")
    ] = 0.25,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the model.")] = Path("fedkin-model"),
    as_json: Json = False,
) -> None:
    """Fit a model for every device of a table, and compare it with Local and Global on held-out rows."""
    how = FitOptions(**options)
    if not 0 <= test_size < 1:
        raise ParameterError(f"--test-size must be at least 0 and less than 1, got {test_size:g}")
    _check_target(target, how)
    try:
        check_model_place(out)
    except ModelFileError as error:
        raise ModelFileError(f"--out: {error}") from None
    with working(f"reading {data}") as say:
        columns = None if features is None else [name.strip() for name in features.split(",") if name.strip()]
        federation = read_federation(data, device=device, target=target, features=columns, offset=offset)
        edges = None if graph is None else Graph.read(graph, federation.devices)
        _hint_at_classes(federation, how)
        comparison, model = _fitted(federation, edges, how, test_size, say)
        model = replace(model, offset_name=offset, options={**model.options, "device_column": device})
        say(f"writing {out}")
        model.save(out)
    if as_json:
        _print_document(data, graph, out, model, comparison, test_size)
        return
    given = "all pairs of devices" if graph is None else str(graph)
    sizes = {"device": model.n_devices, "row": len(federation.X), "feature": model.n_features}
    about = "" if target is None else f", target {target}"
    print_facts(
        {
            "data": f"{data}: {', '.join(count(n, word) for word, n in sizes.items())}",
            "model": f"{model.loss.name} loss, {model.penalty} penalty{about}",
            "graph": f"{given}: {graph_words(model)}",
        }
    )
    if comparison is not None:
        _print_comparison(comparison, test_size)
    _print_model(out, model, compared=comparison is not None)


def _check_target(target: str | None, how: FitOptions) -> None:
    if target is None and how.loss != "mean":
        raise DataError(
            "say which column to predict: --target COL (or --loss mean, which estimates the means of the features)"
        )
    if target is not None and how.loss == "mean":
        raise DataError(f"the mean loss has no target: leave out --target {target}, or name it in --features")


def _hint_at_classes(federation: Federation, how: FitOptions) -> None:
    y = federation.y
    if how.loss == "auto" and y is not None and y.dtype.kind == "f" and set(np.unique(y).tolist()) == {0.0, 1.0}:
        note(f"the target {federation.target_name!r} is 0 or 1 everywhere; to model it as a class, add --loss logistic")


def _fitted(
    federation: Federation, graph: Graph | None, how: FitOptions, test_size: float, say: Report
) -> tuple[Comparison | None, FittedModel]:
    """The comparison on held-out rows, and the model of all rows, which has converged."""
    comparison = None
    with warnings.catch_warnings():
        # the model tells both itself: by its status, and by its notes
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DegenerateDeviceWarning)
        if test_size > 0:
            train, test = federation.split(test_size, how.seed)
            comparison = compare(train, test, graph, how, lambda words: say(f"comparison: {words}"))
        model = fit_federation(federation, graph, how, lambda words: say(f"all rows: {words}"))
    if model.status != "converged":
        more = "rounds" if how.solver == "fedadmm" else "max_iter"
        raise SolverError(
            f"the fit did not converge, so no model was saved: after {count(model.n_iter, 'iteration')} the relative "
            f"gap is {model.gap:.1e}, not {how.tol:.1e}. Raise {flag(more)}, accept a larger {flag('tol')}, or add "
            f"{flag('ridge')} 0.001"
        )
    if comparison is not None and comparison.models["Fedkin"].status != "converged":
        gap = comparison.models["Fedkin"].gap
        note(f"in the comparison, the fit of Fedkin did not converge (relative gap {gap:.1e}); on all rows it did")
    return comparison, model


def _print_comparison(comparison: Comparison, test_size: float) -> None:
    table = plain_table("method", comparison.metric, *comparison.more)
    best = min(comparison.errors, key=lambda name: comparison.errors[name])
    for name, error in comparison.errors.items():
        extra = [f"{values[name]:.4g}" for values in comparison.more.values()]
        add_row(table, name, f"{error:.4g}", *extra, style="bold green" if name == best else "")
    console = output()
    console.print(f"\nError on the {test_size:.0%} of each device's rows that were held out", style="bold")
    console.print(f"({comparison.metric}: lower is better)")
    console.print(table)


def _print_model(out: Path, model: FittedModel, compared: bool) -> None:
    if 1 < model.n_clusters <= MOST_GROUPS:
        console = output()
        console.print(f"{count(model.n_clusters, 'group')} of devices that belong together", style="bold")
        console.print(groups_table(model))
    rule = ", one standard error" if model.options["cv_rule"] == "1se" else ""
    how = f"cross-validation{rule}" if model.options["lam"] == "cv" else "given"
    print_facts(
        {
            "groups": group_words(model),
            "lam": f"{model.lam:.4g} ({how})",
            "gap": gap_words(model),
            "saved": f"{out}, fitted on all {count(int(model.n_samples.sum()), 'row')}"
            + (" (the comparison held some out)" if compared else ""),
        }
    )
    for words in note_lines(model.notes):
        note(words)


def _print_document(
    data: Path, graph: Path | None, out: Path, model: FittedModel, comparison: Comparison | None, test_size: float
) -> None:
    compared = comparison and {
        "test_size": test_size,
        "metric": comparison.metric,
        "higher_is_better": False,
        "errors": comparison.errors,
        "more": comparison.more,
    }
    print_json(
        {
            "fedkin_version": __version__,
            "model": str(out),
            "data": str(data),
            "graph": None if graph is None else str(graph),
            "comparison": compared,
            **model_document(model),
        }
    )


# --- predict ---------------------------------------------------------------------------------------------------


def predict(
    model: Model,
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Rows to predict: a file, or a directory with one file per device.")
    ],
    device: Annotated[
        str | None, typer.Option(metavar="COL", help="Column of the devices; by default the one of the fit.")
    ] = None,
    offset: Annotated[
        str | None, typer.Option(metavar="COL", help="Column of the offset; by default the one of the fit.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="File for the predictions; by default standard output.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict rows of known devices with a fitted model."""
    fitted = load(model)
    column = device or fitted.options.get("device_column")
    federation = read_federation(
        data, device=column, features=fitted.feature_names, offset=offset or fitted.offset_name
    )
    rows = np.argsort(federation.row_order)  # back to the order of the file
    ids = _known_ids(fitted, federation.devices)
    devices = [ids[u] for u in federation.device_index[rows].tolist()]
    shift = None if federation.offset is None else federation.offset[rows]
    columns = _columns(fitted, federation.X[rows], devices, shift)
    header = ["row", column or "device", *columns]
    table: list[list[Any]] = [
        [number, *cells] for number, cells in enumerate(zip(devices, *columns.values(), strict=True))
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
        messages().print(f"{out}: {count(len(table), 'prediction')} for {count(len(set(devices)), 'device')}")


def _known_ids(model: FittedModel, found: tuple[Hashable, ...]) -> list[Hashable]:
    """Ids as the model has them: a file of whole numbers reads as ints what another file had as text."""
    by_text = {str(known): known for known in model.devices}
    return [device if device in model.index else by_text.get(str(device), device) for device in found]


def _columns(model: FittedModel, X: Array, devices: list[Hashable], shift: Array | None) -> dict[str, list[Any]]:
    predicted = model.predict(X, devices, shift)
    if predicted.ndim == 2:  # the means of the features
        return {name: predicted[:, k].tolist() for k, name in enumerate(model.feature_names)}
    columns = {"prediction": predicted.tolist()}
    if model.classes is not None:
        chances = model.predict_proba(X, devices, shift)
        columns.update({f"probability:{label}": chances[:, k].tolist() for k, label in enumerate(model.classes)})
    return columns


# --- inspect ---------------------------------------------------------------------------------------------------


def inspect(model: Model, as_json: Json = False) -> None:
    """Show what a fitted model found: groups, graph, coefficients, and notes on single devices."""
    fitted = load(model)
    if as_json:
        document = {"fedkin_version": fitted.fedkin_version, "model": str(model), **model_document(fitted)}
        print_json({**document, "options": dict(fitted.options)})
        return
    console = output()
    classes = None if fitted.classes is None else ", ".join(map(str, fitted.classes))
    about = {"target": fitted.target_name, "offset": fitted.offset_name, "classes": classes}
    print_facts(
        {
            "model": f"{model}, written by Fedkin {fitted.fedkin_version}",
            "loss": ", ".join([fitted.loss.name, *(f"{key} {value}" for key, value in about.items() if value)]),
            "devices": f"{fitted.n_devices}, fitted on {count(int(fitted.n_samples.sum()), 'row')}",
            "penalty": f"{fitted.penalty}, lam {fitted.lam:.4g}",
            "gap": f"{gap_words(fitted)} after {count(fitted.n_iter, 'iteration')}",
            "groups": group_words(fitted),
            "graph": f"{graph_words(fitted)}; {count(fitted.graph.n_components, 'connected component')}",
        }
    )
    console.print(f"\n{count(fitted.n_clusters, 'group')}", style="bold")
    console.print(groups_table(fitted))
    _print_coefficients(fitted)
    lines = note_lines(fitted.notes)
    if lines:
        console.print("Notes", style="bold")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True)


def _print_coefficients(model: FittedModel) -> None:
    """The features with the largest coefficients: a column per group if there are few, else the spread."""
    size = np.abs(model.coef).mean(axis=(0, 1))
    chosen = np.argsort(-size, kind="stable")[:_MOST_FEATURES]
    title = "Coefficients" if size.size <= _MOST_FEATURES else f"The {len(chosen)} largest of {size.size} coefficients"
    classes = [None] if model.coef.shape[1] == 1 or model.classes is None else list(model.classes[1:])
    labels = sorted(range(model.n_clusters), key=lambda k: -int((model.clusters == k).sum()))
    by_group = len(labels) <= _MOST_COLUMNS and (len(labels) > 1 or n_distinct(model) == 1)
    heads = [f"group {k + 1}" for k in range(len(labels))] if by_group else ["mean", "least", "most"]
    table = plain_table("feature", *heads)
    rows = [("(intercept)", model.intercept)] if model.fit_intercept else []
    rows += [(model.feature_names[q], model.coef[:, :, q]) for q in chosen.tolist()]
    for name, values in rows:
        for j, label in enumerate(classes):
            column = values[:, j]
            if by_group:
                cells = [column[model.clusters == k].mean() for k in labels]
            else:
                cells = [column.mean(), column.min(), column.max()]
            add_row(table, name if label is None else f"{name} [{label}]", *(f"{cell:.4g}" for cell in cells))
    console = output()
    console.print(f"{title} (in the units of the features; {'mean of each group' if by_group else 'over devices'})")
    console.print(table)
