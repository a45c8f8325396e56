"""Commands of sites on this machine, each site's in a process of its own, two at a time, with a live view.

The processes are those of `fedkin.cli.run_errands`, which gets what each site has to do on standard input, and writes a
line of JSON whenever one begins or ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rich.live import Live
from rich.table import Table

from fedkin.cli.shared.console import OK, messages
from fedkin.cli.shared.tables import add_row, plain_table
from fedkin.errors import SolverError

PROGRAM = "fedkin.cli.run_errands"
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
            [sys.executable, "-m", PROGRAM],
            stdin=file,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the simulation, which then ends its processes
            # the arithmetic of one site is small: threads would only get into each other's way
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "500"},
        )
