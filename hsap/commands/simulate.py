"""`hsap simulate FILE`: how long a stored plan takes on a cluster, as figures or as a chart."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from hsap.api import simulate
from hsap.ir.plan import MAGIC, Plan
from hsap.ir.problem import PRESETS
from hsap.ir.schedule import DIRECTIONS
from hsap.ir.text import parse


def add_simulate(commands) -> None:
    """Add the command to the parsers of `hsap`."""
    command = commands.add_parser("simulate", help="say how long a stored plan takes, and draw what ranks wait for")
    command.add_argument("file", metavar="FILE", help="a plan, in stored form or as text")
    command.add_argument("--cluster", metavar="NAME", help=f"{', '.join(PRESETS)} (default: the plan's own)")
    command.add_argument("--json", action="store_true", help="print figures as JSON and nothing else")
    command.set_defaults(run=simulate_command)


def simulate_command(arguments: argparse.Namespace) -> int:
    """Run the command; ValueError where the file holds no plan or the cluster is unknown."""
    timeline = simulate(_read(arguments.file), arguments.cluster)
    if arguments.json:
        print(json.dumps(timeline.summary()))
        return 0
    each = ", ".join(f"{direction} {_ms(timeline.seconds(direction))}" for direction in DIRECTIONS)
    print(
        f"planner {timeline.plan.planner}, topology {timeline.plan.problem.topology} on {timeline.cluster.name}: "
        f"{_ms(timeline.predicted_s)} of attention a layer ({each})"
    )
    width = max(shutil.get_terminal_size().columns - 6, 20)
    for mask in range(len(timeline.traces)):
        for direction in DIRECTIONS:
            print("\n" + timeline.chart(direction, mask, width))
    return 0


def _read(path: str) -> Plan:
    data = Path(path).read_bytes()
    try:
        subject = Plan.from_bytes(data) if data.startswith(MAGIC) else parse(data.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{path}: neither a stored plan nor text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(subject, Plan):
        raise ValueError(f"{path}: a listing has no sizes to simulate; give a plan that `hsap plan -o` kept")
    return subject


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
