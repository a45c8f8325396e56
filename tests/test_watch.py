"""``fedkin watch``: what it serves and to whom, and a site that is killed and started again, seen in a browser."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from browser import Page, chromium, needs_browser, serious_findings
from fedkin.report.pages import LiveServer
from processes import capped, wait_for

STATE: dict[str, Any] = {
    "kind": "sites",
    "sites": [
        {"name": "<b>north</b>", "kind": "running", "state": "running", "round": 3, "waiting_for": [], "sent": 5}
    ],
    "edges": [],
    "round": 3,
    "rounds": 10,
}


def answer(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urlopen(Request(url, headers=headers), timeout=10) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


# --- the server -----------------------------------------------------------------------------------------------


def test_only_who_has_the_token_sees_anything():
    with LiveServer("a run", lambda: STATE) as server:
        bare = server.url.partition("?")[0]
        assert bare.startswith("http://127.0.0.1:")
        code, page = answer(server.url)
        assert code == 200 and "<b>north</b>" not in page and "\\u003cb\\u003enorth" in page
        assert answer(bare)[0] == answer(f"{bare}?token=wrong")[0] == answer(f"{bare}events")[0] == 403
        assert answer(server.url, Host="evil.example")[0] == 421
        assert answer(server.url.replace("/?", "/other?"))[0] == 404
    with LiveServer("a run", lambda: STATE) as again:
        assert again.token != server.token


def test_a_look_that_fails_once_does_not_end_the_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedkin.report.pages.LOOK_SECONDS", 0.05)
    looks: list[int] = []

    def look() -> dict[str, Any]:
        looks.append(1)
        if len(looks) == 2:
            raise OSError("gone for a moment")
        return STATE

    with LiveServer("a run", look):
        wait_for(lambda: len(looks) > 4, 10)


# --- a federation ---------------------------------------------------------------------------------------------


@contextmanager
def watching(folder: Path) -> Iterator[str]:
    """``fedkin watch`` in the background; gives the address that it prints."""
    command = [sys.executable, "-m", "fedkin", "watch", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=capped) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130


@pytest.mark.processes
@pytest.mark.timeout(180)
class TestInTheBrowser:
    pytestmark = needs_browser

    def test_a_site_that_is_killed_turns_absent_and_comes_back(self, tmp_path: Path) -> None:
        pytest.importorskip("zenoh")
        from builders import small_problem
        from fleet import Fleet

        made = Fleet.make(tmp_path, small_problem(3), 1_000_000, rho=0.5)
        with made as fleet, watching(tmp_path) as address, chromium() as browser:
            shown = Page(browser)
            page = shown.open(address)
            page.wait_for_selector("tr[data-kind=absent] >> nth=2")  # nobody runs yet
            assert "No round is over yet." in page.inner_text("#progress")
            fleet.start()
            page.wait_for_selector("tr[data-kind=running] >> nth=2", timeout=60_000)
            page.wait_for_selector("#then >> text=Everybody is there.")
            page.wait_for_selector("#then >> text=/Relative gap [0-9.e\u2212]+/", timeout=60_000)
            assert page.locator("#progress figure:has(h3:text('relative gap')) path.curve").count() == 1
            fleet.kill("d1")
            page.wait_for_selector("tr[data-name=d1][data-kind=absent]", timeout=30_000)
            page.wait_for_selector("#then >> text=d1 is absent")
            page.wait_for_selector("tr[data-kind=waiting] td:last-child >> text=d1", timeout=30_000)
            fleet.start("d1")
            page.wait_for_selector("tr[data-name=d1][data-kind=running]", timeout=60_000)
            page.wait_for_function("document.querySelector('.news').innerText.includes('d1 is back')")
            news = page.inner_text(".news")
            assert news.count("d1 is absent") == news.count("d1 has started") == 1
            assert re.search(r"Round [\d,]+ of 1,000,000", page.inner_text("#now"))
            # Bytes are counted: after a few rounds more, whatever else the machine does.
            page.wait_for_selector("tr[data-name=d0] >> text=/[kM]B/", timeout=60_000)
            assert serious_findings(page) == []
            shown.close()
