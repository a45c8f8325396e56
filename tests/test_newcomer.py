"""The newcomer's path: the commands of the page "Ten minutes to a first model", typed one after the other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "getting-started.md"

pytestmark = pytest.mark.processes


def test_the_page_of_ten_minutes_can_be_typed(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    shutil.copytree(REPOSITORY / "examples" / "heart", tmp_path / "examples" / "heart")
    here = Path(sys.executable).parent
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    page = (tmp_path / "my-report.html").read_text(encoding="utf-8")
    assert "<html" in page and "60 sites" in page
    for table, predicted in (("demo-report/data.csv", "predicted.csv"), ("tables/sites/north.csv", "north-days.csv")):
        lines = [len((tmp_path / name).read_text(encoding="utf-8").splitlines()) for name in (table, predicted)]
        assert lines[0] == lines[1] > 50
    for site in ("north", "hill", "south"):
        own = (tmp_path / "tables" / "sites" / f"{site}.csv").read_text(encoding="utf-8").splitlines()[1]
        sent = (tmp_path / site / "sent" / f"{site}.summary").read_text(encoding="utf-8")
        assert own not in sent
