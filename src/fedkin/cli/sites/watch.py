"""``fedkin watch``: a federation live in the browser."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from fedkin.cli.shared.console import ended_like_ctrl_c, output
from fedkin.errors import DataError
from fedkin.report import LiveServer


def watch(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A site's directory, one with several in it (as federation simulate makes).",
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any that is free.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Follow a federation in the browser: rounds, who waits for whom, who is absent, bytes, residuals, certificate.

    It reads what sites write into their directories, once a second, and changes nothing. Only this machine can
    open the page, with the token in its address. For example: fedkin watch trial
    """
    look = _look_at(directory)
    with LiveServer(directory.resolve().name, look, port) as server:
        output().print(f"watching {directory}: {server.url}", soft_wrap=True)
        output().print("Ctrl-C ends the page; the run goes on", soft_wrap=True)
        if browser:
            webbrowser.open(server.url)
        with ended_like_ctrl_c():
            while True:
                time.sleep(3600)


def _look_at(directory: Path) -> Any:
    """What to call once a second, checked once before anything is served."""
    if not directory.exists():
        raise DataError(f"there is no directory {directory}: check the path")
    if not directory.is_dir():
        raise DataError(f"{directory} is a file: give the directory of a site or of a federation")
    from fedkin.federate import places_in, snapshot

    snapshot(places_in(directory))
    return lambda: snapshot(places_in(directory))  # sites may come later
