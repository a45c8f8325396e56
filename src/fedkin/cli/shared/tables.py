"""The tables and facts that commands print: plain text in few lines."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedkin.cli.shared.console import output
from fedkin.data import Schema

MOST_GROUPS = 12  # groups that are listed with their members
_ROOM = 72  # characters for the members of a group


def schema_table(schema: Schema) -> Table:
    """The columns of a schema, in words; centre and scale where they were agreed on."""
    learned = not schema.agreed
    heads = ("column", "what it is") if learned else ("column", "what it must be", "centre", "scale")
    table = plain_table(*heads, numbers_from=2)
    for column in schema.columns:
        centre, scale = column.centre_and_scale
        scaled = column.kind != "category" and column is not schema.target
        numbers = (f"{centre:g}", f"{scale:g}") if scaled else ("", "")
        words = column.description + (" (target)" if column is schema.target else "")
        add_row(table, column.name, words, *(() if learned else numbers))
    if schema.offset is not None:
        add_row(table, schema.offset, "number (offset)", *(() if learned else ("", "")))
    return table


def plain_table(*columns: str, numbers_from: int = 1) -> Table:
    """A table without much ink; columns from `numbers_from` on are aligned to the right."""
    table = _PlainTable(box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(Text(name), justify="right" if number >= numbers_from else "left", no_wrap=number == 0)
    return table


class _PlainTable(Table):
    """A table whose numbers are never cut: where there is little room, headers are folded, then text."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max(cell_len(str(cell)) for cell in (one.header, *one.cells)) for one in self.columns]
        if sum(widths) + 3 * len(widths) > options.max_width:
            for column in self.columns:
                column.no_wrap, column.overflow = False, "fold"
                if column.justify == "right":
                    cells = [*str(column.header).split(), *map(str, column.cells)]
                    column.width = max(map(cell_len, cells))
        yield from super().__rich_console__(console, options)


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """A row of plain text: ids are never taken for markup."""
    table.add_row(*(Text(cell, style=style) for cell in cells))


def rounded(value: float | str | None, digits: int = 2, sign: bool = False) -> str:
    """A number with so many digits that count, "-" where there is none; an exponent only where it saves space.

    Examples
    --------
    >>> rounded(189.3), rounded(189.3, sign=True), rounded(0.0123456, 3), rounded(1.23e9), rounded(None)
    ('190', '+190', '0.0123', '1.2e+09', '-')
    """
    value = float(value) if isinstance(value, str) else value  # how files of models hold numbers that are not finite
    if value is None or value != value:
        return "-"
    text = f"{value:{'+' if sign else ''}.{digits}g}"
    return f"{float(text):{'+' if sign else ''}.0f}" if "e+" in text and abs(value) < 1e6 else text


def members(group: Sequence[Hashable], room: int = _ROOM) -> str:
    """The ids of a group, as many as there is room for."""
    words = [str(site) for site in group]
    shown: list[str] = []
    for word in words:
        if shown and len(", ".join([*shown, word])) > room:
            return ", ".join(shown) + f" and {len(words) - len(shown)} more"
        shown.append(word)
    return ", ".join(shown)


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values, a line each. Lines are never broken: paths stay whole."""
    width = max(map(len, facts))
    for name, value in facts.items():
        output().print(Text.assemble((f"{name:<{width}}  ", "bold"), value), soft_wrap=True)
