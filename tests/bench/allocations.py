"""One rank of a world whose allocations are counted: each run trains under torch's profiler, from before the model is built.

`allocations.py FILE`: a JSON list of runs, each a list of train.py's arguments. Every rank writes `allocated-RANK.json`
into the run's directory: bytes of PyTorch's own CPU allocator, exactly as it was asked for them. Buffers inside gloo,
NumPy and Python are not among them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from hsap.ir.problem import Topology
from hsap.runtime.groups import make_mesh
from hsap.train.engine import build, join, leave
from hsap.train.inputs import read_inputs
from hsap.train.planning import PlanExchange
from hsap.train.run import Trainer
from tests.parity.rank import configure

PHASES = ("forward", "backward", "update")


class MarkedTrainer(Trainer):
    """Marks the phases of micro-steps for the profiler, and notes the most rows this rank has held."""

    tokens = 0

    def train(self) -> None:
        engine = self.engine.deepspeed
        backward, update = engine.backward, engine.step

        def marked_backward(loss):
            with record_function("hsap backward"):
                return backward(loss)

        def marked_update():
            with record_function("hsap update"):
                return update()

        engine.backward, engine.step = marked_backward, marked_update
        super().train()

    def _exchange(self, use: str) -> PlanExchange:
        # Runs of one world share its store.
        return super()._exchange(f"{self.config.out}/{use}")

    def _loss(self, micro, plan):
        tokens = int((plan.rank_spans(self.mesh.sp_rank)[:, 1] - plan.rank_spans(self.mesh.sp_rank)[:, 0]).sum())
        self.tokens = max(self.tokens, tokens)
        with record_function("hsap forward"):
            return super()._loss(micro, plan)


def named_storages(trainer: Trainer) -> dict[int, str]:
    """Addresses of what lasts from step to step, and what it is."""
    engine = trainer.engine.deepspeed
    optimizer = engine.optimizer
    named: dict[int, str] = {}

    def name(what: str, tensors) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                named.setdefault(tensor.untyped_storage().data_ptr(), what)

    name("arena", [trainer.session.arena.bytes])
    parameters = list(engine.module.parameters())
    name("weights", [p.data for p in parameters])
    name("weights", [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")])
    inner = getattr(optimizer, "optimizer", optimizer)
    name("Adam moments", [t for state in inner.state.values() for t in state.values()])
    name("masters", [p for group in inner.param_groups for p in group["params"]])
    name("gradients", [p.grad for p in parameters if p.grad is not None])
    for attribute, what in (
        ("grad_partitions_flat_buffer", "gradients"),
        ("fp32_groups_gradients_flat", "gradients"),
        ("fp32_groups_gradient_flat_partition", "gradients"),
        ("lp_param_buffer", "weights"),
    ):
        value = getattr(optimizer, attribute, None)
        name(what, value if isinstance(value, list) else [value])
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        name("bucket", bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer])
    return named


def walk(nodes):
    """All events under these, themselves too."""
    coming = list(nodes)
    while coming:
        event = coming.pop()
        yield event
        coming += event.children


def counted(measured: profile, named: dict[int, str], skipped: int) -> dict:
    """Peak bytes of each phase, after the first `skipped` micro-steps, and what they were at the highest one."""
    marks, moves = [], []
    for event in walk(measured.profiler.kineto_results.experimental_event_tree()):
        if event.name.startswith("hsap "):
            marks.append((event.start_time_ns, event.end_time_ns, event.name.removeprefix("hsap ")))
        elif event.name == "[memory]":
            fields = event.extra_fields
            moves.append((event.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated))
    marks.sort()
    moves.sort(key=lambda move: move[0])
    first = [mark for mark in marks if mark[2] == "forward"][skipped][0]
    marks = [mark for mark in marks if mark[0] >= first]
    alive: dict[int, tuple[int, int]] = {}
    peaks = {phase: (0, {}) for phase in PHASES}
    total, at = 0, 0
    for now, address, size, _ in moves:
        if size < 0:
            total -= alive.pop(address, (0, 0))[0]
            continue
        alive[address] = (size, now)
        total += size
        while at < len(marks) and marks[at][1] < now:
            at += 1
        if at < len(marks) and marks[at][0] <= now and total > peaks[marks[at][2]][0]:
            peaks[marks[at][2]] = total, dict(alive)
    out = {}
    for phase, (peak, held) in peaks.items():
        parts: dict[str, int] = {}
        rest: dict[int, int] = {}
        for address, (size, _) in held.items():
            what = named.get(address, "else")
            parts[what] = parts.get(what, 0) + size
            if what == "else":
                rest[size] = rest.get(size, 0) + 1
        largest = sorted(rest.items(), key=lambda item: -item[0] * item[1])[:24]
        out[phase] = {"bytes": peak, "parts": parts, "largest": largest}
    return out


def main(runs: list[list[str]]) -> None:
    """Train one run after the other and count."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    configs = [configure(arguments, int(os.environ["WORLD_SIZE"])) for arguments in runs]
    join(configs[0])
    for config in configs:
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        inputs = read_inputs(config)
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            engine = build(config, inputs.model, make_mesh(Topology.parse(config.topology)))
            trainer = MarkedTrainer(config, inputs, engine)
            trainer.train()
        named = named_storages(trainer)
        found = counted(measured, named, config.accumulation)
        told = {"tokens": trainer.tokens, "arena": trainer.session.arena.bytes.numel(), "phases": found}
        (out / f"allocated-{dist.get_rank()}.json").write_text(json.dumps(told))
        engine.deepspeed.destroy()
        del engine, trainer, measured
        gc.collect()
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
