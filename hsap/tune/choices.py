"""Choices: which shapes a job's ranks can take, and in words why the others can't or aren't tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hsap.ir.check import MAX_RANKS, Refused
from hsap.ir.problem import Topology
from hsap.tune.job import Job
from hsap.tune.setting import GIB

ZERO_STAGES = (0, 1, 2, 3)
CHECKPOINTING = ("none", "selective", "full")
MICRO_PACKS = (1, 2, 4, 8)
ENOUGH_TOKENS = 16_384
"""Tokens of a rank's micro-batch beyond which a larger one gains nothing: kernels are long, traffic is small beside."""


@dataclass(slots=True)
class Refusals:
    """Why choices fell out, in the order of first mention: reason to choices, and to bytes where it was memory."""

    reasons: dict[str, list[str]] = field(default_factory=dict)
    needed: dict[str, float] = field(default_factory=dict)

    def add(self, choice: str, reason: str, needed: float | None = None) -> None:
        """Note one. needed: bytes that it would take of a rank's memory, where that is why."""
        names = self.reasons.setdefault(reason, [])
        if needed is not None:
            self.needed[reason] = needed
        if choice not in names:
            names.append(choice)

    def lines(self, most: int = 6) -> list[str]:
        """One line a reason, with the choices that it met."""
        out = []
        for reason, names in self.reasons.items():
            more = f" and {len(names) - most} more" if len(names) > most else ""
            out.append(f"{', '.join(names[:most])}{more}: {reason}")
        return out


@dataclass(frozen=True, slots=True)
class Shape:
    """SP groups and the ranks of each, with the packs of a micro-step."""

    dp: int
    topology: Topology
    micro_packs: int

    def __str__(self) -> str:
        return f"{self.dp}x{self.topology}"


def shapes(job: Job, refusals: Refusals) -> Iterator[Shape]:
    """Give every shape that is legal and worth a try; tell of the others."""
    for ranks in _divisors(job.world):
        dp, name = job.world // ranks, f"dp {job.world // ranks}"
        if dp > job.packs_per_step:
            refusals.add(
                name,
                f"every SP group needs a pack of its own in each step, and a step has {job.packs_per_step} packs of "
                f"{job.seq_len:,} tokens; raise global_batch_tokens or lower seq_len",
            )
        elif job.packs_per_step % dp:
            refusals.add(
                name,
                f"the {job.packs_per_step} packs of a step don't go round; make the step a multiple of so many packs "
                "by global_batch_tokens",
            )
        elif ranks > job.seq_len:
            refusals.add(name, f"SP groups of {ranks} ranks would be more ranks than a pack has tokens")
        else:
            for topology in _topologies(job, ranks, refusals):
                for micro in _micro_packs(job, dp, ranks):
                    yield Shape(dp, topology, micro)


def _topologies(job: Job, ranks: int, refusals: Refusals) -> Iterator[Topology]:
    node = job.cluster.ranks_per_node
    if ranks > MAX_RANKS:
        refusals.add(f"SP groups of {ranks} ranks", f"plans are made for up to {MAX_RANKS:,} ranks")
        return
    if ranks % node and node % ranks:
        refusals.add(
            f"SP groups of {ranks} ranks", f"some would start inside a node of {node}, differently each; not tried"
        )
        return
    for intra in _divisors(ranks):
        topology = Topology(ranks // intra, intra)
        try:
            job.heads.shares(intra)
        except Refused:
            refusals.add(
                f"intra {intra}",
                f"more ranks than the model's {job.model.num_q_heads} query heads, and IntraSP gives every rank at "
                "least one; put the others into InterSP or data parallelism",
            )
            continue
        if node % intra:
            refusals.add(
                f"intra {intra}",
                f"would send all-to-alls of every layer between nodes of {node} ranks, which InterSP is there "
                "to avoid; legal, not tried",
            )
            continue
        yield topology


def _micro_packs(job: Job, dp: int, ranks: int) -> list[int]:
    each = job.packs_per_step // dp
    return [m for m in MICRO_PACKS if each % m == 0 and (m == 1 or m * job.seq_len <= ENOUGH_TOKENS * ranks)]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def too_large(items: dict[str, float], capacity: float) -> str:
    """Say of what doesn't fit how much it needs, and what most of it is."""
    name = max(items, key=items.__getitem__)
    needed = sum(items.values())
    over = needed - capacity
    short = f"{over / GIB:.2f} GiB" if over >= 0.01 * GIB else f"{over / (1 << 20):.2g} MiB"
    kept = f" with {items['reserve'] / GIB:.2f} in reserve" if items["reserve"] else ""
    return (
        f"needs {needed / GIB:.2f} GiB a rank{kept}, {short} more than it has; the largest item is {name}, "
        f"{items[name] / GIB:.2f} GiB"
    )
