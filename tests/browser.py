"""A real browser for tests of pages: Chromium of the system, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: The browser, where there is one.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def playwright_is_here() -> bool:
    try:
        import playwright  # noqa: F401
    except ImportError:
        return False
    return CHROMIUM is not None


#: For every test that opens a page.
needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(not playwright_is_here(), reason="no Chromium, or no Playwright, here"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; closed at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=_FLAGS, env={**os.environ, "HOME": "/tmp"})
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """A page of the browser that remembers what went wrong on it."""

    def __init__(self, browser: Any, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.trouble: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda line: self._heard(line))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _heard(self, line: Any) -> None:
        if line.type in ("error", "warning"):
            self.trouble.append(line.text)

    def open(self, address: str) -> Any:
        """Load a page and wait until its script has drawn it."""
        self.page.goto(address)
        self.page.wait_for_selector("body[data-ready]")
        return self.page

    def close(self) -> None:
        """Close the page; anything on its console is an error."""
        self.context.close()
        assert self.trouble == []


def serious_findings(page: Any) -> list[str]:
    """What axe-core calls serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0].get('failureSummary', '')}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
