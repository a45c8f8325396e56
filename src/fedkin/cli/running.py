"""Sites that run on this machine: started, supervised, shown in the terminal and by ``fedkin watch``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedkin.cli.console import (
    Interrupted,
    StopRequested,
    add_row,
    argument,
    ended_like_ctrl_c,
    messages,
    note,
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
    overview,
    places_in,
    snapshot,
)
from fedkin.report import LiveServer

PROGRAM = "fedkin.cli.site_run"
_LOOK_SECONDS = 0.3
FRAME_LINES = 6  # of a live view: head, rule, margins, and the line of the prompt


def become(
    place: Path,
    patience: Patience,
    *,
    echo: bool,
    listen: str | None,
    centre: bool = False,
    follow: Path | None = None,
) -> None:
    """Become the process of a site, or of the central machine: what the command line has loaded is not needed."""
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
    """Run all these sites on this machine until they end, with a live view; ``waits``: whether others wait for one."""
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
    lines = overview(places, supervisor.by_name)
    failed = supervisor.failed()
    if failed:
        names = ", ".join(child.name for child in failed)
        raise SolverError(f"{names} failed: {failed[0].why}; see log.jsonl and {STDERR} in {failed[0].place}")
    # a wish to stop may come when all are done: then nothing was stopped
    if (stopped or supervisor.stopped()) and not all_done(places):
        raise StopRequested
    return lines


def _select_all(places: Sequence[Path], give_up: float) -> None:
    """Test the edges of all these sites that have not done it."""
    waiting = [place for place in places if not (place / SELECTION).exists()]
    command = [sys.executable, "-m", "fedkin.federate.program", "--give-up", str(give_up)]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for place in waiting:
            running.append(subprocess.Popen([*command, str(place)], start_new_session=True))
        # who fails is missed by the others: they would wait for long
        while any(process.poll() is None for process in running) and not any(one.returncode for one in running):
            time.sleep(_LOOK_SECONDS)
        codes = [process.returncode for process in running]
    except (Interrupted, KeyboardInterrupt):
        note("stopping the edge tests; the same command begins them again")
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
    """Start the sites and look after them until they have ended, with a live view on terminals."""
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
                    lines = overview(supervisor.places, supervisor.by_name)
                    live.update(status_table(lines, max(console.height - FRAME_LINES, 3)), refresh=True)
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


def status_table(lines: Sequence[Line], most: int | None = None) -> Table:
    """Return a line per site; of more than ``most``, those in trouble and those behind come first."""
    hidden: Sequence[Line] = ()
    if most is not None and len(lines) > most:
        ranked = sorted(lines, key=lambda line: (line.state not in TROUBLE, not line.waiting_for, line.round))
        lines, hidden = ranked[: most - 1], ranked[most - 1 :]
    table = plain_table("site", "state", "round", "change", "up", "pulled", "restarts", "waits for", numbers_from=2)
    colours = dict.fromkeys(TROUBLE, "red") | dict.fromkeys(("done", "finished"), "green") | {"starting again": ""}
    for line in lines:
        change = "" if line.change is None else f"{line.change:.1e}"
        cells = [f"{line.round}/{line.rounds}", change, *map(str, (line.up, line.pulled, line.restarts))]
        add_row(table, line.name, line.state, *cells, ", ".join(line.waiting_for), style=colours.get(line.state, ""))
    if hidden:
        rounds = [line.round for line in hidden]
        add_row(table, f"and {len(hidden)} more", "", f"{min(rounds)} to {max(rounds)}", *[""] * 5, style="dim")
    return table


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
