"""A small federation of hospitals as files: a contract, tables, the organiser's and the sites' directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedkin.federate import Organiser, Site

CONTRACT = """\
name = "heart"
loss = "linear"
[features]
age = {unit = "years", low = 20, high = 100}
ward = {levels = ["A", "B", "C"]}
[target]
name = "days"
low = 0
high = 100
"""
LOGISTIC = CONTRACT.split("[target]")[0].replace('"linear"', '"logistic"') + (
    '[target]\nname = "died"\nlevels = ["no", "yes"]\n'
)
SITES = ("north", "south", "east", "west")


def write_table(path: Path, n: int = 40, seed: int = 0, extra: str = "") -> Path:
    """A table of n patients that fits `CONTRACT`."""
    rng = np.random.default_rng(seed)
    age, ward = rng.uniform(30, 90, n).round(3), np.array(["A", "B", "C"])[np.arange(n) % 3]
    days = (5 + 0.1 * age + 2 * (ward == "B") + rng.normal(size=n)).round(4)
    lines = [f"{a},{w},{d}" for a, w, d in zip(age, ward, days, strict=True)]
    path.write_text("age,ward,days\n" + "\n".join(lines) + "\n" + extra)
    return path


def write_deaths(path: Path, n: int = 100, seed: int = 0) -> Path:
    """A table of n patients that fits `LOGISTIC`."""
    rng = np.random.default_rng(seed)
    lines = [f"{rng.uniform(30, 90):.2f},{'ABC'[k % 3]},{'no' if rng.random() < 0.5 else 'yes'}" for k in range(n)]
    path.write_text("age,ward,died\n" + "\n".join(lines) + "\n")
    return path


def write_graph(path: Path, names: Sequence[str] = SITES) -> Path:
    """A ring; of two, one edge."""
    pairs = [f"{names[k]},{names[(k + 1) % len(names)]}" for k in range(len(names) if len(names) > 2 else 1)]
    path.write_text("source,target\n" + "\n".join(pairs) + "\n")
    return path


def write_sites(path: Path, names: Sequence[str] = SITES, port: int = 7447) -> Path:
    """All on this machine."""
    path.write_text("site,host,port\n" + "".join(f"{name},127.0.0.1,{port + k}\n" for k, name in enumerate(names)))
    return path


def organiser_without_invites(
    folder: Path, contract: str = CONTRACT, names: Sequence[str] = SITES, **options
) -> Organiser:
    """The organiser's directory ``heart`` of a ring of sites."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "heart.toml").write_text(contract)
    graph, sites = write_graph(folder / "ring.csv", names), write_sites(folder / "list.csv", names)
    return Organiser.create(folder / "heart.toml", folder / "heart", graph=graph, sites=sites, **options)


def organiser(folder: Path, contract: str = CONTRACT, names: Sequence[str] = SITES, **options) -> Organiser:
    """The same with invites for all."""
    made = organiser_without_invites(folder, contract, names, **options)
    made.invite()
    return made


def invite_of(heart: Organiser, name: str) -> Path:
    """Where the organiser keeps a site's invite."""
    return heart.directory / "invites" / f"{name}.invite"


def joined(heart: Organiser, name: str, folder: Path | None = None, n: int = 40, seed: int = 0) -> Site:
    """A site that has joined, with rows of its own."""
    place = heart.directory.parent if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    table = write_table(place / f"{name}.csv", n=n, seed=seed + sum(name.encode()))
    return Site.join(invite_of(heart, name), table, place / name)[0]


def enrolled(heart: Organiser, name: str, table: Path, place: Path | None = None, *, again: bool = False) -> Path:
    """The directory of a site that joined with this table and was admitted."""
    join, _ = Site.join(invite_of(heart, name), table, table.parent / name if place is None else place)
    join.accept(heart.admit(join.request, again=again).path)
    return join.directory


def admitted(heart: Organiser, name: str, folder: Path | None = None, n: int = 40, seed: int = 0) -> Path:
    """The directory of a site that was admitted, with rows of its own."""
    join = joined(heart, name, folder, n, seed)
    join.accept(heart.admit(join.request).path)
    return join.directory
