"""Stages: how long a strategy takes, from its schedule alone: no instruction is made and no buffer placed.

A rank goes through the stages as `hsap.compiler.lower` lays them out: it packs what it sends, starts the stage's
rounds, computes while they run, waits for them and folds in what arrived. So a stage takes it the longer of its blocks
and its rounds, and a round begins when both ends are there. The passes that decide *what* is done are the compiler's
own (`order`, `relay`, `trays`, `rounds`); streams, buffers and copies for every intra rank are what is left out, so
that 1,024 ranks are priced in the time of one column. Prices are the event clock's (`hsap.sim.cost`), a round at a
time.

What the event clock knows better: which message of a round has a port first, and all-to-alls whose ranks are not there
at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hsap.compiler.messages import messages
from hsap.compiler.order import is_of_queries, order, shard_of
from hsap.compiler.prefetch import prefetch
from hsap.compiler.relay import relay
from hsap.compiler.rounds import assign_rounds
from hsap.compiler.trays import NEVER, SpanTable, Trays, lay_out
from hsap.ir.block import Shards
from hsap.ir.effects import FLOPS_PER_PAIR
from hsap.ir.heads import HeadRun
from hsap.ir.precision import Precision, row_bytes
from hsap.ir.problem import Cluster, Problem
from hsap.ir.program import NONE, Op, Role, Space
from hsap.ir.schedule import DIRECTIONS, INPUTS, OUTPUTS, Schedule, Strategy, Transfers
from hsap.ir.slice import K0, K1, Q0, Q1, joined
from hsap.ir.sort import distinct, order_of
from hsap.ir.span import ranges
from hsap.sim.cost import ADDED, tiled_pairs
from hsap.tune.ends import Ends, moved_s, rank_tokens
from hsap.tune.live import arena_bytes


@dataclass(frozen=True, slots=True)
class Priced:
    """A strategy's price. seconds[mask][direction] of one layer; arena_bytes, tokens: of the rank with the most."""

    seconds: tuple[tuple[float, float], ...]
    arena_bytes: int
    tokens: int

    def layer_s(self, problem: Problem, direction: int) -> float:
        """Seconds of one layer and direction, the mean over the model's layers."""
        layers = [count for _, count in problem.masks]
        return float(np.average([pair[direction] for pair in self.seconds], weights=layers))


def price(problem: Problem, strategy: Strategy, cluster: Cluster | None = None) -> Priced:
    """Price every mask and direction of a strategy on a cluster (None: the problem's).

    strategy: what `hsap.planners.run` gave for this problem. Deterministic; takes time in proportion to the strategy's
    blocks and transfers, and to the rounds of one column.
    """
    cluster = cluster or problem.cluster
    problem = replace(problem, topology=strategy.topology or problem.topology, cluster=cluster)
    table = SpanTable.of(strategy.shards, strategy.shards.spans)
    columns = _columns(problem)
    ends = Ends.of(problem, strategy.shards)
    seconds, arena = [], 0
    for pair in zip(strategy.forward, strategy.backward):
        both = []
        for schedule, direction in zip(pair, DIRECTIONS):
            laid = _lay(problem, strategy, schedule, direction, table)
            at_end, first = np.zeros(problem.topology.inter_sp), ends.enter_s(direction)
            for share, node_of in columns:
                at_end = np.maximum(at_end, _column(problem, laid, share, node_of))
            both.append(float((first + at_end + ends.leave_s(direction)).max()))
            arena = max(arena, arena_bytes(problem, laid, columns[0][0]))
        seconds.append(tuple(both))
    return Priced(tuple(seconds), arena, int(rank_tokens(problem, strategy.shards).max()))


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """A schedule with what the compiler's passes say of it, in column terms.

    transfers: (arriving, leaving), each with its rounds. trays: by whether they are of queries. on: tray (NONE at home)
    that each entry of the schedule uses, likewise. first_stage: of anything; num_stages from there on. ahead: stages
    that transfers may be early or late.
    """

    shards: Shards
    tokens: np.ndarray
    direction: str
    schedule: Schedule
    num_groups: int
    transfers: tuple[Transfers, Transfers]
    rounds: tuple[np.ndarray, np.ndarray]
    trays: dict[bool, Trays]
    on: dict[bool, np.ndarray]
    first_stage: int
    num_stages: int
    ahead: int

    def tray_tokens(self, of_queries: bool) -> np.ndarray:
        """Tokens on each tray: int64 [num_trays]."""
        trays = self.trays[of_queries]
        shard = trays.keys // self.num_groups % max(len(self.shards), 1)
        return np.bincount(trays.tray, self.tokens[shard], len(trays.rank)).astype(np.int64)


def _lay(problem: Problem, strategy: Strategy, schedule: Schedule, direction: str, table: SpanTable) -> Laid:
    shards, inter = strategy.shards, problem.topology.inter_sp
    arriving, leaving = order(shards, schedule, direction)
    if strategy.relay:
        nodes = problem.node_of[:: problem.topology.intra_sp]
        arriving, leaving = relay(shards, schedule, (arriving, leaving), problem.heads, nodes)
    if strategy.ahead:
        arriving, leaving = prefetch((arriving, leaving), strategy.ahead)
    moved = Transfers.join(arriving, leaving)
    first = min(int(moved.stage.min(initial=0)), 0)
    last = int(np.maximum(schedule.stage.max(initial=0), moved.until.max(initial=0)))
    _, when = distinct((moved.stage - first) * (last - first + 1) + moved.until - first)
    rounds = assign_rounds(when, moved.src, moved.dst, inter, 0)
    trays, on = {}, {}
    for of_queries in (True, False):
        ins, outs = (
            {role: part.take(part.role == role) for role in roles[direction] if is_of_queries(role) == of_queries}
            for part, roles in ((arriving, INPUTS), (leaving, OUTPUTS))
        )
        trays[of_queries], _ = lay_out(table, inter, strategy.num_groups, ins, outs)
        shard = shard_of(schedule, Role.Q if of_queries else Role.KV)
        on[of_queries] = trays[of_queries].find(shards, schedule.rank, shard, schedule.group)[0]
    split = rounds[: len(arriving)], rounds[len(arriving) :]
    return Laid(shards, shards.tokens, direction, schedule, strategy.num_groups, (arriving, leaving), split, trays, on,
                first, last - first + 1, strategy.ahead)  # fmt: skip


def _columns(problem: Problem) -> list[tuple[HeadRun, np.ndarray]]:
    """The columns that differ, as (share of heads, node of each InterSP rank); others take as long as one of them."""
    intra = problem.topology.intra_sp
    nodes = problem.node_of.reshape(-1, intra)
    found = {}
    for j, share in enumerate(problem.heads.shares(intra)):
        found.setdefault((share.q_count, share.kv_count, nodes[:, j].tobytes()), (share, nodes[:, j]))
    return list(found.values())


def _column(problem: Problem, laid: Laid, share: HeadRun, node_of: np.ndarray) -> np.ndarray:
    """When each InterSP rank is done, counted from when its inputs are there: float64 [inter_sp] seconds."""
    cost = _Cost(problem, laid, share)
    shape = (laid.num_stages, problem.topology.inter_sp)
    pack, work, fold = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    cost.add_kernels(work)
    cost.add_packing(pack)
    links = [cost.links(*part, fold) for part in zip(laid.transfers, laid.rounds)]
    round_, src, dst, num_bytes = (np.concatenate(column) for column in zip(*links))
    stage_of, until = (
        np.concatenate([getattr(part, name) for part in laid.transfers]) - laid.first_stage
        for name in ("stage", "until")
    )
    in_order = order_of(round_ * shape[1] + src)
    edges, which = distinct(round_[in_order] * shape[1] + src[in_order])
    lead = in_order[np.searchsorted(which, np.arange(len(edges)))]
    total = np.bincount(which, num_bytes[in_order], len(edges))
    src, dst = src[lead], dst[lead]
    crosses, cluster = node_of[src] != node_of[dst], problem.cluster
    seconds = total / np.where(crosses, cluster.inter_bytes_per_s, cluster.intra_bytes_per_s)
    seconds += np.where(crosses, cluster.inter_latency_s, cluster.intra_latency_s)
    borders = np.searchsorted(edges // shape[1], np.arange(int(round_.max(initial=-1)) + 2))
    return _run(pack, work, fold, (src, dst, seconds, stage_of[lead], until[lead]), borders)


def _run(pack, work, fold, edges, borders) -> np.ndarray:
    """Go through the stages: when each rank is done, float64 [num_ranks].

    pack, work, fold: float64 [num_stages, num_ranks]. edges: source, destination and seconds of what a round carries
    between two ranks, and the stages in which it leaves and is waited for; round by round at `borders`.
    """
    src, dst, seconds, stage_of, until = edges
    now, free, over_by = np.zeros(pack.shape[1]), np.zeros(pack.shape[1]), np.zeros(pack.shape)
    g, num_rounds = 0, len(borders) - 1
    for stage in range(len(pack)):
        now = now + pack[stage]
        while g < num_rounds and stage_of[borders[g]] == stage:
            a, b = src[borders[g] : borders[g + 1]], dst[borders[g] : borders[g + 1]]
            begun = np.maximum(free, now)
            over = np.maximum(begun[a], begun[b]) + seconds[borders[g] : borders[g + 1]]
            # A round has a rank send once and receive once at most.
            free = free.copy()
            free[a] = over
            free[b] = np.maximum(free[b], over)
            awaited = over_by[until[borders[g]]]
            awaited[a], awaited[b] = free[a], free[b]  # rounds of a rank end in their order
            g += 1
        now = np.maximum(now + work[stage], over_by[stage]) + fold[stage]
    return now


class _Cost:
    """Prices of one column's work, with the heads of its share."""

    def __init__(self, problem: Problem, laid: Laid, share: HeadRun) -> None:
        self.problem, self.laid, self.cluster = problem, laid, problem.cluster
        self.dim = problem.heads.head_dim
        self.precision = Precision.of(problem.heads.dtype, problem.wire_dtype)
        if laid.num_groups > 1:
            self.heads = np.array(problem.heads.groups(share, laid.num_groups), np.int64)
        else:
            self.heads = np.array([(0, share.q_count, 0, share.kv_count)], np.int64)

    def row(self, role: int, space: Space, acc: bool) -> np.ndarray:
        """Bytes of a row with its statistics, for each head group: int64 [num_groups]."""
        return sum(row_bytes(self.precision, role, space, acc, self.heads, self.dim))

    def moved_s(self, num_bytes: np.ndarray) -> np.ndarray:
        """Seconds of kernels that move bytes in the rank's own memory."""
        return moved_s(self.cluster, num_bytes)

    def add_kernels(self, work: np.ndarray) -> None:
        """Add the attention kernels: one for all blocks of a rank, stage and group that read the same two places."""
        laid, schedule, cluster = self.laid, self.laid.schedule, self.cluster
        if not len(schedule.block):
            return
        width = int(laid.on[False].max()) + 2
        place = distinct((laid.on[True] + 1) * width + laid.on[False] + 1)[1]
        key = (schedule.rank * laid.num_stages + schedule.stage) * laid.num_groups + schedule.group
        kernels, kernel = distinct(key * (int(place.max()) + 1) + place)
        lead = np.empty(len(kernels), np.int64)
        lead[kernel] = np.arange(len(kernel))
        rank, stage, group = schedule.rank[lead], schedule.stage[lead], schedule.group[lead]
        pieces, owner = joined(*_row_by_row(laid, kernel))
        count, pairs, q_rows, k_rows = (
            np.bincount(owner, column, len(kernels))
            for column in (
                None,
                tiled_pairs(pieces, cluster.tile_tokens),
                pieces[:, Q1] - pieces[:, Q0],
                pieces[:, K1] - pieces[:, K0],
            )
        )
        op, reached = (
            (Op.ATTEND, cluster.attend_efficiency)
            if laid.direction == "forward"
            else (Op.ATTEND_GRAD, cluster.attend_grad_efficiency)
        )
        flops = FLOPS_PER_PAIR[op] * self.dim * self.heads[group, 1] * pairs
        seconds = cluster.kernel_overhead_s + count * cluster.slice_overhead_s + flops / (cluster.flops_per_s * reached)
        for role in ADDED[op]:
            row = self.row(role, Space.OUTPUT, False) + self.row(role, Space.OUTPUT, True)
            rows = q_rows if is_of_queries(role) else k_rows
            seconds += 2 * rows * row[group] / cluster.memory_bytes_per_s
        np.add.at(work, (stage - laid.first_stage, rank), seconds)

    def add_packing(self, pack: np.ndarray) -> None:
        """Add what is copied before it is sent: partial results, and inputs that leave home in one head group."""
        laid = self.laid
        for of_queries, trays in laid.trays.items():
            tokens = laid.tray_tokens(of_queries)
            for role in OUTPUTS[laid.direction]:
                if is_of_queries(role) == of_queries:
                    full = np.flatnonzero(trays.stage[role] != NEVER)
                    row = self.row(role, Space.ARENA, True) + self.row(role, Space.ARENA, False)
                    seconds = self.moved_s(tokens[full] * row[trays.group[full]])
                    np.add.at(pack, (trays.stage[role][full] - laid.first_stage, trays.rank[full]), seconds)
        arriving = laid.transfers[0]
        if laid.num_groups > 1 and len(arriving):
            home = np.flatnonzero(laid.shards.home[arriving.shard] == arriving.src)
            self._add_copies(pack, arriving.take(home))

    def _add_copies(self, pack: np.ndarray, table: Transfers) -> None:
        """Add copies of rows that leave home in one head group: one for shards that lie side by side there."""
        laid, width = self.laid, len(self.laid.shards) + 1
        key = (table.role * laid.num_stages + table.stage - laid.first_stage) * pack.shape[1] + table.src
        keys = distinct((key * laid.num_groups + table.group) * width + table.shard)[0]
        begins = np.append(True, keys[1:] != keys[:-1] + 1)
        rest, shard = keys // width, keys % width
        role, group = rest // laid.num_groups // pack.shape[1] // laid.num_stages, rest % laid.num_groups
        row = np.array([2 * self.row(r, Space.ARENA, False) for r in range(len(Role) - 1)])[role, group]
        seconds = begins * self.cluster.kernel_overhead_s
        seconds += laid.tokens[shard] * row / self.cluster.memory_bytes_per_s
        stage, src = np.divmod(rest // laid.num_groups % (laid.num_stages * pack.shape[1]), pack.shape[1])
        np.add.at(pack, (stage, src), seconds)

    def links(self, table: Transfers, rounds: np.ndarray, fold: np.ndarray):
        """List what travels: round, source, destination and bytes of each transfer; adds folding of partial results."""
        laid = self.laid
        num_bytes = np.zeros(len(table))
        for role in Role:
            mine = np.flatnonzero(table.role == role)
            if role == Role.NONE or not len(mine):
                continue
            group, rows = table.group[mine], laid.tokens[table.shard[mine]]
            num_bytes[mine] = rows * self.row(role, Space.ARENA, False)[group]
            if role in OUTPUTS[laid.direction]:
                self._add_folding(role, table.take(mine), rounds[mine], fold)
        return rounds, table.src, table.dst, num_bytes

    def _add_folding(self, role: Role, table: Transfers, rounds: np.ndarray, fold: np.ndarray) -> None:
        laid, trays = self.laid, self.laid.trays[is_of_queries(role)]
        source, *rows = trays.find(laid.shards, table.src, table.shard, table.group)
        target, *to_rows = trays.find(laid.shards, table.dst, table.shard, table.group)
        m = messages(table, table.group, rounds, source, target, rows, to_rows)
        row = self.row(role, Space.ARENA, False) + 2 * self.row(role, Space.ARENA, True)
        np.add.at(fold, (m["until"] - laid.first_stage, m["dst"]), self.cluster.kernel_overhead_s)
        seconds = laid.tokens[table.shard] * row[table.group] / self.cluster.memory_bytes_per_s
        np.add.at(fold, (table.until - laid.first_stage, table.dst), seconds)


def _row_by_row(laid: Laid, kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slices of all kernels, ordered by kernel, the span of their queries, and keys: (int64 [n, 6], kernel [n])."""
    blocks, block = laid.schedule.blocks, laid.schedule.block
    entry, index = ranges(blocks.offsets[block], blocks.offsets[block + 1])
    owner = kernel[entry]
    starts = np.sort(laid.shards.spans[:, 0])
    strip = np.searchsorted(starts, blocks.slices[index, Q0], side="right")
    in_order = np.lexsort((blocks.slices[index, K0], strip, owner))
    return blocks.slices[index[in_order]], owner[in_order]


assert NONE == -1, "places are numbered from it"
