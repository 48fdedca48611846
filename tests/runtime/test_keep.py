"""What forward keeps of its inputs is had again by all-to-alls alone, and attention goes on from o and lse."""

import pytest
import torch

import hsap
from hsap.ir.program import Op
from hsap.ir.span import positions
from hsap.runtime.kernels import select_kernel
from hsap.runtime.machine import Kept, Machine
from hsap.runtime.memory import Arena
from hsap.runtime.reference import _together
from hsap.runtime.transport import Mailbox
from tests.runtime.oracle import attention, tensors

LENGTHS = [61, 1, 30, 7, 44, 2, 19]


def machines_of(plan):
    box, kernel = Mailbox(), select_kernel("auto", "cpu", torch.float64, head_dim=4)
    return [
        Machine(plan, rank, box.for_rank(rank), kernel, Arena("cpu"), "cpu", torch.float64)
        for rank in range(plan.num_ranks)
    ]


@pytest.mark.parametrize(
    ("topology", "planner", "heads", "lengths"),
    [
        ("1x1", "sap", (8, 2), LENGTHS),
        ("4x1", "zigzag", (9, 3), LENGTHS),
        ("4x1", "usp", (8, 2), LENGTHS),
        ("1x4", "sap", (9, 3), LENGTHS),
        ("2x2", "nested", (9, 3), LENGTHS),
        ("2x4", "distflash", (8, 2), LENGTHS),
        ("2x4", "sap", (8, 2), [2, 1]),
        ("2x2", "sap", (8, 2), []),
    ],
)
def test_backward_goes_on_from_what_is_made_again(topology, planner, heads, lengths):
    shape = hsap.HeadShape(*heads, 4, "fp64")
    layout = hsap.Layout.from_lengths(lengths)
    problem = hsap.Problem(layout, shape, hsap.Topology.parse(topology), (("causal", 1),))
    plan = hsap.compile(problem, planner)
    *inputs, grad_o = tensors(problem, torch.float64)
    rows = [torch.from_numpy(positions(plan.rank_spans(rank))) for rank in range(plan.num_ranks)]
    first, later = machines_of(plan), machines_of(plan)
    kept = _together([m.forward(*(t[r] for t in inputs)) for m, r in zip(first, rows)], first)

    attended = []
    for machine in later:
        decoded = machine.decode(0, 0)
        programs = plan.programs[0][0]
        ops = programs.op[programs.offsets[machine.rank] + decoded.step_of[list(decoded.keeping)]]
        attended += ops.tolist()
    # One all-to-all of q and one of kv on each rank of a column that has several, and nothing else.
    assert attended == [Op.ALL_TO_ALL] * (2 * plan.num_ranks if plan.topology.intra_sp > 1 else 0)

    again = _together([m.keep(*(t[r] for t in inputs)) for m, r in zip(later, rows)], later)
    for (q, kv), one in zip(again, kept):
        assert torch.equal(q, one.q) and torch.equal(kv, one.kv)
    made = [Kept(q, kv, one.o.clone(), one.lse.clone()) for (q, kv), one in zip(again, kept)]
    grads = _together([m.backward(grad_o[r], one) for m, r, one in zip(later, rows, made)], later)
    for got, want in zip(zip(*grads), attention(problem, *inputs, grad_o)[2:] if lengths else ()):
        for part, r in zip(got, rows):
            torch.testing.assert_close(part, want[r], rtol=0, atol=1e-10)
