"""Sites that run: started, watched on one machine, shown, stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedkin.cli.shared.console import Interrupted, StopRequested, ended_like_ctrl_c, messages, note, output, print_json
from fedkin.cli.shared.tables import add_row, plain_table
from fedkin.errors import ParameterError, SolverError
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
    prometheus,
    stop_all,
)

PROGRAM = "fedkin.cli.site_run"
_LOOK_SECONDS = 0.3
_FRAME_LINES = 6  # of the live view: head, rule, margins, and the line of the prompt


def become(place: Path, patience: Patience, *, echo: bool, listen: str | None, centre: bool = False) -> None:
    """Become the process of a site, or of the central machine: what the command line has loaded is not needed."""
    options = [f"--{name.replace('_', '-')}={value!r}" for name, value in vars(patience).items()]
    options += ["--echo"] if echo else []
    options += [] if listen is None else [f"--listen={listen}"]
    role = ["--centre"] if centre else []
    os.execv(sys.executable, [sys.executable, "-m", PROGRAM, *role, str(place), *options])


def select(place: Path, give_up: float, listen: str | None) -> None:
    """Test the edges of one site."""
    from fedkin.federate.selection import main

    check_patience(0, give_up)
    raise SystemExit(main([str(place), "--give-up", str(give_up), *([] if listen is None else ["--listen", listen])]))


def select_all(places: Sequence[Path], give_up: float) -> None:
    """Test the edges of all these sites that have not done it."""
    waiting = [place for place in places if not (place / SELECTION).exists()]
    command = [sys.executable, "-m", "fedkin.federate.selection", "--give-up", str(give_up)]
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


def check_patience(restarts: int, give_up: float) -> None:
    """Raise `ParameterError` for numbers that a supervisor cannot have."""
    Patience(give_up=give_up)
    if restarts < 0:
        raise ParameterError(f"--restarts must be at least 0, got {restarts}")


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
    check_patience(restarts, give_up)
    check_idle(places)
    supervisor = Supervisor(places, PROGRAM, ("--give-up", str(give_up)), restarts)
    stopped = False
    if not all_done(places):
        try:
            with ended_like_ctrl_c(STOP_SIGNAL), only_supervisor(directory):
                if edge_tests:
                    select_all(places, give_up)
                watch(supervisor, waits=waits)
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


def watch(supervisor: Supervisor, *, waits: bool) -> None:
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
                    live.update(table(lines, max(console.height - _FRAME_LINES, 3)), refresh=True)
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


def status(directory: Path, metrics: bool, as_json: bool) -> None:
    """Print what the sites of a directory last said."""
    lines = overview(places_in(directory))
    if metrics:
        sys.stdout.write(prometheus(lines))
    elif as_json:
        print_json({"sites": [asdict(line) for line in lines]})
    else:
        output().print(table(lines))
        for line in lines:
            if line.why:
                note(f"{line.name}: {line.why}")


def stop(directory: Path) -> None:
    """Ask sites to stop."""
    stopped = stop_all(directory)
    output().print(f"asked to stop: {', '.join(stopped)}" if stopped else "no site is running here", soft_wrap=True)


def table(lines: Sequence[Line], most: int | None = None) -> Table:
    """A line per site; where there is room for ``most`` lines only, those in trouble and those behind come first."""
    hidden: Sequence[Line] = ()
    if most is not None and len(lines) > most:
        ranked = sorted(lines, key=lambda line: (line.state not in TROUBLE, not line.waiting_for, line.round))
        lines, hidden = ranked[: most - 1], ranked[most - 1 :]
    heads = ["site", "state"]
    table = plain_table(*heads, "round", "change", "up", "pulled", "restarts", "waits for", numbers_from=len(heads))
    colours = dict.fromkeys(TROUBLE, "red") | dict.fromkeys(("done", "finished"), "green") | {"starting again": ""}
    for line in lines:
        add_row(
            table,
            line.name,
            line.state,
            f"{line.round}/{line.rounds}",
            "" if line.change is None else f"{line.change:.1e}",
            str(line.up),
            str(line.pulled),
            str(line.restarts),
            ", ".join(line.waiting_for),
            style=colours.get(line.state, ""),
        )
    if hidden:
        rounds = [line.round for line in hidden]
        cells = [f"and {len(hidden)} more", *[""] * (len(heads) - 1), f"{min(rounds)} to {max(rounds)}"]
        add_row(table, *cells, *[""] * 5, style="dim")
    return table
