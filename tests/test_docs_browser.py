"""The documentation's site in a real browser: its front page opens from the disk, and a screen reader can use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from browser import findings, needs_browser

REPOSITORY = Path(__file__).resolve().parent.parent
pytestmark = [*needs_browser, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as ``make docs`` builds it, but for the API reference, which takes most of the time."""
    place = tmp_path_factory.mktemp("docs")
    settings = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    quick = place / "mkdocs.yml"
    quick.write_text(
        settings.replace("docs_dir: docs", f"docs_dir: {REPOSITORY / 'docs'}")
        .replace("site_dir: build/site", f"site_dir: {place / 'site'}")
        .replace("hooks: [scripts/docs_hooks.py]", f"hooks: [{REPOSITORY / 'scripts' / 'docs_hooks.py'}]")
        .replace("base_path: [.]", f"base_path: [{REPOSITORY}]")
        .replace("strict: true", "strict: false")
        .replace("  - mkdocstrings:", "  - mkdocstrings:\n      enabled: false", 1),
        encoding="utf-8",
    )
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "--quiet", "build", "-f", str(quick)],
        check=True,
        capture_output=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    return place / "site"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "tutorial", "federation", "trust", "fused"])
def test_pages_are_usable(browser: Any, site: Path, name: str, scheme: str) -> None:
    page = browser.new_context(color_scheme=scheme).new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / f"{name}.html").as_uri())
    assert page.locator("h1").count() == 1
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]  # no network
    assert findings(page, ["serious", "critical"]) == []
    page.context.close()


def test_search_and_formulas_work_from_the_disk(browser: Any, site: Path) -> None:
    page = browser.new_page()
    page.goto((site / "fused.html").as_uri())
    page.wait_for_selector(".katex-display")
    assert page.locator(".arithmatex").count() == page.locator(".arithmatex:has(.katex)").count() > 10
    assert page.locator(".katex-error").count() == 0
    page.locator(".md-search__input").first.fill("overdispersion")
    page.wait_for_selector(".md-search-result__item a[href*='counts.html']")
    page.close()
