"""`hsap planners`: the planners, where they are from, and their options."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hsap.cli.exit import OK


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "planners",
        help="list the planners, their papers and options",
        description="List the planners, their papers, and their options with the values until set.",
    )
    command.add_argument("--json", action="store_true", help="print a list of objects and nothing else")
    command.set_defaults(run=_planners)


def _planners(arguments: argparse.Namespace) -> int:
    from hsap.planners import listing

    rows = listing()
    if arguments.json:
        print(json.dumps(rows))
        return OK
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['summary']}\n{'':<{width}}  {row['paper']}")
        if row["options"]:
            print(f"{'':<{width}}  options: " + ", ".join(f"{key}={value}" for key, value in row["options"].items()))
    return OK
