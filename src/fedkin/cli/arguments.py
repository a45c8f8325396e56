"""Short names for what commands declare: arguments, options with a value, switches."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def option(metavar: str, text: str) -> Any:
    """Return an option that takes a value."""
    return typer.Option(metavar=metavar, help=text)


def argument(metavar: str, text: str) -> Any:
    """Return an argument."""
    return typer.Argument(metavar=metavar, help=text)


def switch(names: str, text: str) -> Any:
    """Return an option without a value, such as ``--yes`` or ``--echo/--no-echo``."""
    return typer.Option(names, help=text)


Json = Annotated[bool, switch("--json", "Print JSON for machines instead of tables.")]
