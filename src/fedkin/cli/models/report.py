"""``fedkin report``: a model directory as one page to look at."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedkin._base import write_file
from fedkin.cli.shared.console import messages, print_json
from fedkin.cli.shared.options import Json, Model
from fedkin.cli.shared.reading import check_new_file
from fedkin.fitting import FittedModel, data_record, load

Coordinates = Annotated[
    Path | None,
    typer.Option(metavar="FILE.csv", help="Where the sites are, for a map: columns site and x, y (or lon, lat)."),
]


def report(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="PAGE.html", help="The page to write.")] = Path("report.html"),
    coordinates: Coordinates = None,
    as_json: Json = False,
) -> None:
    """Write the report of a model: one HTML page that opens without a network.

    It shows who is kin and how sure that is, what each site gained, coefficients with intervals, and how to make it
    again. For example: fedkin report fedkin-model --out report.html
    """
    check_new_file(out, "report.html", model, coordinates)
    size = write_report(load(model), out, coordinates)
    if as_json:
        print_json({"model": str(model), "report": str(out), "bytes": size})
    else:
        messages().print(f"{out}: {size / 1024:.0f} KB, opens in any browser", soft_wrap=True)


def write_report(model: FittedModel, out: Path, coordinates: Path | None = None) -> int:
    """Write the page of a model, and return its size in bytes."""
    from fedkin.report import read_coordinates, report_page  # not for fits without a page

    places = None if coordinates is None else read_coordinates(coordinates, model.sites)
    page = report_page(model, places).encode()
    write_file(out, page)
    return len(page)


def with_origin(model: FittedModel, data: Path, context: typer.Context) -> FittedModel:
    """The model with what its report says about where it comes from: the data's digest and the command."""
    record: dict[str, Any] = {"data": data_record(data, int(model.n_samples.sum())), "command": command_line(context)}
    return replace(model, history={**(model.history or {}), **record})


def command_line(context: typer.Context) -> str:
    """What was typed, as a shell would take it."""
    return shlex.join(["fedkin", *(context.find_root().obj or ())])
