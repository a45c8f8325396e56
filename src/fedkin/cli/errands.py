"""Commands of sites on this machine, each site's in a process of its own, two at a time, with a live view.

``python -m fedkin.cli.errands`` loads what the commands need, once, and forks a process for each site. It reads on
standard input what each site has to do, and writes a line of JSON whenever one begins or ends.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.live import Live
from rich.table import Table

from fedkin.cli.console import OK, messages
from fedkin.cli.tables import add_row, plain_table
from fedkin.errors import SolverError

#: Sites at a time.
AT_A_TIME = 2
_FRAME_LINES = 6  # of the live view: head, rule, margins, and the line of the prompt

#: The words of the commands of each site, one command after the other.
Errands = Mapping[str, Sequence[Sequence[str]]]


@dataclass
class Board:
    """What each site does or has done, in words, for the live view."""

    states: dict[str, str] = field(default_factory=dict)

    def run(self, errands: Errands, doing: str, done: str) -> dict[str, str]:
        """Run the commands of all these sites; gives what those said whose command failed."""
        failed: dict[str, str] = {}
        if not errands:
            return failed
        console, ended = messages(), 0
        with _started(errands) as process, Live(console=console, auto_refresh=False, transient=True) as live:
            try:
                for line in process.stdout or ():
                    name, code, said = json.loads(line)
                    self.states[name] = doing if code is None else done if code == OK else "failed"
                    ended += code is not None
                    if code:
                        failed[name] = said
                    if console.is_terminal:
                        live.update(self._table(max(console.height - _FRAME_LINES, 3)), refresh=True)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if ended < len(errands):
            raise SolverError(f"the processes of the sites were ended from outside, with code {process.returncode}")
        return {name: failed[name] for name in errands if name in failed}

    def _table(self, most: int) -> Table:
        """The states; where there is room for ``most`` lines only, how many sites are in each."""
        table = plain_table("site", "state", numbers_from=2)
        if len(self.states) <= most:
            for name, state in self.states.items():
                add_row(table, name, state)
            return table
        for state in dict.fromkeys(self.states.values()):
            add_row(table, f"{sum(one == state for one in self.states.values())} sites", state)
        return table


def _started(errands: Errands) -> subprocess.Popen[str]:
    with tempfile.TemporaryFile("w+") as file:
        json.dump({name: [list(words) for words in commands] for name, commands in errands.items()}, file)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=file,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the simulation, which then ends its processes
            # the arithmetic of one site is small: threads would only get into each other's way
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "500"},
        )


def main() -> int:
    """Fork a process for each site, at most two at a time, until all have ended."""
    waiting: list[tuple[str, list[list[str]]]] = list(json.load(sys.stdin).items())
    # once, for all that are forked
    heavy = any("accept" in words for _, commands in waiting for words in commands)
    for module in ("fedkin.cli.app", "fedkin.federate.sharing", *(["fedkin.cli.parts"] if heavy else [])):
        importlib.import_module(module)
    running: dict[int, tuple[str, IO[str]]] = {}
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            name, commands = waiting.pop(0)
            _tell(name)
            errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed when the process has ended)
            child = os.fork()
            if child == 0:
                _become(commands, errors)
            running[child] = (name, errors)
        child, status = os.wait()
        name, said = running.pop(child)
        with said:
            said.seek(0)
            code = os.waitstatus_to_exitcode(status)
            _tell(name, code, _words(said.read(), code))
    return OK


def _tell(name: str, code: int | None = None, said: str = "") -> None:
    sys.stdout.write(json.dumps([name, code, said]) + "\n")
    sys.stdout.flush()


def _become(commands: Sequence[Sequence[str]], errors: IO[str]) -> None:
    """Be the process of a site: run its commands until one fails, and end."""
    from fedkin.cli import main as run

    code = 1
    try:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        code = next((code for words in commands if (code := run(words))), OK)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _words(said: str, code: int) -> str:
    """Why a command failed, in its own words."""
    _, found, words = said.rpartition("error: ")
    return words.strip() if found else f"its process ended with code {code}"


if __name__ == "__main__":
    sys.exit(main())
