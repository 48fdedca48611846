"""The page in a real browser: it draws without a complaint, and what is pointed at lights up everywhere."""

import os
import shutil
from dataclasses import replace

import pytest

import hsap
from hsap.view import Scene, read_run, render
from tests.view.plans import compiled, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed (it comes with hsap[dev])")
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path; apt-get install chromium"),
]
GUTTER = 46
ROW = 46


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Files of pages by name, each made once."""
    folder = tmp_path_factory.mktemp("pages")
    plan = compiled(balance="blocks")
    nodes = hsap.Cluster(ranks_per_node=4)
    run = tmp_path_factory.mktemp("run")
    write_run(run, plan)
    half = read_run(run)
    half = replace(half, courses=tuple((forward, None) for forward, _ in half.courses))
    scenes = {
        "one": [Scene.planned(hsap.simulate(plan))],
        "two": [Scene.planned(hsap.simulate(each)) for each in (plan, compiled(planner="ring", cluster=nodes))],
        "masks": [Scene.planned(hsap.simulate(compiled([90, 1, 40], "2x2", masks="window:7+full")))],
        "few": [Scene.planned(hsap.simulate(compiled([1], "3x1", "ring")))],
        "run": [Scene.planned(hsap.simulate(plan), "planned"), Scene.measured(read_run(run))],
        "half": [Scene.planned(hsap.simulate(plan), "planned"), Scene.measured(half)],
        "hostile": [Scene.planned(hsap.simulate(plan), "</script><img src=x onerror=alert(1)>")],
    }
    for name, each in scenes.items():
        (folder / f"{name}.html").write_text(render(each), encoding="utf-8")
    return folder


@pytest.fixture
def show(browser, pages):
    """Open a page; complaints on its console, and requests that it makes, fail the test."""
    complaints, opened = [], []

    def open_page(name, width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(page)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith("file:") else complaints.append(request.url))
        page.goto(f"file://{pages}/{name}.html")
        page.wait_for_selector("html[data-ready]", state="attached")
        settle(page)
        return page

    yield open_page
    for page in opened:
        page.close()
    assert complaints == []


def settle(page):
    """Wait until what was changed is drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def hover(page, canvas, x, y):
    page.locator(canvas).first.scroll_into_view_if_needed()
    box = page.locator(canvas).first.bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)
    settle(page)


PIXELS = """([name, layer]) => {
    const canvas = document.querySelector(name).querySelectorAll("canvas")[layer];
    const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
    const context = copy.getContext("2d", { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const pixels = new Uint32Array(context.getImageData(0, 0, copy.width, copy.height).data.buffer);
    const seen = new Map();
    for (const value of pixels) seen.set(value, (seen.get(value) ?? 0) + 1);
    return [...seen].sort((a, b) => b[1] - a[1]);
}"""
"""Colours of a canvas's layer with how many pixels have them, the most frequent first; 0 is clear."""


def overlay(page, canvas, layer=1):
    """Pixels of a canvas that aren't clear: the layer above shows what is lit."""
    return sum(count for colour, count in page.evaluate(PIXELS, [canvas, layer]) if colour)


def shown_range(page):
    return [float(part) for part in page.locator("#timeline .canvas").first.get_attribute("data-range").split()]


@pytest.mark.parametrize("name", ["one", "two", "masks", "few", "run", "hostile"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_page_draws_and_fits(show, name, width):
    page = show(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for panel in ("matrix", "timeline", "memory", "links", "waiting"):
        assert overlay(page, f"#{panel} .canvas", 0) > 1000, f"{panel} is empty"
    for button in ("backward", "stage", "off", "dark"):
        page.get_by_role("button", name=button, exact=True).click()
        settle(page)
    assert page.locator("#stream .line").count() > 0


def test_an_instruction_lights_its_block_its_box_its_buffers_and_its_line(show):
    page = show("one")
    assert overlay(page, "#matrix .canvas") == overlay(page, "#timeline .canvas") == 0
    # Rank 3's second kernel computes block (3, 2), an A3 of Figure 3 (HSAP), from key rows it receives.
    wide = page.locator("#timeline .canvas").bounding_box()["width"]
    hover(page, "#timeline .canvas", GUTTER + (wide - GUTTER) * 0.26, 4 + 3 * ROW + 12)
    assert "A3 block, q shard 3 × kv shard 2" in page.locator("#tip").inner_text()
    for panel in ("matrix", "timeline", "memory"):
        assert overlay(page, f"#{panel} .canvas") > 0, f"{panel} shows nothing"
    lit = page.locator("#stream .line.lit")
    assert lit.count() == 1 and "compute" in lit.inner_text()
    assert page.locator("#stream select").input_value() == "3"
    page.mouse.move(5, 5)
    settle(page)
    assert overlay(page, "#matrix .canvas") == 0 and page.locator("#tip").is_hidden()


def test_a_transfer_lights_its_partner_and_its_link(show):
    page = show("one")
    line = page.locator("#stream .line", has_text="create $recv-op $q %3").first
    line.hover()
    settle(page)
    tip = page.locator("#tip").inner_text()
    assert "rank 0 · #1" in tip and "from rank 3’s #" in tip and "received" in tip
    for panel in ("timeline", "links", "memory"):
        assert overlay(page, f"#{panel} .canvas") > 0


def test_a_block_lights_who_computes_it_and_a_click_keeps_it(show):
    page = show("one")
    side = page.locator("#matrix .canvas").bounding_box()["width"] - 31
    x, y = 30 + side * 0.06, 30 + side * 0.31  # block (2, 0)
    hover(page, "#matrix .canvas", x, y)
    tip = page.locator("#tip").inner_text()
    assert "A2 block, q shard 2 × kv shard 0" in tip and "rank 0 in stage 2" in tip
    assert overlay(page, "#timeline .canvas") > 0
    page.locator("#matrix .canvas").click(position={"x": x, "y": y})
    page.mouse.move(5, 5)
    settle(page)
    assert overlay(page, "#matrix .canvas") > 0
    page.keyboard.press("Escape")
    settle(page)
    assert overlay(page, "#matrix .canvas") == 0


def test_a_buffer_lights_what_touches_it(show):
    page = show("one")
    wide = page.locator("#memory .canvas").bounding_box()["width"]
    hover(page, "#memory .canvas", GUTTER + wide * 0.3, 92 + 14 + 176 - 50)
    assert "accumulator" in page.locator("#tip").inner_text()
    assert page.locator("#stream .line.lit").count() > 1


def test_zoom_and_pan_change_what_is_seen(show):
    page = show("one")
    everything = shown_range(page)
    box = page.locator("#timeline .canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    settle(page)
    zoomed = shown_range(page)
    assert everything[0] < zoomed[0] < zoomed[1] < everything[1]
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 120, box["y"] + 100, steps=4)
    page.mouse.up()
    settle(page)
    panned = shown_range(page)
    assert panned[0] > zoomed[0] and panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    page.locator("#timeline .canvas").focus()
    for key in ("+", "ArrowLeft", "0"):
        before = shown_range(page)
        page.keyboard.press(key)
        settle(page)
        assert shown_range(page) != before
    assert shown_range(page) == everything
    scrolled = page.evaluate("scrollY")
    page.mouse.wheel(0, 200)
    for _ in range(20):
        settle(page)
    assert page.evaluate("scrollY") > scrolled
    assert shown_range(page) == everything, "a plain wheel scrolls the page"


def test_the_matrix_zooms_and_is_walked_by_keys(show):
    page = show("one")
    canvas = page.locator("#matrix .canvas")
    canvas.focus()
    whole = canvas.get_attribute("data-sight")
    page.keyboard.press("+")
    settle(page)
    assert canvas.get_attribute("data-sight") != whole
    for key in ("0", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    settle(page)
    assert canvas.get_attribute("data-sight") == whole and overlay(page, "#matrix .canvas") > 0
    assert page.locator("#stream .line.lit").count() == 1


def test_the_stream_is_walked_by_keys_and_has_few_lines(show):
    page = show("one")
    page.locator("#stream .stream").focus()
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    settle(page)
    assert page.locator("#stream .line.lit b").inner_text() == "3"
    page.get_by_label("Rank", exact=True).select_option("5")
    assert "rank 5" in page.locator("#stream select option:checked").inner_text()


def test_two_plans_share_time_and_figures(show):
    page = show("two")
    views = page.locator("#timeline .view")
    assert views.count() == 2 and page.locator("#figures tbody tr").count() == 9
    left, right = views.nth(0).bounding_box(), views.nth(1).bounding_box()
    assert left["y"] == right["y"] and left["x"] < right["x"]
    row = page.locator("#figures tbody tr").first.locator("td").all_inner_texts()
    assert row[2].endswith("×")
    page.get_by_role("button", name="Zoom in").click()
    settle(page)
    ranges = {page.locator("#timeline .canvas").nth(i).get_attribute("data-range") for i in (0, 1)}
    assert len(ranges) == 1
    narrow = show("two", 400)
    boxes = [narrow.locator("#timeline .view").nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]


def test_both_themes_by_system_and_by_hand(show):
    found = {}
    for scheme in ("light", "dark"):
        page = show("one", scheme=scheme)
        found[scheme] = (
            page.evaluate("getComputedStyle(document.body).backgroundColor"),
            page.evaluate(PIXELS, ["#timeline .canvas", 0])[0][0],
        )
        other = "dark" if scheme == "light" else "light"
        page.get_by_role("button", name=other, exact=True).click()
        settle(page)
        found[f"{other} by hand"] = (
            page.evaluate("getComputedStyle(document.body).backgroundColor"),
            page.evaluate(PIXELS, ["#timeline .canvas", 0])[0][0],
        )
    assert found["light"] == found["light by hand"] and found["dark"] == found["dark by hand"]
    assert found["light"][0] != found["dark"][0] and found["light"][1] != found["dark"][1]


def test_a_run_shows_twice_the_planned_time(show):
    page = show("run")
    row = page.locator("#figures tbody tr").first.locator("td").all_inner_texts()
    assert row[2] == "2.00 ×"
    assert "measured in step 3" in page.locator("#about").inner_text()


def test_a_direction_that_nobody_measured_says_so(show):
    page = show("half")
    assert page.get_by_text("Nothing was measured").first.is_hidden()
    page.get_by_role("button", name="backward").click()
    settle(page)
    views = page.locator("#timeline .view")
    assert "Nothing was measured" in views.nth(1).inner_text() and "Nothing" not in views.nth(0).inner_text()
    assert overlay(page, "#timeline .canvas", 0) > 1000
    assert page.locator("#figures tbody tr").first.locator("td").all_inner_texts()[1:] == ["–", "–"]


def test_words_of_a_plan_stay_words(show):
    page = show("hostile")
    assert page.locator("img").count() == 0
    assert "</script><img src=x onerror=alert(1)>" in page.locator("#about").inner_text()
