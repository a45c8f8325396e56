"""The table of commands and their shared parts: consoles, notes, error messages, and a clean end after Ctrl-C."""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from fedkin import __version__
from fedkin.errors import FedkinError, FedkinWarning, ParameterError, SolverError, spelled

if TYPE_CHECKING:  # the program starts without them
    from fedkin.data import Finding, Schema


OK, SOLVER_FAILED, WRONG_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 3, 130

#: Python arguments that have another name on the command line.
NAMES = {"fit_intercept": "intercept", "n_jobs": "jobs", "cv_folds": "folds", "cv_rule": "one_se"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
HELP_ALL = "--help-all"
_LONGEST_WORD = 16  # that is never broken in a narrow table
_SHOWN_PER_KIND = 3  # warnings of one kind that are printed


class Interrupted(BaseException):
    """Ctrl-C as an exception other than KeyboardInterrupt, which solvers catch to return their last iterate."""


class StopRequested(Interrupted):
    """A request from another command to stop, such as ``fedkin site stop``."""


def flag(name: str, value: object = None) -> str:
    """Return the command-line spelling of a Python argument."""
    option = "--" + NAMES.get(name, name).replace("_", "-")
    return option if value is None else f"{option} {value}"


# --- output -----------------------------------------------------------------------------------------------------------


def output() -> Console:
    """Return the console for results, with markup off, since site ids may look like markup."""
    return Console(markup=False, highlight=False, emoji=False)


def messages() -> Console:
    """Return the console for progress, notes and errors: standard error."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a JSON document on standard output; numbers that are not finite are null."""
    text = msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=2)
    sys.stdout.write(text.decode() + "\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)


def note(text: str, console: Console | None = None) -> None:
    """Print a note on standard error, or on the console of a live view."""
    (console or messages()).print(Text.assemble(("note: ", "yellow"), text), soft_wrap=True)


def say(*lines: str) -> None:
    """Print sentences on standard output; only the terminal wraps them."""
    for line in lines:
        output().print(line, soft_wrap=True)


def ask_fingerprint(given: str | None, words: str, unasked: bool) -> str | None:
    """Return the given or typed fingerprint; None if prompts are disabled."""
    if given is not None or unasked:
        return given
    if not sys.stdin.isatty():
        raise ParameterError(
            "there is no terminal to ask for a fingerprint: give --fingerprint HEX, or --yes to skip it"
        )
    while not (typed := str(typer.prompt(words, default="", show_default=False)).strip()):
        note("type it, or press Ctrl-C: nothing has been created")
    return typed


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, one per line, without wrapping, so that paths stay whole."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        output().print(Text.assemble((f"{name:<{width}}  ", "bold"), value), soft_wrap=True)


def plain_table(*columns: str, numbers_from: int = 1) -> Table:
    """Return a table without borders; columns from ``numbers_from`` on are right-aligned."""
    table = _PlainTable(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(Text(name), justify="right" if number >= numbers_from else "left", no_wrap=number == 0)
    return table


class _PlainTable(Table):
    """A table that never truncates numbers: narrow terminals wrap its headers, then its text."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max(cell_len(str(cell)) for cell in (one.header, *one.cells)) for one in self.columns]
        if sum(widths) + 3 * len(widths) > options.max_width:
            self.padding = (0, 0, 0, 1)
            for column in self.columns:
                column.no_wrap, column.overflow = False, "fold"
                if column.justify == "right":
                    cells = [*str(column.header).split(), *map(str, column.cells)]
                    column.width = max(map(cell_len, cells))
                else:
                    words = [word for cell in column.cells for word in str(cell).split()]
                    column.min_width = min(max(map(cell_len, words), default=0), _LONGEST_WORD)
            needed = sum((column.width or column.min_width or 0) + 1 for column in self.columns)
            options = options.update(width=max(needed, options.max_width))
        yield from super().__rich_console__(console, options)


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """Add a row of plain text; ids are never parsed as markup."""
    table.add_row(*(Text(cell, style=style) for cell in cells))


def print_rows(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    numbers_from: int = 1,
    styles: Sequence[str] = (),
) -> None:
    """Print a table with a title, whose rows may have styles."""
    table = plain_table(*heads, numbers_from=numbers_from)
    for cells, style in zip(rows, styles or [""] * len(rows), strict=True):
        add_row(table, *cells, style=style)
    if title:
        output().print(f"\n{title}", style="bold")
    output().print(table, crop=False)


def print_schema(schema: Schema, title: str = "") -> None:
    """Print the columns of a schema as a table, with centre and scale if agreed on."""
    rows = []
    for column in schema.columns:
        scaled = column.kind != "category" and not column.knots and column is not schema.target
        numbers = [f"{one:g}" if scaled else "" for one in column.centre_and_scale]
        role = " (target)" if column is schema.target else " (event)" if column.name == schema.event else ""
        rows.append([column.name, column.description + role, *numbers])
    if schema.offset is not None:
        rows.append([schema.offset, f"number ({'exposure' if schema.log_offset else 'offset'})", "", ""])
    heads = ("column", "expected", "centre", "scale") if schema.agreed else ("column", "description")
    print_rows(heads, [cells[: len(heads)] for cells in rows], title, numbers_from=2)


def print_findings(data: Path, found: Mapping[str, Sequence[Finding]]) -> None:
    """Print the findings about a table by site: errors first, then notes."""
    shown = [(site, one) for site, some in found.items() for one in some]
    shown.sort(key=lambda pair: not pair[1].refuses)
    refused, first = sum(one.refuses for _, one in shown), 0 if any(site for site, _ in shown) else 1
    states = {True: "must be fixed", False: "remark"}
    rows = [(site, one.column or "(table)", one.text, states[one.refuses]) for site, one in shown]
    if shown:
        styles = ["" if one.refuses else "dim" for _, one in shown]
        heads = ("site", "column", "finding", "")
        print_rows(heads[first:], [cells[first:] for cells in rows], numbers_from=9, styles=styles)
    verdict = f"{refused} to fix before the rows can be used" if refused else "fits"
    style = "red" if refused else "green"
    output().print(f"{data}: {verdict}{', with remarks' if shown and not refused else ''}", style=style, soft_wrap=True)


# --- errors, warnings, signals ----------------------------------------------------------------------------------------


def guarded(run: Callable[[], None]) -> int:
    """Run a command; turn expected errors into one line on standard error and an exit code."""
    try:
        with _raising_once([signal.SIGINT]), _warnings_as_notes(), spelled(flag):
            run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK if end.code is None else WRONG_INPUT
    except StopRequested:
        messages().print("stopped on request", style="yellow")
        return STOPPED
    except (Interrupted, KeyboardInterrupt):
        messages().print("interrupted: no incomplete files were left", style="yellow")
        return INTERRUPTED
    except FedkinError as error:
        _print_error(str(error))
        return SOLVER_FAILED if isinstance(error, SolverError) else WRONG_INPUT
    except OSError as error:
        _print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return WRONG_INPUT
    return OK


def _print_error(text: str) -> None:
    messages().print(Text.assemble(("error: ", "bold red"), (text, "red")), soft_wrap=True)


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    seen: Counter[str] = Counter()
    said = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if str(message) in said:
            return
        said.add(str(message))
        seen[category.__name__] += 1
        if seen[category.__name__] <= _SHOWN_PER_KIND:
            note(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", FedkinWarning)
        warnings.showwarning = show
        try:
            yield
        finally:  # a command ends with SystemExit
            for kind, times in seen.items():
                if times > _SHOWN_PER_KIND:
                    note(f"{times - _SHOWN_PER_KIND} more of the kind {kind}")


@contextmanager
def stopping_early(wanted: bool) -> Iterator[None]:
    """Let the first Ctrl-C raise KeyboardInterrupt, if wanted, so a step ends with its last result."""
    if not wanted:
        yield
        return
    came: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        came.append(number)
        if len(came) > 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise Interrupted
        raise KeyboardInterrupt

    with handling([signal.SIGINT], interrupt):
        try:
            yield
        except KeyboardInterrupt:  # no result to keep
            raise Interrupted from None


@contextmanager
def _raising_once(signals: Sequence[signal.Signals], on_request: signal.Signals | None = None) -> Iterator[None]:
    """Let these signals raise `Interrupted`, and one of them `StopRequested`."""

    def interrupt(number: int, frame: object) -> None:
        for one in {*signals, signal.SIGINT}:
            signal.signal(one, signal.SIG_IGN)  # only once: clean-up must not be interrupted again
        raise StopRequested if number == on_request else Interrupted

    with handling(signals, interrupt):
        yield


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Delay handled signals until the end of this context, for work that must not be interrupted.

    This includes imports, some of which swallow every exception.
    """
    came: list[int] = []
    heeded = [one for one in _SIGNALS if callable(signal.getsignal(one))]
    with handling(heeded, lambda number, frame: came.append(number)):
        yield
    if came and callable(handler := signal.getsignal(came[0])):
        handler(came[0], None)


@contextmanager
def handling(signals: Sequence[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install ``handler`` for these signals within this context; do nothing outside the main thread."""
    before: dict[signal.Signals, Any] = {}
    try:
        for one in signals:
            before[one] = signal.signal(one, handler)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for one, previous in before.items():
            signal.signal(one, previous)


def ended_like_ctrl_c(on_request: signal.Signals | None = None) -> AbstractContextManager[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, and the signal ``on_request`` as a request to stop.

    This is for commands that start processes in their own sessions, which would otherwise keep running.
    """
    # keep ignored signals ignored, as under nohup
    heeded = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    return _raising_once(heeded if on_request is None else [*heeded, on_request], on_request)


if TYPE_CHECKING:
    Place = Path
else:
    Place = object  # a path or an address; typer would make a plain `Path` of it


def option(metavar: str, text: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Return an option that takes a value."""
    return typer.Option(metavar=metavar, help=text, parser=parser)


def argument(metavar: str, text: str, parser: Callable[[str], Any] | None = None) -> Any:
    """Return an argument."""
    return typer.Argument(metavar=metavar, help=text, parser=parser)


def switch(names: str, text: str) -> Any:
    """Return an option without a value, such as ``--yes`` or ``--echo/--no-echo``."""
    return typer.Option(names, help=text)


Json = Annotated[bool, switch("--json", "Print JSON instead of tables.")]
Echo = Annotated[bool, switch("--echo/--no-echo", "Log to standard error, too.")]
GiveUp = Annotated[float, option("SECONDS", "Maximum wait for another machine, after which this one ends.")]
Linger = Annotated[float, option("SECONDS", "Maximum time to stay connected for others after the end.")]
Gather = Annotated[float, option("SECONDS", "Maximum wait of a leader for sites before round 1.")]
Deadline = Annotated[float, option("SECONDS", "Maximum wait of a leader for answers in a round.")]


class Command(NamedTuple):
    """An entry in the table of commands: the module that defines it, and its help."""

    module: str
    help: str


COMMANDS = {
    "fit": Command("fit", "Fit a model for every site of a table, and compare it with simpler ones on held-out rows."),
    "predict": Command("predict", "Predict rows with a fitted model, each with the model of its site."),
    "inspect": Command("models", "Show a fitted model: groups, graph, coefficients, and notes on single sites."),
    "report": Command("models", "Write the report of a model: one HTML page that works offline."),
    "watch": Command("running", "Follow a federation in the browser."),
    "demo": Command(
        "demo",
        "Generate sites with a partly wrong graph, and compare how close each method comes to the truth.",
    ),
    "study": Command("study", "Run a study: figure, table, page and the underlying rows."),
    "federation": Command(
        "federation", "Organise a federation: draft a contract and admit sites, without seeing any rows."
    ),
    "site": Command("site", "Take part in a federation: check rows, join, share, run. Rows stay where they are."),
}

#: Options that ``--help`` of a command shows; ``--help-all`` shows all.
MOST_USED = {"fit": {"site", "target", "loss", "features", "drop", "missing", "fixed", "graph", "out", "report"}}

#: Examples in the help of commands, one per line.
EXAMPLES = {
    "fit": "fedkin fit patients.csv --site hospital --target outcome --report page.html\n"
    "fedkin fit visits.csv --site hospital --target visits --loss poisson --drop id,date",
    "predict": "fedkin predict fedkin-model new-patients.csv --out predicted.csv",
    "inspect": "fedkin inspect fedkin-model",
    "report": "fedkin report fedkin-model --out page.html",
    "watch": "fedkin watch trial",
    "demo": "fedkin demo --out demo-report",
    "study": "fedkin study kin --quick",
    "federation draft": "fedkin federation draft example.csv --target pressure --out heart.toml",
    "federation check": "fedkin federation check heart.toml --data example.csv",
    "federation new": "fedkin federation new heart.toml --sites sites.csv --graph edges.csv",
    "federation invite": "fedkin federation invite heart north",
    "federation admit": "fedkin federation admit heart north.request",
    "federation renew": "fedkin federation renew heart",
    "federation order": "fedkin federation order heart --lam 0.02",
    "federation expel": "fedkin federation expel heart north",
    "federation deliver": "fedkin federation deliver heart model",
    "federation gather": "fedkin federation gather heart north.model south.model --out model",
    "federation status": "fedkin federation status heart",
    "federation run": "fedkin federation run heart",
    "federation simulate": "fedkin federation simulate heart.toml --data all.csv --site hospital --out trial",
    "site join": "fedkin site join north.invite --data patients.csv",
    "site check": "fedkin site check north --data patients.csv",
    "site accept": "fedkin site accept north north.admit",
    "site renew": "fedkin site renew north",
    "site leave": "fedkin site leave north",
    "site share": "fedkin site share north",
    "site answer": "fedkin site answer north north.ask",
    "site settings": "fedkin site settings north --rows 50",
    "site run": "fedkin site run north",
    "site select": "fedkin site select north",
    "site publish": "fedkin site publish north",
    "site ledger": "fedkin site ledger north",
    "site status": "fedkin site status north",
    "site stop": "fedkin site stop north",
}


class _Group(TyperGroup):
    """A group of commands whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        for one in (shown := super().get_params(ctx)):
            one.metavar = "" if getattr(one, "is_flag", False) else one.metavar
        return shown


class _Command(TyperCommand):
    """A command whose help begins with examples and shows the most used options."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, with arguments as they are named below it."""
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        names = [(one.metavar or str(one.name).upper(), one.required) for one in arguments]
        return ["[OPTIONS]", *(name if needed or name[0] == "[" else f"[{name}]" for name, needed in names)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        name = ctx.command_path.partition(" ")[2]
        first, *rest = (" ".join(part.split()) for part in cleandoc(self.help or "").split("\n\n"))
        examples = "\n".join(f"[bold]{line}[/bold]" for line in EXAMPLES[name].splitlines())
        self.help = "\n\n".join([first, examples, *rest])
        shown = None if HELP_ALL in (ctx.find_root().obj or ()) else MOST_USED.get(name)
        for one in self.get_params(ctx):
            one.metavar = "" if getattr(one, "is_flag", False) else one.metavar
            if shown is not None and one.param_type_name == "option" and one.name not in (*shown, "help"):
                one.hidden = True  # type: ignore[attr-defined]
        if shown is not None:
            self.epilog = f"All options: [bold]fedkin {name} {HELP_ALL}[/bold]"
        super().format_help(ctx, formatter)


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the program with the called command; the others have only their name and help."""
    app = typer.Typer(
        cls=_Group,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Fit a model for every site, partially pooled between similar sites, while rows stay at the sites.",
        epilog="New here? [bold]fedkin demo[/bold] takes a few seconds.",
    )
    app.callback()(_root)
    for name, command in COMMANDS.items():
        if name not in arguments[:1]:
            app.command(name, help=command.help)(_not_loaded)
            continue
        found = getattr(import_module(f"fedkin.cli.{command.module}"), name)
        if isinstance(found, typer.Typer):
            for one in found.registered_commands:
                one.cls = _Command
            app.add_typer(found, name=name, help=command.help, cls=_Group)
        else:
            # fit reports surplus arguments itself
            settings = {"allow_extra_args": True} if name == "fit" else None
            app.command(name, cls=_Command, context_settings=settings)(found)
    return app


def _not_loaded() -> None: ...


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedkin {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...
