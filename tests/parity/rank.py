"""train.py with a probe: saves the first step's gradients, so that runs can be compared parameter by parameter."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

from hsap.train import run
from hsap.train.launch import main


class ProbedTrainer(run.Trainer):
    """Gathers every parameter's full gradient before the first optimizer update."""

    def train(self) -> None:
        engine = self.engine.deepspeed
        update = engine.step

        def step() -> None:
            if engine.is_gradient_accumulation_boundary() and engine.global_steps == 0:
                grads = {name: full_grad(p) for name, p in engine.module.named_parameters()}
                if dist.get_rank() == 0:
                    torch.save(grads, Path(self.config.out) / "gradients.pt")
            update()

        engine.step = step
        super().train()


def full_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The whole gradient of a parameter, however it is partitioned: float32 on the CPU."""
    grad = safe_get_full_grad(parameter)
    grad = parameter.grad if grad is None else grad
    return grad.detach().float().cpu().clone()


if __name__ == "__main__":
    run.Trainer = ProbedTrainer
    main(Path(__file__).resolve().parents[2] / "configs")
