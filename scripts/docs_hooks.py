"""What MkDocs does not know of this repository: where links may lead, notebooks, and docstrings completed on import."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

_UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)[^)]*\)")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Give every notebook a page of its name."""
    for path in sorted(Path(config.docs_dir).glob("*.ipynb")):
        text = as_markdown(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"{path.stem}.md", content=text))
    return files


def as_markdown(notebook: dict[str, Any]) -> str:
    """Return a notebook with its outputs as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", ())})
            if "image/png" in data:
                alt = cell["metadata"].get("alt", "")
                parts.append(f'<img alt="{alt}" src="data:image/png;base64,{data["image/png"]}">')
            elif "text/html" in data:
                parts.append(f'<div class="card">\n{"".join(data["text/html"])}\n</div>')
            else:
                parts.append(f"```output\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep the words of links that leave docs/ for a file of the repository; lead those to notebooks to their page."""
    depth = page.file.src_uri.count("/")

    def kept(link: re.Match[str]) -> str:
        return link[1] if link[2].count("../") > depth else link[0]

    return re.sub(r"\]\((\w+)\.ipynb(#[^)]*)?\)", r"](\1.md\2)", _UPWARDS.sub(kept, markdown))


def on_post_page(output: str, **_: Any) -> str:
    """Give the dialog of the theme's search a name that screen readers can read out."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


class CompleteDocstrings(griffe.Extension):
    """Docstrings with the line ``<options>``: as they are after `fedkin.fitting.options.documented` has seen them."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Replace the docstring of the source by that of the class."""
        if cls.docstring is not None and "<options>" in cls.docstring.value:
            cls.docstring.value = inspect.getdoc(pkgutil.resolve_name(cls.path)) or ""
