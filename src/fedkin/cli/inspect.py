"""``fedkin inspect``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkin.cli.console import output, print_json
from fedkin.cli.tables import (
    add_row,
    count,
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


def run(place: Path, as_json: bool) -> None:
    """Show a model directory."""
    model = load(place)
    if as_json:
        document = {"fedkin_version": model.fedkin_version, "model": str(place), **model_document(model)}
        print_json({**document, "options": dict(model.options)})
        return
    console = output()
    print_facts(
        {
            "model": f"{place}, written by Fedkin {model.fedkin_version}",
            "loss": model.loss.name
            + ("" if model.target_name is None else f", target {model.target_name}")
            + ("" if model.offset_name is None else f", offset {model.offset_name}")
            + ("" if model.classes is None else f", classes {', '.join(map(str, model.classes))}"),
            "devices": f"{model.n_devices}, fitted on {count(int(model.n_samples.sum()), 'row')}",
            "penalty": f"{model.penalty}, lam {model.lam:.4g}",
            "gap": f"{model.gap:.1e} ({model.status.replace('_', ' ')} after {count(model.n_iter, 'iteration')})",
            "groups": group_words(model),
            "graph": f"{graph_words(model)}; {count(model.graph.n_components, 'connected component')}",
        }
    )
    console.print(f"\n{count(model.n_clusters, 'group')}", style="bold")
    console.print(groups_table(model))
    _print_coefficients(model)
    lines = note_lines(model.notes)
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
