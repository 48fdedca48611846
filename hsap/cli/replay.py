"""`hsap replay`: a step that training has written down, once more on one process."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsap.cli.exit import NOT_OK, OK
from hsap.ir.check import printable, shown, whole

if TYPE_CHECKING:
    from hsap.train.guard.dump import Dump
    from hsap.train.guard.replay import Replay

_WIDTH = 28


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "replay",
        help="run a step that training has dumped once more, on one process",
        description="Run a step that training has dumped once more, on one process. Exit code 0: what training saw is "
        "seen again; 1: it isn't; 2: the dump can't be used.",
    )
    command.add_argument("dump", metavar="OUT/dumps/stepN", help="the folder that guard.non_finite=dump wrote")
    command.add_argument("--dtype", choices=("fp32", "fp64"), default="fp32", help="to compute in (default fp32)")
    command.add_argument("--planner", metavar="NAME", help="plan anew (default: the plans of the run)")
    command.add_argument(
        "--documents", type=int, default=8, metavar="N", help="with the highest losses, to run alone too (default 8)"
    )
    command.add_argument("--json", action="store_true", help="print figures as JSON and nothing else")
    command.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    """Exit code 0 where what training saw is seen again, 1 where it isn't."""
    most = whole("--documents", arguments.documents, 0)
    if arguments.planner is not None:
        from hsap.planners import check_options

        check_options(arguments.planner, {})
    from hsap.train.guard.dump import read_dump
    from hsap.train.guard.replay import Replayer, repeats

    dump = read_dump(Path(arguments.dump))
    say = (lambda line: None) if arguments.json else (lambda line: print(f"hsap replay: {line}", file=sys.stderr))
    replay = Replayer(dump, arguments.dtype, arguments.planner).replay(most, say)
    same = repeats(dump, replay)
    print(json.dumps(_figures(dump, replay, same)) if arguments.json else _table(dump, replay, arguments.dtype, same))
    return OK if same else NOT_OK


def _figures(dump: Dump, replay: Replay, same: bool) -> dict[str, Any]:
    seen = [loss for one in dump.micros for loss in one.losses]
    return {
        "step": dump.step,
        "repeats": same,
        "seen": {"loss": _number(dump.seen["loss"]), "grad_norm": _number(dump.seen["grad_norm"])},
        "replayed": {"loss": _number(replay.loss), "grad_norm": _number(replay.grad_norm)},
        "first": replay.first,
        "gradients": replay.gradients,
        "documents": [
            {"group": one.group, "micro": one.micro, "document": one.name, "targets": one.num_targets,
             "seen_loss_sum": _number(loss), "loss_sum": _number(one.loss_sum)}
            | ({} if (alone := replay.alone.get((one.group, one.micro, one.index))) is None else
               {"alone_loss_sum": _number(alone.loss_sum), "alone_grad_norm": _number(alone.grad_norm)})
            for one, loss in zip(replay.documents, seen, strict=True)
        ],
    }  # fmt: skip


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def loss_column(value: float) -> str:
    """A loss in a column: one that has gone out of all bounds isn't written out."""
    return f"{value:.6g}" if abs(value) >= 1e5 else f"{value:.6f}"


def _table(dump: Dump, replay: Replay, dtype: str, same: bool) -> str:
    seen = [loss for one in dump.micros for loss in one.losses]
    lines = [
        f"step {dump.step}: {printable(dump.seen.get('told', '')).removeprefix(f'step {dump.step}: ')}",
        "",
        f"{'':{_WIDTH}} {'seen in ' + dump.dtype:>14} {'in ' + dtype:>14}",
        f"{'mean loss':{_WIDTH}} {loss_column(dump.seen['loss']):>14} {loss_column(replay.loss):>14}",
        f"{'gradient norm':{_WIDTH}} {dump.seen['grad_norm']:14.6g} {replay.grad_norm:14.6g}",
        "",
        f"{'document (group, micro-batch)':{_WIDTH}} {'seen in ' + dump.dtype:>14} {'by the plan':>14} {'alone':>12}"
        f" {'its gradient':>13} {'targets':>8}",
    ]
    told = 0
    for one, loss in zip(replay.documents, seen, strict=True):
        alone = replay.alone.get((one.group, one.micro, one.index))
        if alone is None:
            continue
        told += 1
        count = max(one.num_targets, 1)
        name = f"{shown(one.name)} ({one.group}, {one.micro})"
        lines.append(
            f"{name[:_WIDTH]:{_WIDTH}} {loss_column(loss / count):>14} {loss_column(one.mean):>14} "
            f"{loss_column(alone.loss_sum / count):>12} {alone.grad_norm:13.5g} {one.num_targets:8,}"
        )
    if (left := len(replay.documents) - told) > 0:
        lines.append(
            f"and {left:,} document{'s' * (left > 1)} more; --documents N runs more of them alone, --json has all"
        )
    return "\n".join([*lines, "", *_verdict(replay, dtype, same)])


def _verdict(replay: Replay, dtype: str, same: bool) -> list[str]:
    lines = []
    if (first := replay.first) is not None:
        layer = "" if first["layer"] is None else f" (layer {first['layer']})"
        where = "" if first["token"] is None else f", at token {first['token']:,} of id {first['id']}"
        names = ", ".join(map(shown, first["documents"][:3]))
        lines.append(
            f"the first output that isn't finite is that of {first['module']}{layer}, micro-batch {first['micro']} of "
            f"SP group {first['group']}{where}; documents {names}"
        )
    if replay.gradients:
        name, count = next(iter(replay.gradients.items()))
        more = f", and some of {len(replay.gradients) - 1} parameters more" if len(replay.gradients) > 1 else ""
        lines.append(f"{count:,} elements of the gradient of {name} aren't finite{more}")
    lines.append(
        f"what training saw is seen again in {dtype}"
        if same
        else f"what training saw does NOT show in {dtype}: number format, plan or machine had a part in it; compare "
        "--dtype, --planner and the columns above"
    )
    return lines
