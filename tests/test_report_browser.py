"""Reports in a real browser: what they say, clicks, keys, dark, paper, phones, and what a screen reader would miss.

FEDKIN_PICTURES=DIR keeps a screenshot of every page, light and dark, wide and as wide as a phone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import VISION, Page, findings, needs_browser, seen_as
from fedkin import Federation
from fedkin.datasets import paper_design
from fedkin.fitting import FitOptions, FittedModel, compare, fit, with_history
from fedkin.report import report_page
from test_report import large

pytestmark = [*needs_browser, pytest.mark.timeout(240)]
PHONE = 390
#: Seconds until a page of any size is drawn.
PATIENCE = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


def written(folder: Path, name: str, model: FittedModel) -> str:
    path = folder / f"{name}.html"
    path.write_text(report_page(model), encoding="utf-8")
    return path.as_uri()


# --- the models -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(folder: Path) -> str:
    """A fused model as ``fedkin fit`` makes it of the demonstration's rows, smaller."""
    design = paper_design(20, 40, 6, 2, varrho=0.2, signal=2, seed=0)
    options = FitOptions(method="fused", select="holm")
    found = compare(design.federation, graph=design.graph, options=options, repeats=2)
    model = fit(design.federation, design.graph, options)
    model = with_history(model, design.federation, design.graph, options)
    model = replace(model, comparison=found.plain(), history={**model.history, "command": "fedkin demo"})
    return written(folder, "demo", model)


@pytest.fixture(scope="module")
def landmine(folder: Path) -> str:
    """Kin of tasks like those of landmine: rare classes, two kinds of ground."""
    rng = np.random.default_rng(0)
    theta = np.array([[-2.5, 1.5, 0.0, -1.0], [-2.5, -1.0, 1.5, 0.5]])
    rows = {}
    for u in range(16):
        X = rng.standard_normal((300, 3))
        chance = 1 / (1 + np.exp(-(theta[u % 2, 0] + X @ theta[u % 2, 1:])))
        rows[u + 1] = (X, (rng.random(300) < chance).astype(float))
    federation = Federation(rows, feature_names=("x1", "x2", "x3"))
    options = FitOptions(loss="logistic", method="kin")
    return written(folder, "landmine", replace(fit(federation, None, options), history={"deviations": [2.0, 2.0, 2.0]}))


@pytest.fixture(scope="module")
def election(folder: Path) -> str:
    """A table with the names of states: what matters here is the map."""
    rng = np.random.default_rng(0)
    rows = {}
    for u, state in enumerate(["Ohio", "Texas", "Maine", "Iowa", "Utah", "New York", "Georgia", "Oregon"]):
        X = rng.standard_normal((40, 2))
        rows[state] = (X, X @ [3.0 if u % 2 else -3.0, 1.0] + rng.standard_normal(40))
    return written(folder, "election", fit(Federation(rows), None, FitOptions(method="kin")))


@pytest.fixture(scope="module")
def many(folder: Path) -> str:
    """Two thousand sites."""
    model = large(2000, 12)
    centres = np.random.default_rng(1).standard_normal((8, 1, 12))
    own = model.coef * np.r_[np.zeros(6), np.full(6, 0.1)]  # half of the coefficients are common to a group
    return written(folder, "many", replace(model, coef=own + centres[model.groups]))


@pytest.fixture(scope="module")
def unresolved(folder: Path) -> str:
    """Sites that differ by degrees."""
    rng = np.random.default_rng(0)
    theta, X = rng.standard_normal((15, 3)), rng.standard_normal((15, 30, 3))
    rows = {f"school {u}": (X[u], X[u] @ theta[u] + rng.standard_normal(30)) for u in range(15)}
    return written(folder, "unresolved", fit(Federation(rows), None, FitOptions(method="kin")))


ALL = ("demo", "landmine", "election", "many", "unresolved")


@pytest.fixture
def shown(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; at the end nothing may be on a console, and nothing may have been asked of a network."""
    opened: list[Page] = []

    def show(address: str, **options: Any) -> Any:
        opened.append(Page(browser, **options))
        return opened[-1].open(address)

    yield show
    for one in opened:
        assert all(url.startswith("file:") for url in one.asked)
        one.close()


def drawn(page: Any, selector: str) -> bool:
    """Whether a canvas has more than one colour on it."""
    return page.evaluate(
        """selector => { const c = document.querySelector(selector), all = c.getContext("2d")
        .getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let k = 0; k < all.length; k += 4) seen.add(all[k] + "," + all[k + 1] + "," + all[k + 2]);
        return seen.size > 2; }""",
        selector,
    )


def frame_of(page: Any, selector: str) -> dict[str, float]:
    """Where an element is, once it is in sight."""
    page.locator(selector).evaluate("one => one.scrollIntoView({block: 'center', behavior: 'instant'})")
    return page.locator(selector).bounding_box()


# --- every page -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 1280), (False, PHONE), (True, PHONE)])
def test_pages_are_drawn(name: str, dark: bool, width: int, request: pytest.FixtureRequest, shown: Any) -> None:
    page = shown(request.getfixturevalue(name), dark=dark, width=width)
    assert page.inner_text("h1") and page.inner_text(".lead")
    if name == "unresolved":
        assert page.locator(".ranked circle").count() == 15 and not page.is_visible(".matrix canvas")
        page.click("text=Every pair of sites")
    for canvas in (".graph canvas", ".matrix canvas"):
        page.wait_for_selector(f"{canvas}[style*=width]")
    assert drawn(page, ".graph canvas") and drawn(page, ".matrix canvas")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in background[4:-1].split(",")) < 200) == dark
    place = os.environ.get("FEDKIN_PICTURES")
    if place:
        kind = f"{'dark' if dark else 'light'}-{'phone' if width == PHONE else 'wide'}"
        page.screenshot(path=Path(place, f"{name}-{kind}.png"), full_page=True)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dark", [False, True])
def test_no_findings_of_axe(name: str, dark: bool, request: pytest.FixtureRequest, shown: Any) -> None:
    page = shown(request.getfixturevalue(name), dark=dark)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert findings(page) == []


def test_a_page_of_two_thousand_sites_is_there_at_once(many: str, browser: Any) -> None:
    one = Page(browser)
    session = one.context.new_cdp_session(one.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # of the processor: others may be busy
    one.open(many)
    metrics = {line["name"]: line["value"] for line in session.send("Performance.getMetrics")["metrics"]}
    one.close()
    assert metrics["TaskDuration"] < PATIENCE


# --- what they say and do -------------------------------------------------------------------------------------


def test_the_comparison_and_the_path(demo: str, shown: Any) -> None:
    page = shown(demo)
    assert page.inner_text("h1").startswith("Use ") and "20 sites form 2 groups." in page.inner_text(".lead")
    words = page.inner_text("#comparison")
    for method in ("Local", "Global", "Site intercepts", "Fedkin"):
        assert method in words
    assert "gain over their own models" in words and "mean squared error" in page.inner_text("h1")
    assert "standard error of the difference from Fedkin" in words
    gains = page.locator("#comparison .gains svg.chart")
    assert "reduction of mean squared error" in gains.text_content()
    assert gains.locator(".whisker").count() == 20 and " to " in gains.locator(".pick title >> nth=0").text_content()
    by_gain = gains.locator(".pick .hint").all_text_contents()
    page.click("text=By name")
    assert gains.locator(".pick .hint").all_text_contents() == sorted(by_gain, key=int) != by_gain
    page.click("text=By gain")
    assert page.locator("#comparison .gains circle, #comparison .gains .loss path").count() == 20
    page.click("#comparison summary")
    assert page.locator("#comparison tbody tr[data-site]").count() == 12
    assert page.locator("#path svg").count() == 2 and "lam =" in page.inner_text("#path")
    assert "The optimum is certified" in page.inner_text("#trust")
    assert "fedkin demo" in page.inner_text("#reproduce")
    page.check("text=dropped edge")
    assert drawn(page, ".graph canvas")


def test_matrix_graph_and_table_are_linked(landmine: str, shown: Any) -> None:
    page = shown(landmine)
    box = frame_of(page, ".matrix canvas")
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.3)
    assert "alike with probability" in page.inner_text(".matrix .said")
    hovered = page.inner_text(".graph .said").split(":")[0]
    assert page.inner_text(".matrix .said").startswith(f"{hovered} and ")
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.3)
    assert page.inner_text(".card h3").strip() == hovered
    page.fill("#coefficients input[type=search] >> nth=0", hovered)
    assert page.locator("#coefficients tr.chosen").count() == 1
    other = page.locator(".near button").first
    name = other.inner_text()
    other.click()
    assert page.inner_text(".card h3").strip() == name
    assert page.input_value("#difference input >> nth=0") == name


def test_coefficients_are_sorted_and_searched(landmine: str, shown: Any) -> None:
    page = shown(landmine)
    cells = page.locator("#coefficients .block >> nth=0").locator("tbody td:nth-child(3)")

    def values() -> list[float]:
        return [float(text.replace("\u2212", "-")) for text in cells.all_inner_texts()]

    assert values() == sorted(values(), reverse=True)
    page.click("#coefficients button.sort >> text=Estimate")
    assert values() == sorted(values())
    before = values()
    page.select_option("#coefficients select", index=0)
    assert values() != before and "(intercept)" in page.inner_text("#coefficients .forest >> nth=0")
    page.click("#coefficients button >> text=Next")
    assert "13" in page.inner_text("#coefficients .count")
    page.fill("#coefficients input[type=search] >> nth=0", "no such site")
    assert page.inner_text("#coefficients .count") == "0 sites"
    assert "No site or group is called “no such site”." in page.inner_text("#coefficients .block tbody >> nth=0")


def test_the_map_of_states(election: str, shown: Any) -> None:
    page = shown(election)
    assert page.get_attribute("button:text-is('Map')", "aria-pressed") == "true"
    places = page.evaluate("JSON.parse(document.getElementById('payload').textContent).places")
    tile = next(one for one in places["tiles"] if one[0] == "OH")
    box = frame_of(page, ".graph canvas")
    unit = box["width"] / 11
    page.mouse.click(box["x"] + (tile[1] + 0.5) * unit, box["y"] + (tile[2] + 1.9) * unit)
    assert page.inner_text(".card h3").strip() == "Ohio"
    page.click("button:text-is('Graph')")
    assert page.get_attribute("button:text-is('Graph')", "aria-pressed") == "true"
    assert drawn(page, ".graph canvas")


def test_groups_first_and_sites_on_demand(many: str, shown: Any) -> None:
    page = shown(many)
    assert page.inner_text("h1") == "2,000 sites form 8 groups."
    assert page.locator("tr[data-site]").count() <= 60, "lists are paged"
    page.check("text=show sites")
    page.focus(".graph canvas")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    chosen = page.inner_text(".card h3").strip()
    assert chosen.startswith("site ") and page.locator(".near li").count() > 0
    page.click("#coefficients summary")
    page.fill("#coefficients input[type=search] >> nth=0", "site 01999")
    assert page.locator("#coefficients tr[data-site]").count() == 1
    assert "neighbouring sites" in page.inner_text(".matrix .said")


def test_differences_say_how_they_were_made(landmine: str, shown: Any, folder: Path, monkeypatch: Any) -> None:
    page = shown(landmine)
    assert "accounts for shared uncertainty" in page.inner_text("#difference")
    assert page.inner_text("#difference thead th >> nth=1") == "Difference"
    monkeypatch.setattr("fedkin.report.payload.MOST_DIFFERENCES", 0)
    rows = {u: ([[0.0], [1.0], [2.0], [3.0]], [0.0, 1.0 + u, 2.0, 3.5 * u]) for u in range(4)}
    model = fit(Federation(rows), None, FitOptions(method="kin"))
    assert "Approximate" in shown(written(folder, "approximate", model)).inner_text("#difference")


def test_a_method_within_the_rounded_axis_is_a_dot(shown: Any, folder: Path) -> None:
    """Arrows are for methods that are beyond the axis, not for those beyond its limits before they were rounded."""
    rows = {name: [[float(k > 1)]] for k, name in enumerate("abc")}
    model = fit(Federation(rows), None, FitOptions("mean"))
    means = {"Local": 0.385, "Global": 0.3925, "Site intercepts": 0.3855, "Fedkin": 0.384}
    methods = [{"name": name, "mean": mean, "difference_error": 0.008} for name, mean in means.items()]
    found = {"metric": "log-loss", "methods": methods, "sites": []}
    page = shown(written(folder, "axis", replace(model, comparison=found)))
    chart = page.locator("#comparison svg.chart >> nth=0")
    assert chart.locator("circle").count() == 4 and chart.locator(".cut").count() == 0
    values = chart.locator("text.value").all_text_contents()
    assert values == ["0.3850", "0.3925", "0.3855", "0.3840"]


@pytest.mark.parametrize("width", [1280, PHONE])
def test_huge_errors_do_not_flatten_the_others(width: int, shown: Any, folder: Path) -> None:
    names = [f"A hospital with a long name {u}" for u in range(20)]
    rows = {name: [[float(k > 9)]] for k, name in enumerate(names)}
    model = fit(Federation(rows), None, FitOptions("mean"))
    alone = np.r_[9e10, np.linspace(1.1e9, 9.5e8, 19)]
    means = {"Local": 8.9e10, "Global": 8.87e9, "Site intercepts": 8.85e9, "Fedkin": 8.77e9}
    found = {
        "metric": "mean squared error",
        "methods": [{"name": name, "mean": mean, "standard_error": 1e8} for name, mean in means.items()],
        "sites": [
            {"site": name, "Local": alone[k], "Fedkin": 1e9, "gain": alone[k] - 1e9} for k, name in enumerate(names)
        ],
    }
    page = shown(written(folder, f"huge-{width}", replace(model, comparison=found)), width=width)
    assert "89.0" in page.text_content("#comparison svg >> nth=0")
    assert page.locator("#comparison .cut").count() == 2 and "(\u00d7 10\u2079)" in page.inner_text("#comparison")
    places = [
        float(x)
        for x in page.locator("#comparison .gains circle").evaluate_all("all => all.map(one => one.getAttribute('cx'))")
    ]
    wide = page.evaluate("document.querySelector('#comparison .gains svg').viewBox.baseVal.width")
    assert max(places) - min(places) > 0.1 * wide, "the other sites are not one line"
    assert page.locator("#comparison .gains .cut").count() == 1 and "arrow" in page.inner_text(".gains figcaption")
    page.click("#comparison summary")
    names = page.locator("#comparison tbody .site")
    assert len(set(names.all_inner_texts())) == names.count() == 12, "names that are cut differ"
    assert page.evaluate(
        "[...document.querySelectorAll('tbody .site')].every(one => one.getClientRects().length === 1)"
    )
    place = page.locator("#comparison thead th:has-text('Fedkin')").bounding_box()
    assert place["x"] + place["width"] <= width, "the errors of Fedkin are in sight"
    cells = page.locator("#comparison tbody td.number").all_inner_texts()
    assert all(re.fullmatch(r"[+\u2212]?\d{1,3}(,\d{3})*", cell) for cell in cells), "no powers of ten, commas only"
    words = page.evaluate(
        """[...document.querySelectorAll('#comparison svg')].map(one => [...one.querySelectorAll('text')]
        .map(text => text.getBoundingClientRect()).map(box => [box.left, box.top, box.right, box.bottom]))"""
    )
    for boxes in words:
        for k, a in enumerate(boxes):
            for b in boxes[:k]:
                assert a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] - 3 or b[1] >= a[3] - 3, "no words over others"


def test_no_groups_resolved_is_said_in_peace(unresolved: str, shown: Any) -> None:
    page = shown(unresolved)
    title = "No groups resolved: the 15 sites differ gradually, or too little to show groups."
    assert page.inner_text("h1") == title
    assert "they differ gradually" in page.inner_text("#kin")
    assert page.locator(".legend-groups").count() == 0
    page.click(".ranked [data-site='3']")
    assert page.inner_text(".card h3").strip() == "school 3"


def test_the_address_keeps_the_choice(landmine: str, shown: Any) -> None:
    page = shown(landmine)
    page.fill(".card input", "no such site")
    page.keyboard.press("Tab")
    assert "No site is called" in page.inner_text(".card")
    page.click("#coefficients button.site >> nth=2")
    chosen = page.inner_text(".card h3").strip()
    assert page.input_value(".card input") == chosen and page.url.endswith(f"#site={chosen}")
    again = shown(page.url)
    assert again.inner_text(".card h3").strip() == chosen
    again.click(".legend-groups button >> nth=1")
    assert again.inner_text(".card h3").strip() == "Group 2" and again.url.endswith("#group=2")
    assert again.locator(".card .members button").count() > 1 and again.input_value(".card input") == ""


def test_effects_as_odds_ratios_and_files_to_save(landmine: str, shown: Any) -> None:
    page = shown(landmine)
    cells = page.locator("#coefficients .block >> nth=0").locator("tbody td:nth-child(3)")
    before = [float(text.replace("\u2212", "-")) for text in cells.all_inner_texts()]
    page.click("button:text-is('per standard deviation')")
    doubled = [float(text.replace("\u2212", "-")) for text in cells.all_inner_texts()]
    np.testing.assert_allclose(doubled, 2 * np.array(before), atol=0.02)
    assert "(per standard deviation): log-odds" in page.text_content("#coefficients svg.chart >> nth=0")
    page.click("button:text-is('per unit')")
    page.click("button:text-is('odds ratio')")
    after = [float(text) for text in cells.all_inner_texts()]
    np.testing.assert_allclose(after, np.exp(before), rtol=0.05)
    with page.expect_download() as saved:
        page.click("#coefficients button:text-is('CSV') >> nth=0")
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0] == "Site,Group,Estimate,Low,High" and float(lines[1].split(",")[2]) == pytest.approx(
        after[0], rel=0.05
    )
    page.hover("#coefficients .drawing >> nth=0")
    with page.expect_download() as saved:
        page.click("#coefficients button:text-is('SVG') >> nth=0")
    assert Path(saved.value.path()).read_text().startswith("<svg")


@pytest.mark.parametrize("vision", VISION)
def test_groups_are_told_apart_without_one_kind_of_cone(vision: str) -> None:
    """Marks of the same shape differ clearly in the Lab space."""
    source = (Path(__file__).parents[1] / "web" / "src" / "theme.ts").read_text()
    for name in ("LIGHT", "DARK"):
        codes = re.findall("#([0-9a-f]{6})", re.search(rf"const {name} = \[(.*?)\]", source, re.S)[1])
        lab = seen_as(codes, vision)
        for a in range(12):
            for b in range(a):
                apart = np.linalg.norm(lab[a % len(lab)] - lab[b % len(lab)])
                assert a % 4 != b % 4 or apart > 10, f"{name}: groups {a + 1} and {b + 1}"


def test_everything_can_be_done_with_keys(landmine: str, shown: Any) -> None:
    page = shown(landmine)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.tagName"))
        if page.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    assert {"A", "INPUT", "CANVAS"} <= seen
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    first = page.inner_text(".card h3")
    page.keyboard.press("Escape")
    assert page.locator(".card h3").count() == 0
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.inner_text(".card h3") and first


def test_on_paper_everything_is_open_and_dark_is_light(demo: str, shown: Any, tmp_path: Path) -> None:
    page = shown(demo, dark=True)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.is_visible(".contents") and page.is_visible("#comparison table")
    assert page.is_visible(".gains h3") and not page.is_visible(".save") and not page.is_visible(".said >> nth=0")
    assert page.locator("#comparison tbody tr[data-site]").count() == 20, "no pages on paper"
    assert not page.is_visible(".card"), "no empty card"
    widths = page.locator("svg.chart").evaluate_all("all => all.map(one => one.viewBox.baseVal.width)")
    assert max(widths) <= 700, "pictures have the width of paper, so that their words keep their size"
    assert page.evaluate("[...document.querySelectorAll('details')].every(one => one.open)")
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_names_are_text(browser: Any, folder: Path) -> None:
    nasty = "</script><img src=x onerror=\"document.body.dataset.broken='yes'\">"
    rows = {f"{nasty}{u}": ([[0.0], [1.0], [2.0 + u]], [1.0, 3.0, 5.0]) for u in range(3)}
    model = fit(Federation(rows, feature_names=[nasty]), None, FitOptions(method="fused", lam=0.1))
    model = replace(model, target_name=nasty)
    one = Page(browser)
    page = one.open(written(folder, "nasty", model))
    page.click("#coefficients summary >> nth=0")
    page.click("#coefficients button.site >> nth=0")
    assert page.locator("img").count() == 0 and page.evaluate("document.body.dataset.broken") is None
    one.close()
