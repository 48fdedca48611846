"""Weights: a run's model as a rank holds it, whole, partitioned or in shards, from the seed or from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hsap.models import ModelConfig, build_model, initialise
from hsap.models.huggingface import Weights, fill, load
from hsap.models.llama import VECTORS, Llama
from hsap.models.mlp import SwiGLU
from hsap.runtime.memory import TORCH_DTYPES
from hsap.train.config import TrainConfig
from hsap.train.groups import OptimConfig
from hsap.train.tsp.sharding import Sharding


def make_model(
    config: TrainConfig, model_config: ModelConfig, settings: dict, device: torch.device
) -> tuple[nn.Module, Sharding | None]:
    """Make the model as its weights are held: in shards (TSP), partitioned (ZeRO 3) or whole; also TSP's groups.

    settings: DeepSpeed's.
    """
    import deepspeed

    dtype = TORCH_DTYPES[config.engine.dtype]
    # A run that goes on takes its weights from its checkpoint.
    folder: Any = None if config.resume else config.model.get("from")
    sharding = None
    if config.parallel == "tsp":
        sharding = Sharding(config.tsp_degree, device)
        model = sharding.model(model_config, config.train.seed, dtype, device, folder)
    elif config.engine.zero_stage == 3:
        # The dtype comes from the settings: given as an argument, it is ignored where fp16 isn't supported.
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Llama(model_config)

        if model_config.mlp_chunk_tokens is not None:
            # Its chunks use the weights themselves: they are gathered once for all of them, with the module.
            deepspeed.utils.set_z3_leaf_modules(model, [SwiGLU])

        def gathered(parameter):
            return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)

        if folder is None:
            initialise(model, config.train.seed, gathered)
        else:
            fill(model, Weights(folder), gathered)
    else:
        model = whole_model(config, model_config, device)
    return model, sharding


def whole_model(config: TrainConfig, model_config: ModelConfig, device: torch.device) -> nn.Module:
    """Make the model whole in this process, from the seed or from the folder of `model.from`."""
    dtype, folder = TORCH_DTYPES[config.engine.dtype], None if config.resume else config.model.get("from")
    if folder is None:
        return build_model(model_config, config.train.seed, dtype, device)
    return load(folder, dtype, device, model_config)


def weight_groups(model: nn.Module, optim: OptimConfig) -> list[dict]:
    """Matrices decay, norms and biases don't."""
    matrices = [p for name, p in model.named_parameters() if not name.endswith(VECTORS)]
    rest = [p for name, p in model.named_parameters() if name.endswith(VECTORS)]
    return [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0}]
