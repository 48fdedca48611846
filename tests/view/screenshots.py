"""Take the pictures in docs/: `python -m tests.view.screenshots`, with playwright and a Chromium on the path."""

import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import hsap
from hsap.view import Scene, render
from tests.view.plans import README
from tests.view.test_browser import CHROMIUM, GUTTER, ROW, hover, settle

DOCS = Path(__file__).parents[2] / "docs"
WIDTHS = {"wide": 1280, "narrow": 400}


def main() -> None:
    """Write docs/view-{wide,narrow}-{light,dark}.png: SAP on the packed batch of HSAP's Figure 3."""
    heads, topology = hsap.HeadShape(8, 2, 128, "bf16"), hsap.Topology.parse("8x1")
    plan = hsap.compile(hsap.Problem(hsap.Layout.from_lengths(README), heads, topology), "sap", balance="blocks")
    DOCS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        path = Path(folder) / "report.html"
        path.write_text(render([Scene.planned(hsap.simulate(plan))]), encoding="utf-8")
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, width in WIDTHS.items():
            for scheme in ("light", "dark"):
                height = 1235 if width > 1000 else 900
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(path.as_uri())
                page.wait_for_selector("html[data-ready]", state="attached")
                settle(page)
                if width > 1000:
                    wide = page.locator("#timeline .canvas").bounding_box()["width"]
                    hover(page, "#timeline .canvas", GUTTER + (wide - GUTTER) * 0.27, 4 + 3 * ROW + 12)
                    page.evaluate("scrollTo(0, 0)")
                    settle(page)
                page.screenshot(path=DOCS / f"view-{name}-{scheme}.png", full_page=width < 1000)
        browser.close()


if __name__ == "__main__":
    main()
