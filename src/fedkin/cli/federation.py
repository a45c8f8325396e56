"""The commands ``fedkin federation ...``: what the organiser of a federation does."""

from __future__ import annotations

import typer

federation = typer.Typer(
    no_args_is_help=True,
    help="Organise a federation: agree on a contract and admit sites, without seeing a row.",
)


@federation.callback()
def _root() -> None: ...
