"""Lower: a column's draft, in the order of its phases and free of races."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from hsap.compiler.lay import lay
from hsap.compiler.lower import ALL, CODE, HELD, lower
from hsap.compiler.order import order
from hsap.compiler.trays import SpanTable
from hsap.compiler.widen import Wide, widen
from hsap.ir.block import cut_blocks
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.ir.program import NONE, OPERANDS, Access, Op, Role, Space
from hsap.ir.schedule import DIRECTIONS, Schedule, Transfers
from hsap.ir.slice import UNBOUNDED
from hsap.planners import PLANNERS, run
from hsap.planners.parts import equal_shards

PHASES = {
    Op.SEND: 1,
    Op.RECV: 1,
    Op.LAUNCH: 1,
    Op.ATTEND: 2,
    Op.ATTEND_GRAD: 2,
    Op.WAIT: 3,
    Op.MERGE: 4,
    Op.SUM: 4,
}
"""Order of what a stage holds, ends aside; COPY packs before all of it, or brings the result home at the end."""
NUM_RANKS = 4


def draft(planner: str, direction: str, resharded: bool = False, lengths=(40, 3, 70, 1)):
    problem = Problem(Layout.from_lengths(lengths), HeadShape(4, 2, 8), Topology(NUM_RANKS, 1))
    strategy = run(planner, problem, {})
    schedule = getattr(strategy, direction)[0]
    transfers = order(strategy.shards, schedule, direction)
    num_ranks = (strategy.topology or problem.topology).inter_sp
    wide = widen(strategy.shards, schedule, transfers, num_ranks, strategy.num_groups)
    return lowered(strategy.shards, wide, direction, num_ranks, resharded)


def lowered(shards, wide: Wide, direction: str, num_ranks: int, resharded: bool) -> SimpleNamespace:
    """The tables of a draft as columns with names."""
    made = lower(lay(SpanTable.of(shards, shards.spans), wide, direction, num_ranks), resharded)
    code = dict(zip(CODE, made.code)) | {"buf": made.code[len(CODE) :].T}
    return SimpleNamespace(code=code, buffers=dict(zip(HELD, made.buffers)), index=made.index, spans=made.table.spans)


def streams(code: dict) -> list[list[dict]]:
    """Instructions of each rank as dicts."""
    rows = [dict(zip(code, values)) for values in zip(*(column.tolist() for column in code.values()))]
    return [[row for row in rows if row["rank"] == rank] for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_phases_of_a_stage_follow_one_another(planner, direction):
    made = draft(planner, direction)
    assert (np.diff(made.code["rank"]) >= 0).all()
    for stream in streams(made.code):
        assert [row["stage"] for row in stream] == sorted(row["stage"] for row in stream)
        for _, stage in itertools.groupby(stream, key=lambda row: row["stage"]):
            ops = [row["op"] for row in stage]
            phases = [PHASES.get(op, 0 if i < len(ops) - 1 else 4) for i, op in enumerate(ops)]
            if set(ops) != {Op.COPY}:  # the last stage just hands results over
                assert phases == sorted(phases), [Op(op).name for op in ops]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_transfers_are_joined_then_launched_then_waited_for(planner, direction):
    for stream in streams(draft(planner, direction).code):
        begun, over, pending = set(), set(), {}
        for row in stream:
            op, round = row["op"], row["round"]
            if op in (Op.SEND, Op.RECV):
                assert round not in begun and row["peer"] != row["rank"]
                pending.setdefault(round, []).append(op)
            elif op == Op.LAUNCH:
                assert pending[round] and round > max(begun, default=-1)
                begun.add(round)
            elif op == Op.WAIT:
                assert round in begun and round not in over
                over.add(round)
        assert set(pending) == begun == over


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_everything_read_was_written_and_operands_are_the_ranks_own(planner, direction):
    made = draft(planner, direction)
    space, owner = made.buffers["space"], made.buffers["rank"]
    for stream in streams(made.code):
        written: set[int] = set()
        for row in stream:
            operands = OPERANDS[Op(row["op"])]
            assert row["buf"][len(operands) :] == [NONE] * (5 - len(operands))
            for buffer, access in zip(row["buf"], operands):
                assert owner[buffer] == row["rank"]
                if access == Access.READ:
                    # A rank without rows adds nothing to its result, which is empty then.
                    empty = made.buffers["acc"][buffer] and made.buffers["first"][buffer] == NONE
                    assert buffer in written or space[buffer] == Space.INPUT or empty
                else:
                    written.add(buffer)


def test_home_blocks_use_home_buffers_and_no_transfer():
    made = draft("ring", "forward", lengths=(10, 10, 10, 10))
    attends = made.code["op"] == Op.ATTEND
    assert attends.sum() == NUM_RANKS
    q, kv, o = made.code["buf"][attends, :3].T
    assert (made.buffers["space"][q] == Space.INPUT).all() and (made.buffers["space"][kv] == Space.INPUT).all()
    assert made.buffers["acc"][o].all() and (made.buffers["first"][o] == NONE).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_resharded_streams_begin_and_end_with_all_to_all(direction):
    made = draft("sap", direction, resharded=True)
    roles = {"forward": ([Role.Q, Role.KV], [Role.O]), "backward": ([Role.DO], [Role.DQ, Role.DKV])}[direction]
    for stream in streams(made.code):
        there = [row for row in stream if row["op"] == Op.ALL_TO_ALL]
        assert [row["role"] for row in there] == roles[0] + roles[1]
        assert stream[: len(roles[0])] == there[: len(roles[0])]
        assert stream[-len(roles[1]) :] == there[len(roles[0]) :]
        rounds = [row["round"] for row in stream if row["op"] in (Op.LAUNCH, Op.ALL_TO_ALL)]
        assert rounds == sorted(set(rounds))


def test_head_groups_are_packed_before_they_leave_home():
    """With two head groups that go apart a home buffer has both side by side; what is sent is a copy of one."""
    shards = equal_shards(20, 2)
    blocks = cut_blocks(shards, np.array([[0, 20, 0, 20, -19, 0]]))
    block, group = (part.ravel() for part in np.meshgrid(np.arange(len(blocks)), np.arange(2), indexing="ij"))
    rank = shards.home[blocks.q][block]
    stage = np.where(rank != shards.home[blocks.kv][block], 1 + group, group)
    schedule = Schedule(blocks, block, group, rank, stage)
    wide = widen(shards, schedule, order(shards, schedule, "forward"), 2, 2)
    made = lowered(shards, wide, "forward", 2, False)
    code = made.code
    sends = np.flatnonzero(code["op"] == Op.SEND)
    assert code["run"][sends].tolist() == [0, 1] and (code["rank"][sends] == 0).all()
    copies = np.flatnonzero((code["op"] == Op.COPY) & (code["role"] == Role.KV))
    assert code["buf"][copies, 1].tolist() == code["buf"][sends, 0].tolist()
    assert (copies < sends).all()
    assert made.buffers["run"][code["buf"][copies, 0]].tolist() == [ALL, ALL]
    attends = code["op"] == Op.ATTEND
    slices = [made.index[a:b].tolist() for a, b in zip(code["slice"][attends], code["last"][attends])]
    assert sorted(zip(slices, code["run"][attends])) == [([b], g) for b in range(3) for g in (0, 1)]


def test_a_rank_on_the_way_home_folds_a_partial_result_and_sends_it_on():
    """Ranks 0 and 1 compute for shard 3's queries; what they have goes by rank 2, which has nothing of its own."""
    shards = equal_shards(40, NUM_RANKS)
    blocks = cut_blocks(shards, np.array([[30, 40, 0, 20, -UNBOUNDED, UNBOUNDED]]))
    routes = Transfers.of(Role.O, 3, [0, 1, 2], [2, 2, 3], [1, 2, 4])
    schedule = Schedule.of(blocks, np.array([0, 1]), np.array([0, 1]), routes)
    wide = widen(shards, schedule, order(shards, schedule, "forward"), NUM_RANKS, 1)
    made = lowered(shards, wide, "forward", NUM_RANKS, False)
    by_rank = streams(made.code)
    assert [(row["op"], row["stage"]) for row in by_rank[2] if row["role"] == Role.O and row["first"] == 3] == [
        (Op.RECV, 1), (Op.MERGE, 1), (Op.RECV, 2), (Op.MERGE, 2), (Op.COPY, 4), (Op.SEND, 4)
    ]  # fmt: skip
    merges = [row["buf"] for row in by_rank[2] if row["op"] == Op.MERGE]
    packed = [row["buf"] for row in by_rank[2] if row["op"] == Op.COPY and row["first"] == 3]
    assert merges[0][1] == merges[1][1] == packed[0][0]
    assert made.buffers["acc"][packed[0][0]] and not made.buffers["acc"][packed[0][1]]
    assert [row["peer"] for row in by_rank[3] if row["op"] == Op.RECV and row["role"] == Role.O] == [2]
