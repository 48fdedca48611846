"""The model's shards in a run, and what DeepSpeed is told of them.

DeepSpeed averages gradients over the ranks that hold the same shard, which it takes for its data-parallel group; the
model has summed those of sharded and of replicated parameters over the other ranks by then. With world / D such ranks
in place of the whole world, the loss is scaled by their number: see `hsap.train.run`. To DeepSpeed every parameter is
one of model parallelism, and a copy is one that pipeline stages share, so that norms count each once. Copies get the
same gradient bit for bit from the model; averaged over three ranks or more, at another place of another buffer, their
last bits may part. Checkpoints take the first rank's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hsap.models import ModelConfig
from hsap.models.huggingface import Weights
from hsap.models.llama import initial
from hsap.models.tsp.decoder import ShardedLlama
from hsap.models.tsp.shards import Part
from hsap.runtime.groups import make_shard_groups
from hsap.runtime.weights import WeightTransport


class Sharding:
    """The groups of a run with weights sharded over `degree` neighbouring ranks. Made collectively over the job.

    `get_…` are what DeepSpeed asks of an `mpu`.
    """

    def __init__(self, degree: int, device: torch.device) -> None:
        self.shards, self.owners = make_shard_groups(degree)
        self.transport = WeightTransport(self.shards, device)

    def model(
        self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device, folder: str | Path | None
    ) -> ShardedLlama:
        """Make this rank's shards, from the seed or from a folder in Hugging Face's form, one parameter at a time."""
        weights = None if folder is None else Weights(folder)
        if weights is not None:
            weights.check(config)

        def source(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return initial(name, shape, config, seed) if weights is None else weights.read(name)

        model = ShardedLlama(config, self.transport, source, dtype, device)
        parameter: Any
        for name, parameter in model.named_parameters():
            parameter.part = model.parts[name]
            parameter.model_parallel = True
            parameter.ds_pipe_replicated = not self.counts(parameter.part)
        return model

    def counts(self, part: Part) -> bool:
        """Tell whether this rank's copy is the one that norms and checkpoints take."""
        return part.holders[0] == self.transport.index

    def clip(self, model: nn.Module, norm: float, most: float) -> None:
        """Scale this rank's gradients so that the whole model's, of that norm, has one of `most` at most."""
        factor = min(most / (norm + 1e-6), 1.0)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def get_model_parallel_rank(self) -> int:
        return self.transport.index

    def get_model_parallel_world_size(self) -> int:
        return self.transport.degree

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.shards

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.owners)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.owners)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.owners

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.owners)
