"""Cases of the attention bench: packs, heads, and who attends over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hsap import clusters
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.planners import AUTO, PLANNERS
from tests.bench.packs import pack

NUM_RANKS = 8
HEADS = HeadShape(8, 8, 64, "fp32")
"""As many KV heads as ranks, because DeepSpeed's attention can't share a head."""

ULYSSES, RING = "deepspeed", "context_parallel"
OURS = (*PLANNERS, f"usp:heads={NUM_RANKS}", AUTO)


@dataclass(frozen=True, slots=True)
class Case:
    """A pack and how many layers' attention over it is one measurement. cluster: preset that planners are told of."""

    name: str
    lengths: tuple[int, ...]
    layers: int = 1
    heads: HeadShape = HEADS
    cluster: str = "cpu-gloo"

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_one_document(self) -> bool:
        return len(self.lengths) == 1

    def small(self, num_ranks: int) -> Case:
        """A case of the same kind that takes no time."""
        return replace(self, name="small", lengths=(28 * num_ranks, 4 * num_ranks), layers=1)

    def problem(self, num_ranks: int) -> Problem:
        """The pack on that many ranks of one machine."""
        cluster = clusters.read(self.cluster)
        return Problem(Layout.from_lengths(self.lengths), self.heads, Topology(num_ranks, 1), cluster=cluster)


FULL = (Case("ldc@131072", pack("ldc", batch=1)), Case("single@36864", (36864,)))
"""About 65 s of a 3 GHz core each; the second is what torch's context_parallel can do."""
QUICK = (Case("ldc@4096", pack("ldc", 4096, 1)), Case("single@2048", (2048,)))
