"""``fedkin watch``: what it serves and to whom, and a site that is killed and started again, seen in a browser."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from browser import VISION, Page, chromium, findings, needs_browser, seen_as
from fedkin.report import LiveServer
from processes import PATIENCE, capped, wait_for

STATE: dict[str, Any] = {
    "sites": [
        {"name": "<b>north</b>", "kind": "running", "state": "running", "round": 3, "waiting_for": [], "sent": 5}
    ],
    "edges": [],
    "round": 3,
    "rounds": 10,
}


#: Outline, whether it is hollow, and colour of marks.
MARKS = "all => all.map(one => ['d', 'fill', 'stroke'].map(name => one.getAttribute(name)))"


def answer(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urlopen(Request(url, headers=headers), timeout=PATIENCE) as response:
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
        wait_for(lambda: len(looks) > 4)


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
            assert process.wait(PATIENCE) == 130


@pytest.mark.processes
class TestInTheBrowser:
    pytestmark = needs_browser

    def test_a_site_that_is_killed_turns_absent_and_comes_back(self, tmp_path: Path) -> None:
        pytest.importorskip("zenoh")
        from builders import small_problem
        from fleet import Fleet

        place = tmp_path / "later"
        with ExitStack() as stack, watching(place) as address, chromium() as browser:
            shown = Page(browser)
            page = shown.open(address)
            assert page.inner_text("#now") == "Waiting for the run."
            fleet = stack.enter_context(Fleet.make(place, small_problem(3), 1_000_000, rho=0.5))
            page.wait_for_selector("tr[data-kind=absent] >> nth=2")  # nobody runs yet
            page.wait_for_selector("#progress >> text=No round is complete yet.")
            fleet.start()
            page.wait_for_selector("tr[data-kind=running] >> nth=2")
            page.wait_for_selector("#then >> text=All sites are connected.")
            page.wait_for_selector("#then >> text=/relative gap [0-9.e\u2212]+/")
            assert page.locator("#progress figure:has(h3:text('relative gap')) path.curve").count() == 1
            fleet.kill("d1")
            page.wait_for_selector("tr[data-name=d1][data-kind=absent]")
            page.wait_for_selector("#then >> text=d1 is absent")
            page.wait_for_selector("tr[data-kind=waiting] td:last-child >> text=d1")
            fleet.start("d1")
            page.wait_for_selector("tr[data-name=d1][data-kind=running]")
            page.wait_for_selector(".news >> text=d1 is back", state="attached")
            news = "".join(page.locator(".news").all_text_contents())
            assert news.count("d1 is absent") == news.count("d1 has started") == 1
            assert re.search(r"Round [\d,]+ of 1,000,000", page.inner_text("#now"))
            page.wait_for_selector("#then >> text=/rounds per second, about .* left/")
            # Bytes are counted: after a few rounds more, whatever else the machine does.
            page.wait_for_selector("tr[data-name=d0] >> text=/[kM]B/")
            assert findings(page) == []
            shown.close()

    def test_the_end_says_whether_rounds_converged_and_what_comes_next(self) -> None:
        sites = [{"name": "north", "kind": "done", "state": "done", "round": 12_345, "waiting_for": [], "sent": 5}]
        rounds = list(range(0, 12_500, 500))
        trace = {"n_iter": rounds, "gap": [10.0 ** (-t / 1000) for t in rounds]}
        state = {
            **STATE, "sites": sites, "rounds": 12_345, "round": 12_345, "trace": trace, "gap": 1e-12,
            "converged": 6_000, "closing": {"words": "1 model.", "command": "fedkin predict run/north/model rows.csv"},
        }  # fmt: skip
        shown_now = [{**state, "sites": [{**sites[0], "kind": "absent", "state": "dead"}], "closing": None}]
        with LiveServer("a run", lambda: shown_now[0]) as server, chromium() as browser:
            for dark in (True, False):
                shown = Page(browser, dark=dark)
                page = shown.open(server.url)
                marks = page.locator(".legend-groups path").evaluate_all(MARKS)
                assert len({(shape, fill == "none") for shape, fill, _ in marks}) == len(marks) == 5, "shapes differ"
                for vision in VISION:  # states of the same outline differ in lightness or colour, too
                    lab = seen_as([code.lstrip("#") for *_, code in marks], vision)
                    assert min(np.linalg.norm(a - b) for k, a in enumerate(lab) for b in lab[:k]) > 10
                assert findings(page) == []
                if dark:
                    shown.close()
            assert page.inner_text("#now") == "Stopped at round 12,345 of 12,345."
            assert "No site is running" in page.inner_text("#then") and "per second" not in page.inner_text("#then")
            shown_now[0] = state
            page.wait_for_selector("#now >> text=The site is done.")
            assert "Converged at about round 6,000: relative gap 1.0e\u221212" in page.inner_text("#then")
            assert page.inner_text("#closing code") == "fedkin predict run/north/model rows.csv"
            axis = page.locator("#progress figure:has(h3:text('relative gap')) text").all_text_contents()
            assert axis[0] == "0" and "12,000" in axis
            shown.close()
