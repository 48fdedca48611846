"""`hsap doctor`: is this machine or cluster fit to train on? One page, and an exit code."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hsap.cli.check import OVERRIDES
from hsap.cli.exit import NOT_OK, OK
from hsap.ir.check import one_of, whole

MAX_RANKS = 64


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "doctor",
        help="examine this machine or cluster: versions, GPUs, kernels, links, limits, a configuration",
        description="Examine what train.py needs: versions, GPUs, every attention kernel beside float64, messages "
        "between all ranks and their rates, disk, memory and limits, and a configuration if overrides are given. "
        "Started by torchrun or DeepSpeed's launcher, it examines all their ranks, and rank 0 prints. Exit code 1: "
        "something failed.",
    )
    command.add_argument("--ranks", type=int, metavar="N", help="processes to start (default: one a GPU, 2 on CPUs)")
    command.add_argument("--device", metavar="NAME", help="cpu or cuda (default: cuda where there is one)")
    command.add_argument("--out", default="outputs", metavar="DIR", help="folder of the runs to come (default outputs)")
    command.add_argument("--json", action="store_true", help="print the page as JSON and nothing else")
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
    command.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    ranks = None if arguments.ranks is None else whole("--ranks", arguments.ranks, 1, MAX_RANKS)
    if arguments.device is not None:
        one_of("--device: unknown device", arguments.device, ("cpu", "cuda"), "devices")
    # torch, and processes: only here.
    from torch.cuda import is_available

    from hsap.doctor.examine import Asked, examine

    device = arguments.device or ("cuda" if is_available() else "cpu")
    report = examine(Asked(device, ranks, arguments.out, tuple(arguments.overrides)))
    if report is None:
        return OK
    print(json.dumps(report.to_json()) if arguments.json else report)
    return OK if report.ok else NOT_OK
