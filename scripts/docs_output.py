"""Run every command and every piece of Python of the pages, and put what they print under them.

    python scripts/docs_output.py                  # all pages and the tutorial
    python scripts/docs_output.py docs/counts.md   # one of them
    python scripts/docs_output.py --check ...      # write nothing, and say what would change

In a page, a block ``console`` has commands after ``$`` (continued after ``>``) and below each what it printed; a block
``python`` may be followed by a block ``output``. All blocks of a page run in one process, in the order of the page,
in a directory with the tables of ``docs/tables`` and, where FEDKIN_DATA names them, the public ones. Blocks that need a
public table that is not here keep their output.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import difflib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PUBLIC = ("landmine/landmine.csv", "school/school.csv", "melanoma/melanoma.csv")
#: Python and its output, or commands with theirs.
BLOCKS = re.compile(
    r"^```python\n(?P<python>.*?)^```\n(?:\n```output\n(?P<output>.*?)^```\n)?"
    r"|^```console\n(?P<console>.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


def pages() -> list[Path]:
    """Return every page with something to run."""
    found = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [*(page for page in found if BLOCKS.search(page.read_text(encoding="utf-8"))), *sorted(DOCS.glob("*.ipynb"))]


# --- running --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A directory with the tables, which is the current one meanwhile."""
    with tempfile.TemporaryDirectory() as place:
        tables = [*sorted((DOCS / "tables").glob("*.csv")), ROOT / "examples" / "heart" / "heart.toml"]
        if data := os.environ.get("FEDKIN_DATA"):
            tables += [Path(data) / name for name in PUBLIC if (Path(data) / name).exists()]
        for table in tables:
            (Path(place) / table.name).symlink_to(table)
        for folder in ("docs", "examples"):
            (Path(place) / folder).symlink_to(ROOT / folder)
        os.environ["FEDKIN_LEDGERS"] = str(Path(place) / ".ledgers")
        before = Path.cwd()
        os.chdir(place)
        try:
            yield Path(place)
        finally:
            os.chdir(before)


def command(line: str) -> str:
    """Return what a command prints on standard output, and the error with which it ends, if any.

    Commands of Fedkin run in this process, also those of a loop over sites, because starting one takes a second.
    """
    if loop := re.fullmatch(r"for (\w+) in (.*); do\n(.*)\ndone(?: > \S+)?", line, re.DOTALL):
        name, values, body = loop.groups()
        for value in values.split():
            for one in body.splitlines():
                command(one.partition("  # ")[0].strip().replace(f"${name}", value))
        return ""
    out, err = io.StringIO(), io.StringIO()
    inside = line.startswith("fedkin ") and not set(line) & set(";&")
    line, _, cut = line.partition(" | ") if inside else (line, "", "")
    line, _, target = line.partition(" > ") if inside else (line, "", "")
    if inside:
        from fedkin.cli import main

        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(shlex.split(line)[1:])
        text = out.getvalue() + "\n".join(one for one in err.getvalue().splitlines() if one.startswith("error"))
    else:
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        text = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, env=env).stdout
    if target:
        Path(target).write_text(text, encoding="utf-8")
        return ""
    if cut:
        text = subprocess.run(cut, shell=True, input=text, capture_output=True, text=True, check=True).stdout
    lines = [one.rstrip() for one in text.splitlines()]
    return "".join(f"{one}\n" for one in lines).strip("\n") + "\n" * bool(lines)


def python(code: str, names: dict[str, Any]) -> str:
    """Return what a piece of Python prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<page>", "exec"), names)
    return out.getvalue()


def missing(text: str) -> bool:
    """Return whether a block needs a public table that is not here."""
    return any(Path(name).name in text and not Path(Path(name).name).exists() for name in PUBLIC)


def renewed(text: str) -> str:
    """Return a page with the output of all its blocks as it is now."""
    names: dict[str, Any] = {"__name__": "__main__"}

    def one(block: re.Match[str]) -> str:
        if missing(block[0]):
            return block[0]
        if block["console"] is None:
            printed = python(block["python"], names)
            head = f"```python\n{block['python']}```\n"
            return head if block["output"] is None else f"{head}\n```output\n{printed.rstrip()}\n```\n"
        lines = re.findall(r"^\$ .*(?:\n> .*)*", block["console"], re.MULTILINE)
        shown = [f"{line}\n{command(line[2:].replace(chr(10) + '> ', chr(10)))}" for line in lines]
        return f"```console\n{''.join(shown)}```\n"

    return BLOCKS.sub(one, text)


# --- the tutorial ---------------------------------------------------------------------------------------------


def run_cell(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as Jupyter does, and return its outputs."""
    import matplotlib.pyplot as plt

    tree, value = ast.parse(code), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if out.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": out.getvalue().splitlines(keepends=True)})
    figures = [plt.figure(n) for n in plt.get_fignums()]
    if value is not None and not figures:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if html := getattr(value, "_repr_html_", lambda: None)():
            data["text/html"] = html.splitlines(keepends=True)
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    for figure in figures:
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=100, bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
        plt.close(figure)
    return outputs


def renewed_notebook(text: str) -> str:
    """Return a notebook with the outputs of all its cells as they are now."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    plt.close("all")  # figures of the caller are not the notebook's
    notebook, names, count = json.loads(text), {"__name__": "__main__"}, 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"], cell["outputs"] = count, run_cell("".join(cell["source"]), names)
            for one in cell["outputs"]:
                if "execution_count" in one:
                    one["execution_count"] = count
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


# --- comparing ------------------------------------------------------------------------------------------------


def comparable(text: str, path: Path) -> str:
    """Return what of a page must not change: pictures and HTML of a notebook follow from what it prints."""
    if path.suffix != ".ipynb":
        return text
    kept = []
    for cell in json.loads(text)["cells"]:
        kept.append("".join(cell["source"]))
        for one in cell.get("outputs", ()):
            kept.append("".join(one.get("text") or one["data"].get("text/plain", "a picture")))
    return "\n".join(kept)


def same(kept: str, new: str) -> bool:
    """Return whether two texts have the same words, and numbers that differ by rounding on another processor at most.

    Samplers take other paths where the last bit differs, so that numbers may differ by 2% or two units of their last
    digit.
    """
    one, other = ([" ".join(NUMBER.sub("#", t).replace("─", "").split()), NUMBER.findall(t)] for t in (kept, new))
    return one[0] == other[0] and all(close(a, b) for a, b in zip(one[1], other[1], strict=True))


def close(one: str, other: str) -> bool:
    """Return whether two printed numbers are the same except for rounding."""
    a, b = (float(number.replace(",", "")) for number in (one, other))
    decimals = len(one.partition(".")[2].partition("e")[0])
    return abs(a - b) <= max(2.001 * 10.0**-decimals * ("." in one), 0.02 * max(abs(a), abs(b)))


def treat(page: Path, check: bool) -> bool:
    """Renew a page, or compare it; return whether it was as it should be."""
    text = page.read_text(encoding="utf-8")
    with workplace():
        try:
            new = (renewed_notebook if page.suffix == ".ipynb" else renewed)(text)
        except Exception:
            print(f"{page}:\n{traceback.format_exc()}", file=sys.stderr)
            return False
    kept, made = comparable(text, page), comparable(new, page)
    if same(kept, made):
        return True
    print("".join(difflib.unified_diff(kept.splitlines(True), made.splitlines(True), str(page), "now", n=1)))
    if not check:
        page.write_text(new, encoding="utf-8")
    return False


def main(arguments: list[str]) -> int:
    """Treat the pages that are named, or all of them."""
    check = "--check" in arguments
    chosen = [Path(name).resolve() for name in arguments if name != "--check"] or pages()
    os.environ.update(COLUMNS="92", TERM="dumb", OMP_NUM_THREADS="1")
    as_they_were = [treat(page, check) for page in chosen]
    return 0 if all(as_they_were) or not check else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
