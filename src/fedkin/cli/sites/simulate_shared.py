"""``fedkin federation simulate --by share``: every site joins and shares its sums; the organiser fits, and delivers.

What a site does is a command of its own, in a process of its own, in its own directory; the organiser's part is done
here. Every step looks at what is there already, so that the same command continues after an interruption.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedkin._base import count, write_file
from fedkin.cli.models.fit_shared import Asked, Step, print_step, shared_step
from fedkin.cli.models.results import print_model
from fedkin.cli.shared.console import ended_like_ctrl_c, note, say, working
from fedkin.cli.sites.errands import Board
from fedkin.cli.sites.parts import deliver
from fedkin.data import write_csv
from fedkin.errors import DataError
from fedkin.federate import STOP_SIGNAL, Organiser, only_supervisor
from fedkin.federate.messages import ADMITTED, INVITE, INVITES, QUERIES, SENT, SUMMARIES
from fedkin.federate.trust import fingerprint


def _invite_of(heart: Organiser, name: str) -> Path:
    """The invite of a site, as the organiser wrote it."""
    return heart.directory / INVITES / f"{name}.invite"


@contextmanager
def _own_table(place: Path, columns: Mapping[str, Any]) -> Iterator[Path]:
    """A site's part of the table as a file beside its directory, for as long as it joins: then it has its rows."""
    path = place.with_name(f"{place.name}.csv")
    try:
        cells = zip(*(column.tolist() for column in columns.values()), strict=True)
        write_csv(path, list(columns), [list(row) for row in cells])
        yield path
    finally:
        path.unlink(missing_ok=True)


def share_all(heart: Organiser, sites: Path, parts: Sequence[Mapping[str, Any]], out: Path) -> None:
    """From joining to a model at each site, by one message of every site, or more where the loss needs them.

    Parameters
    ----------
    heart : Organiser
        Has written its invites.
    sites : path
        Where the sites have, or get, their directories.
    parts : sequence of mapping
        The columns of each site's table, in the order of the organiser's list.
    out : path
        For the model of all sites.
    """
    board = Board({member.name: "invited" for member in heart.members})
    with ended_like_ctrl_c(STOP_SIGNAL), only_supervisor(sites.parent):
        join_all(board, heart, sites, parts)
        _share(board, heart, sites)
        step = _fit(board, heart, sites, out)
        paths = {path.stem: path for path in deliver(heart.directory, out, ())}
        accepts = {name: [["site", "accept", str(sites / name), str(path)]] for name, path in paths.items()}
        refuse(board.run(accepts, "accepts its model", "has its model"))
    if step.model is not None:
        print_step(Asked(heart.directory / SUMMARIES), step)
        print_model(out, step.model, compared=False)
    first = sites / next(iter(paths))
    say(f"{count(len(paths), 'model')}, one at each site: {first}/model and so on. The organiser's, of all: {out}")


def join_all(board: Board, heart: Organiser, sites: Path, parts: Sequence[Mapping[str, Any]]) -> None:
    """Every site joins with its own rows; the organiser admits it."""
    seal = fingerprint(heart.authority)
    own = dict(zip([member.name for member in heart.members], parts, strict=True))
    joins = {}
    with ExitStack() as tables:
        for name in own:
            place = sites / name
            if not (place / INVITE).exists():
                table = tables.enter_context(_own_table(place, own[name]))
                how = ["--data", str(table), "--into", str(place), "--fingerprint", seal]
                joins[name] = [["site", "join", str(_invite_of(heart, name)), *how]]
        failed = board.run(joins, "joins", "has joined")
    for name, words in failed.items():
        shutil.rmtree(sites.parent)  # so that the same command begins anew
        raise DataError(f"the rows of {heart.member(name).id!r}: {words}")
    for name in own:
        if not (heart.directory / ADMITTED / f"{name}.admit").exists():
            heart.admit(sites / name / f"{name}.request")
    say(f"{count(len(own), 'site')} joined, each with a key of its own, and were admitted.")


def _share(board: Board, heart: Organiser, sites: Path) -> None:
    """Every site shares its sums, unless its rows are too few."""
    shares = {}
    for member in heart.members:
        place = sites / member.name
        if not (place / SENT / f"{member.name}.summary").exists():
            admitted = heart.directory / ADMITTED / f"{member.name}.admit"
            shares[member.name] = [["site", "accept", str(place), str(admitted)], ["site", "share", str(place)]]
    failed = board.run(shares, "shares its sums", "has shared its sums")
    for name, words in failed.items():
        note(f"{name}: {words}")
    if len(failed) == len(heart.members):
        raise DataError("no site shares anything, so there is no model: see the reasons above")
    say(f"{count(_carry(heart, sites), 'file')} with sums went to the organiser.")


def _fit(board: Board, heart: Organiser, sites: Path, out: Path) -> Step:
    """The model of all sites, after as many questions as the loss needs."""
    summaries = heart.directory / SUMMARIES
    while True:
        answers: dict[str, list[list[str]]] = {}
        for question in sorted((heart.directory / QUERIES).glob("*.ask")):
            name, _, number = question.stem.rpartition("@")
            if not (sites / name / SENT / f"{question.stem}.summary").exists():
                answers[name] = [["site", "answer", str(sites / name), str(question)]]
        if answers:
            refuse(board.run(answers, f"answers question {number}", f"has answered question {number}"))
            say(f"{count(len(answers), 'site')} answered question {number} of the organiser.")
        _carry(heart, sites)
        with working(f"reading {summaries}") as report:
            step = shared_step(Asked(summaries), out, report)
        if step.asks is None:
            return step


def _carry(heart: Organiser, sites: Path) -> int:
    """Carry what sites have written to the organiser, as people would; returns how many files it has."""
    folder = heart.directory / SUMMARIES
    for path in sites.glob(f"*/{SENT}/*.summary"):
        if not (folder / path.name).exists():
            write_file(folder / path.name, path.read_bytes(), private=True)
    return len(list(folder.glob("*.summary")))


def refuse(failed: Mapping[str, str]) -> None:
    """Raise `DataError` in the words of the first site whose command failed."""
    for name, words in failed.items():
        raise DataError(f"{name}: {words}")
