"""``fedkin demo``: the paper's simulation, from generated sites to a report."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedkin import __version__
from fedkin._base import Array, Say, count, write_file
from fedkin.cli.arguments import Json, option
from fedkin.cli.console import add_row, output, plain_table, print_facts, print_json
from fedkin.cli.fit import command_line
from fedkin.cli.format import model_facts
from fedkin.cli.models import write_report
from fedkin.core import global_fit, local_fit, oracle_fit
from fedkin.data import Federation, write_csv
from fedkin.datasets import Design, paper_design
from fedkin.errors import ParameterError
from fedkin.fitting import FitOptions, FittedModel, fit
from fedkin.fitting.progress import progress
from fedkin.graph import Graph
from fedkin.report import DemoResult, demo_picture

GROUPS = 5
LOCAL, GLOBAL, GIVEN, SELECTED, KIN, ORACLE = "Local", "Global", "Fed-ADMM", "Fed-ADMM-ES", "Kin", "Oracle"
_MEANING = {
    LOCAL: "each site alone",
    GLOBAL: "one model for all",
    GIVEN: "the graph as given",
    SELECTED: "its edges tested first",
    KIN: "finds who is alike",
    ORACLE: "told the true groups",
}


def demo(
    out: Annotated[Path, option("DIR", "Directory for the report and the data of the demonstration.")] = Path(
        "demo-report"
    ),
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 60,
    rows: Annotated[int, typer.Option(min=2, help="Rows that each site learns from; it has as many to test on.")] = 60,
    features: Annotated[int, typer.Option(min=1, help="Number of features.")] = 20,
    varrho: Annotated[float, typer.Option(help="Share of the graph that is wrong.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    as_json: Json = False,
    *,
    context: typer.Context,
) -> None:
    """Generate sites with a graph that is partly wrong, and see how close each method comes to the truth."""
    if sites < GROUPS:
        raise ParameterError(f"--sites must be at least {GROUPS}, the number of true groups, got {sites}")
    if out.is_file():
        raise ParameterError(f"--out {out} is a file, expected a directory for the report")
    with progress("generating sites") as say:
        design = paper_design(sites, 2 * rows, features, GROUPS, varrho=varrho, seed=seed)
        out.mkdir(parents=True, exist_ok=True)  # before the work: a place that cannot be written is told at once
        model, result = _found(design, seed, say)
        shown = replace(model, history={**(model.history or {}), "command": command_line(context)})
        write_report(shown, out / "report.html")
        write_file(out / "picture.svg", demo_picture(result))
        _write_data(design, out)
    if as_json:
        print_json(
            {
                "fedkin_version": __version__,
                "report": str(out / "report.html"),
                "estimation_error": result.estimation,
                "held_out_error": result.held_out,
                "n_groups": model.n_groups,
                "true_groups": GROUPS,
                "resolved": model.kin is not None and model.kin.resolved,
                "summary": result.summary,
            }
        )
    else:
        _print(model, result, out)


def _found(design: Design, seed: int, say: Say) -> tuple[FittedModel, DemoResult]:
    """Fit by all methods; return the model that Fedkin fits by default, and how all did."""
    train, test = design.federation.split(0.5, seed)
    rows = int(train.n_samples[0])
    # as in the paper: no intercept, features as they are
    plain = FitOptions(method="fused", fit_intercept=False, standardize=False, select="none", seed=seed)
    say("Local, Global and Oracle")
    theta = {LOCAL: local_fit(train).theta, GLOBAL: np.tile(global_fit(train), (train.n_sites, 1))}
    given = fit(train, design.graph, plain, lambda words: say(f"the graph as given: {words}"))
    tested = replace(plain, select="bonferroni")
    fused = fit(train, design.graph, tested, lambda words: say(f"edges tested first: {words}"))
    model = fit(train, design.graph, FitOptions(fit_intercept=False, seed=seed), say)
    kin = model.kin
    assert kin is not None
    theta[GIVEN], theta[SELECTED], theta[KIN] = given.coef[:, 0], fused.coef[:, 0], model.coef[:, 0]
    theta[ORACLE] = oracle_fit(train, design.labels.tolist())
    error = {name: design.error(estimate) for name, estimate in theta.items()}
    each = {name: _squared_errors(estimate, test) for name, estimate in theta.items()}
    held_out = {name: float(errors.mean()) for name, errors in each.items()}  # sites have equally many rows
    result = DemoResult(
        summary=_summary(design, model, rows, error),
        estimation=error,
        held_out=held_out,
        highlight=(KIN,),
        given=design.graph,
        kept=kin.graph("probability", least=0.5),
        labels=design.labels,
    )
    names = _names(model.n_sites)
    graph = Graph.from_indices(names, model.graph.edges, model.graph.weights)
    named = replace(kin, sites=tuple(names))
    compared = _comparison(names, each, result)
    return replace(model, sites=tuple(names), graph=graph, kin=named, comparison=compared), result


def _comparison(names: list[str], each: dict[str, Array], result: DemoResult) -> dict[str, Any]:
    """Return how the methods did, as a report has it; Fedkin is kin."""
    called = {KIN: "Fedkin", GIVEN: "Graph as given", SELECTED: "Edges tested first"}
    return {
        "metric": "mean squared error",
        "lower_is_better": True,
        "repeats": 1,
        "test_size": 0.5,
        "verdict": result.summary,
        "methods": [{"name": called.get(name, name), "mean": value} for name, value in result.held_out.items()],
        "sites": [
            {"site": site, **{called.get(name, name): float(errors[u]) for name, errors in each.items()}}
            for u, site in enumerate(names)
        ],
        "more": {
            "squared distance from the truth": {called.get(name, name): one for name, one in result.estimation.items()}
        },
    }


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
    groups = f"{count(model.n_groups, 'group')} of sites" if resolved else "no groups that are resolved"
    return (
        f"Every one of the {model.n_sites} sites kept its own {rows} rows. A graph said which sites may be alike, "
        f"but {wrong} of its {design.graph.n_edges} edges were wrong. Fedkin found {groups}"
        f"{', exactly the true ones' if right else f'; in truth there are {GROUPS}'}. "
        f"Its error is {_ratio(error[KIN], error[LOCAL])} that of a site on its own and "
        f"{_ratio(error[KIN], error[ORACLE])} that of an oracle who was told the groups."
    )


def _ratio(part: float, whole: float) -> str:
    share = part / whole
    if abs(share - 1) < 0.005:
        return "the same as"
    return f"{share:.2g} of" if share < 0.005 else f"{share:.0%} of" if share < 1 else f"{share:.2f} times"


def _names(n_sites: int) -> list[str]:
    return [f"site{u:02d}" for u in range(n_sites)]


def _write_data(design: Design, out: Path) -> None:
    fed = design.federation
    assert fed.y is not None
    names = _names(fed.n_sites)
    rows = (
        [names[u], round(float(y), 6), *np.round(x, 6).tolist()]
        for u, y, x in zip(fed.site_index.tolist(), fed.y, fed.X, strict=True)
    )
    write_csv(out / "data.csv", ["site", "y", *fed.feature_names], rows)
    edges = ([names[j], names[i]] for i, j in design.graph.edges.tolist())
    write_csv(out / "graph.csv", ["source", "target"], edges)


def _program() -> str:
    """Return how this program is called from here."""
    if shutil.which("fedkin"):
        return "fedkin"
    return sys.argv[0] if Path(sys.argv[0]).name == "fedkin" else f"{sys.executable} -m fedkin"


def _print(model: FittedModel, result: DemoResult, out: Path) -> None:
    console = output()
    table = plain_table("method", "", "held-out", "estimation", "x oracle", numbers_from=2)
    for name, error in result.estimation.items():
        cells = (name, _MEANING[name], f"{result.held_out[name]:.4g}", f"{error:.3g}")
        ratio = f"{error / result.estimation[ORACLE]:.2f}"
        add_row(table, *cells, ratio, style="bold green" if name == KIN else "")
    console.print("Error of each method on held-out rows and against the true parameters", style="bold")
    console.print(table)
    console.print(result.summary)
    console.print()
    known = model_facts(model)
    facts = {name: known[name] for name in ("groups", "graph", "sampler")}
    print_facts({**facts, "report": str((out / "report.html").resolve())})
    console.print("\nThe same sites from their files, as you would fit your own:")
    command = f"{_program()} fit {out / 'data.csv'} --site site --target y --graph {out / 'graph.csv'}"
    console.print(command, style="bold", soft_wrap=True)
