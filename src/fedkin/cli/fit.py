"""``fedkin fit``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from fedkin import __version__
from fedkin.cli.console import note, output, print_json, working
from fedkin.cli.tables import (
    MOST_GROUPS,
    add_row,
    count,
    graph_words,
    group_words,
    groups_table,
    model_document,
    note_lines,
    plain_table,
    print_facts,
    read_federation,
)
from fedkin.data import Federation
from fedkin.errors import DataError, ModelFileError, ParameterError
from fedkin.fitting import MODEL_FILE, Comparison, FitOptions, FittedModel, compare, fit_federation
from fedkin.graph import Graph
from fedkin.losses import CLASS_LOSSES
from fedkin.stats import Method, Variance


@dataclass(frozen=True)
class FitCommand:
    """What the user asked for."""

    data: Path
    device: str | None
    target: str | None
    features: tuple[str, ...] | None
    offset: str | None
    graph: Path | None
    loss: str
    penalty: str
    select: Method | Literal["none"]
    level: float
    variance: Variance
    lam: str
    one_se: bool
    refit: bool
    standardize: bool
    ridge: float
    test_size: float
    seed: int
    jobs: int
    out: Path
    as_json: bool


def run(command: FitCommand) -> None:
    """Read, compare on held-out rows, fit on all rows, save, and say what was found."""
    lam = _lam(command.lam)
    if not 0 <= command.test_size < 1:
        raise ParameterError(f"--test-size must be at least 0 and less than 1, got {command.test_size:g}")
    _check_place(command.out)
    comparison = None
    with working(f"reading {command.data}") as say:
        federation = read_federation(
            command.data,
            device=command.device,
            target=_target(command),
            features=command.features,
            offset=command.offset,
        )
        graph = None if command.graph is None else Graph.read(command.graph, federation.devices)
        loss = _loss(command.loss, federation)
        options = FitOptions(
            loss=loss,
            penalty=command.penalty,
            lam=lam,
            select=None if command.select == "none" else command.select,
            level=command.level,
            variance=command.variance,
            refit=command.refit,
            standardize=command.standardize,
            ridge=command.ridge,
            cv_rule="1se" if command.one_se else "min",
            seed=command.seed,
            n_jobs=command.jobs,
        )
        if command.test_size > 0:
            train, test = federation.split(command.test_size, command.seed)
            comparison = compare(train, test, graph, options, lambda words: say(f"comparison: {words}"))
        fitted = fit_federation(federation, graph, options, lambda words: say(f"all rows: {words}"))
        model = replace(
            fitted,
            offset_name=command.offset,
            options={**fitted.options, "device_column": command.device},
        )
        say(f"writing {command.out}")
        model.save(command.out)
    if command.as_json:
        _print_document(command, model, comparison)
    else:
        _print_tables(command, federation, model, comparison)


def _lam(text: str) -> float | Literal["cv"]:
    if text == "cv":
        return "cv"
    try:
        return float(text)
    except ValueError:
        raise ParameterError(f"--lam must be cv or a number of at least 0, got {text!r}") from None


def _target(command: FitCommand) -> str | None:
    if command.target is None and command.loss != "mean":
        raise DataError(
            "say which column to predict: --target COL (or --loss mean, which estimates the means of the features)"
        )
    if command.target is not None and command.loss == "mean":
        raise DataError(f"the mean loss has no target: leave out --target {command.target}, or name it in --features")
    return command.target


def _loss(name: str, federation: Federation) -> str:
    y = federation.y
    if y is None:
        return name
    if y.dtype.kind != "f":
        return "logistic" if name == "auto" else name  # more than two classes make it multinomial
    if name in CLASS_LOSSES and np.any(y != np.floor(y)):
        number = y[y != np.floor(y)][0]
        raise DataError(
            f"the target {federation.target_name!r} has numbers such as {number:g}, but the {name} loss needs classes: "
            "use --loss linear, or a column of labels"
        )
    if name != "auto":
        return name
    if set(np.unique(y).tolist()) == {0.0, 1.0}:
        note(f"the target {federation.target_name!r} is 0 or 1 everywhere; to model it as a class, add --loss logistic")
    return "linear"


def _check_place(out: Path) -> None:
    """Before the long work, not after it."""
    taken = out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / MODEL_FILE).exists())
    if taken:
        raise ModelFileError(f"{out} exists and is not a Fedkin model: choose another place with --out")


def _print_tables(
    command: FitCommand, federation: Federation, model: FittedModel, comparison: Comparison | None
) -> None:
    console = output()
    given = "all pairs of devices" if command.graph is None else str(command.graph)
    facts = {
        "data": f"{command.data}: {count(federation.n_devices, 'device')}, {count(len(federation.X), 'row')}, "
        f"{count(federation.n_features, 'feature')}",
        "model": f"{model.loss.name} loss, {model.penalty} penalty"
        + ("" if model.target_name is None else f", target {model.target_name}"),
        "graph": f"{given}: {graph_words(model)}",
    }
    print_facts(facts)
    if comparison is not None:
        _print_comparison(command, comparison)
    if 1 < model.n_clusters <= MOST_GROUPS:
        console.print(f"{count(model.n_clusters, 'group')} of devices that belong together", style="bold")
        console.print(groups_table(model))
    how = "cross-validation" + (", one standard error" if command.one_se else "") if command.lam == "cv" else "given"
    facts = {
        "groups": group_words(model),
        "lam": f"{model.lam:.4g} ({how})",
        "gap": f"{model.gap:.1e} ({model.status.replace('_', ' ')})",
        "saved": f"{command.out}, fitted on all {len(federation.X)} rows"
        + ("" if comparison is None else " (the comparison held some out)"),
    }
    print_facts(facts)
    for words in note_lines(model.notes):
        note(words)


def _print_comparison(command: FitCommand, comparison: Comparison) -> None:
    better = "more" if comparison.higher_is_better else "less"
    table = plain_table("method", comparison.metric, *comparison.more)
    ranked = sorted(comparison.errors, key=lambda name: comparison.errors[name], reverse=comparison.higher_is_better)
    for name, error in comparison.errors.items():
        extra = [f"{values[name]:.4g}" for values in comparison.more.values()]
        add_row(table, name, f"{error:.4g}", *extra, style="bold green" if name == ranked[0] else "")
    console = output()
    console.print(f"\nError on the {command.test_size:.0%} of each device's rows that were held out", style="bold")
    console.print(f"(of the first column, {better} is better)")
    console.print(table)


def _print_document(command: FitCommand, model: FittedModel, comparison: Comparison | None) -> None:
    compared = None
    if comparison is not None:
        compared = {
            "test_size": command.test_size,
            "metric": comparison.metric,
            "higher_is_better": comparison.higher_is_better,
            "errors": comparison.errors,
            "more": comparison.more,
        }
    print_json(
        {
            "fedkin_version": __version__,
            "model": str(command.out),
            "data": str(command.data),
            "graph": None if command.graph is None else str(command.graph),
            "comparison": compared,
            **model_document(model),
        }
    )
