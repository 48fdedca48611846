"""HSAP's Figure 5: which method trains a model of 30B on 64 GPUs at which sequence length, and how fast.

Of the figure only its caption and text are known: what is compared is who runs out of memory first, and who is fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hsap.ir.cluster import Cluster
from hsap.ir.heads import HeadShape
from hsap.ir.problem import Topology
from hsap.models.config import ModelConfig
from hsap.papers.comparison import Table
from hsap.papers.pricing import Draw, priced
from hsap.papers.published import published
from hsap.tune.activations import loss_bytes, saved_bytes, working_bytes
from hsap.tune.collectives import gather_s
from hsap.tune.memory import kept_copies, phases
from hsap.tune.setting import Setting, reserve_bytes
from hsap.tune.step import STEP_BYTES, MicroSteps, ends_s, layer_s, step_s

MODEL = ModelConfig(
    vocab_size=32000, num_layers=48, hidden_dim=7168, num_q_heads=56, num_kv_heads=56, head_dim=128, ffn_dim=19200,
    checkpointing="selective",
)  # fmt: skip
"""As configs/model/gpt-30b.yaml has it; the paper gives no dimensions."""
CLUSTER, GPUS, NODE = "dgx-a100", 64, 8
SEQUENCES = 8
"""Of a step, for every method."""
LENGTHS = tuple(k << 10 for k in (32, 64, 128, 256, 512, 1024))
HSAP, ULYSSES, RING, MEGATRON = "HSAP", "Ulysses-like", "ColAI-like", "Megatron-like"
GATHERS = 14
"""All-gathers and reduce-scatters of a layer's activations under Megatron's tensor and sequence parallelism: four in
forward, four when it is computed again, four in backward and two of inputs that are gathered again there."""
AGAIN = ", again"
"""Ends the shape of a way that computes attention's forward again in backward instead of keeping its tensors."""
CLAIMED = 512 << 10
"""Tokens that the paper says HSAP reaches."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Way:
    """One configuration of a method. shape: in words. seconds: of a step. needs_bytes: of the fullest rank."""

    shape: str
    seconds: float
    needs_bytes: float


def figure5(draw: Draw, seeds: int) -> Table:
    """Every method's best configuration at each length; one document a sequence, so draws nothing."""
    known, cluster = published("5"), Cluster.preset(CLUSTER, nodes=GPUS // NODE)
    figures, rows = [], []
    for length in LENGTHS:
        figure: dict[str, Any] = {"seq_len": length}
        row = [f"{length >> 10}K"]
        for method in (MEGATRON, RING, ULYSSES, HSAP):
            figure[method], shown = _best(list(_ways(method, length, cluster)), length, cluster.capacity_bytes)
            row.append(shown)
        figures.append(figure)
        rows.append(tuple(row))
    return Table(
        "5",
        "HSAP Figure 5: model TFLOP/s of a GPU, 30B on 64 GPUs, each method at its fastest that fits",
        known.source,
        ("tokens", MEGATRON, RING, ULYSSES, HSAP),
        tuple(rows),
        tuple(figures),
        (
            "dimensions of the model are those of configs/model/gpt-30b.yaml, cluster dgx-a100 of 8 nodes, bf16; a "
            f"step is {SEQUENCES} sequences of one causal document; layers are computed again in backward, attention "
            'is kept or computed again ("again"), whichever is faster and fits; 2 GiB and 5 % of a GPU are left alone',
            "HSAP is sap, IntraSP 8 and InterSP 1 to 8, data parallelism for the rest, ZeRO 3; Ulysses-like is IntraSP "
            "8, as 56 heads and 64 GPUs have no larger common divisor, ZeRO 3; ColAI-like is the planner ring over 8 "
            "to 64 GPUs, ZeRO 3, whatever that system's own memory is",
            "Megatron-like is tensor parallelism over the 8 of a node with sequence parallelism between, pipelines of "
            "1 to 8 nodes (1F1B, as many sequences in flight as stages), optimizer shared over data ranks; what stages "
            "send one another isn't counted",
        ),
        (*_findings(figures), *(f'the paper says: "{quote}"' for quote in known.quotes)),
    )


def _ways(method: str, length: int, cluster: Cluster) -> Iterator[Way]:
    if method == MEGATRON:
        for stages in (1, 2, 4, 8):
            yield from _megatron(length, stages, cluster)
        return
    degrees = (NODE,) if method == ULYSSES else (8, 16, 32, 64)
    for degree in degrees:
        intra = 1 if method == RING else NODE
        yield from _split(length, Topology(degree // intra, intra), "ring" if method == RING else "sap", cluster)


def _split(length: int, topology: Topology, planner: str, cluster: Cluster) -> Iterator[Way]:
    """A sequence over the ranks of an SP group, ZeRO 3 over all of them."""
    dp = GPUS // topology.num_ranks
    heads = HeadShape(MODEL.num_q_heads, MODEL.num_kv_heads, MODEL.head_dim, "bf16")
    timeline = priced([length], heads, topology, cluster, planner)
    tokens = int(timeline.plan.tokens_per_rank.max())
    arena = max(int(trace.peak_bytes.max()) for pair in timeline.traces for trace in pair)
    setting = Setting(dp, topology, planner, 3, MODEL.checkpointing, 1, SEQUENCES // dp)
    forward_s, backward_s = timeline.seconds("forward"), timeline.seconds("backward")
    each = phases(MODEL, setting, tokens, arena, reserve_bytes(cluster), kept_copies(MODEL, setting)).values()
    for again in (False, True):
        micro = MicroSteps.alike((forward_s * (1 + again), backward_s), tokens, dp, setting.accumulation)
        seconds = step_s(MODEL, setting, cluster, micro)
        dropped = again * (1 - 1 / MODEL.num_layers)
        needs = max(sum(items.values()) - dropped * items["attention's saved tensors"] for items in each)
        yield Way(f"dp {dp}, {topology}{AGAIN * again}", seconds, needs)


def _megatron(length: int, stages: int, cluster: Cluster) -> Iterator[Way]:
    """Layers over `stages` nodes, every matrix over a node's ranks, sequences over what is left."""
    dp = GPUS // (NODE * stages)
    tokens, layers, turns = length // NODE, MODEL.num_layers // stages, SEQUENCES // dp
    heads = HeadShape(MODEL.num_q_heads // NODE, MODEL.num_kv_heads // NODE, MODEL.head_dim, "bf16")
    attention = priced([length], heads, Topology(1, 1), cluster, "sap")
    gathered = 2 * length * MODEL.hidden_dim
    layer = 4 * layer_s(MODEL, "bf16", cluster, tokens) + GATHERS * gather_s(gathered, cluster, NODE)
    params = MODEL.num_params / (NODE * stages)
    # Gradients reduced and weights gathered by data ranks, each on another node: over each rank's own card.
    traffic = (4 + 2) * params * (1 - 1 / dp) / cluster.inter_bytes_per_s
    once = traffic + STEP_BYTES * params / dp / cluster.memory_bytes_per_s
    saved, rest = saved_bytes(MODEL, "bf16", "selective")
    working = 2 * gathered + max(working_bytes(MODEL, "bf16", "selective", tokens), loss_bytes(MODEL, "bf16", tokens))
    for again in (False, True):
        attention_s = attention.predicted_s + again * attention.seconds("forward")
        # The stage with the head sets the pace.
        turn = layers * (layer + attention_s) + ends_s(MODEL, "bf16", cluster, tokens)
        in_flight = layers * min(stages, turns)
        kept = tokens * (in_flight * rest + (1 if again else in_flight) * saved)
        needs = (2 + 4 + 12 / dp) * params + kept + working + reserve_bytes(cluster)
        yield Way(f"dp {dp}, {stages} stages{AGAIN * again}", float(turn * (turns + stages - 1) + once), needs)


def _best(ways: list[Way], length: int, capacity: float) -> tuple[dict[str, Any], str]:
    """The fastest way that fits, or how much the smallest one lacks."""
    fitting = [way for way in ways if way.needs_bytes <= capacity]
    if not fitting:
        least = min(ways, key=lambda way: way.needs_bytes)
        figure = {"tflops": None, "shape": least.shape, "needs_bytes": least.needs_bytes, "fits_kept": False}
        return figure, f"OOM, {least.needs_bytes / GIB:.0f} GiB ({least.shape})"
    way = min(fitting, key=lambda way: way.seconds)
    flops = MODEL.train_flops(SEQUENCES * length, SEQUENCES * length * (length + 1) // 2)
    tflops = flops / way.seconds / GPUS / 1e12
    kept = any(not each.shape.endswith(AGAIN) for each in fitting)
    figure = {"tflops": tflops, "shape": way.shape, "needs_bytes": way.needs_bytes, "fits_kept": kept}
    return figure, f"{tflops:.0f} ({way.shape})"


def _findings(figures: list[dict[str, Any]]) -> tuple[str, ...]:
    methods = (MEGATRON, RING, ULYSSES, HSAP)
    longest = {m: max((f["seq_len"] for f in figures if f[m]["tflops"]), default=0) for m in methods}
    lengths = ", ".join(f"{m} {longest[m] >> 10}K" for m in sorted(methods, key=longest.__getitem__))
    kept = max((f["seq_len"] for f in figures if f[HSAP]["fits_kept"]), default=0)
    reaches = "reaches" if longest[HSAP] >= CLAIMED else "does not reach"
    firsts = []
    for f in figures:
        most = max(f[m]["tflops"] or 0.0 for m in methods)
        names = [m for m in methods if f[m]["tflops"] == most]
        firsts.append(f"{f['seq_len'] >> 10}K {' and '.join(names) or 'none'}")
    return (
        f"longest sequence that fits, of those tried: {lengths}; HSAP {reaches} the {CLAIMED >> 10}K that the paper "
        f"speaks of, and {kept >> 10}K where attention's tensors are kept, as this project's own training keeps them",
        f"fastest: {', '.join(firsts)} (where the shape is the same, HSAP is Ulysses)",
        "methods that hold a sequence in one node (Ulysses-like, Megatron-like) keep an eighth of it in a GPU, however "
        "many nodes there are; those that spread it over 64 keep a sixty-fourth, and differ in what crosses nodes",
    )
