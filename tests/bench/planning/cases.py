"""Cases: what is planned in each section of the bench, and the figures of a plan.

Definitions are those of `peers.json`: bytes of the forward pass, 8 query / 2 KV heads × 128 in bf16, 8 ranks a node,
means over the first batches of a workload: 2, 3 and 2 at 16, 32 and 64 ranks, 1 of packs over 131,072 tokens.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from hsap import planners
from hsap.api import compile, simulate
from hsap.cli.plan import read_planner
from hsap.compiler.pipeline import build
from hsap.ir.effects import attended_pairs
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology
from hsap.ir.schedule import DIRECTIONS
from hsap.ir.summary import summary
from hsap.verify import verify

FOLDER = Path(__file__).parents[1]
WORKLOADS: dict[str, list[list[int]]] = json.loads((FOLDER / "planning_workloads.json").read_text(encoding="utf-8"))
PEERS = json.loads((FOLDER / "peers.json").read_text(encoding="utf-8"))
RANKS = (16, 32, 64)
HEADS = HeadShape(8, 2, 128, "bf16")
MORE_HEADS = HeadShape(32, 8, 128, "bf16")
NUM_BATCHES = {16: 2, 32: 3, 64: 2}
LARGE_TOKENS = 131072
MASKS = ("causal", "lambda:64,4096", "blockwise:256,2,1,1", "shared_question:4,20")
MASK_WORKLOADS, MASK_RANKS = ("ldc@131072", "single@131072"), 32
BYTES = ("bytes_internode", "bytes_internode_once_per_node", "max_recv_bytes_per_rank", "bytes_total")
FIGURES = (*BYTES, "predicted_s")
SECTIONS = ("planners", "topologies", "heads", "masks")


@dataclass(frozen=True, slots=True)
class Case:
    """A line of the bench without the planner. batches: document lengths of each."""

    section: str
    workload: str
    batches: tuple[tuple[int, ...], ...]
    topology: Topology
    heads: HeadShape = HEADS
    mask: str = "causal"

    @property
    def kv_replication(self) -> float:
        """Copies of a KV head that IntraSP makes: 1 where ranks share out the KV heads."""
        return sum(share.kv_count for share in self.heads.shares(self.topology.intra_sp)) / self.heads.num_kv_heads

    def problems(self) -> Iterator[Problem]:
        for lengths in self.batches:
            yield Problem(Layout.from_lengths(lengths), self.heads, self.topology, ((self.mask, 1),))

    def __str__(self) -> str:
        heads = f"{self.heads.num_q_heads}:{self.heads.num_kv_heads}:{self.heads.head_dim} {self.heads.dtype}"
        return (
            f"{self.section}: {self.workload}, {self.topology}, {self.mask}, heads {heads}, KV replication "
            f"{self.kv_replication:g}, batches: {len(self.batches)}"
        )


def cases(section: str, workloads: Sequence[str], ranks: Sequence[int], num_batches: int | None = None) -> list[Case]:
    """List a section's cases; num_batches: at most so many of a workload instead of what peers' rows are means of."""
    out = []
    for workload in workloads:
        for num_ranks in ranks:
            count = NUM_BATCHES.get(num_ranks, 1) if int(workload.split("@")[1]) <= LARGE_TOKENS else 1
            batches = tuple(map(tuple, WORKLOADS[workload][: min(num_batches or count, count)]))
            flat = Topology(num_ranks, 1)
            if section == "planners":
                out.append(Case(section, workload, batches, flat))
            elif section == "topologies":
                out += [Case(section, workload, batches, Topology(num_ranks // n, n)) for n in (2, 8)]
            elif section == "heads":
                out.append(Case(section, workload, batches, flat, MORE_HEADS))
            elif workload in MASK_WORKLOADS and num_ranks == MASK_RANKS:
                out += [Case(section, workload, batches, flat, mask=mask) for mask in MASKS]
    return out


def measure(case: Case, planner: str, runs: int) -> dict:
    """Plan and verify a case's batches `runs` times each; figures are means over batches, times medians over runs.

    own_topology is there where the planner runs the ranks at a shape that isn't the case's, chose (a planner for each
    batch) where it is auto. What the planner refuses is said under the key `refused` and has no figures.
    """
    line = {
        "section": case.section,
        "workload": case.workload,
        "topology": str(case.topology),
        "mask": case.mask,
        "heads": [case.heads.num_q_heads, case.heads.num_kv_heads, case.heads.head_dim],
        "kv_replication": case.kv_replication,
        "batches": len(case.batches),
        "planner": planner,
    }
    name, options = read_planner(planner)
    try:
        _figures(next(case.problems()), name, options, 1)  # loads what is compiled, the verifier's loops too
        plans, figures = zip(*(_figures(problem, name, options, runs) for problem in case.problems()))
    except (ValueError, ImportError) as error:
        return line | {"refused": str(error)}
    if name == planners.AUTO:
        line["chose"] = [plan.planner for plan in plans]
    elif plans[0].own_topology is not None:
        line["own_topology"] = str(plans[0].own_topology)
    return line | _mean(figures)


def peers(case: Case) -> list[dict]:
    """Lines of other planners for this case, in the form of `measure`: what `peers.json` has of them."""
    if case.section != "planners":
        return []
    known = [
        row for row in PEERS["rows"] if row["workload"] == case.workload and row["ranks"] == case.topology.inter_sp
    ]
    return [
        {
            "section": case.section,
            "workload": case.workload,
            "topology": str(case.topology),
            "planner": f"({name})",
            "area": found["area"],
            "tokens": found["tok"],
            "forward": {key: found[short] * 2**20 for key, short in zip(BYTES, "dhrt")},
        }
        for row in known
        for name, found in row.items()
        if isinstance(found, dict) and "area" in found
    ]


def _figures(problem: Problem, planner: str, options: dict, runs: int) -> tuple[Plan, dict]:
    times = []
    for _ in range(runs):
        plan, choose_s, rest_s = _plan(problem, planner, options)
        times.append((choose_s, rest_s))
    choose_s, rest_s = (median(column) for column in zip(*times))
    figures = summary(plan, simulate(plan).makespans_s)
    return plan, {
        "area": figures["area_imbalance"],
        "area_backward": _backward_area(plan),
        "tokens": figures["token_imbalance"],
        **{name: {key: figures[name][key] for key in FIGURES} for name in DIRECTIONS},
        "stages": figures["stages"],
        "instructions": figures["instructions"],
        "plan_ms": (choose_s + rest_s) * 1e3,
        "choose_ms": choose_s * 1e3,
        "us_per_instruction": rest_s * 1e6 / max(figures["instructions"], 1),
    }


def _plan(problem: Problem, planner: str, options: dict) -> tuple[Plan, float, float]:
    """Plan and verify once: (plan, CPU seconds of choosing, of everything else); auto chooses by compiling others."""
    gc.collect()
    start = time.process_time()
    if planner == planners.AUTO:
        plan = compile(problem, planner, **options)
        chosen = time.process_time()
    else:
        strategy = planners.run(planner, problem, options)
        chosen = time.process_time()
        plan = build(problem, strategy, planner, options)
    report = verify(plan)
    assert report.ok, str(report)
    return plan, chosen - start, time.process_time() - chosen


def _backward_area(plan: Plan) -> float:
    programs = plan.programs[0][1]
    pairs = np.zeros(plan.num_ranks)
    np.add.at(pairs, programs.rank, attended_pairs(programs, plan.slices[0]))
    return float(pairs.max() / pairs.mean())


def _mean(lines: Sequence[dict]) -> dict:
    return {
        key: _mean([line[key] for line in lines]) if isinstance(value, dict) else fmean(line[key] for line in lines)
        for key, value in lines[0].items()
    }
