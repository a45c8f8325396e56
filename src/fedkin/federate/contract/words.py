"""What is wrong with a file, in words."""

from __future__ import annotations

import re


def in_words(error: Exception) -> str:
    """What is wrong with a file, beginning with a verb and naming the field.

    Examples
    --------
    >>> import msgspec
    >>> from fedkin.federate.contract.words import in_words
    >>> in_words(msgspec.ValidationError("Expected `int` >= 1 - at `$.rounds`"))
    'has a wrong rounds: expected `int` >= 1'
    """
    where = re.fullmatch(r"(.*) - at `\$\.?(.*)`", str(error), re.DOTALL)
    if where is None:
        return f"cannot be read: {error}"
    words, field = where[1][0].lower() + where[1][1:], where[2]
    if field == "format":
        return f"is not of the format that this fedkin reads ({words}): use the fedkin version that made it"
    return f"has a wrong {field}: {words}" if field else f"cannot be read: {words}"
