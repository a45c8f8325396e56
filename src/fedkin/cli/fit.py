"""``fedkin fit``: from a table, Parquet files or summaries of sites to a model in a directory."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
import typer

from fedkin import __version__
from fedkin._base import Say, count, listed, progress
from fedkin.cli.console import Json, argument, flag, note, option, print_facts, print_json, say, stopping_early, switch
from fedkin.cli.models import model_document, print_comparison, print_groups, write_report
from fedkin.cli.reading import (
    Opened,
    check_new_file,
    folder_of_summaries,
    open_by_contract,
    open_summaries,
    open_table,
    read_districts,
)
from fedkin.cluster import running_on
from fedkin.core import Correction, Variance
from fedkin.data import DecimalMark
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
    DEFAULTS,
    DESCRIPTIONS,
    REPEATS,
    SHARED,
    Comparison,
    FitOptions,
    FittedModel,
    Queries,
    check_model_place,
    choices,
    compare,
    data_record,
    with_covariates,
    with_history,
)
from fedkin.fitting import fit as fit_model
from fedkin.fitting.options import Debiasing, FitMethod, PenaltyName, Solver
from fedkin.report.text import facts, method_text, note_lines

_MODEL, _FUSED, _TESTS, _CHOICE, _HOW = "Model", "Fused estimator", "Edge tests", "Choice of lam", "Computation"
_HELP = {**DESCRIPTIONS, "cv_rule": "Take the largest lam within one standard error of the best."}

if TYPE_CHECKING:
    Loss: TypeAlias = str
else:  # the names are known at run time
    Loss = Literal[choices("loss")]


def fit_option(name: str, panel: str, metavar: str | None = None) -> Any:
    """Return the typer option of a field of `FitOptions`."""
    spelled = flag(name)
    if DEFAULTS[name] is True and name != "fuse_intercept":
        spelled = f"{spelled}/--no-{spelled[2:]}"
    return typer.Option(spelled, help=_HELP[name], metavar=metavar, rich_help_panel=panel)


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
    event: Annotated[
        str | None, option("COL", "Column of 1 where the event came at the time in --target, 0 where it is censored.")
    ] = None,
    features: Annotated[list[str] | None, option("A,B,...", "Columns to predict from; by default all others.")] = None,
    drop: Annotated[list[str] | None, option("A,B,...", "Columns to leave out, where all others predict.")] = None,
    offset: Annotated[str | None, option("COL", "Column that is added to the linear predictor as it is.")] = None,
    exposure: Annotated[str | None, option("COL", "Column of the exposure of counts: person-years, area.")] = None,
    weight: Annotated[str | None, option("COL", "Column with weights: how many rows each row stands for.")] = None,
    time: Annotated[str | None, option("COL", "Column that orders rows: train on earlier, test on later ones.")] = None,
    missing: Annotated[
        Literal["refuse", "drop", "mean", "indicator"],
        typer.Option(help="Missing cells: refuse the table, drop their rows, fill in means, or also mark them."),
    ] = "refuse",
    categories: Annotated[list[str] | None, option("A,B,...", "Columns whose numbers are names: codes, types.")] = None,
    spline: Annotated[list[str] | None, option("A,B,...", "Columns whose effects are curves: natural splines.")] = None,
    decimal: Annotated[DecimalMark, typer.Option(help="What stands before decimals in CSV files.")] = ".",
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
            "After Ctrl-C keep what is done: the splits of the comparison, or what the fused estimator has reached.",
        ),
    ] = False,
    on: Annotated[
        str, option("PLACE", "Where to run: local, ray or ray://host:port (passes over files, exact solver, Fed-ADMM).")
    ] = "local",
    out: Annotated[Path, option("DIR", "Directory for the model.")] = Path("fedkin-model"),
    report: Annotated[Path | None, option("PAGE.html", "Also write the HTML report of the model.")] = None,
    as_json: Json = False,
    method: Annotated[FitMethod, fit_option("method", _MODEL)] = "auto",
    loss: Annotated[Loss, fit_option("loss", _MODEL)] = "auto",
    fit_intercept: Annotated[bool, fit_option("fit_intercept", _MODEL)] = True,
    boost: Annotated[bool, fit_option("boost", _MODEL)] = False,
    messages: Annotated[int, fit_option("messages", _MODEL)] = FitOptions.messages,
    fixed: Annotated[list[str] | None, fit_option("fixed", _MODEL, "A,B,...")] = None,
    within: Annotated[str | None, fit_option("within", _MODEL, "COL")] = None,
    penalty: Annotated[PenaltyName, fit_option("penalty", _FUSED)] = FitOptions.penalty,
    lam: Annotated[str, fit_option("lam", _FUSED, "cv|X")] = "cv",
    fuse_intercept: Annotated[Literal["yes", "no", "auto"], fit_option("fuse_intercept", _FUSED)] = "yes",
    debias: Annotated[Debiasing, fit_option("debias", _FUSED)] = FitOptions.debias,
    refit: Annotated[bool, fit_option("refit", _FUSED)] = False,
    standardize: Annotated[bool, fit_option("standardize", _FUSED)] = True,
    ridge: Annotated[str, fit_option("ridge", _FUSED, "cv|X")] = str(FitOptions.ridge),
    sparsity: Annotated[str, fit_option("sparsity", _FUSED, "cv|cv-sites|X")] = str(FitOptions.sparsity),
    radius: Annotated[float | None, fit_option("radius", _FUSED, "R")] = None,
    select: Annotated[Literal[Correction, "none"], fit_option("select", _TESTS)] = "bonferroni",
    level: Annotated[float, fit_option("level", _TESTS)] = FitOptions.level,
    variance: Annotated[Variance, fit_option("variance", _TESTS)] = FitOptions.variance,
    cv_folds: Annotated[int, fit_option("cv_folds", _CHOICE)] = FitOptions.cv_folds,
    cv_rule: Annotated[bool, fit_option("cv_rule", _CHOICE)] = False,
    solver: Annotated[Solver, fit_option("solver", _HOW)] = FitOptions.solver,
    tol: Annotated[float, fit_option("tol", _HOW)] = FitOptions.tol,
    max_iter: Annotated[int, fit_option("max_iter", _HOW)] = FitOptions.max_iter,
    rounds: Annotated[int, fit_option("rounds", _HOW)] = FitOptions.rounds,
    batch_size: Annotated[int | None, fit_option("batch_size", _HOW, "B")] = None,
    fedadmm: Annotated[list[str] | None, fit_option("fedadmm", _HOW, "KEY=VALUE,...")] = None,
    seed: Annotated[int, fit_option("seed", _HOW)] = FitOptions.seed,
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
    if graph is not None and covariates is not None:
        raise ParameterError("give --graph or --covariates, not both: covariates are read as a graph")
    columns: dict[str, Any] = {"site": site, "target": target, "offset": offset, "weight": weight, "time": time}
    columns |= {"exposure": exposure, "event": event}
    columns |= {"features": _names(features) if features else None, "drop": _names(drop)}
    columns |= {"categories": _names(categories), "spline": _names(spline), "missing": missing, "decimal": decimal}
    folder, options = folder_of_summaries(data), given_options(context)
    source = folder or data
    if folder is not None:
        _refuse(context, ("contract", "within", *columns), "is for tables; summaries have their contract: leave it out")
    elif federation is not None:
        raise ParameterError(f"--federation is for a directory of summaries, and {data} has none")
    elif contract is not None:
        own = [name for name in columns if name not in ("site", "decimal")]
        _refuse(context, own, "is for the contract to say: leave it out with --contract")
    try:
        replaced, failed = check_model_place(out), None
    except ModelFileError as error:
        raise ModelFileError(f"--out: {error}") from None
    with running_on(on), progress(f"reading {source}") as tell:
        if within is not None:
            options["within"] = read_districts(data, site, within, decimal)
            columns["drop"] = [*columns["drop"], *([] if columns["features"] else [within])]
        if folder is not None:
            opened = open_summaries(folder, options, federation)
        elif contract is not None:
            opened = open_by_contract(data, options, Contract.read(contract), site, decimal)
        else:
            opened = open_table(data, options, columns)
        if not opened.data.in_memory:
            why = "is for rows in memory: files and summaries are compared over their folds; leave it out"
            _refuse(context, ("repeats", "keep_best", *(("test_size",) if test_size else ())), why)
        if opened.options.chosen == "kin":
            why = f"is for the fused estimator, not for kin: leave it out, or take {flag('method', 'fused')}"
            _refuse(context, [name for name in DEFAULTS if name not in SHARED], why)
        opened = opened.with_edges(graph, covariates, site)
        if replaced is not None:
            note(f"{out} has a model of {count(replaced, 'site')}: it will be replaced (--out DIR keeps both)")
        found = fit_opened(opened, tell, test_size, repeats, keep_best)
        if isinstance(found, Queries):
            assert opened.ask is not None
            questions = opened.ask(found)
        else:
            record = {"data": data_record(source, int(found.n_samples.sum())), "command": command_line(context)}
            fitted = {
                **found.options,
                **({} if folder is not None else {"site_column": site, "decimal": decimal, "within_column": within}),
            }
            found = replace(found, history={**(found.history or {}), **record}, options=fitted)
            tell(f"writing {out}")
            try:
                found.save(out)
                if report is not None:
                    write_report(found, report)
            except OSError as error:  # what was found out is printed all the same
                failed = error
    if isinstance(found, Queries):
        print_queries(found, questions, as_json)
    elif as_json:
        place = {"model": str(out), "data": str(source), "graph": graph, "covariates": covariates}
        print_json({**model_document(found), **place})
    else:
        end = {} if report is None or failed else {"report": f"{report}, opens in any browser"}
        print_result(found, opened, source, out, end)
    if failed is not None:
        raise failed


def given_options(context: typer.Context) -> dict[str, Any]:
    """Return the options that were typed, as `FitOptions` takes them."""
    options = {name: context.params[name] for name in DEFAULTS if _written(context, name)}
    if "cv_rule" in options:
        options["cv_rule"] = "1se" if options["cv_rule"] else DEFAULTS["cv_rule"]
    if "fuse_intercept" in options:
        options["fuse_intercept"] = {"yes": True, "no": False}.get(options["fuse_intercept"], "auto")
    options.pop("within", None)  # a column, which is read with the table
    if "fixed" in options:
        options["fixed"] = tuple(_names(options["fixed"]))
    if "fedadmm" in options:
        options["fedadmm"] = _assignments(options["fedadmm"])
    for name in {"lam", "ridge", "sparsity"} & options.keys():
        with suppress(ValueError):  # cv; FitOptions says what else is wrong
            options[name] = float(options[name])
    return options


def _written(context: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise `ParameterError` for the first of these options that was given."""
    for name in names:
        if _written(context, name):
            raise ParameterError(f"{flag(name)} {why}")


def _names(given: list[str] | None) -> list[str]:
    """Return columns, with commas between them or one option for each."""
    return [name.strip() for part in given or () for name in part.split(",") if name.strip()]


def _assignments(given: list[str] | None) -> dict[str, Any] | None:
    """Return the keys and values of ``--fedadmm``; numbers, yes and no are taken as such."""
    found: dict[str, Any] = {}
    for part in _names(given):
        key, is_pair, value = (one.strip() for one in part.partition("="))
        if not is_pair:
            raise ParameterError(f"{flag('fedadmm')} takes KEY=VALUE with commas between them, got {part!r}")
        found[key] = {"yes": True, "no": False}.get(value, value)
        with suppress(ValueError):
            found[key] = float(value)
    return found or None


def command_line(context: typer.Context) -> str:
    """Return what was typed, as a shell would take it."""
    return shlex.join(["fedkin", *(context.find_root().obj or ())])


def fit_opened(
    opened: Opened, tell: Say, test_size: float = 0.25, repeats: int = REPEATS, keep_best: bool = False
) -> FittedModel | Queries:
    """Fit data that were opened, then compare on rows that are held out; return the model, or queries to the sites.

    Ctrl-C with ``keep_best`` ends the fused estimator, or the comparison, with what is done.
    """
    data, graph, how, schema = opened.data, opened.graph, opened.options, opened.schema
    if test_size > 0 and (data.n_samples <= 1).all():
        raise DataError(
            "every site has one row only, so that none can be held out: is --site the right column? If so, "
            "--test-size 0 fits without a comparison"
        )
    comparison: Comparison | None = None
    with warnings.catch_warnings(), stopping_early(keep_best):
        # both are said by the model: by its status, and by its notes
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DegenerateSiteWarning)
        model = fit_model(data, graph, how, tell, schema, queries=opened.queries)
        if isinstance(model, Queries):
            return model
        _check_converged(model, how, keep_best)
        if model.kin is None and model.status == "converged":
            tell("following the path of lam")
            model = with_history(model, data, graph, how, schema)
        if test_size > 0:
            asked: Any = {"model": model, "schema": schema, "progress": lambda text: tell(f"comparison: {text}")}
            asked |= {"repeats": repeats, "test_size": test_size, "keep_best": keep_best}
            try:
                comparison = compare(data, graph, how, **asked)
            except KeyboardInterrupt:  # Ctrl-C is one with keep_best only
                note("interrupted before a split was done: there is no comparison")
            except FedkinError as error:
                note(f"no comparison: {error}")
    fits = [] if comparison is None else [part["Fedkin"] for part in comparison.models if part]
    if model.status == "converged" and any(one.status != "converged" for one in fits):
        note("in the comparison, the fit of Fedkin did not converge in every split; on all rows it did")
    plain = None if comparison is None else comparison.plain()
    known = dict(opened.known)
    if opened.alone:
        known["origin"] = {**(model.origin or {}), "alone": "; ".join(f"{a}: {why}" for a, why in opened.alone.items())}
    return replace(with_covariates(model, opened.covariates), comparison=plain, **known)


def _check_converged(model: FittedModel, how: FitOptions, keep_best: bool) -> None:
    fused = model.fused
    if fused is None or fused.status == "converged":
        return
    if fused.status == "interrupted" and keep_best:
        note(f"interrupted: the model is as far as the fit came, with a relative gap of {fused.gap:.1e}")
        return
    by_rounds = how.solver == "fedadmm"
    if by_rounds and (how.fedadmm or {}).get("stop") == "rounds":
        note(f"all {count(fused.n_iter, 'round')} were done, as stop=rounds asks; the relative gap is {fused.gap:.1e}")
        return
    more = f"{flag('rounds')} or take {flag('fedadmm', 'gradient=saga')}" if by_rounds else flag("max_iter")
    raise SolverError(
        f"the fit did not converge, so no model was saved: after {count(fused.n_iter, 'iteration')} the relative gap "
        f"is {fused.gap:.1e}, not {how.tol:.1e}. Raise {more}, accept a larger {flag('tol')}, or add "
        f"{flag('ridge', 0.001)}"
    )


# --- output -----------------------------------------------------------------------------------------------------------


def print_result(
    model: FittedModel, opened: Opened, data: Path, out: Path, more: Mapping[str, str] | None = None
) -> None:
    """Print what a model was fitted from, how well it predicts, its groups, whether to trust it, and where it is."""
    rows = int(model.n_samples.sum())
    sizes = {"site": model.n_sites, "row": rows, "feature": model.n_features}
    about = "" if model.target_name is None else f", target {model.target_name}"
    print_facts(
        {
            "data": f"{data}: {', '.join(count(n, word) for word, n in sizes.items())}",
            **opened.facts,
            "model": f"{model.loss.name} loss{about}, {method_text(model)}",
        }
    )
    held = ""
    if model.comparison is not None:
        print_comparison(model.comparison)
        held = " (the comparison held some out)"
    print_groups(model)
    print_facts({**facts(model), "saved": f"{out}, fitted on all {count(rows, 'row')}{held}", **(more or {})})
    for text in note_lines(model.notes):
        note(text)


def print_queries(queries: Queries, paths: Sequence[Path], as_json: bool) -> None:
    """Print what to do with the queries to the sites."""
    if as_json:
        asked = {"round": queries.round, "gap": queries.gap, "asks": [str(path) for path in paths]}
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
    say(*lines)
