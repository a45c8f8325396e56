"""The commands ``fedkin site ...``: what a site does that takes part in a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fedkin._base import count, listed
from fedkin.cli.console import (
    WRONG_INPUT,
    Json,
    argument,
    ask_fingerprint,
    note,
    option,
    output,
    print_findings,
    print_json,
    say,
    switch,
)
from fedkin.cli.running import become, status_table
from fedkin.data import read_columns, row_places
from fedkin.federate import (
    SELECTION,
    Patience,
    Site,
    change_settings,
    contract_in,
    describe_summary,
    overview,
    places_in,
    prometheus,
    read_selection,
    sharing,
    site_plan,
    steps_of,
    stop_all,
)
from fedkin.federate.program import select_main
from fedkin.federate.sharing import Shared
from fedkin.federate.trust import fingerprint as key_fingerprint

site = typer.Typer(no_args_is_help=True)

Directory = Annotated[Path, argument("DIR", "The site's directory (fedkin site join).")]
EitherDirectory = Annotated[Path, argument("DIR", "A site's directory, or one that has some in it.")]
GiveUp = Annotated[float, option("SECONDS", "Longest wait for a neighbour; after that the site ends with code 4.")]
Listen = Annotated[
    str | None, option("HOST:PORT", "Listen here, behind NAT or in a container. [the address in the list]")
]


@site.callback()
def _root() -> None: ...


@site.command()
def join(
    invite: Annotated[Path, argument("FILE.invite", "What the organiser sent.")],
    data: Annotated[Path, option("TABLE", "The site's rows, CSV or Parquet.")],
    into: Annotated[Path | None, option("DIR", "The site's directory, to be made. [the site's name]")] = None,
    fingerprint: Annotated[str | None, option("HEX", "Of the authority, as the organiser reads it out.")] = None,
    below_minima: Annotated[
        bool, switch("--below-minima", "Let the contract's thresholds alone decide: rows may be recognised.")
    ] = False,
    yes: Annotated[bool, switch("--yes", "Do not ask for the fingerprint, for automation.")] = False,
) -> None:
    """At the site: check the rows against the contract, make a key that never leaves, and write the request."""
    fingerprint = ask_fingerprint(fingerprint, "Fingerprint of the authority, as the organiser reads it out", yes)
    how = {"expected": fingerprint, "below_minima": below_minima}
    made, remarks = Site.join(invite, data, into, steps=steps_of, **how)  # type: ignore[arg-type]
    for remark in remarks:
        note(str(remark))
    batch, least = made.contract.rounds.batch_size, made.contract.thresholds.rows
    if batch is not None and batch < least:
        note(
            f"the contract lets a round look at {count(batch, 'row')} only, fewer than its threshold of {least}: "
            "neighbours may work rows out from such rounds"
        )
    if fingerprint is None:
        note(
            f"the invite is signed by the authority with the fingerprint {key_fingerprint(made.authority)}; before you "
            "send anything, ask the organiser whether that is right (or join again with --fingerprint)"
        )
    told = "no number that" if made.contract.rounds.placement == "peer" else "step numbers, and nothing else which"
    say(
        f"{count(made.rows().n_samples, 'row')} fit the contract {made.contract.name!r}; {made.directory} on this "
        "machine has them, prepared, with a private key, which stays here, and the request.",
        f"Send {made.request} to the organiser; it holds {told} depends on rows. Read out, when asked, the "
        f"fingerprint of your key: {made.key_fingerprint}. There: fedkin federation admit DIR {made.request.name}",
    )


@site.command()
def check(
    what: Annotated[Path, argument("WHAT", "A contract (TOML), an invite, or the directory of a site.")],
    data: Annotated[Path, option("TABLE", "The site's rows, CSV or Parquet.")],
) -> None:
    """At the site: say in words whether rows fit the contract, and are enough to share sums of. Writes nothing."""
    contract, thresholds = contract_in(what)
    columns = read_columns(data)
    findings = contract.check(columns, thresholds, row_places(data, columns))
    if findings:
        print_findings(data, {"": findings})
    if any(one.refuses for one in findings):
        raise typer.Exit(WRONG_INPUT)
    say(f"{data} fits the contract {contract.name!r}; nothing was written.")


@site.command()
def accept(
    directory: Directory,
    received: Annotated[list[Path], argument("FILE...", "What came: admit, order, notice or model.")],
) -> None:
    """At the site: check what the organiser (or a site that left) sent, and keep it."""
    for path in received:
        say(Site.read(directory).accept(path))


@site.command()
def renew(directory: Directory) -> None:
    """At the site: make a new key and ask for its certificate. The old ones serve until the answer is accepted."""
    path, by_itself = Site.read(directory).renew(steps_of)
    say(f"Send {path} to the organiser; there: fedkin federation admit DIR {path.name}")
    if not by_itself:
        note("the old certificate has ended, so the organiser must ask you for the fingerprint, and say --again")


@site.command()
def leave(directory: Directory, yes: Annotated[bool, switch("--yes", "Do not ask.")] = False) -> None:
    """At the site: sign that it leaves the federation, for good."""
    if not yes:
        typer.confirm(f"{directory}: leave the federation, for good?", abort=True)
    path = Site.read(directory).leave()
    neighbours = [one.member.name for one in Site.read(directory).invite.neighbours]
    say(
        f"Send {path} to the organiser (there: fedkin federation admit DIR {path.name})"
        + (f" and to {listed(neighbours, 8)} (there: fedkin site accept SITE {path.name})." if neighbours else ".")
    )


@site.command()
def share(
    directory: Directory,
    dry_run: Annotated[bool, switch("--dry-run", "Show what would be shared, and write nothing.")] = False,
    folds: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="In how many folds to give sums, for the choice of lam; 0 for sums over all rows only. By default as "
            "many as the thresholds allow.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, option("X", "Add noise for differential privacy: less is safer and less accurate.")
    ] = None,
    delta: Annotated[float, option("X", "Probability with which that may fail.")] = 1e-5,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For many coefficients: a shorter message, with products of columns as a diagonal plus this rank.",
        ),
    ] = None,
) -> None:
    """At the site: sum up the rows in one readable, signed file; every number is shown with what it tells."""
    _show(sharing.share(directory, dry_run=dry_run, folds=folds, epsilon=epsilon, delta=delta, rank=rank))


@site.command()
def answer(
    directory: Directory,
    question: Annotated[Path, argument("FILE.ask", "What the organiser asks.")],
    dry_run: Annotated[bool, switch("--dry-run", "Show the answer, and write nothing.")] = False,
    yes: Annotated[bool, switch("--yes", "Write the answer without asking.")] = False,
) -> None:
    """At the site: show what the answer to the organiser's question would tell, and write it if you approve."""
    shown = sharing.answer(directory, question, dry_run=True)
    if not (dry_run or yes):
        _show_sums(shown)
        typer.confirm("May these numbers leave this site?", abort=True)
    _show(shown if dry_run else sharing.answer(directory, question))


@site.command()
def settings(
    directory: Directory,
    rows: Annotated[int | None, option("N", "Fewest rows.")] = None,
    rows_per_parameter: Annotated[float | None, option("X", "Fewest rows per parameter.")] = None,
    cell: Annotated[int | None, option("N", "Fewest rows of a level or class.")] = None,
    pair: Annotated[int | None, option("N", "Fewest rows of a pair of levels of two features.")] = None,
    effective_rows: Annotated[float | None, option("X", "Fewest rows that carry the weight in an answer.")] = None,
    epsilon: Annotated[float | None, option("X", "Most epsilon of all messages with noise together.")] = None,
    share_result: Annotated[
        bool | None, switch("--share-result/--keep-result", "Whether the organiser may have the parameters.")
    ] = None,
    below_minima: Annotated[
        bool | None, switch("--below-minima/--above-minima", "Whether the hard minima of Fedkin do not hold.")
    ] = None,
    confirm: Annotated[bool, switch("--confirm", "site.toml was changed by hand, and is right.")] = False,
) -> None:
    """At the site: show or change its own rules, which may be stricter than the contract's, not laxer."""
    given = {"rows": rows, "rows_per_parameter": rows_per_parameter, "cell": cell, "effective_rows": effective_rows}
    given |= {"pair": pair, "epsilon": epsilon, "share_result": share_result, "below_minima": below_minima}
    changed = {name: value for name, value in given.items() if value is not None}
    found = change_settings(directory, confirmed=confirm, **changed)
    say(*(f"{name} = {str(value).lower()}" for name, value in msgspec.structs.asdict(found).items()))


@site.command()
def run(
    directory: Directory,
    echo: Annotated[bool, switch("--echo/--no-echo", "Log to standard error, too.")] = True,
    listen: Listen = None,
    follow: Annotated[
        Path | None, option("PATH", "Take in rows that arrive: a table that grows, or a directory of files.")
    ] = None,
    first_pull: Annotated[float, option("SECONDS", "To the first question for a late theta.")] = 0.25,
    last_pull: Annotated[float, option("SECONDS", "Longest time between two questions.")] = 5.0,
    complain: Annotated[float, option("SECONDS", "To the first log line about a wait.")] = 5.0,
    give_up: GiveUp = 3600.0,
    linger: Annotated[float, option("SECONDS", "Longest stay for neighbours after the end.")] = 600.0,
    gather: Annotated[float, option("SECONDS", "A leader's wait for sites before round 1.")] = 60.0,
    deadline: Annotated[float, option("SECONDS", "A leader's wait for answers in a round.")] = 5.0,
) -> None:
    """At the site: do the rounds with its neighbours, which end with a model; after a crash the same goes on."""
    patience = Patience(first_pull, last_pull, complain, give_up, linger, gather, deadline)
    become(directory, patience, echo=echo, listen=listen, follow=follow)


@site.command()
def select(directory: Directory, give_up: GiveUp = 3600.0, listen: Listen = None) -> None:
    """At the site: test its edges together with its neighbours, before the rounds, if the contract says so."""
    Patience(give_up=give_up)  # raises for what is no time
    options = [] if listen is None else ["--listen", listen]
    raise SystemExit(select_main([str(directory), "--give-up", str(give_up), *options]))


@site.command()
def publish(directory: Directory) -> None:
    """At the site: sign its own model for the organiser, after rounds, if the site's rules allow it."""
    dropped: frozenset[str] = frozenset()
    if (directory / SELECTION).exists():
        plan = site_plan(directory)
        dropped = frozenset(plan.name(number) for number in read_selection(directory, plan))
    path = Site.read(directory).publish(dropped)
    say(
        f"{path} has the coefficients of this site and its number of rows, and is signed.",
        f"Send it to the organiser; there: fedkin federation gather DIR {path.name} --out MODEL",
    )


@site.command()
def ledger(
    directory: Directory,
    withdrawn: Annotated[
        str | None, option("REASON", "Record that all that left has been withdrawn: other rows may be shared then.")
    ] = None,
) -> None:
    """At the site: show what has left it, when, to whom, and from which rows."""
    found = Site.read(directory)
    if withdrawn is not None:
        rows = found.rows()
        found.ledger.record(found.entry("withdrawn", rows, note=withdrawn), rows)
    entries = found.ledger.entries()
    for one in entries:
        budget = "" if one.epsilon is None else f", epsilon {one.epsilon:g}, delta {one.delta:g}"
        say(
            f"{one.time[:19]}  {one.what:9}  to {one.to}: {one.note}{budget} "
            f"(rows {one.rows[:8]}, contract {one.contract[:8]})"
        )
    if not entries:
        say("Nothing has left this site.")


@site.command()
def status(
    directory: EitherDirectory,
    metrics: Annotated[bool, switch("--metrics", "Print the text format of Prometheus.")] = False,
    as_json: Json = False,
) -> None:
    """At the site: show how far the rounds are."""
    lines = overview(places_in(directory))
    if metrics:
        typer.echo(prometheus(lines), nl=False)
    elif as_json:
        print_json({"sites": [asdict(line) for line in lines]})
    else:
        output().print(status_table(lines))
        for line in lines:
            if line.why:
                note(f"{line.name}: {line.why}")


@site.command()
def stop(directory: EitherDirectory) -> None:
    """At the site: stop a run; the same command continues it later."""
    stopped = stop_all(directory)
    say(f"asked to stop: {', '.join(stopped)}" if stopped else "no site is running here")


def _show(shared: Shared) -> None:
    """Show every number; then what to send to whom."""
    _show_sums(shared)
    if shared.path is None:
        say("Nothing was written.")
        return
    say(
        f"{shared.path} on this machine has these numbers and is signed. Nothing else leaves this site.",
        f"Send it to the organiser, for the folder summaries (message {shared.round} of this site).",
    )


def _show_sums(shared: Shared) -> None:
    """Show every number, what it is and what it tells."""
    for told in describe_summary(shared.summary):
        say(f"{told.name}: {told.what}", f"  tells {told.tells}")
        names = shared.summary.feature_names if told.name.startswith("column") else shared.summary.parameter_names
        if not told.parts:
            _show_numbers(told.numbers, names)
        elif not isinstance(told.numbers[0], list):
            pairs = zip(told.parts, told.numbers, strict=True)
            say("    " + ", ".join(f"{part}: {number:.6g}" for part, number in pairs))
        else:
            for part, numbers in zip(told.parts, told.numbers, strict=True):
                say(f"    {part}:")
                _show_numbers(numbers, names)


def _show_numbers(numbers: object, names: Sequence[str]) -> None:
    """A line for each name, where there is an entry for each of them."""
    if not isinstance(numbers, list) or len(numbers) != len(names):
        say(f"    {numbers}")
        return
    for name, entry in zip(names, numbers, strict=True):
        row = entry if isinstance(entry, list) else [entry]
        say(f"    {name}  " + "  ".join(f"{number:.6g}" for number in row))
