"""What notebooks show of an object: a small table without scripts, in which nothing of the user's is taken for HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_MOST = 10  # lines of a table


def html_card(
    title: str, facts: Mapping[str, object], head: Sequence[str] = (), lines: Sequence[Sequence[object]] = ()
) -> str:
    """A title, facts by name, and perhaps the first lines of a table.

    Examples
    --------
    >>> "<b>" in html_card("Graph", {"site": "<b>"}), "&lt;b&gt;" in html_card("Graph", {"site": "<b>"})
    (False, True)
    """
    cell = 'style="text-align:left;padding:.15em 1.2em .15em 0;vertical-align:top;background:none"'
    parts = [f"<strong>{escape(title)}</strong>"]
    rows = "".join(
        f'<tr style="background:none"><th {cell}>{escape(name)}</th><td {cell}>{escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    if rows:
        parts.append(f"<table>{rows}</table>")
    if lines:
        top = "".join(f"<th {cell}>{escape(name)}</th>" for name in head)
        body = "".join(
            f'<tr style="background:none">{"".join(f"<td {cell}>{escape(str(value))}</td>" for value in line)}</tr>'
            for line in lines[:_MOST]
        )
        more = f"<p>and {len(lines) - _MOST} more</p>" if len(lines) > _MOST else ""
        parts.append(f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{more}")
    return f"<div>{''.join(parts)}</div>"


def some_of(values: Sequence[object], most: int = 8) -> str:
    """The first few of many, as words.

    Examples
    --------
    >>> some_of(range(4), 2)
    '0, 1 and 2 more'
    """
    shown = ", ".join(str(value) for value in values[:most])
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")
