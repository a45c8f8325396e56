"""Numbers and names as messages print them."""

from __future__ import annotations

from collections.abc import Iterable


def count(number: int, word: str) -> str:
    """A number and its noun.

    Examples
    --------
    >>> count(1, "row"), count(2, "row")
    ('1 row', '2 rows')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def listed(names: Iterable[object], most: int = 5) -> str:
    """The first names, and how many more there are.

    Examples
    --------
    >>> listed(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    shown = [repr(name) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
