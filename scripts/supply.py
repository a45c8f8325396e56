"""Write the locked versions of all dependencies with their hashes, and the list of them for auditors.

- ``supply.py lock INDEX`` writes scripts/base.lock (what Fedkin needs) and scripts/dev.lock (all else that its
  extras and the development need). Versions that are locked stay. To change one, edit or delete its line first.
  INDEX is the address of a package index: a page of links for each package, as pip reads it.
- ``supply.py sbom FILE`` writes the locked versions as a CycloneDX 1.5 bill of materials.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from urllib.parse import unquote

REPOSITORY = Path(__file__).resolve().parent.parent
BASE, DEV = Path(__file__).with_name("base.lock"), Path(__file__).with_name("dev.lock")
HEAD = "# Versions and hashes of all files, for every platform and Python. Written by: make lock INDEX=...\n"
OLDEST = "3.11.0"
Pins = dict[str, str]


def lock(index: str) -> None:
    """Write both lock files; raises `SystemExit` with the packages of which the index has no file."""
    pins = {name: version for path in (BASE, DEV) for name, version, _ in read_lock(path)}
    base = resolve(["hatchling", "editables", str(REPOSITORY)], pins)  # the first two build an editable install
    everything = resolve([f"{REPOSITORY}[dev]"], pins | base)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda item: file_hashes(index, *item), everything.items())
        hashes = dict(zip(everything, found, strict=True))
    if missing := [name for name in everything if not hashes[name]]:
        raise SystemExit(f"the index has no file of {', '.join(missing)} in the locked version")

    def entries(names: set[str]) -> str:
        lines = (
            " \\\n".join([f"{name}=={everything[name]}", *(f"    --hash=sha256:{one}" for one in hashes[name])])
            for name in sorted(names, key=str.lower)
        )
        return "\n".join(lines) + "\n"

    BASE.write_text(HEAD + entries(set(base)), encoding="utf-8")
    DEV.write_text(f"{HEAD}-r {BASE.name}\n{entries(set(everything) - set(base))}", encoding="utf-8")


def resolve(requirements: list[str], pins: Pins) -> Pins:
    """Return the versions that pip would install into an empty environment, those in ``pins`` unchanged."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report), "-c", str(constraints)]
        options += ["--python-version", OLDEST, "--only-binary", ":all:", "--target", folder]  # Debian 12 has 3.11.2
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *requirements], check=True)
        found = [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return {item["name"]: item["version"] for item in found if item["name"] != "fedkin"}


def file_hashes(index: str, name: str, version: str) -> list[str]:
    """Return the SHA-256 of every file of a version in the index, sorted."""
    plain = plain_name(name)
    with urllib.request.urlopen(f"{index.rstrip('/')}/{plain}/", timeout=180) as answer:
        page = answer.read().decode()
    found = re.findall(r'href="[^"#]*/([^"/#]+)#sha256=([0-9a-f]{64})"', unescape(page))
    # name-version-tags.whl or name-version.tar.gz, the name in any spelling
    start = re.compile(rf"{plain.replace('-', '[-_.]+')}-{re.escape(version)}(?:-|\.tar\.gz$|\.zip$)", re.IGNORECASE)
    return sorted({digest for file, digest in found if start.match(unquote(file))})


def read_lock(path: Path) -> list[tuple[str, str, list[str]]]:
    """Return name, version and hashes of every package in a lock file, none if it is missing."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    entries = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s\\]+)((?:\s*\\\n\s+--hash=\S+)*)", text, re.MULTILINE)
    return [(name, version, re.findall(r"sha256:([0-9a-f]{64})", hashes)) for name, version, hashes in entries]


def sbom(out: Path) -> None:
    """Write the bill of materials; what extras and development need has the scope ``optional``."""
    module = (REPOSITORY / "src" / "fedkin" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.*)"', module, re.MULTILINE)
    assert found
    components = [
        {
            "type": "library",
            "name": name,
            "version": version,
            "scope": scope,
            "purl": f"pkg:pypi/{plain_name(name)}@{version}",
            "hashes": [{"alg": "SHA-256", "content": one} for one in hashes],
        }
        for path, scope in ((BASE, "required"), (DEV, "optional"))
        for name, version, hashes in read_lock(path)
    ]
    about = {"component": {"type": "library", "name": "fedkin", "version": found[1]}}
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": about, "components": components}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")


def plain_name(name: str) -> str:
    """Return the spelling of a package's name that indexes use."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["lock", address]:
            lock(address)
        case ["sbom", file]:
            sbom(Path(file))
        case _:
            raise SystemExit(__doc__)
