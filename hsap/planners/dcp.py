"""DCP: dynamic context parallelism, the placement of data and computation as one hypergraph partitioning.

Paper: Jiang et al., "DCP: Addressing Input Dynamism In Long-Context Training via Dynamic Context Parallelism" (2025):
1. Blocks (§4.1): every document is cut into token blocks of B tokens (the last one has what is left), the heads into
   KV-head groups. A computation block is the attention of one token block's queries to another's keys, for one group;
   those without a visible pair don't exist.
2. Placement (§4.2): a hypergraph. Vertices are computation blocks, which weigh FLOPs, and data blocks, which weigh
   bytes; a hyperedge is a data block, weighs its bytes and joins all that read or write it. It is partitioned over
   the nodes (ε 0.4) and each node's part over its ranks (ε 0.1): Σ bytes × (connectivity − 1), the bytes that move,
   is least while both weights are balanced. q, kv and o of the same tokens are on one rank.
3. Divisions (§4.3): each rank's blocks are dealt to T = 4 divisions, so that the data of one travel under the
   computation of another (`divisions`). Partial outputs go home after the last one.
The paper's settings (§7): B is the best of 512, 1024, 2048, 4096 (`block=0` here), T = 4.

Cost: what moves is what the partition cuts. Planning grows with the computation blocks, which for one long document
are many more than for ragged ones (`python -m tests.bench.planning --planner dcp` times both). Head groups are those
left after IntraSP.

Ours: Mt-KaHyPar balances one weight, so it gets tokens and FLOPs added up, and its answer, loose as ε lets it be, is
refined under a cap for each of the two (`refine`): nodes first, then ranks, then all ranks at once with the price of a
byte between nodes and inside one as the cluster has them. Several masks share the tokens' homes and have computation
blocks of their own, each mask's area under its own cap, as layers run one after another; bytes and FLOPs count a mask's
layers. Backward computes where forward does.
Options: block: tokens of a block; by default the largest of 1024, 2048, 4096 of which a rank has four (1024 where it
has two or three, a smaller power of two on small batches); with 0 the best of the paper's sizes, by an estimate: the
slowest rank's computation and transfers, one after another. eps_inter, eps_intra: by how much a part may exceed the
mean in the partitioner. divisions: T. area_slack, token_slack: what the refinement allows a rank's area and tokens over
the mean; 0.54, both ε together ((1 + 0.4) · (1 + 0.1) − 1), is the paper's tolerance for area. Tokens close to even
cost bytes, and where a rank has few blocks they can't be packed that well. With relay=True rows cross between nodes as
the partition over nodes counts them, and results leave as soon as they are done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.check import Refused, excess, whole
from hsap.ir.effects import FLOPS_PER_PAIR
from hsap.ir.problem import Problem
from hsap.ir.program import Op, Role
from hsap.ir.schedule import AHEAD, OUTPUTS, Schedule, Strategy, Transfers
from hsap.ir.sort import distinct
from hsap.ir.span import ranges
from hsap.planners.divisions import Needs, divide
from hsap.planners.hypergraph import Hypergraph, cells_hypergraph
from hsap.planners.partition import partition
from hsap.planners.prices import wire_bytes
from hsap.planners.refine import Parts, refine

BLOCK_SIZES = (512, 1024, 2048, 4096)
"""Token blocks that `block=0` tries."""
DEFAULT_BLOCK, SMALLEST_BLOCK = 1024, 32
"""Below the first, blocks are chosen only for batches with few tokens a rank; never below the second."""
MAX_CELLS = 1 << 23
"""Computation blocks that a batch may have at most: the solver takes minutes for a tenth of them."""
MAX_DIVISIONS = 1 << 10
"""Each goes through all computation blocks once more, and trays are told apart by three of them and a rank's head group
in one integer (`hsap.compiler.trays`)."""
TOKEN_ROOM, AREA_ROOM = 0.2, 0.6
"""Parts of the slacks that a node may use; its ranks need the rest, as blocks have a size."""
RANK_ROOM = 0.96
"""Part of the slacks at which a rank begins to cost, as a cap may be exceeded a little."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The planner's options but for the block size; see there."""

    eps_inter: float
    eps_intra: float
    divisions: int
    area_slack: float
    token_slack: float


def dcp(
    problem: Problem,
    block: int | None = None,
    eps_inter: float = 0.4,
    eps_intra: float = 0.1,
    divisions: int = 4,
    area_slack: float = 0.05,
    token_slack: float = 0.1,
) -> Strategy:
    """Plan token and computation blocks as parts of a hypergraph."""
    if block is None:
        block = _default_block(problem)
    block = whole("planner dcp: block, tokens of a block or 0 for the best of several sizes,", block, 0)
    settings = _Settings(
        excess("planner dcp: eps_inter", eps_inter),
        excess("planner dcp: eps_intra", eps_intra),
        whole("planner dcp: divisions", divisions, 1, MAX_DIVISIONS),
        excess("planner dcp: area_slack", area_slack),
        excess("planner dcp: token_slack", token_slack),
    )
    choices = [_Choice.of(problem, size, settings) for size in ([block] if block else BLOCK_SIZES)]
    best = choices[0] if block else min(choices, key=lambda choice: choice.seconds(problem))
    return best.strategy(problem, settings.divisions)


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """Token blocks of one size, their hypergraph, and the rank of every vertex.

    spans: of the token blocks, int64 [num_token_blocks, 2]. cells: blocks of each mask, by token blocks in order of
    position.
    sizes: bytes of a token's (q, o, kv) in each head group, int64 [num_groups, 3].
    """

    spans: np.ndarray
    cells: tuple[Blocks, ...]
    sizes: np.ndarray
    graph: Hypergraph
    rank: np.ndarray

    @classmethod
    def of(cls, problem: Problem, block: int, settings: _Settings) -> _Choice:
        """Cut a batch into blocks and place them."""
        spans = _token_blocks(problem, block)
        shards = Shards(spans, np.arange(len(spans) + 1), np.zeros(len(spans), np.int64))
        cells = tuple(cut_blocks(shards, problem.slices(mask)) for mask in range(len(problem.masks)))
        work, sizes = _group_sizes(problem)
        _check_sums(problem, cells, sizes)
        columns = [(c.q, c.kv, c.area, layers) for c, (_, layers) in zip(cells, problem.masks)]
        group_bytes = np.stack([sizes[:, 0] + sizes[:, 1], sizes[:, 2]], axis=1)
        graph = cells_hypergraph(shards.tokens, columns, work, group_bytes)
        # A family: a token block and all computation of its queries.
        family = np.concatenate([np.arange(len(spans)), *(np.repeat(c.q, len(sizes)) for c in cells)])
        return cls(spans, cells, sizes, graph, _place(problem, graph, family, settings))

    def strategy(self, problem: Problem, num_divisions: int) -> Strategy:
        """Make shards of the token blocks and deal the computation blocks to divisions."""
        num_tokens, num_groups = len(self.spans), len(self.sizes)
        home = self.rank[:num_tokens]
        order = np.argsort(home, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(num_tokens)
        shards = Shards(self.spans[order], np.arange(num_tokens + 1), home[order])
        schedules, first = [], num_tokens
        for mask, cells in enumerate(self.cells):
            blocks = cut_blocks(shards, problem.slices(mask))
            last = first + len(cells) * num_groups
            by_shard = np.lexsort([place[cells.kv], place[cells.q]])
            rank = self.rank[first:last].reshape(-1, num_groups)[by_shard].ravel()
            schedules.append(self._schedule(problem, shards, blocks, rank, num_divisions))
            first = last
        return Strategy(
            shards,
            tuple(_outputs_last(shards, s, "forward", num_divisions) for s in schedules),
            tuple(_outputs_last(shards, s, "backward", num_divisions) for s in schedules),
            num_groups,
            ahead=AHEAD,
        )

    def _schedule(
        self, problem: Problem, shards: Shards, blocks: Blocks, rank: np.ndarray, num_divisions: int
    ) -> Schedule:
        num_groups = len(self.sizes)
        block, group = np.divmod(np.arange(len(rank)), num_groups)
        reads = np.stack([blocks.q[block], len(shards) + blocks.kv[block]], axis=1) * num_groups + group[:, None]
        home = np.repeat(np.tile(shards.home, 2), num_groups)
        num_bytes = np.concatenate([(shards.tokens[:, None] * self.sizes[:, side]).ravel() for side in (0, 2)])
        needs = Needs(rank, blocks.area[block], reads, home, num_bytes)
        stage = divide(needs, problem.topology.inter_sp, num_divisions)
        return Schedule(blocks, block, group, rank, stage)

    def seconds(self, problem: Problem) -> float:
        """Estimate the slowest rank's forward computation and transfers of all layers, one after another [s]."""
        graph, num_ranks, cluster = self.graph, problem.topology.inter_sp, problem.cluster
        node_of = problem.node_of[:: problem.topology.intra_sp]
        area = graph.loads(self.rank, num_ranks)[:, 1:].sum(axis=1)
        speed = cluster.flops_per_s * cluster.attend_efficiency
        time = area * FLOPS_PER_PAIR[Op.ATTEND] * problem.heads.head_dim / speed
        edge, rank = np.nonzero(graph.counts(self.rank, num_ranks))
        home = self.rank[graph.pins[graph.offsets[:-1]]][edge]  # the first pin of an edge is its data block
        rate, _ = cluster.link(node_of[home] != node_of[rank])
        transfer = np.where(home != rank, graph.num_bytes[edge] / rate, 0.0)
        for end in (home, rank):
            np.add.at(time, end, transfer)
        return float(time.max()) / problem.topology.intra_sp


def _outputs_last(shards: Shards, schedule: Schedule, direction: str, num_divisions: int) -> Schedule:
    """Let all partial results go home after the last division, as the paper has it."""
    rows = []
    for role in OUTPUTS[direction]:
        shard = schedule.shard_of(role)
        away = np.flatnonzero(shards.home[shard] != schedule.rank)
        sizes = (len(shards), int(schedule.group.max(initial=0)) + 1, int(schedule.rank.max(initial=0)) + 1)
        key = np.ravel_multi_index((shard[away], schedule.group[away], schedule.rank[away]), sizes)
        shard, group, rank = np.unravel_index(distinct(key)[0], sizes)
        rows.append(Transfers.of(role, shard, rank, shards.home[shard], num_divisions, group))
    return replace(schedule, transfers=Transfers.join(*rows))


def _default_block(problem: Problem) -> int:
    """The largest size of which a rank has four blocks; on small batches smaller ones, of which it has two."""
    per_rank = problem.layout.num_tokens / problem.topology.inter_sp
    size = BLOCK_SIZES[-1]
    while size > DEFAULT_BLOCK and per_rank < 4 * size:
        size //= 2
    while size > SMALLEST_BLOCK and per_rank < 2 * size:
        size //= 2
    return size


def _token_blocks(problem: Problem, block: int) -> np.ndarray:
    """Cut documents into spans of `block` tokens, the last one ragged: int64 [num_token_blocks, 2]."""
    starts, stops = problem.layout.document_spans.T
    counts = -(-(stops - starts) // block)
    if int((counts * counts).sum()) > MAX_CELLS:
        raise Refused(
            f"planner dcp: block={block} cuts documents of up to {int((stops - starts).max())} tokens into more than "
            f"{MAX_CELLS} pairs of blocks; choose a larger block"
        )
    document, index = ranges(np.zeros_like(counts), counts)
    begin = starts[document] + index * block
    return np.stack([begin, np.minimum(begin + block, stops[document])], axis=1)


def _check_sums(problem: Problem, cells: tuple[Blocks, ...], sizes: np.ndarray) -> None:
    """Refuse a batch whose weights, which count all layers, would leave int64."""
    layers = [count for _, count in problem.masks]
    pairs = sum(int(blocks.area.sum()) * count for blocks, count in zip(cells, layers, strict=True))
    num_bytes = problem.layout.num_tokens * int(sizes.sum()) * sum(layers)
    if max(pairs * problem.heads.num_q_heads, num_bytes) >> 62:
        raise Refused(
            f"planner dcp: {pairs} pairs of {problem.heads.num_q_heads} heads, or {num_bytes} bytes, are beyond 2^62 "
            f"over {sum(layers)} layers; plan for fewer layers, masks in proportion, or choose another planner"
        )


def _group_sizes(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Query heads of each head group, and the bytes of a token's (q, o, kv) in it, over all intra columns."""
    shares = problem.heads.shares(problem.topology.intra_sp)
    num_groups = min(share.kv_count for share in shares)
    heads = np.array([problem.heads.groups(share, num_groups) for share in shares], dtype=np.int64)
    sizes = [wire_bytes(problem, role, heads).sum(axis=0) for role in (Role.Q, Role.O, Role.KV)]
    return heads[:, :, 1].sum(axis=0), np.stack(sizes, axis=1)


def _place(problem: Problem, graph: Hypergraph, family: np.ndarray, settings: _Settings) -> np.ndarray:
    """Partition over nodes, then over the ranks of each node: int64 [num_vertices], the rank of each vertex."""
    intra, num_ranks = problem.topology.intra_sp, problem.topology.inter_sp
    node_of = np.unique(problem.node_of[::intra], return_inverse=True)[1]
    ranks_of = np.bincount(node_of)
    slack = np.array([settings.token_slack] + [settings.area_slack] * len(problem.masks))
    room = np.array([TOKEN_ROOM] + [AREA_ROOM] * len(problem.masks))
    mean = graph.weight.sum(axis=0) / num_ranks
    limit = np.full(len(mean), np.inf)
    limit[0] = (problem.max_tokens_per_rank or np.inf) * intra
    node_caps = np.outer(ranks_of, np.minimum(mean * (1 + slack * room), limit))
    rank_caps = np.tile(np.minimum(mean * (1 + slack * RANK_ROOM), limit), (num_ranks, 1))

    node = partition(graph, ranks_of, settings.eps_inter)
    node = refine(graph, node, Parts.alike(node_caps), (family,))
    rank = np.zeros(len(graph), np.int64)
    for index, size in enumerate(ranks_of):
        mine = np.flatnonzero(node == index)
        inside = graph.within(mine)
        part = partition(inside, np.ones(size), settings.eps_intra)
        part = refine(inside, part, Parts.alike(rank_caps[:size]), (family[mine],))
        rank[mine] = np.searchsorted(node_of, index) + part
    far = max(problem.cluster.intra_bytes_per_s / problem.cluster.inter_bytes_per_s - 1.0, 0.0)
    return refine(graph, rank, Parts(rank_caps, node_of, far), ())
