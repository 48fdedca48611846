"""Rewrite the golden plans on purpose: `python tests/golden/regenerate.py`, then read the difference before committing.

A refactor leaves the files as they are; a change of what is planned shows up in them line by line.
"""

from __future__ import annotations

from pathlib import Path

from hsap.api import compile
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology

FOLDER = Path(__file__).parent
PLANNERS = ("ring", "zigzag", "distflash", "sap")
TOPOLOGIES = ("2x1", "4x1", "2x2")
LENGTHS = (9, 1, 4)
FIGURE_3 = (340, 200, 100, 30, 30, 100)
"""Our reading of the paper's Figure 3 (HSAP §3.2): document lengths over eight ranks of 100 tokens."""


def cases() -> dict[str, Plan]:
    """Give the golden plans by file name."""
    layout, heads = Layout.from_lengths(LENGTHS), HeadShape(4, 2, 8, "bf16")
    figure_3 = Problem(Layout.from_lengths(FIGURE_3), heads, Topology(8, 1))
    return {"figure_3.txt": compile(figure_3, "sap", balance="blocks")} | {
        f"{planner}_{topology}.txt": compile(Problem(layout, heads, Topology.parse(topology)), planner)
        for planner in PLANNERS
        for topology in TOPOLOGIES
    }


def main() -> None:
    """Write every golden file and say which ones changed."""
    for name, plan in cases().items():
        path, text = FOLDER / name, plan.text()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"rewrote {name}")


if __name__ == "__main__":
    main()
