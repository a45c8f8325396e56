"""Format numbers and names for people: the one place that messages, tables, pages and notebooks take them from.

- counts: `whole` (``15,362``) and `count` (``15,362 rows``);
- estimates: `decimals_for` takes the decimals of a whole column from its standard errors, `fixed` writes a number with
  them, so that columns align and no digit is shown that the error does not support;
- probabilities: `probability` (``0.57``, ``>0.99``, ``<0.01``), never ``1.0`` or ``0``;
- shares: `percent` (``6.9%``);
- names: `listed` (quoted, for messages) and `some_of` (plain, for cards).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

#: What stands for a number that there is not.
NO_NUMBER = "–"
_MOST_DECIMALS = 6
_MOST_LINES = 10


def whole(number: float) -> str:
    """Format a count with commas between thousands.

    Examples
    --------
    >>> whole(15362)
    '15,362'
    """
    return f"{round(number):,}"


def count(number: int, word: str) -> str:
    """Format a count and its noun.

    Examples
    --------
    >>> count(1, "row"), count(15362, "row")
    ('1 row', '15,362 rows')
    """
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def decimals_for(errors: Iterable[float], digits: int = 2) -> int:
    """Return how many decimals a column of estimates needs: the smallest standard error shows ``digits`` digits.

    Parameters
    ----------
    errors : iterable of float
        Standard errors; those that are not finite or not positive do not count. Without any, 3 decimals.
    digits : int
        Significant digits of the smallest standard error.

    Examples
    --------
    >>> decimals_for([0.13, 0.021]), decimals_for([25.0]), decimals_for([])
    (3, 0, 3)
    """
    usable = [error for error in errors if 0 < error < math.inf]
    if not usable:
        return 3
    return min(max(digits - 1 - math.floor(math.log10(min(usable))), 0), _MOST_DECIMALS)


def fixed(value: float | None, decimals: int = 3, *, sign: bool = False) -> str:
    """Format a number with fixed decimals and commas between thousands; never ``-0.00``.

    Examples
    --------
    >>> fixed(0.2, 4), fixed(-0.0001, 2), fixed(15362.5, 1), fixed(0.5, 2, sign=True), fixed(float("nan"))
    ('0.2000', '0.00', '15,362.5', '+0.50', '–')
    """
    if value is None or math.isnan(value):
        return NO_NUMBER
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{round(value, decimals) + 0.0:{'+' if sign else ''},.{decimals}f}"


def probability(value: float, decimals: int = 2) -> str:
    """Format a probability; one that rounds to 0 or 1 is given as a bound.

    Examples
    --------
    >>> probability(0.574), probability(0.999), probability(0.0), probability(1.0)
    ('0.57', '>0.99', '<0.01', '>0.99')
    """
    least = 10.0**-decimals
    if value < least:
        return f"<{least:.{decimals}f}"
    return f">{1 - least:.{decimals}f}" if value > 1 - least else fixed(value, decimals)


def percent(share: float, decimals: int = 0, *, sign: bool = False) -> str:
    """Format a share of 1 in percent.

    Examples
    --------
    >>> percent(0.069, 1), percent(-0.25, sign=True)
    ('6.9%', '-25%')
    """
    text = fixed(100 * share, decimals, sign=sign)
    return text if text == NO_NUMBER else f"{text}%"


def listed(names: Iterable[object], most: int = 5) -> str:
    """Quote the first names, and say how many more there are.

    Examples
    --------
    >>> listed(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    return some_of([repr(name) for name in names], most)


def some_of(values: Sequence[object], most: int = 8) -> str:
    """Join the first few of many.

    Examples
    --------
    >>> some_of(range(4), 2)
    '0, 1 and 2 more'
    """
    shown = ", ".join(str(value) for value in values[:most])
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")


def html_card(
    title: str, facts: Mapping[str, object], head: Sequence[str] = (), lines: Sequence[Sequence[object]] = ()
) -> str:
    """Render an object for a notebook: a title, facts by name, the first lines of a table; all text is escaped.

    Examples
    --------
    >>> "<b>" in html_card("Graph", {"site": "<b>"}), "&lt;b&gt;" in html_card("Graph", {"site": "<b>"})
    (False, True)
    """
    style = 'style="text-align:left;padding:.15em 1.2em .15em 0;vertical-align:top;background:none"'

    def cells(tag: str, values: Iterable[object]) -> str:
        return "".join(f"<{tag} {style}>{escape(str(value))}</{tag}>" for value in values)

    row = '<tr style="background:none">'
    parts = [f"<strong>{escape(title)}</strong>"]
    if facts:
        rows = (f"{row}{cells('th', [name])}{cells('td', [value])}</tr>" for name, value in facts.items())
        parts.append(f"<table>{''.join(rows)}</table>")
    if lines:
        body = "".join(f"{row}{cells('td', line)}</tr>" for line in lines[:_MOST_LINES])
        more = f"<p>and {len(lines) - _MOST_LINES} more</p>" if len(lines) > _MOST_LINES else ""
        parts.append(f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>{more}")
    return f"<div>{''.join(parts)}</div>"
