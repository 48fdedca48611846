"""`hsap bench`: measure this machine or cluster, or set the simulator beside what the papers measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsap.cli import datasets
from hsap.cli.exit import OK
from hsap.cli.files import check_writable
from hsap.cli.problem import named
from hsap.ir.check import one_of, whole
from hsap.ir.heads import HeadShape
from hsap.launched import Place

if TYPE_CHECKING:
    from hsap.calibrate.machine import Calibration

PAPER_TABLES = ("2", "3", "4", "5", "dcp13", "dcp14")
"""Those of `hsap.papers.TABLES`, which isn't loaded to print help."""
MAX_SEEDS = 1000


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    bench = commands.add_parser("bench", help="measure this machine or cluster, or simulate what papers measured")
    what = bench.add_subparsers(dest="what", required=True, metavar="WHAT")
    _add_calibrate(what)
    _add_paper(what)


def _add_calibrate(what: Any) -> None:
    command = what.add_parser(
        "calibrate",
        help="time kernels, memory and messages, and write the cluster that `--cluster FILE.yaml` reads",
        description="Time kernels, memory and messages of this machine, and write the cluster that --cluster reads. "
        "Started by torchrun or DeepSpeed's launcher on all nodes of a cluster, it measures links inside nodes and the "
        "network between them with the ranks that these started, and rank 0 writes.",
    )
    command.add_argument("-o", "--out", metavar="FILE.yaml", help="where to write it (default: print it only)")
    command.add_argument(
        "--ranks", type=int, metavar="N", help="processes, of one thread each (default 2, or those of the launcher)"
    )
    command.add_argument("--device", metavar="NAME", help="cpu or cuda (default: cuda where there is one)")
    command.add_argument("--heads", metavar="Q:KV:DIM", help="default 8:2:64 on CPUs, 32:8:128 on GPUs")
    command.add_argument("--dtype", metavar="NAME", help="of q, k, v (default fp32 on CPUs, bf16 on GPUs)")
    command.add_argument("--turns", type=int, default=8, metavar="N", help="of every microbenchmark (default 8)")
    command.add_argument("--json", action="store_true", help="print the cluster and residuals as JSON and nothing else")
    command.set_defaults(run=_calibrate)


def _add_paper(what: Any) -> None:
    command = what.add_parser(
        "paper", help="simulate what the HSAP and DCP papers measured, and print ratios beside theirs"
    )
    command.add_argument(
        "--table",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(PAPER_TABLES)}: HSAP's tables (5: its figure), DCP's figures 13 and 14 (default: all)",
    )
    command.add_argument("--seeds", type=int, default=3, metavar="N", help="packs of each kind (default 3)")
    command.add_argument("--json", action="store_true", help="print the tables as JSON and nothing else")
    command.set_defaults(run=_paper)


def _paper(arguments: argparse.Namespace) -> int:
    wanted = [one_of("--table: unknown name", name, PAPER_TABLES, "tables") for name in arguments.table or PAPER_TABLES]
    seeds = whole("--seeds", arguments.seeds, 1, MAX_SEEDS)
    # Planners and the clock, which bring numba: only here.
    from hsap.papers import TABLES

    tables = []
    for name in dict.fromkeys(wanted):
        table = TABLES[name](datasets.draw, seeds)
        if arguments.json:
            tables.append(table.to_json())
        else:
            print(f"{table}\n", flush=True)
    if arguments.json:
        print(json.dumps({"seeds": seeds, "tables": tables}))
    return OK


def _calibrate(arguments: argparse.Namespace) -> int:
    if arguments.out is not None and not arguments.out.endswith((".yaml", ".yml")):
        raise ValueError(f"--out {arguments.out}: --cluster takes files that end with .yaml; give such a name")
    # torch, and processes: only here.
    from torch.cuda import is_available

    from hsap.calibrate.machine import HEADS, calibrate, calibrate_launched

    place = Place.among_several(os.environ)
    if arguments.out is not None and (place is None or place.rank == 0):
        check_writable("--out", arguments.out)
    heads = None
    if arguments.heads is not None or arguments.dtype is not None:
        if arguments.device is not None:
            one_of("--device: unknown device", arguments.device, HEADS, "devices")
        usual = HEADS[arguments.device or ("cuda" if is_available() else "cpu")]
        text = arguments.heads or f"{usual.num_q_heads}:{usual.num_kv_heads}:{usual.head_dim}"
        heads = named("--heads, --dtype", HeadShape.parse, text, arguments.dtype or usual.dtype)
    name = Path(arguments.out).stem if arguments.out else "here"
    more = (arguments.device, heads, arguments.turns, name)
    if place is None:
        found = calibrate(2 if arguments.ranks is None else arguments.ranks, *more)
    else:
        if arguments.ranks not in (None, place.world_size):
            raise ValueError(
                f"--ranks {arguments.ranks}: a launcher started {place.world_size} ranks (WORLD_SIZE), and these "
                "are measured; leave --ranks out, or have the launcher start as many"
            )
        found = calibrate_launched(place, *more)
    if found is not None:
        _tell(found, arguments.out, arguments.json)
    return OK


def _tell(found: Calibration, out: str | None, as_json: bool) -> None:
    """Write and print what was found."""
    if out is not None:
        found.save(out)
    if as_json:
        residuals = {residual.what: residual.errors for residual in found.residuals}
        print(json.dumps({"cluster": found.cluster.to_json(), "links": found.links, "residuals": residuals}))
        return
    print(f"{found.head}\n{found.links}")
    for field in dataclasses.fields(found.cluster):
        print(f"  {field.name:<24} {_shown(getattr(found.cluster, field.name))}")
    print("\n" + found.table())
    if out is not None:
        print(f"\n{out}: give it as --cluster {out}")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{rows}: {part:.2f}" for rows, part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
