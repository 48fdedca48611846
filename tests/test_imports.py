"""Imports run one way, and planning needs no torch: what the layout promises, checked on every file."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hsap"
MAY_IMPORT = {
    "ir": set(),
    "loops": set(),
    "keys": set(),
    "files": set(),
    "children": set(),
    "tensorfile": {"files"},
    "steps": set(),
    "targets": set(),
    "launched": {"ir"},
    "gathering": set(),
    "position": {"ir"},
    "compiler": {"ir", "loops"},
    "planners": {"ir", "loops"},
    "verify": {"ir", "loops"},
    "sim": {"ir", "loops"},
    "runtime": {"ir", "position"},
    "clusters": {"ir"},
    "api": {"ir", "clusters", "compiler", "planners", "sim"},
    "models": {"ir", "keys", "targets", "tensorfile"},
    "data": {"ir", "keys", "files", "loops", "targets"},
    "view": {"ir", "steps", "sim", "verify"},
    "calibrate": {"children", "launched", "ir", "clusters", "sim", "runtime"},
    "papers": {"ir", "api", "compiler", "planners", "sim", "models", "tune"},
    "tune": {"buckets", "children", "steps", "ir", "clusters", "api", "compiler", "planners", "sim", "models", "data"},
    "cli": {
        *("calibrate", "children", "papers", "ir", "clusters", "api", "planners", "verify", "view", "tune", "models"),
        *("data", "files", "launched", "targets", "train", "checks", "doctor"),
    },
    "planning": {"ir", "position", "api", "verify", "data"},
    "integrations": {"ir", "clusters", "data", "models", "runtime", "planning", "targets", "leak"},
    "leak": {"ir", "gathering"},
    "checks": {"ir", "data", "gathering", "leak", "models", "planning", "runtime", "train"},
    "doctor": {"ir", "keys", "launched", "planners", "runtime", "calibrate", "train"},
    "buckets": {"models"},
    "train": {
        "children",
        "buckets",
        "gathering",
        "position",
        "ir",
        "steps",
        "targets",
        "launched",
        "keys",
        "files",
        "clusters",
        "api",
        "verify",
        "planners",
        "planning",
        "runtime",
        "models",
        "data",
        "leak",
        "tensorfile",
    },
}
"""Which rooms of the package each room may import from; `planners` and `compiler` know nothing of each other."""

KNOWN_CIRCLES = {
    *("hsap.ir.plan", "hsap.ir.text"),  # a plan gives its own text
}
"""Files that import each other, for types alone on one side."""

FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it, by name as a string too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    if path.parent == PACKAGE and path.name == "__init__.py":
        return
    here = room(path)
    rooms = {name.split(".")[1] for name in imported(path) if name.startswith("hsap.") and name != "hsap."}
    assert rooms - {here} <= MAY_IMPORT[here], f"{path} imports {rooms - {here} - MAY_IMPORT[here]}"


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_the_map_of_the_code_names_the_room(name: str) -> None:
    told = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.search(rf"`(hsap/)?{name}(\.py)?`", told), f"say in CONTRIBUTING's Where things are what hsap/{name} is"


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def begun(path: Path) -> set[str]:
    """What the lines of a package's list of modules begin with; empty where its docstring has none."""
    found = re.findall(r"^ *(\w+(?:, \w+)*) {2,}\S", docstring(path), re.MULTILINE)
    return {name for names in found for name in names.split(", ")}


OTHER_LISTS = {PACKAGE / "data" / "prepared"}
"""Packages whose docstrings list something else: files on the disk."""
LISTS = [path for path in FILES if path.name == "__init__.py" and begun(path) and path.parent not in OTHER_LISTS]


@pytest.mark.parametrize("path", LISTS, ids=lambda p: str(p.parent.relative_to(PACKAGE)))
def test_a_package_s_list_names_its_modules(path: Path) -> None:
    there = {module.stem for module in path.parent.glob("*.py")} | {at.parent.name for at in path.parent.glob("*/*.py")}
    # Named where a line begins, or as part of another: "pool  processes of a rank (worker: what runs in each)".
    named = {
        name
        for name in there - {"__init__", "__main__"}
        if re.search(rf"(^|[(,;]|  |\band )\s*{name}([,:;)]|  | \()|`{name}`", docstring(path), re.MULTILINE)
    }
    assert named == there - {"__init__", "__main__"}, f"say in {path}'s docstring what these are"
    gone = {name for name in begun(path) - there if not (path.parent / name).is_dir()}
    assert not gone, f"{path}'s docstring lists {gone}, and there are none"


def module_file(name: str) -> Path | None:
    """The file of a module of the package, None where there is none of that name."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@functools.cache
def names_in(path: Path) -> set[str]:
    """What a file defines or imports, and its strings, which may be keys of what it loads when asked for."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias():
                names.add(node.asname or node.name)
            case ast.Constant(value=str()):
                names.add(node.value)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_is_imported_is_there(path: Path) -> None:
    """Imports inside functions too, which fail only when a user comes that way."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "hsap":
            home = module_file(node.module)
            assert home is not None, f"{path}:{node.lineno}: there is no {node.module}"
            known = names_in(home)
            for alias in node.names:
                there = alias.name in known or module_file(f"{node.module}.{alias.name}") is not None
                assert there, f"{path}:{node.lineno}: there is no {alias.name} in {node.module}"


PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
OF_OBJECTS = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?|torch\.(save|load)")
PROGRAMS = [path for part in ("hydra_plugins", "launch") for path in sorted((PACKAGE.parent / part).rglob("*.py"))]


@pytest.mark.parametrize(
    "path", [*FILES, *PROGRAMS, PACKAGE.parent / "train.py"], ids=lambda p: str(p.relative_to(PACKAGE.parent))
)
def test_nothing_is_pickled(path: Path) -> None:
    """Who unpickles runs what the writer likes, and torch's collectives of objects unpickle what other ranks send."""
    assert not {name.split(".")[0] for name in imported(path)} & PICKLERS, f"{path} pickles"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        named = {ast.unparse(node), node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.alias):
            named = {node.name}
        bad = sorted(filter(OF_OBJECTS.fullmatch, named))
        assert not bad, f"{path}:{node.lineno}: {bad[0]} pickles; see hsap/gathering.py, hsap/tensorfile.py"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert ast.unparse(node.value) == "False", f"{path}:{node.value.lineno}: NumPy unpickles"


def reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    """Modules that one leads to, over however many arrows."""
    found: set[str] = set()
    coming = [start]
    while coming:
        fresh = arrows[coming.pop()] - found
        found |= fresh
        coming += fresh
    return found


def arrows_of(path: Path, modules: set[str]) -> set[str]:
    """Modules that a file imports from: of `from hsap.cli import data` it is the file `data`, not the room's own."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules else node.module for name in full}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def test_circles_are_known() -> None:
    """Imports for types alone count: files that need each other to be read are one file in two places."""
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    arrows = {name: arrows_of(path, set(modules)) - {name} for name, path in modules.items()}
    circle = {name for name in modules if name in reached(name, arrows)}
    assert circle == KNOWN_CIRCLES, "a new circle, or an old one that is gone"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_fat_files(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= 400, f"{path} is longer than 400 lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name} is longer than 60 lines"


def test_planning_and_verifying_load_no_torch() -> None:
    code = (
        "import sys, hsap; plan = hsap.compile(hsap.Problem(hsap.Layout.from_lengths([9, 5]),"
        "heads=hsap.HeadShape(4, 2, 8, 'bf16'), topology=hsap.Topology.parse('2x2')));"
        "assert hsap.verify(plan).ok; print(sorted(m for m in sys.modules if m in ('torch', 'deepspeed', 'hydra')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_numba_is_loaded_when_something_is_planned() -> None:
    code = "import sys, hsap, hsap.cli; print([m for m in sys.modules if m in ('torch', 'numba')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_contract_s_names_are_there() -> None:
    import hsap

    for name in hsap.__all__:
        assert getattr(hsap, name) is not None
    assert callable(hsap.verify) and callable(hsap.compile) and callable(hsap.parse)
    assert hsap.Cluster.preset("dgx-a100", nodes=2).ranks_per_node == 8
