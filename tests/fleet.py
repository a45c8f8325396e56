"""Real device processes on loopback, capped in memory and always cleaned up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from federations import manifest_of, place, rows_of
from fedkin.federate import Manifest, Pair, make_authority, read_result, read_status, write_federation
from fedkin.objective import Problem
from processes import capped, free_ports, wait_for

PROGRAM = ("-m", "fedkin.federate.programs.run")
QUICK = ("--first-pull", "0.1", "--complain", "1", "--give-up", "60", "--linger", "30")


class Fleet:
    """The devices of a federation directory as child processes; use it in a ``with`` statement."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.names = [member.name for member in manifest.members]
        if manifest.placement == "central":
            self.names = ["centre", *self.names]
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def make(
        cls, directory: Path, problem: Problem, rounds: int, *, authority: Pair | None = None, **changes: Any
    ) -> Fleet:
        manifest = manifest_of(problem, rounds, ports=free_ports(problem.n_devices + 1), **changes)
        write_federation(directory, manifest, rows_of(problem), authority or make_authority("test"), share_result=True)
        return cls(directory, manifest)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
            child.wait(10)

    def start(
        self, *names: str, options: tuple[str, ...] = (), program: tuple[str, ...] = PROGRAM, preexec: Any = capped
    ) -> None:
        for name in names or self.names:
            log = (self.directory / f"{name}.stderr").open("ab")
            self.children[name] = subprocess.Popen(
                [sys.executable, *program, str(place(self.directory, name)), *QUICK, *options],
                stderr=log,
                stdout=log,
                preexec_fn=preexec,
            )
            log.close()

    def signal(self, name: str, number: int) -> None:
        self.children[name].send_signal(number)

    def set_lease(self, seconds: float) -> None:
        """Let links die after so many seconds of silence."""
        for name in self.names:
            path = place(self.directory, name) / "zenoh.json5"
            links = json.loads(path.read_text())
            links["transport"].setdefault("link", {})["tx"] = {"lease": int(seconds * 1000), "keep_alive": 4}
            path.write_text(json.dumps(links))

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.children[name].wait(10)

    def round(self, name: str) -> int:
        return int(read_status(place(self.directory, name)).get("round", 0))

    def wait_for_round(self, name: str, t: int, seconds: float = 60) -> None:
        def arrived() -> bool:
            assert self.children[name].poll() in (None, 0), self.report()
            return self.round(name) >= t

        wait_for(arrived, seconds, self.report)

    def wait_for_event(
        self, name: str, event: str, accept: Callable[[dict[str, Any]], bool] = lambda entry: True
    ) -> None:
        """Wait until a device has logged that event, in an entry that ``accept`` takes."""
        wait_for(lambda: any(entry["event"] == event and accept(entry) for entry in self.log(name)), report=self.report)

    def join(self, seconds: float = 120) -> None:
        """Wait until all have ended well."""
        deadline = time.monotonic() + seconds
        for name, child in self.children.items():
            try:
                code = child.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} did not end\n{self.report()}") from None
            assert code == 0, f"{name} ended with {code}\n{self.report()}"

    def theta(self) -> np.ndarray[Any, Any]:
        found = [read_result(place(self.directory, member.name)) for member in self.manifest.members]
        assert all(one is not None for one in found), self.report()
        return np.stack(found)  # type: ignore[arg-type]

    def log(self, name: str) -> list[dict[str, Any]]:
        path = place(self.directory, name) / "log.jsonl"
        written = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith("\n")]  # whole lines

    def report(self) -> str:
        lines = []
        for name in self.names:
            lines.append(f"--- {name}: {read_status(place(self.directory, name))}")
            lines += [str(entry) for entry in self.log(name)[-8:]]
            errors = self.directory / f"{name}.stderr"
            lines.append(errors.read_text()[-1500:] if errors.exists() else "")
        return "\n".join(lines)
