"""Define ``fedkin study``: the figures of the paper, and studies of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fedkin.cli.console import argument, option, switch
from fedkin.studies import launch


def study(
    name: Annotated[
        str | None,
        argument(
            "NAME",
            "estimation, sensitivity, convergence, availability, selection, error-rates, rate, sparse, kin, "
            "coverage, population, election, paper (all figures of the paper, on one page), all, or the path of a "
            "study's TOML file; omit it with --config.",
        ),
    ] = None,
    out: Annotated[Path, option("DIR", "Directory for rows, figures, tables and pages.")] = Path("studies"),
    quick: Annotated[
        bool, switch("--quick", "Fewer settings and replications: minutes, not hours. Writes to NAME-quick.")
    ] = False,
    config: Annotated[Path | None, option("FILE.toml", "A custom study instead of NAME.")] = None,
    jobs: Annotated[int | None, option("N", "Number of processes; by default one per core.")] = None,
    data: Annotated[Path | None, option("DIR", "Directory of the election data, for the study election.")] = None,
    redraw: Annotated[
        bool, switch("--redraw", "Compute nothing: redraw from the rows.parquet of an earlier run.")
    ] = False,
    replications: Annotated[int | None, option("N", "Maximum number of replications of every setting.")] = None,
) -> None:
    """Run a study: figure, table, page and the underlying rows.

    Finished cells are kept in DIR: a stopped run resumes, and a finished run is only redrawn.
    """
    launch(name, out=out, quick=quick, config=config, jobs=jobs, data=data, redraw=redraw, replications=replications)
