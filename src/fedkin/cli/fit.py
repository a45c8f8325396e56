"""Define ``fedkin fit``: fit a table, Parquet files or summaries of sites, and write a model directory."""

import shlex
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import typer

from fedkin import __version__
from fedkin._base import Say, count, listed
from fedkin._progress import progress
from fedkin._storage import place_of
from fedkin.cli.console import (
    Json,
    Place,
    argument,
    flag,
    note,
    option,
    print_facts,
    print_json,
    say,
    stopping_early,
    switch,
)
from fedkin.cli.models import model_document, print_comparison, print_decision, print_groups, write_report
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
    DESCRIBED,
    REPEATS,
    SHARED,
    Comparison,
    FitOptions,
    FittedModel,
    Queries,
    choices,
    compare,
    data_record,
    reserved_place,
    with_covariates,
    with_history,
)
from fedkin.fitting import fit as fit_model
from fedkin.fitting.options import NOT_KIN
from fedkin.kin import memory_of
from fedkin.report.text import facts, method_text, note_lines

#: Options about the columns of a table; those with several columns.
_LISTS = ("features", "drop", "categories", "spline")
_COLUMNS = ("target", "event", "offset", "exposure", "weight", "time", "missing", *_LISTS)
_NOTED = 1e9  # bytes of memory that are stated before they are taken
_ONE_SE = "Choose the largest lam within one standard error of the best."


def fit_option(name: str) -> tuple[str, Any, Any]:
    """Return an option of `FitOptions` as a field of the command: its name, its type with help, and its default."""
    (kind, text, topic), default, spelled, metavar = DESCRIBED[name], DEFAULTS[name], flag(name), None
    parts = get_args(kind)
    words = choices(name) or [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    if name == "cv_rule":
        kind, default, text = bool, False, _ONE_SE
    elif name == "within":  # the column of the districts
        kind, metavar = str | None, "COL"
    elif bool in parts:
        kind, default = Literal["yes", "no", *words], "yes"
    elif float in parts and words:
        kind, default, metavar = str, str(default), "|".join([*words, "X"])
    elif words:
        kind = Literal[*words]
    elif {get_origin(kind), *map(get_origin, parts)} & {tuple, dict}:
        kind, default, metavar = list[str] | None, None, "A,B,..." if get_origin(kind) is tuple else "KEY=VALUE,..."
    elif default is None:
        metavar = "X" if float in parts else "N"
    elif default is True:
        spelled = f"{spelled}/--no-{spelled[2:]}"
    return name, Annotated[kind, typer.Option(spelled, help=text, metavar=metavar, rich_help_panel=topic)], default


@dataclass(kw_only=True)
class FitCommand:
    """Fit a model for every site of a table, and compare it with simpler ones on held-out rows.

    Similar sites learn from each other in proportion to their similarity. All estimates come with their uncertainty.

    With a directory of summaries (fedkin site share) instead of a table, the fit reads no rows, and may write queries
    to the sites.
    """

    context: typer.Context
    data: Annotated[
        Place,
        argument(
            "DATA",
            "CSV or Parquet file, a directory with one file per site, or a directory of sites' summaries; a path or an "
            "address such as s3://bucket/rows.",
            place_of,
        ),
    ]
    site: Annotated[
        str | None, option("COL", "Column that names the site of each row; not needed for a directory.")
    ] = None
    target: Annotated[str | None, option("COL", "Column to predict.")] = None
    event: Annotated[
        str | None, option("COL", "Column with 1 for an event at the time in --target, 0 for a censored time.")
    ] = None
    features: Annotated[list[str] | None, option("A,B,...", "Columns to predict from; by default all others.")] = None
    drop: Annotated[list[str] | None, option("A,B,...", "Columns to leave out when all others are features.")] = None
    offset: Annotated[str | None, option("COL", "Column to add to the linear predictor with coefficient 1.")] = None
    exposure: Annotated[str | None, option("COL", "Exposure column for counts, such as person-years or area.")] = None
    weight: Annotated[str | None, option("COL", "Column with weights: how many rows each row stands for.")] = None
    time: Annotated[str | None, option("COL", "Column that orders rows: train on earlier, test on later ones.")] = None
    missing: Annotated[
        Literal["refuse", "drop", "mean", "indicator"],
        typer.Option(
            help="Missing cells: refuse the table, drop their rows, fill in means, or fill them in and mark them."
        ),
    ] = "refuse"
    categories: Annotated[
        list[str] | None, option("A,B,...", "Numeric columns to treat as categories, such as codes.")
    ] = None
    spline: Annotated[list[str] | None, option("A,B,...", "Columns with nonlinear effects: cubic splines.")] = None
    decimal: Annotated[DecimalMark, typer.Option(help="Decimal separator in CSV files.")] = "."
    graph: Annotated[
        Path | None,
        option("FILE", "Edges between sites, CSV or GraphML; by default, the fused estimator uses all pairs."),
    ] = None
    covariates: Annotated[
        Path | None,
        option("FILE.csv", "Covariates of the sites, one line per site, instead of a graph: size, place, region."),
    ] = None
    contract: Annotated[
        Path | None,
        option("FILE.toml", "Contract of a federation, which sets columns, loss, penalty, scale and folds."),
    ] = None
    federation: Annotated[
        Path | None, option("FILE", "The organiser's federation.json, if it is not next to the summaries.")
    ] = None
    test_size: Annotated[
        float, typer.Option(help="Share of each site's rows to hold out for the comparison; 0 for no comparison.")
    ] = 0.25
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Number of splits for the comparison.")] = REPEATS
    keep_best: Annotated[
        bool,
        switch(
            "--keep-best",
            "After Ctrl-C, keep the completed splits of the comparison, or the last iterate of the fused estimator.",
        ),
    ] = False
    on: Annotated[
        str, option("PLACE", "Where to run: local, ray or ray://host:port (passes over files, exact solver, Fed-ADMM).")
    ] = "local"
    out: Annotated[Path, option("DIR", "Directory for the model.")] = Path("fedkin-model")
    report: Annotated[Path | None, option("PAGE.html", "Also write the HTML report of the model.")] = None
    as_json: Json = False

    def __post_init__(self) -> None:
        """Run the command: typer calls the class with what was typed."""
        self._check()
        folder = folder_of_summaries(self.data)
        self._refuse_sources(folder)
        with ExitStack() as stack:
            try:
                replaced = stack.enter_context(reserved_place(self.out))
            except ModelFileError as error:
                raise ModelFileError(f"--out: {error}") from None
            self._run(folder, replaced)

    def _run(self, folder: Path | None, replaced: int | None) -> None:
        source, given, failed = folder or self.data, self._given(), None
        with running_on(self.on), progress(f"reading {source}") as tell:
            opened = self._opened(folder, given)
            if not opened.data.in_memory:
                why = "is for rows in memory: files and summaries are compared over their folds; leave it out"
                self._refuse(("repeats", "keep_best", *(("test_size",) if self.test_size else ())), why)
            if opened.options.method == "kin":
                n, p = opened.data.n_sites, len(opened.data.feature_names)
                if (size := memory_of(n, p)) > _NOTED:
                    note(f"{count(n, 'site')} with {count(p, 'column')} take about {size / 1e9:.2g} GB of memory")
                others = [name for name in DEFAULTS if name not in SHARED]
                self._refuse(others, f"{NOT_KIN} {flag('method', 'fused')}")
            opened = opened.with_edges(self.graph, self.covariates, self.site)
            if replaced is not None:
                note(f"{self.out} has a model of {count(replaced, 'site')}: it will be replaced (--out DIR keeps both)")
            found = fit_opened(opened, tell, self.test_size, self.repeats, self.keep_best)
            if isinstance(found, Queries):
                assert opened.ask is not None
                questions = opened.ask(found)
            else:
                rows = int(found.n_samples.sum())
                record = {"data": data_record(source, rows), "command": command_line(self.context)}
                reading = {} if folder is not None else {"site_column": self.site, "decimal": self.decimal}
                history = {**(found.history or {}), **record}
                found = replace(found, history=history, options={**found.options, **reading})
                tell(f"writing {self.out}")
                try:
                    found.save(self.out)
                    if self.report is not None:
                        write_report(found, self.report)
                except (OSError, ModelFileError) as error:  # the results so far are printed all the same
                    failed = error
        if isinstance(found, Queries):
            print_queries(found, questions, self.as_json)
        elif self.as_json:
            place = {"model": str(self.out), "data": str(source), "graph": self.graph, "covariates": self.covariates}
            print_json({**model_document(found), **place})
        else:
            saved = None if isinstance(failed, ModelFileError) else self.out
            end = {} if self.report is None or failed else {"report": f"{self.report} (opens in any browser)"}
            print_result(found, opened, source, saved, end)
        if failed is not None:
            raise failed

    def _check(self) -> None:
        if extra := self.context.args:
            raise ParameterError(
                f"unexpected {listed(extra)}: lists have commas and no spaces, such as --features A,B; DATA is one "
                "file or directory, or a pattern in quotes"
            )
        if self.report is not None:
            given = (self.data, self.graph, self.covariates, self.contract, self.federation)
            check_new_file(self.report, "report.html", *given)
            if self.report.absolute().parent.resolve() == self.out.resolve():
                inside = f"--report {self.report} lies in the model directory {self.out}"
                raise ParameterError(f"{inside}: choose a path outside of it")
        if not 0 <= self.test_size < 1:
            raise ParameterError(f"--test-size must be at least 0 and less than 1, got {self.test_size:g}")
        if self.graph is not None and self.covariates is not None:
            raise ParameterError("give --graph or --covariates, not both: covariates become a graph")

    def _refuse_sources(self, folder: Path | None) -> None:
        """Refuse options about a table that summaries or a contract determine."""
        if folder is not None:
            why = "is for tables; summaries have a contract: leave it out"
            self._refuse(("contract", "within", "site", "decimal", *_COLUMNS), why)
        elif self.federation is not None:
            raise ParameterError(f"--federation is for a directory of summaries, and {self.data} has none")
        elif self.contract is not None:
            self._refuse(("within", *_COLUMNS), "is set by the contract: leave it out with --contract")

    def _opened(self, folder: Path | None, given: dict[str, Any]) -> Opened:
        within: str | None = self.context.params["within"]
        if within is not None:
            given["within"] = read_districts(self.data, self.site, within, self.decimal)
        if folder is not None:
            return open_summaries(folder, given, self.federation)
        if self.contract is not None:
            return open_by_contract(self.data, given, Contract.read(self.contract), self.site, self.decimal)
        columns: dict[str, Any] = {name: getattr(self, name) for name in ("site", "decimal", *_COLUMNS)}
        columns |= {name: _names(columns[name]) for name in _LISTS}
        columns["features"] = columns["features"] or None
        if within is not None and not columns["features"]:
            columns["drop"].append(within)
        return replace(open_table(self.data, given, columns), within=within)

    def _given(self) -> dict[str, Any]:
        """Return the typed options as arguments of `FitOptions`; the districts are read with the table."""
        given = {name: self.context.params[name] for name in DEFAULTS if name != "within" and self._typed(name)}
        if "cv_rule" in given:
            given["cv_rule"] = "1se" if given["cv_rule"] else DEFAULTS["cv_rule"]
        if "fuse_intercept" in given:
            given["fuse_intercept"] = {"yes": True, "no": False}.get(given["fuse_intercept"], "auto")
        if "fixed" in given:
            given["fixed"] = tuple(_names(given["fixed"]))
        if "fedadmm" in given:
            given["fedadmm"] = _assignments(given["fedadmm"])
        for name in {"lam", "ridge", "sparsity"} & given.keys():
            with suppress(ValueError):  # cv; FitOptions reports other errors
                given[name] = float(given[name])
        return given

    def _typed(self, name: str) -> bool:
        source = self.context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    def _refuse(self, names: Sequence[str], why: str) -> None:
        """Raise `ParameterError` for the first of these options that was typed."""
        for name in names:
            if self._typed(name):
                raise ParameterError(f"{flag(name)} {why}")


#: The command, with the options of `FitOptions`.
fit = make_dataclass(
    "fit", map(fit_option, DEFAULTS), bases=(FitCommand,), kw_only=True, namespace={"__doc__": FitCommand.__doc__}
)


def _names(given: list[str] | None) -> list[str]:
    """Return columns, given with commas or as repeated options."""
    return [name.strip() for part in given or () for name in part.split(",") if name.strip()]


def _assignments(given: list[str] | None) -> dict[str, Any] | None:
    """Return the keys and values of ``--fedadmm``; parse numbers, yes and no."""
    found: dict[str, Any] = {}
    for part in _names(given):
        key, is_pair, value = (one.strip() for one in part.partition("="))
        if not is_pair:
            raise ParameterError(f"{flag('fedadmm')} takes KEY=VALUE pairs separated by commas, got {part!r}")
        found[key] = {"yes": True, "no": False}.get(value, value)
        with suppress(ValueError):
            found[key] = float(value)
    return found or None


def command_line(context: typer.Context) -> str:
    """Return the command for a shell, with file names but not their folders."""
    typed = context.find_root().obj or ()
    return shlex.join(["fedkin", *(Path(word).name if Path(word).is_absolute() else word for word in typed)])


def fit_opened(
    opened: Opened, tell: Say, test_size: float = 0.25, repeats: int = REPEATS, keep_best: bool = False
) -> FittedModel | Queries:
    """Fit the data, then compare on held-out rows; return the model, or queries to the sites.

    With ``keep_best``, Ctrl-C ends the fused estimator or the comparison with its last result.
    """
    data, graph, how, schema = opened.data, opened.graph, opened.options, opened.schema
    if test_size > 0 and (data.n_samples <= 1).all():
        raise DataError(
            "every site has only one row, so none can be held out: is --site the right column? If so, "
            "--test-size 0 fits without a comparison"
        )
    comparison: Comparison | None = None
    with warnings.catch_warnings(), stopping_early(keep_best):
        # the status and the notes of the model report both
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", DegenerateSiteWarning)
        model = fit_model(data, graph, how, tell, schema, queries=opened.queries)
        if isinstance(model, Queries):
            return model
        _check_converged(model, how, keep_best)
        if model.status == "converged":
            if model.kin is None:
                tell("following the path of lam")
            model = with_history(model, data, graph, how, schema)
        if test_size > 0:
            try:
                comparison = compare(
                    data,
                    graph,
                    how,
                    model=model,
                    schema=schema,
                    progress=lambda text: tell(f"comparison: {text}"),
                    repeats=repeats,
                    test_size=test_size,
                    keep_best=keep_best,
                )
            except KeyboardInterrupt:  # Ctrl-C is one with keep_best only
                note("interrupted before the first split was complete: there is no comparison")
            except FedkinError as error:
                note(f"no comparison: {error}")
    fits = [] if comparison is None else [part["Fedkin"] for part in comparison.models if part]
    if model.status == "converged" and any(one.status != "converged" for one in fits):
        note("in the comparison, the fit of Fedkin did not converge in every split; on all rows it did")
    plain = None if comparison is None else comparison.plain()
    known = dict(opened.known)
    if opened.alone:
        known["origin"] = {**(model.origin or {}), "alone": "; ".join(f"{a}: {why}" for a, why in opened.alone.items())}
    model = with_covariates(model, opened.covariates)
    options = model.options if opened.within is None else {**model.options, "within_column": opened.within}
    return replace(model, comparison=plain, options=options, **known)


def _check_converged(model: FittedModel, how: FitOptions, keep_best: bool) -> None:
    fused = model.fused
    if fused is None or fused.status == "converged":
        return
    if fused.status == "interrupted" and keep_best:
        note(f"interrupted: the model is the last iterate, with a relative gap of {fused.gap:.1e}")
        return
    by_rounds = how.solver == "fedadmm"
    if by_rounds and (how.fedadmm or {}).get("stop") == "rounds":
        note(
            f"all {count(fused.n_iter, 'round')} were run, as stop=rounds requests; the relative gap is {fused.gap:.1e}"
        )
        return
    more = f"{flag('rounds')} or take {flag('fedadmm', 'gradient=saga')}" if by_rounds else flag("max_iter")
    raise SolverError(
        f"the fit did not converge, so no model was saved: after {count(fused.n_iter, 'iteration')} the relative gap "
        f"is {fused.gap:.1e}, not {how.tol:.1e}. Raise {more}, accept a larger {flag('tol')}, or add "
        f"{flag('ridge', 0.001)}"
    )


# --- output -----------------------------------------------------------------------------------------------------------


def print_result(
    model: FittedModel, opened: Opened, data: Path, out: Path | None, more: Mapping[str, str] | None = None
) -> None:
    """Print the verdict, the comparison, the groups, the diagnostics, and the description of the fit."""
    rows = int(model.n_samples.sum())
    sizes = {"site": model.n_sites, "row": rows, "feature": model.n_features}
    about = "" if model.target_name is None else f", target {model.target_name}"
    held = ""
    if model.comparison is not None:
        print_decision(model)
        print_comparison(model.comparison)
        held = " (the comparison held some out)"
    print_groups(model)
    say("")
    print_facts(
        {
            **facts(model, brief=True),
            "data": f"{data}: {', '.join(count(n, word) for word, n in sizes.items())}",
            **opened.facts,
            "model": f"{model.loss.name} loss{about}, {method_text(model)}",
            **({} if out is None else {"saved": f"{out}, fitted on all {count(rows, 'row')}{held}"}),
            **(more or {}),
        }
    )
    for text in note_lines(model.notes):
        note(text)


def print_queries(queries: Queries, paths: Sequence[Path], as_json: bool) -> None:
    """Print instructions for the queries to the sites."""
    if as_json:
        asked = {"round": queries.round, "gap": queries.gap, "asks": [str(path) for path in paths]}
        print_json({"fedkin_version": __version__, "model": None, **asked})
        return
    folder = paths[0].parent
    lines = [
        f"No model yet: one more message from every site is needed (number {queries.round}).",
        f"1. Send each site its query in {folder}:",
        *(f"     {path.name}" for path in paths),
        "2. At each site: fedkin site answer DIR FILE, and send back the file that it writes",
        f"3. Put the answers into {folder.parent / 'summaries'}, and run this command again",
    ]
    if np.isfinite(queries.gap):
        lines.insert(0, f"After {count(queries.round - 1, 'message')} from every site the gap is {queries.gap:.1e}.")
    say(*lines)
