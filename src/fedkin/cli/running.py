"""Run sites on this machine: start, supervise and show them, in the terminal and with ``fedkin watch``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedkin._base import count
from fedkin.cli.console import (
    Interrupted,
    StopRequested,
    add_row,
    argument,
    ended_like_ctrl_c,
    messages,
    note,
    output,
    plain_table,
    say,
)
from fedkin.errors import DataError, ParameterError, SolverError
from fedkin.federate import (
    SELECTION,
    STDERR,
    STOP_SIGNAL,
    TROUBLE,
    Line,
    Patience,
    Supervisor,
    all_done,
    check_idle,
    only_supervisor,
    places_in,
    snapshot,
)
from fedkin.report import LiveServer

PROGRAM = "fedkin.cli.site_run"
_LOOK_SECONDS = 0.3
FRAME_LINES = 6  # lines of a live view: head, rule, margins and prompt


def become(
    place: Path,
    patience: Patience,
    *,
    echo: bool,
    listen: str | None,
    centre: bool = False,
    follow: Path | None = None,
) -> None:
    """Replace this process by that of a site or of the central machine, to free the modules of the command line."""
    options = [f"--{name.replace('_', '-')}={value!r}" for name, value in vars(patience).items()]
    options += ["--echo"] if echo else []
    options += [] if listen is None else [f"--listen={listen}"]
    options += [] if follow is None else [f"--follow={follow}"]
    role = ["--centre"] if centre else []
    os.execv(sys.executable, [sys.executable, "-m", PROGRAM, *role, str(place), *options])


def run_all(
    directory: Path,
    places: Sequence[Path],
    *,
    edge_tests: bool,
    waits: bool,
    restarts: int = 10,
    give_up: float = 3600.0,
) -> list[Line]:
    """Run these sites on this machine until they finish, with a live view; ``waits``: whether others wait for one."""
    Patience(give_up=give_up)
    if restarts < 0:
        raise ParameterError(f"--restarts must be at least 0, got {restarts}")
    check_idle(places)
    supervisor = Supervisor(places, PROGRAM, ("--give-up", str(give_up)), restarts)
    stopped = False
    if not all_done(places):
        try:
            with ended_like_ctrl_c(STOP_SIGNAL), only_supervisor(directory):
                if edge_tests:
                    _select_all(places, give_up)
                _supervise(supervisor, waits=waits)
        except StopRequested:
            stopped = True
    lines = supervisor.overview()
    failed = supervisor.failed()
    if failed:
        names = ", ".join(child.name for child in failed)
        raise SolverError(f"{names} failed: {failed[0].why}; see log.jsonl and {STDERR} in {failed[0].place}")
    # a stop request after all sites are done stops nothing
    if (stopped or supervisor.stopped()) and not all_done(places):
        raise StopRequested
    return lines


def _select_all(places: Sequence[Path], give_up: float) -> None:
    """Test the edges of the sites that have not tested them."""
    waiting = [place for place in places if not (place / SELECTION).exists()]
    command = [sys.executable, "-m", PROGRAM, "--select", "--give-up", str(give_up)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for place in waiting:
            running.append(subprocess.Popen([*command, str(place)], start_new_session=True))
        # the others would wait long for a site that failed
        while any(process.poll() is None for process in running) and not any(one.returncode for one in running):
            time.sleep(_LOOK_SECONDS)
        codes = [process.returncode for process in running]
    except (Interrupted, KeyboardInterrupt):
        note("stopping the edge tests; the same command starts them again")
        raise
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = [place for place, code in zip(waiting, codes, strict=True) if code]
    if failed:
        raise SolverError(f"edge tests failed at {', '.join(one.name for one in failed)}: see log.jsonl in {failed[0]}")


def _supervise(supervisor: Supervisor, *, waits: bool) -> None:
    """Start and supervise the sites until they end, with a live view on terminals."""
    console = messages()
    try:
        supervisor.start()
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while supervisor.poll():
                _tell_news(supervisor, console)
                if waits and (missed := [child.name for child in supervisor.failed()]):
                    note(f"stopping the sites, which wait for {', '.join(missed)}; the same command continues later")
                    break
                if console.is_terminal:
                    table = status_table(supervisor.overview(), max(console.height - FRAME_LINES, 3))
                    live.update(table, refresh=True)
                time.sleep(_LOOK_SECONDS)
    except (Interrupted, KeyboardInterrupt):
        note("stopping the sites; the same command continues later")
        raise
    finally:
        _tell_news(supervisor, console)
        supervisor.stop()


def _tell_news(supervisor: Supervisor, console: Console) -> None:
    while supervisor.news:
        note(supervisor.news.pop(0), console)


def say_end(lines: Sequence[Line], places: Sequence[Path]) -> None:
    """Print the outcome of the rounds, the paths of the models, and the next command."""
    output().print(status_table(lines))
    now = snapshot(places)
    if now["gap"] is not None:
        at = now["converged"]
        ended = f"converged at about round {at:,}" if at else f"not converged after {now['round']:,} rounds"
        gap = max(now["gap"], 1e-12)  # smaller gaps are rounding
        say(f"Relative gap {'below ' * (gap > now['gap'])}{gap:.1e}: {ended}.")
    if now["models"]:
        words, command = closing(sorted(now["models"]))
        say(words, f"next: {command}")


def status_table(lines: Sequence[Line], most: int | None = None) -> Table:
    """Return a line per site; if more than ``most``, failing and slow sites come first."""
    hidden: Sequence[Line] = ()
    if most is not None and len(lines) > most:
        ranked = sorted(lines, key=lambda line: (line.state not in TROUBLE, not line.waiting_for, line.round))
        lines, hidden = ranked[: most - 1], ranked[most - 1 :]
    table = plain_table("site", "state", "round", "change", "up", "pulled", "restarts", "waits for", numbers_from=2)
    colours = dict.fromkeys(TROUBLE, "red") | dict.fromkeys(("done", "finished"), "green") | {"starting again": ""}
    for line in lines:
        change = "" if line.change is None else f"{line.change:.1e}"
        cells = [f"{line.round}/{line.rounds}", change, *map(str, (len(line.up), line.pulled, line.restarts))]
        add_row(table, line.name, line.state, *cells, ", ".join(line.waiting_for), style=colours.get(line.state, ""))
    if hidden:
        rounds = [line.round for line in hidden]
        add_row(table, f"and {len(hidden)} more", "", f"{min(rounds)} to {max(rounds)}", *[""] * 5, style="dim")
    return table


def watch(
    directory: Annotated[
        Path, argument("DIR", "A site's directory, or a directory of several (as from federation simulate).")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any free port.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Follow a federation in the browser: rounds, waiting and absent sites, bytes, residuals, certificate.

    It reads the sites' directories once a second and changes nothing. Only this machine can open the page, with the
    token in its address.
    """
    if directory.exists() and not directory.is_dir():
        raise DataError(f"{directory} is a file: give the directory of a site or of a federation")
    with LiveServer(directory.resolve().name, lambda: _state(directory), port) as server:
        say(f"watching {directory}: {server.url}", "Ctrl-C closes the page; the run continues")
        if not _places(directory):
            note(f"{directory} has no site yet: waiting for one")
        if browser:
            webbrowser.open(server.url)
        with ended_like_ctrl_c():
            while True:
                time.sleep(3600)


def _places(directory: Path) -> list[Path]:
    try:
        return places_in(directory)
    except DataError:  # watched before the run starts
        return []


def _state(directory: Path) -> dict[str, Any]:
    """Return the data of the page: a snapshot, and the next step when all sites are done."""
    now = snapshot(_places(directory))
    done = now["sites"] and all(site["kind"] in ("done", "left") for site in now["sites"])
    words, command = closing(sorted(now["models"])) if done and now["models"] else ("", "")
    return {**now, "closing": {"words": words, "command": command} if words else None}


def closing(models: Sequence[str]) -> tuple[str, str]:
    """Return the paths of the sites' models, and a command that uses the first."""
    where = models[0] if len(models) == 1 else f"{models[0]} and so on"
    return f"{count(len(models), 'model')}, one at each site: {where}.", f"fedkin predict {models[0]} rows.csv"
