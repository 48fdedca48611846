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

from hsap.checks.gradients import tell_gradients
from hsap.ir.problem import Topology
from hsap.planning.exchange import PlanExchange
from hsap.runtime.groups import make_mesh
from hsap.train.config import TrainConfig, train_config
from hsap.train.engine import build, join, leave
from hsap.train.inputs import Inputs, read_inputs
from hsap.train.overrides import rewrite
from hsap.train.run import Trainer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class ProbedTrainer(Trainer):
    """Gathers every parameter's full gradient before the first optimizer update."""

    def train(self) -> None:
        def keep(gradients: dict[str, torch.Tensor]) -> None:
            if dist.get_rank() == 0:
                torch.save(gradients, Path(self.config.out) / "gradients.pt")

        tell_gradients(self.engine, keep)
        super().train()

    def _exchange(self, use: str) -> PlanExchange:
        # Runs of one world share its store.
        return super()._exchange(f"{self.config.out}/{use}")


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
        with ProbedTrainer(config, inputs, engine) as trainer:
            trainer.train()
        engine.deepspeed.destroy()
        del engine, trainer
        gc.collect()
        dist.barrier()
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
