"""A small federation of hospitals, made with the commands that people type: helpers of the black-box tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fedkin.cli import main
from processes import PATIENCE, Children, capped, free_ports

PROGRAM = (sys.executable, "-m", "fedkin")

SITES = ("north", "south", "east", "west")
ROWS = 120
CONTRACT = """\
name = "heart"
loss = "linear"
method = "fused"
[features]
age = {unit = "years", low = 20, high = 100, mean = 60, scale = 10}
ward = {levels = ["A", "B", "C"]}
[target]
name = "days"
low = 0
high = 60
"""
KIN = CONTRACT.replace('method = "fused"\n', "")
DIED = CONTRACT.replace('"linear"', '"logistic"').split("[target]")[0] + (
    '[target]\nname = "died"\nkind = "category"\nlevels = ["no", "yes"]\n'
)


# --- commands ---------------------------------------------------------------------------------------------------------


def cli(*words: object, code: int = 0, cwd: Path | None = None) -> str:
    """Run a command in this process and return what it wrote; it must end with ``code`` and no traceback."""
    said = io.StringIO()
    place = contextlib.nullcontext() if cwd is None else contextlib.chdir(cwd)
    wide = mock.patch.dict(os.environ, {"COLUMNS": "250"})
    with place, wide, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        ended = main([str(word) for word in words])
    assert ended == code, said.getvalue()
    assert "Traceback" not in said.getvalue()
    return said.getvalue()


def document(*words: object, **how: Any) -> Any:
    """The JSON document that a command writes."""
    return json.JSONDecoder().raw_decode(cli(*words, **how))[0]


def process(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [*PROGRAM, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, preexec_fn=capped, check=False)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


class Processes(Children):
    """Commands in the background; use it in a ``with`` statement, after which none is left."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def start(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.said").open("ab") as said:
            command = [*PROGRAM, *map(str, words)]
            self.children[name] = subprocess.Popen(command, stdout=said, stderr=said, preexec_fn=capped)
        return self.children[name]

    def run_site(self, *names: str) -> None:
        """Start ``fedkin site run`` for each of these."""
        for name in names:
            waits = ("--first-pull", 0.1, "--give-up", PATIENCE, "--linger", 20)
            self.start(name, "site", "run", self.folder / name, *waits)

    def join(self, code: int = 0) -> None:
        end = time.monotonic() + PATIENCE
        for name, child in self.children.items():
            assert child.wait(max(end - time.monotonic(), 0.1)) == code, (self.folder / f"{name}.said").read_text()


def site_rounds(place: Path) -> dict[str, int]:
    """How many rounds each site below a directory has done."""
    return {line["name"]: line["round"] or 0 for line in document("site", "status", place, "--json")["sites"]}


# --- tables -----------------------------------------------------------------------------------------------------------


def rows_of(k: int, n: int = ROWS) -> list[tuple[float, str, float, str]]:
    """Patients of the k-th site: age, ward, days, died. The first two sites are alike, and so are the others."""
    rng = np.random.default_rng([7, k])
    age, ward = rng.uniform(30, 90, n).round(4), np.array(["A", "B", "C"])[rng.permutation(n) % 3]
    score = (0.03 if k < 2 else -0.09) * (age - 60) + 1.0 * (ward == "B")
    died = np.where(rng.random(n) < 1 / (1 + np.exp(-score)), "yes", "no")
    days = (20 + 3 * score + rng.normal(size=n)).round(4)
    return list(zip(age.tolist(), ward.tolist(), days.tolist(), died.tolist(), strict=True))


def write_table(path: Path, k: int = 0, n: int = ROWS, extra: Sequence[str] = ()) -> Path:
    """The table of one site."""
    lines = [",".join(map(str, row)) for row in rows_of(k, n)]
    path.write_text("\n".join(["age,ward,days,died", *lines, *extra]) + "\n")
    return path


def write_all(path: Path, names: Sequence[str] = SITES) -> Path:
    """The rows of all sites in one table."""
    lines = [",".join([name, *map(str, row)]) for k, name in enumerate(names) for row in rows_of(k)]
    path.write_text("\n".join(["site,age,ward,days,died", *lines]) + "\n")
    return path


def design(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns as the contract prepares them (intercept, age, ward=B, ward=C), and the days."""
    age, ward, days, _ = (np.array(column) for column in zip(*rows_of(k), strict=True))
    return np.column_stack([np.ones(ROWS), (age - 60) / 10, ward == "B", ward == "C"]), days


# --- organiser and sites ----------------------------------------------------------------------------------------------


def write_ring(path: Path, names: Sequence[str] = SITES) -> Path:
    pairs = [f"{names[k]},{names[(k + 1) % len(names)]}" for k in range(len(names) if len(names) > 2 else 1)]
    path.write_text("\n".join(["source,target", *pairs]) + "\n")
    return path


def organise(folder: Path, contract: str = CONTRACT, names: Sequence[str] = SITES) -> Path:
    """The organiser's directory ``heart`` of a ring of sites, all invited."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "heart.toml").write_text(contract)
    port = free_ports(len(names))
    lines = [f"{name},127.0.0.1,{port + k}" for k, name in enumerate(names)]
    (folder / "sites.csv").write_text("\n".join(["site,host,port", *lines]) + "\n")
    write_ring(folder / "edges.csv", names)
    heart = folder / "heart"
    files = ("--sites", folder / "sites.csv", "--graph", folder / "edges.csv", "--out", heart)
    cli("federation", "new", folder / "heart.toml", *files)
    cli("federation", "invite", heart)
    return heart


def join(heart: Path, name: str, table: Path | None = None, into: Path | None = None, **how: Any) -> str:
    """A site joins with its own table."""
    folder = heart.parent
    if table is None:
        table = write_table(folder / f"{name}.csv", SITES.index(name))
    place = folder / name if into is None else into
    lax = ["--below-minima"] if "batch_size" in (heart / "contract.toml").read_text() else []
    return cli(
        "site", "join", heart / "invites" / f"{name}.invite", "--data", table, "--into", place, "--yes", *lax, **how
    )


def enrol(heart: Path, *names: str, table: Path | None = None) -> Path:
    """Sites join and are admitted; the directory of the last one."""
    for name in names:
        join(heart, name, table)
        place = heart.parent / name
        cli("federation", "admit", heart, place / f"{name}.request", "--yes")
        cli("site", "accept", place, heart / "admitted" / f"{name}.admit")
    return place


def share(heart: Path, *names: str, options: Sequence[object] = ()) -> None:
    """Sites share their sums, which are carried to the organiser."""
    for name in names:
        cli("site", "share", heart.parent / name, "--yes", *options)
        shutil.copy(heart.parent / name / "sent" / f"{name}.summary", heart / "summaries")


def copied(heart: Path, folder: Path) -> Path:
    """The whole federation once more, for a test to change."""
    shutil.copytree(heart.parent, folder / "copy")
    return folder / "copy" / heart.name


def body_of(path: Path) -> dict[str, Any]:
    """What a signed file says."""
    return json.loads(path.read_text())["body"]


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the body of a signed file, and leave the signature as it is."""
    content = json.loads(path.read_text())
    change(content["body"])
    path.write_text(json.dumps(content))


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers of a JSON document."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
