"""``fedkin watch``: a federation live in the browser."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedkin.cli.app import argument
from fedkin.cli.console import ended_like_ctrl_c, say
from fedkin.errors import DataError
from fedkin.federate import places_in, snapshot
from fedkin.report import LiveServer


def watch(
    directory: Annotated[
        Path, argument("DIR", "A site's directory, or one with several in it (as federation simulate).")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any that is free.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Follow a federation in the browser: rounds, who waits for whom, who is absent, bytes, residuals, certificate.

    It reads what sites write into their directories, once a second, and changes nothing. Only this machine can
    open the page, with the token in its address.
    """
    if not directory.exists():
        raise DataError(f"there is no directory {directory}: check the path")
    if not directory.is_dir():
        raise DataError(f"{directory} is a file: give the directory of a site or of a federation")
    snapshot(places_in(directory))  # checked once before anything is served; sites may come later
    with LiveServer(directory.resolve().name, lambda: snapshot(places_in(directory)), port) as server:
        say(f"watching {directory}: {server.url}", "Ctrl-C ends the page; the run goes on")
        if browser:
            webbrowser.open(server.url)
        with ended_like_ctrl_c():
            while True:
                time.sleep(3600)
