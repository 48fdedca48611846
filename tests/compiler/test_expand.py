"""Expand: peers stay within their column, heads and rows are shared out by the rules, scratch is what pieces take."""

import itertools

import numpy as np
import pytest

from hsap.api import compile
from hsap.compiler.expand import place_rows
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.precision import Precision
from hsap.ir.problem import Problem, Topology
from hsap.ir.program import NONE, Op, Role, Space
from hsap.ir.reshard import reshard, scratch_bytes
from hsap.ir.span import positions
from hsap.planners import PLANNERS
from hsap.planners.zigzag import zigzag_shards

LENGTHS = (37, 1, 20, 64, 5)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("topology", ["4x3", "2x8", "5x1", "1x6"])
def test_columns_keep_to_themselves(planner, topology):
    plan = compile(Problem(Layout.from_lengths(LENGTHS), HeadShape(8, 4, 8), Topology.parse(topology)), planner)
    intra = plan.topology.intra_sp
    for programs in plan.programs[0]:
        moved = (programs.op == Op.SEND) | (programs.op == Op.RECV)
        assert (programs.peer[moved] % intra == programs.rank[moved] % intra).all()
        assert (programs.peer[~moved] == NONE).all()
        # Columns are one lowering: equal instructions at equal places.
        for rank in range(plan.num_ranks):
            first = rank - rank % intra
            here, there = (slice(*programs.offsets[r : r + 2]) for r in (rank, first))
            assert np.array_equal(programs.op[here], programs.op[there])
            assert np.array_equal(programs.slices[here], programs.slices[there])
        sends, receives = (np.flatnonzero(programs.op == op) for op in (Op.SEND, Op.RECV))
        rank, peer, round = programs.rank, programs.peer, programs.round
        assert sorted(zip(rank[sends], peer[sends], round[sends])) == sorted(
            zip(peer[receives], rank[receives], round[receives])
        )


@pytest.mark.parametrize(
    ("heads", "intra", "shares"),
    [
        # 28 query heads in groups of 7, two ranks a KV head.
        ((28, 4), 8, [(4, 1), (3, 1)] * 4),
        ((28, 4), 4, [(7, 1)] * 4),
        ((28, 4), 2, [(14, 2)] * 2),
        ((8, 2), 1, [(8, 2)]),
        # Five ranks: 6 6 6 5 5 query heads, and the KV heads that these touch: 0, 0-1, 1-2, 2-3, 3.
        ((28, 4), 5, [(6, 1), (6, 2), (6, 2), (5, 2), (5, 1)]),
    ],
)
def test_heads_of_each_column(heads, intra, shares):
    problem = Problem(Layout.from_lengths(LENGTHS), HeadShape(*heads, 16), Topology(2, intra))
    programs = compile(problem, "ring").programs[0][0]
    attends = np.flatnonzero(programs.op == Op.ATTEND)
    assert set((programs.rank[attends] % intra).tolist()) == set(range(intra))
    for i in attends:
        q_first, q_count, kv_first, kv_count = programs.heads[i].tolist()
        assert (q_first, kv_first) == (0, 0)
        assert (q_count, kv_count) == shares[programs.rank[i] % intra]


@pytest.mark.parametrize("intra", [2, 3, 7])
@pytest.mark.parametrize("lengths", [(53,), (1,), (), (9, 1, 4), (100, 1)])
def test_rows_are_split_evenly_in_order(lengths, intra):
    layout = Layout.from_lengths(lengths)
    problem = Problem(layout, HeadShape(8, 8, 8), Topology(3, intra))
    shards = zigzag_shards(layout.document_spans, 3)
    table, column_rows, rank_rows = place_rows(problem, shards)
    for i in range(3):
        column = positions(table[slice(*column_rows[i])]).tolist()
        parts = [positions(table[slice(*rank_rows[i * intra + j])]).tolist() for j in range(intra)]
        assert list(itertools.chain(*parts)) == column
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(positions(table[: len(shards.spans)]).tolist()) == list(range(layout.num_tokens))


@pytest.mark.parametrize(
    "heads", [HeadShape(28, 4, 64, "bf16"), HeadShape(8, 8, 5, "fp32"), HeadShape(7, 1, 3, "fp64")]
)
@pytest.mark.parametrize("role", [Role.Q, Role.KV, Role.DO, Role.O, Role.DQ, Role.DKV])
def test_scratch_is_what_the_pieces_take(heads, role):
    """Both ways of sizing agree with messages that are padded to 256 bytes, elements and statistics apart."""
    precision = Precision.of(heads.dtype, "fp32")
    tokens = np.array([[3, 3, 2, 2, 2], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [70, 70, 69, 69, 69]])
    to_column = role in (Role.Q, Role.KV, Role.DO)
    sizes = scratch_bytes(role, to_column, heads, precision, tokens)
    width = {"bf16": 2, "fp32": 4, "fp64": 8}[heads.dtype if to_column else "fp32"]
    stats = {Role.O: 1, Role.DO: 2}.get(role, 0) * (8 if heads.dtype == "fp64" else 4)
    shares = heads.shares(5)

    def padded(rows: int, j: int) -> int:
        count = 2 * shares[j].kv_count if role in (Role.KV, Role.DKV) else shares[j].q_count
        parts = (rows * count * heads.head_dim * width, rows * shares[j].q_count * stats)
        return sum(256 * -(-part // 256) for part in parts)

    for g, group in enumerate(tokens.tolist()):
        for i in range(5):
            wanted = sum(padded(group[i], j) + (0 if to_column else padded(group[j], i)) for j in range(5) if j != i)
            assert sizes[g, i] == wanted
            assert reshard(role, to_column, heads, precision, group, i).scratch_bytes == wanted


def test_scratch_of_a_plan_has_no_rows_and_the_right_size():
    problem = Problem(Layout.from_lengths((50, 3)), HeadShape(4, 2, 8, "bf16"), Topology(2, 2))
    forward, backward = compile(problem, "ring").programs[0]
    for programs, roles in ((forward, [Role.Q, Role.KV, Role.O]), (backward, [Role.DO, Role.DQ, Role.DKV])):
        exchanges = programs.op == Op.ALL_TO_ALL
        assert programs.role[exchanges].tolist() == roles * 4
        scratch = programs.buf[exchanges, 2]
        b = programs.buffers
        assert (b.role[scratch] == Role.NONE).all() and (b.space[scratch] == Space.ARENA).all()
        assert (b.rows[scratch] == NONE).all() and (b.heads[scratch] == 0).all()
        # Rank 0 has 13 rows, 2 query and 1 KV head a share, 8 wide: the other's share of its rows is 416 bytes.
        if Role.Q in roles:
            assert b.num_bytes[scratch[:2]].tolist() == [512, 512]
