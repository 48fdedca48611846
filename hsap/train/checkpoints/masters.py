"""Masters: where a rank's float32 weights and Adam's moments lie under each of DeepSpeed's optimizers.

All of them keep a flat or whole float32 master, which is the key of its state in torch's AdamW; what differs is which
pieces of which parameters a master holds, and how the model's weights are made from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.models.tsp.shards import Part
from hsap.train.checkpoints.tensors import Columns, Pieces, key

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT = "fp32"


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A piece of a flattened parameter that this rank updates: elements [start, start + numel).

    master: holds it from `offset` on. replicated: every rank holds it as well. of: what the parameter here is a part
    of, and then start and numel count its own elements; copied: and another rank's same part is the one to be saved.
    """

    name: str
    start: int
    numel: int
    master: Tensor
    offset: int
    replicated: bool = False
    of: Part | None = None
    copied: bool = False

    def part(self, flat: Tensor) -> Tensor:
        """The piece's elements of the master, or of a moment of its shape."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)

    @property
    def place(self) -> int | Columns:
        """Where the piece begins in the whole parameter."""
        if self.of is None or self.of.axis is None:
            return self.start
        inner = math.prod(self.of.whole[self.of.axis + 1 :])
        if self.of.axis == 0:
            return self.of.start * inner + self.start
        return Columns(self.of.start, self.start, self.of.stop - self.of.start, self.of.whole[1])


def capture(engine) -> tuple[dict[str, Tensor], int]:
    """Give what this rank must save, as views by their names in the file, and the number of Adam's steps.

    engine: DeepSpeed's. Of what all ranks hold alike, each saves its share.
    """
    optimizer = _base(engine.optimizer)
    tensors: dict[str, Tensor] = {}
    steps = {int(optimizer.state[shard.master].get("step", 0)) for shard in shards(engine)}
    for shard in _saved(engine):
        # Before the first update, as where the guard has left it out, there are no moments yet.
        state = optimizer.state[shard.master] or dict.fromkeys(MOMENTS, torch.zeros_like(shard.master))
        for kind, flat in ((WEIGHT, shard.master), *((moment, state[moment]) for moment in MOMENTS)):
            tensors[key(kind, shard.name, shard.place)] = shard.part(flat)
    if len(steps) > 1:
        raise RuntimeError(f"Adam has done {sorted(steps)} steps on the parameters of one rank")
    return tensors, steps.pop() if steps else 0


def weights(engine) -> dict[str, Tensor]:
    """Give this rank's share of the float32 weights alone, as `capture` does; there may be no moments yet."""
    return {key(WEIGHT, shard.name, shard.place): shard.part(shard.master) for shard in _saved(engine)}


def restore(engine, pieces: Pieces, adam_steps: int) -> None:
    """Set weights and moments from a checkpoint. Collective over the job."""
    wrapper, optimizer = engine.optimizer, _base(engine.optimizer)
    if hasattr(wrapper, "checkpoint_event_prologue"):
        wrapper.checkpoint_event_prologue()
    optimizer.state.clear()
    for shard in shards(engine):
        state = optimizer.state[shard.master]
        if not state:
            # Where the fused update wants it.
            state["step"] = torch.tensor(float(adam_steps), device=shard.master.device)
            state.update((moment, torch.zeros_like(shard.master)) for moment in MOMENTS)
        for kind, flat in ((WEIGHT, shard.master), *((moment, state[moment]) for moment in MOMENTS)):
            shard.part(flat).copy_(pieces.read_part(kind, shard.name, shard.place, shard.numel))
    _refresh(wrapper)
    if hasattr(wrapper, "checkpoint_event_epilogue"):
        wrapper.checkpoint_event_epilogue()


def _saved(engine) -> Iterator[Shard]:
    """The pieces that this rank writes; of what several ranks hold alike, each has its share."""
    alike = None if engine.mpu is None else engine.mpu.get_data_parallel_group()
    rank, world_size = dist.get_rank(alike), dist.get_world_size(alike)
    for i, shard in enumerate(shards(engine)):
        if not shard.copied and not (shard.replicated and i % world_size != rank):
            yield shard


def shards(engine) -> Iterator[Shard]:
    """Every piece this rank updates, in an order that all ranks share where they hold the same."""
    parameters = dict(engine.module.named_parameters())
    for shard in _pieces(engine):
        parameter = parameters[shard.name]
        if (part := getattr(parameter, "part", None)) is not None:
            shard = replace(shard, of=part, copied=parameter.ds_pipe_replicated)
        yield shard


def _pieces(engine) -> Iterator[Shard]:
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3
        for group, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            for parameter in group:
                _, offset, held = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = held * dist.get_rank()
                numel = max(0, min(held, parameter.ds_numel - start))  # the last ranks' may be padding
                if numel:
                    yield Shard(names[id(parameter)], start, numel, master, offset)
        return
    masters = _sharded_masters(optimizer)
    if masters is not None:  # ZeRO 1 and 2
        for parameter in engine.module.parameters():
            if (mapping := parameter._hp_mapping) is not None:
                held, place = mapping.lp_fragment_address, mapping.hp_fragment_address
                master = masters[mapping.param_group_index]
                yield Shard(names[id(parameter)], held.start, held.numel, master, place.start)
        return
    # ZeRO 0: in bf16 with masters of their own, in fp32 the parameters themselves.
    low = getattr(optimizer, "fp16_groups", None) or [group["params"] for group in optimizer.param_groups]
    full = getattr(optimizer, "fp32_groups", low)
    for group, its_masters in zip(low, full, strict=True):
        for parameter, master in zip(group, its_masters, strict=True):
            yield Shard(names[id(parameter)], 0, parameter.numel(), master, 0, replicated=True)


def _sharded_masters(optimizer) -> list[Tensor] | None:
    """The flat masters of ZeRO 1 and 2 by parameter group; in bf16, stage 1 is an optimizer of its own."""
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    return None


def _refresh(optimizer) -> None:
    """Make the model's weights from the masters, as after a step."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for i, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            low = optimizer.fp16_partitioned_groups_flat[i]
            low.data.copy_(master.data)
            parameters = optimizer.fp16_partitioned_groups[i]
            for parameter, updated in zip(parameters, optimizer.unflatten(low, parameters), strict=True):
                parameter.data = updated.data
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_groups"):
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                parameter.data.copy_(master.data)


def _base(optimizer) -> torch.optim.Optimizer:
    """Torch's optimizer under DeepSpeed's."""
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer
