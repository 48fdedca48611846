"""One rank of a world in which runs follow each other: saves each run's first gradients, to compare them.

`rank.py FILE`: a JSON list of runs, each a list of train.py's arguments. One world for all, because starting processes
takes longer than these runs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from hsap.ir.problem import Topology
from hsap.planning.exchange import PlanExchange
from hsap.runtime.groups import make_mesh
from hsap.train.config import TrainConfig, train_config
from hsap.train.engine import build, join, leave
from hsap.train.inputs import Inputs, read_inputs
from hsap.train.overrides import rewrite
from hsap.train.run import Trainer
from hsap.train.tsp.sharding import Sharding

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class ProbedTrainer(Trainer):
    """Gathers every parameter's full gradient before the first optimizer update."""

    def train(self) -> None:
        engine = self.engine.deepspeed
        update = engine.step

        def step() -> None:
            if engine.is_gradient_accumulation_boundary() and engine.global_steps == 0:
                grads = {name: whole_grad(p, self.engine.sharding) for name, p in engine.module.named_parameters()}
                if dist.get_rank() == 0:
                    torch.save(grads, Path(self.config.out) / "gradients.pt")
            update()

        engine.step = step
        super().train()

    def _exchange(self, use: str) -> PlanExchange:
        # Runs of one world share its store.
        return super()._exchange(f"{self.config.out}/{use}")


def full_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The whole gradient of a parameter, however it is partitioned: float32 on the CPU."""
    from deepspeed.utils import safe_get_full_grad

    grad = safe_get_full_grad(parameter)
    grad = parameter.grad if grad is None else grad
    return grad.detach().float().cpu().clone()


def whole_grad(parameter: torch.nn.Parameter, sharding: Sharding | None) -> torch.Tensor:
    """The same of a parameter that may be a part of the model's: put together from all shards. Collective over them."""
    mine = full_grad(parameter)
    if sharding is None:
        return mine
    parts: list = [None] * sharding.transport.degree
    dist.all_gather_object(parts, (parameter.part, mine), group=sharding.shards)
    whole = torch.full(parameter.part.whole, torch.nan)
    for part, grad in parts:
        part.take(whole).copy_(grad)
    return whole


def configure(arguments: list[str], world_size: int) -> TrainConfig:
    """Compose and check a run's configuration, for CPU ranks."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        values = OmegaConf.to_container(compose("config", rewrite(arguments)), resolve=True)
    return train_config(values, world_size, "cpu", values["out"])


def main(runs: list[list[str]], read: Callable[[TrainConfig], Inputs] = read_inputs) -> None:
    """Train one run after the other. read: gives a run's inputs."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    configs = [configure(arguments, int(os.environ["WORLD_SIZE"])) for arguments in runs]
    join(configs[0])
    for config in configs:
        Path(config.out).mkdir(parents=True, exist_ok=True)
        inputs = read(config)
        engine = build(config, inputs.model, make_mesh(Topology.parse(config.topology)))
        ProbedTrainer(config, inputs, engine).train()
        engine.deepspeed.destroy()
        del engine
        gc.collect()
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
