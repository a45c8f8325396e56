"""``fedkin inspect``."""

from __future__ import annotations

import numpy as np

from fedkin._base import count
from fedkin.cli.console import output, print_json
from fedkin.cli.options import Json, Model
from fedkin.cli.tables import (
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
)
from fedkin.fitting import FittedModel, load

_MOST_FEATURES = 10
_MOST_COLUMNS = 6


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
