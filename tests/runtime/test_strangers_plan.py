"""A stranger's plan: what was read is run only once it is verified, and never with more memory than there is."""

import numpy as np
import pytest
import torch

import hsap
from hsap.ir.program import Op
from hsap.runtime.machine import Machine
from hsap.runtime.memory import Arena
from tests.mutation.mutants import of, with_buffer, with_column, with_program
from tests.runtime.oracle import tensors


@pytest.fixture(scope="module")
def plan() -> hsap.Plan:
    problem = hsap.Problem(hsap.Layout.from_lengths([7, 5]), hsap.HeadShape(2, 1, 4, "fp64"), hsap.Topology(2, 1))
    return hsap.compile(problem, "ring")


@pytest.mark.parametrize("read", [lambda p: hsap.Plan.from_bytes(p.to_bytes()), lambda p: hsap.parse(p.text())])
def test_a_plan_that_was_read_runs_once_it_is_verified(plan, read):
    q, k, v, grad_o = tensors(plan.problem, torch.float64)
    stranger = read(plan)
    with pytest.raises(ValueError, match=r"reference: the plan was read .* call hsap.verify"):
        hsap.reference(stranger, q, k, v)
    assert stranger == plan and hsap.verify(stranger).ok
    torch.testing.assert_close(hsap.reference(stranger, q, k, v, grad_o), hsap.reference(plan, q, k, v, grad_o))


def test_a_plan_that_fails_is_never_let_through(plan):
    forward = plan.programs[0][0]
    wrong = with_program(plan, 0, 0, with_column(forward, "peer", of(forward, Op.SEND), 0))
    stranger = hsap.Plan.from_bytes(wrong.to_bytes())
    assert not hsap.verify(stranger).ok and stranger.unproven
    with pytest.raises(ValueError, match="nothing has verified it"):
        hsap.reference(stranger, *tensors(plan.problem, torch.float64)[:3])


def test_an_executor_refuses_what_nothing_has_verified(plan):
    class Here:
        num_ranks, dtype = 2, torch.float64

    with pytest.raises(ValueError, match="executor: the plan was read from a file"):
        hsap.Session.load(Here(), hsap.parse(plan.text()))


def test_places_outside_of_the_arena_s_due_are_rejected(plan):
    """Executors make the arena as large as the farthest buffer ends."""
    for direction, p in enumerate(plan.programs[0]):
        for b in np.flatnonzero(p.buffers.offset >= 0).tolist():
            for offset in (1 << 40, 1 << 61, -256, 8, int(p.buffers.offset[b]) + (1 << 20)):
                mutant = with_program(plan, 0, direction, with_buffer(p, "offset", b, offset))
                assert not hsap.verify(mutant).ok


def test_more_memory_than_the_machine_has_is_refused():
    with pytest.raises(
        ValueError, match=r"needs a communication buffer of 1125899906842624 bytes on this rank, and cpu"
    ):
        Arena("cpu").reserve(1 << 50)


def test_a_sound_plan_that_copies_without_end_is_refused_before_memory_is_taken():
    """Any number of copies of an input is sound, so what it takes on a rank isn't bounded by the batch."""
    problem = hsap.Problem(
        hsap.Layout.from_lengths([1 << 24]), hsap.HeadShape(64, 64, 1024, "fp32"), hsap.Topology(2, 1)
    )
    stranger = hsap.Plan.from_bytes(hsap.compile(problem, "ring").to_bytes())
    assert hsap.verify(stranger).ok and stranger.arena_bytes().max() > 1 << 40
    with pytest.raises(ValueError, match="the plan needs a communication buffer of"):
        Machine(stranger, 0, None, None, Arena("cpu"))
