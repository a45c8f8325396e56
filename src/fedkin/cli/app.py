"""The table of commands. Each is imported only when it is called, so that the program starts at once."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from fedkin import __version__
from fedkin.cli.examples import show_examples

#: Where each command is defined, under its own name.
_HOMES = {
    "fit": "fedkin.cli.models.fit",
    "predict": "fedkin.cli.models.saved",
    "inspect": "fedkin.cli.models.saved",
    "report": "fedkin.cli.models.report",
    "watch": "fedkin.cli.sites.watch",
    "demo": "fedkin.cli.models.demo",
    "study": "fedkin.cli.study",
    "federation": "fedkin.cli.sites.federation",
    "site": "fedkin.cli.sites.site",
}


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """The program with the command that the arguments call; with all commands, where they call none."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Every site keeps its rows and finds its kin: a model per site, and the groups of sites that are alike.",
        epilog="New here? [bold]fedkin demo[/bold] takes a few seconds.",
    )
    app.callback()(_root)
    called = arguments[0] if arguments else ""
    if called == "--version":
        return app
    for name in [called] if called in _HOMES else _HOMES:
        command = getattr(import_module(_HOMES[name]), name)
        if isinstance(command, typer.Typer):
            show_examples(command, f"{name} ")
            app.add_typer(command, name=name)
        else:
            # fit says itself what is wrong with arguments too many
            settings = {"allow_extra_args": True} if name == "fit" else None
            app.command(name, context_settings=settings)(command)
    show_examples(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedkin {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...
