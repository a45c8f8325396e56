"""What MkDocs does not know of this repository: where links may lead, and docstrings that are completed on import."""

from __future__ import annotations

import inspect
import pkgutil
import re
from typing import Any

import griffe

_UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep the words of links that leave docs/ for a file of the repository, which the site does not have."""
    depth = page.file.src_uri.count("/")

    def kept(link: re.Match[str]) -> str:
        return link[1] if link[2].count("../") > depth else link[0]

    return _UPWARDS.sub(kept, markdown)


class CompleteDocstrings(griffe.Extension):
    """Docstrings with the line ``<options>``: as they are after `fedkin.fitting.options.documented` has seen them."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Replace the docstring of the source by that of the class."""
        if cls.docstring is not None and "<options>" in cls.docstring.value:
            cls.docstring.value = inspect.getdoc(pkgutil.resolve_name(cls.path)) or ""
