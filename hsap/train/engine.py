"""Engine: model, optimizer and DeepSpeed, set up so that gradients are the same for ZeRO 0–3 and any sharding.

That holds with the scale that `hsap.train.updates` gives the loss.
"""

from __future__ import annotations

import io
import logging
import math
import os
import warnings
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.buckets import Buckets
from hsap.ir.problem import Topology
from hsap.models import ModelConfig
from hsap.position import Phase, Position
from hsap.runtime.groups import Mesh, make_mesh
from hsap.train import gradients
from hsap.train.config import TrainConfig
from hsap.train.groups import OptimConfig
from hsap.train.tsp.sharding import Sharding
from hsap.train.weights import make_model, weight_groups


class Engine:
    """DeepSpeed's engine and what the loop needs beside it. device: of this rank; sharding: of weights, under TSP.

    position: where it is noted what it does.
    """

    def __init__(
        self, deepspeed, mesh: Mesh, device: torch.device, sharding: Sharding | None, position: Position
    ) -> None:
        self.deepspeed, self.mesh, self.device, self.sharding = deepspeed, mesh, device, sharding
        self.position, self._norm = position, 0.0
        if sharding is not None:
            # Without ZeRO it would count every copy of a parameter.
            def clip() -> None:
                sharding.clip(deepspeed.module, self._norm, deepspeed.gradient_clipping())

            deepspeed.clip_fp32_gradients = clip

    @property
    def num_averaged(self) -> int:
        """Ranks over which DeepSpeed averages gradients: all, or under TSP those with the same shard."""
        return dist.get_world_size(None if self.sharding is None else self.sharding.owners)

    @property
    def weight_bytes(self) -> int:
        """What this rank has sent of weights and of their gradients under TSP, DeepSpeed's averaging not among it."""
        return 0 if self.sharding is None else self.sharding.transport.sent_bytes.total()

    def backward(self, loss: Tensor) -> None:
        """Backward of one micro-step; behind the last one of a step, `update` or `leave_out` is to follow."""
        engine = self.deepspeed
        self.position.phase(Phase.BACKWARD)
        engine.backward(loss)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()

    def square(self) -> Tensor:
        """This rank's part of the square of the step's gradient norm before clipping: a float64 scalar; the sum over
        all ranks of the job is the whole."""
        return gradients.square(self.deepspeed, self.device)

    def alike(self) -> list[tuple[dict[str, Tensor], dist.ProcessGroup | None]]:
        """Parameters that all ranks of a group hold alike, with the group, None for all; none where ZeRO parts them."""
        parameters = dict(self.deepspeed.module.named_parameters())
        if self.sharding is not None:
            replicated = {name: p for name, p in parameters.items() if p.part.axis is None}
            return [(parameters, self.sharding.owners), (replicated, None)]
        return [] if any(hasattr(p, "ds_id") for p in parameters.values()) else [(parameters, None)]

    def wait(self) -> None:
        """Wait until the device has done all it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def update(self, norm: float) -> None:
        """Update the weights by the step's gradient, of that norm over all ranks."""
        self.position.phase(Phase.UPDATE)
        self._norm = norm
        self.deepspeed.step()

    def leave_out(self, norm: float) -> None:
        """End the step and leave weights, moments and counters as they are, bit for bit. Collective over the job."""
        self._norm = norm
        gradients.leave_out(self.deepspeed)


def join(config: TrainConfig, store: dist.Store | None = None, position: Position | None = None) -> Mesh:
    """Join the other ranks. Collective over the job.

    store: where they meet; None: as the launcher says. position: where it is noted that they are waited for.
    """
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed still calls collectives by names that torch has begun to rename.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if config.engine.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        # Its shared-memory communicator is compiled at first use (most of a minute) and gloo does without it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Behind the watch, which tells more (hsap.train.hang): this limit is for what it doesn't see.
    limits = [limit for limit in (config.guard.timeout_s, config.guard.start_timeout_s) if limit is not None]
    longest = max(timedelta(minutes=30), 2 * timedelta(seconds=max(limits, default=0)))
    timeout = longest if len(limits) == 2 else timedelta(days=30)
    position = position or Position()
    position.phase(Phase.JOIN)
    if store is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        # In the agent's store torch would find the addresses of the ranks before these.
        known: dict[str, Any] = (
            {"device_id": torch.device("cuda", torch.cuda.current_device())} if config.engine.backend == "nccl" else {}
        )
        rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        dist.init_process_group(
            config.engine.backend, store=store, rank=rank, world_size=world_size, timeout=timeout, **known
        )
    deepspeed.init_distributed(config.engine.backend, timeout=timeout, verbose=False, dist_init_required=True)
    mesh = make_mesh(Topology(config.inter_sp, config.intra_sp), config.engine.comm_ctas)
    position.phase(Phase.START)
    return mesh


def own_device(config: TrainConfig) -> torch.device:
    """This rank's device, once it has joined."""
    return torch.device("cuda", torch.cuda.current_device()) if config.engine.device == "cuda" else torch.device("cpu")


def build(config: TrainConfig, model_config: ModelConfig, mesh: Mesh, position: Position | None = None) -> Engine:
    """Make the model, from the seed or from the folder of `model.from`, and hand it to DeepSpeed.

    position: where the rank notes what it is at. Collective over the job.
    """
    import deepspeed

    device = own_device(config)
    buckets = Buckets.of(model_config, config.tsp_degree)
    settings = deepspeed_settings(config, buckets)
    model, sharding = make_model(config, model_config, settings, device)
    # Without ZeRO, DeepSpeed makes bf16's optimizer state by a step of zero gradients. At a learning rate of 0 (the
    # loop sets the real one) it decays no weight, and forgotten it doesn't shift Adam's bias correction.
    optimizer = torch.optim.AdamW(
        weight_groups(model, config.optim), lr=0.0, betas=config.optim.betas, eps=config.optim.eps, fused=True
    )
    with redirect_stdout(io.StringIO()):  # in bf16 it prints what memory is in use, a dozen lines each time
        deepspeed.utils.groups.mpu = None  # it remembers an earlier engine's
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=sharding)
    optimizer.state.clear()
    # Without ZeRO it takes no setting for how many gradients are copied into one buffer to be reduced.
    engine.allreduce_gradients = partial(engine.allreduce_gradients, buckets.reduced)
    made = Engine(engine, mesh, device, sharding, position or Position())
    # Within an update ranks wait for one another but here, where each is by itself.
    optimizer.register_step_pre_hook(lambda *_: made.position.phase(Phase.WEIGHTS))
    optimizer.register_step_post_hook(lambda *_: made.position.phase(Phase.UPDATE))
    return made


def deepspeed_settings(config: TrainConfig, buckets: Buckets) -> dict:
    """DeepSpeed's configuration of a run. No mpu but under TSP: gradients are averaged over the whole world."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.accumulation,
        "gradient_clipping": config.optim.clip or 0.0,
        # Without overlap: gradients reduced on a stream of their own could start in another order than attention's
        # transfers on another rank, and two communicators that wait for each other hang.
        "zero_optimization": {"stage": config.engine.zero_stage, "overlap_comm": False} | buckets.settings(),
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31 - 1,
    }
    if config.engine.dtype == "bf16":
        settings["bf16"] = {"enabled": True}
        # A rank has the gradient of its own tokens only: a sum in bf16 would lose more the more ranks there are.
        settings["communication_data_type"] = "fp32"
        # Without ZeRO, DeepSpeed accumulates micro-steps in the weights' dtype and refuses anything else.
        if config.engine.zero_stage > 0:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def learning_rate(optim: OptimConfig, step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to lr · min_lr_ratio at the last step; steps count from 1."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(num_steps - optim.warmup_steps, 1)
    floor = optim.lr * optim.min_lr_ratio
    return floor + (optim.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def leave(engine: Engine | None = None) -> None:
    """Leave the job: the engine, where there still is one, goes first, or tearing down its groups may crash."""
    import gc

    import deepspeed

    if engine is not None:
        engine.deepspeed.destroy()
        engine.deepspeed = None
    gc.collect()
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()
