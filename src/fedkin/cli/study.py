"""``fedkin study NAME``: run a study of the paper, or a custom one, and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedkin.studies import launch


def study(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="estimation, sensitivity, convergence, availability, selection, error-rates, rate, kin, "
            "coverage, election, all, or the path of a study's TOML file; omit it with --config.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where rows, figures, tables and pages go.")] = Path(
        "studies"
    ),
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer settings and replications: minutes, not hours. Writes to NAME-quick."),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="A custom study instead of NAME.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", help="Processes; by default one per core.")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The election data, for the study that reads them.")
    ] = None,
    redraw: Annotated[
        bool,
        typer.Option("--redraw", help="Compute nothing: draw again from the rows.parquet of an earlier run."),
    ] = False,
) -> None:
    """Run a study: figure, table, page and the rows behind them.

    Finished cells are kept in DIR: a stopped run resumes where it was, and a finished one is only drawn again.
    """
    launch(name, out=out, quick=quick, config=config, jobs=jobs, data=data, redraw=redraw)
