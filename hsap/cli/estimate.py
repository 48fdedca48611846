"""`hsap estimate`: the longest pack that a model trains with on a cluster, by memory, without a GPU."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hsap.cli import datasets, settings
from hsap.cli.exit import OK
from hsap.cli.problem import CLUSTERS, named
from hsap.cli.tune import read_cluster, read_lengths, read_model
from hsap.ir.check import MAX_TOKENS, whole
from hsap.ir.problem import Topology


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "estimate",
        help="the longest pack that fits a cluster's memory, per topology",
        description="The longest pack that fits a cluster's memory, for every topology, with what fills the "
        "fullest rank, item by item.",
    )
    command.add_argument("--model", required=True, metavar="NAME", help="a file of configs/model")
    command.add_argument("--cluster", required=True, metavar="NAME|FILE.yaml", help=CLUSTERS)
    command.add_argument("--nodes", type=int, default=1, metavar="N", help="default 1")
    command.add_argument("--ranks-per-node", type=int, metavar="N", help="default: the cluster's")
    command.add_argument("--topology", metavar="NxM", help="InterSP x IntraSP (default: all)")
    command.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default: what is longest)")
    command.add_argument(
        "--checkpointing", choices=("none", "selective", "full"), help="of activations (default: what is longest)"
    )
    command.add_argument("--seq-len", type=int, metavar="L", help="say what this length of pack takes instead")
    command.add_argument(
        "--data", metavar="DIR|F.json|DATASET", help="plan packs of such documents, too (default: everything even)"
    )
    command.add_argument("--planner", default="sap", metavar="NAME", help="that plans them (default sap)")
    command.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16, fp32 on CPUs")
    command.add_argument(
        "--seed", type=int, default=settings.SEED, metavar="S", help=f"of the packs (default {settings.SEED})"
    )
    command.add_argument("--json", action="store_true", help="print figures as JSON and nothing else")
    command.set_defaults(run=_estimate)


def _estimate(arguments: argparse.Namespace) -> int:
    from hsap.planners import usual
    from hsap.tune.estimate import Asked, estimate
    from hsap.tune.job import Job

    cluster, model = read_cluster(arguments), read_model(arguments.model)
    fixed = None if arguments.seq_len is None else whole("--seq-len", arguments.seq_len, 1, MAX_TOKENS)
    topology = None if arguments.topology is None else named("--topology", Topology.parse, arguments.topology)
    dtype = arguments.dtype or ("fp32" if cluster.is_host else "bf16")
    seed = whole("--seed", arguments.seed, 0, datasets.MAX_SEED)
    lengths: tuple[int, ...] = (MAX_TOKENS,)
    planner = None
    if arguments.data is not None:
        lengths = read_lengths(arguments.data, MAX_TOKENS, seed)
        (planner,) = named("--planner", usual, [arguments.planner])
    world = (cluster.num_nodes or 1) * cluster.ranks_per_node
    job = named("--nodes, --ranks-per-node", Job, arguments.model, model, cluster, lengths, fixed or MAX_TOKENS, world,
                dtype, seed)  # fmt: skip
    asked = Asked(topology, arguments.zero, arguments.checkpointing, fixed)
    found = named("--model, --cluster, --nodes", estimate, job, asked, planner)
    print(json.dumps(_figures(job, found)) if arguments.json else _table(job, found, fixed, arguments.data))
    return OK


def _figures(job: Any, found: Any) -> dict[str, Any]:
    from hsap.tune.table import job_figures

    return job_figures(job) | {
        "rows": [
            {"dp": one.setting.dp, "topology": str(one.setting.topology), "zero_stage": one.setting.zero_stage,
             "checkpointing": one.setting.checkpointing, "pack_tokens": one.pack_tokens,
             "arena_multiple": one.arena_multiple, "memory_bytes": one.memory}
            for one in found
        ],
    }  # fmt: skip


def _table(job: Any, found: Any, fixed: int | None, data: str | None) -> str:
    from hsap.tune.setting import GIB
    from hsap.tune.table import SHORT, aligned

    length = "pack" if fixed else "longest pack"
    titles = ["dp x topology", "ZeRO", "ckpt", length, "a rank", "arena x", "GiB", *SHORT.values()]
    rows = []
    for one in found:
        s = one.setting
        share = -(-one.pack_tokens // s.topology.num_ranks)
        rows.append([
            f"{s.dp} x {s.topology}", str(s.zero_stage), s.checkpointing, f"{one.pack_tokens:,}", f"{share:,}",
            f"{one.arena_multiple:g}", f"{sum(one.memory.values()) / GIB:.2f}",
            *(f"{one.memory[name] / GIB:.2f}" for name in SHORT),
        ])  # fmt: skip
    spread = "everything even" if data is None else f"planned with documents of {data}"
    head = (
        f"{job.name} on {job.cluster.num_nodes} x {job.cluster.name} ({job.world} ranks of "
        f"{job.cluster.capacity_bytes / GIB:.1f} GiB), {job.dtype}: tokens of a pack, one a micro-step, {spread}; GiB "
        "of the fullest rank when it needs most, by item; arena x is the arena_multiple that train.py is to be told"
    )
    return "\n".join([head, "", *aligned([titles, *rows], ">")])
