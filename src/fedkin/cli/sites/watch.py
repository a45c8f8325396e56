"""``fedkin watch``: a federation live in the browser."""

from __future__ import annotations

import os
import time
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from fedkin.admm import RUNNING, read_running
from fedkin.cli.shared.console import ended_like_ctrl_c, output
from fedkin.errors import DataError
from fedkin.report import LiveServer

#: Columns of a trace that the page draws.
_TRACE = ("n_iter", "objective", "primal_residual", "dual_residual", "bytes", "gap")


def watch(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A site's directory, one with several in it (as federation simulate makes), or of a checkpoint.",
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any that is free.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Follow a federation in the browser: rounds, who waits for whom, who is absent, bytes, residuals, certificate.

    It reads what sites and runs write into their directories, once a second, and changes nothing. Only this machine can
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
    running = [directory] if directory.name.endswith(RUNNING) else sorted(directory.glob(f"*{RUNNING}"))
    if running:
        newest = max(running, key=lambda path: path.stat().st_mtime)
        return lambda: run_state(newest)
    if not directory.is_dir():
        raise DataError(f"{directory} is a file: give the directory that the checkpoint is in")
    from fedkin.federate import places_in, snapshot

    try:
        snapshot(places_in(directory))
    except DataError as error:
        raise DataError(f"{error}. Nor has it a checkpoint of fed_admm that is being written") from None
    return lambda: snapshot(places_in(directory))  # sites may come later


def run_state(path: Path) -> dict[str, Any]:
    """The state of a run in one process, from the file beside its checkpoint."""
    told = read_running(path)
    if told is None:
        return {"kind": "run", "sites": [], "edges": [], "round": 0, "rounds": 0}
    absent, ended = set(told["absent"]), told["state"] in ("done", "stopped")
    alive = ended or _runs(int(told["pid"]))
    trace = told["trace"]
    last = trace[-1] if trace else {}

    def kind(site: int) -> str:
        if not alive:
            return "absent"
        return "done" if ended else "absent" if site in absent else "running"

    state = told["state"] if alive else "dead"
    return {
        "kind": "run",
        "sites": [
            {"name": name, "kind": kind(k), "state": state, "round": told["round"], "waiting_for": [], "sent": 0}
            for k, name in enumerate(told["sites"])
        ],
        "edges": told["edges"],
        "round": told["round"],
        "rounds": told["rounds"],
        "change": last.get("primal_residual"),
        "bytes": last.get("bytes"),
        "gap": last.get("gap"),
        "state": state,
        "trace": {name: [line.get(name) for line in trace] for name in _TRACE if any(name in line for line in trace)},
    }


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
