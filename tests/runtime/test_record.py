"""Recording says when instructions ran, as a clock beside them sees it, and clocks are compared as far as can be."""

import threading
import time
from collections import defaultdict
from queue import SimpleQueue

import numpy as np
import pytest
import torch

import hsap
from hsap.ir.program import Op
from hsap.ir.span import positions
from hsap.runtime.clocks import clock_offset
from hsap.runtime.kernels import select_kernel
from hsap.runtime.machine import Machine
from hsap.runtime.memory import Arena
from hsap.runtime.record import FIRST_CAPACITY, Recorder
from hsap.runtime.reference import _together
from hsap.runtime.transport import Mailbox

SLEEP_S = 0.004


class Slow:
    """A kernel that takes its time."""

    def __init__(self, head_dim):
        self.kernel = select_kernel("math", "cpu", torch.float32, head_dim=head_dim)

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def attend(self, *arguments):
        time.sleep(SLEEP_S)
        self.kernel.attend(*arguments)


def ran(topology, recorders, layers=(0,)):
    """Machines of a plan that has run forward once for each of the layers, with its recorders."""
    heads = hsap.HeadShape(4, 2, 8, "fp32")
    problem = hsap.Problem(hsap.Layout.from_lengths([41, 1, 23]), heads, hsap.Topology.parse(topology))
    plan = hsap.compile(problem, "sap")
    box = Mailbox()
    machines = [
        Machine(plan, rank, box.for_rank(rank), Slow(8), Arena("cpu"), "cpu", torch.float32)
        for rank in range(plan.num_ranks)
    ]
    q, k, v = torch.randn(65, 4, 8), torch.randn(65, 2, 8), torch.randn(65, 2, 8)
    rows = [torch.from_numpy(positions(plan.rank_spans(rank))) for rank in range(plan.num_ranks)]
    for machine, recorder in zip(machines, recorders):
        machine.recorder = recorder
    for layer in layers:
        _together([m.forward(q[r], k[r], v[r], 0, layer) for m, r in zip(machines, rows)], machines)
    return plan


@pytest.mark.parametrize("topology", ["2x1", "1x2", "2x2"])
def test_every_instruction_has_its_times(topology):
    recorders = [Recorder() for _ in range(hsap.Topology.parse(topology).num_ranks)]
    began_s = time.perf_counter()
    plan = ran(topology, recorders)
    ended_s = time.perf_counter()
    for rank, recorder in enumerate(recorders):
        (record,) = recorder.take()
        assert (record.plan, record.rank, record.mask, record.direction) == (plan, rank, 0, 0)
        start_s, end_s = record.times_s()
        stream = plan.programs[0][0][rank]
        assert len(start_s) == len(end_s) == len(stream)
        assert began_s <= start_s[0] and end_s[-1] <= ended_s
        assert (end_s >= start_s).all() and (start_s[1:] == end_s[:-1]).all()
        took_s = dict(enumerate(end_s - start_s))
        for at, instruction in enumerate(stream):
            if instruction.op == Op.ATTEND:
                assert took_s[at] >= SLEEP_S
            elif instruction.op in (Op.SEND, Op.RECV):
                assert took_s[at] == 0
        assert sum(took_s.values()) == pytest.approx(end_s[-1] - start_s[0])
        assert recorder.take() == []


def test_layers_and_micro_steps_are_told_apart():
    recorders = [Recorder(layers=[3, 1]), Recorder()]
    recorders[0].micro = 5
    ran("2x1", recorders, layers=(0, 1, 2, 3))
    some, every = (recorder.take() for recorder in recorders)
    assert [(r.layer, r.micro) for r in some] == [(1, 5), (3, 5)]
    assert [(r.layer, r.micro) for r in every] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert (np.diff([r.clock_ns[0] for r in every]) > 0).all()


def test_a_recorder_grows():
    recorder = Recorder()
    steps = np.zeros(FIRST_CAPACITY // 3, np.int64)
    for layer in range(5):
        mark = recorder.begin(None, 0, 0, 0, layer, steps)
        for _ in steps:
            mark()
    records = recorder.take()
    assert [len(record.clock_ns) for record in records] == [len(steps) + 1] * 5
    assert (np.diff(np.concatenate([record.clock_ns for record in records])) >= 0).all()


class Threads:
    """One thread's end of a transport between threads, that blocks as processes' does. lag_s: how long a message to
    the first rank takes."""

    def __init__(self, rank, queues, lag_s):
        self.rank, self.queues, self.lag_s, self.waited = rank, queues, lag_s, []

    def launch(self, round, sends, receives):
        for peer, tensor in sends:
            time.sleep(self.lag_s if peer == 0 else 0)
            self.queues[self.rank, peer].put(tensor.clone())
        self.waited = receives

    def wait(self, round):
        for peer, tensor in self.waited:
            tensor.copy_(self.queues[peer, self.rank].get())
        return True


@pytest.mark.parametrize(
    ("apart_ns", "lag_s"), [(0, 0.0), (50_000_000, 0.0), (-3_000_000_000, 0.002), (400_000, 0.002)]
)
def test_clocks_are_compared_within_the_error(apart_ns, lag_s):
    queues, found = defaultdict(SimpleQueue), {}

    def compare(rank):
        def now_ns():
            return time.perf_counter_ns() + (apart_ns if rank == 2 else 0)

        found[rank] = clock_offset(Threads(rank, queues, lag_s), rank, 3, now_ns=now_ns)

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert (found[0].offset_ns, found[0].error_ns, found[1].offset_ns) == (0, 0, 0)
    assert abs(found[2].offset_ns + apart_ns) <= found[2].error_ns
    assert found[2].error_ns >= 1e9 * lag_s / 2
    if abs(apart_ns) <= 1e9 * lag_s / 2:  # as good as none
        assert found[2].offset_ns == 0
