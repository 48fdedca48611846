"""Trays: blocks that read the same two places are one kernel, and what lies there is what they need."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from hsap import planners
from hsap.compiler.lay import lay
from hsap.compiler.lower import CODE, HELD, lower
from hsap.compiler.order import order
from hsap.compiler.relay import relay
from hsap.compiler.trays import HOMES, NEVER, SpanTable, lay_out
from hsap.compiler.widen import Moves, Runs, Wide, widen
from hsap.ir.block import Shards, cut_blocks
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.program import NONE, PARTIAL_ROLES, Op, Role
from hsap.ir.schedule import DIRECTIONS, INPUTS, OUTPUTS, Schedule, Transfers
from hsap.ir.span import positions
from tests.strategies import scattered

HEADS = HeadShape(4, 2, 8, "bf16")
QUERY_SIDE = (Role.Q, Role.O, Role.DO, Role.DQ)
ALL_ALIKE = Runs(1, ((0, 1),))


def moves(*tables: Transfers) -> Moves:
    """Transfers of the only run."""
    table = Transfers.join(*tables)
    return Moves.of(table, table.group)


def case(planner: str, direction: str):
    """A strategy's schedule and transfers on five ranks of two nodes."""
    problem = Problem(Layout.from_lengths((40, 3, 70, 1, 90)), HEADS, Topology(5, 1), cluster=Cluster(ranks_per_node=3))
    strategy = (
        scattered(problem, 2, seed=1, relay=True) if planner == "scattered" else planners.run(planner, problem, {})
    )
    schedule = getattr(strategy, direction)[0]
    transfers = order(strategy.shards, schedule, direction)
    if strategy.relay:
        transfers = relay(strategy.shards, schedule, transfers, HEADS, problem.node_of)
    return strategy, widen(strategy.shards, schedule, transfers, 5, strategy.num_groups)


def lowered(strategy, wide: Wide, direction: str):
    draft = lower(lay(SpanTable.of(strategy.shards, strategy.shards.spans), wide, direction, 5), False)
    code = dict(zip(CODE, draft.code)) | {"buf": draft.code[len(CODE) :].T}
    return draft, code, dict(zip(HELD, draft.buffers))


def histories(strategy, wide: Wide, of_queries: bool) -> list:
    """For each entry in which run its shard came to its rank and leaves it, and when; None at home."""
    when, runs = defaultdict(dict), wide.runs.runs
    table, entries = wide.moves, wide.entries
    for i in range(len(table)):
        first, count = runs[table.run[i]]
        away = table.src if table.role[i] in PARTIAL_ROLES else table.dst
        for group in range(first, first + count):
            if (int(table.role[i]) in QUERY_SIDE) == of_queries:
                when[int(away[i]), int(table.shard[i]), group][int(table.role[i])] = int(table.stage[i]), (first, count)
    shard = entries.shard_of(Role.Q if of_queries else Role.KV)
    out = []
    for rank, s, run in zip(entries.rank.tolist(), shard.tolist(), entries.run.tolist()):
        at_home = strategy.shards.home[s] == rank
        out.append(None if at_home else tuple(sorted(when[rank, s, runs[run][0]].items())))
    return out


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("planner", ["sap", "nested", "magi", "dcp", "allgather", "scattered", "ring"])
def test_one_kernel_for_all_blocks_between_two_places(planner, direction):
    strategy, wide = case(planner, direction)
    entries = wide.entries
    draft, code, _ = lowered(strategy, wide, direction)
    kernels = np.flatnonzero((code["op"] == Op.ATTEND) | (code["op"] == Op.ATTEND_GRAD))
    sides = [histories(strategy, wide, q) for q in (True, False)]
    keys = list(zip(entries.rank.tolist(), entries.stage.tolist(), entries.run.tolist(), *sides))
    found = Counter(zip(code["rank"][kernels].tolist(), code["stage"][kernels].tolist()))
    wanted = Counter((rank, stage) for rank, stage, *_ in set(keys))
    # Larger trays than some homes' worth are split, of the side that has results in this direction.
    limit = HOMES * -(-int(strategy.shards.tokens.sum()) // 5)
    load = defaultdict(set)
    for key, q, kv in zip(keys, entries.shard_of(Role.Q).tolist(), entries.shard_of(Role.KV).tolist()):
        load[key[0], key[2], "q", key[3]].add(q)
        load[key[0], key[2], "kv", key[4]].add(kv)
    split = {
        key[0]
        for key, shards in load.items()
        if key[3]
        and sum(strategy.shards.tokens[s] for s in shards) > limit
        and (direction, key[2]) != ("forward", "kv")
    }
    for rank, stage in wanted:
        if rank in split:
            assert found[rank, stage] >= wanted[rank, stage]
        else:
            assert found[rank, stage] == wanted[rank, stage]
    assert set(found) == set(wanted)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("planner", ["sap", "nested", "magi", "dcp", "scattered"])
def test_kernels_attend_their_blocks_once_in_rows_that_they_have(planner, direction):
    strategy, wide = case(planner, direction)
    entries = wide.entries
    draft, code, held = lowered(strategy, wide, direction)
    blocks, shards, spans = entries.blocks, strategy.shards, draft.table.spans
    wanted = Counter()
    for block, run, rank, stage in zip(*(getattr(entries, n).tolist() for n in ("block", "run", "rank", "stage"))):
        for i in range(blocks.offsets[block], blocks.offsets[block + 1]):
            wanted[rank, stage, run, i] += 1
    found, operands = Counter(), INPUTS[direction] + OUTPUTS[direction]
    for k in np.flatnonzero((code["op"] == Op.ATTEND) | (code["op"] == Op.ATTEND_GRAD)).tolist():
        attended = draft.index[code["slice"][k] : code["last"][k]].tolist()
        found.update((code["rank"][k], code["stage"][k], code["run"][k], i) for i in attended)
        for role, buffer in zip(operands, code["buf"][k].tolist()):
            first, stop = held["first"][buffer], held["stop"][buffer]
            if first == NONE:
                first, stop = shards.offsets[np.searchsorted(shards.home, int(code["rank"][k]) + np.arange(2))]
            rows = positions(spans[first:stop])
            assert held["role"][buffer] == role and len(set(rows)) == len(rows)
            column = 0 if role in QUERY_SIDE else 2
            for a, b in blocks.slices[attended][:, [column, column + 1]]:
                assert set(range(a, b)) <= set(rows)
    assert found == wanted


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("planner", ["sap", "nested", "dcp", "scattered", "ring"])
def test_messages_carry_the_transfers_rows(planner, direction):
    """Joined or not: between two ranks, in one stage, just these positions of a role and run travel, as sent."""
    strategy, wide = case(planner, direction)
    draft, code, _ = lowered(strategy, wide, direction)
    wanted, found = defaultdict(list), {Op.SEND: defaultdict(list), Op.RECV: defaultdict(list)}
    for role, shard, run, src, dst, stage, _ in zip(*(getattr(wide.moves, n).tolist() for n in wide.moves.__slots__)):
        rows = positions(strategy.shards.spans[slice(*strategy.shards.offsets[shard : shard + 2])])
        wanted[role, run, src, dst, stage] += rows.tolist()
    for i in range(len(code["op"])):
        if code["op"][i] in found:
            ends = [int(code["rank"][i]), int(code["peer"][i])][:: 1 if code["op"][i] == Op.SEND else -1]
            key = (code["role"][i], code["run"][i], *ends, code["stage"][i])
            found[code["op"][i]][key] += positions(draft.table.spans[code["first"][i] : code["stop"][i]]).tolist()
    assert found[Op.SEND] == found[Op.RECV]
    assert {key: sorted(rows) for key, rows in found[Op.SEND].items()} == {k: sorted(v) for k, v in wanted.items()}


def test_rows_lie_in_order_of_position_and_lists_are_there_once():
    """Five shards on rank 1 come to ranks 0 and 2 in another order than they lie in at home."""
    spans = np.array([[0, 4], [20, 30], [4, 9], [40, 41], [9, 20], [30, 40]])
    shards = Shards.of([(0, spans[:1]), *((1, span[None]) for span in spans[1:])])
    come = Transfers.of(Role.KV, [1, 2, 4, 5, 2, 4, 5, 1], 1, [0, 0, 0, 0, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 3, 3])
    trays, table = lay_out(SpanTable.of(shards, shards.spans), 3, ALL_ALIKE, "forward", moves(come))
    assert trays.rank.tolist() == [0, 2] and trays.stage[Role.KV].tolist() == [3, 3]
    assert trays.rows.tolist() == [[6, 10], [6, 10]]
    assert table.spans[6:].tolist() == [[4, 9], [9, 20], [20, 30], [30, 40]]
    role = np.array([Role.KV, Role.KV])
    place, first, stop = trays.find(shards, role, np.array([2, 1]), np.array([5, 5]), np.array([0, 0]))
    assert (place.tolist(), first.tolist(), stop.tolist()) == ([3 + 1, 1], [9, 5], [10, 6])
    again, same = lay_out(table, 3, ALL_ALIKE, "forward", moves(come))
    assert same.spans is table.spans and again.rows.tolist() == trays.rows.tolist()


def test_a_run_of_shards_needs_no_rows_of_its_own():
    shards = Shards.of([(0, np.array([[10 * i, 10 * i + 10]])) for i in range(4)])
    come = Transfers.of(Role.KV, [1, 2, 3], 0, 1, 0)
    trays, table = lay_out(SpanTable.of(shards, shards.spans), 2, ALL_ALIKE, "forward", moves(come))
    assert trays.rows.tolist() == [[1, 4]] and table.spans is shards.spans


def test_trays_are_told_apart_by_stage_and_split_by_tokens():
    shards = Shards.of([(0, np.array([[10 * i, 10 * i + 10]])) for i in range(8)])
    come = Transfers.of(Role.Q, np.arange(8), 0, 1, [0, 0, 0, 0, 0, 0, 0, 1])
    leave = Transfers.of(Role.O, np.arange(8), 1, 0, [4, 4, 4, 4, 4, 4, 5, 5])
    trays, _ = lay_out(SpanTable.of(shards, shards.spans), 5, ALL_ALIKE, "forward", moves(come, leave))
    # Two homes are 32 tokens: the six shards alike are two trays.
    assert trays.rows.tolist() == [[0, 3], [3, 6], [6, 7], [7, 8]]
    assert trays.stage[Role.Q].tolist() == [0, 0, 0, 1] and trays.stage[Role.O].tolist() == [4, 4, 5, 5]


def test_a_shard_on_its_way_has_no_result():
    shards = Shards.of([(i, np.array([[10 * i, 10 * i + 10]])) for i in range(3)])
    leave = Transfers.of(Role.O, 0, [1, 2], [2, 0], [1, 2])
    come = Transfers.of(Role.Q, 0, 0, [1], [0])
    trays, _ = lay_out(SpanTable.of(shards, shards.spans), 3, ALL_ALIKE, "forward", moves(come, leave))
    assert trays.rank.tolist() == [1, 2] and trays.stage[Role.Q].tolist() == [0, NEVER]


def test_a_shard_that_nobody_sends_is_noticed():
    shards = Shards.of([(i, np.array([[10 * i, 10 * i + 10]])) for i in range(2)])
    blocks = cut_blocks(shards, np.array([[10, 20, 0, 10, -19, -1]]))
    schedule = Schedule.of(blocks, np.array([1]), np.array([0]))
    arriving, leaving = order(shards, schedule, "forward")
    nothing = arriving.take(np.zeros(0, np.int64))
    with pytest.raises(AssertionError, match="nobody sends"):
        lay(SpanTable.of(shards, shards.spans), widen(shards, schedule, (nothing, leaving), 2, 1), "forward", 2)
