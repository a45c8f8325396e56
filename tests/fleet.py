"""Sites as child processes, which tests kill, halt and start again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from federations import make_sites, whole_of
from fedkin.core import Problem
from fedkin.federate import Organiser, Site, SitePlan, read_status
from fedkin.federate.trust import Pair
from fedkin.fitting import load
from processes import PATIENCE, Children, capped, wait_for

PROGRAM = ("-m", "fedkin.cli.site_run")
QUICK = ("--first-pull", "0.1", "--complain", "1", "--give-up", "180", "--linger", "30")


class Fleet(Children):
    """The sites of a folder as child processes; use it in a ``with`` statement."""

    def __init__(self, directory: Path, heart: Organiser, plan: SitePlan) -> None:
        super().__init__()
        self.directory, self.heart, self.plan = directory, heart, plan
        self.names = [member.name for member in heart.members]
        if heart.contract.rounds.placement == "central":
            self.names = ["centre", *self.names]

    @classmethod
    def make(cls, directory: Path, problem: Problem, rounds: int, **changes: Any) -> Fleet:
        heart = make_sites(directory, problem, rounds=rounds, **{"batch_size": 4, **changes})
        return cls(directory, heart, whole_of(heart, problem))

    def place(self, name: str) -> Path:
        return self.heart.directory if name == "centre" else self.directory / name

    def pair(self, name: str) -> Pair:
        """The key and certificate of a site, as a thief would copy them."""
        return Site.read(self.place(name)).pair()

    def start(self, *names: str, options: tuple[str, ...] = (), preexec: Any = capped) -> None:
        for name in names or self.names:
            log = (self.directory / f"{name}.stderr").open("ab")
            role = ["--centre"] if name == "centre" else []
            self.children[name] = subprocess.Popen(
                [sys.executable, *PROGRAM, *role, str(self.place(name)), *QUICK, *options],
                stderr=log,
                stdout=log,
                preexec_fn=preexec,
            )
            log.close()

    def signal(self, name: str, number: int) -> None:
        self.children[name].send_signal(number)

    def round(self, name: str) -> int:
        return read_status(self.place(name)).round

    def wait_for_round(self, name: str, t: int, seconds: float = PATIENCE) -> None:
        def arrived() -> bool:
            assert self.children[name].poll() in (None, 0), self.report()
            return self.round(name) >= t

        wait_for(arrived, seconds, self.report)

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.log(name) if entry["event"] == event]

    def wait_for_event(
        self, name: str, event: str, accept: Callable[[dict[str, Any]], bool] = lambda entry: True, **fields: object
    ) -> None:
        """Wait until a site has logged that event with these fields, in an entry that ``accept`` takes."""
        wait_for(
            lambda: any(fields.items() <= entry.items() and accept(entry) for entry in self.events(name, event)),
            report=self.report,
        )

    def is_stuck(self, name: str, times: int = 3) -> int:
        """Wait until a site complains that often about waiting in one and the same round, and return that round."""

        def stuck() -> int | None:
            rounds = [int(entry["round"]) for entry in self.events(name, "waiting")]
            last = rounds[-times:]
            return last[0] if len(last) == times and len(set(last)) == 1 else None

        return int(wait_for(stuck, report=self.report))

    def join(self, seconds: float = PATIENCE) -> None:
        """Wait until all have ended well."""
        deadline = time.monotonic() + seconds
        for name, child in self.children.items():
            try:
                code = child.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} did not end\n{self.report()}") from None
            assert code == 0, f"{name} ended with {code}\n{self.report()}"

    def theta(self) -> np.ndarray[Any, Any]:
        """The parameters ``(V, p)`` in the sites' models."""
        return np.stack([load(self.place(one.name) / "model").coef.ravel() for one in self.heart.members])

    def log(self, name: str) -> list[dict[str, Any]]:
        path = self.place(name) / "log.jsonl"
        written = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith("\n")]  # whole lines

    def report(self) -> str:
        lines = []
        for name in self.names:
            lines.append(f"--- {name}: {read_status(self.place(name))}")
            lines += [str(entry) for entry in self.log(name)[-8:]]
            errors = self.directory / f"{name}.stderr"
            lines.append(errors.read_text()[-1500:] if errors.exists() else "")
        return "\n".join(lines)
