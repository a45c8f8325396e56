"""The table of commands, and what they declare. The module of a command is imported when the command is called."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

from fedkin import __version__


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


class Command(NamedTuple):
    """The module that defines a command (under its own name), and what the command does."""

    module: str
    help: str


COMMANDS = {
    "fit": Command("fit", "Fit a model for every site of a table, and compare it with simpler ones on held-out rows."),
    "predict": Command("models", "Predict rows with a fitted model, each with the model of its site."),
    "inspect": Command(
        "models", "Show what a fitted model found: groups, graph, coefficients, and notes on single sites."
    ),
    "report": Command("models", "Write the report of a model: one HTML page that opens without a network."),
    "watch": Command("watch", "Follow a federation in the browser."),
    "demo": Command(
        "demo", "Generate sites with a graph that is partly wrong, and see how close each method comes to the truth."
    ),
    "study": Command("demo", "Run a study: figure, table, page and the rows behind them."),
    "federation": Command(
        "federation", "Organise a federation: agree on a contract and admit sites, without seeing a row."
    ),
    "site": Command("site", "Take part in a federation: check rows, join, share, run. Rows stay where they are."),
}

#: Examples for the help of commands.
EXAMPLES = {
    "fit": "fedkin fit patients.csv --site hospital --target outcome --report page.html",
    "predict": "fedkin predict fedkin-model new-patients.csv --out predicted.csv",
    "inspect": "fedkin inspect fedkin-model",
    "report": "fedkin report fedkin-model --out page.html",
    "watch": "fedkin watch trial",
    "demo": "fedkin demo --out demo-report",
    "study": "fedkin study kin --quick",
    "federation draft": "fedkin federation draft example.csv --target pressure --out heart.toml",
    "federation check": "fedkin federation check heart.toml --data example.csv",
    "federation new": "fedkin federation new heart.toml --sites sites.csv --graph edges.csv",
    "federation invite": "fedkin federation invite heart north",
    "federation admit": "fedkin federation admit heart north.request",
    "federation renew": "fedkin federation renew heart",
    "federation order": "fedkin federation order heart --lam 0.02",
    "federation expel": "fedkin federation expel heart north",
    "federation deliver": "fedkin federation deliver heart model",
    "federation gather": "fedkin federation gather heart north.model south.model --out model",
    "federation status": "fedkin federation status heart",
    "federation run": "fedkin federation run heart",
    "federation simulate": "fedkin federation simulate heart.toml --data all.csv --site hospital --out trial",
    "site join": "fedkin site join north.invite --data patients.csv",
    "site check": "fedkin site check north --data patients.csv",
    "site accept": "fedkin site accept north north.admit",
    "site renew": "fedkin site renew north",
    "site leave": "fedkin site leave north",
    "site share": "fedkin site share north",
    "site answer": "fedkin site answer north north.ask",
    "site settings": "fedkin site settings north --rows 50",
    "site run": "fedkin site run north",
    "site select": "fedkin site select north",
    "site publish": "fedkin site publish north",
    "site ledger": "fedkin site ledger north",
    "site status": "fedkin site status north",
    "site stop": "fedkin site stop north",
}


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the program with the command that the arguments call; all others are there by name and help only."""
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
    for name, command in COMMANDS.items():
        if name not in arguments[:1]:
            app.command(name, help=command.help)(_not_loaded)
            continue
        found = getattr(import_module(f"fedkin.cli.{command.module}"), name)
        if isinstance(found, typer.Typer):
            for one in found.registered_commands:
                one.epilog = _epilog(f"{name} {one.name or getattr(one.callback, '__name__', '')}")
            app.add_typer(found, name=name, help=command.help)
        else:
            # fit says itself what is wrong with arguments too many
            settings = {"allow_extra_args": True} if name == "fit" else None
            app.command(name, context_settings=settings, epilog=_epilog(name))(found)
    return app


def _epilog(name: str) -> str:
    return f"Example: [bold]{EXAMPLES[name]}[/bold]"


def _not_loaded() -> None: ...


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedkin {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...
