"""The commands and their options. What they do is in the module of the same name, imported when the command runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedkin import __version__
from fedkin.cli.mpi import mpi
from fedkin.cli.peer import peer
from fedkin.studies import study

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Every site keeps its rows and finds its kin: a model per site, and the groups of sites that are alike.",
    epilog="New here? [bold]fedkin demo[/bold] takes half a minute.",
)


class LossName(StrEnum):
    """Losses by name; `auto` looks at the target."""

    auto = "auto"
    linear = "linear"
    logistic = "logistic"
    multinomial = "multinomial"
    poisson = "poisson"
    huber = "huber"
    mean = "mean"


class PenaltyName(StrEnum):
    """Penalties by name."""

    l1 = "l1"
    l2 = "l2"
    linf = "linf"


class SelectName(StrEnum):
    """Corrections of the edge selection, or none of it."""

    bonferroni = "bonferroni"
    holm = "holm"
    bh = "bh"
    by = "by"
    none = "none"


class VarianceName(StrEnum):
    """Variances of the edge selection."""

    model = "model"
    sandwich = "sandwich"
    bartlett = "bartlett"


Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model directory that fedkin fit wrote.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedkin {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def fit(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="CSV or Parquet file, or a directory with one file per device.")
    ],
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
    loss: Annotated[
        LossName, typer.Option(help="auto: linear for numbers, logistic or multinomial for labels.")
    ] = LossName.auto,
    penalty: Annotated[PenaltyName, typer.Option(help="How differences along edges are measured.")] = PenaltyName.l1,
    select: Annotated[
        SelectName, typer.Option(help="Test every edge first and drop those between devices that differ.")
    ] = SelectName.bonferroni,
    level: Annotated[float, typer.Option(help="Level of the edge tests.")] = 0.05,
    variance: Annotated[VarianceName, typer.Option(help="Variance that the edge tests use.")] = VarianceName.model,
    lam: Annotated[str, typer.Option(metavar="cv|X", help="Penalty level: a number, or cv to choose it.")] = "cv",
    one_se: Annotated[
        bool, typer.Option("--one-se", help="With cv: the largest lam within one standard error of the best.")
    ] = False,
    refit: Annotated[bool, typer.Option("--refit", help="Fit each group once more without the penalty.")] = False,
    standardize: Annotated[
        bool, typer.Option("--standardize/--no-standardize", help="Put features on one scale first.")
    ] = True,
    ridge: Annotated[float, typer.Option(help="Small quadratic penalty, for separable classes and the like.")] = 0.0,
    test_size: Annotated[
        float, typer.Option(help="Share of each device's rows held out for the comparison; 0 leaves it out.")
    ] = 0.25,
    seed: Annotated[int, typer.Option(help="Of the split and the folds.")] = 0,
    jobs: Annotated[int, typer.Option(help="Folds to run at the same time.")] = 1,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the model goes.")] = Path("fedkin-model"),
    as_json: Json = False,
) -> None:
    """Fit a model for every device of a table, and compare it with Local and Global on held-out rows."""
    from fedkin.cli.fit import FitCommand, run

    run(
        FitCommand(
            data=data,
            device=device,
            target=target,
            features=None if features is None else tuple(name.strip() for name in features.split(",") if name.strip()),
            offset=offset,
            graph=graph,
            loss=loss.value,
            penalty=penalty.value,
            select=select.value,
            level=level,
            variance=variance.value,
            lam=lam,
            one_se=one_se,
            refit=refit,
            standardize=standardize,
            ridge=ridge,
            test_size=test_size,
            seed=seed,
            jobs=jobs,
            out=out,
            as_json=as_json,
        )
    )


@app.command()
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
        Path | None, typer.Option(metavar="FILE.csv", help="Where the predictions go; by default standard output.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict rows of known devices with a fitted model."""
    from fedkin.cli.predict import run

    run(model, data, device, offset, out, as_json)


@app.command()
def inspect(
    model: Model,
    as_json: Json = False,
) -> None:
    """Show what a fitted model found: groups, graph, coefficients, and notes on single devices."""
    from fedkin.cli.inspect import run

    run(model, as_json)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the report and the data of the demonstration go.")
    ] = Path("demo-report"),
    devices: Annotated[int, typer.Option(help="Number of sites.")] = 60,
    varrho: Annotated[float, typer.Option(help="Share of the graph that is wrong.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    as_json: Json = False,
) -> None:
    """Generate sites with a graph that is partly wrong, and see how close each method comes to the truth."""
    from fedkin.cli.demo import run

    run(out, devices, varrho, seed, as_json)


app.command()(study)
app.add_typer(peer, name="peer")
app.add_typer(mpi, name="mpi")
