"""The package as a whole: light to import, names where the documentation says, examples that run."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import json
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

import fedkin
import fedkin.errors
from fedkin.cli import main
from fedkin.cli.console import COMMANDS
from fedkin.cli.console import EXAMPLES as EXAMPLES_OF_HELP
from processes import PATIENCE

REPOSITORY = Path(__file__).resolve().parent.parent
HEAVY = {
    *("sklearn", "pandas", "polars", "pyarrow", "scipy.stats", "matplotlib", "narwhals", "networkx", "numba"),
    *("typer", "rich"),
}
PUBLIC = {
    *("Federation", "Graph", "Problem", "Solution", "solve", "lam_max", "lam_path", "local_fit", "global_fit"),
    *("oracle_fit", "select_edges", "FedADMMRegressor", "FedADMMClassifier", "load"),
}
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(fedkin.__path__, "fedkin.") if not module.name.endswith("__main__")
)
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")), *(REPOSITORY / "docs/api").glob("*.md")]
NOTEBOOKS = sorted((REPOSITORY / "docs").glob("*.ipynb"))
# tests/test_cluster.py runs engines.py
EXAMPLES = sorted({*(REPOSITORY / "examples").glob("*.py")} - {REPOSITORY / "examples" / "engines.py"})


def run_python(code: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    return set(run_python(f"import sys; {statement}; print(*sys.modules)").split())


# --- imports --------------------------------------------------------------------------------------------------


def test_import_is_light() -> None:
    loaded = loaded_by("import fedkin")
    assert not loaded & HEAVY
    assert "numpy" not in loaded


def test_command_line_starts_light() -> None:
    loaded = loaded_by("from fedkin.cli import main; main(['--version'])")
    assert not loaded & (HEAVY | {"numpy", "scipy"}) - {"typer", "rich"}


def test_public_names() -> None:
    assert PUBLIC <= set(fedkin.__all__) == set(dir(fedkin))
    for name in set(fedkin.__all__) - {"__version__"}:
        assert getattr(fedkin, name).__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fedkin.no_such_name


def test_the_installed_version_is_that_of_the_module() -> None:
    assert importlib.metadata.version("fedkin") == fedkin.__version__
    assert (Path(fedkin.__file__).parent / "py.typed").exists()


def test_dependencies_are_locked_with_hashes(tmp_path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    out = tmp_path / "sbom.json"
    subprocess.run([sys.executable, REPOSITORY / "scripts" / "supply.py", "sbom", out], check=True)
    bill = json.loads(out.read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["version"] == fedkin.__version__
    assert all(one["hashes"] for one in bill["components"])
    locked = {one["purl"].removeprefix("pkg:pypi/").partition("@")[0]: one["scope"] for one in bill["components"]}
    extras = project["optional-dependencies"]
    used = [*re.search(r"fedkin\[(.*)\]", extras["dev"][0])[1].split(","), "dev"]
    needed = {True: project["dependencies"], False: [item for name in used for item in extras[name][name == "dev" :]]}
    for required, items in needed.items():
        for name in (re.match(r"[A-Za-z0-9._-]+", item)[0].lower() for item in items):
            assert locked[name] == "required" or not required
    locks = sorted((REPOSITORY / "scripts").glob("*.lock"))
    assert [path.name for path in locks] == ["base.lock", "dev.lock"]
    for path in locks:  # nothing but what pip checks by hash
        lines = path.read_text(encoding="utf-8").splitlines()
        pin, digest = r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.+!]* \\", r"    --hash=sha256:[0-9a-f]{64}( \\)?"
        assert all(re.fullmatch(rf"#.*|-r base\.lock|{pin}|{digest}", line) for line in lines)


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs" / "api").glob("*.md"))
    found = [pkgutil.resolve_name(name) for name in re.findall(r"^::: (fedkin[\w.]*)$", text, re.MULTILINE)]
    missing = {name for name in fedkin.__all__ if not any(getattr(fedkin, name) is one for one in found)}
    assert missing <= {"__version__", "FedkinError"}  # the errors are shown as a module


# --- documentation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name)
    except (ModuleNotFoundError, fedkin.errors.MissingDependencyError) as error:
        pytest.skip(str(error))
    assert module.__doc__, f"{name} does not say what it is for"
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0


def has_something_to_run(page: Path) -> bool:
    text = page.read_text(encoding="utf-8")
    return page.suffix == ".ipynb" or re.search("^```(python|console)$", text, re.MULTILINE) is not None


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [*filter(has_something_to_run, [*PAGES, *NOTEBOOKS])], ids=lambda page: page.name)
def test_pages_show_what_their_commands_print(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command and every piece of Python of a page runs; `scripts/docs_output.py` renews what they print."""
    for name in ("COLUMNS", "TERM"):  # the script sets them
        monkeypatch.setenv(name, "")
    script = runpy.run_path(str(REPOSITORY / "scripts" / "docs_output.py"))
    assert script["main"](["--check", str(page)]) == 0, capsys.readouterr()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text):
        assert (REPOSITORY / path).exists() or (REPOSITORY / "src" / "fedkin" / path).exists(), path
    for name in re.findall(r"`(fedkin(?:\.[A-Za-z_0-9]+)+)`", text):
        if name not in MODULES:
            assert pkgutil.resolve_name(name) is not None, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_pages_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in re.findall(r"^(?: {4}|\$ )fedkin (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        words = shlex.split(re.sub(r"[\[\]]", " ", line).partition(" -- ")[0].partition(" | ")[0])
        # commands of a group have two words; what comes after -- is for another program
        n = 2 if words[0] in ("federation", "site") else 1
        command, rest = words[:n], words[n:]
        assert main([*command, "--help-all"]) == 0, line
        known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
        assert {word for word in rest if word.startswith("--")} <= known, line


def test_the_page_of_commands_names_every_command() -> None:
    """Options are explained by ``--help-all``, which the page does not repeat."""
    text = (REPOSITORY / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert [command for command in sorted(EXAMPLES_OF_HELP) if f"`fedkin {command}`" not in text] == []


@pytest.mark.parametrize("command", sorted(EXAMPLES_OF_HELP))
def test_help_begins_with_examples_that_can_be_typed(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    examples = EXAMPLES_OF_HELP[command].splitlines()
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "<bool>" not in text and "{" not in text.partition("Options")[0]
    about, _, options = text.partition("Options")
    for example in examples:
        assert example.startswith(f"fedkin {command}") and example in about
        assert set(re.findall(r"--[a-z-]+", example)) <= set(re.findall(r"--[a-z-]+", options))


def test_help_of_fit_shows_ten_options_and_all_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    from fedkin.cli.console import MOST_USED

    assert main(["fit", "--help"]) == 0
    options = set(re.findall(r"│ (--[a-z-]+)", capsys.readouterr().out))
    assert options == {f"--{name}" for name in MOST_USED["fit"]} | {"--help"} and len(options) == 11
    assert main(["fit", "--help-all"]) == 0
    every = set(re.findall(r"│ (--[a-z-]+)", capsys.readouterr().out))
    assert options < every and len(every) > 40


def test_every_command_has_an_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, command in COMMANDS.items():
        one = getattr(importlib.import_module(f"fedkin.cli.{command.module}"), name)
        own = one.registered_commands if isinstance(one, typer.Typer) else ()
        found += [f"{name} {each.name or each.callback.__name__}" for each in own] or [name]
    assert sorted(found) == sorted(EXAMPLES_OF_HELP)


# --- examples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_examples_run(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_gathered_arguments_are_those_of_the_dataclasses_behind() -> None:
    from fedkin.data import Roles, TableOptions

    assert {*TableOptions.__annotations__} == {*Roles.__dataclass_fields__} - {"site", "target"}
