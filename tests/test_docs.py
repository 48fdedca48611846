"""The documentation builds strictly and without network, its code runs, its pictures and tables are the code's own."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import yaml

from hsap.planners import PLANNERS
from tests.docs_blocks import (
    JUDGED,
    PAGES,
    ROOT,
    blocks_of,
    check_composed,
    printed_as_said,
    run_block,
    training_arguments,
)

DOCS = ROOT / "docs"
BLOCKS = {page: blocks_of(page) for page in PAGES}


@pytest.fixture(autouse=True)
def _planners_as_they_were():
    """A page registers a planner, which other tests' tables of planners don't know."""
    known = dict(PLANNERS)
    yield
    PLANNERS.clear()
    PLANNERS.update(known)


def script(name):
    """Load a script of docs/scripts as a module."""
    folder = str(DOCS / "scripts")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, in strict mode: a warning is an error."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason=f'{name} isn\'t installed: pip install "hsap[docs]"')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loaded(HTMLParser):
    """Addresses that a page has a browser load, without being clicked on."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.addresses.append(values["src"])
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(values["href"])


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert {page.stem for page in pages} >= {page.stem for page in DOCS.glob("*.md")}
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        outside = [address for address in loaded.addresses if re.match(r"(https?:)?//", address)]
        assert not outside, f"{page.name} loads {outside}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_pages_written_by_the_build_have_all_keys_commands_and_docstrings(site):
    text = {name: (site / f"{name}.html").read_text(encoding="utf-8") for name in ("settings", "commands", "reference")}
    settings = script("settings")
    for name in settings.FILES:
        for setting in settings.settings(name):
            assert f"<code>{setting.key}</code>" in text["settings"], setting
    for command in ("plan", "verify", "tune", "bench-calibrate"):
        assert f'id="hsap-{command}"' in text["commands"], command
    assert "Compile a packed batch into the streams of every rank." in text["reference"]


def test_every_page_is_in_the_navigation():
    """mkdocs warns of it; here it is told without mkdocs as well."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert re.search(rf"\b{page.name}$", config, re.MULTILINE), f"name {page.name} in mkdocs.yml's nav"


def test_settings_are_those_of_the_files_and_all_say_what_they_mean():
    settings = script("settings")
    for name in settings.FILES:
        known = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
        group = "" if name == "config" else name.partition("/")[0] + "."
        want = {}
        for key, value in known.items():
            if key not in settings.SKIPPED:
                want[group + key] = value
                nested = value if isinstance(value, dict) else {}
                want |= {f"{group}{key}.{inner}": each for inner, each in nested.items()}
        told = {setting.key: setting for setting in settings.settings(name)}
        assert set(told) == set(want), name
        for key, setting in told.items():
            assert setting.meaning or isinstance(want[key], dict), (
                f"configs/{name}.yaml: say in a comment what {key} means"
            )
            if setting.value:
                assert yaml.safe_load(setting.value) == want[key], key


def test_pictures_are_what_the_script_draws():
    pictures = script("pictures")
    for name, draw in pictures.PICTURES.items():
        path = pictures.FOLDER / f"{name}.svg"
        assert path.read_text(encoding="utf-8") == draw().text(), f"{path.name}: run python docs/scripts/pictures.py"
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == set(pictures.PICTURES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_code_says_whether_it_is_run(page):
    for block in BLOCKS[page]:
        if block.language in JUDGED:
            marked = re.match(r"runs$|composes$|not run: \w+", block.mark) or block.text.startswith("--8<--")
            assert marked, f"{block}: mark the block, see tests/docs_blocks.py"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.mark == "runs" for b in BLOCKS[page])], ids=lambda page: page.name
)
def test_code_runs_and_prints_what_is_said(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("datasets", "docs", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    names, printed = {"__name__": page.stem}, ""
    for block in BLOCKS[page]:
        if block.mark == "runs":
            printed = run_block(block, names)
        elif block.mark == "prints":
            assert printed_as_said(block.text, printed), f"{block} says\n{block.text}\nbut it printed\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_train_compose(page):
    for block in BLOCKS[page]:
        if block.mark == "composes":
            for processes, arguments in training_arguments(block):
                check_composed(processes, arguments)


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page):
    """Headings of a page, as links name them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    words = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in words}


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent == ROOT], ids=lambda page: page.name)
def test_links_of_pages_outside_the_site_lead_somewhere(page):
    for found in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = (found[0] or found[1]).partition("#")
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {path}#{anchor}"


def test_files_that_pages_name_exist():
    """Of the project's own folders, as in `hsap/sim/cost.py`."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:hsap|tests|docs|launch|configs|datasets)/[\w./-]*\w/?)`", text):
            there = (ROOT / name).exists() or (ROOT / f"{name}.py").exists()
            assert there, f"{page.name} names {name}, which isn't there"


def test_planners_are_told_of():
    told = (DOCS / "planners.md").read_text(encoding="utf-8")
    papers = (DOCS / "papers.md").read_text(encoding="utf-8")
    for name in PLANNERS:
        if name != "whole_or_zigzag":  # the example's, which a page registers
            assert f"`{name}`" in told, f"docs/planners.md says nothing of {name}"
            assert re.search(rf"`(hsap/planners/)?{name}(\.py|/)?`", papers), f"docs/papers.md says nothing of {name}"


def test_the_worked_example_keeps_a_planner_s_contract():
    import hsap

    spec = importlib.util.spec_from_file_location("own_planner", DOCS / "examples" / "own_planner.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for lengths in ([], [1], [37, 5, 1, 20, 3], [1] * 30, [500]):
        for topology in ("3x1", "2x2"):
            shape = hsap.Topology.parse(topology)
            problem = hsap.Problem(
                hsap.Layout.from_lengths(lengths), hsap.HeadShape(4, 2, 8), shape, [("causal", 1), ("window:6", 2)]
            )
            report = hsap.verify(hsap.compile(problem, "whole_or_zigzag"))
            assert report.ok, str(report)
    assert example.error_against_float64([37, 5, 1, 20, 3], "4x1") < 1e-14
    assert example.error_against_float64([200, 9], "2x2") < 1e-14
    priced = {row[0]: row[1:] for row in example.compare(("whole_or_zigzag", "ring"))}
    assert priced["whole_or_zigzag"][1] < priced["ring"][1], "it moves less than a ring"
    assert priced["whole_or_zigzag"][2] < priced["ring"][2], "and is faster"
