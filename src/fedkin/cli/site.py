"""Commands of a site in a federation: ``fedkin site ...``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fedkin._base import count, listed
from fedkin.cli.console import (
    WRONG_INPUT,
    Deadline,
    Echo,
    Gather,
    GiveUp,
    Json,
    Linger,
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
from fedkin.errors import ParameterError
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
from fedkin.federate.ledger import LEDGER, Entry, read_ledger
from fedkin.federate.messages import Request
from fedkin.federate.program import select_main
from fedkin.federate.sharing import Shared
from fedkin.federate.trust import fingerprint as key_fingerprint

site = typer.Typer(no_args_is_help=True)

Directory = Annotated[Path, argument("DIR", "The site's directory (fedkin site join).")]
EitherDirectory = Annotated[Path, argument("DIR", "A site's directory, or a directory of several.")]
DryRun = Annotated[bool, switch("--dry-run", "Show what would be shared without writing it.")]
YesWrite = Annotated[bool, switch("--yes", "Write the file without asking, for automation.")]
Delta = Annotated[float, option("X", "Delta of differential privacy.")]
Listen = Annotated[
    str | None, option("HOST:PORT", "Address to listen on, if behind NAT or in a container. [the address in the list]")
]


@site.callback()
def _root() -> None: ...


@site.command()
def join(
    invite: Annotated[Path, argument("FILE.invite", "The invite that the organiser sent.")],
    data: Annotated[Path, option("TABLE", "The site's rows, CSV or Parquet.")],
    into: Annotated[Path | None, option("DIR", "The site's directory, to be created. [the site's name]")] = None,
    fingerprint: Annotated[
        str | None, option("HEX", "The authority's fingerprint, as the organiser reads it out.")
    ] = None,
    below_minima: Annotated[
        bool, switch("--below-minima", "Apply the contract's thresholds only: single rows may become identifiable.")
    ] = False,
    yes: Annotated[bool, switch("--yes", "Skip the prompt for the fingerprint, for automation.")] = False,
) -> None:
    """Check the rows against the contract, create a private key, and write the request."""
    fingerprint = ask_fingerprint(fingerprint, "Fingerprint of the authority, as the organiser reads it out", yes)
    made, remarks = Site.join(invite, data, into, steps=steps_of, expected=fingerprint, below_minima=below_minima)
    for remark in remarks:
        note(str(remark))
    if made.contract.rounds.batch_size is not None and not made.settings.below_minima:
        note("rounds in batches reveal single rows, so site run refuses this contract; site share does not need them")
    if fingerprint is None:
        note(
            f"the invite is signed by the authority with the fingerprint {key_fingerprint(made.authority)}; before you "
            "send anything, ask the organiser whether that is right (or join again with --fingerprint)"
        )
    told = "no number that" if made.contract.rounds.placement == "peer" else "step numbers, and nothing else which"
    say(
        f"{count(made.rows().n_samples, 'row')} fit the contract {made.contract.name!r}; {made.directory} on this "
        "machine has the prepared rows, the request, and a private key that never leaves.",
        f"Send {made.request} to the organiser; it holds {told} depends on rows. When asked, read out the "
        f"fingerprint of your key: {made.key_fingerprint}. The organiser runs: fedkin federation admit DIR "
        f"{made.request.name}",
    )


@site.command()
def check(
    what: Annotated[Path, argument("WHAT", "A contract (TOML), an invite, or the directory of a site.")],
    data: Annotated[
        Path | None, option("TABLE", "The site's rows, CSV or Parquet. Without rows, the contract is shown.")
    ] = None,
) -> None:
    """Show the contract, or check whether rows fit it and suffice for sharing sums. Writes nothing."""
    contract, thresholds = contract_in(what)
    if data is None:
        typer.echo(contract.to_toml(), nl=False)
        return
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
    received: Annotated[list[Path], argument("FILE...", "The received file: admit, order, notice or model.")],
) -> None:
    """Check and store a file from the organiser (or from a site that left)."""
    for path in received:
        say(Site.read(directory).accept(path))


@site.command()
def renew(directory: Directory) -> None:
    """Create a new key and request its certificate. The old ones stay valid until then."""
    found = Site.read(directory)
    path, by_itself = found.renew(steps_of)
    asked = found.invite.read(path, Request)[0].request.encode()
    say(
        f"Send {path} to the organiser, who runs: fedkin federation admit DIR {path.name}",
        f"When asked, read out the fingerprint of the new key: {key_fingerprint(asked)}",
    )
    if not by_itself:
        note("the old certificate has expired, so the organiser must use --again")


@site.command()
def leave(directory: Directory, yes: Annotated[bool, switch("--yes", "Do not ask for confirmation.")] = False) -> None:
    """Leave the federation permanently, with a signed notice."""
    if not yes:
        typer.confirm(f"{directory}: leave the federation permanently?", abort=True)
    found = Site.read(directory)
    path, neighbours = found.leave(), [one.member.name for one in found.invite.neighbours]
    say(
        f"Send {path} to the organiser (who runs: fedkin federation admit DIR {path.name})"
        + (f" and to {listed(neighbours, 8)} (which run: fedkin site accept SITE {path.name})." if neighbours else ".")
    )


@site.command()
def share(
    directory: Directory,
    dry_run: DryRun = False,
    folds: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of folds with separate sums, to choose lam; 0 for sums over all rows only. By default as "
            "many as the thresholds allow.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, option("X", "Add noise for differential privacy: a smaller epsilon is safer and less accurate.")
    ] = None,
    delta: Delta = 1e-5,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For many coefficients: a shorter message, with cross-products as a diagonal plus this rank.",
        ),
    ] = None,
    yes: YesWrite = False,
) -> None:
    """Summarise the rows in one signed file. Shows each number and what it reveals; in a terminal, asks
    for approval."""
    make = partial(sharing.share, directory, folds=folds, epsilon=epsilon, delta=delta, rank=rank)
    _note_lost_ledger(directory)
    _share(make, dry_run, yes)


@site.command()
def answer(
    directory: Directory,
    question: Annotated[Path, argument("FILE.ask", "The organiser's query.")],
    dry_run: DryRun = False,
    yes: YesWrite = False,
) -> None:
    """Show what the answer to the organiser's query reveals, and write it if you approve."""
    _note_lost_ledger(directory)
    _share(partial(sharing.answer, directory, question), dry_run, yes)


@site.command()
def settings(
    context: typer.Context,
    directory: Directory,
    rows: Annotated[int | None, option("N", "Minimum number of rows.")] = None,
    rows_per_parameter: Annotated[float | None, option("X", "Minimum number of rows per parameter.")] = None,
    cell: Annotated[int | None, option("N", "Minimum number of rows with a level or class.")] = None,
    pair: Annotated[int | None, option("N", "Minimum number of rows with a pair of levels.")] = None,
    effective_rows: Annotated[float | None, option("X", "Minimum effective number of rows in an answer.")] = None,
    epsilon: Annotated[float | None, option("X", "Maximum total epsilon of all messages with noise.")] = None,
    share_result: Annotated[
        bool | None, switch("--share-result/--keep-result", "Whether to share the parameters with the organiser.")
    ] = None,
    below_minima: Annotated[
        bool | None, switch("--below-minima/--above-minima", "Whether to waive Fedkin's hard minima.")
    ] = None,
    district: Annotated[
        str | None, option("NAME", "District of this site, if the contract asks for it; sent with summaries.")
    ] = None,
    confirm: Annotated[bool, switch("--confirm", "Confirm a manual change to site.toml.")] = False,
) -> None:
    """Show or change the site's own rules, which may be stricter than the contract's but not laxer."""
    rules = {name: value for name, value in context.params.items() if name not in ("directory", "confirm")}
    changed = {name: value for name, value in rules.items() if value is not None}
    found = change_settings(directory, confirmed=confirm, **changed)
    say(*(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in msgspec.structs.asdict(found).items()))


@site.command()
def run(
    directory: Directory,
    echo: Echo = True,
    listen: Listen = None,
    follow: Annotated[
        Path | None, option("PATH", "Add rows as they arrive: a growing table, or a directory of files.")
    ] = None,
    epsilon: Annotated[
        float | None, option("X", "Add noise to the site's sums for differential privacy, and run with these sums.")
    ] = None,
    delta: Delta = 1e-5,
    first_pull: Annotated[float, option("SECONDS", "Time before the first request for a late message.")] = 0.25,
    last_pull: Annotated[float, option("SECONDS", "Maximum time between two requests.")] = 5.0,
    complain: Annotated[float, option("SECONDS", "Time before a wait is logged.")] = 5.0,
    give_up: GiveUp = 3600.0,
    linger: Linger = 600.0,
    gather: Gather = 60.0,
    deadline: Deadline = 5.0,
) -> None:
    """Run the rounds with the neighbours and write a model; the same command continues after a crash."""
    patience = Patience(first_pull, last_pull, complain, give_up, linger, gather, deadline)
    if epsilon is not None:
        sharing.share_with_neighbours(directory, epsilon, delta)
    become(directory, patience, echo=echo, listen=listen, follow=follow)


@site.command()
def select(directory: Directory, give_up: GiveUp = 3600.0, listen: Listen = None) -> None:
    """Test edges with the neighbours before the rounds, if the contract asks for it."""
    Patience(give_up=give_up)  # raises for an invalid time
    options = [] if listen is None else ["--listen", listen]
    raise SystemExit(select_main([str(directory), "--give-up", str(give_up), *options]))


@site.command()
def publish(directory: Directory) -> None:
    """Sign the site's model for the organiser after the rounds, if the site's rules allow it."""
    dropped: frozenset[str] = frozenset()
    if (directory / SELECTION).exists():
        plan = site_plan(directory)
        dropped = frozenset(plan.name(number) for number in read_selection(directory, plan))
    _note_lost_ledger(directory)
    path = Site.read(directory).publish(dropped)
    say(
        f"{path}, which is signed, has the coefficients of this site and its number of rows.",
        f"Send it to the organiser, who runs: fedkin federation gather DIR {path.name} --out MODEL",
    )


@site.command()
def ledger(
    directory: Directory,
    withdrawn: Annotated[
        str | None, option("REASON", "Record that everything sent was withdrawn; other rows may then be shared.")
    ] = None,
) -> None:
    """Show what was sent, when, to whom, and from which rows."""
    _note_lost_ledger(directory)
    found = Site.read(directory)
    if withdrawn is not None:
        found.record("withdrawn", found.rows(), note=withdrawn)
    entries = found.ledger.entries()
    say(*(map(_format_entry, entries) if entries else ["Nothing has left this site."]))


@site.command()
def status(
    directory: EitherDirectory,
    metrics: Annotated[bool, switch("--metrics", "Print in Prometheus text format.")] = False,
    as_json: Json = False,
) -> None:
    """Show the progress of the rounds, and what each site sent last."""
    lines = overview(places_in(directory))
    if metrics:
        typer.echo(prometheus(lines), nl=False)
    elif as_json:
        told = [msgspec.structs.asdict(line) | {"up": len(line.up)} for line in lines]
        print_json({"sites": [{name: value for name, value in one.items() if name != "shares"} for one in told]})
    else:
        output().print(status_table(lines))
        for line in lines:
            if line.why:
                note(f"{line.name}: {line.why}")
        for place in places_in(directory):
            if entries := read_ledger(place / LEDGER):
                say(f"{place.name} sent last: {_format_entry(entries[-1])}; everything: fedkin site ledger {place}")


@site.command()
def stop(directory: EitherDirectory) -> None:
    """Stop a run; fedkin site run continues it later."""
    stopped = stop_all(directory)
    say(f"asked to stop: {', '.join(stopped)}" if stopped else "no site is running here")


def _note_lost_ledger(directory: Path) -> None:
    """Say that the ledger of a directory is missing, if its second copy has entries."""
    found = Site.read(directory).ledger
    if not (directory / LEDGER).exists() and (entries := found.entries()):
        note(
            f"{directory / LEDGER} is missing: its second copy, in {found.folder}, counts instead and has "
            f"{count(len(entries), 'line')}"
        )


def _format_entry(one: Entry) -> str:
    budget = "" if one.epsilon is None else f", epsilon {one.epsilon:g}, delta {one.delta:g}"
    rows = f"(rows {one.rows[:8]}, contract {one.contract[:8]})"
    return f"{one.time[:19]}  {one.what:9}  to {one.to}: {one.note}{budget} {rows}"


def _approve(shared: Shared) -> None:
    """Show every number, and end the command unless they may leave the site."""
    _show_sums(shared)
    if not sys.stdin.isatty():
        raise ParameterError("there is no terminal to ask for approval: add --yes to write the file without asking")
    typer.confirm("May these numbers leave this site?", abort=True)


def _share(make: Callable[..., Shared], dry_run: bool, yes: bool) -> None:
    """Write a file if the user approves of its numbers, each of which is shown; then say what to send to whom."""
    approve = None if yes or dry_run else _approve
    shared = make(dry_run=dry_run, approve=approve)
    if approve is None or shared.path is None:  # else they were shown to ask for approval
        _show_sums(shared, final=shared.path is not None)
    if shared.path is None:
        say("Nothing was written.")
        return
    if shared.before:
        note(
            f"exactly these numbers were written for the organiser before, on {shared.before}: they reveal nothing new"
        )
    say(
        f"{shared.path} on this machine has these numbers and is signed. Nothing else is sent.",
        f"Send it to the organiser, for the folder summaries (message {shared.round} of this site).",
    )


def _show_sums(shared: Shared, *, final: bool = True) -> None:
    """Show every number, what it is and what it reveals; those of a dry run are not ``final`` if they have noise."""
    rows, size = int(shared.summary.count.sum()), len(json.dumps(shared.summary.to_plain())) / 1000
    say(f"Message {shared.round} of this site, about {count(rows, 'row')}: {size:,.1f} kB of numbers, all shown here.")
    if shared.summary.privacy is not None and not final:
        say("The noise shown here is an example: other noise is drawn when the summary is written, and shown then.")
    if shared.summary.privacy is None:
        say(
            "These sums are exact, and exact sums are not anonymous: rows can be computed back from those of small "
            "groups or of whole numbers. Share them under a data agreement only, or add noise with --epsilon."
        )
    say("Columns are centred and scaled as in the contract.")
    if shared.district:
        say(f"district: {shared.district}", "  reveals the site's district, which the contract asks for")
    for told in describe_summary(shared.summary):
        say(f"{told.name}: {told.what}", f"  reveals {told.tells}")
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
    """Print a line for each name, if there is an entry for each."""
    if not isinstance(numbers, list) or len(numbers) != len(names):
        say(f"    {numbers}")
        return
    for name, entry in zip(names, numbers, strict=True):
        row = entry if isinstance(entry, list) else [entry]
        say(f"    {name}  " + "  ".join(f"{number:.6g}" for number in row))
