"""The report page: one file, which needs no network and cannot be broken by the data."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from blackbox.conftest import COLUMNS, Fit, files_below, run

EVIL = "<script>alert(1)</script>"
CLOSING = "</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """Collects the elements of a page, and what is in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def addresses(page: Page) -> list[str]:
    """Return all addresses that a browser would load or follow."""
    names = ("src", "href", "xlink:href", "action", "data", "poster", "srcset")
    return [attributes[name] or "" for _, attributes in page.elements for name in names if name in attributes]


@pytest.fixture(scope="module")
def text(fit: Fit) -> str:
    return fit.page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, clinics) -> Path:
    """A folder with the page of a model whose sites and columns are named by an attacker."""
    folder = tmp_path_factory.mktemp("hostile")
    names = {"a": EVIL, "b": CLOSING, "c": "R&D <b>", "d": "'\"`", "e": "x\u2028y", "f": "ü"}
    rows = clinics.assign(clinic=clinics["clinic"].map(names)).rename(columns={"age": "<i>age</i>"})
    rows.to_csv(folder / "t.csv", index=False)
    run(folder, "fit", "t.csv", *COLUMNS, "--test-size", "0", "--report", "page.html", code=0)
    return folder / "page.html"


def test_the_page_is_html_that_loads_nothing(text):
    assert text.lower().startswith("<!doctype html>")
    page = Page(text)
    assert [address for address in addresses(page) if not address.startswith(("#", "data:"))] == []
    assert "@import" not in text
    assert re.findall(r"url\(\s*['\"]?(?!#|data:|['\"]?#)[^)]*\)", text) == []


def test_the_page_has_no_address_of_another_machine(text):
    outside = set(re.findall(r"(?:https?:)?//[a-z0-9-]+(?:\.[a-z0-9-]+)+[^\s\"'<>)]*", text))
    assert {address for address in outside if not address.startswith("http://www.w3.org/")} == set()


def test_the_page_contains_sites_features_errors_and_the_command(fit, text):
    for word in ("days", "age", "dose", "clinics.csv", "Local", "Global", "Site intercepts", "Fedkin"):
        assert word in text
    comparison = fit.outcome.json["comparison"]
    for method in comparison["methods"]:
        assert f"{method['mean']:.4g}"[:4] in text, method["name"]
    assert "fedkin fit" in text and "--target days" in text


def test_names_are_escaped(hostile):
    text = hostile.read_text(encoding="utf-8")
    assert EVIL not in text and CLOSING not in text
    page = Page(text)
    assert [attributes for tag, attributes in page.elements if tag == "img" or "onerror" in attributes] == []
    assert text.count("<script") == text.count("</script>")
    assert "<i>age</i>" not in text
    assert "alert(1)" in text  # it is there, as text


def test_report_writes_the_page_of_an_old_model(fedkin, tmp_path, fit, text):
    told = fedkin("report", fit.model, "--out", "later.html", "--json").json
    assert told["report"] == "later.html"
    later = (tmp_path / "later.html").read_text(encoding="utf-8")
    assert told["bytes"] == (tmp_path / "later.html").stat().st_size
    assert later == text
    assert set(files_below(tmp_path)) == {"later.html"}


def test_coordinates_put_sites_on_a_map_and_unknown_columns_are_refused(fedkin, tmp_path, fit, text):
    lines = [f"{name},{k}.125,{k}.375" for k, name in enumerate("abcdef")]
    (tmp_path / "places.csv").write_text("\n".join(["site,x,y", *lines, ""]))
    fedkin("report", fit.model, "--out", "map.html", "--coordinates", "places.csv", code=0)
    assert (tmp_path / "map.html").read_text(encoding="utf-8") != text
    (tmp_path / "wrong.csv").write_text("\n".join(["site,wide,high", *lines, ""]))
    fedkin("report", fit.model, "--out", "no.html", "--coordinates", "wrong.csv").refuses("wrong.csv", "lon")
    assert not (tmp_path / "no.html").exists()
