"""Define ``fedkin demo``: methods compared with a known truth."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedkin import __version__
from fedkin._base import Array, Say, count, percent, write_file
from fedkin._progress import progress
from fedkin.cli.console import Json, add_row, option, output, plain_table, print_facts, print_json
from fedkin.cli.fit import command_line
from fedkin.cli.models import write_report
from fedkin.core import global_fit, local_fit, oracle_fit
from fedkin.data import Federation, write_csv
from fedkin.datasets import Design, paper_design
from fedkin.errors import ParameterError
from fedkin.fitting import FitOptions, FittedModel, fit
from fedkin.graph import Graph
from fedkin.report import demo_picture
from fedkin.report.text import facts

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
    rows: Annotated[int, typer.Option(min=2, help="Number of training rows per site, and of test rows.")] = 60,
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
