"""A real browser for tests of pages: Chromium of the system, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fedkin._base import Array
from processes import PATIENCE

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
        self.page.set_default_timeout(1000 * PATIENCE)
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


def findings(page: Any, impacts: Sequence[str] = ("moderate", "serious", "critical")) -> list[str]:
    """Return what axe-core finds of these impacts."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0].get('failureSummary', '')}"
        for one in found
        if one["impact"] in impacts
    ]


#: Colour vision without one kind of cone (Machado et al. 2009, severity 1).
VISION = {
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def seen_as(codes: list[str], vision: str) -> Array:
    """Return colours in the Lab space as someone with this colour vision sees them."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    colours = np.array([[int(code[k : k + 2], 16) / 255 for k in (0, 2, 4)] for code in codes])
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(VISION[vision]).T, 0, 1) @ xyz.T / (xyz @ np.ones(3))
    f = np.where(seen > 0.008856, np.cbrt(seen), 7.787 * seen + 16 / 116)
    return np.column_stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])])
