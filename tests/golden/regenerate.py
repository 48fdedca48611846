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
PLANNERS = ("ring", "zigzag")
TOPOLOGIES = ("2x1", "4x1", "2x2")
LENGTHS = (9, 1, 4)


def cases() -> dict[str, Plan]:
    """Give the golden plans by file name."""
    layout, heads = Layout.from_lengths(LENGTHS), HeadShape(4, 2, 8, "bf16")
    return {
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
