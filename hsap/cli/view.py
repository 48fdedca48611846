"""`hsap view`: one page of a plan, of two side by side, or of a run beside its plan; and traces for Perfetto."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hsap.api import simulate
from hsap.cli.exit import NOT_OK, OK
from hsap.cli.files import check_writable, read_plan
from hsap.cli.problem import CLUSTERS
from hsap.ir.plan import Plan
from hsap.verify import verify


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "view",
        help="draw plans, or a run beside its plan, as one page for the browser",
        description="Draw a plan, two plans of one batch, or a run whose steps were profiled beside its plan, as "
        "one page for the browser, without network.",
    )
    command.add_argument("plan", metavar="PLAN|RUN", help="a plan, in stored form or as text, or the folder of a run")
    command.add_argument("other", nargs="?", metavar="PLAN2", help="another plan of the same batch, shown beside it")
    command.add_argument("-o", "--out", default="report.html", metavar="FILE", help="default report.html")
    command.add_argument("--cluster", metavar="NAME|FILE.yaml", help=f"{CLUSTERS} (default: the plan's own)")
    command.add_argument("--trace", metavar="FILE.json", help="also write a trace that Perfetto and Chrome open")
    for name, what in (("step", "the last"), ("layer", "the first"), ("group", "0")):
        command.add_argument(
            f"--{name}", type=int, metavar="N", help=f"of a run: which {name} to show (default {what})"
        )
    command.set_defaults(run=_view)


def _view(arguments: argparse.Namespace) -> int:
    # The simulator brings numba, which takes longer to import than all else that a command needs.
    from hsap.view import Scene, read_run, render, trace_events

    _check_files(arguments)
    first = Path(arguments.plan)
    scenes = []
    if first.is_dir():
        if arguments.other is not None:
            raise ValueError(f"{first} is a run, which is shown beside its own plan; leave {arguments.other} out")
        run = read_run(first, arguments.step, arguments.layer, arguments.group or 0)
        scenes = [Scene.planned(simulate(run.plan, arguments.cluster), "planned"), Scene.measured(run)]
    else:
        for name in ("step", "layer", "group"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name}: it chooses from what a run measured; {first} is no folder of a run")
        for path in (arguments.plan, *([] if arguments.other is None else [arguments.other])):
            plan = _plan(path)
            if plan is None:
                return NOT_OK
            scenes.append(Scene.planned(simulate(plan, arguments.cluster)))
    page = render(scenes)
    trace = None if arguments.trace is None else json.dumps(trace_events(scenes))
    Path(arguments.out).write_text(page, encoding="utf-8")
    print(f"{arguments.out}: {len(page.encode()) / 1024:.0f} KiB; open it in a browser")
    if trace is not None:
        Path(arguments.trace).write_text(trace, encoding="utf-8")
        print(f"{arguments.trace}: open it at ui.perfetto.dev or chrome://tracing")
    return OK


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse what would be lost or could not be written, before anything is."""
    named = {"PLAN": arguments.plan, "PLAN2": arguments.other, "-o": arguments.out, "--trace": arguments.trace}
    taken: dict[Path, str] = {}
    for flag, name in named.items():
        if name is None:
            continue
        if flag.startswith("PLAN"):
            if not name:
                raise ValueError(f"{flag}: an empty name is no file; give a path")
        elif (other := taken.get(Path(name).resolve())) is not None:
            raise ValueError(f"{flag} {name}: that is {other}, which would be overwritten; choose another file")
        else:
            check_writable(flag, name)
        taken[Path(name).resolve()] = flag


def _plan(path: str) -> Plan | None:
    """Read a plan; None, with its faults on stderr, for one that isn't right: its streams may never end."""
    plan = read_plan(path)
    if not isinstance(plan, Plan):
        raise ValueError(f"{path}: a listing has no sizes to draw; give a plan that `hsap plan -o` kept")
    report = verify(plan)
    if not report.ok:
        print(report, file=sys.stderr)
        return None
    return plan
