"""One rank of a world whose allocations are counted: runs train under torch's profiler, from before a model is built.

`allocations.py FILE`: a JSON list of runs, each a list of train.py's arguments. Every rank writes `allocated-RANK.json`
into the run's directory: bytes of PyTorch's own CPU allocator, exactly as it was asked for them. Buffers inside gloo,
NumPy and Python are not among them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from hsap.ir.problem import Topology
from hsap.planning.exchange import PlanExchange
from hsap.runtime.groups import make_mesh
from hsap.train.engine import build, join, leave
from hsap.train.inputs import read_inputs
from hsap.train.run import Trainer
from hsap.train.updates import Updates
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
        self.updates.loss = self._loss
        super().train()

    def _exchange(self, use: str) -> PlanExchange:
        # Runs of one world share its store.
        return super()._exchange(f"{self.config.out}/{use}")

    def _loss(self, micro, plan):
        tokens = int((plan.rank_spans(self.mesh.sp_rank)[:, 1] - plan.rank_spans(self.mesh.sp_rank)[:, 0]).sum())
        self.tokens = max(self.tokens, tokens)
        with record_function("hsap forward"):
            return Updates.loss(self.updates, micro, plan)


def named_storages(trainer: Trainer) -> dict[int, str]:
    """Addresses of what lasts from step to step, and what it is."""
    engine = trainer.engine.deepspeed
    optimizer = engine.optimizer
    named: dict[int, str] = {}

    def name(what: str, tensors) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                named.setdefault(tensor.untyped_storage().data_ptr(), what)

    name("arena", [trainer.updates.session.arena.bytes])
    parameters = list(engine.module.parameters())
    name("weights", [p.data for p in parameters])
    name("weights", [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")])
    inner = getattr(optimizer, "optimizer", optimizer)
    name("Adam moments", [t for state in inner.state.values() for t in state.values()])
    name("masters", [p for group in inner.param_groups for p in group["params"]])
    for attribute, what in (
        ("grad_partitions_flat_buffer", "gradients"),
        ("fp32_groups_gradients_flat", "gradients"),
        ("fp32_partitioned_groups_flat", "masters"),
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
    """Bytes before the micro-step with index `skipped`, and from then on the peak of each phase, and what it was."""
    marks, moves = [], []
    for event in walk(measured.profiler.kineto_results.experimental_event_tree()):
        if event.name.startswith("hsap "):
            marks.append((event.start_time_ns, event.end_time_ns, event.name.removeprefix("hsap ")))
        elif event.name == "[memory]":
            moves.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    marks.sort()
    moves.sort(key=lambda move: move[0])
    first = [mark for mark in marks if mark[2] == "forward"][skipped][0]
    marks = [mark for mark in marks if mark[0] >= first]
    alive: dict[int, int] = {}
    peaks = dict.fromkeys(PHASES, (0, 0))
    total, before, at = 0, 0, 0
    for i, (now, address, size) in enumerate(moves):
        total += _move(alive, address, size)
        if now < first:
            before = total
        while at < len(marks) and marks[at][1] < now:
            at += 1
        if at < len(marks) and marks[at][0] <= now:
            peaks[marks[at][2]] = max(peaks[marks[at][2]], (total, -i))
    return {
        "before": before,
        "phases": {phase: {"bytes": peak} | _held(moves[: 1 - at], named) for phase, (peak, at) in peaks.items()},
    }


def _move(alive: dict[int, int], address: int, size: int) -> int:
    """Allocate or free (size below 0); gives by how much the total grows. A new tensor in an old one's place is as much
    as to say that the old one is gone."""
    if size < 0:
        return -alive.pop(address, 0)
    grown = size - alive.get(address, 0)
    alive[address] = size
    return grown


def _held(moves: list[tuple[int, int, int]], named: dict[int, str]) -> dict:
    """What is alive after some moves: bytes by name, and the largest (bytes, how many) of those without one."""
    alive: dict[int, int] = {}
    for _, address, size in moves:
        _move(alive, address, size)
    parts, rest = Counter(), Counter()
    for address, size in alive.items():
        what = named.get(address, "else")
        parts[what] += size
        rest[size] += what == "else"
    return {"parts": parts, "largest": sorted(rest.items(), key=lambda item: -item[0] * item[1])[:24]}


def wait_longer() -> None:
    """Let gloo's threads put collectives' tensors down first: what they free, the profiler doesn't see."""
    wait = dist.Work.wait

    def waited(work, *arguments):
        done = wait(work, *arguments)
        time.sleep(0.0005)
        return done

    dist.Work.wait = waited


def main(runs: list[list[str]]) -> None:
    """Train one run after the other and count."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    wait_longer()
    configs = [configure(arguments, int(os.environ["WORLD_SIZE"])) for arguments in runs]
    join(configs[0])
    for config in configs:
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        inputs = read_inputs(config)
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            engine = build(config, inputs.model, make_mesh(Topology.parse(config.topology)))
            with MarkedTrainer(config, inputs, engine) as trainer:
                trainer.train()
        named = named_storages(trainer)
        found = counted(measured, named, (config.train.steps - 1) * config.accumulation)
        told = {"tokens": trainer.tokens, "arena": trainer.updates.session.arena.bytes.numel()} | found
        (out / f"allocated-{dist.get_rank()}.json").write_text(json.dumps(told))
        engine.deepspeed.destroy()
        del engine, trainer, measured
        gc.collect()
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
