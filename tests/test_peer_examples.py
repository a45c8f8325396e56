"""The container file and the systemd unit of ``examples/peer`` fit this repository and this command line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fedkin.federate.program import STOPPED, WRONG

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "peer"


def test_the_container_installs_what_is_in_the_clone() -> None:
    """There is no package on an index yet: all that the build needs is copied into the image."""
    text = (EXAMPLES / "Containerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied and all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed | {Path(name).parts[0] for name in packages} <= copied
    assert re.findall(r"pip install \S+ (\S+)", text) == ['"/src[peer]"']
    assert "-f examples/peer/Containerfile ." in text


def test_the_unit_says_how_to_make_what_it_uses() -> None:
    text = (EXAMPLES / "fedkin-peer@.service").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    words = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert f"useradd --system --home-dir /var/lib/fedkin --shell /usr/sbin/nologin {settings['User']}" in words
    program, state = settings["ExecStart"].split()[0], Path(settings["ReadWritePaths"]).parent
    assert f"venv {Path(program).parent.parent}" in words and f"mkdir -p {state}" in words
    assert settings["RestartPreventExitStatus"].split() == [str(WRONG), str(STOPPED)]
