"""Header: the problem, and what else a plan says of itself, changed behind its streams' back."""

from __future__ import annotations

from dataclasses import replace

from hsap.ir.cluster import Cluster
from hsap.ir.families import MASKS
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.plan import Plan
from hsap.ir.problem import Topology
from tests.mutation.mutants import Random

PARAMETERS = {"window": (4,), "lambda": (1, 3), "blockwise": (3, 2, 1, 1), "shared_question": (2, 20), "prefix": (3,),
              "chunked": (4,)}  # fmt: skip


def _problem(plan: Plan, **changed) -> Plan:
    """Change the problem; `Refused` where it wouldn't be one."""
    return replace(plan, problem=replace(plan.problem, **changed))


def lengths(random: Random, plan: Plan) -> Plan:
    """Documents change places, lend each other a token, fall in two, or one grows or is lost."""
    old = list(plan.problem.layout.lengths)
    if not old:
        return _problem(plan, layout=Layout.from_lengths([1]))
    i, j = random.integers(len(old), size=2)
    match random.integers(5):
        case 0:
            old[i], old[j] = old[j], old[i]
        case 1:
            old[i], old[j] = old[i] + 1, old[j] - 1
        case 2:
            at = random.integers(old[i] + 1)
            old[i : i + 1] = [at, old[i] - at]
        case 3:
            old[i] += random.choice([-1, 1])
        case _:
            del old[i]
    masks = tuple((mask if isinstance(mask, Mask) else Mask(), layers) for mask, layers in plan.problem.masks)
    return _problem(plan, layout=Layout.from_lengths([n for n in old if n > 0]), masks=masks)


def masks(random: Random, plan: Plan) -> Plan:
    """A mask is another, has another parameter, is there twice, or has more layers."""
    old = list(plan.problem.masks)
    i = random.integers(len(old))
    mask, layers = old[i]
    match random.integers(4):
        case 0:
            name = str(random.choice(list(MASKS)))
            old[i] = (Mask(name, PARAMETERS.get(name, ())), layers)
        case 1 if isinstance(mask, Mask) and mask.parameters:
            k = random.integers(len(mask.parameters))
            changed = [*mask.parameters]
            changed[k] += int(random.choice([-1, 1]))
            old[i] = (Mask(mask.name, tuple(changed)), layers)
        case 2:
            old.insert(i, old[i])
        case _:
            old[i] = (mask, layers + 1)
    return _problem(plan, masks=tuple(old))


def heads(random: Random, plan: Plan) -> Plan:
    """More or fewer query or KV heads, another dimension or dtype."""
    old = plan.problem.heads
    q, kv, dim, dtype = old.num_q_heads, old.num_kv_heads, old.head_dim, old.dtype
    match random.integers(5):
        case 0:
            q += int(random.choice([-1, 1]))
        case 1:
            kv += int(random.choice([-1, 1]))
        case 2:
            q, kv = kv, q
        case 3:
            dim += 1
        case _:
            dtype = str(random.choice(["fp32", "bf16"]))
    return _problem(plan, heads=HeadShape(q, kv, dim, dtype))


def topology(random: Random, plan: Plan) -> Plan:
    """Ranks in another shape, one more or fewer, or a shape of the plan's own."""
    old, n = plan.topology, plan.num_ranks
    shapes = [Topology(n // k, k) for k in range(1, n + 1) if n % k == 0]
    if random.random() < 0.5:
        return replace(plan, own_topology=shapes[random.integers(len(shapes))])
    others = [*shapes, Topology(old.inter_sp + 1, old.intra_sp), Topology(max(old.inter_sp - 1, 1), old.intra_sp)]
    return _problem(plan, topology=others[random.integers(len(others))])


def limits(random: Random, plan: Plan) -> Plan:
    """The most tokens of a rank, or the arena, just enough or not."""
    most, layout = int(plan.tokens_per_rank.max(initial=0)), plan.problem.heads
    if random.random() < 0.5:
        return _problem(plan, max_tokens_per_rank=max(most + int(random.integers(-2, 3)), 1))
    row = max(most, 1) * layout.num_q_heads * layout.head_dim * 8
    need = int(plan.arena_bytes().max(initial=0)) + int(random.choice([-257, -1, 0, 1, 256]))
    return _problem(plan, arena_multiple=max(need, 1) / row)


def wire(random: Random, plan: Plan) -> Plan:
    """Another format on the network."""
    return _problem(plan, wire_dtype=str(random.choice(["fp32", "bf16", "fp16", "fp64"])))


def cluster(random: Random, plan: Plan) -> Plan:
    """Other nodes: prices of ways, not a meaning of a plan's."""
    return _problem(plan, cluster=Cluster("other", int(random.integers(1, 9)), int(random.integers(3))))


def packs(random: Random, plan: Plan) -> Plan:
    """Other borders of packs."""
    layout = plan.problem.layout
    cut = int(random.integers(layout.num_documents + 1))
    return _problem(plan, layout=Layout(layout.lengths, (cut, layout.num_documents - cut)))


def names(random: Random, plan: Plan) -> Plan:
    """Planner, options, and what auto found."""
    match random.integers(3):
        case 0:
            return replace(plan, planner=str(random.choice(["", "none", "<b>"])))
        case 1:
            return replace(plan, options={"x": int(random.integers(1 << 30))})
        case _:
            return replace(plan, choice={"sap": float(random.random())})


KINDS = {
    f"header {function.__name__}": function
    for function in (lengths, masks, heads, topology, limits, wire, cluster, packs, names)
}
