"""``fedkin fit``: from a table to a model in a directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedkin._base import count, listed
from fedkin.cli.models.edge_files import EdgeFiles
from fedkin.cli.models.fit_shared import Asked, fit_shared, folder_of_summaries
from fedkin.cli.models.fit_table import Comparing, checked, fit_table
from fedkin.cli.models.report import command_line, with_origin, write_report
from fedkin.cli.models.results import (
    method_words,
    print_comparison,
    print_document,
    print_model,
)
from fedkin.cli.models.streamed import fit_streamed, streams
from fedkin.cli.shared.console import note, working
from fedkin.cli.shared.options import Json, flag, takes_fit_options, with_contract
from fedkin.cli.shared.reading import agreed_federation, check_new_file, read_table
from fedkin.cli.shared.tables import print_facts
from fedkin.data import Schema
from fedkin.errors import DataError, ModelFileError, ParameterError
from fedkin.fitting import REPEATS, FitOptions, FittedModel, check_model_place, with_covariates, with_history
from fedkin.losses import loss_kind


@takes_fit_options
def fit(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="CSV or Parquet file, a directory with one file per site, or a directory of sites' summaries.",
        ),
    ],
    options: dict[str, Any],
    site: Annotated[
        str | None,
        typer.Option(metavar="COL", help="Column that names the site of a row; a directory needs none."),
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="COL", help="Column to predict.")] = None,
    features: Annotated[
        list[str] | None, typer.Option(metavar="A,B,...", help="Columns to predict from; by default all others.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="A,B,...", help="Columns to leave out, where all others predict.")
    ] = None,
    offset: Annotated[
        str | None, typer.Option(metavar="COL", help="Column that is added to the linear predictor as it is.")
    ] = None,
    weight: Annotated[
        str | None, typer.Option(metavar="COL", help="Column with weights: how many rows each row stands for.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="COL", help="Column that orders rows: train on earlier, test on later ones.")
    ] = None,
    missing: Annotated[
        Literal["refuse", "drop", "mean", "indicator"],
        typer.Option(help="Missing cells: refuse the table, drop their rows, fill in means, or also say where."),
    ] = "refuse",
    categories: Annotated[
        list[str] | None, typer.Option(metavar="A,B,...", help="Columns whose numbers are names: codes, types.")
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Leave rows in their Parquet files and keep sums only; by default if memory is short.",
        ),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Edges between sites, CSV or GraphML; for the fused estimator by default all pairs."
        ),
    ] = None,
    covariates: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="What is known about the sites, a line for each, instead of a graph: size, place, region.",
        ),
    ] = None,
    contract: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Contract of a federation, which says columns, loss, penalty, scale and folds.",
        ),
    ] = None,
    federation: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The organiser's federation.json, where it is not beside the summaries."),
    ] = None,
    test_size: Annotated[
        float, typer.Option(help="Share of each site's rows to hold out for the comparison; 0 for no comparison.")
    ] = 0.25,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Splits to compare on.")] = REPEATS,
    keep_best: Annotated[
        bool,
        typer.Option(
            "--keep-best",
            help="After Ctrl-C go on with the splits that are done, or in the last fit with the last split's model.",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the model.")] = Path("fedkin-model"),
    report: Annotated[
        Path | None, typer.Option(metavar="PAGE.html", help="Also write the report of the model, a page to look at.")
    ] = None,
    as_json: Json = False,
    *,
    context: typer.Context,
) -> None:
    """Fit a model for every site of a table, and compare it with simpler ones on held-out rows.

    By default sites that are alike are found, each site's model leans on the others as far as the data say so, and all
    comes with its uncertainty (kin). Options of the fused estimator ask for the paper's.

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
    if not 0 <= test_size < 1:
        raise ParameterError(f"--test-size must be at least 0 and less than 1, got {test_size:g}")
    said: dict[str, object] = {"target": target, "features": features or None, "drop": drop or None, "offset": offset}
    said |= {"weight": weight, "time": time, "categories": categories or None}
    said |= {"missing": None if missing == "refuse" else missing}
    files = EdgeFiles(graph, covariates, site)
    folder = folder_of_summaries(data)
    if folder is not None:
        named = {"site": site, "contract": contract, **said}
        for name, value in named.items():
            if value is not None:
                raise ParameterError(f"{flag(name)} is for tables; summaries have their contract: leave it out")
        about = "summaries, whose sites have said the folds to compare on: leave it out"
        _refuse_written(context, ("test_size", "repeats", "keep_best", "stream"), f"is not for {about}")
        _check_out(out)
        shared = fit_shared(Asked(folder, files, federation, options, command_line(context)), out, as_json)
        if shared is not None and report is not None:
            write_report(shared, report)
        if shared is not None and not as_json:
            _print_end(out, shared, False, report)
        return
    if federation is not None:
        raise ParameterError(f"--federation is for a directory of summaries, and {data} has none")
    agreed = None if contract is None else _read_contract(contract, said)
    how = FitOptions(**options) if agreed is None else with_contract(options, agreed.options)
    if agreed is None:
        _check_target(target, how)
    else:
        target, offset = agreed.target, agreed.schema.offset
    _check_out(out)
    about_table = {
        "site": site,
        "target": target,
        "features": _names(features) if features else None,
        "drop": _names(drop),
        "offset": offset,
        "weight": weight,
        "time": time,
        "missing": missing,
        "categories": _names(categories),
    }
    if agreed is None and streams(data, stream, how, target):
        ignored = ("drop", "repeats", "keep_best", *(() if test_size == 0 else ("test_size",)))
        _refuse_written(
            context, ignored, "needs all rows in memory, and these stay in files: omit it, or add --no-stream"
        )
        with working(f"reading {data}") as say:
            model, folds = fit_streamed(data, about_table, files, how, test_size > 0, say)
            model = replace(model, options={**model.options, "site_column": site})
            model = with_origin(model, data, context)
            model.save(out)
            if report is not None:
                write_report(model, report)
        if as_json:
            print_document(data, files, out, model, folds)
            return
        if folds is not None:
            print_comparison(folds, model.fused is not None)
        _print_end(out, model, False, report)
        return
    with working(f"reading {data}") as say:
        if agreed is None:
            rows = read_table(data, **about_table)
            how = checked(rows, how)
        else:
            rows = agreed_federation(data, site, agreed.schema)
        edges, known = files.read(rows.sites)
        schema = None if agreed is None else agreed.schema
        comparing = Comparing(test_size, repeats, keep_best)
        comparison, model = fit_table(rows, edges, how, comparing, say, schema)
        model = replace(model, offset_name=offset, options={**model.options, "site_column": site})
        if model.fused is not None:
            say("following the path of lam")
        model = with_covariates(with_history(model, rows, edges, how, schema), known)
        model = with_origin(model, data, context)
        say(f"writing {out}")
        model.save(out)
        if report is not None:
            write_report(model, report)
    if as_json:
        print_document(data, files, out, model, comparison)
        return
    sizes = {"site": model.n_sites, "row": len(rows.X), "feature": model.n_features}
    about = "" if target is None else f", target {target}"
    print_facts(
        {
            "data": f"{data}: {', '.join(count(n, word) for word, n in sizes.items())}",
            "model": f"{model.loss.name} loss{about}, {method_words(model)}",
            **files.words(model),
        }
    )
    if comparison is not None:
        print_comparison(comparison)
    _print_end(out, model, comparison is not None, report, len(rows.X))


def _print_end(out: Path, model: FittedModel, compared: bool, report: Path | None, n_rows: int | None = None) -> None:
    print_model(out, model, compared, n_rows)
    if report is not None:
        print_facts({"report": f"{report}, opens in any browser"})


def _refuse_written(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise `ParameterError` for the first of these options that was given."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ParameterError(f"{flag(name)} {why}")


def _names(given: list[str] | None) -> list[str]:
    """Columns, with commas between them or one option for each."""
    return [name.strip() for part in given or () for name in part.split(",") if name.strip()]


def _check_out(out: Path) -> None:
    """Refuse a place that has something else than a model, and say that a model will be replaced."""
    try:
        replaced = check_model_place(out)
    except ModelFileError as error:
        raise ModelFileError(f"--out: {error}") from None
    if replaced is not None:
        note(f"{out} has a model of {count(replaced, 'site')}: it will be replaced (--out DIR keeps both)")


@dataclass(frozen=True)
class _Agreed:
    """What a contract says about a fit."""

    schema: Schema
    options: dict[str, Any]

    @property
    def target(self) -> str | None:
        return None if self.schema.target is None else self.schema.target.name


def _read_contract(path: Path, about: Mapping[str, object]) -> _Agreed:
    from fedkin.cli.shared.contracts import fit_options
    from fedkin.federate import Contract

    for name, given in about.items():
        if given is not None:
            raise ParameterError(f"{flag(name)} is for the contract to say: leave it out with --contract")
    contract = Contract.read(path)
    return _Agreed(contract.schema, fit_options(contract))


def _check_target(target: str | None, how: FitOptions) -> None:
    needed = how.loss == "auto" or loss_kind(how.loss).target is not None
    if target is None and needed:
        raise DataError(
            "say which column to predict: --target COL (or --loss mean, which estimates the means of the features)"
        )
    if target is not None and not needed:
        raise DataError(f"the {how.loss} loss has no target: leave out --target {target}, or name it in --features")
