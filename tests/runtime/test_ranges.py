"""NVTX's ranges bear the instructions' names, nested as they run, and only where they are asked for."""

import torch
import torch.distributed as dist

import hsap
from hsap.ir.program import Op
from hsap.runtime.executor import Session
from hsap.runtime.record import Recorder


class Told:
    """A recorder of ranges in NVTX's place."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.depth = 0

    def push(self, name: str) -> None:
        self.names.append("  " * self.depth + name)
        self.depth += 1

    def pop(self) -> None:
        self.depth -= 1


def test_instructions_are_named() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        heads = hsap.HeadShape(4, 2, 8, "fp32")
        problem = hsap.Problem(hsap.Layout.from_lengths([41, 1, 23]), heads, hsap.Topology(1, 1))
        plan = hsap.compile(problem, "ring")
        session = Session()
        executor = session.load(plan)
        q, k, v = torch.randn(65, 4, 8), torch.randn(65, 2, 8), torch.randn(65, 2, 8)
        plain = executor.forward(q, k, v, layer=3)
        told = session.ranges = Told()
        session.recorder = Recorder()
        kept = executor.forward(q, k, v, layer=3)
        grads = executor.backward(q, kept, layer=3)
        session.ranges = None
        executor.forward(q, k, v)
        assert torch.equal(kept.o, plain.o) and len(grads) == 3
        assert len(session.recorder.take()) == 3
    finally:
        dist.destroy_process_group()
    assert told.depth == 0
    outer = [name for name in told.names if not name.startswith(" ")]
    assert outer == ["hsap forward, layer 3, mask 0", "hsap backward, layer 3, mask 0"]
    inner = [name.split()[1] for name in told.names if name.startswith("  #")]
    ops = [Op(op).name.lower() for direction in (0, 1) for op in plan.programs[0][direction].op]
    assert inner == ops and "attend_grad" in inner
