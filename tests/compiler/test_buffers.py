"""Buffers: whatever is alive together lies apart, by a count of bytes over time that shares nothing with the pass."""

import itertools

import pytest

from hsap.api import compile
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.ir.program import NONE, OPERANDS, Op, Space
from hsap.planners import PLANNERS


def lifetimes(stream, first_index: int) -> dict[int, tuple[int, int]]:
    """First and last step at which each buffer of a rank's stream must exist."""
    waits = {ins.round: step for step, ins in enumerate(stream) if ins.op == Op.WAIT}
    out: dict[int, tuple[int, int]] = {}
    for step, ins in enumerate(stream):
        end = waits[ins.round] if ins.op in (Op.SEND, Op.RECV) else step
        for buffer in ins.buf[: len(OPERANDS[ins.op])]:
            begin, last = out.get(buffer, (step, end))
            out[buffer] = (begin, max(last, end))
    assert all(buffer >= first_index for buffer in out)
    return out


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("topology", ["1x1", "6x1", "3x2", "1x4"])
@pytest.mark.parametrize("lengths", [(301, 1, 44, 100), (1,), ()])
def test_living_buffers_do_not_overlap(planner, topology, lengths):
    problem = Problem(Layout.from_lengths(lengths), HeadShape(4, 4, 8, "bf16"), Topology.parse(topology))
    plan = compile(problem, planner)
    for programs in plan.programs[0]:
        b = programs.buffers
        outside = b.space != Space.ARENA
        assert (b.offset[outside] == NONE).all()
        assert (b.offset[~outside] % 256 == 0).all() and (b.offset[~outside] >= 0).all()
        for rank in range(plan.num_ranks):
            stream = programs[rank]
            alive = lifetimes(stream, int(b.offsets[rank]))
            for step in range(len(stream)):
                spans = sorted(
                    (int(b.offset[i]), int(b.offset[i] + b.num_bytes[i]))
                    for i, (begin, end) in alive.items()
                    if begin <= step <= end and b.space[i] == Space.ARENA and b.num_bytes[i]
                )
                assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans)), (rank, step)


def test_a_ring_reuses_two_places():
    """KV that has moved on leaves its place to the next: the arena doesn't grow with the ring."""
    peaks = []
    for num_ranks in (4, 8, 16):
        problem = Problem(Layout.from_lengths([64 * num_ranks]), HeadShape(4, 4, 16, "bf16"), Topology(num_ranks, 1))
        programs = compile(problem, "ring").programs[0][0]
        peaks.append(int(programs.arena_bytes().max()))
    assert peaks[0] == peaks[1] == peaks[2]
    kv, accumulator = 64 * 2 * 4 * 16 * 2, 64 * 4 * 16 * 4 + 64 * 4 * 8
    assert peaks[0] == 2 * kv + accumulator
