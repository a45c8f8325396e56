"""``fedkin fit``: from a table, Parquet files or summaries of sites to a model in a directory."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from fedkin import __version__
from fedkin._base import Say, count, listed
from fedkin.cli.arguments import Json, argument, option, switch
from fedkin.cli.console import Interrupted, flag, note, output, print_facts, print_json, stopping_early
from fedkin.cli.format import (
    finite,
    format_method,
    graph_fact,
    model_document,
    model_facts,
    note_lines,
    print_comparison,
    print_groups,
)
from fedkin.cli.models import write_report
from fedkin.cli.options import DEFAULT, Loss, Selection, fit_option, given_options, written
from fedkin.cli.reading import (
    EdgeFiles,
    Opened,
    check_new_file,
    folder_of_summaries,
    open_by_contract,
    open_summaries,
    open_table,
)
from fedkin.core import Variance
from fedkin.data import Federation
from fedkin.errors import (
    ConvergenceWarning,
    DataError,
    DegenerateSiteWarning,
    FedkinError,
    ModelFileError,
    ParameterError,
    SolverError,
)
from fedkin.federate import Contract
from fedkin.fitting import (
    REPEATS,
    Comparison,
    FitOptions,
    FittedModel,
    Queries,
    check_model_place,
    compare,
    data_record,
    with_covariates,
    with_history,
)
from fedkin.fitting import fit as fit_model
from fedkin.fitting.options import Debiasing, FitMethod, PenaltyName, Solver
from fedkin.fitting.progress import progress
from fedkin.graph import Graph

_MODEL, _FUSED, _TESTS, _CHOICE, _HOW = "Model", "Fused estimator", "Edge tests", "Choice of lam", "Computation"


def fit(
    context: typer.Context,
    data: Annotated[
        Path,
        argument(
            "DATA", "CSV or Parquet file, a directory with one file per site, or a directory of sites' summaries."
        ),
    ],
    site: Annotated[str | None, option("COL", "Column that names the site of a row; a directory needs none.")] = None,
    target: Annotated[str | None, option("COL", "Column to predict.")] = None,
    features: Annotated[list[str] | None, option("A,B,...", "Columns to predict from; by default all others.")] = None,
    drop: Annotated[list[str] | None, option("A,B,...", "Columns to leave out, where all others predict.")] = None,
    offset: Annotated[str | None, option("COL", "Column that is added to the linear predictor as it is.")] = None,
    weight: Annotated[str | None, option("COL", "Column with weights: how many rows each row stands for.")] = None,
    time: Annotated[str | None, option("COL", "Column that orders rows: train on earlier, test on later ones.")] = None,
    missing: Annotated[
        Literal["refuse", "drop", "mean", "indicator"],
        typer.Option(help="Missing cells: refuse the table, drop their rows, fill in means, or also mark them."),
    ] = "refuse",
    categories: Annotated[list[str] | None, option("A,B,...", "Columns whose numbers are names: codes, types.")] = None,
    graph: Annotated[
        Path | None,
        option("FILE", "Edges between sites, CSV or GraphML; for the fused estimator by default all pairs."),
    ] = None,
    covariates: Annotated[
        Path | None,
        option("FILE.csv", "What is known about the sites, a line for each, instead of a graph: size, place, region."),
    ] = None,
    contract: Annotated[
        Path | None,
        option("FILE.toml", "Contract of a federation, which says columns, loss, penalty, scale and folds."),
    ] = None,
    federation: Annotated[
        Path | None, option("FILE", "The organiser's federation.json, where it is not next to the summaries.")
    ] = None,
    test_size: Annotated[
        float, typer.Option(help="Share of each site's rows to hold out for the comparison; 0 for no comparison.")
    ] = 0.25,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Splits to compare on.")] = REPEATS,
    keep_best: Annotated[
        bool,
        switch(
            "--keep-best",
            "After Ctrl-C go on with the splits that are done, or in the last fit with the last split's model.",
        ),
    ] = False,
    out: Annotated[Path, option("DIR", "Directory for the model.")] = Path("fedkin-model"),
    report: Annotated[Path | None, option("PAGE.html", "Also write the HTML report of the model.")] = None,
    as_json: Json = False,
    method: Annotated[FitMethod, fit_option("method", _MODEL)] = "auto",
    loss: Annotated[Loss, fit_option("loss", _MODEL)] = "auto",
    fit_intercept: Annotated[bool, fit_option("fit_intercept", _MODEL)] = True,
    messages: Annotated[int, fit_option("messages", _MODEL)] = DEFAULT["messages"],
    penalty: Annotated[PenaltyName, fit_option("penalty", _FUSED)] = DEFAULT["penalty"],
    lam: Annotated[str, fit_option("lam", _FUSED, "cv|X")] = "cv",
    fuse_intercept: Annotated[Literal["yes", "no", "auto"], fit_option("fuse_intercept", _FUSED)] = "yes",
    debias: Annotated[Debiasing, fit_option("debias", _FUSED)] = DEFAULT["debias"],
    refit: Annotated[bool, fit_option("refit", _FUSED)] = False,
    standardize: Annotated[bool, fit_option("standardize", _FUSED)] = True,
    ridge: Annotated[str, fit_option("ridge", _FUSED, "cv|X")] = str(DEFAULT["ridge"]),
    sparsity: Annotated[float, fit_option("sparsity", _FUSED)] = DEFAULT["sparsity"],
    select: Annotated[Selection, fit_option("select", _TESTS)] = DEFAULT["select"],
    level: Annotated[float, fit_option("level", _TESTS)] = DEFAULT["level"],
    variance: Annotated[Variance, fit_option("variance", _TESTS)] = DEFAULT["variance"],
    cv_folds: Annotated[int, fit_option("cv_folds", _CHOICE)] = DEFAULT["cv_folds"],
    cv_rule: Annotated[bool, fit_option("cv_rule", _CHOICE)] = False,
    solver: Annotated[Solver, fit_option("solver", _HOW)] = DEFAULT["solver"],
    tol: Annotated[float, fit_option("tol", _HOW)] = DEFAULT["tol"],
    max_iter: Annotated[int, fit_option("max_iter", _HOW)] = DEFAULT["max_iter"],
    rounds: Annotated[int, fit_option("rounds", _HOW)] = DEFAULT["rounds"],
    batch_size: Annotated[int | None, fit_option("batch_size", _HOW, "B")] = None,
    seed: Annotated[int, fit_option("seed", _HOW)] = DEFAULT["seed"],
    n_jobs: Annotated[int | None, fit_option("n_jobs", _HOW, "N")] = None,
) -> None:
    """Fit a model for every site of a table, and compare it with simpler ones on held-out rows.

    By default sites that are alike are found, each site's model borrows from the others as far as the data say so, and
    all comes with its uncertainty (kin). Options of the fused estimator ask for the paper's.

    From a directory of summaries, which sites have written with fedkin site share, it fits the model of all sites
    without their rows, or writes what they are to be asked next.
    """
    if context.args:
        raise ParameterError(
            f"unexpected {listed(context.args)}: lists have commas and no spaces, such as --features A,B; DATA is one "
            "file or directory, or a pattern in quotes"
        )
    if report is not None:
        check_new_file(report, "report.html", data, graph, covariates, contract, federation)
        if report.absolute().parent.resolve() == out.resolve():
            raise ParameterError(f"--report {report} lies in the model directory {out}: choose a place outside of it")
    if not 0 <= test_size < 1:
        raise ParameterError(f"--test-size must be at least 0 and less than 1, got {test_size:g}")
    files, folder, options = EdgeFiles(graph, covariates, site), folder_of_summaries(data), given_options(context)
    columns: dict[str, Any] = {"site": site, "target": target, "offset": offset, "weight": weight, "time": time}
    columns |= {"features": _names(features) if features else None, "drop": _names(drop)}
    columns |= {"categories": _names(categories), "missing": missing}
    if folder is not None:
        _refuse(context, ("contract", *columns), "is for tables; summaries have their contract: leave it out")
        about = "summaries, whose sites have said the folds to compare on: leave it out"
        _refuse(context, ("test_size", "repeats", "keep_best"), f"is not for {about}")
    elif federation is not None:
        raise ParameterError(f"--federation is for a directory of summaries, and {data} has none")
    elif contract is not None:
        own = [name for name in columns if name != "site"]
        _refuse(context, own, "is for the contract to say: leave it out with --contract")
    _check_out(out)
    with progress(f"reading {data}") as say:
        if folder is not None:
            opened = open_summaries(folder, options, federation)
        elif contract is not None:
            opened = open_by_contract(data, options, Contract.read(contract), site)
        else:
            opened = open_table(data, options, columns)
        if folder is None and not isinstance(opened.data, Federation):
            ignored = ("repeats", "keep_best", *(() if test_size == 0 else ("test_size",)))
            _refuse(context, ignored, "needs all rows in memory, which is too small for them: leave it out")
        found = fit_opened(opened, files, say, test_size, repeats, keep_best)
        if isinstance(found, Queries):
            assert opened.ask is not None
            questions = opened.ask(found)
        else:
            record = {"data": data_record(folder or data, int(found.n_samples.sum())), "command": command_line(context)}
            fitted = {**found.options, **({} if folder is not None else {"site_column": site})}
            found = replace(found, history={**(found.history or {}), **record}, options=fitted)
            say(f"writing {out}")
            found.save(out)
            if report is not None:
                write_report(found, report)
    if isinstance(found, Queries):
        print_queries(found, questions, as_json)
        return
    for name in opened.missing:
        note(f"{name} has sent no summary, so it has no model")
    if as_json:
        place = {"model": str(out), "data": str(folder or data)}
        given = {"graph": None if graph is None else str(graph), "covariates": covariates and str(covariates)}
        print_json({**model_document(found), **place, **given})
        return
    print_fit(found, opened, folder or data, files)
    end = {} if report is None else {"report": f"{report}, opens in any browser"}
    print_end(found, out, opened.n_rows, end)


def fit_opened(
    opened: Opened, files: EdgeFiles, say: Say, test_size: float = 0.25, repeats: int = REPEATS, keep_best: bool = False
) -> FittedModel | Queries:
    """Fit data that were opened, compare on rows that are held out, and return the model, or queries to the sites.

    Rows in memory are compared first, so that Ctrl-C with ``keep_best`` leaves a model.
    """
    data, how, schema = opened.data, opened.options, opened.schema
    given, known = files.read(data.sites)
    graph = opened.graph if given is None else given
    comparison: Comparison | None = None
    with warnings.catch_warnings(), stopping_early(keep_best):
        # both are said by the model: by its status, and by its notes
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DegenerateSiteWarning)
        if isinstance(data, Federation):
            comparison, model = _fit_rows(data, graph, how, schema, say, test_size, repeats, keep_best)
        else:
            found = fit_model(data, graph, how, say, schema, queries=opened.queries)
            if isinstance(found, Queries):
                return found
            model = found
            _check_converged(model, how)
            if test_size > 0:
                say("comparing with simpler models, every fold held out in turn")
                try:
                    comparison = compare(data, graph, how, model=model, schema=schema)
                except FedkinError as error:
                    note(f"no comparison: {error}")
        if model.kin is None and model.status == "converged":
            say("following the path of lam")
            model = with_history(model, data, graph, how, schema)
    plain = None if comparison is None else comparison.plain()
    return replace(with_covariates(model, known), comparison=plain, **opened.known)


def _fit_rows(
    data: Federation,
    graph: Graph | None,
    how: FitOptions,
    schema: Any,
    say: Say,
    test_size: float,
    repeats: int,
    keep_best: bool,
) -> tuple[Comparison | None, FittedModel]:
    if test_size > 0 and (np.diff(data.starts) <= 1).all():
        raise DataError(
            "every site has one row only, so that none can be held out: is --site the right column? If so, "
            "--test-size 0 fits without a comparison"
        )
    comparison, last = None, None
    try:
        if test_size > 0:
            given: Any = {"repeats": repeats, "test_size": test_size, "keep_best": keep_best, "schema": schema}
            comparison = compare(data, graph, how, progress=lambda text: say(f"comparison: {text}"), **given)
            last = comparison.models[-1]["Fedkin"]
        model = fit_model(data, graph, how, lambda text: say(f"all rows: {text}"), schema)
    except KeyboardInterrupt:
        if last is None:
            note("--keep-best: no split was done, so there is nothing to keep yet")
            raise Interrupted from None
        model = last
        note(f"interrupted: the model is that of the last split, {count(int(last.n_samples.sum()), 'row')}")
    if model.status == "interrupted" and keep_best and model.fused is not None:
        gap = model.fused.gap
        note(f"interrupted: the model is as far as the fit of all rows came, with a relative gap of {gap:.1e}")
    else:
        _check_converged(model, how)
    if comparison is not None and any(part["Fedkin"].status != "converged" for part in comparison.models):
        note("in the comparison, the fit of Fedkin did not converge in every split; on all rows it did")
    return comparison, model


def _check_converged(model: FittedModel, how: FitOptions) -> None:
    if model.status == "converged" or model.fused is None:
        return
    more = "rounds" if how.solver == "fedadmm" else "max_iter"
    raise SolverError(
        f"the fit did not converge, so no model was saved: after {count(model.fused.n_iter, 'iteration')} the relative "
        f"gap is {model.fused.gap:.1e}, not {how.tol:.1e}. Raise {flag(more)}, accept a larger {flag('tol')}, or add "
        f"{flag('ridge', 0.001)}"
    )


def _check_out(out: Path) -> None:
    """Refuse a place that has something else than a model, and say that a model will be replaced."""
    try:
        replaced = check_model_place(out)
    except ModelFileError as error:
        raise ModelFileError(f"--out: {error}") from None
    if replaced is not None:
        note(f"{out} has a model of {count(replaced, 'site')}: it will be replaced (--out DIR keeps both)")


def _refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise `ParameterError` for the first of these options that was given."""
    for name in names:
        if written(context, name):
            raise ParameterError(f"{flag(name)} {why}")


def _names(given: list[str] | None) -> list[str]:
    """Return columns, with commas between them or one option for each."""
    return [name.strip() for part in given or () for name in part.split(",") if name.strip()]


def command_line(context: typer.Context) -> str:
    """Return what was typed, as a shell would take it."""
    return shlex.join(["fedkin", *(context.find_root().obj or ())])


# --- output -----------------------------------------------------------------------------------------------------------


def print_fit(model: FittedModel, opened: Opened, data: Path, files: EdgeFiles) -> None:
    """Print what a model was fitted from and how well it predicts."""
    sizes = {"site": model.n_sites, "row": opened.n_rows, "feature": model.n_features}
    about = "" if model.target_name is None else f", target {model.target_name}"
    source = "all pairs of sites" if opened.graph is None else "the organiser's graph"
    source = str(files.path) if files.path is not None else "" if model.kin is not None else source
    told = files.path is not None or opened.graph is not None or model.kin is None
    facts: Mapping[str, str] = {
        "data": f"{data}: {', '.join(count(n, word) for word, n in sizes.items())}",
        **opened.facts,
        "model": f"{model.loss.name} loss{about}, {format_method(model)}",
        **(graph_fact(model, source) if told else {}),
    }
    print_facts(facts)
    if model.comparison is not None:
        print_comparison(model.comparison)


def print_end(model: FittedModel, out: Path, n_rows: int, more: Mapping[str, str]) -> None:
    """Print groups, certificate or sampler, where the model is, and notes on sites.

    Where the table has more rows, ``n_rows``, the model is that of a split.
    """
    if model.kin is not None or model.n_groups > 1:
        print_groups(model)
    fitted = int(model.n_samples.sum())
    rows = f"{fitted:,} of {count(n_rows, 'row')}, those of the last split: the fit of all rows was interrupted"
    if fitted == n_rows:
        rows = f"all {count(n_rows, 'row')}" + ("" if model.comparison is None else " (the comparison held some out)")
    shown = ("groups", "penalty", "gap", "sampler")
    facts = {name: text for name, text in model_facts(model).items() if name in shown}
    print_facts({**facts, "saved": f"{out}, fitted on {rows}", **more})
    for text in note_lines(model.notes):
        note(text)


def print_queries(queries: Queries, paths: Sequence[Path], as_json: bool) -> None:
    """Print what to do with the queries to the sites."""
    if as_json:
        asked = {"round": queries.round, "gap": finite(queries.gap), "asks": [str(path) for path in paths]}
        print_json({"fedkin_version": __version__, "model": None, **asked})
        return
    folder = paths[0].parent
    lines = [
        f"No model yet: one more message of every site is needed (number {queries.round}).",
        f"1. Send each site its question in {folder}:",
        *(f"     {path.name}" for path in paths),
        "2. There: fedkin site answer DIR FILE, and send back what it writes",
        f"3. Put the answers into {folder.parent / 'summaries'}, and run this command again",
    ]
    if np.isfinite(queries.gap):
        lines.insert(0, f"After {count(queries.round - 1, 'message')} of every site the gap is {queries.gap:.1e}.")
    for line in lines:
        output().print(line, soft_wrap=True)
