"""`hsap check`: the user's own model, data and ranks, checked before they train."""

from __future__ import annotations

import argparse
from typing import Any

from hsap.cli.exit import NOT_OK, OK

OVERRIDES = "overrides of train.py, KEY=VALUE: the configuration that is checked"


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    check = commands.add_parser("check", help="check a configuration's model, data and ranks before training")
    what = check.add_subparsers(dest="what", required=True, metavar="WHAT")
    leak = what.add_parser(
        "leak",
        help="does anything of one document reach another?",
        description="Change tokens of a few documents of the first batch, on the ranks of train.py, and compare hidden "
        "states and gradients of all rows that the masks keep from them, bit for bit. Exit code 1: something leaks; "
        "documents and layer are named. The same before training: check.leak=true.",
    )
    parity = what.add_parser(
        "parity",
        help="are loss and gradients those of one process?",
        description="Run a step on the ranks of train.py, and the same step in one process with the whole model, "
        "without DeepSpeed. Exit code 1: loss, gradient norm or a parameter's gradient is further off than rounding.",
    )
    parity.add_argument(
        "--full", action="store_true", help="the batch as configured (default: short packs, two micro-steps at most)"
    )
    error = what.add_parser(
        "error",
        help="what does splitting attention cost in accuracy?",
        description="Measure o, dq, dk and dv of the first micro-batch's attention against float64, split over the "
        "configured ranks, beside one device's in the same number format; all in this process, documents cut so that "
        "it takes seconds. Exit code 1: the wire dtype is over check.error_budget (1.1 where that is null).",
    )
    for command in (leak, parity, error):
        command.add_argument("--json", action="store_true", help="print what was found as JSON and nothing else")
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
        command.set_defaults(run=_error if command is error else _check, full=False)


def _error(arguments: argparse.Namespace) -> int:
    from hsap.checks.error import run_error

    return OK if run_error(tuple(arguments.overrides), arguments.json) == OK else NOT_OK


def _check(arguments: argparse.Namespace) -> int:
    # torch, and processes: only here.
    from hsap.checks.launch import Check, run

    code = run(Check(arguments.what, tuple(arguments.overrides), arguments.full, arguments.json))
    return OK if code == OK else NOT_OK
