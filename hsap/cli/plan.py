"""`hsap plan`: compile packed batches, verify their plans, and show or keep them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hsap.api import compile, simulate
from hsap.cli import problem as problem_flags
from hsap.cli.exit import NOT_OK, OK
from hsap.cli.files import check_writable
from hsap.cli.show import show
from hsap.ir.check import Refused, one_line, shown
from hsap.ir.layout import Layout
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem
from hsap.ir.schedule import DIRECTIONS
from hsap.ir.summary import summary
from hsap.verify import verify


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "plan",
        help="compile a packed batch and show its plan",
        description="Compile a packed batch and show its plan: how tokens, work and bytes are spread, which rank "
        "computes which block in which stage, and every rank's stream. Exit code 1: the plan doesn't "
        "verify.",
    )
    problem_flags.add_flags(command)
    command.add_argument("--planner", default="sap", metavar="NAME[:k=v,…]", help="see `hsap planners` (default sap)")
    command.add_argument(
        "-o", "--out", metavar="FILE", help="keep a sound plan; FILE.txt gets its text, else the stored form"
    )
    command.add_argument("--rank", type=int, metavar="R", help="show only this rank's streams")
    command.add_argument("--color", action="store_true", help="colour the grids though stdout is no terminal")
    command.add_argument("--json", action="store_true", help="print figures as JSON and nothing else")
    command.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    # Planners bring numba, which takes longer to import than all else that a command needs.
    from hsap.planners import check_options

    make, layouts, is_list = problem_flags.problems(arguments)
    if arguments.out is not None:
        check_writable("--out", arguments.out)
    if is_list and arguments.out:
        raise ValueError(f"--out {arguments.out}: there are {len(layouts)} batches; give a file with one batch")
    name, options = read_planner(arguments.planner)
    check_options(name, options)  # before they stand among compile's own arguments
    figures, code = [], OK
    for i, layout in enumerate(layouts):
        problem = make(layout)
        if arguments.rank is not None and not 0 <= arguments.rank < problem.num_ranks:
            raise ValueError(f"--rank {arguments.rank}: the topology has ranks 0 to {problem.num_ranks - 1}")
        if i == 0:
            _warm_up(problem, name, options)
        start = time.perf_counter()
        plan = compile(make(layout), name, **options)
        report = verify(plan)
        plan_s = time.perf_counter() - start
        if not report.ok:
            print(report, file=sys.stderr)
            code = NOT_OK
        elif arguments.out:
            _keep(plan, Path(arguments.out))
        figures.append(_figures(plan, bool(report.ok)) | {"plan_s": plan_s, "verified": bool(report.ok)})
        if not arguments.json:
            show(plan, figures[-1], arguments.rank, arguments.color)
    if arguments.json:
        print(json.dumps(figures if is_list else figures[0]))
    return code


def _figures(plan: Plan, verified: bool) -> dict[str, Any]:
    """Give a plan's figures with its predicted times, None where it isn't sound: its streams may never end."""
    if verified:
        return summary(plan, simulate(plan).makespans_s)
    figures = summary(plan)
    for direction in DIRECTIONS:
        figures[direction]["predicted_s"] = None
    return figures


def _warm_up(problem: Problem, planner: str, options: dict[str, Any]) -> None:
    """Plan a small batch, so that loading compiled loops counts as the process's start and not as planning.

    What is refused is refused again for the real batch, with words that fit it.
    """
    lengths = [3, 40, 1, 9] * len(problem.layout.sequences)
    small = replace(
        problem,
        layout=Layout.from_lengths(lengths, [4] * len(problem.layout.sequences)),
        max_tokens_per_rank=None,
    )
    try:
        verify(compile(small, planner, **options))
    except Refused:
        return


def read_planner(text: str) -> tuple[str, dict[str, Any]]:
    """Read `NAME` or `NAME:k=v,…`; values are integers, floats, true, false, none or words."""
    name, _, rest = text.partition(":")
    options = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if key in options:
            raise ValueError(f"--planner {one_line(text)}: the option {one_line(key)} is given twice; give it once")
        if not equals or not key.isidentifier():
            raise ValueError(
                f"--planner {one_line(text)}: can't read the option {shown(part)}; write name:option=value,option=value"
            )
        options[key] = _value(value)
    return name, options


def _value(text: str) -> object:
    words = {"true": True, "false": False, "none": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _keep(plan: Plan, path: Path) -> None:
    if path.suffix == ".txt":
        path.write_text(plan.text(), encoding="utf-8")
    else:
        plan.save(path)
