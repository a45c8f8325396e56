"""One example for each command, which its help ends with."""

from __future__ import annotations

import typer

#: {command: what one would type}.
EXAMPLES = {
    "fit": "fedkin fit patients.csv --site hospital --target outcome --report page.html",
    "predict": "fedkin predict fedkin-model new-patients.csv --out predicted.csv",
    "inspect": "fedkin inspect fedkin-model",
    "report": "fedkin report fedkin-model --out page.html",
    "watch": "fedkin watch trial",
    "demo": "fedkin demo --out demo-report",
    "study": "fedkin study estimation --quick",
    "federation draft": "fedkin federation draft example.csv --target pressure --out heart.toml",
    "federation check": "fedkin federation check heart.toml --data example.csv",
    "federation new": "fedkin federation new heart.toml --sites sites.csv --graph edges.csv",
    "federation invite": "fedkin federation invite heart north",
    "federation admit": "fedkin federation admit heart north.request",
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
    "site status": "fedkin site status north",
    "site stop": "fedkin site stop north",
}


def show_examples(app: typer.Typer, prefix: str = "") -> None:
    """End the help of every command of ``app`` with its example."""
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        if prefix + name in EXAMPLES:
            command.epilog = f"Example: [bold]{EXAMPLES[prefix + name]}[/bold]"
