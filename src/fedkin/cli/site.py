"""The commands ``fedkin site ...``: what a site does that takes part in a federation."""

from __future__ import annotations

import typer

site = typer.Typer(
    no_args_is_help=True,
    help="Take part in a federation: check rows, join, share, run. Rows stay where they are.",
)


@site.callback()
def _root() -> None: ...
