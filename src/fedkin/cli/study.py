"""``fedkin study NAME``: run a study of the paper, or a custom one, and show it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fedkin.cli.arguments import argument, option, switch
from fedkin.studies import launch


def study(
    name: Annotated[
        str | None,
        argument(
            "NAME",
            "estimation, sensitivity, convergence, availability, selection, error-rates, rate, kin, "
            "coverage, election, all, or the path of a study's TOML file; omit it with --config.",
        ),
    ] = None,
    out: Annotated[Path, option("DIR", "Where rows, figures, tables and pages go.")] = Path("studies"),
    quick: Annotated[
        bool, switch("--quick", "Fewer settings and replications: minutes, not hours. Writes to NAME-quick.")
    ] = False,
    config: Annotated[Path | None, option("FILE.toml", "A custom study instead of NAME.")] = None,
    jobs: Annotated[int | None, option("N", "Processes; by default one per core.")] = None,
    data: Annotated[Path | None, option("DIR", "The election data, for the study that reads them.")] = None,
    redraw: Annotated[
        bool, switch("--redraw", "Compute nothing: draw again from the rows.parquet of an earlier run.")
    ] = False,
) -> None:
    """Run a study: figure, table, page and the rows behind them.

    Finished cells are kept in DIR: a stopped run resumes where it was, and a finished one is only drawn again.
    """
    launch(name, out=out, quick=quick, config=config, jobs=jobs, data=data, redraw=redraw)
