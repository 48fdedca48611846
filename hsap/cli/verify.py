"""`hsap verify`: check a stored plan, its text, or a listing in the paper's spelling."""

from __future__ import annotations

import argparse
from typing import Any

from hsap.cli.exit import NOT_OK, OK
from hsap.cli.files import read_plan
from hsap.ir.listing import Listing
from hsap.ir.plan import Plan
from hsap.verify import verify


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "verify",
        help="check a stored plan, its text, or a listing in the paper's spelling",
        description="Check a stored plan, its text, or a listing in the paper's spelling. Exit code 1: it is "
        "wrong; what, where and on which rank is printed.",
    )
    command.add_argument("file", metavar="FILE")
    command.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    subject = read_plan(arguments.file)
    report = verify(subject)
    print(f"ok{_judged(subject)}" if report.ok else report)
    return OK if report.ok else NOT_OK


def _judged(subject: Plan | Listing) -> str:
    """Say of a listing what a verdict rests on; nothing of a plan, which is judged as a whole."""
    if not isinstance(subject, Listing):
        return ""
    halves = len(subject.transfers)
    if not halves:
        return ": no transfer between the listed ranks, so there was nothing to judge"
    return f": transfers between the listed ranks agree ({halves // 2}); nothing else of a listing can be judged"
