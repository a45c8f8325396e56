"""The program behind `fedkin.cli.sites.errands`: commands of sites, each site's in a process of its own, two at a time.

``python -m fedkin.cli.run_errands`` loads what the commands need, once, and forks a process for each site. It reads on
standard input what each site has to do, and writes a line of JSON whenever one begins or ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from fedkin.cli import main as run_command
from fedkin.cli.shared.console import OK

#: Sites at a time.
AT_A_TIME = 2


def main() -> int:
    """Fork a process for each site, at most two at a time, until all have ended."""
    waiting: list[tuple[str, list[list[str]]]] = list(json.load(sys.stdin).items())
    # once, for all that are forked
    heavy = any("accept" in words for _, commands in waiting for words in commands)
    for module in ("fedkin.cli.app", "fedkin.federate.sharing", *(["fedkin.cli.sites.parts"] if heavy else [])):
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
    code = 1
    try:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        code = next((code for words in commands if (code := run_command(words))), OK)
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
