"""`python -m tests.bench.nodes`: planners over emulated nodes at 1 Gb/s, where what travels decides.

Wall time of one layer's attention, forward and backward, from the first rank's start to the last one's end; the median
of rounds in which the planners take turns, after one round that isn't counted. Planners know the nodes as `hsap bench
calibrate` measures them, inside the nodes, before anything else; below each row stands what the simulator then says.

Packs are the real ones scaled down, because only then are network and compute in a ratio like on real machines: what
travels grows with the tokens, what is computed with their square. A ring of 64 A100s with 25 GB/s each is busy with KV
six times as long as with attention for one document of 131,072 tokens of a 7B model, and a hundred times on an ldc-like
pack of as many; a ring of two cores at 1 Gb/s two to three times at 512 tokens, and some five times at 4,096 in an
ldc-like pack. With 16,384 tokens the cores would decide. There are as many heads as in a 7B model, so that pieces of
few tokens still are work, and no kernel's start decides.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

import hsap
from hsap.calibrate.machine import calibrate
from hsap.calibrate.processes import run_ranks
from hsap.cli.plan import read_planner
from hsap.ir.check import Refused
from hsap.ir.effects import FLOPS_PER_PAIR, flows
from hsap.ir.plan import Plan
from hsap.ir.program import Op
from hsap.planners import AUTO
from hsap.runtime.executor import Session
from hsap.runtime.groups import connect
from hsap.sim.share import crowding
from tests.bench.namespaces import nodes, refusal
from tests.bench.packs import KINDS, pack
from tests.bench.record import RESULTS, caption, conditions, record

HEADS = hsap.HeadShape(32, 32, 64, "fp32")
BYTES_PER_S = 125e6
SHAPES = ((2, 1), (2, 2), (4, 1))
"""Nodes and ranks on each."""
TOKENS = {"ldc": 4096, "fineweb": 4096, "single": 512}
QUICK_TOKENS = {"ldc": 2048, "fineweb": 2048, "single": 256}
BASE = "ring"
RAGGED = ("ldc", "fineweb")


@dataclass(frozen=True, slots=True)
class Setting:
    """What the ranks of one emulated cluster measure. packs: (kind, document lengths) of each. turns: calibration's."""

    num_nodes: int
    ranks_per_node: int
    packs: tuple[tuple[str, tuple[int, ...]], ...]
    planners: tuple[str, ...]
    rounds: int
    turns: int = 4
    bytes_per_s: float = BYTES_PER_S
    heads: hsap.HeadShape = HEADS

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def problem(self, lengths: Sequence[int], cluster: hsap.Cluster) -> hsap.Problem:
        topology = hsap.Topology(self.num_ranks, 1)
        return hsap.Problem(hsap.Layout.from_lengths(lengths), self.heads, topology, cluster=cluster)


def planners_of(num_ranks: int) -> tuple[str, ...]:
    """The bench's planners; usp with all ranks in one head group is Ulysses."""
    return (BASE, "zigzag", "distflash", f"usp:heads={num_ranks}", "sap", "nested", AUTO)


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> int:
    """Print a table for every emulated cluster and keep the figures; 2 where nodes can't be emulated."""
    asked = _parser().parse_args(argv)
    if reason := refusal():
        print(f"bench nodes: {reason}", file=sys.stderr)
        return 2
    found = conditions()
    rate = f"{8 * BYTES_PER_S / 1e9:g} Gb/s a node and direction"
    print(f"nodes: {caption(found, threads_per_rank=1)}, {rate}\n{_legend()}")
    tokens = QUICK_TOKENS if asked.quick else TOKENS
    batches = 1 if asked.quick else asked.batches
    rows = []
    for num_nodes, ranks_per_node in SHAPES[:1] if asked.quick else SHAPES:
        packs = tuple((kind, pack(kind, tokens[kind], i)) for kind in KINDS for i in range(_batches(kind, batches)))
        planners = tuple(asked.planner or planners_of(num_nodes * ranks_per_node))
        rounds = 3 if asked.quick else asked.rounds
        rows += measure(Setting(num_nodes, ranks_per_node, packs, planners, rounds))
    record("nodes", {"quick": asked.quick, "bytes_per_s": BYTES_PER_S, "rows": rows}, found, folder)
    return 0


def _batches(kind: str, batches: int) -> int:
    return 1 if kind == "single" else batches


def measure(setting: Setting) -> list[dict]:
    """Emulate a cluster, run every planner on every pack, and print a row for each kind of pack."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-nodes-") as folder,
        nodes(setting.num_nodes, setting.ranks_per_node, setting.bytes_per_s) as made,
    ):
        place = {"ranks_per_node": setting.ranks_per_node, "inside": made.inside, "cores": made.cores}
        calibration = calibrate(setting.num_ranks, "cpu", setting.heads, setting.turns, "emulated", **place)
        told = _planned(setting, calibration.cluster, Path(folder))
        times = run_ranks(setting.num_ranks, _rank, setting, folder, inside=made.inside)
    kinds = dict.fromkeys(kind for kind, _ in setting.packs)
    rows = [_row(setting, kind, told, times) for kind in kinds]
    print(
        f"\n{setting.num_nodes} nodes × {setting.ranks_per_node} ranks, {_machine(setting.heads, calibration.cluster)}"
    )
    print(f"{calibration.table()}\n\n{_header(setting.planners)}")
    for row in rows:
        print(_text(row, setting.planners), flush=True)
    return rows


def _machine(heads: hsap.HeadShape, cluster: hsap.Cluster) -> str:
    """What calibration found."""
    return (
        f"heads {heads.num_q_heads}:{heads.num_kv_heads}:{heads.head_dim} {heads.dtype}; measured: kernel "
        f"{cluster.flops_per_s * cluster.attend_efficiency / 1e9:.1f} GFLOP/s forward, "
        f"{cluster.flops_per_s * cluster.attend_grad_efficiency / 1e9:.1f} backward, {cluster.cores:g} cores a node, "
        f"between nodes {cluster.inter_bytes_per_s / 1e6:.0f} MB/s, {cluster.inter_latency_s * 1e6:.0f} µs, duplex "
        f"{cluster.duplex:.2f}, {cluster.num_nics or cluster.ranks_per_node} cards"
    )


def _row(setting: Setting, kind: str, told: dict, times: list[list[dict]]) -> dict:
    """A kind of pack: means over its packs of the medians over rounds. times: by rank, pack, planner and round."""
    which = [i for i, (name, _) in enumerate(setting.packs) if name == kind]
    plans = told["plans"]
    out: dict = {
        "nodes": setting.num_nodes,
        "ranks_per_node": setting.ranks_per_node,
        "kind": kind,
        "tokens": sum(setting.packs[which[0]][1]),
        "packs": len(which),
        "rounds": setting.rounds,
        "cluster": told["cluster"],
        "network_over_compute": float(np.mean([told["ratios"][i] for i in which])),
        "planners": {},
    }
    for planner in setting.planners:
        refused = next((plans[i][planner]["refused"] for i in which if "refused" in plans[i][planner]), None)
        if refused is not None:
            out["planners"][planner] = {"refused": refused}
            continue
        walls = [_walls([one[i][planner] for one in times]) for i in which]
        out["planners"][planner] = {
            "wall_s": float(np.mean([median(wall) for wall in walls])),
            "spread": float(np.mean([(max(wall) - min(wall)) / median(wall) for wall in walls])),
            "predicted_s": float(np.mean([plans[i][planner]["predicted_s"] for i in which])),
            "network_s": float(np.mean([plans[i][planner]["network_s"] for i in which])),
            "chose": [plans[i][planner]["planner"] for i in which],
        }
    return out


def _walls(times: list[list[tuple[float, float]]]) -> list[float]:
    """Seconds of each round from the first start to the last end. times: by rank and round."""
    return [max(end for _, end in one) - min(begin for begin, _ in one) for one in zip(*times)]


def _rank(rank: int, setting: Setting, folder: str) -> list[dict[str, list[tuple[float, float]]]]:
    """Run every pack by every planner in turn: what `_timed` says of each pack."""
    connect()
    dist.barrier()
    session, out = Session(dtype=torch.float32), []
    for index in range(len(setting.packs)):
        paths = {name: _path(folder, index, name) for name in setting.planners}
        plans = {name: Plan.load(path).vouched() for name, path in paths.items() if path.exists()}
        session.arena.reserve(max(int(plan.arena_bytes()[rank]) for plan in plans.values()))
        out.append(_timed(session, plans, setting.rounds))
    return out


def _timed(session: Session, plans: dict[str, Plan], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(begin, end) of every planner and round, by the machine's one monotonic clock."""
    executors = {name: session.load(plan) for name, plan in plans.items()}
    inputs = {}
    for name, executor in executors.items():
        generator = torch.Generator().manual_seed(session.rank)
        heads = executor.plan.problem.heads
        shape = (executor.num_tokens, heads.num_q_heads, heads.head_dim)
        inputs[name] = [torch.randn(shape, generator=generator) for _ in range(4)]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for round_ in range(rounds + 1):
        for name, executor in executors.items():
            q, k, v, do = inputs[name]
            dist.barrier()
            begin = time.monotonic()
            executor.backward(do, executor.forward(q, k, v))
            if round_:
                times[name].append((begin, time.monotonic()))
    return times


def _planned(setting: Setting, cluster: hsap.Cluster, folder: Path) -> dict:
    """Compile every pack by every planner into the folder; what the plans promise."""
    plans, ratios = [], []
    for index, (_, lengths) in enumerate(setting.packs):
        problem, told = setting.problem(lengths, cluster), {}
        for planner in setting.planners:
            name, options = read_planner(planner)
            try:
                plan = hsap.compile(problem, name, **options)
            except Refused as error:
                told[planner] = {"refused": str(error)}
                continue
            report = hsap.verify(plan)
            assert report.ok, str(report)
            plan.save(_path(folder, index, planner))
            predicted_s = hsap.simulate(plan).predicted_s
            told[planner] = {"planner": plan.planner, "predicted_s": predicted_s, "network_s": network_s(plan, setting)}
        plans.append(told)
        ring = hsap.compile(problem, BASE)
        ratios.append(network_s(ring, setting) / compute_s(ring, cluster))
    return {"plans": plans, "ratios": ratios, "cluster": asdict(cluster)}


def network_s(plan: Plan, setting: Setting) -> float:
    """Seconds for which a plan keeps its busiest node's port in one direction, at the shaped rate."""
    total = np.zeros((2, setting.num_nodes))
    node_of = np.arange(plan.num_ranks) // setting.ranks_per_node
    for programs in plan.programs[0]:
        sent = flows(plan, programs)
        src, dst = node_of[sent.src], node_of[sent.dst]
        for direction, end in enumerate((src, dst)):
            np.add.at(total[direction], end[src != dst], sent.num_bytes[src != dst])
    return float(total.max() / setting.bytes_per_s)


def compute_s(plan: Plan, cluster: hsap.Cluster) -> float:
    """Seconds of the kernel for all visible pairs, spread evenly over ranks and their nodes' cores, as measured."""
    pairs = float(plan.area_per_column().sum())
    heads = plan.problem.heads
    flops = pairs * heads.num_q_heads * heads.head_dim
    both = FLOPS_PER_PAIR[Op.ATTEND] / cluster.attend_efficiency
    both += FLOPS_PER_PAIR[Op.ATTEND_GRAD] / cluster.attend_grad_efficiency
    crowded, _ = crowding(cluster, cluster.ranks_per_node)
    return flops * both * crowded / cluster.flops_per_s / plan.num_ranks


def _path(folder: str | Path, index: int, planner: str) -> Path:
    return Path(folder) / f"{index}-{planner.replace(':', '-')}.plan"


def _legend() -> str:
    return (
        "ms of a layer forward and backward; in brackets how many times faster than ring. net/comp: a ring's time on "
        "its busiest port over the kernel's time on a rank (above 1, the network decides). best: auto's time over the "
        "fastest one's, ± half the spread of auto's rounds; aim: 1 within noise, and 1.5 times faster than ring on "
        f"ragged packs ({', '.join(RAGGED)})."
    )


def _header(planners: Sequence[str]) -> str:
    return (
        f"{'pack':<16}{'net/comp':>9}"
        + "".join(f"{name:>18}" for name in planners)
        + f"{'best':>7}{'±':>6}  auto chose"
    )


def _text(row: dict, planners: Sequence[str]) -> str:
    """A line of what was measured, and one of what was predicted."""
    found = {name: row["planners"][name] for name in planners}
    cells, ending = {}, ""
    for key in ("wall_s", "predicted_s"):
        base = found.get(BASE, {}).get(key)
        cells[key] = "".join(f"{_cell(told.get(key), base):>18}" for told in found.values())
    if "wall_s" in found.get(AUTO, {}):
        auto = found[AUTO]
        fastest = min(told["wall_s"] for told in found.values() if "wall_s" in told)
        chose = " ".join(dict.fromkeys(auto["chose"]))
        ending = f"{auto['wall_s'] / fastest:>7.2f}{auto['spread'] * 50:>5.0f}%  {chose}"
    name = f"{row['kind']}@{row['tokens']}×{row['packs']}"
    return (
        f"{name:<16}{row['network_over_compute']:>9.2f}{cells['wall_s']}{ending}\n"
        f"{'  predicted':<25}{cells['predicted_s']}"
    )


def _cell(seconds: float | None, base_s: float | None) -> str:
    if seconds is None:
        return "refused"
    return f"{seconds * 1e3:.0f}" + (f" ({base_s / seconds:.2f}×)" if base_s else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tests.bench.nodes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two nodes of one rank, short packs, three rounds")
    parser.add_argument("--planner", nargs="+", metavar="NAME", help="NAME[:option=value,…] (default: the table's)")
    parser.add_argument("--batches", type=int, default=2, metavar="N", help="packs of each ragged kind (default 2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds that count (default 5)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
