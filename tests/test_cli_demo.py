"""``fedkin demo``: its numbers, its words and its page."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from clinics import failing
from fedkin.cli import main


def test_demo(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sites", "20", "--rows", "40", "--features", "4"]
    assert main(["demo", *sizes, "--out", "report", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    error = document["estimation_error"]
    assert list(error) == ["Local", "Global", "Fed-ADMM", "Fed-ADMM-ES", "Kin", "Oracle"]
    assert error["Oracle"] <= error["Kin"] * 1.3 < error["Local"] < error["Global"]
    assert error["Kin"] < error["Fed-ADMM"]
    page = (place / "report" / "report.html").read_text(encoding="utf-8")
    assert document["summary"] in html.unescape(page)
    told = json.loads(re.findall(r'id="payload">(.*?)</script>', page, re.DOTALL)[0])
    assert [one["name"] for one in told["comparison"]["methods"]] == [
        "Local",
        "Global",
        "Graph as given",
        "Edges tested first",
        "Fedkin",
        "Oracle",
    ]
    assert told["sites"]["names"][:2] == ["site00", "site01"]
    assert told["reproduction"]["command"].startswith("fedkin demo --sites 20")
    held_out, each = document["held_out_error"]["Kin"], told["comparison"]["sites"]["Fedkin"]
    assert abs(sum(each) / 20 - held_out) < 1e-4
    fit = ["fit", "report/data.csv", "--site", "site", "--target", "y", "--graph", "report/graph.csv"]
    assert main([*fit, "--lam", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_sites"] == 20


def test_demo_in_words(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sites", "10", "--rows", "30", "--features", "3"]
    assert main(["demo", *sizes, "--varrho", "0.1"]) == 0
    shown = capsys.readouterr().out
    wanted = (
        "Local",
        "Global",
        "Fed-ADMM-ES",
        "Kin",
        "Oracle",
        "kept its own 30 rows",
        "report.html",
        " fit demo-report",
    )
    for words in wanted:
        assert words in shown
    assert (place / "demo-report" / "picture.svg").read_text(encoding="utf-8").startswith("<svg")


def test_demo_with_too_few_sites(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--sites" in failing(capsys, "demo", "--sites", "2")
