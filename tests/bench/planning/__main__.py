"""`python -m tests.bench.planning`: every planner on every workload, and where the time of planning goes.

Sections: planners (Rx1, beside other planners' published figures), topologies ((R/2)x2, (R/8)x8), heads (32 query and 8
KV heads), masks (sparse ones at 32 ranks), passes (time of each pass).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import threading
from pathlib import Path

import numba
import numpy as np

from hsap.planners import AUTO, PLANNERS
from tests.bench.planning import passes, tables
from tests.bench.planning.cases import PEERS, RANKS, SECTIONS, WORKLOADS, Case, cases, measure, peers

QUICK_WORKLOADS, QUICK_RANKS = ("ldc@131072", "single@131072"), (16, 32)


def main(argv: list[str] | None = None) -> None:
    """Print the tables; keep their lines as JSON or Markdown where asked to."""
    asked = _parser().parse_args(argv)
    names = asked.planner or [*PLANNERS, AUTO]
    workloads = asked.workload or (QUICK_WORKLOADS if asked.quick else list(WORKLOADS))
    ranks = asked.ranks or (QUICK_RANKS if asked.quick else RANKS)
    sections = asked.section or (("planners",) if asked.quick else (*SECTIONS, "passes"))
    conditions = _conditions(asked.runs)
    print(f"{conditions}\n{tables.LEGEND}")
    width = max(len(name) for name in (*names, "(magi_minheap)")) + len(": nested flashcp")
    lines: list[tuple[str, dict]] = []
    for section in (name for name in SECTIONS if name in sections):
        for case in cases(section, workloads, ranks, 1 if asked.quick else None):
            lines += _measure(case, names, asked.runs, width)
    if lines:
        print("\nothers' planning times in ms: " + json.dumps(PEERS["planning_ms"]))
    if "passes" in sections:
        passes.print_table(names, workloads, [f"{n}x1" for n in ranks], asked.runs)
    if asked.json:
        kept = {"conditions": conditions, "lines": [line for _, line in lines]}
        Path(asked.json).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if asked.markdown:
        Path(asked.markdown).write_text(tables.markdown(conditions, lines), encoding="utf-8")


def _measure(case: Case, names: list[str], runs: int, width: int) -> list[tuple[str, dict]]:
    print(f"\n{case}\n{tables.header(width)}")
    lines = []
    for name in names:
        lines.append(measure(case, name, runs))
        print(tables.text(lines[-1], width), flush=True)
    for line in peers(case):
        lines.append(line)
        print(tables.text(line, width))
    return [(str(case), line) for line in lines]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.bench.planning", description=__doc__)
    several = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--planner", **several, help="NAME[:option=value,…] (default: all)")
    parser.add_argument("--workload", **several, choices=list(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="R", help="default 16 32 64")
    parser.add_argument("--section", **several, choices=(*SECTIONS, "passes"), help=f"of {', '.join(SECTIONS)}, passes")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="times are medians of so many (default 1)")
    parser.add_argument("--quick", action="store_true", help="a batch of two workloads at 16 and 32 ranks")
    parser.add_argument("--json", metavar="FILE", help="keep the lines")
    parser.add_argument("--markdown", metavar="FILE", help="keep the tables")
    return parser


def _conditions(runs: int) -> str:
    return (
        f"{'one run' if runs == 1 else f'median of {runs} runs'}, CPU times; Python threads: "
        f"{threading.active_count()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}, cores: "
        f"{os.cpu_count()}, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"numba {numba.__version__}"
    )


if __name__ == "__main__":
    main()
