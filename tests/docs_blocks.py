"""Code blocks of the documentation: what says of each whether it is run, and how it is."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
JUDGED = ("python", "bash")
"""Languages of which every block needs a mark in the line above it: one of these comments.

    <!-- runs -->            it is run here; a `text` block behind it marked `<!-- prints -->` is what it prints, with
                             … for what varies
    <!-- composes -->        train.py's arguments in it are put together and checked as a run would
    <!-- not run: why -->    neither
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it is, its language, its mark and its text."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """List a page's fenced blocks; ValueError for one that doesn't end."""
    found, opened, mark, body = [], None, "", []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"^```(\S*)", line)
        if opened is None and fence:
            opened, body = (number, fence[1]), []
        elif opened is not None and line.startswith("```"):
            found.append(Block(page, opened[0], opened[1], mark, "\n".join(body) + "\n"))
            opened, mark = None, ""
        elif opened is not None:
            body.append(line)
        elif line.strip():
            comment = re.fullmatch(r"<!-- (.*) -->", line.strip())
            mark = comment[1] if comment else ""
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block has no end")
    return found


def commands(text: str) -> list[list[str]]:
    """Give the words of every command of a shell block; comments and continued lines are known."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def run_block(block: Block, names: dict) -> str:
    """Run a block in this process, in the working directory: what it prints. names: the page's Python names."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
        else:
            for words in commands(block.text):
                _run(words, block)
    return out.getvalue()


def _run(words: list[str], block: Block) -> None:
    if words[0] == "hsap":
        from hsap.cli import main

        assert main(words[1:]) == 0, f"{block}: {shlex.join(words)} failed"
    elif words[0] == "python" and words[1].endswith(".py"):
        argv, sys.argv = sys.argv, words[1:]
        try:
            runpy.run_path(words[1], run_name="__main__")
        finally:
            sys.argv = argv
    else:
        raise AssertionError(f"{block}: only hsap and python FILE are run here, not {words[0]}")


def printed_as_said(said: str, printed: str) -> bool:
    """Compare as doctest does, … standing for anything and runs of blanks for each other."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(said.replace("…", "..."), printed, flags)


def training_arguments(block: Block) -> list[tuple[int | None, list[str]]]:
    """Give (processes that a launcher starts, arguments) of every train.py of a block."""
    found = []
    for words in commands(block.text):
        at = max(i for i, word in enumerate(words) if word.endswith(("train.py", "local.sh", "sbatch", "hostfile.sh")))
        count = re.search(r"--nproc-per-node[= ](\d+)|RANKS=(\d+)", " ".join(words[:at]))
        arguments = [word for word in words[at + 1 :] if word != "HOSTFILE"]
        found.append((int(count[1] or count[2]) if count else None, arguments))
    return found


def check_composed(processes: int | None, arguments: list[str]) -> None:
    """Put a configuration together and check it, as train.py does before it starts ranks."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from hsap.train.config import train_config
    from hsap.train.overrides import know_project, rewrite

    know_project(ROOT)
    flags = [word for word in arguments if word.startswith("-")]
    overrides = rewrite([word for word in arguments if not word.startswith("-")])
    topologies = [""]
    if "--multirun" in flags:
        swept = next(word for word in overrides if "topology=" in word)
        overrides = [word for word in overrides if word != swept]
        topologies = [f"++topology={one}" for one in swept.partition("=")[2].split(",")]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for topology in topologies:
            composed = compose("config", [*overrides, *filter(None, [topology])])
            values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            values.pop("hydra", None)
            inter, intra = map(int, (values["topology"] or "1x1").split("x"))
            train_config(values, processes or inter * intra, "cpu", "outputs/checked")
