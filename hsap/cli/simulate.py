"""`hsap simulate`: how long a stored plan takes on a cluster, as figures or as a chart."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any

from hsap.api import simulate
from hsap.cli.exit import NOT_OK, OK
from hsap.cli.files import read_plan
from hsap.cli.problem import CLUSTERS
from hsap.ir.plan import Plan
from hsap.ir.schedule import DIRECTIONS
from hsap.verify import verify


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "simulate",
        help="say how long a stored plan takes, and draw what ranks wait for",
        description="Say how long a layer's attention takes by a stored plan, forward and backward, and draw what "
        "ranks wait for.",
    )
    command.add_argument("file", metavar="FILE", help="a plan, in stored form or as text")
    command.add_argument("--cluster", metavar="NAME|FILE.yaml", help=f"{CLUSTERS} (default: the plan's own)")
    command.add_argument("--json", action="store_true", help="print figures as JSON and nothing else")
    command.set_defaults(run=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    subject = read_plan(arguments.file)
    if not isinstance(subject, Plan):
        raise ValueError(f"{arguments.file}: a listing has no sizes to simulate; give a plan that `hsap plan -o` kept")
    report = verify(subject)  # times of a plan that isn't right say nothing
    if not report.ok:
        print(report, file=sys.stderr)
        return NOT_OK
    timeline = simulate(subject, arguments.cluster)
    if arguments.json:
        print(json.dumps(timeline.summary()))
        return OK
    each = ", ".join(f"{direction} {_ms(timeline.seconds(direction))}" for direction in DIRECTIONS)
    print(
        f"planner {subject.planner}, topology {subject.problem.topology} on {timeline.cluster.name}: "
        f"{_ms(timeline.predicted_s)} of attention a layer ({each})"
    )
    width = max(shutil.get_terminal_size().columns - 6, 20)
    for mask in range(len(timeline.traces)):
        for direction in DIRECTIONS:
            print("\n" + timeline.chart(direction, mask, width))
    return OK


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
